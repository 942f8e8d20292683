/* tier.c: opens and closes the tiers behind the pools, connects them to the cache (kv_tier_ops),
 * and publishes their counters. The callbacks run inside calls of the cache; engine thread. */
#include "daemon/engine/tier/tier.h"

#include <inttypes.h>
#include <stdlib.h>

#include "cache/kv_tier.h"
#include "daemon/base/log.h"
#include "daemon/base/stats.h"
#include "daemon/engine/core/effects.h"
#include "daemon/engine/core/pool_table.h"
#include "daemon/engine/tier/demote.h"
#include "daemon/engine/tier/disk.h"
#include "daemon/engine/tier/group.h"
#include "daemon/engine/tier/mover.h"
#include "daemon/engine/tier/promote.h"
#include "kernels/moves.h"

/* --- memory ----------------------------------------------------------------------------------- */

static bool memory_take(void *arg, uint64_t bytes, uint64_t *out_place)
{
    struct engine *e = arg;
    void *p;
    attn_status st = e->env.ops->host_alloc(e->env.backend, bytes, &p);
    if (st == ATTN_OK) {
        *out_place = (uintptr_t)p;
        return true;
    }
    log_limited("no host memory", LOG_LEVEL_WARN, log_event, "no host memory",
                "bytes=%" PRIu64 " setting=cache.host_memory", bytes);
    return false;
}

static void memory_give(void *arg, uint64_t place, uint64_t bytes)
{
    struct engine *e = arg;
    e->env.ops->host_free(e->env.backend, (void *)(uintptr_t)place, bytes);
}

static bool disk_take(void *arg, uint64_t bytes, uint64_t *out_place)
{
    struct engine *e = arg;
    return tier_disk_take(e->tier.disk, bytes, out_place);
}

static void disk_give(void *arg, uint64_t place, uint64_t bytes)
{
    struct engine *e = arg;
    tier_disk_give(e->tier.disk, place, bytes);
}

static bool charge(struct engine *e, uint32_t tenant, enum tenant_quota what, uint64_t bytes)
{
    char why[WHY_BYTES];
    struct tenant *who = tenants_of_id(e->env.tenants, tenant);
    return tenant_take(who, what, bytes, why, sizeof why) == ATTN_OK;
}

static bool host_charge(void *arg, uint32_t tenant, uint64_t bytes)
{
    return charge(arg, tenant, TENANT_HOST_BYTES, bytes);
}

static bool disk_charge(void *arg, uint32_t tenant, uint64_t bytes)
{
    return charge(arg, tenant, TENANT_DISK_BYTES, bytes);
}

static void host_discharge(void *arg, uint32_t tenant, uint64_t bytes)
{
    struct engine *e = arg;
    tenant_give(tenants_of_id(e->env.tenants, tenant), TENANT_HOST_BYTES, bytes);
}

static void disk_discharge(void *arg, uint32_t tenant, uint64_t bytes)
{
    struct engine *e = arg;
    tenant_give(tenants_of_id(e->env.tenants, tenant), TENANT_DISK_BYTES, bytes);
}

/* --- the cache's callbacks -------------------------------------------------------------------- */

/* Copies a block that was not demoted in time; the engine waits. */
static void take_now(struct engine *e, struct pool *p, const struct kv_content *c, uint32_t block)
{
    char why[WHY_BYTES];
    uint64_t sum[2], bytes = pool_block_bytes(p);
    struct tier_block *b = tier_store_place(e->tier.blocks, c, mover_tier_bytes(e, p));
    if (b == NULL)
        return;
    uint8_t *to = (uint8_t *)(uintptr_t)tier_block_place(b);
    if (pool_block_read(p, block, to, why, sizeof why) != ATTN_OK) {
        tier_store_drop(e->tier.blocks, b);
        return;
    }
    moves_sum(to, bytes, sum);
    tier_store_filled(e->tier.blocks, b, sum);
    e->tier.out_bytes += bytes;
}

static void evicted(void *arg, const struct kv_content *c, uint32_t block)
{
    struct engine *e = arg;
    struct pool *p = pool_of_kv(e, (kv_pool_id){c->pool});
    if (p == NULL || engine_health(e) != ATTN_OK)
        return;
    if (tier_store_serial(e->tier.blocks, c) != c->serial &&
        (e->tier.disk_blocks == NULL || tier_store_serial(e->tier.disk_blocks, c) != c->serial))
        take_now(e, p, c, block);
}

static bool find(void *arg, struct kv_content *c)
{
    return mover_find(arg, c);
}

static uint64_t serial(void *arg, const struct kv_content *c)
{
    struct engine *e = arg;
    uint64_t s = tier_store_serial(e->tier.blocks, c);
    return s != 0 || e->tier.disk_blocks == NULL ? s : tier_store_serial(e->tier.disk_blocks, c);
}

