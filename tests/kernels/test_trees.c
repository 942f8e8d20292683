/* test_trees.c: trees of new tokens, on any backend against the float64 reference.
 *
 *     test_trees [NAME [EVERY [OFFSET [TESTS]]]]
 *
 * NAME is cpu, cuda or hip (default cpu); the product of geometries, dtypes, options and shapes is
 * walked in steps of EVERY (default 97), each case with other trees. Exit code 77: the backend
 * cannot be opened here.
 */
#include "tests/kernels/product.h"

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

static const struct case_shape shapes[] = {
    {"at edges", {{0, 1}, {1, 2}, {7, 9}, {15, 3}, {16, 16}, {31, 2}, {63, 33}, {64, 64}}},
    {"ragged", {{130, 8}, {1, 64}, {40, 5}, {0, 33}, {299, 17}, {37, 60}}},
    {"one over many keys", {{900, 32}}},
    {"few over many keys", {{700, 5}, {500, 63}}},
};

static const struct case_options options[] = {
    {.name = "plain"},
    {.name = "window", .window_tokens = 20},
    {.name = "window within a tree", .window_tokens = 3},
    {.name = "window of one", .window_tokens = 1},
    {.name = "window and sink tokens", .window_tokens = 6, .sink_tokens = 4},
    {.name = "more sink tokens than are cached", .window_tokens = 2, .sink_tokens = 70},
    {.name = "soft cap", .soft_cap = 5},
    {.name = "sink logits", .has_sink_logits = true},
    {.name = "alibi", .has_alibi = true},
    {.name = "batch invariant", .is_batch_invariant = true},
    {.name = "all",
     .window_tokens = 30,
     .sink_tokens = 3,
     .soft_cap = 3,
     .has_sink_logits = true,
     .has_alibi = true},
};

static attn_status begin(const struct case_geometry *g, struct case_dtype d,
                         const struct case_options *o)
{
    const struct product_case x = {.geometry = g, .dtype = d, .options = o};
    return product_begin(&check, &x);
}

/* Chains, stars, forests and what is between them. */
static void grow_tree(int32_t *parents, uint32_t n)
{
    const uint32_t kind = check_random(&check, 4);
    for (uint32_t i = 0; i < n; i++) {
        if (kind == 0)
            parents[i] = (int32_t)i - 1;
        else if (kind == 1)
            parents[i] = -1;
        else if (kind == 2)
            parents[i] = (int32_t)check_random(&check, i + 1) - 1;
        else
            parents[i] = (int32_t)i - 1 - (int32_t)check_random(&check, i < 4 ? i + 1 : 4);
    }
}

static bool run(const struct product_case *x)
{
    static int32_t parents[CASE_MAX_ITEMS][TREE_MAX_NODES];
    struct check_item history[CASE_MAX_ITEMS], step[CASE_MAX_ITEMS];
    uint32_t n_history, n = check_shape(x->shape, history, &n_history, step);
    for (uint32_t i = 0; i < n; i++) {
        grow_tree(parents[i], step[i].n_tokens);
        if (i % 4 != 3) /* some items of a batch are no trees */
            step[i].parents = parents[i];
    }
    if (n_history > 0 && !check_submit(&check, history, n_history))
        return false;
    if (!check_submit(&check, step, n) || !check_outputs(&check, step, n) ||
        !check_again(&check, step, n))
        return false;
    if (x->options->is_batch_invariant && !check_alone(&check, step, n))
        return false;
    for (uint32_t i = 0; i < n; i++) {
        step[i].flags = BACKEND_ATTEND;
        step[i].wants_lse = true;
        check_move_block(&check, i, check_random(&check, check.seqs[i].n_blocks));
    }
    return check_submit(&check, step, n) && check_outputs(&check, step, n);
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
}

/* Trees behind what their sequences begin with in common, which may be computed once for all of
 * them, beside items that are none. */
