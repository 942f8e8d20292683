/* data.c: makes rows of q, k and v. A row is a piece of a long tape of random values, at a place
 * that its name decides: a load generator must not take longer to make a step than the daemon to
 * answer it.
 */
#include "clients/attnload/data.h"

#include <pthread.h>
#include <stdlib.h>

#include "kernels/reference.h"

#define Q_AMPLITUDE 4.0 /* q.k spreads over a few units: some keys matter, none alone */
#define V_AMPLITUDE 2.0

/* A tape of 16-bit values stays in a core's cache, as what a model has just computed does. */
enum { TAPE_PLACES = 1 << 13, TAPE = TAPE_PLACES + DATA_MAX_DIM };

static float tape32[3][TAPE];
static uint16_t tape16[2][3][TAPE]; /* f16, bf16 */
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void make_tapes(void)
{
    static const double amplitude[3] = {Q_AMPLITUDE, 1.0, V_AMPLITUDE};
    float f32[256];
    uint16_t f16[256], bf16[256];
    for (uint32_t w = 0; w < 3; w++) {
        for (uint32_t i = 0; i < 256; i++) {
            double x = ((int)i - 128) / 128.0 * amplitude[w];
            f32[i] = (float)x;
            reference_put(ATTN_F16, f16, i, x);
            reference_put(ATTN_BF16, bf16, i, x);
        }
        for (uint32_t i = 0; i < TAPE; i++) {
            uint32_t v = data_mix((uint64_t)w << 32 | i) & 255;
            tape32[w][i] = f32[v];
            tape16[0][w][i] = f16[v];
            tape16[1][w][i] = bf16[v];
        }
    }
}

uint64_t data_mix(uint64_t x)
{
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

/* What the token's rows are made of, besides what they are. */
static uint64_t stream_of(const struct data_stream *s, enum data_which which, uint32_t token)
{
    uint64_t seed = data_mix(s->seed);
    if (which == DATA_Q || s->n_blocks == 0 || token / s->block_tokens >= s->n_blocks)
        return data_mix(seed ^ s->stream);
    return data_mix(~seed ^ s->blocks[token / s->block_tokens]);
}

void data_indices(const struct data_stream *s, uint32_t layer, uint32_t pos, uint32_t first,
                  uint32_t end, uint32_t n, int32_t *dst)
{
    const uint64_t span = end - first;
    uint64_t random = data_mix(data_mix(s->seed ^ s->stream) ^ ((uint64_t)layer << 32 | pos));
    for (uint64_t i = 0; i < n; i++) {
        if (span <= n) {
            dst[i] = i < span ? (int32_t)(first + i) : -1;
            continue;
        }
        const uint64_t from = span * i / n, to = span * (i + 1) / n; /* each its own part */
        random = data_mix(random);
        dst[i] = (int32_t)(first + from + random % (to - from));
    }
}

void data_fill(const struct data_stream *s, uint32_t layer, enum data_which which, uint32_t token0,
               uint32_t n_tokens, uint32_t head0, uint32_t n_heads, uint32_t dim, attn_dtype dtype,
               void *dst, const attn_client *client)
{
    pthread_once(&once, make_tapes);
    uint8_t *p = dst;
    size_t row_bytes = dim * attn_dtype_bytes(dtype);
    const uint8_t *tape = dtype == ATTN_F32 ? (const uint8_t *)tape32[which]
                                            : (const uint8_t *)tape16[dtype == ATTN_BF16][which];
    for (uint32_t t = token0; t < token0 + n_tokens; t++) {
        uint64_t base = data_mix(stream_of(s, which, t) ^ ((uint64_t)layer << 2 | which));
        for (uint32_t h = head0; h < head0 + n_heads; h++, p += row_bytes) {
            uint64_t place = data_mix(base ^ ((uint64_t)t << 16 | h)) % TAPE_PLACES;
            attn_client_copy(client, p, tape + place * (row_bytes / dim), row_bytes);
        }
    }
}

/* A power of two: what is made stays exact. Products of q and of outputs keep their size. */
#define WEIGHT_SCALE (1.0 / 8)

void *data_weights(uint32_t seed, uint32_t num_heads, uint32_t n_rows, uint32_t dim,
                   attn_dtype dtype)
{
    const struct data_stream s = {.seed = ~(uint64_t)seed};
    const size_t row = dim * attn_dtype_bytes(dtype);
    uint8_t *all = malloc(num_heads * n_rows * row);
    if (all == NULL)
        return NULL;
    data_fill(&s, 0, DATA_K, 0, num_heads, 0, n_rows, dim, dtype, all, NULL);
    for (size_t i = 0; i < (size_t)num_heads * n_rows * dim; i++)
        reference_put(dtype, all, i, reference_get(dtype, all, i) * WEIGHT_SCALE);
    return all;
}
