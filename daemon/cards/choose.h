/* choose.h: chooses a sequence to move to another card. */
#ifndef ATTND_DAEMON_CARDS_CHOOSE_H
#define ATTND_DAEMON_CARDS_CHOOSE_H

#include "cache/kv.h"
#include "daemon/cards/cards.h"

/* Compares this card with the others over the time since the last call. true: *out_seq should move
 * to card *out_to; false: both are undefined. The engine's thread. */
bool cards_choose(struct engine *e, uint64_t now_ns, kv_seq_id *out_seq, uint32_t *out_to);

#endif
