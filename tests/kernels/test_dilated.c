/* test_dilated.c: layers of dilated attention, on any backend against the float64 reference.
 *
 *     test_dilated [NAME [EVERY [OFFSET [TESTS]]]]
 *
 * NAME is cpu, cuda or hip (default cpu); the product of geometries, dtypes, options and shapes is
 * walked in steps of EVERY (default 97), each case with other branches, every other with a second
 * layer that is not dilated. With ATTND_TEST_TUNED=1 the product is only what the tuned kernels of
 * sm_90 compute. Exit code 77: the backend cannot be opened here.
 */
#include "tests/kernels/product.h"

#include "kernels/gpu/sm90/decode.h"
#include "kernels/gpu/sm90/prefill.h"
#include "kernels/reference.h"
#include "kernels/stripes.h"

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

#ifdef __SANITIZE_ADDRESS__
static uint32_t every = 499, offset; /* the values are those of the other build */
#else
static uint32_t every = 97, offset;
#endif
static bool is_tuned_only;
static struct check check;

/* Segments that blocks do not divide, of one token, of everything; rates that are no power of two;
 * a branch twice. */
static const struct {
    uint32_t n;
    struct attn_branch branches[ATTN_MAX_BRANCHES];
} fixed[] = {
    {1, {{50, 1}}},
    {3, {{64, 1}, {128, 2}, {256, 4}}},
    {3, {{10, 1}, {30, 3}, {100, 5}}},
    {2, {{600, 6}, {1, 1}}},
    {3, {{2048, 1}, {4096, 2}, {8192, 8}}},
    {2, {{32, 1}, {32, 1}}},
    {5, {{16, 1}, {32, 2}, {64, 4}, {128, 8}, {256, 16}}},
    {3, {{INT32_MAX, INT32_MAX}, {INT32_MAX - 1, 2}, {INT32_MAX, 1}}},
};

static const struct case_shape shapes[] = {
    {"decode", {{130, 1}, {1, 4}, {40, 1}, {299, 1}, {0, 1}, {64, 2}}},
    {"prompts", {{0, 70}, {33, 40}, {127, 17}}},
    {"long and short", {{600, 3}, {10, 1}}},
    {"longer prompts", {{0, 300}, {150, 260}, {517, 33}, {1, 130}}},
};

static const struct case_options options[] = {
    {.name = "plain"},
    {.name = "full", .is_full = true},
    {.name = "soft cap", .soft_cap = 5},
    {.name = "sink logits", .has_sink_logits = true},
    {.name = "alibi", .has_alibi = true},
    {.name = "batch invariant", .is_batch_invariant = true},
    {.name = "all", .soft_cap = 8, .has_sink_logits = true, .has_alibi = true},
};

/* The i-th of the table, or random ones; any rate, but one branch has rate 1. */
static void set_branches(struct attn_layer_spec *s, uint32_t i)
{
    if (is_tuned_only && i % 2 == 0) { /* random ones with rates of powers of two */
        s->n_branches = 1 + check_random(&check, ATTN_MAX_BRANCHES);
        const uint32_t most = 1 + check_random(&check, 5);
        for (uint32_t b = 0; b < s->n_branches; b++) {
            uint32_t rate = b == i % s->n_branches ? 1 : 1u << check_random(&check, most);
            s->branches[b].rate = rate;
            s->branches[b].segment_tokens = rate * (1 + check_random(&check, 1 + 400 / rate));
        }
        return;
    }
    if (i < CASE_COUNT(fixed)) {
        s->n_branches = fixed[i].n;
        memcpy(s->branches, fixed[i].branches, sizeof s->branches);
        return;
    }
    s->n_branches = 1 + check_random(&check, ATTN_MAX_BRANCHES);
    for (uint32_t b = 0; b < s->n_branches; b++) {
        uint32_t rate = b == i % s->n_branches ? 1 : 1 + check_random(&check, 9);
        s->branches[b].rate = rate;
        s->branches[b].segment_tokens = rate * (1 + check_random(&check, 1 + 300 / rate));
    }
}

