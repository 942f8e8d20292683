/* engine.c: opens, runs and closes an engine. While batches are in flight, it waits inside the
 * backend's poll, a short slice at a time, so that new requests can join the next batch.
 */
#define _GNU_SOURCE /* pthread_setname_np */
#include "daemon/engine/engine.h"

#include <errno.h>
#include <inttypes.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/random.h>

#include "cache/kv_move.h"
#include "cache/kv_tier.h"
#include "daemon/base/clock.h"
#include "daemon/base/health.h"
#include "daemon/base/log.h"
#include "daemon/base/stack.h"
#include "daemon/base/stats.h"
#include "daemon/engine/core/message.h"
#include "daemon/engine/core/pace.h"
#include "daemon/engine/core/peers.h"
#include "daemon/engine/core/pool_table.h"
#include "daemon/engine/core/queue.h"
#include "daemon/engine/core/session_run.h"
#include "daemon/engine/core/sleep.h"
#include "daemon/engine/core/status.h"
#include "daemon/engine/core/turns.h"
#include "daemon/engine/gauges.h"
#include "daemon/engine/operator/operator.h"
#include "daemon/engine/pool/create.h"
#include "daemon/engine/serve.h"
#include "daemon/engine/step/batch.h"
#include "daemon/engine/step/batch_end.h"
#include "daemon/engine/step/canary_repeat.h"
#include "daemon/engine/step/canary_watch.h"
#include "daemon/engine/step/early_commit.h"
#include "daemon/engine/step/step.h"
#include "daemon/engine/tenants.h"
#include "daemon/engine/tier/idle.h"
#include "daemon/engine/tier/mover.h"
#include "daemon/engine/tier/tier.h"
#include "kernels/kv_layout.h"

static const uint64_t POLL_SLICE_NS = 50 * 1000;
static const uint64_t POLLED_SLICE_NS = 2 * 1000; /* while pollers bring work */
static const uint64_t MAX_SLEEP_NS = 500 * 1000 * 1000; /* so that the heartbeat goes on */
static const uint64_t POOLS_EVERY_NS = 100 * 1000 * 1000;
static const uint64_t CLOSE_TIMEOUT_NS = 5ull * 1000 * 1000 * 1000;
static const uint64_t LOST_CLOSE_TIMEOUT_NS = 200 * 1000 * 1000; /* for a lost device */
enum {
    MIN_BLOCK_BYTES = 4096, /* smaller blocks run out of records before they run out of memory */
    MAX_BLOCKS = 1 << 26,
    MIN_BLOCKS = 64,
    MAX_BLOCK_TOKENS = 256, /* limit of a pool (docs/protocol/pools.md) */
    EVENTS_KEPT = 1 << 16, /* of blocks: a reader that is slower takes a snapshot */
    MIN_WARM_SEQUENCES = 4096, /* fewer stay in the processor's caches anyway */
};

/* --- requests come in ------------------------------------------------------------------------- */

void engine_take_messages(struct engine *e)
{
    struct engine_message *messages = engine_messages_take(e);
    if (messages != NULL)
        tenants_turn(e); /* messages may concern new tenants */
    engine_messages_deliver(e, messages);
    stack_for_each(struct request, req, stack_take_all(&e->returned))
        req->polled->reply(req);
}

/* The requests that were held back, then the inbox. */
static struct request *inbox_with_held(struct engine *e)
{
    struct request *held = is_alone(e) ? NULL : e->peers->ops->held(e), **last = &held;
    while (*last != NULL)
        last = &(*last)->next;
    *last = stack_take_all(&e->inbox);
    return held;
}

static bool take_inbox(struct engine *e, uint64_t now_ns)
{
    bool has_moved = peers_turn(e);
    struct request *oldest = inbox_with_held(e);
    if (!is_alone(e))
        engine_take_messages(e);
    bool has_any = oldest != NULL || has_moved || peers_move_is_there(e);
    bool is_large = e->gauges.sequences >= MIN_WARM_SEQUENCES;
    struct request *cold = oldest; /* the first one that was not warmed */
    stack_for_each(struct request, req, oldest) {
        if (is_large && req == cold)
            cold = steps_warm(e, req);
        if (!peers_hold(e, req))
            engine_serve(e, req, now_ns);
    }
    return has_any;
}

