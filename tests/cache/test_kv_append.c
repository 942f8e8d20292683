/* test_kv_append.c: tests appends, copies on write, forks and truncations. */
#include "tests/cache/fixture.h"

static void appends_take_blocks_at_the_first_layer_that_needs_them(void **state)
{
    struct fixture *f = *state;
    kv_seq_id seq = open_seq(f, NAME);
    struct kv_effects *fx = fx_of(f);
    assert_status(f->kv, ATTN_OK, kv_append_reserve(f->kv, seq, 1, 0, 6, fx));
    assert_int_equal(fx->n_patches, 2);
    assert_int_equal(fx->n_copies, 0);
    for (uint32_t i = 0; i < 2; i++) {
        assert_int_equal(fx->patches[i].row, seq.index);
        assert_int_equal(fx->patches[i].index, i);
        assert_int_equal(fx->patches[i].block, info_of(f, seq).block_table[i]);
    }
    assert_int_equal(info_of(f, seq).layer_len[1], 0);
    kv_append_commit(f->kv, seq, 1, 0, 6);
    assert_int_equal(info_of(f, seq).layer_len[1], 6);
    assert_int_equal(info_of(f, seq).layer_len[0], 0);
    assert_status(f->kv, ATTN_OK, kv_append_reserve(f->kv, seq, 0, 0, 6, fx_of(f)));
    assert_int_equal(f->t.fx.n_patches, 0);
    kv_append_commit(f->kv, seq, 0, 0, 6);
    assert_int_equal(stats_of(f).blocks_used, 2);
    assert_int_equal(stats_of(f).blocks_free, 10);
}

static void a_gap_is_refused_with_both_numbers(void **state)
{
    struct fixture *f = *state;
    kv_seq_id seq = open_seq(f, NAME);
    append(f, seq, 0, 0, 5);
    assert_status(f->kv, ATTN_EINVAL, kv_append_reserve(f->kv, seq, 0, 7, 1, fx_of(f)));
    assert_says(f->kv, "sequence 77: pos is 7, layer 0 has 5 tokens");
    assert_status(f->kv, ATTN_EINVAL, kv_append_reserve(f->kv, seq, 1, 1, 1, fx_of(f)));
    assert_says(f->kv, "pos is 1, layer 1 has 0 tokens");
    assert_int_equal(f->t.fx.n_patches, 0);
}

static void a_retry_that_overlaps_the_end_is_counted_once(void **state)
{
    struct fixture *f = *state;
    kv_seq_id seq = open_seq(f, NAME);
    append(f, seq, 0, 0, 5);
    append(f, seq, 0, 0, 5);
    assert_int_equal(info_of(f, seq).layer_len[0], 5);
    append(f, seq, 0, 3, 1);
    assert_int_equal(info_of(f, seq).layer_len[0], 5);
    append(f, seq, 0, 3, 6);
    assert_int_equal(info_of(f, seq).layer_len[0], 9);
    assert_int_equal(info_of(f, seq).n_blocks, 3);
}

static void bad_ranges_are_refused_by_field(void **state)
{
    struct fixture *f = *state;
    kv_seq_id seq = open_seq(f, NAME);
    assert_status(f->kv, ATTN_EINVAL, kv_append_reserve(f->kv, seq, 2, 0, 1, fx_of(f)));
    assert_says(f->kv, "layer is 2, pool pool has 2");
    assert_status(f->kv, ATTN_EINVAL, kv_append_reserve(f->kv, seq, 0, 0, 0, fx_of(f)));
    assert_says(f->kv, "n_tokens is 0");
    assert_status(f->kv, ATTN_EINVAL, kv_append_reserve(f->kv, seq, 0, 0, 65, fx_of(f)));
    assert_says(f->kv, "pos 0 + n_tokens 65 is over 64");
    assert_status(f->kv, ATTN_EINVAL, kv_append_reserve(f->kv, seq, 0, 0, UINT32_MAX, fx_of(f)));
    assert_status(f->kv, ATTN_ENOTFOUND,
                  kv_append_reserve(f->kv, (kv_seq_id){7}, 0, 0, 1, fx_of(f)));
    assert_status(f->kv, ATTN_ENOTFOUND,
                  kv_append_reserve(f->kv, (kv_seq_id){UINT32_MAX}, 0, 0, 1, fx_of(f)));
}

