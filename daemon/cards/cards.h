/* cards.h: the layer above the engines of a daemon with several cards: which request goes to which
 * engine, which card has which sequence, and the messages between engines. A daemon with one card
 * does without it.
 *
 * The first card's engine is the primary: listeners submit every request to it, and engine_submit
 * calls into here (cards/peers.c). An epoch on the wire has the card in its lowest bits, so a
 * request with an epoch can be routed without a lookup; one that only has a sequence's name needs
 * the table of names.
 *
 * Any thread, unless said otherwise.
 */
#ifndef ATTND_DAEMON_CARDS_CARDS_H
#define ATTND_DAEMON_CARDS_CARDS_H

#include "daemon/engine/engine.h"

enum { CARDS_MAX = CONFIG_MAX_DEVICES };

struct cards;
struct engine;
struct peers;

/* For n engines, which join as they are opened. ATTN_ENOMEM: no memory, or no random bytes. */
attn_status cards_open(uint32_t n, uint32_t max_pools, uint32_t max_sessions,
                       struct cards **out_cards);
void cards_close(struct cards *c); /* after all engines; NULL is fine */
/* Adds an engine that is open; the primary comes first. Main thread. */
void cards_join(struct cards *c, struct engine *e);
/* The table through which engines reach each other (engine_env.peers); NULL if c is NULL. */
struct peers *cards_peers(struct cards *c);

/* What a step takes beside its request while it is on so many cards. */
uint64_t cards_step_bytes(uint32_t n_cards);

#endif
