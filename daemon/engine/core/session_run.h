/* session_run.h: sessions as requests use them. */
#ifndef ATTND_DAEMON_ENGINE_CORE_SESSION_RUN_H
#define ATTND_DAEMON_ENGINE_CORE_SESSION_RUN_H

#include "daemon/engine/core/answer.h"

/* The session that a request names; renews it. ATTN_ENOTFOUND with a sentence. */
attn_status session_of_request(struct engine *e, struct request *req, uint32_t *out_slot,
                               struct answer *a);
/* The session's tenant; NULL: there are no tenants. */
struct tenant *session_tenant(const struct engine *e, uint32_t slot);
/* Closes a sequence, which is its tenant's no more. */
void seq_close(struct engine *e, kv_seq_id seq);
/* Ends a live session at once: what waits of it is refused, its sequences are freed as those of an
 * expired one. */
void session_kill(struct engine *e, uint32_t slot, const char *why);
/* Frees sequences of expired sessions, a slice a turn. true: there is more to do. */
bool sessions_expire(struct engine *e, uint64_t now_ns);

#endif
