/* engine_internal.h: what the engine's files share. Everything here belongs to the engine thread, but
 * the fields marked atomic.
 *
 * A task is a request inside the engine. A step's task has an item for each of its sequences:
 *
 *   waiting   in its sequence's queue: an older item or control request comes first
 *   ready     it holds a claim on (sequence, layer); in its task's ready list, the task in its pool's
 *             ready queue. Claims never collide, so any set of ready items may be one batch
 *   active    in a batch that is built or in flight
 *   done      its status is set
 *
 * A control request on a sequence waits in the same queue until no claim is left. Releasing a claim
 * puts the sequence on the wake list; wakes run between the other activities, never inside them.
 */
#ifndef ATTND_DAEMON_ENGINE_INTERNAL_H
#define ATTND_DAEMON_ENGINE_INTERNAL_H

#include <pthread.h>
#include <stdatomic.h>

#include "cache/kv.h"
#include "daemon/engine.h"
#include "daemon/pool.h"
#include "daemon/session.h"

enum {
    MAX_CLAIMS = 8, /* layers of one sequence in work at once; more wait */
    WHY_BYTES = 256,
    TENANT = 0,
};

struct task;
struct pool;

enum item_state { ITEM_WAITING, ITEM_READY, ITEM_ACTIVE, ITEM_DONE };

struct item {
    struct item *prev, *next; /* of its sequence's queue or its task's ready list */
    struct task *task;
    uint32_t seq; /* kv_seq_id; SEQ_NONE before it is found */
    uint32_t pos, n_tokens;
    uint32_t row; /* its first token in the step's tensors */
    enum item_state state;
};
#define SEQ_NONE UINT32_MAX

enum task_place { TASK_NOWHERE, TASK_FRESH, TASK_WOKEN }; /* in the pool's ready queue */

struct task {
    struct request *req;
    struct task *prev, *next; /* of all held, oldest first */
    struct pool *pool; /* NULL: a control request; items[0] is its place in a sequence's queue */
    uint64_t stamp; /* order of arrival */
    uint32_t session; /* slot */
    uint32_t layer, flags;
    uint32_t n_items, n_done, n_active;
    bool was_launched; /* an item has been in a batch */
    struct wire_step_layout layout;

    struct task *ready_prev, *ready_next, *ready_child; /* ready.c */
    enum task_place place;
    struct item *ready_head, *ready_tail;
    uint32_t n_ready, n_ready_tokens;

    uint8_t *payload; /* of the reply; NULL until an item is launched */
    size_t head_room; /* bytes before payload, for the reply's head */
    uint32_t first_failed; /* item; n_items: none */
    char why[WHY_BYTES]; /* of first_failed */
    int32_t *item_status; /* [n_items] */
    struct item items[];
};

/* The engine's side of a sequence; index is kv_seq_id. */
struct seq_state {
    struct item *head, *tail; /* waiting */
    uint64_t step_stamp; /* the last step that named it: finds duplicates */
    uint16_t claimed[MAX_CLAIMS]; /* layers */
    uint8_t n_claims;
    uint8_t n_active; /* claims whose item is in a batch */
    bool is_copying; /* its active item replaces a shared block: nothing else runs */
    bool is_on_wake_list;
};

/* Ready tasks of a pool, oldest first: new ones arrive in order, woken ones don't. */
struct ready_queue {
    struct task *fresh_head, *fresh_tail;
    struct task *woken_root; /* pairing heap */
    uint32_t n_items; /* ready items of all tasks of the pool */
};
struct task *ready_first(const struct ready_queue *q);
void ready_push_fresh(struct ready_queue *q, struct task *t); /* younger than all fresh ones */
void ready_push_woken(struct ready_queue *q, struct task *t);
void ready_remove(struct ready_queue *q, struct task *t); /* nothing if it is in none */

struct pool {
    kv_pool_id id;
    struct pool_spec spec;
    struct backend_pool_config config;
    struct backend_pool *device;
    uint64_t device_bytes;
    struct ready_queue ready;
    struct kv_effects fx; /* what the next batch must tell the device first */
    double device_ns, n_visible; /* of lately: device time, and cached tokens that it was for */
};

struct batch {
    struct backend_batch device; /* user points back here */
    struct pool *pool;
    struct backend_item *device_items; /* [max_batch_items] */
    struct item **items; /* [max_batch_items] */
    struct backend_patch *patches; /* [patches_capacity + patches_margin] */
    struct backend_copy *copies; /* [copies_capacity] */
    uint32_t n_items, n_tokens, n_tasks;
    uint64_t n_visible; /* cached tokens its items see */
    uint64_t submitted_ns;
    bool is_in_flight;
};

struct engine {
    const struct config *cfg;
    const struct backend_ops *ops;
    struct backend *backend;
    struct iobuf_pool *bufs;
    struct backend_info info;
    uint64_t (*now_ns)(void);
    uint64_t lease_ns;

    /* any thread */
    _Atomic(struct request *) inbox; /* newest first */
    _Atomic uint32_t is_asleep; /* engine_sleep.c, as far as polled_ns */
    _Atomic(struct engine_poller *) pollers;
    int epoll_fd, wake_fd;
    uint64_t spin_ns; /* how long to spin before the next sleep */
    uint64_t polled_ns; /* when a poller last brought something */
    _Atomic bool is_stopping, is_draining;
    _Atomic int health; /* attn_status */
    _Atomic uint32_t n_held; /* requests between engine_submit and their reply */
    _Atomic uint64_t held_bytes;
    _Atomic uint32_t max_queue_requests;
    _Atomic uint64_t max_queue_bytes;
    _Atomic uint64_t task_ns; /* recent time a request takes, for retry-after */

