/* merge.c: outputs over some of the keys each, as one over all: a row's parts are summed in double,
 * each weighted by exp of its lse less the largest. One that is NaN makes NaNs of its row.
 */
#include <math.h>
#include <string.h>

#include "clients/libattn/core/core.h"

#define COLUMNS 64 /* of a row that are summed at a time */

static float f32_of(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static uint32_t bits_of(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static float of_f16(uint16_t h)
{
    const uint32_t sign = (uint32_t)(h & 0x8000) << 16, rest = h & 0x7fff;
    if (rest < 0x400) /* below 2^-14: multiples of 2^-24 */
        return sign != 0 ? -(float)rest * 0x1p-24f : (float)rest * 0x1p-24f;
    const uint32_t top = rest >= 0x7c00 ? 0x7f800000 - (0x7c00 << 13) : 112u << 23;
    return f32_of(sign | ((rest << 13) + top));
}

/* To the nearest, ties to even; a NaN stays one. */
static uint16_t to_f16(float x)
{
    const uint16_t sign = (uint16_t)(bits_of(x) >> 16 & 0x8000);
    const uint32_t bits = bits_of(x) & 0x7fffffff;
    if (bits > 0x7f800000)
        return sign | 0x7e00;
    if (bits >= 0x477ff000) /* 65520 and more */
        return sign | 0x7c00;
    if (bits < 0x38800000) /* adding 0.5 rounds to multiples of 2^-24 */
        return (uint16_t)(sign | (bits_of(f32_of(bits) + 0.5f) - bits_of(0.5f)));
    return (uint16_t)(sign | (((bits + 0xfff + (bits >> 13 & 1)) >> 13) - (112u << 10)));
}

static uint16_t to_bf16(float x)
{
    const uint32_t bits = bits_of(x);
    if ((bits & 0x7fffffff) > 0x7f800000)
        return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* sum += weight * row[0 .. n) */
static void add(double *sum, attn_dtype dtype, const uint8_t *row, uint32_t n, double weight)
{
    const uint16_t *half = (const uint16_t *)(const void *)row;
    if (dtype == ATTN_BF16)
        for (uint32_t i = 0; i < n; i++)
            sum[i] += weight * (double)f32_of((uint32_t)half[i] << 16);
    else if (dtype == ATTN_F16)
        for (uint32_t i = 0; i < n; i++)
            sum[i] += weight * (double)of_f16(half[i]);
    else
        for (uint32_t i = 0; i < n; i++)
            sum[i] += weight * (double)((const float *)(const void *)row)[i];
}

static void put(uint8_t *row, attn_dtype dtype, const double *sum, uint32_t n)
{
    uint16_t *half = (uint16_t *)(void *)row;
    if (dtype == ATTN_BF16)
        for (uint32_t i = 0; i < n; i++)
            half[i] = to_bf16((float)sum[i]);
    else if (dtype == ATTN_F16)
        for (uint32_t i = 0; i < n; i++)
            half[i] = to_f16((float)sum[i]);
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
