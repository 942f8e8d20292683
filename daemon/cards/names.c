/* names.c: tables of a daemon with several cards: the card of each named sequence, the sequences
 * whose epoch names a card that they have left, and the tenant of each session. Called by routing
 * and by every engine; one lock protects all. */
#define _GNU_SOURCE
#include "daemon/cards/names.h"

#include <search.h>
#include <stdlib.h>

#include "daemon/cards/cards.h"
#include "daemon/cards/internal.h"
#include "daemon/cards/placement.h"

/* The card that a sequence is on, or is being made on. */
struct card_name {
    struct seq_name name; /* first: what the tree compares */
    uint32_t card, pool;
    struct card_affinity *affinity; /* of the session that made it; NULL: not known */
    uint32_t n_pending; /* unanswered requests that may make it */
    bool is_open;
    uint32_t epoch; /* if it has moved and its epoch names another card; else 0 */
    struct card_name *next_moved; /* in the same bucket of cards.moved */
};

static int compare(const void *a, const void *b)
{
    const struct seq_name *x = &((const struct card_name *)a)->name;
    const struct seq_name *y = &((const struct card_name *)b)->name;
    if (x->tenant != y->tenant)
        return x->tenant < y->tenant ? -1 : 1;
    return x->name < y->name ? -1 : x->name > y->name;
}

static struct card_name *name_find(struct cards *c, struct seq_name name)
{
    const struct card_name key = {.name = name};
    struct card_name **at = tfind(&key, &c->names, compare);
    return at == NULL ? NULL : *at;
}

/* Adds the entry to the counts of its card, pool and session (by is 1) or takes it out (-1). */
static void name_count(struct cards *c, const struct card_name *n, int by)
{
    if (n->pool < c->max_pools)
        c->n_names[n->card][n->pool] += (uint32_t)by;
    card_affinity_count(c, n->affinity, n->card, by);
}

static struct card_name *name_add(struct cards *c, struct seq_name name,
                                  struct card_affinity *affinity, uint32_t card, uint32_t pool)
{
    struct card_name *n = calloc(1, sizeof *n);
    if (n == NULL)
        return NULL;
    *n = (struct card_name){.name = name, .card = card, .pool = pool, .affinity = affinity};
    if (tsearch(n, &c->names, compare) == NULL) {
        free(n);
        return NULL;
    }
    name_count(c, n, 1);
    return n;
}

static void name_move(struct cards *c, struct card_name *n, uint32_t card, uint32_t pool)
{
    struct card_name from = *n;
    n->card = card;
    n->pool = pool;
    name_count(c, n, 1); /* increment first: a record at zero is freed */
    name_count(c, &from, -1);
}

/* --- names whose epoch names another card than theirs --- */

static struct card_name **moved_place(struct cards *c, struct seq_name name)
{
    uint64_t hash = (name.name ^ (uint64_t)name.tenant << 32) * UINT64_C(0x9e3779b97f4a7c15);
    return &c->moved[hash >> (64 - CARDS_MOVED_BITS)];
}

/* Records the sequence's epoch, and whether that names another card; 0: it is closed. */
static void moved_note(struct cards *c, struct card_name *n, uint32_t epoch)
{
    struct card_name **at = moved_place(c, n->name);
    uint32_t had = n->epoch;
    n->epoch = epoch != 0 && card_of_epoch(c, epoch) != n->card ? epoch : 0;
    if (had == 0 && n->epoch != 0) {
        n->next_moved = *at;
        *at = n;
        atomic_fetch_add(&c->n_moved, 1);
    } else if (had != 0 && n->epoch == 0) {
        while (*at != n)
            at = &(*at)->next_moved;
        *at = n->next_moved;
        atomic_fetch_sub(&c->n_moved, 1);
    }
}

uint32_t cards_at(struct cards *c, struct seq_name name, uint32_t epoch)
{
    uint32_t card = card_of_epoch(c, epoch);
    pthread_mutex_lock(&c->lock);
    const struct card_name *n = *moved_place(c, name);
    while (n != NULL && (n->epoch != epoch || compare(n, &name) != 0))
        n = n->next_moved;
    card = n == NULL ? card : n->card;
    pthread_mutex_unlock(&c->lock);
    return card;
}

