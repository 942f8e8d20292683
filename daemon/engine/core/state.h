/* state.h: the engine: its features' structs together, and what they share. All of it is the engine
 * thread's, but the fields marked atomic.
 *
 * The folders of the engine; each uses those below it only (tests/layers.py):
 *
 *   engine/            life and the loop; a request that has come is checked, handled, answered
 *   engine/operator/   what operators ask and change
 *   engine/seq/        requests of sequences: open, fork, adopt, export, import
 *   engine/pool/       pools: made, sized, resized, dropped
 *   engine/step/       steps: admitted, batched, launched, committed; lanes and their plans
 *   engine/tier/       blocks in tiers, and on their way there and back
 *   engine/core/       what all of them need: tasks and their queues, the inbox, answers, sessions,
 *                      pools by handle, sleep, and the seam to other devices (peers.h)
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
#include "daemon/request/session.h"

struct canary_watch;
struct lane;
struct peers_ops;
struct split;

/* The engines of a daemon, by device (peers.h). */
struct peers {
    uint32_t n; /* that there are to be */
    uint32_t n_open;
    uint32_t epoch_bits; /* of an epoch on the wire, that name the device which made it */
    struct engine *at[CONFIG_MAX_DEVICES]; /* [n_open]; at 0 the primary */
    const struct peers_ops *ops; /* NULL: an engine that is alone */
    _Atomic uint32_t *held; /* [max_sessions] requests of a session's that engines other than the
                             * primary hold; any thread. NULL, where it is alone */
};

struct engine {
    struct engine_env env;
    struct peers *peers; /* never NULL: env.peers, or: */
    struct peers alone;
    struct backend_info info;
    uint64_t lease_ns;
    uint64_t next_lease_ns, next_lease_at_ns; /* as it is set, and when it counts */
    uint64_t boot_id; /* random */
    uint64_t hello_secret[2]; /* random, so that clients cannot make two hellos collide */

    /* any thread */
    _Atomic(struct request *) inbox; /* newest first */
    _Atomic(struct engine_message *) messages; /* of other devices' engines, as the next */
    _Atomic(struct request *) returned; /* answered, for the thread that polls */
    _Atomic uint32_t is_asleep; /* engine/core/sleep.c, as far as polled_ns */
    _Atomic(struct engine_poller *) pollers;
    int epoll_fd, wake_fd;
    uint64_t spin_ns; /* how long to spin before the next sleep */
    uint64_t polled_ns; /* when a poller last brought something */
    uint64_t bell_ns; /* when a lane's layer last came from the primary, that looks at lanes */
    _Atomic bool is_stopping, is_draining;
    _Atomic(struct tenants *) new_tenants; /* as another file has them; NULL: none */
    _Atomic bool ends_tokens; /* no sequence begins a token any more */
    /* draining: a sequence is in a token, or this is unchecked since the last step */
    _Atomic bool is_in_token;
    _Atomic uint64_t token_at_ns; /* draining: when a layer last had tokens appended */
    _Atomic int health; /* attn_status */
    struct queue_count queue; /* requests between engine_submit and their reply */
    _Atomic uint32_t max_queue_requests;
    _Atomic uint64_t max_queue_bytes;
    _Atomic uint64_t oldest_at_ns; /* when the oldest held came; 0: none is */
    _Atomic uint64_t task_ns; /* recent time a request takes, for retry-after */

    struct seq_state *seqs; /* [max_sequences] */
    uint32_t *wake_list; /* [max_sequences] */
    uint32_t n_wakes;
    uint32_t *for_room; /* [max_sequences] with items that wait until a pool has room */
    uint32_t n_for_room;
    struct pool *pools; /* [max_pools]; those without a spec are free */
    struct pool_published *published; /* [max_pools] for any thread (published.h), as the next */
    _Atomic uint64_t published_free_bytes; /* of KV memory, that no pool has */
    uint64_t *pool_keys; /* [max_pools] tenant and handle of each; 0: free */
    struct hold *holds; /* [max_sessions][max_pools] */
    uint32_t n_pools; /* the highest in use, plus one */
    uint32_t n_blocks; /* block records of all pools */
    uint64_t device_bytes; /* of all pools */
    uint32_t patches_capacity, copies_capacity; /* of a batch */
    uint32_t patches_margin; /* room beyond, for kv_append_cancel */
    struct batch batches[BACKEND_MAX_IN_FLIGHT];
    /* the device can write the cache's words (engine/step/early_commit.h) */
    bool has_early_commits;
    uint32_t max_in_flight, n_in_flight;
    uint32_t n_on_device; /* batches that poll will give back, shards of the primary's, too */
    struct split *split; /* batches of split pools; NULL where the engine is alone */
    bool was_shard_last; /* of what went to the device */
    uint32_t concurrency; /* most items lately ready or in flight at a time */
    uint64_t finished_ns; /* when the last batch came back */
    uint64_t progress_ns; /* when a batch last came back, or went to an idle device */
    uint64_t due_ns; /* with one batch in flight: when the next may follow */
    uint64_t flow_clock; /* of all tenants' device time (flow.h) */
    LIST_HEAD(, lane) lanes;
    struct task_list held;
    uint64_t next_stamp;
    uint64_t turn_ns; /* when this turn began */
    uint64_t next_deadline_ns; /* no held task has an earlier one */
    bool is_dirty; /* gauges of cache and sessions are old */
    bool has_old_pools; /* the same of single pools */
    bool has_gone_tenants; /* some of them still have pools */
    uint64_t pools_at_ns; /* when those were published */
    bool is_lost; /* what waited for the lost device has been refused */
    struct kv_stats gauges; /* as published, as the next */
    struct {
        uint64_t kv_bytes, given_bytes, used_bytes, memory_bytes_per_s;
    } last_published;
    struct trace_ring trace;
    struct canary_watch *canary; /* engine/step/canary_watch.h */
    _Atomic uint32_t canary_one_in; /* stats.canary; any thread */
    struct engine_tier tier;
    struct engine_idle idle;
    STAILQ_HEAD(, request) watchers; /* that wait for something to be logged */
    _Atomic uint32_t n_watchers;
    pthread_t thread;
    bool has_thread, has_stopped;
    attn_status stopped_with;
};

#endif
