/* kv_pool.h: creating, describing, resizing and dropping pools, which are ranges of blocks of one
 * shape.
 *
 * A pool is a contiguous range of block records. The caller owns the memory that holds the blocks'
 * bytes; the cache only knows its `place`. For an index that names no pool, functions return
 * ATTN_ENOTFOUND or 0, or do nothing. Thread: the engine's.
 */
#ifndef ATTND_CACHE_KV_POOL_H
#define ATTND_CACHE_KV_POOL_H

#include "cache/kv.h"

#define KV_NAME_BYTES 64
#define KV_SPEC_BYTES 16384

/* What the cache knows of a pool. All but n_blocks and generation is truth that never changes. */
struct kv_pool_spec {
    char name[KV_NAME_BYTES]; /* unique among its tenant's pools */
    uint32_t tenant;
    uint32_t n_layers, n_blocks;
    uint32_t block_tokens; /* a power of two */
    uint32_t spec_bytes;
    const uint8_t *spec; /* [spec_bytes] the caller's description (encoded PoolSpec); compared byte
                            by byte when the pool is created again, returned after a restart */
    uint64_t place; /* the caller's: where the blocks' bytes are */
    uint32_t window_tokens; /* the longest window of its layers: no query sees further back than
                               that, except the first kept_tokens; 0: some layer sees everything */
    uint32_t kept_tokens; /* first tokens that stay visible outside the window */
    uint32_t idle_pages; /* pages that a block takes in idle memory; 0: blocks never go there. Not
                            compared */
    /* out of kv_pool_info only: */
    uint32_t generation; /* how many pools had this index before */
    uint32_t n_made; /* blocks it was created with; n_blocks is what it has now */
};

/* kv_pool_create: creates a pool in the first gap of block records that fits. Called again with the
 * same tenant, name and spec, it returns the same pool, even if it was resized since.
 * Errors   ATTN_EEXIST same name, another spec; ATTN_ENOMEM out of pools or blocks; ATTN_EINVAL */
attn_status kv_pool_create(struct kv *kv, const struct kv_pool_spec *s, kv_pool_id *out_pool);
/* Errors   ATTN_ENOTFOUND */
attn_status kv_pool_find(struct kv *kv, uint32_t tenant, const char *name, kv_pool_id *out_pool);
/* Describes the pool. out->spec is valid until the pool is dropped. out_free_blocks counts the
 * blocks that can be allocated, including cached ones that would be evicted.
 * Errors   ATTN_ENOTFOUND, without a sentence */
attn_status kv_pool_info(const struct kv *kv, kv_pool_id pool, struct kv_pool_spec *out,
                         uint32_t *out_free_blocks);
/* The number of sequences open in the pool. */
uint32_t kv_pool_sequences(const struct kv *kv, kv_pool_id pool);
/* The number of cached blocks of the pool that are not pinned. */
uint32_t kv_pool_cached(const struct kv *kv, kv_pool_id pool);

struct kv_evictable {
    uint32_t block;
    uint32_t index; /* its entry in every table that has it */
    int32_t priority;
    uint32_t age_s; /* since its last use */
    uint32_t life_s; /* 0: no limit */
    bool is_expired;
};
/* The pool's blocks that would be evicted next, in order, n at most. Returns their number. */
uint32_t kv_pool_next_evicted(const struct kv *kv, kv_pool_id pool, uint32_t n,
                              struct kv_evictable *out);

/* kv_pool_drop: drops a pool and what is published in it. Its index and block records can be used
 * by later pools.
 * Errors   ATTN_ENOTFOUND; ATTN_EINVAL sequences are open in it; ATTN_EOVERLOAD its blocks are held
 *          or being moved */
attn_status kv_pool_drop(struct kv *kv, kv_pool_id pool);
/* For a pool whose blocks' bytes are lost: closes its sequences and unpublishes its blocks. */
void kv_pool_clear(struct kv *kv, kv_pool_id pool);
/* After a recovery: drops the pools from index `first` on, which the caller cannot use, and
 * recovers again, which drops their sequences. out_dropped counts both. */
attn_status kv_pools_drop(struct kv *kv, kv_pool_id first, uint32_t *out_dropped);

/* --- resizing ---------------------------------------------------------------------------------
 *
 * Only the pool's number of blocks changes. A kill leaves it with the old one or the new one. The
 * caller provides the memory of added blocks before the call, and may free that of removed blocks
 * after it. */

/* The most blocks that the pool can have without moving its block records. */
uint32_t kv_pool_room(const struct kv *kv, kv_pool_id pool);
/* Grows the pool to n_blocks.
 * Errors   ATTN_ENOTFOUND; ATTN_EINVAL it has as many already; ATTN_ENOMEM beyond kv_pool_room */
attn_status kv_pool_grow(struct kv *kv, kv_pool_id pool, uint32_t n_blocks);

/* kv_pool_shrink_begin: evicts, in the usual order, what does not fit in n_blocks, and lists in out
 * where to copy the blocks above n_blocks that stay. The caller makes the copies, calls
 * kv_pool_shrink_end, which cannot fail, and writes the patches (the changed table entries) to the
 * device. In between, nothing else may be done with the pool and no launch may use it.
 * Owner    out has arrays of its own, until kv_shrink_fini.
 * Errors   ATTN_ENOTFOUND; ATTN_EINVAL n_blocks is 0, or not fewer; ATTN_ENOBLOCKS more are in use
 *          or pinned; ATTN_EOVERLOAD appends are outstanding, blocks are held or being moved;
 *          ATTN_ENOMEM */
struct kv_shrink {
    kv_pool_id pool;
    uint32_t n_blocks, n_copies, n_patches;
    struct kv_copy *copies;
    struct kv_patch *patches;
};
attn_status kv_pool_shrink_begin(struct kv *kv, kv_pool_id pool, uint32_t n_blocks,
                                 struct kv_shrink *out);
void kv_pool_shrink_end(struct kv *kv, const struct kv_shrink *s);
/* Frees the arrays. Without kv_pool_shrink_end before it, the pool keeps its size. A zeroed struct
 * is allowed. */
void kv_shrink_fini(struct kv_shrink *s);

#endif
