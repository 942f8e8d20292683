/* test_extremes.c: positions and settings at the ends of their ranges, against the float64
 * reference: distances beyond 2^24 tokens, where floats have no odd numbers, and the largest and
 * smallest scales, caps, slopes and sink logits that a pool takes. Layers have windows or are
 * dilated, so that queries see few keys wherever they are.
 *
 *     test_extremes [NAME [EVERY [OFFSET]]]
 *
 * NAME is the backend, and of the cases one in EVERY is taken, as in test_backend. The keys are at
 * [base, base + N); the table's entries before them name any block.
 */
#include "tests/kernels/check.h"

#include "kernels/reference.h"

#include <inttypes.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
// clang-format off
#include <cmocka.h>
// clang-format on

enum { N = 400, BLOCK = 128, MAX_HEADS = 64 };

static uint32_t every = 1, offset;
static struct check check;

static const struct attn_layer_spec layers[] = {
    {.window_tokens = 50},
    {.window_tokens = 50, .soft_cap = 8},
    {.n_branches = 3, .branches = {{64, 1}, {128, 2}, {256, 4}}},
    {.n_branches = 1, .branches = {{64, 1}}, .is_full = true},
};

/* slope and sink: of every second head; 0: none have any. */
static const struct setting {
    float scale, soft_cap, slope, sink;
} settings[] = {
    {.scale = BACKEND_MAX_SCALE},
    {.scale = 1e-30f},
    {.scale = 0.125f, .soft_cap = BACKEND_MIN_SOFT_CAP},
    {.scale = 0.125f, .soft_cap = BACKEND_MAX_SOFT_CAP},
    {.scale = BACKEND_MAX_SCALE, .soft_cap = BACKEND_MAX_SOFT_CAP},
    {.scale = 0.125f, .slope = BACKEND_MAX_SETTING},
    {.scale = 0.125f, .slope = -BACKEND_MAX_SETTING},
    {.scale = 0.125f, .sink = BACKEND_MAX_SETTING},
    {.scale = 0.125f, .sink = -BACKEND_MAX_SETTING},
    {.scale = 0.125f, .sink = -INFINITY},
};

/* A pool of one sequence, and what its cache reads as. */
struct far {
    struct backend_pool_config config;
    struct attn_layer_spec spec;
    float slopes[MAX_HEADS], sinks[MAX_HEADS];
    struct backend_pool *pool;
    uint32_t base, *table;
    float *k, *v; /* [N][kv heads][dim] */
};

static void *take(size_t bytes)
{
    void *p = check.arena + check.arena_used;
    check.arena_used += (bytes + 63) / 64 * 64;
    assert_true(check.arena_used <= check.arena_bytes);
    return p;
}

/* Random values of q_dtype, with room for them. */
static void *take_random(const struct far *f, size_t n)
{
    void *p = take(n * attn_dtype_bytes(f->config.q_dtype));
    for (size_t i = 0; i < n; i++)
        reference_put(f->config.q_dtype, p, i, check_normal(&check));
    return p;
}

static void run(struct backend_batch *batch)
{
    assert_int_equal(check.ops->submit(check.b, batch), ATTN_OK);
    assert_ptr_equal(check.ops->poll(check.b, UINT64_MAX), batch);
    assert_int_equal(batch->status, ATTN_OK);
}

