/* trace.h: what was asked for, as a trace: for each sequence when it began, how many tokens
 * it was given before it generated one by one, and how many came after. The latest that ended are
 * kept in a ring; attnctl trace collects them. Engine thread.
 */
#ifndef ATTND_DAEMON_ENGINE_CORE_TRACE_H
#define ATTND_DAEMON_ENGINE_CORE_TRACE_H

#include <stdbool.h>
#include <stdint.h>

enum { TRACE_KEPT = 8192 };

struct trace_entry {
    uint64_t began_ns;
    uint32_t n_input, n_output; /* tokens; n_input 0: nothing came */
};

struct trace_ring {
    uint64_t n_ended; /* so far: the latest has this number */
    struct trace_entry kept[TRACE_KEPT];
};

/* A sequence begins, with tokens of another if it is a fork. */
void trace_begin(struct trace_entry *t, uint64_t now_ns, uint32_t n_forked);
/* Tokens were appended from this position on, in one layer of the sequence. Those that came before
 * do not count again. Input ends with the first token that comes alone behind others. */
void trace_append(struct trace_entry *t, uint32_t pos, uint32_t n_tokens);
/* The sequence ends. */
void trace_end(struct trace_ring *r, struct trace_entry *t);
/* The request of that number; false: it is not there yet, or not any more. */
bool trace_read(const struct trace_ring *r, uint64_t number, struct trace_entry *out);

#endif
