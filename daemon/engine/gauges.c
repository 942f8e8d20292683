/* gauges.c: publishes the gauges of the engine's cache, sessions and pools when they have changed.
 * Gauges are sums over engines, so only differences are added. Called by the engine's loop. */
#include "daemon/engine/gauges.h"

#include <stdio.h>

#include "daemon/base/iobuf.h"
#include "daemon/base/stats.h"
#include "daemon/engine/core/pool_table.h"
#include "daemon/engine/core/published.h"
#include "daemon/engine/tier/idle.h"
#include "daemon/engine/tier/tier.h"

void gauges_publish(struct engine *e)
{
    struct kv_stats last = e->gauges;
    kv_stats_read(e->env.kv, &e->gauges);
    stats_add(sequences, e->gauges.sequences - last.sequences);
    stats_add(blocks_total, e->gauges.blocks_total - last.blocks_total);
    stats_add(blocks_free, e->gauges.blocks_free - last.blocks_free);
    stats_add(blocks_used, e->gauges.blocks_used - last.blocks_used);
    stats_add(blocks_shared, e->gauges.blocks_shared - last.blocks_shared);
    stats_add(blocks_cached, e->gauges.blocks_cached - last.blocks_cached);
    stats_add(blocks_published, e->gauges.blocks_published - last.blocks_published);
    stats_add(prefix_hits, e->gauges.prefix_hits - last.prefix_hits);
    stats_add(prefix_misses, e->gauges.prefix_misses - last.prefix_misses);
    stats_add(prefix_hit_tokens, e->gauges.prefix_hit_tokens - last.prefix_hit_tokens);
    stats_add(evictions, e->gauges.evictions - last.evictions);
    stats_add(blocks_pinned, e->gauges.blocks_pinned - last.blocks_pinned);
    stats_add(blocks_reserved, e->gauges.blocks_reserved - last.blocks_reserved);
    stats_add(evictions_expired, e->gauges.evictions_expired - last.evictions_expired);
    stats_add(eviction_age_seconds, e->gauges.eviction_age_seconds - last.eviction_age_seconds);
    stats_add(cached_dropped, e->gauges.cached_dropped - last.cached_dropped);
    stats_add(blocks_tiered, e->gauges.blocks_tiered - last.blocks_tiered);
    stats_add(table_bytes, e->gauges.table_bytes - last.table_bytes);
    tier_publish(e);
    idle_publish(e);
    if (e->env.card == 0)
        stats_set(sessions, session_count(e->env.sessions));
    pools_publish(e);
    e->is_dirty = false;
    e->has_old_pools = true;
}

void gauges_publish_pools(struct engine *e, uint64_t now_ns)
{
    struct stats_pool list[STATS_MAX_POOLS + 1] = {0};
    uint64_t used_bytes = 0;
    size_t n = 0;
    for (struct pool *p = NULL; (p = pool_next(e, p)) != NULL;) {
        struct kv_pool_spec ks;
        uint32_t n_free = 0;
        kv_pool_info(e->env.kv, p->id, &ks, &n_free);
        struct stats_pool *s = &list[n < STATS_MAX_POOLS ? n : STATS_MAX_POOLS];
        snprintf(s->name, sizeof s->name, "%s", n < STATS_MAX_POOLS ? ks.name : "");
        struct pool_count all = pool_count_all(e, p);
        s->blocks += all.blocks;
        s->free += all.free;
        s->tiered += all.tiered;
        s->sequences += all.sequences;
        used_bytes += (ks.n_blocks - n_free) * (p->device_bytes / ks.n_blocks);
        n += n <= STATS_MAX_POOLS;
    }
    if (e->env.card == 0) {
        stats_set_pools(list, n);
        stats_set(io_memory_bytes, iobuf_pool_bytes(e->env.bufs));
        stats_set(max_batch_items, e->env.cfg->max_batch_items);
        stats_set(max_batch_tokens, e->env.cfg->max_batch_tokens);
    }
    stats_add(kv_memory_bytes, e->info.kv_bytes - e->last_published.kv_bytes);
    stats_add(kv_given_bytes, e->device_bytes - e->last_published.given_bytes);
    stats_add(kv_used_bytes, used_bytes - e->last_published.used_bytes);
    stats_add(memory_bytes_per_s,
              e->info.memory_bytes_per_s - e->last_published.memory_bytes_per_s);
    e->last_published.kv_bytes = e->info.kv_bytes;
    e->last_published.memory_bytes_per_s = e->info.memory_bytes_per_s;
    e->last_published.given_bytes = e->device_bytes;
    e->last_published.used_bytes = used_bytes;
    e->has_old_pools = false;
    e->pools_at_ns = now_ns;
}
