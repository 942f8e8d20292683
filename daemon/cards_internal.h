/* cards_internal.h: what the files of cards.h share. */
#ifndef ATTND_DAEMON_CARDS_INTERNAL_H
#define ATTND_DAEMON_CARDS_INTERNAL_H

#include <pthread.h>
#include <semaphore.h>

#include "daemon/cards.h"
#include "daemon/engine_state.h"

/* A pool of one card, as its engine last said. */
struct card_pool {
    _Atomic uint64_t blocks, free, cached, sequences, bytes;
    _Atomic bool is_split; /* of the lead's: all its sequences are there */
};

enum { CARDS_PREFIXES = 8192, CARDS_MOVED_BITS = 12 };

struct card_move;
struct card_name;

/* What one engine tells another (cards_tell.c). */
enum note_kind { NOTE_BEGIN, NOTE_END, NOTE_SAW, NOTE_CALL, NOTE_MOVE };
struct card_note {
    struct card_note *next;
    enum note_kind kind;
    uint32_t slot;
    uint64_t session, request;
    uint32_t tenant;
    char client[SESSION_NAME_BYTES];
    /* of a call */
    void (*fn)(struct engine *e, void *arg);
    void *arg; /* or what moves, whose note it is */
    _Atomic int state;
    sem_t done;
};

struct cards {
    uint32_t n, n_joined, epoch_bits;
    bool has_tenants;
    uint32_t max_pools, max_sessions;
    struct engine *engines[CARDS_MAX];
    struct card_pool *pools[CARDS_MAX]; /* [max_pools] */
    _Atomic uint64_t free_bytes[CARDS_MAX]; /* of KV memory, that no pool has */
    _Atomic uint32_t *slots; /* [max_sessions] cards that have something of the slot's session */
    _Atomic uint32_t *held; /* [max_sessions] */
    _Atomic uint64_t prefixes[CARDS_PREFIXES]; /* cards_prefix.c */
    uint64_t prefix_seed;
    pthread_rwlock_t route; /* cards_route.c; taken before lock */
    _Atomic(struct card_move *) move; /* the one that is under way; NULL: none */
    _Atomic uint32_t move_pool; /* plus one: whose blocks it copies; 0: none */
    _Atomic uint32_t n_copying; /* a backend's threads have its blocks, or tell that they had */
    _Atomic uint32_t n_moved; /* sequences whose epoch names another card */
    pthread_mutex_t lock; /* of all below */
    struct card_name *moved[1 << CARDS_MOVED_BITS]; /* those, by name */
    void *names; /* tsearch(3): struct card_name */
    void *sessions; /* tsearch(3): struct card_session; of a daemon with tenants */
    uint32_t *n_names[CARDS_MAX]; /* [max_pools] sequences of a pool, those to be opened, too */
};

static inline bool card_is_lost(const struct engine *e)
{
    return engine_health(e) != ATTN_OK;
}

/* The card that an epoch on the wire names; one that there is not is the lead's to refuse. */
static inline uint32_t card_of_epoch(const struct cards *c, uint32_t epoch)
{
    uint32_t card = epoch & ((1u << c->epoch_bits) - 1);
    return card < c->n ? card : 0;
}

/* cards.c: the card where a sequence at this epoch would be: the one that the epoch names, or where
 * it has moved since. */
uint32_t cards_at(struct cards *c, struct seq_name name, uint32_t epoch);
/* The sequence has moved. */
void cards_moved(struct cards *c, struct seq_name name, uint32_t to, uint32_t epoch);
uint32_t cards_tenant(struct cards *c, uint64_t session);
/* Where a sequence may go: must_be a card, or (CARDS_MAX) any, at home if it can. */
struct card_place {
    uint32_t must_be, home;
};
/* Where the request that may make this sequence goes; it is placed there. CARDS_MAX: the name is
 * another card's, or (*out_no_memory) there is no memory. */
uint32_t cards_place(struct cards *c, struct request *req, struct seq_name name, uint32_t pool,
                     struct card_place to, bool *out_no_memory);
/* Where the sequence is; the lead says that it is not open. */
uint32_t cards_of_name(struct cards *c, struct seq_name name);

/* cards_route.c: requests that were this engine's, in order. The route is held for writing. */
void cards_send_again(struct cards *c, struct request *list, struct engine *from);

/* cards_step.c: the cards that the items of a step, or of a plan's, are on, as bits. */
uint32_t cards_of_step(struct cards *c, const struct request *req);
/* From: whose it was; NULL: it is not admitted yet. */
void cards_step_split(struct cards *c, struct request *req, struct engine *from, uint32_t of_cards);
/* A part's items may have moved. */
void cards_part_again(struct cards *c, struct request *req, struct engine *from);

/* cards_move.c: the move is in this engine's hands. */
void card_move_step(struct engine *e, struct card_move *m);
void card_move_free(struct card_move *m); /* NULL is fine */
/* cards_tell.c: hands it to the engine. Any thread. */
void card_move_tell(struct engine *e, struct card_move *m, struct card_note *n);

/* cards_prefix.c: the live card that is likely to have most of what the prompt begins with;
 * CARDS_MAX: none is. */
uint32_t cards_prefix_home(struct cards *c, const Attnd__Open *o);
void cards_prefix_note(struct cards *c, const Attnd__Open *o, uint32_t card);

/* cards_tell.c: has fn run on the engine's thread and waits for it. ATTN_ETIMEDOUT: it did not. */
attn_status cards_ask(struct engine *e, void (*fn)(struct engine *e, void *arg), void *arg);

#endif
