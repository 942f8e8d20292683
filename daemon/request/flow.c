/* flow.c: computes the virtual time of tenants. */
#include "daemon/request/flow.h"

enum { VIRTUAL_NS = 64 /* units of virtual time per nanosecond at a share of 1 */ };

static uint64_t virtual_of(const struct flow *f, uint64_t ns)
{
    return ns * VIRTUAL_NS / f->share;
}

void flow_begin(struct flow *f, uint64_t clock)
{
    f->end = f->end > clock ? f->end : clock;
}

void flow_charge(struct flow *f, uint64_t *clock, uint64_t ns)
{
    *clock = f->end > *clock ? f->end : *clock;
    f->end += virtual_of(f, ns);
}

void flow_settle(struct flow *f, uint64_t charged_ns, uint64_t took_ns)
{
    uint64_t end = f->end + virtual_of(f, took_ns), back = virtual_of(f, charged_ns);
    f->end = end > back ? end - back : 0;
}
