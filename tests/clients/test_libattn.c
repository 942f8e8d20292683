/* test_libattn.c: the client library against a fake daemon that misbehaves on purpose. */
#include <math.h>
#include <poll.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "clients/libattn/attn.h"
#include "tests/clients/fake_daemon.h"

#define HEADS 4
#define KV_HEADS 2
#define DIM 8
#define LAYERS 3
#define ROW (HEADS * DIM)
#define KV_ROW (KV_HEADS * DIM)
#define MAX_TOKENS 64
#define SOON_US 50000 /* timeouts that are meant to pass */
#define LONG_US 20000000 /* timeouts that are not */

struct fixture {
    struct fake_daemon daemon;
    attn_client *client;
    attn_pool *pool;
};

/* One step's arrays, filled with numbers that depend on `salt`. */
struct work {
    float q[MAX_TOKENS * ROW], k[MAX_TOKENS * KV_ROW], v[MAX_TOKENS * KV_ROW];
    float out[MAX_TOKENS * ROW], lse[MAX_TOKENS * HEADS];
    int32_t item_status[4];
    struct attn_item items[4];
    struct attn_step step;
    uint32_t n_tokens;
    struct attn_result result;
    int n_calls;
    attn_ticket ticket;
};

static void work_init(struct work *w, uint32_t salt, uint32_t n_items)
{
    memset(w, 0, sizeof *w);
    uint32_t x = salt * 2654435761u + 1;
    for (int i = 0; i < MAX_TOKENS * ROW; i++) {
        x = x * 1664525u + 1013904223u;
        w->q[i] = (float)(x >> 8) / (1 << 24) - 0.5f;
        w->out[i] = NAN;
    }
    for (int i = 0; i < MAX_TOKENS * KV_ROW; i++)
        w->k[i] = w->v[i] = 1.0f;
    for (int i = 0; i < MAX_TOKENS * HEADS; i++)
        w->lse[i] = NAN;
    for (uint32_t i = 0; i < n_items; i++) {
        w->items[i] = (struct attn_item){
            .seq = salt % 1000 + i, .epoch = 1, .pos = 10 * i + salt % 7, .n_tokens = i + 1};
        w->n_tokens += i + 1;
        w->item_status[i] = 12345;
    }
    w->step = (struct attn_step){.struct_size = sizeof w->step,
                                 .layer = 1,
                                 .n_items = n_items,
                                 .items = w->items,
                                 .q = w->q,
                                 .k = w->k,
                                 .v = w->v,
                                 .out = w->out,
                                 .lse = w->lse,
                                 .item_status = w->item_status,
                                 .timeout_us = LONG_US};
    w->result.struct_size = sizeof w->result;
}

static void assert_good(const struct work *w)
{
    uint32_t t = 0;
    assert_int_equal(w->result.status, ATTN_OK);
    assert_int_equal(w->result.n_failed, 0);
    for (uint32_t i = 0; i < w->step.n_items; i++) {
        assert_int_equal(w->item_status[i], ATTN_OK);
        for (uint32_t j = 0; j < w->items[i].n_tokens; j++, t++) {
            for (uint32_t e = 0; e < ROW; e++)
                assert_true(w->out[t * ROW + e] == 2 * w->q[t * ROW + e] + (float)w->items[i].seq);
            for (uint32_t e = 0; e < HEADS; e++)
                assert_true(w->lse[t * HEADS + e] == (float)(w->items[i].pos + j));
        }
    }
    assert_true(isnan(w->out[t * ROW])); /* nothing behind the last row */
}

static void assert_untouched(const struct work *w)
{
    for (int i = 0; i < MAX_TOKENS * ROW; i++)
        assert_true(isnan(w->out[i]));
    for (int i = 0; i < MAX_TOKENS * HEADS; i++)
        assert_true(isnan(w->lse[i]));
}

static struct attn_pool_spec spec_of_test(void)
{
    return (struct attn_pool_spec){.struct_size = sizeof(struct attn_pool_spec),
                                   .layer_struct_size = sizeof(struct attn_layer),
                                   .name = "test",
                                   .num_layers = LAYERS,
                                   .num_q_heads = HEADS,
                                   .num_kv_heads = KV_HEADS,
                                   .head_dim_k = DIM,
                                   .q_dtype = ATTN_F32};
}

