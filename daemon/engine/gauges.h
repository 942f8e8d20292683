/* gauges.h: publishes statistics of the engine's cache, sessions and pools. Engine thread. */
#ifndef ATTND_DAEMON_ENGINE_GAUGES_H
#define ATTND_DAEMON_ENGINE_GAUGES_H

#include "daemon/engine/core/state.h"

void gauges_publish(struct engine *e);
/* Publishes the gauges of single pools; called less often. */
void gauges_publish_pools(struct engine *e, uint64_t now_ns);

#endif
