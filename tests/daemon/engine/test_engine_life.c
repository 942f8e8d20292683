/* test_engine_life.c: deadlines, overload, leases, adoption and draining, on a clock the test
 * sets. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "daemon/base/log.h"
#include "tests/daemon/engine/engine_rig.h"

#define BOTH (WIRE_STEP_APPEND | WIRE_STEP_ATTEND)

static struct rig r;

static void small_batches(struct rig *rig)
{
    rig->cfg.max_batch_items = 4;
}

/* --- deadlines, overload, leases, drain ------------------------------------------------------- */

static void a_step_past_its_deadline_is_never_run(void **state)
{
    (void)state;
    rig_open(&r, NULL);
    rig_open_many(&r, 1, 3);
    r.backend.is_held = true;
    uint64_t a = rig_send_item(&r, 1, 0, 0, 1);
    rig_run(&r);
    uint64_t b = rig_send_item(&r, 2, 0, 0, 1);
    rig_run(&r);
    uint64_t c = rig_send_item(&r, 3, 0, 0, 1), d = rig_send_item(&r, 1, 0, 1, 1);
    uint64_t f = rig_send_truncate(&r, 1, 0);
    rig_run(&r);
    rig_now_ns += 999999999;
    rig_run(&r);
    assert_null(rig_reply(&r, c));
    rig_now_ns += 1;
    rig_run(&r);
    rig_assert_says(rig_answer(&r, c), ATTN_EDEADLINE, "1000000 us passed");
    assert_int_equal(rig_answer(&r, d)->status, ATTN_EDEADLINE);
    assert_int_equal(rig_answer(&r, f)->status, ATTN_EDEADLINE);
    assert_int_equal(rig_wire_reply(&r, c)->payload_bytes, 0);
    r.backend.is_held = false;
    rig_run(&r);
    assert_int_equal(rig_answer(&r, a)->status, ATTN_OK); /* was on the device already */
    assert_int_equal(rig_answer(&r, b)->status, ATTN_OK);
    assert_int_equal(r.backend.n_items, 2);
    assert_int_equal(rig_len(&r, 1, 0), 1);
    assert_int_equal(rig_len(&r, 3, 0), 0);
    assert_int_equal(rig_item(&r, 1, 0, 1, 1), ATTN_OK);
    rig_close(&r);
}

static void a_partly_launched_step_gives_up_the_rest(void **state)
{
    (void)state;
    rig_open(&r, small_batches);
    rig_open_many(&r, 1, 10);
    r.backend.is_held = true;
    uint64_t id = rig_send_wide(&r, 1, 10, 0);
    rig_run(&r);
    rig_now_ns += 1000000000;
    r.backend.is_held = false;
    rig_run(&r);
    assert_int_equal(rig_answer(&r, id)->status, ATTN_EDEADLINE);
    assert_int_equal(rig_answer(&r, id)->step->n_item_status, 10);
    for (uint32_t i = 0; i < 10; i++)
        assert_int_equal(rig_answer(&r, id)->step->item_status[i],
                         i < 8 ? ATTN_OK : ATTN_EDEADLINE);
    assert_int_equal(rig_len(&r, 8, 0), 1);
    assert_int_equal(rig_len(&r, 9, 0), 0);
    rig_close(&r);
}

static void small_queue(struct rig *rig)
{
    rig->cfg.max_queue_requests = 5;
}

static void overload_is_an_answer(void **state)
{
    (void)state;
    rig_open(&r, small_queue);
    rig_open_many(&r, 1, 8);
    r.backend.is_held = true;
    uint64_t id[8];
    for (uint64_t i = 0; i < 8; i++)
        id[i] = rig_send_item(&r, i + 1, 0, 0, 1);
    for (uint32_t i = 5; i < 8; i++) { /* answered before the engine ran */
        rig_assert_says(rig_answer(&r, id[i]), ATTN_EOVERLOAD,
                        "5 requests are queued (engine.max_queue_requests)");
        assert_true(rig_answer(&r, id[i])->retry_after_us >= 100);
    }
    r.backend.is_held = false;
    rig_run(&r);
    for (uint32_t i = 0; i < 5; i++)
        assert_int_equal(rig_answer(&r, id[i])->status, ATTN_OK);
    assert_int_equal(rig_item(&r, 8, 0, 0, 1), ATTN_OK);
    r.cfg.max_queue_requests = 512;
    r.cfg.max_queue_bytes = 10;
    engine_reload(r.engine, &r.cfg);
    rig_assert_says(rig_answer(&r, rig_send_item(&r, 8, 0, 1, 1)), ATTN_EOVERLOAD,
                    "10 are allowed (engine.max_queue)");
    r.cfg.max_queue_bytes = 1 << 20;
    engine_reload(r.engine, &r.cfg);
    rig_close(&r);
}

