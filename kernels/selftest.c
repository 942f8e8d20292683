/* selftest.c: runs the self test and prints its report. A case is one geometry with one set of
 * options: prompts of three lengths are appended and attended, then a step of a few tokens each
 * after one block was copied, then its queries visit some of the tokens, then the step is computed
 * again by every variant of the bench and by none, as a graph where the device has them.
 */
#include "kernels/selftest.h"

#include "kernels/cases.h"
#include "kernels/kv_layout.h"
#include "kernels/load.h"
#include "kernels/reference.h"

#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/utsname.h>
#include <unistd.h>

#define N_SEQS 3
#define MAX_TOKENS 384 /* of a sequence */
#define MAX_STEP 5 /* tokens of a step behind the prompts */
#define N_BLOCKS 96
#define KV_BYTES (64u << 20)
#define HOST_BYTES (48u << 20)
#define WAIT_NS 30000000000u

struct selftest {
    const struct backend_ops *ops;
    const struct backend_bench_ops *bench; /* NULL: it cannot measure itself */
    struct backend_config config;
    struct backend *b;
    FILE *out;
    uint32_t max_in_flight, n_ok, n_refused, n_failed;
    bool has_lists, has_choice;
    uint64_t rng;
    char *memory; /* host memory of the device: reset for each case */
    size_t used;
};

struct seq {
    uint32_t len, table[MAX_TOKENS / 8];
    float *k, *v; /* as the cache must read back: [MAX_TOKENS][kv heads][dim] */
};

struct run {
    struct selftest *t;
    bool has_heads;
    struct backend_pool *pool;
    struct backend_pool_config config;
    struct attn_layer_spec spec;
    struct seq seqs[N_SEQS];
    float *weights; /* [num_q_heads][q_nope_dim + out_dim][head_dim_v]; NULL: no projections */
    const void *q[N_SEQS]; /* of items, as it attends: [n_tokens][num_q_heads][head_dim_k] */
    uint32_t next_block;
    struct backend_patch patches[N_BLOCKS];
    uint32_t n_patches;
    struct backend_copy copy;
    uint32_t n_copies;
    struct backend_item items[N_SEQS];
    double max_error, max_share; /* of finite outputs; share: of what is allowed there */
    char why[160];
};

/* A row of each table of cases.h. */
struct test_case {
    uint8_t geometry, dtype, options;
};

/* Every kernel of the GPU backends is in some case: matrix kernels for head dims up to 64, 128
 * and 256, few rows and many, 16-bit and quantised, of bf16 and f16; vector kernels of all widths;
 * tuned ones. */
static const struct test_case cases[] = {
    {CASE_GROUPED, CASE_BF16, CASE_PLAIN},
    {CASE_GROUPED, CASE_F16, CASE_PLAIN},
    {CASE_GROUPED, CASE_F32, CASE_PLAIN},
    {CASE_HEAD_EACH, CASE_BF16, CASE_PLAIN},
    {CASE_DIM_256, CASE_BF16, CASE_PLAIN},
    {CASE_DIM_256, CASE_F16, CASE_PLAIN},
    {CASE_OTHER_DIMS, CASE_BF16, CASE_PLAIN},
    {CASE_GROUP_OF_3, CASE_F16, CASE_PLAIN},
    {CASE_GROUPED, CASE_BF16_FP8, CASE_PLAIN},
    {CASE_GROUPED, CASE_BF16_INT8, CASE_PLAIN},
    {CASE_ONE_KV_HEAD, CASE_F16_FP8, CASE_PLAIN},
    {CASE_DIM_256, CASE_F16_INT8, CASE_PLAIN},
    {CASE_ONE_KV_HEAD, CASE_BF16_INT8, CASE_PLAIN},
    {CASE_DIM_256, CASE_BF16_FP8, CASE_PLAIN},
    {CASE_GROUPED, CASE_F16_FP8, CASE_PLAIN},
    {CASE_SMALLEST_BLOCK, CASE_F32_INT8, CASE_PLAIN},
    {CASE_DIM_256, CASE_F32, CASE_PLAIN},
    {CASE_GROUPED, CASE_BF16, CASE_WINDOW_AND_SINKS},
    {CASE_GROUPED, CASE_BF16, CASE_SOFT_CAP},
    {CASE_HEAD_EACH, CASE_F16, CASE_SINK_LOGITS},
    {CASE_GROUPED, CASE_F16, CASE_ALIBI},
    {CASE_GROUPED, CASE_BF16, CASE_FULL},
    {CASE_GROUPED, CASE_BF16, CASE_BATCH_INVARIANT},
    {CASE_LATENT, CASE_BF16, CASE_PLAIN},
    {CASE_LATENT_OF_256, CASE_F32, CASE_PLAIN},
    {CASE_LATENT, CASE_BF16_FP8, CASE_PLAIN},
    {CASE_DIM_512, CASE_BF16, CASE_PLAIN},
};
enum { WITH_VARIANTS_16_BIT = 0, WITH_VARIANTS_QUANTISED = 8 };

