/* test_lane_bells.c: one lane, or several, under an engine without a thread: what a bell becomes,
 * how it is answered, and that bells which lie change nothing. */
#define _GNU_SOURCE /* memfd_create */
#include "tests/daemon/transport/lane_rig.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tests/random.h"

static void a_bell_is_the_next_layer_of_the_plan(void **state)
{
    (void)state;
    struct planned p = plan_of(1, 2, 0);
    p.layers[0] = 2, p.layers[1] = 0, p.layers[2] = 3, p.layers[3] = 1;
    p.out_offset = 192;
    assert_int_equal(plan_make(&p), ATTN_OK);
    for (uint32_t bell = 1; bell <= 4; bell++) {
        side_pass(0, bell);
        assert_int_equal(rig_len(&lane_rig, 1, p.layers[bell - 1]), 1);
        assert_int_equal(rig_len(&lane_rig, 2, p.layers[bell - 1]), 1);
        assert_true(side_output(0, 192) == 1);
        for (uint32_t k = bell; k < 4; k++)
            assert_int_equal(rig_len(&lane_rig, 1, p.layers[k]), 0);
        memset(sides[0]->out + 192, 0xff, 64);
    }
    assert_int_equal(atomic_load(&sides[0]->page.verdict), 0); /* the host said nothing */
    p = plan_of(5, 2, 1);
    assert_int_equal(plan_make(&p), ATTN_OK);
    for (uint32_t bell = 5; bell <= 8; bell++)
        side_pass(0, bell);
    assert_true(side_output(0, LANE_OUT_OFFSET) == 2);
    assert_int_equal(stats_get(bells_refused), 0);
    assert_int_equal(stats_get(plans), 2);
}

static void bells_count_past_the_end_of_their_bits(void **state)
{
    (void)state;
    sides[0]->lane.taken = 0xfffffffd;
    side_ring(0, 0xfffffffd);
    struct planned p = plan_of(0xfffffffe, 1, 0);
    assert_int_equal(plan_make(&p), ATTN_OK);
    p = plan_of(2, 1, 1);
    assert_int_equal(plan_make(&p), ATTN_OK); /* behind it */
    for (uint32_t k = 0; k < 8; k++)
        side_pass(0, 0xfffffffe + k);
    assert_int_equal(rig_len(&lane_rig, 1, 3), 2);
}

static void bells_that_are_there_together_are_one_batch(void **state)
{
    (void)state;
    struct planned p = plan_of(1, 2, 0), q = plan_of(1, 2, 0);
    q.lane = 12;
    q.first_seq = 3;
    assert_int_equal(plan_make(&p), ATTN_OK);
    assert_int_equal(plan_make(&q), ATTN_OK);
    uint32_t n_batches = lane_rig.backend.n_batches;
    side_ring(0, 1);
    side_ring(1, 1);
    rig_run(&lane_rig);
    assert_int_equal(lane_rig.backend.n_batches, n_batches + 1);
    assert_int_equal(lane_rig.backend.batches[n_batches].n_items, 4);
    assert_int_equal(side_done(0), 1);
    assert_int_equal(side_done(1), 1);
}

/* More items than a batch may have: no device can say when all are done. */
static void a_bell_that_takes_several_batches_is_answered_by_the_host(void **state)
{
    (void)state;
    struct planned p = plan_of(1, LANE_RIG_SEQS, 0);
    assert_int_equal(plan_make(&p), ATTN_OK);
    side_ring(0, 1);
    rig_run(&lane_rig);
    assert_int_equal(side_done(0), 0);
    assert_int_equal(side_verdict(0, 1), ATTN_OK);
    assert_int_equal(rig_len(&lane_rig, LANE_RIG_SEQS, 0), 1);
}

static void the_next_bell_may_come_before_the_host_knows(void **state)
{
    (void)state;
    struct planned p = plan_of(1, 1, 0);
    assert_int_equal(plan_make(&p), ATTN_OK);
    lane_rig.backend.is_held = true;
    for (uint32_t bell = 1; bell <= 3; bell++) {
        side_ring(0, bell);
        engine_turn(lane_rig.engine, 0);
    }
    assert_int_equal(sides[0]->lane.n_busy, 3);
    lane_rig.backend.is_held = false;
    rig_run(&lane_rig);
    assert_int_equal(side_done(0), 3);
    assert_int_equal(rig_len(&lane_rig, 1, 2), 1);
    side_pass(0, 4);
}

