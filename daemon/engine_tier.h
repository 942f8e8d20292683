/* engine_tier.h: blocks that pools have no room for, in host memory (cache.host_memory) and in a
 * file behind it (cache.disk_path).
 *
 * Policy picks: the cache says what goes next, what it looks for and what it evicts (kv_elsewhere);
 * the stores have the places, and say what goes of those (cache/tier_store.h). The mover
 * (engine_mover.c) moves whole blocks, many together, beside batches: ahead of their eviction out
 * of pools, ahead of theirs out of host memory to the file, and back when a sequence is opened with
 * their tokens. What can't be moved is computed anew: no request fails for it.
 *
 * A tenant's bytes in the stores are quotas (host_bytes, disk_bytes), charged as the store gives
 * out a place. At its quota the tenant's own blocks make way, those of the same pool.
 */
#ifndef ATTND_DAEMON_ENGINE_TIER_H
#define ATTND_DAEMON_ENGINE_TIER_H

#include "daemon/engine_state.h"

/* ATTN_ENOMEM; ATTN_EINVAL a setting that can't be had: why names it */
attn_status tier_init(struct engine *e, char *why, size_t why_bytes);
void tier_fini(struct engine *e); /* of a half-opened engine, too */
/* A pool is about to be dropped, or cleared: nothing of it is on its way any more when this
 * returns. Requests that waited for its blocks are run. */
void tier_leave_pool(struct engine *e, kv_pool_id pool);
/* A pool is dropped, and all that was of it. */
void tier_forget_pool(struct engine *e, kv_pool_id pool);
/* Adds to the stats what has changed since the last time. */
void tier_publish(struct engine *e);
/* Blocks of a pool's size in the stores. */
uint64_t tier_block_bytes_of(const struct engine *e, const struct pool *p);

/* engine_mover.c */

attn_status mover_init(struct engine *e); /* ATTN_ENOMEM */
void mover_fini(struct engine *e); /* when all is back */
/* Looks after what has come, and begins what is next. true: something came. */
bool mover_turn(struct engine *e);
/* n more blocks of the pool are wanted for an item of the sequence. true: those that would be
 * evicted for it are on their way out, and the sequence is woken when some are; false: they can be
 * had now, or never. */
bool mover_makes_room(struct engine *e, struct pool *p, uint32_t seq, uint64_t n);
/* Blocks of the pool come in, which are nobody's yet: the sequence is woken when they are there. */
bool mover_is_bringing(struct engine *e, const struct pool *p, uint32_t seq);
/* Blocks of these tokens that are elsewhere begin to come, or do already for somebody else. true:
 * the request waits; it becomes a task, whose wake is called, its item's seq SEQ_NONE, when there
 * are more. Ops' refuse calls mover_forget. */
bool mover_fetches(struct engine *e, struct pool *p, uint32_t tenant, const struct kv_tokens *t,
                   struct request *req, uint32_t session, const struct task_ops *ops);
void mover_forget(struct engine *e, struct task *t);
/* Nothing of the pool is on its way any more when this returns; NULL: of any. false: something does
 * not come back. */
bool mover_settle(struct engine *e, const struct pool *p);
/* The block is about to be written anew: what is under way of it is worthless. */
void mover_void(struct engine *e, const struct pool *p, uint32_t block);
/* What the cache looks for (kv_elsewhere.find). */
bool mover_find(struct engine *e, struct kv_content *c);
/* The pool is dropped. */
void mover_forget_pool(struct engine *e, kv_pool_id pool);
/* A copy of the block is in a tier. */
void mover_note_kept(struct engine *e, const struct pool *p, uint32_t block, uint64_t serial);

#endif
