/* kv_append.h: appending tokens, early commits by a device, and freeing blocks that no window
 * reaches.
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
 *          a hole; ATTN_ENOBLOCKS; ATTN_EOVERLOAD another reserve must end first, blocks are in
 *          idle memory, fx or the journal is full */
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
