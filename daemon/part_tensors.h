/* part_tensors.h: what of a batch's tensors one card computes with, and its outputs back among
 * those of the others. Pure; the batch's own items are read only. */
#ifndef ATTND_DAEMON_PART_TENSORS_H
#define ATTND_DAEMON_PART_TENSORS_H

#include "daemon/pool_split.h"

struct part_tensors {
    const struct pool_split *split;
    const struct backend_pool_config *config; /* of the pool as a whole */
    const struct backend_item *whole; /* [n_whole] */
    uint32_t n_whole;
    struct backend_item *items; /* [max_items] what the device is told */
    uint32_t n_items, max_items;
    uint8_t *staging; /* as large as needed, in memory of the device's host_alloc */
};

/* Split by heads. One token's share of a row lies in one piece where the row is, and is computed
 * in place; of more tokens it is copied together, and outputs are copied back. */
uint64_t heads_staging_bytes(const struct part_tensors *t);
void heads_cut(struct part_tensors *t);
void heads_join(const struct part_tensors *t);

#endif
