/* tensors.h: picks what one card computes out of a batch's tensors, and puts its outputs back among
 * those of the others. Pure; the batch's own items are only read.
 */
#ifndef ATTND_DAEMON_CARDS_SPLIT_TENSORS_H
#define ATTND_DAEMON_CARDS_SPLIT_TENSORS_H

#include <string.h>

#include "daemon/cards/split/geometry.h"

struct shard_tensors {
    const struct pool_split *split;
    const struct backend_pool_config *config; /* of the whole pool */
    const struct backend_item *whole; /* [n_whole] */
    uint32_t n_whole;
    struct backend_item *items; /* items for the device, appends first; grown as needed */
    uint32_t n_items, n_appends;
    uint8_t *staging; /* as large as needed, in memory of the device's host_alloc */
    uint8_t *outputs; /* split by tokens: as large as needed, where the device writes */
    /* Copies tensors that lie in memory which the host can't access (as backend_ops.rows_copy);
     * copied is the first error, ATTN_OK before. NULL: all tensors are in host memory. */
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

/* Split by heads: a card has as many items as the batch. The card's heads of a single token are one
 * piece of the row and are used in place; those of several tokens are gathered in staging, and
 * their outputs are copied back. */
uint64_t heads_staging_bytes(const struct shard_tensors *t);
void heads_scatter(struct shard_tensors *t);
void heads_gather(struct shard_tensors *t);

/* Split by tokens: a device has its tokens of a sequence one behind another. An item becomes an
 * append of the card's tokens and queries over the card's keys. Queries make one item as long as
 * each sees one key more than the one before, or the same keys (BACKEND_FULL); those of a dilated
 * layer, and those that choose blocks, are one item at their positions in the sequence. Outputs are
 * partial, with an lse, and lie at the same place in each card's outputs. */
uint32_t tokens_items_max(const struct shard_tensors *t);
uint64_t tokens_staging_bytes(const struct shard_tensors *t);
uint64_t tokens_output_bytes(const struct shard_tensors *t); /* a multiple of 64 */
void tokens_scatter(struct shard_tensors *t);
/* How to merge the partial outputs when those of all cards are there; returns the number of merges.
 * out_list: [n_whole]. Reads only config and whole of t. */
uint32_t tokens_merges(const struct shard_tensors *t, struct backend_merge *out_list);

#endif
