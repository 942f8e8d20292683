/* verify.c: samples outputs while a run goes on and compares them with the float64 reference when
 * it is over. K, V and q are made again from their seed. */
#include "clients/attnload/verify.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/reference.h"

static uint64_t next_random(struct verify *v)
{
    return v->random = data_mix(v->random);
}

attn_status verify_init(struct verify *v, const struct options *o, const void *weights,
                        uint32_t capacity, uint64_t seed)
{
    const struct preset *p = o->preset;
    *v = (struct verify){.o = o, .weights = weights, .capacity = capacity, .random = seed};
    v->group = p->num_q_heads / p->num_kv_heads;
    v->out_bytes = (size_t)v->group * preset_dim_out(p, o->has_heads) * attn_dtype_bytes(o->dtype);
    if (capacity == 0)
        return ATTN_OK;
    v->samples = calloc(capacity, sizeof *v->samples);
    v->outs = calloc(capacity, v->out_bytes);
    v->lses = calloc((size_t)capacity * v->group, sizeof *v->lses);
    if (v->samples != NULL && v->outs != NULL && v->lses != NULL)
        return ATTN_OK;
    verify_fini(v);
    return ATTN_ENOMEM;
}

void verify_fini(struct verify *v)
{
    free(v->samples);
    free(v->outs);
    free(v->lses);
    *v = (struct verify){0};
}

void verify_offer(struct verify *v, const struct data_stream *data, uint32_t layer, uint32_t pos,
                  const void *out, const float *lse)
{
    if (v->capacity == 0)
        return;
    uint64_t slot = v->n_seen++;
    if (v->n < v->capacity)
        v->n++;
    else
        slot = next_random(v) % v->n_seen;
    if (slot >= v->capacity)
        return;
    uint32_t kv_head = (uint32_t)(next_random(v) % v->o->preset->num_kv_heads);
    v->samples[slot] =
        (struct verify_sample){.data = *data, .layer = layer, .pos = pos, .kv_head = kv_head};
    memcpy(v->outs + slot * v->out_bytes, (const uint8_t *)out + kv_head * v->out_bytes,
           v->out_bytes);
    memcpy(v->lses + slot * v->group, lse + kv_head * v->group, v->group * sizeof *lse);
}

struct scratch {
    void *q, *k, *v;
    void *heads; /* q as steps carry it, with --heads */
    double *out, *lse;
    int32_t *indices; /* [--top-k] */
};

/* Keeps the larger, and a NaN for ever. */
static void raise_max(double *max, double x)
{
    if (x > *max || isnan(x))
        *max = x;
}

/* Compares n values. Returns the first beyond the bound, n if there is none. */
static uint32_t compare(attn_dtype dtype, const void *got, const double *want, uint32_t n,
                        double atol, double rtol, double *max_error, double *out_l2)
{
    uint32_t bad = n;
    double diff2 = 0, norm2 = 0;
    for (uint32_t i = 0; i < n; i++) {
        double error = fabs(reference_get(dtype, got, i) - want[i]);
        diff2 += error * error;
        norm2 += want[i] * want[i];
        raise_max(max_error, error);
        if (!(error <= atol + rtol * fabs(want[i])) && bad == n)
            bad = i;
    }
    *out_l2 = norm2 > 0 ? sqrt(diff2 / norm2) : sqrt(diff2);
    return bad;
}

static void judge(const struct verify *v, uint32_t index, const struct scratch *m,
                  struct verify_result *r)
{
    const struct verify_sample *s = &v->samples[index];
    struct reference_bound b = reference_bound_of(v->o->dtype, v->o->kv_dtype);
    const void *out = v->outs + index * v->out_bytes, *lse = v->lses + index * v->group;
    uint32_t n = v->group * preset_dim_out(v->o->preset, v->o->has_heads);
    double l2, lse_l2;
    uint32_t bad = compare(v->o->dtype, out, m->out, n, b.atol, b.rtol, &r->max_error, &l2);
    uint32_t bad_lse = compare(ATTN_F32, lse, m->lse, v->group, b.lse_atol, b.lse_rtol,
                               &r->max_lse_error, &lse_l2);
    raise_max(&r->max_l2, l2);
    r->n_verified++;
    bool is_out_good = bad == n && l2 <= b.l2;
    if (is_out_good && bad_lse == v->group)
        return;
    if (r->n_mismatched++ > 0)
        return;
    uint32_t i = is_out_good ? bad_lse : bad % n; /* only l2: tell the first */
    snprintf(r->first, sizeof r->first,
             "stream %llu layer %u pos %u kv_head %u %s %u: got %g, expected %g, l2 %g",
             (unsigned long long)s->data.stream, s->layer, s->pos, s->kv_head,
             is_out_good ? "lse" : "element", i,
             is_out_good ? reference_get(ATTN_F32, lse, i) : reference_get(v->o->dtype, out, i),
             is_out_good ? m->lse[i] : m->out[i], l2);
}

