/* state.h: what an engine and its requests are made of; structs only. Everything here
 * belongs to the engine thread, but the fields marked atomic.
 *
 * The files of the engine; each calls those below it only (tests/layers.py):
 *
 *   cards/route.c       from a listener to the engine that it is for; cards/step.c: to several
 *   engine/core/inbox.c      into that engine, within its bounds
 *   engine.c            life, the loop: one turn after the other
 *   engine/serve.c      a request that has come: checked, handled, answered
 *   engine/seq/sequence.c    requests of sequences; engine/general.c: those of none
 *   engine/operator/operator.c   what operators ask and change; engine/operator/lists.c: the lists
 *                                among it
 *   engine/restore.c    what a predecessor left; engine/tenants.c: another file of tenants
 *   cards/move.c        a sequence goes to another card; cards/move_target.c: its blocks, and
 *                       there; cards/move_hold.c: what waits for it meanwhile; cards/choose.c:
 *                       which one
 *   engine/seq/export.c     blocks of sequences, out and in
 *   engine/step/plan.c       plans of lanes, whose bells come as steps
 *   engine/step/step.c       admission of steps: everything that can be wrong is refused here
 *   engine/step/batch.c      from ready items to a batch on the device; engine/step/batch_end.c:
 *                            and back
 *   engine/pool/create.c       making pools, dropping them; engine/pool/size.c: their geometry
 *   engine/pool/resize.c     more blocks for a pool, or fewer
 *   engine/tier/tier.c       blocks in tiers; engine/tier/mover.c, mover_*.c: on their way;
 *                            engine/tier/disk.c
 *   engine/tier/idle.c       blocks of idle sequences, which make way for others and come back
 *   engine/core/session_run.c    hello, leases
 *   engine/core/queue.c      claims, waiting, waking, deadlines; engine/core/ready.c: ready tasks
 *                            by age
 *   engine/step/canary_watch.c     a sample of outputs against the reference
 *   engine/core/answer.c     how a request leaves; cards/step_shard.c: as one card's shard
 *   engine/core/effects.c     blocks' bytes, and the updates that a device needs of tables
 *   cards/split/backend_split.c        batches of pools that are split over cards
 *   cards/session.c, cards/names.c, cards/note.c, cards.c: what engines of several cards share
 *   engine/core/pool_table.c, engine/core/pace.c, engine/core/sleep.c, engine/core/status.c,
 *   engine/core/health.c, engine/core/trace.c
 *
 * A task is a request inside the engine. A step's task has an item for each of its sequences:
 *
 *   waiting   in its sequence's queue: an older item or control request comes first
 *   ready     it holds a claim on (sequence, layer); in its task's ready list, the task in its
 *             pool's ready queue. Claims never collide, so any set of ready items may be one batch
 *   active    in a batch that is built or in flight
 *   done      its status is set
 *
 * A control request on a sequence waits in the same queue, with one item, until no claim is left.
 * Releasing a claim puts the sequence on the wake list; wakes run between the other activities,
 * never inside them.
 */
#ifndef ATTND_DAEMON_ENGINE_CORE_STATE_H
#define ATTND_DAEMON_ENGINE_CORE_STATE_H

#include <pthread.h>
#include <stdatomic.h>
#include <sys/queue.h>

#include "cache/kv_idle.h"
#include "cache/kv_pool.h"
#include "cache/kv_seq.h"
#include "cache/tier_store.h"
#include "daemon/engine/core/engine.h"
#include "daemon/engine/core/trace.h"
#include "daemon/request/pool_spec.h"
#include "daemon/request/session.h"

enum {
    MAX_CLAIMS = 8, /* layers of one sequence in work at once; more wait */
    WHY_BYTES = 256,
};
#define SEQ_NONE UINT32_MAX
#define CLAIM_ALL UINT32_MAX /* in place of a layer: the item wants its sequence to itself */

struct canary_watch;
struct lane;
struct task;
struct pool;
struct peers_ops;
struct split;
struct tier_disk;

enum item_state { ITEM_WAITING, ITEM_READY, ITEM_ACTIVE, ITEM_DONE };

struct item {
    TAILQ_ENTRY(item) link; /* of its sequence's queue or its task's ready list */
    struct task *task;
    uint32_t seq; /* kv_seq_id; SEQ_NONE: its name is not, or no longer, of a sequence */
    uint32_t pos, n_tokens;
    uint32_t row; /* its first token in the step's tensors */
    enum item_state state;
};
TAILQ_HEAD(item_list, item);

/* What the queue asks of a task, whatever kind of request it is. */
struct task_ops {
    /* The item has left its sequence's queue. Its turn has come: it has its claim, if it is of a
     * layer; or, seq SEQ_NONE, its sequence was closed, and its name must be looked up again. */
    void (*wake)(struct engine *e, struct item *it);
    /* Ends all of the task that is not in a batch. The task may be gone. */
    void (*refuse)(struct engine *e, struct task *t, attn_status st, const char *why);
};

