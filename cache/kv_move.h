/* kv_move.h: sequences that move to another cache, or are imported from elsewhere.
 *
 * A sequence that moves is the same in the other cache: its name, owner, epoch and the request that
 * made the epoch go with it, so that a repeated request is answered as before. The bytes are the
 * caller's to copy: from blocks that are held where the sequence leaves, to blocks that are
 * reserved where it comes. When the other cache has it, the caller closes it here.
 * Thread: the engine's of each cache.
 */
#ifndef ATTND_CACHE_KV_MOVE_H
#define ATTND_CACHE_KV_MOVE_H

#include "cache/kv_seq.h"

/* For caches that move sequences to each other: the epochs that this one makes have `maker` in
 * their lowest n_bits, so that no two caches make the same. Always the same for an arena. */
void kv_set_epochs(struct kv *kv, uint32_t n_bits, uint32_t maker);

/* What the other cache is told of a sequence. */
struct kv_seq_export {
    uint64_t name, request, owner_id;
    uint32_t tenant, epoch;
    uint32_t made; /* the epoch that `request` made */
    uint32_t owner;
    uint32_t n_blocks, n_cached;
    uint32_t hole; /* hole_past of kv_seq_info */
    const uint32_t *layer_len; /* [n_layers] */
    struct kv_tokens tokens;
};
/* What out points to is in this cache's arena, until the sequence changes.
 * Errors   ATTN_EOVERLOAD appends are outstanding, or blocks are in idle memory */
attn_status kv_seq_export_read(struct kv *kv, kv_seq_id seq, struct kv_seq_export *out);
/* kv_seq_export_hold: holds n blocks of the sequence from entry first on, while somebody reads them
 * beside the launches of this cache: whatever becomes of the sequence, they are not written to.
 * kv_seq_import_cancel releases them. NULL: no memory. */
struct kv_seq_import *kv_seq_export_hold(struct kv *kv, kv_seq_id seq, uint32_t first, uint32_t n);

/* A sequence that comes. Its blocks are reserved first, and are no truth until it is whole: a
 * successor knows nothing of them. Their bytes are the caller's to write; nobody else has them
 * meanwhile. Until it ends, nothing of its pool may be dropped or cleared. */
struct kv_seq_import;
/* NULL: no memory, or no such pool. */
struct kv_seq_import *kv_seq_import_begin(struct kv *kv, kv_pool_id pool);
/* Takes blocks for entries [first, first + n), unless it has them.
 * Errors   ATTN_ENOBLOCKS, ATTN_ENOMEM: it has what it had */
attn_status kv_seq_import_reserve(struct kv *kv, struct kv_seq_import *a, uint32_t first,
                                  uint32_t n);
/* The block of entry i, which was reserved. */
uint32_t kv_seq_import_block(const struct kv_seq_import *a, uint32_t i);
/* kv_seq_import_end: makes the sequence of its blocks, frees those that d does not have, and adds
 * the row's table entries to fx. a is gone.
 * Errors   a stays as it is: ATTN_EEXIST; ATTN_ENOTFOUND its owner is not in this cache;
 *          ATTN_EOVERLOAD max_sequences are open, or fx is full; ATTN_EINVAL it lacks blocks that d
 *          has */
attn_status kv_seq_import_end(struct kv *kv, struct kv_seq_import *a, const struct kv_seq_export *d,
                              struct kv_effects *fx, kv_seq_id *out_seq);
void kv_seq_import_cancel(struct kv *kv, struct kv_seq_import *a); /* a is gone; NULL is fine */

/* --- imports into an open sequence ------------------------------------------------------------ */

/* kv_seq_free_to: makes entries [first, past) a hole, as they are in the sequence that is copied.
 * Layers that end at `first` go on at `past`; the others are as long already. Adds the new entries
 * to fx; what they name is not read. All or nothing; done already is fine.
 * Errors   ATTN_ENOTFOUND; ATTN_EINVAL some layer has no window, the pool keeps another number of
 *          blocks than first, too long, a layer ends in between; ATTN_EOVERLOAD appends are
 *          outstanding, blocks are in idle memory, fx is full */
attn_status kv_seq_free_to(struct kv *kv, kv_seq_id seq, uint32_t first, uint32_t past,
                           struct kv_effects *fx);
/* kv_append_reserve for tokens that are copied together with those before them, the first ones
 * first: what windows of a query at pos would see need not be there yet, as no query comes before
 * all is copied. */
attn_status kv_copy_reserve(struct kv *kv, kv_seq_id seq, uint32_t layer, uint32_t pos,
                            uint32_t n_tokens, struct kv_effects *fx);

#endif
