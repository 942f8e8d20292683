/* status.h: draining and stopping, for the engine's own files. A token is in work from the first
 * layer that has it to the last. */
#ifndef ATTND_DAEMON_ENGINE_CORE_STATUS_H
#define ATTND_DAEMON_ENGINE_CORE_STATUS_H

#include "daemon/engine/core/state.h"

/* Notes that a layer got tokens, so that a sequence may be in the middle of one. Call before the
 * step is answered. Any thread. */
void tokens_came(struct engine *e, uint64_t now_ns);
/* While draining: checks whether any sequence is open and, if no requests are queued, whether one
 * is in the middle of a token. Reads every open sequence. */
void tokens_look(struct engine *e);
/* Whether no layer of the sequence has token `end` - 1 yet. */
bool seq_begins_token(const struct engine *e, uint32_t seq, uint32_t end);
/* With engine.fence: refuses an append if its time is over (ATTN_EFENCED), else makes it the latest
 * at which the request may begin. */
attn_status fence_check(struct engine *e, struct request *req, char *why, size_t why_bytes);
/* Status for requests refused because the process ends: ATTN_EDEVICE or ATTN_EDRAINING. */
attn_status engine_stop_status(const struct engine *e);

#endif
