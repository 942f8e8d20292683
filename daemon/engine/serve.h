/* serve.h: see engine/serve.c. */
#ifndef ATTND_DAEMON_ENGINE_SERVE_H
#define ATTND_DAEMON_ENGINE_SERVE_H

#include "daemon/engine/core/state.h"

/* Takes a request out of the inbox: it is answered, or waits to be. */
void engine_serve(struct engine *e, struct request *req, uint64_t now_ns);

#endif
