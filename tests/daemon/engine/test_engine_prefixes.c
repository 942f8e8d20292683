/* test_engine_prefixes.c: sequences that are opened with their tokens begin with what the cache has
 * of them. The rig compares every patch with the tables. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "tests/daemon/engine/engine_rig.h"

enum { N_IDS = 5 * RIG_BLOCK_TOKENS };

static struct rig r;
static uint32_t ids[N_IDS], other_ids[N_IDS];

static void ids_make(void)
{
    for (uint32_t i = 0; i < N_IDS; i++) {
        ids[i] = i * 2654435761u;
        other_ids[i] = i < 2 * RIG_BLOCK_TOKENS ? ids[i] : ~ids[i];
    }
}

/* Opens with n of these; returns the tokens that it begins with. */
static uint32_t open_with(uint64_t seq, const uint32_t *id, uint32_t n, uint64_t adapter)
{
    uint64_t request =
        rig_send_open_with(&r, seq, &(struct kv_tokens){.ids = id, .n = n, .adapter = adapter});
    rig_run(&r);
    const Attnd__Reply *reply = rig_answer(&r, request);
    if (reply->status != ATTN_OK)
        fail_msg("open: %s", reply->message);
    for (uint32_t l = 0; l < RIG_LAYERS; l++)
        assert_int_equal(rig_len(&r, seq, l), reply->seq->cached_tokens);
    return reply->seq->cached_tokens;
}

static void append(uint64_t seq, uint32_t pos, uint32_t n)
{
    for (uint32_t l = 0; l < RIG_LAYERS; l++)
        assert_int_equal(rig_item(&r, seq, l, pos, n), ATTN_OK);
}

static void close_seq(uint64_t seq)
{
    assert_int_equal(rig_close_seq(&r, seq, rig_epoch(&r, seq)), ATTN_OK);
}

static struct kv_stats counts(void)
{
    struct kv_stats s;
    kv_stats_read(r.kv, &s);
    return s;
}

static void what_one_has_computed_others_begin_with(void **state)
{
    (void)state;
    rig_open(&r, NULL);
    ids_make();
    assert_int_equal(open_with(1, ids, N_IDS, 0), 0);
    assert_int_equal(open_with(2, ids, N_IDS, 0), 0); /* nobody has computed it */
    for (uint32_t l = 0; l < RIG_LAYERS; l++) {
        assert_int_equal(open_with(100 + l, ids, N_IDS, 0), 0); /* not every layer has it */
        assert_int_equal(rig_item(&r, 1, l, 0, N_IDS), ATTN_OK);
    }
    assert_int_equal(open_with(3, ids, N_IDS, 0), N_IDS - RIG_BLOCK_TOKENS); /* not the last one */
    assert_int_equal(open_with(4, ids, N_IDS - 1, 0), N_IDS - RIG_BLOCK_TOKENS);
    assert_int_equal(open_with(5, ids, RIG_BLOCK_TOKENS, 0), 0);
    assert_int_equal(open_with(6, ids, RIG_BLOCK_TOKENS + 1, 0), RIG_BLOCK_TOKENS);
    assert_int_equal(open_with(7, other_ids, N_IDS, 0), 2 * RIG_BLOCK_TOKENS);
    assert_int_equal(open_with(8, ids + 1, N_IDS - 1, 0), 0);
    assert_int_equal(open_with(9, ids, N_IDS, 77), 0); /* another adapter's */
    assert_int_equal(counts().prefix_hit_tokens,
                     2 * (N_IDS - RIG_BLOCK_TOKENS) + 3 * RIG_BLOCK_TOKENS);

    assert_int_equal(rig_item(&r, 3, 0, N_IDS - RIG_BLOCK_TOKENS + 1, 1), ATTN_EINVAL); /* a gap */
    append(3, N_IDS - RIG_BLOCK_TOKENS, RIG_BLOCK_TOKENS);
    append(7, 2 * RIG_BLOCK_TOKENS, 3 * RIG_BLOCK_TOKENS);
    assert_int_equal(open_with(10, other_ids, N_IDS, 0), N_IDS - RIG_BLOCK_TOKENS);
    rig_close(&r);
}

