/* test_merges.c: what a backend does for sequences that are split over devices (backend.h). Outputs
 * of several devices become one behind a batch's attention, against float64: dtypes, head dims,
 * numbers of parts, queries of which some parts have nothing, rows without any key; and the words
 * that they wait for. Queries of a causal layer that all see the same keys.
 *
 *     test_merges [NAME [TESTS]]       NAME cpu, cuda (the default), hip or a module of the
 *     executor
 *
 * Exit code 77: the backend cannot be opened here.
 */
#include "kernels/reference.h"
#include "tests/gpu/rig.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
// clang-format off
#include <cmocka.h>
// clang-format on

enum { LOOKS = 2000, STRIPE = 16, MAX_MERGES = 70, MAX_TOKENS = 19 };
#define WAIT_NS 60000000000u

static const struct backend_ops *ops;
static uint64_t seed;
static const struct attn_layer_spec plain[1] = {{.scale = 0.125f}};

/* false: this backend has no merges. */
static bool open_rig(struct rig *r, attn_dtype dtype, uint32_t dim)
{
    struct backend_pool_config c = rig_config(plain, 1);
    struct backend_info info;
    c.q_dtype = c.kv_dtype = dtype;
    c.head_dim_v = dim;
    rig_open(r, ops, &c, 0, -1);
    rig_begin(r);
    r->ops->info(r->b, &info);
    if (info.features & BACKEND_HAS_MERGES)
        return true;
    rig_close(r);
    return false;
}

/* Partial outputs of merges that lie behind one another, the same in every part. */
struct partial {
    struct backend_merges m;
    struct backend_merge list[MAX_MERGES];
    uint32_t heads, dim, el;
    attn_dtype dtype;
};

/* Where a part's row of a merge is. */
static uint8_t *row_at(const struct partial *p, uint32_t part, const struct backend_merge *x,
                       uint32_t row)
{
    return (uint8_t *)(uintptr_t)p->m.parts[part] + x->out_at + (uint64_t)row * p->dim * p->el;
}

static float *lse_at(const struct partial *p, uint32_t part, const struct backend_merge *x,
                     uint32_t row)
{
    return (float *)(void *)((uint8_t *)(uintptr_t)p->m.parts[part] + x->lse_at) + row;
}

static bool has_row(const struct partial *p, uint32_t part, const struct backend_merge *x,
                    uint32_t row)
{
    uint32_t last = x->pos + (x->is_full ? x->n_tokens - 1 : row / p->heads);
    return part * STRIPE <= last;
}

/* n merges of n_parts parts with random rows; what a part has nothing of stays poisoned. */
static void make(struct partial *p, struct rig *r, uint32_t n_parts, uint32_t n)
{
    uint64_t at = 0;
    *p = (struct partial){.m = {.list = p->list, .n = n, .n_parts = n_parts, .stripe = STRIPE},
                          .heads = r->config.num_q_heads,
                          .dim = r->config.head_dim_v,
                          .el = (uint32_t)attn_dtype_bytes(r->config.q_dtype),
                          .dtype = r->config.q_dtype};
    for (uint32_t i = 0; i < n; i++) {
        struct backend_merge *x = &p->list[i];
        x->n_tokens = n > 4 ? 1 : 1 + rig_random(&seed) % MAX_TOKENS;
        x->pos = rig_random(&seed) % 64;
        x->is_full = rig_random(&seed) % 3 == 0;
        uint64_t rows = (uint64_t)x->n_tokens * p->heads;
        x->out_at = at;
        x->lse_at = at + (rows * p->dim * p->el + 63) / 64 * 64;
        at = x->lse_at + (rows * sizeof(float) + 63) / 64 * 64;
        x->out = rig_take(r, rows * p->dim * p->el);
        x->lse = rig_random(&seed) % 4 == 0 ? NULL : rig_take(r, rows * sizeof(float));
    }
    for (uint32_t k = 0; k < n_parts; k++) {
        p->m.parts[k] = rig_take(r, at);
        for (uint32_t i = 0; i < n; i++) {
            const struct backend_merge *x = &p->list[i];
            for (uint32_t row = 0; row < x->n_tokens * p->heads; row++) {
                bool is_empty = rig_random(&seed) % 7 == 0;
                if (!has_row(p, k, x, row))
                    continue;
                *lse_at(p, k, x, row) = is_empty ? -INFINITY : 3 * rig_normal(&seed);
                for (uint32_t d = 0; d < p->dim; d++)
                    reference_put(p->dtype, row_at(p, k, x, row), d,
                                  is_empty ? 0 : (double)rig_normal(&seed));
            }
        }
    }
}

