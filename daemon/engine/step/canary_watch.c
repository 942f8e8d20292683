/* canary_watch.c: chooses an item for the canary, copies what it saw, and compares.
 *
 * The copy is consistent: only the engine thread writes to the cache, and copies are made while
 * nothing is in flight. Before each block it checks that the sequence is unchanged: its epoch shows
 * that nothing was truncated, canary_forget that nothing was overwritten. Appends after the item do
 * not matter.
 *
 * Items on lanes are never chosen, nor those in shared memory if there are tenants: there a worker
 * could change q or the output meanwhile, and so cause a false alarm.
 */
#define _GNU_SOURCE /* pthread_setname_np */
#include "daemon/engine/step/canary_watch.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "cache/kv_append.h"
#include "daemon/base/health.h"
#include "daemon/base/log.h"
#include "daemon/base/stats.h"
#include "daemon/engine/core/effects.h"
#include "daemon/engine/core/pool_table.h"

enum { MAX_BLOCK_BYTES = 64 << 20 };

static const char *who_is(const struct canary_watch *w, char *out, size_t out_bytes)
{
    snprintf(out, out_bytes, "sequence=%" PRIu64 " layer=%" PRIu32 " head=%" PRIu32 " pos=%" PRIu32,
             w->name, w->item.layer, w->item.head, w->item.pos);
    return out;
}

/* --- the judge -------------------------------------------------------------------------------- */

static void judge(struct canary_watch *w)
{
    struct canary_verdict v;
    char who[128], pool[KV_NAME_BYTES + 16];
    if (canary_judge(&w->item, &v) != ATTN_OK || isnan(v.ratio)) {
        stats_add(canary_skipped, 1);
        return;
    }
    if (v.ratio > 1)
        health_found_wrong();
    stats_observe_canary(v.ratio);
    if (v.ratio <= 1)
        return;
    log_limited("wrong outputs", LOG_LEVEL_ERROR, log_event, "canary: an output is wrong",
                "pool=%s %s element=%" PRIu32 " got=%.9g expected=%.9g times_the_bound=%.3g",
                log_quote(w->pool_name, pool, sizeof pool), who_is(w, who, sizeof who), v.element,
                v.got, v.expected, v.ratio);
}

static void *judge_main(void *arg)
{
    struct canary_watch *w = arg;
    pthread_setname_np(pthread_self(), "attnd-canary");
    pthread_mutex_lock(&w->lock);
    while (!w->is_ending) {
        if (atomic_load(&w->state) != CANARY_JUDGING) {
            pthread_cond_wait(&w->wake, &w->lock);
            continue;
        }
        pthread_mutex_unlock(&w->lock);
        judge(w);
        canary_fini(&w->item);
        atomic_store(&w->state, CANARY_FREE);
        pthread_mutex_lock(&w->lock);
    }
    pthread_mutex_unlock(&w->lock);
    return NULL;
}

/* Wakes the judging thread; creates it at the first call. */
static void hand_over(struct canary_watch *w)
{
    if (!w->has_thread) {
        pthread_mutex_init(&w->lock, NULL);
        pthread_cond_init(&w->wake, NULL);
        w->has_thread = pthread_create(&w->thread, NULL, judge_main, w) == 0;
    }
    pthread_mutex_lock(&w->lock);
    atomic_store(&w->state, CANARY_JUDGING);
    pthread_cond_signal(&w->wake);
    pthread_mutex_unlock(&w->lock);
}

attn_status canary_open(struct engine *e)
{
    e->canary = calloc(1, sizeof *e->canary);
    return e->canary != NULL ? ATTN_OK : ATTN_ENOMEM;
}

void canary_close(struct engine *e)
{
    struct canary_watch *w = e->canary;
    if (w == NULL)
        return;
    if (w->has_thread) {
        pthread_mutex_lock(&w->lock);
        w->is_ending = true;
        pthread_cond_signal(&w->wake);
        pthread_mutex_unlock(&w->lock);
        pthread_join(w->thread, NULL);
    }
    canary_fini(&w->item);
    free(w->block);
    free(w);
}

/* --- the engine thread ------------------------------------------------------------------------ */

static void give_up(struct canary_watch *w)
{
    canary_fini(&w->item);
    free(w->block);
    w->block = NULL;
    atomic_store(&w->state, CANARY_FREE);
    stats_add(canary_skipped, 1);
}

static bool is_suitable(const struct engine *e, const struct item *it)
{
    const struct request *req = it->task->req;
    bool is_shared = req->transport->label == STATS_SHM && e->env.tenants != NULL;
    return (it->task->flags & WIRE_STEP_ATTEND) && req->bell == NULL && !is_shared;
}