static uint64_t now_ns(void)
{
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

static void open_client(struct fixture *f, const struct attn_client_options *o)
{
    struct attn_pool_spec spec = spec_of_test();
    attn_status st = attn_client_open(f->daemon.url, o, LONG_US, &f->client);
    if (st != ATTN_OK)
        print_message("open: %s\n", attn_last_error()->message);
    assert_int_equal(st, ATTN_OK);
    assert_int_equal(attn_pool_create(f->client, &spec, LONG_US, &f->pool), ATTN_OK);
}

static void close_client(struct fixture *f)
{
    attn_pool_close(f->pool);
    attn_client_close(f->client);
    f->pool = NULL;
    f->client = NULL;
}

static int set_up(void **state)
{
    static unsigned int n;
    struct fixture *f = calloc(1, sizeof *f);
    char url[96];
    snprintf(url, sizeof url, "ipc:///tmp/attn_test_%d_%u.sock", (int)getpid(), n++);
    fake_daemon_start(&f->daemon, url);
    open_client(f, NULL);
    *state = f;
    return 0;
}

static int tear_down(void **state)
{
    struct fixture *f = *state;
    close_client(f);
    fake_daemon_stop(&f->daemon);
    unlink(f->daemon.url + strlen("ipc://"));
    free(f);
    return 0;
}

static struct attn_client_counters counters_of(struct fixture *f)
{
    struct attn_client_counters n = {.struct_size = sizeof n};
    assert_int_equal(attn_client_counters(f->client, &n), ATTN_OK);
    return n;
}

/* ---- the good way ---- */

static void hello_tells_session_and_limits(void **state)
{
    struct fixture *f = *state;
    struct attn_client_info info = {.struct_size = sizeof info};
    assert_int_equal(attn_client_info(f->client, &info), ATTN_OK);
    assert_int_equal(info.session, 77);
    assert_int_equal(info.max_step_items, 256);
    assert_string_equal(info.backend, "none");
    info.struct_size = 4;
    assert_int_equal(attn_client_info(f->client, &info), ATTN_EINVAL);

    close_client(f);
    struct attn_client_options o = {.struct_size = sizeof o, .resume_session = 4711};
    open_client(f, &o);
    info.struct_size = sizeof info;
    assert_int_equal(attn_client_info(f->client, &info), ATTN_OK);
    assert_int_equal(info.session, 4711);
}

static void a_pool_comes_back_as_it_was_made(void **state)
{
    struct fixture *f = *state;
    const float sinks[HEADS] = {1, 2, 3, 4};
    struct attn_layer layers[LAYERS] = {
        {.scale = 0.5f}, {.window_tokens = 7, .sink_tokens = 2}, {.soft_cap = 30, .is_full = 1}};
    layers[2].sink_logits = sinks;
    struct attn_pool_spec spec = spec_of_test();
    spec.layers = layers;
    spec.n_layers = LAYERS;
    spec.model = "m";
    attn_pool *p, *again;
    assert_int_equal(attn_pool_create(f->client, &spec, LONG_US, &p), ATTN_OK);
    assert_int_equal(attn_pool_describe(f->client, "test", LONG_US, &again), ATTN_OK);
    const struct attn_pool_spec *s = attn_pool_spec_of(again);
    assert_string_equal(s->name, "test");
    assert_string_equal(s->model, "m");
    assert_string_equal(s->rope, "");
    assert_int_equal(s->head_dim_v, DIM);
    assert_int_equal(s->kv_dtype, ATTN_F32);
    assert_int_equal(s->n_layers, LAYERS);
    assert_true(s->layers[0].scale == 0.5f);
    assert_int_equal(s->layers[1].window_tokens, 7);
    assert_int_equal(s->layers[1].sink_tokens, 2);
    assert_int_equal(s->layers[2].is_full, 1);
    assert_memory_equal(s->layers[2].sink_logits, sinks, sizeof sinks);
    assert_null(s->layers[2].alibi_slopes);
    assert_int_equal(attn_pool_free_blocks(again), 123);
    attn_pool_close(p);
    attn_pool_close(again);
}

static void sequences_carry_epochs_and_lengths(void **state)
{
    struct fixture *f = *state;
    struct attn_seq a, b;
    uint32_t len[LAYERS] = {0};
    assert_int_equal(attn_seq_open(f->pool, 5, LONG_US, &a), ATTN_OK);
    assert_int_equal(a.id, 5);
    assert_int_equal(a.epoch, 1);
    assert_int_equal(attn_seq_fork(f->pool, &a, 6, ATTN_ALL_TOKENS, LONG_US, &b, len), ATTN_OK);
    assert_int_equal(b.id, 6);
    assert_int_equal(b.epoch, 2);
    assert_int_equal(len[2], 102);
    assert_int_equal(attn_seq_adopt(f->pool, 5, LONG_US, &a, NULL), ATTN_OK);
    assert_int_equal(a.epoch, 2);
    assert_int_equal(attn_seq_truncate(f->pool, &a, 3, LONG_US), ATTN_OK);
    assert_int_equal(attn_seq_close(f->pool, &a, LONG_US), ATTN_OK);
    uint64_t ns = 0;
    char *json = NULL;
    assert_int_equal(attn_client_ping(f->client, LONG_US, &ns), ATTN_OK);
    assert_true(ns > 0);
    assert_int_equal(attn_client_stats(f->client, LONG_US, &json), ATTN_OK);
    assert_string_equal(json, "{\"steps\": 1}");
    attn_free(json);
    assert_int_equal(attn_client_drain(f->client, LONG_US), ATTN_OK);
}

static void a_step_gathers_and_scatters(void **state)
{
    struct fixture *f = *state;
    struct work w;
    for (uint32_t n = 1; n <= 4; n++) {
        work_init(&w, n, n);
        assert_int_equal(attn_step(f->pool, &w.step, &w.result), ATTN_OK);
        assert_good(&w);
        assert_int_equal(w.result.queue_ns, 1000);
        assert_int_equal(w.result.device_ns, 2000);
        assert_int_equal(w.result.n_sends, 1);
        assert_true(w.result.total_ns > 0);
    }
    work_init(&w, 9, 2); /* append only */
    w.step.q = w.step.out = NULL;
    w.step.lse = NULL;
    assert_int_equal(attn_step(f->pool, &w.step, &w.result), ATTN_OK);
    assert_untouched(&w);
}

static void many_items_need_no_more_than_memory(void **state)
{
    struct fixture *f = *state;
    enum { N = 200 };
    struct attn_item items[N];
    static float q[N * ROW], out[N * ROW];
    for (int i = 0; i < N; i++)
        items[i] = (struct attn_item){.seq = (uint64_t)i, .epoch = 1, .n_tokens = 1};
    for (int i = 0; i < N * ROW; i++)
        q[i] = (float)(i % 97);
    struct attn_step s = {
        .struct_size = sizeof s, .n_items = N, .items = items, .q = q, .out = out};
    assert_int_equal(attn_step(f->pool, &s, NULL), ATTN_OK);
    for (int i = 0; i < N * ROW; i++)
        assert_true(out[i] == 2 * q[i] + (float)(i / ROW));
}

/* ---- several in flight ---- */

static void on_done(void *user, attn_ticket ticket, const struct attn_result *r)
{
    struct work *w = user;
    w->n_calls++;
    w->ticket = ticket;
    w->result = *r;
}

static void answers_out_of_order_find_their_steps(void **state)
{
    struct fixture *f = *state;
    enum { N = 12 };
    static struct work w[N];
    attn_ticket tickets[N];
    atomic_store(&f->daemon.plan.n_hold, N);
    for (uint32_t i = 0; i < N; i++) {
        work_init(&w[i], 100 + i, 1 + i % 4);
        attn_step_cb cb = i % 2 == 0 ? on_done : NULL;
        assert_int_equal(attn_step_start(f->pool, &w[i].step, cb, &w[i], &tickets[i]), ATTN_OK);
    }
    assert_int_equal(counters_of(f).n_in_flight, N);
    for (uint32_t i = 1; i < N; i += 2)
        assert_int_equal(attn_step_wait(f->client, tickets[i], &w[i].result), ATTN_OK);
    while (counters_of(f).n_in_flight > 0)
        attn_client_poll(f->client, LONG_US, NULL);
    for (uint32_t i = 0; i < N; i++) {
        assert_good(&w[i]);
        assert_int_equal(w[i].n_calls, i % 2 == 0);
        if (i % 2 == 0)
            assert_int_equal(w[i].ticket, tickets[i]);
    }
    assert_int_equal(attn_step_wait(f->client, tickets[1], NULL), ATTN_ENOTFOUND);
    assert_int_equal(attn_step_wait(f->client, tickets[0], NULL), ATTN_ENOTFOUND);
}

static void repeated_answers_are_counted_and_dropped(void **state)
{
    struct fixture *f = *state;
    struct work w;
    atomic_store(&f->daemon.plan.is_repeating, true);
    for (uint32_t i = 0; i < 20; i++) {
        work_init(&w, i, 2);
        assert_int_equal(attn_step(f->pool, &w.step, &w.result), ATTN_OK);
        assert_good(&w);
    }
    assert_true(counters_of(f).n_stray >= 19);
}

static void on_done_start_next(void *user, attn_ticket ticket, const struct attn_result *r)
{
    struct work *w = user;
    struct fixture *f = *(struct fixture **)(w + 2);
    on_done(&w[0], ticket, r);
    char *json;
    assert_int_equal(attn_client_stats(f->client, LONG_US, &json), ATTN_EINVAL);
    assert_int_equal(attn_client_poll(f->client, 0, NULL), ATTN_EINVAL);
    assert_int_equal(attn_step(f->pool, &w[1].step, NULL), ATTN_EINVAL);
    assert_int_equal(attn_step_start(f->pool, &w[1].step, on_done, &w[1], NULL), ATTN_OK);
}

static void a_callback_may_start_but_not_wait(void **state)
{
    struct {
        struct work w[2];
        struct fixture *f;
    } *a = calloc(1, sizeof *a);
    a->f = *state;
    work_init(&a->w[0], 1, 1);
    work_init(&a->w[1], 2, 3);
    assert_int_equal(attn_step_start(a->f->pool, &a->w[0].step, on_done_start_next, a->w, NULL),
                     ATTN_OK);
    while (a->w[1].n_calls == 0)
        assert_int_equal(attn_client_poll(a->f->client, LONG_US, NULL), ATTN_OK);
    assert_good(&a->w[0]);
    assert_good(&a->w[1]);
    free(a);
}

static void the_descriptor_tells_when_to_poll(void **state)
{
    struct fixture *f = *state;
    struct work w;
    work_init(&w, 3, 2);
    assert_int_equal(attn_step_start(f->pool, &w.step, on_done, &w, NULL), ATTN_OK);
    struct pollfd p = {.fd = attn_client_fd(f->client), .events = POLLIN};
    while (w.n_calls == 0) {
        assert_int_equal(poll(&p, 1, LONG_US / 1000), 1);
        assert_int_equal(attn_client_poll(f->client, 0, NULL), ATTN_OK);
    }
    assert_good(&w);
}

static void too_many_in_flight_are_refused(void **state)
{
    struct fixture *f = *state;
    struct work w;
    work_init(&w, 3, 1);
    w.step.lse = NULL;
    w.step.out = w.out;
    atomic_store(&f->daemon.plan.n_swallow, 1000000);
    for (int i = 0; i < ATTN_MAX_IN_FLIGHT; i++)
        assert_int_equal(attn_step_start(f->pool, &w.step, on_done, &w, NULL), ATTN_OK);
    assert_int_equal(attn_step_start(f->pool, &w.step, on_done, &w, NULL), ATTN_EOVERLOAD);
    assert_non_null(strstr(attn_last_error()->message, "in flight"));
    attn_pool_close(f->pool);
    f->pool = NULL;
    attn_client_close(f->client);
    f->client = NULL;
    assert_int_equal(w.n_calls, ATTN_MAX_IN_FLIGHT); /* close ran every callback */
    assert_int_equal(w.result.status, ATTN_ECONN);
}

/* ---- failures that the daemon tells ---- */

static void typed_errors_carry_the_daemons_sentence(void **state)
{
    struct fixture *f = *state;
    static const attn_status all[] = {ATTN_EINVAL,    ATTN_ENOTFOUND, ATTN_ENOBLOCKS,
                                      ATTN_EOVERLOAD, ATTN_ESTALE,    ATTN_EDEADLINE,
                                      ATTN_EDRAINING, ATTN_EDEVICE,   ATTN_EINTERNAL};
    struct work w;
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        work_init(&w, 3, 2);
        atomic_store(&f->daemon.plan.status, all[i]);
        atomic_store(&f->daemon.plan.retry_after_us, 777);
        atomic_store(&f->daemon.plan.n_fail, 1);
        assert_int_equal(attn_step(f->pool, &w.step, &w.result), all[i]);
        assert_int_equal(w.result.status, all[i]);
        assert_int_equal(w.result.n_failed, 2);
        assert_int_equal(w.result.retry_after_us, 777);
        assert_string_equal(w.result.message, "planned failure of step");
        assert_string_equal(attn_last_error()->message, "planned failure of step");
        assert_int_equal(attn_last_error()->status, all[i]);
        assert_int_equal(attn_last_error()->retry_after_us, 777);
        assert_int_equal(w.item_status[0], all[i]);
        assert_int_equal(w.item_status[1], all[i]);
        assert_untouched(&w);
    }
}

