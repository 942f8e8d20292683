/* attnbench_cells.c: the cells of attnbench's grids, one table each, and what a cell is called.
 *
 * best_public_us is a fact about one card: the fastest of FlashInfer 0.6.18, FlashAttention-3
 * (commit 0251105a), TensorRT-LLM's XQA (through FlashInfer fb28d724) and vLLM's paged_attention v1
 * and v2 on an NVIDIA H200: bf16, page 16, shuffled block tables, cold L2, one call as a graph,
 * event to event, median. Of prompts it is the fastest of FlashAttention-3 and 4, cuDNN, Triton and
 * PyTorch's own on contiguous K and V, of more tokens over cached ones FlashAttention-3's paged
 * kernel at page 16; above 0.2 ms many calls in one graph. Of latents it is the faster of FlashMLA
 * (commit 9241ae3) and FlashInfer 0.7.2, at page 16 or 64. It stands beside our time only to be
 * compared on that card.
 */
#include "kernels/bench/bench.h"
#include "kernels/kv_layout.h"

#include <stdio.h>
#include <string.h>

#define COUNT(table) (uint32_t)(sizeof(table) / sizeof((table)[0]))

/* A geometry of cases.h: q heads, kv heads, head_dim. */
#define ON(name) &case_geometries[CASE_##name]

/* geometry, batch, context; the first 16 are the paged grid */
static const struct bench_cell long_cells[] = {
    {ON(64_1_256), 1, 256, .best_public_us = 13.9f},
    {ON(64_1_256), 8, 256, .best_public_us = 14.7f},
    {ON(64_1_256), 16, 256, .best_public_us = 15.2f},
    {ON(64_1_256), 32, 256, .best_public_us = 17.4f},
    {ON(64_1_256), 1, 2048, .best_public_us = 14.5f},
    {ON(64_1_256), 8, 2048, .best_public_us = 16.9f},
    {ON(64_1_256), 16, 2048, .best_public_us = 24.0f},
    {ON(64_1_256), 32, 2048, .best_public_us = 33.6f},
    {ON(64_8_128), 1, 256, .best_public_us = 9.5f},
    {ON(64_8_128), 8, 256, .best_public_us = 10.5f},
    {ON(64_8_128), 16, 256, .best_public_us = 12.4f},
    {ON(64_8_128), 32, 256, .best_public_us = 18.9f},
    {ON(64_8_128), 1, 2048, .best_public_us = 13.0f},
    {ON(64_8_128), 8, 2048, .best_public_us = 28.0f},
    {ON(64_8_128), 16, 2048, .best_public_us = 41.7f},
    {ON(64_8_128), 32, 2048, .best_public_us = 71.2f},
    {ON(32_8_128), 1, 8192, .best_public_us = 19.9f},
    {ON(32_8_128), 4, 8192, .best_public_us = 42.9f},
    {ON(32_8_128), 16, 8192, .best_public_us = 132.4f},
    {ON(32_8_128), 1, 32768, .best_public_us = 44.6f},
    {ON(32_8_128), 4, 32768, .best_public_us = 132.2f},
    {ON(32_8_128), 16, 32768, .best_public_us = 485.7f},
    {ON(32_8_128), 1, 131072, .best_public_us = 133.7f},
    {ON(32_8_128), 4, 131072, .best_public_us = 484.4f},
    {ON(64_8_128), 1, 8192, .best_public_us = 19.6f},
    {ON(64_8_128), 4, 8192, .best_public_us = 43.6f},
    {ON(64_8_128), 16, 8192, .best_public_us = 133.4f},
    {ON(64_8_128), 1, 32768, .best_public_us = 45.1f},
    {ON(64_8_128), 4, 32768, .best_public_us = 131.7f},
    {ON(64_8_128), 16, 32768, .best_public_us = 486.7f},
    {ON(64_8_128), 1, 131072, .best_public_us = 133.0f},
    {ON(64_8_128), 4, 131072, .best_public_us = 485.6f},
    {ON(32_8_128), 128, 1024, .best_public_us = 135.7f},
    {ON(32_8_128), 128, 4096, .best_public_us = 481.8f},
    {ON(32_8_128), 256, 1024, .best_public_us = 256.1f},
    {ON(32_8_128), 256, 4096, .best_public_us = 952.9f},
    {ON(32_8_128), 64, 512, .best_public_us = 170.1f, .first_context = 131072},
    {ON(32_32_128), 32, 2048, .best_public_us = 248.5f},
};