/* What is visited adds up to exp(lse), all that is seen to exp(m->lse). */
static void measure_recall(const struct verify *v, uint32_t index, const struct scratch *m,
                           struct verify_result *r)
{
    const struct reference_bound b = reference_bound_of(v->o->dtype, v->o->kv_dtype);
    const float *lse = v->lses + (size_t)index * v->group;
    r->n_verified++;
    for (uint32_t i = 0; i < v->group; i++) {
        const double recall = exp((double)lse[i] - m->lse[i]);
        const bool is_good =
            (double)lse[i] <= m->lse[i] + b.lse_atol + b.lse_rtol * fabs(m->lse[i]);
        r->min_recall = r->n_rows == 0 || recall < r->min_recall ? recall : r->min_recall;
        r->sum_recall += recall;
        r->n_rows++;
        if (!is_good && r->n_mismatched++ == 0)
            snprintf(r->first, sizeof r->first, "stream %llu pos %u: lse %g, of all keys %g",
                     (unsigned long long)v->samples[index].data.stream, v->samples[index].pos,
                     (double)lse[i], m->lse[i]);
    }
}

/* A head's weights, from which element on. */
static size_t weights_at(const struct preset *p, uint32_t head)
{
    return (size_t)head * (p->qk_nope_head_dim + p->v_head_dim) * p->kv_lora_rank;
}

/* The heads of the model as q over latents, rounded as attnd does. A pool has one kv head. */
static void absorb(const struct verify *v, struct scratch *m)
{
    const struct preset *p = v->o->preset;
    const attn_dtype d = v->o->dtype;
    const uint32_t nope = p->qk_nope_head_dim, rank = p->kv_lora_rank;
    for (uint32_t h = 0; h < v->group; h++) {
        const size_t from = (size_t)h * preset_dim_q(p, true), to = (size_t)h * p->head_dim;
        double sums[DATA_MAX_DIM] = {0};
        for (uint32_t i = 0; i < nope; i++) {
            const double x = reference_get(d, m->heads, from + i);
            for (uint32_t c = 0; c < rank; c++)
                sums[c] += x * reference_get(d, v->weights, weights_at(p, h) + i * rank + c);
        }
        for (uint32_t c = 0; c < p->head_dim; c++)
            reference_put(d, m->q, to + c,
                          c < rank ? sums[c] : reference_get(d, m->heads, from + nope + c - rank));
    }
}

/* What attention gives as heads of the model, in its place. They are not wider. */
static void expand(const struct verify *v, struct scratch *m)
{
    const struct preset *p = v->o->preset;
    const attn_dtype d = v->o->dtype;
    const uint32_t rank = p->kv_lora_rank;
    for (uint32_t h = 0; h < v->group; h++) {
        double latent[DATA_MAX_DIM];
        for (uint32_t c = 0; c < rank; c++) {
            reference_put(d, m->v, 0, m->out[(size_t)h * rank + c]);
            latent[c] = reference_get(d, m->v, 0);
        }
        for (uint32_t i = 0; i < p->v_head_dim; i++) {
            const size_t row = weights_at(p, h) + (size_t)(p->qk_nope_head_dim + i) * rank;
            double sum = 0;
            for (uint32_t c = 0; c < rank; c++)
                sum += latent[c] * reference_get(d, v->weights, row + c);
            m->out[(size_t)h * p->v_head_dim + i] = sum;
        }
    }
}

