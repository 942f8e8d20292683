/* hello.h: the requests hello, which creates or resumes a session, and goodbye, which gives one up:
 * handlers of engine/serve.c's table. */
#ifndef ATTND_DAEMON_ENGINE_HELLO_H
#define ATTND_DAEMON_ENGINE_HELLO_H

#include "daemon/engine/core/answer.h"

attn_status hello_run(struct engine *e, struct request *req, uint32_t session, struct answer *a);
attn_status goodbye_run(struct engine *e, struct request *req, uint32_t session, struct answer *a);

#endif