void cards_epoch(struct cards *c, uint32_t card, struct seq_name name, uint32_t epoch)
{
    pthread_mutex_lock(&c->lock);
    struct card_name *n = name_find(c, name);
    if (n != NULL && n->card == card && n->is_open)
        moved_note(c, n, epoch);
    pthread_mutex_unlock(&c->lock);
}

void cards_moved(struct cards *c, struct seq_name name, uint32_t to, uint32_t epoch)
{
    pthread_mutex_lock(&c->lock);
    struct card_name *n = name_find(c, name);
    if (n != NULL) {
        name_move(c, n, to, n->pool);
        moved_note(c, n, epoch);
    }
    pthread_mutex_unlock(&c->lock);
}

bool cards_are_elsewhere(struct cards *c, uint32_t card, struct seq_name name)
{
    pthread_mutex_lock(&c->lock);
    const struct card_name *n = name_find(c, name);
    bool is = n != NULL && n->is_open && n->card != card && !card_is_lost(c->peers.at[n->card]);
    pthread_mutex_unlock(&c->lock);
    return is;
}

/* Frees the name if it is not used any more. */
static void name_look(struct cards *c, struct card_name *n)
{
    if (n->is_open || n->n_pending > 0)
        return;
    moved_note(c, n, 0);
    name_count(c, n, -1);
    tdelete(n, &c->names, compare);
    free(n);
}

attn_status cards_opened(struct cards *c, uint32_t card, struct seq_name name, uint32_t pool,
                         uint32_t epoch)
{
    attn_status st = ATTN_OK;
    pthread_mutex_lock(&c->lock);
    struct card_name *n = name_find(c, name);
    if (n == NULL)
        n = name_add(c, name, NULL, card, pool);
    if (n == NULL) {
        st = ATTN_ENOMEM;
    } else if (n->card != card && n->is_open) {
        st = ATTN_EEXIST;
    } else {
        name_move(c, n, card, pool);
        n->is_open = true;
        moved_note(c, n, epoch);
    }
    pthread_mutex_unlock(&c->lock);
    return st;
}

void cards_closed(struct cards *c, uint32_t card, struct seq_name name)
{
    pthread_mutex_lock(&c->lock);
    struct card_name *n = name_find(c, name);
    if (n != NULL && n->card == card) {
        n->is_open = false;
        moved_note(c, n, 0);
        name_look(c, n);
    }
    pthread_mutex_unlock(&c->lock);
}

/* Ends the claim of a request on this name, whether the request was carried out or not. */
static void name_unplace(void *cards, struct seq_name name)
{
    struct cards *c = cards;
    pthread_mutex_lock(&c->lock);
    struct card_name *n = name_find(c, name);
    if (n != NULL) {
        n->n_pending--;
        name_look(c, n);
    }
    pthread_mutex_unlock(&c->lock);
}

/* Free blocks per sequence of the pool, with one more sequence. */
static double room_of(const struct cards *c, uint32_t card, uint32_t pool)
{
    uint64_t n_free =
        atomic_load_explicit(&c->peers.at[card]->published[pool].free, memory_order_relaxed);
    return (double)n_free / (c->n_names[card][pool] + 1);
}

/* The card for a new sequence: the one with its prefix, else the one with its session's sequences;
 * but if that has less than half the room (room_of) of the roomiest live card, then the latter. Of
 * equally roomy ones the one with fewer requests is taken. */
static uint32_t best_card(struct cards *c, uint32_t pool, uint32_t prefix,
                          const struct card_affinity *affinity)
{
    uint32_t best = 0, best_held = 0;
    double best_room = -1;
    for (uint32_t i = 0; i < c->peers.n; i++) {
        if (card_is_lost(c->peers.at[i]) || pool >= c->max_pools)
            continue;
        double room = room_of(c, i, pool);
        uint32_t held =
            atomic_load_explicit(&c->peers.at[i]->queue.n_requests, memory_order_relaxed);
        if (room > best_room || (room == best_room && held < best_held)) {
            best = i;
            best_room = room;
            best_held = held;
        }
    }
    uint32_t at = prefix;
    if (pool >= c->max_pools)
        return best;
    if (at == CARDS_MAX)
        at = card_affinity_choose(c, affinity, pool);
    return at == CARDS_MAX || 2 * room_of(c, at, pool) < best_room ? best : at;
}

