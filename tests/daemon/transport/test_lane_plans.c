/* test_lane_plans.c: what a plan of a lane may be, what a repeated one does, and which devices may
 * share a lane. */
#include "tests/daemon/transport/lane_rig.h"

#include <stdio.h>
#include <string.h>

static void a_plan_is_the_same_when_repeated_and_replaced_when_not(void **state)
{
    (void)state;
    struct planned p = plan_of(1, 2, 0), q;
    assert_int_equal(plan_make(&p), ATTN_OK);
    assert_int_equal(plan_make(&p), ATTN_OK);
    side_pass(0, 1);
    assert_int_equal(plan_make(&p), ATTN_OK); /* half done: still the same */
    assert_int_equal(sides[0]->lane.n_plans, 1);
    q = plan_of(2, 2, 0); /* from its second bell on another */
    q.layers[0] = 3;
    q.n_layers = 1;
    assert_int_equal(plan_make(&q), ATTN_OK);
    side_pass(0, 2);
    assert_int_equal(rig_len(&lane_rig, 1, 3), 1);
    assert_int_equal(rig_len(&lane_rig, 1, 1), 0);
    q.first_bell = 3;
    q.n_layers = 0; /* abandons nothing */
    assert_int_equal(plan_make(&q), ATTN_OK);
    p = plan_of(3, 2, 0);
    assert_int_equal(plan_make(&p), ATTN_OK);
    side_pass(0, 3);
    q.first_bell = 4;
    assert_int_equal(plan_make(&q), ATTN_OK); /* the other three layers */
    side_ring(0, 4);
    rig_run(&lane_rig);
    assert_int_equal(side_verdict(0, 4), ATTN_EPROTO);
    assert_int_equal(rig_len(&lane_rig, 1, 1), 0);
    p = plan_of(5, 2, 0); /* all again: written again, the same */
    assert_int_equal(plan_make(&p), ATTN_OK);
    for (uint32_t bell = 5; bell <= 8; bell++)
        side_pass(0, bell);
    assert_int_equal(rig_len(&lane_rig, 1, 1), 1);
}

/* The message was late, or its first copy was refused: it must not come back in place of a plan
 * that was made after it, for whose layers the tensors will be. */
static void a_late_copy_of_a_plan_that_was_replaced_changes_nothing(void **state)
{
    (void)state;
    struct planned p = plan_of(1, 2, 0), q = plan_of(1, 2, 0);
    lane_rig.keeps_sent = true;
    uint64_t first = plan_send(&p);
    rig_run(&lane_rig);
    assert_int_equal(rig_answer(&lane_rig, first)->status, ATTN_OK);
    q.first_seq = 3;
    uint64_t second = plan_send(&q);
    rig_run(&lane_rig);
    assert_int_equal(rig_answer(&lane_rig, second)->status, ATTN_OK);
    rig_resend(&lane_rig, first);
    rig_run(&lane_rig);
    rig_assert_says(rig_answer(&lane_rig, first), ATTN_EINVAL, "a later plan");
    rig_resend(&lane_rig, second); /* the one that is in force may be repeated */
    rig_run(&lane_rig);
    assert_int_equal(rig_answer(&lane_rig, second)->status, ATTN_OK);
    side_pass(0, 1);
    assert_int_equal(rig_len(&lane_rig, 1, 0), 0);
    assert_int_equal(rig_len(&lane_rig, 3, 0), 1);
}

static void plans_queue_up(void **state)
{
    (void)state;
    struct planned p = plan_of(1, 1, 0);
    for (uint32_t k = 0; k < LANE_MAX_PLANS; k++) {
        p = plan_of(1 + 4 * k, 1, k); /* positions that are there when their turn comes */
        assert_int_equal(plan_make(&p), ATTN_OK);
    }
    p = plan_of(1 + 4 * LANE_MAX_PLANS, 1, LANE_MAX_PLANS);
    plan_refused(&p, ATTN_EOVERLOAD, "plans that are not finished");
    for (uint32_t bell = 1; bell <= 4 * LANE_MAX_PLANS; bell++)
        side_pass(0, bell);
    assert_int_equal(rig_len(&lane_rig, 1, 3), LANE_MAX_PLANS);
    assert_int_equal(plan_make(&p), ATTN_OK);
    p.first_bell -= 1;
    plan_refused(&p, ATTN_EINVAL, "plan.first_bell is 16, a plan may begin with 17 to 21");
    p.first_bell = 22;
    plan_refused(&p, ATTN_EINVAL, "plan.first_bell is 22");
}

