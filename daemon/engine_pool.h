/* engine_pool.h: the engine's pools: finding and making them, and their effects on the device. */
#ifndef ATTND_DAEMON_ENGINE_POOL_H
#define ATTND_DAEMON_ENGINE_POOL_H

#include "daemon/engine_state.h"

attn_status pools_init(struct engine *e); /* ATTN_ENOMEM */
void pools_fini(struct engine *e); /* of a half-opened engine, too */

struct pool *pool_find(struct engine *e, const char *name); /* NULL: none; the others, too */
struct pool *pool_of_handle(struct engine *e, uint32_t handle); /* as it is on the wire */
struct pool *pool_of_kv(struct engine *e, kv_pool_id id);
uint32_t pool_handle(const struct engine *e, const struct pool *p);

/* Makes a pool, or finds the one that was made with the same name and spec.
 * Errors   ATTN_EEXIST another spec; ATTN_EOVERLOAD max_pools; ATTN_ENOMEM; what the backend
 *          refuses; why names field and value */
attn_status pool_create(struct engine *e, const Attnd__PoolSpec *asked, struct pool **out_pool,
                        char *why, size_t why_bytes);

/* The pool's effects in the backend's form: room for the capacity and margin of patches. */
void pool_effects_export(const struct pool *p, struct backend_patch *patches,
                         struct backend_copy *copies);
/* The device may not have seen a failed batch's patches: they go again, as the tables are now. */
void pool_patch_again(struct engine *e, struct pool *p, const struct backend_patch *patches,
                      uint32_t n_patches);
/* The item's append, which is reserved, will not be; its patches are added to the effects. */
void pool_cancel_append(struct engine *e, struct pool *p, const struct item *it);

#endif
