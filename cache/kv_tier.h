/* kv_tier.h: evicted blocks that the caller keeps elsewhere (host memory, a file), and brings back.
 *
 * The cache calls back before a published block is evicted, and asks what is elsewhere when blocks
 * of a prefix are to come back. It names blocks by content; tier_store.h is a store for them. The
 * bytes are the caller's to move. Thread: the engine's, callbacks too.
 */
#ifndef ATTND_CACHE_KV_TIER_H
#define ATTND_CACHE_KV_TIER_H

#include "cache/kv_seq.h"

/* What a published block holds, wherever its bytes are. */
struct kv_content {
    uint32_t pool, tenant;
    uint32_t index; /* its place in every table that has it */
    uint32_t n_ids;
    uint64_t adapter;
    uint64_t key[2]; /* hash of its ids and those before it: finds candidates, proves nothing */
    uint64_t serial; /* of the publication; no two have the same */
    uint64_t parent; /* serial of the block before; 0: it is the first */
    const uint32_t *ids; /* [n_ids] */
};

/* The callbacks. They are called while blocks are allocated and prefixes looked up, and may not
 * call the cache. What c points to is valid until they return. A NULL one: nothing is elsewhere. */
struct kv_tier_ops {
    void *arg;
    /* The block is evicted when this returns; until then its bytes are there. */
    void (*evicted)(void *arg, const struct kv_content *c, uint32_t block);
    /* Asked by kv_promote_begin: is there a block of this content, whatever its serial? If so its
     * serial is written to c, and the block stays there until the promotion has ended. */
    bool (*find)(void *arg, struct kv_content *c);
    /* The serial that a block of this content has there; 0: there is none. */
    uint64_t (*serial)(void *arg, const struct kv_content *c);
};
/* x is copied; its arg is used until kv is closed. */
void kv_set_tier_ops(struct kv *kv, const struct kv_tier_ops *x);

/* What a block holds; false: it is not published. out->ids are in the arena, until it is
 * evicted. */
bool kv_block_content(const struct kv *kv, kv_pool_id pool, uint32_t block, struct kv_content *out);

/* A promotion brings blocks back. kv_promote_begin takes a block for each of the tokens' next full
 * blocks that are in a tier, behind those that are published: n_most at most, as many as there is
 * room for. Their bytes are then the caller's to write; nobody else has them meanwhile, and the
 * published blocks before them stay. kv_promote_end publishes the first n_there of them as cached
 * blocks, unless they do not continue a published prefix any more, and frees the others. A
 * promotion is no truth: a successor knows nothing of it.
 *
 * Returns NULL: nothing is in a tier, there is no room, or no memory.
 * Owner    f is gone after kv_promote_end. Until then nothing of its pool may be dropped or
 *          cleared. */
struct kv_promote;
struct kv_promote *kv_promote_begin(struct kv *kv, kv_pool_id pool, uint32_t tenant,
                                    const struct kv_tokens *t, uint32_t n_most);
/* The number of blocks that kv_promote_begin would take if as many are free. */
uint32_t kv_promote_size(const struct kv *kv, kv_pool_id pool, uint32_t tenant,
                         const struct kv_tokens *t, uint32_t n_most);
/* The i-th block taken, in the order in which find returned true. */
uint32_t kv_promote_block(const struct kv_promote *f, uint32_t i);
void kv_promote_end(struct kv *kv, struct kv_promote *f, uint32_t n_there);

/* kv_cached_hold: holds n published blocks that no sequence refers to, while somebody reads them:
 * they are not evicted, and can still be found. kv_cached_release puts each back where it was in
 * the order of eviction, except those that a sequence had meanwhile, which were just used. Their
 * pool is not dropped before that. NULL: no memory. */
struct kv_seq_import;
struct kv_seq_import *kv_cached_hold(struct kv *kv, kv_pool_id pool, const uint32_t *blocks,
                                     uint32_t n);
void kv_cached_release(struct kv *kv, struct kv_seq_import *a);

#endif