static void one_failed_item_leaves_the_others(void **state)
{
    struct fixture *f = *state;
    struct work w;
    work_init(&w, 3, 3);
    atomic_store(&f->daemon.plan.failed_item, 2);
    assert_int_equal(attn_step(f->pool, &w.step, &w.result), ATTN_ENOBLOCKS);
    assert_int_equal(w.result.n_failed, 1);
    assert_int_equal(w.item_status[0], ATTN_OK);
    assert_int_equal(w.item_status[1], ATTN_ENOBLOCKS);
    assert_int_equal(w.item_status[2], ATTN_OK);
    assert_true(w.out[0] == 2 * w.q[0] + (float)w.items[0].seq);
    assert_string_equal(attn_last_error()->message, "item is out of blocks");
}

static void retries_are_off_until_asked_for(void **state)
{
    struct fixture *f = *state;
    struct work w;
    atomic_store(&f->daemon.plan.status, ATTN_EOVERLOAD);
    atomic_store(&f->daemon.plan.retry_after_us, 2000);

    close_client(f);
    struct attn_client_options o = {.struct_size = sizeof o, .max_retries = 3};
    open_client(f, &o);
    atomic_store(&f->daemon.plan.n_fail, 3);
    work_init(&w, 8, 2);
    uint64_t t0 = now_ns();
    assert_int_equal(attn_step(f->pool, &w.step, &w.result), ATTN_OK);
    assert_good(&w);
    assert_int_equal(w.result.n_sends, 4);
    assert_true(now_ns() - t0 >= 3 * 2000000u);
    assert_int_equal(counters_of(f).n_retried, 3);

    atomic_store(&f->daemon.plan.n_fail, 5); /* more than it may retry */
    work_init(&w, 8, 2);
    assert_int_equal(attn_step(f->pool, &w.step, &w.result), ATTN_EOVERLOAD);
    assert_int_equal(w.result.n_sends, 4);
    atomic_store(&f->daemon.plan.n_fail, 1);
    atomic_store(&f->daemon.plan.status, ATTN_EINVAL); /* not retryable */
    assert_int_equal(attn_step(f->pool, &w.step, &w.result), ATTN_EINVAL);
    assert_int_equal(w.result.n_sends, 1);
}

