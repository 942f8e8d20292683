/* test_choose.c: queries that choose blocks, on any backend against a float64 reference that makes
 * the same choice from float64 extremes.
 *
 *     test_choose [NAME [EVERY [OFFSET [TESTS]]]]
 *
 * NAME is cpu, cuda or hip (default cpu); the product of geometries, dtypes, options and shapes is
 * walked in steps of EVERY (default 97). Queries of which two blocks' bounds are too close to say
 * which is taken are left out: few, which is asserted. Exit code 77: the backend cannot be opened
 * here, or does not choose.
 */
#include "tests/kernels/chosen.h"
#include "tests/kernels/product.h"

#include <inttypes.h>
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
static struct check check;
static struct chosen_count count;

static const struct case_shape shapes[] = {
    {"decode at edges", {{129, 1}, {1, 1}, {128, 1}, {255, 1}, {256, 1}, {127, 1}, {63, 1}}},
    {"ragged", {{330, 1}, {1, 4}, {140, 33}, {0, 17}, {299, 2}}},
    {"prompt chunk", {{133, 70}, {0, 129}}},
    {"one over many keys", {{900, 1}}},
    {"few over many keys", {{700, 3}, {500, 2}}},
};

static const struct case_options options[] = {
    {.name = "plain"},
    {.name = "soft cap", .soft_cap = 5},
    {.name = "sink logits", .has_sink_logits = true},
    {.name = "full", .is_full = true},
    {.name = "batch invariant", .is_batch_invariant = true},
};

static attn_status begin(const struct case_geometry *g, struct case_dtype d)
{
    const struct product_case x = {.geometry = g, .dtype = d, .options = &options[0]};
    return product_begin(&check, &x);
}

/* --- the product ------------------------------------------------------------------------------ */

static bool submit(struct check_item *step, uint32_t n)
{
    if (!check_submit(&check, step, n))
        return false;
    for (uint32_t i = 0; i < n; i++)
        if (!chosen_check(&check, &step[i], &count))
            return false;
    return true;
}

static uint32_t any_number(void)
{
    static const uint32_t few[] = {1, 2, 3, 4, 5, 8, 13, 1000};
    return few[check_random(&check, CASE_COUNT(few))];
}

/* Chooses; once more over blocks that were copied; from other keys in the same blocks. */
static bool run(const struct product_case *x)
{
    struct check_item history[CASE_MAX_ITEMS], step[CASE_MAX_ITEMS];
    uint32_t n_history, n = check_shape(x->shape, history, &n_history, step);
    if (n_history > 0 && !check_submit(&check, history, n_history))
        return false;
    for (uint32_t i = 0; i < n; i++)
        step[i].n_chosen = any_number();
    if (!submit(step, n) || !check_again(&check, step, n))
        return false;
    if (x->options->is_batch_invariant && !check_alone(&check, step, n))
        return false;
    for (uint32_t i = 0; i < n; i++) {
        step[i].flags = BACKEND_ATTEND;
        step[i].wants_lse = true;
        step[i].n_chosen = any_number();
        check_move_block(&check, i, check_random(&check, check.seqs[i].n_blocks));
    }
    if (!submit(step, n))
        return false;
    for (uint32_t i = 0; i < n; i++) {
        const uint32_t end = step[i].pos + step[i].n_tokens;
        step[i].flags = BACKEND_APPEND | BACKEND_ATTEND;
        step[i].pos = end / 2;
        step[i].n_tokens = end - end / 2 < 60 ? end - end / 2 : 60;
        step[i].n_chosen = any_number();
    }
    if (!submit(step, n))
        return false;
    for (uint32_t i = 0; i < n; i++) {
        step[i].flags = BACKEND_ATTEND;
        step[i].pos = check.seqs[i].len - 1;
        step[i].n_tokens = 1;
    }
    return submit(step, n);
}

static const struct product product = {.options = options,
                                       .n_options = CASE_COUNT(options),
                                       .shapes = shapes,
                                       .n_shapes = CASE_COUNT(shapes),
                                       .run = run};

static void every_option_agrees_with_the_reference(void **state)
{
    (void)state;
    product_walk(&check, &product, every, offset);
    printf("%" PRIu64 " queries, %" PRIu64 " left out\n", count.n_queries, count.n_left_out);
    assert_true(count.n_left_out <= count.n_queries / 20);
}

