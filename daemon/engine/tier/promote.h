/* promote.h: promotion of blocks. An open whose tokens are in a tier becomes a task and waits.
 * Blocks in the file come to host memory first; then all go to blocks that the cache has set aside
 * (kv_promote_begin), and the cache publishes these. Then the open is run again: it finds them, or
 * begins the next part. If they replace blocks that have no copy yet, these are copied first.
 *
 * Blocks keep their serials, so blocks chained to them are found, too. If two opens want the same
 * blocks, one waits for the other's promotion.
 */
#ifndef ATTND_DAEMON_ENGINE_TIER_PROMOTE_H
#define ATTND_DAEMON_ENGINE_TIER_PROMOTE_H

#include "daemon/engine/core/state.h"

#include "cache/kv_tier.h"

/* Begins to promote blocks of these tokens that are in a tier, unless another request already does.
 * true: the request waits as a new task; when blocks have come, its wake is called with the item's
 * seq SEQ_NONE. Its refuse must call mover_forget. */
bool mover_promotes(struct engine *e, struct pool *p, uint32_t tenant, const struct kv_tokens *t,
                    struct request *req, uint32_t session, const struct task_ops *ops);
void mover_forget(struct engine *e, struct task *t);
/* Whether a promotion into the pool is running; if so, the sequence is woken at its end. */
bool mover_is_bringing(struct engine *e, const struct pool *p, uint32_t seq);
/* Finds a block in the tiers for the cache (kv_tier_ops.find). */
bool mover_find(struct engine *e, struct kv_content *c);
/* Runs the requests that waited for a move again, each once. */
void mover_run_queue(struct engine *e);

#endif
