/* data.h: q, k and v that can be made again: every row is a function of (seed, stream, layer,
 * which, token, head) alone; k and v of a prompt's blocks of (seed, block, layer, which, token,
 * head). Values are n / 128 times a power of two, n in [-128, 127]: exact in
 * every dtype.
 */
#ifndef ATTNLOAD_DATA_H
#define ATTNLOAD_DATA_H

#include "clients/libattn/attn.h"

enum { DATA_MAX_DIM = 1024 };
enum data_which { DATA_Q, DATA_K, DATA_V };

/* One sequence of one run. */
struct data_stream {
    uint64_t seed;
    uint64_t stream; /* different for every sequence of the run */
    /* [n_blocks] names of the first ones; of equal ones k and v are equal */
    const uint64_t *blocks;
    uint32_t n_blocks, block_tokens;
};

/* Rows [n_tokens][n_heads][dim] of dtype, dim up to DATA_MAX_DIM, for tokens token0.. and heads
 * head0.., to dst. client: the one that dst, part of a step, belongs to (attn_client_copy); NULL:
 * none. */
void data_fill(const struct data_stream *s, uint32_t layer, enum data_which which, uint32_t token0,
               uint32_t n_tokens, uint32_t head0, uint32_t n_heads, uint32_t dim, attn_dtype dtype,
               void *dst, const attn_client *client);
/* n tokens of [first, end) that the query at pos visits, ascending; of fewer all, then -1. */
void data_indices(const struct data_stream *s, uint32_t layer, uint32_t pos, uint32_t first,
                  uint32_t end, uint32_t n, int32_t *dst);
/* Weights of every layer's projections, [num_heads][n_rows][dim] of dtype; NULL: no memory. */
void *data_weights(uint32_t seed, uint32_t num_heads, uint32_t n_rows, uint32_t dim,
                   attn_dtype dtype);
/* A well-mixed 64-bit number; also the generator's step. */
uint64_t data_mix(uint64_t x);

#endif
