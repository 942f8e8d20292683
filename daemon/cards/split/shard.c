/* shard.c: carries out a split batch: the primary submits it, each device computes its shard, and
 * outputs are merged when the last is back. */
#include "daemon/cards/split/shard.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/clock.h"
#include "daemon/base/log.h"
#include "daemon/base/stack.h"
#include "daemon/base/stats.h"
#include "daemon/cards/split/outputs.h"
#include "daemon/cards/split/tensors.h"
#include "daemon/engine/core/health.h"
#include "daemon/engine/core/peers.h"
#include "daemon/engine/core/pool_table.h"
#include "daemon/engine/step/batch_end.h"
#include "kernels/grow.h"

enum { MIN_STAGING_BYTES = 64 << 10 };
static const uint64_t INLINE_WAIT_NS = 1000 * 1000;

/* One device's shard of a batch. */
struct shard {
    struct backend_batch device; /* first: shard_done finds the shard by it */
    struct shard *next; /* in the list of its current holder */
    struct split_batch *batch;
    struct split *split; /* the engine that computes it */
    struct shard_tensors tensors;
    uint32_t items_capacity, n_sent; /* n_sent: items that were sent to the device */
    struct backend_extremes extremes; /* of the slice of the batch's joins */
    size_t staging_bytes;
    uint64_t device_ns, kv_bytes, kv_shared_bytes, n_splits; /* sums over all that was sent */
    char why[WHY_BYTES];
};

/* What of a batch is sent; see shard.h. Behind STAGE_APPENDS and STAGE_MAKE a slice is joined. */
enum split_stage { STAGE_ALL, STAGE_APPENDS, STAGE_GIVE, STAGE_MAKE, STAGE_REST };

/* A batch of the primary's on its way over the devices. */
struct split_batch {
    struct backend_batch *whole; /* NULL: free */
    struct backend_pool *pool; /* the primary's, as the next */
    uint32_t pool_index;
    struct shard *shards; /* [devices] */
    struct cards_outputs *outputs; /* split by tokens */
    attn_status outputs_status; /* not ATTN_OK: there is no memory for them, or for joins */
    uint32_t n_out; /* shards that are not back */
    enum split_stage stage;
    bool is_held; /* it waits for one before it to be joined */
    struct extremes_list joins; /* blocks whose extremes are joined between its stages */
    uint32_t slice_at, slice_n; /* those of joins that are joined now */
    /* its number, and that of the pool's oldest batch still out when it was sent */
    uint64_t order, oldest;
    bool has_bells; /* some tensors lie in regions of lanes */
    char why[WHY_BYTES]; /* why it failed */
};

struct split {
    struct engine *engine;
    struct backend heads, tokens;
    LIST_HEAD(, backend_pool) pools;
    _Atomic(struct shard *) in; /* any thread: shards to be computed here */
    struct shard *waiting; /* shards that wait for room on the device */
    /* the primary's */
    _Atomic(struct shard *) back; /* any thread: shards that are computed */
    struct shard *came; /* taken from back, not yet counted */
    uint64_t order; /* of the batch whose shards were sent last */
    struct split_batch batches[BACKEND_MAX_IN_FLIGHT];
};

/* --- life ------------------------------------------------------------------------------------- */

struct split *split_open(struct engine *e)
{
    struct split *s = calloc(1, sizeof *s);
    if (s == NULL)
        return NULL;
    s->engine = e;
    s->heads = (struct backend){.split = s, .how = ATTN_SPLIT_HEADS};
    s->tokens = (struct backend){.split = s, .how = ATTN_SPLIT_TOKENS};
    for (uint32_t i = 0; is_primary(e) && i < BACKEND_MAX_IN_FLIGHT; i++) {
        struct split_batch *b = &s->batches[i];
        b->shards = calloc(e->peers->n, sizeof *b->shards);
        b->outputs = cards_outputs_new();
        if (b->shards == NULL || b->outputs == NULL) {
            split_close(s);
            return NULL;
        }
    }
    return s;
}

