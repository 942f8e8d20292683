/* attn_merge.h: an output's row over some of the keys each as one over all, for host code of either
 * side of the wire. Sums in double, each part weighted by exp of its lse less the largest.
 */
#ifndef ATTN_MERGE_H
#define ATTN_MERGE_H

#include <math.h>

#include "proto/attn_half.h"
#include "proto/attn_types.h"

struct attn_merge_part {
    const void *out; /* [dim] */
    float lse;
};

enum { ATTN_MERGE_COLUMNS = 256 }; /* of a row that are summed at a time */

/* sum += weight * columns [at, at + n) of row */
static inline void attn_merge_add(double *sum, attn_dtype dtype, const void *row, uint32_t at,
                                  uint32_t n, double weight)
{
    const uint16_t *half = (const uint16_t *)row + at;
    if (dtype == ATTN_BF16)
        for (uint32_t i = 0; i < n; i++)
            sum[i] += weight * (double)attn_f32_of_bf16(half[i]);
    else if (dtype == ATTN_F16)
        for (uint32_t i = 0; i < n; i++)
            sum[i] += weight * (double)attn_f32_of_f16(half[i]);
    else
        for (uint32_t i = 0; i < n; i++)
            sum[i] += weight * (double)((const float *)row)[at + i];
}

static inline void attn_merge_put(void *row, attn_dtype dtype, const double *sum, uint32_t at,
                                  uint32_t n)
{
    uint16_t *half = (uint16_t *)row + at;
    if (dtype == ATTN_BF16)
        for (uint32_t i = 0; i < n; i++)
            half[i] = attn_bf16_of_f32((float)sum[i]);
    else if (dtype == ATTN_F16)
        for (uint32_t i = 0; i < n; i++)
            half[i] = attn_f16_of_f32((float)sum[i]);
    else
        for (uint32_t i = 0; i < n; i++)
            ((float *)row)[at + i] = (float)sum[i];
}

/* Writes out [dim], of dtype f32, f16 or bf16, and gives its lse. part(of, p) gives the row's
 * parts, p below n_parts; those whose lse is -inf are not read. Where all are, zeros and -inf;
 * where an lse is NaN, so are the row and its lse. */
static inline float attn_merge_row(attn_dtype dtype, uint32_t dim, uint32_t n_parts,
                                   struct attn_merge_part (*part)(const void *of, uint32_t p),
                                   const void *of, void *out)
{
    float most = -INFINITY;
    double total = 0;
    for (uint32_t p = 0; p < n_parts; p++) {
        const float lse = part(of, p).lse;
        if (isnan(lse) || lse > most) /* a NaN stays */
            most = lse;
    }
    n_parts = most == -INFINITY ? 0 : n_parts;
    for (uint32_t p = 0; p < n_parts; p++)
        total += exp((double)part(of, p).lse - (double)most);
    for (uint32_t at = 0; at < dim; at += ATTN_MERGE_COLUMNS) {
        const uint32_t n = dim - at < ATTN_MERGE_COLUMNS ? dim - at : ATTN_MERGE_COLUMNS;
        double sum[ATTN_MERGE_COLUMNS] = {0};
        for (uint32_t p = 0; p < n_parts; p++) {
            const struct attn_merge_part x = part(of, p);
            const double weight = exp((double)x.lse - (double)most) / total;
            if (weight != 0)
                attn_merge_add(sum, dtype, x.out, at, n, weight);
        }
        attn_merge_put(out, dtype, sum, at, n);
    }
    return total == 0 ? -INFINITY : (float)((double)most + log(total));
}

#endif
