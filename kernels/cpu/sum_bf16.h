/* sum_bf16.h: the weighted sum of V as a matrix product of bf16 pairs, for tiles of many rows that
 * see all of it; only where the CPU multiplies such pairs (tile.h, which includes this).
 *
 * One instruction adds two tokens' products to 16 elements. So V is laid by pairs of tokens once
 * per tile, which pays from some rows on, and weights are rounded to bf16, as on a GPU's matrix
 * units; their sum is not.
 */
#ifndef ATTND_KERNELS_CPU_SUM_BF16_H
#define ATTND_KERNELS_CPU_SUM_BF16_H

#include "kernels/cpu/isa.h"
#include "kernels/cpu/vec.h"

#define SUM_BF16_MIN_ROWS 16
#define SUM_BF16_DIMS 32 /* dv is a multiple */
#define PAIRS (TILE_TOKENS / 2)

/* Two neighbouring tokens of V, n elements each, element by element. */
INLINE void pair_tokens(const uint16_t *a, const uint16_t *b, uint32_t n, uint16_t *out)
{
    uint16_t low[32], high[32];
    for (int i = 0; i < 32; i++) {
        low[i] = (uint16_t)(i / 2 + i % 2 * 32);
        high[i] = (uint16_t)(16 + i / 2 + i % 2 * 32);
    }
    const __m512i first = _mm512_loadu_si512(low), second = _mm512_loadu_si512(high);
    for (uint32_t d = 0; d < n; d += 32) {
        const __m512i x = _mm512_loadu_si512(a + d), y = _mm512_loadu_si512(b + d);
        _mm512_storeu_si512(out + 2 * d, _mm512_permutex2var_epi16(x, first, y));
        _mm512_storeu_si512(out + 2 * d + 32, _mm512_permutex2var_epi16(x, second, y));
    }
}

/* Tokens j and j + 1 of the tile, at `at` of a piece; fetches as much ahead (NULL: nothing). */
INLINE void pair_rows(struct attend_scratch *x, uint32_t j, const uint8_t *v, const uint8_t *ahead,
                      uint32_t at, uint32_t dv)
{
    const uint16_t *row = (const uint16_t *)(const void *)v + (size_t)at * dv;
    pair_tokens(row, row + dv, dv, x->v_pairs + (size_t)j * dv);
    for (uint32_t i = 0; ahead != NULL && i < 4 * dv; i += 64)
        __builtin_prefetch(ahead + (size_t)at * dv * 2 + i, 0, 3);
}

/* A row's weights of a tile, pair by pair. */
INLINE void pair_weights(const float *s, uint32_t *out)
{
    const __m512 low = _mm512_loadu_ps(s), high = _mm512_loadu_ps(s + 16);
    _mm512_storeu_si512(out, (__m512i)_mm512_cvtne2ps_pbh(high, low));
}

/* o[row][d ..] += the tile's weighted sum, n_vecs vectors of n_rows rows. */
INLINE void sum_pairs(int n_rows, int n_vecs, const uint32_t *weights, const uint16_t *v,
                      uint32_t dv, float *o, uint32_t o_stride)
{
    __m512 acc[4][4];
    for (int i = 0; i < n_rows; i++)
        for (int c = 0; c < n_vecs; c++)
            acc[i][c] = _mm512_loadu_ps(o + i * o_stride + c * 16);
    for (int p = 0; p < PAIRS; p++) {
        __m512bh x[4];
        for (int c = 0; c < n_vecs; c++)
            x[c] = (__m512bh)_mm512_loadu_si512(v + 2 * ((size_t)p * dv + c * 16));
        for (int i = 0; i < n_rows; i++) {
            const __m512bh w = (__m512bh)_mm512_set1_epi32((int)weights[i * PAIRS + p]);
            for (int c = 0; c < n_vecs; c++)
                acc[i][c] = _mm512_dpbf16_ps(acc[i][c], w, x[c]);
        }
    }
    for (int i = 0; i < n_rows; i++)
        for (int c = 0; c < n_vecs; c++)
            _mm512_storeu_ps(o + i * o_stride + c * 16, acc[i][c]);
}

/* o[row] += the weighted sum of the tile whose pairs are in x->v_pairs, its weights in x->s. */
static void sum_whole_tile(struct attend_scratch *x, uint32_t n_rows, uint32_t dv, float *o,
                           uint32_t o_stride)
{
    for (uint32_t i = 0; i < n_rows; i++)
        pair_weights(x->s + (size_t)i * TILE_TOKENS, x->weights + (size_t)i * PAIRS);
    for (uint32_t d = 0; d < dv; d += dv - d >= 64 ? 64 : 32)
        for (uint32_t row = 0; row < n_rows; row += n_rows - row >= 4 ? 4 : 1) {
            const uint32_t *w = x->weights + row * PAIRS;
            const uint16_t *v = x->v_pairs + 2 * d;
            float *to = o + (size_t)row * o_stride + d;
            if (n_rows - row >= 4 && dv - d >= 64)
                sum_pairs(4, 4, w, v, dv, to, o_stride);
            else if (n_rows - row >= 4)
                sum_pairs(4, 2, w, v, dv, to, o_stride);
            else if (dv - d >= 64)
                sum_pairs(1, 4, w, v, dv, to, o_stride);
            else
                sum_pairs(1, 2, w, v, dv, to, o_stride);
        }
}

#endif
