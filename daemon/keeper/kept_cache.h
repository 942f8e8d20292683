/* kept_cache.h: the cache as a keeper (keep.h) holds it: the arena's memfd and the descriptors of
 * the KV memory and the idle memory that belong to it. All have the arena's id in their names. Main
 * thread only. */
#ifndef ATTND_DAEMON_KEEPER_KEPT_CACHE_H
#define ATTND_DAEMON_KEEPER_KEPT_CACHE_H

#include "cache/kv.h"
#include "kernels/backend.h"

struct kept_cache {
    int arena_fd, memory_fd; /* -1: none */
    int idle_fd; /* idle memory; -1: there was none */
    char backend[16]; /* the backend that made the KV memory */
    char arena_name[128], memory_name[128], idle_name[128];
};

/* Names the card whose cache it is; "" where there is one card. */
struct kept_owner {
    char text[32];
};
struct kept_owner kept_owner(uint32_t card, uint32_t n_cards, uint32_t device_index);

/* Takes what a predecessor left, if arena and KV memory are both there. false: there is nothing. */
bool kept_cache_take(struct kept_owner owner, struct kept_cache *out);
/* Closes this process's descriptors, when all have been mapped. */
void kept_cache_close(struct kept_cache *k);
/* Drops a cache that can't be used, here and at the keeper. */
void kept_cache_drop(struct kept_cache *k);
/* Gives the keeper the arena and the KV memory. false: it does not have both; the log says why.
 * *out gets their names, for kept_cache_drop, and no descriptors. */
bool kept_cache_put(struct kept_owner owner, const struct kv *kv, const struct backend_ops *ops,
                    struct backend *backend, struct kept_cache *out);
/* Gives the keeper new idle memory in place of what k names; fd -1: only drops that. Before
 * anything is in the new memory. */
void kept_cache_put_idle(struct kept_owner owner, const struct kv *kv, int fd,
                         struct kept_cache *k);

#endif