/* Whose items carry heads, which are projected to latents and back: kernels of each dtype. */
static const struct test_case cases_of_heads[] = {
    {CASE_LATENT, CASE_BF16, CASE_PLAIN},
    {CASE_V_IS_K, CASE_F16, CASE_PLAIN},
    {CASE_LATENT_OF_256, CASE_F32, CASE_PLAIN},
};
enum { Q_NOPE_DIM = 72, OUT_DIM = 88 }; /* more than a kernel's tile, less than two */

/* ---- the report */

enum verdict { OK, REFUSED, FAILED };

__attribute__((format(printf, 3, 4))) static void report(struct selftest *t, enum verdict v,
                                                         const char *format, ...)
{
    static const char *const words[] = {"ok           ", "not supported", "FAILED       "};
    va_list args;
    t->n_ok += v == OK;
    t->n_refused += v == REFUSED;
    t->n_failed += v == FAILED;
    fprintf(t->out, "%s  ", words[v]);
    va_start(args, format);
    vfprintf(t->out, format, args);
    va_end(args);
    fputc('\n', t->out);
    fflush(t->out);
}

/* What a failing call leaves to say. */
static bool call_failed(struct run *r, const char *call, attn_status st)
{
    snprintf(r->why, sizeof r->why, "%s: %s: %s", call, attn_status_name(st),
             r->t->ops->last_error(r->t->b));
    return false;
}

/* ---- data */

static float random_unit(struct selftest *t)
{
    t->rng ^= t->rng << 13;
    t->rng ^= t->rng >> 7;
    t->rng ^= t->rng << 17;
    return (float)(t->rng >> 40) / (1 << 23) - 1.0f; /* [-1, 1) */
}

static void *take(struct selftest *t, size_t bytes)
{
    size_t at = t->used;
    t->used += (bytes + 63) / 64 * 64;
    return t->used <= HOST_BYTES ? t->memory + at : NULL;
}

static void *take_random(struct run *r, size_t n)
{
    void *p = take(r->t, n * attn_dtype_bytes(r->config.q_dtype));
    for (size_t i = 0; p != NULL && i < n; i++)
        reference_put(r->config.q_dtype, p, i, 1.7 * (double)random_unit(r->t));
    return p;
}

/* What the cache must read back: one head's row of n elements. */
static void remember(const struct run *r, const void *from, size_t at, uint32_t n, float *to)
{
    reference_cached_row(r->config.q_dtype, r->config.kv_dtype, from, at, n, to);
}

static void set_block(struct run *r, uint32_t seq, uint32_t index)
{
    uint32_t block = r->next_block++ * 37 % N_BLOCKS; /* in no order */
    r->seqs[seq].table[index] = block;
    r->patches[r->n_patches++] = (struct backend_patch){seq, index, block};
}

static size_t out_bytes_of(const struct run *r, uint32_t n_tokens)
{
    return (size_t)n_tokens * r->config.num_q_heads * backend_out_dim(&r->config) *
           attn_dtype_bytes(r->config.q_dtype);
}

/* The weights of a head. */
static const float *weights_of(const struct run *r, uint32_t head)
{
    const struct backend_pool_config *c = &r->config;
    return r->weights + (size_t)head * (c->q_nope_dim + c->out_dim) * c->head_dim_v;
}

/* Weights of about unit size that leave what is multiplied with them as large as it was. */
static attn_status give_weights(struct run *r)
{
    const struct backend_pool_config *c = &r->config;
    const size_t dv = c->head_dim_v, head = (c->q_nope_dim + c->out_dim) * dv;
    const uint64_t bytes = backend_weights_bytes(c);
    void *given = malloc(bytes);
    r->weights = malloc(c->num_q_heads * head * sizeof *r->weights);
    attn_status st = given != NULL && r->weights != NULL ? ATTN_OK : ATTN_ENOMEM;
    for (size_t i = 0; st == ATTN_OK && i < c->num_q_heads * head; i++) {
        const size_t n_summed = i % head < c->q_nope_dim * dv ? c->q_nope_dim : dv;
        reference_put(c->q_dtype, given, i, (double)random_unit(r->t) * sqrt(3.0 / n_summed));
        r->weights[i] = (float)reference_get(c->q_dtype, given, i);
    }
    if (st == ATTN_OK)
        st = r->t->ops->weights_write(r->pool, 0, 0, given, bytes);
    free(given);
    return st;
}

