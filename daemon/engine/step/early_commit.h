/* early_commit.h: early commits: answers that the device itself gives to workers, for bells that
 * are whole in a batch. Where a successor would take up the cache, the device first tells the
 * cache, by a word of its own, so that answered appends survive a kill that comes before their
 * commit (cache/early_commit.c). Engine thread.
 */
#ifndef ATTND_DAEMON_ENGINE_STEP_EARLY_COMMIT_H
#define ATTND_DAEMON_ENGINE_STEP_EARLY_COMMIT_H

#include "daemon/engine/core/state.h"

/* Lets the device write the cache's words. Where it can't, and the cache is kept, the host answers
 * bells, after the commit: slower, which the log says. */
void early_init(struct engine *e);
void early_fini(struct engine *e);

/* The signals of a batch that is about to be launched; its appends are reserved. */
void early_begin(struct engine *e, struct batch *b);
/* Whether the device has answered the batch's workers. Then all of it is done, even if the device
 * has been lost since. */
bool early_is_answered(const struct engine *e, const struct batch *b);
/* Its appends are committed, or are about to be cancelled. */
void early_end(struct engine *e, const struct batch *b);

#endif
