/* batch.c: builds batches from ready items and launches them.
 *
 * A batch takes ready tasks of one pool, oldest first: whole if they fit an empty batch, else in
 * parts. Tenants take turns by weighted fair queueing; a tenant's next pool is the one with the
 * oldest task. Appends are reserved in the cache one by one as items enter; table patches and block
 * copies of all reserves go with the batch.
 */
#include "daemon/engine/step/batch.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "cache/kv_append.h"
#include "daemon/base/clock.h"
#include "daemon/base/log.h"
#include "daemon/base/stats.h"
#include "daemon/engine/core/answer.h"
#include "daemon/engine/core/effects.h"
#include "daemon/engine/core/pace.h"
#include "daemon/engine/core/peers.h"
#include "daemon/engine/core/pool_table.h"
#include "daemon/engine/core/queue.h"
#include "daemon/engine/core/ready.h"
#include "daemon/engine/core/sleep.h"
#include "daemon/engine/step/batch_end.h"
#include "daemon/engine/step/canary_watch.h"
#include "daemon/engine/step/early_commit.h"
#include "daemon/engine/tier/demote.h"
#include "daemon/engine/tier/group.h"
#include "daemon/engine/tier/hot.h"
#include "daemon/engine/tier/idle.h"
#include "daemon/engine/tier/promote.h"
#include "kernels/layer_visible.h"

#define CHOSEN_BYTES (BACKEND_MAX_LISTED * sizeof(uint32_t))

attn_status batches_init(struct engine *e)
{
    const struct config *c = e->env.cfg;
    uint32_t n_patches = e->patches_capacity + e->patches_margin;
    e->max_in_flight = e->info.max_in_flight < BACKEND_MAX_IN_FLIGHT ? e->info.max_in_flight
                                                                     : BACKEND_MAX_IN_FLIGHT;
    for (uint32_t i = 0; i < e->max_in_flight; i++) {
        struct batch *b = &e->batches[i];
        b->device_items = calloc(c->max_batch_items, sizeof *b->device_items);
        b->items = calloc(c->max_batch_items, sizeof(struct item *));
        b->signals = calloc(1 + (size_t)c->max_batch_items, sizeof *b->signals);
        b->patches = calloc(n_patches, sizeof *b->patches);
        b->copies = calloc(e->copies_capacity, sizeof *b->copies);
        if (b->device_items == NULL || b->items == NULL || b->signals == NULL ||
            b->patches == NULL || b->copies == NULL)
            return ATTN_ENOMEM;
    }
    if (!is_alone(e))
        e->split = e->peers->ops->split->open(e);
    return !is_alone(e) && e->split == NULL ? ATTN_ENOMEM : ATTN_OK;
}

void batches_fini(struct engine *e)
{
    if (!is_alone(e))
        e->peers->ops->split->close(e->split);
    for (uint32_t i = 0; i < BACKEND_MAX_IN_FLIGHT; i++) {
        struct batch *b = &e->batches[i];
        free(b->device_items);
        free(b->items);
        free(b->signals);
        free(b->patches);
        free(b->copies);
        if (b->chosen != NULL)
            e->env.ops->host_free(e->env.backend, b->chosen, CHOSEN_BYTES);
    }
}

/* --- building --------------------------------------------------------------------------------- */

/* Cached tokens that the item's last query sees, averaged over kv heads; of lists the average. */
static uint32_t visible_tokens(const struct pool *p, const struct item *it)
{
    const struct attn_layer_spec *l = &p->config.layers[it->task->layer];
    uint32_t heads = p->config.num_kv_heads;
    if (it->lists.starts != NULL)
        return backend_listed(&it->lists, it->n_tokens) / it->n_tokens;
    const uint32_t end = it->pos + it->n_tokens, n = it->task->n_chosen;
    if (n > 0 && n < end / p->config.block_tokens)
        return n * p->config.block_tokens;
    const struct backend_item last = {.flags = it->ahead > 0 ? BACKEND_FULL : 0,
                                      .pos = end - 1,
                                      .n_tokens = 1,
                                      .key_base = it->key_base,
                                      .ahead = it->ahead};
    return (uint32_t)(layer_keys_seen(l, &p->config, &last) / heads);
}

enum taken { TAKEN, NOT_TAKEN, BATCH_IS_FULL }; /* not taken: failed or deferred */