/* --- what else is so -------------------------------------------------------------------------- */

static void a_choice_of_all_blocks_has_the_bytes_of_none(void **state)
{
    (void)state;
    for (uint32_t d = 0; d < CASE_COUNT(case_dtypes); d++) {
        struct check_item history[CASE_MAX_ITEMS], step[CASE_MAX_ITEMS];
        if (begin(&case_geometries[CASE_GROUPED], case_dtypes[d]) != ATTN_OK)
            continue;
        uint32_t n_history, n = check_shape(&shapes[4], history, &n_history, step);
        assert_true(check_submit(&check, history, n_history));
        assert_true(check_submit(&check, step, n));
        assert_true(check_outputs(&check, step, n));
        for (uint32_t i = 0; i < n; i++)
            step[i].n_chosen = check.seqs[i].n_blocks;
        const uint64_t kv_bytes = check.kv_bytes;
        assert_true(check_again(&check, step, n));
        assert_int_equal(check.kv_bytes, kv_bytes);
    }
}

/* Blocks are written in every way that there is; each time the choice is that of the new keys. */
static void a_choice_is_of_the_keys_that_are_there(void **state)
{
    (void)state;
    for (uint32_t d = 0; d < CASE_COUNT(case_dtypes); d++) {
        struct check_item history[CASE_MAX_ITEMS], step[CASE_MAX_ITEMS];
        if (begin(&case_geometries[CASE_GROUPED], case_dtypes[d]) != ATTN_OK)
            continue;
        uint32_t n_history, n = check_shape(&shapes[3], history, &n_history, step);
        const struct kv_layout l = kv_layout_of(&check.config);
        const uint32_t heads = check.config.num_kv_heads, per_block = check.config.block_tokens;
        const uint32_t dk = check.config.head_dim_k, dv = check.config.head_dim_v;
        struct check_seq *s = &check.seqs[0];
        uint8_t *a = malloc(l.block_bytes), *b = malloc(l.block_bytes);
        assert_true(check_submit(&check, history, n_history));
        step[0].n_chosen = 6;
        assert_true(submit(step, n));
        step[0].flags = BACKEND_ATTEND;
        /* two blocks change places by block_write */
        assert_int_equal(check.ops->block_read(check.pool, s->own[3], a), ATTN_OK);
        assert_int_equal(check.ops->block_read(check.pool, s->own[7], b), ATTN_OK);
        assert_int_equal(check.ops->block_write(check.pool, s->own[3], b), ATTN_OK);
        assert_int_equal(check.ops->block_write(check.pool, s->own[7], a), ATTN_OK);
        for (size_t i = 0; i < (size_t)per_block * heads * dk; i++) {
            float *x = s->k + 3 * (size_t)per_block * heads * dk + i;
            float *y = s->k + 7 * (size_t)per_block * heads * dk + i, z = *x;
            *x = *y;
            *y = z;
        }
        for (size_t i = 0; i < (size_t)per_block * heads * dv; i++) {
            float *x = s->v + 3 * (size_t)per_block * heads * dv + i;
            float *y = s->v + 7 * (size_t)per_block * heads * dv + i, z = *x;
            *x = *y;
            *y = z;
        }
        for (uint32_t round = 0; round < 4; round++)
            assert_true(submit(step, n));
        /* tokens of one block are those of another */
        for (uint32_t i = 0; i < per_block; i++) {
            const struct backend_token_copy c = {s->own[9], i, s->own[4], per_block - 1 - i};
            const size_t from = 9 * (size_t)per_block + i, to = 5 * (size_t)per_block - 1 - i;
            assert_int_equal(check.ops->tokens_copy(check.pool, &c, 1), ATTN_OK);
            memcpy(s->k + to * heads * dk, s->k + from * heads * dk, heads * dk * sizeof *s->k);
            memcpy(s->v + to * heads * dv, s->v + from * heads * dv, heads * dv * sizeof *s->v);
        }
        for (uint32_t round = 0; round < 4; round++)
            assert_true(submit(step, n));
        /* a block is a batch's copy of another */
        const size_t k_block = (size_t)per_block * heads * dk, v_block = k_block / dk * dv;
        const struct backend_copy copy = {s->own[2], s->own[8]};
        struct backend_batch batch = {.pool = check.pool, .copies = &copy, .n_copies = 1};
        assert_int_equal(check.ops->submit(check.b, &batch), ATTN_OK);
        assert_ptr_equal(check.ops->poll(check.b, 10000000000), &batch);
        memcpy(s->k + 8 * k_block, s->k + 2 * k_block, k_block * sizeof *s->k);
        memcpy(s->v + 8 * v_block, s->v + 2 * v_block, v_block * sizeof *s->v);
        for (uint32_t round = 0; round < 4; round++)
            assert_true(submit(step, n));
        assert_int_equal(
            check.ops->pool_resize(check.pool, check.config.n_blocks, check.config.max_row_blocks),
            ATTN_OK);
        assert_true(submit(step, n));
        free(a);
        free(b);
    }
}

