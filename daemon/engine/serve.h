/* serve.h: serves requests from the inbox. Engine thread. */
#ifndef ATTND_DAEMON_ENGINE_SERVE_H
#define ATTND_DAEMON_ENGINE_SERVE_H

#include "daemon/engine/core/state.h"

/* Answers a request, or lets it wait for its turn or its answer. now_ns: when it was taken from the
 * inbox. */
void engine_serve(struct engine *e, struct request *req, uint64_t now_ns);
/* Serves those whose turn it is (core/turns.h). true: others wait. */
bool engine_serve_turns(struct engine *e);
/* The engine is stopping: ends all that wait for their turn. */
void engine_end_turns(struct engine *e);

#endif
