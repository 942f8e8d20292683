/* tables.c: one cell of the tables: tensors of random values, the check against the float64
 * reference, the times. See tables.h.
 */
#include "kernels/bench/tables.h"

#include "kernels/load.h"
#include "kernels/reference.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define RANDOM_FLOATS ((uint64_t)1 << 24)
#define BLOCK_TOKENS 16
#define CHECK_WORK 3e7 /* multiplications in float64 a cell */
#define MIN_CHECKED 8 /* rows */
#define BURST_NS 50000000u /* of work, before a rest: what runs longer heats the device */
#define REST_NS 250000000u
#define MOST_NS 1000000000u /* of a rung's timed runs and rests, but for two runs */

bool table_fail(struct tables *t, attn_status st, const char *what)
{
    if (st != ATTN_OK)
        snprintf(t->error, sizeof t->error, "%s: %s", what, t->ops->last_error(t->r));
    return st == ATTN_OK;
}

static bool backend_fail(struct tables *t, struct backend *b, attn_status st, const char *what)
{
    if (st != ATTN_OK)
        snprintf(t->error, sizeof t->error, "%s: %s", what, t->backend->last_error(b));
    return st == ATTN_OK;
}

static void fill_random(struct tables *t)
{
    uint64_t x = 0x9e3779b97f4a7c15u;
    for (uint64_t i = 0; i < RANDOM_FLOATS; i++) {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        double sum = -2; /* of four uniform values, scaled to unit variance */
        for (int k = 0; k < 4; k++)
            sum += (double)(x >> (16 * k) & 0xffff) / 65536.0;
        t->f32[i] = (float)(sum * 1.7320508);
        reference_put(ATTN_BF16, t->bf16, i, (double)t->f32[i]);
    }
}

/* The rate of a large product, against which shares are given. */
static bool measure_matmul(struct tables *t, bool is_f32)
{
    const uint32_t n = t->ops->matmul_size(t->r), size = is_f32 ? 4 : 2;
    const uint64_t bytes = (uint64_t)n * n * size;
    void *x[3] = {NULL};
    double best = 0;
    attn_status st = ATTN_OK;
    for (int i = 0; i < 3 && st == ATTN_OK; i++)
        st = t->ops->alloc(t->r, bytes, &x[i]);
    for (uint64_t at = 0; at < 2 * bytes && st == ATTN_OK; at += RANDOM_FLOATS * size) {
        const uint64_t in = at % bytes, left = bytes - in;
        st = t->ops->copy(t->r, (char *)x[at / bytes] + in, is_f32 ? (void *)t->f32 : t->bf16,
                          left < RANDOM_FLOATS * size ? left : RANDOM_FLOATS * size, 0);
        if (left < RANDOM_FLOATS * size)
            at += left - RANDOM_FLOATS * size;
    }
    const struct rung_matmul m = {
        .a = x[0], .b = x[1], .c = x[2], .m = n, .n = n, .k = n, .is_f32 = is_f32};
    for (int i = 0; i < 7 && st == ATTN_OK; i++) {
        uint64_t ns = 1;
        nanosleep(&(struct timespec){.tv_nsec = REST_NS / 4}, NULL);
        st = t->ops->mark(t->r, 0, 0);
        if (st == ATTN_OK)
            st = t->ops->matmul(t->r, &m, 0);
        if (st == ATTN_OK)
            st = t->ops->mark(t->r, 1, 0);
        if (st == ATTN_OK)
            st = t->ops->wait(t->r, 0);
        if (st == ATTN_OK)
            st = t->ops->elapsed(t->r, 0, 1, &ns);
        const double tflops = 2.0 * n * n * n / (double)ns / 1e3;
        best = tflops > best ? tflops : best;
    }
    for (int i = 0; i < 3; i++)
        t->ops->free(t->r, x[i]);
    t->matmul_tflops[is_f32] = best;
    return table_fail(t, st, "measuring a matrix product");
}

static bool name_device(struct tables *t)
{
    struct backend_config c = {.kv_bytes = 1 << 20,
                               .max_batch_items = 1,
                               .max_batch_tokens = 1,
                               .import_fd = -1,
                               .n_threads = t->options.n_threads};
    struct backend_info info;
    struct backend *b = NULL;
    bool ok = backend_fail(t, b, t->backend->open(&c, &b), "opening the backend");
    if (ok) {
        t->backend->info(b, &info);
        snprintf(t->device, sizeof t->device, "%s, %u processors", info.device, info.n_processors);
    }
    t->backend->close(b);
    return ok;
}

