/* canary.c: compares one output row of the device with the float64 reference.
 *
 * The bounds of reference.h are for values of about unit size, but live values vary. So the
 * absolute bound grows with the largest |v|, since the output is a mean of them, and with the
 * rounding of scores, which grows with |q| |k|. Devices compute in f32: where products or sums of
 * the worker's finite values may leave its range, an output says nothing about the device. Nor does
 * it where rounding may have chosen another block: two blocks' bounds are equal, or almost. */
#include "daemon/engine/step/canary.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/layer_visible.h"
#include "kernels/reference.h"

static const double SCORE_ROUNDING = 0x1p-20; /* generous for a dot product in f32 */
static const double LARGEST_CODE = 448; /* of nvfp4 six times that, with the E4M3 scale */
static const double LARGEST_WEIGHT = 256; /* kernels' maxima may lag behind by 2^8 */

/* What the device gave for the head in this row. */
static void take_output(struct canary *c, uint32_t row, const void *out, const float *lse)
{
    size_t at = (size_t)row * c->num_q_heads + c->head;
    for (uint32_t d = 0; d < c->out_dim; d++)
        c->got[d] = (float)reference_get(c->q_dtype, out, at * c->out_dim + d);
    c->got_lse = c->has_lse ? lse[at] : 0;
}

attn_status canary_init(struct canary *c, const struct canary_item *item, uint64_t chance)
{
    const struct backend_pool_config *p = item->config;
    *c = (struct canary){.layer = item->layer,
                         .dk = p->head_dim_k,
                         .dv = p->head_dim_v,
                         .q_dim = backend_q_dim(p),
                         .out_dim = backend_out_dim(p),
                         .q_nope_dim = p->q_nope_dim,
                         .block_tokens = p->block_tokens,
                         .q_dtype = p->q_dtype,
                         .kv_dtype = p->kv_dtype,
                         .layout = kv_layout_of(p),
                         .spec = p->layers[item->layer]};
    uint32_t row = (uint32_t)(chance % item->n_tokens), group = p->num_q_heads / p->num_kv_heads;
    c->group = group;
    c->n_chosen = item->n_chosen;
    if (c->spec.is_full ||
        item->is_full) /* not causal: each row sees all keys, as the last one does */
        row = item->n_tokens - 1;
    c->head = (uint32_t)((chance >> 32) % p->num_q_heads);
    c->first = (uint32_t)(chance >> 24) % ((c->out_dim - 1) / CANARY_PROJECTED + 1);
    /* which keys a head sees depends on its kv head: take one of the first */
    if (c->spec.n_branches > 0)
        c->head %= group;
    c->kv_head = c->head / group;
    c->pos = item->pos + row;
    c->n_keys = c->pos + 1;
    if (c->n_keys > CANARY_MAX_KEYS)
        return ATTN_ENOTSUP;
    c->n_blocks = (c->n_keys - 1) / c->block_tokens + 1;

    size_t row_bytes = (size_t)p->num_q_heads * c->q_dim * attn_dtype_bytes(c->q_dtype);
    size_t n = (size_t)c->n_blocks * c->block_tokens;
    c->num_q_heads = p->num_q_heads;
    c->n_queries = row < CANARY_MAX_QUERIES ? row + 1 : CANARY_MAX_QUERIES;
    c->has_lse = item->lse != NULL;
    take_output(c, row, item->out, item->lse);
    if (c->spec.sink_logits != NULL)
        c->sink_logit = c->spec.sink_logits[c->head];
    if (c->spec.alibi_slopes != NULL)
        c->alibi_slope = c->spec.alibi_slopes[c->head];
    c->k = malloc(n * c->dk * sizeof *c->k);
    c->v = malloc(n * c->dv * sizeof *c->v);
    c->queries = malloc(c->n_queries * row_bytes);
    if (c->k == NULL || c->v == NULL || c->queries == NULL) {
        canary_fini(c);
        return ATTN_ENOMEM;
    }
    memcpy(c->queries, (const uint8_t *)item->q + (row + 1 - c->n_queries) * row_bytes,
           c->n_queries * row_bytes);
    size_t at = (size_t)(c->n_queries - 1) * p->num_q_heads + c->head;
    for (uint32_t d = 0; d < c->q_dim; d++)
        c->q[d] = (float)reference_get(c->q_dtype, c->queries, at * c->q_dim + d);
    return ATTN_OK;
}

/* --- projections ------------------------------------------------------------------------------ */