/* ---- failures that nobody tells ---- */

static void every_call_ends_by_its_timeout(void **state)
{
    struct fixture *f = *state;
    struct work w;
    struct attn_seq a = {.id = 1, .epoch = 1};
    attn_pool *p = NULL;
    char *json = NULL;
    struct attn_pool_spec spec = spec_of_test();
    uint64_t t0 = now_ns();
    atomic_store(&f->daemon.plan.n_swallow, 1000000);
    assert_int_equal(attn_pool_create(f->client, &spec, SOON_US, &p), ATTN_ETIMEDOUT);
    assert_int_equal(attn_pool_describe(f->client, "test", SOON_US, &p), ATTN_ETIMEDOUT);
    assert_null(p);
    assert_int_equal(attn_seq_open(f->pool, 1, SOON_US, &a), ATTN_ETIMEDOUT);
    assert_int_equal(attn_seq_fork(f->pool, &a, 2, 1, SOON_US, &a, NULL), ATTN_ETIMEDOUT);
    assert_int_equal(attn_seq_truncate(f->pool, &a, 0, SOON_US), ATTN_ETIMEDOUT);
    assert_int_equal(attn_seq_close(f->pool, &a, SOON_US), ATTN_ETIMEDOUT);
    assert_int_equal(attn_seq_adopt(f->pool, 1, SOON_US, &a, NULL), ATTN_ETIMEDOUT);
    assert_int_equal(attn_client_stats(f->client, SOON_US, &json), ATTN_ETIMEDOUT);
    assert_int_equal(attn_client_drain(f->client, SOON_US), ATTN_ETIMEDOUT);
    work_init(&w, 1, 2);
    w.step.timeout_us = SOON_US;
    assert_int_equal(attn_step(f->pool, &w.step, &w.result), ATTN_ETIMEDOUT);
    assert_non_null(strstr(attn_last_error()->message, "50 ms"));
    assert_int_equal(w.item_status[1], ATTN_ETIMEDOUT);
    assert_untouched(&w);
    attn_ticket t;
    work_init(&w, 1, 2);
    w.step.timeout_us = SOON_US;
    assert_int_equal(attn_step_start(f->pool, &w.step, NULL, NULL, &t), ATTN_OK);
    assert_int_equal(attn_step_wait(f->client, t, &w.result), ATTN_ETIMEDOUT);
    assert_int_equal(attn_step_start(f->pool, &w.step, on_done, &w, &t), ATTN_OK);
    uint32_t n = 0;
    assert_int_equal(attn_client_poll(f->client, LONG_US, &n), ATTN_OK);
    assert_int_equal(n, 1);
    assert_int_equal(w.result.status, ATTN_ETIMEDOUT);
    assert_int_equal(attn_client_poll(f->client, SOON_US, &n), ATTN_OK);
    assert_int_equal(n, 0);
    assert_true(now_ns() - t0 >= 13ull * SOON_US * 1000u);
    assert_int_equal(counters_of(f).n_timed_out, 12);
}

