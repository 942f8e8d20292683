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
/* The owner is gone; its sequences stay until they are closed. */
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
/* True if this request of this owner made the sequence's current epoch. */
bool kv_seq_is_repeat(const struct kv *kv, kv_seq_id seq, uint32_t owner, uint64_t request);

#endif
