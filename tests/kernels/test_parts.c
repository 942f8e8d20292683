/* test_parts.c: sequences that are parts of longer ones, on any backend against the float64
 * reference of the longer sequence, whose other tokens are left out: what an append that begins in
 * the middle sees, and queries behind all tokens of a part.
 *
 *     test_parts [NAME [EVERY [OFFSET [TESTS]]]]
 *
 * NAME is cpu, cuda or hip (default cpu); the product of geometries, dtypes, options and shapes is
 * walked in steps of EVERY (default 97), each case with other parts. Exit code 77: the backend
 * cannot be opened here, or has no parts.
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

#define SEGMENT 96u /* the longest of a dilated layer's: a multiple of the others */

#ifdef __SANITIZE_ADDRESS__
static uint32_t every = 397, offset; /* the values are those of the other build */
#else
static uint32_t every = 97, offset;
#endif
static struct check check;

static const struct case_shape shapes[] = {
    {"decode at edges", {{0, 1}, {1, 1}, {7, 1}, {15, 1}, {16, 1}, {31, 1}, {63, 1}, {64, 1}}},
    {"ragged", {{130, 1}, {1, 4}, {40, 33}, {0, 17}, {299, 2}}},
    {"prompt chunk", {{33, 70}, {0, 129}}},
    {"one over many keys", {{700, 1}}},
};

enum { OPTION_WINDOW = 1, OPTION_DILATED = 8 };

static const struct case_options options[] = {
    {.name = "plain"},
    [OPTION_WINDOW] = {.name = "window", .window_tokens = 20},
    {.name = "window of one", .window_tokens = 1},
    {.name = "window and sink tokens", .window_tokens = 40, .sink_tokens = 21},
    {.name = "soft cap", .soft_cap = 5},
    {.name = "sink logits", .has_sink_logits = true},
    {.name = "alibi", .has_alibi = true},
    {.name = "window and alibi", .window_tokens = 33, .has_alibi = true},
    [OPTION_DILATED] = {.name = "dilated", .has_alibi = true},
    {.name = "batch invariant", .window_tokens = 25, .is_batch_invariant = true},
    {.name = "all",
     .window_tokens = 30,
     .sink_tokens = 35,
     .soft_cap = 3,
     .has_sink_logits = true,
     .has_alibi = true},
};

static attn_status begin(const struct case_geometry *g, struct case_dtype d, uint32_t option)
{
    const struct case_options *o = &options[option];
    struct backend_pool_config config = case_config(g, d, o);
    struct attn_layer_spec spec = case_spec(g, o);
    if (option == OPTION_DILATED) {
        spec.n_branches = 2;
        spec.branches[0] = (struct attn_branch){SEGMENT / 3, 1};
        spec.branches[1] = (struct attn_branch){SEGMENT, 3};
    }
    return check_run_begin(&check, &config, &spec, o->has_sink_logits, o->has_alibi,
                           CASE_MAX_ITEMS);
}

/* Where a part begins: not at all, around the sink tokens, or anywhere. */
static uint32_t random_base(uint32_t option)
{
    const uint32_t sinks = options[option].sink_tokens, kind = check_random(&check, 4);
    if (option == OPTION_DILATED)
        return check_random(&check, 4) * SEGMENT;
    if (kind == 0)
        return 0;
    return kind == 1 && sinks > 0 ? sinks - 1 + check_random(&check, 3) : check_random(&check, 400);
}

/* How far the first query is behind the part: nothing, around the end of a window or a segment, or
 * anywhere. */
static uint32_t random_distance(uint32_t option)
{
    const uint32_t window = options[option].window_tokens, kind = check_random(&check, 4);
    if (kind == 0)
        return 0;
    if (kind == 1 && window > 0)
        return window - 1 + check_random(&check, 3);
    return kind == 2 ? check_random(&check, SEGMENT) : check_random(&check, 600);
}

static bool run(const struct product_case *x)
{
    const uint32_t option = x->option;
    struct check_item history[CASE_MAX_ITEMS], step[CASE_MAX_ITEMS], behind[CASE_MAX_ITEMS];
    uint32_t n_history, n = check_shape(x->shape, history, &n_history, step);
    for (uint32_t i = 0; i < n; i++) {
        const uint32_t len = step[i].pos + step[i].n_tokens, most = len < 70 ? len : 70;
        step[i].key_base = i == 0 ? 0 : random_base(option);
        const uint32_t n_behind = i % 2 ? 1 : 1 + check_random(&check, most);
        behind[i] = (struct check_item){.seq = i,
                                        .pos = len - n_behind,
                                        .n_tokens = n_behind,
                                        .flags = BACKEND_ATTEND | BACKEND_FULL,
                                        .wants_lse = true,
                                        .key_base = step[i].key_base,
                                        .ahead = n_behind + random_distance(option)};
    }
    return (n_history == 0 || check_submit(&check, history, n_history)) &&
           check_submit(&check, step, n) && check_outputs(&check, step, n) &&
           check_submit(&check, behind, n) && check_outputs(&check, behind, n) &&
           check_again(&check, behind, n) &&
           (!options[option].is_batch_invariant || check_alone(&check, behind, n));
}