static void a_late_answer_changes_nothing(void **state)
{
    struct fixture *f = *state;
    struct work late, w;
    atomic_store(&f->daemon.plan.n_hold, 2);
    work_init(&late, 1, 2);
    late.step.timeout_us = SOON_US;
    assert_int_equal(attn_step(f->pool, &late.step, &late.result), ATTN_ETIMEDOUT);
    work_init(&w, 2, 2);
    assert_int_equal(attn_step(f->pool, &w.step, &w.result), ATTN_OK); /* frees both answers */
    assert_good(&w);
    while (counters_of(f).n_stray == 0)
        attn_client_poll(f->client, SOON_US, NULL);
    assert_untouched(&late);
}

static void garbled_answers_are_errors_not_crashes(void **state)
{
    struct fixture *f = *state;
    struct work w;
    struct attn_seq a;
    for (int g = FAKE_INTACT + 1; g < FAKE_N_GARBLINGS; g++) {
        atomic_store(&f->daemon.plan.garbling, (enum fake_garbling)g);
        work_init(&w, 5, 3);
        assert_int_equal(attn_step(f->pool, &w.step, &w.result), ATTN_EPROTO);
        assert_true(strlen(w.result.message) > 10);
        assert_int_equal(w.item_status[2], ATTN_EPROTO);
        assert_untouched(&w);
        if (g != FAKE_SHORT_PAYLOAD)
            assert_int_equal(attn_seq_open(f->pool, 1, LONG_US, &a), ATTN_EPROTO);
    }
    atomic_store(&f->daemon.plan.garbling, FAKE_INTACT);
    work_init(&w, 6, 3);
    assert_int_equal(attn_step(f->pool, &w.step, &w.result), ATTN_OK);
    assert_good(&w);
}

static void restart(struct fixture *f)
{
    char url[96];
    memcpy(url, f->daemon.url, sizeof url);
    fake_daemon_stop(&f->daemon);
    fake_daemon_start(&f->daemon, url);
}

/* The daemon forgets its pools with a restart; the test's steps need one. */
static void learn_pool_again(struct fixture *f)
{
    struct attn_pool_spec spec = spec_of_test();
    attn_client *c;
    attn_pool *p;
    assert_int_equal(attn_client_open(f->daemon.url, NULL, LONG_US, &c), ATTN_OK);
    assert_int_equal(attn_pool_create(c, &spec, LONG_US, &p), ATTN_OK);
    attn_pool_close(p);
    attn_client_close(c);
}

