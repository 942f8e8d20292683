/* demote.c: demotes blocks: copies those that are evicted next to host memory, and those that leave
 * host memory to the file. A copy counts only if its block still has the same serial when it is
 * done. Engine thread. */
#include "daemon/engine/tier/demote.h"

#include <stdlib.h>

#include "cache/kv_tier.h"
#include "daemon/engine/core/pool_table.h"
#include "daemon/engine/core/queue.h"
#include "daemon/engine/tier/disk.h"
#include "daemon/engine/tier/group.h"

static const uint64_t PAUSE_NS = UINT64_C(1000000000); /* after failed moves */

void mover_note_kept(struct engine *e, const struct pool *p, uint32_t block, uint64_t serial)
{
    uint32_t **kept = &e->tier.kept[p->id.index];
    struct kv_pool_spec s;
    uint32_t n_free;
    if (*kept == NULL && kv_pool_info(e->env.kv, p->id, &s, &n_free) == ATTN_OK)
        *kept = calloc(s.n_blocks, sizeof **kept);
    if (*kept != NULL)
        (*kept)[block] = (uint32_t)serial;
}

/* Whether a copy is known to be in a tier; the stores are not asked. */
static bool is_kept(const struct engine *e, const struct pool *p, uint32_t block, uint64_t serial)
{
    const uint32_t *kept = e->tier.kept[p->id.index];
    return kept != NULL && kept[block] == (uint32_t)serial;
}

static void out_came(struct engine *e, struct mover_group *g)
{
    struct mover_demote *o = &e->tier.demote;
    for (uint32_t i = 0; i < g->moves.n; i++) {
        struct kv_content c;
        const struct backend_move *m = &o->list[i];
        if (m->status != ATTN_OK)
            e->tier.out_at_ns = e->turn_ns + PAUSE_NS;
        if (!mover_is_moved(e, m) || !kv_block_content(e->env.kv, g->pool->id, m->block, &c) ||
            c.serial != o->serial[i]) {
            tier_store_drop(e->tier.blocks, o->to[i]);
            continue;
        }
        tier_store_filled(e->tier.blocks, o->to[i], m->sum);
        mover_note_kept(e, g->pool, m->block, c.serial);
        e->tier.out_bytes += m->n_bytes;
    }
    kv_cached_release(e->env.kv, o->reading);
    o->reading = NULL;
    seqs_have_room(e);
}

/* Begins to copy the first n blocks of the list, if possible. */
static void out_begin(struct engine *e, struct pool *p, uint32_t n)
{
    struct mover_demote *o = &e->tier.demote;
    uint32_t blocks[MOVER_GROUP];
    for (uint32_t i = 0; i < n; i++)
        blocks[i] = o->list[i].block;
    o->reading = kv_cached_hold(e->env.kv, p->id, blocks, n);
    if (o->reading != NULL && mover_group_begin(e, &o->group, p, n, NULL))
        return;
    if (o->reading != NULL)
        kv_cached_release(e->env.kv, o->reading);
    o->reading = NULL;
    for (uint32_t i = 0; i < n; i++)
        tier_store_drop(e->tier.blocks, o->to[i]);
}

/* Returns how many of the next `want` blocks to be evicted have no copy; starts copying the first
 * of these unless a copy is running. */
static uint32_t copy_next(struct engine *e, struct pool *p, uint32_t want)
{
    struct mover_demote *o = &e->tier.demote;
    uint64_t bytes = pool_block_bytes(p);
    uint32_t n = 0, n_missing = 0, most = mover_group_size(bytes, MOVER_GROUP);
    want = kv_pool_next_evicted(e->env.kv, p->id, want < MOVER_SCAN ? want : MOVER_SCAN,
                                e->tier.next_out);
    for (uint32_t i = 0; i < want; i++) {
        struct kv_content c;
        uint32_t block = e->tier.next_out[i].block;
        if (!kv_block_content(e->env.kv, p->id, block, &c) || is_kept(e, p, block, c.serial))
            continue;
        n_missing++;
        if (o->group.is_under_way || n == most || e->turn_ns < e->tier.out_at_ns)
            continue;
        struct tier_block *to = tier_store_place(e->tier.blocks, &c, mover_tier_bytes(e, p));
        if (to == NULL && tier_store_serial(e->tier.blocks, &c) == c.serial)
            mover_note_kept(e, p, block, c.serial);
        n_missing -= to == NULL; /* a copy exists, or never will */
        if (to == NULL)
            continue;
        o->list[n] = (struct backend_move){.pool = p->device,
                                           .block = block,
                                           .bytes = (void *)(uintptr_t)tier_block_place(to),
                                           .n_bytes = bytes};
        o->to[n] = to;
        o->serial[n++] = c.serial;
    }
    if (n > 0)
        out_begin(e, p, n);
    return n_missing;
}

static bool has_mover(const struct engine *e, const struct pool *p)
{
    return e->tier.blocks != NULL && p->ops->moves_submit != NULL && engine_health(e) == ATTN_OK;
}

/* Returns the blocks without an owner or content; sets *out_cached to those that can be evicted. */
static uint32_t n_free_blocks(struct engine *e, const struct pool *p, uint32_t *out_cached)
{
    struct kv_pool_spec s;
    uint32_t n = 0;
    kv_pool_info(e->env.kv, p->id, &s, &n);
    *out_cached = kv_pool_cached(e->env.kv, p->id);
    return n - *out_cached;
}

