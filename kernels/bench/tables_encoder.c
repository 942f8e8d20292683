/* tables_encoder.c: ten batches of a small encoder, with each rung as its attention.
 *
 * A layer is x += attention(norm x) Wo, x += gelu(norm x W1) W2, with q, k, v = norm x Wq, Wk, Wv;
 * no biases, weights N(0, 1 / inputs). Products are rungs.h's matmul. The tuned rung appends K and
 * V to the paged cache in every layer, as a prompt does; the others read them where the products
 * left them.
 *
 * The batches travel from page-locked host memory and back: first one after the other, then with a
 * stream for the way in, one for computing and one for the way out, two batches in turn. Times are
 * the host's, from the first copy to the last. Attention's share is its time between marks in the
 * computing stream. Every rung's outputs are first compared with float64, of one sequence of 64
 * tokens.
 */
#include "kernels/bench/tables.h"

#include "kernels/reference.h"
#include "proto/attn_time.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define BATCHES 10
#define LOOPS 5 /* timed, if there are to be so many runs */
#define DIM 64
#define MAX_LAYERS 4
#define CHECK_TOKENS 64

enum { WQ, WK, WV, WO, W1, W2, N_WEIGHTS };

struct model {
    bool is_f32;
    uint32_t n_layers, heads, width, hidden;
    void *weights[MAX_LAYERS][N_WEIGHTS]; /* device, [inputs][outputs] */
    float *host[MAX_LAYERS][N_WEIGHTS]; /* as the device has them */
};

/* Activations of one batch, on the device. */
struct encoder {
    const struct model *m;
    uint32_t batch, n, tokens;
    void *in[2], *x[2]; /* two batches in turn: as they came, and as they are computed */
    void *h, *q, *k, *v, *a, *u, *scratch;
    uint64_t scratch_bytes;
    struct bench_work *work;
    struct table_tuned tuned;
    bool is_tuned;
};

/* Output i of the inputs of a layer's product. */
static void shape_of(const struct model *m, int which, uint32_t *out_k, uint32_t *out_n)
{
    *out_k = which == W2 ? m->hidden : m->width;
    *out_n = which == W1 ? m->hidden : m->width;
}

static uint64_t size_of(const struct model *m, uint64_t elements)
{
    return elements * (m->is_f32 ? 4 : 2);
}

/* ---- the model */

static bool model_open(struct tables *t, bool is_f32, bool is_small, struct model *m)
{
    *m = (struct model){
        .is_f32 = is_f32, .n_layers = is_small ? 1 : MAX_LAYERS, .heads = is_small ? 1 : 12};
    m->width = m->heads * DIM;
    m->hidden = 4 * m->width;
    const attn_dtype type = is_f32 ? ATTN_F32 : ATTN_BF16;
    uint64_t from = 1000003;
    attn_status st = ATTN_OK;
    for (uint32_t l = 0; l < m->n_layers; l++)
        for (int w = 0; w < N_WEIGHTS && st == ATTN_OK; w++) {
            uint32_t k, n;
            shape_of(m, w, &k, &n);
            const uint64_t elements = (uint64_t)k * n;
            const float scale = 1.0f / sqrtf((float)k);
            float *host = m->host[l][w] = malloc(elements * sizeof *host);
            void *there = malloc(size_of(m, elements));
            st = host && there ? t->ops->alloc(t->r, size_of(m, elements), &m->weights[l][w])
                               : ATTN_ENOMEM;
            for (uint64_t i = 0; i < elements && st == ATTN_OK; i++) {
                reference_put(type, there, i, (double)(t->f32[(from + i) & 0xffffff] * scale));
                host[i] = (float)reference_get(type, there, i);
            }
            from += elements + 77;
            if (st == ATTN_OK)
                st = t->ops->copy(t->r, m->weights[l][w], there, size_of(m, elements), 0);
            if (st == ATTN_OK)
                st = t->ops->wait(t->r, 0);
            free(there);
        }
    return table_fail(t, st, "an encoder's weights");
}

static void model_close(struct tables *t, struct model *m)
{
    for (uint32_t l = 0; l < m->n_layers; l++)
        for (int w = 0; w < N_WEIGHTS; w++) {
            t->ops->free(t->r, m->weights[l][w]);
            free(m->host[l][w]);
        }
}

/* ---- activations */

