/* rungs_cpu.c: the table of rungs.h for the CPU. Streams are one: what is asked for is done at
 * once.
 *
 * The naive rung walks one row of Q after another with one float after another; the others
 * (cpu_rungs.h) first bring q, k and v, of whatever type, to f32 by heads, K transposed, which
 * their time includes. Threads take 64 rows of one head at a time.
 */
#include "kernels/bench/rungs/cpu_rungs.h"
#include "kernels/bench/rungs/rungs.h"
#include "kernels/cpu/isa.h"
#include "kernels/cpu/threads.h"
#include "proto/attn_time.h"

#include <math.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define LOG2E 1.4426950408889634f
#define PRODUCT_ROWS 16 /* of a matrix product that a thread takes at a time */

struct rungs {
    struct cpu_threads *threads;
    const struct cpu_rung_isa *isa;
    uint64_t marks[RUNG_MARKS];
    char *evict;
    size_t evict_bytes;
    float *product; /* a, b and c as f32 */
    uint64_t product_floats;
    char error[256];
};

static attn_status fail(struct rungs *r, attn_status st, const char *words)
{
    snprintf(r->error, sizeof r->error, "%s", words);
    return st;
}

static attn_status cpu_open(uint32_t n_threads, struct rungs **out_r)
{
    const struct cpu_isa *isas[4];
    const long cache = sysconf(_SC_LEVEL3_CACHE_SIZE);
    struct rungs *r = calloc(1, sizeof *r);
    *out_r = r;
    if (r == NULL)
        return ATTN_ENOMEM;
    r->isa = &cpu_rungs_portable;
#if defined(ATTND_CPU_X86)
    const uint32_t n = cpu_isa_supported(isas);
    r->isa = n >= 3 ? &cpu_rungs_avx512 : n == 2 ? &cpu_rungs_avx2 : r->isa;
#else
    (void)isas;
#endif
    r->evict_bytes = cache > (16 << 20) ? 4 * (size_t)cache : 64 << 20;
    r->evict = calloc(1, r->evict_bytes);
    if (r->evict == NULL || cpu_threads_open(n_threads, &r->threads) != ATTN_OK)
        return fail(r, ATTN_ENOMEM, "no memory for threads and for emptying the caches");
    return ATTN_OK;
}

static void cpu_close(struct rungs *r)
{
    if (r == NULL)
        return;
    cpu_threads_close(r->threads);
    free(r->evict);
    free(r->product);
    free(r);
}

static const char *cpu_last_error(const struct rungs *r)
{
    return r == NULL ? "no memory" : r->error;
}

static const char *cpu_matmul_name(const struct rungs *r)
{
    (void)r;
    return "ours";
}

static uint32_t cpu_matmul_size(const struct rungs *r)
{
    (void)r;
    return 1024;
}

/* ---- memory, streams, marks */

static attn_status cpu_alloc(struct rungs *r, uint64_t bytes, void **out_p)
{
    *out_p = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
    return *out_p != NULL ? ATTN_OK : fail(r, ATTN_ENOMEM, "out of memory");
}

static void cpu_free(struct rungs *r, void *p)
{
    (void)r;
    free(p);
}

static attn_status cpu_copy(struct rungs *r, void *dst, const void *src, uint64_t bytes,
                            uint32_t stream)
{
    (void)r, (void)stream;
    memcpy(dst, src, bytes);
    return ATTN_OK;
}

static attn_status cpu_fill(struct rungs *r, void *dst, int byte, uint64_t bytes, uint32_t stream)
{
    (void)r, (void)stream;
    memset(dst, byte, bytes);
    return ATTN_OK;
}

static void *cpu_stream(struct rungs *r, uint32_t stream)
{
    (void)r, (void)stream;
    return NULL;
}

static attn_status cpu_wait(struct rungs *r, uint32_t stream)
{
    (void)r, (void)stream;
    return ATTN_OK;
}

static attn_status cpu_follow(struct rungs *r, uint32_t stream, uint32_t other)
{
    (void)r, (void)stream, (void)other;
    return ATTN_OK;
}

