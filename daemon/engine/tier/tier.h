/* tier.h: blocks that pools have no room for, in host memory (cache.host_memory) and in a
 * file behind it (cache.disk_path).
 *
 * Policy picks: the cache says what goes next, what it looks for and what it evicts (kv_tier_ops);
 * the stores have the places, and say what goes of those (cache/tier_store.h). The mover
 * (engine/tier/mover.c) moves whole blocks, many together, beside batches: ahead of their eviction
 * out of pools, ahead of theirs out of host memory to the file, and back when a sequence is opened
 * with their tokens. What can't be moved is computed anew: no request fails for it.
 *
 * A tenant's bytes in the stores are quotas (host_bytes, disk_bytes), charged as the store gives
 * out a place. At its quota the tenant's own blocks make way, those of the same pool.
 */
#ifndef ATTND_DAEMON_ENGINE_TIER_TIER_H
#define ATTND_DAEMON_ENGINE_TIER_TIER_H

#include "daemon/engine/core/state.h"

/* ATTN_ENOMEM; ATTN_EINVAL a setting that can't be had: why names it */
attn_status tier_init(struct engine *e, char *why, size_t why_bytes);
void tier_fini(struct engine *e); /* of a half-opened engine, too */
/* Before a pool is dropped or cleared: waits until none of its blocks is being moved, and runs the
 * requests that waited for them. */
void tier_leave_pool(struct engine *e, kv_pool_id pool);
/* A pool is dropped, and all that was of it. */
void tier_forget_pool(struct engine *e, kv_pool_id pool);
/* The pool was resized; none of its blocks is being moved. */
void tier_resized_pool(struct engine *e, kv_pool_id pool);
/* Adds to the stats what has changed since the last time. */
void tier_publish(struct engine *e);

#endif