static void staging_free(struct shard *h)
{
    if (h->tensors.staging != NULL) {
        struct engine *e = h->split->engine;
        e->env.ops->host_free(e->env.backend, h->tensors.staging, h->staging_bytes);
    }
    h->tensors.staging = NULL;
    h->staging_bytes = 0;
}

void split_pool_add(struct split *s, struct backend_pool *p)
{
    LIST_INSERT_HEAD(&s->pools, p, link);
}

void split_pool_free(struct backend_pool *p)
{
    LIST_REMOVE(p, link);
    extremes_forget_all(&p->extremes);
    pool_split_fini(&p->shard);
    free(p);
}

void split_close(struct split *s)
{
    if (s == NULL)
        return;
    for (uint32_t i = 0; i < BACKEND_MAX_IN_FLIGHT; i++) {
        struct split_batch *b = &s->batches[i];
        for (uint32_t k = 0; b->shards != NULL && k < s->engine->peers->n; k++) {
            staging_free(&b->shards[k]);
            free(b->shards[k].tensors.items);
        }
        free(b->shards);
        free(b->joins.list);
        cards_outputs_free(s->engine, b->outputs);
    }
    while (!LIST_EMPTY(&s->pools))
        split_pool_free(LIST_FIRST(&s->pools));
    free(s);
}

struct engine *split_engine(const struct split *s)
{
    return s->engine;
}

struct backend *split_backend(struct split *s, attn_split how)
{
    return how == ATTN_SPLIT_HEADS ? &s->heads : &s->tokens;
}

/* --- one device's shard ----------------------------------------------------------------------- */

static attn_status staging_grow(struct shard *h, uint64_t bytes)
{
    struct engine *e = h->split->engine;
    size_t size = MIN_STAGING_BYTES;
    void *p;
    if (bytes <= h->staging_bytes)
        return ATTN_OK;
    while (size < bytes)
        size *= 2;
    staging_free(h);
    attn_status st = e->env.ops->host_alloc(e->env.backend, size, &p);
    if (st != ATTN_OK)
        return st;
    h->tensors.staging = p;
    h->staging_bytes = size;
    return ATTN_OK;
}

/* Records why copies of a lane's tensors failed. */
static void copies_say(struct shard *h)
{
    const struct engine *e = h->split->engine;
    if (h->tensors.copied != ATTN_OK)
        snprintf(h->why, sizeof h->why, "tensors of a lane were not copied: %s",
                 e->env.ops->last_error(e->env.backend));
}

/* Makes the device's items and tensors from those of the batch. */
static attn_status shard_scatter(struct shard *h, const struct backend_pool *p)
{
    const struct engine *e = h->split->engine;
    const struct split_batch *b = h->batch;
    struct shard_tensors *t = &h->tensors;
    bool is_heads = p->shard.how == ATTN_SPLIT_HEADS;
    t->split = &p->shard;
    t->config = &p->config;
    t->whole = b->whole->items;
    t->n_whole = b->whole->n_items;
    t->outputs = cards_outputs_of(b->outputs, e->env.card);
    uint32_t n_items = is_heads ? t->n_whole : tokens_items_max(t);
    const uint64_t tensors = is_heads ? heads_staging_bytes(t) : tokens_staging_bytes(t);
    const uint64_t bytes = tensors + b->slice_n * extremes_bytes(t->config);
    attn_status st = array_reserve(&t->items, &h->items_capacity, n_items, sizeof *t->items);
    if (st == ATTN_OK)
        st = staging_grow(h, bytes);
    if (st != ATTN_OK) {
        snprintf(h->why, sizeof h->why, "no host memory for %" PRIu64 " bytes of a split batch",
                 bytes);
        return st;
    }
    h->extremes.bytes = t->staging + tensors;
    t->rows_copy = b->has_bells ? e->env.ops->rows_copy : NULL;
    t->backend = e->env.backend;
    t->copied = ATTN_OK;
    if (is_heads)
        heads_scatter(t);
    else
        tokens_scatter(t);
    copies_say(h);
    return t->copied;
}

