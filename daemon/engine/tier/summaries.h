/* summaries.h: what is left on the device of blocks that are in idle memory, so that queries can
 * have the choice of them: what choices go by (backend_pool_config.n_summaries). And when choices
 * last took which block.
 *
 * A summary's number follows from the pages that its block has, so nothing keeps it: blocks of a
 * pool have as many pages each, and no two the same. Which numbers are of a block that was full as
 * it went is known here alone; a successor knows of none, nor does a pool that was resized. Such
 * blocks come back before their sequence chooses again. Engine thread.
 */
#ifndef ATTND_DAEMON_ENGINE_TIER_SUMMARIES_H
#define ATTND_DAEMON_ENGINE_TIER_SUMMARIES_H

#include "daemon/engine/core/state.h"

/* Whether there may be any: the pool's backend knows them, and there is idle memory. */
bool summaries_may_be(const struct engine *e, const struct pool *p);
/* How many the pool has: one for each block of it that idle memory has room for. */
uint32_t summaries_of(const struct engine *e, const struct pool *p);
/* Whether the pool has any, as its steps choose. The first time this takes the memory of what
 * choices go by; where there is none for summaries the pool has none from now on, which is logged.
 */
bool summaries_open(struct pool *p);
/* Forgets all of the pool's: it is resized, or closed. */
void summaries_forget(struct pool *p);
/* Notes that a query has taken the block, or that it has come back for one. */
void summaries_note(struct engine *e, struct pool *p, uint32_t block);
/* Blocks of a sequence, from the first, that every layer has filled: these can have summaries. */
uint32_t summaries_n_full(const struct pool *p, const struct kv_seq_info *info);
/* Lists up to `most` entries of a sequence that may go, those that choices took longest ago first.
 * needs, [n_needs]: not 0 for those that stay; then only blocks that can have a summary go. NULL:
 * none stays. Returns how many. */
uint32_t summaries_coldest(const struct engine *e, const struct pool *p, uint32_t seq,
                           const uint8_t *needs, uint32_t n_needs, uint32_t most, uint32_t *list);

/* The blocks of a move out are to have summaries: their copies go with the pool's next batch.
 * Between this and summaries_are_settled the blocks must not be given away. */
void summaries_copy(struct engine *e, struct pool *p, const struct kv_idle_move *m);
/* The batch went to the device with the pool's copies; it came back, or was refused: true, the
 * copies are settled. */
void summaries_sent(struct engine *e, const struct batch *b);
bool summaries_came(struct engine *e, const struct batch *b, attn_status st);
/* Whether no copies are under way. give_up: none are any more, what was begun has no summaries. */
bool summaries_are_settled(const struct engine *e);
void summaries_give_up(struct engine *e);
/* The i-th block of the move out is about to go to this page. */
void summaries_went(struct engine *e, struct pool *p, uint32_t i, uint32_t page);

#endif
