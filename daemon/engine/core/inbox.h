/* inbox.h: takes requests into one given engine, within its queue's bounds. Any thread. Transports
 * use engine_submit (core/engine.h), which finds the right engine. */
#ifndef ATTND_DAEMON_ENGINE_CORE_INBOX_H
#define ATTND_DAEMON_ENGINE_CORE_INBOX_H

#include "daemon/engine/core/state.h"

/* Submits a request to this engine, or refuses it as engine_submit does. */
void engine_take(struct engine *e, struct request *req);
/* Moves a request from one engine to another, or back into the same; none of its items may be in
 * work. */
void engine_hand_over(struct engine *to, struct request *req);
/* Counts the request in this engine's queue until it is answered. false: the queue is full, and it
 * has been answered with ATTN_EOVERLOAD. */
bool engine_admit(struct engine *e, struct request *req);

#endif
