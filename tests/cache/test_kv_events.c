/* test_kv_events.c: what readers are told of publications, evictions and pools; random histories
 * are in test_kv_property.c and test_kv_tiers.c, kills in test_kv_kill.c.
 */
#include "tests/cache/kv_test.h"
#include "tests/cache/reader.h"

enum { KEPT = 16, FROM = 1000 };

static const struct kv_config config = {.max_pools = 2,
                                        .max_blocks = 64,
                                        .max_sequences = 8,
                                        .max_seq_blocks = 16,
                                        .max_seq_tokens = 64,
                                        .max_block_tokens = 4,
                                        .max_layers = 1,
                                        .max_owners = 2,
                                        .block_layout = 1,
                                        .events_kept = KEPT,
                                        .events_from = FROM};

/* A sequence of n tokens with ids from `first` on is computed and closed. */
static void compute(struct kv *kv, kv_pool_id pool, uint32_t first, uint32_t n)
{
    static uint64_t name;
    uint32_t ids[64];
    struct test_fx t;
    kv_seq_id seq;
    for (uint32_t i = 0; i < n; i++)
        ids[i] = first + i;
    const struct kv_tokens tokens = {.ids = ids, .n = n, .adapter = 5};
    assert_status(
        kv, ATTN_OK,
        kv_seq_open_with(kv, 3, ++name, pool, 0, KV_NO_REQUEST, &tokens, test_fx_reset(&t), &seq));
    struct kv_seq_info info;
    kv_seq_info(kv, seq, &info);
    uint32_t pos = info.layer_len[0];
    assert_status(kv, ATTN_OK, kv_append_reserve(kv, seq, 0, pos, n - pos, test_fx_reset(&t)));
    kv_append_commit(kv, seq, 0, pos, n - pos);
    kv_seq_close(kv, seq);
}

static void expect(struct kv *kv, uint64_t *number, enum kv_event_kind kind, uint32_t pool)
{
    struct kv_event e;
    assert_true(kv_event_next(kv, *number, &e));
    assert_int_equal(e.kind, kind);
    assert_int_equal(e.pool, pool);
    ++*number;
}

static void publications_evictions_and_pools_come_in_order_with_their_ids(void **state)
{
    (void)state;
    struct kv *kv = test_kv_open(&config, -1);
    uint64_t number = kv_events_number(kv);
    struct kv_event e;
    struct kv_content c, second;
    kv_pool_id pool = test_pool(kv, "p", 1, 4, 3), other = test_pool(kv, "q", 1, 4, 2);
    expect(kv, &number, KV_EVENT_POOL_MADE, pool.index);
    expect(kv, &number, KV_EVENT_POOL_MADE, other.index);
    compute(kv, pool, 100, 9);
    assert_true(kv_event_next(kv, number, &e) && kv_event_content(kv, &e, &c));
    assert_true(c.index == 0 && c.tenant == 3 && c.adapter == 5 && c.parent == 0 && c.n_ids == 4 &&
                c.ids[0] == 100 && c.ids[3] == 103);
    expect(kv, &number, KV_EVENT_PUBLISHED, pool.index);
    assert_true(kv_event_next(kv, number, &e) && kv_event_content(kv, &e, &second));
    assert_true(second.parent == c.serial && second.index == 1 && second.ids[0] == 104);
    expect(kv, &number, KV_EVENT_PUBLISHED, pool.index);
    uint64_t of_second = number - 1;
    assert_false(kv_event_next(kv, number, &e));

    compute(kv, pool, 200, 10); /* takes the end of the first one, and its block with it */
    assert_true(kv_event_next(kv, of_second, &e));
    assert_false(kv_event_content(kv, &e, &c));
    expect(kv, &number, KV_EVENT_EVICTED, pool.index);
    assert_true(kv_event_next(kv, number - 1, &e) && e.serial == second.serial);
    number = kv_events_number(kv);
    assert_status(kv, ATTN_OK, kv_pool_drop(kv, pool));
    uint64_t n = kv_events_number(kv) - number;
    for (uint64_t i = 0; i + 1 < n; i++)
        expect(kv, &number, KV_EVENT_EVICTED, pool.index);
    expect(kv, &number, KV_EVENT_POOL_GONE, pool.index);
    assert_true(n > 1);
    /* another pool in its place is another one */
    kv_pool_id next = test_pool(kv, "r", 1, 4, 3);
    assert_true(next.index == pool.index && kv_event_next(kv, number, &e));
    assert_int_equal(e.generation, 1);
    kv_close(kv);
}

