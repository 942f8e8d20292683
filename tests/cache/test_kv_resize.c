/* test_kv_resize.c: tests pools that grow and shrink while in use: what is refused, what is
 * evicted, and where the blocks that stay are moved. The property and kill tests resize at random,
 * too. */
#include "tests/cache/fixture.h"

/* The fixture's pool has 12 blocks; another lies behind it, as far as the records go. */
static kv_pool_id neighbour(struct fixture *f)
{
    return test_pool(f->kv, "behind", 1, 4, config.max_blocks - 12);
}

static uint32_t n_blocks_of(struct fixture *f, kv_pool_id pool, uint32_t *out_free)
{
    struct kv_pool_spec s;
    assert_status(f->kv, ATTN_OK, kv_pool_info(f->kv, pool, &s, out_free));
    return s.n_blocks;
}

/* Copies nothing: there are no bytes here. */
static struct kv_shrink shrink(struct fixture *f, uint32_t n_blocks)
{
    struct kv_shrink s;
    assert_status(f->kv, ATTN_OK, kv_pool_shrink_begin(f->kv, f->pool, n_blocks, &s));
    kv_pool_shrink_end(f->kv, &s);
    test_check(f->kv);
    return s;
}

static void assert_refused(struct fixture *f, attn_status expected, uint32_t n_blocks,
                           const char *says)
{
    struct kv_shrink s;
    uint32_t n_free, n_free_after, n = n_blocks_of(f, f->pool, &n_free);
    memset(&s, 0xa5, sizeof s);
    struct kv_shrink poison = s;
    struct kv_stats before = stats_of(f);
    assert_status(f->kv, expected, kv_pool_shrink_begin(f->kv, f->pool, n_blocks, &s));
    assert_says(f->kv, says);
    struct kv_stats after = stats_of(f);
    assert_memory_equal(&s, &poison, sizeof s);
    assert_memory_equal(&before, &after, sizeof before);
    assert_int_equal(n_blocks_of(f, f->pool, &n_free_after), n);
    assert_int_equal(n_free_after, n_free);
    test_check(f->kv);
}

static void a_pool_grows_as_far_as_the_next_one(void **state)
{
    struct fixture *f = *state;
    uint32_t n_free;
    assert_int_equal(kv_pool_room(f->kv, f->pool), config.max_blocks);
    kv_pool_id behind = neighbour(f);
    assert_int_equal(kv_pool_room(f->kv, f->pool), 12);
    assert_status(f->kv, ATTN_ENOMEM, kv_pool_grow(f->kv, f->pool, 13));
    assert_says(f->kv, "n_blocks is 13, there is room for 12");
    assert_status(f->kv, ATTN_OK, kv_pool_drop(f->kv, behind));
    behind = test_pool(f->kv, "further", 1, 4, 20); /* of the gap, the first part */
    assert_int_equal(kv_pool_room(f->kv, f->pool), 12);
    assert_int_equal(kv_pool_room(f->kv, behind), config.max_blocks - 12);
    assert_status(f->kv, ATTN_OK, kv_pool_grow(f->kv, behind, config.max_blocks - 12));
    assert_int_equal(n_blocks_of(f, behind, &n_free), config.max_blocks - 12);
    assert_int_equal(n_free, config.max_blocks - 12);
    assert_int_equal(stats_of(f).blocks_total, config.max_blocks);
    assert_status(f->kv, ATTN_EINVAL, kv_pool_grow(f->kv, f->pool, 12));
    assert_status(f->kv, ATTN_EINVAL, kv_pool_grow(f->kv, f->pool, 11));
    assert_status(f->kv, ATTN_ENOTFOUND, kv_pool_grow(f->kv, (kv_pool_id){2}, 11));
}

static void a_pool_that_shrinks_makes_room_for_another(void **state)
{
    struct fixture *f = *state;
    kv_pool_id behind = neighbour(f);
    struct kv_shrink s = shrink(f, 5);
    assert_int_equal(s.n_copies + s.n_patches, 0);
    kv_shrink_fini(&s);
    kv_pool_id between = test_pool(f->kv, "between", 1, 4, 7);
    test_check(f->kv);
    assert_int_equal(kv_pool_room(f->kv, f->pool), 5);
    assert_int_equal(kv_pool_room(f->kv, between), 7);
    assert_status(f->kv, ATTN_OK, kv_pool_drop(f->kv, between));
    assert_status(f->kv, ATTN_OK, kv_pool_grow(f->kv, f->pool, 12));
    kv_seq_id seq = open_seq(f, NAME);
    append_all(f, seq, 0, 48); /* all twelve */
    test_check(f->kv);
    assert_status(f->kv, ATTN_OK, kv_pool_drop(f->kv, behind));
}

