/* plan_check.h: what can be wrong with a plan, as a sentence. */
#ifndef ATTND_DAEMON_ENGINE_STEP_PLAN_CHECK_H
#define ATTND_DAEMON_ENGINE_STEP_PLAN_CHECK_H

#include "daemon/engine/core/state.h"
#include "daemon/engine/step/lane.h"

/* Bells are on their way, or planned, that will move positions. */
static inline bool plan_is_behind(const struct lane *l)
{
    return l->n_plans > 0 || l->n_busy > 0;
}

/* All of it but what is on other cards. */
attn_status plan_check(struct engine *e, const Attnd__Plan *h, uint32_t session,
                       const struct lane *l, struct wire_step_layout *out, char *why,
                       size_t why_bytes);
/* Checks its items whose sequences are on this card; is_behind: earlier steps will move their
 * positions. */
attn_status plan_check_items(struct engine *e, const Attnd__Plan *h, uint32_t session,
                             const struct pool *p, bool is_behind, char *why, size_t why_bytes);

#endif
