/* published.c: publishes counts of pools in atomics, for the threads of other engines and of
 * transports, which place new sequences by them. */
#include "daemon/engine/core/published.h"

#include "cache/kv_owner.h"
#include "daemon/base/stats.h"
#include "daemon/engine/core/peers.h"
#include "daemon/engine/core/pool_table.h"

static struct pool_count count_here(const struct engine *e, const struct pool *p)
{
    struct kv_pool_spec ks;
    uint32_t n_free = 0;
    kv_pool_info(e->env.kv, p->id, &ks, &n_free);
    return (struct pool_count){.blocks = ks.n_blocks,
                               .free = n_free,
                               .cached = kv_pool_cached(e->env.kv, p->id),
                               .reserved = kv_pool_reserved(e->env.kv, p->id),
                               .tiered = kv_idle_pool_paged_out(e->env.kv, p->id),
                               .sequences = kv_pool_sequences(e->env.kv, p->id),
                               .bytes = p->device_bytes};
}

static void store(_Atomic uint64_t *to, uint64_t n)
{
    atomic_store_explicit(to, n, memory_order_relaxed);
}

static uint64_t load(const _Atomic uint64_t *from)
{
    return atomic_load_explicit(from, memory_order_relaxed);
}

static void pool_publish(struct engine *e, const struct pool *p, struct pool_published *to)
{
    struct pool_count n = p == NULL ? (struct pool_count){0} : count_here(e, p);
    if (p != NULL && pool_is_shard(e, p)) /* its blocks are counted by the primary */
        n.blocks = n.free = 0;
    atomic_store_explicit(&to->is_split, p != NULL && pool_spans(e, p), memory_order_relaxed);
    store(&to->blocks, n.blocks);
    store(&to->free, n.free);
    store(&to->cached, n.cached);
    store(&to->reserved, n.reserved);
    store(&to->tiered, n.tiered);
    store(&to->sequences, n.sequences);
    store(&to->bytes, n.bytes);
}

void pools_publish(struct engine *e)
{
    uint32_t card = e->env.card;
    if (is_alone(e))
        return;
    store(&e->published_free_bytes, e->info.kv_bytes - e->device_bytes);
    for (uint32_t i = 0; i < e->env.cfg->max_pools; i++)
        pool_publish(e, pool_of_kv(e, (kv_pool_id){i}), &e->published[i]);
    stats_card_set(card, STATS_CARD_SEQUENCES, e->gauges.sequences);
    stats_card_set(card, STATS_CARD_BLOCKS, e->gauges.blocks_total);
    stats_card_set(card, STATS_CARD_FREE, e->gauges.blocks_free);
    stats_card_set(card, STATS_CARD_MEMORY, e->info.kv_bytes);
}

struct pool_count pool_count_all(struct engine *e, const struct pool *p)
{
    struct pool_count sum = count_here(e, p);
    for (uint32_t i = 0; i < peers_n(e); i++) {
        const struct engine *k = peers_at(e, i);
        const struct pool_published *of = &k->published[p->id.index];
        if (k == e)
            continue;
        sum.blocks += load(&of->blocks);
        sum.free += load(&of->free);
        sum.cached += load(&of->cached);
        sum.reserved += load(&of->reserved);
        sum.tiered += load(&of->tiered);
        sum.sequences += load(&of->sequences);
        sum.bytes += load(&of->bytes);
    }
    return sum;
}

uint64_t least_free_bytes(const struct engine *e)
{
    uint64_t least = e->info.kv_bytes - e->device_bytes;
    for (uint32_t i = 0; i < peers_n(e); i++) {
        uint64_t n = peers_at(e, i) == e ? least : load(&peers_at(e, i)->published_free_bytes);
        least = n < least ? n : least;
    }
    return least;
}

void kv_stats_all(const struct engine *e, struct kv_stats *out_sum)
{
    kv_stats_read(e->env.kv, out_sum);
    for (uint32_t i = 0; i < peers_n(e); i++) {
        struct kv_stats s;
        if (peers_at(e, i) == e)
            continue;
        kv_stats_read(peers_at(e, i)->env.kv, &s);
#define X(field) out_sum->field += s.field;
        KV_STATS_MAP(X)
#undef X
    }
}