/* Returns a shard to the primary: it is computed, or has failed. */
static void shard_return(struct shard *h)
{
    struct engine *primary = peers_at(h->split->engine, 0);
    stack_push(&primary->split->back, h);
    engine_wake(primary);
}

/* This device's shard of the batch's pool; NULL: it has none, or the device is lost. */
static struct backend_pool *pool_here(const struct shard *h)
{
    const struct engine *e = h->split->engine;
    const struct pool *p = pool_of_kv(e, (kv_pool_id){h->batch->pool_index});
    return p == NULL || engine_health(e) != ATTN_OK || !pool_spans(e, p) ? NULL : p->device;
}

static void shard_fail(struct shard *h, attn_status st, const char *why)
{
    const struct split *s = h->split;
    const struct split_batch *b = h->batch;
    struct backend_pool *p = pool_here(h);
    if (why != h->why)
        snprintf(h->why, sizeof h->why, "%s", why);
    if (p != NULL && p->failed < b->order) /* a slow shard may fail after later ones */
        p->failed = b->order;
    h->device.status = st;
    if (b->pool->shard.how == ATTN_SPLIT_TOKENS)
        cards_outputs_fail(b->outputs, s->engine->env.card);
    shard_return(h);
}

/* Between its appends and the rest. */
static bool is_joining(const struct split_batch *b)
{
    return b->stage == STAGE_APPENDS || b->stage == STAGE_GIVE || b->stage == STAGE_MAKE;
}

static bool is_first_stage(const struct split_batch *b)
{
    return b->stage == STAGE_ALL || b->stage == STAGE_APPENDS;
}

/* Items up to here are sent in the batch's stage. */
static uint32_t stage_end(const struct shard *h)
{
    const struct shard_tensors *t = &h->tensors;
    return is_joining(h->batch) ? t->n_appends : t->n_items;
}

/* What follows the stage's last items, or precedes its first. */
static void shard_attach(struct shard *h, uint32_t first)
{
    const struct split_batch *b = h->batch;
    const bool is_last = h->n_sent == stage_end(h);
    const bool gives =
        b->stage == STAGE_GIVE || (b->stage == STAGE_REST && first == h->tensors.n_appends);
    const bool makes = b->stage == STAGE_MAKE || (b->stage == STAGE_APPENDS && is_last);
    if (is_last && !is_joining(b) && b->pool->shard.how == ATTN_SPLIT_TOKENS)
        cards_outputs_attach(b->outputs, h->split->engine->env.card, &h->device);
    if (!gives && !makes)
        return;
    h->extremes.list = b->joins.list + b->slice_at;
    h->extremes.n = b->slice_n;
    h->extremes.is_given = gives;
    h->device.extremes = &h->extremes;
}

/* Sends as many of the stage's items to the device as one batch may have. */
static void shard_send(struct shard *h, const struct backend_pool *p)
{
    struct engine *e = h->split->engine;
    const struct backend_batch *whole = h->batch->whole;
    const struct shard_tensors *t = &h->tensors;
    const bool is_first = h->n_sent == 0 && is_first_stage(h->batch);
    const uint32_t first = h->n_sent, end = stage_end(h);
    uint32_t n = 0, n_tokens = 0;
    while (first + n < end && n < e->env.cfg->max_batch_items &&
           n_tokens + t->items[first + n].n_tokens <= e->env.cfg->max_batch_tokens)
        n_tokens += t->items[first + n++].n_tokens;
    h->n_sent += n;
    h->device = (struct backend_batch){
        .pool = p->device,
        .items = t->items + first,
        .patches = whole->patches,
        .copies = whole->copies,
        .n_items = n,
        .n_patches = is_first ? whole->n_patches : 0,
        .n_copies = is_first ? whole->n_copies : 0,
        .user = h,
    };
    shard_attach(h, first);
    attn_status st = e->env.ops->submit(e->env.backend, &h->device);
    if (st != ATTN_OK) {
        shard_fail(h, st, e->env.ops->last_error(e->env.backend));
        return;
    }
    if (e->n_on_device++ == 0)
        e->progress_ns = clock_now_ns();
}

