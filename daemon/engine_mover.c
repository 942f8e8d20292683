/* engine_mover.c: whole blocks on their way between pools, host memory and the file, beside
 * batches.
 *
 * Out of a pool: while few blocks of it are free, those that will be evicted next are copied to
 * host memory, so that later eviction has nothing to wait for. Published blocks do not change, so a
 * copy is good if the block is the same publication when it is done. An item that wants more blocks
 * than have a copy waits for the next group, in its sequence's queue; its batch goes without it.
 *
 * Out of host memory: the same with the file, for the blocks of the store that go next. Nobody
 * waits for the file: where it is behind, blocks are lost to the cache.
 *
 * Back: an open whose tokens are elsewhere becomes a task and waits. What is in the file comes to
 * host memory first, then all of it to blocks that the cache has set aside (kv_fetch_begin), which
 * it publishes when they are there; then the open is run again, finds them, or begins the next
 * part. Checksums come with the moves, made by their threads.
 *
 * Every group comes back once, over a stack that the backend's threads push to.
 */
#include <sched.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/engine_answer.h"
#include "daemon/engine_batch.h"
#include "daemon/engine_blocks.h"
#include "daemon/engine_health.h"
#include "daemon/engine_pools.h"
#include "daemon/engine_queue.h"
#include "daemon/engine_tier.h"
#include "daemon/log.h"
#include "daemon/stack.h"
#include "daemon/tier_disk.h"
#include "kernels/kv_layout.h"
#include "kernels/moves.h"
#include "proto/attn_time.h"

#define GROUP_BYTES ((uint64_t)32 << 20) /* of blocks that go out together, but for one */
static const uint64_t SETTLE_NS = UINT64_C(5000000000);
static const uint64_t PAUSE_NS = UINT64_C(1000000000); /* after moves that failed */

static uint64_t block_bytes(const struct pool *p)
{
    return kv_layout_of(&p->config).block_bytes;
}

/* How many move together. */
static uint32_t group_size(uint64_t bytes, uint32_t most)
{
    uint64_t n = GROUP_BYTES / bytes;
    return n < 1 ? 1 : n > most ? most : (uint32_t)n;
}

/* --- groups ----------------------------------------------------------------------------------- */

static void group_done(struct backend_moves *m)
{
    struct engine *e = ((struct mover_group *)m)->engine;
    atomic_fetch_add(&e->tier.n_telling, 1);
    stack_push(&e->tier.came, m);
    engine_wake(e);
    atomic_fetch_sub(&e->tier.n_telling, 1);
}

static void group_init(struct engine *e, struct mover_group *g, struct backend_move *list,
                       void (*came)(struct engine *e, struct mover_group *g))
{
    *g = (struct mover_group){.engine = e, .came = came};
    g->moves.list = list;
    g->moves.done = group_done;
}

/* false: nothing was begun. */
static bool group_begin(struct engine *e, struct mover_group *g, struct pool *p, uint32_t n,
                        struct tier_disk *disk)
{
    g->moves.n = n;
    g->pool = p;
    attn_status st = disk != NULL ? tier_disk_submit(disk, &g->moves)
                                  : e->parts.ops->moves_submit(e->parts.backend, &g->moves);
    g->is_under_way = st == ATTN_OK;
    if (st != ATTN_OK)
        log_limited("no moves", LOG_LEVEL_WARN, log_event, "blocks can't be moved", "status=%s",
                    attn_status_message(st));
    return g->is_under_way;
}

static bool take_back(struct engine *e)
{
    struct backend_moves *m = stack_take_all(&e->tier.came);
    bool has_any = m != NULL;
    while (m != NULL) {
        struct mover_group *g = (struct mover_group *)m;
        m = m->next;
        g->is_under_way = false;
        g->came(e, g);
    }
    if (has_any) {
        e->tier.has_changed = true;
        e->is_dirty = true;
    }
    return has_any;
}