bool tables_open(struct tables *t, const struct tables_options *o)
{
    *t = (struct tables){.options = *o};
    if (backend_load(o->backend, &t->backend, t->error, sizeof t->error) != ATTN_OK ||
        backend_bench_load(o->backend, &t->own, t->error, sizeof t->error) != ATTN_OK ||
        rungs_load(o->backend, &t->ops, t->error, sizeof t->error) != ATTN_OK)
        return false;
    t->f32 = malloc(RANDOM_FLOATS * sizeof *t->f32);
    t->bf16 = malloc(RANDOM_FLOATS * sizeof *t->bf16);
    if (t->f32 == NULL || t->bf16 == NULL) {
        snprintf(t->error, sizeof t->error, "no memory for random values");
        return false;
    }
    fill_random(t);
    return name_device(t) &&
           table_fail(t, t->ops->open(o->n_threads, &t->r), "opening the rungs") &&
           (!o->has_bf16 || measure_matmul(t, false)) && (!o->has_f32 || measure_matmul(t, true));
}

void tables_close(struct tables *t)
{
    if (t->ops != NULL)
        t->ops->close(t->r);
    free(t->f32);
    free(t->bf16);
    t->f32 = NULL;
    t->bf16 = NULL;
    t->r = NULL;
}

const char *table_rung_name(const struct tables *t, uint32_t rung)
{
    return rung == RUNG_TUNED ? "tuned" : t->ops->names[rung];
}

bool table_has_rung(const struct tables *t, uint32_t rung)
{
    const char *name = table_rung_name(t, rung), *wanted = t->options.rung;
    return name != NULL && (wanted == NULL || strcmp(name, wanted) == 0);
}

double table_flops(const struct table_cell *c)
{
    return 4.0 * c->batch * c->heads * c->dim * (double)c->n * c->n;
}

void table_times(struct table_result *x, const double *ms, uint32_t n)
{
    double sum = 0, squares = 0;
    x->min_ms = ms[0];
    for (uint32_t i = 0; i < n; i++) {
        sum += ms[i];
        x->min_ms = ms[i] < x->min_ms ? ms[i] : x->min_ms;
    }
    for (uint32_t i = 0; i < n; i++)
        squares += (ms[i] - sum / n) * (ms[i] - sum / n);
    x->runs = n;
    x->avg_ms = sum / n;
    x->std_ms = n > 1 ? sqrt(squares / (n - 1)) : 0;
}

/* ---- tensors: tensor `which`'s element i is random value (i + START * which) % RANDOM_FLOATS */

#define START 5000011u

static uint64_t random_at(uint32_t which, uint64_t i)
{
    return (i + (uint64_t)START * which) % RANDOM_FLOATS;
}

static attn_status fill_tensor(struct tables *t, struct table_setup *s, uint32_t which, void *to)
{
    const uint32_t size = s->c->is_f32 ? 4 : 2;
    const char *from = s->c->is_f32 ? (const char *)t->f32 : (const char *)t->bf16;
    attn_status st = ATTN_OK;
    for (uint64_t i = 0, n; i < s->elements && st == ATTN_OK; i += n) {
        const uint64_t at = random_at(which, i);
        n = RANDOM_FLOATS - at < s->elements - i ? RANDOM_FLOATS - at : s->elements - i;
        st = t->ops->copy(t->r, (char *)to + i * size, from + at * size, n * size, 0);
    }
    return st;
}

/* n values of a tensor, as the device has them, as f32. */
static void tensor_row(const struct tables *t, const struct table_setup *s, uint32_t which,
                       uint64_t first, float *out)
{
    for (uint32_t e = 0; e < s->c->dim; e++) {
        const uint64_t at = random_at(which, first + e);
        out[e] = s->c->is_f32 ? t->f32[at] : (float)reference_get(ATTN_BF16, t->bf16, at);
    }
}