/* causal prompts, then new tokens over 8,192 and 32,768 cached ones */
static const struct bench_cell prompt_cells[] = {
    {ON(12_12_64), 1, 512, .new_tokens = 512, .best_public_us = 12.0f},
    {ON(12_12_64), 1, 1024, .new_tokens = 1024, .best_public_us = 17.1f},
    {ON(12_12_64), 1, 2048, .new_tokens = 2048, .best_public_us = 30.4f},
    {ON(12_12_64), 1, 4096, .new_tokens = 4096, .best_public_us = 61.2f},
    {ON(12_12_64), 1, 8192, .new_tokens = 8192, .best_public_us = 198.0f},
    {ON(12_12_64), 1, 16384, .new_tokens = 16384, .best_public_us = 736.5f},
    {ON(12_12_64), 4, 2048, .new_tokens = 2048, .best_public_us = 69.5f},
    {ON(12_12_128), 1, 512, .new_tokens = 512, .best_public_us = 13.4f},
    {ON(12_12_128), 1, 1024, .new_tokens = 1024, .best_public_us = 20.0f},
    {ON(12_12_128), 1, 2048, .new_tokens = 2048, .best_public_us = 32.4f},
    {ON(12_12_128), 1, 4096, .new_tokens = 4096, .best_public_us = 88.5f},
    {ON(12_12_128), 1, 8192, .new_tokens = 8192, .best_public_us = 282.7f},
    {ON(12_12_128), 1, 16384, .new_tokens = 16384, .best_public_us = 1084.9f},
    {ON(12_12_128), 4, 2048, .new_tokens = 2048, .best_public_us = 98.4f},
    {ON(12_12_256), 1, 512, .new_tokens = 512, .best_public_us = 20.4f},
    {ON(12_12_256), 1, 1024, .new_tokens = 1024, .best_public_us = 30.6f},
    {ON(12_12_256), 1, 2048, .new_tokens = 2048, .best_public_us = 52.9f},
    {ON(12_12_256), 1, 4096, .new_tokens = 4096, .best_public_us = 178.0f},
    {ON(12_12_256), 1, 8192, .new_tokens = 8192, .best_public_us = 526.8f},
    {ON(12_12_256), 1, 16384, .new_tokens = 16384, .best_public_us = 2016.9f},
    {ON(12_12_256), 4, 2048, .new_tokens = 2048, .best_public_us = 178.5f},
    {ON(32_8_64), 1, 512, .new_tokens = 512, .best_public_us = 12.9f},
    {ON(32_8_64), 1, 1024, .new_tokens = 1024, .best_public_us = 21.2f},
    {ON(32_8_64), 1, 2048, .new_tokens = 2048, .best_public_us = 49.8f},
    {ON(32_8_64), 1, 4096, .new_tokens = 4096, .best_public_us = 151.5f},
    {ON(32_8_64), 1, 8192, .new_tokens = 8192, .best_public_us = 496.2f},
    {ON(32_8_64), 1, 16384, .new_tokens = 16384, .best_public_us = 1878.7f},
    {ON(32_8_64), 4, 2048, .new_tokens = 2048, .best_public_us = 173.4f},
    {ON(32_8_128), 1, 512, .new_tokens = 512, .best_public_us = 14.9f},
    {ON(32_8_128), 1, 1024, .new_tokens = 1024, .best_public_us = 25.2f},
    {ON(32_8_128), 1, 2048, .new_tokens = 2048, .best_public_us = 62.5f},
    {ON(32_8_128), 1, 4096, .new_tokens = 4096, .best_public_us = 202.1f},
    {ON(32_8_128), 1, 8192, .new_tokens = 8192, .best_public_us = 731.4f},
    {ON(32_8_128), 1, 16384, .new_tokens = 16384, .best_public_us = 2844.4f},
    {ON(32_8_128), 4, 2048, .new_tokens = 2048, .best_public_us = 229.1f},
    {ON(32_8_256), 1, 512, .new_tokens = 512, .best_public_us = 22.2f},
    {ON(32_8_256), 1, 1024, .new_tokens = 1024, .best_public_us = 39.2f},
    {ON(32_8_256), 1, 2048, .new_tokens = 2048, .best_public_us = 113.2f},
    {ON(32_8_256), 1, 4096, .new_tokens = 4096, .best_public_us = 368.2f},
    {ON(32_8_256), 1, 8192, .new_tokens = 8192, .best_public_us = 1373.3f},
    {ON(32_8_256), 1, 16384, .new_tokens = 16384, .best_public_us = 5304.1f},
    {ON(32_8_256), 4, 2048, .new_tokens = 2048, .best_public_us = 406.2f},
    {ON(32_8_128), 1, 8704, .new_tokens = 512, .best_public_us = 125.3f},
    {ON(32_8_128), 1, 33280, .new_tokens = 512, .best_public_us = 431.6f},
    {ON(32_8_128), 1, 10240, .new_tokens = 2048, .best_public_us = 493.2f},
    {ON(32_8_128), 1, 34816, .new_tokens = 2048, .best_public_us = 1726.4f},
    {ON(32_8_128), 4, 8704, .new_tokens = 512, .best_public_us = 454.4f},
    {ON(32_8_128), 4, 33280, .new_tokens = 512, .best_public_us = 1699.1f},
};

