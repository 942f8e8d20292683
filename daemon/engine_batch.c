/* engine_batch.c: from ready items to a batch and back.
 *
 * A batch takes ready tasks of one pool, oldest first, whole if they fit an empty batch, else in
 * parts. Appends are reserved in the cache one by one as they enter; table patches and block copies of
 * all reserves go with the batch. When it is back, appends are committed, or cancelled if it failed,
 * and every task whose last item is done is answered.
 */
#include <assert.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/engine_internal.h"
#include "daemon/log.h"

enum { MIN_BLOCK_TOKENS = 8 };

attn_status batches_init(struct engine *e)
{
    const struct config *c = e->cfg;
    uint32_t max_row_blocks = c->max_seq_tokens / MIN_BLOCK_TOKENS + 1;
    if (max_row_blocks > e->n_blocks)
        max_row_blocks = e->n_blocks;
    e->max_in_flight = e->info.max_in_flight < BACKEND_MAX_IN_FLIGHT ? e->info.max_in_flight
                                                                     : BACKEND_MAX_IN_FLIGHT;
    /* every block an item can touch, and a few forks of the longest sequence */
    e->copies_capacity = c->max_batch_tokens / MIN_BLOCK_TOKENS + 2 * c->max_batch_items;
    e->patches_capacity = e->copies_capacity + 4 * max_row_blocks;
    e->patches_margin = (BACKEND_MAX_IN_FLIGHT + 1) * e->copies_capacity;
    for (uint32_t i = 0; i < e->max_in_flight; i++) {
        struct batch *b = &e->batches[i];
        uint32_t n_patches = e->patches_capacity + e->patches_margin;
        b->device_items = calloc(c->max_batch_items, sizeof *b->device_items);
        b->items = calloc(c->max_batch_items, sizeof(struct item *));
        b->patches = calloc(n_patches, sizeof *b->patches);
        b->copies = calloc(e->copies_capacity, sizeof *b->copies);
        if (b->device_items == NULL || b->items == NULL || b->patches == NULL || b->copies == NULL)
            return ATTN_ENOMEM;
    }
    return ATTN_OK;
}

void batches_fini(struct engine *e)
{
    for (uint32_t i = 0; i < BACKEND_MAX_IN_FLIGHT; i++) {
        struct batch *b = &e->batches[i];
        free(b->device_items);
        free(b->items);
        free(b->patches);
        free(b->copies);
    }
}

attn_status pool_effects_init(struct engine *e, struct pool *p)
{
    p->fx = (struct kv_effects){
        .patches = calloc(e->patches_capacity + e->patches_margin, sizeof *p->fx.patches),
        .copies = calloc(e->copies_capacity, sizeof *p->fx.copies),
        .patches_capacity = e->patches_capacity,
        .copies_capacity = e->copies_capacity,
    };
    return p->fx.patches == NULL || p->fx.copies == NULL ? ATTN_ENOMEM : ATTN_OK;
}

void pool_effects_fini(struct pool *p)
{
    free(p->fx.patches);
    free(p->fx.copies);
}

/* --- when to launch ----------------------------------------------------------------------------- */

/* Behind a batch in flight the next one gains nothing by an early launch, and loses what it would still
 * collect. It goes when the device should be six tenths through, but WAY_IN_NS before the end at the latest:
 * early enough that its way in, over the bus and from the caches of cores that may be asleep, is done in time;
 * late enough that workers who were answered meanwhile are in it.
 *
 * A batch's time is guessed from what its pool's cached tokens took in about the last sixteen batches. Not from
 * single ones: of two that ran beside each other the later seems to have taken next to nothing. */
enum { WAY_IN_NS = 120000, MIN_ENOUGH = 8 };

static bool is_time(const struct engine *e, const struct pool *p, uint64_t now_ns)
{
    return e->n_in_flight == 0 || now_ns >= e->due_ns ||
           p->ready.n_items >= e->cfg->max_batch_items;
}

/* The device begins with b now. */
static void set_due(struct engine *e, const struct batch *b, uint64_t now_ns)
{
    const struct pool *p = b->pool;
    double ns = p->n_visible > 0 ? (double)b->n_visible * p->device_ns / p->n_visible : 0;
    double due = 0.6 * ns < ns - WAY_IN_NS ? 0.6 * ns : ns - WAY_IN_NS;
    e->due_ns = now_ns + (due > 0 ? (uint64_t)due : 0);
}

