/* resize.c: gives a pool more or fewer blocks, while none of its batches is in flight and none of
 * its blocks is being moved to or from host memory or another card. Engine thread. */
#include "daemon/engine/pool/resize.h"

#include <assert.h>
#include <inttypes.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>

#include "daemon/base/clock.h"
#include "daemon/base/log.h"
#include "daemon/engine/core/message.h"
#include "daemon/engine/core/peers.h"
#include "daemon/engine/core/pool_table.h"
#include "daemon/engine/core/published.h"
#include "daemon/engine/core/queue.h"
#include "daemon/engine/core/turns.h"
#include "daemon/engine/pool/size.h"
#include "daemon/engine/step/batch.h"
#include "daemon/engine/step/batch_end.h"
#include "daemon/engine/tier/summaries.h"
#include "daemon/engine/tier/tier.h"

#define FAIL(status, ...) (snprintf(why, why_bytes, __VA_ARGS__), (status))

static const uint64_t WAIT_NS = 1000 * 1000;

/* --- waiting ---------------------------------------------------------------------------------- */

static struct batch *batch_of(struct engine *e, const struct pool *p)
{
    for (uint32_t i = 0; i < e->max_in_flight; i++)
        if (e->batches[i].is_in_flight && e->batches[i].pool == p)
            return &e->batches[i];
    return NULL;
}

/* Waits for a batch, or some time. An engine whose inbox is not empty does not sleep while other
 * devices compute. */
static void wait_a_little(struct engine *e)
{
    if (!batch_finish_one(e, WAIT_NS))
        sched_yield();
    batches_watch(e, clock_now_ns());
}

/* Waits until nothing of the pool is in work. */
static attn_status pool_drain(struct engine *e, struct pool *p, char *why, size_t why_bytes)
{
    while (batch_of(e, p) != NULL && engine_health(e) == ATTN_OK)
        wait_a_little(e);
    if (engine_health(e) != ATTN_OK)
        return FAIL(engine_health(e), "the device is lost");
    tier_leave_pool(e, p->id);
    if (peers_move_pool(e, p->id.index))
        return FAIL(ATTN_EOVERLOAD, "pool \"%s\": a sequence of it is on its way to another card",
                    p->spec.wire->name);
    return ATTN_OK;
}

/* Submits the pool's patches and copies; waits until the device takes them. */
static attn_status flush(struct engine *e, struct pool *p, char *why, size_t why_bytes)
{
    while (!batch_flush_patches(e, p)) {
        if (engine_health(e) != ATTN_OK)
            return FAIL(engine_health(e), "the device is lost");
        if (e->n_in_flight + e->n_on_device == 0)
            return FAIL(ATTN_EINTERNAL, "the device refused to copy blocks");
        wait_a_little(e);
    }
    return ATTN_OK;
}

/* --- fewer ------------------------------------------------------------------------------------ */

/* Copies the blocks to be moved; returns when the copies are done. */
static attn_status copy_blocks(struct engine *e, struct pool *p, const struct kv_shrink *s,
                               char *why, size_t why_bytes)
{
    for (uint32_t at = 0, n; at < s->n_copies; at += n) {
        n = s->n_copies - at < e->copies_capacity ? s->n_copies - at : e->copies_capacity;
        memcpy(p->fx.copies, s->copies + at, n * sizeof p->fx.copies[0]);
        p->fx.n_copies = n;
        attn_status st = flush(e, p, why, why_bytes);
        p->fx.n_copies = 0;
        if (st != ATTN_OK)
            return st;
        struct batch *b = batch_of(e, p);
        while (b->is_in_flight && engine_health(e) == ATTN_OK)
            wait_a_little(e);
        if (b->is_in_flight || b->device.status != ATTN_OK)
            return FAIL(ATTN_EDEVICE, "the device failed to copy blocks");
    }
    return ATTN_OK;
}

/* Adds the table updates to the next batches. Pending patches without an owner must not name a
 * removed block. */
static void notify_tables(struct engine *e, struct pool *p, const struct kv_shrink *s)
{
    char why[WHY_BYTES];
    struct kv_effects *fx = &p->fx;
    for (uint32_t i = 0; i < fx->n_patches; i++)
        if (fx->patches[i].block >= s->n_blocks)
            fx->patches[i].block = 0;
    for (uint32_t i = 0; i < s->n_patches; i++) {
        if (fx->n_patches == fx->patches_capacity && flush(e, p, why, sizeof why) != ATTN_OK)
            return;
        fx->patches[fx->n_patches++] = s->patches[i];
    }
    while (batch_of(e, p) != NULL && engine_health(e) == ATTN_OK)
        wait_a_little(e);
}

