/* test_kv_reserve.c: what a reservation promises, what it refuses, and what its sentences say. The
 * property tests reserve at random, the kill tests at every instruction.
 */
#include "tests/cache/fixture.h"

enum { ME, OTHER, THIRD };

static int setup_owners(void **state)
{
    setup(state);
    struct fixture *f = *state;
    for (uint32_t i = ME; i <= THIRD; i++)
        kv_owner_begin(f->kv, i, 100 + i, TENANT, "an owner");
    return 0;
}

static kv_seq_id open_of(struct fixture *f, uint32_t owner, uint64_t name)
{
    kv_seq_id seq = {UINT32_MAX};
    assert_status(f->kv, ATTN_OK,
                  kv_seq_open(f->kv, TENANT, name, f->pool, owner, ++f->request, &seq));
    return seq;
}

/* Blocks of 4 tokens. */
static attn_status grow(struct fixture *f, kv_seq_id seq, uint32_t n_blocks)
{
    uint32_t pos = info_of(f, seq).layer_len[0], n = n_blocks * 4;
    attn_status st = kv_append_reserve(f->kv, seq, 0, pos, n, fx_of(f));
    if (st == ATTN_OK)
        kv_append_commit(f->kv, seq, 0, pos, n);
    return st;
}

static void others_leave_what_is_reserved(void **state)
{
    struct fixture *f = *state;
    kv_seq_id mine = open_of(f, ME, 1), theirs = open_of(f, OTHER, 2);
    assert_status(f->kv, ATTN_OK, kv_reserve(f->kv, ME, f->pool, 5));
    assert_int_equal(kv_pool_free_for(f->kv, f->pool, OTHER), 7);
    assert_status(f->kv, ATTN_OK, grow(f, theirs, 7));
    assert_status(f->kv, ATTN_ENOBLOCKS, grow(f, theirs, 1));
    assert_says(f->kv, "pool pool has 0 free for its session, which has reserved 0 and has 7; all "
                       "have reserved 5");
    for (uint32_t i = 0; i < 5; i++)
        assert_status(f->kv, ATTN_OK, grow(f, mine, 1));
    assert_status(f->kv, ATTN_ENOBLOCKS, grow(f, mine, 1));
    kv_seq_close(f->kv, mine);
    assert_status(f->kv, ATTN_ENOBLOCKS, grow(f, theirs, 1));
    assert_status(f->kv, ATTN_OK, kv_reserve(f->kv, ME, f->pool, 2));
    assert_status(f->kv, ATTN_OK, grow(f, theirs, 3));
}

static void more_than_is_left_is_refused_with_figures(void **state)
{
    struct fixture *f = *state;
    kv_seq_id theirs = open_of(f, OTHER, 2);
    assert_status(f->kv, ATTN_OK, kv_reserve(f->kv, ME, f->pool, 5));
    assert_status(f->kv, ATTN_OK, grow(f, theirs, 3));
    assert_status(f->kv, ATTN_ENOBLOCKS, kv_reserve(f->kv, THIRD, f->pool, 5));
    assert_says(f->kv, "pool pool: n_blocks is 5, of its 12 blocks 4 can be reserved: others have "
                       "reserved 5 and hold 3 beyond that, 0 are pinned");
    assert_int_equal(kv_reserved(f->kv, THIRD, f->pool), 0);
    assert_status(f->kv, ATTN_OK, kv_reserve(f->kv, OTHER, f->pool, 7)); /* 3 of them it has */
    assert_int_equal(stats_of(f).blocks_reserved, 12);
    assert_status(f->kv, ATTN_ENOTFOUND, kv_reserve(f->kv, 3, f->pool, 1));
    assert_status(f->kv, ATTN_ENOTFOUND, kv_reserve(f->kv, ME, (kv_pool_id){2}, 1));
}