/* --- the loop --------------------------------------------------------------------------------- */

static bool is_of_split_pool(const struct engine *e, kv_seq_id id)
{
    struct kv_seq_info info;
    kv_seq_info(e->env.kv, id, &info);
    const struct pool *p = pool_of_kv(e, info.pool);
    return p != NULL && pool_spans(e, p);
}

/* After a card was lost, closes its sequences or, is_split, the primary's sequences that are split
 * over it. May be repeated. */
static void drop_sequences(struct engine *e, bool is_split)
{
    uint32_t n = 0;
    for (kv_seq_id id = {0}; kv_seq_next(e->env.kv, UINT32_MAX, &id) == ATTN_OK; id.index++) {
        if (is_split && !is_of_split_pool(e, id))
            continue;
        if (seq_is_busy(e, id.index))
            continue; /* in a batch that has not come back */
        seq_close(e, id);
        seq_closed(e, id.index);
        n++;
    }
    if (n == 0)
        return;
    e->is_dirty = true;
    if (is_split)
        log_error("a card is lost, and %" PRIu32 " sequences that are split over it", n);
    else
        log_error("card %" PRIu32 " is lost, and %" PRIu32 " sequences with it", e->env.card, n);
}

/* If the device was lost, refuses what waits, once, and drops the sequences if other cards go
 * on. */
static void refuse_if_lost(struct engine *e)
{
    if (engine_health(e) == ATTN_OK)
        return;
    if (!e->is_lost)
        tasks_refuse(e, engine_health(e), "the device is lost");
    e->is_lost = true;
    if (peers_any_live(e))
        drop_sequences(e, false);
}

/* Drops split sequences if another card, which has shards of them, is lost. */
static void drop_if_not_whole(struct engine *e)
{
    uint32_t n = 0;
    if (!is_primary(e) || peers_all_live(e))
        return;
    for (struct pool *p = NULL; (p = pool_next(e, p)) != NULL;)
        n += pool_spans(e, p) ? kv_pool_sequences(e->env.kv, p->id) : 0;
    if (n > 0)
        drop_sequences(e, true);
}

static uint64_t idle_ns(const struct engine *e, uint64_t now_ns, uint64_t max_wait_ns)
{
    uint64_t expiry_ns = e->env.card > 0 /* the primary expires sessions */
                             ? UINT64_MAX
                             : session_next_expiry_ns(e->env.sessions, e->lease_ns);
    uint64_t until_ns = expiry_ns <= now_ns ? 0 : expiry_ns - now_ns;
    return until_ns < max_wait_ns ? until_ns : max_wait_ns;
}

/* How long to wait for a batch: not long, since new requests may join the next one. */
static uint64_t slice_ns(const struct engine *e, uint64_t now_ns, uint64_t max_wait_ns)
{
    uint64_t ns = engine_is_polled(e) ? POLLED_SLICE_NS : POLL_SLICE_NS;
    if (e->due_ns > now_ns && e->due_ns - now_ns < ns)
        ns = e->due_ns - now_ns;
    return max_wait_ns < ns ? max_wait_ns : ns;
}

/* Launches a batch of its own or a shard of one of the primary's, in turns. */
static bool launch(struct engine *e)
{
    if (is_alone(e))
        return batch_launch(e);
    if (e->was_shard_last && batch_launch(e)) {
        e->was_shard_last = false;
        return true;
    }
    if (e->peers->ops->split->launch(e->split)) {
        e->was_shard_last = true;
        return true;
    }
    return !e->was_shard_last && batch_launch(e);
}

/* When the oldest request held by any device arrived; 0: none is held. */
static uint64_t oldest_of_all_ns(const struct engine *e)
{
    uint64_t oldest = 0;
    for (uint32_t i = 0; i < peers_n(e); i++) {
        uint64_t at = atomic_load_explicit(&peers_at(e, i)->oldest_at_ns, memory_order_relaxed);
        oldest = at != 0 && (oldest == 0 || at < oldest) ? at : oldest;
    }
    return oldest;
}

