/* hot.h: steps whose queries choose blocks, of sequences of which blocks are in idle memory: a hot
 * set is on the device, and what is chosen comes back.
 *
 * Choices go by summaries, so they are what they would be with all blocks there. An item goes into
 * a batch as any other does: it appends, its queries choose, and those compute whose blocks are
 * there. The batch says what was chosen. Its append is committed; if a query missed a block, the
 * item is not answered but goes back to its sequence's queue, the blocks of the first queries that
 * missed any are brought back (idle.h), as many queries as have room, and these are computed by
 * another batch, which attends alone, as that of a repeated step. And so on. What is not chosen for
 * long makes way first. If the blocks of one query do not fit, its item is "out of blocks"; what
 * was appended stays, as with any item that fails behind its append.
 *
 * An item of which no query sees more blocks than it may choose needs those that it sees, one that
 * only appends to a sequence whose steps choose those that it writes. Items of full layers and of
 * parts need all of their sequence's blocks, as steps that do not choose do.
 * Engine thread.
 */
#ifndef ATTND_DAEMON_ENGINE_TIER_HOT_H
#define ATTND_DAEMON_ENGINE_TIER_HOT_H

#include "daemon/engine/core/state.h"

/* In its request's arena. */
struct hot_item {
    uint32_t n_entries; /* of the table that its queries see */
    uint32_t first, n; /* the queries that are computed next: all, or some that missed blocks */
    bool is_whole; /* its queries visit all that they see, or it has none */
    bool is_appended; /* it was in a batch: its tokens are committed, it only attends */
    bool is_partial; /* in the latest batch, some of the table's blocks were away */
    uint8_t *needs; /* [n_entries] as idle_ask has it */
    uint32_t *table; /* [n_entries] as the latest batch had it; NULL: none was away yet */
    uint32_t *chosen; /* [n_tokens][num_kv_heads][n_chosen] NULL: no query has missed a block */
    bool *has_missed; /* [n_tokens] as of the latest batch that each was in */
};

/* Before the item is taken into a batch: it->hot is what it needs, or NULL: all that its sequence
 * has. ATTN_ENOMEM. */
attn_status hot_prepare(struct engine *e, struct item *it);
/* Whether the item has tokens to append. */
static inline bool item_appends(const struct item *it)
{
    return (it->task->flags & WIRE_STEP_APPEND) && (it->hot == NULL || !it->hot->is_appended);
}
/* How much of a batch's memory the item's choices take: uint32_t. */
uint32_t hot_chosen(const struct item *it);
/* Makes d, which has all of the item, what is computed next; chosen: [hot_chosen]. */
void hot_launch(struct engine *e, const struct item *it, uint32_t *chosen, struct backend_item *d);
/* The batch with d is back, and the item's tokens are committed. *out_again: queries have missed
 * blocks, and it is to go into another batch. ATTN_ENOMEM. */
attn_status hot_came(struct engine *e, struct item *it, const struct backend_item *d,
                     bool *out_again);

#endif
