/* balance.c: compares the memory and the load of cards. Called by the engine that looks for a
 * sequence to move. */
#include "daemon/cards/balance.h"

enum { BUSY_PERMILLE = 800 };

static uint32_t free_permille(const struct balance_card *c)
{
    return c->n_blocks == 0 ? 0 : (uint32_t)(1000 * c->n_free / c->n_blocks);
}

static uint64_t least(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

struct balance_move balance_room(const struct balance_card *cards, uint32_t n_cards, uint32_t from)
{
    struct balance_move none = {0};
    uint32_t own = free_permille(&cards[from]), best = 0, to = from;
    for (uint32_t i = 0; i < n_cards; i++) {
        if (i == from || cards[i].is_lost || free_permille(&cards[i]) <= best)
            continue;
        best = free_permille(&cards[i]);
        to = i;
    }
    if (to == from || cards[from].is_lost || own >= 250 || best < own + 250)
        return none;
    /* moving n blocks leaves both with the same part of their blocks free */
    uint64_t a = cards[from].n_blocks, b = cards[to].n_blocks;
    uint64_t n = (a * cards[to].n_free - b * cards[from].n_free) / (a + b);
    return (struct balance_move){to, n};
}

struct balance_move balance_load(const struct balance_card *cards, uint32_t n_cards, uint32_t from,
                                 uint64_t n_active)
{
    struct balance_move none = {0};
    uint32_t own = cards[from].busy_permille, best = own, to = from;
    for (uint32_t i = 0; i < n_cards; i++) {
        if (i == from || cards[i].is_lost || cards[i].busy_permille >= best)
            continue;
        best = cards[i].busy_permille;
        to = i;
    }
    if (to == from || cards[from].is_lost || own < BUSY_PERMILLE || 2 * best > own)
        return none;
    uint64_t n = n_active * (own - best) / (2 * (uint64_t)own);
    return (struct balance_move){to, least(n, cards[to].n_free / 2)};
}
