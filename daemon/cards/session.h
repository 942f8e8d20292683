/* session.h: mirrors the primary's sessions to the other cards: their begin, the requests that they
 * have had carried out, and their end.
 */
#ifndef ATTND_DAEMON_CARDS_SESSION_H
#define ATTND_DAEMON_CARDS_SESSION_H

#include "daemon/cards/cards.h"

/* The primary has begun or ended a session; has the other cards do the same. The primary's thread.
 * ATTN_ENOMEM: the others do not know it. */
attn_status cards_session_begin(struct engine *primary, uint32_t slot, uint64_t id, uint32_t tenant,
                                const char *client);
void cards_session_end(struct engine *primary, uint32_t slot, uint64_t id);
/* This card has released everything of an ended session. false: this is the primary, and others
 * have not released theirs yet. */
bool cards_session_release(struct engine *e, uint32_t slot);
/* Sets how many cards have something of a predecessor's session. Before the engines have
 * threads. */
void cards_session_kept(struct cards *c, uint32_t slot, uint32_t n_cards);
/* Makes sure that cards_request_done can report the next request that this card carries out. false:
 * no memory. */
bool cards_request_begin(struct engine *e);
/* Reports a request that was carried out, so that no other card carries out a repeated one. */
void cards_request_done(struct engine *e, uint32_t slot, uint64_t session, uint64_t request);

#endif