/* An item's q as it attends, n_rows of it; NULL: host memory is too small. */
static const void *attended_q(struct run *r, const void *q, size_t n_rows)
{
    const struct backend_pool_config *c = &r->config;
    const size_t dim = backend_q_dim(c), dk = c->head_dim_k;
    float given[BACKEND_MAX_LATENT_K], wide[BACKEND_MAX_LATENT_K];
    if (r->weights == NULL)
        return q;
    void *to = take(r->t, n_rows * dk * attn_dtype_bytes(c->q_dtype));
    for (size_t row = 0; to != NULL && row < n_rows; row++) {
        for (size_t i = 0; i < dim; i++)
            given[i] = (float)reference_get(c->q_dtype, q, row * dim + i);
        reference_absorb(c, weights_of(r, row % c->num_q_heads), given, wide);
        for (size_t i = 0; i < dk; i++)
            reference_put(c->q_dtype, to, row * dk + i, (double)wide[i]);
    }
    return to;
}

/* An item of n new tokens of a sequence; false: host memory is too small. */
static bool add_tokens(struct run *r, uint32_t seq, uint32_t n)
{
    const struct backend_pool_config *c = &r->config;
    struct seq *s = &r->seqs[seq];
    size_t kv_rows = (size_t)n * c->num_kv_heads, rows = (size_t)n * c->num_q_heads;
    size_t out_bytes = out_bytes_of(r, n);
    struct backend_item *it = &r->items[seq];
    *it = (struct backend_item){.flags = BACKEND_APPEND | BACKEND_ATTEND,
                                .table_row = seq,
                                .pos = s->len,
                                .n_tokens = n,
                                .block_table = s->table};
    it->q = take_random(r, rows * backend_q_dim(c));
    r->q[seq] = it->q != NULL ? attended_q(r, it->q, rows) : NULL;
    it->k = take_random(r, kv_rows * c->head_dim_k);
    it->v = c->is_v_in_k ? it->k : take_random(r, kv_rows * c->head_dim_v);
    it->out = take(r->t, out_bytes);
    it->lse = take(r->t, rows * sizeof *it->lse);
    if (!r->q[seq] || !it->k || !it->v || !it->out || !it->lse) {
        snprintf(r->why, sizeof r->why, "the case does not fit its host memory");
        return false;
    }
    memset(it->out, 0xff, out_bytes);
    memset(it->lse, 0xff, rows * sizeof *it->lse);
    size_t row0 = (size_t)s->len * c->num_kv_heads;
    for (size_t i = 0; i < kv_rows; i++) {
        float *k = s->k + (row0 + i) * c->head_dim_k, *v = s->v + (row0 + i) * c->head_dim_v;
        remember(r, it->k, i * c->head_dim_k, c->head_dim_k, k);
        if (c->is_v_in_k)
            memcpy(v, k, c->head_dim_v * sizeof *v);
        else
            remember(r, it->v, i * c->head_dim_v, c->head_dim_v, v);
    }
    uint32_t had = (s->len + c->block_tokens - 1) / c->block_tokens;
    s->len += n;
    for (uint32_t i = had; i * c->block_tokens < s->len; i++)
        set_block(r, seq, i);
    return true;
}

/* ---- checks */

static bool run_batch(struct run *r)
{
    const struct backend_ops *ops = r->t->ops;
    struct backend_batch batch = {.pool = r->pool,
                                  .items = r->items,
                                  .n_items = N_SEQS,
                                  .patches = r->patches,
                                  .n_patches = r->n_patches,
                                  .copies = &r->copy,
                                  .n_copies = r->n_copies};
    attn_status st = ops->submit(r->t->b, &batch);
    if (st != ATTN_OK)
        return call_failed(r, "submit", st);
    struct backend_batch *back = ops->poll(r->t->b, WAIT_NS);
    r->n_patches = r->n_copies = 0;
    if (back != &batch)
        return call_failed(r, "no batch came back in 30 s", ATTN_EDEVICE);
    return back->status == ATTN_OK || call_failed(r, "batch", back->status);
}

static bool is_close(double got, double want, double bound)
{
    if (isinf(want))
        return got == want;
    return fabs(got - want) <= bound; /* false if either is NaN */
}

/* A row of an item's output against what attention gives for it. */
static bool check_row(struct run *r, uint32_t seq, size_t row, const double *latents)
{
    const struct backend_pool_config *c = &r->config;
    const struct backend_item *it = &r->items[seq];
    const size_t dim = backend_out_dim(c);
    struct reference_bound bound = reference_bound_of(c->q_dtype, c->q_dtype);
    double expanded[BACKEND_MAX_HEAD_DIM];
    const double *want = r->weights != NULL ? expanded : latents;
    bool ok = true;
    if (r->weights != NULL)
        reference_expand(c, weights_of(r, row % c->num_q_heads), latents, expanded);
    for (size_t i = 0; ok && i < dim; i++) {
        double got = reference_get(c->q_dtype, it->out, row * dim + i), error = fabs(got - want[i]);
        double allowed = bound.atol + bound.rtol * fabs(want[i]);
        ok = is_close(got, want[i], allowed);
        if (ok && error > r->max_error)
            r->max_error = error;
        if (ok && error > r->max_share * allowed)
            r->max_share = error / allowed;
        if (!ok)
            snprintf(r->why, sizeof r->why,
                     "out of sequence %" PRIu32 " at %" PRIu32 "+%" PRIu32
                     ", row %zu, element %zu: %g, reference %g",
                     seq, it->pos, it->n_tokens, row, i, got, want[i]);
    }
    return ok;
}