/* A move failed: not the device, or it is lost. */
static bool is_moved(struct engine *e, const struct backend_move *m)
{
    if (m->status == ATTN_EDEVICE)
        device_lose(e, "a block could not be moved");
    return m->status == ATTN_OK;
}

static void wake_waiting(struct engine *e)
{
    while (e->tier.n_waiting > 0) {
        uint32_t seq = e->tier.waiting[--e->tier.n_waiting];
        e->seqs[seq].waits_for_room = false;
        seq_wake_later(e, seq);
    }
}

static void wait_for_room(struct engine *e, uint32_t seq)
{
    if (e->seqs[seq].waits_for_room)
        return;
    e->seqs[seq].waits_for_room = true;
    e->tier.waiting[e->tier.n_waiting++] = seq;
    e->tier.n_waits++;
}

/* --- out of a pool ---------------------------------------------------------------------------- */

void mover_note_kept(struct engine *e, const struct pool *p, uint32_t block, uint64_t serial)
{
    uint32_t **kept = &e->tier.kept[p->id.index];
    struct kv_pool_spec s;
    uint32_t n_free;
    if (*kept == NULL && kv_pool_info(e->parts.kv, p->id, &s, &n_free) == ATTN_OK)
        *kept = calloc(s.n_blocks, sizeof **kept);
    if (*kept != NULL)
        (*kept)[block] = (uint32_t)serial;
}

/* A copy is there, as far as is known without looking for it. */
static bool is_kept(const struct engine *e, const struct pool *p, uint32_t block, uint64_t serial)
{
    const uint32_t *kept = e->tier.kept[p->id.index];
    return kept != NULL && kept[block] == (uint32_t)serial;
}

void mover_void(struct engine *e, const struct pool *p, uint32_t block)
{
    struct mover_out *o = &e->tier.out;
    for (uint32_t i = 0; o->group.is_under_way && o->group.pool == p && i < o->group.moves.n; i++)
        o->is_void[i] |= o->list[i].block == block;
}

static void out_came(struct engine *e, struct mover_group *g)
{
    struct mover_out *o = &e->tier.out;
    for (uint32_t i = 0; i < g->moves.n; i++) {
        struct kv_content c;
        const struct backend_move *m = &o->list[i];
        if (m->status != ATTN_OK)
            e->tier.out_at_ns = e->turn_ns + PAUSE_NS;
        if (!is_moved(e, m) || o->is_void[i] ||
            !kv_block_content(e->parts.kv, g->pool->id, m->block, &c) || c.serial != o->serial[i]) {
            tier_store_drop(e->tier.blocks, o->to[i]);
            continue;
        }
        tier_store_filled(e->tier.blocks, o->to[i], m->sum);
        mover_note_kept(e, g->pool, m->block, c.serial);
        e->tier.out_bytes += m->n_bytes;
    }
    wake_waiting(e);
}

/* Of the blocks that are evicted next, `want` of them, how many have no copy; the first of those
 * begin to go, if none do. */
static uint32_t copy_next(struct engine *e, struct pool *p, uint32_t want, bool *out_began)
{
    struct mover_out *o = &e->tier.out;
    uint64_t bytes = block_bytes(p);
    uint32_t n = 0, n_missing = 0, most = group_size(bytes, MOVER_GROUP);
    want = kv_pool_next_evicted(e->parts.kv, p->id, want < MOVER_SCAN ? want : MOVER_SCAN,
                                e->tier.next_out);
    *out_began = false;
    for (uint32_t i = 0; i < want; i++) {
        struct kv_content c;
        uint32_t block = e->tier.next_out[i].block;
        if (!kv_block_content(e->parts.kv, p->id, block, &c) || is_kept(e, p, block, c.serial))
            continue;
        n_missing++;
        if (o->group.is_under_way || n == most || e->turn_ns < e->tier.out_at_ns)
            continue;
        struct tier_block *to = tier_store_place(e->tier.blocks, &c, tier_block_bytes_of(e, p));
        if (to == NULL && tier_store_serial(e->tier.blocks, &c) == c.serial)
            mover_note_kept(e, p, block, c.serial);
        n_missing -= to == NULL; /* it is there, or never will be */
        if (to == NULL)
            continue;
        o->list[n] = (struct backend_move){.pool = p->device,
                                           .block = block,
                                           .bytes = (void *)(uintptr_t)tier_block_place(to),
                                           .n_bytes = bytes};
        o->to[n] = to;
        o->serial[n] = c.serial;
        o->is_void[n++] = false;
    }
    *out_began = n > 0 && group_begin(e, &o->group, p, n, NULL);
    for (uint32_t i = 0; i < n && !*out_began; i++)
        tier_store_drop(e->tier.blocks, o->to[i]);
    return n_missing;
}

