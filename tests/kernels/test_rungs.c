/* test_rungs.c: attnbench's rungs against the float64 reference, with scores held in as little
 * memory as they take.
 *
 *     test_rungs [NAME]      cpu (default), or a backend whose module attnd-NAMEbench.so is found
 */
#include "kernels/bench/rungs/rungs.h"
#include "kernels/reference.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
// clang-format off
#include <cmocka.h>
// clang-format on

#define BATCH 2
#define HEADS 2
#define TOKENS 128

static const char *name = "cpu";
static const struct rungs_ops *ops;
static struct rungs *r;
static uint64_t rng = 88172645463325252u;

static double random_value(void)
{
    rng ^= rng << 13;
    rng ^= rng >> 7;
    rng ^= rng << 17;
    return (double)(rng >> 11) / 0x1p52 - 1; /* -1 to 1 */
}

static void *tensor(size_t n, attn_dtype type, bool is_poison)
{
    const size_t size = attn_dtype_bytes(type);
    void *p, *host = malloc(n * size);
    assert_non_null(host);
    memset(host, 0xff, n * size);
    for (size_t i = 0; !is_poison && i < n; i++)
        reference_put(type, host, i, 2 * random_value());
    assert_int_equal(ops->alloc(r, n * size, &p), ATTN_OK);
    assert_int_equal(ops->copy(r, p, host, n * size, 0), ATTN_OK);
    assert_int_equal(ops->wait(r, 0), ATTN_OK);
    free(host);
    return p;
}

static void *fetched(const void *p, size_t bytes)
{
    void *host = malloc(bytes);
    assert_non_null(host);
    assert_int_equal(ops->copy(r, host, p, bytes, 0), ATTN_OK);
    assert_int_equal(ops->wait(r, 0), ATTN_OK);
    return host;
}

/* Largest error of all outputs, against the reference over each sequence. */
static double error_of(const struct rung_call *c)
{
    const attn_dtype type = c->is_f32 ? ATTN_F32 : ATTN_BF16;
    const struct attn_layer_spec spec = {.scale = c->scale, .is_full = true};
    const size_t n = (size_t)TOKENS * HEADS * c->dim, bytes = n * BATCH * attn_dtype_bytes(type);
    char *q = fetched(c->q, bytes), *k = fetched(c->k, bytes), *v = fetched(c->v, bytes);
    char *out = fetched(c->out, bytes);
    double *want = malloc(n * sizeof *want), worst = 0;
    for (size_t b = 0; b < BATCH; b++) {
        const size_t at = b * n * attn_dtype_bytes(type);
        assert_int_equal(reference_attend(&spec, HEADS, HEADS, c->dim, c->dim, type, q + at, TOKENS,
                                          0, k + at, v + at, TOKENS, want, NULL),
                         ATTN_OK);
        for (size_t i = 0; i < n; i++) {
            const double error = fabs(reference_get(type, out + at, i) - want[i]);
            worst = error <= worst ? worst : error; /* NaN stays */
        }
    }
    free(q);
    free(k);
    free(v);
    free(out);
    free(want);
    return worst;
}

static void every_rung_agrees_with_the_reference(void **state)
{
    static const uint32_t dims[] = {64, 128, 256};
    uint32_t n_run = 0;
    (void)state;
    for (uint32_t i = 0; i < RUNG_COUNT * 2 * 3; i++) {
        const enum rung rung = (enum rung)(i % RUNG_COUNT);
        struct rung_call c = {.rung = rung,
                              .is_f32 = i / RUNG_COUNT % 2,
                              .batch = BATCH,
                              .heads = HEADS,
                              .dim = dims[i / RUNG_COUNT / 2],
                              .n = TOKENS,
                              .scale = 1 / sqrtf((float)dims[i / RUNG_COUNT / 2])};
        const attn_dtype type = c.is_f32 ? ATTN_F32 : ATTN_BF16;
        const size_t n = (size_t)BATCH * TOKENS * HEADS * c.dim;
        struct bench_work *work;
        if (ops->names[rung] == NULL)
            continue;
        void *q = tensor(n, type, false), *k = tensor(n, type, false), *v = tensor(n, type, false);
        c.q = q, c.k = k, c.v = v;
        c.out = tensor(n, type, true);
        c.scratch_bytes = ops->scratch_bytes(r, &c);
        if (ops->has_streams && (rung == RUNG_NAIVE || rung == RUNG_VECTORISED))
            c.scratch_bytes = 64 * TOKENS * sizeof(float); /* two tiles of rows a head */
        assert_int_equal(ops->alloc(r, c.scratch_bytes + 16, &c.scratch), ATTN_OK);
        attn_status st = ops->attend_open(r, &c, &work);
        if (st == ATTN_OK) {
            assert_int_equal(work->run(work, ops->stream(r, 0)), ATTN_OK);
            assert_int_equal(ops->wait(r, 0), ATTN_OK);
            work->close(work);
            const double error = error_of(&c);
            if (!(error < (c.is_f32 ? 5e-5 : 2e-2)))
                fail_msg("%s, %s, dim %u: off by %g", ops->names[rung], c.is_f32 ? "f32" : "bf16",
                         c.dim, error);
            n_run++;
        } else if (st != ATTN_ENOTSUP) {
            fail_msg("%s: %s", ops->names[rung], ops->last_error(r));
        }
        ops->free(r, q);
        ops->free(r, k);
        ops->free(r, v);
        ops->free(r, c.out);
        ops->free(r, c.scratch);
    }
    assert_true(n_run >= 3 * 2 * 3 - 1); /* all but f32 of dim 256 in 64 KiB of shared memory */
}

