/* move_hold.h: requests that are held back while a sequence leaves (cards/move.c). The engine's
 * thread. */
#ifndef ATTND_DAEMON_CARDS_MOVE_HOLD_H
#define ATTND_DAEMON_CARDS_MOVE_HOLD_H

#include "daemon/cards/cards.h"

/* The request must wait until a sequence has left: it is held back. Requests are asked in order. */
bool cards_hold(struct engine *e, struct request *req);
/* What was held back and is not any more, oldest first. */
struct request *cards_hold_end(struct engine *e);
/* All that waits, what was held back first: it is sent elsewhere. */
struct request *cards_hold_all(struct engine *e);

#endif