static bool has_mover(const struct engine *e, const struct pool *p)
{
    return e->tier.blocks != NULL && !pool_is_split(&p->split) && engine_health(e) == ATTN_OK;
}

/* Blocks that are nobody's; those that can be evicted. */
static uint32_t n_free_blocks(struct engine *e, const struct pool *p, uint32_t *out_cached)
{
    struct kv_pool_spec s;
    uint32_t n = 0;
    kv_pool_info(e->parts.kv, p->id, &s, &n);
    *out_cached = kv_pool_cached(e->parts.kv, p->id);
    return n - *out_cached;
}

bool mover_makes_room(struct engine *e, struct pool *p, uint32_t seq, uint64_t n)
{
    if (!has_mover(e, p))
        return false;
    uint32_t n_cached, n_free = n_free_blocks(e, p, &n_cached);
    if (n <= n_free || n - n_free > n_cached)
        return false; /* there are enough, or not even if all went */
    bool has_begun;
    uint32_t n_missing = copy_next(e, p, (uint32_t)(n - n_free), &has_begun);
    if (n_missing == 0 || !e->tier.out.group.is_under_way)
        return false;
    wait_for_room(e, seq);
    return true;
}

static void look_ahead(struct engine *e)
{
    e->tier.has_changed = false;
    for (struct pool *p = NULL; (p = pool_next(e, p)) != NULL;) {
        uint32_t n_cached, n_free;
        bool has_begun;
        if (e->tier.out.group.is_under_way || !has_mover(e, p))
            continue;
        n_free = n_free_blocks(e, p, &n_cached);
        uint32_t ahead = p->config.n_blocks / 8 + 1;
        ahead = ahead < MOVER_AHEAD ? ahead : MOVER_AHEAD;
        if (n_free < ahead && n_cached > 0)
            copy_next(e, p, ahead - n_free, &has_begun);
    }
}

/* --- out of host memory ----------------------------------------------------------------------- */

static void disk_failed(struct engine *e, const char *what)
{
    e->tier.n_disk_errors++;
    log_limited("disk tier", LOG_LEVEL_WARN, log_event, "a block is lost to the disk tier",
                "%s=failed setting=cache.disk_path", what);
}

static void spill_came(struct engine *e, struct mover_group *g)
{
    struct mover_spill *s = &e->tier.spill;
    for (uint32_t i = 0; i < g->moves.n; i++) {
        if (s->list[i].status == ATTN_OK) {
            tier_store_filled(e->tier.disk_blocks, s->to[i], tier_block_sum(s->from[i]));
            e->tier.disk_out_bytes += s->list[i].n_bytes;
        } else {
            tier_store_drop(e->tier.disk_blocks, s->to[i]);
            disk_failed(e, "write");
            e->tier.disk_at_ns = e->turn_ns + PAUSE_NS;
        }
        tier_store_let_go(e->tier.blocks, s->from[i]);
    }
}

/* The blocks that go next from host memory, where it is nearly full, and have no copy in the
 * file. */
static void spill(struct engine *e)
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
            pool_is_split(&p->split))
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
    bool has_begun = n > 0 && group_begin(e, &s->group, NULL, n, e->tier.disk);
    for (uint32_t i = 0; i < n; i++)
        if (has_begun)
            tier_store_hold(e->tier.blocks, s->from[i]);
        else
            tier_store_drop(e->tier.disk_blocks, s->to[i]);
}

