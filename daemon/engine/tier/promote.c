/* promote.c: promotes blocks: brings those of an open's tokens from the file and host memory back
 * to the pool, then runs the open again. Checksums are computed by the threads that move. Engine
 * thread. */
#include "daemon/engine/tier/promote.h"

#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "cache/kv_tier.h"
#include "daemon/base/log.h"
#include "daemon/engine/core/effects.h"
#include "daemon/engine/core/pool_table.h"
#include "daemon/engine/core/queue.h"
#include "daemon/engine/tier/demote.h"
#include "daemon/engine/tier/disk.h"
#include "daemon/engine/tier/group.h"
#include "kernels/moves.h"

static bool is_coming(const struct engine *e, const struct mover_found *x)
{
    const struct mover_promote *f;
    LIST_FOREACH(f, &e->tier.promotions, link)
        for (uint32_t i = 0; i < f->n; i++)
            if ((x->host != NULL && f->from[i].host == x->host) ||
                (x->disk != NULL && f->from[i].disk == x->disk))
                return true;
    return false;
}

bool mover_find(struct engine *e, struct kv_content *c)
{
    struct engine_tier *t = &e->tier;
    struct mover_found x = {.host = tier_store_find(t->blocks, c)};
    if (x.host == NULL && t->disk_blocks != NULL)
        x.disk = tier_store_find(t->disk_blocks, c);
    if ((x.host == NULL && x.disk == NULL) || t->n_found == MOVER_PROMOTE)
        return false;
    if (is_coming(e, &x)) {
        t->has_met = true;
        return false;
    }
    if (x.host != NULL)
        tier_store_hold(t->blocks, x.host);
    else
        tier_store_hold(t->disk_blocks, x.disk);
    c->serial = tier_block_content(x.host != NULL ? x.host : x.disk)->serial;
    t->found[t->n_found++] = x;
    return true;
}

/* Drops a block from all tiers after its bytes did not match their checksum. */
static void drop_damaged(struct engine *e, struct tier_block *host)
{
    const struct kv_content *c = tier_block_content(host);
    struct tier_block *disk =
        e->tier.disk_blocks == NULL ? NULL : tier_store_find(e->tier.disk_blocks, c);
    if (disk != NULL)
        tier_store_drop(e->tier.disk_blocks, disk);
    log_error("a block in a tier is not as it was put there: it is dropped");
}

static void found_release(struct engine *e, struct mover_found *x)
{
    if (x->host != NULL)
        tier_store_release(e->tier.blocks, x->host);
    if (x->disk != NULL)
        tier_store_release(e->tier.disk_blocks, x->disk);
    *x = (struct mover_found){0};
}

static void wait_in_queue(struct engine *e, struct task *t)
{
    TAILQ_INSERT_TAIL(&e->tier.queue, t, fresh);
    t->place = TASK_FRESH;
}

static void promote_end(struct engine *e, struct mover_promote *f)
{
    struct task *t = f->task;
    bool is_whole = f->n > 0 && f->n_there == f->n;
    for (uint32_t i = 0; i < f->n; i++)
        found_release(e, &f->from[i]);
    kv_promote_end(e->env.kv, f->kv, f->n_there);
    LIST_REMOVE(f, link);
    free(f);
    if (t != NULL) {
        t->req->is_promoted |= !is_whole;
        wait_in_queue(e, t);
    }
    e->tier.has_changed = true;
    seqs_have_room(e);
}

/* Goes on when all blocks are in host memory or were lost on the way there. */
static void promote_to_pool(struct engine *e, struct mover_promote *f);

static struct mover_promote *promote_of(struct mover_group *g)
{
    return (struct mover_promote *)((uint8_t *)g - offsetof(struct mover_promote, group));
}

static void promote_came(struct engine *e, struct mover_group *g)
{
    struct mover_promote *f = promote_of(g);
    bool is_good = true;
    for (uint32_t i = 0; i < g->moves.n; i++) {
        const struct backend_move *m = &f->list[i];
        if (!mover_is_moved(e, m)) {
            is_good = false;
            continue;
        }
        e->tier.in_bytes += m->n_bytes;
        if (!tier_store_verify(e->tier.blocks, f->from[i].host, m->sum)) {
            drop_damaged(e, f->from[i].host);
            is_good = false;
        } else {
            mover_note_kept(e, g->pool, m->block, tier_block_content(f->from[i].host)->serial);
        }
        f->n_there += is_good;
    }
    promote_end(e, f);
}

