/* attnbench_cells.c: the cells of attnbench's grids, one table each.
 *
 * best_public_us is a fact about one card: the fastest of FlashInfer 0.6.18, FlashAttention-3
 * (commit 0251105a), TensorRT-LLM's XQA (through FlashInfer fb28d724) and vLLM's paged_attention v1
 * and v2 on an NVIDIA H200: bf16, page 16, shuffled block tables, cold L2, one call as a graph,
 * event to event, median. Of prompts it is the fastest of FlashAttention-3 and 4, cuDNN, Triton and
 * PyTorch's own on contiguous K and V, of more tokens over cached ones FlashAttention-3's paged
 * kernel at page 16; above 0.2 ms many calls in one graph. It stands beside our time only to be
 * compared on that card.
 */
#include "kernels/bench/attnbench.h"

#include <string.h>

#define COUNT(table) (uint32_t)(sizeof(table) / sizeof((table)[0]))

/* q heads, kv heads, head_dim, batch, context; the first 16 are the paged grid */
static const struct bench_cell long_cells[] = {
    {64, 1, 256, 1, 256, .best_public_us = 13.9f},
    {64, 1, 256, 8, 256, .best_public_us = 14.7f},
    {64, 1, 256, 16, 256, .best_public_us = 15.2f},
    {64, 1, 256, 32, 256, .best_public_us = 17.4f},
    {64, 1, 256, 1, 2048, .best_public_us = 14.5f},
    {64, 1, 256, 8, 2048, .best_public_us = 16.9f},
    {64, 1, 256, 16, 2048, .best_public_us = 24.0f},
    {64, 1, 256, 32, 2048, .best_public_us = 33.6f},
    {64, 8, 128, 1, 256, .best_public_us = 9.5f},
    {64, 8, 128, 8, 256, .best_public_us = 10.5f},
    {64, 8, 128, 16, 256, .best_public_us = 12.4f},
    {64, 8, 128, 32, 256, .best_public_us = 18.9f},
    {64, 8, 128, 1, 2048, .best_public_us = 13.0f},
    {64, 8, 128, 8, 2048, .best_public_us = 28.0f},
    {64, 8, 128, 16, 2048, .best_public_us = 41.7f},
    {64, 8, 128, 32, 2048, .best_public_us = 71.2f},
    {32, 8, 128, 1, 8192, .best_public_us = 19.9f},
    {32, 8, 128, 4, 8192, .best_public_us = 42.9f},
    {32, 8, 128, 16, 8192, .best_public_us = 132.4f},
    {32, 8, 128, 1, 32768, .best_public_us = 44.6f},
    {32, 8, 128, 4, 32768, .best_public_us = 132.2f},
    {32, 8, 128, 16, 32768, .best_public_us = 485.7f},
    {32, 8, 128, 1, 131072, .best_public_us = 133.7f},
    {32, 8, 128, 4, 131072, .best_public_us = 484.4f},
    {64, 8, 128, 1, 8192, .best_public_us = 19.6f},
    {64, 8, 128, 4, 8192, .best_public_us = 43.6f},
    {64, 8, 128, 16, 8192, .best_public_us = 133.4f},
    {64, 8, 128, 1, 32768, .best_public_us = 45.1f},
    {64, 8, 128, 4, 32768, .best_public_us = 131.7f},
    {64, 8, 128, 16, 32768, .best_public_us = 486.7f},
    {64, 8, 128, 1, 131072, .best_public_us = 133.0f},
    {64, 8, 128, 4, 131072, .best_public_us = 485.6f},
    {32, 8, 128, 128, 1024, .best_public_us = 135.7f},
    {32, 8, 128, 128, 4096, .best_public_us = 481.8f},
    {32, 8, 128, 256, 1024, .best_public_us = 256.1f},
    {32, 8, 128, 256, 4096, .best_public_us = 952.9f},
    {32, 8, 128, 64, 512, .best_public_us = 170.1f, .first_context = 131072},
    {32, 32, 128, 32, 2048, .best_public_us = 248.5f},
};

