/* create.h: making pools, and dropping them. */
#ifndef ATTND_DAEMON_ENGINE_POOL_CREATE_H
#define ATTND_DAEMON_ENGINE_POOL_CREATE_H

#include "daemon/engine/core/state.h"

void pools_fini(struct engine *e); /* of a half-opened engine, too */

/* Makes a pool, or finds the one that was made with the same name and spec. Where there is no room,
 * or it only has another size, pools of the tenant's are dropped that no sequence lives in and no
 * session holds. What a dropped pool has left in its memory the backend clears (backend.h,
 * pool_open).
 * Errors   ATTN_EEXIST another spec; ATTN_EQUOTA max_pools, the tenant's blocks; ATTN_ENOMEM; what
 *          the backend refuses; why names field and value */
attn_status pool_create(struct engine *e, const struct tenant *who, const Attnd__PoolSpec *asked,
                        struct pool **out_pool, char *why, size_t why_bytes);

/* Finds it without making it. ATTN_ENOTFOUND: no such name; ATTN_EEXIST, ATTN_EINVAL as above */
attn_status pool_find_same(struct engine *e, const struct tenant *who, const Attnd__PoolSpec *asked,
                           struct pool **out_pool, char *why, size_t why_bytes);

/* Forgets a pool: its memory and its place may be another's.
 * Errors   ATTN_EINVAL sequences live in it; ATTN_EOVERLOAD the device has work of it */
attn_status pool_drop(struct engine *e, struct pool *p, char *why, size_t why_bytes);

/* Makes a pool on the device again that the cache has, over the same memory.
 * Errors   as pool_create; ATTN_ENOTFOUND; ATTN_EPROTO */
attn_status pool_restore(struct engine *e, kv_pool_id id, char *why, size_t why_bytes);

#endif
