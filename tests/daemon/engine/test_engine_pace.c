/* test_engine_pace.c: the policy of batching, which is arithmetic: no engine, no clock. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdlib.h>

#include "daemon/engine/core/pace.h"
#include "daemon/engine/core/state.h"
#include "tests/random.h"

static void an_unknown_cost_lets_the_next_batch_follow_at_once(void **state)
{
    (void)state;
    struct pace_cost c = {0};
    assert_int_equal(pace_due_ns(&c, 1000, 77), 77);
    pace_learn(&c, 0, 5000); /* nothing was seen: nothing is learnt */
    assert_int_equal(pace_due_ns(&c, 1000, 77), 77);
}

static void a_short_batch_is_followed_before_its_way_in_is_over(void **state)
{
    (void)state;
    struct pace_cost c = {0};
    pace_learn(&c, 100, 100000); /* 1 us a token */
    assert_int_equal(pace_due_ns(&c, 100, 0), 0); /* shorter than the way in */
    assert_int_equal(pace_due_ns(&c, 200, 0), 200000 - PACE_WAY_IN_NS);
    assert_int_equal(pace_due_ns(&c, 1000, 50), 50 + 600000); /* six tenths are earlier */
}

static void a_cost_follows_what_batches_take_lately(void **state)
{
    (void)state;
    struct pace_cost c = {0};
    for (int i = 0; i < 200; i++)
        pace_learn(&c, 1000, 1000000);
    assert_in_range(pace_due_ns(&c, 1000, 0), 599000, 601000);
    pace_learn(&c, 1000, 0); /* one that ran beside another moves it by a sixteenth */
    assert_in_range(pace_due_ns(&c, 1000, 0), 555000, 570000);
    for (int i = 0; i < 200; i++)
        pace_learn(&c, 1000, 2000000);
    assert_in_range(pace_due_ns(&c, 1000, 0), 1199000, 1201000);
}

static void a_batch_takes_half_of_what_is_about(void **state)
{
    (void)state;
    assert_int_equal(pace_enough(0), PACE_MIN_ENOUGH);
    assert_int_equal(pace_enough(17), PACE_MIN_ENOUGH); /* 8.5: never less than the least */
    assert_int_equal(pace_enough(18), 9);
    assert_int_equal(pace_enough(19), 10);
    assert_int_equal(pace_enough(UINT32_MAX), UINT32_MAX / 2 + 1);
}

static void what_is_about_rises_at_once_and_falls_slowly(void **state)
{
    (void)state;
    assert_int_equal(pace_concurrency(10, 100), 100);
    uint32_t n = 160;
    assert_int_equal(pace_concurrency(n, 3), 150);
    for (int i = 0; i < 100; i++)
        n = pace_concurrency(n, 3);
    assert_int_equal(n, 3);
}

static void a_refused_request_comes_back_when_the_queue_should_be_done(void **state)
{
    (void)state;
    assert_int_equal(pace_retry_after_us(0, 0), 100); /* never sooner */
    assert_int_equal(pace_retry_after_us(500, 20000), 10000);
    assert_int_equal(pace_retry_after_us(UINT32_MAX, 1000000000), 1000000); /* never later */
    uint64_t ns = 0;
    for (int i = 0; i < 100; i++)
        ns = pace_request_ns(ns, 800000, 8);
    assert_in_range(ns, 95000, 100000);
}

static void a_batch_of_ten_milliseconds_is_long(void **state)
{
    (void)state;
    struct pace_cost c = {0};
    assert_false(pace_is_long(&c, UINT32_MAX, true)); /* nothing is known */
    pace_learn(&c, 1000, 1000000); /* 1 us a token */
    assert_false(pace_is_long(&c, 9999, false));
    assert_true(pace_is_long(&c, 10000, false));
    assert_false(pace_is_long(&c, 999, true));
    assert_true(pace_is_long(&c, 1000, true));
}

static void in_time_is_what_may_take_twice_as_long(void **state)
{
    (void)state;
    assert_true(pace_is_in_time(0, UINT64_MAX, 0)); /* nobody is ahead */
    assert_true(pace_is_in_time(45, 1000000, 100000000)); /* 45 ms, and 10 of its own batch */
    assert_false(pace_is_in_time(46, 1000000, 100000000));
    assert_true(pace_is_in_time(1, 1000000, 3000000)); /* its batch takes no longer than what is
                                                          ahead */
    assert_false(pace_is_in_time(1, 1000000, 2999999));
}

/* ---- shares ---- */

enum { FLOWS = 5, DEEPEST = 2 };

/* A device that has up to `depth` batches, whose cost is guessed badly and now and then comes back:
 * flows that always have something ready are never further apart than the batches that are under
 * way, whatever the shares. */