static void shard_begin(struct shard *h)
{
    const struct split_batch *b = h->batch;
    const struct backend_pool *p = pool_here(h);
    if (is_first_stage(b)) {
        h->n_sent = 0;
        h->device_ns = h->kv_bytes = h->kv_shared_bytes = h->n_splits = 0;
    }
    if (p == NULL) {
        shard_fail(h, ATTN_EDEVICE, "a card with a part of the pool is lost");
        return;
    }
    if (b->outputs_status != ATTN_OK) {
        shard_fail(h, b->outputs_status, "no memory for the outputs or choices of a split batch");
        return;
    }
    if (b->oldest <= p->failed) {
        shard_fail(h, ATTN_EINTERNAL, "a batch before it failed on one of the pool's cards");
        return;
    }
    attn_status st = is_first_stage(b) ? shard_scatter(h, p) : ATTN_OK;
    if (st != ATTN_OK)
        shard_fail(h, st, h->why);
    else
        shard_send(h, p);
}

/* Adds up what the device took for some of the shard's items. */
static void shard_measure(struct shard *h, const struct backend_batch *d)
{
    uint32_t card = h->split->engine->env.card;
    h->device_ns += d->device_ns;
    h->kv_bytes += d->kv_bytes;
    h->kv_shared_bytes += d->kv_shared_bytes;
    h->n_splits += d->n_splits;
    if (card == 0)
        return; /* the primary counts its batches as a whole */
    stats_card_add(card, STATS_CARD_BATCHES, 1);
    stats_card_add(card, STATS_CARD_ITEMS, d->n_items);
    stats_card_add(card, STATS_CARD_READ, d->kv_bytes);
    stats_card_add(card, STATS_CARD_DEVICE, d->device_ns);
}

void shard_done(struct split *s, struct backend_batch *d)
{
    struct shard *h = (struct shard *)(void *)d;
    struct engine *e = s->engine;
    e->progress_ns = clock_now_ns();
    shard_measure(h, d);
    if (d->status != ATTN_OK) {
        const char *why = e->env.ops->last_error(e->env.backend);
        log_error("card %" PRIu32 ": its part of a batch failed: %s", e->env.card, why);
        if (d->status == ATTN_EDEVICE)
            device_lose(e, why);
        shard_fail(h, d->status, why);
        return;
    }
    const struct pool *p = pool_of_kv(e, (kv_pool_id){h->batch->pool_index});
    if (h->n_sent < stage_end(h)) {
        shard_send(h, p->device);
        return;
    }
    if (h->batch->pool->shard.how == ATTN_SPLIT_HEADS)
        heads_gather(&h->tensors);
    copies_say(h);
    if (h->tensors.copied == ATTN_OK)
        shard_return(h);
    else
        shard_fail(h, h->tensors.copied, h->why);
}

bool split_has_work(const struct split *s)
{
    return !stack_is_empty(&s->in) || !stack_is_empty(&s->back);
}

/* Appends the shards that the primary has sent to those that wait. */
static void take_in(struct split *s)
{
    struct shard **last = &s->waiting;
    while (*last != NULL)
        last = &(*last)->next;
    *last = stack_take_all(&s->in);
}