static void a_step_that_would_be_late_is_refused_at_once(void **state)
{
    (void)state;
    enum { AHEAD = 20 };
    rig_open(&r, NULL);
    rig_open_many(&r, 1, AHEAD + 1);
    uint64_t late = AHEAD + 1;
    uint32_t zero = 0, one = 1;
    struct rig_step s = {.flags = BOTH, .n_items = 1, .seq = &late, .pos = &zero, .n_tokens = &one};
    atomic_store(&r.engine->task_ns, 10000000);
    s.timeout_us = 5000; /* alone it is taken, whatever requests have lately cost */
    uint64_t alone = rig_send_step(&r, &s);
    rig_run(&r);
    assert_int_equal(rig_answer(&r, alone)->status, ATTN_OK);
    r.backend.is_held = true;
    for (uint64_t i = 1; i <= AHEAD; i++)
        rig_send_item(&r, i, 0, 0, 1);
    atomic_store(&r.engine->task_ns, 10000000);
    s.timeout_us = 400000; /* 200 ms are ahead, and may take twice as long */
    rig_assert_says(rig_answer(&r, rig_send_step(&r, &s)), ATTN_EOVERLOAD,
                    "20 requests are ahead, about 200 ms; the deadline is in 400 ms");
    s.timeout_us = 410000;
    uint64_t in_time = rig_send_step(&r, &s);
    assert_null(rig_reply(&r, in_time));
    r.backend.is_held = false;
    rig_run(&r);
    assert_int_equal(rig_answer(&r, in_time)->status, ATTN_OK);
    rig_close(&r);
}

static void room_for_sessions(struct rig *rig)
{
    rig->cfg.max_sessions = 100;
}

/* Says hello over this connection until it is refused: how many sessions it got. */
static unsigned hello_until_refused(struct share *connection, const Attnd__Reply **out_refusal)
{
    r.share = connection;
    for (unsigned n = 0;; n++) {
        *out_refusal = rig_hello_with(&r, 0, NULL);
        if ((*out_refusal)->status != ATTN_OK)
            return n;
    }
}

/* All sessions are taken: an operator finds one, until those set aside are taken, too. Those give
 * nothing to others, and are there again when they are given up or their lease is over. */
static void operators_find_a_session(void **state)
{
    (void)state;
    rig_open(&r, NULL);
    for (int round = 0; round < 3; round++) {
        const Attnd__Reply *refusal;
        unsigned n = hello_until_refused(NULL, &refusal);
        assert_int_equal(n, r.cfg.max_sessions - (round == 0)); /* the rig has one */
        rig_assert_says(refusal, ATTN_EOVERLOAD, "engine.max_sessions is 16");
        r.is_admin = true;
        assert_int_equal(hello_until_refused(NULL, &refusal), SESSION_N_ASIDE);
        rig_assert_says(refusal, ATTN_EOVERLOAD, "engine.max_sessions is 16");
        r.is_admin = false;
        assert_int_equal(rig_hello_with(&r, 0, NULL)->status, ATTN_EOVERLOAD);
        rig_now_ns += r.cfg.lease_us * 1000 + 1;
        rig_run(&r);
    }
    r.is_admin = true;
    for (uint32_t i = 0; i < 3 * SESSION_N_ASIDE; i++) {
        Attnd__Goodbye b = ATTND__GOODBYE__INIT;
        Attnd__Request h = ATTND__REQUEST__INIT;
        h.session = rig_hello(&r, "attnctl");
        h.body_case = ATTND__REQUEST__BODY_GOODBYE;
        h.goodbye = &b;
        assert_int_equal(rig_call(&r, &h)->status, ATTN_OK);
        rig_forget(&r);
    }
    r.is_admin = false;
    assert_int_equal(hello_until_refused(NULL, &(const Attnd__Reply *){NULL}), r.cfg.max_sessions);
    rig_close(&r);
}

