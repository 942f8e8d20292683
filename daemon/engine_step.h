/* engine_step.h: steps as they come in. */
#ifndef ATTND_DAEMON_ENGINE_STEP_H
#define ATTND_DAEMON_ENGINE_STEP_H

#include "daemon/engine_state.h"

/* Takes a step in: refuses it as a whole, or its items become ready, wait or fail. */
void step_admit(struct engine *e, struct request *req, uint64_t now_ns);
/* Fetches what the next requests of a list will touch into the processor's caches. The first
 * request that was left out, or NULL. */
struct request *steps_warm(struct engine *e, struct request *first);

#endif