bool shard_launch(struct split *s)
{
    struct engine *e = s->engine;
    if (!stack_is_empty(&s->in))
        take_in(s);
    struct shard *h = s->waiting;
    bool is_full = e->n_on_device >= e->max_in_flight && engine_health(e) == ATTN_OK;
    if (h == NULL || is_full)
        return false;
    s->waiting = h->next;
    e->polled_ns = clock_now_ns(); /* the engine polls for the next one before it sleeps */
    if (h->batch->has_bells)
        e->bell_ns = e->polled_ns;
    shard_begin(h);
    return true;
}

/* --- the primary ------------------------------------------------------------------------------ */

static attn_status outputs_begin(struct split *s, struct split_batch *b)
{
    const struct shard_tensors t = {.split = &b->pool->shard,
                                    .config = &b->pool->config,
                                    .whole = b->whole->items,
                                    .n_whole = b->whole->n_items};
    return cards_outputs_begin(s->engine, b->outputs, &t, s->engine->peers->n, b->order);
}

static bool has_bells(const struct batch *b)
{
    for (uint32_t i = 0; i < b->n_items; i++)
        if (b->items[i]->task->req->bell != NULL)
            return true;
    return false;
}

static struct split_batch *batch_begin(struct split *s, struct backend_batch *whole)
{
    const struct batch *of_engine = whole->user;
    struct split_batch *b = &s->batches[0];
    while (b->whole != NULL)
        b++;
    b->order = b->oldest = ++s->order;
    b->pool = whole->pool;
    for (uint32_t i = 0; i < BACKEND_MAX_IN_FLIGHT; i++) {
        const struct split_batch *other = &s->batches[i];
        if (other->whole != NULL && other->pool == b->pool)
            b->oldest = other->order < b->oldest ? other->order : b->oldest;
    }
    b->whole = whole;
    b->stage = STAGE_ALL;
    b->is_held = true;
    b->pool_index = of_engine->pool->id.index;
    b->n_out = s->engine->peers->n;
    b->has_bells = has_bells(of_engine);
    b->why[0] = '\0';
    b->outputs_status = b->pool->shard.how == ATTN_SPLIT_TOKENS ? outputs_begin(s, b) : ATTN_OK;
    whole->status = ATTN_OK;
    whole->device_ns = whole->kv_bytes = whole->kv_shared_bytes = whole->n_splits = 0;
    return b;
}

/* Computes the shards sent to this engine on the caller's thread: at start, when engines have no
 * threads. */
static void compute_inline(struct engine *e)
{
    while (shard_launch(e->split) || e->n_on_device > 0)
        batch_finish_one(e, INLINE_WAIT_NS);
}

static void shard_give(struct split *s, struct split_batch *b, uint32_t device)
{
    struct shard *h = &b->shards[device];
    struct engine *e = peers_at(s->engine, device);
    h->batch = b;
    h->split = e->split;
    h->device = (struct backend_batch){.status = ATTN_OK};
    h->why[0] = '\0';
    if (e == s->engine) {
        shard_begin(h);
        return;
    }
    stack_push(&e->split->in, h);
    engine_wake(e);
    if (!e->has_thread)
        compute_inline(e);
}

/* The primary's own shard comes last, since it may be computed within the call. */
static void batch_give(struct split *s, struct split_batch *b)
{
    b->n_out = s->engine->peers->n;
    for (uint32_t k = b->n_out; k-- > 0;)
        shard_give(s, b, k);
}

/* The slice is what is left of joins from slice_at on, as far as it goes. */
static void slice_take(struct split_batch *b)
{
    const uint32_t most = extremes_slice(&b->pool->config), left = b->joins.n - b->slice_at;
    b->slice_n = left < most ? left : most;
}

/* Decides in how many stages the batch goes. Not earlier than now: batches before it change what is
 * known of blocks. */
static void batch_plan(struct split_batch *b)
{
    b->is_held = false;
    b->joins.n = b->slice_at = b->slice_n = 0;
    if (b->pool->shard.how != ATTN_SPLIT_TOKENS)
        return;
    attn_status st = extremes_find(&b->pool->extremes, &b->pool->config, b->whole, &b->joins);
    if (b->outputs_status == ATTN_OK)
        b->outputs_status = st;
    if (b->joins.n == 0)
        return;
    b->stage = STAGE_APPENDS;
    slice_take(b);
}

