/* merge.c: merges outputs row by row: a row's parts are summed in f32, each weighted by exp of its
 * lse less that of all.
 */
#include "kernels/merge.h"

#include <math.h>
#include <string.h>

#include "proto/attn_half.h"

/* acc += weight * row */
static void row_add(float *acc, attn_dtype dtype, const void *row, uint32_t n, float weight)
{
    if (dtype == ATTN_BF16)
        for (uint32_t i = 0; i < n; i++)
            acc[i] += weight * attn_f32_of_bf16(((const uint16_t *)row)[i]);
    else if (dtype == ATTN_F16)
        for (uint32_t i = 0; i < n; i++)
            acc[i] += weight * attn_f32_of_f16(((const uint16_t *)row)[i]);
    else
        for (uint32_t i = 0; i < n; i++)
            acc[i] += weight * ((const float *)row)[i];
}

static void row_put(void *row, attn_dtype dtype, const float *acc, uint32_t n)
{
    if (dtype == ATTN_BF16)
        for (uint32_t i = 0; i < n; i++)
            ((uint16_t *)row)[i] = attn_bf16_of_f32(acc[i]);
    else if (dtype == ATTN_F16)
        for (uint32_t i = 0; i < n; i++)
            ((uint16_t *)row)[i] = attn_f16_of_f32(acc[i]);
    else
        memcpy(row, acc, n * sizeof *acc);
}

/* One row of a merge, of the first n parts: where they have it, and its lse of each. */
struct merged_row {
    const uint8_t *out[BACKEND_MAX_PARTS];
    float lse[BACKEND_MAX_PARTS];
    uint32_t n;
};

static struct merged_row row_of(const struct backend_pool_config *c, const struct backend_merges *m,
                                const struct backend_merge *x, uint32_t row)
{
    uint32_t last = x->pos + (x->is_full ? x->n_tokens - 1 : row / c->num_q_heads);
    uint64_t out_at = x->out_at + row * (uint64_t)c->head_dim_v * attn_dtype_bytes(c->q_dtype);
    struct merged_row r = {.n = 0};
    while (r.n < m->n_parts && (uint64_t)r.n * m->stripe <= last) {
        const uint8_t *base = m->parts[r.n];
        r.out[r.n] = base + out_at;
        memcpy(&r.lse[r.n++], base + x->lse_at + row * sizeof(float), sizeof(float));
    }
    return r;
}

/* The row's out; gives its lse. */
static float merge_row(const struct backend_pool_config *c, const struct merged_row *r, void *out)
{
    float most = -INFINITY, sum = 0, acc[BACKEND_MAX_HEAD_DIM];
    memset(acc, 0, c->head_dim_v * sizeof *acc);
    for (uint32_t k = 0; k < r->n; k++)
        if (isnan(r->lse[k]) || r->lse[k] > most) /* a NaN stays */
            most = r->lse[k];
    for (uint32_t k = 0; k < r->n && most != -INFINITY; k++)
        sum += expf(r->lse[k] - most);
    for (uint32_t k = 0; k < r->n; k++)
        if (r->lse[k] != -INFINITY)
            row_add(acc, c->q_dtype, r->out[k], c->head_dim_v, expf(r->lse[k] - most) / sum);
    row_put(out, c->q_dtype, acc, c->head_dim_v);
    return sum == 0 ? -INFINITY : most + logf(sum);
}

void merges_compute(const struct backend_pool_config *c, const struct backend_merges *m)
{
    uint64_t row_bytes = (uint64_t)c->head_dim_v * attn_dtype_bytes(c->q_dtype);
    for (uint32_t i = 0; i < m->n; i++) {
        const struct backend_merge *x = &m->list[i];
        for (uint32_t row = 0; row < x->n_tokens * c->num_q_heads; row++) {
            const struct merged_row r = row_of(c, m, x, row);
            float lse = merge_row(c, &r, (uint8_t *)x->out + row * row_bytes);
            if (x->lse != NULL)
                x->lse[row] = lse;
        }
    }
}