    struct kv *kv;
    struct session_table *sessions;
    struct seq_state *seqs; /* [max_sequences] */
    uint32_t *wake_list; /* [max_sequences] */
    uint32_t n_wakes;
    struct pool *pools; /* [max_pools]; the handle on the wire is the index + 1 */
    uint32_t n_pools;
    uint32_t n_blocks; /* block records of all pools */
    uint64_t device_bytes; /* of all pools */
    struct batch batches[BACKEND_MAX_IN_FLIGHT];
    uint32_t max_in_flight, n_in_flight;
    uint32_t n_about; /* most items lately ready or in flight at a time */
    uint64_t due_ns; /* with one batch in flight: when the next may follow */
    uint32_t patches_capacity, copies_capacity; /* of a batch */
    uint32_t patches_margin; /* room beyond, for kv_append_cancel */
    struct task *oldest, *newest;
    uint64_t next_stamp;
    uint64_t turn_ns; /* when this turn began */
    uint64_t next_deadline_ns; /* no held task has an earlier one */
    bool is_dirty; /* gauges of cache and sessions are old */
    pthread_t thread;
    bool has_thread;
};

/* engine.c */
attn_status engine_open_with_clock(const struct config *cfg, const struct backend_ops *ops,
                                   struct backend *b, struct iobuf_pool *bufs,
                                   uint64_t (*now_ns)(void), bool has_thread,
                                   struct engine **out_engine, char *why, size_t why_bytes);
/* One turn of the loop; false: nothing was done. Waits for work or a batch at most max_wait_ns. The
 * thread's body; tests without a thread call it themselves. */
bool engine_turn(struct engine *e, uint64_t max_wait_ns);
/* Every request leaves by one of these two: it is the transport's after the call. */
void engine_answer(struct engine *e, struct request *req, attn_status st); /* req->reply is built */
void engine_refuse(struct engine *e, struct request *req, attn_status st, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
void engine_fail(struct engine *e, attn_status st, const char *what); /* the device is lost */

/* engine_sleep.c */
attn_status engine_sleep_init(struct engine *e);
void engine_sleep_fini(struct engine *e); /* of a half-opened engine, too: descriptors are -1 */
/* Spins, then sleeps, until something came, somebody woke the engine, or max_ns are over. */
void engine_idle(struct engine *e, uint64_t max_ns);
bool engine_poll_pollers(struct engine *e); /* true: something came; it is in the inbox */
/* Pollers bring work so often that the next is worth looking out for. */
bool engine_is_polled(const struct engine *e);

/* engine_task.c */
void task_link(struct engine *e, struct task *t);
void task_unlink(struct engine *e, struct task *t);
/* Fetches what the next requests of a list will touch into the processor's caches. The first request
 * that was left out, or NULL. */
struct request *steps_warm(struct engine *e, struct request *first);
void step_admit(struct engine *e, struct request *req, uint64_t now_ns);
/* After items changed: answers the task if all are done, else queues it if some are ready. */
void task_settle(struct engine *e, struct task *t);
/* Ends all that is not in a batch; a task of which nothing was launched is refused as a whole. */
void task_abort(struct engine *e, struct task *t, attn_status st, const char *why);
void tasks_expire(struct engine *e, uint64_t now_ns);
/* Room for the reply's tensors. ATTN_EOVERLOAD: no buffer. */
attn_status task_reserve_reply(struct task *t);
/* The item ends with this status; format is printed if it is the step's first failure. */
void item_done(struct item *it);
void item_fail(struct item *it, attn_status st, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
/* Gives the claim of a ready or active item back; the sequence will be woken. */
void item_release(struct engine *e, struct item *it);
/* Takes a ready item out of its task's ready list; it keeps its claim. */
void item_unready(struct item *it);
/* A ready item goes back to the head of its sequence's queue. */
void item_defer(struct engine *e, struct item *it);
void seq_queue_push(struct seq_state *s, struct item *it);
bool seq_is_busy(const struct engine *e, uint32_t seq);
/* The sequence is gone: what waited for it finds its name anew. */
void seq_closed(struct engine *e, uint32_t seq);
void seqs_wake(struct engine *e);

/* engine_batch.c */
attn_status batches_init(struct engine *e);
void batches_fini(struct engine *e);
attn_status pool_effects_init(struct engine *e, struct pool *p);
void pool_effects_fini(struct pool *p);
/* Builds and submits one batch. false: nothing is ready, or the device takes no more. */
bool batch_launch(struct engine *e);
/* Sends the pool's patches alone, to make room for more. false: the device takes no more now. */
bool batch_flush_patches(struct engine *e, struct pool *p);
void batch_finish(struct engine *e, struct batch *b);

/* engine_control.c */
void control_admit(struct engine *e, struct request *req, uint64_t now_ns);
/* Runs a control request that waited; the sequence it names has no claims now. */
void control_run(struct engine *e, struct task *t);
/* Finds its sequence again, waits or runs. */
void control_dispatch(struct engine *e, struct task *t);
/* Frees sequences of expired sessions, a slice a turn. true: there is more to do. */
bool sessions_expire(struct engine *e, uint64_t now_ns);
/* ATTN_ENOTFOUND with a sentence; renews. */
attn_status session_of_request(struct engine *e, const struct request *req, uint64_t now_ns,
                               uint32_t *out_slot, char *why, size_t why_bytes);

/* engine_pool.c */
attn_status pool_create(struct engine *e, const Attnd__PoolSpec *asked, struct pool **out_pool,
                        char *why, size_t why_bytes);
struct pool *pool_find(struct engine *e, const char *name);
struct pool *pool_of_handle(struct engine *e, uint32_t handle);
uint32_t pool_handle(const struct engine *e, const struct pool *p);

#endif