static bool encoder_open(struct tables *t, const struct model *m, uint32_t batch, uint32_t n,
                         uint32_t rung, struct encoder *e)
{
    const struct table_cell c = {batch, m->heads, DIM, n, m->is_f32};
    *e = (struct encoder){
        .m = m, .batch = batch, .n = n, .tokens = batch * n, .is_tuned = rung == RUNG_TUNED};
    const uint64_t bytes = size_of(m, (uint64_t)e->tokens * m->width);
    void **tensors[] = {&e->in[0], &e->in[1], &e->x[0], &e->x[1], &e->h,
                        &e->q,     &e->k,     &e->v,    &e->a};
    attn_status st = t->ops->alloc(t->r, bytes * 4, &e->u);
    for (size_t i = 0; i < sizeof tensors / sizeof *tensors && st == ATTN_OK; i++)
        st = t->ops->alloc(t->r, bytes, tensors[i]);
    if (st == ATTN_OK) /* the tuned kernel is run once when it is opened */
        st = t->ops->fill(t->r, e->q, 0, bytes, 0);
    if (st == ATTN_OK)
        st = t->ops->fill(t->r, e->k, 0, bytes, 0);
    if (st == ATTN_OK)
        st = t->ops->fill(t->r, e->v, 0, bytes, 0);
    if (st == ATTN_OK)
        st = t->ops->wait(t->r, 0);
    if (!table_fail(t, st, "an encoder's activations"))
        return false;
    if (e->is_tuned) {
        const bool ok = table_tuned_open(t, &c, e->q, e->k, e->v, e->a, true, &e->tuned);
        e->work = e->tuned.work;
        return ok;
    }
    struct rung_call call = {.rung = (enum rung)rung,
                             .is_f32 = m->is_f32,
                             .batch = batch,
                             .heads = m->heads,
                             .dim = DIM,
                             .n = n,
                             .scale = 1.0f / sqrtf((float)DIM),
                             .q = e->q,
                             .k = e->k,
                             .v = e->v,
                             .out = e->a};
    call.scratch_bytes = e->scratch_bytes = t->ops->scratch_bytes(t->r, &call);
    st = t->ops->alloc(t->r, call.scratch_bytes + 256, &e->scratch);
    call.scratch = e->scratch;
    if (st == ATTN_OK)
        st = t->ops->attend_open(t->r, &call, &e->work);
    return table_fail(t, st, "an encoder's attention");
}

static void encoder_close(struct tables *t, struct encoder *e)
{
    void *tensors[] = {e->in[0], e->in[1], e->x[0], e->x[1], e->h,      e->q,
                       e->k,     e->v,     e->a,    e->u,    e->scratch};
    if (e->is_tuned)
        table_tuned_close(t, &e->tuned);
    else if (e->work != NULL)
        e->work->close(e->work);
    for (size_t i = 0; i < sizeof tensors / sizeof *tensors; i++)
        t->ops->free(t->r, tensors[i]);
}

static attn_status product(struct tables *t, const struct encoder *e, uint32_t layer, int which,
                           const void *a, void *c, bool is_added)
{
    struct rung_matmul p = {.a = a,
                            .b = e->m->weights[layer][which],
                            .c = c,
                            .m = e->tokens,
                            .is_f32 = e->m->is_f32,
                            .is_added = is_added};
    shape_of(e->m, which, &p.k, &p.n);
    return t->ops->matmul(t->r, &p, 0);
}

#define TRY(call)                                                                                  \
    do {                                                                                           \
        attn_status try_st = (call);                                                               \
        if (try_st != ATTN_OK)                                                                     \
            return try_st;                                                                         \
    } while (0)

/* One batch from in to x, on stream 0; attention of layer l between marks 2 * (mark + l) and one
 * more. */
static attn_status forward(struct tables *t, const struct encoder *e, const void *in, void *x,
                           uint32_t mark)
{
    const struct rungs_ops *ops = t->ops;
    const struct model *m = e->m;
    const bool is_f32 = m->is_f32;
    TRY(ops->copy(t->r, x, in, size_of(m, (uint64_t)e->tokens * m->width), 0));
    for (uint32_t l = 0; l < m->n_layers; l++) {
        TRY(ops->norm(t->r, x, e->h, e->tokens, m->width, is_f32, 0));
        TRY(product(t, e, l, WQ, e->h, e->q, false));
        TRY(product(t, e, l, WK, e->h, e->k, false));
        TRY(product(t, e, l, WV, e->h, e->v, false));
        TRY(ops->mark(t->r, 2 * (mark + l), 0));
        TRY(e->work->run(e->work, ops->stream(t->r, 0)));
        TRY(ops->mark(t->r, 2 * (mark + l) + 1, 0));
        TRY(product(t, e, l, WO, e->a, x, true));
        TRY(ops->norm(t->r, x, e->h, e->tokens, m->width, is_f32, 0));
        TRY(product(t, e, l, W1, e->h, e->u, false));
        TRY(ops->gelu(t->r, e->u, (uint64_t)e->tokens * m->hidden, is_f32, 0));
        TRY(product(t, e, l, W2, e->u, x, true));
    }
    return ATTN_OK;
}

