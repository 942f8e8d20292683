/* test_summaries.c: queries that choose among blocks of which some are not there: summaries have
 * what choices go by, and no bytes.
 *
 *     test_summaries [NAME [EVERY [OFFSET [TESTS]]]]
 *
 * Arguments as test_choose's. Behind the pool, where summaries would have their bytes, another pool
 * has NaN, and blocks are NaN as soon as they have left. Exit code 77: the backend cannot be opened
 * here, or has no summaries.
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

#define N_SUMMARIES 40
#define KV_BYTES (128u << 20) /* a check's */

#ifdef __SANITIZE_ADDRESS__
static uint32_t every = 499, offset;
#else
static uint32_t every = 97, offset;
#endif
static struct check check;
static struct chosen_count count;
static struct backend_pool *neighbour; /* behind the check's pool */

static const struct case_shape shapes[] = {
    {"decode at edges", {{129, 1}, {1, 1}, {128, 1}, {255, 1}, {256, 1}, {127, 1}, {63, 1}}},
    {"ragged", {{330, 1}, {1, 4}, {140, 33}, {0, 17}, {299, 2}}},
    {"one over many keys", {{900, 1}}},
    {"few over many keys", {{700, 3}, {500, 2}}},
};

static const struct case_options options[] = {
    {.name = "plain"},
    {.name = "sink logits", .has_sink_logits = true},
    {.name = "full", .is_full = true},
    {.name = "batch invariant", .is_batch_invariant = true},
};

/* --- blocks that leave and come back ---------------------------------------------------------- */

/* Blocks that are not there, and their bytes; blocks that are free. */
static struct {
    uint32_t seq, index, summary;
    uint8_t *bytes;
} away[N_SUMMARIES];
static uint32_t n_away, free_blocks[1024], n_free;
static bool is_used[N_SUMMARIES]; /* summaries */

static uint32_t first_summary(void)
{
    return check.config.n_blocks + check.config.n_summaries - N_SUMMARIES;
}

static void leave(uint32_t seq, uint32_t index)
{
    uint32_t i = check_random(&check, N_SUMMARIES);
    while (is_used[i])
        i = (i + 1) % N_SUMMARIES;
    is_used[i] = true;
    uint8_t *bytes = malloc(kv_layout_of(&check.config).block_bytes);
    const uint32_t block = check.seqs[seq].own[index], summary = first_summary() + i;
    assert_int_equal(check.ops->block_read(check.pool, block, bytes), ATTN_OK);
    check_send_away(&check, seq, index, summary);
    away[n_away].seq = seq;
    away[n_away].index = index;
    away[n_away].summary = summary;
    away[n_away++].bytes = bytes;
}

/* To the last of the free blocks. */
static void come_back(uint32_t at)
{
    assert_true(check_bring_back(&check, away[at].seq, away[at].index, free_blocks[--n_free],
                                 away[at].bytes));
    is_used[away[at].summary - first_summary()] = false;
    free(away[at].bytes);
    away[at] = away[--n_away];
}

/* Of those that are away one in `back` comes back, of the others one in `gone` leaves; 0: none. */
static void shuffle(uint32_t n_seqs, uint32_t back, uint32_t gone)
{
    uint32_t left[CHECK_MAX_COPIES], n_left = 0;
    for (uint32_t i = n_away; i-- > 0;)
        if (back > 0 && check_random(&check, back) == 0)
            come_back(i);
    for (uint32_t s = 0; s < n_seqs; s++)
        for (uint32_t i = 0; i < check.seqs[s].len / check.config.block_tokens; i++) {
            const uint32_t block = check.seqs[s].own[i];
            if (gone == 0 || check_random(&check, gone) != 0 || block >= check.config.n_blocks ||
                n_away == N_SUMMARIES || n_left == CHECK_MAX_COPIES / 2)
                continue;
            leave(s, i);
            left[n_left++] = block;
        }
    memcpy(free_blocks + n_free, left, n_left * sizeof *left); /* from the next time on */
    n_free += n_left;
}

