/* canary_judge.c: compares the copied row with the float64 reference.
 *
 * The bounds of reference.h are for values of about unit size, but live values vary. So the
 * absolute bound grows with the largest |v|, since the output is a mean of them, and with the
 * rounding of scores, which grows with |q| |k|. Devices compute in f32: where products or sums of
 * the worker's finite values may leave its range, an output says nothing about the device. Nor does
 * it where rounding may have chosen another block: two blocks' bounds are equal, or almost. */
#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/engine/step/canary.h"
#include "kernels/reference.h"

static const double SCORE_ROUNDING = 0x1p-20; /* generous for a dot product in f32 */
static const double FEW = 4; /* of 512 sums of f32 so many are hardly ever between two values */
static const double LARGEST_CODE = 448; /* of nvfp4 six times that, with the E4M3 scale */
static const double LARGEST_WEIGHT = 256; /* kernels' maxima may lag behind by 2^8 */

/* Of one element, to either side. */
static double rounding_of(attn_dtype d)
{
    return d == ATTN_BF16 ? 0x1p-8 : d == ATTN_F16 ? 0x1p-11 : 0x1p-24;
}

/* Rows [first, first + n) of the h-th head's weights, [n][dv]. */
static void weights_of(const struct canary *c, uint32_t h, uint32_t first, uint32_t n, float *out)
{
    const size_t at = ((size_t)h * (c->q_nope_dim + c->out_dim) + first) * c->dv;
    for (size_t i = 0; i < (size_t)n * c->dv; i++)
        out[i] = (float)reference_get(c->q_dtype, c->weights, at + i);
}

/* How far a device's q may be from the reference's, whatever rounds it. */
struct q_error {
    double length; /* of all elements together: sums are in f32 */
    double
        element; /* of a few: where a sum is between two values of q_dtype, it may have the other */
};

/* A head's q, as it attends. w: its weights. */
static struct q_error project_q(const struct canary *c, const float *w, const float *given,
                                float *q)
{
    const uint32_t nope = c->q_nope_dim;
    double sums = 0, largest = 0;
    for (uint32_t d = 0; d < c->dv; d++) {
        double sum = 0, size = 0;
        for (uint32_t i = 0; i < nope; i++) {
            const double x = (double)given[i] * w[(size_t)i * c->dv + d];
            sum += x;
            size += fabs(x);
        }
        uint8_t rounded[4];
        reference_put(c->q_dtype, rounded, 0, sum);
        q[d] = (float)reference_get(c->q_dtype, rounded, 0);
        sums += size * size;
        largest = fmax(largest, fabs(sum));
    }
    for (uint32_t d = c->dv; d < c->dk; d++)
        q[d] = given[d - c->dv + nope];
    return (struct q_error){SCORE_ROUNDING * sqrt(sums),
                            FEW * 2 * rounding_of(c->q_dtype) * largest};
}

static double length_of(const float *row, uint32_t n)
{
    double sum = 0;
    for (uint32_t d = 0; d < n; d++)
        sum += (double)row[d] * row[d];
    return sqrt(sum);
}

/* Of what the row sees. */
struct sizes {
    double v, k, length; /* the largest |element| of v and k, the longest k */
};

static struct sizes sizes_of(const struct canary *c)
{
    struct visible seen = canary_visible(c);
    struct sizes s = {0};
    for (uint32_t j = 0; j < c->n_keys; j++) {
        if (!visible_has(&seen, j))
            continue;
        s.length = fmax(s.length, length_of(c->k + (size_t)j * c->dk, c->dk));
        for (uint32_t d = 0; d < c->dk; d++)
            s.k = fmax(s.k, fabs(c->k[(size_t)j * c->dk + d]));
        for (uint32_t d = 0; d < c->dv; d++)
            s.v = fmax(s.v, fabs(c->v[(size_t)j * c->dv + d]));
    }
    return s;
}

