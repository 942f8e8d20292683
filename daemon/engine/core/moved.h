/* moved.h: sequences that were moved to another daemon: what is answered to those that ask for them
 * here. On the engine's thread.
 */
#ifndef ATTND_DAEMON_ENGINE_CORE_MOVED_H
#define ATTND_DAEMON_ENGINE_CORE_MOVED_H

#include "daemon/engine/core/answer.h"

/* Whether what a close says of the sequence's new place can be kept. ATTN_EINVAL, with the reason
 * in a. */
attn_status moved_check(const Attnd__Moved *to, struct answer *a);
/* Notes it, for engine.lease from now on. Call before the sequence is closed. */
void moved_note(struct engine *e, uint32_t tenant, const Attnd__Close *close);
/* Of a sequence that is not open here, for a handle of this epoch (0: any): ATTN_EMOVED or
 * ATTN_ENOTFOUND, with a sentence in why. */
attn_status moved_or_gone(struct engine *e, uint32_t tenant, uint64_t name, uint32_t epoch,
                          char *why, size_t why_bytes);
/* Serves a Locate. */
attn_status locate_run(struct engine *e, struct request *req, uint32_t session, struct answer *a);

#endif
