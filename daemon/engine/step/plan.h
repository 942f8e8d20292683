/* plan.h: plans as they come in. */
#ifndef ATTND_DAEMON_ENGINE_STEP_PLAN_H
#define ATTND_DAEMON_ENGINE_STEP_PLAN_H

#include "daemon/engine/core/answer.h"

/* Checks the steps that a plan names, and gives it to its lane: a handler of engine/serve.c's
 * table. */
attn_status plan_run(struct engine *e, struct request *req, uint32_t session, struct answer *a);

#endif
