/* test_kv_idle.c: tests idle memory: which blocks may move out, that no page has two owners, and
 * what a successor makes of them with and without that memory. */
#define _GNU_SOURCE
#include "tests/cache/kv_test.h"

#include "cache/kv_internal.h"
#include "tests/random.h"

#include <sys/mman.h>
#include <unistd.h>

#define TOKENS 4 /* of a block */

static struct kv_config config = {.max_pools = 2,
                                  .max_blocks = 64,
                                  .max_sequences = 16,
                                  .max_seq_blocks = 16,
                                  .max_seq_tokens = 64,
                                  .max_layers = 2,
                                  .max_block_tokens = TOKENS,
                                  .max_owners = 2,
                                  .block_layout = 1,
                                  .idle_pages = 200};

static kv_pool_id pool_of(struct kv *kv, const char *name, uint32_t n_blocks, uint32_t idle_pages)
{
    struct kv_pool_spec s = {
        .n_layers = 1, .n_blocks = n_blocks, .block_tokens = TOKENS, .idle_pages = idle_pages};
    kv_pool_id pool;
    snprintf(s.name, sizeof s.name, "%s", name);
    assert_status(kv, ATTN_OK, kv_pool_create(kv, &s, &pool));
    return pool;
}

static kv_seq_id seq_of(struct kv *kv, uint64_t name, kv_pool_id pool, uint32_t n_blocks)
{
    struct test_fx t;
    kv_seq_id seq;
    struct kv_tokens none = {0};
    test_fx_reset(&t);
    assert_status(
        kv, ATTN_OK,
        kv_seq_open_with(kv, 0, name, pool, KV_NO_OWNER, KV_NO_REQUEST, &none, &t.fx, &seq));
    assert_status(kv, ATTN_OK, kv_append_reserve(kv, seq, 0, 0, n_blocks * TOKENS, &t.fx));
    kv_append_commit(kv, seq, 0, 0, n_blocks * TOKENS);
    return seq;
}

static uint32_t out(struct kv *kv, kv_seq_id seq, uint32_t n)
{
    struct kv_idle_move *m = kv_idle_out_begin(kv, seq, NULL, n);
    for (uint32_t i = 0; m != NULL && i < m->n; i++)
        m->entries[i].is_good = true;
    assert_status(kv, ATTN_OK, kv_check(kv));
    uint32_t went = m == NULL ? 0 : kv_idle_out_end(kv, m);
    assert_status(kv, ATTN_OK, kv_check(kv));
    return went;
}

static uint32_t in(struct kv *kv, kv_seq_id seq, uint32_t n)
{
    struct test_fx t;
    struct kv_idle_move *m = kv_idle_in_begin(kv, seq, NULL, n);
    test_fx_reset(&t);
    for (uint32_t i = 0; m != NULL && i < m->n; i++)
        m->entries[i].is_good = true;
    uint32_t came = m == NULL ? 0 : kv_idle_in_end(kv, m, &t.fx);
    assert_status(kv, ATTN_OK, kv_check(kv));
    assert_int_equal(t.fx.n_patches, came);
    return came;
}

static void blocks_that_went_make_room_and_must_be_back_before_a_fork(void **state)
{
    (void)state;
    struct kv *kv = test_kv_open(&config, -1);
    struct test_fx t;
    kv_pool_id pool = pool_of(kv, "a", 8, 3);
    kv_seq_id a = seq_of(kv, 1, pool, 6), fork;
    struct kv_seq_info info;
    test_fx_reset(&t);
    assert_int_equal(kv_idle_movable(kv, a), 6);
    assert_int_equal(out(kv, a, 5), 5);
    kv_seq_info(kv, a, &info);
    assert_int_equal(info.n_paged_out, 5);
    assert_false(kv_is_place(info.block_table[0])); /* the first one stays longest */
    assert_int_equal(kv_idle_pool_paged_out(kv, pool), 5);
    assert_status(kv, ATTN_EOVERLOAD, kv_append_reserve(kv, a, 0, 20, 1, &t.fx));
    assert_status(kv, ATTN_EOVERLOAD, kv_seq_fork(kv, a, 2, 24, KV_NO_OWNER, KV_NO_REQUEST, &fork));
    struct kv_seq_export d;
    assert_status(kv, ATTN_EOVERLOAD, kv_seq_export_read(kv, a, &d));
    kv_seq_id b = seq_of(kv, 3, pool, 7); /* in their place */
    assert_int_equal(in(kv, a, 16), 0);
    kv_seq_close(kv, b);
    assert_int_equal(in(kv, a, 2), 2);
    assert_int_equal(in(kv, a, 16), 3);
    assert_status(kv, ATTN_OK, kv_append_reserve(kv, a, 0, 24, 1, &t.fx));
    assert_int_equal(kv_idle_movable(kv, a), 0); /* something is in work */
    kv_append_commit(kv, a, 0, 24, 1);
    kv_close(kv);
}

