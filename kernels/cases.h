/* cases.h: what backends are checked over: geometries, dtypes and attention options, each a table.
 * The tests of every backend walk their product (tests/kernels/test_backend.c), the self test takes
 * some of it, attnbench's cells name the geometries that it measures, which the tests check, too. A
 * backend may refuse a case by pool_check with ATTN_ENOTSUP.
 */
#ifndef ATTND_KERNELS_CASES_H
#define ATTND_KERNELS_CASES_H

#include "kernels/kv_layout.h"

#include <math.h>

#define CASE_COUNT(table) (sizeof(table) / sizeof((table)[0]))

struct case_geometry {
    const char *name;
    uint32_t num_q_heads, num_kv_heads, head_dim_k, head_dim_v, block_tokens;
    bool is_v_in_k;
};

enum {
    CASE_GROUPED,
    CASE_HEAD_EACH,
    CASE_ONE_KV_HEAD,
    CASE_GROUP_OF_3,
    CASE_DIM_96,
    CASE_DIM_512,
    CASE_DIM_192,
    CASE_DIM_256,
    CASE_OTHER_DIMS,
    CASE_GROUP_OF_64,
    CASE_GROUP_OF_5,
    CASE_SMALLEST_BLOCK,
    CASE_SMALLEST_DIM,
    CASE_LARGEST_BLOCK,
    CASE_GROUP_OF_160,
    CASE_GROUP_OF_64_DIM_128,
    CASE_KV_HEADS_AS_WARPS,
    CASE_LATENT,
    CASE_LATENT_OF_256,
    CASE_LATENT_128_HEADS,
    CASE_LATENT_LARGEST_BLOCK,
    CASE_V_IS_K,
    CASE_V_IN_K_HEADS,
    CASE_N_PRODUCT, /* those above are in the product; attnbench measures those below */
    CASE_64_1_256 = CASE_N_PRODUCT,
    CASE_64_8_128,
    CASE_32_8_64,
    CASE_32_8_128,
    CASE_32_8_256,
    CASE_32_32_128,
    CASE_12_12_64,
    CASE_12_12_128,
    CASE_12_12_256,
    CASE_24_24_256,
    CASE_16_1_576,
    CASE_128_1_576,
};

/* Steps through the product share no factor with the tables' sizes: a new row wants a look at
 * them. */
static const struct case_geometry case_geometries[] = {
    [CASE_GROUPED] = {"grouped queries", 8, 2, 128, 128, 16, false},
    [CASE_HEAD_EACH] = {"a kv head each", 4, 4, 64, 64, 16, false},
    [CASE_ONE_KV_HEAD] = {"one kv head", 8, 1, 64, 64, 32, false},
    [CASE_GROUP_OF_3] = {"a group of 3", 6, 2, 80, 80, 16, false},
    [CASE_DIM_96] = {"dim 96, blocks of 64", 4, 1, 96, 96, 64, false},
    [CASE_DIM_512] = {"dim 512", 4, 2, 512, 512, 16, false},
    [CASE_DIM_192] = {"dim 192", 8, 1, 192, 192, 16, false},
    [CASE_DIM_256] = {"dim 256", 8, 1, 256, 256, 16, false},
    [CASE_OTHER_DIMS] = {"k and v of other dims", 8, 2, 192, 128, 16, false},
    [CASE_GROUP_OF_64] = {"a group of 64", 64, 1, 64, 64, 16, false},
    [CASE_GROUP_OF_5] = {"a group of 5, a dim that is no multiple of 16", 5, 1, 72, 72, 32, false},
    [CASE_SMALLEST_BLOCK] = {"the smallest block", 4, 2, 24, 40, 8, false},
    [CASE_SMALLEST_DIM] = {"the smallest dim", 2, 2, 8, 8, 8, false},
    [CASE_LARGEST_BLOCK] = {"the largest block", 16, 1, 128, 128, 256, false},
    [CASE_GROUP_OF_160] = {"a group larger than a tile of rows", 160, 1, 16, 16, 16, false},
    [CASE_GROUP_OF_64_DIM_128] = {"a group of 64, a dim that has kernels for it", 64, 1, 128, 128,
                                  16, false},
    [CASE_KV_HEADS_AS_WARPS] = {"as many kv heads as a thread block has warps", 16, 8, 64, 64, 16,
                                false},
    [CASE_LATENT] = {"a latent of 512", 16, 1, 576, 512, 16, true},
    [CASE_LATENT_OF_256] = {"a latent of 256", 8, 1, 320, 256, 64, true},
    [CASE_LATENT_128_HEADS] = {"a small latent, 128 heads", 128, 1, 72, 64, 64, true},
    [CASE_LATENT_LARGEST_BLOCK] = {"a latent in the largest block", 5, 1, 576, 512, 256, true},
    [CASE_V_IS_K] = {"V is K", 4, 2, 64, 64, 8, true},
    [CASE_V_IN_K_HEADS] = {"V in wide K, of several heads", 6, 2, 392, 72, 32, true},
    [CASE_64_1_256] = {"measured", 64, 1, 256, 256, 16, false},
    [CASE_64_8_128] = {"measured", 64, 8, 128, 128, 16, false},
    [CASE_32_8_64] = {"measured", 32, 8, 64, 64, 16, false},
    [CASE_32_8_128] = {"measured", 32, 8, 128, 128, 16, false},
    [CASE_32_8_256] = {"measured", 32, 8, 256, 256, 16, false},
    [CASE_32_32_128] = {"measured", 32, 32, 128, 128, 16, false},
    [CASE_12_12_64] = {"measured", 12, 12, 64, 64, 16, false},
    [CASE_12_12_128] = {"measured", 12, 12, 128, 128, 16, false},
    [CASE_12_12_256] = {"measured", 12, 12, 256, 256, 16, false},
    [CASE_24_24_256] = {"measured", 24, 24, 256, 256, 16, false},
    [CASE_16_1_576] = {"measured", 16, 1, 576, 512, 64, true},
    [CASE_128_1_576] = {"measured", 128, 1, 576, 512, 64, true},
};