/* latent attention (MLA): 128 query heads, then 16 */
static const struct bench_cell latent_cells[] = {
    {ON(128_1_576), 1, 2048, .best_public_us = 20.0f},
    {ON(128_1_576), 1, 8192, .best_public_us = 27.4f},
    {ON(128_1_576), 1, 32768, .best_public_us = 44.0f},
    {ON(128_1_576), 8, 2048, .best_public_us = 26.5f},
    {ON(128_1_576), 8, 8192, .best_public_us = 47.2f},
    {ON(128_1_576), 8, 32768, .best_public_us = 130.4f},
    {ON(128_1_576), 32, 2048, .best_public_us = 49.6f},
    {ON(128_1_576), 32, 8192, .best_public_us = 131.0f},
    {ON(128_1_576), 32, 32768, .best_public_us = 432.7f},
    {ON(128_1_576), 128, 2048, .best_public_us = 133.8f},
    {ON(128_1_576), 128, 8192, .best_public_us = 447.3f},
    {ON(128_1_576), 128, 32768, .best_public_us = 1685.5f},
    {ON(16_1_576), 1, 2048, .best_public_us = 20.9f},
    {ON(16_1_576), 1, 8192, .best_public_us = 28.2f},
    {ON(16_1_576), 1, 32768, .best_public_us = 50.5f},
    {ON(16_1_576), 8, 2048, .best_public_us = 21.9f},
    {ON(16_1_576), 8, 8192, .best_public_us = 33.9f},
    {ON(16_1_576), 8, 32768, .best_public_us = 84.4f},
    {ON(16_1_576), 32, 2048, .best_public_us = 30.8f},
    {ON(16_1_576), 32, 8192, .best_public_us = 82.0f},
    {ON(16_1_576), 32, 32768, .best_public_us = 283.9f},
    {ON(16_1_576), 128, 2048, .best_public_us = 79.6f},
    {ON(16_1_576), 128, 8192, .best_public_us = 281.9f},
    {ON(16_1_576), 128, 32768, .best_public_us = 1092.0f},
};

static const struct bench_cell cpu_cells[] = {
    {ON(32_8_128), 1, 4096, .first_context = 0},
    {ON(32_8_128), 1, 16384, .first_context = 0},
    {ON(32_8_128), 16, 4096, .first_context = 0},
    {ON(32_8_128), 16, 16384, .first_context = 0},
};

static const struct bench_cell variant_cells[] = {
    {ON(64_8_128), 1, 2048, .best_public_us = 13.0f},
    {ON(64_8_128), 16, 2048, .best_public_us = 41.7f},
    {ON(64_1_256), 16, 2048, .best_public_us = 24.0f},
};

