/* gauges.h: what the stats say of the engine's cache, sessions and pools. Gauges are sums
 * over all engines: what this one's share has changed by is added. */
#ifndef ATTND_DAEMON_ENGINE_GAUGES_H
#define ATTND_DAEMON_ENGINE_GAUGES_H

#include "daemon/engine/core/state.h"

void gauges_publish(struct engine *e);
/* What the pools hold, now and then. */
void gauges_publish_pools(struct engine *e, uint64_t now_ns);

#endif