bool mover_makes_room(struct engine *e, struct pool *p, uint64_t n)
{
    if (!has_mover(e, p))
        return false;
    uint32_t n_cached, n_free = n_free_blocks(e, p, &n_cached);
    if (n <= n_free)
        return false;
    if (mover_holds(e, p, n))
        return true;
    if (n - n_free > n_cached)
        return false; /* too few even if all were evicted */
    uint32_t n_missing = copy_next(e, p, (uint32_t)(n - n_free));
    return n_missing > 0 && e->tier.demote.group.is_under_way;
}

bool mover_holds(struct engine *e, const struct pool *p, uint64_t n)
{
    const struct mover_demote *o = &e->tier.demote;
    if (o->reading == NULL || o->group.pool != p)
        return false;
    uint32_t n_cached, n_free = n_free_blocks(e, p, &n_cached);
    uint64_t n_now = (uint64_t)n_free + n_cached;
    return n > n_now && n <= n_now + o->group.moves.n; /* beyond that, waiting does not help */
}

void mover_demote_next(struct engine *e)
{
    for (struct pool *p = NULL; (p = pool_next(e, p)) != NULL;) {
        uint32_t n_cached, n_free;
        if (e->tier.demote.group.is_under_way || !has_mover(e, p))
            continue;
        n_free = n_free_blocks(e, p, &n_cached);
        uint32_t ahead = p->config.n_blocks / 8 + 1;
        ahead = ahead < MOVER_AHEAD ? ahead : MOVER_AHEAD;
        if (n_free < ahead && n_cached > 0)
            copy_next(e, p, ahead - n_free);
    }
}

/* --- out of host memory ----------------------------------------------------------------------- */

static void spill_came(struct engine *e, struct mover_group *g)
{
    struct mover_spill *s = &e->tier.spill;
    for (uint32_t i = 0; i < g->moves.n; i++) {
        if (s->list[i].status == ATTN_OK) {
            tier_store_filled(e->tier.disk_blocks, s->to[i], tier_block_sum(s->from[i]));
            e->tier.disk_out_bytes += s->list[i].n_bytes;
        } else {
            tier_store_drop(e->tier.disk_blocks, s->to[i]);
            mover_disk_failed(e, "write");
            e->tier.disk_at_ns = e->turn_ns + PAUSE_NS;
        }
        tier_store_release(e->tier.blocks, s->from[i]);
    }
}

void mover_spill_next(struct engine *e)
{
    struct mover_spill *s = &e->tier.spill;
    struct tier_block *next[2 * MOVER_GROUP];
    struct tier_store_stats now;
    if (e->tier.disk == NULL || s->group.is_under_way || e->turn_ns < e->tier.disk_at_ns)
        return;
    tier_store_stats_read(e->tier.blocks, &now);
    if (now.filled == e->tier.n_spilled_of)
        return;
    uint32_t n_next = tier_store_next_out(e->tier.blocks, 2 * MOVER_GROUP, next), n = 0;
    for (uint32_t i = 0; i < n_next && n < MOVER_GROUP; i++) {
        const struct kv_content *c = tier_block_content(next[i]);
        size_t bytes = tier_block_bytes(next[i]);
        const struct pool *p = pool_of_kv(e, (kv_pool_id){c->pool});
        if (tier_store_room(e->tier.blocks, c->pool) > 2 * MOVER_GROUP * bytes || p == NULL ||
            p->ops->moves_submit == NULL)
            continue;
        struct tier_block *to = tier_store_place(e->tier.disk_blocks, c, bytes);
        if (to == NULL)
            continue;
        s->list[n] = (struct backend_move){.block = tier_disk_block(tier_block_place(to)),
                                           .bytes = (void *)(uintptr_t)tier_block_place(next[i]),
                                           .n_bytes = bytes};
        s->from[n] = next[i];
        s->to[n++] = to;
    }
    if (n == 0)
        e->tier.n_spilled_of = now.filled;
    bool has_begun = n > 0 && mover_group_begin(e, &s->group, NULL, n, e->tier.disk);
    for (uint32_t i = 0; i < n; i++)
        if (has_begun)
            tier_store_hold(e->tier.blocks, s->from[i]);
        else
            tier_store_drop(e->tier.disk_blocks, s->to[i]);
}

/* --- life ------------------------------------------------------------------------------------- */

attn_status mover_demote_init(struct engine *e)
{
    struct engine_tier *t = &e->tier;
    mover_group_init(e, &t->demote.group, t->demote.list, out_came);
    mover_group_init(e, &t->spill.group, t->spill.list, spill_came);
    t->kept = calloc(e->env.cfg->max_pools, sizeof *t->kept);
    t->next_out = calloc(MOVER_SCAN, sizeof *t->next_out);
    return t->kept == NULL || t->next_out == NULL ? ATTN_ENOMEM : ATTN_OK;
}

void mover_demote_fini(struct engine *e)
{
    struct engine_tier *t = &e->tier;
    for (uint32_t i = 0; t->kept != NULL && i < e->env.cfg->max_pools; i++)
        free(t->kept[i]);
    free(t->kept);
    free(t->next_out);
}

void mover_forget_pool(struct engine *e, kv_pool_id pool)
{
    free(e->tier.kept[pool.index]);
    e->tier.kept[pool.index] = NULL;
}