/* n rows of an item's outputs, from row0 on, against what attention gives for them. */
static bool check_rows(struct run *r, uint32_t seq, size_t row0, size_t n, const double *want,
                       const double *lse)
{
    const struct backend_item *it = &r->items[seq];
    struct reference_bound bound = reference_bound_of(r->config.q_dtype, r->config.q_dtype);
    bool ok = true;
    for (size_t i = 0; ok && i < n; i++)
        ok = check_row(r, seq, row0 + i, want + i * r->config.head_dim_v);
    for (size_t i = 0; ok && i < n; i++) {
        const double got = (double)it->lse[row0 + i];
        ok = is_close(got, lse[i], bound.lse_atol + bound.lse_rtol * fabs(lse[i]));
        if (!ok)
            snprintf(r->why, sizeof r->why,
                     "lse of sequence %" PRIu32 " at %" PRIu32 "+%" PRIu32
                     ", row %zu: %g, reference %g",
                     seq, it->pos, it->n_tokens, row0 + i, got, lse[i]);
    }
    return ok;
}

/* One item's outputs against the reference over all that was appended. */
static bool check_item(struct run *r, uint32_t seq)
{
    const struct backend_pool_config *c = &r->config;
    const struct backend_item *it = &r->items[seq];
    const struct seq *s = &r->seqs[seq];
    size_t rows = (size_t)it->n_tokens * c->num_q_heads, n_q = rows * c->head_dim_k;
    float *q = malloc(n_q * sizeof *q);
    double *want = malloc(rows * c->head_dim_v * sizeof *want), *lse = malloc(rows * sizeof *lse);
    bool ok = q && want && lse;
    for (size_t i = 0; ok && i < n_q; i++)
        q[i] = (float)reference_get(c->q_dtype, r->q[seq], i);
    const struct reference_seen seen = {.starts = it->lists.starts, .tokens = it->lists.tokens};
    ok = ok && reference_attend_seen(&r->spec, c->num_q_heads, c->num_kv_heads, c->head_dim_k,
                                     c->head_dim_v, ATTN_F32, q, it->n_tokens, it->pos, s->k, s->v,
                                     s->len, &seen, want, lse) == ATTN_OK;
    if (!ok)
        snprintf(r->why, sizeof r->why, "out of host memory");
    ok = ok && check_rows(r, seq, 0, rows, want, lse);
    free(q);
    free(want);
    free(lse);
    return ok;
}

static bool check_items(struct run *r)
{
    for (uint32_t i = 0; i < N_SEQS; i++)
        if (!check_item(r, i))
            return false;
    return true;
}

/* Outputs of the last step become NaN, and its items attend only. */
static void attend_again(struct run *r)
{
    for (uint32_t i = 0; i < N_SEQS; i++) {
        struct backend_item *it = &r->items[i];
        size_t rows = (size_t)it->n_tokens * r->config.num_q_heads;
        it->flags = BACKEND_ATTEND;
        memset(it->out, 0xff, out_bytes_of(r, it->n_tokens));
        memset(it->lse, 0xff, rows * sizeof *it->lse);
    }
}

/* The last step once more by a variant of the bench, twice: as a graph where there are graphs. */
static bool check_variant(struct run *r, const char *variant, bool *out_is_refused)
{
    uint64_t ns[2];
    attend_again(r);
    struct backend_batch batch = {.pool = r->pool, .items = r->items, .n_items = N_SEQS};
    struct backend_batch *batches[1] = {&batch};
    attn_status st = r->t->bench->time_batch(r->t->b, variant, batches, 1, 2, false, ns);
    *out_is_refused = st == ATTN_ENOTSUP;
    if (*out_is_refused)
        return true;
    return st == ATTN_OK ? check_items(r) : call_failed(r, "time_batch", st);
}

