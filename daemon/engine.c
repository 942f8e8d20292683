/* engine.c: the engine's life, its inbox and its loop.
 *
 * The inbox is a stack that any thread pushes to; the engine takes all of it at once. An awake
 * engine costs its producers no system call, a sleeping one (engine_sleep.c) one. While batches are
 * in flight the engine waits inside the backend's poll, a short slice at a time, so that new
 * requests can join the next batch.
 */
#include "daemon/engine.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "daemon/cards.h"
#include "daemon/clock.h"
#include "daemon/engine_answer.h"
#include "daemon/engine_batch.h"
#include "daemon/engine_canary.h"
#include "daemon/engine_control.h"
#include "daemon/engine_operator.h"
#include "daemon/engine_pace.h"
#include "daemon/engine_plan.h"
#include "daemon/engine_pool.h"
#include "daemon/engine_queue.h"
#include "daemon/engine_session.h"
#include "daemon/engine_sleep.h"
#include "daemon/engine_status.h"
#include "daemon/engine_step.h"
#include "daemon/engine_tenants.h"
#include "daemon/engine_tier.h"
#include "daemon/health.h"
#include "daemon/log.h"
#include "daemon/stack.h"
#include "daemon/stats.h"
#include "kernels/kv_layout.h"

static const uint64_t POLL_SLICE_NS = 50 * 1000;
static const uint64_t POLLED_SLICE_NS = 2 * 1000; /* with pollers that bring work */
static const uint64_t MAX_SLEEP_NS = 500 * 1000 * 1000; /* the heartbeat goes on when idle */
static const uint64_t POOLS_EVERY_NS = 100 * 1000 * 1000;
static const uint64_t CLOSE_TIMEOUT_NS = 5ull * 1000 * 1000 * 1000;
static const uint64_t LOST_CLOSE_TIMEOUT_NS = 200 * 1000 * 1000; /* of a lost device */
enum {
    MIN_BLOCK_BYTES = 4096, /* smaller blocks run out of records before they run out of memory */
    MAX_BLOCKS = 1 << 26,
    MIN_BLOCKS = 64,
    MAX_BLOCK_TOKENS = 256, /* of a pool; protocol.md */
    MIN_WARM_SEQUENCES = 4096, /* fewer stay in the processor's caches by themselves */
};

/* --- inbox ------------------------------------------------------------------------------------ */

void engine_renew(struct engine *e, uint64_t session)
{
    session_touch(e->parts.sessions, session, clock_now_ns());
}

/* Why the queue, or what one holder may have of it, is full; NULL: the request is counted there. */
static const char *queue_fault(struct engine *e, struct request *req, uint32_t n, uint64_t total,
                               char why[SHARE_TEXT_BYTES])
{
    uint32_t max_requests = atomic_load_explicit(&e->max_queue_requests, memory_order_relaxed);
    uint64_t max_bytes = atomic_load_explicit(&e->max_queue_bytes, memory_order_relaxed);
    uint64_t bytes = req->msg->n_bytes;
    if (n > max_requests) {
        snprintf(why, SHARE_TEXT_BYTES,
                 "%" PRIu32 " requests are queued (engine.max_queue_requests)", max_requests);
        return why;
    }
    if (total > max_bytes) {
        snprintf(why, SHARE_TEXT_BYTES,
                 "%" PRIu64 " bytes would be queued, %" PRIu64 " are allowed (engine.max_queue)",
                 total, max_bytes);
        return why;
    }
    uint64_t task_ns = atomic_load_explicit(&e->task_ns, memory_order_relaxed);
    uint64_t left_ns = req->deadline_ns - req->received_ns;
    if (req->wire.header->body_case == ATTND__REQUEST__BODY_STEP && e->parts.tenants == NULL &&
        !pace_is_in_time(n - 1, task_ns, left_ns)) {
        snprintf(why, SHARE_TEXT_BYTES,
                 "%" PRIu32 " requests are ahead, about %" PRIu64 " ms; the deadline is in %" PRIu64
                 " ms",
                 n - 1, (n - 1) * task_ns / 1000000, left_ns / 1000000);
        return why;
    }
    uint64_t n_free = max_requests - (n - 1), bytes_free = max_bytes - (total - bytes);
    const struct share *full = share_take(req->share, SHARE_REQUESTS, 1, n_free, max_requests);
    if (full != NULL)
        return share_say(full, SHARE_REQUESTS, n_free, why);
    full = share_take(req->share, SHARE_QUEUE_BYTES, bytes, bytes_free, max_bytes);
    if (full == NULL)
        return NULL;
    share_give(req->share, SHARE_REQUESTS, 1);
    return share_say(full, SHARE_QUEUE_BYTES, bytes_free, why);
}

