/* products.h: rows of one head through the weights of its projections; included by tile.h. Products
 * are summed in f32, each element in an order that the number of rows does not change.
 */
#ifndef ATTND_KERNELS_CPU_PRODUCTS_H
#define ATTND_KERNELS_CPU_PRODUCTS_H

#include "kernels/cpu/vec.h"

#define PROJECT_VECS 2 /* with CPU_PROJECT_ROWS rows 8 sums and 2 weights: in 16 registers */

/* n_vecs vectors of the rows' sums of q[i] * w[i], from element `at` on; lanes of each count. */
INLINE void absorb_tile(attn_dtype dtype, int n_rows, int n_vecs, int lanes, const float *q,
                        const uint8_t *w, uint32_t n, uint32_t latent, uint8_t *const *out,
                        uint32_t at)
{
    const uint32_t el = dtype_bytes(dtype);
    vf sums[CPU_PROJECT_ROWS][PROJECT_VECS] = {0};
    for (uint32_t i = 0; i < n; i++) {
        vf wv[PROJECT_VECS];
        for (int v = 0; v < n_vecs; v++)
            wv[v] =
                vf_load_as(dtype, w + ((size_t)i * latent + at + (uint32_t)v * VEC) * el, lanes);
        for (int r = 0; r < n_rows; r++)
            for (int v = 0; v < n_vecs; v++)
                sums[r][v] = vf_fma(vf_set(q[(uint32_t)r * n + i]), wv[v], sums[r][v]);
    }
    for (int r = 0; r < n_rows; r++)
        for (int v = 0; v < n_vecs; v++)
            vf_store_as(dtype, out[r] + (at + (uint32_t)v * VEC) * (size_t)el, sums[r][v], lanes);
}

INLINE void absorb_rows(attn_dtype dtype, int n_rows, const float *q, const uint8_t *w, uint32_t n,
                        uint32_t latent, uint8_t *const *out)
{
    uint32_t at = 0;
    for (; at + PROJECT_VECS * VEC <= latent; at += PROJECT_VECS * VEC)
        absorb_tile(dtype, n_rows, PROJECT_VECS, VEC, q, w, n, latent, out, at);
    for (; at + VEC <= latent; at += VEC)
        absorb_tile(dtype, n_rows, 1, VEC, q, w, n, latent, out, at);
    if (at < latent)
        absorb_tile(dtype, n_rows, 1, VEC_TAIL, q, w, n, latent, out, at);
}

/* dim (a multiple of 8) elements of a row as floats. */
INLINE void widen(attn_dtype dtype, const uint8_t *row, uint32_t dim, float *out)
{
    for (uint32_t d = 0; d < dim; d += VEC_TAIL) {
        const vf x = vf_load_as(dtype, row + (size_t)d * dtype_bytes(dtype), VEC_TAIL);
        memcpy(out + d, &x, VEC_TAIL * sizeof *out);
    }
}

INLINE void absorb_as(attn_dtype dtype, const struct project_rows *p)
{
    float q[CPU_PROJECT_ROWS * MAX_V_DIM];
    for (uint32_t r = 0; r < p->n_rows; r++)
        widen(dtype, p->in[r], p->n, q + r * p->n);
    if (p->n_rows == CPU_PROJECT_ROWS)
        absorb_rows(dtype, CPU_PROJECT_ROWS, q, p->w, p->n, p->latent, p->out);
    else
        for (uint32_t r = 0; r < p->n_rows; r++)
            absorb_rows(dtype, 1, q + r * p->n, p->w, p->n, p->latent, p->out + r);
}

static void absorb(attn_dtype dtype, const struct project_rows *p)
{
    if (dtype == ATTN_F32)
        absorb_as(ATTN_F32, p);
    else if (dtype == ATTN_F16)
        absorb_as(ATTN_F16, p);
    else
        absorb_as(ATTN_BF16, p);
}

/* out[row][i] = in[row] . w[i]; rows are `stride` apart, zeros behind their elements. */
INLINE void expand_rows(attn_dtype dtype, int n_rows, const float *in, uint32_t stride,
                        const struct project_rows *p, uint8_t *const *out)
{
    const uint32_t el = dtype_bytes(dtype);
    float s[CPU_PROJECT_ROWS * TILE_TOKENS];
    for (uint32_t at = 0; at < p->n; at += 8) {
        for (uint32_t i = 0; i < 8; i += TOKENS_AT_ONCE)
            scores_f32(dtype, n_rows, in, stride, p->w + (size_t)(at + i) * p->latent * el, NULL,
                       p->latent, (size_t)p->latent * el, s + i);
        for (int r = 0; r < n_rows; r++)
            for (uint32_t i = 0; i < 8; i += VEC_TAIL) {
                vf x = {0};
                memcpy(&x, s + r * TILE_TOKENS + i, VEC_TAIL * sizeof *s);
                vf_store_as(dtype, out[r] + (size_t)(at + i) * el, x, VEC_TAIL);
            }
    }
}

INLINE void expand_as(attn_dtype dtype, const struct project_rows *p)
{
    const uint32_t stride = (p->latent + VEC - 1) / VEC * VEC; /* whole vectors are read */
    float in[CPU_PROJECT_ROWS * MAX_V_DIM];
    for (uint32_t r = 0; r < p->n_rows; r++) {
        widen(dtype, p->in[r], p->latent, in + r * stride);
        memset(in + r * stride + p->latent, 0, (stride - p->latent) * sizeof *in);
    }
    if (p->n_rows == CPU_PROJECT_ROWS)
        expand_rows(dtype, CPU_PROJECT_ROWS, in, stride, p, p->out);
    else
        for (uint32_t r = 0; r < p->n_rows; r++)
            expand_rows(dtype, 1, in + r * stride, stride, p, p->out + r);
}

static void expand(attn_dtype dtype, const struct project_rows *p)
{
    if (dtype == ATTN_F32)
        expand_as(ATTN_F32, p);
    else if (dtype == ATTN_F16)
        expand_as(ATTN_F16, p);
    else
        expand_as(ATTN_BF16, p);
}

#endif
