/* cards_step.h: a step on its way to the cards that have its sequences. */
#ifndef ATTND_DAEMON_CARDS_STEP_H
#define ATTND_DAEMON_CARDS_STEP_H

#include "daemon/cards.h"

/* The cards that a step's items are on, as bits. Any thread. */
uint32_t cards_of_step(const struct cards *c, const Attnd__Step *s);
/* Sends each of them its part. Whose part is done last answers the step. */
void cards_step_split(struct cards *c, struct request *req, uint32_t of_cards);

#endif