/* Of what is refused because the process ends: which of its reasons to end it is. */
static attn_status stop_status(const struct engine *e)
{
    return engine_health(e) != ATTN_OK ? engine_health(e) : ATTN_EDRAINING;
}

void engine_submit(struct engine *e, struct request *req)
{
    if (e->parts.cards != NULL)
        cards_submit(e->parts.cards, req);
    else
        engine_take(e, req);
}

void engine_take(struct engine *e, struct request *req)
{
    if (!engine_admit(e, req))
        return;
    stack_push(&e->inbox, req);
    engine_wake(e);
}

bool engine_admit(struct engine *e, struct request *req)
{
    uint64_t bytes = req->msg->n_bytes, total;
    char why[SHARE_TEXT_BYTES];
    uint32_t n;
    engine_hold(e, bytes, &n, &total);
    const char *fault = queue_fault(e, req, n, total, why);
    if (fault == NULL)
        return true;
    stats_add(requests_refused_overload, 1);
    engine_renew(e, request_session(req));
    if (req->is_placed)
        cards_settle(e->parts.cards, req);
    request_reply_error(req, ATTN_EOVERLOAD, engine_retry_after_us(e), "%s", fault);
    engine_let_go(e, bytes);
    return false;
}

/* What is left of the cards goes on: the sequences were this one's, and are no more. */
static void refuse_of_lost(struct engine *e, struct request *req)
{
    if (e->parts.cards != NULL && cards_live(e->parts.cards))
        engine_refuse(e, req, ATTN_ENOTFOUND, "no such sequence: its card is lost");
    else
        engine_refuse(e, req, engine_health(e), "the device is lost");
}

/* A request that nobody needs to look into; its session is renewed all the same. */
static bool refuse_unread(struct engine *e, struct request *req, uint64_t now_ns)
{
    attn_status health = engine_health(e);
    uint64_t session = request_session(req);
    if (atomic_load_explicit(&e->is_stopping, memory_order_relaxed))
        engine_refuse(e, req, stop_status(e), "the daemon is stopping");
    else if (req->deadline_ns <= now_ns)
        engine_refuse(e, req, ATTN_EDEADLINE, "%" PRIu64 " us passed before the engine saw it",
                      (now_ns - req->received_ns) / 1000);
    else if (req->wire.header->body_case == ATTND__REQUEST__BODY_STEP && health != ATTN_OK)
        refuse_of_lost(e, req);
    else
        return false;
    engine_renew(e, session);
    return true;
}

static void take_request(struct engine *e, struct request *req, uint64_t now_ns)
{
    Attnd__Request__BodyCase body = req->wire.header->body_case;
    req->taken_ns = now_ns;
    if (refuse_unread(e, req, now_ns))
        return;
    if (body == ATTND__REQUEST__BODY_STEP)
        step_admit(e, req, now_ns);
    else if (body == ATTND__REQUEST__BODY_PLAN)
        plan_admit(e, req, now_ns);
    else if (body == ATTND__REQUEST__BODY_HELLO)
        hello_admit(e, req, now_ns);
    else
        control_admit(e, req, now_ns);
}

