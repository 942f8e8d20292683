/* test_engine_operator.c: what operators end, what they see of requests, and how long they wait for
 * events, of an engine on a clock the test sets. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>
#include <jansson.h>

#include "cache/kv_tier.h"
#include "daemon/base/log.h"
#include "daemon/engine/core/session_run.h"
#include "tests/daemon/engine/engine_rig.h"

static struct rig r;

static void open_as_operator(void)
{
    rig_open(&r, NULL);
    r.principal = (struct principal){.kind = PRINCIPAL_USER, .uid = geteuid()};
}

static const Attnd__Reply *answer_to(uint64_t id)
{
    rig_run(&r);
    return rig_answer(&r, id);
}

static uint64_t send_kill(const char *session, const char *tenant, uint64_t seq)
{
    Attnd__Kill b = ATTND__KILL__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    b.session = (char *)(uintptr_t)session;
    b.tenant = (char *)(uintptr_t)tenant;
    b.seq = seq;
    h.session = r.session;
    h.body_case = ATTND__REQUEST__BODY_KILL;
    h.kill = &b;
    return rig_send(&r, &h, NULL, 0);
}

static uint64_t send_inspect(const char *topic, uint64_t after, uint64_t wait_us)
{
    Attnd__Inspect b = ATTND__INSPECT__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    b.topic = (char *)(uintptr_t)topic;
    b.after = after;
    b.wait_us = wait_us;
    h.session = r.session;
    h.body_case = ATTND__REQUEST__BODY_INSPECT;
    h.inspect = &b;
    return rig_send(&r, &h, NULL, 0);
}

/* The answer's list, and what stands beside it. */
static json_t *list_of(uint64_t id, const char *topic, json_t **out_page)
{
    const Attnd__Reply *reply = answer_to(id);
    assert_int_equal(reply->status, ATTN_OK);
    *out_page = json_loads(reply->stats->json, 0, NULL);
    assert_non_null(*out_page);
    json_t *list = json_object_get(*out_page, topic);
    assert_non_null(list);
    return list;
}

static char *label_of(uint64_t session)
{
    static char label[16];
    snprintf(label, sizeof label, "%08x", (unsigned)session_label(session));
    return label;
}

/* With this sequence, time sent, or time to hold. */
static uint64_t send_of(Attnd__Request__BodyCase body, uint64_t value)
{
    Attnd__Retire retire = ATTND__RETIRE__INIT;
    Attnd__Fence fence = ATTND__FENCE__INIT;
    Attnd__Drain drain = ATTND__DRAIN__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    h.session = r.session;
    h.body_case = body;
    retire.seq = fence.sent_ns = drain.hold_us = value;
    if (body == ATTND__REQUEST__BODY_RETIRE)
        h.retire = &retire;
    else if (body == ATTND__REQUEST__BODY_FENCE)
        h.fence = &fence;
    else
        h.drain = &drain;
    return rig_send(&r, &h, NULL, 0);
}

/* --- retire and fence ------------------------------------------------------------------------- */

static void a_retired_sequence_has_no_valid_handle_and_stays_its_sessions(void **state)
{
    (void)state;
    open_as_operator();
    rig_open_many(&r, 1, 2);
    uint64_t id = rig_send_item(&r, 1, 0, 0, 3);
    assert_int_equal(answer_to(id)->status, ATTN_OK);
    r.backend.is_held = true;
    uint64_t flying = rig_send_item(&r, 1, 0, 3, 1);
    rig_run(&r);
    uint64_t retire = send_of(ATTND__REQUEST__BODY_RETIRE, 1);
    rig_run(&r);
    assert_null(rig_reply(&r, retire)); /* it waits for what came before */
    r.backend.is_held = false;
    rig_run(&r);
    assert_int_equal(rig_answer(&r, flying)->status, ATTN_OK);
    assert_int_equal(rig_answer(&r, retire)->status, ATTN_OK);
    r.epoch = 1; /* what its handles have */
    id = rig_send_item(&r, 1, 0, 4, 1);
    r.epoch = 0;
    rig_assert_says(answer_to(id), ATTN_ESTALE, "epoch is 1, the sequence is at 2");
    id = rig_send_item(&r, 2, 0, 0, 1); /* another is as it was */
    assert_int_equal(answer_to(id)->status, ATTN_OK);
    assert_int_equal(rig_len(&r, 1, 0), 4);
    const Attnd__Reply *adopted = rig_adopt(&r, 1);
    assert_int_equal(adopted->status, ATTN_OK);
    assert_int_equal(adopted->seq->layer_len[0], 4);
    rig_assert_says(answer_to(send_of(ATTND__REQUEST__BODY_RETIRE, 77)), ATTN_ENOTFOUND, "77");
    r.principal = (struct principal){.kind = PRINCIPAL_USER, .uid = geteuid() + 12345};
    rig_assert_says(answer_to(send_of(ATTND__REQUEST__BODY_RETIRE, 1)), ATTN_EAUTH, "root");
    rig_close(&r);
}