static void newcomers_find_room_for_their_session(void **state)
{
    (void)state;
    enum { GREEDY = 12 };
    struct share_table *shares = share_table_open(50, 80);
    struct principal who = {.kind = PRINCIPAL_USER, .uid = 5};
    struct share *s[GREEDY];
    const Attnd__Reply *refusal;
    unsigned n = 0;
    rig_open(&r, room_for_sessions);
    for (unsigned i = 0; i < GREEDY; i++)
        s[i] = share_open(shares, &who);
    assert_int_equal(hello_until_refused(s[0], &refusal), 49); /* half of what the rig leaves */
    rig_assert_says(refusal, ATTN_EOVERLOAD,
                    "this connection has 49 sessions; the 50 that engine.max_sessions leaves are "
                    "for others (listen.peer_share)");
    for (unsigned i = 1; i < GREEDY; i++)
        n += hello_until_refused(s[i], &refusal);
    assert_int_equal(49 + n, 79); /* of the 99 that the rig's own session leaves */
    rig_assert_says(refusal, ATTN_EOVERLOAD,
                    "uid 5 has 79 sessions; the 20 that engine.max_sessions leaves are for others "
                    "(listen.principal_share)");
    who.uid = 6;
    struct share *newcomer = share_open(shares, &who);
    r.share = newcomer;
    assert_int_equal(rig_hello_with(&r, 0, NULL)->status, ATTN_OK);
    rig_now_ns += 30000000000; /* with the leases the places come back */
    rig_run(&r);
    assert_int_equal(share_held(s[0], SHARE_SESSIONS), 0);
    assert_int_equal(hello_until_refused(s[0], &refusal), 50); /* the rig has none any more */
    r.share = NULL;
    rig_close(&r);
    for (unsigned i = 0; i < GREEDY; i++)
        share_unref(s[i]);
    share_unref(newcomer);
    share_table_close(shares);
}

static void one_connection_leaves_others_their_part_of_the_queue(void **state)
{
    (void)state;
    struct share_table *shares = share_table_open(50, 80);
    struct principal who = {.kind = PRINCIPAL_USER, .uid = 5};
    struct share *a = share_open(shares, &who), *b = share_open(shares, &who);
    rig_open(&r, NULL);
    rig_open_many(&r, 1, 64);
    r.backend.is_held = true;
    r.share = a;
    uint64_t last = 0;
    for (uint32_t i = 0; i <= r.cfg.max_queue_requests / 2; i++)
        last = rig_send_item(&r, 1 + i % 64, 0, 0, 1);
    rig_assert_says(rig_answer(&r, last), ATTN_EOVERLOAD, "listen.peer_share");
    r.share = b;
    for (uint32_t i = 0; i < r.cfg.max_queue_requests / 4; i++)
        assert_null(rig_reply(&r, rig_send_item(&r, 1 + i % 64, 0, 0, 1)));
    last = rig_send_item(&r, 1, 0, 0, 1);
    rig_assert_says(rig_answer(&r, last), ATTN_EOVERLOAD, "this connection has 128 requests");
    r.backend.is_held = false;
    rig_run(&r);
    assert_int_equal(share_held(a->principal, SHARE_REQUESTS), 0);
    assert_int_equal(share_held(a->principal, SHARE_QUEUE_BYTES), 0);
    r.share = NULL;
    rig_close(&r);
    assert_int_equal(share_held(a->principal, SHARE_SMALL_BYTES), 0);
    share_unref(a);
    share_unref(b);
    share_table_close(shares);
}

static void silence_ends_a_lease_in_slices(void **state)
{
    (void)state;
    rig_open(&r, NULL);
    uint64_t first = r.session;
    rig_open_many(&r, 1, 150);
    r.session = rig_hello(&r, "other");
    rig_open_many(&r, 1000, 1);
    rig_now_ns += 29000000000;
    assert_int_equal(rig_item(&r, 1000, 0, 0, 1), ATTN_OK); /* renews the second only */
    assert_int_equal(session_count(r.sessions), 2);
    rig_now_ns += 1000000000;
    engine_turn(r.engine, 0);
    assert_int_equal(session_count(r.sessions), 1);
    assert_int_equal(stats_get(sequences_expired), 64);
    assert_int_equal(rig_item(&r, 1000, 0, 1, 1), ATTN_OK);
    rig_run(&r);
    assert_int_equal(stats_get(sequences_expired), 150);
    assert_int_equal(stats_get(sequences), 1);
    assert_int_equal(stats_get(leases_expired), 1);
    r.session = first;
    assert_int_equal(rig_open_seq(&r, 1), ATTN_ENOTFOUND);
    r.session = rig_hello(&r, "again");
    assert_int_equal(rig_open_seq(&r, 1), ATTN_OK);
    rig_close(&r);
}

