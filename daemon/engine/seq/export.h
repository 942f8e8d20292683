/* export.h: the requests export and import: blocks of a sequence, out and in. */
#ifndef ATTND_DAEMON_ENGINE_SEQ_EXPORT_H
#define ATTND_DAEMON_ENGINE_SEQ_EXPORT_H

#include "daemon/engine/core/answer.h"

/* Both of a sequence of which nothing is in work. The importer has been checked to be its owner. */
attn_status export_run(struct engine *e, struct request *req, kv_seq_id seq, struct answer *a);
attn_status import_run(struct engine *e, struct request *req, kv_seq_id seq, struct answer *a);

#endif