/* Keys of zeros: all bounds are the same. */
static void of_blocks_with_the_same_bound_the_newer_are_taken(void **state)
{
    (void)state;
    for (uint32_t d = 0; d < CASE_COUNT(case_dtypes); d++) {
        struct check_item history[CASE_MAX_ITEMS], step[CASE_MAX_ITEMS];
        if (begin(&case_geometries[CASE_GROUPED], case_dtypes[d]) != ATTN_OK)
            continue;
        uint32_t n_history, n = check_shape(&shapes[3], history, &n_history, step);
        const struct kv_layout l = kv_layout_of(&check.config);
        struct check_seq *s = &check.seqs[0];
        const size_t row = (size_t)check.config.num_kv_heads * check.config.head_dim_k;
        const uint32_t n_full = history[0].n_tokens / check.config.block_tokens;
        uint8_t *bytes = malloc(l.block_bytes);
        assert_true(check_submit(&check, history, n_history));
        for (uint32_t i = 0; i < n_full; i++) {
            assert_int_equal(check.ops->block_read(check.pool, s->own[i], bytes), ATTN_OK);
            memset(bytes + s->layer * l.layer_bytes, 0, l.v_offset);
            assert_int_equal(check.ops->block_write(check.pool, s->own[i], bytes), ATTN_OK);
        }
        memset(s->k, 0, n_full * check.config.block_tokens * row * sizeof *s->k);
        check.n_front = 0; /* else the history is appended once more */
        const uint64_t n_before = count.n_left_out;
        for (uint32_t k = 3; k < 9; k++) {
            step[0].n_chosen = k;
            assert_true(submit(step, n));
            step[0].flags = BACKEND_ATTEND;
        }
        assert_int_equal(count.n_left_out, n_before);
        free(bytes);
    }
}

/* What is kept of blocks leaves its room to a pool; without room a choice fails by name. */
static void a_pool_takes_the_room_of_what_is_kept(void **state)
{
    (void)state;
    struct check_item history[CASE_MAX_ITEMS], step[CASE_MAX_ITEMS];
    struct backend_pool *other;
    assert_int_equal(begin(&case_geometries[CASE_GROUPED], case_dtypes[CASE_BF16]), ATTN_OK);
    uint32_t n_history, n = check_shape(&shapes[3], history, &n_history, step);
    struct backend_pool_config large = check.config; /* all that is behind the pool but a block */
    large.n_blocks = check.ops->pool_room(check.pool) - check.config.n_blocks - 1;
    assert_true(check_submit(&check, history, n_history));
    step[0].n_chosen = 6;
    assert_true(submit(step, n));
    step[0].flags = BACKEND_ATTEND;
    assert_int_equal(check.ops->pool_open(check.b, &large, &other), ATTN_OK);
    if (!check_submit(&check, step, n)) /* there may be a gap that other tests have left */
        assert_non_null(strstr(check.ops->last_error(check.b), "choosing blocks takes"));
    check.ops->pool_close(other);
    assert_true(submit(step, n));
}