static void appends_are_fenced_until_an_operator_renews_it_and_after(void **state)
{
    (void)state;
    open_as_operator();
    rig_open_many(&r, 1, 1);
    rig_assert_says(answer_to(send_of(ATTND__REQUEST__BODY_FENCE, rig_now_ns)), ATTN_EINVAL,
                    "engine.fence is 0");
    r.cfg.fence_us = 2000000;
    rig_assert_says(answer_to(rig_send_item(&r, 1, 0, 0, 1)), ATTN_EFENCED, "engine.fence");
    assert_int_equal(answer_to(send_of(ATTND__REQUEST__BODY_FENCE, rig_now_ns))->status, ATTN_OK);
    assert_int_equal(answer_to(rig_send_item(&r, 1, 0, 0, 1))->status, ATTN_OK);
    rig_now_ns += UINT64_C(1999000000);
    assert_int_equal(answer_to(rig_send_item(&r, 1, 0, 1, 1))->status, ATTN_OK);
    rig_now_ns += 1000000;
    rig_assert_says(answer_to(rig_send_item(&r, 1, 0, 2, 1)), ATTN_EFENCED, "2000 ms");
    uint64_t late = send_of(ATTND__REQUEST__BODY_FENCE, rig_now_ns - UINT64_C(2000000000));
    assert_int_equal(answer_to(late)->status, ATTN_OK);
    rig_assert_says(answer_to(rig_send_item(&r, 1, 0, 2, 1)), ATTN_EFENCED, "2000 ms");
    rig_assert_says(answer_to(send_of(ATTND__REQUEST__BODY_FENCE, rig_now_ns + 1)), ATTN_EINVAL,
                    "fence.sent_ns");
    assert_int_equal(rig_len(&r, 1, 0), 2);
    rig_close(&r);
}

/* What was taken in time, but can begin only later, does not begin. */
static void what_waits_while_the_fence_falls_is_not_appended(void **state)
{
    (void)state;
    open_as_operator();
    r.cfg.fence_us = 2000000;
    rig_open_many(&r, 1, 1);
    assert_int_equal(answer_to(send_of(ATTND__REQUEST__BODY_FENCE, rig_now_ns))->status, ATTN_OK);
    r.backend.is_held = true;
    uint64_t flying = rig_send_item(&r, 1, 0, 0, 1);
    rig_run(&r);
    uint64_t waiting = rig_send_item(&r, 1, 0, 1, 1);
    rig_run(&r);
    rig_now_ns += UINT64_C(2000000000);
    r.backend.is_held = false;
    rig_run(&r);
    assert_int_equal(rig_answer(&r, flying)->status, ATTN_OK);
    assert_int_equal(rig_answer(&r, waiting)->status, ATTN_EDEADLINE);
    assert_int_equal(rig_len(&r, 1, 0), 1);
    rig_close(&r);
}

