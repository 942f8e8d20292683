/* test_engine_restore.c: an engine on a predecessor's arena goes on where that one ended: pools,
 * sequences, sessions, and what it answers to requests that its predecessor has carried out.
 */
#include "cache/kv_owner.h"
#include "cache/kv_seq.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>

#include <cmocka.h>

#include "tests/daemon/engine/engine_rig.h"

#define S 1000000000ull

static struct rig r;

static void open_rig(void)
{
    rig_open(&r, NULL);
    r.keeps_sent = true;
}

/* Appends n tokens to every layer. */
static void append_all(uint64_t seq, uint32_t pos, uint32_t n)
{
    for (uint32_t layer = 0; layer < RIG_LAYERS; layer++)
        assert_int_equal(rig_item(&r, seq, layer, pos, n), ATTN_OK);
}

static void a_successor_keeps_pools_sequences_and_sessions(void **state)
{
    (void)state;
    open_rig();
    rig_make_pool(&r, "second");
    uint64_t other = rig_hello(&r, "other");
    rig_open_many(&r, 1, 2);
    append_all(1, 0, 20);
    assert_int_equal(rig_item(&r, 2, 1, 0, 5), ATTN_OK); /* one layer is ahead of the others */
    assert_int_equal(rig_fork(&r, 1, 3, 17), ATTN_OK);

    struct engine_kept kept = rig_succeed(&r, NULL);
    assert_int_equal(kept.n_pools, 2);
    assert_int_equal(kept.n_sequences, 3);
    assert_int_equal(kept.n_tokens, 20 + 5 + 17);
    assert_int_equal(kept.n_sessions, 2);
    assert_int_equal(kept.n_dropped, 0);

    assert_int_equal(rig_pool(&r, "p", 64), r.pool); /* the same numbers on the wire */
    assert_int_equal(rig_make_pool(&r, "second")->pool->pool, 2);
    assert_int_equal(rig_hello_with(&r, other, NULL)->status, ATTN_OK);
    assert_int_equal(rig_len(&r, 2, 0), 0);
    assert_int_equal(rig_len(&r, 2, 1), 5);
    append_all(1, 20, 1); /* goes on; the last block of the fork is still shared */
    append_all(3, 17, 2);
    assert_int_equal(rig_len(&r, 1, 3), 21);
    assert_int_equal(rig_len(&r, 3, 3), 19);
    assert_int_equal(rig_item(&r, 2, 0, 1, 1), ATTN_EINVAL); /* a gap is still one */
    rig_close(&r);
}

static void the_device_is_told_every_table_entry_before_it_computes(void **state)
{
    (void)state;
    open_rig();
    rig_open_many(&r, 1, 3);
    for (uint64_t seq = 1; seq <= 3; seq++)
        append_all(seq, 0, 3 * RIG_BLOCK_TOKENS);
    rig_succeed(&r, NULL);
    uint32_t n_batches = r.backend.n_batches;
    assert_int_equal(rig_item(&r, 2, 0, 3 * RIG_BLOCK_TOKENS, 1), ATTN_OK);
    assert_int_equal(r.backend.batches[n_batches].n_patches, 9 + 1);
    rig_close(&r);
}

static void attend(uint64_t seq, uint32_t pos)
{
    uint32_t n = 1;
    struct rig_step s = {
        .flags = WIRE_STEP_ATTEND, .n_items = 1, .seq = &seq, .pos = &pos, .n_tokens = &n};
    uint64_t id = rig_send_step(&r, &s);
    rig_run(&r);
    assert_int_equal(rig_answer(&r, id)->status, ATTN_OK);
}

