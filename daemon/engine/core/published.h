/* published.h: what an engine lets any thread read of its pools and its memory, as of its last
 * look, and the sums over all devices. */
#ifndef ATTND_DAEMON_ENGINE_CORE_PUBLISHED_H
#define ATTND_DAEMON_ENGINE_CORE_PUBLISHED_H

#include "daemon/engine/core/state.h"

/* Of a daemon with several devices: publishes what this one's pools have now. The engine's
 * thread. */
void pools_publish(struct engine *e);

struct pool_count {
    uint64_t blocks, free, cached, tiered, sequences, bytes; /* free includes cached */
};
/* Of all devices: this one's as it is now, the others' as they last published it. The engine's
 * thread. */
struct pool_count pool_count_all(struct engine *e, const struct pool *p);
/* The least that any device has left of its KV memory. The engine's thread. */
uint64_t least_free_bytes(const struct engine *e);
/* What the caches of all devices count, added. Any thread. */
void kv_stats_all(const struct engine *e, struct kv_stats *out_sum);

#endif
