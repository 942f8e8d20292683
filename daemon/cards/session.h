/* session.h: mirrors sessions to the other cards: that one has begun, which requests it has had
 * carried out, and that it has ended.
 */
#ifndef ATTND_DAEMON_CARDS_SESSION_H
#define ATTND_DAEMON_CARDS_SESSION_H

#include "daemon/cards/cards.h"

/* The primary has begun or ended one: so do the others. The primary's thread. */
attn_status cards_session_begin(struct engine *primary, uint32_t slot, uint64_t id, uint32_t tenant,
                                const char *client);
void cards_session_end(struct engine *primary, uint32_t slot, uint64_t id);
/* This card has released everything of an ended session. false: the primary must wait for
 * others. */
bool cards_session_release(struct engine *e, uint32_t slot);
/* A session of a predecessor: n_cards have something of it. Before the engines have threads. */
void cards_session_kept(struct cards *c, uint32_t slot, uint32_t n_cards);
/* The request has been carried out: a repetition must not be, by another card either. */
void cards_request_done(struct engine *e, uint32_t slot, uint64_t session, uint64_t request);

#endif