static void a_changed_lease_ends_nobody_who_has_not_been_told(void **state)
{
    (void)state;
    rig_open(&r, NULL); /* 30 s */
    r.cfg.lease_us = 1000000;
    rig_run(&r);
    rig_now_ns += 10000000000; /* a third of what the client knows of */
    rig_run(&r);
    assert_int_equal(session_count(r.sessions), 1);
    assert_int_equal(rig_hello_with(&r, r.session, NULL)->hello->lease_us, 1000000);
    for (int i = 0; i < 80; i++) { /* from now on it renews every quarter of a second */
        rig_now_ns += 250000000;
        rig_hello_with(&r, r.session, NULL);
        rig_run(&r);
    }
    assert_int_equal(session_count(r.sessions), 1);
    r.cfg.lease_us = 5000000; /* longer: at once */
    rig_run(&r);
    rig_now_ns += 4999999999;
    rig_run(&r);
    assert_int_equal(session_count(r.sessions), 1);
    rig_now_ns += 1;
    rig_run(&r);
    assert_int_equal(session_count(r.sessions), 0);
    r.session = rig_hello(&r, "another");
    r.cfg.lease_us = 1000000; /* shorter: after five seconds */
    rig_run(&r);
    rig_now_ns += 4999999999;
    rig_run(&r);
    assert_int_equal(session_count(r.sessions), 1);
    rig_now_ns += 1;
    rig_run(&r);
    assert_int_equal(session_count(r.sessions), 0);
    rig_close(&r);
}

static void queue_of_one(struct rig *rig)
{
    rig->cfg.max_queue_requests = 1;
}

static void a_refused_request_renews_its_session(void **state)
{
    (void)state;
    rig_open(&r, queue_of_one);
    rig_open_many(&r, 1, 1);
    uint64_t held = r.session, refused = rig_hello(&r, "refused");
    r.backend.is_held = true;
    rig_send_item(&r, 1, 0, 0, 1);
    rig_run(&r);
    for (int i = 0; i < 3; i++) {
        rig_now_ns += 20000000000; /* two thirds of the lease */
        r.session = refused;
        rig_assert_says(rig_answer(&r, rig_send_item(&r, 1, 0, 0, 1)), ATTN_EOVERLOAD, "queued");
        rig_run(&r);
        assert_int_equal(session_count(r.sessions), 2);
    }
    r.session = held;
    r.backend.is_held = false;
    rig_run(&r);
    rig_now_ns += 60000000000; /* and from then on only silence */
    rig_run(&r);
    assert_int_equal(session_count(r.sessions), 0);
    rig_close(&r);
}

static void work_in_flight_keeps_a_lease(void **state)
{
    (void)state;
    rig_open(&r, NULL);
    rig_open_many(&r, 1, 2);
    r.backend.is_held = true;
    uint64_t a = rig_send_item(&r, 1, 0, 0, 1);
    rig_run(&r);
    rig_now_ns += 60000000000;
    rig_run(&r);
    assert_int_equal(session_count(r.sessions), 1);
    r.backend.is_held = false;
    rig_run(&r);
    assert_int_equal(rig_answer(&r, a)->status, ATTN_OK);
    assert_int_equal(rig_item(&r, 1, 0, 1, 1), ATTN_OK);
    rig_close(&r);
}