static void learn_device_ns(struct batch *b, uint64_t device_ns)
{
    struct pool *p = b->pool;
    if (b->n_visible == 0)
        return;
    p->device_ns += (double)device_ns - p->device_ns / 16;
    p->n_visible += (double)b->n_visible - p->n_visible / 16;
}

/* Items that make a batch full enough. Workers who are answered together come back together; if one batch
 * took them all, device and workers would wait for each other in turn. So it takes half of what there is:
 * of the most items that were lately ready or in flight at a time. */
static uint32_t enough_items(struct engine *e, const struct pool *p)
{
    uint32_t n = p->ready.n_items;
    if (e->max_in_flight == 1)
        return UINT32_MAX;
    for (uint32_t i = 0; i < e->max_in_flight; i++)
        n += e->batches[i].is_in_flight ? e->batches[i].n_items : 0;
    e->n_about -= (e->n_about + 15) / 16;
    e->n_about = n > e->n_about ? n : e->n_about;
    return e->n_about / 2 > MIN_ENOUGH ? (e->n_about + 1) / 2 : MIN_ENOUGH;
}

/* Cached tokens that the last query of an item sees. */
static uint32_t visible_tokens(const struct pool *p, const struct item *it)
{
    const struct attn_layer_spec *l = &p->config.layers[it->task->layer];
    uint32_t all = it->pos + it->n_tokens, some = l->window_tokens + l->sink_tokens;
    return l->window_tokens != 0 && some < all ? some : all;
}

/* --- building ---------------------------------------------------------------------------------- */

enum taken { TAKEN, NOT_TAKEN, BATCH_IS_FULL }; /* not taken: failed or deferred */

static enum taken take_append(struct engine *e, struct batch *b, struct item *it)
{
    struct pool *p = b->pool;
    struct seq_state *s = &e->seqs[it->seq];
    kv_seq_id id = {it->seq};
    if (s->n_active > 0 && kv_append_copies(e->kv, id, it->pos, it->n_tokens)) {
        item_defer(e, it); /* a batch in flight may be reading the table that would change */
        return NOT_TAKEN;
    }
    uint32_t n_copies = p->fx.n_copies;
    attn_status st = kv_append_reserve(e->kv, id, it->task->layer, it->pos, it->n_tokens, &p->fx);
    if (st == ATTN_EOVERLOAD && (b->n_items > 0 || e->n_in_flight > 0 || p->fx.n_patches > 0))
        return BATCH_IS_FULL; /* of patches or copies: what is there goes first */
    if (st == ATTN_OK) {
        s->is_copying = p->fx.n_copies > n_copies;
        return TAKEN;
    }
    item_unready(it);
    item_release(e, it);
    item_fail(it, st, "%s", kv_last_error(e->kv));
    return NOT_TAKEN;
}

/* Takes the first ready item of its task into the batch. */
static enum taken take_item(struct engine *e, struct batch *b, struct item *it)
{
    struct task *t = it->task;
    struct seq_state *s = &e->seqs[it->seq];
    if (s->is_copying) {
        item_defer(e, it);
        return NOT_TAKEN;
    }
    if (t->flags & WIRE_STEP_APPEND) {
        enum taken r = take_append(e, b, it);
        if (r != TAKEN)
            return r;
    }
    item_unready(it);
    t->n_active++;
    s->n_active++;
    it->state = ITEM_ACTIVE;

    const struct backend_pool_config *c = &b->pool->config;
    const struct wire_step_layout *l = &t->layout;
    const uint8_t *in = t->req->wire.payload;
    size_t el = attn_dtype_bytes(c->q_dtype), row = it->row;
    struct kv_seq_info info;
    kv_seq_info(e->kv, (kv_seq_id){it->seq}, &info);
    struct backend_item *d = &b->device_items[b->n_items];
    *d = (struct backend_item){
        .layer = t->layer,
        .table_row = it->seq,
        .pos = it->pos,
        .n_tokens = it->n_tokens,
        .block_table = info.block_table,
    };
    if (t->flags & WIRE_STEP_APPEND) {
        d->flags |= BACKEND_APPEND;
        d->k = in + l->k_offset + row * c->num_kv_heads * c->head_dim_k * el;
        d->v = in + l->v_offset + row * c->num_kv_heads * c->head_dim_v * el;
    }
    if (t->flags & WIRE_STEP_ATTEND) {
        d->flags |= BACKEND_ATTEND;
        b->n_visible += visible_tokens(b->pool, it);
        d->q = in + l->q_offset + row * c->num_q_heads * c->head_dim_k * el;
        d->out = t->payload + l->out_offset + row * c->num_q_heads * c->head_dim_v * el;
    }
    if (t->flags & WIRE_STEP_LSE)
        d->lse = (float *)(void *)(t->payload + l->lse_offset + row * c->num_q_heads * 4);
    b->items[b->n_items++] = it;
    b->n_tokens += it->n_tokens;
    return TAKEN;
}