static void out_of_blocks_changes_nothing(void **state)
{
    struct fixture *f = *state;
    kv_seq_id seq = open_seq(f, NAME), other = open_seq(f, 1);
    append(f, seq, 0, 0, 40);
    append(f, other, 0, 0, 4);
    assert_status(f->kv, ATTN_ENOBLOCKS, kv_append_reserve(f->kv, other, 0, 4, 8, fx_of(f)));
    assert_says(f->kv, "sequence 1: needs 2 blocks, pool pool has 1 free");
    assert_int_equal(f->t.fx.n_patches, 0);
    assert_int_equal(info_of(f, other).n_blocks, 1);
    assert_int_equal(stats_of(f).out_of_blocks, 1);
    append(f, other, 0, 4, 4);
    assert_int_equal(stats_of(f).blocks_free, 0);
    kv_seq_close(f->kv, seq);
    assert_int_equal(stats_of(f).blocks_free, 10);
}

static void full_effects_refuse_the_append_and_change_nothing(void **state)
{
    struct fixture *f = *state;
    kv_seq_id seq = open_seq(f, NAME);
    struct kv_effects *fx = fx_of(f);
    fx->patches_capacity = 1;
    assert_status(f->kv, ATTN_EOVERLOAD, kv_append_reserve(f->kv, seq, 0, 0, 5, fx));
    assert_int_equal(fx->n_patches, 0);
    assert_int_equal(stats_of(f).blocks_used, 0);
    assert_status(f->kv, ATTN_OK, kv_append_reserve(f->kv, seq, 0, 0, 4, fx));
    kv_append_commit(f->kv, seq, 0, 0, 4);
}

static void cancel_gives_new_blocks_back_unless_another_append_uses_them(void **state)
{
    struct fixture *f = *state;
    kv_seq_id seq = open_seq(f, NAME);
    assert_status(f->kv, ATTN_OK, kv_append_reserve(f->kv, seq, 0, 0, 10, fx_of(f)));
    assert_status(f->kv, ATTN_OK, kv_append_reserve(f->kv, seq, 1, 0, 5, fx_of(f)));
    assert_status(f->kv, ATTN_OK, kv_append_cancel(f->kv, seq, 0, 0, 10, fx_of(f)));
    assert_int_equal(info_of(f, seq).n_blocks, 3);
    kv_append_commit(f->kv, seq, 1, 0, 5);
    assert_int_equal(info_of(f, seq).n_blocks, 2);
    assert_int_equal(info_of(f, seq).layer_len[0], 0);
    assert_int_equal(info_of(f, seq).layer_len[1], 5);
    assert_int_equal(stats_of(f).blocks_used, 2);
}

static void a_commit_that_nobody_reserved_changes_nothing(void **state)
{
    struct fixture *f = *state;
    kv_seq_id seq = open_seq(f, NAME);
    append(f, seq, 0, 0, 3);
    kv_append_commit(f->kv, seq, 0, 3, 1);
    assert_int_equal(info_of(f, seq).layer_len[0], 3);
    assert_status(f->kv, ATTN_OK, kv_append_reserve(f->kv, seq, 0, 3, 1, fx_of(f)));
    kv_append_commit(f->kv, seq, 0, 3, 50); /* past what the table covers */
    assert_int_equal(info_of(f, seq).layer_len[0], 3);
    kv_append_commit(f->kv, (kv_seq_id){6}, 0, 0, 1);
    assert_status(f->kv, ATTN_OK, kv_append_cancel(f->kv, seq, 0, 0, 1, fx_of(f)));
}

