/* engine_plan.h: plans as they come in. */
#ifndef ATTND_DAEMON_ENGINE_PLAN_H
#define ATTND_DAEMON_ENGINE_PLAN_H

#include "daemon/engine_state.h"

/* Checks the steps that a plan names, and gives it to its lane. */
void plan_admit(struct engine *e, struct request *req, uint64_t now_ns);

/* Calls announced bells off if somebody else wants the device, or one has waited for long. */
void lanes_watch(struct engine *e, uint64_t now_ns);

#endif