/* Where (sequence, token, head) `row` begins in a tensor; rows lie one behind the other. */
static bool make_references(struct tables *t, struct table_setup *s)
{
    const struct table_cell *c = s->c;
    const uint64_t rows = (uint64_t)c->batch * c->n * c->heads;
    const double affordable = CHECK_WORK / (2.0 * c->n * c->dim);
    const uint64_t most = affordable < MIN_CHECKED ? MIN_CHECKED : (uint64_t)affordable;
    const struct attn_layer_spec spec = {.scale = 1.0f / sqrtf((float)c->dim), .is_full = true};
    s->n_checked = (uint32_t)(rows < most ? rows : most);
    s->checked = malloc(s->n_checked * sizeof *s->checked);
    s->want = malloc((size_t)s->n_checked * c->dim * sizeof *s->want);
    float *q = malloc(c->dim * sizeof *q), *k = malloc((size_t)c->n * c->dim * sizeof *k);
    float *v = malloc((size_t)c->n * c->dim * sizeof *v);
    bool ok = s->checked && s->want && q && k && v;
    for (uint32_t i = 0; ok && i < s->n_checked; i++) {
        /* all rows, or every so manieth from a place that moves through the heads */
        const uint64_t row = rows == s->n_checked ? i : (i * (rows / s->n_checked) + i * 7) % rows;
        const uint64_t head = row % c->heads, item = row / c->heads / c->n;
        s->checked[i] = row;
        tensor_row(t, s, 0, row * c->dim, q);
        for (uint32_t j = 0; j < c->n; j++) {
            const uint64_t at = ((item * c->n + j) * c->heads + head) * c->dim;
            tensor_row(t, s, 1, at, k + (size_t)j * c->dim);
            tensor_row(t, s, 2, at, v + (size_t)j * c->dim);
        }
        ok = reference_attend(&spec, 1, 1, c->dim, c->dim, ATTN_F32, q, 1, c->n - 1, k, v, c->n,
                              s->want + (size_t)i * c->dim, NULL) == ATTN_OK;
    }
    free(q);
    free(k);
    free(v);
    if (!ok)
        snprintf(t->error, sizeof t->error, "no memory for the reference");
    return ok;
}

bool table_setup_open(struct tables *t, const struct table_cell *c, struct table_setup *s)
{
    *s = (struct table_setup){.c = c, .elements = (uint64_t)c->batch * c->n * c->heads * c->dim};
    s->bytes = s->elements * (c->is_f32 ? 4 : 2);
    s->host = malloc(s->bytes);
    void **tensors[] = {&s->q, &s->k, &s->v, &s->out};
    attn_status st = s->host ? ATTN_OK : ATTN_ENOMEM;
    for (uint32_t i = 0; i < 4 && st == ATTN_OK; i++) {
        st = t->ops->alloc(t->r, s->bytes, tensors[i]);
        if (st == ATTN_OK && i < 3)
            st = fill_tensor(t, s, i, *tensors[i]);
    }
    for (uint32_t rung = 0; rung < RUNG_COUNT; rung++) {
        const struct rung_call call = {.rung = (enum rung)rung,
                                       .is_f32 = c->is_f32,
                                       .batch = c->batch,
                                       .heads = c->heads,
                                       .dim = c->dim,
                                       .n = c->n};
        const uint64_t bytes = t->ops->names[rung] != NULL ? t->ops->scratch_bytes(t->r, &call) : 0;
        s->scratch_bytes = bytes > s->scratch_bytes ? bytes : s->scratch_bytes;
    }
    if (st == ATTN_OK)
        st = t->ops->alloc(t->r, s->scratch_bytes + 256, &s->scratch);
    if (st == ATTN_OK)
        st = t->ops->wait(t->r, 0);
    return table_fail(t, st, "a cell's tensors") && make_references(t, s);
}

void table_setup_close(struct tables *t, struct table_setup *s)
{
    t->ops->free(t->r, s->q);
    t->ops->free(t->r, s->k);
    t->ops->free(t->r, s->v);
    t->ops->free(t->r, s->out);
    t->ops->free(t->r, s->scratch);
    free(s->host);
    free(s->checked);
    free(s->want);
    *s = (struct table_setup){0};
}

/* ---- the product's kernel */

/* Tells the device each sequence's blocks, in steps of the table that share no factor with it. */
static bool make_table(struct tables *t, struct table_tuned *x, const struct table_cell *c)
{
    const uint32_t a_row = c->n / BLOCK_TOKENS, n = a_row * c->batch;
    struct backend_patch *patches = calloc(n, sizeof *patches);
    const uint32_t step = n % 7 ? 7 : n % 11 ? 11 : 1;
    x->blocks = calloc(n, sizeof *x->blocks);
    bool ok = patches != NULL && x->blocks != NULL;
    for (uint32_t i = 0; ok && i < n; i++) {
        x->blocks[i] = (uint32_t)((uint64_t)i * step % n);
        patches[i] = (struct backend_patch){i / a_row, i % a_row, x->blocks[i]};
    }
    struct backend_batch batch = {.pool = x->pool, .patches = patches, .n_patches = n};
    if (ok && backend_fail(t, x->b, t->backend->submit(x->b, &batch), "block tables")) {
        struct backend_batch *back = NULL;
        while (back == NULL)
            back = t->backend->poll(x->b, 1000000000);
        ok = backend_fail(t, x->b, back->status, "block tables");
    } else {
        ok = false;
    }
    free(patches);
    return ok;
}

