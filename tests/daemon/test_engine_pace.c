/* test_engine_pace.c: the policy of batching, which is arithmetic: no engine, no clock. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "daemon/engine_pace.h"
#include "daemon/engine_state.h"

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
    assert_int_equal(pace_about(10, 100), 100);
    uint32_t n = 160;
    assert_int_equal(pace_about(n, 3), 150);
    for (int i = 0; i < 100; i++)
        n = pace_about(n, 3);
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
    assert_false(pace_is_long(&c, UINT32_MAX)); /* nothing is known */
    pace_learn(&c, 1000, 1000000); /* 1 us a token */
    assert_false(pace_is_long(&c, 9999));
    assert_true(pace_is_long(&c, 10000));
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
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
