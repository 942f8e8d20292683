/* step.h: admits and checks steps. Engine thread. */
#ifndef ATTND_DAEMON_ENGINE_STEP_STEP_H
#define ATTND_DAEMON_ENGINE_STEP_STEP_H

#include "daemon/engine/core/answer.h"

/* Handler of steps (engine/serve.c): refuses a step as a whole, or admits it: its items become
 * ready, wait or fail, and it is answered later. */
attn_status step_run(struct engine *e, struct request *req, uint32_t session, struct answer *a);

/* Charges a request's bytes to its tenant until it is answered. ATTN_EQUOTA; ATTN_EOVERLOAD: it
 * would fit if less of the tenant's were in flight. */
attn_status bytes_charge(struct engine *e, struct request *req, uint32_t session, uint64_t bytes,
                         char *why, size_t why_bytes);

/* Checks what does not depend on sequences or the payload; out: where the tensors are. ATTN_EINVAL
 * and what wire_step_layout_of gives. */
attn_status step_check_shape(const struct engine *e, const Attnd__Step *s, const struct pool *p,
                             struct wire_step_layout *out, char *why, size_t why_bytes);
/* Whether what a step of these flags needs to project its heads is there. ATTN_ENOWEIGHTS. */
attn_status step_check_weights(uint32_t flags, uint32_t layer, const struct pool *p, char *why,
                               size_t why_bytes);
/* Check item i: its open sequence as a whole; its position in a layer that has len tokens.
 * ATTN_ESTALE, ATTN_EINVAL. */
attn_status step_check_seq(const struct engine *e, const Attnd__Step *s, uint32_t i,
                           const struct kv_seq_info *info, const struct pool *p, uint32_t session,
                           char *why, size_t why_bytes);
attn_status step_check_pos(const Attnd__Step *s, uint32_t i, uint32_t layer, uint32_t len,
                           char *why, size_t why_bytes);

/* Prefetches what the next requests of the list will use into the processor's caches. Returns the
 * first request that it left out, or NULL. */
struct request *steps_warm(struct engine *e, struct request *first);

#endif