/* The most blocks that the item's append can take. */
static uint64_t blocks_wanted(struct engine *e, const struct pool *p, const struct item *it)
{
    struct kv_seq_info info;
    kv_seq_info(e->env.kv, (kv_seq_id){it->seq}, &info);
    uint32_t per_block = p->config.block_tokens;
    uint64_t n = ((uint64_t)it->pos + it->n_tokens + per_block - 1) / per_block;
    uint64_t n_copied = n < info.n_blocks ? n : info.n_blocks;
    n_copied -= it->pos / per_block < n_copied ? it->pos / per_block : n_copied;
    bool copies =
        n_copied > 0 && kv_append_copies(e->env.kv, (kv_seq_id){it->seq}, it->pos, it->n_tokens);
    return (n > info.n_blocks ? n - info.n_blocks : 0) + (copies ? n_copied : 0);
}

/* Fails the item with the cache's last error. */
static enum taken cannot_take(struct engine *e, struct item *it, attn_status st)
{
    item_unready(it);
    item_release(e, it);
    item_fail(it, st, "%s%s", kv_last_error(e->env.kv), st == ATTN_ENOBLOCKS ? MORE_BLOCKS : "");
    return NOT_TAKEN;
}

static attn_status reserve(struct engine *e, const struct item *it, struct kv_effects *fx)
{
    const kv_seq_id id = {it->seq};
    const Attnd__Step *s = it->task->req->wire.header->step;
    return it->nodes == NULL
               ? kv_append_reserve(e->env.kv, id, it->task->layer, it->pos, it->n_tokens, fx)
               : kv_tree_reserve(e->env.kv, id, it->task->layer, it->pos, s->parent + it->row,
                                 it->n_tokens, fx);
}

static struct idle_ask ask_of(const struct batch *b, const struct item *it)
{
    const struct hot_item *h = it->hot;
    return (struct idle_ask){.seq = it->seq,
                             .stamp = it->task->stamp,
                             .is_begun = b->n_items > 0,
                             .needs = h == NULL ? NULL : h->needs,
                             .n_needs = h == NULL ? 0 : h->n_entries};
}

static enum taken take_append(struct engine *e, struct batch *b, struct item *it)
{
    struct pool *p = b->pool;
    struct seq_state *s = &e->seqs[it->seq];
    kv_seq_id id = {it->seq};
    if (s->n_active > 0 && kv_append_copies(e->env.kv, id, it->pos, it->n_tokens)) {
        item_defer(e, it); /* a batch in flight may be reading the table that would change */
        return NOT_TAKEN;
    }
    uint64_t n_wanted =
        e->tier.blocks != NULL || e->idle.by_use != NULL ? blocks_wanted(e, p, it) : 0;
    const struct idle_ask ask = ask_of(b, it);
    if (idle_makes_room(e, p, &ask, n_wanted)) {
        seq_waits_for_room(e, it->seq);
        item_defer(e, it); /* until other sequences have made room */
        return NOT_TAKEN;
    }
    if (e->tier.blocks != NULL && mover_makes_room(e, p, n_wanted)) {
        mover_wait_for_room(e, it->seq);
        item_defer(e, it); /* until blocks were demoted; the batch goes without it */
        return NOT_TAKEN;
    }
    uint32_t n_copies = p->fx.n_copies;
    canary_forget(e, it->seq, it->task->layer, it->pos);
    attn_status st = reserve(e, it, &p->fx);
    if (st == ATTN_EOVERLOAD &&
        (b->n_items > 0 || e->n_in_flight > 0 || p->fx.n_patches + p->fx.n_copies > 0))
        return BATCH_IS_FULL; /* full of patches or copies: these go first */
    if (st == ATTN_OK) {
        s->is_copying = p->fx.n_copies > n_copies;
        return TAKEN;
    }
    if (st == ATTN_ENOBLOCKS && mover_is_bringing(e, p, it->seq)) {
        /* blocks being brought have no owner yet: once here, they can be evicted */
        item_defer(e, it);
        return NOT_TAKEN;
    }
    if (st == ATTN_ENOBLOCKS && peers_read_pool(e, p->id.index)) {
        /* a moving sequence's released blocks are still being read */
        seq_waits_for_room(e, it->seq);
        item_defer(e, it);
        return NOT_TAKEN;
    }
    return cannot_take(e, it, st);
}

