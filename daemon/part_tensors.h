/* part_tensors.h: what of a batch's tensors one card computes with, and its outputs back among
 * those of the others. Pure; the batch's own items are read only.
 */
#ifndef ATTND_DAEMON_PART_TENSORS_H
#define ATTND_DAEMON_PART_TENSORS_H

#include "daemon/pool_split.h"

struct part_tensors {
    const struct pool_split *split;
    const struct backend_pool_config *config; /* of the pool as a whole */
    const struct backend_item *whole; /* [n_whole] */
    uint32_t n_whole;
    struct backend_item *items; /* what the device is told, appends first; as many as needed */
    uint32_t n_items;
    uint8_t *staging; /* as large as needed, in memory of the device's host_alloc */
    uint8_t *outputs; /* split by tokens: as large as needed, where the device writes */
};

/* Split by heads: as many items as the batch has. One token's share of a row lies in one piece
 * where the row is, and is computed in place; of more tokens it is copied together, and outputs are
 * copied back. */
uint64_t heads_staging_bytes(const struct part_tensors *t);
void heads_cut(struct part_tensors *t);
void heads_join(const struct part_tensors *t);

/* Split by tokens: a card's tokens of a sequence lie behind one another on its device. An item
 * becomes an append of those that are the card's, and queries over the card's keys: in one piece as
 * far as each query sees one key more than the one before, or the same (BACKEND_FULL); of a dilated
 * layer in one piece, at their positions in the sequence. Their outputs are partial, with an lse,
 * and lie at the same place of each card's: */
uint32_t tokens_items_max(const struct part_tensors *t);
uint64_t tokens_staging_bytes(const struct part_tensors *t);
uint64_t tokens_output_bytes(const struct part_tensors *t); /* a multiple of 64 */
void tokens_cut(struct part_tensors *t);
/* until those of all cards are there, and are merged: where and how. out_list: [n_whole]. Of t
 * config and whole are looked at. */
uint32_t tokens_merges(const struct part_tensors *t, struct backend_merge *out_list);

#endif
