/* placement.h: on which cards a session has its sequences, so that its next one may go to the same
 * card: a step whose sequences are on one card need not be split.
 *
 * Under the lock of struct cards.
 */
#ifndef ATTND_DAEMON_CARDS_PLACEMENT_H
#define ATTND_DAEMON_CARDS_PLACEMENT_H

#include "daemon/cards/cards.h"

/* How many sequences one session has made, per card. */
struct card_affinity {
    uint64_t session; /* first: the tree's key */
    uint32_t n[CARDS_MAX], n_all;
};

/* The session's record, made if there is none. NULL: no memory; its sequences are not counted. */
struct card_affinity *card_affinity_of(struct cards *c, uint64_t session);
/* Counts one more (by is 1) or one less (-1) on a card; 0 changes nothing. A record that then
 * counts none is freed. NULL is fine. */
void card_affinity_count(struct cards *c, struct card_affinity *h, uint32_t card, int by);
/* The live card with most of the session's sequences; CARDS_MAX: it has none, or one more there
 * would exceed the card's fair share by over a quarter. The fair share is the pool's sequences
 * divided by the live cards, or what it would be if every session had as many as this one if that
 * is more. */
uint32_t card_affinity_choose(const struct cards *c, const struct card_affinity *h, uint32_t pool);
void cards_affinity_fini(struct cards *c);

#endif
