/* keys_f32.h: scores of an item's many rows with a tile of keys that are floats; a part of tile.h,
 * compiled with its flags.
 *
 * K is laid dimension by dimension once per tile, so that a vector has one dimension of several
 * tokens and no sum is added up across a vector: for heads of 64 elements that adding takes as long
 * as the products do.
 */
#ifndef ATTND_KERNELS_CPU_KEYS_F32_H
#define ATTND_KERNELS_CPU_KEYS_F32_H

#include "kernels/cpu/isa.h"
#include "kernels/cpu/vec.h"

#define LAID_MIN_ROWS 128 /* of an item, from which laying pays */
#define LAID_VECS 2
#if VEC == 16
#define LAID_ROWS 8 /* 16 sums and 2 vectors of K of 32 registers */
#else
#define LAID_ROWS 4 /* 8 sums and 2 vectors of K of 16 registers */
#endif

typedef float four __attribute__((vector_size(16)));

INLINE four four_load(const uint8_t *row, size_t at)
{
    four x = {0};
    if (row != NULL)
        memcpy(&x, row + at, sizeof x);
    return x;
}

/* Lays four tokens of K, from column col of the tile; those without a row are 0. */
INLINE void lay_keys(float *laid, const uint8_t *const rows[4], uint32_t dk, uint32_t col)
{
    for (uint32_t d = 0; d < dk; d += 4) {
        const size_t at = d * sizeof(float);
        const four a = four_load(rows[0], at), b = four_load(rows[1], at);
        const four c = four_load(rows[2], at), e = four_load(rows[3], at);
        const four low = __builtin_shufflevector(a, b, 0, 4, 1, 5),
                   high = __builtin_shufflevector(a, b, 2, 6, 3, 7);
        const four low2 = __builtin_shufflevector(c, e, 0, 4, 1, 5),
                   high2 = __builtin_shufflevector(c, e, 2, 6, 3, 7);
        const four x[4] = {__builtin_shufflevector(low, low2, 0, 1, 4, 5),
                           __builtin_shufflevector(low, low2, 2, 3, 6, 7),
                           __builtin_shufflevector(high, high2, 0, 1, 4, 5),
                           __builtin_shufflevector(high, high2, 2, 3, 6, 7)};
        for (uint32_t i = 0; i < 4; i++)
            memcpy(laid + (size_t)(d + i) * TILE_TOKENS + col, &x[i], sizeof x[i]);
    }
}

/* s[row][token] of n_rows rows with LAID_VECS vectors of tokens from laid on. */
INLINE void scores_of_laid(int n_rows, const float *q, uint32_t q_stride, const float *laid,
                           uint32_t dk, float *s)
{
    vf sums[LAID_ROWS][LAID_VECS] = {0};
    for (uint32_t d = 0; d < dk; d++) {
        vf k[LAID_VECS];
        for (int j = 0; j < LAID_VECS; j++)
            k[j] = vf_load(laid + (size_t)d * TILE_TOKENS + j * VEC);
        for (int i = 0; i < n_rows; i++) {
            const vf x = vf_set(q[(size_t)i * q_stride + d]);
            for (int j = 0; j < LAID_VECS; j++)
                sums[i][j] = vf_fma(x, k[j], sums[i][j]);
        }
    }
    for (int i = 0; i < n_rows; i++)
        for (int j = 0; j < LAID_VECS; j++)
            vf_store(s + (size_t)i * TILE_TOKENS + j * VEC, sums[i][j]);
}

/* Scores of all n_rows rows with the tile that is laid. */
static void scores_of_all(const float *q, uint32_t n_rows, uint32_t q_stride, const float *laid,
                          uint32_t dk, float *s)
{
    for (uint32_t col = 0; col < TILE_TOKENS; col += LAID_VECS * VEC)
        for (uint32_t row = 0; row < n_rows; row += n_rows - row >= LAID_ROWS ? LAID_ROWS : 1) {
            const float *x = q + (size_t)row * q_stride;
            float *to = s + (size_t)row * TILE_TOKENS + col;
            if (n_rows - row >= LAID_ROWS)
                scores_of_laid(LAID_ROWS, x, q_stride, laid + col, dk, to);
            else
                scores_of_laid(1, x, q_stride, laid + col, dk, to);
        }
}

#endif
