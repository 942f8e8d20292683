/* kv_idle.h: blocks of idle sequences go to host memory (idle memory) when a pool runs out, and
 * come back.
 *
 * Idle memory is the caller's; it is counted in pages and outlives the process as the arena does.
 * Where the bytes of a block are is written in the sequence's own row of the block table: an entry
 * with KV_PLACE set names no block but the page at which its bytes begin. That is truth, and
 * changes in one store: on the way out after the bytes are there and before the block is released,
 * on the way in after the block has them and before the pages are free. So a kill at any
 * instruction leaves each block in one place. Which pages are free is derived.
 *
 * Only blocks go that one sequence alone refers to; if such a block is published, it is no more.
 * What forks without a table of their own read stays, and so do those forks. Blocks must be back
 * before the sequence is appended to, forked or moved (ATTN_EOVERLOAD); truncating, closing,
 * adopting and giving ids need no block.
 *
 * The bytes are the caller's to copy, between begin and end. Meanwhile neither block nor pages are
 * used for anything else, whatever becomes of the sequence. Thread: the engine's.
 *
 * Idle memory is not a part of the memory for evicted blocks: it must be one memfd from the start
 * and outlive the process, while what evicted blocks take comes in pieces and dies with it, and
 * neither may crowd out the other. For the same reason these blocks never go to the file.
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
    bool is_good; /* the caller sets it before the end: the bytes have been copied */
    bool is_gone; /* the sequence has released it meanwhile */
};
struct kv_idle_move {
    LIST_ENTRY(kv_idle_move) link;
    uint32_t pool, seq; /* seq: UINT32_MAX once it is closed */
    bool is_in;
    uint32_t n;
    struct kv_idle_entry entries[];
};

/* Blocks of the sequence that could go now; 0: none, or it has to stay. */
uint32_t kv_idle_movable(const struct kv *kv, kv_seq_id seq);
/* Entries of the sequence's table whose blocks have gone. */
uint32_t kv_idle_n_paged_out(const struct kv *kv, kv_seq_id seq);
/* The same of all sequences of a pool. */
uint32_t kv_idle_pool_paged_out(const struct kv *kv, kv_pool_id pool);
/* Do all layers have as many tokens? Else the sequence is in the middle of one. */
bool kv_idle_is_even(const struct kv *kv, kv_seq_id seq);

/* Takes pages for n_most of the sequence's blocks at most, the last ones of its table. NULL:
 * nothing can go, there is no room, or no memory. */
struct kv_idle_move *kv_idle_out_begin(struct kv *kv, kv_seq_id seq, uint32_t n_most);
/* Entries that are good have gone from now on and their blocks are free, except those that have
 * changed, are shared by now or were released. Returns the number that went. m is gone. */
uint32_t kv_idle_out_end(struct kv *kv, struct kv_idle_move *m);

/* Takes blocks for n_most of those that have gone at most, the first ones of the sequence's table.
 * NULL: nothing has gone, there is no block, or no memory. */
struct kv_idle_move *kv_idle_in_begin(struct kv *kv, kv_seq_id seq, uint32_t n_most);
/* Entries that are good are back; adds them to fx, which has room for all of m. Returns the number
 * that came. m is gone. */
uint32_t kv_idle_in_end(struct kv *kv, struct kv_idle_move *m, struct kv_effects *fx);

#endif
