/* step_part.h: one card's part of a step whose sequences are on several (cards/step.c). Each
 * card's engine has a request of its own over the same message, computes the items that are its
 * own in place and passes over the others; outputs go into one reply.
 */
#ifndef ATTND_DAEMON_CARDS_STEP_PART_H
#define ATTND_DAEMON_CARDS_STEP_PART_H

#include "daemon/cards/cards.h"
#include "daemon/engine/core/state.h"

/* One card's request. */
struct step_part {
    struct request req; /* first: part_reply finds the part by it */
    struct step_part *next; /* of the whole's, made before it */
    struct step_whole *whole;
    uint32_t number, card;
    bool is_answered; /* item by item; else it was refused as a whole: */
    attn_status refused;
    char why[WHY_BYTES];
};

struct step_whole {
    struct cards *cards;
    struct request *req;
    _Atomic uint32_t n_left; /* parts */
    pthread_mutex_t lock; /* of the rest */
    bool has_task;
    struct backend_pool_config config; /* as the next, of any part that was answered */
    struct wire_step_layout layout;
    uint32_t flags;
    size_t head_room; /* with payload */
    uint8_t *payload; /* of the reply; NULL: nothing was computed */
    uint32_t first_failed; /* item, of the answered parts */
    char why[WHY_BYTES]; /* of that */
    struct step_part *parts; /* the latest */
    uint32_t n_parts;
    _Atomic uint32_t *part_of; /* [n_items] number of its part */
    int32_t item_status[]; /* [n_items] */
};

/* All on the thread of the engine whose part it is. */

/* Whether the item is of another card. */
bool cards_step_is_foreign(const struct request *req, uint32_t item);
/* The item is the part's. Any thread. */
bool cards_step_is_of(const struct step_part *part, uint32_t item);
/* The step's message is counted with this part of it. */
bool cards_step_counts(const struct request *req);
/* The outputs go where those of the other parts do, behind `head` bytes. As step_reserve_reply. */
attn_status cards_step_reserve(struct task *t, size_t head);
/* All items are done: their statuses are noted. What the part is answered with. */
attn_status cards_step_part_done(struct task *t);

#endif
