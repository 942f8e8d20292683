/* reserve.c: blocks of a pool that a session sets aside, on all cards or none. Engine thread. */
#include "daemon/engine/pool/reserve.h"

#include <inttypes.h>
#include <stdio.h>

#include "cache/kv_owner.h"
#include "daemon/base/log.h"
#include "daemon/engine/core/message.h"
#include "daemon/engine/core/peers.h"
#include "daemon/engine/core/pool_table.h"
#include "daemon/engine/core/published.h"

struct reserve_ask {
    struct peer_ask all; /* first */
    uint32_t index, session, n_blocks;
    bool is_on_each; /* each card has a pool of its own */
    uint32_t had[CONFIG_MAX_DEVICES]; /* on cards that have done it */
};

static void reserve_here(struct engine *e, void *arg)
{
    struct reserve_ask *ask = arg;
    kv_pool_id pool = {ask->index};
    ask->had[e->env.card] = kv_reserved(e->env.kv, ask->session, pool);
    ask->all.status = kv_reserve(e->env.kv, ask->session, pool, ask->n_blocks);
    e->is_dirty = true;
    if (ask->all.status == ATTN_OK)
        pools_publish(e);
    else if (ask->is_on_each)
        snprintf(ask->all.why, ask->all.why_bytes, "card %" PRIu32 ": %.220s", e->env.card,
                 kv_last_error(e->env.kv));
    else
        snprintf(ask->all.why, ask->all.why_bytes, "%s", kv_last_error(e->env.kv));
}

/* What was raised can be lowered again; what was lowered is never taken back. */
static void reserve_back(struct engine *e, void *arg)
{
    const struct reserve_ask *ask = arg;
    if (kv_reserve(e->env.kv, ask->session, (kv_pool_id){ask->index}, ask->had[e->env.card]) !=
        ATTN_OK)
        log_warn("%s", kv_last_error(e->env.kv));
    e->is_dirty = true;
    pools_publish(e);
}

attn_status pool_reserve(struct engine *e, const struct pool *p, uint32_t session,
                         uint32_t n_blocks, char *why, size_t why_bytes)
{
    struct reserve_ask ask = {.all = {ATTN_OK, why, why_bytes},
                              .index = p->id.index,
                              .session = session,
                              .n_blocks = n_blocks,
                              .is_on_each = !is_alone(e) && !pool_spans(e, p)};
    uint32_t n_done, n_undone;
    char ignored[WHY_BYTES];
    reserve_here(e, &ask);
    if (ask.all.status != ATTN_OK || !ask.is_on_each)
        return ask.all.status;
    attn_status st = engine_call_others(e, peers_n(e), reserve_here, &ask.all, &n_done);
    if (st == ATTN_OK)
        return ATTN_OK;
    ask.all = (struct peer_ask){ATTN_OK, ignored, sizeof ignored};
    engine_call_others(e, n_done, reserve_back, &ask.all, &n_undone);
    reserve_back(e, &ask);
    return st;
}

void pools_unreserve(struct engine *e, uint32_t session, uint64_t request)
{
    char why[WHY_BYTES];
    for (struct pool *p = NULL; (p = pool_next(e, p)) != NULL;) {
        if (kv_reserved(e->env.kv, session, p->id) > 0)
            pool_reserve(e, p, session, 0, why, sizeof why);
        kv_owner_set(e->env.kv, session, p->id, KV_RESERVATION, request);
    }
}

Attnd__ProbeReply *answer_room(struct engine *e, const struct pool *p, uint32_t session,
                               struct answer *a)
{
    struct pool_count all = pool_count_all(e, p);
    Attnd__ProbeReply *body = answer_probe(a);
    body->n_blocks = (uint32_t)all.blocks;
    body->n_free_blocks = (uint32_t)all.free;
    body->n_reserved_blocks = kv_reserved(e->env.kv, session, p->id);
    if (all.reserved > 0)
        body->n_free_blocks = kv_pool_free_for(e->env.kv, p->id, session);
    return body;
}
