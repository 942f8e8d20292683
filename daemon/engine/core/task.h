/* task.h: a request inside the engine, and the engine's state of a sequence; structs only, of the
 * engine's thread.
 *
 * A step's task has an item for each of its sequences:
 *
 *   waiting   in its sequence's queue: an older item or control request comes first
 *   ready     has a claim on (sequence, layer) and is in its task's ready list; the task is in its
 *             pool's ready queue. Claims never collide, so any set of ready items may be one batch
 *   active    in a batch that is being built or in flight
 *   done      its status is set
 *
 * A control request on a sequence waits in the same queue, as one item, until no claim is left. It
 * has its claim, on all layers, until it has had its turn, or all of them (turns.h). Releasing a
 * claim puts the sequence on the wake list; wakes run between the other activities, never inside
 * them.
 */
#ifndef ATTND_DAEMON_ENGINE_CORE_TASK_H
#define ATTND_DAEMON_ENGINE_CORE_TASK_H

#include <sys/queue.h>

#include "daemon/engine/core/trace.h"
#include "daemon/request/request.h"

enum {
    MAX_CLAIMS = 8, /* layers of one sequence in work at once; more wait */
    WHY_BYTES = 256,
};
#define SEQ_NONE UINT32_MAX
/* ends the sentence of ATTN_ENOBLOCKS */
#define MORE_BLOCKS "; close sequences, or give the pool more blocks (attnctl pool resize)"
#define CLAIM_ALL UINT32_MAX /* in place of a layer: needs the sequence exclusively */
#define CLAIMED_ALL UINT16_MAX /* as the only claim of a sequence */

struct engine;
struct pool;
struct task;
struct transfer;
struct hot_item;

enum item_state { ITEM_WAITING, ITEM_READY, ITEM_ACTIVE, ITEM_DONE };

struct item {
    TAILQ_ENTRY(item) link; /* in its sequence's queue or its task's ready list */
    struct task *task;
    uint32_t seq; /* kv_seq_id; SEQ_NONE: its name is not, or no longer, that of a sequence */
    uint32_t pos, n_tokens; /* of queries behind their keys: where they would be at its end */
    uint32_t key_base, ahead; /* as a backend's item has them */
    uint32_t row; /* its first token's row in the step's tensors */
    const struct tree_node *nodes; /* [n_tokens] of a tree; NULL: its tokens follow each other */
    struct backend_lists lists; /* what its queries visit, if the step is sparse */
    struct hot_item *hot; /* of a step that chooses blocks, if they may be away (tier/hot.h) */
    enum item_state state;
};
TAILQ_HEAD(item_list, item);

/* What the queue calls on a task, whatever kind of request it is. */
struct task_ops {
    /* Called for an item taken out of its sequence's queue. Either its turn has come, and it has
     * its claim; or seq is SEQ_NONE: its sequence was closed, and its name must be looked up
     * again. */
    void (*wake)(struct engine *e, struct item *it);
    /* Ends all items that are not in a batch. May free the task. */
    void (*refuse)(struct engine *e, struct task *t, attn_status st, const char *why);
    /* Its turn on the engine's thread has come. false: it wants another. NULL: a step's */
    bool (*run)(struct engine *e, struct task *t);
};

enum task_place { TASK_NOWHERE, TASK_FRESH, TASK_WOKEN }; /* in the pool's ready queue */

struct task {
    const struct task_ops *ops;
    struct request *req;
    TAILQ_ENTRY(task) held; /* in the list of all held, oldest first */
    uint64_t stamp; /* order of arrival */
    uint32_t session; /* slot */
    uint32_t layer; /* or CLAIM_ALL */
    uint32_t n_items, n_done, n_active;
    struct transfer *transfer; /* of an export or import that has begun; NULL: none */

    /* only for a step */
    struct pool *pool;
    uint32_t flags;
    bool was_launched; /* an item has been in a batch */
    struct wire_step_layout layout;
    struct item_list ready_items;
    uint32_t n_ready, n_ready_tokens;
    uint32_t n_listed; /* tokens of all lists, or blocks that may be chosen */
    uint32_t n_chosen; /* blocks that each query visits; 0: it chooses none */
    enum task_place place;
    TAILQ_ENTRY(task) fresh; /* fresh to heap_child: engine/core/ready.c */
    struct task *heap_prev, *heap_next, *heap_child;
    uint8_t *payload; /* of the reply; NULL until an item is launched */
    size_t head_room; /* bytes before payload, for the reply's head */
    uint32_t first_failed; /* item; n_items: none */
    char why[WHY_BYTES]; /* of first_failed */
    int32_t *item_status; /* [n_items] */

    struct item items[]; /* a control request has one */
};
TAILQ_HEAD(task_list, task);

/* The engine's state of a sequence; the index is that of kv_seq_id. */
struct seq_state {
    struct item_list waiting;
    uint64_t step_stamp; /* of the last step that named it; detects duplicates */
    uint16_t claimed[MAX_CLAIMS]; /* layers */
    uint8_t n_claims;
    uint8_t n_active; /* claims whose item is in a batch */
    bool is_copying; /* its active item replaces a shared block: nothing else runs */
    bool is_on_wake_list;
    bool waits_for_room; /* its seq is in engine.for_room */
    /* in its pool's list, the order in which idle sequences make way */
    TAILQ_ENTRY(seq_state) by_use;
    uint32_t listed_of; /* that pool plus one; 0: in no list */
    bool chooses; /* blocks, as its latest step did: those that are not chosen may be away */
    bool is_moving; /* from or to another card: nothing else is done with it */
    struct trace_entry trace;
    /* n_kept: fewest tokens that truncations have left since kept_epoch. kept_epoch 0: no export
     * has asked for it. */
    uint32_t kept_epoch, n_kept;
};

TAILQ_HEAD(seq_list, seq_state);

/* Ready tasks of a pool, oldest first: new ones arrive in order, woken ones don't. */
struct ready_queue {
    struct task_list fresh;
    struct task *woken_root; /* pairing heap */
    uint32_t n_items; /* ready items of all tasks of the pool */
};

#endif
