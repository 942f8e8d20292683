/* test_resize.c: a pool ends earlier, then further on, with longer rows, between batches: what was
 * appended before is read by batches after it, blocks that come are zeros, neighbours keep theirs.
 *
 * Usage: test_resize [NAME [EVERY [OFFSET]]]: the backend, every which geometry, from where on. */
#include <sched.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "tests/kernels/check.h"

/* check.c gives out blocks in steps of 7 where their number is no multiple of 7: so none twice, as
 * long as that many are given out. */
enum { N_SEQS = 3, FEW_BLOCKS = 7 * 40 + 1, MANY_BLOCKS = 7 * 80 + 1 };

static struct check check;
#ifdef __SANITIZE_ADDRESS__
static uint32_t every = 11, offset;
#else
static uint32_t every = 5, offset;
#endif

static attn_status resize(uint32_t n_blocks, uint32_t more_rows)
{
    attn_status st =
        check.ops->pool_resize(check.pool, n_blocks, check.config.max_row_blocks + more_rows);
    if (st == ATTN_OK)
        check.config.n_blocks = n_blocks;
    return st;
}

/* More tokens for each sequence, and queries over all that it has. */
static bool goes_on(uint32_t n_tokens)
{
    struct check_item items[N_SEQS];
    for (uint32_t i = 0; i < N_SEQS; i++)
        items[i] = (struct check_item){.seq = i,
                                       .pos = check.seqs[i].len,
                                       .n_tokens = n_tokens + i,
                                       .flags = BACKEND_APPEND | BACKEND_ATTEND,
                                       .wants_lse = true};
    if (!check_submit(&check, items, N_SEQS) || !check_outputs(&check, items, N_SEQS))
        return false;
    for (uint32_t i = 0; i < N_SEQS; i++)
        items[i] = (struct check_item){
            .seq = i, .pos = check.seqs[i].len - 1, .n_tokens = 1, .flags = BACKEND_ATTEND};
    return check_submit(&check, items, N_SEQS) && check_outputs(&check, items, N_SEQS);
}

static bool runs(const struct case_geometry *g, struct case_dtype d, const struct case_options *o,
                 uint32_t *n_done)
{
    struct backend_pool_config config = case_config(g, d, o);
    struct attn_layer_spec spec = case_spec(g, o);
    attn_status st =
        check_run_begin(&check, &config, &spec, o->has_sink_logits, o->has_alibi, N_SEQS);
    if (st == ATTN_ENOTSUP || st == ATTN_ENOMEM) /* the largest do not fit a check's memory */
        return true;
    assert_int_equal(st, ATTN_OK);
    if (check.ops->pool_room(check.pool) < MANY_BLOCKS) /* earlier pools lie before it */
        return true;
    ++*n_done;
    uint32_t few = 3 * config.block_tokens < 40 ? 3 * config.block_tokens : 40;
    assert_int_equal(resize(FEW_BLOCKS, 0), ATTN_OK);
    check.next_block = 1;
    if (!goes_on(few) || !goes_on(1))
        return false;
    assert_int_equal(resize(MANY_BLOCKS, 3), ATTN_OK);
    if (!goes_on(1) || !goes_on(few))
        return false;
    assert_int_equal(resize(MANY_BLOCKS - 7, 0), ATTN_OK);
    bool is_right = goes_on(1) && goes_on(few / 2);
    check.ops->pool_close(check.pool);
    return is_right;
}

static void sequences_go_on_while_their_pool_is_resized(void **state)
{
    const struct case_options *options[] = {&case_options[CASE_PLAIN],
                                            &case_options[CASE_WINDOW_AND_SINKS]};
    uint32_t n_done = 0, n = 0;
    (void)state;
    for (size_t g = 0; g < CASE_N_PRODUCT; g++)
        for (size_t d = 0; d < CASE_COUNT(case_dtypes); d++, n++)
            if (n % every == offset &&
                !runs(&case_geometries[g], case_dtypes[d], options[n / every % 2], &n_done))
                fail_msg("geometry %zu dtype %zu", g, d);
    print_message("%u pools were resized\n", n_done);
    assert_true(n_done > 5);
}

