/* test_lists.c: queries that visit listed tokens, on any backend against the float64 reference.
 *
 *     test_lists [NAME [EVERY [OFFSET [TESTS]]]]
 *
 * NAME is cpu, cuda or hip (default cpu); the product of geometries, dtypes, options and shapes is
 * walked in steps of EVERY (default 97), each case with other lists. Cached tokens that no query
 * lists are NaN. With ATTND_TEST_TUNED=latent only pools whose V is in K are walked. Exit code 77:
 * the backend cannot be opened here.
 */
#include "tests/kernels/product.h"

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

#define MAX_QUERIES 130
#define MAX_LISTED (1 << 17) /* of a batch here */

#ifdef __SANITIZE_ADDRESS__
static uint32_t every = 499, offset; /* the values are those of the other build */
#else
static uint32_t every = 97, offset;
#endif
static struct check check;

static const struct case_shape shapes[] = {
    {"decode at edges", {{0, 1}, {1, 1}, {7, 1}, {15, 1}, {16, 1}, {31, 1}, {63, 1}, {64, 1}}},
    {"ragged", {{130, 1}, {1, 4}, {40, 33}, {0, 17}, {299, 2}}},
    {"prompt chunk", {{33, 70}, {0, 129}}},
    {"one over many keys", {{900, 1}}},
    {"few over many keys", {{700, 3}, {500, 2}}},
};

static const struct case_options options[] = {
    {.name = "plain"},
    {.name = "window", .window_tokens = 20},
    {.name = "window and sink tokens", .window_tokens = 6, .sink_tokens = 4},
    {.name = "soft cap", .soft_cap = 5},
    {.name = "sink logits", .has_sink_logits = true},
    {.name = "alibi", .has_alibi = true},
    {.name = "full", .is_full = true},
    {.name = "batch invariant", .is_batch_invariant = true},
    {.name = "all",
     .window_tokens = 30,
     .sink_tokens = 3,
     .soft_cap = 3,
     .has_sink_logits = true,
     .has_alibi = true},
};

/* The lists of a batch. */
static struct {
    uint32_t starts[CASE_MAX_ITEMS][MAX_QUERIES + 1];
    uint32_t tokens[MAX_LISTED], n;
} lists;

static attn_status begin(const struct product_case *x)
{
    lists.n = 0;
    return product_begin(&check, x);
}

/* Does the query at p see the token? */
static bool sees(const struct case_options *o, uint32_t p, uint32_t token)
{
    return o->window_tokens == 0 || token + o->window_tokens > p || token < o->sink_tokens;
}

/* All, none, the last, those beside the edges of blocks, or some of the tokens that each query
 * sees. */
static void make_lists(struct check_item *it, const struct case_options *o, uint32_t *starts)
{
    const uint32_t per_block = check.config.block_tokens, item_kind = check_random(&check, 8);
    for (uint32_t t = 0; t < it->n_tokens; t++) {
        const uint32_t p = it->pos + t, end = o->is_full ? it->pos + it->n_tokens : p + 1;
        const uint32_t kind = item_kind < 6 ? item_kind : check_random(&check, 6);
        const uint32_t of_all = 1 + check_random(&check, 12);
        starts[t] = lists.n;
        for (uint32_t j = 0; j < end; j++) {
            const bool is_chosen = kind == 0   ? true
                                   : kind == 1 ? t % 2 == 1 && j == p
                                   : kind == 2 ? (j + 1) % per_block < 2
                                               : check_random(&check, 12) < of_all;
            if (is_chosen && sees(o, p, j))
                lists.tokens[lists.n++] = j;
        }
    }
    starts[it->n_tokens] = lists.n;
    assert_true(lists.n <= MAX_LISTED);
    it->lists = (struct backend_lists){.starts = starts, .tokens = lists.tokens};
}

static void poison_row(uint8_t *layer, const struct kv_layout *l, uint32_t head, uint32_t slot)
{
    const uint32_t per_block = check.config.block_tokens;
    const uint64_t k_row = l->k_head_bytes / per_block;
    memset(layer + head * l->k_head_bytes + slot * k_row, 0xff, k_row);
    if (l->is_quantised)
        memset(layer + l->k_scales + ((uint64_t)head * per_block + slot) * l->k_scale_bytes, 0xff,
               l->k_scale_bytes);
    if (check.config.is_v_in_k)
        return;
    memset(layer + l->v_offset + head * l->v_head_bytes + slot * l->v_row_bytes, 0xff,
           l->v_row_bytes);
    if (l->is_quantised)
        memset(layer + l->v_scales + ((uint64_t)head * per_block + slot) * l->v_scale_bytes, 0xff,
               l->v_scale_bytes);
}

