/* health.h: whether the engine's device works or is lost. Read with engine_health
 * (core/engine.h). */
#ifndef ATTND_DAEMON_ENGINE_CORE_HEALTH_H
#define ATTND_DAEMON_ENGINE_CORE_HEALTH_H

#include "daemon/engine/core/state.h"

/* Marks the device as lost: steps are refused from now on, and the next turn refuses those that
 * wait. */
void device_lose(struct engine *e, const char *what);

#endif
