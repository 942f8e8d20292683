/* append.c: writes k and v of new tokens into their blocks, copies whole blocks.
 *
 * Parts of the job are (item, token) and copies; no two parts of one job write the same bytes.
 * Small jobs are done by the engine thread alone, which costs less than waking the others.
 */
#include "kernels/cpu/cpu.h"

#include <math.h>
#include <stdatomic.h>
#include <string.h>

#define ALONE_BYTES (128 << 10)
#define TOKENS_A_PART 8

static float half_get(uint16_t h)
{
    uint32_t bits = (uint32_t)(h & 0x7fff) << 13, special = 0x7f800000, sign = (h & 0x8000u) << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    x *= 0x1p112f;
    memcpy(&bits, &x, sizeof x);
    bits |= sign | ((h & 0x7c00) == 0x7c00 ? special : 0);
    memcpy(&x, &bits, sizeof x);
    return x;
}

static void widen(attn_dtype dtype, const uint8_t *from, uint32_t n, float *to)
{
    if (dtype == ATTN_F32) {
        memcpy(to, from, n * sizeof(float));
        return;
    }
    uint16_t h[MAX_K_DIM];
    memcpy(h, from, n * sizeof *h);
    for (uint32_t i = 0; i < n; i++) {
        uint32_t bits = (uint32_t)h[i] << 16;
        if (dtype == ATTN_F16)
            to[i] = half_get(h[i]);
        else
            memcpy(&to[i], &bits, sizeof bits);
    }
}

/* |x| <= 448: round to 3 mantissa bits; below 2^-6 the step is 2^-9, which adding 2^14 leaves. */
static uint8_t e4m3_of(float x)
{
    uint32_t bits, sign;
    memcpy(&bits, &x, sizeof bits);
    sign = bits >> 24 & 0x80;
    float a = fminf(fabsf(x), 448.0f);
    if (a < 0x1p-6f) {
        a += 0x1p14f;
        memcpy(&bits, &a, sizeof bits);
        return (uint8_t)(sign | (bits - 0x46800000));
    }
    memcpy(&bits, &a, sizeof bits);
    bits += 0x7ffff + (bits >> 20 & 1);
    return (uint8_t)(sign | ((bits >> 20) - (120 << 3)));
}

static float e4m3_get(uint8_t code) /* not negative, not NaN's */
{
    uint32_t bits = (uint32_t)code << 20;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x * 0x1p120f;
}

static uint32_t e2m1_of(float x)
{
    const float a = fabsf(x);
    return (signbit(x) ? 8u : 0u) + (a > 0.25f) + (a >= 0.75f) + (a > 1.25f) + (a >= 1.75f) +
           (a > 2.5f) + (a >= 3.5f) + (a > 5.0f);
}

