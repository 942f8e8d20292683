/* stages.c: see stages.h. */
#include "daemon/base/stages.h"

#include "daemon/request/request.h"

static const char *const names[STAGE_N] = {
#define X(name, text, help) text,
    STAGE_MAP(X)
#undef X
};

const char *stage_name(enum stage s)
{
    return names[s];
}

/* From *at to until, which may be missing (0); moves *at. */
static uint64_t step_to(uint64_t *at, uint64_t until)
{
    uint64_t ns = until > *at ? until - *at : 0;
    *at += ns;
    return ns;
}

void stages_of(const struct request *req, uint64_t sent_ns, uint64_t out_ns[STAGE_N])
{
    uint64_t at = req->began_ns != 0 ? req->began_ns : req->received_ns;
    out_ns[STAGE_RECEIVE] = step_to(&at, req->received_ns);
    out_ns[STAGE_QUEUE] = step_to(&at, req->taken_ns);
    out_ns[STAGE_WAIT] = step_to(&at, req->batched_ns);
    uint64_t in_flight_ns = step_to(&at, req->done_ns);
    out_ns[STAGE_DEVICE] = req->device_ns < in_flight_ns ? req->device_ns : in_flight_ns;
    out_ns[STAGE_LAUNCH] = in_flight_ns - out_ns[STAGE_DEVICE];
    out_ns[STAGE_REPLY] = step_to(&at, req->replied_ns);
    out_ns[STAGE_SEND] = step_to(&at, sent_ns);
}