/* Fills the batch from the pool's ready tasks. true: it is full of patches or copies. */
static bool batch_fill(struct engine *e, struct batch *b, uint64_t now_ns)
{
    uint32_t max_items = e->cfg->max_batch_items, max_tokens = e->cfg->max_batch_tokens;
    uint32_t enough = enough_items(e, b->pool);
    struct task *t;
    while (b->n_items < enough && (t = ready_first(&b->pool->ready)) != NULL) {
        if (t->req->deadline_ns <= now_ns) {
            e->next_deadline_ns = 0;
            tasks_expire(e, now_ns);
            continue;
        }
        bool fits_here =
            t->n_ready <= max_items - b->n_items && t->n_ready_tokens <= max_tokens - b->n_tokens;
        bool fits_empty = t->n_ready <= max_items && t->n_ready_tokens <= max_tokens;
        if (!fits_here && fits_empty)
            return false; /* whole in the next one */
        if (task_reserve_reply(t) != ATTN_OK) {
            task_abort(e, t, ATTN_EOVERLOAD, "no message buffer is left for the reply");
            continue;
        }
        uint32_t n_before = b->n_items;
        enum taken r = TAKEN;
        while (t->n_ready > 0 && r != BATCH_IS_FULL && b->n_items < max_items &&
               t->ready_head->n_tokens <= max_tokens - b->n_tokens)
            r = take_item(e, b, t->ready_head);
        if (b->n_items > n_before) {
            b->n_tasks++;
            t->was_launched = true;
        }
        if (t->n_ready > 0)
            return r == BATCH_IS_FULL;
        ready_remove(&b->pool->ready, t);
        task_settle(e, t);
    }
    return false;
}

static struct pool *oldest_pool(struct engine *e)
{
    struct pool *best = NULL;
    uint64_t best_stamp = UINT64_MAX;
    for (uint32_t i = 0; i < e->n_pools; i++) {
        struct task *t = ready_first(&e->pools[i].ready);
        if (t != NULL && t->stamp < best_stamp) {
            best_stamp = t->stamp;
            best = &e->pools[i];
        }
    }
    return best;
}

static struct batch *batch_begin(struct engine *e, struct pool *p)
{
    struct batch *b = &e->batches[0];
    while (b->is_in_flight)
        b++;
    b->pool = p;
    b->n_items = b->n_tokens = b->n_tasks = 0;
    b->n_visible = 0;
    return b;
}

/* --- the way back ------------------------------------------------------------------------------ */

/* The device may not have seen a failed batch's patches: they are sent again as the table is now. */
static void patch_again(struct engine *e, struct batch *b)
{
    struct kv_effects *fx = &b->pool->fx;
    uint32_t room = e->patches_capacity + e->patches_margin;
    for (uint32_t i = 0; i < b->device.n_patches && fx->n_patches < room; i++) {
        const struct backend_patch *patch = &b->patches[i];
        struct kv_seq_info info;
        kv_seq_info(e->kv, (kv_seq_id){patch->row}, &info);
        if (patch->index < info.n_blocks && info.pool.index == b->pool->id.index)
            fx->patches[fx->n_patches++] =
                (struct kv_patch){patch->row, patch->index, info.block_table[patch->index]};
    }
}

static void batch_done(struct engine *e, struct batch *b, attn_status st, const char *why)
{
    struct kv_effects *fx = &b->pool->fx;
    for (uint32_t i = 0; i < b->n_items; i++) {
        struct item *it = b->items[i];
        struct task *t = it->task;
        if (t->flags & WIRE_STEP_APPEND) {
            kv_seq_id id = {it->seq};
            if (st == ATTN_OK) {
                kv_append_commit(e->kv, id, t->layer, it->pos, it->n_tokens);
            } else {
                fx->patches_capacity = e->patches_capacity + e->patches_margin;
                attn_status cancelled =
                    kv_append_cancel(e->kv, id, t->layer, it->pos, it->n_tokens, fx);
                assert(cancelled == ATTN_OK); /* the margin has room for every copy in flight */
                (void)cancelled;
                fx->patches_capacity = e->patches_capacity;
            }
        }
        item_release(e, it);
        t->n_active--;
        if (st == ATTN_OK)
            item_done(it);
        else
            item_fail(it, st, "%s", why);
        task_settle(e, t);
    }
    e->is_dirty = true;
}