uint32_t cards_place(struct cards *c, struct request *req, struct seq_name name, uint32_t pool,
                     struct card_place to, bool *out_no_memory)
{
    *out_no_memory = false;
    pthread_mutex_lock(&c->lock);
    struct card_name *n = name_find(c, name);
    bool is_made = n == NULL || card_is_lost(c->peers.at[n->card]);
    struct card_affinity *affinity = is_made ? card_affinity_of(c, request_session(req)) : NULL;
    uint32_t card =
        is_made && to.must_be == CARDS_MAX ? best_card(c, pool, to.prefix, affinity) : to.must_be;
    if (n == NULL) {
        n = name_add(c, name, affinity, card, pool);
        *out_no_memory = n == NULL;
    } else if (is_made) {
        n->is_open = false; /* its sequence was lost with the card */
        moved_note(c, n, 0);
        name_move(c, n, card, pool);
    }
    card_affinity_count(c, affinity, 0, 0); /* frees a new affinity that was not used */
    bool is_elsewhere = n != NULL && to.must_be != CARDS_MAX && n->card != to.must_be;
    uint32_t at = n == NULL || is_elsewhere ? CARDS_MAX : n->card;
    if (at != CARDS_MAX) {
        n->n_pending++;
        charge_place(&req->charge, name, name_unplace, c);
    }
    pthread_mutex_unlock(&c->lock);
    return at;
}

bool cards_know(struct cards *c, struct seq_name name)
{
    pthread_mutex_lock(&c->lock);
    const struct card_name *n = name_find(c, name);
    bool is_open = n != NULL && n->is_open && !card_is_lost(c->peers.at[n->card]);
    pthread_mutex_unlock(&c->lock);
    return is_open;
}

uint32_t cards_of_name(struct cards *c, struct seq_name name)
{
    pthread_mutex_lock(&c->lock);
    const struct card_name *n = name_find(c, name);
    uint32_t card = n == NULL ? 0 : n->card;
    pthread_mutex_unlock(&c->lock);
    return card;
}

void cards_name_fini(struct cards *c)
{
    tdestroy(c->names, free);
    cards_affinity_fini(c);
    tdestroy(c->sessions, free);
}

/* --- owners of sessions ----------------------------------------------------------------------- */

struct card_session {
    uint64_t id; /* first: what the tree compares */
    uint32_t tenant;
};

static int compare_sessions(const void *a, const void *b)
{
    uint64_t x = ((const struct card_session *)a)->id, y = ((const struct card_session *)b)->id;
    return x < y ? -1 : x > y;
}

uint32_t cards_tenant(struct cards *c, uint64_t session)
{
    const struct card_session key = {.id = session};
    pthread_mutex_lock(&c->lock);
    struct card_session **at = tfind(&key, &c->sessions, compare_sessions);
    uint32_t tenant = at == NULL ? TENANT_OPERATOR : (*at)->tenant;
    pthread_mutex_unlock(&c->lock);
    return tenant;
}

attn_status cards_tenant_set(struct cards *c, uint64_t session, uint32_t tenant)
{
    if (!c->has_tenants)
        return ATTN_OK;
    struct card_session *s = malloc(sizeof *s);
    if (s == NULL)
        return ATTN_ENOMEM;
    *s = (struct card_session){session, tenant};
    pthread_mutex_lock(&c->lock);
    struct card_session **at = tsearch(s, &c->sessions, compare_sessions);
    pthread_mutex_unlock(&c->lock);
    if (at == NULL || *at != s)
        free(s);
    return at == NULL ? ATTN_ENOMEM : ATTN_OK;
}

void cards_tenant_forget(struct cards *c, uint64_t session)
{
    const struct card_session key = {.id = session};
    pthread_mutex_lock(&c->lock);
    struct card_session **at = tfind(&key, &c->sessions, compare_sessions);
    struct card_session *s = at == NULL ? NULL : *at;
    if (s != NULL)
        tdelete(s, &c->sessions, compare_sessions);
    pthread_mutex_unlock(&c->lock);
    free(s);
}