/* ---- the same in float64 */

static void norm_f64(const double *x, double *out, uint32_t n, uint32_t width)
{
    for (size_t r = 0; r < n; r++, x += width, out += width) {
        double sum = 0, squares = 0;
        for (size_t i = 0; i < width; i++)
            sum += x[i];
        for (size_t i = 0; i < width; i++)
            squares += (x[i] - sum / width) * (x[i] - sum / width);
        for (size_t i = 0; i < width; i++)
            out[i] = (x[i] - sum / width) / sqrt(squares / width + 1e-5);
    }
}

/* c += a b */
static void product_f64(const struct model *m, uint32_t layer, int which, const double *a,
                        double *c)
{
    uint32_t k, n;
    shape_of(m, which, &k, &n);
    const float *b = m->host[layer][which];
    for (size_t row = 0; row < CHECK_TOKENS; row++)
        for (size_t i = 0; i < k; i++)
            for (size_t j = 0; j < n; j++)
                c[row * n + j] += a[row * k + i] * (double)b[i * n + j];
}

static void attend_f64(const struct model *m, const double *q, const double *k, const double *v,
                       double *out)
{
    double s[CHECK_TOKENS];
    for (size_t h = 0; h < m->heads; h++)
        for (size_t i = 0; i < CHECK_TOKENS; i++) {
            double top = -INFINITY, sum = 0, *o = out + i * m->width + h * DIM;
            for (size_t j = 0; j < CHECK_TOKENS; j++) {
                s[j] = 0;
                for (size_t e = 0; e < DIM; e++)
                    s[j] += q[i * m->width + h * DIM + e] * k[j * m->width + h * DIM + e] / 8;
                top = s[j] > top ? s[j] : top;
            }
            for (size_t j = 0; j < CHECK_TOKENS; j++)
                sum += s[j] = exp(s[j] - top);
            for (size_t e = 0; e < DIM; e++)
                o[e] = 0;
            for (size_t j = 0; j < CHECK_TOKENS; j++)
                for (size_t e = 0; e < DIM; e++)
                    o[e] += s[j] / sum * v[j * m->width + h * DIM + e];
        }
}

/* x [CHECK_TOKENS][width], in place; false: no memory */
static bool forward_f64(const struct model *m, double *x)
{
    const size_t n = (size_t)CHECK_TOKENS * m->width;
    double *all = calloc(9 * n, sizeof *all), *h = all, *q = h + n, *k = q + n, *v = k + n;
    double *a = v + n, *u = a + n; /* u: 4 n */
    for (uint32_t l = 0; all != NULL && l < m->n_layers; l++) {
        memset(q, 0, 3 * n * sizeof *q);
        memset(u, 0, 4 * n * sizeof *u);
        norm_f64(x, h, CHECK_TOKENS, m->width);
        product_f64(m, l, WQ, h, q);
        product_f64(m, l, WK, h, k);
        product_f64(m, l, WV, h, v);
        attend_f64(m, q, k, v, a);
        product_f64(m, l, WO, a, x);
        norm_f64(x, h, CHECK_TOKENS, m->width);
        product_f64(m, l, W1, h, u);
        for (size_t i = 0; i < 4 * n; i++)
            u[i] =
                u[i] / 2 * (1 + tanh(0.7978845608028654 * (u[i] + 0.044715 * u[i] * u[i] * u[i])));
        product_f64(m, l, W2, u, x);
    }
    free(all);
    return all != NULL;
}