static void a_lost_connection_means_sending_again(void **state)
{
    struct fixture *f = *state;
    enum { N = 5 };
    static struct work w[N];
    attn_ticket tickets[N];
    atomic_store(&f->daemon.plan.n_swallow, N);
    for (uint32_t i = 0; i < N; i++) {
        work_init(&w[i], 40 + i, 2);
        assert_int_equal(attn_step_start(f->pool, &w[i].step, NULL, NULL, &tickets[i]), ATTN_OK);
    }
    while (atomic_load(&f->daemon.plan.n_swallow) > 0)
        attn_client_poll(f->client, 1000, NULL); /* all have arrived and got lost */
    restart(f);
    learn_pool_again(f);
    for (uint32_t i = 0; i < N; i++) {
        assert_int_equal(attn_step_wait(f->client, tickets[i], &w[i].result), ATTN_OK);
        assert_good(&w[i]);
        assert_int_equal(w[i].result.n_sends, 2);
    }
    assert_int_equal(atomic_load(&f->daemon.last_step_id), tickets[N - 1]); /* the same ids */
    assert_true(counters_of(f).n_resent >= N);
}

static void without_a_daemon_calls_say_so(void **state)
{
    struct fixture *f = *state;
    struct work w;
    char url[96];
    memcpy(url, f->daemon.url, sizeof url);
    fake_daemon_stop(&f->daemon);
    work_init(&w, 1, 2);
    w.step.timeout_us = SOON_US;
    assert_int_equal(attn_step(f->pool, &w.step, &w.result), ATTN_ECONN);
    assert_non_null(strstr(w.result.message, url));
    attn_client *c = NULL;
    assert_int_equal(attn_client_open(url, NULL, SOON_US, &c), ATTN_ECONN);
    assert_null(c);
    fake_daemon_start(&f->daemon, url);
}

static void wrong_arguments_are_named(void **state)
{
    struct fixture *f = *state;
    struct work w;
    attn_client *c = NULL;
    static const char *const urls[] = {"", "ipc://", "http://x", "shm:///x", "tcp://nohost"};
    for (size_t i = 0; i < sizeof urls / sizeof urls[0]; i++) {
        assert_int_equal(attn_client_open(urls[i], NULL, SOON_US, &c), ATTN_EINVAL);
        assert_non_null(strstr(attn_last_error()->message, urls[i]));
    }
    struct attn_client_options o = {.struct_size = 3};
    assert_int_equal(attn_client_open(f->daemon.url, &o, SOON_US, &c), ATTN_EINVAL);
    assert_null(c);

    unsigned int n_before = atomic_load(&f->daemon.n_requests);
#define REFUSED(change)                                                                            \
    do {                                                                                           \
        work_init(&w, 1, 2);                                                                       \
        change;                                                                                    \
        assert_int_equal(attn_step(f->pool, &w.step, &w.result), ATTN_EINVAL);                     \
        assert_int_equal(attn_step_start(f->pool, &w.step, on_done, &w, NULL), ATTN_EINVAL);       \
        assert_int_equal(w.n_calls, 0);                                                            \
    } while (0)
    REFUSED(w.step.struct_size = 1);
    REFUSED(w.step.n_items = 0);
    REFUSED(w.step.n_items = 257);
    REFUSED(w.step.items = NULL);
    REFUSED(w.step.k = NULL);
    REFUSED(w.step.v = NULL);
    REFUSED(w.step.q = NULL);
    REFUSED(w.step.out = NULL);
    REFUSED(w.step.q = NULL; w.step.out = NULL);
    REFUSED(w.step.k = w.step.v = w.step.q = NULL; w.step.out = w.step.lse = NULL);
    REFUSED(w.items[1].n_tokens = 0);
    REFUSED(w.items[1].n_tokens = 5000);
    REFUSED(w.items[0].n_tokens = w.items[1].n_tokens = UINT32_MAX);
#undef REFUSED
    work_init(&w, 1, 1);
    w.result.struct_size = 0;
    assert_int_equal(attn_step(f->pool, &w.step, &w.result), ATTN_EINVAL);
    assert_int_equal(attn_step_start(f->pool, &w.step, NULL, NULL, NULL), ATTN_EINVAL);
    struct attn_pool_spec spec = spec_of_test();
    attn_pool *p = NULL;
    spec.n_layers = 2;
    assert_int_equal(attn_pool_create(f->client, &spec, SOON_US, &p), ATTN_EINVAL);
    spec.struct_size = 0;
    assert_int_equal(attn_pool_create(f->client, &spec, SOON_US, &p), ATTN_EINVAL);
    assert_null(p);
    assert_int_equal(atomic_load(&f->daemon.n_requests), n_before); /* nothing was sent */
}

static void a_spec_too_large_for_a_header_is_refused(void **state)
{
    struct fixture *f = *state;
    static float slopes[1024];
    static struct attn_layer layers[512];
    struct attn_pool_spec spec = spec_of_test();
    attn_pool *p = NULL;
    unsigned int n_before = atomic_load(&f->daemon.n_requests);
    for (size_t i = 0; i < 512; i++)
        layers[i].alibi_slopes = slopes;
    spec.num_layers = spec.n_layers = 512;
    spec.num_q_heads = spec.num_kv_heads = 1024;
    spec.layers = layers;
    assert_int_equal(attn_pool_create(f->client, &spec, SOON_US, &p), ATTN_EINVAL);
    assert_non_null(strstr(attn_last_error()->message, "1048576"));
    assert_null(p);

    size_t n = 2 << 20;
    char *name = malloc(n);
    memset(name, 'x', n);
    name[n - 1] = 0;
    assert_int_equal(attn_pool_describe(f->client, name, SOON_US, &p), ATTN_EINVAL);
    free(name);
    assert_int_equal(atomic_load(&f->daemon.n_requests), n_before);
}