/* --- back ------------------------------------------------------------------------------------- */

static bool is_coming(const struct engine *e, const struct mover_found *x)
{
    const struct mover_fetch *f;
    LIST_FOREACH(f, &e->tier.fetches, link)
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
    if ((x.host == NULL && x.disk == NULL) || t->n_found == MOVER_FETCH)
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

/* The checksum of bytes that came is wrong: no tier has the block any more. */
static void drop_damaged(struct engine *e, struct tier_block *host)
{
    const struct kv_content *c = tier_block_content(host);
    struct tier_block *disk =
        e->tier.disk_blocks == NULL ? NULL : tier_store_find(e->tier.disk_blocks, c);
    if (disk != NULL)
        tier_store_drop(e->tier.disk_blocks, disk);
    log_error("a block in a tier is not as it was put there: it is dropped");
}

static void fetch_let_go(struct engine *e, struct mover_found *x)
{
    if (x->host != NULL)
        tier_store_let_go(e->tier.blocks, x->host);
    if (x->disk != NULL)
        tier_store_let_go(e->tier.disk_blocks, x->disk);
    *x = (struct mover_found){0};
}

static void fetch_end(struct engine *e, struct mover_fetch *f)
{
    struct task *t = f->task;
    bool is_whole = f->n > 0 && f->n_there == f->n;
    for (uint32_t i = 0; i < f->n; i++)
        fetch_let_go(e, &f->from[i]);
    kv_fetch_end(e->parts.kv, f->kv, f->n_there);
    LIST_REMOVE(f, link);
    free(f);
    if (t != NULL) {
        t->req->is_fetched |= !is_whole;
        TAILQ_INSERT_TAIL(&e->tier.queue, t, fresh);
        t->place = TASK_FRESH;
    }
    e->tier.has_changed = true;
    wake_waiting(e);
}

/* All of it is in host memory, or was lost on the way there. */
static void fetch_to_pool(struct engine *e, struct mover_fetch *f);

static struct mover_fetch *fetch_of(struct mover_group *g)
{
    return (struct mover_fetch *)((uint8_t *)g - offsetof(struct mover_fetch, group));
}

static void fetch_came(struct engine *e, struct mover_group *g)
{
    struct mover_fetch *f = fetch_of(g);
    bool is_good = true;
    for (uint32_t i = 0; i < g->moves.n; i++) {
        const struct backend_move *m = &f->list[i];
        if (!is_moved(e, m)) {
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
    fetch_end(e, f);
}

static void fetch_read(struct engine *e, struct mover_group *g)
{
    struct mover_fetch *f = fetch_of(g);
    uint32_t k = 0;
    for (uint32_t i = 0; i < f->n && k < g->moves.n; i++) {
        struct mover_found *x = &f->from[i];
        if (x->disk == NULL)
            continue;
        if (f->list[k++].status == ATTN_OK) {
            /* unread so far: it is verified as anything else on its way to the pool */
            tier_store_filled(e->tier.blocks, x->host, tier_block_sum(x->disk));
            tier_store_hold(e->tier.blocks, x->host);
            e->tier.disk_in_bytes += f->list[k - 1].n_bytes;
        } else {
            tier_store_drop(e->tier.blocks, x->host);
            x->host = NULL;
            tier_store_drop(e->tier.disk_blocks, x->disk);
            disk_failed(e, "read");
        }
    }
    fetch_to_pool(e, f);
}

static void fetch_to_pool(struct engine *e, struct mover_fetch *f)
{
    uint32_t n = 0;
    uint64_t bytes = block_bytes(f->group.pool);
    for (; n < f->n && f->from[n].host != NULL; n++)
        f->list[n] = (struct backend_move){
            .pool = f->group.pool->device,
            .block = kv_fetch_block(f->kv, n),
            .is_in = true,
            .bytes = (void *)(uintptr_t)tier_block_place(f->from[n].host),
            .n_bytes = bytes,
        };
    f->group.came = fetch_came;
    if (n == 0 || !group_begin(e, &f->group, f->group.pool, n, NULL))
        fetch_end(e, f);
}

/* Reads what is in the file alone; false: nothing is, or it can't be read. */
static bool fetch_from_disk(struct engine *e, struct mover_fetch *f)
{
    uint32_t k = 0;
    for (uint32_t i = 0; i < f->n; i++) {
        struct mover_found *x = &f->from[i];
        if (x->disk == NULL)
            continue;
        size_t bytes = tier_block_bytes(x->disk);
        x->host = tier_store_place(e->tier.blocks, tier_block_content(x->disk), bytes);
        if (x->host == NULL) { /* the rest is for the next part */
            for (uint32_t j = i; j < f->n; j++)
                fetch_let_go(e, &f->from[j]);
            f->n = i;
            break;
        }
        f->list[k++] = (struct backend_move){.block = tier_disk_block(tier_block_place(x->disk)),
                                             .is_in = true,
                                             .bytes = (void *)(uintptr_t)tier_block_place(x->host),
                                             .n_bytes = bytes};
    }
    f->group.came = fetch_read;
    if (k > 0 && group_begin(e, &f->group, f->group.pool, k, e->tier.disk))
        return true;
    for (uint32_t i = 0; i < f->n; i++)
        if (f->from[i].disk != NULL && f->from[i].host != NULL) {
            tier_store_drop(e->tier.blocks, f->from[i].host);
            f->from[i].host = NULL;
        }
    return false;
}

/* NULL: nothing comes. */
static struct mover_fetch *fetch_begin(struct engine *e, struct pool *p, uint32_t tenant,
                                       const struct kv_tokens *t)
{
    struct engine_tier *x = &e->tier;
    struct mover_fetch *f = calloc(1, sizeof *f);
    x->n_found = 0;
    x->has_met = false;
    if (f == NULL)
        return NULL;
    f->kv = kv_fetch_begin(e->parts.kv, p->id, tenant, t, group_size(block_bytes(p), MOVER_FETCH));
    if (f->kv == NULL) {
        free(f);
        return NULL;
    }
    f->n = x->n_found;
    memcpy(f->from, x->found, f->n * sizeof f->from[0]);
    group_init(e, &f->group, f->list, fetch_came);
    f->group.pool = p;
    LIST_INSERT_HEAD(&x->fetches, f, link);
    return f;
}

/* Of a split pool, whose parts the cards' threads move: the engine waits. false: not all of it
 * came. */
static bool fetch_now(struct engine *e, struct mover_fetch *f)
{
    char why[WHY_BYTES];
    struct pool *p = f->group.pool;
    uint64_t bytes = block_bytes(p), sum[2];
    for (; f->n_there < f->n && f->from[f->n_there].host != NULL; f->n_there++) {
        struct tier_block *host = f->from[f->n_there].host;
        const uint8_t *from = (const uint8_t *)(uintptr_t)tier_block_place(host);
        moves_sum(from, bytes, sum);
        if (!tier_store_verify(e->tier.blocks, host, sum)) {
            drop_damaged(e, host);
            break;
        }
        if (pool_block_write(e, p, kv_fetch_block(f->kv, f->n_there), from, why, sizeof why) !=
            ATTN_OK)
            break;
        e->tier.in_bytes += bytes;
    }
    bool is_whole = f->n_there == f->n;
    fetch_end(e, f);
    return is_whole;
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

bool mover_fetches(struct engine *e, struct pool *p, uint32_t tenant, const struct kv_tokens *t,
                   struct request *req, uint32_t session, const struct task_ops *ops)
{
    if (e->tier.blocks == NULL || engine_health(e) != ATTN_OK || req->is_fetched)
        return false;
    struct mover_fetch *f = fetch_begin(e, p, tenant, t);
    if (pool_is_split(&p->split)) {
        while (f != NULL && fetch_now(e, f))
            f = fetch_begin(e, p, tenant, t);
        return false;
    }
    if (f == NULL && !e->tier.has_met)
        return false;
    struct task *task = task_make(e, req, session, ops);
    if (f != NULL) {
        f->task = task;
        if (!fetch_from_disk(e, f))
            fetch_to_pool(e, f);
    } else if (task != NULL) {
        TAILQ_INSERT_TAIL(&e->tier.queue, task, fresh);
        task->place = TASK_FRESH;
    }
    return task != NULL;
}

void mover_forget(struct engine *e, struct task *t)
{
    struct mover_fetch *f;
    if (t->place == TASK_FRESH)
        TAILQ_REMOVE(&e->tier.queue, t, fresh);
    LIST_FOREACH(f, &e->tier.fetches, link)
        if (f->task == t)
            f->task = NULL;
}

bool mover_is_bringing(struct engine *e, const struct pool *p, uint32_t seq)
{
    const struct mover_fetch *f;
    LIST_FOREACH(f, &e->tier.fetches, link)
        if (f->group.pool == p) {
            wait_for_room(e, seq);
            return true;
        }
    return false;
}

/* What waited for something to come is run again, once. */
static void run_queue(struct engine *e)
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

/* --- the mover -------------------------------------------------------------------------------- */

bool mover_turn(struct engine *e)
{
    if (e->tier.blocks == NULL)
        return false;
    tier_store_set_time(e->tier.blocks, (uint32_t)(e->turn_ns / UINT64_C(1000000000)));
    if (e->tier.disk_blocks != NULL)
        tier_store_set_time(e->tier.disk_blocks, (uint32_t)(e->turn_ns / UINT64_C(1000000000)));
    bool has_any = take_back(e);
    if (e->tier.has_changed)
        run_queue(e);
    if (e->is_dirty || e->tier.has_changed)
        look_ahead(e);
    spill(e);
    return has_any;
}

static bool is_settled(const struct engine *e, const struct pool *p)
{
    const struct engine_tier *t = &e->tier;
    const struct mover_fetch *f;
    LIST_FOREACH(f, &t->fetches, link)
        if (p == NULL || f->group.pool == p)
            return false;
    if (t->spill.group.is_under_way) /* it may be of any pool */
        return false;
    return !t->out.group.is_under_way || (p != NULL && t->out.group.pool != p);
}

bool mover_settle(struct engine *e, const struct pool *p)
{
    uint64_t begun_ns = attn_now_ns();
    if (e->tier.blocks == NULL)
        return true;
    while (!is_settled(e, p)) {
        if (take_back(e))
            continue;
        if (attn_now_ns() - begun_ns > SETTLE_NS)
            return false;
        sched_yield();
    }
    while (p == NULL && atomic_load(&e->tier.n_telling) > 0)
        sched_yield();
    return true;
}

void mover_forget_pool(struct engine *e, kv_pool_id pool)
{
    free(e->tier.kept[pool.index]);
    e->tier.kept[pool.index] = NULL;
}

attn_status mover_init(struct engine *e)
{
    struct engine_tier *t = &e->tier;
    TAILQ_INIT(&t->queue);
    LIST_INIT(&t->fetches);
    group_init(e, &t->out.group, t->out.list, out_came);
    group_init(e, &t->spill.group, t->spill.list, spill_came);
    t->kept = calloc(e->parts.cfg->max_pools, sizeof *t->kept);
    t->next_out = calloc(MOVER_SCAN, sizeof *t->next_out);
    t->waiting = calloc(e->parts.cfg->max_sequences, sizeof *t->waiting);
    return t->kept == NULL || t->next_out == NULL || t->waiting == NULL ? ATTN_ENOMEM : ATTN_OK;
}

void mover_fini(struct engine *e)
{
    struct engine_tier *t = &e->tier;
    for (uint32_t i = 0; t->kept != NULL && i < e->parts.cfg->max_pools; i++)
        free(t->kept[i]);
    free(t->kept);
    free(t->next_out);
    free(t->waiting);
}