static attn_status shrink(struct engine *e, struct pool *p, uint32_t n_blocks, uint32_t *out_moved,
                          char *why, size_t why_bytes)
{
    struct kv_shrink s;
    attn_status st = kv_pool_shrink_begin(e->env.kv, p->id, n_blocks, &s);
    if (st != ATTN_OK)
        return FAIL(st, "%s", kv_last_error(e->env.kv));
    st = copy_blocks(e, p, &s, why, why_bytes);
    if (st == ATTN_OK) {
        kv_pool_shrink_end(e->env.kv, &s);
        notify_tables(e, p, &s);
        st = p->ops->pool_resize(p->device, n_blocks, p->config.max_row_blocks);
        if (st != ATTN_OK) /* a successor opens it with the cache's size */
            log_error("pool \"%s\" has fewer blocks than the device knows: %s", p->spec.wire->name,
                      p->ops->last_error(p->backend));
        tenant_give(tenants_of_id(e->env.tenants, p->tenant), TENANT_BLOCKS,
                    p->config.n_blocks - n_blocks);
        st = ATTN_OK;
        *out_moved = s.n_copies;
    }
    kv_shrink_fini(&s);
    return st;
}

/* --- more ------------------------------------------------------------------------------------- */

static attn_status grow(struct engine *e, struct pool *p, uint32_t n_blocks, uint32_t row_blocks,
                        char *why, size_t why_bytes)
{
    struct tenant *who = tenants_of_id(e->env.tenants, p->tenant);
    uint32_t more = n_blocks - p->config.n_blocks, room = kv_pool_room(e->env.kv, p->id);
    uint32_t device_room = p->ops->pool_room(p->device);
    room = device_room < room ? device_room : room;
    if (n_blocks > room)
        return FAIL(ATTN_ENOMEM,
                    "n_blocks is %" PRIu32 ", pool \"%s\" has room for %" PRIu32
                    " where it is: drop pools, or raise device.kv_memory",
                    n_blocks, p->spec.wire->name, room);
    attn_status st = tenant_take(who, TENANT_BLOCKS, more, why, why_bytes);
    if (st != ATTN_OK)
        return st;
    st = p->ops->pool_resize(p->device, n_blocks, row_blocks);
    if (st != ATTN_OK) {
        summaries_forget(p);
        tenant_give(who, TENANT_BLOCKS, more);
        return FAIL(st, "%s", p->ops->last_error(p->backend));
    }
    st = kv_pool_grow(e->env.kv, p->id, n_blocks);
    assert(st == ATTN_OK); /* there is room */
    (void)st;
    seqs_have_room(e);
    return ATTN_OK;
}

/* --- one card, all cards ---------------------------------------------------------------------- */

static uint32_t row_blocks_with(const struct engine *e, const struct pool *p, uint32_t n_blocks)
{
    uint32_t n = pool_row_blocks(e, p, n_blocks);
    return n < p->config.max_row_blocks ? p->config.max_row_blocks : n;
}

void pool_note_size(struct engine *e, struct pool *p, uint32_t n_blocks, uint32_t row_blocks,
                    uint32_t n_moved)
{
    uint32_t had = p->config.n_blocks;
    p->spec.wire->n_blocks = p->config.n_blocks = n_blocks;
    p->config.max_row_blocks = row_blocks;
    e->device_bytes -= p->device_bytes;
    p->device_bytes = p->ops->pool_bytes(p->backend, &p->config);
    e->device_bytes += p->device_bytes;
    tier_resized_pool(e, p->id);
    const bool had_summaries = p->has_summaries_open;
    summaries_forget(p);
    if (had_summaries) /* while their room is there */
        summaries_open(p);
    e->is_dirty = true;
    log_info("pool \"%s\" has %" PRIu32 " blocks, %" PRIu64 " MiB; it had %" PRIu32 ", and %" PRIu32
             " were moved",
             p->spec.wire->name, n_blocks, p->device_bytes >> 20, had, n_moved);
    pools_publish(e);
}

/* Adds the card to the reason. */
static void name_device(const struct engine *e, char *why, size_t why_bytes)
{
    char what[WHY_BYTES];
    snprintf(what, sizeof what, "%s", why);
    snprintf(why, why_bytes, "card %" PRIu32 ": %.220s", e->env.card, what);
}