static attn_status begin(const struct case_geometry *g, struct case_dtype d,
                         const struct case_options *o, uint32_t branches, uint32_t n_seqs)
{
    struct backend_pool_config config = case_config(g, d, o);
    struct attn_layer_spec spec = case_spec(g, o);
    set_branches(&spec, branches);
    return check_run_begin(&check, &config, &spec, o->has_sink_logits, o->has_alibi, n_seqs);
}

static void tell_branches(void)
{
    const struct attn_layer_spec *s = &check.specs[0];
    for (uint32_t i = 0; i < s->n_branches; i++)
        fprintf(stderr, " (%" PRIu32 ", %" PRIu32 ")", s->branches[i].segment_tokens,
                s->branches[i].rate);
    fprintf(stderr, "\n");
}

/* History, then a step, then decodes of a few tokens anywhere in what is cached. */
static bool run(const struct product_case *x)
{
    struct check_item history[CASE_MAX_ITEMS], step[CASE_MAX_ITEMS], last[CASE_MAX_ITEMS];
    uint32_t n_history, n = check_shape(x->shape, history, &n_history, step);
    for (uint32_t i = 0; i < n; i++) {
        uint32_t len = step[i].pos + step[i].n_tokens, n_again = 1 + i % 3;
        n_again = n_again < len ? n_again : len;
        last[i] = (struct check_item){.seq = i,
                                      .pos = check_random(&check, len - n_again + 1),
                                      .n_tokens = n_again,
                                      .flags = BACKEND_ATTEND,
                                      .wants_lse = true};
    }
    const bool is_right = (n_history == 0 || check_submit(&check, history, n_history)) &&
                          check_submit(&check, step, n) && check_outputs(&check, step, n) &&
                          check_again(&check, step, n) &&
                          (!x->options->is_batch_invariant || check_alone(&check, step, n)) &&
                          check_submit(&check, last, n) && check_outputs(&check, last, n);
    if (!is_right)
        tell_branches();
    return is_right;
}

/* Is a case left out of the product? By ATTND_TEST_TUNED. */
static bool is_left_out(const struct product_case *x)
{
    const struct case_geometry *g = x->geometry;
    const struct backend_pool_config c = case_config(g, x->dtype, &options[0]);
    bool has_prompt = false;
    for (uint32_t i = 0; i < CASE_MAX_ITEMS; i++)
        has_prompt |= x->shape->items[i].n_tokens > DECODE_MAX_TOKENS;
    return is_tuned_only &&
           (!has_prompt || !prefill_supported(&c, 9) || g->head_dim_k > 128 || g->head_dim_v > 128);
}

static attn_status begin_case(const struct product_case *x)
{
    const uint32_t turn = offset + x->n_run; /* so that one case alone may have any branches */
    check.has_plain_layer = turn % 2;
    return begin(x->geometry, x->dtype, x->options, turn % (2 * CASE_COUNT(fixed)), CASE_MAX_ITEMS);
}

static const struct product product = {.options = options,
                                       .n_options = CASE_COUNT(options),
                                       .shapes = shapes,
                                       .n_shapes = CASE_COUNT(shapes),
                                       .is_left_out = is_left_out,
                                       .begin = begin_case,
                                       .run = run};

static void every_option_of_a_dilated_layer_agrees_with_the_reference(void **state)
{
    (void)state;
    product_walk(&check, &product, every, offset);
    check.has_plain_layer = false;
}

/* Branches whose keys are apart have few tiles in the product; here they have four, and tuned
 * kernels find the blocks of one while they bring another. */
static void branches_of_several_tiles_agree_with_the_reference(void **state)
{
    (void)state;
    static const struct case_shape shape = {"long prompts", {{600, 400}, {0, 300}}};
    static const uint32_t dims[] = {64, 128};
    const bool was_tuned_only = is_tuned_only;
    is_tuned_only = false; /* branches of the table */
    for (uint32_t i = 0; i < 4; i++) {
        const struct case_geometry g = {.num_q_heads = 4,
                                        .num_kv_heads = 2,
                                        .head_dim_k = dims[i / 2],
                                        .head_dim_v = dims[i / 2],
                                        .block_tokens = 16};
        const struct product_case x = {.geometry = &g,
                                       .dtype = case_dtypes[CASE_BF16],
                                       .options = &options[i % 2],
                                       .shape = &shape};
        assert_int_equal(begin(&g, x.dtype, x.options, 4, CASE_MAX_ITEMS), ATTN_OK);
        assert_true(run(&x));
    }
    is_tuned_only = was_tuned_only;
}

