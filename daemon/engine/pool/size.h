/* size.h: a pool's geometry and number of blocks on this card. Engine thread. */
#ifndef ATTND_DAEMON_ENGINE_POOL_SIZE_H
#define ATTND_DAEMON_ENGINE_POOL_SIZE_H

#include "daemon/engine/core/state.h"

/* Checks the geometry of p->spec, chooses the backend and, if the spec leaves it open, the number
 * of blocks; sets p->config and p->device_bytes.
 * Errors   ATTN_EINVAL, ATTN_EQUOTA, ATTN_ENOMEM, what the backend refuses; why names field and
 *          value */
attn_status pool_size(struct engine *e, const struct tenant *who, struct pool *p, char *why,
                      size_t why_bytes);
/* Entries in a row of the pool's block table, if it has n_blocks. */
uint32_t pool_row_blocks(const struct engine *e, const struct pool *p, uint32_t n_blocks);
/* Blocks whose bytes are those of its weights, rounded up; 0: it has none. */
uint32_t pool_weight_blocks(const struct pool *p);
/* Block records of the pool in this card's cache. */
uint32_t pool_records(const struct engine *e, const struct pool *p);

#endif