/* --- life ------------------------------------------------------------------------------------- */

static attn_status open_disk(struct engine *e, char *why, size_t why_bytes)
{
    const struct config *c = e->env.cfg;
    attn_status st = tier_disk_open(c->disk_path, c->disk_bytes, &e->tier.disk, why, why_bytes);
    const struct tier_memory m = {disk_take,      disk_give, disk_charge,
                                  disk_discharge, e,         config_disk_record_bytes(c)};
    if (st == ATTN_OK)
        st = tier_store_open(c->disk_bytes, &m, &e->tier.disk_blocks);
    return st;
}

attn_status tier_init(struct engine *e, char *why, size_t why_bytes)
{
    uint64_t limit = config_tier_bytes(e->env.cfg);
    if (limit == 0)
        return ATTN_OK;
    const struct tier_memory m = {memory_take, memory_give,
                                  host_charge, host_discharge,
                                  e,           config_tier_record_bytes(e->env.cfg)};
    const struct kv_tier_ops here = {e, evicted, find, serial};
    attn_status st = mover_init(e);
    if (st == ATTN_OK)
        st = tier_store_open(limit, &m, &e->tier.blocks);
    snprintf(why, why_bytes, "no memory for the tables of cache.host_memory");
    if (st == ATTN_OK && e->env.cfg->disk_bytes > 0)
        st = open_disk(e, why, why_bytes);
    if (st == ATTN_OK)
        kv_set_tier_ops(e->env.kv, &here);
    return st;
}

void tier_fini(struct engine *e)
{
    const struct kv_tier_ops nowhere = {0};
    if (e->tier.blocks != NULL) {
        kv_set_tier_ops(e->env.kv, &nowhere);
        mover_drain(e, NULL);
    }
    tier_store_close(e->tier.disk_blocks);
    tier_disk_close(e->tier.disk);
    tier_store_close(e->tier.blocks);
    mover_fini(e);
}

void tier_leave_pool(struct engine *e, kv_pool_id pool)
{
    const struct pool *p = pool_of_kv(e, pool);
    if (p != NULL && !mover_drain(e, p))
        log_error("blocks of a pool that is dropped are still on their way");
}

void tier_forget_pool(struct engine *e, kv_pool_id pool)
{
    if (e->tier.blocks == NULL)
        return;
    tier_store_drop_pool(e->tier.blocks, pool.index);
    if (e->tier.disk_blocks != NULL)
        tier_store_drop_pool(e->tier.disk_blocks, pool.index);
    mover_forget_pool(e, pool);
}

/* Forgets which blocks have a copy; the stores are asked again, by content. */
void tier_resized_pool(struct engine *e, kv_pool_id pool)
{
    if (e->tier.blocks != NULL)
        mover_forget_pool(e, pool);
}

/* --- stats ------------------------------------------------------------------------------------ */

static void publish_disk(struct engine *e)
{
    struct tier_store_stats now, last = e->tier.last_disk_published;
    tier_store_stats_read(e->tier.disk_blocks, &now);
    stats_add(blocks_disk, now.blocks - last.blocks);
    stats_add(disk_used_bytes, now.used_bytes - last.used_bytes);
    stats_add(disk_hits, now.hits - last.hits);
    stats_add(disk_evictions, now.evictions - last.evictions);
    stats_add(disk_eviction_age_seconds, now.eviction_age_seconds - last.eviction_age_seconds);
    stats_add(disk_out_bytes, e->tier.disk_out_bytes);
    stats_add(disk_in_bytes, e->tier.disk_in_bytes);
    stats_add(disk_errors, e->tier.n_disk_errors);
    e->tier.disk_out_bytes = e->tier.disk_in_bytes = e->tier.n_disk_errors = 0;
    e->tier.last_disk_published = now;
}

void tier_publish(struct engine *e)
{
    struct tier_store_stats now, last = e->tier.last_published;
    if (e->tier.blocks == NULL)
        return;
    tier_store_stats_read(e->tier.blocks, &now);
    stats_add(blocks_host, now.blocks - last.blocks);
    stats_add(host_memory_bytes, now.bytes - last.bytes);
    stats_add(host_hits, now.hits - last.hits);
    stats_add(host_evictions, now.evictions - last.evictions);
    stats_add(host_eviction_age_seconds, now.eviction_age_seconds - last.eviction_age_seconds);
    stats_add(host_no_room, now.no_room - last.no_room);
    stats_add(host_damaged, now.damaged - last.damaged);
    stats_add(host_out_bytes, e->tier.out_bytes);
    stats_add(host_in_bytes, e->tier.in_bytes);
    stats_add(host_waits, e->tier.n_waits);
    e->tier.out_bytes = e->tier.in_bytes = e->tier.n_waits = 0;
    e->tier.last_published = now;
    if (e->tier.disk_blocks != NULL)
        publish_disk(e);
}
