/* size.h: what geometry a pool has on this card, and how many blocks. */
#ifndef ATTND_DAEMON_ENGINE_POOL_SIZE_H
#define ATTND_DAEMON_ENGINE_POOL_SIZE_H

#include "daemon/engine/core/state.h"

/* Checks the geometry of p->spec, picks what computes it, and decides n_blocks: what clients know
 * of it (p->config), and its bytes on this device.
 * Errors   ATTN_EINVAL, ATTN_EQUOTA, ATTN_ENOMEM, what the backend refuses; why names field and
 *          value */
attn_status pool_size(struct engine *e, const struct tenant *who, struct pool *p, char *why,
                      size_t why_bytes);
/* Entries that a row of its block table has room for, if it has n_blocks. */
uint32_t pool_row_blocks(const struct engine *e, const struct pool_spec *s, uint32_t n_blocks);
/* Block records that the pool has in this card's cache. */
uint32_t pool_records(const struct engine *e, const struct pool *p);

#endif
