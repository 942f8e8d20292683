/* early_commit.h: early commits: the device itself answers the workers of bells that are whole in a
 * batch. If the cache is kept for a successor, the device first writes a word in the cache, so that
 * answered appends survive even if the daemon is killed before it commits them
 * (cache/early_commit.c). Engine thread.
 */
#ifndef ATTND_DAEMON_ENGINE_STEP_EARLY_COMMIT_H
#define ATTND_DAEMON_ENGINE_STEP_EARLY_COMMIT_H

#include "daemon/engine/core/state.h"

/* Lets the device write the cache's words. If it can't and the cache is kept, the host answers
 * bells after the commit, which is slower; this is logged. */
void early_init(struct engine *e);
void early_fini(struct engine *e);

/* Sets the signals of a batch that is about to be launched; its appends are reserved. */
void early_begin(struct engine *e, struct batch *b);
/* Whether the device has answered the batch's workers. If so, all of it is done, even if the device
 * has been lost since. */
bool early_is_answered(const struct engine *e, const struct batch *b);
/* Ends the batch's early commit, once its appends are committed or before they are cancelled. */
void early_end(struct engine *e, const struct batch *b);

#endif
