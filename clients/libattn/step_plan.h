/* step_plan.h: a plan of steps, as it was told and as its steps look at it. */
#ifndef ATTN_STEP_PLAN_H
#define ATTN_STEP_PLAN_H

#include <stdatomic.h>

#include "clients/libattn/attn.h"
#include "proto/wire.h"

struct attn_step_plan {
    atomic_uint n_refs; /* the caller's; of the request that tells it */
    atomic_bool is_told; /* and not known to be unknown to the daemon */
    uint64_t id; /* of the request that told it */
    const attn_pool *pool;
    uint32_t n_items;
    struct attn_item *items; /* [n_items] behind the struct, as the arrays of: */
    Attnd__Request request;
    Attnd__Plan plan;
    Attnd__Step step;
};

bool step_plan_has_layer(const attn_step_plan *p, uint32_t layer);

#endif
