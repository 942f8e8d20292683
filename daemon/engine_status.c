/* engine_status.c: whether the engine drains and whether its device is lost, as others ask and tell
 * it. */
#include "daemon/engine_status.h"

#include "daemon/clock.h"
#include "daemon/engine_pool.h"
#include "daemon/health.h"

void engine_drain(struct engine *e)
{
    tokens_came(e, clock_now_ns());
    atomic_store(&e->is_draining, true);
    health_set_draining(true);
    engine_wake(e); /* it looks for tokens */
}

void engine_end_tokens(struct engine *e)
{
    atomic_store(&e->ends_tokens, true);
}

void tokens_came(struct engine *e, uint64_t now_ns)
{
    atomic_store(&e->token_at_ns, now_ns);
    atomic_store(&e->is_in_token, true);
}

void tokens_look(struct engine *e)
{
    const struct kv *kv = e->parts.kv;
    if (!atomic_load(&e->is_draining) || !atomic_load(&e->is_in_token) || !engine_is_idle(e))
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
    kv_seq_info(e->parts.kv, (kv_seq_id){seq}, &info);
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

bool engine_is_drained(const struct engine *e)
{
    uint64_t now_ns = clock_now_ns(), at_ns = atomic_load(&e->token_at_ns);
    uint64_t most_ns = config_now(e->parts.cfg, token_timeout_us) * 1000;
    bool is_waited_for =
        atomic_load(&e->is_in_token) && (now_ns < at_ns || now_ns - at_ns < most_ns);
    return atomic_load(&e->is_draining) && engine_is_idle(e) && !is_waited_for;
}

bool engine_is_idle(const struct engine *e)
{
    return atomic_load(&e->n_held) == 0;
}

attn_status engine_health(const struct engine *e)
{
    return (attn_status)atomic_load_explicit(&e->health, memory_order_relaxed);
}