static void a_drain_is_held_for_a_day_at_most(void **state)
{
    (void)state;
    open_as_operator();
    rig_open_many(&r, 1, 1);
    uint64_t day = UINT64_C(24) * 3600 * 1000000;
    rig_assert_says(answer_to(send_of(ATTND__REQUEST__BODY_DRAIN, day + 1)), ATTN_EINVAL,
                    "drain.hold_us is 86400000001");
    assert_false(engine_is_draining(r.engine));
    assert_int_equal(answer_to(send_of(ATTND__REQUEST__BODY_DRAIN, day))->status, ATTN_OK);
    assert_true(engine_is_held(r.engine));
    rig_close(&r);
}

/* --- kill ------------------------------------------------------------------------------------- */

static void a_killed_session_ends_at_once_and_its_batch_in_its_time(void **state)
{
    (void)state;
    open_as_operator();
    uint64_t operator= r.session, worker = rig_hello(&r, "worker");
    r.session = worker;
    rig_open_many(&r, 1, 3);
    r.backend.is_held = true;
    uint64_t flying = rig_send_item(&r, 1, 0, 0, 1);
    rig_run(&r);
    rig_send_item(&r, 2, 0, 0, 1); /* the device takes two batches */
    rig_run(&r);
    uint64_t waiting = rig_send_item(&r, 1, 0, 1, 1), ready = rig_send_item(&r, 3, 0, 0, 1);
    rig_run(&r);
    r.session = operator;
    uint64_t kill = send_kill(label_of(worker), "", 0);
    rig_run(&r);
    assert_int_equal(rig_answer(&r, kill)->status, ATTN_OK);
    rig_assert_says(rig_answer(&r, waiting), ATTN_ENOTFOUND, "operator");
    rig_assert_says(rig_answer(&r, ready), ATTN_ENOTFOUND, "operator");
    assert_null(rig_reply(&r, flying));
    r.session = worker;
    uint64_t late = rig_send_item(&r, 2, 0, 0, 1);
    rig_run(&r);
    assert_int_equal(rig_answer(&r, late)->status, ATTN_ENOTFOUND);
    r.session = operator;
    rig_assert_says(answer_to(send_kill(label_of(worker), "", 0)), ATTN_ENOTFOUND, "0 sessions");
    r.backend.is_held = false;
    rig_run(&r);
    assert_int_equal(rig_answer(&r, flying)->status, ATTN_OK);
    struct kv_stats s;
    kv_stats_read(r.kv, &s);
    assert_int_equal(s.sequences, 0);
    assert_int_equal(s.blocks_used, 0);
    for (uint32_t i = 0; i < 2 * r.cfg.max_sessions; i++) /* its slot is another's again */
        answer_to(send_kill(label_of(rig_hello(&r, "next")), "", 0));
    rig_close(&r);
}

static void a_killed_session_that_holds_nothing_leaves_no_trace(void **state)
{
    (void)state;
    open_as_operator();
    uint32_t n = session_count(r.sessions);
    uint64_t worker = rig_hello(&r, "worker");
    answer_to(send_kill(label_of(worker), "", 0));
    assert_int_equal(session_count(r.sessions), n);
    rig_close(&r);
}

static void a_sequence_is_killed_in_its_turn(void **state)
{
    (void)state;
    open_as_operator();
    uint64_t operator= r.session, worker = rig_hello(&r, "worker");
    r.session = worker;
    rig_open_many(&r, 7, 2);
    r.backend.is_held = true;
    uint64_t before = rig_send_item(&r, 7, 0, 0, 1);
    rig_run(&r);
    r.session = operator;
    uint64_t kill = send_kill("", "", 7);
    r.session = worker;
    uint64_t behind = rig_send_item(&r, 7, 0, 1, 1);
    rig_run(&r);
    assert_null(rig_reply(&r, kill));
    r.backend.is_held = false;
    rig_run(&r);
    assert_int_equal(rig_answer(&r, before)->status, ATTN_OK);
    assert_int_equal(rig_answer(&r, kill)->status, ATTN_OK);
    assert_int_equal(rig_answer(&r, behind)->status, ATTN_ENOTFOUND);
    assert_int_equal(rig_item(&r, 8, 0, 0, 1), ATTN_OK); /* the other one lives */
    rig_assert_says(answer_to(send_kill("", "", 7)), ATTN_ENOTFOUND, "not open");
    rig_assert_says(answer_to(send_kill("", "nobody", 8)), ATTN_ENOTFOUND, "kill.tenant");
    rig_close(&r);
}