/* Appends all N tokens. */
static void fill(struct far *f)
{
    const struct backend_pool_config *c = &f->config;
    struct backend_patch patches[(N - 1) / BLOCK + 1];
    const size_t rows = (size_t)N * c->num_kv_heads;
    for (uint32_t i = 0; i <= (N - 1) / BLOCK; i++) {
        f->table[f->base / BLOCK + i] = i;
        patches[i] = (struct backend_patch){.index = f->base / BLOCK + i, .block = i};
    }
    struct backend_item item = {.flags = BACKEND_APPEND,
                                .pos = f->base,
                                .n_tokens = N,
                                .block_table = f->table,
                                .k = take_random(f, rows * c->head_dim_k),
                                .v = take_random(f, rows * c->head_dim_v)};
    for (size_t r = 0; r < rows; r++) {
        reference_cached_row(c->q_dtype, c->kv_dtype, item.k, r * c->head_dim_k, c->head_dim_k,
                             f->k + r * c->head_dim_k);
        reference_cached_row(c->q_dtype, c->kv_dtype, item.v, r * c->head_dim_v, c->head_dim_v,
                             f->v + r * c->head_dim_v);
    }
    run(&(struct backend_batch){.pool = f->pool,
                                .items = &item,
                                .patches = patches,
                                .n_items = 1,
                                .n_patches = (N - 1) / BLOCK + 1});
}

/* Queries at base + [at, at + n) are what the reference makes of them at [at, at + n). */
static void ask(const struct far *f, uint32_t at, uint32_t n)
{
    const struct backend_pool_config *c = &f->config;
    const size_t rows = (size_t)n * c->num_q_heads, n_out = rows * c->head_dim_v;
    const size_t out_bytes = n_out * attn_dtype_bytes(c->q_dtype);
    const struct reference_bound bound = reference_bound_of(c->q_dtype, c->q_dtype);
    struct backend_item item = {.flags = BACKEND_ATTEND,
                                .pos = f->base + at,
                                .n_tokens = n,
                                .block_table = f->table,
                                .q = take_random(f, rows * c->head_dim_k),
                                .out = take(out_bytes),
                                .lse = take(rows * sizeof(float))};
    memset(item.out, 0xff, out_bytes);
    memset(item.lse, 0xff, rows * sizeof(float));
    run(&(struct backend_batch){.pool = f->pool, .items = &item, .n_items = 1});
    float *q = malloc(rows * c->head_dim_k * sizeof *q);
    double *want = malloc(n_out * sizeof *want), *lse = malloc(rows * sizeof *lse);
    for (size_t i = 0; i < rows * c->head_dim_k; i++)
        q[i] = (float)reference_get(c->q_dtype, item.q, i);
    assert_int_equal(reference_attend(&f->spec, c->num_q_heads, c->num_kv_heads, c->head_dim_k,
                                      c->head_dim_v, ATTN_F32, q, n, at, f->k, f->v, at + n, want,
                                      lse),
                     ATTN_OK);
    for (size_t i = 0; i < n_out; i++) {
        double got = reference_get(c->q_dtype, item.out, i);
        if (!(fabs(got - want[i]) <= bound.atol + bound.rtol * fabs(want[i])))
            fail_msg("%s over %s, out[%zu] of %" PRIu32 " queries at %" PRIu32 " is %g, not %g",
                     attn_dtype_name(c->q_dtype), attn_dtype_name(c->kv_dtype), i, n, f->base + at,
                     got, want[i]);
    }
    for (size_t i = 0; i < rows; i++)
        if (!(fabs(item.lse[i] - lse[i]) <= bound.lse_atol + bound.lse_rtol * fabs(lse[i])))
            fail_msg("%s over %s, lse[%zu] of %" PRIu32 " queries at %" PRIu32 " is %g, not %g",
                     attn_dtype_name(c->q_dtype), attn_dtype_name(c->kv_dtype), i, n, f->base + at,
                     (double)item.lse[i], lse[i]);
    free(q);
    free(want);
    free(lse);
}

