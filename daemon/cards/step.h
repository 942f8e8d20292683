/* step.h: a step on its way to the cards that have its sequences. */
#ifndef ATTND_DAEMON_CARDS_STEP_H
#define ATTND_DAEMON_CARDS_STEP_H

#include "daemon/cards/cards.h"

/* The cards that the items of a step, or of a plan's, are on, as bits. */
uint32_t cards_of_step(struct cards *c, const struct request *req);
/* Sends each card its shard; the engine that finishes last answers the step. from: the engine that
 * had it; NULL: not admitted yet. */
void cards_step_split(struct cards *c, struct request *req, struct engine *from, uint32_t of_cards);
/* A part's items may have moved. */
void cards_shard_again(struct cards *c, struct request *req);

#endif
