/* tier.h: keeps blocks that pools have no room for in host memory (cache.host_memory) and in a file
 * (cache.disk_path).
 *
 * The cache decides which blocks go next, what it looks for and what it evicts (kv_tier_ops); the
 * stores allocate places and decide what leaves them (cache/tier_store.h). The mover
 * (engine/tier/mover.c) moves whole blocks in groups, in parallel with batches: out of pools and
 * out of host memory ahead of eviction, and back when a sequence is opened with their tokens. What
 * can't be moved is computed again: no request fails for it.
 *
 * A tenant's bytes in the stores count against its quotas (host_bytes, disk_bytes), charged when a
 * store allocates a place. At the quota, the tenant's own blocks in the same pool make way.
 */
#ifndef ATTND_DAEMON_ENGINE_TIER_TIER_H
#define ATTND_DAEMON_ENGINE_TIER_TIER_H

#include "daemon/engine/core/state.h"

/* ATTN_ENOMEM; ATTN_EINVAL: why names the setting that cannot be met. */
attn_status tier_init(struct engine *e, char *why, size_t why_bytes);
void tier_fini(struct engine *e); /* also for a half-opened engine */
/* Waits until none of the pool's blocks is being moved; call before it is dropped or resized. */
void tier_leave_pool(struct engine *e, kv_pool_id pool);
/* Call when a pool is dropped: drops all of its blocks in the tiers. */
void tier_forget_pool(struct engine *e, kv_pool_id pool);
/* Call when a pool was resized; none of its blocks may be moving. */
void tier_resized_pool(struct engine *e, kv_pool_id pool);
/* Adds what has changed since the last call to the statistics. */
void tier_publish(struct engine *e);

#endif