/* Two pools, and room for what is kept of one: it is made anew where it was given away. */
static void pools_take_the_room_of_what_is_kept_of_others(void **state)
{
    (void)state;
    struct check_item history[CASE_MAX_ITEMS], step[CASE_MAX_ITEMS];
    struct backend_pool *other, *rest;
    assert_int_equal(begin(&case_geometries[CASE_GROUPED], case_dtypes[CASE_BF16]), ATTN_OK);
    uint32_t n_history, n = check_shape(&shapes[3], history, &n_history, step);
    struct backend_pool_config config = check.config;
    const uint32_t n_blocks = config.n_blocks, n_kept = n_blocks / 16 + 2; /* and some beside */
    assert_int_equal(check.ops->pool_open(check.b, &config, &other), ATTN_OK);
    config.n_blocks = check.ops->pool_room(other) - n_blocks - n_kept;
    assert_int_equal(check.ops->pool_open(check.b, &config, &rest), ATTN_OK);
    assert_true(check_submit(&check, history, n_history));
    step[0].n_chosen = 6;
    for (uint32_t round = 0; round < 3; round++) {
        struct backend_item item = {.flags = BACKEND_ATTEND,
                                    .layer = check.seqs[0].layer,
                                    .pos = step[0].pos,
                                    .n_tokens = 1,
                                    .block_table = check.seqs[0].own,
                                    .q = check.arena,
                                    .out = check.arena + (1 << 20),
                                    .n_chosen = 6};
        struct backend_batch batch = {.pool = other, .items = &item, .n_items = 1};
        assert_true(submit(step, n));
        step[0].flags = BACKEND_ATTEND;
        if (check.ops->submit(check.b, &batch) != ATTN_OK)
            fail_msg("%s", check.ops->last_error(check.b));
        assert_ptr_equal(check.ops->poll(check.b, 10000000000), &batch);
    }
    check.ops->pool_close(rest);
    check.ops->pool_close(other);
}

static void choices_that_cannot_be_start_nothing(void **state)
{
    (void)state;
    static const struct tree_node nodes[2];
    static const uint32_t starts[] = {0, 1, 2}, tokens[] = {0, 0};
    uint32_t table[64] = {0};
    assert_int_equal(begin(&case_geometries[CASE_GROUPED], case_dtypes[CASE_BF16]), ATTN_OK);
    for (uint32_t i = 0; i < 3; i++) {
        struct backend_item item = {.flags = i == 2 ? BACKEND_APPEND : BACKEND_ATTEND,
                                    .pos = 8,
                                    .n_tokens = 2,
                                    .block_table = table,
                                    .q = check.arena,
                                    .k = check.arena,
                                    .v = check.arena,
                                    .out = check.arena + (1 << 20),
                                    .nodes = i == 0 ? nodes : NULL,
                                    .n_chosen = 2};
        if (i == 1)
            item.lists = (struct backend_lists){starts, tokens};
        struct backend_batch batch = {.pool = check.pool, .items = &item, .n_items = 1};
        assert_int_equal(check.ops->submit(check.b, &batch), ATTN_EINVAL);
        assert_non_null(strstr(check.ops->last_error(check.b), "item 0: n_chosen"));
    }
    const struct case_options window = {.name = "window", .window_tokens = 20};
    const struct product_case x = {.geometry = &case_geometries[CASE_GROUPED],
                                   .dtype = case_dtypes[CASE_BF16],
                                   .options = &window};
    assert_int_equal(product_begin(&check, &x), ATTN_OK);
    struct backend_item item = {.flags = BACKEND_ATTEND,
                                .n_tokens = 1,
                                .block_table = table,
                                .q = check.arena,
                                .out = check.arena + (1 << 20),
                                .n_chosen = 2};
    struct backend_batch batch = {.pool = check.pool, .items = &item, .n_items = 1};
    assert_int_equal(check.ops->submit(check.b, &batch), ATTN_EINVAL);
    assert_non_null(strstr(check.ops->last_error(check.b), "item 0: n_chosen, with a window"));
}

int main(int argc, char **argv)
{
    struct backend_info info;
    int rc = check_start(&check, argc, argv, 913, &every, &offset);
    if (rc != 0)
        return rc;
    check.needs_room = true;
    check.ops->info(check.b, &info);
    if (!(info.features & BACKEND_HAS_CHOICE)) {
        check_close(NULL);
        return 77;
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_option_agrees_with_the_reference),
        cmocka_unit_test(a_choice_of_all_blocks_has_the_bytes_of_none),
        cmocka_unit_test(a_choice_is_of_the_keys_that_are_there),
        cmocka_unit_test(of_blocks_with_the_same_bound_the_newer_are_taken),
        cmocka_unit_test(a_pool_takes_the_room_of_what_is_kept),
        cmocka_unit_test(pools_take_the_room_of_what_is_kept_of_others),
        cmocka_unit_test(choices_that_cannot_be_start_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, check_close);
}