static attn_status cpu_mark(struct rungs *r, uint32_t mark, uint32_t stream)
{
    (void)stream;
    r->marks[mark] = attn_now_ns();
    return ATTN_OK;
}

static attn_status cpu_elapsed(struct rungs *r, uint32_t from, uint32_t to, uint64_t *out_ns)
{
    *out_ns = r->marks[to] - r->marks[from];
    return ATTN_OK;
}

static attn_status cpu_evict(struct rungs *r, uint32_t stream)
{
    (void)stream;
    for (size_t i = 0; i < r->evict_bytes; i += 64)
        ((volatile char *)r->evict)[i]++;
    return ATTN_OK;
}

/* ---- elements */

static float load(bool is_f32, const void *x, size_t at)
{
    uint32_t u;
    float f;
    if (is_f32)
        return ((const float *)x)[at];
    u = (uint32_t)((const uint16_t *)x)[at] << 16;
    memcpy(&f, &u, sizeof f);
    return f;
}

static void store(bool is_f32, void *x, size_t at, float f)
{
    uint32_t u;
    if (is_f32) {
        ((float *)x)[at] = f;
        return;
    }
    memcpy(&u, &f, sizeof u);
    if (f == f) /* to nearest even */
        u += 0x7fff + (u >> 16 & 1);
    ((uint16_t *)x)[at] = (uint16_t)(u >> 16);
}

/* ---- attention */

struct rung_work {
    struct bench_work work;
    struct rungs *r;
    struct rung_call c;
    /* scratch: q, k and v by heads, what is computed by heads, scores of each thread */
    float *q, *kt, *v, *out, *scores;
    _Atomic uint32_t next; /* unit of work */
};

static uint64_t elements_of(const struct rung_call *c)
{
    return (uint64_t)c->batch * c->n * c->heads * c->dim;
}

/* Where token `row` of head `head` (of batch * heads) begins. */
static size_t token_at(const struct rung_call *c, uint32_t head, uint32_t row)
{
    const size_t token = (size_t)(head / c->heads) * c->n + row;
    return (token * c->heads + head % c->heads) * c->dim;
}

static uint64_t cpu_scratch_bytes(const struct rungs *r, const struct rung_call *c)
{
    const uint64_t scores = (uint64_t)cpu_threads_count(r->threads) * 16 * c->n * sizeof(float);
    return (c->rung == RUNG_NAIVE ? 0 : elements_of(c) * 4 * sizeof(float)) +
           (c->rung == RUNG_MATRIX ? 0 : scores);
}

static void naive_row(const struct rung_call *c, uint32_t head, uint32_t row, float *s)
{
    float top = -INFINITY, sum = 0;
    for (uint32_t key = 0; key < c->n; key++) {
        const size_t q = token_at(c, head, row), k = token_at(c, head, key);
        s[key] = 0;
        for (uint32_t e = 0; e < c->dim; e++)
            s[key] += load(c->is_f32, c->q, q + e) * load(c->is_f32, c->k, k + e);
        s[key] *= c->scale;
        top = s[key] > top ? s[key] : top;
    }
    for (uint32_t key = 0; key < c->n; key++)
        sum += s[key] = expf(s[key] - top);
    for (uint32_t e = 0; e < c->dim; e++) {
        float o = 0;
        for (uint32_t key = 0; key < c->n; key++)
            o += s[key] * load(c->is_f32, c->v, token_at(c, head, key) + e);
        store(c->is_f32, c->out, token_at(c, head, row) + e, o / sum);
    }
}

