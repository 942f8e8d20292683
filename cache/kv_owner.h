/* kv_owner.h: owners of sequences (sessions), and what a repeated request meets, so that it changes
 * nothing.
 *
 * A request that makes a sequence or takes it over has a number, which the owner's client raises
 * with each. A number that the owner has sent before is a repeat: if the sequence is still as that
 * request made it (its epoch is), the answer is the same; else, and for numbers below the
 * KV_MAX_SEEN highest, the answer is ATTN_ESTALE. All other requests name an epoch, which the
 * caller compares. All of it is truth and holds across a successor. `owner` is a slot below
 * max_owners. Thread: the engine's.
 */
#ifndef ATTND_CACHE_KV_OWNER_H
#define ATTND_CACHE_KV_OWNER_H

#include "cache/kv.h"

#define KV_LABEL_BYTES 52
#define KV_MAX_SEEN 256 /* requests remembered for an owner */

/* A new owner takes the slot: none of its requests is seen. id (not 0) and label are the owner's
 * own words; the label is cut to KV_LABEL_BYTES, with its final zero. */
void kv_owner_begin(struct kv *kv, uint32_t owner, uint64_t id, uint32_t tenant, const char *label);
/* The owner is gone; its sequences stay until they are closed. */
void kv_owner_end(struct kv *kv, uint32_t owner);
/* The id of the slot's owner; 0: there is none. */
uint64_t kv_owner_id(const struct kv *kv, uint32_t owner);
uint32_t kv_owner_tenant(const struct kv *kv, uint32_t owner);
const char *kv_owner_label(const struct kv *kv, uint32_t owner); /* in the arena */

/* The highest request seen of the owner; 0: none. */
uint64_t kv_owner_last_request(const struct kv *kv, uint32_t owner);
/* Was the request carried out before, or is it too old to tell? Never for KV_NO_OWNER or
 * KV_NO_REQUEST. */
bool kv_owner_has_seen(const struct kv *kv, uint32_t owner, uint64_t request);
/* The request was carried out outside this cache: remembers it. */
void kv_owner_saw(struct kv *kv, uint32_t owner, uint64_t request);
/* Remembers all requests that another cache has seen of the owner in the same slot. */
void kv_owner_saw_all(struct kv *kv, const struct kv *other, uint32_t owner);
/* Was the sequence's epoch made by this request of its owner? */
bool kv_seq_is_repeat(const struct kv *kv, kv_seq_id seq, uint32_t owner, uint64_t request);

#endif