static attn_status recompute(const struct verify *v, const struct verify_sample *s,
                             struct scratch *m)
{
    const struct preset *p = v->o->preset;
    uint32_t group = v->group, dim = p->head_dim, dim_v = preset_dim_v(p), n_kv = s->pos + 1;
    struct attn_layer l = preset_layer(p, s->layer);
    struct attn_layer_spec spec = {.scale = l.scale > 0 ? l.scale : 1 / sqrtf((float)dim),
                                   .window_tokens = l.window_tokens,
                                   .soft_cap = l.soft_cap};
    data_fill(&s->data, s->layer, DATA_Q, s->pos, 1, s->kv_head * group, group,
              preset_dim_q(p, v->o->has_heads), v->o->dtype, v->o->has_heads ? m->heads : m->q,
              NULL);
    if (v->o->has_heads)
        absorb(v, m);
    data_fill(&s->data, s->layer, DATA_K, 0, n_kv, s->kv_head, 1, dim, v->o->dtype, m->k, NULL);
    const size_t e = attn_dtype_bytes(v->o->dtype);
    for (uint32_t i = 0; p->kv_lora_rank > 0 && i < n_kv; i++)
        memcpy((uint8_t *)m->v + i * dim_v * e, (const uint8_t *)m->k + i * dim * e, dim_v * e);
    if (p->kv_lora_rank == 0)
        data_fill(&s->data, s->layer, DATA_V, 0, n_kv, s->kv_head, 1, dim, v->o->dtype, m->v, NULL);
    const uint32_t top_k = v->o->top_k, starts[] = {0, top_k};
    const struct reference_seen seen = {.starts = top_k > 0 ? starts : NULL,
                                        .tokens = (const uint32_t *)m->indices};
    if (top_k > 0)
        data_indices(&s->data, s->layer, s->pos, n_kv - preset_visible(p, s->layer, s->pos), n_kv,
                     top_k, m->indices);
    const attn_status st = reference_attend_seen(&spec, group, 1, dim, dim_v, v->o->dtype, m->q, 1,
                                                 s->pos, m->k, m->v, n_kv, &seen, m->out, m->lse);
    if (st == ATTN_OK && v->o->has_heads)
        expand(v, m);
    return st;
}

attn_status verify_run(struct verify *v, struct verify_result *r)
{
    uint32_t max_kv = 1;
    for (uint32_t i = 0; i < v->n; i++)
        max_kv = v->samples[i].pos + 1 > max_kv ? v->samples[i].pos + 1 : max_kv;
    size_t row = v->o->preset->head_dim * attn_dtype_bytes(v->o->dtype);
    struct scratch m = {.q = malloc(row * v->group),
                        .k = malloc(row * max_kv),
                        .v = malloc(row * max_kv),
                        .heads = malloc(row * v->group),
                        .out = calloc((size_t)v->group * preset_dim_v(v->o->preset), sizeof *m.out),
                        .lse = calloc(v->group, sizeof *m.lse),
                        .indices = calloc(v->o->top_k + 1, sizeof *m.indices)};
    bool has_memory = m.q != NULL && m.k != NULL && m.v != NULL && m.out != NULL && m.lse != NULL &&
                      m.indices != NULL && m.heads != NULL;
    attn_status st = has_memory ? ATTN_OK : ATTN_ENOMEM;
    for (uint32_t i = 0; st == ATTN_OK && i < v->n; i++) {
        st = recompute(v, &v->samples[i], &m);
        if (st == ATTN_OK && v->o->choose_blocks > 0)
            measure_recall(v, i, &m, r);
        else if (st == ATTN_OK)
            judge(v, i, &m, r);
    }
    free(m.q);
    free(m.k);
    free(m.v);
    free(m.out);
    free(m.lse);
    free(m.indices);
    free(m.heads);
    return st;
}

void verify_join(struct verify_result *dst, const struct verify_result *src)
{
    if (dst->n_mismatched == 0)
        memcpy(dst->first, src->first, sizeof dst->first);
    if (dst->n_rows == 0 || (src->n_rows > 0 && src->min_recall < dst->min_recall))
        dst->min_recall = src->min_recall;
    dst->sum_recall += src->sum_recall;
    dst->n_rows += src->n_rows;
    dst->n_verified += src->n_verified;
    dst->n_mismatched += src->n_mismatched;
    raise_max(&dst->max_error, src->max_error);
    raise_max(&dst->max_l2, src->max_l2);
    raise_max(&dst->max_lse_error, src->max_lse_error);
}
