/* kv_idle.h: blocks of sequences move to host memory (idle memory) when a pool runs out, and come
 * back.
 *
 * Idle memory belongs to the caller; it is counted in pages and outlives the process as the arena
 * does. The sequence's row of the block table says where a block's bytes are: an entry with
 * KV_PLACE set names the page at which they begin instead of a block. The entry is truth and
 * changes in one store: on the way out, when the bytes are in idle memory and the block is not yet
 * released; on the way in, when the block has the bytes and the pages are not yet free. So a kill
 * at any instruction leaves each block in one place. Which pages are free is derived.
 *
 * Only blocks that a single sequence refers to move out; a published one is no longer published
 * then, and nothing is published from the first entry on that is out. Blocks that a fork reads
 * through its source's table stay, and so does such a fork. An append needs the entries that it
 * writes, a fork, a move and a commit of a tree's path need all (ATTN_EOVERLOAD). Truncating,
 * closing, adopting and giving ids need none. So a sequence can be in use while blocks that it does
 * not write are out.
 *
 * The caller copies the bytes between begin and end. Until end, neither block nor pages are used
 * for anything else, whatever happens to the sequence: an append that begins meanwhile and writes
 * such a block replaces it by a copy. Before an end of a move out, the caller waits for launches
 * that read the sequence. Thread: the engine's.
 *
 * Idle memory is not a part of the memory for evicted blocks: it must be one memfd from the start
 * and outlive the process, while memory for evicted blocks is taken in pieces and is lost with the
 * process, and neither may crowd out the other. For the same reason idle blocks are never written
 * to the file.
 */
#ifndef ATTND_CACHE_KV_IDLE_H
#define ATTND_CACHE_KV_IDLE_H

#include <sys/queue.h>

#include "cache/kv.h"

#define KV_PLACE (UINT32_C(1) << 31)
#define KV_PAGE_BYTES 4096

static inline bool kv_is_place(uint32_t entry)
{
    return (entry & KV_PLACE) != 0;
}

struct kv_idle_entry {
    uint32_t index; /* in the sequence's table */
    uint32_t block, page;
    bool is_good; /* set by the caller before the end: the bytes have been copied */
    bool is_gone; /* the sequence has released the entry meanwhile */
};
struct kv_idle_move {
    LIST_ENTRY(kv_idle_move) link;
    uint32_t pool, seq; /* seq: UINT32_MAX once it is closed */
    bool is_in;
    uint32_t n;
    struct kv_idle_entry entries[];
};

/* How many blocks of the sequence could move out now; 0 also if the sequence has to stay. */
uint32_t kv_idle_movable(const struct kv *kv, kv_seq_id seq);
/* Whether the block of this entry of its table could. */
bool kv_idle_may_go(const struct kv *kv, kv_seq_id seq, uint32_t index);
/* How many entries of the sequence's table have their blocks in idle memory. */
uint32_t kv_idle_n_paged_out(const struct kv *kv, kv_seq_id seq);
/* The same, for all sequences of a pool. */
uint32_t kv_idle_pool_paged_out(const struct kv *kv, kv_pool_id pool);
/* True if all layers have the same number of tokens; otherwise the sequence is in the middle of
 * one. */
bool kv_idle_is_even(const struct kv *kv, kv_seq_id seq);

/* Begins to move out up to n_most of the sequence's blocks and takes pages for them: those of these
 * entries of its table, in this order, as long as there are pages; NULL: the last ones first. Those
 * that may not move, or are out, are left. The result goes to kv_idle_out_end. NULL: nothing can
 * move, appends are outstanding, there is no room, or no memory. */
struct kv_idle_move *kv_idle_out_begin(struct kv *kv, kv_seq_id seq, const uint32_t *indices,
                                       uint32_t n_most);
/* Ends a move out: the blocks of good entries are now in idle memory and free in the pool, except
 * those that were changed, shared or released meanwhile. Returns how many moved. Frees m. */
uint32_t kv_idle_out_end(struct kv *kv, struct kv_idle_move *m);

/* Begins to bring back up to n_most of the sequence's blocks and takes blocks for them: those of
 * these entries of its table, in this order, as long as there are blocks; NULL: the first ones
 * first. Those that are not out are left. The result goes to kv_idle_in_end. NULL: nothing is out,
 * there is no free block, or no memory. */
struct kv_idle_move *kv_idle_in_begin(struct kv *kv, kv_seq_id seq, const uint32_t *indices,
                                      uint32_t n_most);
/* Ends a move in: good entries name blocks again and are added to fx, which must have room for all
 * of m. Returns how many came back. Frees m. */
uint32_t kv_idle_in_end(struct kv *kv, struct kv_idle_move *m, struct kv_effects *fx);

#endif
