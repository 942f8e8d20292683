/* test_attnbench_check.c: what attnbench says of outputs that are wrong: the rows it checks lie
 * over all of them. A backend of its own measures, and spoils rows.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
// clang-format off
#include <cmocka.h>
// clang-format on

#include "kernels/bench/bench.h"
#include "kernels/reference.h"
#include "tests/random.h"

static uint64_t random_state = 11;

/* Tokens [first, past) of a q head of a sequence, of the first layer or the last. */
static struct {
    uint32_t end, item, head, first, past;
} spoilt;

static const struct bench_cell *cell;
static const struct backend_bench_ops *real;

static attn_status time_and_spoil(struct backend *b, const char *variant,
                                  struct backend_batch *const *list, uint32_t n, uint32_t runs,
                                  bool is_alone, uint64_t *out_ns)
{
    attn_status st = real->time_batch(b, variant, list, n, runs, is_alone, out_ns);
    const struct backend_item *it = &list[spoilt.end]->items[spoilt.item];
    for (uint32_t t = spoilt.first; t < spoilt.past; t++) {
        const size_t row = (size_t)t * cell->g->num_q_heads + spoilt.head;
        const size_t at = row * cell->g->head_dim_v + random_below(&random_state, 8);
        reference_put(ATTN_BF16, it->out, at, reference_get(ATTN_BF16, it->out, at) + 0.5);
    }
    return st;
}

static struct bench x;
static struct bench_setup s;
static struct backend_bench_ops spoiling;

static void open_cell(const struct bench_cell *c)
{
    const struct bench_options o = {
        .backend = "cpu", .runs = 1, .n_threads = 2, .max_tokens = c->new_tokens * c->batch};
    cell = c;
    memset(&spoilt, 0, sizeof spoilt);
    assert_true(bench_open(&x, &o, bench_setup_bytes(c)));
    real = x.own;
    spoiling = *real;
    spoiling.time_batch = time_and_spoil;
    x.own = &spoiling;
    assert_true(bench_setup_open(&x, c, &s));
}

static struct bench_error checked(void)
{
    struct bench_error e;
    assert_true(bench_check(&x, &s, NULL, &e));
    return e;
}

static void close_cell(void)
{
    bench_setup_close(&x, &s);
    bench_close(&x);
}

static const struct case_geometry geometry = {"bench", 4, 2, 64, 64, 16, false};

/* Somewhere n wrong tokens in a row. */
static void spoil(uint32_t n)
{
    spoilt.end = random_below(&random_state, 2);
    spoilt.item = random_below(&random_state, cell->batch);
    spoilt.head = random_below(&random_state, cell->g->num_q_heads);
    spoilt.first = random_below(&random_state, cell->new_tokens - n + 1);
    spoilt.past = spoilt.first + n;
}

static void one_wrong_row_of_a_small_cell_is_found(void **state)
{
    (void)state;
    const struct bench_cell c = {.g = &geometry, .batch = 2, .context = 90, .new_tokens = 48};
    open_cell(&c);
    struct bench_error e = checked();
    assert_true(e.is_allclose);
    assert_int_equal(e.n_rows, 2 * 2 * 48 * 4);
    assert_int_equal(e.n_rows_checked, e.n_rows);
    for (uint32_t i = 0; i < 50; i++) {
        spoil(1);
        assert_false(checked().is_allclose);
    }
    close_cell();
}

/* Twice as long as what a checked row stands for. */
static void a_run_of_wrong_rows_is_found_wherever_it_is(void **state)
{
    (void)state;
    const struct bench_cell c = {.g = &geometry, .batch = 1, .context = 4096, .new_tokens = 4096};
    open_cell(&c);
    struct bench_error e = checked();
    assert_true(e.is_allclose);
    assert_in_range(e.n_rows_checked, 1, e.n_rows);
    const uint32_t each = (uint32_t)((e.n_rows + e.n_rows_checked - 1) / e.n_rows_checked);
    for (uint32_t i = 0; i < 2; i++) {
        spoil(2 * each);
        if (checked().is_allclose)
            fail_msg("end %u, head %u, tokens %u to %u", spoilt.end, spoilt.head, spoilt.first,
                     spoilt.past);
    }
    close_cell();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(one_wrong_row_of_a_small_cell_is_found),
        cmocka_unit_test(a_run_of_wrong_rows_is_found_wherever_it_is),
    };
    return cmocka_run_group_tests_name("attnbench_check", tests, NULL, NULL);
}
