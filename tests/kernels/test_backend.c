/* test_backend.c: attention of any backend against the float64 reference (its pools: test_pools.c).
 *
 *     test_backend [NAME [EVERY [OFFSET [TESTS]]]]
 *
 * NAME is cpu, cuda or hip (default cpu). EVERY: the option product is walked in steps of EVERY
 * (default 97; 1 is all of it; choose one prime to the tables' sizes). TESTS: a pattern of the
 * tests to run, after ! of those to leave out. Exit code 77: the backend cannot be opened here.
 * With ATTND_TEST_TUNED=1 the product is only what the tuned decode kernels of sm_90 compute, with
 * ATTND_TEST_TUNED=prompts what those for prompts compute, with ATTND_TEST_TUNED=few what may have
 * units of few rows there, with ATTND_TEST_TUNED=f32 prompts of f32 over f32, with
 * ATTND_TEST_TUNED=rows bf16 or f16 that is not quantised, with ATTND_TEST_TUNED=latent pools whose
 * V is in K, with ATTND_TEST_TUNED=fp4 those of FP4; with
 * ATTND_TEST_PAIRS=N no case of more than N pairs of a query and a key, and of some other tests a
 * part; ATTND_TEST_FAIL_FAST=1 ends it at the first failure, not the tenth.
 */
#include "tests/kernels/product.h"

#include "kernels/gpu/sm90/decode.h"
#include "kernels/gpu/sm90/prefill.h"
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

#ifdef __SANITIZE_ADDRESS__
static uint32_t every = 997, offset; /* the values are those of the other build */
#else
static uint32_t every = 97, offset;
#endif
static struct check check;

/* History, then a step, then the step again and earlier positions again after blocks have moved. */
static bool run_case(const struct case_shape *shape, bool is_batch_invariant)
{
    struct check_item history[CASE_MAX_ITEMS], step[CASE_MAX_ITEMS], last[CASE_MAX_ITEMS];
    uint32_t n_history, n = check_shape(shape, history, &n_history, step);
    if (n_history > 0 && !check_submit(&check, history, n_history))
        return false;
    if (!check_submit(&check, step, n) || !check_outputs(&check, step, n) ||
        !check_again(&check, step, n))
        return false;
    if (is_batch_invariant && !check_alone(&check, step, n))
        return false;
    for (uint32_t i = 0; i < n; i++) {
        uint32_t len = shape->items[i].n_before + shape->items[i].n_tokens;
        uint32_t n_tokens = 1 + check_random(&check, len < 5 ? len : 5);
        last[i] = (struct check_item){.seq = i,
                                      .pos = check_random(&check, len - n_tokens + 1),
                                      .n_tokens = n_tokens,
                                      .flags = BACKEND_ATTEND,
                                      .wants_lse = true};
        if (i % 3 != 1) /* of both layers */
            check_move_block(&check, i, check_random(&check, check.seqs[i].n_blocks));
    }
    return check_submit(&check, last, n) && check_outputs(&check, last, n);
}

/* Is a case left out of the product? By ATTND_TEST_TUNED. */
static bool is_left_out(const struct backend_pool_config *c, const struct case_shape *s)
{
    const char *tuned = getenv("ATTND_TEST_TUNED");
    bool has_prompt = false;
    if (tuned == NULL)
        return false;
    if (strcmp(tuned, "latent") == 0)
        return !c->is_v_in_k;
    if (strcmp(tuned, "fp4") == 0)
        return kv_group(c->kv_dtype) == 0;
    if (strcmp(tuned, "rows") == 0)
        return c->is_v_in_k || c->kv_dtype != c->q_dtype || c->q_dtype == ATTN_F32;
    const bool is_f32 = strcmp(tuned, "f32") == 0, is_few = strcmp(tuned, "few") == 0;
    if (!is_f32 && !is_few && strcmp(tuned, "prompts") != 0)
        return !decode_supported(c, 9, 0);
    for (uint32_t i = 0; i < CASE_MAX_ITEMS; i++)
        has_prompt |= s->items[i].n_tokens > DECODE_MAX_TOKENS;
    if (is_few && (c->head_dim_k > 64 || c->head_dim_v > 64 || c->kv_dtype != c->q_dtype))
        return true; /* no units of few rows */
    return !has_prompt ||
           !(is_f32 ? c->q_dtype == ATTN_F32 && c->kv_dtype == ATTN_F32 : prefill_supported(c, 9));
}

