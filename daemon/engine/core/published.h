/* published.h: counts of pools and memory that an engine publishes for any thread, and their sums
 * over all devices. */
#ifndef ATTND_DAEMON_ENGINE_CORE_PUBLISHED_H
#define ATTND_DAEMON_ENGINE_CORE_PUBLISHED_H

#include "daemon/engine/core/state.h"

/* Publishes the counts of this engine's pools; nothing if it is the only engine. The engine's
 * thread. */
void pools_publish(struct engine *e);

struct pool_count {
    uint64_t blocks, free, cached, reserved, tiered, sequences, bytes; /* free includes cached */
};
/* Sums over all devices: present counts of this one, the last published ones of the others. The
 * engine's thread. */
struct pool_count pool_count_all(struct engine *e, const struct pool *p);
/* The least free KV memory of any device, in bytes. The engine's thread. */
uint64_t least_free_bytes(const struct engine *e);
/* Sums of the statistics of all devices' caches. Any thread. */
void kv_stats_all(const struct engine *e, struct kv_stats *out_sum);

#endif