/* One unit after another: 64 rows of one head. */
static void attend_units(void *arg, uint32_t thread)
{
    struct rung_work *w = arg;
    const struct rung_call *c = &w->c;
    const uint32_t a_head = c->n / CPU_RUNG_ROWS, n = c->batch * c->heads * a_head;
    const size_t head_floats = (size_t)c->n * c->dim;
    float *scores = w->scores + (size_t)thread * 16 * c->n;
    uint32_t unit;
    while ((unit = atomic_fetch_add(&w->next, 1)) < n) {
        const uint32_t head = unit / a_head, row0 = unit % a_head * CPU_RUNG_ROWS;
        const struct cpu_rung_head h = {w->q + head * head_floats, w->kt + head * head_floats,
                                        w->v + head * head_floats, c->n, c->dim};
        float *out = w->out + head * head_floats;
        if (c->rung == RUNG_NAIVE) {
            for (uint32_t row = row0; row < row0 + CPU_RUNG_ROWS; row++)
                naive_row(c, head, row, scores);
            continue;
        }
        if (c->rung == RUNG_VECTORISED)
            w->r->isa->vectorised(&h, row0, scores, out);
        else
            w->r->isa->fused(&h, row0, out);
        for (uint32_t row = row0; row < row0 + CPU_RUNG_ROWS; row++)
            for (uint32_t e = 0; e < c->dim; e++)
                store(c->is_f32, c->out, token_at(c, head, row) + e, out[(size_t)row * c->dim + e]);
    }
}

/* q, k and v of one head after another to f32. */
static void pack_heads(void *arg, uint32_t thread)
{
    struct rung_work *w = arg;
    const struct rung_call *c = &w->c;
    uint32_t head;
    (void)thread;
    while ((head = atomic_fetch_add(&w->next, 1)) < c->batch * c->heads) {
        const size_t to = (size_t)head * c->n * c->dim;
        for (uint32_t row = 0; row < c->n; row++)
            for (uint32_t e = 0; e < c->dim; e++) {
                const size_t at = token_at(c, head, row) + e;
                w->q[to + (size_t)row * c->dim + e] = load(c->is_f32, c->q, at) * c->scale * LOG2E;
                w->kt[to + (size_t)e * c->n + row] = load(c->is_f32, c->k, at);
                w->v[to + (size_t)row * c->dim + e] = load(c->is_f32, c->v, at);
            }
    }
}

static attn_status work_run(struct bench_work *work, void *stream)
{
    struct rung_work *w = (struct rung_work *)work;
    (void)stream;
    if (w->c.rung != RUNG_NAIVE) {
        atomic_store(&w->next, 0);
        cpu_threads_run(w->r->threads, pack_heads, w);
    }
    atomic_store(&w->next, 0);
    cpu_threads_run(w->r->threads, attend_units, w);
    return ATTN_OK;
}

static void work_close(struct bench_work *work)
{
    free(work);
}

static attn_status cpu_attend_open(struct rungs *r, const struct rung_call *c,
                                   struct bench_work **out_w)
{
    if (c->n == 0 || c->n % 64 != 0 || c->dim == 0 || c->dim % 64 != 0)
        return fail(r, ATTN_ENOTSUP, "rungs take multiples of 64 tokens and elements");
    if (c->scratch_bytes < cpu_scratch_bytes(r, c))
        return fail(r, ATTN_ENOTSUP, "too little scratch memory");
    struct rung_work *w = calloc(1, sizeof *w);
    if (w == NULL)
        return fail(r, ATTN_ENOMEM, "out of memory");
    const uint64_t n = c->rung == RUNG_NAIVE ? 0 : elements_of(c);
    w->work = (struct bench_work){work_run, work_close};
    w->r = r;
    w->c = *c;
    w->q = c->scratch;
    w->kt = w->q + n;
    w->v = w->kt + n;
    w->out = w->v + n;
    w->scores = w->out + n;
    *out_w = &w->work;
    return ATTN_OK;
}

/* ---- an encoder's other parts */

struct product_job {
    struct rungs *r;
    const struct rung_matmul *m;
    float *a, *b, *c;
    _Atomic uint32_t next;
};

static void product_rows(void *arg, uint32_t thread)
{
    struct product_job *j = arg;
    const struct rung_matmul *m = j->m;
    uint32_t row;
    (void)thread;
    while ((row = atomic_fetch_add(&j->next, PRODUCT_ROWS)) < m->m)
        j->r->isa->product(j->c + (size_t)row * m->n, m->n, j->a + (size_t)row * m->k, m->k, j->b,
                           m->n, PRODUCT_ROWS, m->n, m->k, m->is_added);
}