static void what_is_wrong_with_a_plan_is_named(void **state)
{
    (void)state;
    const struct planned good = plan_of(1, 2, 0);
    struct {
        const char *part;
        attn_status st;
        struct planned p;
    } cases[] = {
        {"plan.lane is 0x000000000000000d, no such lane", ATTN_ENOTFOUND, good},
        {"plan.lane is 0x0000000000000000, no such lane", ATTN_ENOTFOUND, good},
        {"plan.layers[2] is 4, the pool has 4 layers", ATTN_EINVAL, good},
        {"plan.step.layer is 1", ATTN_EINVAL, good},
        {"plan.step.pool is 99", ATTN_ENOTFOUND, good},
        {"item 1 (sequence 7): no such sequence", ATTN_ENOTFOUND, good},
        {"item 1 (sequence 1): it is in this plan twice", ATTN_EINVAL, good},
        {"item 0 (sequence 1): epoch is 5", ATTN_ESTALE, good},
        {"item 0 (sequence 1): pos is 1, layer 0 has 0 tokens", ATTN_EINVAL, good},
        {"is not appended yet: layer 0 has 0", ATTN_EINVAL, good},
        {"plan.in_offset is 32", ATTN_EINVAL, good},
        {"plan.in_offset is 262080", ATTN_EINVAL, good},
        {"plan.in_offset is 18446744073709551552", ATTN_EINVAL, good},
        {"plan.out_offset is 64", ATTN_EINVAL, good},
        {"plan.out_offset is 262144", ATTN_EINVAL, good},
        {"plan.out_offset is 1099511627776", ATTN_EINVAL, good},
        {"lse", ATTN_EINVAL, good},
        {"blocks, pool", ATTN_ENOBLOCKS, good},
    };
    cases[0].p.lane = 13;
    cases[1].p.lane = 0;
    cases[2].p.layers[2] = 4;
    cases[3].p.step_layer = 1;
    cases[4].p.pool = 99;
    cases[5].p.first_seq = 6;
    cases[6].p.is_twice = true;
    cases[7].p.epoch = 5;
    cases[8].p.pos = 1;
    cases[9].p.flags = WIRE_STEP_ATTEND;
    cases[10].p.in_offset = 32;
    cases[11].p.in_offset = LANE_RIG_BYTES - 64;
    cases[12].p.in_offset = UINT64_MAX - 63;
    cases[13].p.out_offset = 64;
    cases[14].p.out_offset = LANE_RIG_BYTES;
    cases[15].p.out_offset = (uint64_t)1 << 40;
    cases[16].p.flags = WIRE_STEP_APPEND | WIRE_STEP_LSE;
    cases[17].p.n_tokens = 320; /* 80 blocks of 64 */
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        plan_refused(&cases[i].p, cases[i].st, cases[i].part);
    side_ring(0, 1);
    rig_run(&lane_rig);
    assert_int_equal(side_verdict(0, 1), ATTN_EPROTO); /* none of them was taken */
    for (uint64_t seq = 1; seq <= LANE_RIG_SEQS; seq++)
        assert_int_equal(rig_len(&lane_rig, seq, 0), 0);
}

/* As a step's item: who decodes by a lane learns where its sequence went, too. */
static void a_plan_of_a_sequence_that_was_moved_is_told_where(void **state)
{
    (void)state;
    struct planned p = plan_of(1, 2, 0);
    Attnd__Moved moved = ATTND__MOVED__INIT;
    Attnd__Close close = ATTND__CLOSE__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    p.epoch = rig_epoch(&lane_rig, 1); /* of both */
    assert_int_equal(rig_epoch(&lane_rig, 2), p.epoch);
    moved.url = "tcp://there:7471";
    moved.seq = 200;
    moved.epoch = 9;
    close.seq = 2;
    close.epoch = p.epoch;
    close.moved = &moved;
    h.session = lane_rig.session;
    h.body_case = ATTND__REQUEST__BODY_CLOSE;
    h.close = &close;
    assert_int_equal(rig_call(&lane_rig, &h)->status, ATTN_OK);
    plan_refused(&p, ATTN_EMOVED,
                 "item 1 (sequence 2): sequence 2 has moved to tcp://there:7471: 200, epoch 9");
    p.epoch++; /* no handle had it */
    p.first_seq = 2;
    plan_refused(&p, ATTN_ENOTFOUND, "item 0 (sequence 2): no such sequence");
    assert_int_equal(rig_len(&lane_rig, 1, 0), 0);
}

