/* test_kv_seq.c: tests pools, and opening, finding, adopting and closing sequences. */
#include "tests/cache/fixture.h"

static void a_pool_made_again_is_the_same_pool(void **state)
{
    struct fixture *f = *state;
    assert_int_equal(test_pool(f->kv, "pool", 2, 4, 12).index, f->pool.index);
    assert_int_equal(stats_of(f).pools, 1);
    struct kv_pool_spec s;
    uint32_t n_free;
    assert_int_equal(kv_pool_info(f->kv, f->pool, &s, &n_free), ATTN_OK);
    assert_string_equal(s.name, "pool");
    assert_int_equal(s.n_layers, 2);
    assert_int_equal(s.block_tokens, 4);
    assert_int_equal(s.n_blocks, 12);
    assert_int_equal(n_free, 12);
    assert_int_equal(s.spec_bytes, 4);
    assert_memory_equal(s.spec, "pool", 4);
    kv_pool_id found;
    assert_int_equal(kv_pool_find(f->kv, 0, "pool", &found), ATTN_OK);
    assert_int_equal(found.index, f->pool.index);
    assert_status(f->kv, ATTN_ENOTFOUND, kv_pool_find(f->kv, 0, "other", &found));
    assert_says(f->kv, "pool other");
    assert_status(f->kv, ATTN_ENOTFOUND, kv_pool_find(f->kv, 1, "pool", &found));
    assert_int_equal(kv_pool_info(f->kv, (kv_pool_id){1}, &s, &n_free), ATTN_ENOTFOUND);
    assert_int_equal(kv_pool_info(f->kv, (kv_pool_id){99}, &s, &n_free), ATTN_ENOTFOUND);
}

static void a_pool_with_the_same_name_and_another_spec_is_refused_by_field(void **state)
{
    struct fixture *f = *state;
    kv_pool_id pool;
    const struct kv_pool_spec same = {.name = "pool",
                                      .n_layers = 2,
                                      .block_tokens = 4,
                                      .n_blocks = 12,
                                      .spec = (const uint8_t *)"pool",
                                      .spec_bytes = 4};
    struct kv_pool_spec s = same;
    s.n_layers = 3;
    assert_status(f->kv, ATTN_EEXIST, kv_pool_create(f->kv, &s, &pool));
    assert_says(f->kv, "n_layers 2, not 3");
    s = same;
    s.block_tokens = 8;
    assert_status(f->kv, ATTN_EEXIST, kv_pool_create(f->kv, &s, &pool));
    assert_says(f->kv, "block_tokens 4, not 8");
    s = same;
    s.n_blocks = 13;
    assert_status(f->kv, ATTN_EEXIST, kv_pool_create(f->kv, &s, &pool));
    assert_says(f->kv, "n_blocks 12, not 13");
    s = same;
    s.spec = (const uint8_t *)"pooL";
    assert_status(f->kv, ATTN_EEXIST, kv_pool_create(f->kv, &s, &pool));
    s.spec_bytes = 3;
    assert_status(f->kv, ATTN_EEXIST, kv_pool_create(f->kv, &s, &pool));
}