static void a_forks_table_is_told_at_its_first_step(void **state)
{
    (void)state;
    open_rig();
    rig_open_many(&r, 1, 1);
    append_all(1, 0, 3 * RIG_BLOCK_TOKENS);
    uint32_t n_batches = r.backend.n_batches;
    for (uint64_t fork = 2; fork <= 4; fork++)
        assert_int_equal(rig_fork(&r, 1, fork, 2 * RIG_BLOCK_TOKENS), ATTN_OK);
    assert_int_equal(r.backend.n_batches, n_batches);
    attend(2, 5);
    assert_int_equal(r.backend.batches[n_batches].n_patches, 2);
    assert_int_equal(rig_close_seq(&r, 1, rig_epoch(&r, 1)), ATTN_OK);
    assert_int_equal(rig_item(&r, 3, 0, 2 * RIG_BLOCK_TOKENS, 1), ATTN_OK);
    assert_int_equal(r.backend.batches[n_batches + 1].n_patches, 2 + 1);
    rig_succeed(&r, NULL);
    n_batches = r.backend.n_batches;
    attend(4, 5);
    assert_int_equal(r.backend.batches[n_batches].n_patches, 2 + 3 + 2);
    attend(4, 6);
    assert_int_equal(r.backend.batches[n_batches + 1].n_patches, 0);
    rig_close(&r);
}

/* The device applies a batch's patches in any order. */
static void patches_of_one_entry_agree(void **state)
{
    (void)state;
    open_rig();
    rig_open_many(&r, 1, 1);
    append_all(1, 0, 2 * RIG_BLOCK_TOKENS);
    rig_send_fork(&r, 1, 2); /* its entries go with the batch that replaces one of them */
    rig_run(&r);
    assert_int_equal(rig_item(&r, 2, 0, RIG_BLOCK_TOKENS + 1, 2), ATTN_OK);
    rig_succeed(&r, NULL);
    assert_int_equal(rig_truncate(&r, 1, 3), ATTN_OK); /* before the device is told anything */
    rig_open_many(&r, 3, 1);
    rig_send_item(&r, 3, 0, 0, RIG_BLOCK_TOKENS + 1); /* takes the blocks */
    rig_send_item(&r, 1, 0, 3, 2 * RIG_BLOCK_TOKENS);
    rig_run(&r);
    rig_close(&r);
}

static void what_the_predecessor_carried_out_is_not_carried_out_again(void **state)
{
    (void)state;
    open_rig();
    uint64_t opened = rig_send_open(&r, 1);
    rig_run(&r);
    append_all(1, 0, 12);
    uint64_t forked = rig_send_fork(&r, 1, 2);
    rig_run(&r);
    uint64_t truncated = rig_send_truncate(&r, 1, 4);
    rig_run(&r);
    append_all(1, 4, 2);
    uint64_t closed = rig_send_close(&r, 2);
    rig_run(&r);
    uint32_t epoch = rig_epoch(&r, 1);

    rig_succeed(&r, NULL);
    const uint64_t ids[] = {opened, forked, truncated, closed};
    for (size_t i = 0; i < sizeof ids / sizeof ids[0]; i++) {
        rig_resend(&r, ids[i]);
        rig_run(&r);
    }
    kv_seq_id seq;
    /* not born again */
    assert_int_equal(kv_seq_find(r.kv, TENANT_OPERATOR, 2, &seq), ATTN_ENOTFOUND);
    assert_int_equal(rig_epoch(&r, 1), epoch);
    assert_int_equal(rig_len(&r, 1, 0), 6);
    assert_int_equal(rig_open_seq(&r, 1), ATTN_EEXIST); /* another request, however */
    rig_close(&r);
}

static void leases_begin_anew(void **state)
{
    (void)state;
    open_rig();
    rig_open_many(&r, 1, 1);
    rig_now_ns += 29 * S;
    rig_succeed(&r, NULL);
    rig_now_ns += 29 * S;
    rig_run(&r);
    assert_int_equal(rig_item(&r, 1, 0, 0, 1), ATTN_OK);
    rig_succeed(&r, NULL);
    rig_now_ns += 31 * S;
    rig_run(&r);
    assert_int_equal(rig_item(&r, 1, 0, 1, 1), ATTN_ENOTFOUND);
    assert_int_equal(stats_get(leases_expired), 1);
    rig_close(&r);
}

static void end_first_session(struct rig *rig)
{
    uint32_t slot;
    assert_int_equal(session_find(rig->sessions, rig->session, &slot), ATTN_OK);
    kv_owner_end(rig->kv, slot); /* a lease has ended, and the process with it */
}

