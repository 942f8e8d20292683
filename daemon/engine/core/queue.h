/* queue.h: which items may run now. A sequence has a queue of items that wait, and claims,
 * one for each layer in work; a task is held from its admission until it is answered.
 *
 * The queue knows no kind of request: what to do when an item's turn has come, or when a task must
 * end early, are the two operations of its task.
 */
#ifndef ATTND_DAEMON_ENGINE_CORE_QUEUE_H
#define ATTND_DAEMON_ENGINE_CORE_QUEUE_H

#include "daemon/engine/core/state.h"

attn_status queue_init(struct engine *e); /* ATTN_ENOMEM */
void queue_fini(struct engine *e); /* of a half-opened engine, too */

/* A held task has a place among all, keeps its session alive, and its deadline is watched. */
void task_hold(struct engine *e, struct task *t);
void task_release(struct engine *e, struct task *t);
/* Refuses waiting and ready tasks whose deadline has passed. */
void tasks_expire(struct engine *e, uint64_t now_ns);
/* Refuses all of every task that is not in a batch. */
void tasks_refuse(struct engine *e, attn_status st, const char *why);
/* The same of the tasks of one session. */
void tasks_refuse_of(struct engine *e, uint32_t session, attn_status st, const char *why);

/* Puts the item, whose seq is set, into its sequence's queue. true: it has its claim and may run
 * now. */
bool item_enter(struct engine *e, struct item *it);
/* Puts the item, whose seq is set, at the head of its sequence's queue. */
void item_wait_first(struct engine *e, struct item *it);
/* The item, which waits, leaves its sequence's queue. */
void item_leave(struct engine *e, struct item *it);
/* An item with a claim becomes ready. */
void item_ready(struct item *it);
/* Takes a ready item out of its task's ready list; it keeps its claim. */
void item_unready(struct item *it);
/* A ready item goes back to the head of its sequence's queue. */
void item_defer(struct engine *e, struct item *it);
/* Gives the item's claim back; the sequence will be woken. */
void item_release(struct engine *e, struct item *it);
/* The item ends with this status; format is printed if it is the step's first failure. */
void item_done(struct item *it);
void item_fail(struct item *it, attn_status st, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
/* After items of a step changed: answers it if all are done, else queues it if some are ready. */
void step_advance(struct engine *e, struct task *t);

bool seq_is_busy(const struct engine *e, uint32_t seq);
/* The sequence is gone: what waited for it looks its name up again. */
void seq_closed(struct engine *e, uint32_t seq);
/* Something that an item of the sequence waits for has come: it is woken with the others. */
void seq_wake_later(struct engine *e, uint32_t seq);
/* Makes the sequence wait until a pool has room; false: it already did. */
bool seq_waits_for_room(struct engine *e, uint32_t seq);
void seqs_have_room(struct engine *e);
/* The sequence, of the pool of this index, has been used just now: idle ones make way in the order
 * of their last use. It does no more until then. */
void seq_note_use(struct engine *e, uint32_t seq, uint32_t pool);
void seq_unlist(struct engine *e, struct seq_state *s);
/* Wakes what waits for claims that were released. */
void seqs_wake(struct engine *e);

#endif