struct case_dtype {
    attn_dtype q, kv;
};

enum {
    CASE_BF16,
    CASE_F16,
    CASE_F32,
    CASE_BF16_INT8,
    CASE_F16_INT8,
    CASE_F32_INT8,
    CASE_F16_FP8,
    CASE_BF16_FP8,
    CASE_F32_FP8,
    CASE_BF16_NVFP4,
    CASE_F16_NVFP4,
    CASE_BF16_MXFP4,
    CASE_F16_MXFP4,
    CASE_F32_MXFP4,
};

static const struct case_dtype case_dtypes[] = {
    [CASE_BF16] = {ATTN_BF16, ATTN_BF16},       [CASE_F16] = {ATTN_F16, ATTN_F16},
    [CASE_F32] = {ATTN_F32, ATTN_F32},          [CASE_BF16_INT8] = {ATTN_BF16, ATTN_INT8},
    [CASE_F16_INT8] = {ATTN_F16, ATTN_INT8},    [CASE_F32_INT8] = {ATTN_F32, ATTN_INT8},
    [CASE_F16_FP8] = {ATTN_F16, ATTN_FP8_E4M3}, [CASE_BF16_FP8] = {ATTN_BF16, ATTN_FP8_E4M3},
    [CASE_F32_FP8] = {ATTN_F32, ATTN_FP8_E4M3}, [CASE_BF16_NVFP4] = {ATTN_BF16, ATTN_NVFP4},
    [CASE_F16_NVFP4] = {ATTN_F16, ATTN_NVFP4},  [CASE_BF16_MXFP4] = {ATTN_BF16, ATTN_MXFP4},
    [CASE_F16_MXFP4] = {ATTN_F16, ATTN_MXFP4},  [CASE_F32_MXFP4] = {ATTN_F32, ATTN_MXFP4},
};

/* Are the head dims whole groups of FP4 values? Others are refused. */
static inline bool case_fits(const struct case_geometry *g, struct case_dtype d)
{
    const uint32_t group = kv_group(d.kv);
    return group == 0 || (g->head_dim_k % group == 0 && g->head_dim_v % group == 0);
}

struct case_options {
    const char *name;
    uint32_t window_tokens, sink_tokens;
    float soft_cap;
    bool is_full, has_sink_logits, has_alibi, is_batch_invariant;
};

enum {
    CASE_PLAIN,
    CASE_WINDOW,
    CASE_WINDOW_OF_ONE,
    CASE_WINDOW_AND_SINKS,
    CASE_MANY_SINKS,
    CASE_SOFT_CAP,
    CASE_SINK_LOGITS,
    CASE_ALIBI,
    CASE_FULL,
    CASE_BATCH_INVARIANT,
    CASE_ALL,
};

static const struct case_options case_options[] = {
    [CASE_PLAIN] = {.name = "plain"},
    [CASE_WINDOW] = {.name = "window", .window_tokens = 16},
    [CASE_WINDOW_OF_ONE] = {.name = "window of one", .window_tokens = 1},
    [CASE_WINDOW_AND_SINKS] = {.name = "window and sink tokens",
                               .window_tokens = 50,
                               .sink_tokens = 4},
    [CASE_MANY_SINKS] = {.name = "narrow window and many sink tokens",
                         .window_tokens = 5,
                         .sink_tokens = 90},
    [CASE_SOFT_CAP] = {.name = "soft cap", .soft_cap = 5},
    [CASE_SINK_LOGITS] = {.name = "sink logits", .has_sink_logits = true},
    [CASE_ALIBI] = {.name = "alibi", .has_alibi = true},
    [CASE_FULL] = {.name = "full", .is_full = true},
    [CASE_BATCH_INVARIANT] = {.name = "batch invariant", .is_batch_invariant = true},
    [CASE_ALL] = {.name = "all",
                  .window_tokens = 70,
                  .sink_tokens = 3,
                  .soft_cap = 8,
                  .has_sink_logits = true,
                  .has_alibi = true},
};

/* The pool of a case; how many layers, blocks and rows it has is the caller's. */
static inline struct backend_pool_config
case_config(const struct case_geometry *g, struct case_dtype d, const struct case_options *o)
{
    return (struct backend_pool_config){.num_q_heads = g->num_q_heads,
                                        .num_kv_heads = g->num_kv_heads,
                                        .head_dim_k = g->head_dim_k,
                                        .head_dim_v = g->head_dim_v,
                                        .is_v_in_k = g->is_v_in_k,
                                        .block_tokens = g->block_tokens,
                                        .q_dtype = d.q,
                                        .kv_dtype = d.kv,
                                        .is_batch_invariant = o->is_batch_invariant};
}

/* Its layers; sink logits and slopes are the caller's. */
static inline struct attn_layer_spec case_spec(const struct case_geometry *g,
                                               const struct case_options *o)
{
    return (struct attn_layer_spec){.scale = 1.0f / sqrtf((float)g->head_dim_k),
                                    .window_tokens = o->window_tokens,
                                    .sink_tokens = o->sink_tokens,
                                    .soft_cap = o->soft_cap,
                                    .is_full = o->is_full};
}

#endif
