/* serve.h: serves requests from the inbox. Engine thread. */
#ifndef ATTND_DAEMON_ENGINE_SERVE_H
#define ATTND_DAEMON_ENGINE_SERVE_H

#include "daemon/engine/core/state.h"

/* Answers a request, or lets it wait for its answer. now_ns: when it was taken from the inbox. */
void engine_serve(struct engine *e, struct request *req, uint64_t now_ns);

#endif