/* Begins a move of these entries. */
static struct kv_idle_move *begin(struct kv *kv, kv_seq_id seq, bool is_in, uint32_t n,
                                  const uint32_t *indices)
{
    struct kv_idle_move *m =
        is_in ? kv_idle_in_begin(kv, seq, indices, n) : kv_idle_out_begin(kv, seq, indices, n);
    for (uint32_t i = 0; m != NULL && i < m->n; i++)
        m->entries[i].is_good = true;
    assert_status(kv, ATTN_OK, kv_check(kv));
    return m;
}

static bool is_out(const struct kv *kv, kv_seq_id seq, uint32_t index)
{
    return kv_is_place(kv_own_row(kv, seq.index)[index]);
}

static void an_append_needs_the_blocks_that_it_writes(void **state)
{
    (void)state;
    struct kv *kv = test_kv_open(&config, -1);
    struct test_fx t;
    struct kv_seq_info info;
    kv_pool_id pool = pool_of(kv, "a", 8, 2);
    kv_seq_id a = seq_of(kv, 1, pool, 6);
    uint32_t epoch;
    test_fx_reset(&t);
    /* in this order, what is named twice or not there only once or not at all */
    struct kv_idle_move *m = begin(kv, a, false, 6, (const uint32_t[]){4, 1, 1, 99, 3, 4});
    assert_int_equal(m->n, 3);
    assert_int_equal(m->entries[0].index, 4);
    assert_int_equal(m->entries[1].index, 1);
    assert_int_equal(kv_idle_out_end(kv, m), 3);
    assert_true(is_out(kv, a, 1) && !is_out(kv, a, 2) && is_out(kv, a, 3) && is_out(kv, a, 4));
    for (uint32_t i = 24; i < 40; i++) { /* behind them, and again what is there */
        assert_status(kv, ATTN_OK, kv_append_reserve(kv, a, 0, i, 1, &t.fx));
        assert_status(kv, ATTN_OK, kv_check(kv));
        kv_append_commit(kv, a, 0, i, 1);
        assert_status(kv, ATTN_OK, kv_check(kv));
    }
    assert_status(kv, ATTN_OK, kv_append_reserve(kv, a, 0, 9, 2, &t.fx));
    kv_append_commit(kv, a, 0, 9, 2);
    assert_status(kv, ATTN_EOVERLOAD, kv_append_reserve(kv, a, 0, 9, 4, &t.fx)); /* the next, too */
    assert_status(kv, ATTN_EOVERLOAD, kv_append_reserve(kv, a, 0, 5, 1, &t.fx));
    m = begin(kv, a, true, 4, (const uint32_t[]){2, 3, 3, 0});
    assert_int_equal(m->n, 1);
    assert_status(kv, ATTN_EOVERLOAD, kv_append_reserve(kv, a, 0, 12, 1, &t.fx)); /* on its way */
    assert_int_equal(kv_idle_in_end(kv, m, &t.fx), 1);
    assert_status(kv, ATTN_OK, kv_append_reserve(kv, a, 0, 12, 1, &t.fx));
    kv_append_commit(kv, a, 0, 12, 1);
    assert_status(kv, ATTN_OK, kv_seq_truncate(kv, a, 18, KV_NO_REQUEST, &epoch)); /* in block 4 */
    assert_status(kv, ATTN_EOVERLOAD, kv_append_reserve(kv, a, 0, 18, 1, &t.fx));
    assert_status(kv, ATTN_OK, kv_seq_truncate(kv, a, 16, KV_NO_REQUEST, &epoch));
    assert_status(kv, ATTN_OK, kv_append_reserve(kv, a, 0, 16, 1, &t.fx));
    kv_append_commit(kv, a, 0, 16, 1);
    kv_seq_info(kv, a, &info);
    assert_int_equal(info.n_paged_out, 1);
    assert_status(kv, ATTN_OK, kv_check(kv));
    kv_seq_close(kv, a);
    assert_status(kv, ATTN_OK, kv_check(kv));
    assert_int_equal(kv->pages.n_used, 0);
    kv_close(kv);
}