static bool is_case_left_out(const struct product_case *x)
{
    const struct backend_pool_config config =
        case_config(x->geometry, x->dtype, &case_options[CASE_PLAIN]);
    return is_left_out(&config, x->shape);
}

static bool run_product_case(const struct product_case *x)
{
    return run_case(x->shape, x->options->is_batch_invariant);
}

static const struct product product = {.options = case_options,
                                       .n_options = CASE_COUNT(case_options),
                                       .shapes = case_shapes,
                                       .n_shapes = CASE_COUNT(case_shapes),
                                       .is_left_out = is_case_left_out,
                                       .run = run_product_case};

static void every_option_agrees_with_the_reference(void **state)
{
    (void)state;
    product_walk(&check, &product, every, offset);
}

/* What attnbench measures: the groups and head dims of its geometries, of at most 4 kv heads, so
 * that they fit. */
static void measured_geometries_agree_with_the_reference(void **state)
{
    (void)state;
    const struct case_dtype d = case_dtypes[CASE_BF16];
    for (uint32_t i = CASE_N_PRODUCT; i < CASE_COUNT(case_geometries); i++) {
        struct case_geometry g = case_geometries[i];
        const uint32_t group = g.num_q_heads / g.num_kv_heads;
        const struct case_shape *s = &case_shapes[i % 2];
        g.num_kv_heads = g.num_kv_heads < 4 ? g.num_kv_heads : 4;
        g.num_q_heads = group * g.num_kv_heads;
        const struct backend_pool_config config = case_config(&g, d, &case_options[CASE_PLAIN]);
        if (is_left_out(&config, s))
            continue;
        const attn_status st =
            check_begin(&check, &g, d, &case_options[CASE_PLAIN], CASE_MAX_ITEMS);
        if (st == ATTN_ENOTSUP && g.is_v_in_k)
            continue;
        assert_int_equal(st, ATTN_OK);
        if (!run_case(s, false))
            fail_msg("(%u, %u, %u), %s", g.num_q_heads, g.num_kv_heads, g.head_dim_k, s->name);
    }
}

/* Few prompts over many keys, which kernels may cut into parts of several whole tiles each; other
 * prompts over the same keys follow, so that nothing is left from the one before. */
static void few_prompts_over_many_keys_agree_with_the_reference(void **state)
{
    (void)state;
    static const uint32_t geometries[] = {CASE_ONE_KV_HEAD, CASE_GROUPED, CASE_DIM_192,
                                          CASE_DIM_256, CASE_LATENT_OF_256};
    static const struct case_options options[] = {
        {.name = "plain"},
        {.name = "wide window", .window_tokens = 600, .sink_tokens = 3},
        {.name = "many sink tokens", .window_tokens = 300, .sink_tokens = 290},
        {.name = "full", .is_full = true, .soft_cap = 8, .has_alibi = true},
    };
    static const struct case_shape shapes[] = {
        {"one over many keys", {{950, 40}}},
        {"two over many keys", {{770, 18}, {571, 33}}},
    };
#ifdef __SANITIZE_ADDRESS__
    const uint32_t step = 6; /* each option once, with another geometry */
#else
    const uint32_t step = check_step(6);
#endif
    for (uint32_t i = 0; i < CASE_COUNT(geometries) * CASE_COUNT(options); i += step) {
        const struct case_geometry *g = &case_geometries[geometries[i % CASE_COUNT(geometries)]];
        const struct case_options *o = &options[i / CASE_COUNT(geometries)];
        const struct case_shape *s = &shapes[i % 3 % 2];
        attn_status st = check_begin(&check, g, case_dtypes[CASE_BF16], o, CASE_MAX_ITEMS);
        if (st == ATTN_ENOTSUP)
            continue;
        bool is_right = st == ATTN_OK && run_case(s, false);
        for (uint32_t n = 17; n < 20 && is_right; n++) {
            struct check_item other = {
                .pos = 600 + check_random(&check, 150),
                .n_tokens = n,
                .flags = BACKEND_ATTEND,
                .wants_lse = true,
            };
            is_right = check_submit(&check, &other, 1) && check_outputs(&check, &other, 1);
        }
        if (!is_right)
            fail_msg("(%u, %u, %u), %s, %s", g->num_q_heads, g->num_kv_heads, g->head_dim_k,
                     o->name, s->name);
    }
}

