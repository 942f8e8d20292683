/* lists.h: sparse steps: what a step's indices name becomes the lists that backends have, which
 * ascend and name each token once; steps whose queries choose blocks, which backends do. Engine
 * thread. */
#ifndef ATTND_DAEMON_ENGINE_STEP_LISTS_H
#define ATTND_DAEMON_ENGINE_STEP_LISTS_H

#include "daemon/engine/core/state.h"

/* Checks all of a sparse step but its indices: its layer, its pool, how many they are. */
attn_status lists_check(const Attnd__Step *s, const struct pool *p, uint64_t n_tokens, char *why,
                        size_t why_bytes);
/* Checks that blocks can be chosen in a step's layer and pool. */
attn_status choice_check(const Attnd__Step *s, const struct pool *p, char *why, size_t why_bytes);
/* Counts what the task's queries can choose.
 * Errors   ATTN_EINVAL more than a step may have */
attn_status choice_make(const struct engine *e, struct task *t, char *why, size_t why_bytes);
/* Reads the indices of the task's items once, since a worker can write to them meanwhile, and gives
 * the items their lists, in the request's arena. Items that are elsewhere, or too long to be
 * computed, get empty ones.
 * Errors   ATTN_EINVAL one names nothing that its query sees; ATTN_ENOMEM */
attn_status lists_make(const struct engine *e, struct task *t, char *why, size_t why_bytes);

#endif
