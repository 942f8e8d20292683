/* engine_pool.h: the engine's pools: finding and making them, and their effects on the device. */
#ifndef ATTND_DAEMON_ENGINE_POOL_H
#define ATTND_DAEMON_ENGINE_POOL_H

#include "daemon/engine_state.h"

attn_status pools_init(struct engine *e); /* ATTN_ENOMEM */
void pools_fini(struct engine *e); /* of a half-opened engine, too */

/* Of the tenant's; NULL: none; the others, too. */
struct pool *pool_find(struct engine *e, const struct tenant *who, const char *name);
struct pool *pool_of_handle(struct engine *e, const struct tenant *who, uint32_t handle);
struct pool *pool_of_kv(const struct engine *e, kv_pool_id id);
uint32_t pool_handle(const struct engine *e, const struct pool *p);
/* Which pool a handle is of; of one that is of none, any number. */
uint32_t pool_index_of_handle(uint32_t handle);
struct pool *pool_next(struct engine *e, struct pool *p); /* all in turn: behind p; NULL begins */

/* The session has the pool's handle: it does not make way for others while the session lives. Not
 * known of sessions that a predecessor had. */
void pool_hold(struct engine *e, struct pool *p, uint32_t session);
/* The session is no more. */
void pools_let_go(struct engine *e, uint32_t session);

/* Makes a pool, or finds the one that was made with the same name and spec. Where there is no room,
 * pools of the tenant's are dropped that no sequence lives in and no session holds. What a
 * dropped pool has left in its memory the backend clears (backend.h, pool_open).
 * Errors   ATTN_EEXIST another spec; ATTN_EQUOTA max_pools, the tenant's blocks; ATTN_ENOMEM; what
 *          the backend refuses; why names field and value */
attn_status pool_create(struct engine *e, const struct tenant *who, const Attnd__PoolSpec *asked,
                        struct pool **out_pool, char *why, size_t why_bytes);

/* Clients know it by a handle of this generation (a card's pool has the lead's). */
void pool_rename(struct engine *e, struct pool *p, uint32_t generation);

/* Forgets a pool: its memory and its place may be another's.
 * Errors   ATTN_EINVAL sequences live in it; ATTN_EOVERLOAD the device has work of it */
attn_status pool_drop(struct engine *e, struct pool *p, char *why, size_t why_bytes);

/* Makes a pool on the device again that the cache has, over the same memory.
 * Errors   as pool_create; ATTN_ENOTFOUND; ATTN_EPROTO */
attn_status pool_restore(struct engine *e, kv_pool_id id, char *why, size_t why_bytes);

/* A block of the pool as [layer][K|V][kv_head][block_tokens][head_dim] (kv_layout.h), behind all
 * batches that the sequences which have it are in; of a split pool from and to all cards.
 * Errors   ATTN_EDEVICE and what the backend gives; of a split pool also ATTN_EOVERLOAD */
attn_status pool_block_read(struct engine *e, const struct pool *p, uint32_t block, uint8_t *out,
                            char *why, size_t why_bytes);
attn_status pool_block_write(struct engine *e, const struct pool *p, uint32_t block,
                             const uint8_t *bytes, char *why, size_t why_bytes);

/* The pool's effects in the backend's form: room for the capacity and margin of patches. */
void pool_effects_export(struct engine *e, const struct pool *p, struct backend_patch *patches,
                         struct backend_copy *copies);
/* The device may not have seen a failed batch's patches: they go again, as the tables are now. */
void pool_patch_again(struct engine *e, struct pool *p, const struct backend_patch *patches,
                      uint32_t n_patches);
/* The item's append, which is reserved, will not be; its patches are added to the effects. */
void pool_cancel_append(struct engine *e, struct pool *p, const struct item *it);

#endif
