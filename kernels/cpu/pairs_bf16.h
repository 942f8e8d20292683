/* pairs_bf16.h: both products of a tile as matrix products of bf16 pairs, for items of many rows;
 * only where the CPU multiplies such pairs (tile.h, which includes this).
 *
 * One instruction adds the products of a pair to 16 sums. Scores: a pair is two elements of K, the
 * sums are 16 tokens', so no sum is ever added up across a vector; K is laid by pairs once per
 * tile. Sum of V, in tiles that all rows see whole: a pair is two tokens, the sums are 16 elements
 * of the output; V is laid by pairs of tokens, and weights are rounded to bf16, as on a GPU's
 * matrix units; their sum is not.
 */
#ifndef ATTND_KERNELS_CPU_PAIRS_BF16_H
#define ATTND_KERNELS_CPU_PAIRS_BF16_H

#include "kernels/cpu/isa.h"
#include "kernels/cpu/vec.h"

#define PAIRS_MIN_ROWS 16 /* of an item, from which laying pays */
#define PAIRS_DIMS 32 /* dv is a multiple */
#define PAIRS (TILE_TOKENS / 2)
#define ROWS_OF_PAIRS 8 /* 16 sums of scores, 2 vectors of K */

/* --- scores ----------------------------------------------------------------------------------- */

/* Columns become rows: x[i][j] = x[j][i] of 16 vectors of 16 pairs. */
INLINE void transpose_pairs(__m512i x[16])
{
    __m512i y[16];
    for (int i = 0; i < 16; i += 2) {
        y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
        y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {
            x[i + 2 * j] = _mm512_unpacklo_epi64(y[i + j], y[i + j + 2]);
            x[i + 2 * j + 1] = _mm512_unpackhi_epi64(y[i + j], y[i + j + 2]);
        }
    /* each 128-bit part of x[4 i + c] is 4 tokens of column 4 part + c: now the parts */
    for (int c = 0; c < 4; c++) {
        __m512i a = _mm512_shuffle_i32x4(x[c], x[4 + c], 0x44);
        __m512i b = _mm512_shuffle_i32x4(x[c], x[4 + c], 0xee);
        __m512i d = _mm512_shuffle_i32x4(x[8 + c], x[12 + c], 0x44);
        __m512i e = _mm512_shuffle_i32x4(x[8 + c], x[12 + c], 0xee);
        y[c] = _mm512_shuffle_i32x4(a, d, 0x88);
        y[4 + c] = _mm512_shuffle_i32x4(a, d, 0xdd);
        y[8 + c] = _mm512_shuffle_i32x4(b, e, 0x88);
        y[12 + c] = _mm512_shuffle_i32x4(b, e, 0xdd);
    }
    for (int i = 0; i < 16; i++)
        x[i] = y[i];
}

/* Lays 16 tokens of K, from column col of the tile, by pairs; those without a row are 0. */
INLINE void pair_keys(struct attend_scratch *x, const uint8_t *const rows[16], uint32_t dk,
                      uint32_t col)
{
    for (uint32_t d = 0; d < dk; d += 32) {
        __mmask32 mask = dk - d >= 32 ? 0xffffffff : (1u << (dk - d)) - 1;
        __m512i v[16];
        for (int j = 0; j < 16; j++)
            v[j] = rows[j] != NULL ? _mm512_maskz_loadu_epi16(mask, rows[j] + d * 2)
                                   : _mm512_setzero_si512();
        transpose_pairs(v);
        for (uint32_t i = 0; i < 16; i++)
            _mm512_storeu_si512(x->k_pairs + (size_t)(d / 2 + i) * TILE_TOKENS + col, v[i]);
    }
}

/* One row of q, which is n pairs, to its place among the ROWS_OF_PAIRS that are laid together. */
INLINE void pair_q(const uint16_t *q, uint32_t dk, uint32_t row, uint32_t *q_pairs)
{
    uint32_t *to = q_pairs + (size_t)(row / ROWS_OF_PAIRS) * ROWS_OF_PAIRS * dk / 2;
    for (uint32_t i = 0; i < dk / 2; i++)
        memcpy(to + i * ROWS_OF_PAIRS + row % ROWS_OF_PAIRS, q + 2 * i, 4);
}

/* s[row][token] of ROWS_OF_PAIRS rows with the tile whose pairs are laid. */
INLINE void scores_of_pairs(const uint32_t *q_pairs, const uint32_t *k_pairs, uint32_t n_pairs,
                            float *s)
{
    __m512 acc[ROWS_OF_PAIRS][2];
    for (int i = 0; i < ROWS_OF_PAIRS; i++)
        acc[i][0] = acc[i][1] = _mm512_setzero_ps();
    for (uint32_t p = 0; p < n_pairs; p++) {
        const __m512bh low = (__m512bh)_mm512_loadu_si512(k_pairs + p * TILE_TOKENS);
        const __m512bh high = (__m512bh)_mm512_loadu_si512(k_pairs + p * TILE_TOKENS + 16);
        for (int i = 0; i < ROWS_OF_PAIRS; i++) {
            const __m512bh q = (__m512bh)_mm512_set1_epi32((int)q_pairs[p * ROWS_OF_PAIRS + i]);
            acc[i][0] = _mm512_dpbf16_ps(acc[i][0], q, low);
            acc[i][1] = _mm512_dpbf16_ps(acc[i][1], q, high);
        }
    }
    for (int i = 0; i < ROWS_OF_PAIRS; i++) {
        _mm512_storeu_ps(s + i * TILE_TOKENS, acc[i][0]);
        _mm512_storeu_ps(s + i * TILE_TOKENS + 16, acc[i][1]);
    }
}

/* --- sum of V --------------------------------------------------------------------------------- */
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
                      uint32_t at, uint32_t dv, size_t v_stride)
{
    const uint8_t *row = v + at * v_stride;
    pair_tokens((const uint16_t *)(const void *)row,
                (const uint16_t *)(const void *)(row + v_stride), dv, x->v_pairs + (size_t)j * dv);
    for (uint32_t i = 0; ahead != NULL && i < 2 * v_stride; i += 64)
        __builtin_prefetch(ahead + at * v_stride + i, 0, 3);
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
