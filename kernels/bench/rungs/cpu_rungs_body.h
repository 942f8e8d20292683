/* cpu_rungs_body.h: the body of cpu_rungs_*.c, which name ISA_NAME and ISA_SYMBOL. See cpu_rungs.h.
 */
#include "kernels/bench/rungs/cpu_rungs.h"
#include "kernels/cpu/vec.h"

#include <math.h>

#define WIDE 4 /* vectors of a row of results in registers */
#define PASS_ROWS 16
#define KEYS 64

static void product(float *c, uint64_t ldc, const float *a, uint64_t lda, const float *b,
                    uint64_t ldb, uint32_t m, uint32_t n, uint32_t k, bool is_added)
{
    for (uint32_t j = 0; j < n; j += WIDE * VEC)
        for (uint32_t i = 0; i < m; i += 4) {
            vf sum[4][WIDE];
            for (int r = 0; r < 4; r++)
                for (int w = 0; w < WIDE; w++)
                    sum[r][w] = is_added ? vf_load(c + (i + r) * ldc + j + w * VEC) : vf_set(0);
            for (uint32_t e = 0; e < k; e++) {
                vf x[WIDE];
                for (int w = 0; w < WIDE; w++)
                    x[w] = vf_load(b + e * ldb + j + w * VEC);
                for (int r = 0; r < 4; r++) {
                    const vf y = vf_set(a[(i + r) * lda + e]);
                    for (int w = 0; w < WIDE; w++)
                        sum[r][w] += y * x[w];
                }
            }
            for (int r = 0; r < 4; r++)
                for (int w = 0; w < WIDE; w++)
                    vf_store(c + (i + r) * ldc + j + w * VEC, sum[r][w]);
        }
}

/* Scores in base 2 become weights, not divided by their sum, which is returned. */
static float weigh(float *s, uint32_t n, float top)
{
    vf sum = vf_set(0);
    for (uint32_t j = 0; j < n; j += VEC) {
        const vf w = vf_exp2(vf_load(s + j) - top);
        sum += w;
        vf_store(s + j, w);
    }
    return vf_hsum(sum);
}

static float largest(const float *s, uint32_t n, float top)
{
    vf m = vf_set(top);
    for (uint32_t j = 0; j < n; j += VEC)
        m = vf_max(vf_load(s + j), m);
    return vf_hmax(m);
}

static void scale_row(float *x, uint32_t n, float f)
{
    for (uint32_t j = 0; j < n; j += VEC)
        vf_store(x + j, vf_load(x + j) * f);
}

static void vectorised(const struct cpu_rung_head *h, uint32_t row0, float *scores, float *out)
{
    for (uint32_t at = row0; at < row0 + CPU_RUNG_ROWS; at += PASS_ROWS) {
        product(scores, h->n, h->q + (size_t)at * h->dim, h->dim, h->kt, h->n, PASS_ROWS, h->n,
                h->dim, false);
        for (uint32_t r = 0; r < PASS_ROWS; r++) {
            float *s = scores + (size_t)r * h->n;
            scale_row(s, h->n, 1 / weigh(s, h->n, largest(s, h->n, -INFINITY)));
        }
        product(out + (size_t)at * h->dim, h->dim, scores, h->n, h->v, h->dim, PASS_ROWS, h->dim,
                h->n, false);
    }
}

static void fused(const struct cpu_rung_head *h, uint32_t row0, float *out)
{
    float s[CPU_RUNG_ROWS * KEYS], top[CPU_RUNG_ROWS], sum[CPU_RUNG_ROWS];
    float *o = out + (size_t)row0 * h->dim;
    for (uint32_t key = 0; key < h->n; key += KEYS) {
        product(s, KEYS, h->q + (size_t)row0 * h->dim, h->dim, h->kt + key, h->n, CPU_RUNG_ROWS,
                KEYS, h->dim, false);
        for (uint32_t r = 0; r < CPU_RUNG_ROWS; r++) {
            const float m = largest(s + r * KEYS, KEYS, key > 0 ? top[r] : -INFINITY);
            if (key > 0 && m > top[r]) {
                const float f = exp2f(top[r] - m);
                sum[r] *= f;
                scale_row(o + (size_t)r * h->dim, h->dim, f);
            }
            top[r] = m;
            sum[r] = (key > 0 ? sum[r] : 0) + weigh(s + r * KEYS, KEYS, m);
        }
        product(o, h->dim, s, KEYS, h->v + (size_t)key * h->dim, h->dim, CPU_RUNG_ROWS, h->dim,
                KEYS, key > 0);
    }
    for (uint32_t r = 0; r < CPU_RUNG_ROWS; r++)
        scale_row(o + (size_t)r * h->dim, h->dim, 1 / sum[r]);
}

const struct cpu_rung_isa ISA_SYMBOL = {
    .name = ISA_NAME, .vectorised = vectorised, .fused = fused, .product = product};
