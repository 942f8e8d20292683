/* cards.h: what is above the engines of a daemon with several cards: which request goes to which
 * engine, where sequences are, and the messages between engines. A daemon with one card has no such
 * table.
 *
 * The first card's engine is the primary: listeners give it everything, and engine_submit comes
 * here (cards/peers.c). An epoch on the wire has the card in its lowest bits, so a request that
 * names one is sent on without a look at anything; a request that only has a sequence's name needs
 * the table of names.
 *
 * Any thread, unless said otherwise.
 */
#ifndef ATTND_DAEMON_CARDS_CARDS_H
#define ATTND_DAEMON_CARDS_CARDS_H

#include "daemon/engine/engine.h"

enum { CARDS_MAX = 8 };

struct cards;
struct engine;
struct peers;

/* For n engines, which join as they are opened. ATTN_ENOMEM, also of random bytes. */
attn_status cards_open(uint32_t n, uint32_t max_pools, uint32_t max_sessions,
                       struct cards **out_cards);
void cards_close(struct cards *c); /* after all engines; NULL is fine */
/* An engine is open; the primary is the first. Main thread. */
void cards_join(struct cards *c, struct engine *e);
/* What its engines know of each other (engine_env.peers); NULL of NULL. */
struct peers *cards_peers(struct cards *c);

#endif
