/* plan.h: receives plans for lanes. */
#ifndef ATTND_DAEMON_ENGINE_STEP_PLAN_H
#define ATTND_DAEMON_ENGINE_STEP_PLAN_H

#include "daemon/engine/core/answer.h"

/* Checks the steps that a plan names and gives it to its lane. A handler in the table of
 * engine/serve.c. */
attn_status plan_run(struct engine *e, struct request *req, uint32_t session, struct answer *a);

#endif