enum task_place { TASK_NOWHERE, TASK_FRESH, TASK_WOKEN }; /* in the pool's ready queue */

struct task {
    const struct task_ops *ops;
    struct request *req;
    TAILQ_ENTRY(task) held; /* of all held, oldest first */
    uint64_t stamp; /* order of arrival */
    uint32_t session; /* slot */
    uint32_t layer; /* or CLAIM_ALL */
    uint32_t n_items, n_done, n_active;

    /* of a step */
    struct pool *pool;
    uint32_t flags;
    bool was_launched; /* an item has been in a batch */
    struct wire_step_layout layout;
    struct item_list ready_items;
    uint32_t n_ready, n_ready_tokens;
    enum task_place place;
    TAILQ_ENTRY(task) fresh; /* engine/core/ready.c, as far as heap_child */
    struct task *heap_prev, *heap_next, *heap_child;
    uint8_t *payload; /* of the reply; NULL until an item is launched */
    size_t head_room; /* bytes before payload, for the reply's head */
    uint32_t first_failed; /* item; n_items: none */
    char why[WHY_BYTES]; /* of first_failed */
    int32_t *item_status; /* [n_items] */

    struct item items[]; /* a control request's only one is its place in its sequence's queue */
};
TAILQ_HEAD(task_list, task);

/* The engine's side of a sequence; index is kv_seq_id. */
struct seq_state {
    struct item_list waiting;
    uint64_t step_stamp; /* the last step that named it: finds duplicates */
    uint16_t claimed[MAX_CLAIMS]; /* layers */
    uint8_t n_claims;
    uint8_t n_active; /* claims whose item is in a batch */
    bool is_copying; /* its active item replaces a shared block: nothing else runs */
    bool is_on_wake_list;
    bool waits_for_room; /* its seq is in engine.for_room */
    TAILQ_ENTRY(seq_state) by_use; /* of its pool's, where idle ones make way */
    uint32_t listed_of; /* that pool plus one; 0: in no list */
    bool is_moving; /* from or to another card: nothing is done with it */
    struct trace_entry trace;
    /* Since this epoch no truncation has left fewer tokens; 0: never exported with a request for
     * it. */
    uint32_t kept_epoch, n_kept;
};

TAILQ_HEAD(seq_list, seq_state);

/* Ready tasks of a pool, oldest first: new ones arrive in order, woken ones don't. */
struct ready_queue {
    struct task_list fresh;
    struct task *woken_root; /* pairing heap */
    uint32_t n_items; /* ready items of all tasks of the pool */
};

/* What a pool's cached tokens have lately cost (engine/core/pace.c). */
struct pace_cost {
    double device_ns, n_visible; /* device time, and the cached tokens that it was for */
};

struct pool {
    kv_pool_id id;
    struct pool_spec spec;
    uint32_t tenant; /* owner; may be a tenant that is no longer configured */
    uint32_t n_made; /* blocks that it was made with; what it has is in spec and config */
    struct backend_pool_config config; /* as clients know it */
    /* What computes it: the engine's device, or of a split pool all devices together (peers.h). */
    const struct backend_ops *ops;
    struct backend *backend;
    struct backend_pool *device;
    bool has_words; /* its batches may have signals */
    uint64_t device_bytes;
    uint32_t generation; /* pools that this one's index was before */
    struct ready_queue ready;
    struct kv_effects fx; /* updates that the next batch carries to the device first */
    uint32_t n_holders; /* sessions that made or found it and live */
    struct pace_cost cost;
};

/* A session's hold of a pool. */
struct hold {
    /* the session's highest that holds it; else, up to which it has released them */
    uint64_t request;
    bool is_held;
};

struct batch {
    struct backend_batch device; /* user points back here */
    struct pool *pool;
    struct backend_item *device_items; /* [max_batch_items] */
    struct item **items; /* [max_batch_items] */
    struct backend_word *signals; /* [1 + max_batch_items] */
    struct backend_patch *patches; /* [patches_capacity + patches_margin] */
    struct backend_copy *copies; /* [copies_capacity] */
    uint32_t n_items, n_tokens, n_tasks;
    uint64_t n_visible; /* cached tokens its items see */
    uint64_t submitted_ns;
    uint64_t charged_ns; /* to its tenant, an estimate until it is back */
    bool is_in_flight;
};

/* Blocks that are moved together (engine/tier/mover.c). */
enum {
    MOVER_GROUP = 32, /* most that go out together */
    MOVER_PROMOTE = 64, /* most that come for a request at a time */
    MOVER_AHEAD = 64, /* blocks of a pool to keep available without waiting for a copy */
    MOVER_SCAN = 4096, /* of those that are evicted next, looked at */
};
struct mover_group {
    struct backend_moves moves; /* first: what done is given */
    struct engine *engine;
    void (*came)(struct engine *e, struct mover_group *g);
    struct pool *pool;
    bool is_under_way;
};