/* The next batch that may go to the devices; NULL: there is none. */
static struct split_batch *next_held(struct split *s)
{
    struct split_batch *next = NULL;
    for (uint32_t i = 0; i < BACKEND_MAX_IN_FLIGHT; i++) {
        struct split_batch *b = &s->batches[i];
        if (b->whole != NULL && !b->is_held && is_joining(b))
            return NULL;
        if (b->whole != NULL && b->is_held && (next == NULL || b->order < next->order))
            next = b;
    }
    return next;
}

static void release(struct split *s)
{
    struct split_batch *b;
    while ((b = next_held(s)) != NULL) {
        batch_plan(b);
        batch_give(s, b);
    }
}

void split_submit(struct split *s, struct backend_batch *whole)
{
    batch_begin(s, whole);
    release(s);
}

/* All devices have made their extremes of the slice: joins them. Returns the next stage. */
static enum split_stage batch_join(const struct split *s, struct split_batch *b)
{
    void *bytes[BACKEND_MAX_PARTS];
    for (uint32_t i = 0; i < s->engine->peers->n; i++)
        bytes[i] = b->shards[i].extremes.bytes;
    extremes_join(&b->pool->config, bytes, s->engine->peers->n, b->slice_n);
    if (b->slice_at + b->slice_n < b->joins.n)
        return STAGE_GIVE;
    extremes_note(&b->pool->extremes, &b->pool->config, &b->joins);
    return STAGE_REST;
}

/* All devices have done a stage: gives them the next. */
static void batch_go_on(struct split *s, struct split_batch *b)
{
    if (b->stage != STAGE_GIVE) {
        b->stage = batch_join(s, b);
    } else {
        b->stage = STAGE_MAKE;
        b->slice_at += b->slice_n;
        slice_take(b);
    }
    batch_give(s, b);
    release(s);
}

/* Adds a shard's result to its batch: status, and behind its last stage times and counts. */
static void shard_count(struct split_batch *b, const struct shard *h)
{
    struct backend_batch *whole = b->whole;
    b->n_out--;
    if (h->device.status != ATTN_OK && whole->status == ATTN_OK) {
        whole->status = h->device.status;
        snprintf(b->why, sizeof b->why, "%s", h->why);
    }
    if (is_joining(b))
        return;
    whole->device_ns = h->device_ns > whole->device_ns ? h->device_ns : whole->device_ns;
    whole->kv_bytes += h->kv_bytes;
    whole->kv_shared_bytes += h->kv_shared_bytes;
    whole->n_splits += (uint32_t)h->n_splits;
}

static struct backend_batch *batch_end(struct split *s, struct split_batch *b)
{
    struct backend_batch *whole = b->whole;
    if (whole->status != ATTN_OK) {
        snprintf(b->pool->backend->why, sizeof b->pool->backend->why, "%s", b->why);
        extremes_forget_all(&b->pool->extremes); /* a device may lack what it was to be given */
    } else if (b->pool->shard.how == ATTN_SPLIT_TOKENS)
        cards_outputs_merge(b->outputs, &b->pool->config);
    b->whole = NULL;
    release(s);
    return whole;
}

struct backend_batch *split_poll(struct split *s)
{
    if (s->came == NULL && !stack_is_empty(&s->back))
        s->came = stack_take_all(&s->back);
    while (s->came != NULL) {
        struct shard *h = s->came;
        s->came = h->next;
        struct split_batch *b = h->batch;
        shard_count(b, h);
        if (b->n_out > 0)
            continue;
        if (!is_joining(b) || b->whole->status != ATTN_OK)
            return batch_end(s, b);
        batch_go_on(s, b);
    }
    return NULL;
}
