/* calls.h: several requests on sequences in one message: a handler of engine/serve.c's table. */
#ifndef ATTND_DAEMON_ENGINE_SEQ_CALLS_H
#define ATTND_DAEMON_ENGINE_SEQ_CALLS_H

#include "daemon/engine/core/answer.h"

attn_status calls_run(struct engine *e, struct request *req, uint32_t session, struct answer *a);

#endif