static void make_items(struct table_tuned *x, const struct table_cell *c, const void *q,
                       const void *k, const void *v, void *out)
{
    const size_t row = (size_t)c->n * c->heads * c->dim * (c->is_f32 ? 4 : 2);
    for (uint32_t i = 0; i < c->batch; i++)
        x->items[i] = (struct backend_item){.flags = BACKEND_APPEND | BACKEND_ATTEND,
                                            .table_row = i,
                                            .n_tokens = c->n,
                                            .block_table = x->blocks + i * (c->n / BLOCK_TOKENS),
                                            .q = (const char *)q + i * row,
                                            .k = (const char *)k + i * row,
                                            .v = (const char *)v + i * row,
                                            .out = (char *)out + i * row};
    x->batch = (struct backend_batch){.pool = x->pool, .items = x->items, .n_items = c->batch};
}

bool table_tuned_open(struct tables *t, const struct table_cell *c, const void *q, const void *k,
                      const void *v, void *out, bool is_appended, struct table_tuned *x)
{
    const struct attn_layer_spec spec = {.scale = 1.0f / sqrtf((float)c->dim), .is_full = true};
    const attn_dtype type = c->is_f32 ? ATTN_F32 : ATTN_BF16;
    const uint64_t elements = (uint64_t)c->batch * c->n * c->heads * c->dim;
    const struct backend_config config = {.kv_bytes = 2 * elements * (c->is_f32 ? 4 : 2) + 65536,
                                          .max_batch_items = c->batch,
                                          .max_batch_tokens = c->batch * c->n,
                                          .n_threads = t->options.n_threads,
                                          .import_fd = -1};
    const struct backend_pool_config pool = {.num_layers = 1,
                                             .num_q_heads = c->heads,
                                             .num_kv_heads = c->heads,
                                             .head_dim_k = c->dim,
                                             .head_dim_v = c->dim,
                                             .block_tokens = BLOCK_TOKENS,
                                             .n_blocks = c->batch * c->n / BLOCK_TOKENS,
                                             .n_table_rows = c->batch,
                                             .max_row_blocks = c->n / BLOCK_TOKENS,
                                             .q_dtype = type,
                                             .kv_dtype = type,
                                             .layers = &spec};
    *x = (struct table_tuned){0};
    x->items = calloc(c->batch, sizeof *x->items);
    if (x->items == NULL) {
        snprintf(t->error, sizeof t->error, "no memory for a batch");
        return false;
    }
    if (!backend_fail(t, x->b, t->backend->open(&config, &x->b), "opening the backend") ||
        !backend_fail(t, x->b, t->backend->pool_open(x->b, &pool, &x->pool), "opening a pool") ||
        !make_table(t, x, c))
        return false;
    make_items(x, c, q, k, v, out);
    attn_status st = t->own->work_open(x->b, &x->batch, &x->work);
    if (st == ATTN_OK && !is_appended) { /* once to fill the cache, then without */
        st = x->work->run(x->work, t->ops->stream(t->r, 0));
        if (!table_fail(t, t->ops->wait(t->r, 0), "filling the cache"))
            return false;
        x->work->close(x->work);
        x->work = NULL;
        for (uint32_t i = 0; i < c->batch; i++)
            x->items[i].flags = BACKEND_ATTEND;
        if (st == ATTN_OK)
            st = t->own->work_open(x->b, &x->batch, &x->work);
    }
    return backend_fail(t, x->b, st, "a batch");
}

void table_tuned_close(struct tables *t, struct table_tuned *x)
{
    if (x->work != NULL)
        x->work->close(x->work);
    t->backend->close(x->b);
    free(x->items);
    free(x->blocks);
    *x = (struct table_tuned){0};
}

/* ---- a rung on a cell */

