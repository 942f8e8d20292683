/* engine_tier.c: see engine_tier.h. */
#include "daemon/engine_tier.h"

#include "daemon/engine_pool.h"
#include "daemon/engine_status.h"
#include "daemon/log.h"
#include "daemon/stats.h"
#include "kernels/kv_layout.h"

static void *memory_take(void *arg, size_t bytes)
{
    struct engine *e = arg;
    void *p;
    attn_status st = e->parts.ops->host_alloc(e->parts.backend, bytes, &p);
    if (st == ATTN_OK)
        return p;
    log_limited("no host memory", LOG_LEVEL_WARN, log_event, "no host memory",
                "bytes=%zu setting=cache.host_memory", bytes);
    return NULL;
}

static void memory_give(void *arg, void *p, size_t bytes)
{
    struct engine *e = arg;
    e->parts.ops->host_free(e->parts.backend, p, bytes);
}

static uint64_t block_bytes(const struct pool *p)
{
    return kv_layout_of(&p->config).block_bytes;
}

static void take_evicted(void *arg, const struct kv_content *c, uint32_t block)
{
    struct engine *e = arg;
    struct pool *p = pool_of_kv(e, (kv_pool_id){c->pool});
    char why[WHY_BYTES];
    if (p == NULL || engine_health(e) != ATTN_OK)
        return;
    struct host_block *b = host_tier_place(e->tier.blocks, c, block_bytes(p));
    if (b == NULL)
        return;
    if (pool_block_read(e, p, block, host_block_bytes(b), why, sizeof why) != ATTN_OK) {
        host_tier_drop(e->tier.blocks, b);
        return;
    }
    host_tier_filled(e->tier.blocks, b);
    e->tier.out_bytes += block_bytes(p);
}

static void *find(void *arg, struct kv_content *c)
{
    struct engine *e = arg;
    struct host_block *b = host_tier_find(e->tier.blocks, c);
    if (b == NULL)
        return NULL;
    if (!host_tier_verify(e->tier.blocks, b)) {
        log_error("a block in host memory is not as it was put there: it is dropped");
        return NULL;
    }
    c->serial = host_block_serial(b);
    host_tier_hold(e->tier.blocks, b);
    return b;
}

static uint64_t serial(void *arg, const struct kv_content *c)
{
    struct engine *e = arg;
    return host_tier_serial(e->tier.blocks, c);
}

static bool bring(void *arg, void *found, uint32_t pool, const uint32_t *block)
{
    struct engine *e = arg;
    struct pool *p = pool_of_kv(e, (kv_pool_id){pool});
    char why[WHY_BYTES];
    bool is_there =
        block != NULL && p != NULL && engine_health(e) == ATTN_OK &&
        pool_block_write(e, p, *block, host_block_bytes(found), why, sizeof why) == ATTN_OK;
    if (is_there)
        e->tier.in_bytes += block_bytes(p);
    host_tier_let_go(e->tier.blocks, found);
    return is_there;
}

attn_status tier_init(struct engine *e)
{
    uint64_t limit = e->parts.cfg->host_memory_bytes;
    if (limit == 0)
        return ATTN_OK;
    const struct host_tier_memory memory = {memory_take, memory_give, e};
    const struct kv_elsewhere here = {e, take_evicted, find, serial, bring};
    attn_status st = host_tier_open(limit, &memory, &e->tier.blocks);
    if (st == ATTN_OK)
        kv_set_elsewhere(e->parts.kv, &here);
    return st;
}

void tier_fini(struct engine *e)
{
    const struct kv_elsewhere nowhere = {0};
    if (e->tier.blocks == NULL)
        return;
    kv_set_elsewhere(e->parts.kv, &nowhere);
    host_tier_close(e->tier.blocks);
}

void tier_forget_pool(struct engine *e, kv_pool_id pool)
{
    if (e->tier.blocks != NULL)
        host_tier_drop_pool(e->tier.blocks, pool.index);
}

void tier_publish(struct engine *e)
{
    struct host_tier_stats now, last = e->tier.told;
    if (e->tier.blocks == NULL)
        return;
    host_tier_stats_read(e->tier.blocks, &now);
    stats_add(blocks_host, now.blocks - last.blocks);
    stats_add(host_memory_bytes, now.bytes - last.bytes);
    stats_add(host_hits, now.hits - last.hits);
    stats_add(host_evictions, now.evictions - last.evictions);
    stats_add(host_no_room, now.no_room - last.no_room);
    stats_add(host_damaged, now.damaged - last.damaged);
    stats_add(host_out_bytes, e->tier.out_bytes);
    stats_add(host_in_bytes, e->tier.in_bytes);
    e->tier.out_bytes = e->tier.in_bytes = 0;
    e->tier.told = now;
}
