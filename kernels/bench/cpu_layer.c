/* cpu_layer.c: a whole layer on the cpu backend, measured: layer norm, products with the weights of
 * q, k and v, attention, the product with the output's weights. The products are plain loops that
 * the compiler vectorises, rows shared among the threads.
 */
#include "kernels/bench/cpu_layer.h"

#include "kernels/bench/project.h"
#include "kernels/cpu/cpu.h"
#include "kernels/reference.h"

#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>

#define ROWS_AT_ONCE 16

struct product {
    const float *x, *w, *added; /* as gpu_project has them, in f32; w [dim][dim] transposed */
    float *y;
    uint32_t n, dim;
    _Atomic uint32_t next;
};

static void multiply_rows(void *arg, uint32_t thread)
{
    (void)thread;
    struct product *p = arg;
    uint32_t row;
    while ((row = atomic_fetch_add(&p->next, ROWS_AT_ONCE)) < p->n) {
        uint32_t end = row + ROWS_AT_ONCE < p->n ? row + ROWS_AT_ONCE : p->n;
        for (uint32_t r = row; r < end; r++)
            for (uint32_t d = 0; d < p->dim; d++)
                p->y[(size_t)r * p->dim + d] = p->added ? p->added[(size_t)r * p->dim + d] : 0;
        for (uint32_t k = 0; k < p->dim; k++)
            for (uint32_t r = row; r < end; r++) {
                const float x = p->x[(size_t)r * p->dim + k], *w = p->w + (size_t)k * p->dim;
                float *y = p->y + (size_t)r * p->dim;
                for (uint32_t d = 0; d < p->dim; d++)
                    y[d] += x * w[d];
            }
    }
}

static void multiply(struct backend *b, const float *x, const float *w, const float *added,
                     float *y, uint32_t n, uint32_t dim)
{
    struct product p = {.x = x, .w = w, .added = added, .y = y, .n = n, .dim = dim};
    cpu_threads_run(b->threads, multiply_rows, &p);
}

static void norm_row(const float *x, float *y, uint32_t dim)
{
    float mean = 0, squares = 0;
    for (uint32_t d = 0; d < dim; d++)
        mean += x[d] / (float)dim;
    for (uint32_t d = 0; d < dim; d++)
        squares += (x[d] - mean) * (x[d] - mean);
    for (uint32_t d = 0; d < dim; d++)
        y[d] = (x[d] - mean) / sqrtf(squares / (float)dim + PROJECT_EPSILON);
}

bool cpu_layer_open(struct cpu_layer *l, attn_dtype dtype, const struct backend_bench_layer *layer,
                    const struct backend_batch *batch)
{
    const struct backend_pool_config *c = &batch->pool->config;
    size_t n = 0, dim = layer->dim;
    *l = (struct cpu_layer){.layer = layer, .dtype = dtype};
    for (uint32_t i = 0; i < batch->n_items; i++)
        n += (size_t)batch->items[i].n_tokens * c->num_q_heads * c->head_dim_k;
    l->n = (uint32_t)(n / dim);
    l->floats = malloc((6 * n + 4 * dim * dim) * sizeof *l->floats);
    l->sent = malloc(3 * n * attn_dtype_bytes(dtype));
    l->items = malloc(batch->n_items * sizeof *l->items);
    if (l->floats == NULL || l->sent == NULL || l->items == NULL)
        return false;
    float *w = l->floats + 6 * n;
    for (size_t i = 0; i < n; i++)
        l->floats[i] = (float)reference_get(dtype, layer->x, i);
    for (size_t k = 0; k < 4; k++)
        for (size_t i = 0; i < dim * dim; i++)
            w[k * dim * dim + i % dim * dim + i / dim] =
                (float)reference_get(dtype, layer->weights[k], i);
    size_t at = 0, e = attn_dtype_bytes(dtype);
    for (uint32_t i = 0; i < batch->n_items; i++) {
        struct backend_item *it = &l->items[i];
        *it = batch->items[i];
        it->q = l->sent + at * e;
        it->k = l->sent + (n + at) * e;
        it->v = l->sent + (2 * n + at) * e;
        at += (size_t)it->n_tokens * c->num_q_heads * c->head_dim_k;
    }
    return true;
}

void cpu_layer_close(struct cpu_layer *l)
{
    free(l->floats);
    free(l->sent);
    free(l->items);
}

/* x, its norm, q, k, v, then y, each [n][dim] f32; then the four weights */
attn_status cpu_layer_run(struct backend *b, struct cpu_layer *l, struct backend_batch *batch)
{
    const uint32_t n = l->n, dim = l->layer->dim;
    const size_t size = (size_t)n * dim;
    float *x = l->floats, *normed = x + size, *y = x + 5 * size, *w = x + 6 * size;
    for (uint32_t r = 0; r < n; r++)
        norm_row(x + (size_t)r * dim, normed + (size_t)r * dim, dim);
    for (size_t i = 0; i < size && l->dtype != ATTN_F32; i++) {
        uint16_t rounded;
        reference_put(l->dtype, &rounded, 0, normed[i]);
        normed[i] = (float)reference_get(l->dtype, &rounded, 0);
    }
    for (uint32_t k = 0; k < 3; k++) {
        float *to = x + (2 + k) * size;
        multiply(b, normed, w + (size_t)k * dim * dim, NULL, to, n, dim);
        for (size_t i = 0; i < size; i++)
            reference_put(l->dtype, l->sent, k * size + i, to[i]);
    }
    struct backend_batch own = *batch;
    own.items = l->items;
    cpu_append(b, &own);
    attn_status st = cpu_attend(b, b->isa, &own, 0);
    if (st != ATTN_OK)
        return st;
    size_t at = 0; /* attention's output takes the norm's place */
    for (uint32_t i = 0; i < own.n_items; i++) {
        const struct backend_pool_config *c = &batch->pool->config;
        size_t count = (size_t)own.items[i].n_tokens * c->num_q_heads * c->head_dim_v;
        for (size_t j = 0; j < count; j++)
            normed[at + j] = (float)reference_get(l->dtype, own.items[i].out, j);
        at += count;
    }
    multiply(b, normed, w + (size_t)3 * dim * dim, x, y, n, dim);
    for (size_t i = 0; i < size; i++)
        reference_put(l->dtype, l->layer->y, i, y[i]);
    return ATTN_OK;
}
