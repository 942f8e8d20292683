/* engine_tier.h: what is evicted from pools goes to host memory and comes back (cache.host_memory).
 *
 * The cache says what goes and what it looks for (kv_elsewhere); the tier's store has the places
 * (cache/host_tier.h); the backend moves whole blocks. The engine's thread waits for each. What
 * can't be moved is computed anew: no request fails for it.
 */
#ifndef ATTND_DAEMON_ENGINE_TIER_H
#define ATTND_DAEMON_ENGINE_TIER_H

#include "daemon/engine_state.h"

attn_status tier_init(struct engine *e); /* ATTN_ENOMEM */
void tier_fini(struct engine *e); /* of a half-opened engine, too */
/* A pool is dropped, and all that was of it. */
void tier_forget_pool(struct engine *e, kv_pool_id pool);
/* Adds to the stats what has changed since the last time. */
void tier_publish(struct engine *e);

#endif
