/* batch_end.h: ends batches that came back: commits their appends, or cancels them if the batch
 * failed, and answers tasks whose items are all done. Engine thread. */
#ifndef ATTND_DAEMON_ENGINE_STEP_BATCH_END_H
#define ATTND_DAEMON_ENGINE_STEP_BATCH_END_H

#include "daemon/engine/core/state.h"

/* Finishes one batch, or a shard of the primary's, that is done within wait_ns. false: there was
 * none. */
bool batch_finish_one(struct engine *e, uint64_t wait_ns);
/* Declares the device lost if a batch is in flight and none has come back for
 * engine.stall_timeout. */
void batches_watch(struct engine *e, uint64_t now_ns);
/* Ends a batch that the backend did not accept. */
void batch_refused(struct engine *e, struct batch *b, attn_status st, const char *why);
/* The tenant that the pool's batches are charged to; NULL: none. */
struct tenant *batch_payer(const struct engine *e, const struct pool *p);

#endif
