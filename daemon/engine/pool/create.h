/* create.h: creates, finds, drops and restores pools. Engine thread. */
#ifndef ATTND_DAEMON_ENGINE_POOL_CREATE_H
#define ATTND_DAEMON_ENGINE_POOL_CREATE_H

#include "daemon/engine/core/state.h"

void pools_fini(struct engine *e); /* also for a half-opened engine */

/* Creates a pool, or finds the one with the same name and spec. If there is no room, or it exists
 * with another size, drops pools of the tenant that have no sequences and that no session holds.
 * The backend clears what a dropped pool left in its memory (backend.h, pool_open).
 * Errors   ATTN_EEXIST another spec; ATTN_EQUOTA max_pools, the tenant's blocks; ATTN_ENOMEM; what
 *          the backend refuses; why names field and value */
attn_status pool_create(struct engine *e, const struct tenant *who, const Attnd__PoolSpec *asked,
                        struct pool **out_pool, char *why, size_t why_bytes);

/* Finds the pool without creating it. ATTN_ENOTFOUND: no such name; ATTN_EEXIST, ATTN_EINVAL as
 * above. */
attn_status pool_find_same(struct engine *e, const struct tenant *who, const Attnd__PoolSpec *asked,
                           struct pool **out_pool, char *why, size_t why_bytes);

/* Drops a pool; its memory and its place become free.
 * Errors   ATTN_EINVAL it has sequences; ATTN_EOVERLOAD the device is working on it */
attn_status pool_drop(struct engine *e, struct pool *p, char *why, size_t why_bytes);

/* Opens a pool that the cache has on the device again, over the same memory.
 * Errors   as pool_create; ATTN_ENOTFOUND; ATTN_EPROTO */
attn_status pool_restore(struct engine *e, kv_pool_id id, char *why, size_t why_bytes);

#endif
