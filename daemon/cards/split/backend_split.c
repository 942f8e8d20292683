/* backend_split.c: batches of pools that are split over all cards. Their sequences and block tables
 * are the lead's alone, so a batch is made, committed and answered there as any other; each card's
 * engine computes its part of it on its own device. Blocks have the same numbers on every card.
 *
 * The parts of a batch go to the cards in the order of the lead's batches, and it is done when all
 * are back. One that fails fails the batch: nothing is committed, the step may be repeated. Maybe
 * it has not told its card what it was to tell of block tables and copies. So on that card the
 * batches fail, too, that the lead sent before it knew: what was untold is in later ones.
 */
#include "daemon/cards/split/backend_split.h"

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
#include "kernels/grow.h"

enum { MIN_STAGING_BYTES = 64 << 10 };

/* One card's part of a batch. */
struct batch_part {
    struct backend_batch device; /* first: part_leave finds the part by it */
    struct batch_part *next; /* of who has it in a list */
    struct batch *whole;
    struct engine *engine; /* whose device computes it */
    struct part_tensors tensors;
    uint32_t items_capacity, n_sent; /* of its items, to the device */
    size_t staging_bytes;
    uint64_t device_ns, kv_bytes, n_splits; /* of all that was sent */
    char why[WHY_BYTES];
};

/* --- life ------------------------------------------------------------------------------------- */

attn_status parts_init(struct engine *e)
{
    if (is_alone(e) || !is_primary(e))
        return ATTN_OK;
    for (uint32_t i = 0; i < e->max_in_flight; i++) {
        struct batch *b = &e->batches[i];
        b->parts = calloc(e->peers->n, sizeof *b->parts);
        b->outputs = cards_outputs_new();
        if (b->parts == NULL || b->outputs == NULL)
            return ATTN_ENOMEM;
    }
    return ATTN_OK;
}

static void staging_free(struct batch_part *part)
{
    struct engine *e = part->engine;
    if (part->tensors.staging != NULL)
        e->parts.ops->host_free(e->parts.backend, part->tensors.staging, part->staging_bytes);
    part->tensors.staging = NULL;
    part->staging_bytes = 0;
}

void parts_fini(struct engine *e)
{
    for (uint32_t i = 0; i < BACKEND_MAX_IN_FLIGHT; i++) {
        struct batch *b = &e->batches[i];
        for (uint32_t k = 0; b->parts != NULL && k < e->peers->n; k++) {
            staging_free(&b->parts[k]);
            free(b->parts[k].tensors.items);
        }
        free(b->parts);
        cards_outputs_free(e, b->outputs);
    }
}

/* --- one card's part -------------------------------------------------------------------------- */

static attn_status staging_grow(struct batch_part *part, uint64_t bytes)
{
    struct engine *e = part->engine;
    size_t size = MIN_STAGING_BYTES;
    void *p;
    if (bytes <= part->staging_bytes)
        return ATTN_OK;
    while (size < bytes)
        size *= 2;
    staging_free(part);
    attn_status st = e->parts.ops->host_alloc(e->parts.backend, size, &p);
    if (st != ATTN_OK)
        return st;
    part->tensors.staging = p;
    part->staging_bytes = size;
    return ATTN_OK;
}

/* What went wrong with a lane's tensors. */
static void copies_say(struct batch_part *part)
{
    if (part->tensors.copied != ATTN_OK)
        snprintf(part->why, sizeof part->why, "tensors of a lane were not copied: %s",
                 part->engine->parts.ops->last_error(part->engine->parts.backend));
}

/* The card's items and tensors of the batch. */
static attn_status part_cut(struct batch_part *part, const struct pool *p)
{
    struct part_tensors *t = &part->tensors;
    bool is_heads = p->split.how == ATTN_SPLIT_HEADS;
    t->split = &p->split;
    t->config = &p->config;
    t->whole = part->whole->device_items;
    t->n_whole = part->whole->n_items;
    t->outputs = cards_outputs_of(part->whole->outputs, part->engine->parts.card);
    uint32_t n_items = is_heads ? t->n_whole : tokens_items_max(t);
    uint64_t bytes = is_heads ? heads_staging_bytes(t) : tokens_staging_bytes(t);
    attn_status st = array_reserve(&t->items, &part->items_capacity, n_items, sizeof *t->items);
    if (st == ATTN_OK)
        st = staging_grow(part, bytes);
    if (st != ATTN_OK) {
        snprintf(part->why, sizeof part->why,
                 "no host memory for %" PRIu64 " bytes of a split batch", bytes);
        return st;
    }
    t->rows_copy = part->whole->has_bells ? part->engine->parts.ops->rows_copy : NULL;
    t->backend = part->engine->parts.backend;
    t->copied = ATTN_OK;
    if (is_heads)
        heads_cut(t);
    else
        tokens_cut(t);
    copies_say(part);
    return t->copied;
}

