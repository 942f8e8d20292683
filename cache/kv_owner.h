/* kv_owner.h: owners of sequences (sessions), and how a repeated request is detected, so that it
 * changes nothing.
 *
 * A request that makes a sequence or takes it over carries a number, which the owner's client
 * raises each time. A number seen before is a repeat: if the sequence still has the epoch that this
 * request made, the answer is the same; otherwise, and for numbers older than the KV_MAX_SEEN
 * highest, it is ATTN_ESTALE. All other requests name an epoch, which the caller compares. All of
 * this is truth and holds across a successor. `owner` is a slot below max_owners. Thread: the
 * engine's.
 */
#ifndef ATTND_CACHE_KV_OWNER_H
#define ATTND_CACHE_KV_OWNER_H

#include "cache/kv.h"

#define KV_LABEL_BYTES 52
#define KV_MAX_SEEN 256 /* requests remembered for an owner */

/* A new owner takes the slot, with no request seen yet. The cache does not interpret id (not 0) and
 * label; the label is cut to KV_LABEL_BYTES, including its final zero. */
void kv_owner_begin(struct kv *kv, uint32_t owner, uint64_t id, uint32_t tenant, const char *label);
/* The owner is gone, and what it reserved; its sequences stay until they are closed. */
void kv_owner_end(struct kv *kv, uint32_t owner);
/* The id of the slot's owner; 0: the slot has none. */
uint64_t kv_owner_id(const struct kv *kv, uint32_t owner);
uint32_t kv_owner_tenant(const struct kv *kv, uint32_t owner);
const char *kv_owner_label(const struct kv *kv, uint32_t owner); /* in the arena */

/* The highest request seen of the owner; 0: none. */
uint64_t kv_owner_last_request(const struct kv *kv, uint32_t owner);
/* True if the request was carried out before, or is too old to know. Always false for KV_NO_OWNER
 * and KV_NO_REQUEST. */
bool kv_owner_has_seen(const struct kv *kv, uint32_t owner, uint64_t request);
/* Remembers a request that was carried out outside this cache. */
void kv_owner_saw(struct kv *kv, uint32_t owner, uint64_t request);
/* Remembers all requests that another cache has seen of the owner in the same slot. */
void kv_owner_saw_all(struct kv *kv, const struct kv *other, uint32_t owner);
/* Settings of a pool, of which the owner's latest request counts, in whatever order they come. */
enum kv_setting { KV_RESERVATION, KV_SIZE, KV_N_SETTINGS };
/* True if a later request of the owner has set it, or the request is known (kv_owner_has_seen). */
bool kv_owner_has_set(const struct kv *kv, uint32_t owner, kv_pool_id pool, enum kv_setting what,
                      uint64_t request);
/* Remembers that the request has set it. */
void kv_owner_set(struct kv *kv, uint32_t owner, kv_pool_id pool, enum kv_setting what,
                  uint64_t request);
/* True if this request of this owner made the sequence's current epoch. */
bool kv_seq_is_repeat(const struct kv *kv, kv_seq_id seq, uint32_t owner, uint64_t request);

/* --- reservations -----------------------------------------------------------------------------
 *
 * An owner may set blocks of a pool aside. It can then have that many entries with blocks in the
 * tables of its sequences, whatever other owners do; it may have more, of those that are neither
 * reserved nor used. Where a pool has reservations, a shared block counts once for each sequence
 * that has it, an open with tokens finds no more than the owner may have, fork and adoption of more
 * are ATTN_ENOBLOCKS, and pins give way. */

/* Sets how many blocks of the pool the owner has reserved, instead of what it had; 0: none.
 * Errors   nothing changed: ATTN_ENOTFOUND no such pool or owner; ATTN_ENOBLOCKS others have
 *          reserved them, or use them beyond that. The sentence has the numbers */
attn_status kv_reserve(struct kv *kv, uint32_t owner, kv_pool_id pool, uint32_t n_blocks);
uint32_t kv_reserved(const struct kv *kv, uint32_t owner, kv_pool_id pool);
/* The entries with blocks that the owner's sequences have in the pool. */
uint32_t kv_charged(const struct kv *kv, uint32_t owner, kv_pool_id pool);
/* What all owners have reserved of the pool. */
uint32_t kv_pool_reserved(const struct kv *kv, kv_pool_id pool);
/* The blocks of the pool that the owner's sequences can have besides those that they have. */
uint32_t kv_pool_free_for(const struct kv *kv, kv_pool_id pool, uint32_t owner);
/* True if the sequence's owner has no more than it reserved: then nobody else gains by what the
 * sequence gives back. */
bool kv_seq_is_covered(const struct kv *kv, kv_seq_id seq);

#endif