/* The item in the backend's form. */
static struct backend_item device_item(struct engine *e, const struct item *it)
{
    const struct task *t = it->task;
    const struct backend_pool_config *c = &t->pool->config;
    const struct wire_step_layout *l = &t->layout;
    const uint8_t *in = t->req->wire.payload;
    size_t el = attn_dtype_bytes(c->q_dtype), row = it->row;
    struct kv_seq_info info;
    kv_seq_info(e->env.kv, (kv_seq_id){it->seq}, &info);
    struct backend_item d = {
        .layer = t->layer,
        .table_row = it->seq,
        .pos = it->pos,
        .n_tokens = it->n_tokens,
        .block_table = info.block_table,
        .nodes = it->nodes,
        .lists = it->lists,
        .n_chosen = t->n_chosen,
        .key_base = it->key_base,
        .ahead = it->ahead,
    };
    if (t->flags & WIRE_STEP_APPEND) {
        d.flags |= BACKEND_APPEND;
        d.k = in + l->k_offset + row * c->num_kv_heads * c->head_dim_k * el;
        if (!c->is_v_in_k)
            d.v = in + l->v_offset + row * c->num_kv_heads * c->head_dim_v * el;
    }
    if (t->flags & WIRE_STEP_ATTEND) {
        d.flags |= BACKEND_ATTEND | (t->flags & WIRE_STEP_FULL ? BACKEND_FULL : 0);
        d.q = in + l->q_offset + row * c->num_q_heads * backend_q_dim(c) * el;
        d.out = t->payload + l->out_offset + row * c->num_q_heads * backend_out_dim(c) * el;
    }
    if (t->flags & WIRE_STEP_LSE)
        d.lse = (float *)(void *)(t->payload + l->lse_offset + row * c->num_q_heads * 4);
    return d;
}

/* TAKEN: the sequence's blocks are on the device. Else the item waits, or failed. */
static enum taken take_blocks(struct engine *e, struct batch *b, struct item *it)
{
    char why[WHY_BYTES];
    const struct idle_ask a = ask_of(b, it);
    switch (idle_brings(e, &a, why, sizeof why)) {
    case IDLE_HERE:
        return TAKEN;
    case IDLE_COMES:
        seq_waits_for_room(e, it->seq);
        item_defer(e, it);
        return NOT_TAKEN;
    case IDLE_NEEDS_PATCHES:
        return BATCH_IS_FULL;
    case IDLE_NEVER:
        break;
    }
    item_unready(it);
    item_release(e, it);
    item_fail(it, ATTN_ENOBLOCKS, "%s", why);
    return NOT_TAKEN;
}

static enum taken no_memory(struct engine *e, struct item *it)
{
    item_unready(it);
    item_release(e, it);
    item_fail(it, ATTN_ENOMEM, "no memory for the blocks that its queries choose");
    return NOT_TAKEN;
}

/* Whether the batch has memory for what the item's queries choose. */
static bool has_chosen(struct engine *e, struct batch *b, const struct item *it)
{
    void *p;
    if (it->hot != NULL && b->chosen == NULL &&
        e->env.ops->host_alloc(e->env.backend, CHOSEN_BYTES, &p) == ATTN_OK)
        b->chosen = p;
    return it->hot == NULL || b->chosen != NULL;
}

/* Takes the item, its task's first ready one, into the batch. */
static enum taken take_item(struct engine *e, struct batch *b, struct item *it)
{
    struct task *t = it->task;
    struct seq_state *s = &e->seqs[it->seq];
    if (s->is_copying) {
        item_defer(e, it);
        return NOT_TAKEN;
    }
    if (hot_prepare(e, it) != ATTN_OK || !has_chosen(e, b, it))
        return no_memory(e, it);
    enum taken r = take_blocks(e, b, it);
    if (r == TAKEN && item_appends(it))
        r = take_append(e, b, it);
    if (r != TAKEN)
        return r;
    if (item_appends(it)) {
        /* reserved */
    } else if (kv_seq_sees(e->env.kv, (kv_seq_id){it->seq}, it->pos + it->ahead) != ATTN_OK) {
        return cannot_take(e, it, ATTN_EINVAL);
    } else if (kv_seq_materialize(e->env.kv, (kv_seq_id){it->seq}, &b->pool->fx) != ATTN_OK) {
        return BATCH_IS_FULL; /* full of patches; an empty batch has room for any table row */
    }
    item_unready(it);
    t->n_active++;
    s->n_active++;
    it->state = ITEM_ACTIVE;
    b->device_items[b->n_items] = device_item(e, it);
    if (it->hot != NULL)
        hot_launch(e, it, b->chosen + b->n_chosen, &b->device_items[b->n_items]);
    b->n_chosen += hot_chosen(it);
    b->items[b->n_items++] = it;
    b->n_tokens += it->n_tokens;
    if (t->flags & WIRE_STEP_ATTEND)
        b->n_visible += visible_tokens(b->pool, it);
    return TAKEN;
}