static attn_status begin_case(const struct product_case *x)
{
    return begin(x->geometry, x->dtype, x->option);
}

static const struct product product = {.options = options,
                                       .n_options = CASE_COUNT(options),
                                       .shapes = shapes,
                                       .n_shapes = CASE_COUNT(shapes),
                                       .begin = begin_case,
                                       .run = run};

static void every_option_agrees_with_the_reference_of_the_whole(void **state)
{
    (void)state;
    product_walk(&check, &product, every, offset);
}

/* A query at every distance behind a part of a few blocks. */
static void every_place_of_the_border_agrees(void **state)
{
    (void)state;
    for (uint32_t o = 0; o < CASE_COUNT(options); o++) {
        const bool is_dilated = o == OPTION_DILATED;
        if (begin(&case_geometries[CASE_GROUPED], case_dtypes[CASE_F32], o) != ATTN_OK)
            continue;
        struct check_item history = {.n_tokens = 83, .flags = BACKEND_APPEND};
        assert_true(check_submit(&check, &history, 1));
        for (uint32_t distance = 0; distance < (is_dilated ? 2 * SEGMENT : 125); distance++) {
            struct check_item query = {.pos = 82,
                                       .n_tokens = 1,
                                       .flags = BACKEND_ATTEND | BACKEND_FULL,
                                       .wants_lse = true,
                                       .key_base = distance % 2 ? 0
                                                   : is_dilated ? SEGMENT
                                                                : 15,
                                       .ahead = 1 + distance};
            if (!check_submit(&check, &query, 1) || !check_outputs(&check, &query, 1))
                fail_msg("%s, %u behind", options[o].name, distance);
        }
    }
}

static void parts_that_cannot_be_start_nothing(void **state)
{
    (void)state;
    static uint32_t table[64];
    static const struct {
        uint32_t option, flags, key_base, ahead;
        const char *why;
    } bad[] = {
        {OPTION_WINDOW, BACKEND_ATTEND | BACKEND_FULL, 0, 0,
         "item 0: full, in a layer with a window"},
        {0, BACKEND_ATTEND, 0, 8, "item 0: ahead, of an item that is not full"},
        {0, BACKEND_ATTEND | BACKEND_FULL, 0, 1, "item 0: ahead, of an item that is not full, or"},
        {0, BACKEND_ATTEND | BACKEND_FULL, 0, INT32_MAX, "item 0: ahead"},
        {OPTION_DILATED, BACKEND_ATTEND, SEGMENT + 1, 0, "item 0: key_base, inside a segment"},
    };
    for (uint32_t i = 0; i < CASE_COUNT(bad); i++) {
        assert_int_equal(
            begin(&case_geometries[CASE_GROUPED], case_dtypes[CASE_BF16], bad[i].option), ATTN_OK);
        struct backend_item item = {.flags = bad[i].flags,
                                    .pos = 8,
                                    .n_tokens = 2,
                                    .block_table = table,
                                    .q = check.arena,
                                    .out = check.arena + (1 << 20),
                                    .key_base = bad[i].key_base,
                                    .ahead = bad[i].ahead};
        struct backend_batch batch = {.pool = check.pool, .items = &item, .n_items = 1};
        assert_int_equal(check.ops->submit(check.b, &batch), ATTN_EINVAL);
        if (strstr(check.ops->last_error(check.b), bad[i].why) == NULL)
            fail_msg("%s, expected %s", check.ops->last_error(check.b), bad[i].why);
    }
}

int main(int argc, char **argv)
{
    struct backend_info info;
    int rc = check_start(&check, argc, argv, 733, &every, &offset);
    if (rc != 0)
        return rc;
    check.ops->info(check.b, &info);
    if (!(info.features & BACKEND_HAS_PARTS)) {
        printf("backend %s has no parts\n", check.name);
        check_close(NULL);
        return 77;
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_option_agrees_with_the_reference_of_the_whole),
        cmocka_unit_test(every_place_of_the_border_agrees),
        cmocka_unit_test(parts_that_cannot_be_start_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, check_close);
}