/* Blocks that a window has let go may be written to by a move at this moment. */
static void skip_unseen(struct canary_watch *w)
{
    while (w->n_taken < w->item.n_blocks && !canary_sees_block(&w->item, w->n_taken))
        w->n_taken++;
}

static void choose(struct engine *e, const struct batch *b, uint32_t i)
{
    struct canary_watch *w = e->canary;
    const struct item *it = b->items[i];
    const struct backend_item *d = &b->device_items[i];
    struct canary_item item = {.config = &b->pool->config,
                               .layer = d->layer,
                               .pos = d->pos,
                               .n_tokens = d->n_tokens,
                               .q = d->q,
                               .out = d->out,
                               .lse = d->lse};
    struct kv_seq_info info;
    w->chance = w->chance * 6364136223846793005u + 1442695040888963407u + e->boot_id;
    w->block_bytes = kv_layout_of(item.config).block_bytes;
    if (w->block_bytes > MAX_BLOCK_BYTES ||
        canary_init(&w->item, &item, w->chance ^ w->chance >> 29) != ATTN_OK) {
        stats_add(canary_skipped, 1);
        return;
    }
    kv_seq_info(e->env.kv, (kv_seq_id){it->seq}, &info);
    w->seq = it->seq;
    w->name = info.name;
    w->tenant = info.tenant;
    w->epoch = info.epoch;
    w->n_taken = 0;
    skip_unseen(w);
    snprintf(w->pool_name, sizeof w->pool_name, "%s", b->pool->spec.wire->name);
    atomic_store(&w->state, CANARY_READING);
}

void canary_choose(struct engine *e, const struct batch *b)
{
    struct canary_watch *w = e->canary;
    uint32_t one_in = atomic_load_explicit(&e->canary_one_in, memory_order_relaxed);
    if (one_in == 0 || b->n_items == 0)
        return;
    w->n_since += b->n_items;
    if (w->n_since < one_in)
        return;
    if (atomic_load(&w->state) != CANARY_FREE) {
        stats_add(canary_skipped, w->n_since / one_in);
        w->n_since %= one_in;
        return;
    }
    uint32_t first = (uint32_t)(w->chance % b->n_items);
    for (uint32_t n = 0; n < b->n_items; n++) {
        uint32_t i = (first + n) % b->n_items;
        if (!is_suitable(e, b->items[i]))
            continue;
        w->n_since %= one_in;
        choose(e, b, i);
        return;
    }
}

void canary_forget(struct engine *e, uint32_t seq, uint32_t layer, uint32_t pos)
{
    struct canary_watch *w = e->canary;
    if (atomic_load_explicit(&w->state, memory_order_relaxed) == CANARY_READING && w->seq == seq &&
        w->item.layer == layer && pos < w->item.n_keys)
        give_up(w);
}

/* The sequence's block table; NULL: the sequence has changed since the item. */
static const uint32_t *table_of(struct engine *e, const struct canary_watch *w,
                                struct pool **out_pool)
{
    struct kv_seq_info info;
    kv_seq_id seq;
    if (kv_seq_find(e->env.kv, w->tenant, w->name, &seq) != ATTN_OK || seq.index != w->seq)
        return NULL;
    kv_seq_info(e->env.kv, seq, &info);
    *out_pool = pool_of_kv(e, info.pool);
    if (info.epoch != w->epoch || info.n_paged_out > 0 || *out_pool == NULL ||
        info.n_blocks < w->item.n_blocks || kv_seq_sees(e->env.kv, seq, w->item.pos) != ATTN_OK)
        return NULL;
    return info.block_table;
}

bool canary_work(struct engine *e)
{
    struct canary_watch *w = e->canary;
    struct pool *p;
    char why[WHY_BYTES];
    if (atomic_load_explicit(&w->state, memory_order_relaxed) != CANARY_READING)
        return false;
    const uint32_t *table = table_of(e, w, &p);
    if (w->block == NULL)
        w->block = malloc(w->block_bytes);
    if (table == NULL || w->block == NULL ||
        pool_block_read(p, table[w->n_taken], w->block, why, sizeof why) != ATTN_OK) {
        give_up(w);
        return true;
    }
    canary_take_block(&w->item, w->n_taken++, w->block);
    skip_unseen(w);
    if (w->n_taken == w->item.n_blocks) {
        free(w->block);
        w->block = NULL;
        hand_over(w);
    }
    return true;
}