static void a_pool_that_does_not_fit_is_refused_by_field(void **state)
{
    struct fixture *f = *state;
    kv_pool_id pool;
    const struct kv_pool_spec good = {.name = "b", .n_layers = 1, .block_tokens = 4, .n_blocks = 1};
    struct kv_pool_spec s = good;
    s.name[0] = '\0';
    assert_status(f->kv, ATTN_EINVAL, kv_pool_create(f->kv, &s, &pool));
    memset(s.name, 'x', sizeof s.name);
    assert_status(f->kv, ATTN_EINVAL, kv_pool_create(f->kv, &s, &pool));
    s = good;
    s.n_layers = 4;
    assert_status(f->kv, ATTN_EINVAL, kv_pool_create(f->kv, &s, &pool));
    assert_says(f->kv, "n_layers is 4");
    s = good;
    s.block_tokens = 6;
    assert_status(f->kv, ATTN_EINVAL, kv_pool_create(f->kv, &s, &pool));
    assert_says(f->kv, "block_tokens is 6");
    s = good;
    s.n_blocks = 0;
    assert_status(f->kv, ATTN_EINVAL, kv_pool_create(f->kv, &s, &pool));
    s = good;
    s.spec_bytes = KV_SPEC_BYTES + 1;
    s.spec = (const uint8_t *)"";
    assert_status(f->kv, ATTN_EINVAL, kv_pool_create(f->kv, &s, &pool));
    s = good;
    s.n_blocks = 53;
    assert_status(f->kv, ATTN_ENOMEM, kv_pool_create(f->kv, &s, &pool));
    assert_says(f->kv, "n_blocks is 53, 52 are left");
    test_pool(f->kv, "b", 1, 4, 50);
    test_pool(f->kv, "c", 1, 4, 2);
    s = (struct kv_pool_spec){.name = "d", .n_layers = 1, .block_tokens = 4, .n_blocks = 1};
    assert_status(f->kv, ATTN_ENOMEM, kv_pool_create(f->kv, &s, &pool));
    assert_says(f->kv, "all 3 pools");
}

static void pools_give_out_ids_of_their_own(void **state)
{
    struct fixture *f = *state;
    kv_pool_id other = test_pool(f->kv, "other", 1, 4, 12);
    kv_seq_id a = open_seq(f, NAME), b;
    assert_status(f->kv, ATTN_OK, kv_seq_open(f->kv, TENANT, 1, other, OWNER, KV_NO_REQUEST, &b));
    append(f, a, 0, 0, 4);
    append(f, b, 0, 0, 4);
    assert_int_equal(info_of(f, a).block_table[0], 0);
    assert_int_equal(info_of(f, b).block_table[0], 0);
    assert_int_equal(stats_of(f).blocks_used, 2);
    assert_int_equal(stats_of(f).blocks_shared, 0);
}

static void a_new_sequence_is_empty_and_found_by_tenant_and_name(void **state)
{
    struct fixture *f = *state;
    kv_seq_id seq = open_seq(f, NAME), found = {99};
    assert_status(f->kv, ATTN_OK, kv_seq_find(f->kv, TENANT, NAME, &found));
    assert_int_equal(found.index, seq.index);
    struct kv_seq_info i = info_of(f, seq);
    assert_int_equal(i.name, NAME);
    assert_int_equal(i.tenant, TENANT);
    assert_int_equal(i.pool.index, f->pool.index);
    assert_int_equal(i.epoch, 1);
    assert_int_equal(i.owner, OWNER);
    assert_int_equal(i.n_blocks, 0);
    assert_int_equal(i.layer_len[0] + i.layer_len[1], 0);
    found.index = 99;
    assert_status(f->kv, ATTN_ENOTFOUND, kv_seq_find(f->kv, TENANT + 1, NAME, &found));
    assert_says(f->kv, "sequence 77: not found");
    assert_status(f->kv, ATTN_ENOTFOUND, kv_seq_find(f->kv, TENANT, NAME + 1, &found));
    assert_int_equal(found.index, 99);
}

static void an_open_repeated_gives_the_same_sequence(void **state)
{
    struct fixture *f = *state;
    kv_seq_id seq = open_seq(f, NAME), again = {99};
    for (uint32_t n = 0; n < 2; n++) { /* empty, then not */
        again.index = 99;
        assert_status(f->kv, ATTN_OK, kv_seq_open(f->kv, TENANT, NAME, f->pool, OWNER, 1, &again));
        assert_int_equal(again.index, seq.index);
        append(f, seq, 1, n, 1);
    }
    assert_int_equal(stats_of(f).opens, 1);
    assert_status(f->kv, ATTN_EEXIST, kv_seq_open(f->kv, TENANT, NAME, f->pool, OWNER, 2, &again));
    assert_says(f->kv, "sequence 77 is already open");
    assert_status(f->kv, ATTN_EEXIST,
                  kv_seq_open(f->kv, TENANT, NAME, f->pool, OWNER + 1, 1, &again));
}

