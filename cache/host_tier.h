/* host_tier.h: published blocks that were evicted, in host memory, until they are wanted again.
 *
 * A store of whole blocks by content: pool, tenant, adapter, place, key, the publication before it
 * and token ids, all of which are compared. It moves no bytes itself: it gives out places, which
 * the caller fills and reads. A checksum (xxh3, 128 bits) is made once, when a place is filled, and
 * verified before its bytes are used. When the memory is full the block used longest ago goes. All
 * of it is gone with the process.
 *
 * Memory is taken in pieces of several blocks, each for one pool, up to the limit; a pool takes
 * over another's piece when the block used longest ago is in it. The limit counts the blocks'
 * bytes, not the records beside them.
 * Thread one (the engine's).
 */
#ifndef ATTND_CACHE_HOST_TIER_H
#define ATTND_CACHE_HOST_TIER_H

#include "cache/kv.h"

/* Where the memory comes from; take may fail (NULL). */
struct host_tier_memory {
    void *(*take)(void *arg, size_t bytes);
    void (*give)(void *arg, void *p, size_t bytes);
    void *arg;
};

/* blocks: those that can be found; bytes: taken from the memory. The rest counts since the tier was
 * opened. no_room: blocks that were not taken in, for want of memory; age_ns is of evicted ones,
 * from when they were last put or found. */
struct host_tier_stats {
    uint64_t blocks, bytes;
    uint64_t filled, hits, evictions, no_room, damaged;
};

struct host_tier;
struct host_block;

attn_status host_tier_open(uint64_t limit_bytes, const struct host_tier_memory *m,
                           struct host_tier **out_tier);
void host_tier_close(struct host_tier *t); /* NULL is fine; no place may be in use */
void host_tier_stats_read(const struct host_tier *t, struct host_tier_stats *out);

/* host_tier_place: a place for a block's bytes, which is the caller's until it is filled or
 * dropped. NULL: there is no room, or the same publication is there already, which counts as
 * used. All blocks of a pool have the same size. */
struct host_block *host_tier_place(struct host_tier *t, const struct kv_content *c,
                                   size_t block_bytes);
/* Its bytes are there: it can be found from now on. In place of an equal block that is there. */
void host_tier_filled(struct host_tier *t, struct host_block *b);
/* A block that is there, as the one used last; NULL: there is none. Everything of c is compared but
 * its serial, which host_block_serial tells. */
struct host_block *host_tier_find(struct host_tier *t, const struct kv_content *c);
/* The serial of such a block, which does not count as used; 0: there is none. */
uint64_t host_tier_serial(const struct host_tier *t, const struct kv_content *c);
/* While it is held a block that is there stays. */
void host_tier_hold(struct host_tier *t, struct host_block *b);
void host_tier_let_go(struct host_tier *t, struct host_block *b);
/* Are its bytes as they were? If not it is counted, and found no more. */
bool host_tier_verify(struct host_tier *t, struct host_block *b);
/* A place that was not filled, or a block that nobody holds, goes. */
void host_tier_drop(struct host_tier *t, struct host_block *b);
/* All of a pool go: nobody holds any, nor has a place of it. */
void host_tier_drop_pool(struct host_tier *t, uint32_t pool);

void *host_block_bytes(const struct host_block *b);
uint64_t host_block_serial(const struct host_block *b);

/* For tests: recounts everything. NULL, or what differs. */
const char *host_tier_check(const struct host_tier *t);

#endif