static void nobody_else_may_end_anything(void **state)
{
    (void)state;
    rig_open(&r, NULL);
    r.principal = (struct principal){.kind = PRINCIPAL_ANONYMOUS};
    rig_open_many(&r, 7, 1);
    rig_assert_says(answer_to(send_kill("", "", 7)), ATTN_EAUTH, "only root");
    rig_assert_says(answer_to(send_kill(label_of(r.session), "", 0)), ATTN_EAUTH, "only root");
    rig_assert_says(answer_to(send_inspect("requests", 0, 0)), ATTN_EAUTH, "only root");
    assert_int_equal(rig_item(&r, 7, 0, 0, 1), ATTN_OK);
    rig_close(&r);
}

/* --- trace ------------------------------------------------------------------------------------ */

static void expect_request(const json_t *t, int input, int output)
{
    assert_int_equal(json_integer_value(json_object_get(t, "input_length")), input);
    assert_int_equal(json_integer_value(json_object_get(t, "output_length")), output);
}

static void a_trace_counts_what_a_sequence_was_given_and_generated(void **state)
{
    (void)state;
    json_t *page;
    open_as_operator();
    rig_open_many(&r, 1, 2);
    for (uint32_t layer = 0; layer < RIG_LAYERS; layer++) /* a prompt in two chunks */
        assert_int_equal(rig_item(&r, 1, layer, 0, 5), ATTN_OK);
    assert_int_equal(rig_item(&r, 1, 0, 5, 3), ATTN_OK);
    for (uint32_t pos = 8; pos < 12; pos++) {
        for (uint32_t layer = 0; layer < RIG_LAYERS; layer++)
            assert_int_equal(rig_item(&r, 1, layer, layer == 0 ? pos : 5, 1), ATTN_OK);
        assert_int_equal(rig_item(&r, 1, 0, pos, 1), ATTN_OK); /* again */
    }
    assert_int_equal(rig_item(&r, 2, 0, 0, 1), ATTN_OK); /* a prompt of one token */
    json_t *list = list_of(send_inspect("open_requests", 0, 0), "open_requests", &page);
    assert_int_equal(json_array_size(list), 2);
    expect_request(json_array_get(list, 0), 8, 4);
    expect_request(json_array_get(list, 1), 1, 0);
    json_decref(page);
    list = list_of(send_inspect("requests", UINT64_MAX, 0), "requests", &page);
    assert_int_equal(json_array_size(list), 0);
    assert_int_equal(json_integer_value(json_object_get(page, "next")), 0);
    json_decref(page);
    assert_int_equal(rig_close_seq(&r, 1, rig_epoch(&r, 1)), ATTN_OK);
    list = list_of(send_inspect("requests", 0, 0), "requests", &page);
    assert_int_equal(json_array_size(list), 1);
    expect_request(json_array_get(list, 0), 8, 4);
    assert_int_equal(json_integer_value(json_object_get(page, "next")), 1);
    json_decref(page);
    rig_close(&r);
}

static void a_ring_of_requests_counts_what_it_lost(void **state)
{
    (void)state;
    json_t *page;
    open_as_operator();
    struct trace_entry one = {.began_ns = 1, .n_input = 1}, got;
    for (uint32_t i = 0; i < TRACE_KEPT + 7; i++) {
        one.n_input = i + 1;
        one.began_ns = 1;
        trace_end(&r.engine->trace, &one);
    }
    assert_false(trace_read(&r.engine->trace, 7, &got));
    assert_true(trace_read(&r.engine->trace, 8, &got));
    assert_int_equal(got.n_input, 8);
    assert_false(trace_read(&r.engine->trace, TRACE_KEPT + 8, &got));
    json_t *list = list_of(send_inspect("requests", 2, 0), "requests", &page);
    expect_request(json_array_get(list, 0), 8, 0);
    assert_int_equal(json_integer_value(json_object_get(page, "dropped")), 5);
    json_decref(page);
    rig_close(&r);
}

