/* session.h: what a session is to the cards that did not say hello to it: they are told that
 * it has begun, what it has had carried out, and that it is over.
 */
#ifndef ATTND_DAEMON_CARDS_SESSION_H
#define ATTND_DAEMON_CARDS_SESSION_H

#include "daemon/cards/cards.h"

/* How an engine ends a session of its own (engine/core/session_run.h, session_kill). */
typedef void card_session_ends(struct engine *e, uint32_t slot, const char *why);

/* The lead has begun or ended one: so do the others. The lead's thread. */
attn_status cards_session_begin(struct cards *c, uint32_t slot, uint64_t id, uint32_t tenant,
                                const char *client);
void cards_session_end(struct cards *c, uint32_t slot, uint64_t id, card_session_ends *end);
/* This card has nothing of an ended session left. false: the lead must wait for others. */
bool cards_session_let_go(struct engine *e, uint32_t slot);
/* A session of a predecessor: n_cards have something of it. Before the engines have threads. */
void cards_session_kept(struct cards *c, uint32_t slot, uint32_t n_cards);
/* Requests of a session's, by slot, that are inside engines other than the lead. Any thread. */
_Atomic uint32_t *cards_held(const struct cards *c);
/* The request has been carried out: a repetition must not be, by another card either. */
void cards_saw(struct engine *e, uint32_t slot, uint64_t session, uint64_t request);

#endif