/* What is cached of the item's sequence and in none of its lists becomes NaN. */
static void poison_unlisted(const struct check_item *it)
{
    const struct kv_layout l = kv_layout_of(&check.config);
    const struct check_seq *s = &check.seqs[it->seq];
    const uint32_t per_block = check.config.block_tokens;
    bool is_listed[CHECK_MAX_TOKENS] = {false};
    uint8_t *block = malloc(l.block_bytes);
    for (uint32_t i = it->lists.starts[0]; i < it->lists.starts[it->n_tokens]; i++)
        is_listed[it->lists.tokens[i]] = true;
    for (uint32_t i = 0; i < s->n_blocks; i++) {
        assert_int_equal(check.ops->block_read(check.pool, s->own[i], block), ATTN_OK);
        for (uint32_t slot = 0; slot < per_block; slot++)
            for (uint32_t h = 0; h < check.config.num_kv_heads; h++)
                if (!is_listed[i * per_block + slot])
                    poison_row(block + s->layer * l.layer_bytes, &l, h, slot);
        assert_int_equal(check.ops->block_write(check.pool, s->own[i], block), ATTN_OK);
    }
    free(block);
}

static bool run(const struct product_case *x)
{
    struct check_item history[CASE_MAX_ITEMS], step[CASE_MAX_ITEMS];
    uint32_t n_history, n = check_shape(x->shape, history, &n_history, step);
    if (n_history > 0 && !check_submit(&check, history, n_history))
        return false;
    for (uint32_t i = 0; i < n; i++) {
        if (i % 4 == 3) /* some items of a batch have no lists */
            continue;
        make_lists(&step[i], x->options, lists.starts[i]);
        poison_unlisted(&step[i]);
    }
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

static bool is_left_out(const struct product_case *x)
{
    return getenv("ATTND_TEST_TUNED") != NULL && !x->geometry->is_v_in_k;
}

static const struct product product = {.options = options,
                                       .n_options = CASE_COUNT(options),
                                       .shapes = shapes,
                                       .n_shapes = CASE_COUNT(shapes),
                                       .is_left_out = is_left_out,
                                       .begin = begin,
                                       .run = run};

static void every_option_agrees_with_the_reference(void **state)
{
    (void)state;
    product_walk(&check, &product, every, offset);
}

static void lists_that_cannot_be_start_nothing(void **state)
{
    (void)state;
    static const struct tree_node nodes[2];
    static const struct {
        uint32_t starts[3], tokens[4];
        bool is_tree;
        const char *why;
    } bad[] = {
        {{0, 1, 2}, {8, 9}, true, "item 0: lists"},    {{0, 2, 2}, {5, 5}, false, "item 0: a list"},
        {{0, 2, 2}, {5, 4}, false, "item 0: a list"},  {{0, 1, 2}, {9, 1}, false, "item 0: a list"},
        {{0, 1, 2}, {8, 10}, false, "item 0: a list"}, {{2, 1, 2}, {0, 1}, false, "item 0: a list"},
    };
    uint32_t table[64] = {0};
    const struct product_case plain = {.geometry = &case_geometries[CASE_GROUPED],
                                       .dtype = case_dtypes[CASE_BF16],
                                       .options = &options[0]};
    assert_int_equal(begin(&plain), ATTN_OK);
    for (uint32_t i = 0; i < CASE_COUNT(bad); i++) {
        struct backend_item item = {.flags = BACKEND_ATTEND,
                                    .pos = 8,
                                    .n_tokens = 2,
                                    .block_table = table,
                                    .q = check.arena,
                                    .out = check.arena + (1 << 20),
                                    .nodes = bad[i].is_tree ? nodes : NULL,
                                    .lists = {bad[i].starts, bad[i].tokens}};
        struct backend_batch batch = {.pool = check.pool, .items = &item, .n_items = 1};
        assert_int_equal(check.ops->submit(check.b, &batch), ATTN_EINVAL);
        assert_non_null(strstr(check.ops->last_error(check.b), bad[i].why));
    }
}

int main(int argc, char **argv)
{
    int rc = check_start(&check, argc, argv, 912, &every, &offset);
    if (rc != 0)
        return rc;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_option_agrees_with_the_reference),
        cmocka_unit_test(lists_that_cannot_be_start_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, check_close);
}