static void a_reader_of_more_than_is_kept_is_told_and_takes_a_snapshot(void **state)
{
    (void)state;
    struct kv *kv = test_kv_open(&config, -1);
    kv_pool_id pool = test_pool(kv, "p", 1, 4, 12);
    struct reader r = {0};
    reader_catch_up(&r, kv);
    assert_int_equal(r.n_snapshots, 1);
    uint64_t number = kv_events_number(kv);
    for (uint32_t i = 0; i < KEPT; i++)
        compute(kv, pool, 1000 * i, 5);
    assert_true(kv_events_number(kv) > number + KEPT);
    struct kv_event e;
    assert_false(kv_events_has(kv, number) || kv_event_next(kv, number, &e));
    assert_true(kv_events_has(kv, kv_events_number(kv) - KEPT));
    assert_false(kv_events_has(kv, kv_events_number(kv) - KEPT - 1));
    assert_false(kv_events_has(kv, kv_events_number(kv) + 1)); /* of another arena */
    assert_false(kv_events_has(kv, UINT64_MAX));
    for (uint32_t i = 0; i < 5; i++) { /* the cache changes between the parts of its snapshot */
        reader_turn(&r, kv, 3);
        compute(kv, pool, 7000 * i, 9);
    }
    reader_catch_up(&r, kv);
    assert_string_equal(reader_difference(&r, kv), "");
    assert_true(r.n_snapshots == 2 && r.n > 5);
    kv_close(kv);
}

static void numbers_never_restart(void **state)
{
    (void)state;
    struct kv_config later = config;
    later.events_from = FROM + 1;
    struct kv *kv = test_kv_open(&config, -1);
    assert_true(kv_events_number(kv) > FROM);
    kv_pool_id pool = test_pool(kv, "p", 1, 4, 12);
    compute(kv, pool, 1, 30);
    struct reader r = {0};
    reader_catch_up(&r, kv);
    uint64_t number = kv_events_number(kv);
    for (int i = 0; i < 2; i++) { /* in a successor they go on, whatever it says */
        struct kv *next = test_kv_open(&later, kv_fd(kv));
        kv_close(kv);
        kv = next;
        assert_true(kv_events_number(kv) > number && !kv_events_has(kv, number));
        assert_true(kv_events_has(kv, kv_events_number(kv)));
        reader_catch_up(&r, kv);
        assert_string_equal(reader_difference(&r, kv), "");
        assert_int_equal(r.n_snapshots, 2 + i);
        number = kv_events_number(kv);
        later.events_from = 1;
    }
    kv_close(kv);
    later.events_from = number + 100; /* an empty one begins where it is told to */
    kv = test_kv_open(&later, -1);
    assert_true(kv_events_number(kv) > number + 100 && !kv_events_has(kv, number));
    reader_catch_up(&r, kv);
    assert_int_equal(r.n, 0);
    kv_close(kv);
}

static void a_block_that_a_smaller_pool_moves_stays_known(void **state)
{
    (void)state;
    struct kv *kv = test_kv_open(&config, -1);
    kv_pool_id pool = test_pool(kv, "p", 1, 4, 12);
    for (uint32_t i = 0; i < 6; i++)
        compute(kv, pool, 100 * i, 6);
    struct reader r = {0};
    reader_catch_up(&r, kv);
    uint32_t n_events = r.n_events;
    struct kv_shrink s;
    assert_status(kv, ATTN_OK, kv_pool_shrink_begin(kv, pool, 4, &s));
    assert_true(s.n_copies > 0);
    kv_pool_shrink_end(kv, &s);
    kv_shrink_fini(&s);
    reader_catch_up(&r, kv);
    assert_string_equal(reader_difference(&r, kv), "");
    assert_true(r.n == 4 && r.n_snapshots == 1 && r.n_events > n_events);
    kv_close(kv);
}

static void what_a_recovery_drops_is_known_to_be_gone(void **state)
{
    (void)state;
    struct kv *kv = test_kv_open(&config, -1);
    kv_pool_id pool = test_pool(kv, "p", 1, 4, 12), other = test_pool(kv, "q", 1, 4, 12);
    compute(kv, pool, 1, 10);
    compute(kv, other, 1, 10);
    struct reader r = {0};
    uint32_t n_dropped;
    reader_catch_up(&r, kv);
    assert_int_equal(r.n, 4);
    assert_status(kv, ATTN_OK, kv_pools_drop(kv, other, &n_dropped)); /* says nothing of blocks */
    reader_catch_up(&r, kv);
    assert_string_equal(reader_difference(&r, kv), "");
    assert_true(r.n == 2 && r.n_snapshots == 2);
    kv_close(kv);
}

static void without_a_ring_every_reader_takes_snapshots(void **state)
{
    (void)state;
    struct kv_config c = config;
    c.events_kept = 0;
    struct kv *kv = test_kv_open(&c, -1);
    kv_pool_id pool = test_pool(kv, "p", 1, 4, 12);
    compute(kv, pool, 1, 30);
    struct kv_event e;
    assert_false(kv_event_next(kv, kv_events_number(kv) - 1, &e));
    assert_false(kv_event_next(kv, kv_events_number(kv), &e));
    kv_close(kv);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(publications_evictions_and_pools_come_in_order_with_their_ids),
        cmocka_unit_test(a_reader_of_more_than_is_kept_is_told_and_takes_a_snapshot),
        cmocka_unit_test(numbers_never_restart),
        cmocka_unit_test(a_block_that_a_smaller_pool_moves_stays_known),
        cmocka_unit_test(what_a_recovery_drops_is_known_to_be_gone),
        cmocka_unit_test(without_a_ring_every_reader_takes_snapshots),
    };
    return cmocka_run_group_tests_name("kv_events", tests, NULL, NULL);
}
