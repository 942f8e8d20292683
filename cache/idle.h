/* idle.h: blocks of idle sequences in host memory, and back.
 *
 * When blocks run out, those of a sequence that nothing is in work of make way: their bytes go to
 * idle memory, which the caller has and which outlives the process as the arena does. Where they
 * are stands in the sequence's own row of the block table: a number with KV_PLACE set names no
 * block but the page of that memory at which its bytes begin. That is truth, and changes in one
 * store: out after the bytes are there and before the block is let go of, in after the block has
 * them and before the pages are free. So a kill at any instruction leaves each block in one place.
 * Which pages are free is derived.
 *
 * Only blocks go that one sequence alone refers to; a publication of such a block is taken back.
 * What forks read that nobody has written to stays, and so do those forks. What has gone must be
 * back before anything is appended, forked or sent elsewhere (ATTN_EOVERLOAD); truncating, closing,
 * adopting and giving ids needs no block.
 *
 * The bytes are the caller's to copy, between begin and end. Meanwhile neither block nor pages are
 * anybody else's, whatever becomes of the sequence.
 */
#ifndef ATTND_CACHE_IDLE_H
#define ATTND_CACHE_IDLE_H

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
    bool is_good; /* the caller's word at the end: its bytes have been copied */
    bool is_gone; /* the sequence has let go of it meanwhile */
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
/* Entries of its table whose blocks have gone. */
uint32_t kv_idle_n_away(const struct kv *kv, kv_seq_id seq);
/* Of the blocks of a pool. */
uint32_t kv_idle_pool_away(const struct kv *kv, kv_pool_id pool);
/* Every layer has as many tokens: it is not in the middle of one. */
bool kv_idle_is_even(const struct kv *kv, kv_seq_id seq);

/* Takes pages for n_most of its blocks at most, the last ones of its table. NULL: nothing can go,
 * there is no room, or no memory. */
struct kv_idle_move *kv_idle_out_begin(struct kv *kv, kv_seq_id seq, uint32_t n_most);
/* Those that are good are there from now on, and their blocks free, unless they have changed, are
 * shared by now or were let go of. The number that went. m is gone. */
uint32_t kv_idle_out_end(struct kv *kv, struct kv_idle_move *m);

/* Takes blocks for n_most of those that have gone, the first ones of its table, as many as can be
 * had. NULL: nothing has gone, there is no block, or no memory. */
struct kv_idle_move *kv_idle_in_begin(struct kv *kv, kv_seq_id seq, uint32_t n_most);
/* Those that are good are back; adds their entries to fx, which has room for all of m. The number
 * that came. m is gone. */
uint32_t kv_idle_in_end(struct kv *kv, struct kv_idle_move *m, struct kv_effects *fx);

#endif
