/* session_run.h: finds, ends and expires workers' sessions. Engine thread. */
#ifndef ATTND_DAEMON_ENGINE_CORE_SESSION_RUN_H
#define ATTND_DAEMON_ENGINE_CORE_SESSION_RUN_H

#include "daemon/engine/core/answer.h"

/* Finds and renews the session that a request names. ATTN_ENOTFOUND, with the reason in a. */
attn_status session_of_request(struct engine *e, struct request *req, uint32_t *out_slot,
                               struct answer *a);
/* The session's tenant; NULL: there are no tenants. */
struct tenant *session_tenant(const struct engine *e, uint32_t slot);
/* Closes a sequence and gives back its tenant's quota. */
void seq_close(struct engine *e, kv_seq_id seq);
/* Ends a live session at once: its waiting requests are refused with why, its sequences freed as
 * those of an expired session. */
void session_kill(struct engine *e, uint32_t slot, const char *why);
/* Ends a live session that its client gives up, and in which nothing is left. */
void session_leave(struct engine *e, uint32_t slot);
/* Ends sessions whose lease is over and frees their sequences, a slice per turn. true: there is
 * more to do. */
bool sessions_expire(struct engine *e, uint64_t now_ns);

#endif
