/* demote.h: demotion of blocks.
 *
 * From a pool: while it has few free blocks, those that are evicted next are copied to host memory,
 * so that their eviction need not wait. They are held meanwhile, so that they are not overwritten.
 * An item that needs more blocks than have a copy waits in its sequence's queue for the next group;
 * its batch goes without it.
 *
 * From host memory: likewise to the file, for the store's next blocks to go. The engine never waits
 * for the file: if it falls behind, blocks are lost to the cache.
 */
#ifndef ATTND_DAEMON_ENGINE_TIER_DEMOTE_H
#define ATTND_DAEMON_ENGINE_TIER_DEMOTE_H

#include "daemon/engine/core/state.h"

attn_status mover_demote_init(struct engine *e); /* ATTN_ENOMEM */
void mover_demote_fini(struct engine *e); /* only when no move is running */
/* Makes room for n more blocks. true: blocks to be evicted are still being copied, ask again when a
 * copy ends; false: there is room, or there never will be. */
bool mover_makes_room(struct engine *e, struct pool *p, uint64_t n);
/* Whether n blocks become available once running demotions end. */
bool mover_holds(struct engine *e, const struct pool *p, uint64_t n);
/* Notes that the block has a copy in a tier. */
void mover_note_kept(struct engine *e, const struct pool *p, uint32_t block, uint64_t serial);
/* Call when the pool is dropped or resized: forgets which of its blocks have a copy. */
void mover_forget_pool(struct engine *e, kv_pool_id pool);
/* Begins to copy the next blocks of pools with few free ones to host memory. */
void mover_demote_next(struct engine *e);
/* Begins to copy the next blocks without a copy there to the file, if host memory is nearly
 * full. */
void mover_spill_next(struct engine *e);

#endif
