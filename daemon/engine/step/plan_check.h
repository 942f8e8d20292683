/* plan_check.h: checks plans; why gets the reason for a refusal. Engine thread. */
#ifndef ATTND_DAEMON_ENGINE_STEP_PLAN_CHECK_H
#define ATTND_DAEMON_ENGINE_STEP_PLAN_CHECK_H

#include "daemon/engine/core/state.h"
#include "daemon/engine/step/lane.h"

/* Whether bells that will move positions are planned or on their way. */
static inline bool plan_is_behind(const struct lane *l)
{
    return l->n_plans > 0 || l->n_busy > 0;
}

/* Checks all of a plan except its items on other cards. out: where its tensors are. */
attn_status plan_check(struct engine *e, const Attnd__Plan *h, uint32_t session,
                       const struct lane *l, struct wire_step_layout *out, char *why,
                       size_t why_bytes);
/* Checks the items whose sequences are on this card. is_behind: earlier steps will still move
 * positions, so these are not checked. */
attn_status plan_check_items(struct engine *e, const Attnd__Plan *h, uint32_t session,
                             const struct pool *p, bool is_behind, char *why, size_t why_bytes);

#endif