/* The last step once more, each of whose queries visits about a third of what it sees. */
static bool check_lists(struct run *r)
{
    static uint32_t starts[N_SEQS][MAX_STEP + 1], tokens[N_SEQS * MAX_STEP * MAX_TOKENS];
    uint32_t n = 0;
    attend_again(r);
    for (uint32_t i = 0; i < N_SEQS; i++) {
        struct backend_item *it = &r->items[i];
        for (uint32_t t = 0; t < it->n_tokens; t++) {
            const uint32_t p = it->pos + t, window = r->spec.window_tokens;
            starts[i][t] = n;
            for (uint32_t j = t % 3; j <= p; j += 1 + (t + j) % 5)
                if (window == 0 || j + window > p || j < r->spec.sink_tokens)
                    tokens[n++] = j;
        }
        starts[i][it->n_tokens] = n;
        it->lists = (struct backend_lists){.starts = starts[i], .tokens = tokens};
    }
    bool ok = run_batch(r) && check_items(r);
    for (uint32_t i = 0; i < N_SEQS; i++)
        r->items[i].lists = (struct backend_lists){.starts = NULL};
    return ok;
}

/* One query and kv head of a choosing item; has room for what the reference takes and gives. */
struct choosing {
    float *q, *k, *v;
    double *want, *lse;
    uint32_t tokens[MAX_TOKENS];
};

static bool check_choice(struct run *r, uint32_t seq, uint32_t token, uint32_t head,
                         struct choosing *x)
{
    const struct backend_pool_config *c = &r->config;
    const struct backend_item *it = &r->items[seq];
    const struct seq *s = &r->seqs[seq];
    const uint32_t group = c->num_q_heads / c->num_kv_heads, dk = c->head_dim_k, dv = c->head_dim_v;
    const uint32_t end = r->spec.is_full ? s->len : it->pos + token + 1;
    const size_t row0 = (size_t)token * c->num_q_heads + (size_t)head * group;
    struct attn_layer_spec spec = r->spec;
    double margin;
    if (spec.sink_logits != NULL)
        spec.sink_logits += head * group;
    for (size_t i = 0; i < (size_t)group * dk; i++)
        x->q[i] = (float)reference_get(c->q_dtype, r->q[seq], row0 * dk + i);
    for (size_t j = 0; j < end; j++) {
        const size_t row = j * c->num_kv_heads + head;
        memcpy(x->k + j * dk, s->k + row * dk, dk * sizeof *x->k);
        memcpy(x->v + j * dv, s->v + row * dv, dv * sizeof *x->v);
    }
    const uint32_t starts[] = {0, reference_choose(it->n_chosen, c->block_tokens, group, dk, x->q,
                                                   x->k, end, x->tokens, &margin, NULL)};
    const struct reference_seen seen = {.starts = starts, .tokens = x->tokens};
    if (starts[1] > 0 && margin < 1e-3) /* sums of f32 may take another block */
        return true;
    if (starts[1] > 0 && reference_attend_seen(&spec, group, 1, dk, dv, ATTN_F32, x->q, 1, end - 1,
                                               x->k, x->v, end, &seen, x->want, x->lse) == ATTN_OK)
        return check_rows(r, seq, row0, group, x->want, x->lse);
    snprintf(r->why, sizeof r->why, "out of host memory");
    return false;
}

/* The last step once more, whose queries choose four blocks. */
static bool check_choices(struct run *r)
{
    const struct backend_pool_config *c = &r->config;
    const size_t group = c->num_q_heads / c->num_kv_heads, dk = c->head_dim_k, dv = c->head_dim_v;
    struct choosing x = {.q = malloc(group * dk * sizeof *x.q),
                         .k = malloc(MAX_TOKENS * dk * sizeof *x.k),
                         .v = malloc(MAX_TOKENS * dv * sizeof *x.v),
                         .want = malloc(group * dv * sizeof *x.want),
                         .lse = malloc(group * sizeof *x.lse)};
    bool ok = x.q && x.k && x.v && x.want && x.lse;
    if (!ok)
        snprintf(r->why, sizeof r->why, "out of host memory");
    attend_again(r);
    for (uint32_t i = 0; i < N_SEQS; i++)
        r->items[i].n_chosen = 4;
    ok = ok && run_batch(r);
    for (uint32_t i = 0; i < N_SEQS; i++)
        for (uint32_t t = 0; ok && t < r->items[i].n_tokens; t++)
            for (uint32_t h = 0; ok && h < c->num_kv_heads; h++)
                ok = check_choice(r, i, t, h, &x);
    for (uint32_t i = 0; i < N_SEQS; i++)
        r->items[i].n_chosen = 0;
    free(x.q);
    free(x.k);
    free(x.v);
    free(x.want);
    free(x.lse);
    return ok;
}

