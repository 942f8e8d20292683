/* balance.h: which card should give sequences to which other one, and how much: pure
 * functions. Never more than half of what lies between two cards, so that what was moved is not
 * moved back; and only where the gap is wide, so that small ones cost nothing. */
#ifndef ATTND_DAEMON_CARDS_BALANCE_H
#define ATTND_DAEMON_CARDS_BALANCE_H

#include <stdbool.h>
#include <stdint.h>

struct balance_card {
    bool is_lost;
    uint64_t n_blocks, n_free; /* of one pool */
    uint32_t busy_permille; /* of its device's time lately */
};

struct balance_move {
    uint32_t to;
    uint64_t n_blocks; /* at most; 0: nothing goes */
};

/* For want of room: less than a quarter of the card's blocks is free, and another card's share of
 * free blocks is larger by a quarter of the whole at least. */
struct balance_move balance_room(const struct balance_card *cards, uint32_t n_cards, uint32_t from);
/* For want of time: the card is busy most of the time, and another one at most half as much.
 * n_active: blocks of those of its sequences that were in steps lately. */
struct balance_move balance_load(const struct balance_card *cards, uint32_t n_cards, uint32_t from,
                                 uint64_t n_active);

#endif