/* Forks of forks, each with tokens of its own, in one batch: what they begin with may be computed
 * once for all of them. */
static bool run_forks(const struct case_geometry *g, bool is_poisoned)
{
    const uint32_t per_block = g->block_tokens,
                   trunk = 1 + (320 + check_random(&check, 200)) / check_step(5) / per_block;
    struct check_item history[CHECK_MAX_SEQS], step[CHECK_MAX_SEQS];
    uint32_t ends[CHECK_MAX_SEQS] = {trunk}, n = 0;
    history[n++] = (struct check_item){.n_tokens = trunk * per_block + check_random(&check, 40),
                                       .flags = BACKEND_APPEND};
    check_poison = (struct check_poison){.is_set = is_poisoned,
                                         .token = 5,
                                         .kv_head = g->num_kv_heads - 1,
                                         .element = 1,
                                         .value = check_random(&check, 2) ? NAN : INFINITY,
                                         .is_v = check_random(&check, 2)};
    bool ok = check_submit(&check, history, 1);
    check_poison.is_set = false;
    for (uint32_t i = 1; i < CHECK_MAX_SEQS && ok; i++) {
        const uint32_t from = check_random(&check, 3) ? 0 : check_random(&check, i);
        const uint32_t most = ends[from] < trunk ? ends[from] : trunk;
        ends[i] = from > 0 ? ends[from] : most - check_random(&check, 2) * (most / 3);
        check_fork(&check, from, i, ends[i]);
        history[n] = (struct check_item){.seq = i,
                                         .pos = ends[i] * per_block,
                                         .n_tokens = 1 + check_random(&check, 60),
                                         .flags = BACKEND_APPEND};
        ok = check_submit(&check, &history[n++], 1);
        if (i % 2 == 0) /* others may begin with some of this one's own */
            ends[i] = check.seqs[i].len / per_block;
    }
    for (uint32_t i = 0; i < n; i++)
        step[i] = (struct check_item){.seq = i,
                                      .pos = check.seqs[i].len,
                                      .n_tokens = 1 + check_random(&check, 4) * (i % 2),
                                      .flags = BACKEND_APPEND | BACKEND_ATTEND,
                                      .wants_lse = i % 3 != 1};
    ok = ok && check_submit(&check, step, n) && check_outputs(&check, step, n) &&
         check_again(&check, step, n);
    return ok;
}

static void sequences_that_begin_alike_agree_with_the_reference(void **state)
{
    (void)state;
    static const uint32_t options[] = {CASE_PLAIN,     CASE_SOFT_CAP, CASE_SINK_LOGITS,
                                       CASE_ALIBI,     CASE_FULL,     CASE_BATCH_INVARIANT,
                                       CASE_MANY_SINKS};
    const uint32_t n_g = CASE_N_PRODUCT, n_d = CASE_COUNT(case_dtypes);
    const bool is_cpu = strcmp(check.name, "cpu") == 0;
    /* devices compute so few apart; the executor's pools are told that it pays */
    const bool has_shared = is_cpu || strncmp(check.name, "cuda", 4) != 0;
    const uint32_t most = is_cpu ? 20 : 500, step = every < most ? every : most;
    const uint32_t n = n_g * n_d * CASE_COUNT(options);
    uint32_t n_run = 0, n_shared = 0;
    for (uint32_t i = offset % step; i < n; i += step) {
        const struct case_geometry *g = &case_geometries[i % n_g];
        const struct case_options *o = &case_options[options[i / n_g % CASE_COUNT(options)]];
        const struct case_dtype d = case_dtypes[i / n_g / CASE_COUNT(options)];
        const struct backend_pool_config config = case_config(g, d, &case_options[CASE_PLAIN]);
        if (is_left_out(&config, &case_shapes[0]))
            continue;
        const attn_status st = check_begin(&check, g, d, o, CASE_MAX_ITEMS);
        if (st == ATTN_ENOTSUP)
            continue;
        if (st != ATTN_OK || !run_forks(g, i % 7 == 0))
            fail_msg("case %" PRIu32 ": (%u, %u, %u, %u) blocks of %u, %s/%s, %s: %s", i,
                     g->num_q_heads, g->num_kv_heads, g->head_dim_k, g->head_dim_v, g->block_tokens,
                     attn_dtype_name(d.q), attn_dtype_name(d.kv), o->name,
                     check.ops->last_error(check.b));
        n_run++;
        n_shared += check.kv_shared_bytes > 0;
        if (o->window_tokens > 0 || o->is_batch_invariant || g->num_q_heads > 64)
            assert_int_equal(check.kv_shared_bytes, 0);
    }
    printf("%" PRIu32 " batches of forks, %" PRIu32 " of them read in common\n", n_run, n_shared);
    assert_true(n_run > 0);
    if (has_shared)
        assert_true(n_shared > 0);
}

