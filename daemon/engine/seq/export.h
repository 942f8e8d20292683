/* export.h: the requests export and import: blocks of a sequence, out and in, as many at a time as
 * a turn has time for. Engine thread. */
#ifndef ATTND_DAEMON_ENGINE_SEQ_EXPORT_H
#define ATTND_DAEMON_ENGINE_SEQ_EXPORT_H

#include "daemon/engine/core/answer.h"

/* Nothing of the sequence may be in work until the request has ended, and the importer must have
 * been checked to be its owner. *begun is set where blocks are to be copied (else it may be NULL):
 * transfer_more does that. */
attn_status export_begin(struct engine *e, struct request *req, kv_seq_id seq,
                         struct transfer **begun, struct answer *a);
attn_status import_begin(struct engine *e, struct request *req, kv_seq_id seq,
                         struct transfer **begun, struct answer *a);
/* Copies until all is done, or, a->is_later, the turn is over: call it again. */
attn_status transfer_more(struct engine *e, struct request *req, kv_seq_id seq, struct transfer *x,
                          struct answer *a);

#endif