/* Who leaves a shared block to others does not take their room. */
static void a_shared_block_counts_for_each_sequence(void **state)
{
    struct fixture *f = *state;
    kv_seq_id mine = open_of(f, ME, 1), theirs, fork;
    assert_status(f->kv, ATTN_OK, kv_reserve(f->kv, ME, f->pool, 6));
    append_all(f, mine, 0, 16);
    assert_status(f->kv, ATTN_OK, kv_seq_fork(f->kv, mine, 2, 16, OTHER, ++f->request, &theirs));
    assert_int_equal(kv_charged(f->kv, OTHER, f->pool), 4);
    assert_status(f->kv, ATTN_OK, grow(f, theirs, 2));
    assert_status(f->kv, ATTN_ENOBLOCKS,
                  kv_seq_fork(f->kv, mine, 3, 4, OTHER, ++f->request, &fork));
    assert_says(f->kv, "fork at 4 has 1 blocks, pool pool has 0 for its session: others have "
                       "reserved the rest");
    kv_seq_close(f->kv, mine);
    mine = open_of(f, ME, 1);
    assert_status(f->kv, ATTN_OK, grow(f, mine, 6));
}

static void an_open_finds_as_much_as_it_may_have(void **state)
{
    struct fixture *f = *state;
    uint32_t ids[17];
    for (uint32_t i = 0; i < 17; i++)
        ids[i] = i;
    struct kv_tokens tokens = {.ids = ids, .n = 17};
    kv_seq_id seq, again;
    assert_status(
        f->kv, ATTN_OK,
        kv_seq_open_with(f->kv, TENANT, 1, f->pool, ME, ++f->request, &tokens, fx_of(f), &seq));
    append_all(f, seq, 0, 16);
    assert_status(f->kv, ATTN_OK, kv_reserve(f->kv, ME, f->pool, 10));
    assert_status(f->kv, ATTN_OK,
                  kv_seq_open_with(f->kv, TENANT, 2, f->pool, OTHER, ++f->request, &tokens,
                                   fx_of(f), &again));
    assert_int_equal(info_of(f, again).n_cached, 8);
    assert_status(
        f->kv, ATTN_OK,
        kv_seq_open_with(f->kv, TENANT, 3, f->pool, ME, ++f->request, &tokens, fx_of(f), &again));
    assert_int_equal(info_of(f, again).n_cached, 16);
}

static void adoption_is_refused_where_the_room_is_anothers(void **state)
{
    struct fixture *f = *state;
    kv_seq_id mine = open_of(f, ME, 1);
    uint32_t epoch;
    assert_status(f->kv, ATTN_OK, kv_reserve(f->kv, ME, f->pool, 10));
    assert_status(f->kv, ATTN_OK, grow(f, mine, 4));
    assert_status(f->kv, ATTN_ENOBLOCKS, kv_seq_adopt(f->kv, mine, OTHER, ++f->request, &epoch));
    assert_says(f->kv, "its 4 blocks are more than its new session can have: of pool pool all have "
                       "reserved 10");
    kv_owner_end(f->kv, ME);
    assert_status(f->kv, ATTN_OK, kv_seq_adopt(f->kv, mine, OTHER, ++f->request, &epoch));
    assert_int_equal(kv_charged(f->kv, OTHER, f->pool), 4);
    assert_int_equal(kv_charged(f->kv, ME, f->pool), 0);
}

static void a_reservation_ends_with_its_owner_or_pool(void **state)
{
    struct fixture *f = *state;
    assert_status(f->kv, ATTN_OK, kv_reserve(f->kv, ME, f->pool, 12));
    kv_owner_end(f->kv, ME);
    assert_int_equal(kv_pool_reserved(f->kv, f->pool), 0);
    kv_owner_begin(f->kv, ME, 7, TENANT, "another");
    assert_int_equal(kv_reserved(f->kv, ME, f->pool), 0);
    assert_status(f->kv, ATTN_OK, kv_reserve(f->kv, ME, f->pool, 12));
    assert_status(f->kv, ATTN_OK, kv_pool_drop(f->kv, f->pool));
    assert_int_equal(stats_of(f).blocks_reserved, 0);
    f->pool = test_pool(f->kv, "pool", 2, 4, 12);
    assert_int_equal(kv_reserved(f->kv, ME, f->pool), 0);
    assert_status(f->kv, ATTN_OK, kv_reserve(f->kv, OTHER, f->pool, 12));
}