/* The length of a layer as a successor would find it if the process died now. */
static uint32_t len_after_a_kill(uint64_t seq, uint32_t layer)
{
    struct backend_info info;
    char why[256];
    struct kv *kv;
    struct kv_seq_info i;
    kv_seq_id id;
    struct stat sb;
    int fd = memfd_create("copy", MFD_ALLOW_SEALING), from = kv_fd(lane_rig.kv);
    assert_int_equal(fstat(from, &sb), 0);
    uint8_t *bytes = malloc((size_t)sb.st_size);
    assert_int_equal(pread(from, bytes, (size_t)sb.st_size, 0), sb.st_size);
    assert_int_equal(pwrite(fd, bytes, (size_t)sb.st_size, 0), sb.st_size);
    free(bytes);
    rig_backend_ops.info(&lane_rig.backend, &info);
    struct kv_config c = engine_kv_config(&lane_rig.cfg, info.kv_bytes);
    if (kv_open(&c, fd, &kv, why, sizeof why) != ATTN_OK)
        fail_msg("the successor finds no cache: %s", why);
    assert_int_equal(kv_check(kv), ATTN_OK);
    assert_int_equal(kv_seq_find(kv, TENANT_OPERATOR, seq, &id), ATTN_OK);
    kv_seq_info(kv, id, &i);
    uint32_t len = i.layer_len[layer];
    kv_close(kv);
    close(fd);
    return len;
}

static void what_the_device_has_answered_is_there_after_a_kill(void **state)
{
    (void)state;
    struct planned p = plan_of(1, 2, 0), other = plan_of(1, 1, 0);
    other.lane = 12;
    other.first_seq = 4;
    assert_int_equal(plan_make(&p), ATTN_OK);
    assert_int_equal(plan_make(&other), ATTN_OK);
    lane_rig.backend.is_held = true;
    side_ring(0, 1);
    side_ring(1, 1);
    engine_turn(lane_rig.engine, 0);
    assert_int_equal(lane_rig.backend.n_in_flight, 1);
    assert_int_equal(len_after_a_kill(1, 0), 0); /* nobody has answered yet */
    rig_device_signals(&lane_rig, 1); /* one word is out, and no worker has been told */
    assert_int_equal(side_done(0), 0);
    assert_int_equal(side_done(1), 0);
    assert_int_equal(len_after_a_kill(1, 0), 1);
    rig_device_signals(&lane_rig, UINT32_MAX);
    assert_int_equal(side_done(0), 1);
    assert_int_equal(side_done(1), 1);
    assert_int_equal(rig_len(&lane_rig, 2, 0), 0); /* nobody has committed it */
    for (uint64_t seq = 1; seq <= 4; seq++)
        assert_int_equal(len_after_a_kill(seq, 0), seq != 3);
    lane_rig.backend.is_held = false;
    rig_run(&lane_rig);
    assert_int_equal(rig_len(&lane_rig, 2, 0), 1);
    assert_int_equal(len_after_a_kill(2, 0), 1);
    assert_int_equal(rig_truncate(&lane_rig, 2, 0), ATTN_OK);
    assert_int_equal(len_after_a_kill(2, 0), 0);
}

static void a_bell_whose_batch_fails_is_not_there_after_a_kill(void **state)
{
    (void)state;
    struct planned p = plan_of(1, 1, 0);
    assert_int_equal(plan_make(&p), ATTN_OK);
    side_pass(0, 1);
    lane_rig.backend.fail_batch = ATTN_EINTERNAL;
    side_ring(0, 2);
    rig_run(&lane_rig);
    assert_int_equal(side_verdict(0, 2), ATTN_EINTERNAL);
    assert_int_equal(len_after_a_kill(1, 0), 1);
    assert_int_equal(len_after_a_kill(1, 1), 0);
}