/* One poisoned element of K or V: NaN and inf reach exactly the outputs that see it. */
static void poison_one(const struct case_geometry *g, uint32_t element_k, uint32_t element_v)
{
    const float values[] = {NAN, INFINITY, -INFINITY};
    const struct case_options options[] = {{.name = "plain"},
                                           {.name = "window", .window_tokens = 20}};
    for (uint32_t i = 0; i < 3 * 2 * 2 * CASE_COUNT(case_dtypes); i += check_step(5)) {
        struct case_dtype d = case_dtypes[i / 12];
        if (check_begin(&check, g, d, &options[i / 6 % 2], 2) != ATTN_OK)
            continue;
        struct check_item history = {.seq = 0, .n_tokens = 40, .flags = BACKEND_APPEND};
        struct check_item step[2] = {{.seq = 0,
                                      .pos = 40,
                                      .n_tokens = 30,
                                      .flags = BACKEND_APPEND | BACKEND_ATTEND,
                                      .wants_lse = true},
                                     {.seq = 1, .n_tokens = 9, .flags = 3, .wants_lse = true}};
        assert_true(check_submit(&check, &history, 1));
        check_poison = (struct check_poison){.is_set = true,
                                             .is_v = i / 3 % 2,
                                             .token = 5,
                                             .kv_head = 1,
                                             .element = i / 3 % 2 ? element_v : element_k,
                                             .value = values[i % 3]};
        bool ok = check_submit(&check, step, 2);
        check_poison.is_set = false;
        if (!ok || !check_outputs(&check, step, 2) || !check_again(&check, step, 2))
            fail_msg("%s/%s, %s, %g in %s", attn_dtype_name(d.q), attn_dtype_name(d.kv),
                     options[i / 6 % 2].name, (double)values[i % 3], i / 3 % 2 ? "v" : "k");
    }
}

static void nan_and_inf_are_where_the_reference_has_them(void **state)
{
    (void)state;
    poison_one(&case_geometries[CASE_GROUPED], 77, 77);
    poison_one(&case_geometries[CASE_V_IN_K_HEADS], 377, 7);
}

/* A batch-invariant pool: alone, and in a crowd of other lengths, byte by byte. */
static void check_crowd(const struct case_geometry *g)
{
    const uint32_t lens[CHECK_MAX_SEQS] = {900, 1, 64, 333, 17, 512, 700, 40};
    const struct case_options options = {.name = "batch invariant", .is_batch_invariant = true};
    if (check_begin(&check, g, case_dtypes[0], &options, CHECK_MAX_SEQS) == ATTN_ENOTSUP)
        return;
    uint32_t block_tokens = g->block_tokens, n_blocks = 0, n = 0;
    struct check_item history[CHECK_MAX_SEQS], step[CHECK_MAX_SEQS];
    for (; n < CHECK_MAX_SEQS; n++) {
        n_blocks += lens[n] / block_tokens + 1;
        if (n_blocks > check.config.n_blocks)
            break;
        history[n] = (struct check_item){.seq = n, .n_tokens = lens[n], .flags = BACKEND_APPEND};
        step[n] = (struct check_item){.seq = n,
                                      .pos = lens[n],
                                      .n_tokens = 1 + n % 3,
                                      .flags = BACKEND_APPEND | BACKEND_ATTEND,
                                      .wants_lse = true};
    }
    assert_true(n >= 4);
    assert_true(check_submit(&check, history, n));
    assert_true(check_submit(&check, step, n));
    assert_true(check_outputs(&check, step, n));
    assert_true(check_alone(&check, step, n));
}

