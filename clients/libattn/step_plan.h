/* step_plan.h: a plan of steps, as it was told and as its steps look at it. */
#ifndef ATTN_STEP_PLAN_H
#define ATTN_STEP_PLAN_H

#include <stdatomic.h>

#include "clients/libattn/plan_message.h"

struct attn_step_plan {
    atomic_uint n_refs; /* the caller's; of the request that tells it */
    atomic_bool is_told; /* and not known to be unknown to the daemon */
    uint64_t id; /* of the request that told it */
    const attn_pool *pool;
    uint32_t n_items;
    struct plan_message *message;
    struct attn_item items[]; /* [n_items] */
};

bool step_plan_has_layer(const attn_step_plan *p, uint32_t layer);

#endif
