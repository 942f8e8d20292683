/* inbox.h: requests on their way into one engine; its queue's bounds. Any thread; the way to
 * whichever engine it is begins at engine_submit (engine.h). */
#ifndef ATTND_DAEMON_ENGINE_CORE_INBOX_H
#define ATTND_DAEMON_ENGINE_CORE_INBOX_H

#include "daemon/engine/core/state.h"

/* Hands a request to this engine, as engine_submit does. */
void engine_take(struct engine *e, struct request *req);
/* Moves a request from one engine to another (or back to the same), while none of its items is in
 * work. */
void engine_hand_over(struct engine *to, struct request *req);
/* Counts the request as this engine's until it is answered; false: it is, with ATTN_EOVERLOAD. */
bool engine_admit(struct engine *e, struct request *req);

#endif
