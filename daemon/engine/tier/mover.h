/* mover.h: whole blocks on their way between pools, host memory and the file, beside
 * batches: out (engine/tier/demote.h) and back (engine/tier/promote.h), in groups
 * (engine/tier/group.h). */
#ifndef ATTND_DAEMON_ENGINE_TIER_MOVER_H
#define ATTND_DAEMON_ENGINE_TIER_MOVER_H

#include "daemon/engine/core/state.h"

attn_status mover_init(struct engine *e); /* ATTN_ENOMEM */
void mover_fini(struct engine *e); /* when all is back */
/* Looks after what has come, and begins what is next. true: something came. */
bool mover_turn(struct engine *e);
/* Waits for blocks that are held as they go out of the pool, if n can't be had without them. */
void mover_wait(struct engine *e, const struct pool *p, uint64_t n);
/* Nothing of the pool is on its way any more when this returns; NULL: of any. false: something does
 * not come back. */
bool mover_drain(struct engine *e, const struct pool *p);

#endif