bool engine_turn(struct engine *e, uint64_t max_wait_ns)
{
    uint64_t now_ns = e->turn_ns = clock_now_ns();
    turns_renew(e);
    kv_set_time(e->env.kv, (uint32_t)(now_ns / UINT64_C(1000000000)));
    health_beat(HEALTH_ENGINE + e->env.card);
    tenants_turn(e); /* before the first hello, so that removed tenants are refused at once */
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
        gauges_publish(e);
    if (e->has_old_pools && now_ns - e->pools_at_ns >= POOLS_EVERY_NS)
        gauges_publish_pools(e, now_ns);
    const struct task *oldest = TAILQ_FIRST(&e->held);
    atomic_store_explicit(&e->oldest_at_ns, oldest == NULL ? 0 : oldest->req->received_ns,
                          memory_order_relaxed);
    if (is_primary(e))
        stats_set(oldest_at_ns, oldest_of_all_ns(e));
    bool has_turns = e->turns.n > e->turns.n_memory;
    if (e->n_in_flight + e->n_on_device > 0) {
        bool is_hurried = is_busy || has_turns || !engine_is_quiet(e);
        uint64_t wait_ns = is_hurried ? 0 : slice_ns(e, now_ns, max_wait_ns);
        for (; batch_finish_one(e, wait_ns); wait_ns = 0)
            is_busy = true;
        batches_watch(e, now_ns);
        refuse_if_lost(e);
    } else if (!is_busy && !has_turns && (canary_work(e) || canary_repeat(e))) {
        is_busy = true;
    } else if (!is_busy && !has_turns && max_wait_ns > 0) {
        uint64_t wait_ns = turns_nap_ns(e, idle_ns(e, now_ns, max_wait_ns));
        if (wait_ns > 0)
            engine_idle(e, wait_ns);
    }
    return engine_serve_turns(e) || is_busy || has_turns;
}

/* Waits for all batches; ATTN_ETIMEDOUT: some did not come back. */
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

/* Brings messages of several calls to their end: one may be with another engine, which is stopped
 * after this one; those behind it are refused. */
static attn_status end_calls(struct engine *e)
{
    uint64_t start_ns = clock_now_ns();
    while (atomic_load(&e->n_calls) > 0) {
        take_inbox(e, clock_now_ns());
        tasks_refuse(e, engine_stop_status(e), "the daemon is stopping");
        engine_end_turns(e);
        if (clock_now_ns() - start_ns > CLOSE_TIMEOUT_NS)
            return ATTN_ETIMEDOUT;
        sched_yield();
    }
    return ATTN_OK;
}

static attn_status engine_finish(struct engine *e)
{
    take_inbox(e, clock_now_ns());
    if (!is_alone(e)) {
        e->peers->ops->stop(e);
        take_inbox(e, clock_now_ns()); /* what stop released */
    }
    watchers_answer(e, true);
    tasks_refuse(e, engine_stop_status(e), "the daemon is stopping");
    engine_end_turns(e);
    attn_status st = wait_for_batches(e), calls = end_calls(e);
    st = st == ATTN_OK ? calls : st;
    if (!mover_drain(e, NULL))
        st = ATTN_ETIMEDOUT;
    seqs_wake(e);
    tasks_refuse(e, engine_stop_status(e), "the daemon is stopping");
    engine_end_turns(e);
    return st;
}

static void *engine_main(void *arg)
{
    struct engine *e = arg;
    char name[16];
    snprintf(name, sizeof name, "attnd-engine%" PRIu32, e->env.card);
    pthread_setname_np(pthread_self(), name);
    prctl(PR_SET_TIMERSLACK, 1000UL); /* naps beside a long batch end 50 us late otherwise */
    while (!atomic_load(&e->is_stopping))
        engine_turn(e, MAX_SLEEP_NS);
    return (void *)(intptr_t)engine_finish(e);
}

/* --- life ------------------------------------------------------------------------------------- */

