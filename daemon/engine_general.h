/* engine_general.h: requests that name no sequence: pools, stats, drain. */
#ifndef ATTND_DAEMON_ENGINE_GENERAL_H
#define ATTND_DAEMON_ENGINE_GENERAL_H

#include "daemon/engine_state.h"

/* Runs and answers the request, if it is one of them. false: it is not. */
bool general_run(struct engine *e, struct request *req, uint32_t session);

#endif
