/* outputs.h: the partial outputs of a batch of a pool that is split by tokens, and how they
 * become the batch's own.
 *
 * They lie together. Where every card reaches the primary's memory it is there: each stores its own
 * over the link and signals a word, and the primary's device merges behind its own shard. Else it
 * is host memory that all devices work with. Where the primary's device has no merges, or another's
 * no words, the primary merges on the host when all shards are back.
 *
 * The primary's thread, unless said otherwise.
 */
#ifndef ATTND_DAEMON_CARDS_SPLIT_OUTPUTS_H
#define ATTND_DAEMON_CARDS_SPLIT_OUTPUTS_H

#include "daemon/cards/split/tensors.h"
#include "daemon/engine/core/state.h"

struct cards_outputs;

struct cards_outputs *cards_outputs_new(void); /* NULL: no memory */
void cards_outputs_free(struct engine *primary, struct cards_outputs *o); /* NULL is fine */
/* For a batch over so many cards, as t has its items; order: the batch's, never twice.
 * ATTN_ENOMEM */
attn_status cards_outputs_begin(struct engine *primary, struct cards_outputs *o,
                                const struct shard_tensors *t, uint32_t n_cards, uint64_t order);
/* Where a card's are. Any engine's thread, until the batch is done. */
uint8_t *cards_outputs_of(const struct cards_outputs *o, uint32_t card);
/* Adds to a card's last batch what follows its attention: a signal, or the merge. The card's
 * thread. */
void cards_outputs_attach(const struct cards_outputs *o, uint32_t card, struct backend_batch *last);
/* Signals in place of the card's device, which has failed. */
void cards_outputs_fail(const struct cards_outputs *o, uint32_t card);
/* All are there: merges what no device has merged. */
void cards_outputs_merge(const struct cards_outputs *o, const struct backend_pool_config *whole);

#endif
