/* move_leave.h: reports and questions about the sequence that is moving to another card
 * (cards/move.c). The thread of the engine it leaves, unless said otherwise. */
#ifndef ATTND_DAEMON_CARDS_MOVE_LEAVE_H
#define ATTND_DAEMON_CARDS_MOVE_LEAVE_H

#include "daemon/cards/cards.h"

/* The sequence was cut to its first n_blocks, or is closed. Others are ignored. */
void cards_move_cut(struct engine *e, uint32_t seq, uint32_t n_blocks);
void cards_move_closed(struct engine *e, uint32_t seq);
/* Whether blocks of this pool are held because they are being copied, so that there will be more
 * room in a moment. */
bool cards_move_reads(const struct engine *e, uint32_t pool);
/* Whether a sequence of this pool is moving. Any thread. */
bool cards_move_is_of(struct engine *e, uint32_t pool);
/* Whether this sequence is moving; whether the target has all of the one that is. */
bool cards_move_is_of_seq(const struct engine *e, uint32_t seq);
bool cards_move_is_there(const struct engine *e);

#endif