static void check_row(const struct partial *p, const struct backend_merge *x, uint32_t row)
{
    double sum = 0, out[256] = {0};
    for (uint32_t k = 0; k < p->m.n_parts; k++) {
        if (!has_row(p, k, x, row))
            continue;
        double weight = exp((double)*lse_at(p, k, x, row));
        sum += weight;
        for (uint32_t d = 0; d < p->dim; d++)
            out[d] += weight * reference_get(p->dtype, row_at(p, k, x, row), d);
    }
    const struct reference_bound bound = reference_bound_of(p->dtype, p->dtype);
    for (uint32_t d = 0; d < p->dim; d++) {
        double want = sum == 0 ? 0 : out[d] / sum;
        double got = reference_get(p->dtype, x->out, (uint64_t)row * p->dim + d);
        if (!(fabs(got - want) <= bound.atol + bound.rtol * fabs(want)))
            fail_msg("row %u of %u tokens at %u, full %u: out[%u] is %g, not %g", row, x->n_tokens,
                     x->pos, x->is_full, d, got, want);
    }
    if (x->lse == NULL)
        return;
    double got = (double)x->lse[row];
    if (sum == 0 ? got != -INFINITY : !(fabs(got - log(sum)) <= 1e-5))
        fail_msg("row %u: lse is %g, not %g", row, got, log(sum));
}

static void check(const struct partial *p)
{
    for (uint32_t i = 0; i < p->m.n; i++)
        for (uint32_t row = 0; row < p->list[i].n_tokens * p->heads; row++)
            check_row(p, &p->list[i], row);
}

static void run(struct rig *r, struct backend_batch *batch)
{
    if (r->ops->submit(r->b, batch) != ATTN_OK)
        fail_msg("submit: %s", r->ops->last_error(r->b));
    assert_ptr_equal(r->ops->poll(r->b, WAIT_NS), batch);
    assert_int_equal(batch->status, ATTN_OK);
}

/* Where a part's lse is NaN so are the row's out and lse, whatever the other parts have. */
static void a_part_that_is_nan_makes_its_row_nan(void **state)
{
    (void)state;
    static struct rig r;
    static struct partial p;
    if (!open_rig(&r, ATTN_BF16, 64))
        skip();
    for (uint32_t nan_part = 0; nan_part < 3; nan_part++)
        for (int is_alone = 0; is_alone < 2; is_alone++) {
            rig_begin(&r);
            make(&p, &r, 3, 1);
            struct backend_merge *x = &p.list[0];
            x->pos = 3 * STRIPE; /* all parts have keys */
            x->lse = x->lse != NULL ? x->lse : rig_take(&r, MAX_TOKENS * p.heads * sizeof(float));
            const uint32_t rows = x->n_tokens * p.heads;
            for (uint32_t row = 0; row < rows; row++)
                for (uint32_t k = 0; k < 3; k++) {
                    const bool is_nan = k == nan_part && row % 2 == 0;
                    const float other = is_alone && row % 2 == 0 ? -INFINITY : 0.5f;
                    *lse_at(&p, k, x, row) = is_nan ? NAN : other;
                    for (uint32_t d = 0; d < p.dim; d++)
                        reference_put(p.dtype, row_at(&p, k, x, row), d, is_nan ? NAN : 1.0);
                }
            struct backend_batch batch = {.pool = r.pool, .merges = &p.m};
            run(&r, &batch);
            for (uint32_t row = 0; row < rows; row++) {
                const bool want = row % 2 == 0;
                if (!!isnan(x->lse[row]) != want)
                    fail_msg("row %u: lse is %g", row, (double)x->lse[row]);
                for (uint32_t d = 0; d < p.dim; d++)
                    assert_int_equal(
                        !!isnan(reference_get(p.dtype, x->out, (uint64_t)row * p.dim + d)), want);
            }
        }
    rig_close(&r);
}