static void a_request_is_carried_out_once(void **state)
{
    struct fixture *f = *state;
    kv_seq_id seq = open_seq(f, NAME), out;
    uint32_t epoch = 0;
    assert_status(f->kv, ATTN_OK,
                  truncate_to(f, seq, 0)); /* the epoch is not the open's any more */
    assert_status(f->kv, ATTN_ESTALE, kv_seq_open(f->kv, TENANT, NAME, f->pool, OWNER, 1, &out));
    assert_says(f->kv, "request 1 was carried out before");
    assert_status(f->kv, ATTN_OK, kv_seq_adopt(f->kv, seq, 0, 9, &epoch));
    assert_int_equal(epoch, 3);
    assert_status(f->kv, ATTN_OK, kv_seq_adopt(f->kv, seq, 0, 9, &epoch)); /* the same answer */
    assert_int_equal(epoch, 3);
    assert_status(f->kv, ATTN_OK, kv_seq_adopt(f->kv, seq, 1, 9, &epoch)); /* of another owner */
    assert_int_equal(epoch, 4);
    assert_status(f->kv, ATTN_ESTALE, kv_seq_adopt(f->kv, seq, 0, 9, &epoch));
    kv_seq_close(f->kv, seq);
    assert_status(f->kv, ATTN_ESTALE, kv_seq_open(f->kv, TENANT, NAME, f->pool, OWNER, 1, &out));
    assert_int_equal(stats_of(f).sequences, 0);
}

static void epochs_of_a_name_never_come_again(void **state)
{
    struct fixture *f = *state;
    uint32_t last = 0;
    for (uint32_t life = 0; life < 20; life++) {
        kv_seq_id seq = open_seq(f, NAME);
        assert_true(info_of(f, seq).epoch > last);
        for (uint32_t i = 0; i < life % 3; i++)
            assert_status(f->kv, ATTN_OK, truncate_to(f, seq, 0));
        last = info_of(f, seq).epoch;
        kv_seq_close(f->kv, seq);
    }
}

static void requests_are_remembered_to_a_bound_and_older_ones_are_refused(void **state)
{
    struct fixture *f = *state;
    kv_seq_id out;
    assert_int_equal(kv_owner_last_request(f->kv, OWNER), 0);
    for (uint64_t id = 10; id < 10 + 2 * KV_MAX_SEEN; id += 2) {
        assert_status(f->kv, ATTN_OK, kv_seq_open(f->kv, TENANT, id, f->pool, OWNER, id, &out));
        kv_seq_close(f->kv, out);
    }
    uint64_t last = 10 + 2 * KV_MAX_SEEN - 2;
    assert_int_equal(kv_owner_last_request(f->kv, OWNER), last);
    /* between two that are remembered: late, but not done yet */
    assert_status(f->kv, ATTN_OK, kv_seq_open(f->kv, TENANT, 1, f->pool, OWNER, last - 1, &out));
    /* 10 had to make room for it: 9 and 10 may have been done, for all that is known */
    assert_status(f->kv, ATTN_ESTALE, kv_seq_open(f->kv, TENANT, 2, f->pool, OWNER, 9, &out));
    assert_status(f->kv, ATTN_ESTALE, kv_seq_open(f->kv, TENANT, 2, f->pool, OWNER, 10, &out));
    assert_status(f->kv, ATTN_OK, kv_seq_open(f->kv, TENANT, 2, f->pool, OWNER, 13, &out));
    kv_owner_begin(f->kv, OWNER, 1, 0, "another");
    assert_int_equal(kv_owner_last_request(f->kv, OWNER), 0);
    assert_status(f->kv, ATTN_OK, kv_seq_open(f->kv, TENANT, 3, f->pool, OWNER, 9, &out));
}