static void an_append_beside_a_move_out_keeps_what_it_writes(void **state)
{
    (void)state;
    struct kv *kv = test_kv_open(&config, -1);
    kv_pool_id pool = pool_of(kv, "a", 12, 2);
    kv_seq_id a = seq_of(kv, 1, pool, 6);
    for (uint32_t pass = 0; pass < 3; pass++) { /* in flight, committed and cancelled at the end */
        struct test_fx t;
        test_fx_reset(&t);
        struct kv_idle_move *m = begin(kv, a, false, 3, (const uint32_t[]){2, 3, 4});
        assert_int_equal(m->n, 3);
        assert_status(kv, ATTN_OK, kv_append_reserve(kv, a, 0, 14, 1, &t.fx));
        assert_int_equal(t.fx.n_copies, 1); /* the move refers to it */
        if (pass == 1)
            kv_append_commit(kv, a, 0, 14, 1);
        if (pass == 2)
            assert_status(kv, ATTN_OK, kv_append_cancel(kv, a, 0, 14, 1, &t.fx));
        assert_null(kv_idle_out_begin(kv, a, NULL, 1));
        /* what was put back is as it was when the move began */
        assert_int_equal(kv_idle_out_end(kv, m), pass == 2 ? 3 : 2);
        assert_status(kv, ATTN_OK, kv_check(kv));
        assert_true(is_out(kv, a, 2) && is_out(kv, a, 3) == (pass == 2) && is_out(kv, a, 4));
        if (pass == 0) {
            assert_int_equal(kv_idle_movable(kv, a), 0); /* an append is outstanding */
            kv_append_commit(kv, a, 0, 14, 1);
        }
        uint32_t n_dropped;
        assert_status(kv, ATTN_OK, kv_recover(kv, &n_dropped));
        assert_int_equal(n_dropped, 0);
        assert_int_equal(kv_idle_n_paged_out(kv, a), pass == 2 ? 3 : 2);
        assert_int_equal(in(kv, a, 16), pass == 2 ? 3 : 2);
    }
    kv_close(kv);
}

static uint32_t n_published(const struct kv *kv)
{
    struct kv_stats s;
    kv_stats_read(kv, &s);
    return (uint32_t)s.blocks_published;
}

static void nothing_is_published_behind_a_block_that_is_out(void **state)
{
    (void)state;
    struct kv *kv = test_kv_open(&config, -1);
    struct test_fx t;
    kv_pool_id pool = pool_of(kv, "a", 16, 2);
    uint32_t ids[40];
    for (uint32_t i = 0; i < 40; i++)
        ids[i] = i;
    kv_seq_id a = seq_of(kv, 1, pool, 5);
    assert_status(kv, ATTN_OK, kv_seq_tokens(kv, a, 0, ids, 40));
    assert_int_equal(n_published(kv), 5);
    assert_int_equal(kv_idle_out_end(kv, begin(kv, a, false, 1, (const uint32_t[]){2})), 1);
    assert_int_equal(n_published(kv), 4);
    test_fx_reset(&t);
    assert_status(kv, ATTN_OK, kv_append_reserve(kv, a, 0, 20, 8, &t.fx));
    kv_append_commit(kv, a, 0, 20, 8);
    assert_status(kv, ATTN_OK, kv_check(kv));
    assert_int_equal(n_published(kv), 4);
    assert_int_equal(in(kv, a, 1), 1);
    test_fx_reset(&t);
    assert_status(kv, ATTN_OK, kv_append_reserve(kv, a, 0, 28, 4, &t.fx));
    kv_append_commit(kv, a, 0, 28, 4);
    assert_int_equal(n_published(kv), 8);
    assert_status(kv, ATTN_OK, kv_check(kv));
    kv_close(kv);
}