static bool take_inbox(struct engine *e, uint64_t now_ns)
{
    struct request *oldest = stack_take_all(&e->inbox);
    if (e->parts.cards != NULL)
        cards_listen(e);
    bool has_any = oldest != NULL;
    bool is_large = e->gauges.sequences >= MIN_WARM_SEQUENCES;
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

/* --- the loop --------------------------------------------------------------------------------- */

/* The gauges are sums over all engines: what this one's share has changed by is added. */
static void publish_gauges(struct engine *e)
{
    struct kv_stats last = e->gauges;
    kv_stats_read(e->parts.kv, &e->gauges);
    stats_add(sequences, e->gauges.sequences - last.sequences);
    stats_add(blocks_total, e->gauges.blocks_total - last.blocks_total);
    stats_add(blocks_free, e->gauges.blocks_free - last.blocks_free);
    stats_add(blocks_used, e->gauges.blocks_used - last.blocks_used);
    stats_add(blocks_shared, e->gauges.blocks_shared - last.blocks_shared);
    stats_add(blocks_cached, e->gauges.blocks_cached - last.blocks_cached);
    stats_add(blocks_published, e->gauges.blocks_published - last.blocks_published);
    stats_add(prefix_hits, e->gauges.prefix_hits - last.prefix_hits);
    stats_add(prefix_misses, e->gauges.prefix_misses - last.prefix_misses);
    stats_add(prefix_hit_tokens, e->gauges.prefix_hit_tokens - last.prefix_hit_tokens);
    stats_add(evictions, e->gauges.evictions - last.evictions);
    stats_add(blocks_pinned, e->gauges.blocks_pinned - last.blocks_pinned);
    stats_add(evictions_expired, e->gauges.evictions_expired - last.evictions_expired);
    stats_add(eviction_age_seconds, e->gauges.eviction_age_seconds - last.eviction_age_seconds);
    stats_add(cached_dropped, e->gauges.cached_dropped - last.cached_dropped);
    tier_publish(e);
    if (e->parts.card == 0)
        stats_set(sessions, session_count(e->parts.sessions));
    if (e->parts.cards != NULL)
        cards_publish(e);
    e->is_dirty = false;
    e->has_old_pools = true;
}

/* What the pools hold, now and then. */
static void publish_pools(struct engine *e, uint64_t now_ns)
{
    struct stats_pool list[STATS_MAX_POOLS + 1] = {0};
    uint64_t used_bytes = 0;
    size_t n = 0;
    for (struct pool *p = NULL; (p = pool_next(e, p)) != NULL;) {
        struct kv_pool_spec ks;
        uint32_t n_free = 0;
        kv_pool_info(e->parts.kv, p->id, &ks, &n_free);
        struct stats_pool *s = &list[n < STATS_MAX_POOLS ? n : STATS_MAX_POOLS];
        snprintf(s->name, sizeof s->name, "%s", n < STATS_MAX_POOLS ? ks.name : "");
        struct pool_count other = {0};
        if (e->parts.cards != NULL)
            other = cards_pool_count(e->parts.cards, e, p->id.index);
        s->blocks += ks.n_blocks + other.blocks;
        s->free += n_free + other.free;
        s->sequences += kv_pool_sequences(e->parts.kv, p->id) + other.sequences;
        used_bytes += (ks.n_blocks - n_free) * (p->device_bytes / ks.n_blocks);
        n += n <= STATS_MAX_POOLS;
    }
    if (e->parts.card == 0) {
        stats_set_pools(list, n);
        stats_set(io_memory_bytes, iobuf_pool_bytes(e->parts.bufs));
        stats_set(max_batch_items, e->parts.cfg->max_batch_items);
        stats_set(max_batch_tokens, e->parts.cfg->max_batch_tokens);
    }
    stats_add(kv_memory_bytes, e->info.kv_bytes - e->told.kv_bytes);
    stats_add(kv_given_bytes, e->device_bytes - e->told.given_bytes);
    stats_add(kv_used_bytes, used_bytes - e->told.used_bytes);
    stats_add(memory_bytes_per_s, e->info.memory_bytes_per_s - e->told.memory_bytes_per_s);
    e->told.kv_bytes = e->info.kv_bytes;
    e->told.memory_bytes_per_s = e->info.memory_bytes_per_s;
    e->told.given_bytes = e->device_bytes;
    e->told.used_bytes = used_bytes;
    e->has_old_pools = false;
    e->pools_at_ns = now_ns;
}

/* A batch came back with the device lost: what waits is refused, once. */
static void refuse_if_lost(struct engine *e)
{
    if (engine_health(e) == ATTN_OK)
        return;
    if (!e->is_lost)
        tasks_refuse(e, engine_health(e), "the device is lost");
    e->is_lost = true;
    if (e->parts.cards != NULL && cards_live(e->parts.cards))
        cards_drop_sequences(e, false);
}

/* Another card has a part of some sequences, and is lost. */
static void drop_if_not_whole(struct engine *e)
{
    uint32_t n = 0;
    if (e->parts.cards == NULL || e->parts.card > 0 || cards_are_whole(e->parts.cards))
        return;
    for (struct pool *p = NULL; (p = pool_next(e, p)) != NULL;)
        n += pool_is_split(&p->split) ? kv_pool_sequences(e->parts.kv, p->id) : 0;
    if (n > 0)
        cards_drop_sequences(e, true);
}

static uint64_t idle_ns(const struct engine *e, uint64_t now_ns, uint64_t max_wait_ns)
{
    uint64_t expiry_ns = e->parts.card > 0 /* the lead ends sessions */
                             ? UINT64_MAX
                             : session_next_expiry_ns(e->parts.sessions, e->lease_ns);
    uint64_t until_ns = expiry_ns <= now_ns ? 0 : expiry_ns - now_ns;
    return until_ns < max_wait_ns ? until_ns : max_wait_ns;
}

/* How long to wait for a batch: new requests may join the next one. */
static uint64_t slice_ns(const struct engine *e, uint64_t now_ns, uint64_t max_wait_ns)
{
    uint64_t ns = engine_is_polled(e) ? POLLED_SLICE_NS : POLL_SLICE_NS;
    if (e->due_ns > now_ns && e->due_ns - now_ns < ns)
        ns = e->due_ns - now_ns;
    return max_wait_ns < ns ? max_wait_ns : ns;
}

/* Something goes to the device: of the lead's split batches and its own work by turns. */
static bool launch(struct engine *e)
{
    if (e->parts.cards == NULL)
        return batch_launch(e);
    if (e->was_part_last && batch_launch(e)) {
        e->was_part_last = false;
        return true;
    }
    if (parts_launch(e)) {
        e->was_part_last = true;
        return true;
    }
    return !e->was_part_last && batch_launch(e);
}

bool engine_turn(struct engine *e, uint64_t max_wait_ns)
{
    uint64_t now_ns = e->turn_ns = clock_now_ns();
    kv_set_time(e->parts.kv, (uint32_t)(now_ns / UINT64_C(1000000000)));
    health_beat(HEALTH_ENGINE + e->parts.card);
    tenants_turn(e); /* before the first hello: who is gone is refused at once */
    bool is_busy = engine_poll_pollers(e);
    is_busy |= take_inbox(e, now_ns);
    is_busy |= mover_turn(e);
    tasks_expire(e, now_ns);
    is_busy |= sessions_expire(e, now_ns);
    watchers_answer(e, false);
    do
        seqs_wake(e);
    while (launch(e));
    refuse_if_lost(e);
    drop_if_not_whole(e);

    tokens_look(e);
    if (e->is_dirty)
        publish_gauges(e);
    if (e->has_old_pools && now_ns - e->pools_at_ns >= POOLS_EVERY_NS)
        publish_pools(e, now_ns);
    const struct task *oldest = TAILQ_FIRST(&e->held);
    atomic_store_explicit(&e->oldest_at_ns, oldest == NULL ? 0 : oldest->req->received_ns,
                          memory_order_relaxed);
    if (e->parts.card == 0)
        stats_set(oldest_at_ns,
                  e->parts.cards != NULL ? cards_oldest_at_ns(e->parts.cards) : e->oldest_at_ns);
    if (e->n_in_flight + e->n_on_device > 0) {
        bool is_hurried = is_busy || !engine_is_quiet(e);
        uint64_t wait_ns = is_hurried ? 0 : slice_ns(e, now_ns, max_wait_ns);
        for (; batch_finish_one(e, wait_ns); wait_ns = 0)
            is_busy = true;
        batches_watch(e, now_ns);
        refuse_if_lost(e);
    } else if (!is_busy && canary_work(e)) {
        is_busy = true;
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
    uint64_t start_ns = clock_now_ns();
    while (e->n_in_flight + e->n_on_device > 0) {
        uint64_t most_ns = engine_health(e) == ATTN_OK ? CLOSE_TIMEOUT_NS : LOST_CLOSE_TIMEOUT_NS;
        if (!batch_finish_one(e, POLL_SLICE_NS) && clock_now_ns() - start_ns > most_ns)
            return ATTN_ETIMEDOUT;
    }
    return ATTN_OK;
}

static attn_status engine_finish(struct engine *e)
{
    take_inbox(e, clock_now_ns());
    watchers_answer(e, true);
    tasks_refuse(e, stop_status(e), "the daemon is stopping");
    attn_status st = wait_for_batches(e);
    if (!mover_settle(e, NULL))
        st = ATTN_ETIMEDOUT;
    seqs_wake(e);
    tasks_refuse(e, stop_status(e), "the daemon is stopping");
    return st;
}

static void *engine_main(void *arg)
{
    struct engine *e = arg;
    while (!atomic_load(&e->is_stopping))
        engine_turn(e, MAX_SLEEP_NS);
    return (void *)(intptr_t)engine_finish(e);
}

/* --- life ------------------------------------------------------------------------------------- */

void engine_reload(struct engine *e, const struct config *cfg)
{
    atomic_store(&e->max_queue_requests, cfg->max_queue_requests);
    atomic_store(&e->max_queue_bytes, cfg->max_queue_bytes);
    atomic_store(&e->canary.one_in, cfg->canary);
    session_table_set(e->parts.sessions, cfg->max_peer_sessions);
}

static void engine_free(struct engine *e)
{
    if (e->parts.card == 0)
        log_set_listener(NULL, NULL);
    canary_end(e);
    tenants_close(atomic_load(&e->new_tenants));
    tier_fini(e);
    batches_fini(e);
    pools_fini(e);
    queue_fini(e);
    engine_sleep_fini(e);
    free(e);
}

struct kv_config engine_kv_config(const struct config *cfg, uint64_t kv_bytes)
{
    uint64_t n = kv_bytes / MIN_BLOCK_BYTES;
    return (struct kv_config){
        .max_pools = cfg->max_pools,
        .max_blocks = n > MAX_BLOCKS   ? MAX_BLOCKS
                      : n < MIN_BLOCKS ? MIN_BLOCKS
                                       : (uint32_t)n,
        .max_sequences = cfg->max_sequences,
        .max_seq_blocks = cfg->max_seq_tokens / 8 + 1,
        .max_seq_tokens = cfg->max_seq_tokens,
        .max_block_tokens = MAX_BLOCK_TOKENS,
        .max_layers = cfg->max_layers,
        .max_owners = cfg->max_sessions,
        .block_layout = KV_LAYOUT_VERSION,
    };
}

attn_status engine_open(const struct engine_parts *parts, struct engine **out_engine, char *why,
                        size_t why_bytes)
{
    const struct config *c = parts->cfg;
    struct engine *e = calloc(1, sizeof *e);
    if (e == NULL) {
        snprintf(why, why_bytes, "no memory for the engine");
        return ATTN_ENOMEM;
    }
    e->parts = *parts;
    e->epoch_bits = parts->cards == NULL ? 0 : cards_epoch_bits(parts->cards);
    e->lease_ns = e->next_lease_ns = c->lease_us * 1000;
    e->next_stamp = 1;
    e->epoll_fd = e->wake_fd = -1;
    if (getrandom(e->hello_secret, sizeof e->hello_secret, 0) < 0)
        e->hello_secret[0] = clock_now_ns();
    parts->ops->info(parts->backend, &e->info);
    e->n_blocks = engine_kv_config(c, e->info.kv_bytes).max_blocks;
    engine_reload(e, c);
    attn_status st = ATTN_EINTERNAL;
    if (getrandom(&e->boot_id, sizeof e->boot_id, 0) != sizeof e->boot_id) {
        snprintf(why, why_bytes, "getrandom: %s", strerror(errno));
        goto fail;
    }
    st = queue_init(e);
    if (st == ATTN_OK)
        st = pools_init(e);
    if (st == ATTN_OK)
        st = batches_init(e);
    if (st != ATTN_OK) {
        snprintf(why, why_bytes,
                 "no memory for the engine's tables (max_sequences %" PRIu32
                 ", max_batch_items %" PRIu32 ")",
                 c->max_sequences, c->max_batch_items);
        goto fail;
    }
    st = tier_init(e, why, why_bytes);
    if (st != ATTN_OK)
        goto fail;
    st = engine_sleep_init(e);
    if (st != ATTN_OK) {
        snprintf(why, why_bytes, "no descriptors for the engine: %s", strerror(errno));
        goto fail;
    }
    publish_gauges(e);
    if (e->parts.card == 0)
        log_set_listener(watchers_wake, e);

    *out_engine = e;
    return ATTN_OK;
fail:
    engine_free(e);
    return st;
}

attn_status engine_start(struct engine *e, char *why, size_t why_bytes)
{
    int err = pthread_create(&e->thread, NULL, engine_main, e);
    e->has_thread = err == 0;
    if (err == 0)
        return ATTN_OK;
    snprintf(why, why_bytes, "the engine's thread can't be started: %s", strerror(err));
    return ATTN_ENOMEM;
}

attn_status engine_stop(struct engine *e)
{
    void *result = NULL;
    if (e->has_stopped)
        return e->stopped_with;
    atomic_store(&e->is_stopping, true);
    engine_wake(e);
    if (e->has_thread)
        pthread_join(e->thread, &result);
    else
        result = (void *)(intptr_t)engine_finish(e);
    health_end(HEALTH_ENGINE + e->parts.card);
    e->has_thread = false;
    e->has_stopped = true;
    e->stopped_with = (attn_status)(intptr_t)result;
    return e->stopped_with;
}

attn_status engine_close(struct engine *e)
{
    attn_status st = e == NULL ? ATTN_OK : engine_stop(e);
    if (e != NULL && st == ATTN_OK)
        engine_free(e);
    return st;
}