static void fork_shares_blocks_until_first_append(void **state)
{
    struct fixture *f = *state;
    kv_seq_id src, child = fork_at(f, &src, 6);
    struct kv_seq_info a = info_of(f, src), b = info_of(f, child);
    assert_int_equal(b.tenant, TENANT);
    assert_int_equal(b.owner, OWNER + 1);
    assert_int_equal(b.n_blocks, 2);
    assert_int_equal(b.layer_len[0], 6);
    assert_int_equal(b.layer_len[1], 6);
    assert_false(b.is_notified);
    assert_ptr_equal(b.block_table, a.block_table);
    assert_int_equal(stats_of(f).blocks_shared, 0);
    assert_int_equal(stats_of(f).blocks_used, 3);

    struct kv_effects *fx = fx_of(f);
    fx->patches_capacity = 1;
    assert_status(f->kv, ATTN_EOVERLOAD, kv_seq_materialize(f->kv, child, fx));
    assert_status(f->kv, ATTN_OK, kv_seq_materialize(f->kv, child, fx_of(f)));
    b = info_of(f, child);
    assert_true(b.is_notified);
    assert_int_equal(f->t.fx.n_patches, 2);
    for (uint32_t i = 0; i < 2; i++) {
        assert_int_equal(b.block_table[i], a.block_table[i]);
        assert_int_equal(f->t.fx.patches[i].row, child.index);
        assert_int_equal(f->t.fx.patches[i].index, i);
        assert_int_equal(f->t.fx.patches[i].block, a.block_table[i]);
    }
    assert_int_equal(stats_of(f).blocks_shared, 2);
    assert_int_equal(stats_of(f).blocks_used, 3);
    assert_status(f->kv, ATTN_OK, kv_seq_materialize(f->kv, child, fx_of(f)));
    assert_int_equal(f->t.fx.n_patches, 0);

    uint32_t shared = b.block_table[1];
    assert_true(kv_append_copies(f->kv, child, 6, 1));
    assert_status(f->kv, ATTN_OK, kv_append_reserve(f->kv, child, 0, 6, 1, fx_of(f)));
    assert_int_equal(f->t.fx.n_copies, 1);
    assert_int_equal(f->t.copies[0].src, shared);
    assert_int_equal(f->t.copies[0].dst, b.block_table[1]);
    assert_int_not_equal(b.block_table[1], shared);
    assert_int_equal(a.block_table[1], shared);
    assert_int_equal(f->t.fx.n_patches, 1);
    assert_int_equal(f->t.patches[0].block, b.block_table[1]);
    assert_true(has_pending_copy(f->kv, child));
    assert_false(has_pending_copy(f->kv, src));
    kv_append_commit(f->kv, child, 0, 6, 1);
    assert_false(has_pending_copy(f->kv, child));
    assert_int_equal(stats_of(f).blocks_shared, 1);
    assert_int_equal(stats_of(f).blocks_used, 4);
    assert_false(kv_append_copies(f->kv, child, 7, 1));
    assert_false(kv_append_copies(f->kv, src, 6, 1));
    assert_int_equal(stats_of(f).copies, 1);
}

static void a_cancelled_copy_brings_the_shared_block_back(void **state)
{
    struct fixture *f = *state;
    kv_seq_id src, child = fork_at(f, &src, 9);
    assert_status(f->kv, ATTN_OK, kv_seq_materialize(f->kv, child, fx_of(f)));
    struct kv_seq_info b = info_of(f, child);
    uint32_t before[3];
    memcpy(before, b.block_table, sizeof before);
    assert_status(f->kv, ATTN_OK, kv_append_reserve(f->kv, child, 1, 2, 8, fx_of(f)));
    assert_int_equal(f->t.fx.n_copies, 3);
    struct kv_effects *fx = fx_of(f);
    fx->patches_capacity = 2;
    assert_status(f->kv, ATTN_EOVERLOAD, kv_append_cancel(f->kv, child, 1, 2, 8, fx));
    assert_true(has_pending_copy(f->kv, child));
    assert_status(f->kv, ATTN_OK, kv_append_cancel(f->kv, child, 1, 2, 8, fx_of(f)));
    assert_int_equal(f->t.fx.n_patches, 3);
    for (uint32_t i = 0; i < 3; i++) {
        assert_int_equal(f->t.patches[i].block, before[f->t.patches[i].index]);
        assert_int_equal(b.block_table[i], before[i]);
    }
    assert_int_equal(stats_of(f).blocks_used, 3);
    assert_int_equal(stats_of(f).blocks_shared, 3);
}