static void trees_of_sequences_that_begin_alike(void **state)
{
    (void)state;
    static int32_t parents[CASE_MAX_ITEMS][TREE_MAX_NODES];
    const uint32_t n_cases = CASE_N_PRODUCT * CASE_COUNT(case_dtypes);
    const uint32_t at_a_time = every < 11 ? every : 11;
    uint32_t n_shared = 0;
    for (uint32_t i = offset % at_a_time; i < n_cases; i += at_a_time) {
        const struct case_geometry *g = &case_geometries[i % CASE_N_PRODUCT];
        const uint32_t n_blocks = 1 + 200 / g->block_tokens;
        if (g->num_q_heads > 32 || begin(g, case_dtypes[i / CASE_N_PRODUCT], &options[i % 2 * 6]) !=
                                       ATTN_OK) /* plain, soft cap */
            continue;
        struct check_item step[4],
            history = {.n_tokens = n_blocks * g->block_tokens + 3, .flags = BACKEND_APPEND};
        bool ok = check_submit(&check, &history, 1);
        for (uint32_t k = 0; k < CASE_COUNT(step) && ok; k++) {
            if (k > 0)
                check_fork(&check, 0, k, n_blocks);
            history = (struct check_item){
                .seq = k, .pos = check.seqs[k].len, .n_tokens = 1 + 9 * k, .flags = BACKEND_APPEND};
            ok = check_submit(&check, &history, 1);
            step[k] = (struct check_item){.seq = k,
                                          .pos = check.seqs[k].len,
                                          .n_tokens = k == 3 ? 2 : 1 + check_random(&check, 20),
                                          .flags = BACKEND_APPEND | BACKEND_ATTEND,
                                          .wants_lse = k % 2,
                                          .parents = k == 3 ? NULL : parents[k]};
            grow_tree(parents[k], step[k].n_tokens);
        }
        ok = ok && check_submit(&check, step, CASE_COUNT(step)) &&
             check_outputs(&check, step, CASE_COUNT(step)) &&
             check_again(&check, step, CASE_COUNT(step));
        if (!ok)
            fail_msg("case %" PRIu32 ": %s", i, check.ops->last_error(check.b));
        n_shared += check.kv_shared_bytes > 0;
    }
    if (strncmp(check.name, "cuda", 4) != 0) /* which computes so few apart */
        assert_true(n_shared > 0);
}

/* What is not finite in a node reaches the nodes below it and no other. */
static void nan_reaches_the_nodes_below(void **state)
{
    (void)state;
    static const int32_t parents[] = {-1, 0, 0, 1, 2, 3, -1, 6};
    const uint32_t n = CASE_COUNT(parents);
    for (uint32_t i = 0; i < 2 * CASE_COUNT(case_dtypes); i++) {
        const struct case_geometry *g = &case_geometries[i % CASE_N_PRODUCT];
        if (begin(g, case_dtypes[i / 2], &case_options[CASE_PLAIN]) != ATTN_OK)
            continue;
        struct check_item before = {.n_tokens = 21, .flags = BACKEND_APPEND};
        struct check_item step = {.pos = 21,
                                  .n_tokens = n,
                                  .flags = BACKEND_APPEND | BACKEND_ATTEND,
                                  .wants_lse = true,
                                  .parents = parents};
        assert_true(check_submit(&check, &before, 1));
        check_poison = (struct check_poison){
            .is_set = true, .is_v = i % 2, .token = 1 + i % 2, .value = i % 3 ? NAN : INFINITY};
        bool ok = check_submit(&check, &step, 1) && check_outputs(&check, &step, 1);
        check_poison.is_set = false;
        assert_true(ok);
    }
}