static void check_flows(uint64_t seed, uint32_t depth)
{
    struct flow flows[FLOWS];
    double had[FLOWS] = {0};
    struct {
        uint32_t flow;
        uint64_t charged, takes;
    } way[DEEPEST];
    uint64_t clock = 0;
    uint32_t n_way = 0, oldest = 0;
    const uint64_t longest = 20000;
    for (int i = 0; i < FLOWS; i++)
        flows[i] = (struct flow){.share = 1 + random_below(&seed, 20)};
    for (int round = 0; round < 5000; round++) {
        uint32_t best = 0;
        if (n_way == depth) { /* the oldest comes back; one in eight never ran */
            struct flow *f = &flows[way[oldest].flow];
            uint64_t took = random_below(&seed, 8) == 0 ? 0 : way[oldest].takes;
            flow_settle(f, way[oldest].charged, took);
            had[way[oldest].flow] += (double)took / f->share;
            oldest = (oldest + 1) % depth;
            n_way--;
        }
        for (uint32_t i = 1; i < FLOWS; i++)
            if (flows[i].end < flows[best].end)
                best = i;
        uint32_t at = (oldest + n_way++) % depth;
        way[at].flow = best;
        way[at].takes = 1000 + random_below(&seed, (uint32_t)longest - 1000);
        way[at].charged = way[at].takes / 2 + random_below(&seed, (uint32_t)way[at].takes);
        flow_charge(&flows[best], &clock, way[at].charged);
        for (uint32_t i = 0; i < FLOWS; i++) {
            for (uint32_t k = 0; k < i; k++) {
                double most = 3.0 * depth * longest * (1.0 / flows[i].share + 1.0 / flows[k].share);
                assert_true(had[i] - had[k] < most && had[k] - had[i] < most);
            }
        }
    }
}

static void flows_that_are_always_ready_stay_together(void **state)
{
    (void)state;
    for (unsigned seed = 1; seed <= 20; seed++)
        check_flows(seed, 1 + seed % DEEPEST);
}

static void a_flow_that_was_away_has_saved_nothing(void **state)
{
    (void)state;
    struct flow a = {.share = 1}, b = {.share = 1};
    uint64_t clock = 0;
    for (int i = 0; i < 100; i++)
        flow_charge(&a, &clock, 1000);
    flow_begin(&b, clock);
    assert_int_equal(b.end, clock);
    flow_charge(&b, &clock, 1000); /* first, and then by turns */
    assert_int_equal(b.end, a.end);
    flow_begin(&b, clock); /* and has lost nothing */
    assert_int_equal(b.end, a.end);
}

static void a_charge_that_is_given_back_leaves_nothing(void **state)
{
    (void)state;
    struct flow f = {.share = 7};
    uint64_t clock = 12345;
    flow_charge(&f, &clock, 999);
    uint64_t end = f.end;
    for (int i = 0; i < 100; i++) {
        flow_charge(&f, &clock, 4711);
        flow_settle(&f, 4711, 0);
    }
    assert_int_equal(f.end, end);
    flow_settle(&f, UINT32_MAX, 0); /* never below nothing */
    assert_int_equal(f.end, 0);
}

static void a_request_waits_for_the_turns_before_its_own(void **state)
{
    (void)state;
    assert_int_equal(pace_ahead(1000, 0, 1, 9), 0);
    assert_int_equal(pace_ahead(1000, 10, 1, 4), 40);
    assert_int_equal(pace_ahead(1000, 10, 3, 4), 13);
    assert_int_equal(pace_ahead(25, 10, 1, 4), 25); /* no more than there are */
    assert_int_equal(pace_ahead(UINT32_MAX, UINT32_MAX, 1, 64000), UINT32_MAX);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(an_unknown_cost_lets_the_next_batch_follow_at_once),
        cmocka_unit_test(a_short_batch_is_followed_before_its_way_in_is_over),
        cmocka_unit_test(a_cost_follows_what_batches_take_lately),
        cmocka_unit_test(a_batch_takes_half_of_what_is_about),
        cmocka_unit_test(what_is_about_rises_at_once_and_falls_slowly),
        cmocka_unit_test(a_refused_request_comes_back_when_the_queue_should_be_done),
        cmocka_unit_test(a_batch_of_ten_milliseconds_is_long),
        cmocka_unit_test(in_time_is_what_may_take_twice_as_long),
        cmocka_unit_test(flows_that_are_always_ready_stay_together),
        cmocka_unit_test(a_flow_that_was_away_has_saved_nothing),
        cmocka_unit_test(a_charge_that_is_given_back_leaves_nothing),
        cmocka_unit_test(a_request_waits_for_the_turns_before_its_own),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
