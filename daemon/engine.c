/* engine.c: the engine's life, its inbox and its loop.
 *
 * The inbox is a stack that any thread pushes to with one compare-and-swap; the engine takes all of it
 * at once and turns it round. An awake engine costs its producers no system call, a sleeping one
 * (engine_sleep.c) one. While batches are in flight the engine waits inside the backend's poll, a short slice
 * at a time, so that new requests can join the next batch.
 */
#include "daemon/engine.h"

#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/engine_internal.h"
#include "daemon/health.h"
#include "daemon/log.h"

static const uint64_t POLL_SLICE_NS = 50 * 1000;
static const uint64_t POLLED_SLICE_NS = 2 * 1000; /* with pollers that bring work */
static const uint64_t MAX_SLEEP_NS = 500 * 1000 * 1000; /* the heartbeat goes on when idle */
static const uint64_t CLOSE_TIMEOUT_NS = 5ull * 1000 * 1000 * 1000;
enum {
    MIN_BLOCK_BYTES = 4096, /* smaller blocks run out of records before they run out of memory */
    MAX_BLOCKS = 1 << 26,
    MIN_WARM_SEQUENCES = 4096, /* fewer stay in the processor's caches by themselves */
};

/* --- inbox ------------------------------------------------------------------------------------- */

static bool inbox_is_empty(struct engine *e)
{
    return atomic_load(&e->inbox) == NULL;
}

static uint64_t retry_after_us(const struct engine *e)
{
    uint64_t us = atomic_load_explicit(&e->n_held, memory_order_relaxed) *
                  atomic_load_explicit(&e->task_ns, memory_order_relaxed) / 1000;
    return us < 100 ? 100 : us > 1000000 ? 1000000 : us;
}

static void let_go(struct engine *e, uint64_t bytes)
{
    stats_sub(queue_requests, 1);
    stats_sub(queue_bytes, bytes);
    atomic_fetch_sub(&e->held_bytes, bytes);
    atomic_fetch_sub(&e->n_held, 1);
}

void engine_submit(struct engine *e, struct request *req)
{
    uint64_t bytes = req->msg->n_bytes;
    uint32_t max_requests = atomic_load_explicit(&e->max_queue_requests, memory_order_relaxed);
    uint64_t max_bytes = atomic_load_explicit(&e->max_queue_bytes, memory_order_relaxed);
    stats_add(queue_requests, 1);
    stats_add(queue_bytes, bytes);
    uint32_t n = atomic_fetch_add(&e->n_held, 1) + 1;
    uint64_t total = atomic_fetch_add(&e->held_bytes, bytes) + bytes;
    if (n > max_requests || total > max_bytes) {
        stats_add(requests_refused_overload, 1);
        if (n > max_requests)
            request_reply_error(req, ATTN_EOVERLOAD, retry_after_us(e),
                                "%" PRIu32 " requests are queued (max_queue_requests)",
                                max_requests);
        else
            request_reply_error(req, ATTN_EOVERLOAD, retry_after_us(e),
                                "%" PRIu64 " bytes would be queued, %" PRIu64
                                " are allowed (max_queue_bytes)",
                                total, max_bytes);
        let_go(e, bytes);
        return;
    }
    struct request *head = atomic_load_explicit(&e->inbox, memory_order_relaxed);
    do
        req->next = head;
    while (!atomic_compare_exchange_weak(&e->inbox, &head, req));
    engine_wake(e);
}

void engine_answer(struct engine *e, struct request *req, attn_status st)
{
    uint64_t bytes = req->msg->n_bytes;
    request_reply(req, st);
    let_go(e, bytes);
}

void engine_refuse(struct engine *e, struct request *req, attn_status st, const char *format, ...)
{
    uint64_t bytes = req->msg->n_bytes;
    char why[2 * WHY_BYTES];
    va_list args;
    va_start(args, format);
    vsnprintf(why, sizeof why, format, args);
    va_end(args);
    request_reply_error(req, st, attn_status_is_retryable(st) ? retry_after_us(e) : 0, "%s", why);
    let_go(e, bytes);
}

/* --- the loop ---------------------------------------------------------------------------------- */

static void abort_all(struct engine *e, attn_status st, const char *why)
{
    for (struct task *t = e->oldest, *next; t != NULL; t = next) {
        next = t->next;
        if (t->n_done + t->n_active < t->n_items)
            task_abort(e, t, st, why);
    }
    seqs_wake(e);
}

void engine_fail(struct engine *e, attn_status st, const char *what)
{
    if (atomic_exchange(&e->health, st) != ATTN_OK)
        return;
    log_error("device lost: %s", what);
    abort_all(e, st, "the device is lost");
}

