/* merge.c: outputs over some of the keys each, as one over all: a row's parts are summed in double,
 * each weighted by exp of its lse less the largest. One that is NaN makes NaNs of its row.
 */
#include <math.h>

#include "clients/libattn/core/core.h"
#include "proto/attn_half.h"

#define COLUMNS 64 /* of a row that are summed at a time */

/* sum += weight * row[0 .. n) */
static void add(double *sum, attn_dtype dtype, const uint8_t *row, uint32_t n, double weight)
{
    const uint16_t *half = (const uint16_t *)(const void *)row;
    if (dtype == ATTN_BF16)
        for (uint32_t i = 0; i < n; i++)
            sum[i] += weight * (double)attn_f32_of_bf16(half[i]);
    else if (dtype == ATTN_F16)
        for (uint32_t i = 0; i < n; i++)
            sum[i] += weight * (double)attn_f32_of_f16(half[i]);
    else
        for (uint32_t i = 0; i < n; i++)
            sum[i] += weight * (double)((const float *)(const void *)row)[i];
}

static void put(uint8_t *row, attn_dtype dtype, const double *sum, uint32_t n)
{
    uint16_t *half = (uint16_t *)(void *)row;
    if (dtype == ATTN_BF16)
        for (uint32_t i = 0; i < n; i++)
            half[i] = attn_bf16_of_f32((float)sum[i]);
    else if (dtype == ATTN_F16)
        for (uint32_t i = 0; i < n; i++)
            half[i] = attn_f16_of_f32((float)sum[i]);
    else
        for (uint32_t i = 0; i < n; i++)
            ((float *)(void *)row)[i] = (float)sum[i];
}

attn_status attn_merge(attn_dtype dtype, uint32_t n_parts, uint64_t n_rows, uint32_t dim,
                       const void *outs, const float *lses, void *out, float *out_lse)
{
    if (outs == NULL)
        return error_set(ATTN_EINVAL, "outs is NULL");
    if (lses == NULL)
        return error_set(ATTN_EINVAL, "lses is NULL");
    if (out == NULL)
        return error_set(ATTN_EINVAL, "out is NULL");
    if (n_parts == 0 || dim == 0)
        return error_set(ATTN_EINVAL, "n_parts is %u, dim %u: expected 1 or more", n_parts, dim);
    if (dtype != ATTN_F32 && dtype != ATTN_F16 && dtype != ATTN_BF16)
        return error_set(ATTN_EINVAL, "dtype is %s: expected f32, f16 or bf16",
                         attn_dtype_name(dtype));
    const uint64_t row_bytes = dim * attn_dtype_bytes(dtype), part_bytes = n_rows * row_bytes;
    for (uint64_t row = 0; row < n_rows; row++) {
        float most = -INFINITY;
        double total = 0;
        for (uint32_t p = 0; p < n_parts; p++) {
            const float x = lses[p * n_rows + row];
            if (isnan(x) || x > most) /* a NaN stays */
                most = x;
        }
        for (uint32_t p = 0; p < n_parts && most != -INFINITY; p++)
            total += exp((double)lses[p * n_rows + row] - (double)most);
        for (uint32_t at = 0; at < dim; at += COLUMNS) {
            const uint32_t n = dim - at < COLUMNS ? dim - at : COLUMNS;
            const uint64_t byte = row * row_bytes + at * attn_dtype_bytes(dtype);
            double sum[COLUMNS] = {0};
            for (uint32_t p = 0; p < n_parts && most != -INFINITY; p++) {
                const double weight = exp((double)lses[p * n_rows + row] - (double)most) / total;
                if (weight != 0)
                    add(sum, dtype, (const uint8_t *)outs + p * part_bytes + byte, n, weight);
            }
            put((uint8_t *)out + byte, dtype, sum, n);
        }
        if (out_lse != NULL)
            out_lse[row] = total == 0 ? -INFINITY : (float)((double)most + log(total));
    }
    return ATTN_OK;
}
