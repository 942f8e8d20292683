/* reserve.h: blocks of a pool that a session sets aside (cache/kv_owner.h says what that means).
 * Engine thread of the primary. */
#ifndef ATTND_DAEMON_ENGINE_POOL_RESERVE_H
#define ATTND_DAEMON_ENGINE_POOL_RESERVE_H

#include "daemon/engine/core/answer.h"

/* The session has reserved n_blocks of the pool from then on, on each card; of a split pool, in
 * all. 0: none.
 * Errors   nothing changed: ATTN_ENOBLOCKS others have reserved or use them; ATTN_EOVERLOAD a card
 *          does not answer. why has the numbers, and of several cards the one that refuses */
attn_status pool_reserve(struct engine *e, const struct pool *p, uint32_t session,
                         uint32_t n_blocks, char *why, size_t why_bytes);
/* The session has reserved nothing from then on; requests before this one reserve nothing. */
void pools_unreserve(struct engine *e, uint32_t session, uint64_t request);

/* Answers with how much room the pool has for the session: a probe of no tokens. */
Attnd__ProbeReply *answer_room(struct engine *e, const struct pool *p, uint32_t session,
                               struct answer *a);

#endif
