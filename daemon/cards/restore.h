/* restore.h: the arenas of a predecessor's cards are made to agree. Main thread, before any
 * engine has a thread. */
#ifndef ATTND_DAEMON_CARDS_RESTORE_H
#define ATTND_DAEMON_CARDS_RESTORE_H

#include "daemon/cards/cards.h"

/* Of pools, before any engine takes up sequences. */
attn_status cards_restore_pools(struct cards *c, char *why, size_t why_bytes);
/* Then of sessions; and learns the names. ATTN_ENOMEM: nothing is dropped, the next start may do
 * better. */
attn_status cards_restore(struct cards *c);

#endif
