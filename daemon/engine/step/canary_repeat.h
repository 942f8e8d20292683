/* canary_repeat.h: computes again what the canary doubts. Engine thread. */
#ifndef ATTND_DAEMON_ENGINE_STEP_CANARY_REPEAT_H
#define ATTND_DAEMON_ENGINE_STEP_CANARY_REPEAT_H

#include "daemon/engine/core/state.h"

/* Launches it; it ends with canary_repeated (canary_watch.h). Call it while the engine is idle and
 * nothing is in flight. true: did something; false: there is nothing, or its sequence is busy. */
bool canary_repeat(struct engine *e);

#endif