/* causal prompts, then new tokens over 8,192 and 32,768 cached ones */
static const struct bench_cell prompt_cells[] = {
    {12, 12, 64, 1, 512, .new_tokens = 512, .best_public_us = 12.0f},
    {12, 12, 64, 1, 1024, .new_tokens = 1024, .best_public_us = 17.1f},
    {12, 12, 64, 1, 2048, .new_tokens = 2048, .best_public_us = 30.4f},
    {12, 12, 64, 1, 4096, .new_tokens = 4096, .best_public_us = 61.2f},
    {12, 12, 64, 1, 8192, .new_tokens = 8192, .best_public_us = 198.0f},
    {12, 12, 64, 1, 16384, .new_tokens = 16384, .best_public_us = 736.5f},
    {12, 12, 64, 4, 2048, .new_tokens = 2048, .best_public_us = 69.5f},
    {12, 12, 128, 1, 512, .new_tokens = 512, .best_public_us = 13.4f},
    {12, 12, 128, 1, 1024, .new_tokens = 1024, .best_public_us = 20.0f},
    {12, 12, 128, 1, 2048, .new_tokens = 2048, .best_public_us = 32.4f},
    {12, 12, 128, 1, 4096, .new_tokens = 4096, .best_public_us = 88.5f},
    {12, 12, 128, 1, 8192, .new_tokens = 8192, .best_public_us = 282.7f},
    {12, 12, 128, 1, 16384, .new_tokens = 16384, .best_public_us = 1084.9f},
    {12, 12, 128, 4, 2048, .new_tokens = 2048, .best_public_us = 98.4f},
    {12, 12, 256, 1, 512, .new_tokens = 512, .best_public_us = 20.4f},
    {12, 12, 256, 1, 1024, .new_tokens = 1024, .best_public_us = 30.6f},
    {12, 12, 256, 1, 2048, .new_tokens = 2048, .best_public_us = 52.9f},
    {12, 12, 256, 1, 4096, .new_tokens = 4096, .best_public_us = 178.0f},
    {12, 12, 256, 1, 8192, .new_tokens = 8192, .best_public_us = 526.8f},
    {12, 12, 256, 1, 16384, .new_tokens = 16384, .best_public_us = 2016.9f},
    {12, 12, 256, 4, 2048, .new_tokens = 2048, .best_public_us = 178.5f},
    {32, 8, 64, 1, 512, .new_tokens = 512, .best_public_us = 12.9f},
    {32, 8, 64, 1, 1024, .new_tokens = 1024, .best_public_us = 21.2f},
    {32, 8, 64, 1, 2048, .new_tokens = 2048, .best_public_us = 49.8f},
    {32, 8, 64, 1, 4096, .new_tokens = 4096, .best_public_us = 151.5f},
    {32, 8, 64, 1, 8192, .new_tokens = 8192, .best_public_us = 496.2f},
    {32, 8, 64, 1, 16384, .new_tokens = 16384, .best_public_us = 1878.7f},
    {32, 8, 64, 4, 2048, .new_tokens = 2048, .best_public_us = 173.4f},
    {32, 8, 128, 1, 512, .new_tokens = 512, .best_public_us = 14.9f},
    {32, 8, 128, 1, 1024, .new_tokens = 1024, .best_public_us = 25.2f},
    {32, 8, 128, 1, 2048, .new_tokens = 2048, .best_public_us = 62.5f},
    {32, 8, 128, 1, 4096, .new_tokens = 4096, .best_public_us = 202.1f},
    {32, 8, 128, 1, 8192, .new_tokens = 8192, .best_public_us = 731.4f},
    {32, 8, 128, 1, 16384, .new_tokens = 16384, .best_public_us = 2844.4f},
    {32, 8, 128, 4, 2048, .new_tokens = 2048, .best_public_us = 229.1f},
    {32, 8, 256, 1, 512, .new_tokens = 512, .best_public_us = 22.2f},
    {32, 8, 256, 1, 1024, .new_tokens = 1024, .best_public_us = 39.2f},
    {32, 8, 256, 1, 2048, .new_tokens = 2048, .best_public_us = 113.2f},
    {32, 8, 256, 1, 4096, .new_tokens = 4096, .best_public_us = 368.2f},
    {32, 8, 256, 1, 8192, .new_tokens = 8192, .best_public_us = 1373.3f},
    {32, 8, 256, 1, 16384, .new_tokens = 16384, .best_public_us = 5304.1f},
    {32, 8, 256, 4, 2048, .new_tokens = 2048, .best_public_us = 406.2f},
    {32, 8, 128, 1, 8704, .new_tokens = 512, .best_public_us = 125.3f},
    {32, 8, 128, 1, 33280, .new_tokens = 512, .best_public_us = 431.6f},
    {32, 8, 128, 1, 10240, .new_tokens = 2048, .best_public_us = 493.2f},
    {32, 8, 128, 1, 34816, .new_tokens = 2048, .best_public_us = 1726.4f},
    {32, 8, 128, 4, 8704, .new_tokens = 512, .best_public_us = 454.4f},
    {32, 8, 128, 4, 33280, .new_tokens = 512, .best_public_us = 1699.1f},
};

static const struct bench_cell cpu_cells[] = {
    {32, 8, 128, 1, 4096, .first_context = 0},
    {32, 8, 128, 1, 16384, .first_context = 0},
    {32, 8, 128, 16, 4096, .first_context = 0},
    {32, 8, 128, 16, 16384, .first_context = 0},
};

static const struct bench_cell variant_cells[] = {
    {64, 8, 128, 1, 2048, .best_public_us = 13.0f},
    {64, 8, 128, 16, 2048, .best_public_us = 41.7f},
    {64, 1, 256, 16, 2048, .best_public_us = 24.0f},
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

double bench_flops(const struct bench_cell *c)
{
    double pairs = 0, n = bench_new_tokens(c);
    for (uint32_t i = 0; i < c->batch; i++)
        pairs += n * (bench_context(c, i) - n / 2);
    return 4.0 * pairs * c->num_q_heads * c->head_dim;
}

uint64_t bench_kv_bytes(const struct bench_cell *c)
{
    uint64_t tokens = 0;
    for (uint32_t i = 0; i < c->batch; i++)
        tokens += bench_context(c, i);
    return tokens * c->num_kv_heads * c->head_dim * 2 * 2;
}