static void a_copy_is_alone_on_its_sequence(void **state)
{
    struct fixture *f = *state;
    kv_seq_id src, child = fork_at(f, &src, 8), other;
    /* In place (a new block), so two may be outstanding; a copy must wait for both. */
    assert_status(f->kv, ATTN_OK, kv_append_reserve(f->kv, child, 0, 8, 1, fx_of(f)));
    assert_status(f->kv, ATTN_OK, kv_append_reserve(f->kv, child, 1, 8, 1, fx_of(f)));
    assert_status(f->kv, ATTN_EOVERLOAD, kv_append_reserve(f->kv, child, 0, 7, 1, fx_of(f)));
    assert_says(f->kv, "1 copies wait for 2 appends");
    assert_status(f->kv, ATTN_EOVERLOAD, truncate_to(f, child, 8));
    kv_append_commit(f->kv, child, 0, 8, 1);
    kv_append_commit(f->kv, child, 1, 8, 1);
    assert_status(f->kv, ATTN_OK, kv_append_reserve(f->kv, child, 0, 7, 1, fx_of(f)));
    assert_status(f->kv, ATTN_EOVERLOAD, kv_append_reserve(f->kv, child, 1, 9, 1, fx_of(f)));
    assert_says(f->kv, "a copy is pending");
    assert_status(f->kv, ATTN_EOVERLOAD,
                  kv_seq_fork(f->kv, child, 5, 4, OWNER, KV_NO_REQUEST, &other));
    assert_status(f->kv, ATTN_EOVERLOAD, truncate_to(f, child, 4));
    kv_append_commit(f->kv, child, 0, 7, 1);
}

static void closing_with_a_copy_pending_lets_go_of_both_blocks(void **state)
{
    struct fixture *f = *state;
    kv_seq_id src, child = fork_at(f, &src, 6);
    assert_status(f->kv, ATTN_OK, kv_append_reserve(f->kv, child, 0, 6, 1, fx_of(f)));
    assert_int_equal(stats_of(f).blocks_used, 4);
    kv_seq_close(f->kv, child);
    assert_int_equal(stats_of(f).blocks_used, 3);
    assert_int_equal(stats_of(f).blocks_shared, 0);
    test_check(f->kv);
    kv_seq_close(f->kv, src);
    assert_int_equal(stats_of(f).blocks_used, 0);
}

static void a_full_journal_refuses_the_copy(void **state)
{
    struct fixture *f = *state;
    /* The journal has room for one copy a sequence and one whole row: 8 + 16. */
    kv_pool_id big = test_pool(f->kv, "big", 1, 4, 52);
    kv_seq_id src, a, b;
    assert_status(f->kv, ATTN_OK, kv_seq_open(f->kv, TENANT, 0, big, OWNER, KV_NO_REQUEST, &src));
    append(f, src, 0, 0, 64);
    assert_status(f->kv, ATTN_OK, kv_seq_fork(f->kv, src, 1, 64, OWNER, KV_NO_REQUEST, &a));
    assert_status(f->kv, ATTN_OK, kv_seq_fork(f->kv, src, 2, 64, OWNER, KV_NO_REQUEST, &b));
    assert_status(f->kv, ATTN_OK, kv_append_reserve(f->kv, a, 0, 0, 64, fx_of(f)));
    assert_int_equal(f->t.fx.n_copies, 16);
    assert_status(f->kv, ATTN_EOVERLOAD, kv_append_reserve(f->kv, b, 0, 0, 36, fx_of(f)));
    assert_says(f->kv, "needs 9 copies, the journal has 8");
    assert_status(f->kv, ATTN_OK, kv_append_reserve(f->kv, b, 0, 0, 32, fx_of(f)));
    assert_status(f->kv, ATTN_OK, kv_append_cancel(f->kv, a, 0, 0, 64, fx_of(f)));
    kv_append_commit(f->kv, b, 0, 0, 32);
}

