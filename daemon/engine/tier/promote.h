/* promote.h: promotion, blocks on their way back. An open whose tokens are in a tier becomes a task
 * and waits. What is in the file comes to host memory first, then all of it to blocks that the
 * cache has set aside (kv_promote_begin), which it publishes when they are there; then the open is
 * run again, finds them, or begins the next part. Where they take the place of blocks that have no
 * copy yet, it waits for these to be copied first.
 *
 * Blocks keep the serials that they had, so what is chained to them is found, too. Of two opens
 * that want the same blocks one waits for the other's.
 */
#ifndef ATTND_DAEMON_ENGINE_TIER_PROMOTE_H
#define ATTND_DAEMON_ENGINE_TIER_PROMOTE_H

#include "daemon/engine/core/state.h"

#include "cache/kv_tier.h"

/* Blocks of these tokens that are in a tier begin to come, or already come for another request.
 * true: the request waits; it becomes a task; its wake is called, with the item's seq SEQ_NONE,
 * when blocks have come. Ops' refuse calls mover_forget. */
bool mover_promotes(struct engine *e, struct pool *p, uint32_t tenant, const struct kv_tokens *t,
                    struct request *req, uint32_t session, const struct task_ops *ops);
void mover_forget(struct engine *e, struct task *t);
/* Whether a promotion into the pool is running; then the sequence is woken at its end. */
bool mover_is_bringing(struct engine *e, const struct pool *p, uint32_t seq);
/* What the cache looks for (kv_tier_ops.find). */
bool mover_find(struct engine *e, struct kv_content *c);
/* Runs again, once, the requests that waited for a move. */
void mover_run_queue(struct engine *e);

#endif
