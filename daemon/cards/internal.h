/* internal.h: the state of a daemon's cards, shared by the files of this folder. */
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
    struct card_move *move; /* this card's move; NULL: none */
    uint32_t seq; /* the sequence; SEQ_NONE: it was closed */
    uint32_t n_there; /* leading blocks that the target has */
    uint32_t n_valid; /* leading blocks that have not changed since they were copied */
    struct kv_seq_import *reading; /* hold on the blocks that are being copied; NULL: none */
    uint32_t reading_of; /* their pool */
    bool wants_stop; /* few blocks are left: it stops once no item of it is in flight */
    bool is_stopped; /* requests for the sequence, and all behind them, are held back */
    bool is_there; /* the target has all of it */
    uint64_t wanted_ns, stopped_ns; /* when these two began */
    uint64_t looked_ns, looked_stamp,
        busy_ns[CONFIG_MAX_DEVICES]; /* at the last look at the load */
    struct request *held, *held_last; /* requests that are held back */
};

struct cards {
    struct peers peers; /* first: cards_of finds the cards by it */
    bool has_tenants;
    uint32_t max_pools, n_slots;
    _Atomic uint32_t *slots; /* [n_slots] number of cards that still have the session */
    _Atomic uint64_t prefixes[CARDS_PREFIXES]; /* cards/prefix.c */
    uint64_t prefix_seed;
    struct card_leave leaves[CARDS_MAX]; /* per card, used by its engine's thread only */
    /* [by][for]: what card `by` will tell the others of a request; its engine's thread only */
    struct session_message *notes[CARDS_MAX][CARDS_MAX];
    pthread_rwlock_t route; /* cards/route.c; taken before lock */
    _Atomic(struct card_move *) move; /* the one under way; NULL: none */
    _Atomic uint32_t move_pool; /* index plus one of that move's pool; 0: none */
    _Atomic uint32_t n_copying; /* copies in flight, or about to be reported as done */
    _Atomic uint32_t n_moved; /* sequences whose epoch names another card */
    pthread_mutex_t lock; /* protects all below */
    struct card_name *moved[1 << CARDS_MOVED_BITS]; /* the n_moved sequences, hashed by name */
    void *names; /* tsearch(3): struct card_name */
    void *sessions; /* tsearch(3): struct card_session; of a daemon with tenants */
    void *affinities; /* tsearch(3): struct card_affinity, of sessions that have sequences */
    uint32_t n_affinities;
    uint32_t *n_names[CARDS_MAX]; /* [max_pools] sequences of a pool, open or being opened */
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

/* The card that an epoch on the wire names; if there is none such, the primary, which refuses
 * it. */
static inline uint32_t card_of_epoch(const struct cards *c, uint32_t epoch)
{
    uint32_t card = epoch & ((1u << c->peers.epoch_bits) - 1);
    return card < c->peers.n ? card : 0;
}

#endif
