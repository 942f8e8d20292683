/* batch_end.h: batches come back: what they have appended is committed, or cancelled if they
 * failed, and tasks whose items are all done are answered. */
#ifndef ATTND_DAEMON_ENGINE_STEP_BATCH_END_H
#define ATTND_DAEMON_ENGINE_STEP_BATCH_END_H

#include "daemon/engine/core/state.h"

/* Finishes the oldest batch in flight if it is done within wait_ns. false: it is not, or there is
 * none. */
bool batch_finish_one(struct engine *e, uint64_t wait_ns);
/* No batch has come back for engine.stall_timeout, and one is in flight: the device is lost. */
void batches_watch(struct engine *e, uint64_t now_ns);
/* The backend has not taken it. */
void batch_refused(struct engine *e, struct batch *b, attn_status st, const char *why);
/* The tenant that the pool's batches are charged to; NULL: none. */
struct tenant *batch_payer(const struct engine *e, const struct pool *p);

#endif
