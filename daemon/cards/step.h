/* step.h: splits a step over the cards that have its sequences. */
#ifndef ATTND_DAEMON_CARDS_STEP_H
#define ATTND_DAEMON_CARDS_STEP_H

#include "daemon/cards/cards.h"

/* The cards that have items of a step, or of a plan's step, as bits. */
uint32_t cards_of_step(struct cards *c, const struct request *req);
/* Sends each card in of_cards its shard; the engine that finishes last answers the step. from: the
 * engine that had the step; NULL: it is not admitted yet. */
void cards_step_split(struct cards *c, struct request *req, struct engine *from, uint32_t of_cards);
/* Routes a shard's request again, because its items may have moved: it is split further if need
 * be. */
void cards_shard_again(struct cards *c, struct request *req);

#endif