static void begin_successor(struct fixture *f)
{
    struct kv *next = test_kv_open(&config, kv_fd(f->kv));
    kv_close(f->kv);
    f->kv = next;
}

static void a_successor_keeps_reservations(void **state)
{
    struct fixture *f = *state;
    kv_seq_id theirs = open_of(f, OTHER, 1);
    assert_status(f->kv, ATTN_OK, grow(f, theirs, 2));
    assert_status(f->kv, ATTN_OK, kv_reserve(f->kv, ME, f->pool, 9));
    begin_successor(f);
    assert_int_equal(kv_reserved(f->kv, ME, f->pool), 9);
    assert_int_equal(stats_of(f).blocks_reserved, 9);
    assert_int_equal(kv_pool_free_for(f->kv, f->pool, OTHER), 1);
}

static void a_pool_shrinks_to_what_is_reserved_and_used(void **state)
{
    struct fixture *f = *state;
    struct kv_shrink s;
    kv_seq_id theirs = open_of(f, OTHER, 1);
    assert_status(f->kv, ATTN_OK, grow(f, theirs, 2));
    assert_status(f->kv, ATTN_OK, kv_reserve(f->kv, ME, f->pool, 6));
    assert_status(f->kv, ATTN_ENOBLOCKS, kv_pool_shrink_begin(f->kv, f->pool, 7, &s));
    assert_says(f->kv, "n_blocks is 7, 6 blocks are reserved, 2 in use beyond that and 0 pinned");
    assert_status(f->kv, ATTN_OK, kv_pool_shrink_begin(f->kv, f->pool, 8, &s));
    kv_pool_shrink_end(f->kv, &s);
    kv_shrink_fini(&s);
    assert_status(f->kv, ATTN_ENOBLOCKS, grow(f, theirs, 1));
}

/* Of each pool's settings by themselves, also after a successor has begun, until the owner ends. */
static void what_an_earlier_request_asks_for_comes_too_late(void **state)
{
    struct fixture *f = *state;
    assert_false(kv_owner_has_set(f->kv, ME, f->pool, KV_RESERVATION, 7));
    kv_owner_set(f->kv, ME, f->pool, KV_RESERVATION, 7);
    kv_owner_set(f->kv, ME, f->pool, KV_RESERVATION, 5);
    begin_successor(f);
    assert_true(kv_owner_has_set(f->kv, ME, f->pool, KV_RESERVATION, 6));
    assert_true(kv_owner_has_set(f->kv, ME, f->pool, KV_RESERVATION, 7));
    assert_false(kv_owner_has_set(f->kv, ME, f->pool, KV_RESERVATION, 8));
    assert_false(kv_owner_has_set(f->kv, ME, f->pool, KV_SIZE, 6));
    assert_false(kv_owner_has_set(f->kv, ME, (kv_pool_id){f->pool.index + 1}, KV_RESERVATION, 6));
    assert_false(kv_owner_has_set(f->kv, OTHER, f->pool, KV_RESERVATION, 6));
    kv_owner_begin(f->kv, ME, 99, 0, "anew");
    assert_false(kv_owner_has_set(f->kv, ME, f->pool, KV_RESERVATION, 6));
}

int main(void)
{
#define R(name) cmocka_unit_test_setup_teardown(name, setup_owners, teardown)
    const struct CMUnitTest tests[] = {
        R(others_leave_what_is_reserved),
        R(more_than_is_left_is_refused_with_figures),
        R(a_shared_block_counts_for_each_sequence),
        R(an_open_finds_as_much_as_it_may_have),
        R(adoption_is_refused_where_the_room_is_anothers),
        R(a_reservation_ends_with_its_owner_or_pool),
        R(a_successor_keeps_reservations),
        R(a_pool_shrinks_to_what_is_reserved_and_used),
        R(what_an_earlier_request_asks_for_comes_too_late),
    };
    return cmocka_run_group_tests_name("kv_reserve", tests, NULL, NULL);
}
