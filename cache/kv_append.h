/* kv_append.h: appending tokens, trees of tokens, early commits by a device, and freeing blocks
 * that no window reaches.
 *
 * An append is two calls. kv_append_reserve, before the batch, allocates blocks and copies shared
 * ones. kv_append_commit or kv_append_cancel ends it when the batch is back. Lengths change at
 * commit only. Thread: the engine's.
 */
#ifndef ATTND_CACHE_KV_APPEND_H
#define ATTND_CACHE_KV_APPEND_H

#include "cache/kv.h"

/* kv_append_reserve: makes tokens [pos, pos + n_tokens) of the layer writable: allocates missing
 * blocks, replaces shared ones by copies (journalled until the commit). pos is at most the layer's
 * length. Adds the changed table entries and the copies to fx. All or nothing.
 *
 * A reserve that copies changes table entries of committed tokens, so it is alone on its sequence:
 * it is refused while other reserves are outstanding, and others are refused until it has ended.
 * Launches that only attend read the table, too: where kv_append_copies is true the caller waits
 * for them.
 * Errors   ATTN_EINVAL a gap before pos, the layer, beyond max_seq_blocks, a query at pos would see
 *          a hole; ATTN_ENOBLOCKS; ATTN_EOVERLOAD another reserve must end first, a block that
 *          it writes is in idle memory, fx or the journal is full */
attn_status kv_append_reserve(struct kv *kv, kv_seq_id seq, uint32_t layer, uint32_t pos,
                              uint32_t n_tokens, struct kv_effects *fx);
/* True if kv_append_reserve of this range would replace a shared block by a copy. */
bool kv_append_copies(const struct kv *kv, kv_seq_id seq, uint32_t pos, uint32_t n_tokens);
/* kv_append_commit: the batch is done. The layer's length becomes max(length, pos + n_tokens);
 * replaced blocks are released. */
void kv_append_commit(struct kv *kv, kv_seq_id seq, uint32_t layer, uint32_t pos,
                      uint32_t n_tokens);
/* kv_append_cancel: the batch failed. Replaced blocks come back (their table entries are added to
 * fx); lengths stay; blocks past the longest layer are released once no other reserve of the
 * sequence is outstanding.
 * Errors   ATTN_EOVERLOAD fx has less room for patches than the reserve made copies: nothing
 *          changed, cancel again */
attn_status kv_append_cancel(struct kv *kv, kv_seq_id seq, uint32_t layer, uint32_t pos,
                             uint32_t n_tokens, struct kv_effects *fx);

/* --- trees ------------------------------------------------------------------------------------
 *
 * The nodes of a tree (a speculative one, of beams) are the last tokens of their sequence, behind
 * those that are committed. They are truth as other tokens are, and survive a kill, but until one
 * of their paths is committed they are nobody else's: no block of them is published, no fork,
 * import or move has them, and nothing is appended behind them. A truncation to where the tree
 * begins, or before it, drops it. */
#define KV_MAX_TREE_NODES 64

/* kv_tree_reserve: kv_append_reserve for a layer's nodes of a tree, which begins where the layer
 * ends: parents[i] is -1 or the index of an earlier node. The first layer's begins the tree; the
 * others' must be equal. kv_append_commit or kv_append_cancel ends it; a tree of which no layer has
 * nodes is gone.
 * Errors   as kv_append_reserve; ATTN_EINVAL another layer has more tokens, or another tree is
 *          there, or parents are none; ATTN_EOVERLOAD also: it begins and appends are
 *          outstanding */
attn_status kv_tree_reserve(struct kv *kv, kv_seq_id seq, uint32_t layer, uint32_t pos,
                            const int32_t *parents, uint32_t n, struct kv_effects *fx);

/* One token, in all layers. */
struct kv_token_copy {
    uint32_t from_block, from_slot, to_block, to_slot;
};
/* Who copies tokens on the device, behind everything that was launched. No block is both read and
 * written. */
struct kv_token_ops {
    void *user;
    attn_status (*copy)(void *user, const struct kv_token_copy *list, uint32_t n);
};

/* kv_tree_commit: keeps the path of these nodes, from one without a parent downwards, as the next
 * tokens of the sequence, and drops the others; raises the epoch. n 0 drops them all. A path whose
 * nodes follow each other from the first on stays where it is. Else the blocks that it comes to lie
 * in are replaced: tokens are copied from the old ones to new ones, so that a kill before the end
 * leaves the tree as it was. Adds the changed table entries to fx. All or nothing.
 * Errors   ATTN_EINVAL there is no tree, a layer has no nodes yet, nodes are no path;
 *          ATTN_ENOBLOCKS; ATTN_EOVERLOAD appends are outstanding, blocks are in idle memory, no
 *          epoch is left, fx or the journal is full; those of copy */
attn_status kv_tree_commit(struct kv *kv, kv_seq_id seq, const uint32_t *nodes, uint32_t n,
                           uint64_t request, const struct kv_token_ops *ops, struct kv_effects *fx,
                           uint32_t *out_epoch);

/* --- early commits ----------------------------------------------------------------------------
 *
 * A device can hand the output of an append to a worker before the host commits it. If the process
 * dies in between, its successor must find the append committed. So each such append is recorded
 * between its reserve and the launch of its batch, and the device writes the slot's word before it
 * hands the output on. If the word was written, recovery commits what was recorded. Each batch in
 * flight has a slot below KV_EARLY_SLOTS. */
#define KV_EARLY_SLOTS 2
#define KV_EARLY_WORDS_BYTES 4096
/* The most appends of one slot. */
uint32_t kv_early_max(const struct kv *kv);
/* The words that devices write, one per slot. They fill whole pages of the arena, so that they can
 * be registered with a device. */
uint32_t *kv_early_words(const struct kv *kv, size_t *out_bytes);
/* Records one append of the slot's next batch. */
void kv_early_add(struct kv *kv, uint32_t slot, kv_seq_id seq, uint32_t layer, uint32_t pos,
                  uint32_t n_tokens);
/* Ends the recording. Returns the value that the device has to write to the slot's word. */
uint32_t kv_early_begin(struct kv *kv, uint32_t slot);
/* True once the device has written the word: the recorded appends must then be committed, whatever
 * happened to the device since. */
bool kv_early_is_answered(const struct kv *kv, uint32_t slot);
/* Frees the slot, once its appends are committed, or before they are cancelled because the device
 * never wrote the word. Does nothing if the slot was not begun. */
void kv_early_end(struct kv *kv, uint32_t slot);

/* --- windows ----------------------------------------------------------------------------------
 *
 * If all layers of a pool have a window, blocks that no query can see any more are released and
 * leave a hole in the table. A query may still come at the position of a layer's latest append (a
 * retry), so the layer whose latest append is furthest back decides. An append, a truncation or a
 * fork whose next query would see the hole is refused with ATTN_EINVAL. */

/* Releases the blocks that no query can see. Does nothing while appends are outstanding, and until
 * every layer has been appended to since the last recovery. The caller makes sure that no launch
 * reads the sequence. */
void kv_seq_free_unseen(struct kv *kv, kv_seq_id seq);
/* Checks that every token that a query at this position sees is still there.
 * Errors   ATTN_EINVAL, with the sentence, if not */
attn_status kv_seq_sees(struct kv *kv, kv_seq_id seq, uint32_t pos);

#endif
