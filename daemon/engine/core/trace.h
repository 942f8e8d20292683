/* trace.h: traces of the load: for each sequence, when it began, how many tokens it got before it
 * generated one by one, and how many after. A ring keeps the latest that ended; attnctl trace
 * collects them. Engine thread.
 */
#ifndef ATTND_DAEMON_ENGINE_CORE_TRACE_H
#define ATTND_DAEMON_ENGINE_CORE_TRACE_H

#include <stdbool.h>
#include <stdint.h>

enum { TRACE_KEPT = 8192 };

struct trace_entry {
    uint64_t began_ns;
    uint32_t n_input, n_output; /* tokens; n_input 0: none came */
};

struct trace_ring {
    uint64_t n_ended; /* so far; also the number of the latest */
    struct trace_entry kept[TRACE_KEPT];
};

/* Starts a sequence's trace; a fork starts with n_forked tokens. */
void trace_begin(struct trace_entry *t, uint64_t now_ns, uint32_t n_forked);
/* Counts tokens appended at pos in one layer of the sequence, each position once. The input ends
 * with the first token that comes alone behind others. */
void trace_append(struct trace_entry *t, uint32_t pos, uint32_t n_tokens);
/* Moves the sequence's trace into the ring. */
void trace_end(struct trace_ring *r, struct trace_entry *t);
/* Reads the trace of that number, from 1; false: not there yet, or already overwritten. */
bool trace_read(const struct trace_ring *r, uint64_t number, struct trace_entry *out);

#endif