/* Items of the pool that are ready, and those in flight of its tenant, or of all. */
static uint32_t items_in_work(const struct engine *e, const struct pool *p, bool is_of_all)
{
    uint32_t n = p->ready.n_items;
    for (uint32_t i = 0; i < e->max_in_flight; i++) {
        const struct batch *b = &e->batches[i];
        n += b->is_in_flight && (is_of_all || b->pool->tenant == p->tenant) ? b->n_items : 0;
    }
    return n;
}

/* Whether other tenants have steps, too. */
static bool is_contended(const struct engine *e, const struct pool *p)
{
    const struct tenant *who = batch_payer(e, p);
    return who != NULL && tenants_busy_shares(e->env.tenants) > who->flow.share;
}

/* How many items make this batch full enough. Between tenants, whoever has all in one batch has
 * nothing to send when his turn comes again, and all get the same, whatever their shares. */
static uint32_t enough_items(struct engine *e, const struct pool *p)
{
    if (is_contended(e, p))
        return (items_in_work(e, p, false) + 1) / 2;
    if (e->max_in_flight == 1)
        return UINT32_MAX;
    uint32_t n = items_in_work(e, p, true);
    e->concurrency = pace_concurrency(e->concurrency, n);
    return pace_enough(e->concurrency);
}

/* Fills the batch from the pool's ready tasks. true: it is full of patches or copies. */
static bool batch_fill(struct engine *e, struct batch *b, uint64_t now_ns)
{
    uint32_t max_items = e->env.cfg->max_batch_items, max_tokens = e->env.cfg->max_batch_tokens;
    uint32_t enough = enough_items(e, b->pool);
    bool has_others = e->others_at_ns != 0 && now_ns - e->others_at_ns < PACE_LATELY_NS;
    struct task *t;
    while (b->n_items < enough && !pace_is_long(&b->pool->cost, b->n_visible, has_others) &&
           (t = ready_first(&b->pool->ready)) != NULL) {
        if (t->req->deadline_ns <= now_ns) {
            e->next_deadline_ns = 0;
            tasks_expire(e, now_ns);
            continue;
        }
        bool fits_here =
            t->n_ready <= max_items - b->n_items && t->n_ready_tokens <= max_tokens - b->n_tokens;
        if (t->n_listed > BACKEND_MAX_LISTED - b->n_listed)
            return false; /* it fits an empty batch */
        bool fits_empty = t->n_ready <= max_items && t->n_ready_tokens <= max_tokens;
        if (!fits_here && fits_empty)
            return false; /* the task goes whole into the next batch */
        if (step_reserve_reply(e, t) != ATTN_OK) {
            t->ops->refuse(e, t, ATTN_EOVERLOAD, "no message buffer is left for the reply");
            continue;
        }
        uint32_t n_before = b->n_items;
        enum taken r = TAKEN;
        while (t->n_ready > 0 && r != BATCH_IS_FULL && b->n_items < max_items &&
               TAILQ_FIRST(&t->ready_items)->n_tokens <= max_tokens - b->n_tokens)
            r = take_item(e, b, TAILQ_FIRST(&t->ready_items));
        if (b->n_items > n_before) {
            b->n_tasks++;
            b->n_listed += t->n_listed;
            t->was_launched = true;
        }
        if (t->n_ready > 0)
            return r == BATCH_IS_FULL;
        ready_remove(&b->pool->ready, t);
        step_advance(e, t);
    }
    return false;
}

