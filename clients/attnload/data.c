/* data.c: see data.h. A row's bytes come from a counter mixed with the row's name, eight at a time;
 * a table of 256 values turns them into elements. */
#include "clients/attnload/data.h"

#include <pthread.h>
#include <string.h>

#include "kernels/reference.h"

#define Q_AMPLITUDE 4.0 /* q.k spreads over a few units: some keys matter, none alone */
#define V_AMPLITUDE 2.0

static float table32[3][256];
static uint16_t table16[2][3][256]; /* f16, bf16 */
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void make_tables(void)
{
    static const double amplitude[3] = {Q_AMPLITUDE, 1.0, V_AMPLITUDE};
    for (int w = 0; w < 3; w++) {
        for (int i = 0; i < 256; i++) {
            double x = (i - 128) / 128.0 * amplitude[w];
            table32[w][i] = (float)x;
            reference_put(ATTN_F16, table16[0][w], (size_t)i, x);
            reference_put(ATTN_BF16, table16[1][w], (size_t)i, x);
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

static void fill_row(uint64_t name, enum data_which which, uint32_t dim, attn_dtype dtype,
                     void *dst)
{
    const uint16_t *t16 = table16[dtype == ATTN_BF16][which];
    for (uint32_t i = 0; i < dim; i += 8) {
        uint64_t bytes = data_mix(name + i);
        uint32_t n = dim - i < 8 ? dim - i : 8;
        for (uint32_t j = 0; j < n; j++, bytes >>= 8) {
            if (dtype == ATTN_F32)
                ((float *)dst)[i + j] = table32[which][bytes & 255];
            else
                ((uint16_t *)dst)[i + j] = t16[bytes & 255];
        }
    }
}

void data_fill(const struct data_stream *s, uint32_t layer, enum data_which which, uint32_t token0,
               uint32_t n_tokens, uint32_t head0, uint32_t n_heads, uint32_t dim, attn_dtype dtype,
               void *dst)
{
    pthread_once(&once, make_tables);
    uint8_t *p = dst;
    size_t row_bytes = dim * attn_dtype_bytes(dtype);
    uint64_t base = data_mix(data_mix(s->seed) ^ s->stream);
    base = data_mix(base ^ ((uint64_t)layer << 2 | which));
    for (uint32_t t = token0; t < token0 + n_tokens; t++) {
        for (uint32_t h = head0; h < head0 + n_heads; h++, p += row_bytes)
            fill_row(data_mix(base ^ ((uint64_t)t << 16 | h)), which, dim, dtype, p);
    }
}
