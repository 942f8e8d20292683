/* trace.c: a ring of traces of ended sequences. */
#include "daemon/engine/core/trace.h"

void trace_begin(struct trace_entry *t, uint64_t now_ns, uint32_t n_forked)
{
    *t = (struct trace_entry){.began_ns = now_ns, .n_input = n_forked};
}

void trace_append(struct trace_entry *t, uint32_t pos, uint32_t n_tokens)
{
    uint32_t n_known = t->n_input + t->n_output, end = pos + n_tokens;
    if (end <= n_known)
        return;
    bool is_output = t->n_output > 0 || (n_known > 0 && n_tokens == 1);
    *(is_output ? &t->n_output : &t->n_input) += end - n_known;
}

void trace_end(struct trace_ring *r, struct trace_entry *t)
{
    if (t->n_input > 0)
        r->kept[r->n_ended++ % TRACE_KEPT] = *t;
    *t = (struct trace_entry){0};
}

bool trace_read(const struct trace_ring *r, uint64_t number, struct trace_entry *out)
{
    if (number == 0 || number > r->n_ended || r->n_ended - number >= TRACE_KEPT)
        return false;
    *out = r->kept[(number - 1) % TRACE_KEPT];
    return true;
}
