/* placement.c: counts the sequences of each session per card, and chooses a card for its next one.
 * Called by cards/names.c, under the lock of struct cards. */
#define _GNU_SOURCE
#include "daemon/cards/placement.h"

#include <search.h>
#include <stdlib.h>

#include "daemon/cards/cards.h"
#include "daemon/cards/internal.h"

static int compare(const void *a, const void *b)
{
    uint64_t x = ((const struct card_affinity *)a)->session,
             y = ((const struct card_affinity *)b)->session;
    return x < y ? -1 : x > y;
}

struct card_affinity *card_affinity_of(struct cards *c, uint64_t session)
{
    const struct card_affinity key = {.session = session};
    struct card_affinity **at = tfind(&key, &c->affinities, compare);
    if (at != NULL)
        return *at;
    struct card_affinity *h = calloc(1, sizeof *h);
    if (h == NULL)
        return NULL;
    h->session = session;
    if (tsearch(h, &c->affinities, compare) == NULL) {
        free(h);
        return NULL;
    }
    c->n_affinities++;
    return h;
}

void card_affinity_count(struct cards *c, struct card_affinity *h, uint32_t card, int by)
{
    if (h == NULL)
        return;
    h->n[card] += (uint32_t)by;
    h->n_all += (uint32_t)by;
    if (h->n_all > 0)
        return;
    tdelete(h, &c->affinities, compare);
    c->n_affinities--;
    free(h);
}

uint32_t card_affinity_choose(const struct cards *c, const struct card_affinity *h, uint32_t pool)
{
    uint32_t affinity = CARDS_MAX, n_live = 0, most = 0;
    uint64_t n = 1;
    for (uint32_t i = 0; i < c->peers.n; i++) {
        if (card_is_lost(c->peers.at[i]))
            continue;
        n_live++;
        n += c->n_names[i][pool];
        if (h != NULL && h->n[i] > most) {
            affinity = i;
            most = h->n[i];
        }
    }
    if (affinity == CARDS_MAX)
        return CARDS_MAX;
    uint64_t expected = (uint64_t)c->n_affinities * (h->n_all + 1);
    expected = expected > n ? expected : n;
    bool leaves_enough = 4 * (uint64_t)n_live * (c->n_names[affinity][pool] + 1) <= 5 * expected;
    return leaves_enough ? affinity : CARDS_MAX;
}

void cards_affinity_fini(struct cards *c)
{
    tdestroy(c->affinities, free);
}