static void a_table_names_the_blocks_that_its_own_became(void **state)
{
    struct fixture *f = *state;
    kv_seq_id first = open_seq(f, NAME), second = open_seq(f, NAME + 1), fork;
    append_all(f, first, 0, 20);
    append_all(f, second, 0, 22);
    assert_status(f->kv, ATTN_OK, kv_seq_fork(f->kv, second, NAME + 2, 18, OWNER, 90, &fork));
    assert_status(f->kv, ATTN_OK, kv_seq_materialize(f->kv, fork, fx_of(f)));
    kv_seq_close(f->kv, first);
    uint32_t was[6];
    memcpy(was, info_of(f, second).block_table, sizeof was);
    struct kv_shrink s = shrink(f, 6);
    assert_true(s.n_copies > 0);
    for (uint32_t i = 0; i < 6; i++) {
        uint32_t is = info_of(f, second).block_table[i], expected = was[i];
        for (uint32_t k = 0; k < s.n_copies; k++)
            expected = s.copies[k].src == was[i] ? s.copies[k].dst : expected;
        assert_int_equal(is, expected);
        assert_true(is < 6);
        if (i < 5)
            assert_int_equal(info_of(f, fork).block_table[i], is);
    }
    for (uint32_t i = 0; i < s.n_patches; i++) {
        kv_seq_id of = {s.patches[i].row};
        assert_int_equal(info_of(f, of).block_table[s.patches[i].index], s.patches[i].block);
    }
    kv_shrink_fini(&s);
    assert_refused(f, ATTN_ENOBLOCKS, 5, "n_blocks is 5, 6 blocks are in use and 0 pinned");
    assert_refused(f, ATTN_EINVAL, 0, "n_blocks is 0, it has 6");
    assert_refused(f, ATTN_EINVAL, 6, "n_blocks is 6, it has 6");
    assert_status(f->kv, ATTN_ENOBLOCKS, kv_append_reserve(f->kv, second, 0, 22, 4, fx_of(f)));
    assert_status(f->kv, ATTN_OK, kv_pool_grow(f->kv, f->pool, 7));
    append_all(f, second, 22, 4);
}

static void appends_that_are_outstanding_are_waited_for(void **state)
{
    struct fixture *f = *state;
    kv_seq_id seq = open_seq(f, NAME);
    assert_status(f->kv, ATTN_OK, kv_append_reserve(f->kv, seq, 0, 0, 4, fx_of(f)));
    assert_refused(f, ATTN_EOVERLOAD, 8, "appends are outstanding");
    kv_append_commit(f->kv, seq, 0, 0, 4);
    struct kv_seq_import *held = kv_seq_export_hold(f->kv, seq, 0, 1);
    assert_refused(f, ATTN_EOVERLOAD, 8, "blocks of it are on their way");
    kv_seq_import_cancel(f->kv, held);
    struct kv_shrink s = shrink(f, 8);
    kv_shrink_fini(&s);
}

static uint32_t ids[40];

static kv_seq_id open_with(struct fixture *f, uint64_t name, uint32_t first_id, uint32_t n)
{
    kv_seq_id seq = {UINT32_MAX};
    for (uint32_t i = 0; i < n; i++)
        ids[i] = first_id + i;
    const struct kv_tokens t = {.ids = ids, .n = n};
    assert_status(
        f->kv, ATTN_OK,
        kv_seq_open_with(f->kv, TENANT, name, f->pool, OWNER, ++f->request, &t, fx_of(f), &seq));
    return seq;
}

/* Eight cached blocks of two prompts, the first one used later. */
static void cache_two_prompts(struct fixture *f)
{
    kv_seq_id a = open_with(f, NAME, 100, 17), b = open_with(f, NAME + 1, 500, 17);
    append_all(f, a, 0, 17);
    append_all(f, b, 0, 17);
    kv_seq_close(f->kv, b);
    kv_seq_close(f->kv, a);
    assert_int_equal(stats_of(f).blocks_cached, 8);
}