static bool check(struct tables *t, struct table_setup *s, struct bench_work *work,
                  struct table_result *out)
{
    const attn_dtype type = s->c->is_f32 ? ATTN_F32 : ATTN_BF16;
    const uint32_t size = s->c->is_f32 ? 4 : 2;
    double diff = 0, norm = 0;
    attn_status st = t->ops->fill(t->r, s->out, 0xff, s->bytes, 0);
    if (st == ATTN_OK)
        st = work->run(work, t->ops->stream(t->r, 0));
    if (st == ATTN_OK)
        st = t->ops->copy(t->r, s->host, s->out, s->bytes, 0);
    if (st == ATTN_OK)
        st = t->ops->wait(t->r, 0);
    if (!table_fail(t, st, "computing a cell"))
        return false;
    out->rows = s->elements / s->c->dim;
    out->rows_checked = s->n_checked;
    out->is_right = true;
    for (uint64_t i = 0; i < s->elements; i++) { /* the exponent's bits */
        const uint8_t *x = (const uint8_t *)s->host + i * size + size - 2;
        out->is_right = out->is_right && ((x[1] & 0x7f) != 0x7f || (x[0] & 0x80) == 0);
    }
    for (uint32_t i = 0; i < s->n_checked; i++)
        for (uint32_t e = 0; e < s->c->dim; e++) {
            const double want = s->want[(size_t)i * s->c->dim + e];
            const double error =
                fabs(reference_get(type, s->host, s->checked[i] * s->c->dim + e) - want);
            out->max_abs = error > out->max_abs ? error : out->max_abs;
            diff += error * error;
            norm += want * want;
        }
    out->l2 = sqrt(diff / norm);
    out->is_right = out->is_right && out->l2 <= (s->c->is_f32 ? 1e-4 : 1e-2);
    t->is_wrong = t->is_wrong || !out->is_right;
    return true;
}

static attn_status run_once(struct tables *t, struct bench_work *work, uint64_t *out_ns)
{
    attn_status st = t->ops->evict(t->r, 0);
    if (st == ATTN_OK)
        st = t->ops->mark(t->r, 0, 0);
    if (st == ATTN_OK)
        st = work->run(work, t->ops->stream(t->r, 0));
    if (st == ATTN_OK)
        st = t->ops->mark(t->r, 1, 0);
    if (st == ATTN_OK)
        st = t->ops->wait(t->r, 0);
    return st == ATTN_OK ? t->ops->elapsed(t->r, 0, 1, out_ns) : st;
}

static bool time_runs(struct tables *t, struct bench_work *work, struct table_result *out)
{
    uint64_t spent = 0, burst = BURST_NS, ns = 0;
    attn_status st = ATTN_OK;
    uint32_t n = 0;
    double *ms = calloc(t->options.runs, sizeof *ms);
    if (ms == NULL)
        st = ATTN_ENOMEM;
    for (; st == ATTN_OK && n < t->options.runs && (n < 2 || spent < MOST_NS); n++) {
        if (burst >= BURST_NS) {
            nanosleep(&(struct timespec){.tv_nsec = REST_NS}, NULL);
            spent += REST_NS;
            burst = 0;
            if (ns < BURST_NS / 5) /* a rest lets clocks fall: they come back in a run not timed */
                st = run_once(t, work, &ns);
        }
        if (st == ATTN_OK)
            st = run_once(t, work, &ns);
        spent += ns;
        burst += ns;
        ms[n] = (double)ns / 1e6;
    }
    if (st == ATTN_OK)
        table_times(out, ms, n);
    free(ms);
    return table_fail(t, st, "timing a cell");
}

bool table_measure(struct tables *t, struct table_setup *s, uint32_t rung, struct table_result *out)
{
    const struct table_cell *c = s->c;
    struct table_tuned tuned = {0};
    struct bench_work *work = NULL;
    bool ok;
    *out = (struct table_result){.streams = 1, .attention_share = 1};
    if (rung == RUNG_TUNED) {
        ok = table_tuned_open(t, c, s->q, s->k, s->v, s->out, false, &tuned);
        work = tuned.work;
    } else {
        struct rung_call call = {.rung = (enum rung)rung,
                                 .is_f32 = c->is_f32,
                                 .batch = c->batch,
                                 .heads = c->heads,
                                 .dim = c->dim,
                                 .n = c->n,
                                 .scale = 1.0f / sqrtf((float)c->dim),
                                 .q = s->q,
                                 .k = s->k,
                                 .v = s->v,
                                 .out = s->out,
                                 .scratch = s->scratch};
        call.scratch_bytes = out->scratch_bytes = t->ops->scratch_bytes(t->r, &call);
        ok = table_fail(t, t->ops->attend_open(t->r, &call, &work), table_rung_name(t, rung));
    }
    ok = ok && check(t, s, work, out) && time_runs(t, work, out);
    out->tflops = ok ? table_flops(c) / out->avg_ms / 1e9 : 0;
    if (rung == RUNG_TUNED)
        table_tuned_close(t, &tuned);
    else if (work != NULL)
        work->close(work);
    return ok;
}
