/* trace.h: request traces in Mooncake's JSON-lines format: one object a line with "timestamp" in
 * milliseconds, "input_length" and "output_length" in tokens; "hash_ids", if there, names the
 * blocks of the input: 512 tokens each, equal where the number is. Other members are not looked
 * at. */
#ifndef ATTNLOAD_TRACE_H
#define ATTNLOAD_TRACE_H

#include <stddef.h>
#include <stdint.h>

#include "proto/attn_types.h"

struct trace_request {
    uint64_t arrival_us; /* after the first request's */
    uint32_t n_input, n_output; /* tokens, >= 1 */
    uint32_t first_block, n_blocks; /* of the trace's */
};

struct trace_scaling {
    double speed; /* arrivals come this much faster; 0: all at once */
    double length; /* of input and output */
    uint32_t max_requests; /* the first so many; 0: all */
};

struct trace {
    struct trace_request *requests; /* in order of arrival */
    uint32_t n;
    uint64_t *blocks; /* [n_blocks] names */
    uint32_t n_blocks, block_tokens;
};

/* ATTN_ENOTFOUND file; ATTN_EINVAL names line and member; ATTN_ENOMEM. *out only on success. */
attn_status trace_load(const char *path, const struct trace_scaling *s, struct trace *out,
                       char *why, size_t why_bytes);
void trace_fini(struct trace *t);

#endif