static void what_others_read_stays(void **state)
{
    (void)state;
    struct kv *kv = test_kv_open(&config, -1);
    struct test_fx t;
    kv_pool_id pool = pool_of(kv, "a", 16, 1);
    kv_seq_id a = seq_of(kv, 1, pool, 4), f;
    assert_status(kv, ATTN_OK, kv_seq_fork(kv, a, 2, 8, KV_NO_OWNER, KV_NO_REQUEST, &f));
    assert_int_equal(kv_idle_movable(kv, a), 2); /* those that the fork does not read */
    assert_int_equal(kv_idle_movable(kv, f), 0);
    assert_int_equal(out(kv, a, 16), 2);
    kv_seq_close(kv, a); /* the fork has them alone now */
    assert_int_equal(in(kv, f, 16), 0);
    a = seq_of(kv, 1, pool, 4);
    kv_seq_close(kv, f);
    assert_status(kv, ATTN_OK, kv_seq_fork(kv, a, 2, 8, KV_NO_OWNER, KV_NO_REQUEST, &f));
    test_fx_reset(&t);
    assert_status(kv, ATTN_OK, kv_seq_materialize(kv, f, &t.fx));
    assert_int_equal(kv_idle_movable(kv, a), 2); /* those that the fork has not */
    assert_int_equal(kv_idle_movable(kv, f), 0);
    assert_int_equal(out(kv, a, 16), 2);
    kv_seq_close(kv, f);
    assert_int_equal(out(kv, a, 16), 2);

    /* a fork that comes while they are on their way keeps them */
    assert_int_equal(in(kv, a, 16), 4);
    struct kv_idle_move *m = kv_idle_out_begin(kv, a, NULL, 16);
    assert_non_null(m);
    assert_status(kv, ATTN_OK, kv_seq_fork(kv, a, 2, 8, KV_NO_OWNER, KV_NO_REQUEST, &f));
    for (uint32_t i = 0; i < m->n; i++)
        m->entries[i].is_good = true;
    assert_int_equal(kv_idle_out_end(kv, m), 2); /* not what it reads */
    assert_status(kv, ATTN_OK, kv_check(kv));
    kv_close(kv);
}

static void pools_with_blocks_of_many_sizes_share_the_pages(void **state)
{
    (void)state;
    struct kv *kv = test_kv_open(&config, -1);
    kv_pool_id pool[2] = {pool_of(kv, "a", 32, 3), pool_of(kv, "b", 32, 7)};
    kv_seq_id seqs[8];
    uint64_t seed = 77;
    uint32_t n_went = 0, n_full = 0;
    for (uint32_t i = 0; i < 8; i++)
        seqs[i] = seq_of(kv, i + 1, pool[i % 2], 7);
    for (uint32_t i = 0; i < 4000; i++) {
        uint64_t random = random_mixed(&seed);
        kv_seq_id seq = seqs[random >> 40 & 7];
        uint32_t n = 1 + (random >> 33) % 7, movable = kv_idle_movable(kv, seq);
        if (random >> 50 & 1) {
            in(kv, seq, n);
            continue;
        }
        uint32_t went = out(kv, seq, n);
        n_went += went;
        n_full += went < (movable < n ? movable : n);
    }
    assert_true(n_went > 500 && n_full > 50);
    for (uint32_t i = 0; i < 8; i++)
        kv_seq_close(kv, seqs[i]);
    assert_status(kv, ATTN_OK, kv_check(kv));
    assert_int_equal(kv->pages.n_used, 0);
    kv_close(kv);
}

static void a_pool_with_fewer_blocks_keeps_what_is_paged_out(void **state)
{
    (void)state;
    struct kv *kv = test_kv_open(&config, -1);
    kv_pool_id pool = pool_of(kv, "a", 16, 2);
    kv_seq_id a = seq_of(kv, 1, pool, 8), b = seq_of(kv, 2, pool, 8);
    struct kv_shrink s;
    assert_int_equal(out(kv, a, 6), 6);
    assert_status(kv, ATTN_ENOBLOCKS, kv_pool_shrink_begin(kv, pool, 9, &s));
    struct kv_idle_move *m = kv_idle_in_begin(kv, a, NULL, 1);
    assert_non_null(m);
    assert_status(kv, ATTN_EOVERLOAD, kv_pool_shrink_begin(kv, pool, 10, &s)); /* on its way */
    assert_int_equal(kv_idle_in_end(kv, m, &(struct kv_effects){0}), 0); /* it did not come */
    assert_status(kv, ATTN_OK, kv_pool_shrink_begin(kv, pool, 10, &s));
    kv_pool_shrink_end(kv, &s);
    kv_shrink_fini(&s);
    assert_status(kv, ATTN_OK, kv_check(kv));
    assert_int_equal(kv_idle_n_paged_out(kv, a), 6);
    assert_int_equal(in(kv, a, 16), 0);
    assert_int_equal(out(kv, b, 16), 8);
    assert_int_equal(in(kv, a, 16), 6);
    uint32_t n_dropped;
    assert_status(kv, ATTN_OK, kv_recover(kv, &n_dropped));
    assert_int_equal(n_dropped, 0);
    assert_status(kv, ATTN_OK, kv_check(kv));
    kv_close(kv);
}

