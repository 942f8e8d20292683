/* kv_append.h: tokens are appended: room before a batch, lengths after it; commits that a device
 * makes early; and blocks that no window reaches any more.
 *
 * An append is two calls. kv_append_reserve, before the batch, allocates blocks and copies shared
 * ones. kv_append_commit or kv_append_cancel ends it when the batch is back. Lengths move at commit
 * only. Thread: the engine's.
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
/* Would kv_append_reserve of this range replace a shared block by a copy? */
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
 * Appends whose output a device hands to a worker by itself, before the host commits them. Should
 * the process die in between, its successor must find them committed. So each is recorded between
 * its reserve and the launch of its batch, and the device writes the slot's word before it tells
 * anybody: where the word is there, recovery commits what is recorded. A batch in flight has a slot
 * below KV_EARLY_SLOTS. */
#define KV_EARLY_SLOTS 2
#define KV_EARLY_WORDS_BYTES 4096
/* The most appends of one slot. */
uint32_t kv_early_max(const struct kv *kv);
/* The words that devices write, one for each slot. They are whole pages of the arena, so that they
 * can be registered with a device. */
uint32_t *kv_early_words(const struct kv *kv, size_t *out_bytes);
/* Records one append of the slot's next batch. */
void kv_early_add(struct kv *kv, uint32_t slot, kv_seq_id seq, uint32_t layer, uint32_t pos,
                  uint32_t n_tokens);
/* All are recorded. Returns the value that the device is to write to the slot's word. */
uint32_t kv_early_begin(struct kv *kv, uint32_t slot);
/* Has the device written it? Then they are to be committed, whatever else became of the device. */
bool kv_early_is_answered(const struct kv *kv, uint32_t slot);
/* All are committed; or none was answered, and all will be cancelled. A slot that was not begun is
 * fine. */
void kv_early_end(struct kv *kv, uint32_t slot);

/* --- windows ----------------------------------------------------------------------------------
 *
 * Where all layers of a pool have a window, blocks that no query can see any more are released;
 * what is left is a hole in the table. A query may still come at the position of a layer's latest
 * append (a retry), so the layer that is furthest back there decides. An append, a truncation or a
 * fork whose next query would see the hole is refused, ATTN_EINVAL. */

/* Lets go of what no query sees. Does nothing while appends are outstanding, and until every layer
 * has been appended to since the last recovery. The caller sees to it that no launch reads the
 * sequence. */
void kv_seq_free_unseen(struct kv *kv, kv_seq_id seq);
/* Is all there that a query at this position sees?
 * Errors   ATTN_EINVAL, with the sentence: no */
attn_status kv_seq_sees(struct kv *kv, kv_seq_id seq, uint32_t pos);

#endif
