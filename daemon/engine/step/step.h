/* step.h: steps as they come in. */
#ifndef ATTND_DAEMON_ENGINE_STEP_STEP_H
#define ATTND_DAEMON_ENGINE_STEP_STEP_H

#include "daemon/engine/core/answer.h"

/* Takes a step in, a handler of engine/serve.c's table: refuses it as a whole, or its items become
 * ready, wait or fail, and it is answered later. */
attn_status step_run(struct engine *e, struct request *req, uint32_t session, struct answer *a);

/* Charges a request's bytes to its tenant until it is answered. ATTN_EQUOTA; ATTN_EOVERLOAD: beside
 * what else is in flight. */
attn_status bytes_charge(struct engine *e, struct request *req, uint32_t session, uint64_t bytes,
                         char *why, size_t why_bytes);

/* What of a step can be wrong without looking at a sequence or its payload; out: where its tensors
 * are. ATTN_EINVAL and what wire_step_layout_of gives. */
attn_status step_check_shape(const struct engine *e, const Attnd__Step *s, const struct pool *p,
                             struct wire_step_layout *out, char *why, size_t why_bytes);
/* What can be wrong with item i: with its sequence, which is open, as a whole; and with its
 * position in a layer that has len tokens. ATTN_ESTALE, ATTN_EINVAL. */
attn_status step_check_seq(const struct engine *e, const Attnd__Step *s, uint32_t i,
                           const struct kv_seq_info *info, const struct pool *p, uint32_t session,
                           char *why, size_t why_bytes);
attn_status step_check_pos(const Attnd__Step *s, uint32_t i, uint32_t layer, uint32_t len,
                           char *why, size_t why_bytes);

/* Fetches what the next requests of a list will touch into the processor's caches. The first
 * request that was left out, or NULL. */
struct request *steps_warm(struct engine *e, struct request *first);

#endif