static void an_adopted_sequence_refuses_its_old_owner(void **state)
{
    (void)state;
    rig_open(&r, NULL);
    uint64_t dead = r.session;
    rig_open_many(&r, 1, 1);
    assert_int_equal(rig_item(&r, 1, 0, 0, 5), ATTN_OK);
    assert_int_equal(rig_item(&r, 1, 1, 0, 4), ATTN_OK);
    r.session = rig_hello(&r, "heir");
    assert_int_equal(rig_item(&r, 1, 0, 5, 1), ATTN_ESTALE); /* not its own yet */
    const Attnd__Reply *a = rig_adopt(&r, 1);
    assert_int_equal(a->status, ATTN_OK);
    assert_int_equal(a->seq->epoch, 2);
    assert_int_equal(a->seq->n_layer_len, RIG_LAYERS);
    assert_int_equal(a->seq->layer_len[0], 5);
    assert_int_equal(a->seq->layer_len[1], 4);
    assert_int_equal(a->seq->pool, r.pool);
    uint64_t seq = 1, heir = r.session;
    uint32_t pos = 5, n = 1, two = 2;
    struct rig_step s = {
        .flags = BOTH, .n_items = 1, .seq = &seq, .pos = &pos, .n_tokens = &n, .epoch = &two};
    r.session = dead;
    r.epoch = 1; /* the last that it knew */
    uint64_t id = rig_send_item(&r, 1, 0, 5, 1);
    r.epoch = 0;
    rig_run(&r);
    rig_assert_says(rig_answer(&r, id), ATTN_ESTALE, "epoch is 1, the sequence is at 2");
    id = rig_send_step(&r, &s);
    rig_run(&r);
    rig_assert_says(rig_answer(&r, id), ATTN_ESTALE, "belongs to another session");
    assert_int_equal(rig_truncate(&r, 1, 0), ATTN_ESTALE);
    assert_int_equal(rig_close_seq(&r, 1, 2), ATTN_ESTALE);
    r.session = heir;
    id = rig_send_step(&r, &s);
    rig_run(&r);
    assert_int_equal(rig_answer(&r, id)->status, ATTN_OK);
    assert_int_equal(rig_len(&r, 1, 0), 6);
    assert_int_equal(rig_adopt(&r, 77)->status, ATTN_ENOTFOUND);
    rig_close(&r);
}

static void draining_refuses_what_is_new_and_finishes_what_is_not(void **state)
{
    (void)state;
    rig_open(&r, NULL);
    rig_open_many(&r, 1, 1);
    assert_false(engine_is_drained(r.engine));
    r.backend.is_held = true;
    uint64_t a = rig_send_item(&r, 1, 0, 0, 1);
    rig_run(&r);
    engine_drain(r.engine, 0);
    assert_false(engine_is_drained(r.engine));
    assert_int_equal(rig_open_seq(&r, 2), ATTN_EDRAINING);
    assert_int_equal(rig_hello_with(&r, 0, NULL)->status, ATTN_EDRAINING);
    assert_int_equal(rig_hello_with(&r, r.session, NULL)->status, ATTN_OK);
    rig_assert_says(rig_make_pool(&r, "new"), ATTN_EDRAINING, "no new pools");
    assert_int_equal(rig_make_pool(&r, "p")->status, ATTN_OK);
    uint64_t b = rig_send_item(&r, 1, 0, 1, 1);
    rig_run(&r);
    r.backend.is_held = false;
    rig_run(&r);
    assert_int_equal(rig_answer(&r, a)->status, ATTN_OK);
    assert_int_equal(rig_answer(&r, b)->status, ATTN_OK);
    assert_int_equal(rig_fork(&r, 1, 5, 1), ATTN_EDRAINING);
    assert_true(engine_is_drained(r.engine));
    rig_close(&r);
}

static uint32_t epoch_of(uint64_t name)
{
    kv_seq_id id;
    struct kv_seq_info info;
    assert_int_equal(kv_seq_find(r.kv, TENANT_OPERATOR, name, &id), ATTN_OK);
    kv_seq_info(r.kv, id, &info);
    return info.epoch;
}

static void sequences_hold_a_drain_up_until_they_have_gone(void **state)
{
    const struct principal operators = {.kind = PRINCIPAL_USER, .uid = geteuid()};
    (void)state;
    rig_open(&r, NULL);
    rig_open_many(&r, 1, 2);
    engine_drain(r.engine, 5000000);
    rig_run(&r);
    assert_true(engine_is_held(r.engine));
    assert_false(engine_is_drained(r.engine));
    assert_int_equal(rig_open_seq(&r, 3), ATTN_EDRAINING);
    assert_int_equal(rig_hello_with(&r, 0, NULL)->status, ATTN_EDRAINING);
    uint64_t id = rig_send_item(&r, 1, 0, 0, 1);
    rig_run(&r);
    assert_int_equal(rig_answer(&r, id)->status, ATTN_OK);
    for (uint32_t l = 1; l < RIG_LAYERS; l++)
        rig_send_item(&r, 1, l, 0, 1);
    rig_run(&r);
    struct principal worker = r.principal;
    r.principal = operators; /* who comes to move them */
    assert_int_equal(rig_hello_with(&r, 0, NULL)->status, ATTN_OK);
    r.principal = worker;
    assert_int_equal(rig_close_seq(&r, 1, epoch_of(1)), ATTN_OK);
    rig_run(&r);
    assert_true(engine_is_held(r.engine));
    assert_int_equal(rig_close_seq(&r, 2, epoch_of(2)), ATTN_OK);
    rig_run(&r);
    assert_false(engine_is_held(r.engine));
    assert_true(engine_is_drained(r.engine));
    rig_close(&r);
}

