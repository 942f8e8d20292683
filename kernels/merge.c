/* merge.c: merges outputs row by row, as proto/attn_merge.h does. */
#include "kernels/merge.h"

#include <string.h>

#include "proto/attn_merge.h"

/* A row of a merge, where its parts have it. */
struct merged_row {
    const struct backend_merges *m;
    uint64_t out_at, lse_at;
};

static struct attn_merge_part part_of(const void *of, uint32_t p)
{
    const struct merged_row *r = of;
    const uint8_t *base = r->m->parts[p];
    struct attn_merge_part part = {.out = base + r->out_at};
    memcpy(&part.lse, base + r->lse_at, sizeof part.lse);
    return part;
}

/* Parts that have anything of the row. */
static uint32_t parts_of(const struct backend_pool_config *c, const struct backend_merges *m,
                         const struct backend_merge *x, uint32_t row)
{
    const uint32_t last = x->pos + (x->is_full ? x->n_tokens - 1 : row / c->num_q_heads);
    uint32_t n = 0;
    while (n < m->n_parts && (uint64_t)n * m->stripe <= last)
        n++;
    return n;
}

void merges_compute(const struct backend_pool_config *c, const struct backend_merges *m)
{
    const uint64_t row_bytes = (uint64_t)backend_out_dim(c) * attn_dtype_bytes(c->q_dtype);
    for (uint32_t i = 0; i < m->n; i++) {
        const struct backend_merge *x = &m->list[i];
        for (uint32_t row = 0; row < x->n_tokens * c->num_q_heads; row++) {
            const struct merged_row r = {m, x->out_at + row * row_bytes,
                                         x->lse_at + row * sizeof(float)};
            const float lse = attn_merge_row(c->q_dtype, backend_out_dim(c), parts_of(c, m, x, row),
                                             part_of, &r, (uint8_t *)x->out + row * row_bytes);
            if (x->lse != NULL)
                x->lse[row] = lse;
        }
    }
}