static void a_repeated_open_has_the_same_answer(void **state)
{
    (void)state;
    rig_open(&r, NULL);
    ids_make();
    open_with(1, ids, N_IDS, 0);
    append(1, 0, N_IDS);
    r.keeps_sent = true;
    uint64_t request = rig_send_open_with(&r, 2, &(struct kv_tokens){.ids = ids, .n = N_IDS});
    r.keeps_sent = false;
    rig_run(&r);
    assert_int_equal(rig_answer(&r, request)->seq->cached_tokens, N_IDS - RIG_BLOCK_TOKENS);
    append(2, N_IDS - RIG_BLOCK_TOKENS, RIG_BLOCK_TOKENS);
    rig_resend(&r, request);
    rig_run(&r);
    assert_int_equal(rig_answer(&r, request)->seq->cached_tokens, N_IDS - RIG_BLOCK_TOKENS);
    assert_int_equal(rig_len(&r, 2, 0), N_IDS);
    rig_close(&r);
}

static void tokens_are_told_as_they_come(void **state)
{
    (void)state;
    rig_open(&r, NULL);
    ids_make();
    assert_int_equal(rig_open_seq(&r, 1), ATTN_OK);
    append(1, 0, N_IDS);
    assert_int_equal(rig_tokens(&r, 1, 1, ids + 1, 1), ATTN_EINVAL); /* a gap */
    assert_int_equal(rig_tokens(&r, 1, 0, ids, 0), ATTN_EINVAL);
    assert_int_equal(rig_tokens(&r, 1, 0, ids, 3), ATTN_OK);
    assert_int_equal(rig_tokens(&r, 1, 0, ids, 3), ATTN_OK); /* again */
    assert_int_equal(rig_tokens(&r, 1, 1, ids, 2), ATTN_EINVAL); /* others */
    assert_int_equal(open_with(2, ids, N_IDS, 0), 0);
    assert_int_equal(rig_tokens(&r, 1, 2, ids + 2, RIG_BLOCK_TOKENS), ATTN_OK);
    assert_int_equal(open_with(3, ids, N_IDS, 0), RIG_BLOCK_TOKENS);

    r.epoch = rig_epoch(&r, 1);
    assert_int_equal(rig_truncate(&r, 1, 2), ATTN_OK); /* its ids, too */
    assert_int_equal(rig_tokens(&r, 1, 2, ids + 2, 1), ATTN_ESTALE);
    r.epoch = 0;
    assert_int_equal(rig_tokens(&r, 1, 3, ids + 3, 1), ATTN_EINVAL);
    assert_int_equal(rig_tokens(&r, 1, 2, other_ids + N_IDS - 1, 1), ATTN_OK);
    append(1, 2, 1); /* into a block that others have */
    assert_int_equal(open_with(4, ids, N_IDS, 0), RIG_BLOCK_TOKENS);
    rig_close(&r);
}

static void what_is_closed_is_kept_until_blocks_run_out(void **state)
{
    (void)state;
    rig_open(&r, NULL);
    ids_make();
    uint32_t n_blocks = 64, per_seq = N_IDS / RIG_BLOCK_TOKENS;
    uint32_t name = 1;
    for (uint32_t n = 0; n + per_seq <= n_blocks; n += per_seq, name++) {
        ids[0] = name; /* so that no two have anything in common */
        assert_int_equal(open_with(name, ids, N_IDS, 0), 0);
        append(name, 0, N_IDS);
        close_seq(name);
        assert_int_equal(counts().blocks_used, 0);
        assert_int_equal(counts().blocks_cached, n + per_seq);
    }
    ids[0] = 1; /* used now, so that the second one is the oldest */
    assert_int_equal(open_with(100, ids, N_IDS, 0), N_IDS - RIG_BLOCK_TOKENS);
    close_seq(100);
    assert_int_equal(rig_open_seq(&r, 101), ATTN_OK);
    append(101, 0, 2 * per_seq * RIG_BLOCK_TOKENS);
    assert_int_equal(counts().evictions, 2 * per_seq - n_blocks % per_seq);
    ids[0] = 2;
    assert_int_equal(open_with(102, ids, N_IDS, 0), 0);
    ids[0] = 1;
    assert_int_equal(open_with(103, ids, N_IDS, 0), N_IDS - RIG_BLOCK_TOKENS);

    /* out of blocks is when nothing may go any more */
    uint32_t left = n_blocks - (uint32_t)counts().blocks_used;
    assert_int_equal(rig_open_seq(&r, 104), ATTN_OK);
    for (uint32_t i = 0; i < left; i++)
        assert_int_equal(rig_item(&r, 104, 0, i * RIG_BLOCK_TOKENS, RIG_BLOCK_TOKENS), ATTN_OK);
    assert_int_equal(counts().blocks_cached, 0);
    assert_int_equal(rig_item(&r, 104, 0, left * RIG_BLOCK_TOKENS, 1), ATTN_ENOBLOCKS);
    rig_close(&r);
}

