/* health.h: whether the engine has its device. Others ask with engine_health (engine.h). */
#ifndef ATTND_DAEMON_ENGINE_CORE_HEALTH_H
#define ATTND_DAEMON_ENGINE_CORE_HEALTH_H

#include "daemon/engine/core/state.h"

/* The device is lost: steps are refused from now on, and the next turn refuses what waits. */
void device_lose(struct engine *e, const char *what);

#endif
