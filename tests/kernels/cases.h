/* cases.h: the option product that every backend is checked over. A case is one element of each
 * table; test_backend walks them all (or every n-th), attn options, shapes and dtypes included. A
 * backend may refuse a case by pool_check with ATTN_ENOTSUP; it is then counted as skipped.
 */
#ifndef ATTND_TESTS_KERNELS_CASES_H
#define ATTND_TESTS_KERNELS_CASES_H

#include "kernels/backend.h"

struct case_geometry {
    uint32_t num_q_heads, num_kv_heads, head_dim_k, head_dim_v, block_tokens;
};

static const struct case_geometry case_geometries[] = {
    {8, 2, 128, 128, 16}, /* grouped queries */
    {4, 4, 64, 64, 16}, /* a kv head each */
    {8, 1, 64, 64, 32}, /* one kv head for all */
    {6, 2, 80, 80, 16}, /* a group of 3 */
    {4, 1, 96, 96, 64},     {4, 2, 112, 112, 128}, {8, 1, 192, 192, 16},
    {8, 1, 256, 256, 16},   {8, 2, 192, 128, 16}, /* k and v of different dims */
    {64, 1, 64, 64, 16}, /* a group of 64 */
    {5, 1, 72, 72, 32}, /* a group of 5, a dim that is no multiple of 16 */
    {4, 2, 24, 40, 8}, /* the smallest block */
    {2, 2, 8, 8, 8}, /* the smallest dim */
    {16, 1, 128, 128, 256}, /* the largest block */
    {160, 1, 16, 16, 16}, /* a group larger than a tile of rows */
    {64, 1, 128, 128, 16}, /* a group of 64, a dim that has kernels for it */
    {16, 8, 64, 64, 16}, /* as many kv heads as a thread block has warps */
};

struct case_dtype {
    attn_dtype q, kv;
};

static const struct case_dtype case_dtypes[] = {
    {ATTN_BF16, ATTN_BF16},    {ATTN_F16, ATTN_F16},       {ATTN_F32, ATTN_F32},
    {ATTN_BF16, ATTN_INT8},    {ATTN_F16, ATTN_INT8},      {ATTN_F32, ATTN_INT8},
    {ATTN_F16, ATTN_FP8_E4M3}, {ATTN_BF16, ATTN_FP8_E4M3}, {ATTN_F32, ATTN_FP8_E4M3},
};

struct case_options {
    const char *name;
    uint32_t window_tokens, sink_tokens;
    float soft_cap;
    bool is_full, has_sink_logits, has_alibi, is_batch_invariant;
};

static const struct case_options case_options[] = {
    {.name = "plain"},
    {.name = "window", .window_tokens = 16},
    {.name = "window of one", .window_tokens = 1},
    {.name = "window and sink tokens", .window_tokens = 50, .sink_tokens = 4},
    {.name = "narrow window and many sink tokens", .window_tokens = 5, .sink_tokens = 90},
    {.name = "soft cap", .soft_cap = 5},
    {.name = "sink logits", .has_sink_logits = true},
    {.name = "alibi", .has_alibi = true},
    {.name = "full", .is_full = true},
    {.name = "batch invariant", .is_batch_invariant = true},
    {.name = "all",
     .window_tokens = 70,
     .sink_tokens = 3,
     .soft_cap = 8,
     .has_sink_logits = true,
     .has_alibi = true},
};

/* One sequence: n_before tokens are cached, then a step of n_tokens. */
struct case_item {
    uint32_t n_before, n_tokens;
};

#define CASE_MAX_ITEMS 8
struct case_shape {
    const char *name;
    struct case_item items[CASE_MAX_ITEMS]; /* up to the first with n_tokens 0 */
};

static const struct case_shape case_shapes[] = {
    {"decode at edges", {{0, 1}, {1, 1}, {7, 1}, {15, 1}, {16, 1}, {31, 1}, {63, 1}, {64, 1}}},
    {"speculative", {{0, 2}, {7, 3}, {14, 4}, {30, 5}, {5, 8}, {61, 16}, {64, 17}}},
    {"ragged", {{130, 1}, {1, 4}, {40, 1}, {9, 1}, {0, 7}}},
    {"prompt chunks", {{0, 40}, {33, 70}}},
    {"one long", {{700, 1}}},
    {"long and short", {{515, 3}, {3, 1}, {260, 1}, {55, 1}, {62, 2}, {49, 1}, {60, 1}, {63, 1}}},
    {"prompts at edges", {{0, 17}, {0, 64}, {63, 65}, {1, 127}, {200, 56}, {95, 33}, {0, 129}}},
    {"long prompts", {{0, 257}, {383, 130}, {700, 18}, {0, 1}}},
};

#define CASE_COUNT(table) (sizeof(table) / sizeof((table)[0]))

#endif