static float e8m0_get(uint8_t code)
{
    uint32_t bits = code == 0 ? 0x400000 : (uint32_t)code << 23;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* Of a group whose largest magnitude is max: its power of two, 1.75 and more counting as 2, so that
 * it becomes 4 or 6; no more than leaves values finite. */
static uint8_t e8m0_of_max(float max)
{
    uint32_t bits;
    memcpy(&bits, &max, sizeof bits);
    bits = (bits + 0x200000) >> 23;
    return (uint8_t)(bits > 254 ? 252 : bits > 2 ? bits - 2 : 0);
}

/* The groups of a row that has no NaN or inf; of_row: nvfp4's f32 scale. */
static void quantise_groups(attn_dtype kv_dtype, const float *x, uint32_t n, float of_row,
                            uint8_t *codes, uint8_t *scales)
{
    const uint32_t group = kv_group(kv_dtype);
    const bool is_nv = kv_dtype == ATTN_NVFP4;
    for (uint32_t g = 0; g < n / group; g++, x += group, codes += group / 2) {
        float max = 0;
        for (uint32_t i = 0; i < group; i++)
            max = fmaxf(max, fabsf(x[i]));
        scales[g] = is_nv ? e4m3_of(max / of_row / 6.0f) : e8m0_of_max(max);
        const float scale = is_nv ? e4m3_get(scales[g]) * of_row : e8m0_get(scales[g]);
        for (uint32_t i = 0; i < group && scale > 0; i += 2)
            codes[i / 2] = (uint8_t)(e2m1_of(x[i] / scale) | e2m1_of(x[i + 1] / scale) << 4);
    }
}

static void quantise_fp4(attn_dtype kv_dtype, const float *x, uint32_t n, float max, bool is_finite,
                         uint8_t *codes, uint8_t *scales)
{
    const bool is_nv = kv_dtype == ATTN_NVFP4;
    const float of_row = is_finite ? max / 2688.0f : NAN;
    memset(codes, 0, kv_row_bytes(kv_dtype, n));
    memset(scales, 0, kv_scale_bytes(kv_dtype, n));
    if (is_nv)
        memcpy(scales, &of_row, sizeof of_row);
    else if (!is_finite)
        memset(scales, 255, n / kv_group(kv_dtype));
    if (is_finite && (!is_nv || of_row > 0))
        quantise_groups(kv_dtype, x, n, of_row, codes, scales + (is_nv ? sizeof of_row : 0));
}

/* As reference_quantise, in f32. */
static void quantise(attn_dtype kv_dtype, const float *x, uint32_t n, uint8_t *codes,
                     uint8_t *out_scales)
{
    float max = 0, poison = 0;
    for (uint32_t i = 0; i < n; i++) {
        max = fmaxf(max, fabsf(x[i]));
        poison += x[i] * 0; /* NaN if any is NaN or inf */
    }
    if (kv_group(kv_dtype) > 0) {
        quantise_fp4(kv_dtype, x, n, max, poison == 0, codes, out_scales);
        return;
    }
    const float scale = max / (kv_dtype == ATTN_INT8 ? 127.0f : 448.0f) + poison;
    memcpy(out_scales, &scale, sizeof scale);
    if (!(scale > 0)) {
        memset(codes, 0, n);
        return;
    }
    if (kv_dtype == ATTN_INT8) {
        for (uint32_t i = 0; i < n; i++)
            codes[i] = (uint8_t)(int8_t)fminf(127, fmaxf(-127, rintf(x[i] / scale)));
        return;
    }
    for (uint32_t i = 0; i < n; i++)
        codes[i] = e4m3_of(x[i] / scale);
}

static void append_token(const struct backend_pool *p, const struct backend_item *item, uint32_t t)
{
    const struct attend_geometry *g = &p->geometry;
    float row[MAX_K_DIM];
    uint8_t *scales;
    for (uint32_t h = 0; h < p->config.num_kv_heads; h++) {
        for (int is_v = 0; is_v < (p->config.is_v_in_k ? 1 : 2); is_v++) {
            uint32_t n = is_v ? g->dv : g->dk;
            size_t bytes = n * attn_dtype_bytes(g->q_dtype);
            const uint8_t *from = is_v ? item->v : item->k;
            from += ((size_t)t * p->config.num_kv_heads + h) * bytes;
            uint8_t *to = cpu_row(p, item, item->pos + t, h, is_v, &scales);
            if (scales == NULL) {
                memcpy(to, from, bytes);
                continue;
            }
            widen(g->q_dtype, from, n, row);
            quantise(g->kv_dtype, row, n, to, scales);
        }
    }
}

struct append_job {
    const struct backend_batch *batch;
    _Atomic uint32_t next_copy, next_item;
};

static void do_copies(void *arg, uint32_t thread)
{
    (void)thread;
    struct append_job *job = arg;
    const struct backend_pool *p = job->batch->pool;
    uint64_t bytes = p->geometry.layout.block_bytes;
    uint32_t i;
    while ((i = atomic_fetch_add(&job->next_copy, 1)) < job->batch->n_copies)
        if (job->batch->copies[i].dst < p->config.n_blocks)
            memcpy(p->base + job->batch->copies[i].dst * bytes,
                   p->base + job->batch->copies[i].src * bytes, bytes);
}

/* Every thread walks all items and takes the parts whose number it draws. */
static void do_appends(void *arg, uint32_t thread)
{
    (void)thread;
    struct append_job *job = arg;
    uint32_t mine = atomic_fetch_add(&job->next_item, 1), part = 0;
    for (uint32_t i = 0; i < job->batch->n_items; i++) {
        const struct backend_item *item = &job->batch->items[i];
        if ((item->flags & BACKEND_APPEND) == 0)
            continue;
        for (uint32_t t = 0; t < item->n_tokens; t += TOKENS_A_PART, part++) {
            if (part != mine)
                continue;
            for (uint32_t j = t; j < t + TOKENS_A_PART && j < item->n_tokens; j++)
                append_token(job->batch->pool, item, j);
            mine = atomic_fetch_add(&job->next_item, 1);
        }
    }
}

static void run(struct backend *b, cpu_job_fn fn, struct append_job *job, uint64_t bytes)
{
    if (bytes <= ALONE_BYTES)
        fn(job, 0);
    else
        cpu_threads_run(b->threads, fn, job);
}

void cpu_append(struct backend *b, const struct backend_batch *batch)
{
    struct append_job job = {.batch = batch};
    const struct backend_pool_config *c = &batch->pool->config;
    uint64_t n_tokens = 0;
    for (uint32_t i = 0; i < batch->n_items; i++)
        if (batch->items[i].flags & BACKEND_APPEND) {
            n_tokens += batch->items[i].n_tokens;
            cpu_extremes_forget_item(batch->pool, &batch->items[i]);
        }
    for (uint32_t i = 0; i < batch->n_copies; i++)
        if (batch->copies[i].dst < c->n_blocks)
            cpu_extremes_forget(batch->pool, batch->copies[i].dst);
    if (batch->n_copies > 0)
        run(b, do_copies, &job, batch->n_copies * batch->pool->geometry.layout.block_bytes);
    if (n_tokens > 0)
        run(b, do_appends, &job,
            n_tokens * c->num_kv_heads * kv_stored_elements(c) * attn_dtype_bytes(c->q_dtype));
}