static void opening_needs_a_pool_an_owner_and_a_free_record(void **state)
{
    struct fixture *f = *state;
    kv_seq_id seq = {99};
    assert_status(f->kv, ATTN_ENOTFOUND,
                  kv_seq_open(f->kv, TENANT, 1, (kv_pool_id){2}, OWNER, 1, &seq));
    assert_status(f->kv, ATTN_EINVAL, kv_seq_open(f->kv, TENANT, 1, f->pool, 4, 1, &seq));
    assert_says(f->kv, "owner is 4, at most 3");
    for (uint64_t i = 0; i < config.max_sequences; i++)
        open_seq(f, i);
    assert_status(f->kv, ATTN_EOVERLOAD,
                  kv_seq_open(f->kv, TENANT, NAME, f->pool, OWNER, KV_NO_REQUEST, &seq));
    assert_says(f->kv, "all 8 sequences");
    assert_int_equal(seq.index, 99);
    assert_status(f->kv, ATTN_OK, kv_seq_find(f->kv, TENANT, 5, &seq));
    kv_seq_close(f->kv, seq);
    assert_int_equal(open_seq(f, NAME).index, seq.index);
}

static void adoption_raises_the_epoch_and_moves_the_owner(void **state)
{
    struct fixture *f = *state;
    kv_seq_id a = open_seq(f, 1), b = open_seq(f, 2), c = open_seq(f, 3), any;
    uint32_t epoch = 0;
    assert_status(f->kv, ATTN_OK, kv_seq_adopt(f->kv, b, 0, KV_NO_REQUEST, &epoch));
    assert_int_equal(epoch, 2);
    assert_int_equal(info_of(f, b).epoch, 2);
    assert_int_equal(info_of(f, b).owner, 0);
    assert_status(f->kv, ATTN_OK, kv_owner_any(f->kv, 0, &any));
    assert_int_equal(any.index, b.index);
    assert_status(f->kv, ATTN_EINVAL, kv_seq_adopt(f->kv, b, 4, KV_NO_REQUEST, &epoch));
    assert_status(f->kv, ATTN_OK, kv_seq_adopt(f->kv, b, KV_NO_OWNER, KV_NO_REQUEST, &epoch));
    assert_int_equal(epoch, 3);
    assert_status(f->kv, ATTN_ENOTFOUND, kv_owner_any(f->kv, 0, &any));
    assert_status(f->kv, ATTN_ENOTFOUND, kv_owner_any(f->kv, KV_NO_OWNER, &any));
    /* Freeing an owner's sequences in slices. */
    uint32_t n = 0;
    for (; kv_owner_any(f->kv, OWNER, &any) == ATTN_OK; n++) {
        assert_true(any.index == a.index || any.index == c.index);
        kv_seq_close(f->kv, any);
        test_check(f->kv);
    }
    assert_int_equal(n, 2);
    assert_status(f->kv, ATTN_ENOTFOUND, kv_seq_adopt(f->kv, a, 0, KV_NO_REQUEST, &epoch));
}

static void a_closed_sequence_answers_nothing(void **state)
{
    struct fixture *f = *state;
    kv_seq_id seq = open_seq(f, NAME), other;
    append_all(f, seq, 0, 9);
    kv_seq_close(f->kv, seq);
    kv_seq_close(f->kv, seq);
    assert_int_equal(stats_of(f).closes, 1);
    assert_int_equal(stats_of(f).blocks_used, 0);
    assert_null(info_of(f, seq).block_table);
    assert_status(f->kv, ATTN_ENOTFOUND, kv_seq_find(f->kv, TENANT, NAME, &other));
    assert_status(f->kv, ATTN_ENOTFOUND, truncate_to(f, seq, 0));
    assert_status(f->kv, ATTN_ENOTFOUND, kv_seq_fork(f->kv, seq, 1, 0, OWNER, 1, &other));
    assert_false(has_pending_copy(f->kv, seq));
    assert_false(kv_append_copies(f->kv, (kv_seq_id){1000}, 0, 1));
}