static void a_drain_is_held_up_as_long_as_was_said_last(void **state)
{
    (void)state;
    rig_open(&r, NULL);
    rig_open_many(&r, 1, 1);
    engine_drain(r.engine, 5000000);
    rig_run(&r);
    rig_now_ns += UINT64_C(4999000000);
    assert_true(engine_is_held(r.engine));
    engine_drain(r.engine, 5000000);
    rig_now_ns += UINT64_C(4999000000);
    assert_true(engine_is_held(r.engine));
    rig_now_ns += 1000000;
    assert_false(engine_is_held(r.engine));
    rig_run(&r);
    assert_true(engine_is_drained(r.engine));
    engine_drain(r.engine, 5000000);
    assert_true(engine_is_held(r.engine));
    engine_drain(r.engine, 0);
    assert_false(engine_is_held(r.engine));
    rig_close(&r);
}

static void a_drain_ends_between_two_tokens(void **state)
{
    (void)state;
    rig_open(&r, NULL);
    r.cfg.token_timeout_us = 1000000;
    rig_open_many(&r, 1, 2);
    uint64_t id = rig_send_item(&r, 1, 0, 0, 1);
    engine_drain(r.engine, 0);
    rig_run(&r);
    assert_int_equal(rig_answer(&r, id)->status, ATTN_OK);
    assert_false(engine_is_drained(r.engine)); /* its other layers are to come */
    engine_end_tokens(r.engine);
    uint64_t other = rig_send_item(&r, 2, 0, 0, 1), next = rig_send_item(&r, 1, 0, 1, 1);
    rig_run(&r);
    rig_assert_says(rig_answer(&r, other), ATTN_EDRAINING, "no new tokens");
    rig_assert_says(rig_answer(&r, next), ATTN_EDRAINING, "no new tokens");
    for (uint32_t layer = 1; layer < RIG_LAYERS; layer++) {
        assert_false(engine_is_drained(r.engine));
        id = rig_send_item(&r, 1, layer, 0, 1);
        rig_run(&r);
        assert_int_equal(rig_answer(&r, id)->status, ATTN_OK);
    }
    assert_true(engine_is_drained(r.engine));
    rig_close(&r);
}

static void a_worker_that_is_silent_within_a_token_is_not_waited_for(void **state)
{
    (void)state;
    rig_open(&r, NULL);
    r.cfg.token_timeout_us = 1000000;
    rig_open_many(&r, 1, 1);
    uint64_t id = rig_send_item(&r, 1, 0, 0, 1);
    engine_drain(r.engine, 0);
    rig_run(&r);
    assert_int_equal(rig_answer(&r, id)->status, ATTN_OK);
    rig_now_ns += 999000000;
    assert_false(engine_is_drained(r.engine));
    rig_now_ns += 2000000;
    assert_true(engine_is_drained(r.engine));
    rig_close(&r);
}

static void only_who_may_administer_drains(void **state)
{
    (void)state;
    const struct {
        struct principal who;
        bool may;
    } cases[] = {
        {{.kind = PRINCIPAL_UNKNOWN}, false},
        {{.kind = PRINCIPAL_ANONYMOUS}, false},
        {{.kind = PRINCIPAL_USER, .uid = geteuid() + 12345, .pid = 77}, false},
        {{.kind = PRINCIPAL_USER, .uid = geteuid()}, true},
        {{.kind = PRINCIPAL_USER, .uid = 0}, true},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char who[PRINCIPAL_TEXT_BYTES];
        rig_open(&r, NULL);
        Attnd__Drain b = ATTND__DRAIN__INIT;
        Attnd__Request h = ATTND__REQUEST__INIT;
        h.session = r.session;
        h.body_case = ATTND__REQUEST__BODY_DRAIN;
        h.drain = &b;
        r.principal = cases[i].who;
        const Attnd__Reply *reply = rig_call(&r, &h);
        assert_int_equal(engine_is_draining(r.engine), cases[i].may);
        if (cases[i].may) {
            assert_int_equal(reply->status, ATTN_OK);
        } else {
            rig_assert_says(reply, ATTN_EAUTH, "drain is for root");
            rig_assert_says(reply, ATTN_EAUTH, "listen.admin");
            rig_assert_says(reply, ATTN_EAUTH, principal_format(&cases[i].who, who));
        }
        rig_close(&r);
    }
}

