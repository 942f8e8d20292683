/* extremes.h: what queries of a pool that is split by tokens choose blocks by. A device has a
 * stripe of each block's keys, so the extremes of a block (kernels/backend.h, backend_extremes) are
 * joined from all devices and given to all: then every device chooses the same blocks. Here is
 * which blocks have been given. The primary's thread.
 */
#ifndef ATTND_DAEMON_CARDS_SPLIT_EXTREMES_H
#define ATTND_DAEMON_CARDS_SPLIT_EXTREMES_H

#include "kernels/backend.h"

/* How far of a row of the table, in one layer, all blocks but the first have been given: so a step
 * looks at what is new only. */
struct extremes_known {
    uint32_t n, turn; /* entries; of another turn than the pool's it says nothing */
};

struct split_extremes {
    uint8_t *has; /* [n_blocks][num_layers] of the pool: devices have the extremes of all stripes;
                     NULL: no query has chosen yet, or nothing is known */
    struct extremes_known *known; /* [n_table_rows][num_layers]; NULL as has */
    uint32_t known_turn; /* grows when a block is forgotten that may be in any row */
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
 * lack. The caller gives them to all before the next batch is looked at, and says so
 * (extremes_note), or forgets all. Rows change by the patches of batches only. ATTN_ENOMEM */
attn_status extremes_find(struct split_extremes *x, const struct backend_pool_config *whole,
                          const struct backend_batch *batch, struct extremes_list *out);
/* All devices are given those of the list. */
void extremes_note(struct split_extremes *x, const struct backend_pool_config *whole,
                   const struct extremes_list *list);

/* Bytes of one block's extremes in one layer. */
uint64_t extremes_bytes(const struct backend_pool_config *whole);
/* How many blocks are joined at once, 1 at least: they take 256 KiB of each device's staging, and
 * some 0.2 ms of the primary's thread, between which it does other work. The batch's tenant is
 * charged for that, as for all of the time from its launch to its end. */
uint32_t extremes_slice(const struct backend_pool_config *whole);
/* Joins the extremes of n blocks that n_cards devices have made, into those of each of them. */
void extremes_join(const struct backend_pool_config *whole, void *const *bytes, uint32_t n_cards,
                   uint32_t n);

/* Has a query of the item a choice? */
bool extremes_item_chooses(const struct backend_pool_config *whole,
                           const struct backend_item *item);

#endif