struct mover_demote { /* of a pool to host memory */
    struct mover_group group;
    struct backend_move list[MOVER_GROUP];
    struct tier_block *to[MOVER_GROUP];
    uint64_t serial[MOVER_GROUP];
    struct kv_seq_import *reading; /* held, while their bytes are read */
};
struct mover_spill { /* of host memory to the file */
    struct mover_group group;
    struct backend_move list[MOVER_GROUP];
    struct tier_block *from[MOVER_GROUP], *to[MOVER_GROUP];
};
struct mover_found {
    struct tier_block *host, *disk; /* one of them is NULL */
};
struct mover_promote { /* to a pool, by way of host memory */
    LIST_ENTRY(mover_promote) link;
    struct mover_group group; /* of what comes from the file, then of all */
    struct kv_promote *kv;
    struct task *task; /* that waits; NULL: none any more */
    uint32_t n, n_there;
    struct mover_found from[MOVER_PROMOTE];
    struct backend_move list[MOVER_PROMOTE];
};

/* Blocks in tiers (engine/tier/tier.h). */
struct engine_tier {
    struct tier_store *blocks; /* in host memory; NULL: there are no tiers */
    struct tier_store *disk_blocks; /* NULL: none on disk, as the next */
    struct tier_disk *disk;
    struct tier_store_stats last_published, last_disk_published; /* as the stats have it */
    uint64_t out_bytes, in_bytes, disk_out_bytes, disk_in_bytes; /* moved since, as the next */
    uint64_t n_disk_errors, n_waits;

    _Atomic(struct backend_moves *) came; /* done, not looked at */
    _Atomic uint32_t n_notifying; /* threads that say so just now */
    struct mover_demote demote;
    struct mover_spill spill;
    LIST_HEAD(, mover_promote) promotions;
    struct mover_found found[MOVER_PROMOTE]; /* of the promotion that begins */
    uint32_t n_found;
    bool has_met; /* it came upon what another promotion brings */
    struct task_list queue; /* to be run again when something has come */
    uint32_t **kept; /* [max_pools][n_blocks] low words of the serials that have a copy in a tier */
    struct kv_evictable *next_out; /* [MOVER_SCAN] */
    bool has_changed; /* pools' blocks have changed since the last mover_demote_next */
    uint64_t out_at_ns, disk_at_ns; /* after an error: no demotion before this time */
    uint64_t n_spilled_of; /* blocks.filled when nothing was left to spill */
};

/* Blocks of idle sequences (engine/tier/idle.h). */
struct engine_idle {
    struct seq_list *by_use; /* [max_pools] oldest first; NULL: none make way, as all below */
    struct mover_group out, in;
    struct kv_idle_move *out_move, *in_move; /* under way; NULL: nothing is */
    uint64_t out_for; /* stamp of the request that what goes makes way for */
    bool is_out_void; /* an older one asks for its sequence: it stays */
    bool is_registered;
    struct backend_move out_list[MOVER_GROUP], in_list[MOVER_PROMOTE];
    uint64_t out_bytes, in_bytes, n_waits, n_damaged; /* since they were published */
};

/* A sequence that moves to another card (cards/move.c). */
struct engine_leave {
    struct card_move *move; /* the one that this engine has at work; NULL: none */
    uint32_t seq; /* the sequence; SEQ_NONE: it was closed */
    uint32_t n_there; /* leading blocks whose bytes are at the target */
    uint32_t n_valid; /* its first blocks that have not changed since they were copied */
    struct kv_seq_import *reading; /* held, while their bytes are read; NULL: none */
    uint32_t reading_of; /* pool */
    bool wants_stop; /* little is left: the rest goes when nothing is in work */
    bool is_stopped; /* requests for the sequence are held back, and all behind them */
    bool is_there; /* the other card has all of it */
    uint64_t wanted_ns, stopped_ns;
    uint64_t looked_ns, looked_stamp,
        busy_ns[CONFIG_MAX_DEVICES]; /* at the last look at the load */
    struct request *held, *held_last; /* back */
};

/* What of a pool any thread may read (published.h). */
struct pool_published {
    _Atomic uint64_t blocks, free, cached, tiered, sequences, bytes;
    _Atomic bool is_split; /* its sequences are the primary's */
};

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
    struct peers *peers; /* never NULL: parts.peers, or: */
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
    struct engine_leave leave;
    STAILQ_HEAD(, request) watchers; /* that wait for something to be logged */
    _Atomic uint32_t n_watchers;
    pthread_t thread;
    bool has_thread, has_stopped;
    attn_status stopped_with;
};

#endif
