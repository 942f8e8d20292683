/* extremes.h: what queries of a pool that is split by tokens choose blocks by. A device has a
 * stripe of each block's keys, so the extremes of a block (kernels/backend.h, backend_extremes) are
 * joined from all devices and given to all: then every device chooses the same blocks. Here is
 * which blocks have been given. The primary's thread.
 */
#ifndef ATTND_DAEMON_CARDS_SPLIT_EXTREMES_H
#define ATTND_DAEMON_CARDS_SPLIT_EXTREMES_H

#include "kernels/backend.h"

struct split_extremes {
    uint8_t *has; /* [n_blocks][num_layers] of the pool: devices have the extremes of all stripes;
                     NULL: no query has chosen yet, or nothing is known */
};

/* Nothing is known any more: devices may have lost what they were given. */
void extremes_forget_all(struct split_extremes *x);
/* The block's bytes change. */
void extremes_forget(struct split_extremes *x, const struct backend_pool_config *whole,
                     uint32_t block);

/* Blocks whose extremes have to be joined before a batch attends. Owned; grown as needed. */
struct extremes_list {
    struct backend_block_layer *list; /* [n] */
    uint32_t n, capacity;
};

/* Forgets what the batch writes, and lists what its queries have the choice of and what devices
 * lack. ATTN_ENOMEM */
attn_status extremes_find(struct split_extremes *x, const struct backend_pool_config *whole,
                          const struct backend_batch *batch, struct extremes_list *out);
/* All devices are given those of the list. */
void extremes_note(struct split_extremes *x, const struct backend_pool_config *whole,
                   const struct extremes_list *list);

/* Bytes of one block's extremes in one layer. */
uint64_t extremes_bytes(const struct backend_pool_config *whole);
/* Joins the extremes of n blocks that n_cards devices have made, into those of each of them. */
void extremes_join(const struct backend_pool_config *whole, void *const *bytes, uint32_t n_cards,
                   uint32_t n);

/* Has a query of the item a choice? */
bool extremes_item_chooses(const struct backend_pool_config *whole,
                           const struct backend_item *item);

#endif