static bool run_steps(struct run *r)
{
    static const uint32_t prompts[N_SEQS] = {1, 40, 270}, steps[N_SEQS] = {1, MAX_STEP, 3};
    for (uint32_t i = 0; i < N_SEQS; i++)
        if (!add_tokens(r, i, prompts[i]))
            return false;
    if (!run_batch(r) || !check_items(r))
        return false;
    /* the first block of the longest sequence moves; the step appends behind it */
    r->copy.src = r->seqs[2].table[0];
    set_block(r, 2, 0);
    r->copy.dst = r->seqs[2].table[0];
    r->n_copies = 1;
    for (uint32_t i = 0; i < N_SEQS; i++)
        if (!add_tokens(r, i, steps[i]))
            return false;
    const bool can_choose =
        r->t->has_choice && r->spec.window_tokens == 0 && r->spec.alibi_slopes == NULL;
    return run_batch(r) && check_items(r) && (!r->t->has_lists || check_lists(r)) &&
           (!can_choose || check_choices(r));
}

/* false: the geometry is refused, or a call failed; reported. */
static bool open_run(struct run *r, const struct test_case *c, const char *name)
{
    struct selftest *t = r->t;
    static float logits[64], slopes[64];
    for (int i = 0; i < 64; i++) {
        logits[i] = 2 * random_unit(t);
        slopes[i] = -0.02f * (float)(1 + i % 10);
    }
    const struct case_geometry *g = &case_geometries[c->geometry];
    const struct case_options *o = &case_options[c->options];
    r->spec = case_spec(g, o);
    r->spec.sink_logits = o->has_sink_logits ? logits : NULL;
    r->spec.alibi_slopes = o->has_alibi ? slopes : NULL;
    r->config = case_config(g, case_dtypes[c->dtype], o);
    r->config.q_nope_dim = r->has_heads ? Q_NOPE_DIM : 0;
    r->config.out_dim = r->has_heads ? OUT_DIM : 0;
    r->config.num_layers = 1;
    r->config.n_blocks = N_BLOCKS;
    r->config.n_table_rows = N_SEQS;
    r->config.max_row_blocks = MAX_TOKENS / g->block_tokens;
    r->config.layers = &r->spec;
    attn_status st = t->ops->pool_check(t->b, &r->config);
    if (st == ATTN_OK)
        st = t->ops->pool_open(t->b, &r->config, &r->pool);
    if (st == ATTN_OK && r->has_heads)
        st = give_weights(r);
    if (st != ATTN_OK)
        report(t, st == ATTN_ENOTSUP ? REFUSED : FAILED, "%s: %s", name, t->ops->last_error(t->b));
    for (uint32_t i = 0; i < N_SEQS; i++) {
        r->seqs[i].k = calloc((size_t)MAX_TOKENS * g->num_kv_heads * g->head_dim_k, sizeof(float));
        r->seqs[i].v = calloc((size_t)MAX_TOKENS * g->num_kv_heads * g->head_dim_v, sizeof(float));
        if (st == ATTN_OK && (!r->seqs[i].k || !r->seqs[i].v)) {
            st = ATTN_ENOMEM;
            report(t, FAILED, "%s: out of host memory", name);
        }
    }
    t->used = 0;
    return st == ATTN_OK;
}

static void close_run(struct run *r)
{
    for (uint32_t i = 0; i < N_SEQS; i++) {
        free(r->seqs[i].k);
        free(r->seqs[i].v);
    }
    free(r->weights);
    if (r->pool != NULL)
        r->t->ops->pool_close(r->pool);
}

/* What the checks that follow check. */
static void say_kernels(const struct run *r)
{
    char kernels[512];
    if (r->t->ops->pool_kernels == NULL)
        return;
    r->t->ops->pool_kernels(r->pool, kernels, sizeof kernels);
    fprintf(r->t->out, "computed by    %s\n", kernels);
}

enum how { ONCE, WITH_VARIANTS, WITH_HEADS };

static void test_one(struct selftest *t, const struct test_case *c, enum how how)
{
    char name[160];
    const struct case_geometry *g = &case_geometries[c->geometry];
    const struct case_options *o = &case_options[c->options];
    snprintf(name, sizeof name, "%s/%s, %u/%u heads of %u/%u, blocks of %u: %s%s%s%s",
             attn_dtype_name(case_dtypes[c->dtype].q), attn_dtype_name(case_dtypes[c->dtype].kv),
             g->num_q_heads, g->num_kv_heads, g->head_dim_k, g->head_dim_v, g->block_tokens,
             g->name, c->options ? ", " : "", c->options ? o->name : "",
             how == WITH_HEADS ? ", projected heads" : "");
    struct run r = {.t = t, .has_heads = how == WITH_HEADS};
    if (open_run(&r, c, name)) {
        say_kernels(&r);
        if (run_steps(&r))
            report(t, OK, "%s: largest error %.2g, %.0f %% of the bound", name, r.max_error,
                   100 * r.max_share);
        else
            report(t, FAILED, "%s: %s", name, r.why);
        bool is_last = how != WITH_VARIANTS;
        for (uint32_t v = 0; !is_last && r.why[0] == 0; v++) {
            bool is_refused;
            r.max_error = r.max_share = 0;
            const char *variant = t->bench->variants[v];
            is_last = variant == NULL; /* the kernels that submit takes */
            bool ok = check_variant(&r, variant, &is_refused);
            const char *words = is_last ? "none" : variant;
            if (ok)
                report(t, is_refused ? REFUSED : OK,
                       "  variant %s: largest error %.2g, %.0f %% of the bound", words, r.max_error,
                       100 * r.max_share);
            else
                report(t, FAILED, "  variant %s: %s", words, r.why);
        }
    }
    close_run(&r);
}

