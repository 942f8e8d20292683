/* engine_operator.h: what operators ask of a running daemon: inspect, configure, reload, pool_drop.
 */
#ifndef ATTND_DAEMON_ENGINE_OPERATOR_H
#define ATTND_DAEMON_ENGINE_OPERATOR_H

#include "daemon/engine_state.h"

/* Answers the request if it is an operator's; false: it is not. */
bool operator_run(struct engine *e, struct request *req);

#endif
