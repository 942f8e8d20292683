/* demote.h: demotion, blocks on their way out.
 *
 * Out of a pool: while few blocks of it are free, those that will be evicted next are copied to
 * host memory, so that later eviction has nothing to wait for. They are held until then, so that
 * they are not overwritten while being read. An item that wants more blocks than have a copy waits
 * for the next group, in its sequence's queue; its batch goes without it.
 *
 * Out of host memory: the same with the file, for the blocks of the store that go next. The engine
 * never waits for the file: if it falls behind, blocks are lost to the cache.
 */
#ifndef ATTND_DAEMON_ENGINE_TIER_DEMOTE_H
#define ATTND_DAEMON_ENGINE_TIER_DEMOTE_H

#include "daemon/engine/core/state.h"

attn_status mover_demote_init(struct engine *e); /* ATTN_ENOMEM */
void mover_demote_fini(struct engine *e); /* when all is back */
/* Makes room for n more blocks. true: blocks to be evicted are still being copied, ask again when a
 * copy ends; false: there is room, or there never will be. */
bool mover_makes_room(struct engine *e, struct pool *p, uint64_t n);
/* Whether n blocks become available once running demotions end. */
bool mover_holds(struct engine *e, const struct pool *p, uint64_t n);
/* Notes that the block has a copy in a tier. */
void mover_note_kept(struct engine *e, const struct pool *p, uint32_t block, uint64_t serial);
/* The pool is dropped. */
void mover_forget_pool(struct engine *e, kv_pool_id pool);
/* Begins to copy what goes next: from pools where few blocks are free; */
void mover_demote_next(struct engine *e);
/* from host memory, where it is nearly full, what has no copy in the file. */
void mover_spill_next(struct engine *e);

#endif
