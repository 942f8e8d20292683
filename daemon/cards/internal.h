/* internal.h: what the files of cards.h share. */
#ifndef ATTND_DAEMON_CARDS_INTERNAL_H
#define ATTND_DAEMON_CARDS_INTERNAL_H

#include <pthread.h>

#include "daemon/cards/cards.h"
#include "daemon/engine/core/state.h"

/* A pool of one card, as its engine last said. */
struct card_pool {
    _Atomic uint64_t blocks, free, cached, tiered, sequences, bytes;
    _Atomic bool is_split; /* of the lead's: all its sequences are there */
};

enum { CARDS_PREFIXES = 8192, CARDS_MOVED_BITS = 12 };

struct card_home;
struct card_move;
struct card_name;

struct cards {
    uint32_t n, n_joined, epoch_bits;
    bool has_tenants;
    uint32_t max_pools, max_sessions;
    struct engine *engines[CARDS_MAX];
    struct card_pool *pools[CARDS_MAX]; /* [max_pools] */
    _Atomic uint64_t free_bytes[CARDS_MAX]; /* of KV memory, that no pool has */
    _Atomic uint32_t *slots; /* [max_sessions] cards that have something of the slot's session */
    _Atomic uint32_t *held; /* [max_sessions] */
    _Atomic uint64_t prefixes[CARDS_PREFIXES]; /* cards/prefix.c */
    uint64_t prefix_seed;
    pthread_rwlock_t route; /* cards/route.c; taken before lock */
    _Atomic(struct card_move *) move; /* the one that is under way; NULL: none */
    _Atomic uint32_t move_pool; /* plus one: whose blocks it copies; 0: none */
    _Atomic uint32_t n_copying; /* a backend's threads have its blocks, or tell that they had */
    _Atomic uint32_t n_moved; /* sequences whose epoch names another card */
    pthread_mutex_t lock; /* of all below */
    struct card_name *moved[1 << CARDS_MOVED_BITS]; /* those, by name */
    void *names; /* tsearch(3): struct card_name */
    void *sessions; /* tsearch(3): struct card_session; of a daemon with tenants */
    void *homes; /* tsearch(3): struct card_home, of sessions that have sequences */
    uint32_t n_homes;
    uint32_t *n_names[CARDS_MAX]; /* [max_pools] sequences of a pool, those to be opened, too */
};

static inline bool card_is_lost(const struct engine *e)
{
    return engine_health(e) != ATTN_OK;
}

/* Their backends are of one module: it knows how its devices reach each other. */
static inline bool cards_are_alike(const struct engine *a, const struct engine *b)
{
    return a->parts.ops->moves_submit == b->parts.ops->moves_submit;
}

/* The card that an epoch on the wire names; one that there is not is the lead's to refuse. */
static inline uint32_t card_of_epoch(const struct cards *c, uint32_t epoch)
{
    uint32_t card = epoch & ((1u << c->epoch_bits) - 1);
    return card < c->n ? card : 0;
}

#endif
