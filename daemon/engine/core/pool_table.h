/* pool_table.h: the table of an engine's pools and the sessions that hold them. */
#ifndef ATTND_DAEMON_ENGINE_CORE_POOL_TABLE_H
#define ATTND_DAEMON_ENGINE_CORE_POOL_TABLE_H

#include "daemon/engine/core/state.h"

/* ATTN_ENOMEM; undone by pools_fini (engine/pool/create.h) */
attn_status pools_init(struct engine *e);

bool pool_is_made(const struct pool *p);
/* Of the tenant's; NULL: none; the others, too. */
struct pool *pool_find(struct engine *e, const struct tenant *who, const char *name);
struct pool *pool_of_handle(struct engine *e, const struct tenant *who, uint32_t handle);
struct pool *pool_of_kv(const struct engine *e, kv_pool_id id);
uint32_t pool_handle(const struct engine *e, const struct pool *p);
/* Which pool a handle is of; of one that is of none, any number. */
uint32_t pool_index_of_handle(uint32_t handle);
struct pool *pool_next(struct engine *e, struct pool *p); /* all in turn: behind p; NULL begins */

/* The session has the pool's handle by this request: it does not make way for others until the
 * session releases it, or ends. Not known of what a predecessor's sessions held. In whatever order
 * copies of both arrive: it is held if the highest request that asked to is above the highest up to
 * which it was released.
 *
 * Returns  whether it is held now, and was not before */
bool pool_hold(struct engine *e, struct pool *p, uint32_t session, uint64_t request);
void pool_release(struct engine *e, struct pool *p, uint32_t session, uint64_t request);
/* pools_unhold: the session has ended; pool_unhold_all: the pool is dropped. */
void pools_unhold(struct engine *e, uint32_t session);
void pool_unhold_all(struct engine *e, struct pool *p);
/* The highest request by which the session has held a pool, or released one; 0: none. */
uint64_t pools_last_request(const struct engine *e, uint32_t session);

/* Computed by all devices together: its sequences are the primary's, blocks are counted there, and
 * a lost device takes them with it. */
static inline bool pool_spans(const struct engine *e, const struct pool *p)
{
    return p->backend != e->env.backend;
}

/* A device's shard of such a pool: memory without sequences. */
static inline bool pool_is_shard(const struct engine *e, const struct pool *p)
{
    return pool_spans(e, p) && e->env.card > 0;
}

/* Clients know it by a handle of this generation (a card's pool has the primary's). */
void pool_rename(struct engine *e, struct pool *p, uint32_t generation);
/* Of all layers. */
uint64_t pool_block_bytes(const struct pool *p);

#endif
