/* route.h: requests on their way to the engine of a card (engine_submit, engine.h). */
#ifndef ATTND_DAEMON_CARDS_ROUTE_H
#define ATTND_DAEMON_CARDS_ROUTE_H

#include "daemon/cards/cards.h"

/* Sends a request of a listener to the card that it is for. Any thread. */
void cards_route(struct engine *e, struct request *req);
/* The cards but the primary that have sequences of the plan's step, a bit each. The primary's
 * thread. */
uint32_t cards_of_plan(struct engine *primary, const struct request *plan);
/* Requests that were this engine's, in order. The route is held for writing. */
void cards_send_again(struct cards *c, struct request *list, struct engine *from);

#endif