/* NaN in K or V of a token reaches the heads and queries that see the token, nobody else. */
static void nan_reaches_who_sees_its_token(void **state)
{
    (void)state;
    /* in K and in V, two tokens and heads; every fifth but on the cpu */
    const uint32_t apart = strcmp(check.name, "cpu") == 0 ? 1 : 5;
    for (uint32_t i = 0; i < 4 * CASE_COUNT(case_dtypes); i += apart) {
        if (begin(&case_geometries[CASE_KV_HEADS_AS_WARPS], case_dtypes[i / 4], &options[0], 1,
                  1) != ATTN_OK)
            continue;
        struct check_item history = {.n_tokens = 108, .flags = BACKEND_APPEND};
        struct check_item step[2] = {
            {.pos = 108, .n_tokens = 1, .flags = 3, .wants_lse = true},
            {.pos = 68, .n_tokens = 40, .flags = BACKEND_ATTEND, .wants_lse = true}};
        check_poison = (struct check_poison){.is_set = true,
                                             .is_v = i % 2,
                                             .token = i % 4 < 2 ? 82 : 41,
                                             .kv_head = i % 4 < 2 ? 2 : 5,
                                             .element = 9,
                                             .value = NAN};
        bool ok = check_submit(&check, &history, 1);
        check_poison.is_set = false;
        for (uint32_t k = 0; k < 2; k++)
            ok = ok && check_submit(&check, &step[k], 1) && check_outputs(&check, &step[k], 1);
        if (!ok)
            fail_msg("%s/%s, NaN in %s", attn_dtype_name(case_dtypes[i / 4].q),
                     attn_dtype_name(case_dtypes[i / 4].kv), i % 2 ? "v" : "k");
    }
}

/* The mask of dilated.h, key by key, against the sentence that defines it. */
static void the_header_shows_each_query_its_keys(void **state)
{
    (void)state;
    for (uint32_t i = 0; i < 3000; i++) {
        uint32_t rate = 1 + check_random(&check, 7), n = 1 + check_random(&check, 90);
        uint32_t segment = rate * (1 + check_random(&check, 20)), head = check_random(&check, 9);
        uint32_t p = check_random(&check, n), is_full = i % 2;
        struct branch b = branch_of(segment, rate, head);
        struct visible v = branch_visible(b, is_full, p, n);
        uint32_t low = check_random(&check, p + 1), n_seen = 0, some_end = 0, some_first = 0;
        for (uint32_t j = 0; j < n; j++) {
            bool is_seen = p % rate == head % rate && j % rate == head % rate &&
                           p / segment == j / segment && (is_full || j <= p);
            bool is_shown = false;
            for (uint32_t key = v.first; key < v.end; key++)
                is_shown = is_shown || branch_token(b, key) == j;
            assert_true(is_seen == is_shown);
            n_seen += is_seen;
        }
        assert_int_equal(visible_count(v), n_seen);
        struct branch_range range = branch_visible_to(b, is_full, low, p, n);
        for (uint32_t t = p + 1; t-- > low;) {
            struct visible one = branch_visible(b, is_full, t, n);
            if (one.end == 0)
                continue;
            some_end = some_end ? some_end : one.end;
            some_first = one.first;
        }
        assert_int_equal(range.highest.end, some_end);
        assert_int_equal(range.lowest.first, some_first);
    }
}

/* Of stripes, token by token: each card has its own, and of what a query sees what is among
 * them. */