static void take_request(struct engine *e, struct request *req, uint64_t now_ns)
{
    bool is_step = req->wire.header->body_case == ATTND__REQUEST__BODY_STEP;
    attn_status health = engine_health(e);
    if (atomic_load_explicit(&e->is_stopping, memory_order_relaxed))
        engine_refuse(e, req, ATTN_EDRAINING, "the daemon is stopping");
    else if (req->deadline_ns <= now_ns)
        engine_refuse(e, req, ATTN_EDEADLINE, "%" PRIu64 " us passed before the engine saw it",
                      (now_ns - req->received_ns) / 1000);
    else if (is_step && health != ATTN_OK)
        engine_refuse(e, req, health, "the device is lost");
    else if (is_step)
        step_admit(e, req, now_ns);
    else
        control_admit(e, req, now_ns);
}

static bool take_inbox(struct engine *e, uint64_t now_ns)
{
    struct request *newest = atomic_exchange(&e->inbox, NULL), *oldest = NULL;
    while (newest != NULL) {
        struct request *next = newest->next;
        newest->next = oldest;
        oldest = newest;
        newest = next;
    }
    bool has_any = oldest != NULL;
    bool is_large = stats_get(sequences) >= MIN_WARM_SEQUENCES;
    struct request *cold = oldest; /* the first one that was not warmed */
    while (oldest != NULL) {
        struct request *next = oldest->next;
        if (is_large && oldest == cold)
            cold = steps_warm(e, oldest);
        take_request(e, oldest, now_ns);
        oldest = next;
    }
    return has_any;
}

static void publish_gauges(struct engine *e)
{
    struct kv_stats s;
    kv_stats_read(e->kv, &s);
    stats_set(sequences, s.sequences);
    stats_set(blocks_total, s.blocks_total);
    stats_set(blocks_free, s.blocks_free);
    stats_set(blocks_used, s.blocks_used);
    stats_set(blocks_shared, s.blocks_shared);
    stats_set(sessions, session_count(e->sessions));
    e->is_dirty = false;
}

static uint64_t idle_ns(const struct engine *e, uint64_t now_ns, uint64_t max_wait_ns)
{
    uint64_t expiry_ns = session_next_expiry_ns(e->sessions, e->lease_ns);
    uint64_t until_ns = expiry_ns <= now_ns ? 0 : expiry_ns - now_ns;
    return until_ns < max_wait_ns ? until_ns : max_wait_ns;
}

static struct batch *poll_batch(struct engine *e, uint64_t wait_ns)
{
    struct backend_batch *d = e->n_in_flight == 0 ? NULL : e->ops->poll(e->backend, wait_ns);
    return d == NULL ? NULL : d->user;
}

bool engine_turn(struct engine *e, uint64_t max_wait_ns)
{
    uint64_t now_ns = e->turn_ns = e->now_ns();
    health_beat(HEALTH_ENGINE);
    bool is_busy = engine_poll_pollers(e);
    is_busy |= take_inbox(e, now_ns);
    tasks_expire(e, now_ns);
    is_busy |= sessions_expire(e, now_ns);
    do
        seqs_wake(e);
    while (batch_launch(e));

    if (e->is_dirty)
        publish_gauges(e);
    if (e->n_in_flight > 0) {
        uint64_t slice_ns = engine_is_polled(e) ? POLLED_SLICE_NS : POLL_SLICE_NS;
        uint64_t wait_ns = max_wait_ns < slice_ns ? max_wait_ns : slice_ns;
        if (e->due_ns > now_ns && e->due_ns - now_ns < wait_ns)
            wait_ns = e->due_ns - now_ns;
        struct batch *b = poll_batch(e, is_busy || !inbox_is_empty(e) ? 0 : wait_ns);
        while (b != NULL) {
            batch_finish(e, b);
            is_busy = true;
            b = poll_batch(e, 0);
        }
    } else if (!is_busy && max_wait_ns > 0) {
        uint64_t wait_ns = idle_ns(e, now_ns, max_wait_ns);
        if (wait_ns > 0)
            engine_idle(e, wait_ns);
    }
    return is_busy;
}

/* Gives every batch the time to come back. */
static attn_status wait_for_batches(struct engine *e)
{
    uint64_t start_ns = stats_now_ns();
    while (e->n_in_flight > 0) {
        struct batch *b = poll_batch(e, POLL_SLICE_NS);
        if (b != NULL)
            batch_finish(e, b);
        else if (stats_now_ns() - start_ns > CLOSE_TIMEOUT_NS)
            return ATTN_ETIMEDOUT;
    }
    return ATTN_OK;
}

static attn_status engine_finish(struct engine *e)
{
    take_inbox(e, e->now_ns());
    abort_all(e, ATTN_EDRAINING, "the daemon is stopping");
    attn_status st = wait_for_batches(e);
    seqs_wake(e);
    abort_all(e, ATTN_EDRAINING, "the daemon is stopping");
    return st;
}

static void *engine_main(void *arg)
{
    struct engine *e = arg;
    while (!atomic_load(&e->is_stopping))
        engine_turn(e, MAX_SLEEP_NS);
    return (void *)(intptr_t)engine_finish(e);
}

/* --- life -------------------------------------------------------------------------------------- */

void engine_reload(struct engine *e, const struct config *cfg)
{
    atomic_store(&e->max_queue_requests, cfg->max_queue_requests);
    atomic_store(&e->max_queue_bytes, cfg->max_queue_bytes);
}

