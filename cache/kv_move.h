/* kv_move.h: sequences that move to another cache, or are imported from elsewhere.
 *
 * A sequence that moves is the same in the other cache: its name, owner, epoch and the request that
 * made the epoch go with it, so that a repeated request gets the same answer. The caller copies the
 * bytes, from blocks held in the cache that the sequence leaves to blocks reserved in the one it
 * enters. Once the other cache has the sequence, the caller closes it here.
 * Thread: the engine's of each cache.
 */
#ifndef ATTND_CACHE_KV_MOVE_H
#define ATTND_CACHE_KV_MOVE_H

#include "cache/kv_seq.h"

/* For caches that move sequences to each other: gives this cache's epochs the lowest n_bits
 * `maker`, so that no two caches make the same epoch. Must be the same for the whole life of an
 * arena. */
void kv_set_epochs(struct kv *kv, uint32_t n_bits, uint32_t maker);

/* A sequence, as described to the other cache. */
struct kv_seq_export {
    uint64_t name, request, owner_id;
    uint32_t tenant, epoch;
    uint32_t made; /* the epoch that `request` made */
    uint32_t owner;
    uint32_t n_blocks, n_cached;
    uint32_t hole; /* hole_past of kv_seq_info */
    const uint32_t *layer_len; /* [n_layers] */
    struct kv_tokens tokens;
    struct kv_note note;
};
/* Describes the sequence. The pointers in out refer to this cache's arena and are valid until the
 * sequence changes.
 * Errors   ATTN_ENOTFOUND; ATTN_EOVERLOAD appends are outstanding, blocks are in idle memory, or it
 *          has a tree */
attn_status kv_seq_export_read(struct kv *kv, kv_seq_id seq, struct kv_seq_export *out);
/* kv_seq_export_hold: holds n blocks of the sequence from entry first on while the caller reads
 * them beside this cache's launches: they are not written to, whatever happens to the sequence.
 * kv_seq_import_cancel releases them. NULL: no memory. */
struct kv_seq_import *kv_seq_export_hold(struct kv *kv, kv_seq_id seq, uint32_t first, uint32_t n);

/* A sequence being imported. Its blocks are reserved first, and are not truth until the import
 * ends: a successor knows nothing of them. The caller writes their bytes; nothing else uses the
 * blocks meanwhile. Until then, nothing of its pool may be dropped or cleared. */
struct kv_seq_import;
/* Begins an import into the pool. NULL: no memory, or no such pool. */
struct kv_seq_import *kv_seq_import_begin(struct kv *kv, kv_pool_id pool);
/* Reserves blocks for those of entries [first, first + n) that have none.
 * Errors   ATTN_ENOBLOCKS, ATTN_ENOMEM: what was reserved before stays */
attn_status kv_seq_import_reserve(struct kv *kv, struct kv_seq_import *a, uint32_t first,
                                  uint32_t n);
/* The block reserved for entry i. */
uint32_t kv_seq_import_block(const struct kv_seq_import *a, uint32_t i);
/* kv_seq_import_end: opens the sequence with the reserved blocks, frees those that d does not have,
 * and adds the row's table entries to fx. Frees a.
 * Errors   a stays as it is: ATTN_EEXIST; ATTN_ENOTFOUND its owner is not in this cache;
 *          ATTN_EOVERLOAD max_sequences are open, or fx is full; ATTN_EINVAL a block that d has was
 *          not reserved */
attn_status kv_seq_import_end(struct kv *kv, struct kv_seq_import *a, const struct kv_seq_export *d,
                              struct kv_effects *fx, kv_seq_id *out_seq);
void kv_seq_import_cancel(struct kv *kv, struct kv_seq_import *a); /* frees a; NULL is allowed */

/* --- imports into an open sequence ------------------------------------------------------------ */

/* kv_seq_free_to: makes entries [first, past) a hole, as in the sequence that is copied. Layers
 * that end where entry `first` begins now end where `past` begins; the others must be as long
 * already. Adds the new entries to fx; no query reads what they name. All or nothing; may be
 * repeated.
 * Errors   ATTN_ENOTFOUND; ATTN_EINVAL some layer has no window, the pool does not keep `first`
 *          blocks, too long, a layer ends in between; ATTN_EOVERLOAD appends are outstanding,
 *          blocks are in idle memory, fx is full */
attn_status kv_seq_free_to(struct kv *kv, kv_seq_id seq, uint32_t first, uint32_t past,
                           struct kv_effects *fx);
/* kv_append_reserve for tokens copied from elsewhere in ascending order. Tokens that a query at pos
 * would see may still be missing, since no query comes before everything is copied. */
attn_status kv_copy_reserve(struct kv *kv, kv_seq_id seq, uint32_t layer, uint32_t pos,
                            uint32_t n_tokens, struct kv_effects *fx);

/* --- where sequences went ----------------------------------------------------------------------
 *
 * A table of the KV_MAX_MOVED latest that were moved to another daemon, which is truth: a new entry
 * takes the place of the oldest. */

#define KV_MAX_MOVED 1024
#define KV_URL_BYTES 128 /* with its final zero */

struct kv_moved {
    uint64_t id; /* that it has there */
    uint32_t epoch; /* that it had there at first */
    const char *url; /* of the daemon, not interpreted, shorter than KV_URL_BYTES */
};

/* Notes, for life_s seconds by kv_set_time, where a sequence went that is about to be closed at
 * this epoch. It holds for handles of that epoch and those before, not for sequences that are
 * opened under the name later. */
void kv_moved_note(struct kv *kv, uint32_t tenant, uint64_t name, uint32_t epoch,
                   const struct kv_moved *to, uint32_t life_s);
/* Where the sequence of a handle went; epoch 0: whichever had the name last. url is in the arena,
 * valid until the next kv_moved_note. false: not known. Looks at every entry. */
bool kv_moved_find(const struct kv *kv, uint32_t tenant, uint64_t name, uint32_t epoch,
                   struct kv_moved *out);

#endif