static uint32_t n_cached_of(struct fixture *f, uint32_t first_id)
{
    kv_seq_id seq = open_with(f, NAME + 5, first_id, 17);
    uint32_t n = info_of(f, seq).n_cached;
    kv_seq_close(f->kv, seq);
    return n;
}

static void what_is_cached_goes_in_order_and_the_rest_is_found_again(void **state)
{
    struct fixture *f = *state;
    cache_two_prompts(f);
    struct kv_shrink s = shrink(f, 6);
    kv_shrink_fini(&s);
    assert_int_equal(stats_of(f).blocks_cached, 6);
    assert_int_equal(stats_of(f).evictions, 2); /* the end of what was used longer ago */
    assert_int_equal(n_cached_of(f, 500), 8);
    assert_int_equal(n_cached_of(f, 100), 16);
    s = shrink(f, 4);
    kv_shrink_fini(&s);
    assert_int_equal(n_cached_of(f, 100), 16);
    assert_int_equal(n_cached_of(f, 500), 0);
    struct kv *next = test_kv_open(&config, kv_fd(f->kv)); /* a successor */
    kv_close(f->kv);
    f->kv = next;
    test_check(f->kv);
    uint32_t n_free;
    assert_int_equal(n_blocks_of(f, f->pool, &n_free), 4);
    assert_int_equal(n_cached_of(f, 100), 16);
}

static void pinned_blocks_are_moved_and_not_evicted(void **state)
{
    struct fixture *f = *state;
    const struct kv_retention pin = {.is_pinned = 1};
    kv_seq_id a = open_with(f, NAME, 100, 17), b = open_with(f, NAME + 1, 500, 17);
    append_all(f, a, 0, 17);
    append_all(f, b, 0, 17);
    assert_status(f->kv, ATTN_OK, kv_seq_retain(f->kv, b, &pin, 1));
    kv_seq_close(f->kv, b);
    kv_seq_close(f->kv, a);
    assert_refused(f, ATTN_ENOBLOCKS, 3, "n_blocks is 3, 0 blocks are in use and 4 pinned");
    struct kv_shrink s = shrink(f, 4);
    assert_true(s.n_copies > 0);
    kv_shrink_fini(&s);
    assert_int_equal(stats_of(f).blocks_pinned, 4);
    assert_int_equal(n_cached_of(f, 500), 16);
    assert_int_equal(n_cached_of(f, 100), 0);
}

static void a_pool_is_found_by_what_it_was_made_with(void **state)
{
    struct fixture *f = *state;
    struct kv_shrink s = shrink(f, 3);
    kv_shrink_fini(&s);
    assert_int_equal(test_pool(f->kv, "pool", 2, 4, 12).index, f->pool.index);
    struct kv_pool_spec spec;
    uint32_t n_free;
    kv_pool_info(f->kv, f->pool, &spec, &n_free);
    assert_int_equal(spec.n_made, 12);
    assert_int_equal(spec.n_blocks, 3);
}

static void a_number_of_blocks_that_is_damaged_drops_the_pool(void **state)
{
    struct fixture *f = *state;
    kv_pool_live(f->kv, f->pool.index)->sized ^= 1;
    uint32_t n_dropped;
    assert_status(f->kv, ATTN_OK, kv_recover(f->kv, &n_dropped));
    assert_int_equal(stats_of(f).damaged, 1);
    assert_int_equal(stats_of(f).pools, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        T(a_pool_grows_as_far_as_the_next_one),
        T(a_pool_that_shrinks_makes_room_for_another),
        T(a_table_names_the_blocks_that_its_own_became),
        T(appends_that_are_outstanding_are_waited_for),
        T(what_is_cached_goes_in_order_and_the_rest_is_found_again),
        T(pinned_blocks_are_moved_and_not_evicted),
        T(a_pool_is_found_by_what_it_was_made_with),
        T(a_number_of_blocks_that_is_damaged_drops_the_pool),
    };
    return cmocka_run_group_tests_name("kv_resize", tests, NULL, NULL);
}
