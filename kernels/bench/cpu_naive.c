/* cpu_naive.c: the obvious kernel, the first step of attnbench's ladder: each q head of each query
 * on its own, all scores, then their softmax, then the sum of V, one float after another. Threads
 * share the (item, token, q head) rows. As correct as the others, and as slow as it looks.
 */
#include "kernels/cpu/cpu.h"

#include "kernels/reference.h"

#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>

struct naive_job {
    const struct backend_batch *batch;
    _Atomic uint64_t next_row;
    _Atomic bool is_out_of_memory;
};

/* One head's row of K (or V) of a token. */
static void read_row(const struct backend_pool *p, const struct backend_item *item, uint32_t token,
                     uint32_t kv_head, bool is_v, double *out)
{
    const uint32_t n = is_v ? p->geometry.dv : p->geometry.dk;
    uint8_t *scales, *row = cpu_row(p, item, token, kv_head, is_v, &scales);
    if (scales != NULL)
        reference_dequantise(p->geometry.kv_dtype, row, scales, n, out);
    for (uint32_t d = 0; d < n && scales == NULL; d++)
        out[d] = reference_get(p->geometry.kv_dtype, row, d);
}

static float score(const struct backend_pool *p, const struct backend_item *item, uint32_t t,
                   uint32_t head, uint32_t j)
{
    const struct attend_geometry *g = &p->geometry;
    const struct attn_layer_spec *spec = &p->layers[item->layer];
    float s = 0;
    double k[MAX_K_DIM];
    read_row(p, item, j, head / g->group, false, k);
    for (uint32_t d = 0; d < g->dk; d++)
        s += (float)reference_get(g->q_dtype, item->q,
                                  ((size_t)t * g->num_q_heads + head) * g->dk + d) *
             (float)k[d];
    s *= spec->scale;
    if (spec->soft_cap > 0)
        s = spec->soft_cap * tanhf(s / spec->soft_cap);
    if (spec->alibi_slopes)
        s += spec->alibi_slopes[head] * ((float)j - (float)(item->pos + t));
    return s;
}

static void naive_row(const struct backend_pool *p, const struct backend_item *item, uint32_t t,
                      uint32_t head, float *s)
{
    const struct attend_geometry *g = &p->geometry;
    const struct attn_layer_spec *spec = &p->layers[item->layer];
    struct visible v = layer_visible(spec, (struct stripes){0}, item, layer_branch(spec, 0, 0), t);
    float o[MAX_V_DIM] = {0};
    float max = spec->sink_logits ? spec->sink_logits[head] : -INFINITY, sum = 0;
    for (uint32_t j = 0; j < v.end; j++) {
        if (!visible_has(&v, j))
            continue;
        s[j] = score(p, item, t, head, j);
        max = s[j] <= max ? max : s[j];
    }
    if (spec->sink_logits && max != -INFINITY)
        sum = expf(spec->sink_logits[head] - max);
    for (uint32_t j = 0; j < v.end && max != -INFINITY; j++) {
        if (!visible_has(&v, j))
            continue;
        float w = expf(s[j] - max);
        double row[MAX_V_DIM];
        read_row(p, item, j, head / g->group, true, row);
        sum += w;
        for (uint32_t d = 0; d < g->dv; d++)
            o[d] += w * (float)row[d];
    }
    size_t at = (size_t)t * g->num_q_heads + head;
    for (uint32_t d = 0; d < g->dv; d++)
        reference_put(g->q_dtype, item->out, at * g->dv + d, sum == 0 ? 0 : o[d] / sum);
    if (item->lse != NULL)
        item->lse[at] = sum == 0 ? -INFINITY : max + logf(sum);
}

static void naive_rows(void *arg, uint32_t thread)
{
    (void)thread;
    struct naive_job *job = arg;
    const struct backend_pool *p = job->batch->pool;
    uint32_t heads = p->geometry.num_q_heads;
    uint64_t longest = 0, row = 0;
    for (uint32_t i = 0; i < job->batch->n_items; i++) {
        const struct backend_item *item = &job->batch->items[i];
        if (item->pos + item->n_tokens > longest)
            longest = item->pos + item->n_tokens;
    }
    float *s = malloc(longest * sizeof *s);
    if (s == NULL) {
        atomic_store(&job->is_out_of_memory, true);
        return;
    }
    uint64_t mine = atomic_fetch_add(&job->next_row, 1);
    for (uint32_t i = 0; i < job->batch->n_items; i++) {
        const struct backend_item *item = &job->batch->items[i];
        if ((item->flags & BACKEND_ATTEND) == 0)
            continue;
        uint64_t n_rows = (uint64_t)item->n_tokens * heads;
        for (; mine < row + n_rows; mine = atomic_fetch_add(&job->next_row, 1))
            naive_row(p, item, (uint32_t)((mine - row) / heads), (uint32_t)((mine - row) % heads),
                      s);
        row += n_rows;
    }
    free(s);
}

attn_status cpu_attend_naive(struct backend *b, const struct backend_batch *batch)
{
    struct naive_job job = {.batch = batch};
    cpu_threads_run(b->threads, naive_rows, &job);
    if (!atomic_load(&job.is_out_of_memory))
        return ATTN_OK;
    cpu_fail(b, "no memory for scores");
    return ATTN_ENOMEM;
}