static void to_f32(const void *from, float *to, uint64_t n)
{
    for (uint64_t i = 0; i < n; i++)
        to[i] = load(false, from, i);
}

static attn_status cpu_matmul(struct rungs *r, const struct rung_matmul *m, uint32_t stream)
{
    const uint64_t a = (uint64_t)m->m * m->k, b = (uint64_t)m->k * m->n, c = (uint64_t)m->m * m->n;
    (void)stream;
    if (m->m % 64 != 0 || m->n % 64 != 0 || m->k % 64 != 0)
        return fail(r, ATTN_ENOTSUP, "matrix products take multiples of 64");
    struct product_job j = {.r = r, .m = m, .a = (float *)m->a, .b = (float *)m->b, .c = m->c};
    if (!m->is_f32) {
        if (r->product_floats < a + b + c) {
            free(r->product);
            r->product = malloc((a + b + c) * sizeof(float));
            r->product_floats = r->product ? a + b + c : 0;
        }
        if (r->product == NULL)
            return fail(r, ATTN_ENOMEM, "out of memory");
        j.a = r->product;
        j.b = j.a + a;
        j.c = j.b + b;
        to_f32(m->a, j.a, a);
        to_f32(m->b, j.b, b);
        if (m->is_added)
            to_f32(m->c, j.c, c);
    }
    cpu_threads_run(r->threads, product_rows, &j);
    for (uint64_t i = 0; !m->is_f32 && i < c; i++)
        store(false, m->c, i, j.c[i]);
    return ATTN_OK;
}

static attn_status cpu_norm(struct rungs *r, const void *x, void *out, uint32_t rows,
                            uint32_t width, bool is_f32, uint32_t stream)
{
    (void)r, (void)stream;
    for (size_t row = 0; row < rows; row++) {
        const size_t at = row * width;
        float sum = 0, squares = 0;
        for (size_t i = 0; i < width; i++)
            sum += load(is_f32, x, at + i);
        const float mean = sum / (float)width;
        for (size_t i = 0; i < width; i++) {
            const float d = load(is_f32, x, at + i) - mean;
            squares += d * d;
        }
        const float f = 1 / sqrtf(squares / (float)width + 1e-5f);
        for (size_t i = 0; i < width; i++)
            store(is_f32, out, at + i, (load(is_f32, x, at + i) - mean) * f);
    }
    return ATTN_OK;
}

static attn_status cpu_gelu(struct rungs *r, void *x, uint64_t n, bool is_f32, uint32_t stream)
{
    (void)r, (void)stream;
    for (uint64_t i = 0; i < n; i++) {
        const float y = load(is_f32, x, i);
        const float t = tanhf(0.7978845608f * (y + 0.044715f * y * y * y));
        store(is_f32, x, i, 0.5f * y * (1 + t));
    }
    return ATTN_OK;
}

static const struct rungs_ops ops = {
    .abi = RUNGS_ABI,
    .name = "cpu",
    .names = {[RUNG_NAIVE] = "naive", [RUNG_VECTORISED] = "vectorised", [RUNG_MATRIX] = "fused"},
    .has_streams = false,
    .open = cpu_open,
    .close = cpu_close,
    .last_error = cpu_last_error,
    .matmul_name = cpu_matmul_name,
    .matmul_size = cpu_matmul_size,
    .alloc = cpu_alloc,
    .host_alloc = cpu_alloc,
    .free = cpu_free,
    .host_free = cpu_free,
    .copy = cpu_copy,
    .fill = cpu_fill,
    .stream = cpu_stream,
    .wait = cpu_wait,
    .follow = cpu_follow,
    .mark = cpu_mark,
    .elapsed = cpu_elapsed,
    .evict = cpu_evict,
    .scratch_bytes = cpu_scratch_bytes,
    .attend_open = cpu_attend_open,
    .matmul = cpu_matmul,
    .norm = cpu_norm,
    .gelu = cpu_gelu,
};

const struct rungs_ops *rungs_cpu(void)
{
    return &ops;
}
