/* tier_store.h: published blocks that were evicted, and where their bytes are, until they are
 * wanted again: a store of places in host memory or in a file.
 *
 * It finds whole blocks by content: pool, tenant, adapter, place, key, the publication before it
 * and token ids, all of which are compared. It moves no bytes itself: it gives out places, which
 * the caller fills and reads, and keeps the checksum that came with the bytes, which the caller
 * compares before they are used. When there is no room the block used longest ago goes. All of it
 * is gone with the process.
 *
 * Memory is taken in pieces of several blocks, each for one pool, up to the limit; a pool takes
 * over another's piece when the block used longest ago is in it. The limit counts the blocks'
 * bytes, not the records beside them.
 * Thread one (the engine's).
 */
#ifndef ATTND_CACHE_TIER_STORE_H
#define ATTND_CACHE_TIER_STORE_H

#include "cache/kv_tier.h"

/* Where the places are: addresses, or offsets in a file. */
struct tier_memory {
    bool (*take)(void *arg, uint64_t bytes, uint64_t *out_place); /* false: there is none */
    void (*give)(void *arg, uint64_t place, uint64_t bytes);
    /* A tenant's bytes in places that are not free; NULL: none counts. charge: so many more;
     * false: it may not have them, so a block of the same pool goes. discharge: so many fewer. */
    bool (*charge)(void *arg, uint32_t tenant, uint64_t bytes);
    void (*discharge)(void *arg, uint32_t tenant, uint64_t bytes);
    void *arg;
};

/* blocks: those that can be found; bytes: taken from the memory; used_bytes: of those blocks. The
 * rest counts since the store was opened. no_room: blocks that were not taken in, for want of
 * memory; eviction_age_seconds: the sum of their times since they were last put or found. */
struct tier_store_stats {
    uint64_t blocks, bytes, used_bytes;
    uint64_t filled, hits, evictions, eviction_age_seconds, no_room, damaged;
};

struct tier_store;
struct tier_block;

attn_status tier_store_open(uint64_t limit_bytes, const struct tier_memory *m,
                            struct tier_store **out_store);
void tier_store_close(struct tier_store *t); /* NULL is fine; no place may be in use */
void tier_store_stats_read(const struct tier_store *t, struct tier_store_stats *out);
void tier_store_set_time(struct tier_store *t, uint32_t now_s); /* what ages are counted by */

/* tier_store_place: a place for a block's bytes, which is the caller's until it is filled or
 * dropped. NULL: there is no room, or the same publication is there already, which counts as
 * used. All blocks of a pool have the same size. */
struct tier_block *tier_store_place(struct tier_store *t, const struct kv_content *c,
                                    size_t block_bytes);
/* Its bytes are there, and have this checksum: it can be found from now on. In place of an equal
 * block that is there. */
void tier_store_filled(struct tier_store *t, struct tier_block *b, const uint64_t sum[2]);
/* A block that is there, as the one used last; NULL: there is none. Everything of c is compared but
 * its serial, which tier_block_content tells. */
struct tier_block *tier_store_find(struct tier_store *t, const struct kv_content *c);
/* The serial of such a block, which does not count as used; 0: there is none. */
uint64_t tier_store_serial(const struct tier_store *t, const struct kv_content *c);
/* While it is held a block that is there stays. */
void tier_store_hold(struct tier_store *t, struct tier_block *b);
void tier_store_release(struct tier_store *t, struct tier_block *b);
/* Its bytes, as they were read, have this checksum. false: they are not as they were put there: it
 * is counted, and found no more. */
bool tier_store_verify(struct tier_store *t, struct tier_block *b, const uint64_t sum[2]);
/* A place that was not filled, or a block, goes; one that is held when it is released. */
void tier_store_drop(struct tier_store *t, struct tier_block *b);
/* All of a pool go: nobody holds any, nor has a place of it. */
void tier_store_drop_pool(struct tier_store *t, uint32_t pool);
/* Those that would go next if there were no room, n at most; how many. */
uint32_t tier_store_next_out(const struct tier_store *t, uint32_t n, struct tier_block **out);
/* Bytes that are left to be had without anything going, at least. */
uint64_t tier_store_room(const struct tier_store *t, uint32_t pool);

uint64_t tier_block_place(const struct tier_block *b);
size_t tier_block_bytes(const struct tier_block *b);
const struct kv_content *tier_block_content(const struct tier_block *b); /* ids are the store's */
const uint64_t *tier_block_sum(const struct tier_block *b); /* [2] */

/* For tests: recounts everything. NULL, or what differs. */
const char *tier_store_check(const struct tier_store *t);

#endif
