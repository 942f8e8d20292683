/* pool_table.h: an engine's pools and which sessions hold them. Engine thread. */
#ifndef ATTND_DAEMON_ENGINE_CORE_POOL_TABLE_H
#define ATTND_DAEMON_ENGINE_CORE_POOL_TABLE_H

#include "daemon/engine/core/state.h"

/* ATTN_ENOMEM. Undone by pools_fini (engine/pool/create.h). */
attn_status pools_init(struct engine *e);
/* Bytes of the patches and copies that wait for a pool's next batch, at most. */
uint64_t pool_effects_bytes(const struct config *c);

bool pool_is_made(const struct pool *p);
/* Finds a pool by name or handle (the tenant's), or by cache id. NULL: none. */
struct pool *pool_find(struct engine *e, const struct tenant *who, const char *name);
struct pool *pool_of_handle(struct engine *e, const struct tenant *who, uint32_t handle);
struct pool *pool_of_kv(const struct engine *e, kv_pool_id id);
uint32_t pool_handle(const struct engine *e, const struct pool *p);
/* The index of the pool that a handle names; any number if the handle is invalid. */
uint32_t pool_index_of_handle(uint32_t handle);
struct pool *pool_next(struct engine *e, struct pool *p); /* iterates; NULL: the first */

/* pool_hold: the session holds the pool by this request: the pool does not make way for others
 * until the session releases it or ends. Holds of a predecessor's sessions are not known. Copies of
 * both requests may arrive in any order: the pool is held if the highest request that holds it is
 * above the highest that released it.
 *
 * Returns  whether this request made the session a holder */
bool pool_hold(struct engine *e, struct pool *p, uint32_t session, uint64_t request);
void pool_release(struct engine *e, struct pool *p, uint32_t session, uint64_t request);
/* pools_unhold: for a session that has ended; pool_unhold_all: for a pool that is dropped. */
void pools_unhold(struct engine *e, uint32_t session);
void pool_unhold_all(struct engine *e, struct pool *p);
/* The highest request by which the session has held or released a pool; 0: none. */
uint64_t pools_last_request(const struct engine *e, uint32_t session);

/* Whether all devices compute the pool together. Its sequences and block counts are the primary's,
 * and losing a device loses them. */
static inline bool pool_spans(const struct engine *e, const struct pool *p)
{
    return p->backend != e->env.backend;
}

/* Whether this is another device's shard of such a pool: memory without sequences. */
static inline bool pool_is_shard(const struct engine *e, const struct pool *p)
{
    return pool_spans(e, p) && e->env.card > 0;
}

/* Sets the generation in the pool's handle; on other cards, to that of the primary. */
void pool_rename(struct engine *e, struct pool *p, uint32_t generation);
/* Bytes of a block in all layers. */
uint64_t pool_block_bytes(const struct pool *p);

#endif