static void parts_become_one_as_float64_has_it(void **state)
{
    (void)state;
    static struct rig r;
    static struct partial p;
    static const struct {
        attn_dtype dtype;
        uint32_t dim;
    } shapes[] = {
        {ATTN_BF16, 64}, {ATTN_F16, 128}, {ATTN_F32, 256}, {ATTN_BF16, 8}, {ATTN_F32, 24}};
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) {
        if (!open_rig(&r, shapes[i].dtype, shapes[i].dim))
            skip();
        for (uint32_t n_parts = 1; n_parts <= BACKEND_MAX_PARTS; n_parts += 1 + n_parts / 3) {
            rig_begin(&r);
            make(&p, &r, n_parts, n_parts == 3 ? MAX_MERGES : 3);
            struct backend_batch batch = {.pool = r.pool, .merges = &p.m};
            run(&r, &batch);
            check(&p);
        }
        rig_close(&r);
    }
}

/* As decoding over several cards does: this one's part is an output of the batch itself, the
 * other's comes while it runs. */
static void merges_wait_for_words_and_for_the_batch(void **state)
{
    (void)state;
    static struct rig r;
    static struct partial p;
    uint64_t s = seed;
    if (!open_rig(&r, ATTN_BF16, 64))
        skip();
    make(&p, &r, 2, 1);
    struct backend_merge *x = &p.list[0];
    const uint32_t rows = x->n_tokens * p.heads;
    x->pos = STRIPE;
    uint32_t *words = rig_take(&r, 256), *signals = words + 16;
    words[0] = words[1] = *signals = 6;
    struct backend_item *it = rig_step(&r, 0, 0, 0, x->n_tokens, 3, &s);
    it->out = row_at(&p, 0, x, 0);
    it->lse = lse_at(&p, 0, x, 0);
    memset(it->out, 0xff, (size_t)rows * p.dim * p.el);
    uint8_t *other = row_at(&p, 1, x, 0), *kept = malloc((size_t)rows * p.dim * p.el);
    assert_non_null(kept);
    for (uint32_t row = 0; row < rows; row++) { /* a token may have come with no key of that part */
        *lse_at(&p, 1, x, row) = rig_normal(&seed);
        for (uint32_t d = 0; d < p.dim; d++)
            reference_put(p.dtype, row_at(&p, 1, x, row), d, (double)rig_normal(&seed));
    }
    memcpy(kept, other, (size_t)rows * p.dim * p.el);
    memset(other, 0xff, (size_t)rows * p.dim * p.el);

    const struct backend_word waits[] = {{&words[0], 7}, {&words[1], 5}};
    const struct backend_word signal = {signals, 9};
    struct backend_batch batch = {.pool = r.pool,
                                  .items = it,
                                  .n_items = 1,
                                  .patches = r.patches,
                                  .n_patches = r.n_patches,
                                  .signals = &signal,
                                  .n_signals = 1,
                                  .merges = &p.m,
                                  .merge_waits = waits,
                                  .n_merge_waits = 2};
    if (r.ops->submit(r.b, &batch) != ATTN_OK)
        fail_msg("submit: %s", r.ops->last_error(r.b));
    for (int i = 0; i < LOOKS; i++)
        assert_null(r.ops->poll(r.b, 0));
    assert_int_equal(*(volatile uint32_t *)signals, 6);
    for (size_t i = 0; i < (size_t)rows * p.dim * p.el; i++)
        assert_int_equal(((uint8_t *)x->out)[i], 0xff);
    memcpy(other, kept, (size_t)rows * p.dim * p.el);
    __atomic_store_n(&words[0], 7, __ATOMIC_RELEASE);
    assert_ptr_equal(r.ops->poll(r.b, WAIT_NS), &batch);
    assert_int_equal(batch.status, ATTN_OK);
    assert_int_equal(*signals, 9);
    check(&p);
    /* again, with nothing to wait for: a short step may be attention alone */
    memset(x->out, 0xff, (size_t)rows * p.dim * p.el);
    batch.n_patches = batch.n_merge_waits = 0;
    run(&r, &batch);
    check(&p);
    assert_true(batch.device_ns < UINT64_C(4000000000));
    free(kept);
    rig_close(&r);
}

static void refuse(struct rig *r, const struct backend_merges *m, const char *words)
{
    struct backend_batch batch = {.pool = r->pool, .merges = m};
    assert_int_equal(r->ops->submit(r->b, &batch), ATTN_EINVAL);
    if (strstr(r->ops->last_error(r->b), words) == NULL)
        fail_msg("%s", r->ops->last_error(r->b));
}

