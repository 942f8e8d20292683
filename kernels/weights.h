/* weights.h: where a pool's projections (backend.h, weights_write) lie in its part of the KV
 * memory, in front of its blocks: [num_layers] how many bytes a layer has, as uint64_t, then
 * [num_layers] the bytes. Zeroed memory has none.
 */
#ifndef ATTND_KERNELS_WEIGHTS_H
#define ATTND_KERNELS_WEIGHTS_H

#include "kernels/backend.h"

/* Of the counts, up to the first layer's bytes. */
static inline uint64_t weights_counts_bytes(const struct backend_pool_config *c)
{
    return ((uint64_t)c->num_layers * sizeof(uint64_t) + 63) & ~(uint64_t)63;
}

/* Of all of it; 0: the pool has no projections. */
static inline uint64_t weights_room(const struct backend_pool_config *c)
{
    if (c->q_nope_dim == 0)
        return 0;
    return (weights_counts_bytes(c) + c->num_layers * backend_weights_bytes(c) + 4095) &
           ~(uint64_t)4095;
}

/* Where a layer's bytes begin. */
static inline uint64_t weights_at(const struct backend_pool_config *c, uint32_t layer)
{
    return weights_counts_bytes(c) + layer * backend_weights_bytes(c);
}

/* A count as it was found; a damaged one is none, and the weights are sent again. */
static inline uint64_t weights_counted(const struct backend_pool_config *c, uint64_t n)
{
    return n <= backend_weights_bytes(c) ? n : 0;
}

#endif
