/* restore.h: makes the arenas that a predecessor left on several cards agree. Main thread, before
 * any engine has a thread. */
#ifndef ATTND_DAEMON_CARDS_RESTORE_H
#define ATTND_DAEMON_CARDS_RESTORE_H

#include "daemon/cards/cards.h"

/* Makes pools agree, before any engine takes up sequences. On failure why gets the reason. */
attn_status cards_restore_pools(struct cards *c, char *why, size_t why_bytes);
/* Then makes sessions agree, and fills the table of names. ATTN_ENOMEM: nothing is dropped, so a
 * later start may succeed. */
attn_status cards_restore(struct cards *c);

#endif