static attn_status begin_with(const struct product_case *x, uint32_t n_summaries)
{
    struct backend_pool_config config = case_config(x->geometry, x->dtype, x->options);
    const struct attn_layer_spec spec = case_spec(x->geometry, x->options);
    config.n_summaries = n_summaries;
    attn_status st =
        check_run_begin(&check, &config, &spec, x->options->has_sink_logits, false, CASE_MAX_ITEMS);
    n_free = 0;
    memset(is_used, 0, sizeof is_used);
    return st;
}

static attn_status begin(const struct product_case *x)
{
    attn_status st = begin_with(x, N_SUMMARIES);
    if (st != ATTN_OK)
        return st;
    struct backend_pool_config behind = check.config;
    behind.n_blocks = N_SUMMARIES + 1;
    behind.n_summaries = 0;
    assert_int_equal(check.ops->pool_open(check.b, &behind, &neighbour), ATTN_OK);
    assert_int_equal(check.ops->pool_place(neighbour),
                     check.ops->pool_place(check.pool) +
                         check.ops->pool_bytes(check.b, &check.config));
    for (uint32_t i = 0; i < behind.n_blocks; i++)
        assert_int_equal(check.ops->block_write(neighbour, i, check.poison), ATTN_OK);
    return st;
}

static void end(void)
{
    for (; n_away > 0; n_away--)
        free(away[n_away - 1].bytes);
    if (neighbour != NULL)
        check.ops->pool_close(neighbour);
    neighbour = NULL;
    check.ops->pool_close(check.pool);
}