static void sequences_of_a_session_that_ended_are_freed(void **state)
{
    (void)state;
    open_rig();
    uint64_t first = r.session;
    rig_open_many(&r, 1, 5);
    append_all(1, 0, 12);
    struct engine_kept kept = rig_succeed(&r, end_first_session);
    assert_int_equal(kept.n_sessions, 0);
    rig_run(&r);
    struct kv_stats s;
    kv_stats_read(r.kv, &s);
    assert_int_equal(s.sequences, 0);
    assert_int_equal(s.blocks_used, 0);
    r.session = rig_hello(&r, "next");
    assert_true(r.session != first);
    rig_open_many(&r, 1, 1);
    rig_close(&r);
}

static void an_expired_session_is_unknown_to_the_successor(void **state)
{
    (void)state;
    open_rig();
    uint64_t first = r.session;
    rig_now_ns += 31 * S;
    rig_run(&r);
    struct engine_kept kept = rig_succeed(&r, NULL);
    assert_int_equal(kept.n_sessions, 0);
    assert_int_equal(rig_hello_with(&r, first, NULL)->status, ATTN_ENOTFOUND);
    r.session = rig_hello(&r, "next");
    rig_close(&r);
}

static void have_second_pool_fail(struct rig *rig)
{
    rig->backend.max_pools = 1;
    rig->backend.over_max_pools = ATTN_ENOTSUP;
}

static void have_memory_fail(struct rig *rig)
{
    rig->backend.max_pools = 1;
    rig->backend.over_max_pools = ATTN_ENOMEM;
}

static void have_all_succeed(struct rig *rig)
{
    rig->backend.max_pools = 0;
}

static void nothing_is_dropped_where_memory_is_short(void **state)
{
    (void)state;
    open_rig();
    rig_open_many(&r, 1, 1);
    append_all(1, 0, 9);
    rig_make_pool(&r, "second");
    struct engine_kept kept = {0};
    rig_run(&r);
    assert_int_equal(rig_try_to_succeed(&r, have_memory_fail, &kept), ATTN_ENOMEM);
    assert_int_equal(rig_try_to_succeed(&r, have_all_succeed, &kept), ATTN_OK);
    assert_int_equal(kept.n_pools, 2);
    assert_int_equal(kept.n_sequences, 1);
    assert_int_equal(kept.n_dropped, 0);
    append_all(1, 9, 1);
    rig_close(&r);
}

static void pools_that_the_backend_refuses_are_dropped_and_said_so(void **state)
{
    (void)state;
    open_rig();
    rig_open_many(&r, 1, 1);
    append_all(1, 0, 9);
    uint32_t first = r.pool;
    r.pool = rig_make_pool(&r, "second")->pool->pool;
    rig_open_many(&r, 2, 2);
    rig_make_pool(&r, "third");
    struct engine_kept kept = rig_succeed(&r, have_second_pool_fail);
    r.backend.max_pools = 0;
    assert_int_equal(kept.n_pools, 1);
    assert_int_equal(kept.n_sequences, 1);
    assert_int_equal(kept.n_dropped, 4); /* two pools, two sequences */
    r.pool = first;
    append_all(1, 9, 1);
    assert_int_equal(rig_item(&r, 2, 0, 0, 1), ATTN_ENOTFOUND);
    /* its place, and not the handle of the pool that was dropped */
    assert_int_equal(rig_make_pool(&r, "fourth")->pool->pool & 0x7ff, 2);
    assert_int_not_equal(rig_make_pool(&r, "fourth")->pool->pool, 2);
    rig_close(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_successor_keeps_pools_sequences_and_sessions),
        cmocka_unit_test(the_device_is_told_every_table_entry_before_it_computes),
        cmocka_unit_test(a_forks_table_is_told_at_its_first_step),
        cmocka_unit_test(patches_of_one_entry_agree),
        cmocka_unit_test(what_the_predecessor_carried_out_is_not_carried_out_again),
        cmocka_unit_test(leases_begin_anew),
        cmocka_unit_test(sequences_of_a_session_that_ended_are_freed),
        cmocka_unit_test(an_expired_session_is_unknown_to_the_successor),
        cmocka_unit_test(nothing_is_dropped_where_memory_is_short),
        cmocka_unit_test(pools_that_the_backend_refuses_are_dropped_and_said_so),
    };
    return cmocka_run_group_tests_name("engine_restore", tests, NULL, NULL);
}
