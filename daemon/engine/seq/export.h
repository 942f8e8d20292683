/* export.h: the requests export and import: blocks of a sequence, out and in. Engine thread. */
#ifndef ATTND_DAEMON_ENGINE_SEQ_EXPORT_H
#define ATTND_DAEMON_ENGINE_SEQ_EXPORT_H

#include "daemon/engine/core/answer.h"

/* Nothing of the sequence may be in work. The importer must have been checked to be its owner. */
attn_status export_run(struct engine *e, struct request *req, kv_seq_id seq, struct answer *a);
attn_status import_run(struct engine *e, struct request *req, kv_seq_id seq, struct answer *a);

#endif