/* ---- threads and processes ---- */

struct thread_arg {
    struct fixture *f;
    uint32_t index;
    uint32_t n_bad;
    pthread_t thread;
};

static void *run_steps(void *arg)
{
    struct thread_arg *a = arg;
    struct work *w = malloc(4 * sizeof *w);
    attn_ticket tickets[4];
    for (uint32_t i = 0; i < 60; i++) {
        for (uint32_t j = 0; j < 4; j++) {
            work_init(&w[j], a->index * 1000 + i * 10 + j, 1 + (i + j) % 4);
            attn_step_start(a->f->pool, &w[j].step, NULL, NULL, &tickets[j]);
        }
        for (uint32_t j = 0; j < 4; j++) {
            uint32_t t = 0;
            a->n_bad += attn_step_wait(a->f->client, tickets[j], &w[j].result) != ATTN_OK;
            for (uint32_t k = 0; k < w[j].step.n_items; k++) {
                for (uint32_t e = 0; e < w[j].items[k].n_tokens * ROW; e++, t++)
                    a->n_bad += w[j].out[t] != 2 * w[j].q[t] + (float)w[j].items[k].seq;
            }
        }
        work_init(&w[0], a->index + i, 2);
        a->n_bad += attn_step(a->f->pool, &w[0].step, NULL) != ATTN_OK;
        a->n_bad += w[0].out[0] != 2 * w[0].q[0] + (float)w[0].items[0].seq;
    }
    free(w);
    return NULL;
}

static void many_threads_share_one_client(void **state)
{
    enum { N = 6 };
    struct thread_arg a[N];
    for (uint32_t i = 0; i < N; i++) {
        a[i] = (struct thread_arg){.f = *state, .index = i};
        assert_int_equal(pthread_create(&a[i].thread, NULL, run_steps, &a[i]), 0);
    }
    for (uint32_t i = 0; i < N; i++) {
        pthread_join(a[i].thread, NULL);
        assert_int_equal(a[i].n_bad, 0);
    }
    assert_int_equal(counters_of(*state).n_in_flight, 0);
}

static void a_forked_child_is_refused_and_the_parent_goes_on(void **state)
{
    struct fixture *f = *state;
    pid_t pid = fork();
    if (pid == 0) {
        struct work w;
        attn_client *c;
        char *json;
        work_init(&w, 1, 1);
        int bad = attn_step(f->pool, &w.step, NULL) != ATTN_EINVAL;
        bad += attn_client_stats(f->client, SOON_US, &json) != ATTN_EINVAL;
        bad += attn_client_ping(f->client, SOON_US, NULL) != ATTN_EINVAL;
        bad += attn_client_fd(f->client) != -1;
        bad += attn_client_open(f->daemon.url, NULL, SOON_US, &c) != ATTN_ENOTSUP;
        close_client(f);
        _exit(bad);
    }
    int status = -1;
    assert_true(pid > 0);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_int_equal(status, 0);
    struct work w;
    work_init(&w, 4, 4);
    assert_int_equal(attn_step(f->pool, &w.step, &w.result), ATTN_OK);
    assert_good(&w);
}

static void tcp_works_as_ipc_does(void **state)
{
    (void)state;
    struct fixture f = {0};
    struct work w;
    char url[64];
    snprintf(url, sizeof url, "tcp://127.0.0.1:%d", 20000 + (int)(getpid() % 20000));
    fake_daemon_start(&f.daemon, url);
    open_client(&f, NULL);
    for (uint32_t i = 0; i < 10; i++) {
        work_init(&w, i, 4);
        assert_int_equal(attn_step(f.pool, &w.step, &w.result), ATTN_OK);
        assert_good(&w);
    }
    close_client(&f);
    fake_daemon_stop(&f.daemon);
}

/* Answers above 1 MiB, nanomsg's own default limit, and requests larger than socket buffers. */
static void large_messages_pass(void **state)
{
    struct fixture *f = *state;
    struct attn_pool_spec spec = spec_of_test();
    attn_pool *p;
    spec.num_q_heads = 64;
    spec.head_dim_k = 64;
    assert_int_equal(attn_pool_create(f->client, &spec, LONG_US, &p), ATTN_OK);
    enum { TOKENS = 1000, WIDE = 64 * 64 };
    float *q = malloc(sizeof(float) * TOKENS * WIDE), *out = malloc(sizeof(float) * TOKENS * WIDE);
    struct attn_item item = {.seq = 3, .epoch = 1, .n_tokens = TOKENS};
    struct attn_step s = {.struct_size = sizeof s,
                          .n_items = 1,
                          .items = &item,
                          .q = q,
                          .out = out,
                          .timeout_us = LONG_US};
    for (int i = 0; i < TOKENS * WIDE; i++)
        q[i] = (float)(i % 1021);
    assert_int_equal(attn_step(p, &s, NULL), ATTN_OK);
    for (int i = 0; i < TOKENS * WIDE; i++)
        assert_true(out[i] == 2 * q[i] + 3);
    free(q);
    free(out);
    attn_pool_close(p);
}

