/* kv_pool.h: pools: ranges of blocks of one shape, which are created, described, resized and
 * dropped.
 *
 * A pool is a contiguous range of block records. The caller has the memory that holds the blocks'
 * bytes; the cache knows only its `place`. Functions with a pool argument return ATTN_ENOTFOUND, 0
 * or nothing for an index that names no pool. Thread: the engine's.
 */
#ifndef ATTND_CACHE_KV_POOL_H
#define ATTND_CACHE_KV_POOL_H

#include "cache/kv.h"

#define KV_NAME_BYTES 64
#define KV_SPEC_BYTES 16384

/* What the cache knows of a pool. All but n_blocks and generation is truth that never changes. */
struct kv_pool_spec {
    char name[KV_NAME_BYTES]; /* among the pools of its tenant */
    uint32_t tenant;
    uint32_t n_layers, n_blocks;
    uint32_t block_tokens; /* a power of two */
    uint32_t spec_bytes;
    const uint8_t *spec; /* [spec_bytes] the owner's description (encoded PoolSpec); compared byte
                            by byte when the pool is created again, given back after a restart */
    uint64_t place; /* the owner's word: where the blocks' bytes are */
    uint32_t window_tokens; /* the longest window of its layers: no query sees further back than
                               that, except the first kept_tokens; 0: some layer sees everything */
    uint32_t kept_tokens; /* that stay visible whatever the window */
    uint32_t idle_pages; /* that a block takes in idle memory; 0: blocks never go there. Not
                            compared */
    /* out of kv_pool_info only: */
    uint32_t generation; /* how many pools had this index before */
    uint32_t n_made; /* blocks it was created with; n_blocks is what it has now */
};

/* kv_pool_create: takes the first gap of block records that fits. The same tenant, name and spec
 * again: the same pool, whatever its number of blocks is since (kv_pool_grow).
 * Errors   ATTN_EEXIST same name, another spec; ATTN_ENOMEM out of pools or blocks; ATTN_EINVAL */
attn_status kv_pool_create(struct kv *kv, const struct kv_pool_spec *s, kv_pool_id *out_pool);
/* Errors   ATTN_ENOTFOUND */
attn_status kv_pool_find(struct kv *kv, uint32_t tenant, const char *name, kv_pool_id *out_pool);
/* out->spec stays until the pool is dropped. out_free_blocks counts what can be had: also the
 * cached blocks that would be evicted.
 * Errors   ATTN_ENOTFOUND, without a sentence */
attn_status kv_pool_info(const struct kv *kv, kv_pool_id pool, struct kv_pool_spec *out,
                         uint32_t *out_free_blocks);
/* Sequences open in the pool. */
uint32_t kv_pool_sequences(const struct kv *kv, kv_pool_id pool);
/* Blocks of the pool that are cached and not pinned. */
uint32_t kv_pool_cached(const struct kv *kv, kv_pool_id pool);

struct kv_evictable {
    uint32_t block;
    uint32_t index; /* its place in every table that has it */
    int32_t priority;
    uint32_t age_s; /* since its last use */
    uint32_t life_s; /* 0: lives for ever */
    bool is_expired;
};
/* The pool's blocks that would be evicted next, in order, n at most. Returns their number. */
uint32_t kv_pool_next_evicted(const struct kv *kv, kv_pool_id pool, uint32_t n,
                              struct kv_evictable *out);

/* kv_pool_drop: forgets a pool and what is published in it. Its index may be the next pool's, its
 * block records another's.
 * Errors   ATTN_ENOTFOUND; ATTN_EINVAL sequences are open in it; ATTN_EOVERLOAD its blocks are
 *          held, or on their way */
attn_status kv_pool_drop(struct kv *kv, kv_pool_id pool);
/* The bytes of its blocks are gone: closes its sequences and forgets what is published. */
void kv_pool_clear(struct kv *kv, kv_pool_id pool);
/* After a recovery: drops the pools from index `first` on, which the caller cannot use, and
 * recovers again, which drops their sequences. out_dropped counts both. */
attn_status kv_pools_drop(struct kv *kv, kv_pool_id first, uint32_t *out_dropped);

/* --- resizing ---------------------------------------------------------------------------------
 *
 * Only the pool's number of blocks changes. A kill leaves it with the old one or the new one. The
 * caller has the bytes of added blocks before the call, and may give away those of removed blocks
 * after it. */

/* The most blocks that the pool can have where its records lie. */
uint32_t kv_pool_room(const struct kv *kv, kv_pool_id pool);
/* Errors   ATTN_ENOTFOUND; ATTN_EINVAL it has as many; ATTN_ENOMEM beyond kv_pool_room */
attn_status kv_pool_grow(struct kv *kv, kv_pool_id pool, uint32_t n_blocks);

/* kv_pool_shrink_begin: evicts what does not fit in n_blocks, in the usual order, and lists the
 * copies of what is above them. The caller carries out the copies, calls kv_pool_shrink_end, which
 * cannot fail, and writes the patches, which are the table entries that have changed. In between,
 * nothing else may be done with the pool and no launch may use it.
 * Owner    out has arrays of its own, until kv_shrink_fini.
 * Errors   ATTN_ENOTFOUND; ATTN_EINVAL n_blocks is 0, or not fewer; ATTN_ENOBLOCKS more are in use,
 *          or pinned; ATTN_EOVERLOAD appends are outstanding, blocks are held or on their way;
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
/* Also of one that was not ended, whose pool stays as large as it was. A zeroed one is fine. */
void kv_shrink_fini(struct kv_shrink *s);

#endif