static void stripes_show_each_query_the_keys_that_are_here(void **state)
{
    (void)state;
    for (uint32_t i = 0; i < 3000; i++) {
        uint32_t stripe = 8u << check_random(&check, 3), cards = 2u << check_random(&check, 3);
        uint32_t card = check_random(&check, cards), head = check_random(&check, 40);
        struct stripes s = {stripe, stripe * cards, stripe * card};
        uint32_t rate = i % 3 == 0   ? 1u << check_random(&check, 8)
                        : i % 7 == 0 ? INT32_MAX - i % 2
                                     : 1 + check_random(&check, 400);
        uint32_t segment = rate * (1 + check_random(&check, 1 + 400 / rate));
        uint32_t n = 1 + check_random(&check, 700), p = check_random(&check, n), is_full = i % 2;
        struct branch b = branch_of(segment, rate, head);
        struct visible v = stripes_visible(s, b, branch_visible(b, is_full, p, n));
        uint32_t n_here = 0, key = 0;
        for (uint32_t j = 0; j < n; j++) {
            bool is_here = j / stripe % cards == card;
            assert_int_equal(stripes_before(s, j), n_here);
            if (!is_here)
                continue;
            assert_int_equal(stripes_position(s, n_here), j);
            if (j % rate == head % rate) {
                bool is_seen = p % rate == head % rate && p / segment == j / segment;
                assert_int_equal(stripes_token(s, b, key), n_here);
                assert_int_equal(visible_has(&v, key), is_seen && (is_full || j <= p));
                key++;
            }
            n_here++;
        }
        assert_true(v.first <= v.end && v.end <= key);
        for (uint32_t j = 0; j < 70; j++)
            stripes_token(s, b, key + j); /* of no key, but it ends */
    }
}

/* What a query sees, computed in parts that meet by their sums of weights. */
static void shards_agree_with_the_reference(void **state)
{
    (void)state;
    const uint32_t apart = strcmp(check.name, "cpu") == 0 ? 1 : 5; /* bf16 in one, f32 in six */
    for (uint32_t i = 0; i < 6; i += apart) {
        const uint32_t dtype = i % 2 ? CASE_F32 : CASE_BF16;
        const struct case_geometry *g = &case_geometries[CASE_KV_HEADS_AS_WARPS];
        char variant[16];
        assert_int_equal(begin(g, case_dtypes[dtype], &options[1], i < 2 ? 1 : 9 + i, 2), ATTN_OK);
        struct check_item step[2] = {{.n_tokens = 150, .flags = 3, .wants_lse = true},
                                     {.seq = 1, .n_tokens = 20, .flags = 3, .wants_lse = true}};
        snprintf(variant, sizeof variant, "shards%u", 1 + i);
        assert_true(check_submit(&check, step, 2));
        assert_int_equal(check_time(&check, variant, step, 2), ATTN_OK);
        if (!check_outputs(&check, step, 2))
            fail_msg("%s of %s", variant, attn_dtype_name(case_dtypes[dtype].q));
    }
    struct check_item step[1] = {{.n_tokens = 9, .flags = 3}};
    assert_int_equal(begin(&case_geometries[0], case_dtypes[0], &options[0], 1, 1), ATTN_OK);
    assert_true(check_submit(&check, step, 1));
    assert_int_equal(check_time(&check, "shards33", step, 1), ATTN_ENOTSUP);
    assert_int_equal(check_time(&check, "naive", step, 1), ATTN_ENOTSUP);
    assert_non_null(strstr(check.ops->last_error(check.b), "layer 0 is dilated"));
}

/* x + out(attention(q, k, v of x's norm)), as backend_bench.h has it, in float64 but for
 * rounding. */