/* One sequence's output against want. */
static bool check_rung(struct tables *t, const struct model *m, uint32_t rung, const double *want,
                       struct table_result *x)
{
    const uint64_t n = (uint64_t)CHECK_TOKENS * m->width, bytes = size_of(m, n);
    const attn_dtype type = m->is_f32 ? ATTN_F32 : ATTN_BF16;
    const void *input = m->is_f32 ? (const void *)t->f32 : t->bf16;
    struct encoder e;
    double diff = 0, norm = 0;
    void *host = malloc(bytes);
    bool ok = encoder_open(t, m, 1, CHECK_TOKENS, rung, &e) && host != NULL;
    if (ok) {
        attn_status st = t->ops->copy(t->r, e.in[0], input, bytes, 0);
        if (st == ATTN_OK)
            st = t->ops->fill(t->r, e.x[0], 0xff, bytes, 0);
        if (st == ATTN_OK)
            st = t->ops->fill(t->r, e.a, 0xff, bytes, 0);
        if (st == ATTN_OK)
            st = forward(t, &e, e.in[0], e.x[0], 0);
        if (st == ATTN_OK)
            st = t->ops->copy(t->r, host, e.x[0], bytes, 0);
        if (st == ATTN_OK)
            st = t->ops->wait(t->r, 0);
        ok = table_fail(t, st, "an encoder's forward pass");
    }
    for (uint64_t i = 0; ok && i < n; i++) {
        const double error = fabs(reference_get(type, host, i) - want[i]);
        x->max_abs = error > x->max_abs ? error : x->max_abs;
        diff += error * error;
        norm += want[i] * want[i];
    }
    x->l2 = sqrt(diff / norm);
    x->rows = x->rows_checked = CHECK_TOKENS;
    x->is_right = x->l2 <= (m->is_f32 ? 1e-4 : 2e-2); /* not if it is NaN */
    t->is_wrong = t->is_wrong || (ok && !x->is_right);
    encoder_close(t, &e);
    free(host);
    return ok;
}

/* ---- ten batches */

struct loop {
    char *in, *out; /* page-locked, [BATCHES][tokens][width] */
    uint64_t bytes; /* of a batch */
};

static attn_status run_in_turn(struct tables *t, const struct encoder *e, const struct loop *l)
{
    for (uint32_t i = 0; i < BATCHES; i++) {
        TRY(t->ops->copy(t->r, e->in[0], l->in + i * l->bytes, l->bytes, 0));
        TRY(forward(t, e, e->in[0], e->x[0], i * MAX_LAYERS));
        TRY(t->ops->copy(t->r, l->out + i * l->bytes, e->x[0], l->bytes, 0));
        TRY(t->ops->wait(t->r, 0));
    }
    return ATTN_OK;
}

/* Streams: 0 computes, 1 brings, 2 takes away. Each step waits for what is enqueued when it is said
 * to, so that a batch is brought while the one before is computed. */
static attn_status run_on_streams(struct tables *t, const struct encoder *e, const struct loop *l)
{
    const struct rungs_ops *ops = t->ops;
    TRY(ops->copy(t->r, e->in[0], l->in, l->bytes, 1));
    for (uint32_t i = 0; i < BATCHES; i++) {
        TRY(ops->follow(t->r, 0, 1)); /* batch i is there */
        if (i + 1 < BATCHES) {
            TRY(ops->follow(t->r, 1, 0)); /* batch i - 1 has been computed */
            TRY(ops->copy(t->r, e->in[(i + 1) % 2], l->in + (i + 1) * l->bytes, l->bytes, 1));
        }
        TRY(forward(t, e, e->in[i % 2], e->x[i % 2], i * MAX_LAYERS));
        TRY(ops->follow(t->r, 2, 0));
        /* what batch i + 1 is computed into is free when batch i - 1 has been taken away */
        TRY(ops->follow(t->r, 0, 2));
        TRY(ops->copy(t->r, l->out + i * l->bytes, e->x[i % 2], l->bytes, 2));
    }
    TRY(ops->wait(t->r, 2));
    return ops->wait(t->r, 0);
}

static bool time_loop(struct tables *t, const struct encoder *e, const struct loop *l,
                      bool has_streams, struct table_result *x)
{
    const int n_loops = t->options.runs < LOOPS ? (int)t->options.runs : LOOPS;
    double ms[LOOPS], attention_ns = 0, all_ns = 0;
    for (int i = -1; i < n_loops; i++) { /* the first is not timed */
        const uint64_t start = attn_now_ns();
        attn_status st = has_streams ? run_on_streams(t, e, l) : run_in_turn(t, e, l);
        const uint64_t loop_ns = attn_now_ns() - start;
        uint64_t attention = 0, ns = 0;
        for (uint32_t b = 0; b < BATCHES; b++)
            for (uint32_t k = 0; k < e->m->n_layers && st == ATTN_OK; k++) {
                const uint32_t mark = 2 * (b * MAX_LAYERS + k);
                st = t->ops->elapsed(t->r, mark, mark + 1, &ns);
                attention += ns;
            }
        if (!table_fail(t, st, "the inference loop"))
            return false;
        if (i < 0)
            continue;
        ms[i] = (double)loop_ns / 1e6;
        attention_ns += (double)attention;
        all_ns += (double)loop_ns;
    }
    table_times(x, ms, (uint32_t)n_loops);
    x->streams = has_streams ? RUNG_STREAMS : 1;
    x->attention_share = attention_ns / all_ns;
    return true;
}

