/* engine_operator.h: what operators ask of a running daemon: inspect, configure, reload, pool_drop,
 * kill. */
#ifndef ATTND_DAEMON_ENGINE_OPERATOR_H
#define ATTND_DAEMON_ENGINE_OPERATOR_H

#include "daemon/engine_state.h"

/* Answers the request if it is an operator's; false: it is not, or it may end a sequence, in the
 * sequence's turn. */
bool operator_run(struct engine *e, struct request *req);
/* Answers those who wait for events and have some, or have waited long enough; is_last: all. */
void watchers_answer(struct engine *e, bool is_last);
/* Something was logged (log_set_listener). */
void watchers_wake(void *user);

#endif
