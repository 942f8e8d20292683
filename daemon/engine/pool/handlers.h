/* handlers.h: requests on pools: handlers of engine/serve.c's table. */
#ifndef ATTND_DAEMON_ENGINE_POOL_HANDLERS_H
#define ATTND_DAEMON_ENGINE_POOL_HANDLERS_H

#include "daemon/engine/core/answer.h"

attn_status pool_reserve_run(struct engine *e, struct request *req, uint32_t session,
                             struct answer *a);
attn_status weights_run(struct engine *e, struct request *req, uint32_t session,
                        struct answer *a); /* weights.c */
attn_status pool_resize_run(struct engine *e, struct request *req, uint32_t session,
                            struct answer *a);
attn_status pool_create_run(struct engine *e, struct request *req, uint32_t session,
                            struct answer *a);
attn_status pool_describe_run(struct engine *e, struct request *req, uint32_t session,
                              struct answer *a);
attn_status pool_release_run(struct engine *e, struct request *req, uint32_t session,
                             struct answer *a);

#endif
