/* state.h: struct engine: the structs of its features, and what they share. Only the engine's
 * thread uses it, except for atomic fields.
 *
 * The engine's folders; each uses only those below it (tests/layers.py):
 *
 *   engine/            open, close and the loop; requests are checked, handled, answered
 *   engine/operator/   what operators ask and change
 *   engine/seq/        requests on sequences: open, fork, adopt, export, import
 *   engine/pool/       pools: created, sized, resized, dropped
 *   engine/step/       steps: admitted, batched, launched, committed; lanes and their plans
 *   engine/tier/       blocks in host memory and on disk, and moved there and back
 *   engine/core/       what all of them need: tasks and their queues, the inbox, answers, sessions,
 *                      the pool table, sleep, and the interface to other devices (peers.h)
 */
#ifndef ATTND_DAEMON_ENGINE_CORE_STATE_H
#define ATTND_DAEMON_ENGINE_CORE_STATE_H

#include <pthread.h>
#include <stdatomic.h>
#include <sys/queue.h>

#include "cache/kv_seq.h"
#include "daemon/engine/core/batch_state.h"
#include "daemon/engine/core/engine.h"
#include "daemon/engine/core/tier_state.h"
#include "daemon/engine/core/turn_state.h"
#include "daemon/request/session.h"

struct canary_watch;
struct lane;
struct peers_ops;
struct split;

/* The engines of a daemon, by device (peers.h). */
struct peers {
    uint32_t n; /* number planned */
    uint32_t n_open;
    uint32_t epoch_bits; /* bits of an epoch on the wire that name the device which made it */
    struct engine *at[CONFIG_MAX_DEVICES]; /* [n_open]; at 0 the primary */
    const struct peers_ops *ops; /* NULL: the engine is the only one */
    /* [session_slots] requests of each session that engines other than the primary hold; any
     * thread. NULL: the engine is the only one */
    _Atomic uint32_t *held;
};

struct engine {
    struct engine_env env;
    struct peers *peers; /* never NULL: env.peers, or &alone */
    struct peers alone;
    struct backend_info info;
    uint64_t lease_ns;
    uint64_t next_lease_ns, next_lease_at_ns; /* a changed lease, and when it applies */
    uint64_t boot_id; /* random */
    uint64_t hello_secret[2]; /* random, so that clients cannot make two hellos collide */

    /* any thread */
    _Atomic(struct request *) inbox; /* newest first */
    _Atomic(struct engine_message *) messages; /* from other engines; newest first */
    _Atomic(struct request *) returned; /* answered, for the thread that polls */
    _Atomic uint32_t is_asleep; /* this to polled_ns: engine/core/sleep.c */
    _Atomic(struct engine_poller *) pollers;
    int epoll_fd, wake_fd;
    uint64_t spin_ns; /* how long to spin before the next sleep */
    uint64_t polled_ns; /* when a poller last brought something */
    uint64_t bell_ns; /* when the primary, which polls the lanes, last passed on a layer */
    _Atomic bool is_stopping, is_draining;
    _Atomic(struct tenants *) new_tenants; /* to replace the present ones; NULL: none */
    _Atomic bool ends_tokens; /* refuse to begin tokens */
    /* draining: a sequence is in a token, or this is unchecked since the last step */
    _Atomic bool is_in_token;
    _Atomic uint64_t token_at_ns; /* draining: when a layer last had tokens appended */
    /* draining: a sequence is open, or this is unchecked since the drain began */
    _Atomic bool has_sequences;
    _Atomic uint64_t hold_until_ns; /* draining: until then they hold it up */
    _Atomic uint64_t fence_ns; /* with engine.fence: until then appends are served */
    _Atomic int health; /* attn_status */
    struct queue_count queue; /* requests between engine_submit and their reply */
    _Atomic uint32_t n_calls; /* messages of several calls that are under way (seq/calls.c) */
    _Atomic uint32_t max_queue_requests;
    _Atomic uint64_t max_queue_bytes;
    _Atomic uint64_t oldest_at_ns; /* arrival of the oldest held request; 0: none */
    _Atomic uint64_t task_ns; /* recent time a request takes, for retry-after */

    struct seq_state *seqs; /* [max_sequences] */
    uint32_t *wake_list; /* [max_sequences] */
    uint32_t n_wakes;
    uint32_t *for_room; /* [max_sequences] with items that wait until a pool has room */
    uint32_t n_for_room;
    struct pool *pools; /* [max_pools]; those without a spec are free */
    struct pool_published *published; /* [max_pools] counts for any thread (published.h) */
    _Atomic uint64_t published_free_bytes; /* KV memory that no pool has */
    uint64_t *pool_keys; /* [max_pools] tenant and handle of each; 0: free */
    struct hold *holds; /* [session_slots][max_pools] */
    uint32_t n_pools; /* highest index in use, plus one */
    uint32_t n_blocks; /* total block records */
    uint64_t device_bytes; /* of all pools */
    uint32_t patches_capacity, copies_capacity; /* of a batch */
    uint32_t patches_margin; /* extra room, for kv_append_cancel */
    struct batch batches[BACKEND_MAX_IN_FLIGHT];
    /* the device can write the cache's words (engine/step/early_commit.h) */
    bool has_early_commits;
    uint32_t max_in_flight, n_in_flight;
    uint32_t n_on_device; /* batches that poll will give back, including shards of the primary's */
    struct split *split; /* batches of split pools; NULL: the engine is the only one */
    bool was_shard_last; /* the last launch was of a shard */
    uint32_t concurrency; /* most items lately ready or in flight at a time */
    uint64_t finished_ns; /* when the last batch came back */
    uint64_t progress_ns; /* when a batch last came back, or went to an idle device */
    uint64_t due_ns; /* with one batch in flight: when the next may follow */
    uint64_t flow_clock; /* virtual time of the fair queueing of tenants (flow.h) */
    const struct tenant *last_sender; /* of a step */
    uint64_t others_at_ns; /* when it was last another one */
    struct turns turns; /* requests other than steps that wait for this thread */
    LIST_HEAD(, lane) lanes;
    struct task_list held;
    uint64_t next_stamp;
    uint64_t turn_ns; /* when this turn began */
    uint64_t next_deadline_ns; /* no held task has an earlier one */
    bool is_dirty; /* published counts of cache and sessions are stale */
    bool has_old_pools; /* published counts of single pools are stale */
    bool has_gone_tenants; /* tenants no longer configured still have pools */
    uint64_t pools_at_ns; /* when the counts of pools were published */
    bool is_lost; /* what waited for the lost device has been refused */
    struct kv_stats gauges; /* as last published; so is the next */
    struct {
        uint64_t kv_bytes, given_bytes, used_bytes, memory_bytes_per_s;
    } last_published;
    struct trace_ring trace;
    struct canary_watch *canary; /* engine/step/canary_watch.h */
    _Atomic uint32_t canary_one_in; /* stats.canary; any thread */
    struct engine_tier tier;
    struct engine_idle idle;
    STAILQ_HEAD(, request) watchers; /* requests that wait for a log line */
    _Atomic uint32_t n_watchers;
    pthread_t thread;
    bool has_thread, has_stopped;
    attn_status stopped_with;
};

#endif