/* The source of forks of 6, 8 and 3 tokens, one of them a fork of a fork, with ids. */
static kv_seq_id fork_family(struct fixture *f, kv_seq_id fork[3])
{
    static const uint32_t len[3] = {6, 8, 3};
    uint32_t ids[10];
    for (uint32_t i = 0; i < 10; i++)
        ids[i] = 1000 + i;
    kv_seq_id src = open_seq(f, NAME);
    append_all(f, src, 0, 10);
    assert_status(f->kv, ATTN_OK, kv_seq_tokens(f->kv, src, 0, ids, 7));
    for (uint32_t i = 0; i < 3; i++)
        assert_status(f->kv, ATTN_OK,
                      kv_seq_fork(f->kv, i == 2 ? fork[0] : src, NAME + 1 + i, len[i], OWNER,
                                  ++f->request, &fork[i]));
    assert_status(f->kv, ATTN_OK, kv_seq_tokens(f->kv, src, 7, ids + 7, 3));
    for (uint32_t i = 0; i < 3; i++)
        assert_false(info_of(f, fork[i]).is_notified);
    return src;
}

static void assert_family(struct fixture *f, const kv_seq_id fork[3], const uint32_t *row)
{
    static const uint32_t len[3] = {6, 8, 3}, n_ids[3] = {6, 7, 3};
    test_check(f->kv);
    for (uint32_t i = 0; i < 3; i++) {
        struct kv_seq_info info = info_of(f, fork[i]);
        assert_int_equal(info.layer_len[1], len[i]);
        assert_int_equal(info.n_ids, n_ids[i]);
        assert_memory_equal(info.block_table, row, info.n_blocks * sizeof row[0]);
        for (uint32_t k = 0; k < n_ids[i]; k++)
            assert_int_equal(kv_seq_ids(f->kv, fork[i])[k], 1000 + k);
    }
}

static void forks_outlive_what_their_source_becomes(void **state)
{
    for (uint32_t what = 0; what < 4; what++) {
        struct fixture *f;
        setup((void **)&f);
        kv_seq_id fork[3], src = fork_family(f, fork);
        uint32_t row[3], other[4] = {1, 2, 3, 4};
        memcpy(row, info_of(f, src).block_table, sizeof row);
        if (what == 0) /* it writes where they read */
            append(f, src, 0, 2, 3);
        if (what == 1) { /* other tokens follow */
            assert_status(f->kv, ATTN_OK, truncate_to(f, src, 4));
            assert_status(f->kv, ATTN_OK, kv_seq_tokens(f->kv, src, 4, other, 4));
            append_all(f, src, 4, 4);
        }
        if (what == 2)
            kv_seq_close(f->kv, src);
        if (what == 3) { /* it writes behind them: they go on to read it */
            append_all(f, src, 10, 3);
            assert_ptr_equal(info_of(f, fork[1]).block_table, info_of(f, src).block_table);
        }
        assert_family(f, fork, row);
        if (what == 2) { /* and what their first reader becomes, and the process */
            uint32_t n_dropped;
            kv_seq_close(f->kv, fork[1]);
            assert_status(f->kv, ATTN_OK, kv_recover(f->kv, &n_dropped));
            assert_int_equal(n_dropped, 0);
            assert_memory_equal(info_of(f, fork[0]).block_table, row, 2 * sizeof row[0]);
            append(f, fork[2], 0, 3, 4);
            assert_int_equal(info_of(f, fork[0]).layer_len[0], 6);
        }
        teardown((void **)&f);
    }
    (void)state;
}

