/* names.h: which card a sequence of a name is on, or will be, and which tenant owns a session that
 * requests name. Any thread, unless said otherwise.
 */
#ifndef ATTND_DAEMON_CARDS_NAMES_H
#define ATTND_DAEMON_CARDS_NAMES_H

#include "daemon/cards/cards.h"

/* A sequence of this name is open on some card. */
bool cards_know(struct cards *c, struct seq_name name);
/* The same, and that card is another than this one. */
bool cards_are_elsewhere(struct cards *c, uint32_t card, struct seq_name name);
/* The card where a sequence at this epoch would be: the one that the epoch names, or where it has
 * moved since. */
uint32_t cards_at(struct cards *c, struct seq_name name, uint32_t epoch);
/* The sequence has moved. */
void cards_moved(struct cards *c, struct seq_name name, uint32_t to, uint32_t epoch);
/* A sequence was opened on this card, or closed. Its engine's thread. ATTN_EEXIST: it is open on
 * another card; ATTN_ENOMEM. */
attn_status cards_opened(struct cards *c, uint32_t card, struct seq_name name, uint32_t pool,
                         uint32_t epoch);
/* One that is open there has another epoch. */
void cards_epoch(struct cards *c, uint32_t card, struct seq_name name, uint32_t epoch);
void cards_closed(struct cards *c, uint32_t card, struct seq_name name);
/* Where the sequence is; the primary says that it is not open. */
uint32_t cards_of_name(struct cards *c, struct seq_name name);

/* Where a sequence may go: must_be a card, or (CARDS_MAX) any; to the one with its prefix
 * (CARDS_MAX: none has), or to those of its session, if it can. */
struct card_place {
    uint32_t must_be, prefix;
};
/* Where the request that may make this sequence goes; until it leaves it is charged with the name.
 * CARDS_MAX: the name is another card's, or (*out_no_memory) there is no memory. */
uint32_t cards_place(struct cards *c, struct request *req, struct seq_name name, uint32_t pool,
                     struct card_place to, bool *out_no_memory);

/* Sets the tenant of a session that requests will name; forgets it when the session ends.
 * ATTN_ENOMEM. */
attn_status cards_tenant_set(struct cards *c, uint64_t session, uint32_t tenant);
void cards_tenant_forget(struct cards *c, uint64_t session);
/* For an unknown session, and without tenants: the operator. */
uint32_t cards_tenant(struct cards *c, uint64_t session);
void cards_name_fini(struct cards *c);

#endif
