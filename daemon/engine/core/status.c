/* status.c: draining, and tokens that must be finished first. */
#include "daemon/engine/core/status.h"

#include <inttypes.h>
#include <stdio.h>

#include "daemon/base/clock.h"
#include "daemon/base/health.h"
#include "daemon/engine/core/peers.h"
#include "daemon/engine/core/pool_table.h"

void engine_drain(struct engine *e, uint64_t hold_us)
{
    uint64_t now_ns = clock_now_ns();
    health_set_draining(true);
    for (uint32_t i = 0; i < peers_n(e); i++) {
        struct engine *k = peers_at(e, i);
        tokens_came(k, now_ns);
        atomic_store(&k->has_sequences, true);
        atomic_store(&k->hold_until_ns, hold_us == 0 ? 0 : now_ns + hold_us * 1000);
        atomic_store(&k->is_draining, true);
        engine_wake(k); /* so that it looks for unfinished tokens */
    }
}

void engine_end_tokens(struct engine *e)
{
    for (uint32_t i = 0; i < peers_n(e); i++)
        atomic_store(&peers_at(e, i)->ends_tokens, true);
}

void tokens_came(struct engine *e, uint64_t now_ns)
{
    atomic_store(&e->token_at_ns, now_ns);
    atomic_store(&e->is_in_token, true);
}

void tokens_look(struct engine *e)
{
    const struct kv *kv = e->env.kv;
    if (!atomic_load(&e->is_draining))
        return;
    struct kv_stats now;
    kv_stats_read(kv, &now);
    atomic_store(&e->has_sequences, now.sequences > 0);
    if (!atomic_load(&e->is_in_token) || atomic_load(&e->queue.n_requests) > 0)
        return;
    for (kv_seq_id id = {0}; kv_seq_next(kv, UINT32_MAX, &id) == ATTN_OK; id.index++) {
        struct kv_seq_info info;
        kv_seq_info(kv, id, &info);
        const struct pool *p = pool_of_kv(e, info.pool);
        for (uint32_t i = 1; i < p->config.num_layers; i++)
            if (info.layer_len[i] != info.layer_len[0])
                return;
    }
    atomic_store(&e->is_in_token, false);
}

bool seq_begins_token(const struct engine *e, uint32_t seq, uint32_t end)
{
    struct kv_seq_info info;
    kv_seq_info(e->env.kv, (kv_seq_id){seq}, &info);
    const struct pool *p = pool_of_kv(e, info.pool);
    for (uint32_t i = 0; i < p->config.num_layers; i++)
        if (info.layer_len[i] >= end)
            return false;
    return true;
}

bool engine_is_draining(const struct engine *e)
{
    return atomic_load(&e->is_draining);
}

bool engine_is_held(const struct engine *e)
{
    uint64_t now_ns = clock_now_ns();
    for (uint32_t i = 0; i < peers_n(e); i++) {
        const struct engine *k = peers_at(e, i);
        if (atomic_load(&k->has_sequences) && now_ns < atomic_load(&k->hold_until_ns))
            return true;
    }
    return false;
}

static bool is_drained(const struct engine *e)
{
    uint64_t now_ns = clock_now_ns(), at_ns = atomic_load(&e->token_at_ns);
    uint64_t most_ns = config_now(e->env.cfg, token_timeout_us) * 1000;
    bool is_waited_for =
        atomic_load(&e->is_in_token) && (now_ns < at_ns || now_ns - at_ns < most_ns);
    return atomic_load(&e->is_draining) && atomic_load(&e->queue.n_requests) == 0 && !is_waited_for;
}

bool engine_is_drained(const struct engine *e)
{
    if (engine_is_held(e))
        return false;
    for (uint32_t i = 0; i < peers_n(e); i++)
        if (!is_drained(peers_at(e, i)))
            return false;
    return true;
}

bool engine_is_idle(const struct engine *e)
{
    for (uint32_t i = 0; i < peers_n(e); i++)
        if (atomic_load(&peers_at(e, i)->queue.n_requests) > 0)
            return false;
    return true;
}

attn_status fence_check(struct engine *e, struct request *req, char *why, size_t why_bytes)
{
    uint64_t fence_ns = atomic_load_explicit(&e->fence_ns, memory_order_relaxed);
    uint64_t fence_us = config_now(e->env.cfg, fence_us);
    if (fence_us == 0)
        return ATTN_OK;
    if (fence_ns <= e->turn_ns) {
        snprintf(why, why_bytes,
                 "no operator has asked for appends to be served in the last %" PRIu64
                 " ms (engine.fence)",
                 fence_us / 1000);
        return ATTN_EFENCED;
    }
    req->deadline_ns = req->deadline_ns < fence_ns ? req->deadline_ns : fence_ns;
    return ATTN_OK;
}

attn_status engine_stop_status(const struct engine *e)
{
    return engine_health(e) != ATTN_OK ? engine_health(e) : ATTN_EDRAINING;
}
