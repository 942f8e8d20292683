/* step_shard.h: one card's shard of a step whose sequences are on several cards (cards/step.c). */
#ifndef ATTND_DAEMON_CARDS_STEP_SHARD_H
#define ATTND_DAEMON_CARDS_STEP_SHARD_H

#include "daemon/cards/cards.h"
#include "daemon/engine/core/state.h"

/* One card's request. */
struct step_shard {
    struct request req; /* first: shard_reply finds the shard by it */
    struct step_shard *next; /* the whole's shard that was made before it */
    struct step_whole *whole;
    uint32_t number, card;
    bool is_answered; /* item by item; false: it was refused as a whole, with the next two */
    attn_status refused;
    char why[WHY_BYTES];
};

/* The step as a whole. */
struct step_whole {
    struct cards *cards;
    struct request *req;
    _Atomic uint32_t n_left; /* shards that are not finished */
    pthread_mutex_t lock; /* protects the rest */
    bool has_task; /* some shard was answered item by item; from it are the next three */
    struct backend_pool_config config;
    struct wire_step_layout layout;
    uint32_t flags;
    size_t head_room; /* bytes in front of payload */
    uint8_t *payload; /* of the reply; NULL: nothing was computed */
    uint32_t first_failed; /* first failed item of the answered shards */
    char why[WHY_BYTES]; /* why it failed */
    struct step_shard *shards; /* linked by next, the newest first */
    uint32_t n_shards;
    _Atomic uint32_t *shard_of; /* [n_items] number of each item's shard */
    int32_t item_status[]; /* [n_items] */
};

/* On the thread of the engine that has the shard, unless said otherwise. */

/* Whether the item belongs to another shard than the request's. */
bool cards_step_is_foreign(const struct request *req, uint32_t item);
/* Whether the item belongs to this shard. Any thread. */
bool cards_step_is_of(const struct step_shard *shard, uint32_t item);
/* Whether the step's message is counted with this shard, as it is with the first. */
bool cards_step_counts(const struct request *req);
/* Reserves the reply of the whole step, with `head` bytes before its payload, unless another shard
 * has; all shards write their outputs there. Errors as step_reserve_reply. */
attn_status cards_step_reserve(struct task *t, size_t head);
/* The shard's items are done: notes their statuses. Returns the status to answer the shard with. */
attn_status cards_step_shard_done(struct task *t);

#endif