static int copy_of(const struct kv *kv)
{
    int fd = memfd_create("copy", MFD_ALLOW_SEALING);
    assert_int_equal(ftruncate(fd, (off_t)kv->bytes), 0);
    assert_int_equal(pwrite(fd, kv->base, kv->bytes, 0), kv->bytes);
    return fd;
}

static void a_successor_without_the_memory_drops_whose_blocks_are_there(void **state)
{
    (void)state;
    struct kv *kv = test_kv_open(&config, -1);
    kv_pool_id pool = pool_of(kv, "a", 16, 2);
    kv_seq_id a = seq_of(kv, 1, pool, 4), found;
    seq_of(kv, 2, pool, 4);
    assert_int_equal(out(kv, a, 1), 1);
    struct kv_config without = config, anew = config, small = config;
    without.idle_pages = 0;
    anew.idle_is_new = 1;
    small.idle_pages = 1;
    const struct {
        const struct kv_config *c;
        uint32_t n_damaged;
    } with[] = {{&config, 0}, {&without, 1}, {&anew, 1}, {&small, 1}};
    for (uint32_t i = 0; i < 4; i++) {
        struct kv_stats s;
        int fd = copy_of(kv);
        struct kv *next = test_kv_open(with[i].c, fd);
        kv_stats_read(next, &s);
        assert_status(next, ATTN_OK, kv_check(next));
        assert_int_equal(s.damaged, with[i].n_damaged);
        assert_int_equal(s.sequences, 2 - with[i].n_damaged);
        assert_int_equal(s.blocks_tiered, 1 - with[i].n_damaged);
        assert_status(next, ATTN_OK, kv_seq_find(next, 0, 2, &found));
        if (i == 2) { /* new memory serves new ones */
            assert_int_equal(out(next, found, 4), 4);
            assert_int_equal(in(next, found, 4), 4);
        }
        kv_close(next);
        close(fd);
    }
    kv_close(kv);
}

static void two_that_claim_a_page_do_not_both_stay(void **state)
{
    (void)state;
    struct kv *kv = test_kv_open(&config, -1);
    kv_pool_id pool = pool_of(kv, "a", 16, 2);
    kv_seq_id a = seq_of(kv, 1, pool, 2), b = seq_of(kv, 2, pool, 2);
    assert_int_equal(out(kv, a, 2), 2);
    assert_int_equal(out(kv, b, 2), 2);
    kv_own_row(kv, b.index)[1] = kv_own_row(kv, a.index)[0] + 1; /* they overlap */
    assert_int_not_equal(kv_check(kv), ATTN_OK);
    uint32_t n_dropped;
    assert_status(kv, ATTN_OK, kv_recover(kv, &n_dropped));
    assert_int_equal(n_dropped, 1);
    assert_status(kv, ATTN_OK, kv_check(kv));
    kv_own_row(kv, a.index)[0] = KV_PLACE | 199; /* ends behind the last page */
    assert_status(kv, ATTN_OK, kv_recover(kv, &n_dropped));
    assert_int_equal(n_dropped, 1);
    assert_status(kv, ATTN_OK, kv_check(kv));
    kv_close(kv);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(blocks_that_went_make_room_and_must_be_back_before_a_fork),
        cmocka_unit_test(an_append_needs_the_blocks_that_it_writes),
        cmocka_unit_test(an_append_beside_a_move_out_keeps_what_it_writes),
        cmocka_unit_test(nothing_is_published_behind_a_block_that_is_out),
        cmocka_unit_test(what_others_read_stays),
        cmocka_unit_test(pools_with_blocks_of_many_sizes_share_the_pages),
        cmocka_unit_test(a_successor_without_the_memory_drops_whose_blocks_are_there),
        cmocka_unit_test(a_pool_with_fewer_blocks_keeps_what_is_paged_out),
        cmocka_unit_test(two_that_claim_a_page_do_not_both_stay),
    };
    return cmocka_run_group_tests_name("kv_idle", tests, NULL, NULL);
}