/* Computed, or why not: the lead has it again. */
static void part_return(struct batch_part *part)
{
    struct engine *lead = peers_at(part->engine, 0);
    stack_push(&lead->parts_back, part);
    engine_wake(lead);
}

static void part_fail(struct batch_part *part, attn_status st, const char *why)
{
    if (why != part->why)
        snprintf(part->why, sizeof part->why, "%s", why);
    if (part->engine->part_failed < part->whole->order) /* a slow one may fail after later ones */
        part->engine->part_failed = part->whole->order;
    part->device.status = st;
    if (part->whole->pool->split.how == ATTN_SPLIT_TOKENS)
        cards_outputs_fail(part->whole->outputs, part->engine->parts.card);
    part_return(part);
}

/* Puts as many of its items on this engine's device as a batch may have. */
static void part_send(struct engine *e, struct batch_part *part, const struct pool *p)
{
    const struct batch *b = part->whole;
    const struct part_tensors *t = &part->tensors;
    uint32_t first = part->n_sent, n = 0, n_tokens = 0;
    while (first + n < t->n_items && n < e->parts.cfg->max_batch_items &&
           n_tokens + t->items[first + n].n_tokens <= e->parts.cfg->max_batch_tokens)
        n_tokens += t->items[first + n++].n_tokens;
    part->n_sent += n;
    part->device = (struct backend_batch){
        .pool = p->device,
        .items = t->items + first,
        .patches = b->patches,
        .copies = b->copies,
        .n_items = n,
        .n_patches = first == 0 ? b->device.n_patches : 0,
        .n_copies = first == 0 ? b->device.n_copies : 0,
        .user = part,
    };
    if (part->n_sent == t->n_items && p->split.how == ATTN_SPLIT_TOKENS)
        cards_outputs_attach(b->outputs, e->parts.card, &part->device);
    attn_status st = e->parts.ops->submit(e->parts.backend, &part->device);
    if (st != ATTN_OK) {
        part_fail(part, st, e->parts.ops->last_error(e->parts.backend));
        return;
    }
    if (e->n_on_device++ == 0)
        e->progress_ns = clock_now_ns();
}

static void part_begin(struct engine *e, struct batch_part *part)
{
    const struct pool *p = pool_of_kv(e, part->whole->pool->id);
    part->n_sent = 0;
    part->device_ns = part->kv_bytes = part->n_splits = 0;
    if (engine_health(e) != ATTN_OK || p == NULL) {
        part_fail(part, ATTN_EDEVICE, "a card with a part of the pool is lost");
        return;
    }
    if (part->whole->outputs_status != ATTN_OK) {
        part_fail(part, part->whole->outputs_status, "no memory for the outputs of a split batch");
        return;
    }
    if (part->whole->oldest <= e->part_failed) {
        part_fail(part, ATTN_EINTERNAL, "a batch before it failed on one of the pool's cards");
        return;
    }
    attn_status st = part_cut(part, p);
    if (st != ATTN_OK)
        part_fail(part, st, part->why);
    else
        part_send(e, part, p);
}

/* What the device took for some of its items. */
static void part_measure(struct engine *e, struct batch_part *part, const struct backend_batch *d)
{
    part->device_ns += d->device_ns;
    part->kv_bytes += d->kv_bytes;
    part->n_splits += d->n_splits;
    if (e->parts.card == 0)
        return; /* the lead counts its batches as a whole */
    stats_card_add(e->parts.card, STATS_CARD_BATCHES, 1);
    stats_card_add(e->parts.card, STATS_CARD_ITEMS, d->n_items);
    stats_card_add(e->parts.card, STATS_CARD_READ, d->kv_bytes);
    stats_card_add(e->parts.card, STATS_CARD_DEVICE, d->device_ns);
}