/* --- watch ------------------------------------------------------------------------------------ */

static void who_watches_is_answered_when_something_happens(void **state)
{
    (void)state;
    json_t *page;
    open_as_operator();
    uint64_t seen = log_count(), first = send_inspect("events", seen, 5000000);
    uint64_t second = send_inspect("events", seen + 1, 5000000);
    rig_run(&r);
    assert_null(rig_reply(&r, first));
    log_error("something"); /* what the rig's log level lets through */
    rig_run(&r);
    json_t *list = list_of(first, "events", &page);
    assert_int_equal(json_array_size(list), 1);
    assert_string_equal(json_string_value(json_object_get(json_array_get(list, 0), "msg")),
                        "something");
    assert_int_equal(json_integer_value(json_object_get(page, "next")), seen + 1);
    json_decref(page);
    assert_null(rig_reply(&r, second));
    rig_now_ns += 5000000000;
    rig_run(&r);
    assert_int_equal(json_array_size(list_of(second, "events", &page)), 0);
    json_decref(page);
    rig_close(&r);
}

static void those_beyond_a_number_and_of_a_draining_daemon_do_not_wait(void **state)
{
    (void)state;
    enum { WAIT = 16 };
    uint64_t ids[WAIT];
    json_t *page;
    open_as_operator();
    uint64_t seen = log_count();
    for (int i = 0; i < WAIT; i++)
        ids[i] = send_inspect("events", seen, 5000000);
    uint64_t beyond = send_inspect("events", seen, 5000000);
    rig_run(&r);
    assert_null(rig_reply(&r, ids[0]));
    assert_int_equal(json_array_size(list_of(beyond, "events", &page)), 0);
    json_decref(page);
    engine_drain(r.engine, 0);
    rig_run(&r);
    for (int i = 0; i < WAIT; i++)
        assert_int_equal(rig_answer(&r, ids[i])->status, ATTN_OK);
    rig_assert_says(answer_to(send_inspect("pools", 0, 1)), ATTN_EINVAL, "inspect.wait_us");
    rig_close(&r);
}

static void the_cache_tells_its_hit_ratio(void **state)
{
    (void)state;
    enum { N = 5 * RIG_BLOCK_TOKENS };
    uint32_t ids[N];
    json_t *page, *all;
    rig_open(&r, NULL);
    r.principal = (struct principal){.kind = PRINCIPAL_USER, .uid = geteuid()};
    list_of(send_inspect("cache", 0, 0), "cache", &page);
    all = json_object_get(page, "all");
    assert_null(json_object_get(all, "hit_ratio")); /* nobody has told any tokens */
    assert_int_equal(json_integer_value(json_object_get(all, "blocks_host")), 0);
    json_decref(page);
    for (uint32_t i = 0; i < N; i++)
        ids[i] = i;
    for (uint64_t name = 1; name <= 2; name++) { /* the second has four blocks of five */
        const struct kv_tokens t = {.ids = ids, .n = N};
        rig_send_open_with(&r, name, &t);
        rig_run(&r);
        for (uint32_t l = 0; l < RIG_LAYERS && name == 1; l++)
            assert_int_equal(rig_item(&r, name, l, 0, N), ATTN_OK);
    }
    list_of(send_inspect("cache", 0, 0), "cache", &page);
    all = json_object_get(page, "all");
    assert_float_equal(json_real_value(json_object_get(all, "hit_ratio")), 0.4, 1e-9);
    json_decref(page);
    rig_close(&r);
}

/* The member of an entry as a number; -1: there is none. */
static long long number_of(const json_t *o, const char *name)
{
    const json_t *v = json_object_get(o, name);
    return v == NULL ? -1 : json_integer_value(v);
}

