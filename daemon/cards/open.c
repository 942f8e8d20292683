/* open.c: makes and frees the table of cards, which engines join as they are opened. */
#include <stdlib.h>
#include <sys/random.h>

#include "daemon/cards/internal.h"
#include "daemon/cards/names.h"
#include "daemon/cards/peers.h"

attn_status cards_open(uint32_t n, uint32_t max_pools, uint32_t max_sessions,
                       struct cards **out_cards)
{
    struct cards *c = calloc(1, sizeof *c);
    if (c == NULL)
        return ATTN_ENOMEM;
    c->peers.n = n;
    c->peers.ops = &cards_peers_ops;
    while (1u << c->peers.epoch_bits < n)
        c->peers.epoch_bits++;
    c->max_pools = max_pools;
    c->n_slots = session_slots(max_sessions);
    pthread_mutex_init(&c->lock, NULL);
    pthread_rwlock_init(&c->route, NULL);
    c->slots = calloc(c->n_slots, sizeof *c->slots);
    c->peers.held = calloc(c->n_slots, sizeof *c->peers.held);
    bool is_whole =
        c->slots != NULL && c->peers.held != NULL &&
        getrandom(&c->prefix_seed, sizeof c->prefix_seed, 0) == (ssize_t)sizeof c->prefix_seed;
    for (uint32_t i = 0; i < n; i++) {
        c->n_names[i] = calloc(max_pools, sizeof *c->n_names[i]);
        is_whole &= c->n_names[i] != NULL;
    }
    if (!is_whole) {
        cards_close(c);
        return ATTN_ENOMEM;
    }
    *out_cards = c;
    return ATTN_OK;
}

void cards_close(struct cards *c)
{
    if (c == NULL)
        return;
    cards_name_fini(c);
    for (uint32_t i = 0; i < c->peers.n; i++)
        free(c->n_names[i]);
    for (uint32_t i = 0; i < CARDS_MAX * CARDS_MAX; i++)
        free(c->notes[i / CARDS_MAX][i % CARDS_MAX]);
    free(c->slots);
    free(c->peers.held);
    pthread_mutex_destroy(&c->lock);
    pthread_rwlock_destroy(&c->route);
    free(c);
}

void cards_join(struct cards *c, struct engine *e)
{
    c->peers.at[e->env.card] = e;
    c->has_tenants |= e->env.tenants != NULL;
    c->peers.n_open++;
}

struct peers *cards_peers(struct cards *c)
{
    return c == NULL ? NULL : &c->peers;
}