void part_leave(struct engine *e, struct backend_batch *d)
{
    struct batch_part *part = (struct batch_part *)(void *)d;
    const struct pool *p = pool_of_kv(e, part->whole->pool->id);
    e->progress_ns = clock_now_ns();
    part_measure(e, part, d);
    if (d->status != ATTN_OK) {
        const char *why = e->parts.ops->last_error(e->parts.backend);
        log_error("card %" PRIu32 ": its part of a batch failed: %s", e->parts.card, why);
        if (d->status == ATTN_EDEVICE && e->parts.card != 0)
            device_lose(e, why);
        part_fail(part, d->status, why);
    } else if (part->n_sent < part->tensors.n_items) {
        part_send(e, part, p);
    } else {
        if (p->split.how == ATTN_SPLIT_HEADS)
            heads_join(&part->tensors);
        copies_say(part);
        if (part->tensors.copied == ATTN_OK)
            part_return(part);
        else
            part_fail(part, part->tensors.copied, part->why);
    }
}

/* What the lead has sent, behind what waits. */
static void take_in(struct engine *e)
{
    struct batch_part **last = &e->parts_waiting;
    while (*last != NULL)
        last = &(*last)->next;
    *last = stack_take_all(&e->parts_in);
}

bool parts_launch(struct engine *e)
{
    if (!stack_is_empty(&e->parts_in))
        take_in(e);
    struct batch_part *part = e->parts_waiting;
    bool is_full = e->n_on_device >= e->max_in_flight && engine_health(e) == ATTN_OK;
    if (part == NULL || is_full)
        return false;
    e->parts_waiting = part->next;
    e->polled_ns = clock_now_ns(); /* the next one is looked for without sleep for a while */
    if (part->whole->has_bells)
        e->bell_ns = e->polled_ns;
    part_begin(e, part);
    return true;
}

/* --- the lead --------------------------------------------------------------------------------- */

static attn_status outputs_begin(struct engine *e, struct batch *b, uint32_t n)
{
    const struct part_tensors t = {.split = &b->pool->split,
                                   .config = &b->pool->config,
                                   .whole = b->device_items,
                                   .n_whole = b->n_items};
    return cards_outputs_begin(e, b->outputs, &t, n, b->order);
}

void parts_begin(struct engine *e, struct batch *b, uint32_t n)
{
    b->order = b->oldest = ++e->parts_order;
    for (uint32_t i = 0; i < e->max_in_flight; i++) {
        const struct batch *other = &e->batches[i];
        if (other->is_in_flight && pool_is_split(&other->pool->split))
            b->oldest = other->order < b->oldest ? other->order : b->oldest;
    }
    b->n_parts_out = n;
    b->has_bells = false;
    for (uint32_t i = 0; i < b->n_items; i++)
        b->has_bells |= b->items[i]->task->req->bell != NULL;
    b->outputs_status = ATTN_OK;
    if (b->pool->split.how == ATTN_SPLIT_TOKENS)
        b->outputs_status = outputs_begin(e, b, n);
    b->is_own_loss = false;
    b->why[0] = '\0';
    b->device.status = ATTN_OK;
}

void part_give(struct engine *e, struct batch *b, uint32_t card)
{
    struct batch_part *part = &b->parts[card];
    part->whole = b;
    part->engine = peers_at(e, card);
    part->device = (struct backend_batch){.status = ATTN_OK};
    part->why[0] = '\0';
    if (part->engine == e) {
        part_begin(e, part);
        return;
    }
    stack_push(&part->engine->parts_in, part);
    engine_wake(part->engine);
}

/* What a part has to say about its batch. */
static void part_count(const struct engine *e, struct batch *b, const struct batch_part *part)
{
    const struct backend_batch *d = &part->device;
    if (d->status != ATTN_OK && b->device.status == ATTN_OK) {
        b->device.status = d->status;
        snprintf(b->why, sizeof b->why, "%s", part->why);
    }
    b->is_own_loss |= part->engine == e && d->status == ATTN_EDEVICE;
    b->device.device_ns =
        part->device_ns > b->device.device_ns ? part->device_ns : b->device.device_ns;
    b->device.kv_bytes += part->kv_bytes;
    b->device.n_splits += (uint32_t)part->n_splits;
    b->n_parts_out--;
}

struct batch *parts_take_back(struct engine *e)
{
    if (e->parts_came == NULL && !stack_is_empty(&e->parts_back))
        e->parts_came = stack_take_all(&e->parts_back);
    while (e->parts_came != NULL) {
        struct batch_part *part = e->parts_came;
        struct batch *b = part->whole;
        e->parts_came = part->next;
        part_count(e, b, part);
        if (b->n_parts_out > 0)
            continue;
        if (b->device.status == ATTN_OK && b->pool->split.how == ATTN_SPLIT_TOKENS)
            cards_outputs_merge(b->outputs, &b->pool->config);
        return b;
    }
    return NULL;
}