static void a_fork_repeated_gives_the_same_sequence(void **state)
{
    struct fixture *f = *state;
    kv_seq_id src, child = fork_at(f, &src, 6), again = {99};
    for (uint32_t n = 0; n < 2; n++) { /* as it was made, then longer */
        again.index = 99;
        assert_status(f->kv, ATTN_OK, kv_seq_fork(f->kv, src, NAME + 1, 6, OWNER + 1, 5, &again));
        assert_int_equal(again.index, child.index);
        append(f, child, 0, 6 + n, 1);
    }
    assert_status(f->kv, ATTN_EEXIST, kv_seq_fork(f->kv, src, NAME + 1, 6, OWNER + 1, 6, &again));
    kv_seq_close(f->kv, child);
    assert_status(f->kv, ATTN_ESTALE, kv_seq_fork(f->kv, src, NAME + 1, 6, OWNER + 1, 5, &again));
}

static void a_fork_past_a_layers_end_is_refused_with_both_numbers(void **state)
{
    struct fixture *f = *state;
    kv_seq_id src = open_seq(f, NAME), child;
    append(f, src, 0, 0, 10);
    append(f, src, 1, 0, 7);
    assert_status(f->kv, ATTN_EINVAL, kv_seq_fork(f->kv, src, 1, 8, OWNER, 6, &child));
    assert_says(f->kv, "fork at 8, layer 1 has 7 tokens");
    assert_status(f->kv, ATTN_OK, kv_seq_fork(f->kv, src, 1, 7, OWNER, 7, &child));
    assert_status(f->kv, ATTN_OK, kv_seq_fork(f->kv, src, 3, 0, OWNER, 8, &child));
    assert_int_equal(info_of(f, child).n_blocks, 0);
}

static void truncate_cuts_every_layer_and_releases_blocks(void **state)
{
    struct fixture *f = *state;
    kv_seq_id seq = open_seq(f, NAME);
    append(f, seq, 0, 0, 10);
    append(f, seq, 1, 0, 3);
    assert_status(f->kv, ATTN_EINVAL, truncate_to(f, seq, 11));
    assert_says(f->kv, "len is 11, its longest layer has 10");
    assert_status(f->kv, ATTN_OK, truncate_to(f, seq, 5));
    assert_int_equal(info_of(f, seq).layer_len[0], 5);
    assert_int_equal(info_of(f, seq).layer_len[1], 3);
    assert_int_equal(info_of(f, seq).n_blocks, 2);
    assert_status(f->kv, ATTN_OK, truncate_to(f, seq, 0));
    assert_int_equal(stats_of(f).blocks_used, 0);
    assert_int_equal(stats_of(f).truncates, 2);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        T(appends_take_blocks_at_the_first_layer_that_needs_them),
        T(a_gap_is_refused_with_both_numbers),
        T(a_retry_that_overlaps_the_end_is_counted_once),
        T(bad_ranges_are_refused_by_field),
        T(out_of_blocks_changes_nothing),
        T(full_effects_refuse_the_append_and_change_nothing),
        T(cancel_gives_new_blocks_back_unless_another_append_uses_them),
        T(a_commit_that_nobody_reserved_changes_nothing),
        T(fork_shares_blocks_until_first_append),
        T(a_cancelled_copy_brings_the_shared_block_back),
        T(a_copy_is_alone_on_its_sequence),
        T(closing_with_a_copy_pending_lets_go_of_both_blocks),
        T(a_full_journal_refuses_the_copy),
        T(forks_outlive_what_their_source_becomes),
        T(a_fork_repeated_gives_the_same_sequence),
        T(a_fork_past_a_layers_end_is_refused_with_both_numbers),
        T(truncate_cuts_every_layer_and_releases_blocks),
    };
    return cmocka_run_group_tests_name("kv_append", tests, NULL, NULL);
}
