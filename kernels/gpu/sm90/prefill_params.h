/* prefill_params.h: what prefill_launch hands to the prefill kernels and the shape of a unit for
 * each head dim. Internal to prefill_*.
 *
 * Words used here: a row is one (query token, head of a group), row = token * group + head; a unit
 * is the rows of one tile of an item and one kv head; a tile of keys is what one stage of the ring
 * holds.
 */
#ifndef ATTND_GPU_PREFILL_PARAMS_H
#define ATTND_GPU_PREFILL_PARAMS_H

#include "kernels/gpu/sm90/prefill.h"

#ifdef __CUDACC__
#define PREFILL_BOTH __host__ __device__ constexpr
#elif defined(__cplusplus)
#define PREFILL_BOTH constexpr
#else
#define PREFILL_BOTH static inline
#endif

#ifdef __cplusplus
extern "C" {
#endif

struct prefill_params {
    const struct gpu_item *items;
    const void *entries; /* prefill_entry, dilated: prefill_run; NULL: in the words */
    const struct gpu_layer *layers;
    const uint32_t *table;
    uint32_t *
        /* [2] units taken beyond the first of each block, blocks done; [PREFILL_MAX_CUT] parts done
           of the unit in that slot; zero between launches */
        counters;
    float *part_o, *part_ml;
    const char *base; /* of K and V, with strides as struct gpu_kv has them */
    const uint32_t *list_starts, *list_tokens; /* as struct gpu_attend has them */
    const struct tree_node *nodes; /* the same */
    uint64_t block_bytes, layer_bytes, v_offset;
    const float *scales; /* of a quantised pool: of decoded K, [blocks][PREFILL_DECODED_TOKENS] */
    uint32_t head_blocks; /* the same: decoded blocks of each head */
    uint32_t n_entries, n_units, section_heads;
    uint32_t num_q_heads, first_kv_head, group;
    uint32_t head0, num_kv_heads; /* kv heads from head0 on, of the pool's */
    uint32_t group_reciprocal; /* 2^32 over group, rounded up; of a group of one 0 */
    uint32_t dk, dv;
    uint32_t block_tokens, block_shift, box_tokens;
    uint32_t is_chained;
};

/* K and V of kv heads from head0 on, decoded for a launch of the same heads (prefill_codes.cu). */
struct prefill_decode {
    struct gpu_kv kv;
    const struct gpu_item *items; /* [n_items] */
    char *values; /* [blocks]: of a head and PREFILL_DECODED_TOKENS keys K, then V */
    float *scales; /* as prefill_params has them */
    uint64_t block_bytes; /* of values */
    uint32_t n_items, head0, head_blocks, pad;
};
int prefill_decode_launch(const struct prefill_decode *a, uint32_t n_heads, void *stream,
                          int chained);

/* Bytes of a block of decoded K and V. */
PREFILL_BOTH uint64_t prefill_block_bytes(uint32_t dk, uint32_t dv)
{
    return (uint64_t)PREFILL_DECODED_TOKENS * (dk + dv) * 2;
}

struct prefill_words {
    union prefill_list list;
};

/* The dim of the kernels of pools whose V is in K (latent_body.cuh), columns of their sums, and
 * rows of a block of latent_join. */
#define PREFILL_LATENT_DIM 576
#define LATENT_COLUMNS 512
#define LATENT_STAGES 4
#define LATENT_SLOTS 3 /* units that are known in a block */
#define LATENT_THREADS 384
#define LATENT_JOIN_ROWS 8

/* 64 rows of a unit for each warpgroup. Narrow kernels have two: of dilated layers a few hundred
 * rows see the same keys, which 128 divide better. */
PREFILL_BOTH uint32_t prefill_rows(uint32_t dim, bool is_narrow)
{
    return dim == PREFILL_LATENT_DIM ? 64 : dim == 64 && !is_narrow ? 192 : 128;
}

/* Rows of a unit of calls that are done sooner so (prefill_plan.c), at head dim 64, where layers
 * are not dilated and K and V not quantised: two blocks share a processor then. */
#define PREFILL_FEW_ROWS 64
PREFILL_BOTH bool prefill_has_few_rows(uint32_t dim, bool is_quantised)
{
    return dim == 64 && !is_quantised;
}
PREFILL_BOTH uint32_t prefill_blocks_at_once(uint32_t dim, uint32_t rows)
{
    return dim == 64 && rows == PREFILL_FEW_ROWS ? 2 : 1;
}

/* Keys of a tile: what two stages of K and V leave room for, and the registers of the scores. */
PREFILL_BOTH uint32_t prefill_keys(uint32_t dim)
{
    return dim <= 128 ? 128 : dim == 192 ? 96 : dim == 256 ? 80 : 48;
}

/* Tiles of rows that wait in shared memory. */
PREFILL_BOTH uint32_t prefill_q_stages(uint32_t dim)
{
    return dim <= 128 ? 2 : 1;
}

/* Tiles of K, and of V, in shared memory. */
PREFILL_BOTH uint32_t prefill_stages(uint32_t dim, bool is_narrow)
{
    return dim == 64 && is_narrow ? 4 : 2;
}

enum {
    PREFILL_SLOTS = 2, /* units that are known in a block */
    PREFILL_UNIT_BYTES = 128,
    PREFILL_BRANCH_BYTES = 56,
    PREFILL_ALIGN = 1024,
};

/* A unit, and of a dilated layer the branches in which it takes part. */
PREFILL_BOTH uint32_t prefill_slot_bytes(bool is_narrow)
{
    return PREFILL_UNIT_BYTES + (is_narrow ? ATTN_MAX_BRANCHES * PREFILL_BRANCH_BYTES : 0);
}

/* Shared memory: K stages | V stages | q | units | barriers. Slabs of 64 elements are 128 bytes
 * wide. */
PREFILL_BOTH uint32_t prefill_tile_bytes(uint32_t dim)
{
    return prefill_keys(dim) * dim * 2;
}
PREFILL_BOTH uint32_t prefill_shared_bytes(uint32_t dim, uint32_t rows, bool is_narrow)
{
    return PREFILL_ALIGN + 2 * prefill_stages(dim, is_narrow) * prefill_tile_bytes(dim) +
           prefill_q_stages(dim) * rows * dim * 2 + PREFILL_SLOTS * prefill_slot_bytes(is_narrow) +
           (4 * prefill_stages(dim, is_narrow) + 2 * prefill_q_stages(dim) + 2 * PREFILL_SLOTS) * 8;
}

/* Of the latent kernels: stages | the last slab of q | units | factors | maxima and sums of weights
 * | flags | masked tiles | barriers. It begins at a multiple of 128, so that 896 bytes at most lie
 * before the first multiple of 1024. */
PREFILL_BOTH uint32_t latent_shared_bytes(void)
{
    return PREFILL_ALIGN - 128 + LATENT_STAGES * prefill_tile_bytes(PREFILL_LATENT_DIM) + 8192 +
           LATENT_SLOTS * prefill_slot_bytes(false) + LATENT_STAGES * 64 * 4 + 64 * 8 +
           LATENT_STAGES * 4 * 4 + 4 * 8 + (3 * LATENT_STAGES + 2 + 2 * LATENT_SLOTS) * 8;
}

/* Behind it in the kernels of quantised pools: scales of the K stages. */
PREFILL_BOTH uint32_t prefill_scales_bytes(uint32_t dim, bool is_quantised)
{
    return is_quantised ? prefill_stages(dim, false) * prefill_keys(dim) * 4 : 0;
}

#ifdef __cplusplus
}
#endif
#endif
