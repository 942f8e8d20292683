/* general.h: requests that name no sequence: pools, stats, drain. Handlers of
 * engine/serve.c's table. */
#ifndef ATTND_DAEMON_ENGINE_GENERAL_H
#define ATTND_DAEMON_ENGINE_GENERAL_H

#include "daemon/engine/core/answer.h"

attn_status pool_resize_run(struct engine *e, struct request *req, uint32_t session,
                            struct answer *a);
attn_status pool_create_run(struct engine *e, struct request *req, uint32_t session,
                            struct answer *a);
attn_status pool_describe_run(struct engine *e, struct request *req, uint32_t session,
                              struct answer *a);
attn_status pool_release_run(struct engine *e, struct request *req, uint32_t session,
                             struct answer *a);
attn_status stats_run(struct engine *e, struct request *req, uint32_t session, struct answer *a);
attn_status drain_run(struct engine *e, struct request *req, uint32_t session, struct answer *a);

#endif