static void tiles_cover_every_row_once_within_their_memory(void **state)
{
    static const uint64_t room[] = {64, 65, 130, 191, 192, 500, 1000, 100000}; /* rows */
    (void)state;
    for (size_t i = 0; i < sizeof room / sizeof *room; i++) {
        const struct rung_call c = {.batch = 2, .heads = 3, .n = 192};
        const uint64_t bytes = room[i] * c.n * sizeof(float);
        struct rung_tile t = {0};
        uint32_t next = 0; /* row of all heads */
        while (rung_tile_next(&c, bytes, &t)) {
            assert_int_equal(t.head0 * c.n + t.row0, next);
            assert_int_equal(t.n_rows % 64, 0);
            assert_true(t.n_rows > 0 && t.row0 + t.n_rows <= c.n);
            assert_true(t.n_heads == 1 || t.n_rows == c.n);
            assert_true((uint64_t)t.n_heads * t.n_rows * c.n * sizeof(float) <= bytes);
            next += t.n_heads * t.n_rows;
        }
        assert_int_equal(next, c.batch * c.heads * c.n);
    }
}

static void a_matrix_product_adds_when_it_is_told_to(void **state)
{
    enum { M = 64, N = 128, K = 64 };
    (void)state;
    for (int i = 0; i < 4; i++) {
        const bool is_f32 = i / 2, is_added = i % 2;
        const attn_dtype type = is_f32 ? ATTN_F32 : ATTN_BF16;
        const size_t size = attn_dtype_bytes(type);
        void *a = tensor(M * K, type, false), *b = tensor(K * N, type, false);
        void *c = tensor(M * N, type, !is_added);
        const struct rung_matmul m = {a, b, c, M, N, K, is_f32, is_added};
        char *x = fetched(a, M * K * size), *y = fetched(b, K * N * size);
        char *z = fetched(c, M * N * size);
        assert_int_equal(ops->matmul(r, &m, 0), ATTN_OK);
        char *got = fetched(c, M * N * size);
        for (size_t at = 0; at < M * N; at++) {
            double want = is_added ? reference_get(type, z, at) : 0;
            for (size_t k = 0; k < K; k++)
                want +=
                    reference_get(type, x, at / N * K + k) * reference_get(type, y, k * N + at % N);
            const double error = fabs(reference_get(type, got, at) - want);
            assert_true(error < (is_f32 ? 1e-4 : 0.02 + 0.005 * fabs(want)));
        }
        free(x);
        free(y);
        free(z);
        free(got);
        ops->free(r, a);
        ops->free(r, b);
        ops->free(r, c);
    }
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_rung_agrees_with_the_reference),
        cmocka_unit_test(tiles_cover_every_row_once_within_their_memory),
        cmocka_unit_test(a_matrix_product_adds_when_it_is_told_to),
    };
    char why[256];
    if (argc > 1)
        name = argv[1];
    if (rungs_load(name, &ops, why, sizeof why) != ATTN_OK || ops->open(2, &r) != ATTN_OK) {
        print_error("%s: %s\n", name, ops ? ops->last_error(r) : why);
        return 77;
    }
    const int failed = cmocka_run_group_tests(tests, NULL, NULL);
    ops->close(r);
    return failed;
}