static void promote_read(struct engine *e, struct mover_group *g)
{
    struct mover_promote *f = promote_of(g);
    uint32_t k = 0;
    for (uint32_t i = 0; i < f->n && k < g->moves.n; i++) {
        struct mover_found *x = &f->from[i];
        if (x->disk == NULL)
            continue;
        if (f->list[k++].status == ATTN_OK) {
            /* not verified yet: that is done on the way to the pool */
            tier_store_filled(e->tier.blocks, x->host, tier_block_sum(x->disk));
            tier_store_hold(e->tier.blocks, x->host);
            e->tier.disk_in_bytes += f->list[k - 1].n_bytes;
        } else {
            tier_store_drop(e->tier.blocks, x->host);
            x->host = NULL;
            tier_store_drop(e->tier.disk_blocks, x->disk);
            mover_disk_failed(e, "read");
        }
    }
    promote_to_pool(e, f);
}

static void promote_to_pool(struct engine *e, struct mover_promote *f)
{
    uint32_t n = 0;
    uint64_t bytes = pool_block_bytes(f->group.pool);
    for (; n < f->n && f->from[n].host != NULL; n++)
        f->list[n] = (struct backend_move){
            .pool = f->group.pool->device,
            .block = kv_promote_block(f->kv, n),
            .is_in = true,
            .bytes = (void *)(uintptr_t)tier_block_place(f->from[n].host),
            .n_bytes = bytes,
        };
    f->group.came = promote_came;
    if (n == 0 || !mover_group_begin(e, &f->group, f->group.pool, n, NULL))
        promote_end(e, f);
}

/* Begins to read the blocks that are only in the file; false: there are none, or it failed. */
static bool promote_from_disk(struct engine *e, struct mover_promote *f)
{
    uint32_t k = 0;
    for (uint32_t i = 0; i < f->n; i++) {
        struct mover_found *x = &f->from[i];
        if (x->disk == NULL)
            continue;
        size_t bytes = tier_block_bytes(x->disk);
        x->host = tier_store_place(e->tier.blocks, tier_block_content(x->disk), bytes);
        if (x->host == NULL) { /* the rest comes with the next part */
            for (uint32_t j = i; j < f->n; j++)
                found_release(e, &f->from[j]);
            f->n = i;
            break;
        }
        f->list[k++] = (struct backend_move){.block = tier_disk_block(tier_block_place(x->disk)),
                                             .is_in = true,
                                             .bytes = (void *)(uintptr_t)tier_block_place(x->host),
                                             .n_bytes = bytes};
    }
    f->group.came = promote_read;
    if (k > 0 && mover_group_begin(e, &f->group, f->group.pool, k, e->tier.disk))
        return true;
    for (uint32_t i = 0; i < f->n; i++)
        if (f->from[i].disk != NULL && f->from[i].host != NULL) {
            tier_store_drop(e->tier.blocks, f->from[i].host);
            f->from[i].host = NULL;
        }
    return false;
}

/* NULL: nothing to promote, or no memory. */
static struct mover_promote *promote_begin(struct engine *e, struct pool *p, uint32_t tenant,
                                           uint32_t session, const struct kv_tokens *t)
{
    struct engine_tier *x = &e->tier;
    struct mover_promote *f = calloc(1, sizeof *f);
    x->n_found = 0;
    x->has_met = false;
    if (f == NULL)
        return NULL;
    f->kv = kv_promote_begin(e->env.kv, p->id, tenant, session, t,
                             mover_group_size(pool_block_bytes(p), MOVER_PROMOTE));
    if (f->kv == NULL) {
        free(f);
        return NULL;
    }
    f->n = x->n_found;
    memcpy(f->from, x->found, f->n * sizeof f->from[0]);
    mover_group_init(e, &f->group, f->list, promote_came);
    f->group.pool = p;
    LIST_INSERT_HEAD(&x->promotions, f, link);
    return f;
}

/* For a split pool, whose shards are moved by the cards' threads: promotes while the engine waits.
 * false: not all blocks came. */
