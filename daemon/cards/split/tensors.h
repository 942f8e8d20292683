/* tensors.h: what of a batch's tensors one card computes with, and its outputs back among
 * those of the others. Pure; the batch's own items are read only.
 */
#ifndef ATTND_DAEMON_CARDS_SPLIT_TENSORS_H
#define ATTND_DAEMON_CARDS_SPLIT_TENSORS_H

#include <string.h>

#include "daemon/cards/split/geometry.h"

struct shard_tensors {
    const struct pool_split *split;
    const struct backend_pool_config *config; /* of the pool as a whole */
    const struct backend_item *whole; /* [n_whole] */
    uint32_t n_whole;
    struct backend_item *items; /* items for the device, appends first; grown as needed */
    uint32_t n_items;
    uint8_t *staging; /* as large as needed, in memory of the device's host_alloc */
    uint8_t *outputs; /* split by tokens: as large as needed, where the device writes */
    /* Some of whole's tensors may lie in memory that the host does not see: this copies (as of
     * backend_ops), and copied is how that went, ATTN_OK before. NULL: all are the host's. */
    attn_status (*rows_copy)(struct backend *b, const struct backend_rows *r);
    struct backend *backend;
    attn_status copied;
};

static inline void shard_copy(struct shard_tensors *t, const struct backend_rows *r)
{
    if (t->rows_copy != NULL) {
        if (t->copied == ATTN_OK)
            t->copied = t->rows_copy(t->backend, r);
        return;
    }
    for (uint32_t i = 0; i < r->n; i++)
        memcpy((uint8_t *)r->to + i * r->to_step, (const uint8_t *)r->from + i * r->from_step,
               r->row_bytes);
}

/* Split by heads: as many items as the batch has. One token's share of a row lies in one piece
 * where the row is, and is computed in place; of more tokens it is copied together, and outputs are
 * copied back. */
uint64_t heads_staging_bytes(const struct shard_tensors *t);
void heads_scatter(struct shard_tensors *t);
void heads_gather(struct shard_tensors *t);

/* Split by tokens: a card's tokens of a sequence lie behind one another on its device. An item
 * becomes an append of those that are the card's, and queries over the card's keys: in one piece as
 * far as each query sees one key more than the one before, or the same (BACKEND_FULL); of a dilated
 * layer in one piece, at their positions in the sequence. Their outputs are partial, with an lse,
 * and lie at the same place of each card's: */
uint32_t tokens_items_max(const struct shard_tensors *t);
uint64_t tokens_staging_bytes(const struct shard_tensors *t);
uint64_t tokens_output_bytes(const struct shard_tensors *t); /* a multiple of 64 */
void tokens_scatter(struct shard_tensors *t);
/* until those of all cards are there, and are merged: where and how. out_list: [n_whole]. Of t
 * config and whole are looked at. */
uint32_t tokens_merges(const struct shard_tensors *t, struct backend_merge *out_list);

#endif