static void readers_learn_which_blocks_are_published_and_evicted(void **state)
{
    (void)state;
    enum { N = 2 * RIG_BLOCK_TOKENS };
    uint32_t ids[N];
    char hex[8 * RIG_BLOCK_TOKENS + 1];
    json_t *page;
    open_as_operator();
    for (uint32_t i = 0; i < N; i++)
        ids[i] = 0xab000000u + i;
    json_t *list = list_of(send_inspect("blocks", 0, 0), "blocks", &page);
    assert_int_equal(json_array_size(list), 0);
    assert_int_equal(number_of(page, "next"), 0);
    uint64_t number = (uint64_t)number_of(page, "number");
    json_decref(page);
    const struct kv_tokens t = {.ids = ids, .n = N, .adapter = UINT64_MAX};
    rig_send_open_with(&r, 1, &t);
    rig_run(&r);
    for (uint32_t l = 0; l < RIG_LAYERS; l++)
        assert_int_equal(rig_item(&r, 1, l, 0, N), ATTN_OK);
    list = list_of(send_inspect("block_events", number, 0), "block_events", &page);
    assert_int_equal(json_array_size(list), 2);
    const json_t *first = json_array_get(list, 0), *second = json_array_get(list, 1);
    for (uint32_t i = 0; i < RIG_BLOCK_TOKENS; i++)
        snprintf(hex + 8 * i, 9, "%08x", (unsigned)ids[RIG_BLOCK_TOKENS + i]);
    assert_string_equal(json_string_value(json_object_get(second, "ids")), hex);
    assert_string_equal(json_string_value(json_object_get(first, "event")), "published");
    assert_string_equal(json_string_value(json_object_get(first, "adapter")),
                        "18446744073709551615");
    assert_true(number_of(first, "parent") == 0 && number_of(first, "serial") > 0);
    assert_int_equal(number_of(second, "parent"), number_of(first, "serial"));
    assert_int_equal(number_of(second, "place"), 1);
    assert_non_null(json_string_value(json_object_get(first, "pool")));
    assert_int_equal(number_of(page, "next"), number + 2);
    assert_true(json_is_false(json_object_get(page, "behind")) &&
                json_is_false(json_object_get(page, "more")));
    json_t *snapshot, *event = json_deep_copy(second);
    list = list_of(send_inspect("blocks", 0, 0), "blocks", &snapshot);
    assert_int_equal(json_array_size(list), 2); /* with the same members */
    json_object_del(event, "event");
    assert_true(json_equal(json_array_get(list, 1), event));
    json_decref(event);
    json_decref(snapshot);
    json_decref(page);
    /* the second block is written anew: it is not what it was */
    assert_int_equal(rig_truncate(&r, 1, RIG_BLOCK_TOKENS + 1), ATTN_OK);
    for (uint32_t l = 0; l < RIG_LAYERS; l++)
        assert_int_equal(rig_item(&r, 1, l, RIG_BLOCK_TOKENS + 1, 1), ATTN_OK);
    list = list_of(send_inspect("block_events", number, 0), "block_events", &page);
    assert_int_equal(json_array_size(list), 3);
    assert_null(json_object_get(json_array_get(list, 1), "ids")); /* gone when it was asked for */
    assert_string_equal(json_string_value(json_object_get(json_array_get(list, 2), "event")),
                        "evicted");
    assert_int_equal(number_of(json_array_get(list, 2), "serial"),
                     number_of(json_array_get(list, 1), "serial"));
    number = (uint64_t)number_of(page, "next");
    json_decref(page);
    /* others are behind */
    const uint64_t behind[] = {0, 7, number + 1, number - 100000, UINT64_MAX, UINT64_C(5) << 56};
    for (size_t i = 0; i < sizeof behind / sizeof behind[0]; i++) {
        list = list_of(send_inspect("block_events", behind[i], 0), "block_events", &page);
        assert_true(json_is_true(json_object_get(page, "behind")) && json_array_size(list) == 0);
        json_decref(page);
    }
    r.principal = (struct principal){.kind = PRINCIPAL_USER, .uid = geteuid() + 1};
    rig_assert_says(answer_to(send_inspect("blocks", 0, 0)), ATTN_EAUTH, "only root");
    rig_assert_says(answer_to(send_inspect("block_events", 0, 0)), ATTN_EAUTH, "only root");
    rig_close(&r);
}

