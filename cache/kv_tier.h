/* kv_tier.h: evicted blocks that the caller keeps elsewhere (host memory, a file) and brings back,
 * and what has become of published blocks lately (events, below).
 *
 * The cache calls back before a published block is evicted, and asks what is elsewhere when blocks
 * of a prefix are to come back. It names blocks by content; tier_store.h is a store for them. The
 * caller moves the bytes. Thread: the engine's, callbacks too.
 */
#ifndef ATTND_CACHE_KV_TIER_H
#define ATTND_CACHE_KV_TIER_H

#include "cache/kv_seq.h"

/* What a published block holds, wherever its bytes are. */
struct kv_content {
    uint32_t pool, tenant;
    uint32_t index; /* its entry in every table that has it */
    uint32_t n_ids;
    uint64_t adapter;
    uint64_t key[2]; /* hash of its ids and those before it: finds candidates, proves nothing */
    uint64_t serial; /* of the publication; no two have the same */
    uint64_t parent; /* serial of the block before; 0: it is the first */
    const uint32_t *ids; /* [n_ids] */
};

/* The callbacks. They are called while blocks are allocated and prefixes looked up, and may not
 * call the cache. What c points to is valid until they return. A NULL callback is not called:
 * nothing is elsewhere. */
struct kv_tier_ops {
    void *arg;
    /* Called before a block is evicted; its bytes are valid until this returns. */
    void (*evicted)(void *arg, const struct kv_content *c, uint32_t block);
    /* Called by kv_promote_begin: true if there is a block of this content, whatever its serial.
     * Then writes its serial to c, and keeps the block until the promotion has ended. */
    bool (*find)(void *arg, struct kv_content *c);
    /* The serial of the stored block of this content; 0: there is none. */
    uint64_t (*serial)(void *arg, const struct kv_content *c);
};
/* Sets the callbacks. x is copied; its arg is used until kv is closed. */
void kv_set_tier_ops(struct kv *kv, const struct kv_tier_ops *x);

/* What a published block holds; false: it is not published. out->ids are in the arena, until the
 * block is evicted. */
bool kv_block_content(const struct kv *kv, kv_pool_id pool, uint32_t block, struct kv_content *out);

/* A promotion brings blocks back from a tier. kv_promote_begin takes up to n_most blocks, as far as
 * there is room for the owner, for the tokens' next full blocks that are in a tier, after those
 * that are published. The caller writes their bytes; nothing else uses the blocks meanwhile, and
 * the published blocks before them stay. kv_promote_end publishes the first n_there of them as
 * cached blocks, unless they no longer continue a published prefix, and frees the others. A
 * promotion is not truth: a successor knows nothing of it.
 *
 * Returns NULL: nothing is in a tier, there is no room, or no memory.
 * Owner    kv_promote_end frees f. Until then nothing of its pool may be dropped or cleared. */
struct kv_promote;
struct kv_promote *kv_promote_begin(struct kv *kv, kv_pool_id pool, uint32_t tenant, uint32_t owner,
                                    const struct kv_tokens *t, uint32_t n_most);
/* Where the leading full blocks of some tokens are, but never the one with the last token. */
struct kv_found {
    uint32_t n_published; /* a new sequence begins with these at once */
    uint32_t n_in_tier; /* the next ones, at most n_most: kv_promote_begin would take them if enough
                           blocks are free */
};
struct kv_found kv_prefix_find(const struct kv *kv, kv_pool_id pool, uint32_t tenant,
                               const struct kv_tokens *t, uint32_t n_most);
/* The i-th block taken, in the order in which find returned true. */
uint32_t kv_promote_block(const struct kv_promote *f, uint32_t i);
void kv_promote_end(struct kv *kv, struct kv_promote *f, uint32_t n_there);

/* kv_cached_hold: holds n published blocks that no sequence refers to while the caller reads them:
 * they are not evicted, and can still be found. Their pool cannot be dropped meanwhile.
 * kv_cached_release puts each back at its old place in the order of eviction, or at the end if a
 * sequence used it meanwhile. NULL: no memory. */
struct kv_seq_import;
struct kv_seq_import *kv_cached_hold(struct kv *kv, kv_pool_id pool, const uint32_t *blocks,
                                     uint32_t n);
void kv_cached_release(struct kv *kv, struct kv_seq_import *a);

/* --- events -------------------------------------------------------------------------------------
 *
 * Which blocks were published and evicted lately, for whoever keeps an index of them elsewhere.
 * The cache keeps the latest events in a ring of this process, with rising numbers. Numbers never
 * restart: an arena goes on above those that it has given, and a new one begins above
 * kv_config.events_from. No event of an earlier process is in the ring, and recovery may have
 * dropped blocks without one, so who has read up to there is behind.
 *
 * Who is behind takes a snapshot: the number of the latest event, then all publications, in any
 * number of calls while the cache changes; then the events after that number. A publication is a
 * serial in a block: the same one twice changes nothing, and an eviction of what is not known is
 * none. Then the reader has what the cache has. Thread: the engine's. */

enum kv_event_kind {
    KV_EVENT_PUBLISHED = 1, /* also of a block that moved, before it is evicted where it was */
    KV_EVENT_EVICTED, /* or written again, paged out, dropped with its pool */
    KV_EVENT_POOL_MADE,
    KV_EVENT_POOL_GONE, /* its blocks are evicted before it */
};

struct kv_event {
    uint64_t serial; /* of the publication; 0 of a pool */
    uint32_t pool, generation; /* the pool's index, and how many pools had it before */
    uint32_t block;
    uint32_t kind;
};

/* The number of the latest event. */
uint64_t kv_events_number(const struct kv *kv);
/* Whether all events after this number are in the ring; false: who has read up to it is behind. */
bool kv_events_has(const struct kv *kv, uint64_t after);
/* The first event after this number, which kv_events_has; false: there is none yet. */
bool kv_event_next(const struct kv *kv, uint64_t after, struct kv_event *out);
/* What was published by an event of this kind. false: it is not there any more, and a later event
 * says so. out->ids are in the arena, until the block is evicted. */
bool kv_event_content(const struct kv *kv, const struct kv_event *e, struct kv_content *out);

/* Where a walk over all publications is; zeros: at its beginning. */
struct kv_published_at {
    uint32_t pool, block;
};
/* Finds the first publication at or after *at, and sets *at to its place. Looks at *n_most blocks
 * and pools at most, and takes off how many it was.
 * Returns  ATTN_OK; ATTN_ENOTFOUND there are no more; ATTN_EOVERLOAD n_most are looked at, go on at
 *          *at */
attn_status kv_published_next(const struct kv *kv, struct kv_published_at *at, uint32_t *n_most,
                              struct kv_content *out);

#endif