/* Two batches in flight come back in order; the second sees what the first appended. */
static void test_order(struct selftest *t)
{
    struct run r = {.t = t};
    if (!open_run(&r, &cases[0], "two batches in flight")) {
        close_run(&r);
        return;
    }
    bool ok = true;
    struct backend_item first[N_SEQS];
    struct backend_batch batches[2] = {{.pool = r.pool, .items = first, .n_items = N_SEQS},
                                       {.pool = r.pool, .items = r.items, .n_items = N_SEQS}};
    for (int k = 0; k < 2 && ok; k++) {
        for (uint32_t i = 0; i < N_SEQS && ok; i++)
            ok = add_tokens(&r, i, k == 0 ? 20 + 9 * i : 1);
        if (k == 0)
            memcpy(first, r.items, sizeof first);
    }
    /* all patches with the first batch: the table only grows */
    batches[0].patches = r.patches;
    batches[0].n_patches = r.n_patches;
    uint32_t n_in_flight = 0, n_back = 0;
    for (uint32_t k = 0; k < 2 && ok; k++) {
        attn_status st = t->ops->submit(t->b, &batches[k]);
        ok = st == ATTN_OK || call_failed(&r, "submit", st);
        n_in_flight += ok;
        while (n_in_flight && (!ok || k == 1 || n_in_flight == t->max_in_flight)) {
            struct backend_batch *back = t->ops->poll(t->b, WAIT_NS);
            if (ok && (back != &batches[n_back] || back->status != ATTN_OK))
                ok = call_failed(&r, "batches came back in another order, or failed", ATTN_EDEVICE);
            n_in_flight--;
            n_back++;
        }
    }
    ok = ok && check_items(&r);
    report(t, ok ? OK : FAILED, "two batches, up to %" PRIu32 " in flight: %s", t->max_in_flight,
           ok ? "in order" : r.why);
    close_run(&r);
}

/* Blocks to and from the host, pools that are cleared, and memory that outlives its backend. */
static void test_memory(struct selftest *t)
{
    struct run r = {.t = t};
    if (!open_run(&r, &cases[0], "blocks")) {
        close_run(&r);
        return;
    }
    uint64_t bytes = kv_layout_of(&r.config).block_bytes;
    uint8_t *in = malloc(bytes), *back = malloc(bytes);
    bool ok = in && back;
    for (uint64_t i = 0; ok && i < bytes; i++) {
        in[i] = (uint8_t)(1 + i * 31 % 255);
        back[i] = 0;
    }
    ok = ok && t->ops->block_write(r.pool, 7, in) == ATTN_OK &&
         t->ops->block_read(r.pool, 7, back) == ATTN_OK && memcmp(in, back, bytes) == 0;
    report(t, ok ? OK : FAILED, "a block written and read back");
    t->ops->pool_close(r.pool);
    r.pool = NULL;
    ok = t->ops->pool_open(t->b, &r.config, &r.pool) == ATTN_OK && ok &&
         t->ops->block_read(r.pool, 7, back) == ATTN_OK;
    for (uint64_t i = 0; ok && i < bytes; i++)
        ok = back[i] == 0;
    report(t, ok ? OK : FAILED, "a pool where another one was, cleared");

    struct backend_config config = t->config;
    struct backend_pool *pool;
    struct backend *b = NULL;
    int fd = -1;
    config.kv_bytes = 8 << 20;
    attn_status st = t->ops->open(&config, &b);
    if (st == ATTN_OK)
        st = t->ops->export_memory(b, &fd);
    if (st == ATTN_ENOTSUP) {
        report(t, REFUSED, "export of KV memory: %s", t->ops->last_error(b));
    } else {
        ok = in && back && st == ATTN_OK && t->ops->pool_open(b, &r.config, &pool) == ATTN_OK &&
             t->ops->block_write(pool, 9, in) == ATTN_OK;
        if (ok)
            r.config.kv_place = t->ops->pool_place(pool);
        t->ops->close(b);
        b = NULL;
        config.import_fd = fd;
        ok = ok && t->ops->open(&config, &b) == ATTN_OK &&
             t->ops->pool_open(b, &r.config, &pool) == ATTN_OK &&
             t->ops->block_read(pool, 9, back) == ATTN_OK && memcmp(in, back, bytes) == 0;
        report(t, ok ? OK : FAILED, "export of KV memory: %s",
               ok ? "found again by an import" : t->ops->last_error(b));
        if (config.import_fd >= 0)
            close(config.import_fd);
    }
    t->ops->close(b);
    free(in);
    free(back);
    close_run(&r);
}