void engine_drain(struct engine *e)
{
    atomic_store(&e->is_draining, true);
    health_set_draining(true);
}

bool engine_is_draining(const struct engine *e)
{
    return atomic_load(&e->is_draining);
}

bool engine_is_drained(const struct engine *e)
{
    return atomic_load(&e->is_draining) && atomic_load(&e->n_held) == 0;
}

attn_status engine_health(const struct engine *e)
{
    return (attn_status)atomic_load_explicit(&e->health, memory_order_relaxed);
}

static void engine_free(struct engine *e)
{
    if (e->pools != NULL) {
        for (uint32_t i = 0; i < e->n_pools; i++) {
            pool_spec_fini(&e->pools[i].spec);
            pool_effects_fini(&e->pools[i]);
        }
    }
    batches_fini(e);
    engine_sleep_fini(e);
    session_table_close(e->sessions);
    kv_close(e->kv);
    free(e->pools);
    free(e->seqs);
    free(e->wake_list);
    free(e);
}

static attn_status open_tables(struct engine *e, char *why, size_t why_bytes)
{
    const struct config *c = e->cfg;
    uint64_t n_blocks = e->info.kv_bytes / MIN_BLOCK_BYTES;
    e->n_blocks = n_blocks > MAX_BLOCKS ? MAX_BLOCKS : n_blocks < 64 ? 64 : (uint32_t)n_blocks;
    struct kv_config kc = {
        .max_pools = c->max_pools,
        .max_blocks = e->n_blocks,
        .max_sequences = c->max_sequences,
        .max_seq_blocks = c->max_seq_tokens / 8 + 1,
        .max_layers = c->max_layers,
        .max_owners = c->max_sessions,
    };
    attn_status st = kv_open(&kc, -1, &e->kv, why, why_bytes);
    if (st != ATTN_OK)
        return st;
    e->seqs = calloc(c->max_sequences, sizeof *e->seqs);
    e->wake_list = calloc(c->max_sequences, sizeof *e->wake_list);
    e->pools = calloc(c->max_pools, sizeof *e->pools);
    st = session_table_open(c->max_sessions, &e->sessions);
    if (st == ATTN_OK)
        st = batches_init(e);
    if (st == ATTN_OK && (e->seqs == NULL || e->wake_list == NULL || e->pools == NULL))
        st = ATTN_ENOMEM;
    if (st != ATTN_OK)
        snprintf(why, why_bytes,
                 "no memory for the engine's tables (max_sequences %" PRIu32
                 ", max_batch_items %" PRIu32 ")",
                 c->max_sequences, c->max_batch_items);
    return st;
}

attn_status engine_open_with_clock(const struct config *cfg, const struct backend_ops *ops,
                                   struct backend *b, struct iobuf_pool *bufs,
                                   uint64_t (*now_ns)(void), bool has_thread,
                                   struct engine **out_engine, char *why, size_t why_bytes)
{
    struct engine *e = calloc(1, sizeof *e);
    if (e == NULL) {
        snprintf(why, why_bytes, "no memory for the engine");
        return ATTN_ENOMEM;
    }
    e->cfg = cfg;
    e->ops = ops;
    e->backend = b;
    e->bufs = bufs;
    e->now_ns = now_ns;
    e->lease_ns = cfg->lease_us * 1000;
    e->next_stamp = 1;
    e->epoll_fd = e->wake_fd = -1;
    e->next_deadline_ns = UINT64_MAX;
    ops->info(b, &e->info);
    engine_reload(e, cfg);
    attn_status st = open_tables(e, why, why_bytes);
    if (st != ATTN_OK)
        goto fail;
    st = engine_sleep_init(e);
    if (st != ATTN_OK) {
        snprintf(why, why_bytes, "no descriptors for the engine: %s", strerror(errno));
        goto fail;
    }
    publish_gauges(e);
    if (has_thread) {
        int err = pthread_create(&e->thread, NULL, engine_main, e);
        if (err != 0) {
            snprintf(why, why_bytes, "the engine's thread can't be started: %s", strerror(err));
            st = ATTN_ENOMEM;
            goto fail;
        }
        e->has_thread = true;
    }
    *out_engine = e;
    return ATTN_OK;
fail:
    engine_free(e);
    return st;
}

attn_status engine_open(const struct config *cfg, const struct backend_ops *ops, struct backend *b,
                        struct iobuf_pool *bufs, struct engine **out_engine, char *why,
                        size_t why_bytes)
{
    return engine_open_with_clock(cfg, ops, b, bufs, stats_now_ns, true, out_engine, why,
                                  why_bytes);
}

attn_status engine_close(struct engine *e)
{
    if (e == NULL)
        return ATTN_OK;
    void *result = NULL;
    atomic_store(&e->is_stopping, true);
    engine_wake(e);
    if (e->has_thread)
        pthread_join(e->thread, &result);
    else
        result = (void *)(intptr_t)engine_finish(e);
    health_end(HEALTH_ENGINE);
    attn_status st = (attn_status)(intptr_t)result;
    if (st == ATTN_OK)
        engine_free(e);
    return st;
}