/* Of ten batches. */
static double loop_flops(const struct model *m, uint32_t batch, uint32_t n)
{
    const struct table_cell c = {batch, m->heads, DIM, n, m->is_f32};
    const double products = 2.0 * batch * n * m->width * (4.0 * m->width + 2.0 * m->hidden);
    return BATCHES * m->n_layers * (products + table_flops(&c));
}

static bool run_rung(struct tables *t, const struct model *m, uint32_t rung, uint32_t batch,
                     uint32_t n, const double *want)
{
    const struct table_cell c = {batch, m->heads, DIM, n, m->is_f32};
    struct encoder e = {0};
    struct loop l = {.bytes = size_of(m, (uint64_t)batch * n * m->width)};
    struct table_result x = {0};
    const char *values = m->is_f32 ? (const char *)t->f32 : (const char *)t->bf16;
    void *in = NULL, *out = NULL;
    bool ok = check_rung(t, m, rung, want, &x) &&
              table_fail(t, t->ops->host_alloc(t->r, l.bytes * BATCHES, &in), "host memory") &&
              table_fail(t, t->ops->host_alloc(t->r, l.bytes * BATCHES, &out), "host memory") &&
              encoder_open(t, m, batch, n, rung, &e);
    l.in = in;
    l.out = out;
    for (uint64_t i = 0; ok && i < BATCHES * l.bytes; i++) /* the random values are 32 MiB */
        l.in[i] = values[i % (32 << 20)];
    if (ok)
        x.scratch_bytes = e.scratch_bytes;
    for (int has_streams = 0; ok && has_streams <= t->ops->has_streams; has_streams++) {
        ok = time_loop(t, &e, &l, has_streams, &x);
        if (!ok)
            break;
        x.tflops = loop_flops(m, batch, n) / x.avg_ms / 1e9;
        printf("[LOOP] %-10s %-4s %u streams %10.3f ms, attention %5.1f %%   rel L2 %.1e%s\n",
               table_rung_name(t, rung), m->is_f32 ? "f32" : "bf16", x.streams, x.avg_ms,
               100 * x.attention_share, x.l2, x.is_right ? "" : " WRONG");
        fflush(stdout);
        table_write(t, "encoder", rung, &c, &x);
    }
    encoder_close(t, &e);
    t->ops->host_free(t->r, in);
    t->ops->host_free(t->r, out);
    return ok;
}

bool tables_encoder(struct tables *t)
{
    static const uint32_t rungs[] = {RUNG_NAIVE, RUNG_VECTORISED, RUNG_SHARED,
                                     RUNG_WARP,  RUNG_MATRIX,     RUNG_TUNED};
    const bool is_small = t->options.max_tokens != 0 && t->options.max_tokens < 512;
    const uint32_t batch = is_small ? 1 : 8, n = is_small ? t->options.max_tokens : 512;
    bool ok = true;
    for (int is_f32 = 0; ok && is_f32 < 2; is_f32++) {
        struct model m;
        if (!(is_f32 ? t->options.has_f32 : t->options.has_bf16))
            continue;
        ok = model_open(t, is_f32, is_small, &m);
        double *want = calloc((size_t)CHECK_TOKENS * m.width, sizeof *want);
        for (size_t i = 0; want != NULL && i < (size_t)CHECK_TOKENS * m.width; i++)
            want[i] = is_f32 ? (double)t->f32[i] : reference_get(ATTN_BF16, t->bf16, i);
        if (ok && (want == NULL || !forward_f64(&m, want))) {
            snprintf(t->error, sizeof t->error, "no memory for the reference");
            ok = false;
        }
        if (ok)
            printf("\nten batches of %u x %u tokens, %s: %u layers, %u heads of %d, width %u, MLP "
                   "%u, products by %s\n",
                   batch, n, is_f32 ? "f32" : "bf16", m.n_layers, m.heads, DIM, m.width, m.hidden,
                   t->ops->matmul_name(t->r));
        for (size_t i = 0; ok && i < sizeof rungs / sizeof *rungs; i++)
            if (table_has_rung(t, rungs[i]))
                ok = run_rung(t, &m, rungs[i], batch, n, want);
        free(want);
        model_close(t, &m);
    }
    return ok;
}
