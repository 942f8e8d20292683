/* canary_watch.c: chooses an item for the canary, copies what it saw, and compares.
 *
 * The copy is consistent: only the engine thread writes to the cache, and copies are made while
 * nothing is in flight. Before each block it checks that the sequence is unchanged: its epoch shows
 * that nothing was truncated, canary_forget that nothing was overwritten. Appends after the item do
 * not matter. What is computed again claims its layer of the sequence, as items do, so nothing is
 * written, closed or dropped meanwhile.
 *
 * Items on lanes are never chosen, nor those in shared memory if there are tenants: there a worker
 * could change q or the output meanwhile, and so cause a false alarm. Nor those that choose blocks
 * by heads that are projected, for which all heads would have to be projected.
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
#include "daemon/engine/core/queue.h"
#include "daemon/engine/tier/hot.h"

enum { MAX_BLOCK_BYTES = 16 << 20 };

/* --- the judge -------------------------------------------------------------------------------- */

/* Where, and what was found there. */
static const char *describe(const struct canary_watch *w, const struct canary_verdict *v, char *out,
                            size_t out_bytes)
{
    char pool[KV_NAME_BYTES + 16];
    snprintf(out, out_bytes,
             "pool=%s sequence=%" PRIu64 " layer=%" PRIu32 " head=%" PRIu32 " pos=%" PRIu32
             " element=%" PRIu32 " got=%.9g expected=%.9g times_the_bound=%.3g",
             log_quote(w->pool_name, pool, sizeof pool), w->name, w->item.layer, v->head,
             w->item.pos, v->element, v->got, v->expected, v->ratio);
    return out;
}

/* The output was beyond its bound, and that is all there is to say. */
static void say_once(const struct canary_watch *w, const char *why)
{
    char what[512];
    stats_add(canary_unrepeated, 1);
    log_limited("outputs wrong once", LOG_LEVEL_WARN, log_event, "canary: an output was wrong once",
                "%s why=\"%s\"", describe(w, &w->verdict, what, sizeof what), why);
}

/* true: it is beyond its bound, for the first time. */
static bool judge(struct canary_watch *w)
{
    struct canary_verdict v;
    char what[512];
    if (canary_judge(&w->item, &v) != ATTN_OK || isnan(v.ratio)) {
        stats_add(canary_skipped, 1);
        return false;
    }
    if (w->is_again && v.ratio <= 1)
        say_once(w, "computed again it is right");
    w->verdict = v;
    if (v.ratio > 1 && !w->is_again)
        return true;
    if (v.ratio > 1)
        health_found_wrong();
    stats_observe_canary(v.ratio);
    if (v.ratio > 1)
        log_limited("wrong outputs", LOG_LEVEL_ERROR, log_event, "canary: an output is wrong", "%s",
                    describe(w, &v, what, sizeof what));
    return false;
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
        bool is_doubted = judge(w);
        if (!is_doubted)
            canary_fini(&w->item);
        atomic_store(&w->state, is_doubted ? CANARY_DOUBTED : CANARY_FREE);
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

uint64_t canary_most_bytes(void)
{
    return MAX_BLOCK_BYTES + (uint64_t)CANARY_MAX_KEYS * 2 * CANARY_MAX_DIM * sizeof(float) +
           CANARY_MAX_WEIGHT_BYTES;
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
    return (it->task->flags & WIRE_STEP_ATTEND) && it->nodes == NULL && it->lists.starts == NULL &&
           (it->task->pool->config.q_nope_dim == 0 || it->task->n_chosen == 0) &&
           it->key_base == 0 && it->ahead == 0 && (it->hot == NULL || !it->hot->is_partial) &&
           req->bell == NULL && !is_shared;
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
                               .is_full = (d->flags & BACKEND_FULL) != 0,
                               .n_chosen = d->n_chosen,
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
    w->is_written = w->is_again = false;
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
    int state = atomic_load_explicit(&w->state, memory_order_relaxed);
    if (state == CANARY_FREE || w->seq != seq || w->item.layer != layer || pos >= w->item.n_keys)
        return;
    w->is_written = true;
    if (state == CANARY_READING)
        give_up(w);
}

const uint32_t *canary_table(struct engine *e, const struct canary_watch *w, struct pool **out_pool)
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

/* --- the second time -------------------------------------------------------------------------- */

static void free_memory(struct canary_watch *w)
{
    if (w->memory != NULL)
        w->pool->ops->host_free(w->pool->backend, w->memory, w->memory_bytes);
    w->memory = NULL;
}

void canary_leave(struct canary_watch *w, const char *why)
{
    say_once(w, why);
    free_memory(w);
    give_up(w);
}

void canary_repeated(struct engine *e, attn_status st)
{
    struct canary_watch *w = e->canary;
    seq_give(e, w->seq, w->item.layer);
    kv_seq_free_unseen(e->env.kv, (kv_seq_id){w->seq});
    if (st != ATTN_OK) {
        canary_leave(w, "the batch that computed it again failed");
        return;
    }
    canary_take_output(&w->item, w->memory + w->out_at, (float *)(void *)(w->memory + w->lse_at));
    free_memory(w);
    w->is_again = true;
    hand_over(w);
}

/* --- the engine's idle turns ------------------------------------------------------------------ */

/* Of pools with projections: the weights of a head. They stay as they are as long as the pool. */
static bool take_weights(struct canary_watch *w, struct pool *p)
{
    struct canary *c = &w->item;
    const uint64_t n = canary_weights_bytes(c);
    void *bytes = malloc(n);
    const bool has =
        bytes != NULL &&
        p->ops->weights_read(p->device, c->layer, canary_weights_at(c), n, bytes) == ATTN_OK;
    if (has)
        canary_take_weights(c, bytes);
    free(bytes);
    return has;
}

bool canary_work(struct engine *e)
{
    struct canary_watch *w = e->canary;
    struct pool *p;
    char why[WHY_BYTES];
    if (atomic_load(&w->state) != CANARY_READING)
        return false;
    const uint32_t *table = canary_table(e, w, &p);
    if (w->block == NULL)
        w->block = malloc(w->block_bytes);
    if (table != NULL && canary_wants_weights(&w->item)) {
        if (!take_weights(w, p))
            give_up(w);
        return true;
    }
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
