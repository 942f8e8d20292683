/* decode_host.h: the host side of the tuned decode kernels: decode_select.c chooses how a batch is
 * computed, decode_fill.c turns that and the batch into a call. Pure functions of the pool and the
 * batch, so that the same batch gives the same bytes. Internal to them and their tests.
 */
#ifndef ATTND_GPU_DECODE_HOST_H
#define ATTND_GPU_DECODE_HOST_H

#include "kernels/gpu/sm90/decode_params.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Shared memory of a processor, and what each thread block on it takes besides its own. */
enum { PROCESSOR_SHARED = 228 << 10, BLOCK_RESERVED = 1 << 10 };

static inline uint32_t min_u32(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

static inline uint32_t ceil_div(uint32_t a, uint32_t b)
{
    return a / b + (a % b != 0);
}

/* The least k with 2^k >= n. */
static inline uint32_t log2_of(uint32_t n)
{
    uint32_t k = 0;
    while (1u << k < n)
        k++;
    return k;
}

/* What an item sees: the numbers of decode_dev_item. */
void decode_visible_tiles(const struct decode_pool *p, const struct decode_item *it,
                          uint32_t *out_n, uint32_t *out_sinks, uint32_t *out_skip);

static inline uint32_t units_of(const struct decode_pool *p, const struct decode_item *it,
                                uint32_t rows)
{
    return ceil_div(it->n_tokens * p->kv.group, rows);
}

/* A batch in units of so many rows. */
struct decode_shape {
    uint32_t max_rows; /* query rows a kv head of the widest item */
    uint32_t max_tiles;
    uint64_t tiles; /* of all segments */
    uint32_t segments;
};

struct decode_shape decode_shape_of(const struct decode_pool *p, const struct decode_item *items,
                                    uint32_t n_items, uint32_t rows);

/* What the rule chose; decode_fill turns it and a batch into a call. */
struct decode_choice {
    enum decode_kernel kernel;
    uint32_t rows; /* of a unit: 8, 16, 32 or 64 */
    uint32_t cluster; /* DECODE_CLUSTER, DECODE_SHORT, DECODE_WIDE */
    uint32_t n_groups; /* DECODE_WIDE: clusters a segment */
    uint32_t warps, stages;
    bool is_tight; /* DECODE_SHORT: as in decode_params */
    uint32_t n_processors; /* DECODE_LIST: thread blocks; DECODE_WARP: warps */
    uint32_t by_head_tiles; /* DECODE_LIST: items of no more tiles are computed a head a warp */
};
void decode_select(const struct decode_pool *p, const struct decode_item *items, uint32_t n_items,
                   struct decode_choice *out);
attn_status decode_fill(const struct decode_pool *p, const struct decode_item *items,
                        uint32_t n_items, const struct decode_choice *c, struct decode_planner *w,
                        void *upload, uint64_t upload_capacity, struct decode_call *out_call);

/* Does launching so many thread blocks as clusters of 8 load the GPCs alike? */
bool decode_is_even_load(uint32_t n_processors, uint64_t blocks);
/* Thread blocks, one a processor: one cluster of 8 on each GPC, of which there are 8. */
uint32_t decode_cluster_a_gpc(uint32_t n_processors);

#ifdef __cplusplus
}
#endif
#endif
