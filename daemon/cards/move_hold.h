/* move_hold.h: holds requests back while a sequence leaves (cards/move.c). The engine's thread. */
#ifndef ATTND_DAEMON_CARDS_MOVE_HOLD_H
#define ATTND_DAEMON_CARDS_MOVE_HOLD_H

#include "daemon/cards/cards.h"

/* Holds the request back if it names the sequence that leaves, or if others are held back already.
 * Call it for requests in order. true: it is held. */
bool cards_hold(struct engine *e, struct request *req);
/* Takes the requests whose wait is over because the sequence stays, oldest first. NULL: none. */
struct request *cards_hold_end(struct engine *e);
/* Takes the requests held back and then those in the inbox, to be routed again. */
struct request *cards_hold_all(struct engine *e);

#endif
