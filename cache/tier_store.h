/* tier_store.h: a store that records where the bytes of evicted published blocks are kept: places
 * in host memory or in a file.
 *
 * It finds whole blocks by content: pool, tenant, adapter, index, key, the publication before it
 * and token ids, all of which are compared. It moves no bytes: it hands out places, which the
 * caller fills and reads, and keeps the checksum that came with the bytes, which the caller
 * compares before they are used. When there is no room, the block used longest ago is evicted.
 * Everything is lost with the process.
 *
 * Memory is taken in pieces of several blocks, each for one pool, up to the limit; a pool takes
 * over another's piece if the block used longest ago is in it. The limit counts the blocks' bytes;
 * tier_memory has one for the records beside them.
 * Thread one (the engine's).
 */
#ifndef ATTND_CACHE_TIER_STORE_H
#define ATTND_CACHE_TIER_STORE_H

#include "cache/kv_tier.h"

/* Provides the memory in which places lie. A place is an address or an offset in a file. */
struct tier_memory {
    bool (*take)(void *arg, uint64_t bytes, uint64_t *out_place); /* false: there is none */
    void (*give)(void *arg, uint64_t place, uint64_t bytes);
    /* Accounts a tenant's bytes in places that are not free; NULL: not accounted. charge adds
     * bytes; false: over the tenant's bound, so a block of the same pool is evicted. discharge
     * subtracts them. */
    bool (*charge)(void *arg, uint32_t tenant, uint64_t bytes);
    void (*discharge)(void *arg, uint32_t tenant, uint64_t bytes);
    void *arg;
    uint64_t most_record_bytes; /* of the heap, for records of blocks; 0: no bound */
};

/* blocks: those that can be found; bytes: taken from the memory; used_bytes: of those blocks. The
 * rest counts since the store was opened. no_room: blocks that were not stored for want of memory;
 * eviction_age_seconds: the sum of their ages, since they were last stored or found. */
struct tier_store_stats {
    uint64_t blocks, bytes, used_bytes;
    uint64_t filled, hits, evictions, eviction_age_seconds, no_room, damaged;
};

struct tier_store;
struct tier_block;

attn_status tier_store_open(uint64_t limit_bytes, const struct tier_memory *m,
                            struct tier_store **out_store);
void tier_store_close(struct tier_store *t); /* NULL is allowed; no place may be in use */
void tier_store_stats_read(const struct tier_store *t, struct tier_store_stats *out);
void tier_store_set_time(struct tier_store *t, uint32_t now_s); /* ages are measured by it */

/* tier_store_place: takes a place for a block's bytes, which the caller owns until it is filled or
 * dropped. NULL: there is no room, or the same publication is stored already, which counts as a
 * use. All blocks of a pool have the same size. */
struct tier_block *tier_store_place(struct tier_store *t, const struct kv_content *c,
                                    size_t block_bytes);
/* The bytes are in the place and have this checksum: the block can be found from now on, and
 * replaces an equal one. */
void tier_store_filled(struct tier_store *t, struct tier_block *b, const uint64_t sum[2]);
/* Finds a block and marks it as the one used last; NULL: there is none. Compares everything in c
 * but the serial; tier_block_content has the block's own. */
struct tier_block *tier_store_find(struct tier_store *t, const struct kv_content *c);
/* The serial of such a block, without counting as a use; 0: there is none. */
uint64_t tier_store_serial(const struct tier_store *t, const struct kv_content *c);
/* A held block is not evicted. Every hold needs a release. */
void tier_store_hold(struct tier_store *t, struct tier_block *b);
void tier_store_release(struct tier_store *t, struct tier_block *b);
/* True if the checksum of the bytes as read is the stored one. Otherwise the block is counted as
 * damaged and cannot be found any more. */
bool tier_store_verify(struct tier_store *t, struct tier_block *b, const uint64_t sum[2]);
/* Drops a block, or a place that was not filled. A held block goes when it is released. */
void tier_store_drop(struct tier_store *t, struct tier_block *b);
/* Drops all blocks of a pool; none may be held, and no place taken but unfilled. */
void tier_store_drop_pool(struct tier_store *t, uint32_t pool);
/* Writes the blocks that would be evicted next to out, n at most; returns their number. */
uint32_t tier_store_next_out(const struct tier_store *t, uint32_t n, struct tier_block **out);
/* The bytes that can at least be stored for the pool before anything is evicted. */
uint64_t tier_store_room(const struct tier_store *t, uint32_t pool);

uint64_t tier_block_place(const struct tier_block *b);
size_t tier_block_bytes(const struct tier_block *b);
const struct kv_content *tier_block_content(const struct tier_block *b); /* ids are in the store */
const uint64_t *tier_block_sum(const struct tier_block *b); /* [2] */

/* For tests: recounts everything. Returns NULL, or what differs. */
const char *tier_store_check(const struct tier_store *t);

#endif