static void a_batch_invariant_item_has_the_same_bytes_alone_and_in_a_crowd(void **state)
{
    (void)state;
    check_crowd(&case_geometries[CASE_GROUPED]);
    check_crowd(&case_geometries[CASE_LATENT]);
}

static void variants_of_the_bench_agree_with_the_reference(void **state)
{
    (void)state;
    for (uint32_t v = 0; check.bench->variants[v] != NULL; v++) {
        struct case_dtype d = case_dtypes[0];
        assert_int_equal(check_begin(&check, &case_geometries[0], d, &case_options[0], 3), ATTN_OK);
        struct check_item history[3], step[3];
        for (uint32_t i = 0; i < 3; i++) {
            uint32_t len = 1 + check_random(&check, 300);
            history[i] = (struct check_item){.seq = i, .n_tokens = len, .flags = BACKEND_APPEND};
            step[i] = (struct check_item){.seq = i,
                                          .pos = len - 1,
                                          .n_tokens = 1,
                                          .flags = BACKEND_ATTEND,
                                          .wants_lse = true};
        }
        assert_true(check_submit(&check, history, 3));
        assert_true(check_submit(&check, step, 3));
        attn_status st = check_time(&check, check.bench->variants[v], step, 3);
        if (st == ATTN_ENOTSUP)
            continue;
        assert_int_equal(st, ATTN_OK);
        if (!check_outputs(&check, step, 3))
            fail_msg("variant %s", check.bench->variants[v]);
    }
}

static void a_timed_read_stays_within_the_kv_memory(void **state)
{
    (void)state;
    struct backend_info info;
    char size[32];
    uint64_t ns[3] = {UINT64_MAX, UINT64_MAX, UINT64_MAX};
    check.ops->info(check.b, &info);
    attn_status st = check.bench->time_read(check.b, info.kv_bytes + 16, 1, true, ns);
    assert_int_equal(st, ATTN_ENOTSUP);
    snprintf(size, sizeof size, "%" PRIu64, info.kv_bytes + 16);
    assert_non_null(strstr(check.ops->last_error(check.b), size));
    assert_true(ns[0] == UINT64_MAX);
    assert_int_equal(check.bench->time_read(check.b, 4096, 3, true, ns), ATTN_OK);
    assert_true(ns[0] != UINT64_MAX && ns[1] != UINT64_MAX && ns[2] != UINT64_MAX);
}

