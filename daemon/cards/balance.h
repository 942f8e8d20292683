/* balance.h: decides which card should give sequences to which other one, and how much. Pure
 * functions. At most half of the gap between two cards is moved, so that nothing is moved back; and
 * only a wide gap counts, so that small ones cost nothing. */
#ifndef ATTND_DAEMON_CARDS_BALANCE_H
#define ATTND_DAEMON_CARDS_BALANCE_H

#include <stdbool.h>
#include <stdint.h>

struct balance_card {
    bool is_lost;
    uint64_t n_blocks, n_free; /* of one pool */
    uint32_t busy_permille; /* of the device's time since the last look */
};

struct balance_move {
    uint32_t to;
    uint64_t n_blocks; /* at most; 0: move nothing */
};

/* Moves for memory: when less than a quarter of the card's blocks is free, and another card's free
 * part is larger by 25 percentage points or more. */
struct balance_move balance_room(const struct balance_card *cards, uint32_t n_cards, uint32_t from);
/* Moves for compute: when the card is busy for 80 % of the time or more, and another one for at
 * most half as much. n_active: blocks of the card's sequences that were in steps lately. */
struct balance_move balance_load(const struct balance_card *cards, uint32_t n_cards, uint32_t from,
                                 uint64_t n_active);

#endif