static void reference_layer(const struct check *c, const struct backend_bench_layer *l, uint32_t n,
                            double *out)
{
    const struct backend_pool_config *g = &c->config;
    uint32_t dim = l->dim;
    size_t size = (size_t)n * dim, e = attn_dtype_bytes(g->q_dtype);
    double *normed = calloc(2 * size, sizeof *normed), *mixed = normed + size;
    uint8_t *sent = calloc(3, size * e), *rounded = calloc(2, size * e);
    for (uint32_t r = 0; r < n; r++) {
        double mean = 0, squares = 0;
        for (uint32_t d = 0; d < dim; d++)
            mean += reference_get(g->q_dtype, l->x, (size_t)r * dim + d) / dim;
        for (uint32_t d = 0; d < dim; d++)
            squares += pow(reference_get(g->q_dtype, l->x, (size_t)r * dim + d) - mean, 2) / dim;
        for (uint32_t d = 0; d < dim; d++)
            reference_put(g->q_dtype, rounded, (size_t)r * dim + d,
                          (reference_get(g->q_dtype, l->x, (size_t)r * dim + d) - mean) /
                              sqrt(squares + 1e-5));
    }
    for (uint32_t w = 0; w < 4; w++) {
        const uint8_t *from = w < 3 ? rounded : rounded + size * e;
        if (w == 3) {
            assert_int_equal(reference_attend(&c->specs[0], g->num_q_heads, g->num_kv_heads,
                                              g->head_dim_k, g->head_dim_v, g->q_dtype, sent, n, 0,
                                              sent + size * e, sent + 2 * size * e, n, mixed, NULL),
                             ATTN_OK);
            for (size_t i = 0; i < size; i++)
                reference_put(g->q_dtype, rounded + size * e, i, mixed[i]);
        }
        for (size_t i = 0; i < size; i++) {
            double sum = 0;
            for (uint32_t d = 0; d < dim; d++)
                sum += reference_get(g->q_dtype, from, i / dim * dim + d) *
                       reference_get(g->q_dtype, l->weights[w], i % dim * dim + d);
            if (w < 3)
                reference_put(g->q_dtype, sent + w * size * e, i, sum);
            else
                out[i] = sum + reference_get(g->q_dtype, l->x, i);
        }
    }
    free(normed);
    free(sent);
    free(rounded);
}

/* What attnbench measures as a whole layer. */
static void a_layer_around_attention_agrees_with_the_reference(void **state)
{
    (void)state;
    enum { N = 70, HEADS = 2, DIM = 64 * HEADS };
    const struct case_geometry g = {"two heads", HEADS, HEADS, 64, 64, 16, false};
    for (uint32_t i = 0; i < 3; i++) {
        const struct case_dtype d = case_dtypes[i];
        const size_t e = attn_dtype_bytes(d.q);
        assert_int_equal(begin(&g, d, &options[1], 1, 1), ATTN_OK);
        uint8_t *at = check.arena + check.arena_used + (1 << 20);
        struct backend_bench_layer l = {.dim = DIM, .x = at, .y = at + (1 << 20)};
        for (size_t k = 0; k < N * DIM; k++)
            reference_put(d.q, at, k, check_normal(&check));
        for (uint32_t w = 0; w < 4; w++) {
            uint8_t *weights = at + (2 + w) * (1 << 20);
            for (size_t k = 0; k < DIM * DIM; k++)
                reference_put(d.q, weights, k, check_normal(&check) / sqrt(DIM));
            l.weights[w] = weights;
        }
        memset(l.y, 0xff, N * DIM * e);
        struct check_item fill = {.n_tokens = N, .flags = BACKEND_APPEND};
        assert_true(check_submit(&check, &fill, 1)); /* takes the blocks */
        struct backend_item item = {.flags = BACKEND_APPEND | BACKEND_ATTEND,
                                    .n_tokens = N,
                                    .block_table = check.seqs[0].table,
                                    .q = at,
                                    .k = at,
                                    .v = at,
                                    .out = at + 6 * (1 << 20)};
        struct backend_batch batch = {.pool = check.pool, .items = &item, .n_items = 1};
        uint64_t ns[2];
        double *want = malloc(N * DIM * sizeof *want), diff = 0, norm = 0;
        assert_int_equal(check.bench->time_layer(check.b, &batch, &l, 2, false, ns), ATTN_OK);
        reference_layer(&check, &l, N, want);
        for (size_t k = 0; k < N * DIM; k++) {
            diff += pow(reference_get(d.q, l.y, k) - want[k], 2);
            norm += pow(want[k], 2);
        }
        free(want);
        if (!(sqrt(diff / norm) < reference_bound_of(d.q, d.q).l2))
            fail_msg("%s: relative error %g", attn_dtype_name(d.q), sqrt(diff / norm));
    }
}

