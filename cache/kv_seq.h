/* kv_seq.h: opening, forking, truncating, adopting and closing sequences, and the table rows that a
 * device reads.
 *
 * A sequence belongs to a tenant and has a 64-bit name there. Its epoch rises with every truncation
 * and adoption, so a request made for an earlier state is recognized. Full blocks whose token ids
 * are known are published: other sequences of the tenant that are opened with the same tokens begin
 * with them.
 * Thread: the engine's.
 */
#ifndef ATTND_CACHE_KV_SEQ_H
#define ATTND_CACHE_KV_SEQ_H

#include "cache/kv.h"

#define KV_NO_OWNER UINT32_MAX
#define KV_NO_REQUEST 0 /* a request that is never repeated */

/* How long published blocks stay that no sequence uses. A range goes from one token to where the
 * next range begins. A block gets the range of its first token; before the first range all fields
 * are zero. */
#define KV_MIN_PRIORITY (-3)
#define KV_MAX_PRIORITY 3
#define KV_MAX_LIFE_S (1u << 20)
#define KV_MAX_RETENTIONS 8 /* of a sequence */
struct kv_retention {
    uint32_t from; /* first token of the range */
    int32_t priority; /* the lowest are evicted first */
    uint32_t life_s; /* after the last use, rounded up to a power of two: an expired block is
                        evicted before others of its priority; 0: no limit */
    uint32_t is_pinned; /* 1: never evicted, unless a block before it was */
};

/* What a client says of a sequence's tokens. */
struct kv_tokens {
    const uint32_t *ids; /* [n] */
    uint32_t n;
    uint64_t adapter; /* anything else that K and V depend on; 0: nothing */
    const struct kv_retention *retention; /* [n_retentions] in ascending order */
    uint32_t n_retentions;
};

/* What its owner wants whoever adopts a sequence to know; the cache does not interpret it. */
#define KV_MAX_NOTE_BYTES 4096
struct kv_note {
    const uint8_t *bytes; /* [n_bytes] */
    uint32_t n_bytes; /* 0: there is none, or it was taken away */
    uint64_t request; /* that set it; 0: none ever did */
    uint32_t epoch; /* of the sequence then */
};

struct kv_seq_info {
    uint64_t name; /* the client's 64-bit id */
    uint32_t tenant;
    kv_pool_id pool;
    uint32_t epoch; /* raised by every truncation and adoption; a name never has the same epoch
                       twice */
    uint32_t owner; /* session slot, or KV_NO_OWNER */
    uint32_t n_blocks; /* entries in its table */
    uint32_t hole_first, hole_past; /* entries [hole_first, hole_past) name no block, since no
                                       window reaches them any more; equal: there is no hole */
    const uint32_t *block_table; /* [n_blocks] pool-local block ids: the row in the arena, valid
                                    until the sequence is closed. Entries change at a reserve that
                                    copies, and as blocks go to idle memory (kv_is_place) and come
                                    back */
    uint32_t n_paged_out; /* entries whose blocks are in idle memory */
    /* false: a fork that was neither written to nor materialized. No effects have announced its
     * row, and block_table may be its source's, valid until either changes */
    bool is_notified;
    const uint32_t *layer_len; /* [n_layers] committed tokens; valid as block_table is */
    uint32_t tree_pos, n_nodes; /* tokens [tree_pos, tree_pos + n_nodes), where a layer has them,
                                   are a tree (kv_append.h); n_nodes 0: there is none */
    uint32_t n_cached; /* tokens that every layer had when it was opened */
    uint32_t n_ids; /* tokens from the start whose ids are known */
    uint64_t adapter;
};

/* kv_seq_open_with: opens a new sequence of these tokens. It begins with the matching published
 * blocks of its tenant, pool and adapter, but never includes the last token of t; n_cached of
 * kv_seq_info tells how many tokens it got. Adds the row's table entries to fx. A repeated request
 * adds nothing and has the same answer. The retention in t also applies to the blocks found.
 * Errors   ATTN_EEXIST; ATTN_ESTALE; ATTN_ENOTFOUND no such pool; ATTN_EINVAL owner, too many
 *          tokens, retention; ATTN_EOVERLOAD max_sequences are open, no epoch is left, or fx is
 *          full */
attn_status kv_seq_open_with(struct kv *kv, uint32_t tenant, uint64_t name, kv_pool_id pool,
                             uint32_t owner, uint64_t request, const struct kv_tokens *t,
                             struct kv_effects *fx, kv_seq_id *out_seq);
/* kv_seq_fork: opens a new sequence that shares the blocks of src's first len tokens; all its
 * layers have length len. The cost does not depend on len: without windows, the fork reads its
 * source's table row until it is written to or materialized, or until the source changes tokens
 * that both have.
 * Errors   as kv_seq_open_with; ATTN_EINVAL a layer of src has fewer tokens, they are a tree's, or
 *          a query at len would see a hole; ATTN_EOVERLOAD also: src has a copy pending, or blocks
 *          in idle
 * memory */