static attn_status begin_case(uint32_t geometry, uint32_t dtype, uint32_t option)
{
    const struct product_case x = {.geometry = &case_geometries[geometry],
                                   .dtype = case_dtypes[dtype],
                                   .options = &options[option]};
    return begin(&x);
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

static bool has_away(uint32_t seq)
{
    for (uint32_t i = 0; i < n_away; i++)
        if (away[i].seq == seq)
            return true;
    return false;
}

/* A sequence's next tokens, or the latest once more. */
static struct check_item next_item(uint32_t seq)
{
    const uint32_t len = check.seqs[seq].len, n = 1 + check_random(&check, len < 3 ? len : 3);
    const bool is_new = check_random(&check, 2) == 0;
    return (struct check_item){.seq = seq,
                               .pos = is_new ? len : len - n,
                               .n_tokens = n,
                               .flags = BACKEND_ATTEND | (is_new ? BACKEND_APPEND : 0),
                               .wants_lse = seq % 3 != 1,
                               .n_chosen = any_number(),
                               .wants_chosen = has_away(seq) || check_random(&check, 2) == 0};
}

static bool rounds(const struct product_case *x)
{
    struct check_item history[CASE_MAX_ITEMS], step[CASE_MAX_ITEMS];
    uint32_t n_history, n = check_shape(x->shape, history, &n_history, step);
    if (n_history > 0 && !check_submit(&check, history, n_history))
        return false;
    for (uint32_t i = 0; i < n; i++) {
        step[i].n_chosen = any_number();
        step[i].wants_chosen = i % 2 == 0;
    }
    if (!submit(step, n))
        return false;
    for (uint32_t round = 0; round < 4; round++) {
        shuffle(n, 2, round < 3 ? 4 : 0);
        for (uint32_t i = 0; i < n; i++)
            step[i] = next_item(i);
        if (!submit(step, n) || !check_again(&check, step, n))
            return false;
    }
    shuffle(n, 1, 0);
    for (uint32_t i = 0; i < n; i++) {
        step[i] = next_item(i);
        step[i].wants_chosen = false;
    }
    return submit(step, n);
}

static bool run(const struct product_case *x)
{
    const bool ok = rounds(x);
    end();
    return ok;
}

static const struct product product = {.options = options,
                                       .n_options = CASE_COUNT(options),
                                       .shapes = shapes,
                                       .n_shapes = CASE_COUNT(shapes),
                                       .begin = begin,
                                       .run = run};

static void every_option_agrees_with_the_reference(void **state)
{
    (void)state;
    count = (struct chosen_count){0};
    product_walk(&check, &product, every, offset);
    printf("%" PRIu64 " queries, %" PRIu64 " left out, %" PRIu64 " missed\n", count.n_queries,
           count.n_left_out, count.n_missed);
    assert_true(count.n_left_out <= count.n_queries / 20);
    if (count.n_queries > 500) { /* many cases */
        assert_true(count.n_missed >= count.n_queries / 10);
        assert_true(count.n_missed <= count.n_queries / 10 * 9);
    }
}

/* --- what else is so -------------------------------------------------------------------------- */

/* b's choices are a's, and in a batch-invariant pool its outputs that are any. */
static void check_same(const struct check_item *a, const struct check_item *b)
{
    const struct backend_pool_config *g = &check.config;
    const size_t n_rows = (size_t)a->n_tokens * g->num_kv_heads;
    const size_t bytes =
        (size_t)g->num_q_heads / g->num_kv_heads * g->head_dim_v * attn_dtype_bytes(g->q_dtype);
    assert_memory_equal(a->chosen, b->chosen, n_rows * a->n_chosen * sizeof *a->chosen);
    for (size_t row = 0; row < n_rows && g->is_batch_invariant; row++)
        if (!check_is_missed(&check, check.seqs[b->seq].own, b->chosen + row * b->n_chosen,
                             b->n_chosen))
            assert_memory_equal((uint8_t *)a->out + row * bytes, (uint8_t *)b->out + row * bytes,
                                bytes);
}

/* Half of the blocks that leave are copied to in the same batch. */
static void repeat_with_copies(const struct check_item *step, uint32_t n, struct check_item *again)
{
    const uint32_t n_left = check.n_copies, newest = check.seqs[0].own[check.seqs[0].n_blocks - 1];
    uint8_t *bytes = malloc(kv_layout_of(&check.config).block_bytes);
    assert_true(newest < check.config.n_blocks); /* it is not full, so it never leaves */
    assert_int_equal(check.ops->block_read(check.pool, newest, bytes), ATTN_OK);
    for (uint32_t k = 0; k < n_left / 2; k++)
        check.copies[check.n_copies++] =
            (struct backend_copy){.src = newest, .dst = check.copies[k].src};
    assert_true(check_repeat(&check, step, n, BACKEND_ATTEND, again));
    assert_int_equal(check.ops->block_write(check.pool, newest, bytes), ATTN_OK);
    free(bytes);
}

/* What is away changes no choice. */
static void a_choice_is_the_same_whatever_is_away(void **state)
{
    (void)state;
    static const uint32_t geometries[] = {CASE_GROUPED, CASE_LATENT, CASE_SMALLEST_BLOCK};
    for (uint32_t i = 0; i < CASE_COUNT(geometries) * CASE_COUNT(case_dtypes); i++) {
        struct check_item history[CASE_MAX_ITEMS], step[CASE_MAX_ITEMS], again[CASE_MAX_ITEMS];
        if (i % check_step(5) != 0 ||
            begin_case(geometries[i % CASE_COUNT(geometries)], i / CASE_COUNT(geometries),
                       i % 2 == 0 ? 3 : 0) != ATTN_OK)
            continue;
        uint32_t n_history, n = check_shape(&shapes[3], history, &n_history, step);
        assert_true(check_submit(&check, history, n_history));
        for (uint32_t k = 0; k < n; k++) {
            step[k].n_chosen = 4 + 3 * k;
            step[k].wants_chosen = true;
        }
        assert_true(submit(step, n));
        for (uint32_t round = 0; round < 4; round++) {
            shuffle(n, 2, round < 3 ? 3 : 0);
            repeat_with_copies(step, n, again);
            for (uint32_t k = 0; k < n; k++)
                check_same(&step[k], &again[k]);
        }
        end();
    }
}

/* Where the bytes of these summaries would be there is no memory. */
static void nothing_is_read_of_what_is_not_there(void **state)
{
    (void)state;
    for (uint32_t d = 0; d < CASE_COUNT(case_dtypes); d++) {
        struct check_item history[CASE_MAX_ITEMS], step[CASE_MAX_ITEMS];
        const struct product_case x = {.geometry = &case_geometries[CASE_LARGEST_BLOCK],
                                       .dtype = case_dtypes[d],
                                       .options = &options[0]};
        struct backend_pool_config config = case_config(x.geometry, x.dtype, x.options);
        config.num_layers = CHECK_LAYERS;
        const uint64_t block_bytes = kv_layout_of(&config).block_bytes;
        if (begin_with(&x, (uint32_t)(8ull * KV_BYTES / block_bytes)) != ATTN_OK)
            continue;
        uint32_t n_history, n = check_shape(&shapes[3], history, &n_history, step);
        assert_true(check_submit(&check, history, n_history));
        assert_true(submit(step, n));
        for (uint32_t round = 0; round < 6; round++) {
            shuffle(n, 2, 2);
            for (uint32_t i = 0; i < n; i++)
                step[i] = next_item(i);
            assert_true(submit(step, n));
        }
        end();
    }
}

/* --- what is refused -------------------------------------------------------------------------- */

/* It says so, whether the batch is not begun or fails. */
static void check_refused(const struct backend_item *item, const struct backend_copy *copy,
                          const char *says)
{
    struct backend_batch batch = {.pool = check.pool,
                                  .items = item,
                                  .n_items = item != NULL,
                                  .copies = copy,
                                  .n_copies = copy != NULL};
    attn_status st = check.ops->submit(check.b, &batch);
    if (st == ATTN_OK) {
        assert_ptr_equal(check.ops->poll(check.b, UINT64_MAX), &batch);
        st = batch.status;
    }
    assert_int_equal(st, ATTN_EINVAL);
    if (strstr(check.ops->last_error(check.b), says) == NULL)
        fail_msg("\"%s\" does not say \"%s\"", check.ops->last_error(check.b), says);
}

static void what_cannot_be_is_refused_by_name(void **state)
{
    (void)state;
    struct check_item history[CASE_MAX_ITEMS], step[CASE_MAX_ITEMS];
    char says[128];
    assert_int_equal(begin_case(CASE_GROUPED, CASE_BF16, 0), ATTN_OK);
    uint32_t n_history, n = check_shape(&shapes[2], history, &n_history, step);
    const uint32_t n_blocks = check.config.n_blocks;
    uint32_t *table = check.seqs[0].table;
    assert_true(check_submit(&check, history, n_history));
    const struct check_seq *s = &check.seqs[0];
    struct backend_item item = {.flags = BACKEND_ATTEND,
                                .layer = s->layer,
                                .pos = 899,
                                .n_tokens = 1,
                                .block_table = table,
                                .q = check.arena,
                                .k = check.arena,
                                .v = check.arena,
                                .out = check.arena + (1 << 20),
                                .n_chosen = 4,
                                .chosen = (uint32_t *)(check.arena + (2 << 20))};
    const uint32_t had = table[5], newest = 899 / check.config.block_tokens;

    struct backend_item x = item;
    x.n_chosen = 0;
    check_refused(&x, NULL, "item 0: chosen, without n_chosen");
    table[5] = n_blocks + 1;
    snprintf(says, sizeof says, "item 0: block_table[5] is summary %u, which nothing was copied to",
             n_blocks + 1);
    check_refused(&item, NULL, says);
    x = item;
    x.chosen = NULL;
    snprintf(says, sizeof says, "item 0: block_table[5] is %u of %u", n_blocks + 1, n_blocks);
    check_refused(&x, NULL, says);
    x.n_chosen = 0;
    check_refused(&x, NULL, says);
    table[5] = n_blocks + N_SUMMARIES;
    snprintf(says, sizeof says, "item 0: block_table[5] is %u of %u", n_blocks + N_SUMMARIES,
             n_blocks + N_SUMMARIES);
    check_refused(&item, NULL, says);
    table[5] = had;
    const uint32_t had_newest = table[newest];
    table[newest] = n_blocks + 1;
    x = item;
    x.flags |= BACKEND_APPEND;
    snprintf(says, sizeof says, "item 0: block_table[%u] is %u of %u", newest, n_blocks + 1,
             n_blocks);
    check_refused(&x, NULL, says);
    table[newest] = had_newest;

    check_refused(NULL, &(struct backend_copy){n_blocks, 1}, "copy 0");
    check_refused(NULL, &(struct backend_copy){n_blocks, n_blocks + 1}, "copy 0");
    check_refused(NULL, &(struct backend_copy){1, n_blocks + N_SUMMARIES}, "copy 0");
    snprintf(says, sizeof says, "%u of %u", n_blocks, n_blocks);
    assert_int_equal(check.ops->block_read(check.pool, n_blocks, check.poison), ATTN_EINVAL);
    assert_non_null(strstr(check.ops->last_error(check.b), says));
    assert_int_equal(check.ops->block_write(check.pool, n_blocks, check.poison), ATTN_EINVAL);

    struct backend_pool_config c = check.config;
    c.n_summaries = (uint32_t)INT32_MAX - n_blocks + 1;
    assert_int_equal(check.ops->pool_check(check.b, &c), ATTN_EINVAL);
    snprintf(says, sizeof says, "n_summaries is %u", c.n_summaries);
    assert_non_null(strstr(check.ops->last_error(check.b), says));
    c.n_summaries = 1;
    c.n_stripes = 2;
    assert_int_equal(check.ops->pool_check(check.b, &c), ATTN_EINVAL);
    assert_non_null(strstr(check.ops->last_error(check.b), "n_summaries is 1"));

    /* and nothing was begun */
    check.n_front = 0;
    step[0].n_chosen = 5;
    step[0].wants_chosen = true;
    assert_true(submit(step, n));
    end();
    begin_with(&(struct product_case){.geometry = &case_geometries[CASE_GROUPED],
                                      .dtype = case_dtypes[CASE_BF16],
                                      .options = &options[0]},
               0);
    item.block_table = calloc(64, sizeof *item.block_table);
    check_refused(&item, NULL, "item 0: chosen, without n_chosen or in a pool without n_summaries");
    free((void *)item.block_table);
    check.ops->pool_close(check.pool);
}

/* One sequence of many keys, and its next step; returns that step's items. */
static uint32_t begin_long(struct check_item *step)
{
    struct check_item history[CASE_MAX_ITEMS];
    uint32_t n_history;
    assert_int_equal(begin_case(CASE_GROUPED, CASE_BF16, 0), ATTN_OK);
    const uint32_t n = check_shape(&shapes[2], history, &n_history, step);
    assert_true(check_submit(&check, history, n_history));
    return n;
}

/* They are numbers behind the blocks, and nothing was copied to any. */
static void a_resized_pool_has_new_summaries(void **state)
{
    (void)state;
    struct check_item step[CASE_MAX_ITEMS];
    const uint32_t n = begin_long(step);
    step[0].n_chosen = 6;
    step[0].wants_chosen = true;
    assert_true(submit(step, n));
    shuffle(1, 0, 3);
    step[0] = next_item(0);
    assert_true(submit(step, n));
    shuffle(1, 1, 0);
    step[0] = next_item(0);
    assert_true(submit(step, n));
    check.ops->pool_close(neighbour);
    neighbour = NULL;
    const uint32_t n_more = check.config.n_blocks + 3;
    assert_int_equal(check.ops->pool_resize(check.pool, n_more, check.config.max_row_blocks),
                     ATTN_OK);
    check.config.n_blocks = n_more;
    check.n_front = 0; /* its table is the old numbers' */
    for (uint32_t round = 0; round < 3; round++) {
        shuffle(1, 2, 3);
        step[0] = next_item(0);
        assert_true(submit(step, n));
    }
    shuffle(1, 1, 0);
    step[0] = next_item(0);
    assert_true(submit(step, n));
    uint32_t *table = check.seqs[0].table, had = table[4];
    table[4] = check.config.n_blocks + N_SUMMARIES - 1;
    assert_int_equal(check.ops->pool_resize(check.pool, n_more, check.config.max_row_blocks),
                     ATTN_OK);
    struct backend_item item = {.flags = BACKEND_ATTEND,
                                .layer = check.seqs[0].layer,
                                .pos = 899,
                                .n_tokens = 1,
                                .block_table = table,
                                .q = check.arena,
                                .out = check.arena + (1 << 20),
                                .n_chosen = 4,
                                .chosen = (uint32_t *)(check.arena + (2 << 20))};
    check_refused(&item, NULL, "which nothing was copied to");
    table[4] = had;
    end();
}

/* What is known of blocks that are not there is not given away for a pool. */
static void summaries_leave_no_room_to_others(void **state)
{
    (void)state;
    struct check_item step[CASE_MAX_ITEMS];
    struct backend_pool *other;
    const uint32_t n = begin_long(step);
    struct backend_pool_config large = check.config; /* all that is behind the two pools */
    large.n_summaries = 0;
    large.n_blocks = check.ops->pool_room(neighbour) - N_SUMMARIES - 2;
    step[0].n_chosen = 6;
    step[0].wants_chosen = true;
    assert_true(submit(step, n));
    shuffle(1, 0, 3);
    step[0] = next_item(0);
    assert_true(submit(step, n));
    assert_int_equal(check.ops->pool_open(check.b, &large, &other), ATTN_ENOMEM);
    step[0] = next_item(0);
    step[0].flags = BACKEND_ATTEND;
    step[0].pos = check.seqs[0].len - 1;
    step[0].n_tokens = 1;
    assert_true(submit(step, n));
    end();
}

/* Without memory for them a pool goes on as one that has none, and stays so. */
static void a_pool_without_room_has_no_summaries(void **state)
{
    (void)state;
    struct check_item step[CASE_MAX_ITEMS];
    struct backend_pool *other = NULL;
    const uint32_t n = begin_long(step);
    struct backend_pool_config large = check.config; /* all that is behind the two pools */
    large.n_summaries = 0;
    large.n_blocks = check.ops->pool_room(neighbour);
    while (check.ops->pool_open(check.b, &large, &other) == ATTN_ENOMEM)
        large.n_blocks--;
    assert_ptr_not_equal(other, NULL);
    assert_int_equal(check.ops->summaries_open(check.pool), ATTN_ENOMEM);
    assert_non_null(strstr(check.ops->last_error(check.b), "choosing blocks takes "));
    check.ops->pool_close(other);
    step[0].n_chosen = 6;
    assert_true(submit(step, n));
    struct backend_item item = {.flags = BACKEND_ATTEND,
                                .layer = check.seqs[0].layer,
                                .pos = 899,
                                .n_tokens = 1,
                                .block_table = check.seqs[0].table,
                                .q = check.arena,
                                .out = check.arena + (1 << 20),
                                .n_chosen = 4,
                                .chosen = (uint32_t *)(check.arena + (2 << 20))};
    check_refused(&item, NULL, "in a pool without n_summaries");
    const struct backend_copy copy = {0, check.config.n_blocks};
    check_refused(NULL, &copy, "copy 0");
    end();
}

int main(int argc, char **argv)
{
    struct backend_info info;
    int rc = check_start(&check, argc, argv, 271, &every, &offset);
    if (rc != 0)
        return rc;
    check.needs_room = true;
    check.ops->info(check.b, &info);
    if (!(info.features & BACKEND_HAS_SUMMARIES)) {
        check_close(NULL);
        return 77;
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_option_agrees_with_the_reference),
        cmocka_unit_test(a_choice_is_the_same_whatever_is_away),
        cmocka_unit_test(nothing_is_read_of_what_is_not_there),
        cmocka_unit_test(what_cannot_be_is_refused_by_name),
        cmocka_unit_test(a_resized_pool_has_new_summaries),
        cmocka_unit_test(summaries_leave_no_room_to_others),
        cmocka_unit_test(a_pool_without_room_has_no_summaries),
    };
    return cmocka_run_group_tests(tests, NULL, check_close);
}
