/* stack.h: a lock-free stack that many threads push to and one takes whole, for inboxes between
 * threads.
 *
 * Head   _Atomic(struct node *), NULL when empty.
 * Node   any struct with a member `next` of its own type. It belongs to the pusher until it is
 *        pushed and to the taker from then on: the pusher does not touch it after the exchange, so
 *        it may be freed at once.
 * Order  Pushing, taking and looking are sequentially consistent. So no wake-up is lost if the
 *        taker says that it sleeps and then checks the stack once more, and a pusher pushes and
 *        then checks whether the taker sleeps.
 *
 * Because all nodes are taken at once, one that comes back at the same address (ABA) does no harm.
 * Concurrency Kit's ck_stack orders nothing beyond the node itself and has only untyped links.
 */
#ifndef ATTND_DAEMON_BASE_STACK_H
#define ATTND_DAEMON_BASE_STACK_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>

/* Pushes a node. True if the stack was empty: then the pusher wakes the taker. Any thread. */
#define stack_push(head, node)                                                                     \
    __extension__({                                                                                \
        __typeof__(node) stack_node_ = (node);                                                     \
        __typeof__(node) stack_older_ = atomic_load_explicit((head), memory_order_relaxed);        \
        do                                                                                         \
            stack_node_->next = stack_older_;                                                      \
        while (!atomic_compare_exchange_weak((head), &stack_older_, stack_node_));                 \
        stack_older_ == NULL;                                                                      \
    })

/* Takes all nodes, as a list linked by next, oldest first; NULL: none. */
#define stack_take_all(head)                                                                       \
    __extension__({                                                                                \
        __auto_type stack_newest_ = atomic_exchange((head), NULL);                                 \
        __typeof__(stack_newest_) stack_list_ = NULL;                                              \
        while (stack_newest_ != NULL) {                                                            \
            __typeof__(stack_newest_) stack_below_ = stack_newest_->next;                          \
            stack_newest_->next = stack_list_;                                                     \
            stack_list_ = stack_newest_;                                                           \
            stack_newest_ = stack_below_;                                                          \
        }                                                                                          \
        stack_list_;                                                                               \
    })

/* Walks a list from stack_take_all. The body may free the node or push it elsewhere. */
#define stack_for_each(type, node, list)                                                           \
    for (type *node = (list), *stack_next_; node != NULL && (stack_next_ = node->next, true);      \
         node = stack_next_)

/* Any thread; another one may change the answer at once. */
#define stack_is_empty(head) (atomic_load(head) == NULL)

#endif