uint64_t canary_weights_bytes(const struct canary *c)
{
    return (uint64_t)(c->q_nope_dim + c->out_dim) * c->dv * attn_dtype_bytes(c->q_dtype);
}

uint64_t canary_weights_at(const struct canary *c)
{
    return c->head * canary_weights_bytes(c);
}

/* Of one element, to either side. */
static double rounding_of(attn_dtype d)
{
    return d == ATTN_BF16 ? 0x1p-8 : d == ATTN_F16 ? 0x1p-11 : 0x1p-24;
}

/* The row's q, as it attends. */
static void project_q(struct canary *c)
{
    const uint32_t nope = c->q_nope_dim;
    float given[CANARY_MAX_DIM];
    double sums = 0, largest = 0;
    memcpy(given, c->q, c->q_dim * sizeof *given);
    for (uint32_t d = 0; d < c->dv; d++) {
        double sum = 0, size = 0;
        for (uint32_t i = 0; i < nope; i++) {
            const double x = (double)given[i] * c->weights[(size_t)i * c->dv + d];
            sum += x;
            size += fabs(x);
        }
        uint8_t rounded[4];
        reference_put(c->q_dtype, rounded, 0, sum);
        c->q[d] = (float)reference_get(c->q_dtype, rounded, 0);
        sums += size * size;
        largest = fmax(largest, fabs(sum));
    }
    for (uint32_t d = c->dv; d < c->dk; d++)
        c->q[d] = given[d - c->dv + nope];
    /* sums in f32; where one is between two values of q_dtype, a device may have the other */
    c->q_error = SCORE_ROUNDING * sqrt(sums) + 2 * rounding_of(c->q_dtype) * largest;
}

attn_status canary_take_weights(struct canary *c, const void *bytes)
{
    const size_t n = (size_t)(c->q_nope_dim + c->out_dim) * c->dv;
    c->weights = malloc(n * sizeof *c->weights);
    if (c->weights == NULL)
        return ATTN_ENOMEM;
    for (size_t i = 0; i < n; i++)
        c->weights[i] = (float)reference_get(c->q_dtype, bytes, i);
    project_q(c);
    return ATTN_OK;
}

void canary_keep_row(struct canary *c)
{
    size_t row_bytes = (size_t)c->num_q_heads * c->q_dim * attn_dtype_bytes(c->q_dtype);
    memmove(c->queries, c->queries + (c->n_queries - 1) * row_bytes, row_bytes);
    c->n_queries = 1;
}

void canary_take_output(struct canary *c, const void *out, const float *lse)
{
    take_output(c, c->n_queries - 1, out, lse);
}

void canary_fini(struct canary *c)
{
    free(c->k);
    free(c->v);
    free(c->queries);
    free(c->weights);
    c->k = c->v = c->weights = NULL;
    c->queries = NULL;
}

/* The keys that the row sees; of a dilated layer all, though it sees fewer. */
static struct visible seen_of(const struct canary *c)
{
    if (c->spec.n_branches > 0)
        return (struct visible){.end = c->n_keys};
    const struct backend_item last = {.pos = c->pos, .n_tokens = 1};
    return layer_visible(&c->spec, (struct stripes){0}, &last, (struct branch){0}, 0);
}

bool canary_sees_block(const struct canary *c, uint32_t i)
{
    struct visible seen = seen_of(c);
    uint32_t first = i * c->block_tokens;
    return first < seen.sinks || first + c->block_tokens > seen.first;
}

/* Widens one token's row of the head to floats: the first dim elements. */
static void take_row(const struct canary *c, const uint8_t *codes, const uint8_t *scales,
                     uint32_t dim, float *out)
{
    double wide[CANARY_MAX_DIM];
    if (!c->layout.is_quantised) {
        for (uint32_t d = 0; d < dim; d++)
            out[d] = (float)reference_get(c->kv_dtype, codes, d);
        return;
    }
    reference_dequantise(c->kv_dtype, codes, scales, dim, wide);
    for (uint32_t d = 0; d < dim; d++)
        out[d] = (float)wide[d];
}

