/* move.h: moves a sequence to another card while it is in use. The engine's thread. */
#ifndef ATTND_DAEMON_CARDS_MOVE_H
#define ATTND_DAEMON_CARDS_MOVE_H

#include "cache/kv.h"
#include "daemon/cards/cards.h"

struct answer;

/* Begins the move that an operator asks for. The request is answered when the sequence has moved or
 * can't be. */
attn_status cards_move_ask(struct engine *e, struct request *req, kv_seq_id seq, struct answer *a);
/* Advances this card's move, or looks whether one should begin. Called at the beginning of each
 * turn. true: a move has reached its end. */
bool cards_move_turn(struct engine *e);
/* The engine stops: ends this card's move, so that the sequence stays. */
void cards_move_stop(struct engine *e);
/* Frees a move that is left when all engines have stopped. NULL is fine. */
void cards_move_fini(struct cards *c);

#endif