void engine_reload(struct engine *e, const struct config *cfg)
{
    atomic_store(&e->max_queue_requests, cfg->max_queue_requests);
    atomic_store(&e->max_queue_bytes, cfg->max_queue_bytes);
    atomic_store(&e->canary_one_in, cfg->canary);
}

static void engine_free(struct engine *e)
{
    if (is_primary(e))
        log_set_listener(NULL, NULL);
    canary_close(e);
    tenants_close(atomic_load(&e->new_tenants));
    tier_fini(e);
    idle_fini(e);
    early_fini(e);
    batches_fini(e);
    pools_fini(e);
    queue_fini(e);
    engine_sleep_fini(e);
    free(e);
}

/* Above the numbers of all caches before, unless there were a million events a second. Where the
 * clock was set back, a reader's number fits no ring, so it takes a snapshot all the same. */
static uint64_t first_event_number(void)
{
    struct timespec now = clock_wall();
    return (uint64_t)now.tv_sec * 1000000u + (uint64_t)now.tv_nsec / 1000u;
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
        .max_owners = session_slots(cfg->max_sessions),
        .block_layout = KV_LAYOUT_VERSION,
        .table_pages = (uint32_t)(config_table_bytes(cfg) / KV_PAGE_BYTES),
        .idle_pages = (uint32_t)(cfg->idle_memory_bytes / KV_PAGE_BYTES),
        .events_kept = EVENTS_KEPT,
        .events_from = first_event_number(),
    };
}

uint64_t engine_table_bytes(const struct config *c)
{
    uint64_t a_sequence = sizeof(struct seq_state) + 2 * sizeof(uint32_t);
    uint64_t a_session = sizeof(struct session) + 4 * sizeof(void *) +
                         c->max_pools * sizeof(*((struct engine *)0)->holds);
    uint64_t an_item = sizeof(struct backend_item) + sizeof(struct item *) + 4 * sizeof(uint64_t);
    return c->max_sequences * a_sequence + session_slots(c->max_sessions) * a_session +
           BACKEND_MAX_IN_FLIGHT * c->max_batch_items * an_item +
           (c->max_pools + BACKEND_MAX_IN_FLIGHT) * pool_effects_bytes(c) + canary_most_bytes() +
           EVENTS_KEPT * sizeof(struct kv_event);
}

attn_status engine_open(const struct engine_env *env, struct engine **out_engine, char *why,
                        size_t why_bytes)
{
    const struct config *c = env->cfg;
    struct engine *e = calloc(1, sizeof *e);
    if (e == NULL) {
        snprintf(why, why_bytes, "no memory for the engine");
        return ATTN_ENOMEM;
    }
    e->env = *env;
    e->alone = (struct peers){.n = 1, .n_open = 1, .at = {e}};
    e->peers = env->peers != NULL ? env->peers : &e->alone;
    if (!is_alone(e))
        kv_set_epochs(env->kv, e->peers->epoch_bits, env->card);
    e->lease_ns = e->next_lease_ns = c->lease_us * 1000;
    e->next_stamp = 1;
    STAILQ_INIT(&e->watchers);
    e->epoll_fd = e->wake_fd = -1;
    if (getrandom(e->hello_secret, sizeof e->hello_secret, 0) < 0)
        e->hello_secret[0] = clock_now_ns();
    env->ops->info(env->backend, &e->info);
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
    if (st == ATTN_OK)
        st = canary_open(e);
    if (st != ATTN_OK) {
        snprintf(why, why_bytes,
                 "no memory for the engine's tables (max_sequences %" PRIu32
                 ", max_batch_items %" PRIu32 ")",
                 c->max_sequences, c->max_batch_items);
        goto fail;
    }
    st = tier_init(e, why, why_bytes);
    if (st == ATTN_OK)
        st = idle_init(e, why, why_bytes);
    if (st != ATTN_OK)
        goto fail;
    early_init(e);
    st = engine_sleep_init(e);
    if (st != ATTN_OK) {
        snprintf(why, why_bytes, "no descriptors for the engine: %s", strerror(errno));
        goto fail;
    }
    tenants_count_tables(e, true);
    gauges_publish(e);
    if (is_primary(e))
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
    health_end(HEALTH_ENGINE + e->env.card);
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