static void a_bad_item_starts_nothing_and_is_named(void **state)
{
    (void)state;
    assert_int_equal(check_begin(&check, &case_geometries[0], case_dtypes[0], &case_options[0], 1),
                     ATTN_OK);
    uint32_t table[1] = {0};
    uint16_t q[8 * 128] = {0}, out[8 * 128];
    memset(out, 0xff, sizeof out);
    struct backend_item good = {.flags = BACKEND_ATTEND,
                                .n_tokens = 1,
                                .block_table = table,
                                .q = q,
                                .out = out},
                        bad;
    struct backend_batch batch = {.pool = check.pool, .items = &bad, .n_items = 1};
#define REFUSES(field, value)                                                                      \
    bad = good;                                                                                    \
    bad.field = value;                                                                             \
    assert_int_equal(check.ops->submit(check.b, &batch), ATTN_EINVAL);                             \
    assert_null(check.ops->poll(check.b, 0));                                                      \
    assert_non_null(strstr(check.ops->last_error(check.b), #field));                               \
    for (size_t i = 0; i < 8 * 128; i++)                                                           \
    assert_int_equal(out[i], 0xffff)
    REFUSES(layer, CHECK_LAYERS);
    REFUSES(n_tokens, 0);
    REFUSES(pos, CHECK_MAX_TOKENS);
#undef REFUSES
}

/* Of what is cached, the keys that some query of an item sees, each once. */
static void the_bytes_read_are_those_of_the_keys_that_are_seen(void **state)
{
    enum { N_BEFORE = 100, N = 20, WINDOW = CASE_WINDOW_AND_SINKS };
    const struct {
        uint32_t geometry, dtype, options, keys, row_bytes;
    } cases[] = {
        {CASE_SMALLEST_BLOCK, CASE_BF16, CASE_PLAIN, N_BEFORE + N, (24 + 40) * 2},
        {CASE_SMALLEST_BLOCK, CASE_BF16_INT8, CASE_PLAIN, N_BEFORE + N,
         24 + 40 + 2 * sizeof(float)},
        {CASE_SMALLEST_BLOCK, CASE_BF16, CASE_FULL, N_BEFORE + N, (24 + 40) * 2},
        {CASE_SMALLEST_BLOCK, CASE_BF16, WINDOW, 4 + 50 + N - 1, (24 + 40) * 2},
        {CASE_LATENT, CASE_BF16, CASE_PLAIN, N_BEFORE + N, 576 * 2},
        {CASE_LATENT, CASE_BF16_INT8, CASE_PLAIN, N_BEFORE + N, 576 + sizeof(float)},
    };
    (void)state;
    for (size_t i = 0; i < CASE_COUNT(cases); i++) {
        const struct case_geometry *g = &case_geometries[cases[i].geometry];
        const attn_status st =
            check_begin(&check, g, case_dtypes[cases[i].dtype], &case_options[cases[i].options], 1);
        if (st == ATTN_ENOTSUP && g->is_v_in_k)
            continue;
        assert_int_equal(st, ATTN_OK);
        struct check_item history = {.n_tokens = N_BEFORE + N, .flags = BACKEND_APPEND};
        assert_true(check_submit(&check, &history, 1));
        const uint64_t q_bytes = N * g->num_q_heads * g->head_dim_k * sizeof(float);
        uint8_t *q = check.arena + check.arena_used, *out = q + q_bytes;
        memset(q, 0, q_bytes);
        struct backend_item item = {.flags = BACKEND_ATTEND,
                                    .pos = N_BEFORE,
                                    .n_tokens = N,
                                    .block_table = check.seqs[0].table,
                                    .q = q,
                                    .out = out};
        struct backend_batch batch = {.pool = check.pool, .items = &item, .n_items = 1};
        assert_int_equal(check.ops->submit(check.b, &batch), ATTN_OK);
        assert_ptr_equal(check.ops->poll(check.b, UINT64_MAX), &batch);
        assert_int_equal(batch.status, ATTN_OK);
        assert_int_equal(batch.kv_bytes, cases[i].keys * g->num_kv_heads * cases[i].row_bytes);
    }
}

int main(int argc, char **argv)
{
    int rc = check_start(&check, argc, argv, 20250, &every, &offset);
    if (rc != 0)
        return rc;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_option_agrees_with_the_reference),
        cmocka_unit_test(measured_geometries_agree_with_the_reference),
        cmocka_unit_test(few_prompts_over_many_keys_agree_with_the_reference),
        cmocka_unit_test(sequences_that_begin_alike_agree_with_the_reference),
        cmocka_unit_test(nan_and_inf_are_where_the_reference_has_them),
        cmocka_unit_test(a_batch_invariant_item_has_the_same_bytes_alone_and_in_a_crowd),
        cmocka_unit_test(variants_of_the_bench_agree_with_the_reference),
        cmocka_unit_test(a_timed_read_stays_within_the_kv_memory),
        cmocka_unit_test(a_bad_item_starts_nothing_and_is_named),
        cmocka_unit_test(the_bytes_read_are_those_of_the_keys_that_are_seen),
    };
    return cmocka_run_group_tests(tests, NULL, check_close);
}