/* The pool that gets the next batch; NULL: no items are ready. */
static struct pool *next_pool(struct engine *e)
{
    struct pool *best = NULL;
    uint64_t best_start = 0, best_stamp = 0;
    for (struct pool *p = NULL; (p = pool_next(e, p)) != NULL;) {
        const struct task *t = ready_first(&p->ready);
        const struct tenant *who = t != NULL ? batch_payer(e, p) : NULL;
        uint64_t start = who == NULL ? 0 : who->flow.end;
        if (t != NULL && (best == NULL || start < best_start ||
                          (start == best_start && t->stamp < best_stamp))) {
            best_start = start;
            best_stamp = t->stamp;
            best = p;
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
    b->n_listed = b->n_chosen = 0;
    b->is_again = false;
    return b;
}

/* --- submit ----------------------------------------------------------------------------------- */

/* Submits the batch, with its pool's patches and copies, to the device. */
static void batch_submit(struct engine *e, struct batch *b)
{
    struct kv_effects *fx = &b->pool->fx;
    pool_effects_export(e, b->pool, b->patches, b->copies);
    b->device = (struct backend_batch){
        .pool = b->pool->device,
        .items = b->device_items,
        .patches = b->patches,
        .copies = b->copies,
        .n_items = b->is_again ? 1 : b->n_items,
        .n_patches = fx->n_patches,
        .n_copies = fx->n_copies,
        .user = b,
    };
    early_begin(e, b);
    b->submitted_ns = clock_now_ns();
    for (uint32_t i = 0; i < b->n_items; i++)
        if (b->items[i]->task->req->batched_ns == 0)
            b->items[i]->task->req->batched_ns = b->submitted_ns;

    struct tenant *who = batch_payer(e, b->pool);
    b->charged_ns = pace_cost_ns(&b->pool->cost, b->n_visible);
    if (who != NULL)
        flow_charge(&who->flow, &e->flow_clock, b->charged_ns);

    attn_status st = b->pool->ops->submit(b->pool->backend, &b->device);
    e->n_on_device += st == ATTN_OK && !pool_spans(e, b->pool);
    if (st == ATTN_OK) {
        idle_copies_sent(e, b);
        fx->n_patches = fx->n_copies = 0;
        b->is_in_flight = true;
        if (e->n_in_flight == 0)
            e->progress_ns = b->submitted_ns;
        if (e->n_in_flight++ == 0)
            e->due_ns = pace_due_ns(&b->pool->cost, b->n_visible, b->submitted_ns);
        stats_add(batches, 1);
        stats_add(batch_items, b->n_items);
        return;
    }
    const char *why = b->pool->ops->last_error(b->pool->backend);
    stats_add(batches_failed, 1);
    log_error("the backend refused a batch of %" PRIu32 " items: %s: %s", b->n_items,
              attn_status_message(st), why);
    fx->n_copies = 0; /* of this batch's appends, which are cancelled, and of what goes */
    idle_copies_came(e, b, st);
    batch_refused(e, b, st, why);
}

/* Whether the device takes no more batches, or no struct batch is free. */
static bool has_no_place(const struct engine *e)
{
    return e->n_in_flight == e->max_in_flight || e->n_on_device >= e->max_in_flight;
}

bool batch_flush_patches(struct engine *e, struct pool *p)
{
    if (has_no_place(e))
        return false;
    struct batch *b = batch_begin(e, p);
    batch_submit(e, b);
    return b->is_in_flight;
}

bool batch_launch_again(struct engine *e, struct pool *p, const struct backend_item *item,
                        uint64_t n_visible)
{
    if (has_no_place(e))
        return false;
    struct batch *b = batch_begin(e, p);
    b->is_again = true;
    b->device_items[0] = *item;
    b->n_visible = n_visible;
    batch_submit(e, b);
    return b->is_in_flight;
}

/* An idle device gets what is ready; behind a batch in flight, the next goes when it is due, or
 * when its items would fill it. */
static bool is_time(const struct engine *e, const struct pool *p, uint64_t now_ns)
{
    return e->n_in_flight == 0 || now_ns >= e->due_ns ||
           p->ready.n_items >= e->env.cfg->max_batch_items;
}

/* The pool that may have a batch now; NULL: none. */
static struct pool *pool_to_launch(struct engine *e, uint64_t now_ns)
{
    struct pool *p = next_pool(e);
    bool may = p != NULL && !has_no_place(e) && is_time(e, p, now_ns) &&
               atomic_load_explicit(&e->health, memory_order_relaxed) == ATTN_OK;
    return may ? p : NULL;
}

bool batch_waits(struct engine *e, struct tenant **out_payer)
{
    struct pool *p = pool_to_launch(e, clock_now_ns());
    if (p != NULL)
        *out_payer = batch_payer(e, p);
    return p != NULL;
}

bool batch_launch(struct engine *e)
{
    uint64_t now_ns = clock_now_ns();
    struct pool *p = idle_waits_for_batch(e);
    if (p != NULL && batch_flush_patches(e, p))
        return true;
    p = pool_to_launch(e, now_ns);
    if (p == NULL)
        return false;
    struct batch *b = batch_begin(e, p);
    bool is_full_of_patches = batch_fill(e, b, now_ns);
    if (b->n_items > 0 || p->fx.n_copies > 0 || (is_full_of_patches && p->fx.n_patches > 0)) {
        batch_submit(e, b);
        return true;
    }
    return !is_full_of_patches;
}
