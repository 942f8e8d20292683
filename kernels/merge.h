/* merge.h: outputs of several devices as one (struct backend_merges), on the host.
 */
#ifndef ATTND_KERNELS_MERGE_H
#define ATTND_KERNELS_MERGE_H

#include "kernels/backend.h"

/* c: of the pool; num_q_heads, head_dim_v and q_dtype are looked at. */
void merges_compute(const struct backend_pool_config *c, const struct backend_merges *m);

#endif
