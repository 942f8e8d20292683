/* move.h: a sequence goes to another card while it is used. The engine's thread. */
#ifndef ATTND_DAEMON_CARDS_MOVE_H
#define ATTND_DAEMON_CARDS_MOVE_H

#include "cache/kv.h"
#include "daemon/cards/cards.h"

struct answer;

/* An operator's request: answered when the sequence is there, or why not. */
attn_status cards_move_ask(struct engine *e, struct request *req, kv_seq_id seq, struct answer *a);
/* At each turn, before anything of it is looked at: what can go on goes on. true: it did. */
bool cards_move_turn(struct engine *e);
/* The engine stops: what moves stays where it is. */
void cards_move_stop(struct engine *e);
/* All engines have stopped. NULL is fine. */
void cards_move_fini(struct cards *c);

#endif
