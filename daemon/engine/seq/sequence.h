/* sequence.h: requests of one sequence that are no steps: handlers of engine/serve.c. */
#ifndef ATTND_DAEMON_ENGINE_SEQ_SEQUENCE_H
#define ATTND_DAEMON_ENGINE_SEQ_SEQUENCE_H

#include "daemon/engine/core/answer.h"

/* Runs the request, or has it wait for the sequence that it names. */
attn_status control_on_seq(struct engine *e, struct request *req, uint32_t session,
                           struct answer *a);
/* The same of an import: as large as steps, and waiting as they do, it is charged as they are. */
attn_status control_import(struct engine *e, struct request *req, uint32_t session,
                           struct answer *a);
/* Of a sequence; or of a session, which has no turn to wait for. */

#endif