static bool promote_now(struct engine *e, struct mover_promote *f)
{
    char why[WHY_BYTES];
    struct pool *p = f->group.pool;
    uint64_t bytes = pool_block_bytes(p), sum[2];
    for (; f->n_there < f->n && f->from[f->n_there].host != NULL; f->n_there++) {
        struct tier_block *host = f->from[f->n_there].host;
        const uint8_t *from = (const uint8_t *)(uintptr_t)tier_block_place(host);
        moves_sum(from, bytes, sum);
        if (!tier_store_verify(e->tier.blocks, host, sum)) {
            drop_damaged(e, host);
            break;
        }
        if (pool_block_write(p, kv_promote_block(f->kv, f->n_there), from, why, sizeof why) !=
            ATTN_OK)
            break;
        e->tier.in_bytes += bytes;
    }
    bool is_whole = f->n_there == f->n;
    promote_end(e, f);
    return is_whole;
}

static void promote_all_now(struct engine *e, struct pool *p, uint32_t tenant, uint32_t session,
                            const struct kv_tokens *t)
{
    struct mover_promote *f;
    do
        f = promote_begin(e, p, tenant, session, t);
    while (f != NULL && promote_now(e, f));
}

static struct task *task_make(struct engine *e, struct request *req, uint32_t session,
                              const struct task_ops *ops)
{
    struct task *t = wire_arena_alloc(&req->arena, sizeof(struct task) + sizeof(struct item));
    if (t == NULL)
        return NULL;
    *t =
        (struct task){.ops = ops, .req = req, .session = session, .layer = CLAIM_ALL, .n_items = 1};
    t->items[0] = (struct item){.task = t, .seq = SEQ_NONE};
    task_hold(e, t);
    return t;
}

/* Whether the blocks to promote must wait until others, which they will replace, have been copied.
 * Asks for as many as there can be room for. */
static bool waits_for_room(struct engine *e, struct pool *p, uint32_t tenant,
                           const struct kv_tokens *t)
{
    struct kv_pool_spec s;
    uint32_t n_room, most = mover_group_size(pool_block_bytes(p), MOVER_PROMOTE);
    kv_pool_info(e->env.kv, p->id, &s, &n_room);
    if (most <= n_room - kv_pool_cached(e->env.kv, p->id))
        return false; /* room for any promotion */
    uint32_t n = kv_prefix_find(e->env.kv, p->id, tenant, t, most).n_in_tier;
    return mover_makes_room(e, p, n) || (n > n_room && mover_makes_room(e, p, n_room));
}

bool mover_promotes(struct engine *e, struct pool *p, uint32_t tenant, const struct kv_tokens *t,
                    struct request *req, uint32_t session, const struct task_ops *ops)
{
    if (e->tier.blocks == NULL || engine_health(e) != ATTN_OK || req->is_promoted)
        return false;
    if (p->ops->moves_submit == NULL) {
        promote_all_now(e, p, tenant, session, t);
        return false;
    }
    bool waits = waits_for_room(e, p, tenant, t);
    struct mover_promote *f = waits ? NULL : promote_begin(e, p, tenant, session, t);
    if (f == NULL && !waits && !e->tier.has_met)
        return false;
    struct task *task = task_make(e, req, session, ops);
    if (f != NULL) {
        f->task = task;
        if (!promote_from_disk(e, f))
            promote_to_pool(e, f);
    } else if (task != NULL) {
        wait_in_queue(e, task);
    }
    return task != NULL;
}

void mover_forget(struct engine *e, struct task *t)
{
    struct mover_promote *f;
    if (t->place == TASK_FRESH)
        TAILQ_REMOVE(&e->tier.queue, t, fresh);
    LIST_FOREACH(f, &e->tier.promotions, link)
        if (f->task == t)
            f->task = NULL;
}

bool mover_is_bringing(struct engine *e, const struct pool *p, uint32_t seq)
{
    const struct mover_promote *f;
    LIST_FOREACH(f, &e->tier.promotions, link)
        if (f->group.pool == p) {
            mover_wait_for_room(e, seq);
            return true;
        }
    return false;
}

void mover_run_queue(struct engine *e)
{
    struct task_list queue = TAILQ_HEAD_INITIALIZER(queue);
    struct task *t;
    TAILQ_CONCAT(&queue, &e->tier.queue, fresh);
    while ((t = TAILQ_FIRST(&queue)) != NULL) {
        TAILQ_REMOVE(&queue, t, fresh);
        t->place = TASK_NOWHERE;
        t->ops->wake(e, &t->items[0]);
    }
}
