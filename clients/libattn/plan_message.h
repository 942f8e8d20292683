/* plan_message.h: the request that tells the daemon a plan, of a lane or of steps. */
#ifndef ATTN_PLAN_MESSAGE_H
#define ATTN_PLAN_MESSAGE_H

#include "clients/libattn/client.h"

struct plan_message {
    Attnd__Request request;
    Attnd__Plan plan;
    Attnd__Step step;
    uint32_t numbers[]; /* layers, then items, that the three above point to */
};

/* What a says of p, which was checked, with no lane; free() it. NULL: no memory. */
struct plan_message *plan_message_new(const attn_pool *p, const struct attn_plan *a);

#endif
