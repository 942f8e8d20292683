/* mover.h: moves whole blocks between pools, host memory and the file, in parallel with batches:
 * out (engine/tier/demote.h) and in (engine/tier/promote.h), in groups (engine/tier/group.h).
 * Engine thread. */
#ifndef ATTND_DAEMON_ENGINE_TIER_MOVER_H
#define ATTND_DAEMON_ENGINE_TIER_MOVER_H

#include "daemon/engine/core/state.h"

attn_status mover_init(struct engine *e); /* ATTN_ENOMEM */
void mover_fini(struct engine *e); /* only when no move is running */
/* Handles finished moves and begins the next ones; called every turn. true: something had
 * finished. */
bool mover_turn(struct engine *e);
/* If n blocks are only available after running demotions, waits for these, at most 5 s. */
void mover_wait(struct engine *e, const struct pool *p, uint64_t n);
/* Waits until no block of the pool (NULL: of any pool) is being moved. false: after 5 s a move had
 * not come back. */
bool mover_drain(struct engine *e, const struct pool *p);

#endif