static void refused_drains_do_not_fill_the_log(void **state)
{
    (void)state;
    Attnd__Drain b = ATTND__DRAIN__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    rig_open(&r, NULL);
    h.session = r.session;
    h.body_case = ATTND__REQUEST__BODY_DRAIN;
    h.drain = &b;
    r.principal = (struct principal){.kind = PRINCIPAL_ANONYMOUS};
    rig_log_begin();
    attn_status st = ATTN_OK;
    for (uint32_t i = 0; i < 20 * LOG_LIMIT; i++)
        st = (attn_status)rig_call(&r, &h)->status;
    assert_int_equal(rig_log_end(), LOG_LIMIT); /* the rig's clock stands still */
    assert_int_equal(st, ATTN_EAUTH);
    rig_close(&r);
}

static void blocks_of_no_sequence_are_refused_by_name(void **state)
{
    (void)state;
    rig_open(&r, NULL);
    Attnd__Export x = ATTND__EXPORT__INIT;
    Attnd__Import i = ATTND__IMPORT__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    h.session = r.session;
    h.body_case = ATTND__REQUEST__BODY_EXPORT;
    h.export = &x;
    rig_assert_says(rig_call(&r, &h), ATTN_ENOTFOUND, "sequence 0 is not open");
    h.body_case = ATTND__REQUEST__BODY_IMPORT;
    h.import = &i;
    rig_assert_says(rig_call(&r, &h), ATTN_ENOTFOUND, "sequence 0 is not open");
    rig_close(&r);
}

static void stats_are_answered_as_json(void **state)
{
    (void)state;
    rig_open(&r, NULL);
    Attnd__Stats b = ATTND__STATS__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    h.session = r.session;
    h.body_case = ATTND__REQUEST__BODY_STATS;
    h.stats = &b;
    const Attnd__Reply *a = rig_call(&r, &h);
    assert_int_equal(a->status, ATTN_OK);
    assert_true(a->stats->json[0] == '{');
    assert_non_null(strstr(a->stats->json, "sessions"));
    rig_close(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_step_past_its_deadline_is_never_run),
        cmocka_unit_test(a_partly_launched_step_gives_up_the_rest),
        cmocka_unit_test(overload_is_an_answer),
        cmocka_unit_test(a_step_that_would_be_late_is_refused_at_once),
        cmocka_unit_test(operators_find_a_session),
        cmocka_unit_test(newcomers_find_room_for_their_session),
        cmocka_unit_test(one_connection_leaves_others_their_part_of_the_queue),
        cmocka_unit_test(silence_ends_a_lease_in_slices),
        cmocka_unit_test(a_changed_lease_ends_nobody_who_has_not_been_told),
        cmocka_unit_test(a_refused_request_renews_its_session),
        cmocka_unit_test(work_in_flight_keeps_a_lease),
        cmocka_unit_test(an_adopted_sequence_refuses_its_old_owner),
        cmocka_unit_test(draining_refuses_what_is_new_and_finishes_what_is_not),
        cmocka_unit_test(sequences_hold_a_drain_up_until_they_have_gone),
        cmocka_unit_test(a_drain_is_held_up_as_long_as_was_said_last),
        cmocka_unit_test(a_drain_ends_between_two_tokens),
        cmocka_unit_test(a_worker_that_is_silent_within_a_token_is_not_waited_for),
        cmocka_unit_test(only_who_may_administer_drains),
        cmocka_unit_test(refused_drains_do_not_fill_the_log),
        cmocka_unit_test(blocks_of_no_sequence_are_refused_by_name),
        cmocka_unit_test(stats_are_answered_as_json),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
