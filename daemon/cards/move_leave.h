/* move_leave.h: what happens to a sequence on its way to another card (cards/move.c). */
#ifndef ATTND_DAEMON_CARDS_MOVE_LEAVE_H
#define ATTND_DAEMON_CARDS_MOVE_LEAVE_H

#include "daemon/cards/cards.h"

/* It was cut to its first n_blocks, or is closed. Its engine's thread. */
void cards_move_cut(struct engine *e, uint32_t seq, uint32_t n_blocks);
void cards_move_closed(struct engine *e, uint32_t seq);
/* Blocks of this pool are held, since they are being read: there is more room in a moment. Its
 * engine's thread. */
bool cards_move_reads(const struct engine *e, uint32_t pool);
/* Blocks of this pool are being copied. Any thread. */
bool cards_move_is_of(struct engine *e, uint32_t pool);
/* The sequence is on its way. The target has all of one. Its engine's thread. */
bool cards_move_is_of_seq(const struct engine *e, uint32_t seq);
bool cards_move_is_there(const struct engine *e);

#endif
