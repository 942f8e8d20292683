/* kept_cache.h: the cache as a keeper (keep.h) holds it: the arena's memfd and the descriptor of
 * the KV memory that it is about, which carry the arena's id in their names. Main thread only. */
#ifndef ATTND_DAEMON_KEEPER_KEPT_CACHE_H
#define ATTND_DAEMON_KEEPER_KEPT_CACHE_H

#include "cache/kv.h"
#include "kernels/backend.h"

struct kept_cache {
    int arena_fd, memory_fd; /* -1: none */
    int idle_fd; /* idle memory; -1: there was none */
    char backend[16]; /* that the memory is of */
    char arena_name[128], memory_name[128], idle_name[128];
};

/* Which card's they are: "" where there is one. */
struct kept_owner {
    char text[32];
};
struct kept_owner kept_owner(uint32_t card, uint32_t n_cards, uint32_t device_index);

/* What a predecessor left, if both are there; false: nothing. */
bool kept_cache_take(struct kept_owner owner, struct kept_cache *out);
/* Closes this process's copies: both have been opened. */
void kept_cache_close(struct kept_cache *k);
/* Drops a cache that cannot be used, here and at the keeper. */
void kept_cache_drop(struct kept_cache *k);
/* Gives the keeper the arena and the device's memory; false: it does not have both. Logs why. What
 * kept_cache_drop needs to drop them is in *out, which has no descriptors. */
bool kept_cache_put(struct kept_owner owner, const struct kv *kv, const struct backend_ops *ops,
                    struct backend *backend, struct kept_cache *out);
/* Gives the keeper idle memory, which is new, in place of what k names; fd -1: there is none any
 * more. Before anything is in it. */
void kept_cache_put_idle(struct kept_owner owner, const struct kv *kv, int fd,
                         struct kept_cache *k);

#endif