void canary_take_block(struct canary *c, uint32_t i, const uint8_t *block)
{
    const struct kv_layout *l = &c->layout;
    const uint8_t *layer = block + c->layer * l->layer_bytes;
    const uint8_t *k = layer + c->kv_head * l->k_head_bytes;
    const uint8_t *v = layer + l->v_offset + c->kv_head * l->v_head_bytes;
    const uint8_t *k_scales =
        layer + l->k_scales + (size_t)c->kv_head * c->block_tokens * l->k_scale_bytes;
    const uint8_t *v_scales =
        layer + l->v_scales + (size_t)c->kv_head * c->block_tokens * l->v_scale_bytes;
    uint32_t first = i * c->block_tokens, n = c->n_keys - first;
    for (uint32_t t = 0; t < (n < c->block_tokens ? n : c->block_tokens); t++) {
        take_row(c, k + (size_t)t * l->k_row_bytes, k_scales + (size_t)t * l->k_scale_bytes, c->dk,
                 c->k + (size_t)(first + t) * c->dk);
        take_row(c, v + (size_t)t * l->v_row_bytes, v_scales + (size_t)t * l->v_scale_bytes, c->dv,
                 c->v + (size_t)(first + t) * c->dv);
    }
}

static double length_of(const float *row, uint32_t n)
{
    double sum = 0;
    for (uint32_t d = 0; d < n; d++)
        sum += (double)row[d] * row[d];
    return sqrt(sum);
}

/* The largest |v|, how far scores may be off, and whether f32 has room for all on the way. */
static void sizes_of(const struct canary *c, double *out_v, double *out_score_error,
                     bool *out_fits_f32)
{
    struct visible seen = seen_of(c);
    double v = 0, k = 0;
    for (uint32_t j = 0; j < c->n_keys; j++) {
        if (!visible_has(&seen, j))
            continue;
        k = fmax(k, length_of(c->k + (size_t)j * c->dk, c->dk));
        for (uint32_t d = 0; d < c->dv; d++)
            v = fmax(v, fabs(c->v[(size_t)j * c->dv + d]));
    }
    double q = length_of(c->q, c->dk), product = q * k, score = product * c->spec.scale;
    double code = c->kv_dtype == ATTN_NVFP4 ? 6 * LARGEST_CODE : LARGEST_CODE;
    double codes = c->layout.is_quantised ? q * code * sqrt(c->dk) : 0;
    double bias = fabs(c->alibi_slope) * c->n_keys;
    *out_v = v;
    *out_score_error =
        SCORE_ROUNDING * (score + bias + c->spec.soft_cap) + c->q_error * k * c->spec.scale;
    *out_fits_f32 = fmax(product, codes) < FLT_MAX / 4 && score + bias < BACKEND_MAX_SCORE &&
                    v * c->n_keys * LARGEST_WEIGHT < FLT_MAX / 4;
}

static void compare(double got, double expected, double bound, uint32_t element,
                    struct canary_verdict *v)
{
    double ratio = fabs(got - expected) / bound;
    if (isnan(expected) || isinf(expected)) /* NaN or Inf in the worker's tensors */
        ratio = NAN;
    else if (isnan(got))
        ratio = INFINITY;
    if (ratio > v->ratio || isnan(ratio))
        *v = (struct canary_verdict){ratio, got, expected, element};
}

/* The tokens that the row visits, in list: [n_keys]; 0: a device may have chosen others. */
static attn_status visited(const struct canary *c, uint32_t *list, uint32_t *out_n)
{
    const size_t head = (size_t)(c->n_queries - 1) * c->num_q_heads + c->kv_head * c->group;
    float *q = malloc((size_t)c->group * c->dk * sizeof *q);
    double longest = 0, largest = 0, margin;
    bool is_tied, is_finite = true;
    *out_n = 0;
    if (q == NULL)
        return ATTN_ENOMEM;
    for (uint32_t r = 0; r < c->group; r++) {
        float *row = q + (size_t)r * c->dk;
        for (uint32_t d = 0; d < c->dk; d++)
            row[d] = (float)reference_get(c->q_dtype, c->queries, (head + r) * c->dk + d);
        longest = fmax(longest, length_of(row, c->dk));
        is_finite &= isfinite(length_of(row, c->dk));
    }
    for (size_t i = 0; i < (size_t)c->n_keys * c->dk; i++) {
        largest = fmax(largest, fabsf(c->k[i]));
        is_finite &= isfinite(c->k[i]);
    }
    const double bound = longest * largest * sqrt(c->dk); /* no block's is larger */
    uint32_t n = reference_choose(c->n_chosen, c->block_tokens, c->group, c->dk, q, c->k, c->n_keys,
                                  list, &margin, &is_tied);
    free(q);
    /* of two sums in f32, each of dk products and of extremes that may be rounded */
    if (is_finite && bound < FLT_MAX / 4 && !is_tied &&
        margin > (c->dk + 4) * (FLT_EPSILON * bound + FLT_MIN))
        *out_n = n;
    return n > 0 ? ATTN_OK : ATTN_ENOMEM;
}

