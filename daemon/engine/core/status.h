/* status.h: draining and stopping, as the engine's own files see them. A token is in work
 * from the first layer that has it to the last. */
#ifndef ATTND_DAEMON_ENGINE_CORE_STATUS_H
#define ATTND_DAEMON_ENGINE_CORE_STATUS_H

#include "daemon/engine/core/state.h"

/* A layer got tokens: whether a sequence is in the middle of one must be looked at again. Before
 * the step is answered. */
void tokens_came(struct engine *e, uint64_t now_ns);
/* Looks, if nothing is held; reads every open sequence. */
void tokens_look(struct engine *e);
/* Tokens up to `end` would be the first in any layer of the sequence. */
bool seq_begins_token(const struct engine *e, uint32_t seq, uint32_t end);
/* Of what is refused because the process ends: which of its reasons to end it is. */
attn_status engine_stop_status(const struct engine *e);

#endif