static void with_many_blocks(struct rig *rig)
{
    rig->backend.kv_bytes = 4 << 20;
}

static void a_page_of_blocks_fits_an_answer_and_the_next_goes_on(void **state)
{
    (void)state;
    enum { N = 3 * RIG_BLOCK_TOKENS, N_SEQS = 200 };
    uint32_t n = 0, n_pages = 0;
    uint64_t after = 0, number = 0;
    rig_open(&r, with_many_blocks);
    r.pool = rig_pool(&r, "large", 500);
    r.principal = (struct principal){.kind = PRINCIPAL_USER, .uid = geteuid()};
    for (uint64_t name = 1; name <= N_SEQS; name++) {
        uint32_t ids[N];
        for (uint32_t i = 0; i < N; i++)
            ids[i] = (uint32_t)name * 1000 + i;
        const struct kv_tokens t = {.ids = ids, .n = N};
        rig_send_open_with(&r, name, &t);
        rig_run(&r);
        bool has_room = rig_item(&r, name, 0, 0, N) == ATTN_OK;
        for (uint32_t l = 1; l < RIG_LAYERS && has_room; l++)
            assert_int_equal(rig_item(&r, name, l, 0, N), ATTN_OK);
        assert_int_equal(rig_close_seq(&r, name, rig_epoch(&r, name)), ATTN_OK);
        rig_forget(&r);
    }
    do {
        json_t *page, *list = list_of(send_inspect("blocks", after, 0), "blocks", &page);
        assert_true(json_array_size(list) <= 400);
        number = number == 0 ? (uint64_t)number_of(page, "number") : number;
        n += (uint32_t)json_array_size(list);
        after = (uint64_t)number_of(page, "next");
        n_pages++;
        json_decref(page);
    } while (after != 0);
    assert_true(n_pages > 1);
    struct kv_stats s;
    kv_stats_read(r.kv, &s);
    assert_int_equal(n, s.blocks_published);
    assert_true(s.evictions > 0 || n == 3 * N_SEQS);
    assert_int_equal(number, kv_events_number(r.kv));
    for (uint64_t i = number - s.evictions - n; i < number;) { /* all of them, in several pages */
        json_t *page, *list = list_of(send_inspect("block_events", i, 0), "block_events", &page);
        assert_true(json_array_size(list) > 0 && json_array_size(list) <= 400);
        i = (uint64_t)number_of(page, "next");
        assert_int_equal(json_is_true(json_object_get(page, "more")), i < number);
        json_decref(page);
    }
    rig_close(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_retired_sequence_has_no_valid_handle_and_stays_its_sessions),
        cmocka_unit_test(appends_are_fenced_until_an_operator_renews_it_and_after),
        cmocka_unit_test(what_waits_while_the_fence_falls_is_not_appended),
        cmocka_unit_test(a_drain_is_held_for_a_day_at_most),
        cmocka_unit_test(a_killed_session_ends_at_once_and_its_batch_in_its_time),
        cmocka_unit_test(a_killed_session_that_holds_nothing_leaves_no_trace),
        cmocka_unit_test(a_sequence_is_killed_in_its_turn),
        cmocka_unit_test(nobody_else_may_end_anything),
        cmocka_unit_test(a_trace_counts_what_a_sequence_was_given_and_generated),
        cmocka_unit_test(a_ring_of_requests_counts_what_it_lost),
        cmocka_unit_test(who_watches_is_answered_when_something_happens),
        cmocka_unit_test(those_beyond_a_number_and_of_a_draining_daemon_do_not_wait),
        cmocka_unit_test(the_cache_tells_its_hit_ratio),
        cmocka_unit_test(readers_learn_which_blocks_are_published_and_evicted),
        cmocka_unit_test(a_page_of_blocks_fits_an_answer_and_the_next_goes_on),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
