/* batch_end.c: ends batches that came back: commits or cancels their appends, charges their tenant,
 * answers tasks that are done. Also detects a hanging device. */
#include "daemon/engine/step/batch_end.h"

#include <inttypes.h>
#include <stdio.h>

#include "cache/kv_append.h"
#include "daemon/base/clock.h"
#include "daemon/base/log.h"
#include "daemon/base/stats.h"
#include "daemon/engine/core/effects.h"
#include "daemon/engine/core/health.h"
#include "daemon/engine/core/pace.h"
#include "daemon/engine/core/peers.h"
#include "daemon/engine/core/pool_table.h"
#include "daemon/engine/core/queue.h"
#include "daemon/engine/core/sleep.h"
#include "daemon/engine/core/status.h"
#include "daemon/engine/core/turns.h"
#include "daemon/engine/step/canary_watch.h"
#include "daemon/engine/step/early_commit.h"
#include "daemon/engine/tier/hot.h"
#include "daemon/engine/tier/idle.h"

struct tenant *batch_payer(const struct engine *e, const struct pool *p)
{
    return tenants_of_id(e->env.tenants, p->tenant);
}

/* Ends every item of a batch that came back or was refused by the backend. */
static void batch_done(struct engine *e, struct batch *b, attn_status st, const char *why)
{
    if (atomic_load_explicit(&e->is_draining, memory_order_relaxed))
        tokens_came(e, clock_now_ns());
    bool is_lost = st == ATTN_EDEVICE && !pool_spans(e, b->pool);
    if (early_is_answered(e, b))
        st = ATTN_OK;
    if (st != ATTN_OK)
        early_end(e, b);
    for (uint32_t i = 0; i < b->n_items; i++) {
        struct item *it = b->items[i];
        struct task *t = it->task;
        bool goes_again = false;
        attn_status is = st;
        if (item_appends(it) && st == ATTN_OK) {
            kv_append_commit(e->env.kv, (kv_seq_id){it->seq}, t->layer, it->pos, it->n_tokens);
            trace_append(&e->seqs[it->seq].trace, it->pos, it->n_tokens);
        } else if (item_appends(it))
            pool_cancel_append(e, b->pool, it);
        if (it->hot != NULL && st == ATTN_OK)
            is = hot_came(e, it, &b->device_items[i], &goes_again);
        if (goes_again)
            item_again(e, it);
        else
            item_release(e, it);
        if (e->seqs[it->seq].n_active == 0)
            kv_seq_free_unseen(e->env.kv, (kv_seq_id){it->seq});
        t->n_active--;
        if (is == ATTN_OK && !goes_again)
            item_done(it);
        else if (!goes_again)
            item_fail(it, is, "%s", is == st ? why : "no memory for the blocks that it chose");
        step_advance(e, t);
    }
    early_end(e, b);
    e->is_dirty = true;
    if (e->idle.by_use != NULL)
        seqs_have_room(e); /* sequences that were in work may make way now */
    if (is_lost)
        device_lose(e, why);
}

/* Replaces what the tenant was charged by what the batch took. */
static void batch_charge_actual(struct engine *e, struct batch *b, uint64_t took_ns)
{
    struct tenant *who = batch_payer(e, b->pool);
    if (e->turns.n > 0)
        turns_note_batch(e, who, took_ns);
    if (who == NULL)
        return;
    flow_settle(&who->flow, b->charged_ns, took_ns);
    if (!tenant_is_operator(who))
        atomic_fetch_add_explicit(&stats.tenants[who->stats].used[STATS_TENANT_DEVICE], took_ns,
                                  memory_order_relaxed);
}

static void card_measure(uint32_t card, const struct batch *b)
{
    stats_card_add(card, STATS_CARD_BATCHES, 1);
    stats_card_add(card, STATS_CARD_ITEMS, b->n_items);
    stats_card_add(card, STATS_CARD_READ, b->device.kv_bytes);
    stats_card_add(card, STATS_CARD_DEVICE, b->device.device_ns);
}