/* More than the sockets hold: some are queued in the library and sent when others are through. */
static void many_large_messages_wait_for_their_turn(void **state)
{
    struct fixture *f = *state;
    struct attn_pool_spec spec = spec_of_test();
    attn_pool *p;
    spec.num_q_heads = 64;
    spec.head_dim_k = 64;
    assert_int_equal(attn_pool_create(f->client, &spec, LONG_US, &p), ATTN_OK);
    enum { STEPS = 6, TOKENS = 400, WIDE = 64 * 64, ALL = TOKENS * WIDE };
    struct attn_item items[STEPS];
    attn_ticket tickets[STEPS];
    float *q = malloc(sizeof(float) * ALL), *out = malloc(sizeof(float) * ALL * STEPS);
    for (int i = 0; i < ALL; i++)
        q[i] = (float)(i % 1021);
    for (int i = 0; i < STEPS; i++) {
        items[i] = (struct attn_item){.seq = 10 + (uint64_t)i, .epoch = 1, .n_tokens = TOKENS};
        struct attn_step s = {.struct_size = sizeof s,
                              .n_items = 1,
                              .items = &items[i],
                              .q = q,
                              .out = out + (size_t)i * ALL,
                              .timeout_us = LONG_US};
        assert_int_equal(attn_step_start(p, &s, NULL, NULL, &tickets[i]), ATTN_OK);
    }
    struct pollfd fd = {.fd = attn_client_fd(f->client), .events = POLLIN};
    while (counters_of(f).n_in_flight > 0) { /* as an event loop does */
        poll(&fd, 1, 20);
        assert_int_equal(attn_client_poll(f->client, 0, NULL), ATTN_OK);
    }
    for (int i = 0; i < STEPS; i++) {
        assert_int_equal(attn_step_wait(f->client, tickets[i], NULL), ATTN_OK);
        for (int e = 0; e < ALL; e++)
            assert_true(out[(size_t)i * ALL + e] == 2 * q[e] + (float)(10 + i));
    }
    free(q);
    free(out);
    attn_pool_close(p);
}

static void a_message_the_daemon_would_not_take_is_not_sent(void **state)
{
    struct fixture *f = *state;
    struct attn_pool_spec spec = spec_of_test();
    attn_pool *p;
    spec.num_q_heads = 1024;
    spec.head_dim_k = 256;
    assert_int_equal(attn_pool_create(f->client, &spec, LONG_US, &p), ATTN_OK);
    struct attn_item item = {.seq = 3, .epoch = 1, .n_tokens = 64}; /* 64 MiB, and a header */
    float *q = calloc(64, 1 << 20), *out = calloc(64, 1 << 20);
    struct attn_step s = {
        .struct_size = sizeof s, .n_items = 1, .items = &item, .q = q, .out = out};
    unsigned int n_before = atomic_load(&f->daemon.n_requests);
    assert_int_equal(attn_step(p, &s, NULL), ATTN_EINVAL);
    assert_non_null(strstr(attn_last_error()->message, "67108864"));
    item.n_tokens = 65;
    assert_int_equal(attn_step(p, &s, NULL), ATTN_EINVAL);
    assert_int_equal(atomic_load(&f->daemon.n_requests), n_before);
    free(q);
    free(out);
    attn_pool_close(p);
}

#define T(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)

int main(void)
{
    const struct CMUnitTest tests[] = {
        T(hello_tells_session_and_limits),
        T(a_pool_comes_back_as_it_was_made),
        T(sequences_carry_epochs_and_lengths),
        T(a_step_gathers_and_scatters),
        T(many_items_need_no_more_than_memory),
        T(answers_out_of_order_find_their_steps),
        T(repeated_answers_are_counted_and_dropped),
        T(a_callback_may_start_but_not_wait),
        T(the_descriptor_tells_when_to_poll),
        T(too_many_in_flight_are_refused),
        T(typed_errors_carry_the_daemons_sentence),
        T(one_failed_item_leaves_the_others),
        T(retries_are_off_until_asked_for),
        T(every_call_ends_by_its_timeout),
        T(a_late_answer_changes_nothing),
        T(garbled_answers_are_errors_not_crashes),
        T(a_lost_connection_means_sending_again),
        T(without_a_daemon_calls_say_so),
        T(wrong_arguments_are_named),
        T(a_spec_too_large_for_a_header_is_refused),
        T(many_threads_share_one_client),
        T(a_forked_child_is_refused_and_the_parent_goes_on),
        cmocka_unit_test(tcp_works_as_ipc_does),
        T(large_messages_pass),
        T(many_large_messages_wait_for_their_turn),
        T(a_message_the_daemon_would_not_take_is_not_sent),
    };
    return cmocka_run_group_tests_name("libattn", tests, NULL, NULL);
}
