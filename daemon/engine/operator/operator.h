/* operator.h: requests of operators: stats, inspect, configure, reload, drain, fence, pool_drop,
 * kill.
 * Handlers of engine/serve.c's table; engine thread. */
#ifndef ATTND_DAEMON_ENGINE_OPERATOR_OPERATOR_H
#define ATTND_DAEMON_ENGINE_OPERATOR_OPERATOR_H

#include "daemon/engine/core/answer.h"

/* Checks the requester's right and logs changes. ATTN_EAUTH; ATTN_ENOTFOUND: it names an unknown
 * tenant. */
attn_status operator_check(struct engine *e, const struct request *req, struct answer *a);
attn_status inspect_run(struct engine *e, struct request *req, uint32_t session, struct answer *a);
attn_status pool_drop_run(struct engine *e, struct request *req, uint32_t session,
                          struct answer *a);
attn_status configure_run(struct engine *e, struct request *req, uint32_t session,
                          struct answer *a);
attn_status reload_run(struct engine *e, struct request *req, uint32_t session, struct answer *a);
attn_status kill_run(struct engine *e, struct request *req, uint32_t session, struct answer *a);
attn_status stats_run(struct engine *e, struct request *req, uint32_t session, struct answer *a);
attn_status drain_run(struct engine *e, struct request *req, uint32_t session, struct answer *a);
attn_status fence_run(struct engine *e, struct request *req, uint32_t session, struct answer *a);
/* Answers watchers that have events or whose time is over; is_last: all watchers. */
void watchers_answer(struct engine *e, bool is_last);
/* Wakes the engine if there are watchers; called after each log line (log_set_listener). Any
 * thread. */
void watchers_wake(void *user);

#endif
