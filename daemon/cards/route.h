/* route.h: sends requests to the engine of the card that they are for (engine_submit). */
#ifndef ATTND_DAEMON_CARDS_ROUTE_H
#define ATTND_DAEMON_CARDS_ROUTE_H

#include "daemon/cards/cards.h"

/* Sends a request from a listener to its card. Any thread. */
void cards_route(struct engine *e, struct request *req);
/* The cards other than the primary that have sequences of the plan's step, as bits. The primary's
 * thread. */
uint32_t cards_of_plan(struct engine *primary, const struct request *plan);
/* Routes requests again, in order, that this engine had. The route is held for writing. */
void cards_send_again(struct cards *c, struct request *list, struct engine *from);

#endif