static void a_successor_has_what_was_kept(void **state)
{
    (void)state;
    rig_open(&r, NULL);
    ids_make();
    open_with(1, ids, N_IDS, 0);
    append(1, 0, N_IDS);
    close_seq(1);
    rig_succeed(&r, NULL);
    assert_int_equal(open_with(2, ids, N_IDS, 0), N_IDS - RIG_BLOCK_TOKENS);
    append(2, N_IDS - RIG_BLOCK_TOKENS, RIG_BLOCK_TOKENS);
    rig_close(&r);
}

static void with_host_memory(struct rig *rig)
{
    rig->cfg.host_memory_bytes = 1 << 20;
}

/* Prompt i, computed or taken from the cache, and closed; what it began with. */
static uint32_t run_prompt(uint32_t i)
{
    static uint64_t name = 1000;
    ids[0] = i; /* so that no two have anything in common */
    uint32_t n = open_with(++name, ids, N_IDS, 0);
    append(name, n, N_IDS - n);
    close_seq(name);
    assert_int_equal(kv_check(r.kv), ATTN_OK);
    return n;
}

static void what_is_evicted_comes_back(void **state)
{
    enum { N = 20, ALL = N_IDS - RIG_BLOCK_TOKENS };
    (void)state;
    rig_open(&r, with_host_memory);
    ids_make();
    for (uint32_t i = 0; i < N; i++) /* 5 blocks each, of 64 */
        assert_int_equal(run_prompt(i), 0);
    assert_true(counts().evictions > 0);
    assert_int_equal(r.backend.n_written, 0);
    assert_int_equal(run_prompt(0), ALL);
    assert_int_equal(r.backend.n_written, ALL / RIG_BLOCK_TOKENS);
    assert_true(stats.host_in_bytes > 0);
    assert_int_equal(stats.host_in_bytes % r.backend.n_written, 0);
    assert_int_equal(stats.host_out_bytes % (stats.host_in_bytes / r.backend.n_written), 0);

    r.backend.fail_write = ATTN_EINTERNAL; /* then it is computed */
    uint32_t n_before = r.backend.n_written;
    for (uint32_t i = 2; run_prompt(i) != 0; i++)
        assert_true(i < N);
    assert_true(r.backend.n_written > n_before);
    r.backend.fail_write = ATTN_OK;
    r.backend.fail_read = ATTN_EINTERNAL; /* nothing new goes there */
    uint64_t n_out = stats.host_out_bytes;
    for (uint32_t i = 0; i < N; i++)
        run_prompt(100 + i);
    assert_int_equal(stats.host_out_bytes, n_out);
    assert_int_equal(run_prompt(100), 0);
    rig_close(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_one_has_computed_others_begin_with),
        cmocka_unit_test(a_repeated_open_has_the_same_answer),
        cmocka_unit_test(tokens_are_told_as_they_come),
        cmocka_unit_test(what_is_closed_is_kept_until_blocks_run_out),
        cmocka_unit_test(a_successor_has_what_was_kept),
        cmocka_unit_test(what_is_evicted_comes_back),
    };
    return cmocka_run_group_tests_name("engine_prefixes", tests, NULL, NULL);
}
