/* batch.h: builds batches from ready items and launches them. Engine thread. */
#ifndef ATTND_DAEMON_ENGINE_STEP_BATCH_H
#define ATTND_DAEMON_ENGINE_STEP_BATCH_H

#include "daemon/engine/core/state.h"

attn_status batches_init(struct engine *e); /* ATTN_ENOMEM */
void batches_fini(struct engine *e); /* also for a half-opened engine */

/* Builds and submits one batch. false: nothing is ready, it is not time, or the device takes no
 * more. */
bool batch_launch(struct engine *e);
/* Launches one item of no step, which is computed again for the canary, in a batch of its own; it
 * ends with canary_repeated. n_visible: cached tokens that it attends to. false: the device takes
 * no more now, or refused it. */
bool batch_launch_again(struct engine *e, struct pool *p, const struct backend_item *item,
                        uint64_t n_visible);
/* Whether batch_launch would, and who pays for it (NULL: no tenant). */
bool batch_waits(struct engine *e, struct tenant **out_payer);
/* Sends the pool's patches alone, to make room for more. false: the device takes no more now. */
bool batch_flush_patches(struct engine *e, struct pool *p);

#endif