/* The bytes that one token of 500 reads are those of the keys that it sees. */
static void a_decode_reads_the_tokens_it_sees(void **state)
{
    (void)state;
    const struct case_geometry *g = &case_geometries[CASE_HEAD_EACH];
    assert_int_equal(begin(g, case_dtypes[CASE_BF16], &options[0], 1, 1), ATTN_OK);
    struct check_item history = {.n_tokens = 500, .flags = BACKEND_APPEND};
    assert_true(check_submit(&check, &history, 1));
    uint8_t *q = check.arena + check.arena_used, *out = q + 4096;
    memset(q, 0, 4096);
    struct backend_item item = {.flags = BACKEND_ATTEND,
                                .pos = 499,
                                .n_tokens = 1,
                                .block_table = check.seqs[0].table,
                                .q = q,
                                .out = out};
    struct backend_batch batch = {.pool = check.pool, .items = &item, .n_items = 1};
    assert_int_equal(check.ops->submit(check.b, &batch), ATTN_OK);
    assert_ptr_equal(check.ops->poll(check.b, UINT64_MAX), &batch);
    assert_int_equal(batch.status, ATTN_OK);
    /* position 499 is 1 modulo 2 and 3 modulo 4: heads 1 and 3 take part at rate 2, 3 at rate 4 */
    uint64_t keys = 4 * (499 % 64 + 1) + 2 * (499 % 128 / 2 + 1) + 1 * (499 % 256 / 4 + 1);
    assert_int_equal(batch.kv_bytes, keys * (g->head_dim_k + g->head_dim_v) * 2);
}

static void bad_branches_are_refused_by_field_and_value(void **state)
{
    (void)state;
    struct attn_layer_spec spec = {.scale = 1, .n_branches = 2, .branches = {{8, 1}, {64, 4}}};
    struct backend_pool_config c =
        case_config(&case_geometries[0], case_dtypes[0], &case_options[CASE_PLAIN]);
    c.num_layers = c.n_blocks = c.n_table_rows = c.max_row_blocks = 1;
    c.layers = &spec;
    const struct attn_layer_spec good = spec;
    assert_int_equal(check.ops->pool_check(check.b, &c), ATTN_OK);
#define REFUSES(change, text)                                                                      \
    spec = good;                                                                                   \
    change;                                                                                        \
    assert_int_equal(check.ops->pool_check(check.b, &c), ATTN_EINVAL);                             \
    assert_non_null(strstr(check.ops->last_error(check.b), text))
    REFUSES(spec.branches[1].rate = 0, "layers[0].branches[1] has segments of 64 tokens and");
    REFUSES(spec.branches[1].rate = 65, "branches[1] has segments of 64 tokens and rate 65");
    REFUSES(spec.branches[1].segment_tokens = 0, "branches[1] has segments of 0 tokens");
    REFUSES(spec.branches[1].segment_tokens = 66, "must be a multiple of the rate");
    REFUSES(spec.branches[1].segment_tokens = UINT32_MAX - 3, "1 to 2147483647");
    REFUSES(spec.branches[0].rate = 2, "layers[0].branches: none has rate 1");
    REFUSES(spec.n_branches = 9, "layers[0].branches has 9 entries, at most 8");
    REFUSES(c.n_stripes = 3, "stripe is 0 of 3, must be of 2, 4 or 8");
    REFUSES((c.n_stripes = 4, c.stripe = 4), "stripe is 4 of 4, must be of 2, 4 or 8");
    REFUSES(c.n_stripes = 16, "n_stripes is 16, must be 0 to 8");
    c.n_stripes = c.stripe = 0;
    REFUSES(spec.window_tokens = 5, "layers[0].window_tokens is 5, a dilated layer has no window");
#undef REFUSES
}

int main(int argc, char **argv)
{
    int rc = check_start(&check, argc, argv, 733, &every, &offset);
    is_tuned_only = getenv("ATTND_TEST_TUNED") != NULL;
    if (rc != 0)
        return rc;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_option_of_a_dilated_layer_agrees_with_the_reference),
        cmocka_unit_test(branches_of_several_tiles_agree_with_the_reference),
        cmocka_unit_test(nan_reaches_who_sees_its_token),
        cmocka_unit_test(shards_agree_with_the_reference),
        cmocka_unit_test(a_layer_around_attention_agrees_with_the_reference),
        cmocka_unit_test(the_header_shows_each_query_its_keys),
        cmocka_unit_test(stripes_show_each_query_the_keys_that_are_here),
        cmocka_unit_test(a_decode_reads_the_tokens_it_sees),
        cmocka_unit_test(bad_branches_are_refused_by_field_and_value),
    };
    return cmocka_run_group_tests(tests, NULL, check_close);
}