/* Whether it must wait until the memory of that many blocks is cleared. */
static bool awaits_memory(struct engine *e, const struct pool *p, uint32_t n_blocks)
{
    struct pool next = *p;
    next.config.n_blocks = n_blocks;
    return turns_await_memory(e, &next, false);
}

/* Memory that is not clear yet is cleared meanwhile. */
static attn_status resize_now(struct engine *e, struct pool *p, uint32_t n_blocks, char *why,
                              size_t why_bytes)
{
    uint32_t had = p->config.n_blocks, row_blocks = row_blocks_with(e, p, n_blocks), n_moved = 0;
    if (n_blocks == had)
        return ATTN_OK;
    attn_status st = pool_drain(e, p, why, why_bytes);
    if (st == ATTN_OK)
        st = n_blocks < had ? shrink(e, p, n_blocks, &n_moved, why, why_bytes)
                            : grow(e, p, n_blocks, row_blocks, why, why_bytes);
    if (st == ATTN_OK)
        pool_note_size(e, p, n_blocks, row_blocks, n_moved);
    else if (!is_alone(e) && !pool_spans(e, p)) /* a split pool's backend names the card */
        name_device(e, why, why_bytes);
    return st;
}

static attn_status resize_here(struct engine *e, struct pool *p, uint32_t n_blocks, char *why,
                               size_t why_bytes)
{
    if (n_blocks > p->config.n_blocks && awaits_memory(e, p, n_blocks))
        return FAIL(ATTN_EOVERLOAD, "pool \"%s\": memory is being cleared", p->spec.wire->name);
    return resize_now(e, p, n_blocks, why, why_bytes);
}

struct resize_ask {
    struct peer_ask all; /* first */
    uint32_t index, n_blocks;
    uint32_t had[CONFIG_MAX_DEVICES]; /* previous sizes on cards that have done it */
};

static void resize_there(struct engine *e, void *arg)
{
    struct resize_ask *ask = arg;
    struct pool *p = pool_of_kv(e, (kv_pool_id){ask->index});
    ask->had[e->env.card] = p == NULL ? 0 : p->config.n_blocks;
    if (p != NULL)
        ask->all.status = resize_here(e, p, ask->n_blocks, ask->all.why, ask->all.why_bytes);
}

/* Nobody asks again for what has to be undone, so it does not wait for memory. */
static void resize_back(struct engine *e, void *arg)
{
    const struct resize_ask *ask = arg;
    struct pool *p = pool_of_kv(e, (kv_pool_id){ask->index});
    char why[WHY_BYTES];
    uint32_t had = ask->had[e->env.card];
    if (p != NULL && resize_now(e, p, had, why, sizeof why) != ATTN_OK)
        log_warn("pool \"%s\" has %" PRIu32 " blocks on card %" PRIu32 ", not %" PRIu32,
                 p->spec.wire->name, p->config.n_blocks, e->env.card, had);
}

/* Each device has a pool of its own: resizes all, or none. */
static attn_status resize_all(struct engine *e, struct pool *p, uint32_t n_blocks, char *why,
                              size_t why_bytes)
{
    uint32_t n_done, n_undone;
    char ignored[WHY_BYTES];
    struct resize_ask ask = {.all = {ATTN_OK, why, why_bytes},
                             .index = p->id.index,
                             .n_blocks = n_blocks,
                             .had = {p->config.n_blocks}};
    attn_status st = resize_here(e, p, n_blocks, why, why_bytes);
    if (st != ATTN_OK)
        return st;
    st = engine_call_others(e, peers_n(e), resize_there, &ask.all, &n_done);
    if (st == ATTN_OK)
        return ATTN_OK;
    ask.all.why = ignored;
    ask.all.why_bytes = sizeof ignored;
    engine_call_others(e, n_done, resize_back, &ask.all, &n_undone);
    resize_back(e, &ask);
    return st;
}

attn_status pool_resize(struct engine *e, struct pool *p, uint32_t n_blocks, char *why,
                        size_t why_bytes)
{
    if (n_blocks == 0)
        return FAIL(ATTN_EINVAL, "n_blocks is 0, must be 1 at least");
    if (!pool_spans(e, p))
        return resize_all(e, p, n_blocks, why, why_bytes);
    if (!peers_all_live(e))
        return FAIL(ATTN_EDEVICE, "pool \"%s\" is split over cards, of which one is lost",
                    p->spec.wire->name);
    return resize_here(e, p, n_blocks, why, why_bytes);
}
