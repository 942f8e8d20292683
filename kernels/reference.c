/* reference.c: attention, rounding and quantisation in the plainest form that is right.
 *
 * Everything is float64 but quantisation, which is f32 operation by operation, so that all backends
 * can agree with it bit by bit. No state, no threads; allocates a score per key and head of a
 * group.
 */
#include "kernels/reference.h"

#include "kernels/kv_layout.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define MAX_DIM BACKEND_MAX_LATENT_K

static double f32_get(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* frexp and ldexp without their calls, which took most of the tests' time. */
static double power_of_two(int e) /* a normal number: -1022 <= e <= 1023 */
{
    uint64_t bits = (uint64_t)(e + 1023) << 52;
    double x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* e with |x| in [2^e, 2^(e+1)); -1023 for 0 and what is subnormal as a double. */
static int exponent_of(double x)
{
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    return (int)(bits >> 52 & 0x7ff) - 1023;
}

/* A float format of 16 bits or fewer, by its mantissa width and exponent bias. */
static double small_float_get(uint32_t bits, uint32_t mantissa_bits, uint32_t exponent_bits)
{
    int bias = (1 << (exponent_bits - 1)) - 1;
    uint32_t mantissa = bits & ((1u << mantissa_bits) - 1);
    uint32_t exponent = (bits >> mantissa_bits) & ((1u << exponent_bits) - 1);
    double sign = (bits >> (mantissa_bits + exponent_bits)) & 1 ? -1.0 : 1.0;
    if (exponent == 0)
        return sign * mantissa * power_of_two(1 - bias - (int)mantissa_bits);
    return sign * (mantissa | (1u << mantissa_bits)) *
           power_of_two((int)exponent - bias - (int)mantissa_bits);
}

/* x rounded to nearest even at a precision of mantissa_bits and a smallest normal exponent. */
static double round_to(double x, int mantissa_bits, int min_exponent)
{
    int e = exponent_of(x), step = (e < min_exponent ? min_exponent : e) - mantissa_bits;
    return nearbyint(x * power_of_two(-step)) * power_of_two(step);
}

static uint16_t half_put(double x, uint32_t mantissa_bits, uint32_t exponent_bits)
{
    int bias = (1 << (exponent_bits - 1)) - 1;
    uint16_t sign = (uint16_t)(signbit(x) ? 0x8000 : 0);
    uint16_t inf = (uint16_t)(((1u << exponent_bits) - 1) << mantissa_bits);
    if (isnan(x))
        return (uint16_t)(sign | inf | (1u << (mantissa_bits - 1)));
    double r = fabs(isinf(x) ? x : round_to(x, (int)mantissa_bits, 1 - bias));
    if (r == 0)
        return sign;
    int e = exponent_of(r);
    if (e > bias) /* of infinity, too */
        return sign | inf;
    if (e < 1 - bias) /* subnormal */
        return (uint16_t)(sign | (uint16_t)(r * power_of_two(bias - 1 + (int)mantissa_bits)));
    uint32_t mantissa =
        (uint32_t)(r * power_of_two((int)mantissa_bits - e)) - (1u << mantissa_bits);
    return (uint16_t)(sign | ((uint32_t)(e + bias) << mantissa_bits) | mantissa);
}

double reference_get(attn_dtype dtype, const void *array, size_t i)
{
    uint16_t h;
    if (dtype == ATTN_F32)
        return ((const float *)array)[i];
    memcpy(&h, (const char *)array + 2 * i, sizeof h);
    if (dtype == ATTN_BF16)
        return f32_get((uint32_t)h << 16);
    if ((h & 0x7c00) == 0x7c00)
        return h & 0x3ff ? NAN : h & 0x8000 ? -INFINITY : INFINITY;
    return small_float_get(h, 10, 5);
}

void reference_put(attn_dtype dtype, void *array, size_t i, double x)
{
    if (dtype == ATTN_F32) {
        ((float *)array)[i] = (float)x;
        return;
    }
    uint16_t h = dtype == ATTN_BF16 ? half_put(x, 7, 8) : half_put(x, 10, 5);
    memcpy((char *)array + 2 * i, &h, sizeof h);
}

static uint8_t e4m3_put(float x)
{
    uint8_t sign = signbit(x) ? 0x80 : 0;
    double r = fabs(round_to(x, 3, -6));
    if (r > 448)
        r = 448;
    if (r == 0)
        return sign;
    int e = exponent_of(r);
    if (e < -6)
        return (uint8_t)(sign | (uint8_t)(r * 512));
    return (uint8_t)(sign | (uint32_t)(e + 7) << 3 | ((uint32_t)(r * power_of_two(3 - e)) - 8));
}

static double e4m3_get(uint8_t code)
{
    return (code & 0x7f) == 0x7f ? NAN : small_float_get(code, 3, 4);
}

/* Of the codes' magnitudes the nearest, of two the even code. */
static uint8_t e2m1_put(float x)
{
    const float a = fabsf(x);
    const int code = (a > 0.25f) + (a >= 0.75f) + (a > 1.25f) + (a >= 1.75f) + (a > 2.5f) +
                     (a >= 3.5f) + (a > 5.0f);
    return (uint8_t)((signbit(x) ? 8 : 0) | code);
}

static double e8m0_get(uint8_t code)
{
    return code == 255 ? NAN : power_of_two(code - 127);
}

/* The code of the scale of a group whose largest magnitude is max. */
static uint8_t e8m0_of_max(float max)
{
    uint32_t bits;
    memcpy(&bits, &max, sizeof bits);
    const uint32_t e = (bits + 0x200000) >> 23; /* 1.75 and more count as 2 */
    return (uint8_t)(e > 254 ? 252 : e > 2 ? e - 2 : 0);
}

static float max_of(const double *row, uint32_t n)
{
    float max = 0;
    for (uint32_t i = 0; i < n; i++)
        max = fmaxf(max, fabsf((float)row[i]));
    return max;
}

static void fp4_quantise(attn_dtype kv_dtype, const double *row, uint32_t n, bool is_finite,
                         uint8_t *out_codes, uint8_t *out_scales)
{
    const uint32_t group = kv_group(kv_dtype);
    const bool is_nv = kv_dtype == ATTN_NVFP4;
    float of_row = is_finite ? max_of(row, n) / 2688.0f : NAN;
    uint8_t *of_groups = out_scales + (is_nv ? sizeof of_row : 0);
    memset(out_codes, 0, kv_row_bytes(kv_dtype, n));
    memset(out_scales, 0, kv_scale_bytes(kv_dtype, n));
    if (is_nv)
        memcpy(out_scales, &of_row, sizeof of_row);
    else if (!is_finite)
        memset(out_scales, 255, n / group);
    for (uint32_t g = 0; g < n / group && is_finite && (!is_nv || of_row > 0); g++) {
        const float max = max_of(row + (size_t)g * group, group);
        float scale;
        of_groups[g] = is_nv ? e4m3_put(max / of_row / 6.0f) : e8m0_of_max(max);
        scale = is_nv ? (float)e4m3_get(of_groups[g]) * of_row : (float)e8m0_get(of_groups[g]);
        for (uint32_t i = g * group; i < (g + 1) * group && scale > 0; i++)
            out_codes[i / 2] |= (uint8_t)(e2m1_put((float)row[i] / scale) << (i % 2 * 4));
    }
}

static void fp4_dequantise(attn_dtype kv_dtype, const uint8_t *codes, const uint8_t *scales,
                           uint32_t n, double *out_row)
{
    const bool is_nv = kv_dtype == ATTN_NVFP4;
    float of_row = 1;
    if (is_nv)
        memcpy(&of_row, scales, sizeof of_row);
    for (uint32_t i = 0; i < n; i++) {
        const uint8_t code = codes[i / 2] >> (i % 2 * 4) & 15;
        const uint8_t scale = scales[(is_nv ? sizeof of_row : 0) + i / kv_group(kv_dtype)];
        out_row[i] = small_float_get(code, 1, 2) * (is_nv ? e4m3_get(scale) : e8m0_get(scale));
        out_row[i] *= of_row;
    }
}

void reference_quantise(attn_dtype kv_dtype, const double *row, uint32_t n, uint8_t *out_codes,
                        void *out_scales)
{
    bool is_finite = true;
    for (uint32_t i = 0; i < n; i++)
        is_finite = is_finite && isfinite((float)row[i]);
    if (kv_group(kv_dtype) > 0) {
        fp4_quantise(kv_dtype, row, n, is_finite, out_codes, out_scales);
        return;
    }
    float scale = is_finite ? max_of(row, n) / (kv_dtype == ATTN_INT8 ? 127.0f : 448.0f) : NAN;
    for (uint32_t i = 0; i < n; i++) {
        float x = (float)row[i] / scale;
        if (!(scale > 0))
            out_codes[i] = 0;
        else if (kv_dtype == ATTN_INT8)
            out_codes[i] = (uint8_t)(int8_t)fminf(127, fmaxf(-127, nearbyintf(x)));
        else
            out_codes[i] = e4m3_put(isinf(x) ? copysignf(448, x) : x);
    }
    memcpy(out_scales, &scale, sizeof scale);
}

void reference_dequantise(attn_dtype kv_dtype, const uint8_t *codes, const void *scales, uint32_t n,
                          double *out_row)
{
    float scale;
    if (kv_group(kv_dtype) > 0) {
        fp4_dequantise(kv_dtype, codes, scales, n, out_row);
        return;
    }
    memcpy(&scale, scales, sizeof scale);
    for (uint32_t i = 0; i < n; i++) {
        double x = (int8_t)codes[i];
        if (kv_dtype == ATTN_FP8_E4M3)
            x = e4m3_get(codes[i]);
        out_row[i] = x * scale;
    }
}

void reference_cached_row(attn_dtype q_dtype, attn_dtype kv_dtype, const void *from, size_t at,
                          uint32_t n, float *out_row)
{
    double row[MAX_DIM];
    uint8_t codes[MAX_DIM], scales[MAX_DIM];
    for (uint32_t i = 0; i < n; i++)
        row[i] = reference_get(q_dtype, from, at + i);
    if (kv_dtype != q_dtype) {
        reference_quantise(kv_dtype, row, n, codes, scales);
        reference_dequantise(kv_dtype, codes, scales, n, row);
    }
    for (uint32_t i = 0; i < n; i++)
        out_row[i] = (float)row[i];
}

/* Does the query at p see the key at j? A window bounds how far back it sees, never how far
 * ahead. */
static bool is_visible(const struct attn_layer_spec *spec, uint32_t p, uint32_t j, uint32_t end)
{
    if (j >= (spec->is_full ? end : p + 1))
        return false;
    return spec->window_tokens == 0 || (uint64_t)j + spec->window_tokens > p ||
           j < spec->sink_tokens;
}

/* How often: once, or once for each branch of a dilated layer that has both. */
static uint32_t times_seen(const struct attn_layer_spec *spec, uint32_t kv_head, uint32_t p,
                           uint32_t j, uint32_t end)
{
    uint32_t n = 0;
    if (!is_visible(spec, p, j, end))
        return 0;
    for (uint32_t i = 0; i < spec->n_branches; i++) {
        uint32_t w = spec->branches[i].segment_tokens, r = spec->branches[i].rate;
        n += p / w == j / w && p % w % r == kv_head % r && j % w % r == kv_head % r;
    }
    return spec->n_branches == 0 ? 1 : n;
}

/* The position of token j, which is one of a tree's if it is not below pos. */
static uint32_t position_of(const struct reference_seen *x, uint32_t pos, uint32_t j)
{
    uint32_t depth = 0;
    if (x == NULL || x->parents == NULL || j < pos)
        return j;
    for (int32_t i = x->parents[j - pos]; i >= 0; i = x->parents[i])
        depth++;
    return pos + depth;
}

/* Is token j on the way from query t to the tree's root, or below pos? */
static bool is_on_path(const struct reference_seen *x, uint32_t pos, uint32_t t, uint32_t j)
{
    if (x == NULL || x->parents == NULL || j < pos)
        return true;
    int32_t i = (int32_t)t;
    while (i >= 0 && pos + (uint32_t)i != j)
        i = x->parents[i];
    return i >= 0;
}

/* Is token j one of those that query t visits? */
static bool is_listed(const struct reference_seen *x, uint32_t t, uint32_t j)
{
    if (x == NULL || x->starts == NULL)
        return true;
    for (uint32_t i = x->starts[t]; i < x->starts[t + 1]; i++)
        if (x->tokens[i] == j)
            return true;
    return false;
}

/* A row as float64; n is at most MAX_DIM. The dtype is looked at once for each row: tests spend
 * most of their time here. */
static void read_row(attn_dtype dtype, const void *array, size_t at, uint32_t n, double *out)
{
    if (dtype == ATTN_F32) {
        const float *row = (const float *)array + at;
        for (uint32_t i = 0; i < n; i++)
            out[i] = row[i];
        return;
    }
    for (uint32_t i = 0; i < n; i++)
        out[i] = reference_get(dtype, array, at + i);
}

static double score(const struct attn_layer_spec *spec, const double *q, const double *k,
                    uint32_t dk)
{
    double part[8] = {0}, s = 0; /* sums that need not wait for one another */
    uint32_t d = 0;
    for (; d + 8 <= dk; d += 8)
        for (uint32_t i = 0; i < 8; i++)
            part[i] += q[d + i] * k[d + i];
    for (; d < dk; d++)
        s += q[d] * k[d];
    for (uint32_t i = 0; i < 8; i++)
        s += part[i];
    s *= spec->scale;
    if (spec->soft_cap > 0)
        s = spec->soft_cap * tanh(s / spec->soft_cap);
    return s;
}

/* The heads that share a key and value head, at one query row: each row of K and of V is read once
 * for all of them. */
struct head_group {
    uint32_t n, first; /* heads */
    double *q; /* [n][dk] */
    double *s; /* [n][n_kv] scores */
    double *max, *sum; /* [n] */
    uint8_t *seen; /* [n_kv] how often each key counts */
};

/* lse[n] and out[n][dv] from the scores. */
static void attend_group(const struct attn_layer_spec *spec, const struct head_group *g,
                         uint32_t n_kv, attn_dtype dtype, const void *v, size_t v0, size_t v_stride,
                         uint32_t dv, double *out, double *lse)
{
    double row[MAX_DIM];
    for (uint32_t i = 0; i < g->n; i++) {
        const double sink = spec->sink_logits ? spec->sink_logits[g->first + i] : -INFINITY;
        double max = sink;
        for (uint32_t j = 0; j < n_kv; j++)
            if (g->seen[j] && !(g->s[i * n_kv + j] <= max))
                max = g->s[i * n_kv + j]; /* a NaN score becomes the maximum, and so the result */
        g->max[i] = max;
        g->sum[i] = max == -INFINITY ? 1 : exp(sink - max); /* 1: nothing is seen, out stays 0 */
    }
    for (uint32_t d = 0; d < g->n * dv; d++)
        out[d] = 0;
    for (uint32_t j = 0; j < n_kv; j++) {
        if (!g->seen[j])
            continue;
        read_row(dtype, v, v0 + j * v_stride, dv, row);
        for (uint32_t i = 0; i < g->n; i++) {
            if (g->max[i] == -INFINITY)
                continue;
            const double w = g->seen[j] * exp(g->s[i * n_kv + j] - g->max[i]);
            g->sum[i] += w;
            for (uint32_t d = 0; d < dv; d++)
                out[i * dv + d] += w * row[d];
        }
    }
    for (uint32_t i = 0; i < g->n; i++) {
        for (uint32_t d = 0; d < dv; d++)
            out[i * dv + d] /= g->sum[i];
        lse[i] = g->max[i] + log(g->sum[i]);
    }
}

attn_status reference_attend_seen(const struct attn_layer_spec *spec, uint32_t num_q_heads,
                                  uint32_t num_kv_heads, uint32_t dk, uint32_t dv, attn_dtype dtype,
                                  const void *q, uint32_t n_q, uint32_t pos, const void *k,
                                  const void *v, uint32_t n_kv, const struct reference_seen *x,
                                  double *out, double *lse)
{
    if (dk > MAX_DIM || dv > MAX_DIM)
        return ATTN_EINVAL;
    const uint32_t n = num_q_heads / num_kv_heads, end = pos + n_q < n_kv ? pos + n_q : n_kv;
    double *numbers = malloc(((size_t)n * (dk + n_kv + 3)) * sizeof *numbers);
    uint8_t *seen = malloc((size_t)n_kv + 1);
    struct head_group g = {.n = n, .q = numbers, .seen = seen};
    if (numbers == NULL || seen == NULL) {
        free(numbers);
        free(seen);
        return ATTN_ENOMEM;
    }
    g.max = g.q + (size_t)n * dk;
    g.sum = g.max + n;
    double *lse_row = g.sum + n;
    g.s = lse_row + n;
    for (uint32_t t = 0; t < n_q; t++) {
        const uint32_t p = position_of(x, pos, pos + t);
        for (uint32_t kv_head = 0; kv_head < num_kv_heads; kv_head++) {
            double k_row[MAX_DIM];
            g.first = kv_head * n;
            const size_t row = (size_t)t * num_q_heads + g.first;
            for (uint32_t i = 0; i < n; i++)
                read_row(dtype, q, (row + i) * dk, dk, g.q + (size_t)i * dk);
            for (uint32_t j = 0; j < n_kv; j++) {
                const uint32_t at = position_of(x, pos, j);
                seen[j] = (uint8_t)(is_on_path(x, pos, t, j) && is_listed(x, t, j)
                                        ? times_seen(spec, kv_head, p, at, end)
                                        : 0);
                if (!seen[j])
                    continue;
                read_row(dtype, k, ((size_t)j * num_kv_heads + kv_head) * dk, dk, k_row);
                for (uint32_t i = 0; i < n; i++) {
                    double *s = g.s + (size_t)i * n_kv + j;
                    *s = score(spec, g.q + (size_t)i * dk, k_row, dk);
                    if (spec->alibi_slopes)
                        *s += (double)spec->alibi_slopes[g.first + i] * ((double)at - (double)p);
                }
            }
            attend_group(spec, &g, n_kv, dtype, v, (size_t)kv_head * dv, (size_t)num_kv_heads * dv,
                         dv, out + row * dv, lse ? lse + row : lse_row);
        }
    }
    free(seen);
    free(numbers);
    return ATTN_OK;
}

attn_status reference_attend(const struct attn_layer_spec *spec, uint32_t num_q_heads,
                             uint32_t num_kv_heads, uint32_t dk, uint32_t dv, attn_dtype dtype,
                             const void *q, uint32_t n_q, uint32_t pos, const void *k,
                             const void *v, uint32_t n_kv, double *out, double *lse)
{
    return reference_attend_seen(spec, num_q_heads, num_kv_heads, dk, dv, dtype, q, n_q, pos, k, v,
                                 n_kv, NULL, out, lse);
}

static double rounded(attn_dtype d, double x)
{
    uint8_t bytes[sizeof(float)];
    reference_put(d, bytes, 0, x);
    return reference_get(d, bytes, 0);
}

void reference_absorb(const struct backend_pool_config *c, const float *w, const float *q,
                      float *out_q)
{
    const uint32_t dv = c->head_dim_v;
    double sums[BACKEND_MAX_HEAD_DIM] = {0};
    for (uint32_t i = 0; i < c->q_nope_dim; i++)
        for (uint32_t d = 0; d < dv; d++)
            sums[d] += (double)q[i] * (double)w[(size_t)i * dv + d];
    for (uint32_t d = 0; d < c->head_dim_k; d++)
        out_q[d] = d < dv ? (float)rounded(c->q_dtype, sums[d]) : q[c->q_nope_dim + d - dv];
}

void reference_expand(const struct backend_pool_config *c, const float *w, const double *latents,
                      double *out)
{
    double given[BACKEND_MAX_HEAD_DIM];
    for (uint32_t d = 0; d < c->head_dim_v; d++)
        given[d] = rounded(c->q_dtype, latents[d]);
    for (uint32_t i = 0; i < c->out_dim; i++) {
        out[i] = 0;
        for (uint32_t d = 0; d < c->head_dim_v; d++)
            out[i] += given[d] * (double)w[(size_t)(c->q_nope_dim + i) * c->head_dim_v + d];
    }
}

struct reference_bound reference_bound_of(attn_dtype q_dtype, attn_dtype kv_dtype)
{
    /* atol, rtol, l2, lse_atol, lse_rtol */
    if (kv_dtype == ATTN_NVFP4 || kv_dtype == ATTN_MXFP4)
        return (struct reference_bound){1.0, 0.3, 0.5, 1.0, 1e-4};
    if (kv_dtype == ATTN_FP8_E4M3)
        return (struct reference_bound){0.25, 0.1, 0.1, 0.25, 1e-4};
    if (kv_dtype == ATTN_INT8)
        return (struct reference_bound){0.06, 0.05, 0.03, 0.06, 1e-4};
    if (q_dtype == ATTN_F32)
        return (struct reference_bound){2e-5, 1e-4, 2e-5, 2e-4, 1e-4};
    if (q_dtype == ATTN_F16)
        return (struct reference_bound){2e-3, 2e-3, 1e-3, 2e-4, 1e-4};
    return (struct reference_bound){0.01, 0.01, 5e-3, 2e-4, 1e-4};
}

/* What no product of one of the q with one of the n keys passes. */
static double bound_of(uint32_t group, uint32_t dk, const float *q, const float *k, uint32_t n)
{
    double best = -INFINITY;
    for (uint32_t r = 0; r < group; r++) {
        double sum = 0;
        for (uint32_t d = 0; d < dk; d++) {
            double max = -INFINITY, min = INFINITY, x = (double)q[(size_t)r * dk + d];
            for (uint32_t j = 0; j < n; j++) {
                max = fmax(max, (double)k[(size_t)j * dk + d]);
                min = fmin(min, (double)k[(size_t)j * dk + d]);
            }
            sum += x > 0 ? x * max : x * min;
        }
        best = fmax(best, sum);
    }
    return best;
}

uint32_t reference_choose(uint32_t n_chosen, uint32_t block_tokens, uint32_t group, uint32_t dk,
                          const float *q, const float *k, uint32_t n_seen, uint32_t *out_tokens,
                          double *out_margin, bool *out_is_tied)
{
    const uint32_t newest = (n_seen - 1) / block_tokens;
    double *bounds = calloc(newest + 1, sizeof *bounds), last = INFINITY;
    bool *is_taken = calloc(newest + 1, sizeof *is_taken);
    uint32_t n = 0;
    bool is_tied = false;
    *out_margin = INFINITY;
    if (bounds == NULL || is_taken == NULL)
        goto out;
    is_taken[newest] = true;
    is_taken[0] |= n_chosen > 1;
    for (uint32_t i = 1; i < newest; i++) {
        is_taken[i] = n_chosen > newest;
        if (!is_taken[i])
            bounds[i] = bound_of(group, dk, q, k + (size_t)i * block_tokens * dk, block_tokens);
    }
    for (uint32_t taken = 2; taken < n_chosen && n_chosen <= newest; taken++) {
        uint32_t best = 0; /* of two with one bound the newer */
        for (uint32_t i = 1; i < newest; i++)
            if (!is_taken[i] && (best == 0 || bounds[i] >= bounds[best]))
                best = i;
        is_taken[best] = true;
        last = bounds[best];
    }
    for (uint32_t i = 1; i < newest && isfinite(last); i++) {
        is_tied |= !is_taken[i] && bounds[i] == last;
        if (!is_taken[i] && bounds[i] != last)
            *out_margin = fmin(*out_margin, last - bounds[i]);
    }
    if (out_is_tied != NULL)
        *out_is_tied = is_tied;
    for (uint32_t j = 0; j < n_seen; j++)
        if (is_taken[j / block_tokens])
            out_tokens[n++] = j;
out:
    free(bounds);
    free(is_taken);
    return n;
}
