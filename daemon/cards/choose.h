/* choose.h: see cards/choose.c. */
#ifndef ATTND_DAEMON_CARDS_CHOOSE_H
#define ATTND_DAEMON_CARDS_CHOOSE_H

#include "cache/kv.h"
#include "daemon/cards/cards.h"

/* Looks at what has been since the last look. true: the sequence, of which this card has too much,
 * should go to card *out_to; else both are undefined. The engine's thread. */
bool cards_choose(struct engine *e, uint64_t now_ns, kv_seq_id *out_seq, uint32_t *out_to);

#endif
