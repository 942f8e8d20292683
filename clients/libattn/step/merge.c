/* merge.c: outputs over some of the keys each, as one over all (proto/attn_merge.h). */
#include "clients/libattn/core/core.h"
#include "proto/attn_merge.h"

struct row {
    const uint8_t *out; /* of the first part, as lse */
    const float *lse;
    uint64_t n_rows, part_bytes;
};

static struct attn_merge_part part_of(const void *of, uint32_t p)
{
    const struct row *r = of;
    return (struct attn_merge_part){r->out + p * r->part_bytes, r->lse[p * r->n_rows]};
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
    const uint64_t row_bytes = dim * attn_dtype_bytes(dtype);
    for (uint64_t i = 0; i < n_rows; i++) {
        const struct row row = {(const uint8_t *)outs + i * row_bytes, lses + i, n_rows,
                                n_rows * row_bytes};
        const float lse =
            attn_merge_row(dtype, dim, n_parts, part_of, &row, (uint8_t *)out + i * row_bytes);
        if (out_lse != NULL)
            out_lse[i] = lse;
    }
    return ATTN_OK;
}