static void what_cannot_be_is_refused_by_name(void **state)
{
    (void)state;
    static struct rig r;
    static struct partial p;
    if (!open_rig(&r, ATTN_BF16, 64))
        skip();
    make(&p, &r, 2, 2);
    struct backend_merges m = p.m;
    m.n_parts = 9;
    refuse(&r, &m, "n_parts is 9 of 8");
    m = p.m;
    m.parts[1] = (const uint8_t *)m.parts[1] + 4;
    refuse(&r, &m, "parts[1]");
    m.parts[1] = NULL;
    refuse(&r, &m, "parts[1]");
    p.list[1].out = NULL;
    refuse(&r, &p.m, "list[1]");
    rig_close(&r);
}

/* Prompts of many and of few queries behind what is cached, and without; as a full layer, which is
 * compared with the reference elsewhere, has them. */
static void items_can_be_full_in_a_causal_layer(void **state)
{
    (void)state;
    static struct rig causal, full;
    static const struct attn_layer_spec layers[][1] = {
        {{.scale = 0.125f}},
        {{.scale = 0.125f, .is_full = true}},
        {{.scale = 0.1f, .soft_cap = 9}},
        {{.scale = 0.1f, .soft_cap = 9, .is_full = true}}};
    static const struct {
        attn_dtype q, kv;
        uint32_t dim, layers;
    } shapes[] = {{ATTN_BF16, ATTN_BF16, 64, 0}, {ATTN_F16, ATTN_F16, 128, 2},
                  {ATTN_F32, ATTN_F32, 64, 2},   {ATTN_BF16, ATTN_FP8_E4M3, 128, 0},
                  {ATTN_BF16, ATTN_BF16, 24, 0}, {ATTN_F16, ATTN_INT8, 64, 0}};
    static const uint32_t n_tokens[] = {2, 16, 5, 100, 33, 150}; /* at 0, 2, 18, ... */
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) {
        struct backend_pool_config c = rig_config(layers[shapes[i].layers], 1);
        uint64_t a = seed + i, b = seed + i;
        c.q_dtype = shapes[i].q;
        c.kv_dtype = shapes[i].kv;
        c.head_dim_k = c.head_dim_v = shapes[i].dim;
        rig_open(&causal, ops, &c, 0, -1);
        c.layers = layers[shapes[i].layers + 1];
        rig_open(&full, ops, &c, 0, -1);
        uint32_t pos = 0;
        for (size_t k = 0; k < sizeof n_tokens / sizeof n_tokens[0]; k++) {
            rig_begin(&causal);
            rig_begin(&full);
            rig_step(&causal, 0, 0, pos, n_tokens[k], 3 | BACKEND_FULL, &a);
            rig_step(&full, 0, 0, pos, n_tokens[k], 3, &b);
            if (k > 0) { /* beside one that is causal */
                rig_step(&causal, 1, 0, 0, 20, 3, &a);
                rig_step(&full, 1, 0, 0, 20, 3, &b);
            }
            rig_run(&causal);
            rig_run(&full);
            causal.n_items = full.n_items = 1;
            rig_compare_items(&causal, &full, "full in a causal layer", seed + i);
            pos += n_tokens[k];
        }
        rig_close(&causal);
        rig_close(&full);
    }
}

static void items_cannot_be_full_in_a_layer_with_a_window(void **state)
{
    (void)state;
    static struct rig r;
    static const struct attn_layer_spec window[1] = {{.scale = 0.125f, .window_tokens = 8}};
    struct backend_pool_config c = rig_config(window, 1);
    uint64_t s = seed;
    rig_open(&r, ops, &c, 0, -1);
    rig_begin(&r);
    struct backend_batch batch = {.pool = r.pool,
                                  .items = rig_step(&r, 0, 0, 0, 4, 3 | BACKEND_FULL, &s),
                                  .n_items = 1,
                                  .patches = r.patches,
                                  .n_patches = r.n_patches};
    assert_int_equal(r.ops->submit(r.b, &batch), ATTN_EINVAL);
    assert_non_null(strstr(r.ops->last_error(r.b), "full, in a layer with a window"));
    rig_close(&r);
}

int main(int argc, char **argv)
{
    int end = rig_start(argc, argv, &ops, &seed);
    if (end != 0)
        return end;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(parts_become_one_as_float64_has_it),
        cmocka_unit_test(a_part_that_is_nan_makes_its_row_nan),
        cmocka_unit_test(merges_wait_for_words_and_for_the_batch),
        cmocka_unit_test(what_cannot_be_is_refused_by_name),
        cmocka_unit_test(items_can_be_full_in_a_causal_layer),
        cmocka_unit_test(items_cannot_be_full_in_a_layer_with_a_window),
    };
    return cmocka_run_group_tests_name("merges", tests, NULL, NULL);
}