/* Memory that exists already, as the device's host memory. */
static void test_registered(struct selftest *t)
{
    char *own = t->memory;
    char *p = mmap(NULL, HOST_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) {
        report(t, FAILED, "registered host memory: out of memory");
        return;
    }
    attn_status st = t->ops->host_register(t->b, p, HOST_BYTES);
    if (st != ATTN_OK) {
        report(t, REFUSED, "registered host memory: %s", attn_status_message(st));
    } else {
        struct run r = {.t = t};
        t->memory = p;
        if (open_run(&r, &cases[0], "registered host memory")) {
            bool ok = run_steps(&r);
            report(t, ok ? OK : FAILED, "registered host memory: %s",
                   ok ? "read and written" : r.why);
        }
        close_run(&r);
        t->memory = own;
        t->ops->host_unregister(t->b, p, HOST_BYTES);
    }
    munmap(p, HOST_BYTES);
}

static void test_read(struct selftest *t)
{
    uint64_t ns[5];
    if (t->bench == NULL)
        return;
    if (t->bench->time_read(t->b, 32 << 20, 5, false, ns) == ATTN_OK)
        report(t, OK, "a read of 32 MiB takes %.1f us", (double)ns[4] / 1e3);
    else
        report(t, FAILED, "a read of 32 MiB: %s", t->ops->last_error(t->b));
}

static attn_status open_backend(struct selftest *t)
{
    void *memory;
    attn_status st = t->ops->open(&t->config, &t->b);
    if (st == ATTN_OK)
        st = t->ops->host_alloc(t->b, HOST_BYTES, &memory);
    if (st != ATTN_OK) {
        report(t, FAILED, "open: %s", t->ops->last_error(t->b));
        t->ops->close(t->b);
        return st;
    }
    t->memory = memory;
    return ATTN_OK;
}

attn_status selftest_run(const struct backend_ops *ops, int32_t device_index, uint32_t n_threads,
                         FILE *out)
{
    struct selftest t = {.ops = ops, .out = out, .rng = 20250};
    t.config = (struct backend_config){.kv_bytes = KV_BYTES,
                                       .max_batch_items = 16,
                                       .max_batch_tokens = 1024,
                                       .n_threads = n_threads,
                                       .device_index = device_index,
                                       .import_fd = -1};
    struct utsname host;
    fprintf(out, "backend %s, self test\n", ops->name);
    if (uname(&host) == 0)
        fprintf(out, "host   %s %s %s\n", host.sysname, host.release, host.machine);
    attn_status st = open_backend(&t);
    if (st != ATTN_OK) {
        fprintf(out, "%s: failed, it cannot be opened\n", ops->name);
        return st;
    }
    struct backend_info info;
    ops->info(t.b, &info);
    t.max_in_flight = info.max_in_flight;
    t.has_lists = (info.features & BACKEND_HAS_LISTS) != 0;
    t.has_choice = (info.features & BACKEND_HAS_CHOICE) != 0;
    fprintf(out, "device %s, %" PRIu32 " processors\n", info.device, info.n_processors);
    if (info.driver[0] != 0)
        fprintf(out, "driver %s\n", info.driver);
    char why[256];
    if (backend_bench_load(ops->name, &t.bench, why, sizeof why) != ATTN_OK)
        report(&t, FAILED, "measurement: %s", why);
    for (size_t i = 0; i < CASE_COUNT(cases); i++) {
        const bool has_variants = i == WITH_VARIANTS_16_BIT || i == WITH_VARIANTS_QUANTISED;
        test_one(&t, &cases[i], t.bench != NULL && has_variants ? WITH_VARIANTS : ONCE);
    }
    for (size_t i = 0; i < CASE_COUNT(cases_of_heads); i++)
        test_one(&t, &cases_of_heads[i], WITH_HEADS);
    test_order(&t);
    test_memory(&t);
    test_registered(&t);
    test_read(&t);
    ops->host_free(t.b, t.memory, HOST_BYTES);
    ops->close(t.b);
    fprintf(out, "%s: %s, %" PRIu32 " ok, %" PRIu32 " not supported, %" PRIu32 " failed\n",
            ops->name, t.n_failed ? "failed" : "passed", t.n_ok, t.n_refused, t.n_failed);
    return t.n_failed ? ATTN_EINTERNAL : ATTN_OK;
}
