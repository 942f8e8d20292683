/* test_engine_goodbye.c: clients that give their session up: it ends at once where nothing is left
 * in it; else its sequences wait for the lease. Copies of a goodbye change nothing. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "daemon/engine/core/pool_table.h"
#include "tests/daemon/engine/engine_rig.h"

static struct rig r;
static uint64_t last_id; /* of the latest goodbye */

static void have_second(struct rig *rig)
{
    rig->has_second = true;
}

static void open_rig(bool has_second)
{
    rig_open(&r, has_second ? have_second : NULL);
    r.keeps_sent = true;
}

static const Attnd__Reply *goodbye(void)
{
    Attnd__Goodbye b = ATTND__GOODBYE__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    h.session = r.session;
    h.body_case = ATTND__REQUEST__BODY_GOODBYE;
    h.goodbye = &b;
    last_id = r.next_id;
    return rig_call(&r, &h);
}

/* The answer to a copy of the latest goodbye. */
static const Attnd__Reply *again(void)
{
    rig_forget(&r);
    rig_resend(&r, last_id);
    rig_run(&r);
    return rig_answer(&r, last_id);
}

static uint32_t n_holders(const char *name)
{
    const struct pool *p = pool_find(r.engine, NULL, name);
    assert_non_null(p);
    return p->n_holders;
}

static attn_status status_of_session(uint64_t id)
{
    return (attn_status)rig_hello_with(&r, id, NULL)->status;
}

static void end_without_sequences(bool has_second)
{
    open_rig(has_second);
    uint32_t n_before = session_count(r.sessions);
    for (uint32_t i = 0; i < 3 * r.cfg.max_sessions; i++) {
        r.session = rig_hello(&r, "worker");
        r.pool = rig_pool(&r, "own", 16);
        uint32_t held = n_holders("own");
        assert_int_equal(rig_open_seq(&r, 100), ATTN_OK);
        assert_int_equal(rig_item(&r, 100, 0, 0, 3), ATTN_OK);
        assert_int_equal(rig_close_seq(&r, 100, rig_epoch(&r, 100)), ATTN_OK);
        assert_int_equal(goodbye()->status, ATTN_OK);
        assert_int_equal(session_count(r.sessions), n_before);
        assert_int_equal(n_holders("own"), held - 1);
        assert_int_equal(again()->status, ATTN_ENOTFOUND);
        assert_int_equal(status_of_session(r.session), ATTN_ENOTFOUND);
    }
    rig_close(&r);
}

static void without_sequences_the_session_ends_at_once(void **state)
{
    (void)state;
    end_without_sequences(false);
    end_without_sequences(true);
}

/* A sequence is left, on whichever card: it is there to be adopted, and the session to be resumed,
 * for one more lease; only pools are let go. */
static void leave_a_sequence(bool has_second)
{
    open_rig(has_second);
    const uint64_t lease_ns = r.cfg.lease_us * 1000, heir = r.session;
    const uint64_t left = r.session = rig_hello(&r, "worker");
    r.pool = rig_pool(&r, "own", 16);
    const uint32_t held = n_holders("own");
    rig_open_many(&r, 1, 4);
    rig_now_ns += lease_ns / 2;
    assert_int_equal(goodbye()->status, ATTN_OK);
    assert_int_equal(n_holders("own"), held - 1);
    assert_int_equal(again()->status, ATTN_OK);
    rig_now_ns += lease_ns - 1;
    r.session = heir;
    for (uint64_t seq = 1; seq <= 3; seq++)
        assert_int_equal(rig_adopt(&r, seq)->status, ATTN_OK);
    assert_int_equal(status_of_session(left), ATTN_OK);
    r.session = left; /* one is left, wherever it is */
    assert_int_equal(goodbye()->status, ATTN_OK);
    assert_int_equal(status_of_session(left), ATTN_OK);
    r.session = heir;
    assert_int_equal(rig_adopt(&r, 4)->status, ATTN_OK);
    r.session = left;
    assert_int_equal(goodbye()->status, ATTN_OK);
    assert_int_equal(status_of_session(left), ATTN_ENOTFOUND);
    r.session = heir;
    for (uint64_t seq = 1; seq <= 4; seq++)
        assert_int_equal(rig_close_seq(&r, seq, rig_epoch(&r, seq)), ATTN_OK);
    rig_close(&r);
}

