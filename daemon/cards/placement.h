/* placement.h: where a session's sequences are, so that its next one may go there: a step over
 * sequences of one card is computed and waited for once.
 *
 * Under the lock of struct cards.
 */
#ifndef ATTND_DAEMON_CARDS_PLACEMENT_H
#define ATTND_DAEMON_CARDS_PLACEMENT_H

#include "daemon/cards/cards.h"

/* Sequences that one session has made. */
struct card_affinity {
    uint64_t session; /* first: what the tree compares */
    uint32_t n[CARDS_MAX], n_all;
};

/* The session's, made if it has none. NULL: no memory, and its sequences are counted nowhere. */
struct card_affinity *card_affinity_of(struct cards *c, uint64_t session);
/* One more (by is 1) or less (-1) on a card. NULL is fine; one that then has none is gone. */
void card_affinity_count(struct cards *c, struct card_affinity *h, uint32_t card, int by);
/* The card with most of the session's sequences, unless one more there would exceed its fair share
 * by over a quarter. The fair share is all sequences over the live cards, or what it would be if
 * every session had as many as this one. Else CARDS_MAX. */
uint32_t card_affinity_choose(const struct cards *c, const struct card_affinity *h, uint32_t pool);
void cards_affinity_fini(struct cards *c);

#endif
