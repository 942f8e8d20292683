/* sequence.h: requests on one sequence, except for steps: handlers of engine/serve.c's table. */
#ifndef ATTND_DAEMON_ENGINE_SEQ_SEQUENCE_H
#define ATTND_DAEMON_ENGINE_SEQ_SEQUENCE_H

#include "daemon/engine/core/answer.h"

/* Runs the request, or makes it wait until the sequence that it names is free. */
attn_status control_on_seq(struct engine *e, struct request *req, uint32_t session,
                           struct answer *a);
/* The same for an import. Its bytes are charged to the tenant, as a step's are. */
attn_status control_import(struct engine *e, struct request *req, uint32_t session,
                           struct answer *a);

/* Says what an open of these tokens would find, and how much room its pool has. */
attn_status probe_run(struct engine *e, struct request *req, uint32_t session, struct answer *a);

#endif
