/* internal.h: what the files of cards.h share. */
#ifndef ATTND_DAEMON_CARDS_INTERNAL_H
#define ATTND_DAEMON_CARDS_INTERNAL_H

#include <pthread.h>

#include "daemon/cards/cards.h"
#include "daemon/engine/core/peers.h"

enum { CARDS_PREFIXES = 8192, CARDS_MOVED_BITS = 12 };

struct card_affinity;
struct card_move;
struct card_name;

/* A sequence that moves to another card (cards/move.c). */
struct card_leave {
    struct card_move *move; /* the one that this card has at work; NULL: none */
    uint32_t seq; /* the sequence; SEQ_NONE: it was closed */
    uint32_t n_there; /* leading blocks whose bytes are at the target */
    uint32_t n_valid; /* its first blocks that have not changed since they were copied */
    struct kv_seq_import *reading; /* held, while their bytes are read; NULL: none */
    uint32_t reading_of; /* pool */
    bool wants_stop; /* little is left: the rest goes when nothing is in work */
    bool is_stopped; /* requests for the sequence are held back, and all behind them */
    bool is_there; /* the other card has all of it */
    uint64_t wanted_ns, stopped_ns;
    uint64_t looked_ns, looked_stamp,
        busy_ns[CONFIG_MAX_DEVICES]; /* at the last look at the load */
    struct request *held, *held_last; /* back */
};

struct cards {
    struct peers peers; /* first: cards_of finds the cards by it */
    bool has_tenants;
    uint32_t max_pools, max_sessions;
    _Atomic uint32_t *slots; /* [max_sessions] cards that have something of the slot's session */
    _Atomic uint64_t prefixes[CARDS_PREFIXES]; /* cards/prefix.c */
    uint64_t prefix_seed;
    struct card_leave leaves[CARDS_MAX]; /* each its engine thread's */
    pthread_rwlock_t route; /* cards/route.c; taken before lock */
    _Atomic(struct card_move *) move; /* the one that is under way; NULL: none */
    _Atomic uint32_t move_pool; /* index plus one of the pool whose blocks it copies; 0: none */
    /* backend threads that copy its blocks or are about to report that they did */
    _Atomic uint32_t n_copying;
    _Atomic uint32_t n_moved; /* sequences whose epoch names another card */
    pthread_mutex_t lock; /* of all below */
    struct card_name *moved[1 << CARDS_MOVED_BITS]; /* those, by name */
    void *names; /* tsearch(3): struct card_name */
    void *sessions; /* tsearch(3): struct card_session; of a daemon with tenants */
    void *affinities; /* tsearch(3): struct card_affinity, of sessions that have sequences */
    uint32_t n_affinities;
    uint32_t *n_names[CARDS_MAX]; /* [max_pools] sequences of a pool, those to be opened, too */
};

static inline bool card_is_lost(const struct engine *e)
{
    return engine_health(e) != ATTN_OK;
}

static inline struct cards *cards_of(const struct engine *e)
{
    return (struct cards *)(void *)e->peers;
}

static inline struct card_leave *leave_of(const struct engine *e)
{
    return &cards_of(e)->leaves[e->env.card];
}

/* The card that an epoch on the wire names; one that there is not is the primary's to refuse. */
static inline uint32_t card_of_epoch(const struct cards *c, uint32_t epoch)
{
    uint32_t card = epoch & ((1u << c->peers.epoch_bits) - 1);
    return card < c->peers.n ? card : 0;
}

#endif