/* false: the backend has no such pool. NULL: slopes as models have them. */
static bool run_far(const struct case_geometry *g, struct case_dtype d, uint32_t layer,
                    uint32_t base, const struct setting *s)
{
    struct far f = {.base = base, .config = case_config(g, d, &case_options[CASE_PLAIN])};
    struct backend_pool_config *c = &f.config;
    check.arena_used = 0;
    if (!case_fits(g, d))
        return false;
    f.spec = layers[layer];
    f.spec.scale = s != NULL ? s->scale : 1.0f / sqrtf((float)g->head_dim_k);
    f.spec.soft_cap = s != NULL ? s->soft_cap : f.spec.soft_cap;
    for (uint32_t h = 0; h < g->num_q_heads; h++) {
        f.slopes[h] = s == NULL ? 2.0f / (float)(1 + h % 5) : h % 2 ? s->slope : 0;
        f.sinks[h] = s != NULL && h % 2 ? s->sink : 0;
    }
    f.spec.alibi_slopes = s == NULL || s->slope != 0 ? f.slopes : NULL;
    f.spec.sink_logits = s != NULL && s->sink != 0 ? f.sinks : NULL;
    c->num_layers = 1;
    c->layers = &f.spec;
    c->n_blocks = (N - 1) / BLOCK + 1;
    c->n_table_rows = 1;
    c->max_row_blocks = base / BLOCK + c->n_blocks;
    attn_status st = check.ops->pool_open(check.b, c, &f.pool);
    if (st == ATTN_ENOTSUP)
        return false;
    assert_int_equal(st, ATTN_OK);
    f.table = calloc(c->max_row_blocks, sizeof *f.table);
    f.k = calloc((size_t)N * g->num_kv_heads * g->head_dim_k, sizeof *f.k);
    f.v = calloc((size_t)N * g->num_kv_heads * g->head_dim_v, sizeof *f.v);
    fill(&f);
    ask(&f, 300, 1);
    ask(&f, 303, 4);
    ask(&f, 255, 33);
    check.ops->pool_close(f.pool);
    free(f.table);
    free(f.k);
    free(f.v);
    return true;
}

static const struct case_geometry geometries[] = {
    {"a group of 4", 8, 2, 64, 64, BLOCK, false},
    {"a group of 32", 32, 1, 128, 128, BLOCK, false},
    {"a dim without tuned kernels", 4, 2, 40, 40, BLOCK, false},
};

static bool is_asked(uint32_t at, uint32_t *n_asked)
{
    bool is = at >= offset && (at - offset) % every == 0;
    *n_asked += is;
    return is;
}

static void distances_beyond_2_24_tokens_are_exact(void **state)
{
    static const uint32_t bases[] = {1 << 24, (1 << 25) + 256, 1 << 28};
    uint32_t n = 0, n_asked = 0, at = 0;
    (void)state;
    for (uint32_t i = 0; i < CASE_COUNT(geometries); i++)
        for (uint32_t d = 0; d < CASE_COUNT(case_dtypes); d++)
            for (uint32_t l = 0; l < CASE_COUNT(layers); l++, at++)
                if (is_asked(at, &n_asked))
                    n += run_far(&geometries[i], case_dtypes[d], l, bases[at % CASE_COUNT(bases)],
                                 NULL);
    printf("%" PRIu32 " of %" PRIu32 " pools\n", n, n_asked);
    assert_true(n > n_asked / 2);
}

static void settings_at_their_bounds_agree_with_the_reference(void **state)
{
    uint32_t n = 0, n_asked = 0, at = 0;
    (void)state;
    for (uint32_t i = 0; i < CASE_COUNT(settings); i++)
        for (uint32_t d = 0; d < CASE_COUNT(case_dtypes); d++, at++)
            if (is_asked(at, &n_asked))
                n += run_far(&geometries[at % 2], case_dtypes[d], at % 4 == 3 ? 2 : 0, 0,
                             &settings[i]);
    printf("%" PRIu32 " of %" PRIu32 " pools\n", n, n_asked);
    assert_true(n > n_asked / 2);
}

int main(int argc, char **argv)
{
    int rc = check_start(&check, argc, argv, 20261, &every, &offset);
    if (rc != 0)
        return rc;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(distances_beyond_2_24_tokens_are_exact),
        cmocka_unit_test(settings_at_their_bounds_agree_with_the_reference),
    };
    return cmocka_run_group_tests(tests, NULL, check_close);
}