const struct bench_cell *bench_cells(const char *grid, uint32_t *out_n)
{
    if (strcmp(grid, "paged") == 0 || strcmp(grid, "long") == 0) {
        *out_n = grid[0] == 'p' ? BENCH_PAGED_CELLS : COUNT(long_cells);
        return long_cells;
    }
    if (strcmp(grid, "prompt") == 0) {
        *out_n = COUNT(prompt_cells);
        return prompt_cells;
    }
    if (strcmp(grid, "cpu") == 0) {
        *out_n = COUNT(cpu_cells);
        return cpu_cells;
    }
    if (strcmp(grid, "latent") == 0) {
        *out_n = COUNT(latent_cells);
        return latent_cells;
    }
    if (strcmp(grid, "variants") == 0) {
        *out_n = COUNT(variant_cells);
        return variant_cells;
    }
    return NULL;
}

uint32_t bench_context(const struct bench_cell *c, uint32_t item)
{
    if (item == 0 && c->first_context > 0)
        return c->first_context;
    if (c->max_context <= c->context)
        return c->context;
    /* multiples of the golden ratio lie evenly, and neighbours far apart */
    const uint32_t at = item * 2654435769u;
    return c->context + (uint32_t)((uint64_t)at * (c->max_context - c->context + 1) >> 32);
}

uint32_t bench_new_tokens(const struct bench_cell *c)
{
    return c->new_tokens > 0 ? c->new_tokens : 1;
}

uint32_t bench_item_tokens(const struct bench_cell *c, uint32_t item)
{
    return c->n_prompts == 0 || item < c->n_prompts ? bench_new_tokens(c) : 1;
}

double bench_flops(const struct bench_cell *c)
{
    double pairs = 0;
    for (uint32_t i = 0; i < c->batch; i++) {
        const double n = bench_item_tokens(c, i);
        pairs += n * (bench_context(c, i) - n / 2);
    }
    return 2.0 * pairs * c->g->num_q_heads * (c->g->head_dim_k + c->g->head_dim_v);
}

uint64_t bench_kv_bytes(const struct bench_cell *c)
{
    uint64_t tokens = 0;
    for (uint32_t i = 0; i < c->batch; i++)
        tokens += bench_context(c, i) - (i > 0 ? c->shared_tokens : 0);
    const attn_dtype kv = bench_kv_dtype(c);
    const uint32_t scale_bytes = kv == ATTN_BF16 ? 0 : kv_scale_bytes(kv, c->g->head_dim_k);
    const uint64_t n_rows = c->g->is_v_in_k ? 1 : 2;
    return tokens * c->g->num_kv_heads * n_rows *
           (kv_row_bytes(kv, c->g->head_dim_k) + scale_bytes);
}

attn_dtype bench_kv_dtype(const struct bench_cell *c)
{
    return c->kv_dtype == ATTN_DTYPE_NONE ? ATTN_BF16 : c->kv_dtype;
}

void bench_cell_name(const struct bench_cell *c, char *out, size_t bytes)
{
    char dims[24];
    snprintf(dims, sizeof dims, c->g->is_v_in_k ? "%u/%u" : "%u", c->g->head_dim_k,
             c->g->head_dim_v);
    snprintf(out, bytes, "%u,%u,%s,b%u,c%u", c->g->num_q_heads, c->g->num_kv_heads, dims, c->batch,
             c->context);
    if (c->max_context > 0)
        snprintf(out + strlen(out), bytes - strlen(out), "..%u", c->max_context);
    if (c->first_context > 0)
        snprintf(out + strlen(out), bytes - strlen(out), "+1x%u", c->first_context);
    if (c->shared_tokens > 0)
        snprintf(out + strlen(out), bytes - strlen(out), ",s%u", c->shared_tokens);
    if (c->new_tokens > 0)
        snprintf(out + strlen(out), bytes - strlen(out), ",n%u", c->new_tokens);
    if (c->n_prompts > 0)
        snprintf(out + strlen(out), bytes - strlen(out), "x%u", c->n_prompts);
    if (c->kv_dtype != ATTN_DTYPE_NONE)
        snprintf(out + strlen(out), bytes - strlen(out), ",%s", attn_dtype_name(c->kv_dtype));
}