/* Tokens are copied with all layers, K and V and their scales, and nothing else. */
static void tokens_are_copied(void **state)
{
    (void)state;
    for (uint32_t i = 0; i < CASE_N_PRODUCT * CASE_COUNT(case_dtypes); i += 5) {
        const struct case_geometry *g = &case_geometries[i % CASE_N_PRODUCT];
        if (begin(g, case_dtypes[i / CASE_N_PRODUCT], &case_options[CASE_PLAIN]) != ATTN_OK)
            continue;
        const struct kv_layout l = kv_layout_of(&check.config);
        const uint32_t per_block = g->block_tokens;
        uint8_t *in = malloc(l.block_bytes), *old = malloc(l.block_bytes);
        uint8_t *out = malloc(l.block_bytes);
        for (uint64_t b = 0; b < l.block_bytes; b++) {
            in[b] = (uint8_t)check_random(&check, 256);
            old[b] = (uint8_t)~in[b];
        }
        assert_int_equal(check.ops->block_write(check.pool, 1, in), ATTN_OK);
        assert_int_equal(check.ops->block_write(check.pool, 2, old), ATTN_OK);
        struct backend_token_copy list[8];
        for (uint32_t j = 0; j < 8; j++)
            list[j] = (struct backend_token_copy){1, (j * 5 + 3) % per_block, 2, per_block - 1 - j};
        assert_int_equal(check.ops->tokens_copy(check.pool, list, 7), ATTN_OK);
        assert_int_equal(check.ops->block_read(check.pool, 2, out), ATTN_OK);
        const uint32_t n_parts = g->is_v_in_k ? 1 : 2;
        for (uint32_t x = 0; x < CHECK_LAYERS * n_parts * g->num_kv_heads * per_block; x++) {
            const uint32_t slot = x % per_block, head = x / per_block % g->num_kv_heads;
            const uint32_t part = x / per_block / g->num_kv_heads % n_parts;
            const uint64_t layer = x / per_block / g->num_kv_heads / n_parts * l.layer_bytes;
            const uint64_t row_bytes = part ? l.v_row_bytes : l.k_row_bytes;
            const uint64_t scale_bytes = part ? l.v_scale_bytes : l.k_scale_bytes;
            const uint64_t at = layer + (part ? l.v_offset : 0) + head * per_block * row_bytes;
            const uint64_t scales =
                layer + (part ? l.v_scales : l.k_scales) + head * per_block * scale_bytes;
            const uint32_t j = per_block - 1 - slot;
            const uint8_t *want = j < 7 ? in : old;
            const uint32_t from = j < 7 ? list[j].from_slot : slot;
            assert_memory_equal(out + at + slot * row_bytes, want + at + from * row_bytes,
                                row_bytes);
            if (l.is_quantised)
                assert_memory_equal(out + scales + slot * scale_bytes,
                                    want + scales + from * scale_bytes, scale_bytes);
        }
        list[0].to_slot = per_block;
        assert_int_equal(check.ops->tokens_copy(check.pool, list, 1), ATTN_EINVAL);
        list[0] = (struct backend_token_copy){.from_block = check.config.n_blocks};
        assert_int_equal(check.ops->tokens_copy(check.pool, list, 1), ATTN_EINVAL);
        free(in);
        free(old);
        free(out);
    }
}

static void a_tree_where_there_can_be_none_starts_nothing(void **state)
{
    (void)state;
    static const struct tree_node nodes[65];
    const struct case_options full = {.name = "full", .is_full = true};
    uint32_t table[64] = {0};
    for (int i = 0; i < 2; i++) {
        assert_int_equal(begin(&case_geometries[CASE_GROUPED], case_dtypes[CASE_BF16],
                               i == 0 ? &full : &case_options[CASE_PLAIN]),
                         ATTN_OK);
        struct backend_item item = {.flags = BACKEND_ATTEND,
                                    .n_tokens = i == 0 ? 2 : 65,
                                    .block_table = table,
                                    .q = check.arena,
                                    .out = check.arena + (1 << 20),
                                    .nodes = nodes};
        struct backend_batch batch = {.pool = check.pool, .items = &item, .n_items = 1};
        assert_int_equal(check.ops->submit(check.b, &batch), ATTN_EINVAL);
        assert_non_null(strstr(check.ops->last_error(check.b), "item 0: a tree"));
    }
}

int main(int argc, char **argv)
{
    int rc = check_start(&check, argc, argv, 911, &every, &offset);
    if (rc != 0)
        return rc;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_option_agrees_with_the_reference),
        cmocka_unit_test(trees_of_sequences_that_begin_alike),
        cmocka_unit_test(nan_reaches_the_nodes_below),
        cmocka_unit_test(tokens_are_copied),
        cmocka_unit_test(a_tree_where_there_can_be_none_starts_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, check_close);
}