void batch_finish(struct engine *e, struct batch *b)
{
    const struct backend_batch *d = &b->device;
    uint64_t now_ns = e->now_ns();
    b->is_in_flight = false;
    e->n_in_flight--;
    for (uint32_t i = 0; i < e->max_in_flight; i++)
        if (e->batches[i].is_in_flight)
            set_due(e, &e->batches[i], now_ns);
    for (uint32_t i = 0; i < b->n_items; i++) {
        struct request *req = b->items[i]->task->req;
        if (i == 0 || b->items[i - 1]->task->req != req)
            req->device_ns += d->device_ns;
    }
    stats_add(batch_splits, d->n_splits);
    stats_add(kv_read_bytes, d->kv_bytes);
    stats_add(device_ns, d->device_ns);
    if (b->n_tasks > 0) {
        uint64_t old = atomic_load_explicit(&e->task_ns, memory_order_relaxed);
        uint64_t sample = (now_ns - b->submitted_ns) / b->n_tasks;
        atomic_store_explicit(&e->task_ns, old - old / 8 + sample / 8, memory_order_relaxed);
    }

    attn_status st = d->status;
    const char *why = "";
    if (st == ATTN_OK) {
        learn_device_ns(b, d->device_ns);
    } else {
        why = e->ops->last_error(e->backend);
        stats_add(batches_failed, 1);
        log_error("a batch of %" PRIu32 " items failed: %s: %s", b->n_items,
                  attn_status_message(st), why);
        patch_again(e, b);
    }
    batch_done(e, b, st, why);
    if (st == ATTN_EDEVICE)
        engine_fail(e, st, why);
}

/* --- submit ------------------------------------------------------------------------------------ */

/* Hands the batch with its pool's patches and copies to the device. */
static void batch_submit(struct engine *e, struct batch *b)
{
    struct kv_effects *fx = &b->pool->fx;
    for (uint32_t i = 0; i < fx->n_patches; i++)
        b->patches[i] =
            (struct backend_patch){fx->patches[i].row, fx->patches[i].index, fx->patches[i].block};
    for (uint32_t i = 0; i < fx->n_copies; i++)
        b->copies[i] = (struct backend_copy){fx->copies[i].src, fx->copies[i].dst};
    b->device = (struct backend_batch){
        .pool = b->pool->device,
        .items = b->device_items,
        .patches = b->patches,
        .copies = b->copies,
        .n_items = b->n_items,
        .n_patches = fx->n_patches,
        .n_copies = fx->n_copies,
        .user = b,
    };
    b->submitted_ns = e->now_ns();
    for (uint32_t i = 0; i < b->n_items; i++)
        if (b->items[i]->task->req->batched_ns == 0)
            b->items[i]->task->req->batched_ns = b->submitted_ns;

    attn_status st = e->ops->submit(e->backend, &b->device);
    if (st == ATTN_OK) {
        fx->n_patches = fx->n_copies = 0;
        b->is_in_flight = true;
        if (e->n_in_flight++ == 0)
            set_due(e, b, b->submitted_ns);
        stats_add(batches, 1);
        stats_add(batch_items, b->n_items);
        return;
    }
    const char *why = e->ops->last_error(e->backend);
    stats_add(batches_failed, 1);
    log_error("the backend refused a batch of %" PRIu32 " items: %s: %s", b->n_items,
              attn_status_message(st), why);
    fx->n_copies = 0; /* all were of this batch's appends, which are cancelled */
    batch_done(e, b, st, why);
    if (st == ATTN_EDEVICE)
        engine_fail(e, st, why);
}

bool batch_flush_patches(struct engine *e, struct pool *p)
{
    if (e->n_in_flight == e->max_in_flight)
        return false;
    struct batch *b = batch_begin(e, p);
    batch_submit(e, b);
    return b->is_in_flight;
}

bool batch_launch(struct engine *e)
{
    struct pool *p = oldest_pool(e);
    uint64_t now_ns = e->now_ns();
    if (p == NULL || e->n_in_flight == e->max_in_flight || !is_time(e, p, now_ns))
        return false;
    struct batch *b = batch_begin(e, p);
    bool is_full_of_patches = batch_fill(e, b, now_ns);
    if (b->n_items > 0 || (is_full_of_patches && p->fx.n_patches > 0)) {
        batch_submit(e, b);
        return true;
    }
    return !is_full_of_patches;
}