/* How far scores of the h-th head may be off; infinite where f32 has no room for all on the way. */
static double score_error_of(const struct canary *c, uint32_t h, const float *q, struct q_error off,
                             struct sizes s)
{
    double length = length_of(q, c->dk), product = length * s.length;
    double score = product * c->spec.scale;
    double code = c->kv_dtype == ATTN_NVFP4 ? 6 * LARGEST_CODE : LARGEST_CODE;
    double codes = c->layout.is_quantised ? length * code * sqrt(c->dk) : 0;
    double slope = c->spec.alibi_slopes != NULL ? fabs(c->spec.alibi_slopes[h]) : 0;
    double bias = slope * c->n_keys;
    if (!(fmax(product, codes) < FLT_MAX / 4 && score + bias < BACKEND_MAX_SCORE &&
          s.v * c->n_keys * LARGEST_WEIGHT < FLT_MAX / 4))
        return INFINITY;
    return SCORE_ROUNDING * (score + bias + c->spec.soft_cap) +
           (off.length * s.length + off.element * s.k) * c->spec.scale;
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
        *v = (struct canary_verdict){ratio, got, expected, v->head, element};
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

/* What the reference gives for the row, and what it was given: of each head. */
struct expected {
    float *q; /* [n_heads][dk] as it attends */
    struct q_error *q_error; /* [n_heads] */
    double *out, *lse; /* [n_heads][dv], [n_heads] */
    float *weights; /* room for those of a head */
    bool is_sure; /* of the tokens that a device visits */
};

static void expected_free(struct expected *x)
{
    free(x->q);
    free(x->q_error);
    free(x->out);
    free(x->lse);
    free(x->weights);
}

static attn_status expected_take(const struct canary *c, struct expected *x)
{
    const size_t n = c->n_heads, most = c->q_nope_dim > c->out_dim ? c->q_nope_dim : c->out_dim;
    const size_t row = (size_t)(c->n_queries - 1) * c->num_q_heads + c->head;
    x->q = malloc(n * c->dk * sizeof *x->q);
    x->q_error = calloc(n, sizeof *x->q_error);
    x->out = malloc(n * c->dv * sizeof *x->out);
    x->lse = malloc(n * sizeof *x->lse);
    x->weights = c->weights != NULL ? malloc(most * c->dv * sizeof *x->weights) : NULL;
    if (x->q == NULL || x->q_error == NULL || x->out == NULL || x->lse == NULL ||
        (c->weights != NULL && x->weights == NULL))
        return ATTN_ENOMEM;
    for (uint32_t h = 0; h < n; h++) {
        float given[CANARY_MAX_DIM], *q = x->q + (size_t)h * c->dk;
        for (uint32_t d = 0; d < c->q_dim; d++)
            given[d] = (float)reference_get(c->q_dtype, c->queries, (row + h) * c->q_dim + d);
        if (c->weights == NULL) {
            memcpy(q, given, c->dk * sizeof *q);
            continue;
        }
        weights_of(c, h, 0, c->q_nope_dim, x->weights);
        x->q_error[h] = project_q(c, x->weights, given, q);
    }
    return ATTN_OK;
}

static attn_status compute(const struct canary *c, struct expected *x)
{
    uint32_t starts[2] = {0, 0}, *list = NULL;
    attn_status st = expected_take(c, x);
    x->is_sure = true;
    if (st == ATTN_OK && c->n_chosen > 0) {
        list = malloc(c->n_keys * sizeof *list);
        st = list == NULL ? ATTN_ENOMEM : visited(c, list, &starts[1]);
        x->is_sure = starts[1] > 0;
    }
    const struct reference_seen seen = {.starts = list != NULL ? starts : NULL, .tokens = list};
    if (st == ATTN_OK && x->is_sure)
        st = reference_attend_seen(&c->spec, c->n_heads, 1, c->dk, c->dv, ATTN_F32, x->q, 1, c->pos,
                                   c->k, c->v, c->n_keys, &seen, x->out, x->lse);
    free(list);
    return st;
}

/* The largest of what the row's keys' latents are projected to by a row of weights. */
static double largest_projected(const struct canary *c, const float *w)
{
    const struct visible seen = canary_visible(c);
    double largest = 0;
    for (uint32_t j = 0; j < c->n_keys; j++) {
        double x = 0;
        for (uint32_t i = 0; i < c->dv && visible_has(&seen, j); i++)
            x += (double)w[i] * c->v[(size_t)j * c->dv + i];
        largest = fmax(largest, fabs(x));
    }
    return largest;
}

/* Compares what the projection makes of the h-th head's latents. A device's latents are a mean of
 * those of the keys, each by a weight that is off, then rounded; so its output is a mean of what
 * the keys' latents are projected to, and the bound is that of a mean of these. Where an output is
 * off by no more than the rounding explains, they are not looked for. */
static void compare_projected(const struct canary *c, struct expected *x, uint32_t h,
                              const struct reference_bound *b, double weights_error,
                              struct canary_verdict *v)
{
    const double *latents = x->out + (size_t)h * c->dv;
    const float *got = c->got + (size_t)h * c->out_dim;
    weights_of(c, h, c->q_nope_dim, c->out_dim, x->weights);
    for (uint32_t d = 0; d < c->out_dim && !isnan(v->ratio); d++) {
        const float *w = x->weights + (size_t)d * c->dv;
        double expected = 0, size = 0;
        for (uint32_t i = 0; i < c->dv; i++) {
            expected += w[i] * latents[i];
            size += fabs(w[i] * latents[i]);
        }
        double bound = (rounding_of(c->q_dtype) + SCORE_ROUNDING) * size +
                       b->atol * rounding_of(c->q_dtype) + b->rtol * fabs(expected);
        if (!(fabs(got[d] - expected) <= bound))
            bound += (b->atol + weights_error) * largest_projected(c, w);
        compare(got[d], expected, bound, d, v);
    }
}

static struct canary_verdict judge_head(const struct canary *c, struct expected *x, uint32_t h,
                                        double largest, double score_error)
{
    const struct reference_bound b = reference_bound_of(c->q_dtype, c->q_dtype);
    /* weights are off by a factor of e^error, so is their sum */
    const double weights_error = fmin(2, expm1(2 * score_error));
    const double atol = b.atol * fmax(1, largest) + weights_error * largest;
    const double *want = x->out + (size_t)h * c->dv;
    const float *got = c->got + (size_t)h * c->out_dim;
    struct canary_verdict v = {.ratio = -1, .head = c->head + h};
    if (c->weights != NULL)
        compare_projected(c, x, h, &b, weights_error, &v);
    for (uint32_t d = 0; d < c->dv && c->weights == NULL && !isnan(v.ratio); d++)
        compare(got[d], want[d], atol + b.rtol * fabs(want[d]), d, &v);
    if (c->has_lse && !isnan(v.ratio))
        compare(c->got[(size_t)c->n_heads * c->out_dim + h], x->lse[h],
                b.lse_atol + b.lse_rtol * fabs(x->lse[h]) + score_error, c->out_dim, &v);
    return v;
}

attn_status canary_judge(const struct canary *c, struct canary_verdict *out)
{
    struct expected x = {0};
    struct canary_verdict worst = {.ratio = NAN};
    attn_status st = compute(c, &x);
    const struct sizes s = sizes_of(c);
    for (uint32_t h = 0; st == ATTN_OK && x.is_sure && h < c->n_heads; h++) {
        const double error = score_error_of(c, h, x.q + (size_t)h * c->dk, x.q_error[h], s);
        if (isinf(error))
            continue;
        const struct canary_verdict v = judge_head(c, &x, h, s.v, error);
        if (v.ratio > worst.ratio || isnan(worst.ratio))
            worst = v;
    }
    expected_free(&x);
    if (st == ATTN_OK)
        *out = worst;
    return st;
}