/* Accounts for the batch's time: in its requests, its tenant, the statistics and retry-after. */
static void batch_measure(struct engine *e, struct batch *b, uint64_t now_ns)
{
    const struct backend_batch *d = &b->device;
    /* of two overlapping batches, the later counts from the end of the earlier */
    uint64_t since_ns = b->submitted_ns > e->finished_ns ? b->submitted_ns : e->finished_ns;
    for (uint32_t i = 0; i < b->n_items; i++) {
        struct request *req = b->items[i]->task->req;
        if (i == 0 || b->items[i - 1]->task->req != req)
            req->device_ns += d->device_ns;
        req->done_ns = now_ns;
    }
    stats_add(batch_splits, d->n_splits);
    stats_add(kv_read_bytes, d->kv_bytes);
    stats_add(kv_shared_bytes, d->kv_shared_bytes);
    stats_add(device_ns, d->device_ns);
    if (!is_alone(e))
        card_measure(e->env.card, b);
    if (b->n_tasks > 0) {
        uint64_t last_ns = atomic_load_explicit(&e->task_ns, memory_order_relaxed);
        uint64_t ns = pace_request_ns(last_ns, now_ns - since_ns, b->n_tasks);
        atomic_store_explicit(&e->task_ns, ns, memory_order_relaxed);
    }
    batch_charge_actual(e, b, now_ns - since_ns);
    e->finished_ns = now_ns;
}

static void batch_finish(struct engine *e, struct batch *b)
{
    uint64_t now_ns = clock_now_ns();
    b->is_in_flight = false;
    e->n_in_flight--;
    e->progress_ns = now_ns;
    for (uint32_t i = 0; i < e->max_in_flight; i++) {
        const struct batch *next = &e->batches[i];
        if (next->is_in_flight) /* the device begins it now */
            e->due_ns = pace_due_ns(&next->pool->cost, next->n_visible, now_ns);
    }
    batch_measure(e, b, now_ns);

    attn_status st = b->device.status;
    const char *why = "";
    if (st == ATTN_OK) {
        pace_learn(&b->pool->cost, b->n_visible, b->device.device_ns);
        canary_choose(e, b);
    } else {
        why = b->pool->ops->last_error(b->pool->backend);
        stats_add(batches_failed, 1);
        log_error("a batch of %" PRIu32 " items failed: %s: %s", b->n_items,
                  attn_status_message(st), why);
    }
    if (st != ATTN_OK)
        pool_patch_again(e, b->pool, b->patches, b->device.n_patches);
    if (b->is_again)
        canary_repeated(e, st);
    idle_copies_came(e, b, st);
    batch_done(e, b, st, why);
}

/* false: a shard of a batch of the primary's */
static bool is_own_batch(const struct engine *e, const struct backend_batch *d)
{
    for (uint32_t i = 0; i < e->max_in_flight; i++)
        if (d == &e->batches[i].device)
            return true;
    return false;
}

bool batch_finish_one(struct engine *e, uint64_t wait_ns)
{
    struct backend_batch *d = is_alone(e) ? NULL : e->peers->ops->split->poll(e->split);
    if (d != NULL) {
        batch_finish(e, d->user);
        return true;
    }
    if (e->n_on_device == 0) {
        if (e->n_in_flight > 0 && wait_ns > 0)
            engine_idle(e, wait_ns); /* other cards are computing */
        return false;
    }
    d = e->env.ops->poll(e->env.backend, wait_ns);
    if (d == NULL)
        return false;
    e->n_on_device--;
    if (is_own_batch(e, d))
        batch_finish(e, d->user);
    else
        e->peers->ops->split->done(e->split, d);
    return true;
}

void batches_watch(struct engine *e, uint64_t now_ns)
{
    uint64_t most_ns = config_now(e->env.cfg, stall_timeout_us) * 1000;
    if (e->n_on_device == 0)
        most_ns *= 2; /* another card's device hangs, and that card reports it first */
    if (e->n_in_flight + e->n_on_device == 0 || most_ns == 0 || now_ns < e->progress_ns ||
        now_ns - e->progress_ns < most_ns)
        return;
    char why[WHY_BYTES];
    snprintf(why, sizeof why, "no batch has come back for %" PRIu64 " ms (engine.stall_timeout)",
             most_ns / 1000000);
    device_lose(e, why);
}

void batch_refused(struct engine *e, struct batch *b, attn_status st, const char *why)
{
    batch_charge_actual(e, b, 0);
    batch_done(e, b, st, why);
}
