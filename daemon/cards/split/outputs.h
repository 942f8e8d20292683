/* outputs.h: the partial outputs of a batch of a pool that is split by tokens, and their merge into
 * the batch's outputs.
 *
 * All partial outputs lie in one piece of memory. Where every card reaches the primary's memory it
 * is there: each device stores its outputs over the link and signals a word, and the primary's
 * device merges after its own shard. Else it is host memory that all devices reach. Where the
 * primary's device can't merge, or another can't signal words, the primary merges on the host when
 * all shards are back.
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
/* Prepares the outputs of a batch over n_cards cards; t has its items. order: the batch's unique
 * number. ATTN_ENOMEM */
attn_status cards_outputs_begin(struct engine *primary, struct cards_outputs *o,
                                const struct shard_tensors *t, uint32_t n_cards, uint64_t order);
/* Where a card writes its outputs. Any engine's thread, until the batch is done. */
uint8_t *cards_outputs_of(const struct cards_outputs *o, uint32_t card);
/* Adds what follows a card's attention to its last batch: a signal, or on the primary the merge.
 * The thread of the card's engine. */
void cards_outputs_attach(const struct cards_outputs *o, uint32_t card, struct backend_batch *last);
/* Signals in place of a card's device that has failed. The thread of the card's engine. */
void cards_outputs_fail(const struct cards_outputs *o, uint32_t card);
/* Merges on the host when all outputs are there, unless a device has merged them. */
void cards_outputs_merge(const struct cards_outputs *o, const struct backend_pool_config *whole);

#endif
