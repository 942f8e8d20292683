/* verify.c: see verify.h. */
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

attn_status verify_init(struct verify *v, const struct options *o, uint32_t capacity, uint64_t seed)
{
    const struct preset *p = o->preset;
    *v = (struct verify){.o = o, .capacity = capacity, .random = seed};
    v->out_bytes =
        (size_t)(p->num_q_heads / p->num_kv_heads) * p->head_dim * attn_dtype_bytes(o->dtype);
    if (capacity == 0)
        return ATTN_OK;
    v->samples = calloc(capacity, sizeof *v->samples);
    v->outs = calloc(capacity, v->out_bytes);
    if (v->samples != NULL && v->outs != NULL)
        return ATTN_OK;
    verify_fini(v);
    return ATTN_ENOMEM;
}

void verify_fini(struct verify *v)
{
    free(v->samples);
    free(v->outs);
    *v = (struct verify){0};
}

void verify_offer(struct verify *v, const struct data_stream *data, uint32_t layer, uint32_t pos,
                  const void *out)
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
}

struct scratch {
    void *q, *k, *v;
    double *out;
};

static void compare(const struct verify *v, const struct verify_sample *s, const void *got,
                    const double *want, struct verify_result *r)
{
    const struct preset *p = v->o->preset;
    struct reference_bound b = reference_bound_of(v->o->dtype, v->o->kv_dtype);
    uint32_t n = p->num_q_heads / p->num_kv_heads * p->head_dim, bad = UINT32_MAX;
    double diff2 = 0, norm2 = 0, x_bad = 0;
    for (uint32_t i = 0; i < n; i++) {
        double x = reference_get(v->o->dtype, got, i), error = fabs(x - want[i]);
        diff2 += error * error;
        norm2 += want[i] * want[i];
        if (error > r->max_error || isnan(error))
            r->max_error = error;
        if (!(error <= b.atol + b.rtol * fabs(want[i])) && bad == UINT32_MAX) {
            bad = i;
            x_bad = x;
        }
    }
    double l2 = norm2 > 0 ? sqrt(diff2 / norm2) : sqrt(diff2);
    if (l2 > r->max_l2 || isnan(l2))
        r->max_l2 = l2;
    r->n_verified++;
    if (bad == UINT32_MAX && l2 <= b.l2)
        return;
    if (r->n_mismatched++ > 0)
        return;
    uint32_t i = bad == UINT32_MAX ? 0 : bad;
    snprintf(r->first, sizeof r->first,
             "stream %llu layer %u pos %u kv_head %u element %u: got %g, expected %g, l2 %g",
             (unsigned long long)s->data.stream, s->layer, s->pos, s->kv_head, i,
             bad == UINT32_MAX ? reference_get(v->o->dtype, got, 0) : x_bad, want[i], l2);
}

static attn_status recompute(const struct verify *v, const struct verify_sample *s,
                             struct scratch *m)
{
    const struct preset *p = v->o->preset;
    uint32_t group = p->num_q_heads / p->num_kv_heads, dim = p->head_dim, n_kv = s->pos + 1;
    struct attn_layer l = preset_layer(p, s->layer);
    struct attn_layer_spec spec = {.scale = l.scale > 0 ? l.scale : 1 / sqrtf((float)dim),
                                   .window_tokens = l.window_tokens,
                                   .soft_cap = l.soft_cap};
    data_fill(&s->data, s->layer, DATA_Q, s->pos, 1, s->kv_head * group, group, dim, v->o->dtype,
              m->q);
    data_fill(&s->data, s->layer, DATA_K, 0, n_kv, s->kv_head, 1, dim, v->o->dtype, m->k);
    data_fill(&s->data, s->layer, DATA_V, 0, n_kv, s->kv_head, 1, dim, v->o->dtype, m->v);
    return reference_attend(&spec, group, 1, dim, dim, v->o->dtype, m->q, 1, s->pos, m->k, m->v,
                            n_kv, m->out, NULL);
}

attn_status verify_run(struct verify *v, struct verify_result *r)
{
    uint32_t max_kv = 1;
    for (uint32_t i = 0; i < v->n; i++)
        max_kv = v->samples[i].pos + 1 > max_kv ? v->samples[i].pos + 1 : max_kv;
    size_t row = v->o->preset->head_dim * attn_dtype_bytes(v->o->dtype);
    struct scratch m = {.q = malloc(v->out_bytes),
                        .k = malloc(row * max_kv),
                        .v = malloc(row * max_kv),
                        .out = calloc(v->out_bytes, sizeof(double))};
    attn_status st =
        m.q == NULL || m.k == NULL || m.v == NULL || m.out == NULL ? ATTN_ENOMEM : ATTN_OK;
    for (uint32_t i = 0; st == ATTN_OK && i < v->n; i++) {
        st = recompute(v, &v->samples[i], &m);
        if (st == ATTN_OK)
            compare(v, &v->samples[i], v->outs + i * v->out_bytes, m.out, r);
    }
    free(m.q);
    free(m.k);
    free(m.v);
    free(m.out);
    return st;
}

void verify_join(struct verify_result *dst, const struct verify_result *src)
{
    if (dst->n_mismatched == 0)
        memcpy(dst->first, src->first, sizeof dst->first);
    dst->n_verified += src->n_verified;
    dst->n_mismatched += src->n_mismatched;
    if (src->max_error > dst->max_error || isnan(src->max_error))
        dst->max_error = src->max_error;
    if (src->max_l2 > dst->max_l2 || isnan(src->max_l2))
        dst->max_l2 = src->max_l2;
}
