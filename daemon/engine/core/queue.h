/* queue.h: which items may run now. A sequence has a queue of waiting items, and one claim for each
 * layer in work; a task is held from its admission until it is answered.
 *
 * The queue knows no kinds of request: two operations of the task define what happens when an
 * item's turn has come, and when the task must end early.
 */
#ifndef ATTND_DAEMON_ENGINE_CORE_QUEUE_H
#define ATTND_DAEMON_ENGINE_CORE_QUEUE_H

#include "daemon/engine/core/state.h"

attn_status queue_init(struct engine *e); /* ATTN_ENOMEM */
void queue_fini(struct engine *e); /* also for a half-opened engine */

/* Holds an admitted task: it gets its place in the order, keeps its session alive, and its deadline
 * is watched. Released when it is answered. */
void task_hold(struct engine *e, struct task *t);
void task_release(struct engine *e, struct task *t);
/* Refuses waiting and ready tasks whose deadline has passed. */
void tasks_expire(struct engine *e, uint64_t now_ns);
/* Refuses, in every task, all items that are not in a batch. */
void tasks_refuse(struct engine *e, attn_status st, const char *why);
/* The same for the tasks of one session. */
void tasks_refuse_of(struct engine *e, uint32_t session, attn_status st, const char *why);

/* Appends the item, its seq set, to its sequence's queue, or, if the queue is empty and its layer
 * is free, gives it its claim. true: it has its claim and may run now. */
bool item_enter(struct engine *e, struct item *it);
/* An item with CLAIM_ALL gives its claim back, and waits at the head of its sequence's queue. */
void item_wait_first(struct engine *e, struct item *it);
/* Removes a waiting item from its sequence's queue. */
void item_leave(struct engine *e, struct item *it);
/* An item with a claim becomes ready. */
void item_ready(struct item *it);
/* Takes a ready item out of its task's ready list; it keeps its claim. */
void item_unready(struct item *it);
/* A ready item goes back to the head of its sequence's queue. */
void item_defer(struct engine *e, struct item *it);
/* Gives back the item's claim and puts its sequence on the wake list. */
void item_release(struct engine *e, struct item *it);
/* An item whose batch is back gives its claim back, and waits for another in its sequence's queue,
 * in front of younger items. */
void item_again(struct engine *e, struct item *it);
/* item_release for an item with CLAIM_ALL. */
void item_unclaim(struct engine *e, struct item *it);
/* Ends the item; item_fail: with a status, and a reason that is kept if this is the step's first
 * item that failed. */
void item_done(struct item *it);
void item_fail(struct item *it, attn_status st, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
/* After a step's items changed: answers the step if all are done, else queues it if some are
 * ready. */
void step_advance(struct engine *e, struct task *t);

/* Claims the layer of a sequence that is not busy for work of the engine's own, as an active item
 * does; false: it is. seq_give ends it. */
bool seq_take(struct engine *e, uint32_t seq, uint32_t layer);
void seq_give(struct engine *e, uint32_t seq, uint32_t layer);
bool seq_is_busy(const struct engine *e, uint32_t seq);
/* The sequence is closed: items that waited for it look its name up again. */
void seq_closed(struct engine *e, uint32_t seq);
/* Puts the sequence on the wake list: something that its items wait for has happened. */
void seq_wake_later(struct engine *e, uint32_t seq);
/* Makes the sequence wait until a pool has room; false: it already does. */
bool seq_waits_for_room(struct engine *e, uint32_t seq);
void seqs_have_room(struct engine *e);
/* Records that the sequence, of the pool of this index, has just been used: idle ones make way in
 * the order of their last use. */
void seq_note_use(struct engine *e, uint32_t seq, uint32_t pool);
void seq_unlist(struct engine *e, struct seq_state *s);
/* Wakes the sequences on the wake list. */
void seqs_wake(struct engine *e);

#endif
