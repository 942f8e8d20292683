/* test_engine_windows.c: pools whose layers all have windows: what a sequence holds however long it
 * is, and what is refused behind that. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "engine_rig.h"

enum {
    WINDOW = 20,
    SINKS = 3, /* one block */
    HELD = 1 + (WINDOW + RIG_BLOCK_TOKENS - 2) / RIG_BLOCK_TOKENS + 1, /* sinks, window, and one */
};

static struct rig r;

static void begin(uint32_t n_blocks)
{
    rig_open(&r, NULL);
    r.pool = rig_pool_of_windows(&r, "windows", n_blocks, WINDOW, SINKS);
    assert_int_equal(rig_open_seq(&r, 1), ATTN_OK);
}

static void append(uint64_t seq, uint32_t pos, uint32_t n)
{
    for (uint32_t l = 0; l < RIG_LAYERS; l++)
        assert_int_equal(rig_item(&r, seq, l, pos, n), ATTN_OK);
}

static uint64_t n_used(void)
{
    struct kv_stats s;
    kv_stats_read(r.kv, &s);
    return s.blocks_used;
}

/* The reply to a step that only attends. */
static const Attnd__Reply *attend(uint64_t seq, uint32_t pos)
{
    uint32_t n = 1;
    struct rig_step s = {
        .flags = WIRE_STEP_ATTEND, .n_items = 1, .seq = &seq, .pos = &pos, .n_tokens = &n};
    uint64_t id = rig_send_step(&r, &s);
    rig_run(&r);
    return rig_answer(&r, id);
}

static void a_sequence_of_any_length_holds_its_window_and_a_block(void **state)
{
    (void)state;
    begin(HELD); /* no more than one sequence needs */
    for (uint32_t pos = 0; pos < 30 * RIG_BLOCK_TOKENS; pos++) {
        append(1, pos, 1);
        assert_true(n_used() <= HELD);
    }
    assert_int_equal(rig_close_seq(&r, 1, rig_epoch(&r, 1)), ATTN_OK);
    assert_int_equal(n_used(), 0);
    rig_close(&r);
}

static void the_layer_that_is_furthest_back_keeps_its_blocks(void **state)
{
    (void)state;
    begin(64);
    append(1, 0, 90);
    for (uint32_t l = 0; l + 1 < RIG_LAYERS; l++)
        assert_int_equal(rig_item(&r, 1, l, 90, 2), ATTN_OK);
    uint64_t before = n_used();
    assert_int_equal(before, 12);
    assert_int_equal(rig_item(&r, 1, RIG_LAYERS - 1, 0, 90), ATTN_OK); /* again, all of it */
    assert_int_equal(n_used(), before);
    assert_int_equal(rig_item(&r, 1, RIG_LAYERS - 1, 90, 2), ATTN_OK);
    assert_int_equal(n_used(), HELD);
    append(1, 90, 2); /* the latest append of each layer may be repeated */
    rig_close(&r);
}

static void what_would_see_freed_tokens_is_refused_by_name(void **state)
{
    (void)state;
    begin(64);
    append(1, 0, 90);
    append(1, 90, 1);
    assert_int_equal(n_used(), HELD);
    uint64_t id = rig_send_item(&r, 1, 0, 60, 1);
    rig_run(&r);
    rig_assert_says(rig_answer(&r, id), ATTN_EINVAL, "a query at 60 sees tokens that are freed");
    rig_assert_says(attend(1, 60), ATTN_EINVAL, "windows of 20, of tokens 8 to 63 nothing is left");
    assert_int_equal(attend(1, 88)->status, ATTN_OK);
    assert_int_equal(rig_truncate(&r, 1, 60), ATTN_EINVAL);
    assert_int_equal(rig_fork(&r, 1, 2, 60), ATTN_EINVAL);

    Attnd__Export x = ATTND__EXPORT__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    x.seq = 1;
    x.n_blocks = 3;
    h.session = r.session;
    h.body_case = ATTND__REQUEST__BODY_EXPORT;
    h.export = &x;
    rig_assert_says(rig_call(&r, &h), ATTN_EINVAL, "blocks 1 to 7 are freed");

    assert_int_equal(rig_fork(&r, 1, 2, 90), ATTN_OK); /* shares what is left */
    append(2, 90, 40);
    assert_int_equal(rig_truncate(&r, 1, 88), ATTN_OK);
    append(1, 88, 1);
    assert_int_equal(rig_truncate(&r, 1, 2), ATTN_OK); /* into the tokens that all keep */
    append(1, 2, 90);
    rig_close(&r);
}

static void a_successor_goes_on_with_what_is_left(void **state)
{
    (void)state;
    begin(HELD);
    for (uint32_t pos = 0; pos < 100; pos++)
        append(1, pos, 1);
    rig_succeed(&r, NULL);
    assert_true(n_used() <= HELD);
    for (uint32_t pos = 100; pos < 140; pos++)
        append(1, pos, 1);
    rig_close(&r);
}

static void one_layer_without_a_window_keeps_everything(void **state)
{
    (void)state;
    rig_open(&r, NULL);
    assert_int_equal(rig_open_seq(&r, 1), ATTN_OK);
    append(1, 0, 90);
    append(1, 90, 1);
    assert_int_equal(n_used(), 12);
    assert_int_equal(rig_truncate(&r, 1, 5), ATTN_OK);
    rig_close(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_sequence_of_any_length_holds_its_window_and_a_block),
        cmocka_unit_test(the_layer_that_is_furthest_back_keeps_its_blocks),
        cmocka_unit_test(what_would_see_freed_tokens_is_refused_by_name),
        cmocka_unit_test(a_successor_goes_on_with_what_is_left),
        cmocka_unit_test(one_layer_without_a_window_keeps_everything),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