/* Three pools behind one another: the middle one shrinks, and grows again. */
static void a_pool_has_the_room_up_to_the_next_and_finds_it_zeroed(void **state)
{
    (void)state;
    struct check_small s;
    struct backend_pool *p[3], *more;
    check_small_open(&check, &s, 4 << 20, 8);
    for (int i = 0; i < 3; i++) {
        assert_int_equal(check.ops->pool_open(s.b, &s.pool, &p[i]), ATTN_OK);
        for (uint32_t k = 0; k < 8; k++)
            assert_int_equal(check.ops->block_write(p[i], k, s.in), ATTN_OK);
    }
    uint32_t room = check.ops->pool_room(p[1]);
    assert_in_range(room, 8, 8 + 4096 / s.block_bytes);
    uint64_t place = check.ops->pool_place(p[1]);
    assert_int_equal(check.ops->pool_resize(p[1], room + 1, 1), ATTN_ENOMEM);
    char says[64];
    snprintf(says, sizeof says, "n_blocks is %u, there is room for %u", room + 1, room);
    assert_non_null(strstr(check.ops->last_error(s.b), says));
    check_small_blocks(&check, &s, p[1], 0, 8, s.in);

    assert_int_equal(check.ops->pool_resize(p[1], 2, 1), ATTN_OK);
    check_small_blocks(&check, &s, p[1], 0, 2, s.in);
    assert_int_equal(check.ops->block_read(p[1], 2, s.in), ATTN_EINVAL);
    assert_int_equal(check.ops->pool_resize(p[1], 5, 9), ATTN_OK);
    check_small_blocks(&check, &s, p[1], 0, 2, s.in);
    check_small_blocks(&check, &s, p[1], 2, 5, s.zeros);
    s.pool.n_blocks = 1;
    assert_int_equal(check.ops->pool_open(s.b, &s.pool, &more), ATTN_OK); /* between them */
    assert_true(check.ops->pool_place(more) > place &&
                check.ops->pool_place(more) < check.ops->pool_place(p[2]));
    assert_int_equal(check.ops->block_write(more, 0, s.in), ATTN_OK);
    assert_true(check.ops->pool_room(p[1]) < 8);
    check.ops->pool_close(more);
    assert_int_equal(check.ops->pool_resize(p[1], 8, 9), ATTN_OK);
    check_small_blocks(&check, &s, p[1], 0, 2, s.in);
    check_small_blocks(&check, &s, p[1], 2, 8, s.zeros);
    assert_int_equal(check.ops->pool_place(p[1]), place);
    check_small_blocks(&check, &s, p[0], 0, 8, s.in);
    check_small_blocks(&check, &s, p[2], 0, 8, s.in);
    check_small_close(&check, &s);
}

static void fill(struct backend_pool *p, uint32_t n_blocks, const uint8_t *like)
{
    for (uint32_t i = 0; i < n_blocks; i++)
        assert_int_equal(check.ops->block_write(p, i, like), ATTN_OK);
}

static void await_memory(struct backend *b, struct backend_pool *p,
                         const struct backend_pool_config *c)
{
    while (!check.ops->memory_ready(b, p, c))
        sched_yield();
}

/* Whatever becomes of memory that was asked for: a pool finds zeros, and others keep theirs. */
static void memory_that_is_cleared_beforehand_is_nobody_elses(void **state)
{
    (void)state;
    if (check.ops->memory_ready == NULL)
        skip();
    struct check_small s;
    check_small_open(&check, &s, 16 << 20, 1);
    struct backend_pool_config c = s.pool;
    c.n_blocks = (uint32_t)((8 << 20) / s.block_bytes);
    struct backend_pool *p, *other;
    for (int round = 0; round < 6; round++) {
        assert_false(check.ops->memory_ready(s.b, NULL, &c));
        if (round % 2 == 0)
            await_memory(s.b, NULL, &c);
        other = NULL;
        if (round >= 2) { /* another pool takes a part of it, and goes again or stays */
            assert_int_equal(check.ops->pool_open(s.b, &s.pool, &other), ATTN_OK);
            check_small_blocks(&check, &s, other, 0, 1, s.zeros);
            fill(other, 1, s.in);
        }
        if (round >= 4) {
            check.ops->pool_close(other);
            other = NULL;
        }
        assert_int_equal(check.ops->pool_open(s.b, &c, &p), ATTN_OK);
        check_small_blocks(&check, &s, p, 0, c.n_blocks, s.zeros);
        fill(p, c.n_blocks, s.in);
        if (other != NULL)
            check_small_blocks(&check, &s, other, 0, 1, s.in);
        /* and where it grows */
        assert_int_equal(check.ops->pool_resize(p, 1, 1), ATTN_OK);
        assert_false(check.ops->memory_ready(s.b, p, &c));
        if (round % 2 == 0)
            await_memory(s.b, p, &c);
        assert_int_equal(check.ops->pool_resize(p, c.n_blocks, 1), ATTN_OK);
        check_small_blocks(&check, &s, p, 0, 1, s.in);
        check_small_blocks(&check, &s, p, 1, c.n_blocks, s.zeros);
        fill(p, c.n_blocks, s.in);
        check.ops->pool_close(p);
        if (other != NULL)
            check.ops->pool_close(other);
    }
    assert_false(check.ops->memory_ready(s.b, NULL, &c));
    check_small_close(&check, &s); /* while it is being cleared */
}

int main(int argc, char **argv)
{
    int rc = check_start(&check, argc, argv, 20261, &every, &offset);
    if (rc != 0)
        return rc;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sequences_go_on_while_their_pool_is_resized),
        cmocka_unit_test(a_pool_has_the_room_up_to_the_next_and_finds_it_zeroed),
        cmocka_unit_test(memory_that_is_cleared_beforehand_is_nobody_elses),
    };
    return cmocka_run_group_tests_name("resize", tests, NULL, check_close);
}