/* Lane 0 rings, and its device tells everybody whom it can; the host has not looked. */
static void device_answers(void)
{
    struct planned p = plan_of(1, 1, 0);
    assert_int_equal(plan_make(&p), ATTN_OK);
    lane_rig.backend.is_held = true;
    side_ring(0, 1);
    engine_turn(lane_rig.engine, 0);
    rig_device_signals(&lane_rig, UINT32_MAX);
}

/* By another batch's fault, say, right after it has told everybody. */
static void what_a_device_had_answered_when_it_was_lost_is_committed(void **state)
{
    (void)state;
    device_answers();
    assert_int_equal(side_done(0), 1);
    lane_rig.backend.fail_batch = ATTN_EDEVICE;
    lane_rig.backend.is_held = false;
    rig_run(&lane_rig);
    assert_int_equal(engine_health(lane_rig.engine), ATTN_EDEVICE);
    assert_int_equal(rig_len(&lane_rig, 1, 0), 1);
    assert_int_equal(len_after_a_kill(1, 0), 1);
}

static void a_bell_waits_for_the_host_where_the_device_cannot_tell_the_cache(void **state)
{
    (void)state;
    device_answers();
    assert_int_equal(side_done(0), 0);
    lane_rig.backend.is_held = false;
    rig_run(&lane_rig);
    assert_int_equal(side_verdict(0, 1), ATTN_OK);
    assert_int_equal(len_after_a_kill(1, 0), 1);
}

static void bells_that_lie_change_nothing(void **state)
{
    (void)state;
    static const uint32_t lies[] = {2, 7, 0xfffffff0, 0x80000000, 0x12345678};
    struct planned p;
    uint32_t next = 1;
    for (size_t i = 0; i < sizeof lies / sizeof *lies; i++) {
        p = plan_of(next, 1, 0);
        assert_int_equal(plan_make(&p), ATTN_OK);
        uint32_t lie = next + lies[i] - (lies[i] < 8 ? 1 : 0);
        side_ring(0, lie);
        rig_run(&lane_rig);
        assert_int_equal(side_verdict(0, lie), ATTN_EPROTO);
        assert_non_null(strstr(sides[0]->page.why, "is next"));
        assert_int_equal(stats_get(bells_refused), i + 1);
        for (uint32_t layer = 0; layer < RIG_LAYERS; layer++)
            assert_int_equal(rig_len(&lane_rig, 1, layer), 0);
        next = lie + 1;
    }
    side_ring(0, next); /* of no plan: what was planned is gone */
    rig_run(&lane_rig);
    assert_int_equal(side_verdict(0, next), ATTN_EPROTO);
    side_ring(0, next); /* once more is no bell */
    rig_run(&lane_rig);
    assert_int_equal(stats_get(bells_refused), sizeof lies / sizeof *lies + 1);
    p = plan_of(next + 1, 1, 0); /* whoever plans anew goes on */
    assert_int_equal(plan_make(&p), ATTN_OK);
    side_pass(0, next + 1);
}

/* What is true when it is planned need not be when it is rung for. */
static void a_bell_is_checked_as_a_step(void **state)
{
    (void)state;
    struct planned p = plan_of(1, 2, 0);
    assert_int_equal(plan_make(&p), ATTN_OK);
    assert_int_equal(rig_truncate(&lane_rig, 2, 0), ATTN_OK); /* raises the epoch */
    side_ring(0, 1);
    rig_run(&lane_rig);
    assert_int_equal(side_verdict(0, 1), ATTN_ESTALE);
    assert_non_null(strstr(sides[0]->page.why, "item 1 (sequence 2): epoch is"));
}

