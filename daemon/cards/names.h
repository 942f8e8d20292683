/* names.h: which card a named sequence is on or will be made on, and which tenant owns a session.
 * Any thread, unless said otherwise.
 */
#ifndef ATTND_DAEMON_CARDS_NAMES_H
#define ATTND_DAEMON_CARDS_NAMES_H

#include "daemon/cards/cards.h"

/* Whether a sequence of this name is open on a live card. */
bool cards_know(struct cards *c, struct seq_name name);
/* Whether it is open on a live card other than this one. */
bool cards_are_elsewhere(struct cards *c, uint32_t card, struct seq_name name);
/* The card of the sequence with this epoch: the one that the epoch names, or the one that the
 * sequence has moved to since. */
uint32_t cards_at(struct cards *c, struct seq_name name, uint32_t epoch);
/* Records that the sequence has moved to another card. */
void cards_moved(struct cards *c, struct seq_name name, uint32_t to, uint32_t epoch);
/* Records that a sequence was opened on this card; cards_closed, that it was closed. Its engine's
 * thread. ATTN_EEXIST: it is open on another card; ATTN_ENOMEM. */
attn_status cards_opened(struct cards *c, uint32_t card, struct seq_name name, uint32_t pool,
                         uint32_t epoch);
/* Records a new epoch of a sequence that is open on this card. */
void cards_epoch(struct cards *c, uint32_t card, struct seq_name name, uint32_t epoch);
void cards_closed(struct cards *c, uint32_t card, struct seq_name name);
/* The card of the sequence; for an unknown one the primary, which refuses the request. */
uint32_t cards_of_name(struct cards *c, struct seq_name name);

/* Where a sequence may be made. must_be: only on this card; CARDS_MAX: on any. prefix: the card
 * that has its prefix, preferred over the one with its session's sequences; CARDS_MAX: none has
 * it. */
struct card_place {
    uint32_t must_be, prefix;
};
/* Chooses the card for a request that may make this sequence, and charges the request with the name
 * (charge.h). CARDS_MAX: the name belongs to another card, or (*out_no_memory) there is no
 * memory. */
uint32_t cards_place(struct cards *c, struct request *req, struct seq_name name, uint32_t pool,
                     struct card_place to, bool *out_no_memory);

/* Sets the tenant of a session that requests will name; forgets it when the session ends.
 * ATTN_ENOMEM. */
attn_status cards_tenant_set(struct cards *c, uint64_t session, uint32_t tenant);
void cards_tenant_forget(struct cards *c, uint64_t session);
/* The session's tenant; the operator for an unknown session, and where there are no tenants. */
uint32_t cards_tenant(struct cards *c, uint64_t session);
void cards_name_fini(struct cards *c);

#endif