static void a_failed_layer_ends_the_plan(void **state)
{
    (void)state;
    struct planned p = plan_of(1, 2, 0);
    assert_int_equal(plan_make(&p), ATTN_OK);
    side_pass(0, 1);
    lane_rig.backend.fail_batch = ATTN_EINTERNAL;
    side_ring(0, 2);
    rig_run(&lane_rig);
    assert_int_equal(side_done(0), 1);
    assert_int_equal(side_verdict(0, 2), ATTN_EINTERNAL);
    side_ring(0, 3); /* the worker's stream goes on: each layer is told the same */
    rig_run(&lane_rig);
    assert_int_equal(side_verdict(0, 3), ATTN_EINTERNAL);
    assert_int_equal(rig_len(&lane_rig, 1, 1), 0);
    p = plan_of(4, 2, 0);
    assert_int_equal(plan_make(&p), ATTN_OK);
    for (uint32_t bell = 4; bell <= 7; bell++)
        side_pass(0, bell);
    assert_int_equal(rig_len(&lane_rig, 1, 1), 1);
}

static void two_gpus_need_no_mps_and_one_does(void **state)
{
    (void)state;
    enum { OURS = 1, OTHER = 2, HOST = 0 };
    const struct {
        uint8_t theirs, ours;
        bool is_their_mps, is_our_mps;
        uint32_t driver;
        attn_status st;
        const char *part;
    } cases[] = {
        {HOST, HOST, false, false, 0, ATTN_OK, ""},
        {OURS, OURS, true, true, 13000, ATTN_OK, ""},
        {OTHER, OURS, false, false, 13000, ATTN_OK, ""},
        {OTHER, OURS, true, false, 13000, ATTN_OK, ""},
        {OURS, OURS, false, true, 13000, ATTN_ENOTSUP, "time slices: the worker is not"},
        {OURS, OURS, true, false, 13000, ATTN_ENOTSUP, "time slices: the daemon is not"},
        {OURS, OURS, false, false, 13000, ATTN_ENOTSUP, "time slices: worker and daemon are not"},
        {OURS, OURS, true, true, 12080, ATTN_ENOTSUP, "driver is 12080, the daemon's 13000"},
        {OTHER, OURS, false, false, 12080, ATTN_ENOTSUP, "driver is 12080, the daemon's 13000"},
        {HOST, OURS, false, false, 0, ATTN_ENOTSUP,
         "region is on host memory, the daemon's on GPU "},
        {OTHER, HOST, false, false, 13000, ATTN_ENOTSUP,
         "on GPU 02020202020202020202020202020202, the daemon's on host memory"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct lane_device theirs = {.driver_version = cases[i].driver,
                                     .is_shared = cases[i].is_their_mps};
        struct lane_device ours = {.driver_version = 13000, .is_shared = cases[i].is_our_mps};
        char why[200] = "";
        memset(theirs.uuid, cases[i].theirs, sizeof theirs.uuid);
        memset(ours.uuid, cases[i].ours, sizeof ours.uuid);
        if (lane_device_check(&theirs, &ours, why, sizeof why) != cases[i].st ||
            strstr(why, cases[i].part) == NULL)
            fail_msg("case %zu: %s", i, why);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        LANE_TEST(a_plan_is_the_same_when_repeated_and_replaced_when_not),
        LANE_TEST(a_late_copy_of_a_plan_that_was_replaced_changes_nothing),
        LANE_TEST(plans_queue_up),
        LANE_TEST(what_is_wrong_with_a_plan_is_named),
        LANE_TEST(a_plan_of_a_sequence_that_was_moved_is_told_where),
        LANE_TEST(a_failed_layer_ends_the_plan),
        LANE_TEST(two_gpus_need_no_mps_and_one_does),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