static void a_bell_that_waits_too_long_is_told_so(void **state)
{
    (void)state;
    struct planned p = plan_of(1, 1, 0), q = p;
    p.timeout_us = q.timeout_us = 1000;
    q.lane = 12;
    assert_int_equal(plan_make(&p), ATTN_OK);
    assert_int_equal(plan_make(&q), ATTN_OK);
    lane_rig.backend.is_held = true;
    side_ring(0, 1);
    engine_turn(lane_rig.engine, 0);
    side_ring(1, 1); /* the same sequence and layer: it waits */
    engine_turn(lane_rig.engine, 0);
    rig_now_ns += 2000000;
    engine_turn(lane_rig.engine, 0);
    assert_int_equal(side_verdict(1, 1), ATTN_EDEADLINE);
    lane_rig.backend.is_held = false;
    rig_run(&lane_rig);
    assert_int_equal(side_done(0), 1);
}

static void a_worker_that_goes_leaves_what_is_in_work_to_end(void **state)
{
    (void)state;
    struct planned p = plan_of(1, 1, 0);
    assert_int_equal(plan_make(&p), ATTN_OK);
    lane_rig.backend.is_held = true;
    side_ring(0, 1);
    engine_turn(lane_rig.engine, 0);
    lane_close(&sides[0]->lane);
    side_ring(0, 2);
    engine_turn(lane_rig.engine, 0);
    assert_int_equal(sides[0]->lane.n_busy, 1);
    assert_false(atomic_load(&lane_rig_has_news));
    lane_rig.backend.is_held = false;
    rig_run(&lane_rig);
    assert_int_equal(sides[0]->lane.n_busy, 0);
    assert_true(atomic_load(&lane_rig_has_news));
    assert_int_equal(rig_len(&lane_rig, 1, 0), 1);
    assert_int_equal(rig_len(&lane_rig, 1, 1), 0);
    plan_refused(&p, ATTN_ENOTFOUND, "no such lane");
}

/* Random plans and random bells, next to true ones: lengths move by true bells alone. */
static void random_bells_never_move_a_length(void **state)
{
    (void)state;
    uint64_t seed = 12345;
    uint32_t count = 0, len[RIG_LAYERS] = {0};
    struct planned p = {0};
    uint32_t n_left = 0;
    for (int i = 0; i < 3000; i++) {
        uint32_t dice = random_below(&seed, 256);
        if (n_left == 0) {
            p = plan_of(count + 1, 1, len[RIG_LAYERS - 1] % 20);
            if (plan_make(&p) == ATTN_OK)
                n_left = RIG_LAYERS;
        } else if (dice < 200) {
            side_pass(0, ++count);
            uint32_t layer = p.layers[RIG_LAYERS - n_left--];
            len[layer] = p.pos + 1 > len[layer] ? p.pos + 1 : len[layer];
        } else {
            uint32_t lie =
                dice < 230 ? (uint32_t)random_mixed(&seed) : count + 2 + random_below(&seed, 16);
            side_ring(0, lie);
            rig_run(&lane_rig);
            n_left = lie == count + 1 ? n_left : 0;
            count = lie;
            if (side_verdict(0, lie) == ATTN_OK)
                fail_msg("bell %u was believed", lie);
        }
        for (uint32_t layer = 0; layer < RIG_LAYERS; layer++)
            assert_int_equal(rig_len(&lane_rig, 1, layer), len[layer]);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        LANE_TEST(a_bell_is_the_next_layer_of_the_plan),
        LANE_TEST(bells_count_past_the_end_of_their_bits),
        LANE_TEST(bells_that_are_there_together_are_one_batch),
        LANE_TEST(a_bell_that_takes_several_batches_is_answered_by_the_host),
        LANE_TEST(the_next_bell_may_come_before_the_host_knows),
        LANE_KEPT(what_the_device_has_answered_is_there_after_a_kill),
        LANE_KEPT(a_bell_whose_batch_fails_is_not_there_after_a_kill),
        LANE_KEPT(what_a_device_had_answered_when_it_was_lost_is_committed),
        LANE_KEPT_UNSIGNALLED(a_bell_waits_for_the_host_where_the_device_cannot_tell_the_cache),
        LANE_TEST(bells_that_lie_change_nothing),
        LANE_TEST(a_bell_is_checked_as_a_step),
        LANE_TEST(a_bell_that_waits_too_long_is_told_so),
        LANE_TEST(a_worker_that_goes_leaves_what_is_in_work_to_end),
        LANE_TEST(random_bells_never_move_a_length),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