/* The reference's output; out_is_sure: of the tokens that a device visits. */
static attn_status compute(const struct canary *c, const struct attn_layer_spec *spec, double *out,
                           double *out_lse, bool *out_is_sure)
{
    uint32_t starts[2] = {0, 0}, *list = NULL;
    attn_status st = ATTN_OK;
    *out_is_sure = true;
    if (c->n_chosen > 0) {
        list = malloc(c->n_keys * sizeof *list);
        st = list == NULL ? ATTN_ENOMEM : visited(c, list, &starts[1]);
        *out_is_sure = starts[1] > 0;
    }
    const struct reference_seen seen = {.starts = list != NULL ? starts : NULL, .tokens = list};
    if (st == ATTN_OK && *out_is_sure)
        st = reference_attend_seen(spec, 1, 1, c->dk, c->dv, ATTN_F32, c->q, 1, c->pos, c->k, c->v,
                                   c->n_keys, &seen, out, out_lse);
    free(list);
    return st;
}

/* Compares what the projection makes of the latents `want`. A device's latents are a mean of those
 * of the keys, each by a weight that is off, then rounded; so its output is a mean of what the
 * keys' latents are projected to, and the bound is that of a mean of these. */
static void compare_projected(const struct canary *c, const double *want,
                              const struct reference_bound *b, double weights_error,
                              struct canary_verdict *v)
{
    const struct visible seen = seen_of(c);
    for (uint32_t d = c->first; d < c->out_dim && !isnan(v->ratio);
         d += (c->out_dim - 1) / CANARY_PROJECTED + 1) {
        const float *w = c->weights + (size_t)(c->q_nope_dim + d) * c->dv;
        double expected = 0, size = 0, largest = 0;
        for (uint32_t i = 0; i < c->dv; i++) {
            expected += w[i] * want[i];
            size += fabs(w[i] * want[i]);
        }
        for (uint32_t j = 0; j < c->n_keys; j++) {
            double x = 0;
            for (uint32_t i = 0; i < c->dv && visible_has(&seen, j); i++)
                x += (double)w[i] * c->v[(size_t)j * c->dv + i];
            largest = fmax(largest, fabs(x));
        }
        const double rounding = (rounding_of(c->q_dtype) + SCORE_ROUNDING) * size;
        compare(c->got[d], expected,
                (b->atol + weights_error) * largest + rounding + b->atol * rounding_of(c->q_dtype) +
                    b->rtol * fabs(expected),
                d, v);
    }
}

attn_status canary_judge(const struct canary *c, struct canary_verdict *out)
{
    double want[CANARY_MAX_DIM], want_lse, largest, score_error;
    bool fits_f32, is_sure;
    struct reference_bound b = reference_bound_of(c->q_dtype, c->q_dtype);
    struct attn_layer_spec spec = c->spec;
    spec.sink_logits = spec.sink_logits != NULL ? &c->sink_logit : NULL;
    spec.alibi_slopes = spec.alibi_slopes != NULL ? &c->alibi_slope : NULL;
    sizes_of(c, &largest, &score_error, &fits_f32);
    if (!fits_f32) {
        *out = (struct canary_verdict){.ratio = NAN};
        return ATTN_OK;
    }
    attn_status st = compute(c, &spec, want, &want_lse, &is_sure);
    if (st != ATTN_OK)
        return st;
    if (!is_sure) {
        *out = (struct canary_verdict){.ratio = NAN};
        return ATTN_OK;
    }
    /* weights are off by a factor of e^error, so is their sum */
    const double weights_error = fmin(2, expm1(2 * score_error));
    double atol = b.atol * fmax(1, largest) + weights_error * largest;
    struct canary_verdict v = {.ratio = -1};
    if (c->q_nope_dim > 0)
        compare_projected(c, want, &b, weights_error, &v);
    for (uint32_t d = 0; d < c->dv && c->q_nope_dim == 0 && !isnan(v.ratio); d++)
        compare(c->got[d], want[d], atol + b.rtol * fabs(want[d]), d, &v);
    if (c->has_lse && !isnan(v.ratio))
        compare(c->got_lse, want_lse, b.lse_atol + b.lse_rtol * fabs(want_lse) + score_error,
                c->out_dim, &v);
    *out = v;
    return ATTN_OK;
}
