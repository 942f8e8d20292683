/* step_shard.h: one card's shard of a step whose sequences are on several (cards/step.c). Each
 * card's engine has a request of its own over the same message, computes the items that are its
 * own in place and passes over the others; outputs go into one reply.
 */
#ifndef ATTND_DAEMON_CARDS_STEP_SHARD_H
#define ATTND_DAEMON_CARDS_STEP_SHARD_H

#include "daemon/cards/cards.h"
#include "daemon/engine/core/state.h"

/* One card's request. */
struct step_shard {
    struct request req; /* first: shard_reply finds the shard by it */
    struct step_shard *next; /* of the whole's, made before it */
    struct step_whole *whole;
    uint32_t number, card;
    bool is_answered; /* item by item; else it was refused as a whole: */
    attn_status refused;
    char why[WHY_BYTES];
};

struct step_whole {
    struct cards *cards;
    struct request *req;
    _Atomic uint32_t n_left; /* shards */
    pthread_mutex_t lock; /* of the rest */
    bool has_task;
    struct backend_pool_config config; /* as the next, of any shard that was answered */
    struct wire_step_layout layout;
    uint32_t flags;
    size_t head_room; /* with payload */
    uint8_t *payload; /* of the reply; NULL: nothing was computed */
    uint32_t first_failed; /* item, of the answered shards */
    char why[WHY_BYTES]; /* of that */
    struct step_shard *shards; /* the latest */
    uint32_t n_shards;
    _Atomic uint32_t *shard_of; /* [n_items] number of its shard */
    int32_t item_status[]; /* [n_items] */
};

/* All on the thread of the engine that has the shard. */

/* Whether the item is of another card. */
bool cards_step_is_foreign(const struct request *req, uint32_t item);
/* The item is the shard's. Any thread. */
bool cards_step_is_of(const struct step_shard *shard, uint32_t item);
/* The step's message is counted with this shard of it. */
bool cards_step_counts(const struct request *req);
/* The outputs go where those of the other shards do, behind `head` bytes. As step_reserve_reply. */
attn_status cards_step_reserve(struct task *t, size_t head);
/* All items are done: their statuses are noted. What the shard is answered with. */
attn_status cards_step_shard_done(struct task *t);

#endif