attn_status kv_seq_fork(struct kv *kv, kv_seq_id src, uint64_t new_name, uint32_t len,
                        uint32_t owner, uint64_t request, kv_seq_id *out_seq);
/* kv_seq_tokens: sets the ids of tokens [pos, pos + n), appended already or not. Known ids may be
 * given again. Full blocks whose ids are known are published when every layer has them and no
 * append of the sequence is outstanding.
 * Errors   ATTN_EINVAL n is 0, pos leaves a gap, an id differs from the one given before, too
 * many */
attn_status kv_seq_tokens(struct kv *kv, kv_seq_id seq, uint32_t pos, const uint32_t *ids,
                          uint32_t n);
/* kv_seq_retain: replaces the retention from token r[0].from on, also for blocks that are published
 * already. A fork starts with its source's retention.
 * Errors   ATTN_EINVAL names the range */
attn_status kv_seq_retain(struct kv *kv, kv_seq_id seq, const struct kv_retention *r, uint32_t n);
/* kv_seq_note: sets the sequence's note in place of the one before, all or nothing even when killed
 * half way. It stays until the sequence is closed, whoever owns it and whatever is truncated; forks
 * have none of their source's. It takes pages of table_pages until then, one of no bytes a page.
 * request is not KV_NO_REQUEST; the one that set the note changes nothing when it comes again.
 * Errors   ATTN_EINVAL over KV_MAX_NOTE_BYTES; ATTN_ESTALE a later request set it at this epoch;
 *          ATTN_EQUOTA */
attn_status kv_seq_note(struct kv *kv, kv_seq_id seq, uint64_t request, const uint8_t *bytes,
                        uint32_t n_bytes);
/* The note, in the arena, valid until it is set again or the sequence is closed. */
struct kv_note kv_seq_note_get(const struct kv *kv, kv_seq_id seq);
/* kv_seq_truncate: shortens layers longer than len to len and raises the epoch, all or nothing even
 * when killed half way (recovery finishes it). Blocks past the longest layer are released.
 * Errors   ATTN_EINVAL len is beyond the longest layer or within a tree, or a query there would see
 *          a hole;
 *          ATTN_EOVERLOAD appends are outstanding, or no epoch is left */
attn_status kv_seq_truncate(struct kv *kv, kv_seq_id seq, uint32_t len, uint64_t request,
                            uint32_t *out_epoch);
/* kv_seq_adopt: gives the sequence another owner (or KV_NO_OWNER) and the next epoch; both change
 * together.
 * Errors   ATTN_EINVAL owner; ATTN_ESTALE; ATTN_EOVERLOAD no epoch is left */
attn_status kv_seq_adopt(struct kv *kv, kv_seq_id seq, uint32_t owner, uint64_t request,
                         uint32_t *out_epoch);
/* kv_seq_close: closes the sequence and releases all its blocks at once; the caller makes sure that
 * no launch still uses them. Outstanding appends are cancelled. Does nothing if it is not open. */
void kv_seq_close(struct kv *kv, kv_seq_id seq);

/* kv_seq_materialize: needed before a device reads the sequence's row: gives the sequence a table
 * of its own, and adds all entries to fx unless effects have announced them before.
 * kv_append_reserve does the same.
 * Errors   ATTN_EOVERLOAD fx is full */
attn_status kv_seq_materialize(struct kv *kv, kv_seq_id seq, struct kv_effects *fx);

/* Finds an open sequence by tenant and name.
 * Errors   ATTN_ENOTFOUND */
attn_status kv_seq_find(struct kv *kv, uint32_t tenant, uint64_t name, kv_seq_id *out_seq);
/* Describes the sequence; all fields are zero if it is not open. */
void kv_seq_info(const struct kv *kv, kv_seq_id seq, struct kv_seq_info *out);
/* The token ids, [n_ids of kv_seq_info], in the arena, valid until the sequence changes. */
const uint32_t *kv_seq_ids(const struct kv *kv, kv_seq_id seq);
/* kv_seq_next: *seq becomes the first open sequence whose index is at least seq's and below end.
 * Errors   ATTN_ENOTFOUND no open sequence has such an index or a higher one; ATTN_EOVERLOAD none
 *          is below end, *seq is end. Neither leaves a sentence */
attn_status kv_seq_next(const struct kv *kv, uint32_t end, kv_seq_id *seq);
/* Any one sequence of an owner, for closing them in slices.
 * Errors   ATTN_ENOTFOUND it has none */
attn_status kv_owner_any(struct kv *kv, uint32_t owner, kv_seq_id *out_seq);

/* kv_warm: a hint that n <= KV_WARM_MAX sequences will soon be found and appended to at these
 * positions. Prefetches what that touches, with all cache misses in parallel. Changes nothing.
 * out_seq[i] is the likely id; its index is UINT32_MAX if there is none. */
#define KV_WARM_MAX 64
void kv_warm(const struct kv *kv, uint32_t tenant, const uint64_t *names, const uint32_t *pos,
             uint32_t n, kv_seq_id *out_seq);

#endif