static void sequences_that_are_left_wait_for_the_lease(void **state)
{
    (void)state;
    leave_a_sequence(false);
    leave_a_sequence(true);
}

static void the_lease_frees_what_nobody_adopts(void **state)
{
    (void)state;
    open_rig(false);
    r.session = rig_hello(&r, "worker");
    rig_open_many(&r, 1, 3);
    assert_int_equal(goodbye()->status, ATTN_OK);
    rig_now_ns += r.cfg.lease_us * 1000 + 1;
    rig_run(&r);
    r.session = rig_hello(&r, "heir");
    assert_int_equal(rig_adopt(&r, 1)->status, ATTN_ENOTFOUND);
    rig_close(&r);
}

/* The session was resumed and is used: a goodbye that comes again, or only now, ends nothing. */
static void a_late_goodbye_takes_nothing_away(void **state)
{
    (void)state;
    open_rig(false);
    r.pool = rig_pool(&r, "own", 16);
    assert_int_equal(rig_open_seq(&r, 1), ATTN_OK);
    uint64_t early = r.next_id++;
    assert_int_equal(goodbye()->status, ATTN_OK);
    assert_int_equal(rig_hello_with(&r, r.session, NULL)->hello->last_request_id, last_id);
    assert_int_equal(rig_close_seq(&r, 1, rig_epoch(&r, 1)), ATTN_OK);
    assert_int_equal(again()->status, ATTN_OK); /* nothing is left, but its user is there */
    rig_pool(&r, "own", 16);
    assert_int_equal(n_holders("own"), 1);
    rig_assert_says(again(), ATTN_ESTALE, "whose latest is");
    uint64_t next = r.next_id;
    r.next_id = early; /* one that was on its way all the time */
    assert_int_equal(goodbye()->status, ATTN_ESTALE);
    r.next_id = next;
    assert_int_equal(n_holders("own"), 1);
    assert_int_equal(goodbye()->status, ATTN_OK);
    assert_int_equal(n_holders("own"), 0);
    rig_close(&r);
}

/* A step is on the device, whose sequence its session has still. */
static void what_is_on_its_way_is_finished(void **state)
{
    (void)state;
    open_rig(false);
    assert_int_equal(rig_open_seq(&r, 1), ATTN_OK);
    r.backend.is_held = true;
    uint64_t step = rig_send_item(&r, 1, 0, 0, 5);
    assert_int_equal(goodbye()->status, ATTN_OK);
    r.backend.is_held = false;
    rig_run(&r);
    assert_int_equal(rig_answer(&r, step)->status, ATTN_OK);
    assert_int_equal(rig_len(&r, 1, 0), 5);
    rig_close(&r);
}

static void a_successor_knows_a_copy(void **state)
{
    (void)state;
    open_rig(false);
    r.pool = rig_pool(&r, "own", 16);
    assert_int_equal(rig_open_seq(&r, 1), ATTN_OK);
    assert_int_equal(goodbye()->status, ATTN_OK);
    rig_succeed(&r, NULL);
    assert_int_equal(rig_close_seq(&r, 1, rig_epoch(&r, 1)), ATTN_OK);
    assert_int_equal(again()->status, ATTN_OK);
    assert_int_equal(status_of_session(r.session), ATTN_OK);
    rig_close(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(without_sequences_the_session_ends_at_once),
        cmocka_unit_test(sequences_that_are_left_wait_for_the_lease),
        cmocka_unit_test(the_lease_frees_what_nobody_adopts),
        cmocka_unit_test(a_late_goodbye_takes_nothing_away),
        cmocka_unit_test(what_is_on_its_way_is_finished),
        cmocka_unit_test(a_successor_knows_a_copy),
    };
    return cmocka_run_group_tests_name("engine goodbye", tests, NULL, NULL);
}