static void assert_moved(struct kv *kv, uint64_t name, uint32_t epoch, uint64_t id)
{
    struct kv_moved at;
    assert_true(kv_moved_find(kv, TENANT, name, epoch, &at));
    assert_int_equal(at.id, id);
    assert_int_equal(at.epoch, 5);
    assert_string_equal(at.url, "tcp://b:1");
}

static void where_a_sequence_went_is_known_by_its_handles_for_a_while(void **state)
{
    struct fixture *f = *state;
    const struct kv_moved to = {.id = 1000, .epoch = 5, .url = "tcp://b:1"};
    struct kv_moved at;
    kv_set_time(f->kv, 100);
    assert_false(kv_moved_find(f->kv, TENANT, NAME, 0, &at));
    kv_moved_note(f->kv, TENANT, NAME, 3, &to, 10);
    assert_moved(f->kv, NAME, 3, 1000);
    assert_moved(f->kv, NAME, 1, 1000);
    assert_moved(f->kv, NAME, 0, 1000);
    assert_false(kv_moved_find(f->kv, TENANT, NAME, 4, &at)); /* of a later sequence */
    assert_false(kv_moved_find(f->kv, TENANT + 1, NAME, 3, &at));
    assert_false(kv_moved_find(f->kv, TENANT, NAME + 1, 3, &at));
    kv_set_time(f->kv, 109);
    assert_moved(f->kv, NAME, 3, 1000);
    kv_set_time(f->kv, 110);
    assert_false(kv_moved_find(f->kv, TENANT, NAME, 3, &at));
}

static void of_moved_sequences_the_latest_are_known_in_a_successor_too(void **state)
{
    struct fixture *f = *state;
    struct kv_moved at;
    uint32_t n_dropped;
    for (uint32_t i = 0; i < KV_MAX_MOVED + 3; i++) {
        const struct kv_moved to = {.id = i, .epoch = 5, .url = "tcp://b:1"};
        kv_moved_note(f->kv, TENANT, 2000 + i, 3, &to, 10);
        if (i % 100 == 0)
            test_check(f->kv);
    }
    for (int round = 0; round < 2; round++) {
        for (uint32_t i = 0; i < 3; i++)
            assert_false(kv_moved_find(f->kv, TENANT, 2000 + i, 3, &at));
        for (uint32_t i = 3; i < KV_MAX_MOVED + 3; i++)
            assert_moved(f->kv, 2000 + i, 3, i);
        assert_int_equal(kv_recover(f->kv, &n_dropped), ATTN_OK);
        assert_int_equal(n_dropped, 0);
    }
    /* what is damaged is not told, and the others are */
    f->kv->moved[7].url[3] ^= 1;
    assert_int_equal(kv_recover(f->kv, &n_dropped), ATTN_OK);
    assert_false(kv_moved_find(f->kv, TENANT, 2000 + 6, 3, &at));
    assert_moved(f->kv, 2000 + 7, 3, 7);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        T(a_pool_made_again_is_the_same_pool),
        T(a_pool_with_the_same_name_and_another_spec_is_refused_by_field),
        T(a_pool_that_does_not_fit_is_refused_by_field),
        T(pools_give_out_ids_of_their_own),
        T(a_new_sequence_is_empty_and_found_by_tenant_and_name),
        T(an_open_repeated_gives_the_same_sequence),
        T(a_request_is_carried_out_once),
        T(epochs_of_a_name_never_come_again),
        T(requests_are_remembered_to_a_bound_and_older_ones_are_refused),
        T(opening_needs_a_pool_an_owner_and_a_free_record),
        T(adoption_raises_the_epoch_and_moves_the_owner),
        T(a_closed_sequence_answers_nothing),
        T(where_a_sequence_went_is_known_by_its_handles_for_a_while),
        T(of_moved_sequences_the_latest_are_known_in_a_successor_too),
    };
    return cmocka_run_group_tests_name("kv_seq", tests, NULL, NULL);
}
