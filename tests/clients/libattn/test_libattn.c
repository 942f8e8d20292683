/* test_libattn.c: the client library at a fake daemon: calls, many in flight, threads, forks. */
#include "clients/libattn/core/core.h"
#include "tests/clients/libattn/libattn_rig.h"

#include <poll.h>
#include <semaphore.h>
#include <sys/wait.h>
#include <unistd.h>

/* ---- the good way ---- */

static void hello_tells_session_and_limits(void **state)
{
    struct fixture *f = *state;
    struct attn_client_info info = {.struct_size = sizeof info};
    assert_int_equal(attn_client_info(f->client, &info), ATTN_OK);
    assert_int_equal(info.session, 77);
    assert_int_equal(info.max_step_items, 256);
    assert_int_equal(info.max_sequences, 512);
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
    const struct attn_branch branches[2] = {{4, 1}, {12, 3}};
    layers[2].branches = branches;
    layers[2].n_branches = 2;
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
    assert_null(s->layers[1].branches);
    assert_int_equal(s->layers[2].n_branches, 2);
    assert_memory_equal(s->layers[2].branches, branches, sizeof branches);
    assert_int_equal(attn_pool_free_blocks(again), 123);
    attn_pool_close(p);
    attn_pool_close(again);
    layers[2].n_branches = 9;
    assert_int_equal(attn_pool_create(f->client, &spec, LONG_US, &p), ATTN_EINVAL);
    assert_non_null(strstr(attn_last_error()->message, "layers[2].branches: 9 of them"));
    layers[2].n_branches = 2;
    layers[2].branches = NULL;
    assert_int_equal(attn_pool_create(f->client, &spec, LONG_US, &p), ATTN_EINVAL);
    assert_non_null(strstr(attn_last_error()->message, "layers[2].branches"));
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
    assert_int_equal(a.epoch, 3);
    assert_int_equal(attn_seq_close(f->pool, &a, LONG_US), ATTN_OK);
    uint64_t ns = 0;
    char *json = NULL;
    assert_int_equal(attn_client_ping(f->client, LONG_US, &ns), ATTN_OK);
    assert_true(ns > 0);
    assert_int_equal(attn_client_stats(f->client, LONG_US, &json), ATTN_OK);
    assert_string_equal(json, "{\"steps\": 1}");
    attn_free(json);
    assert_int_equal(attn_client_drain(f->client, 0, LONG_US), ATTN_OK);
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

static void a_step_in_place_is_filled_and_read_in_its_message(void **state)
{
    struct fixture *f = *state;
    struct work w;
    for (uint32_t n = 1; n <= 4; n++) {
        work_init(&w, n, n);
        work_in_place(&w);
        assert_int_equal(attn_step(f->pool, &w.step, &w.result), ATTN_OK);
        assert_good(&w);
        assert_int_equal(w.n_fills, 1);
        assert_int_equal(w.n_takes, 1);
    }
    work_init(&w, 9, 2); /* append only */
    w.step.q = NULL;
    w.step.lse = NULL;
    work_in_place(&w);
    assert_int_equal(attn_step(f->pool, &w.step, &w.result), ATTN_OK);
    assert_int_equal(w.n_fills, 1);
    assert_int_equal(w.n_takes, 0);
    assert_untouched(&w);
}

static void a_step_for_a_device_carries_the_same(void **state)
{
    struct fixture *f = *state;
    struct work w;
    f->client->is_streaming = true; /* as at a daemon that reads messages with a device */
    for (uint32_t n = 1; n <= 4; n++) {
        work_init(&w, n, n);
        assert_int_equal(attn_step(f->pool, &w.step, &w.result), ATTN_OK);
        assert_good(&w);
        float copy[MAX_TOKENS * ROW];
        memset(copy, 0xff, sizeof copy);
        attn_client_copy(f->client, copy, w.q, sizeof copy);
        assert_memory_equal(copy, w.q, sizeof copy);
    }
}

static void many_items_need_no_more_than_memory(void **state)
{
    struct fixture *f = *state;
    enum { N = 200 };
    struct attn_item items[N];
    static float q[N * ROW], out[N * ROW];
    for (int i = 0; i < N; i++)
        items[i] = (struct attn_item){.seq = {(uint64_t)i, 1, 0}, .n_tokens = 1};
    for (int i = 0; i < N * ROW; i++)
        q[i] = (float)(i % 97);
    struct attn_step s = {
        .struct_size = sizeof s, .n_items = N, .items = items, .q = q, .out = out};
    assert_int_equal(attn_step(f->pool, &s, NULL), ATTN_OK);
    for (int i = 0; i < N * ROW; i++)
        assert_true(out[i] == 2 * q[i] + (float)(i / ROW));
}

/* ---- several in flight ---- */

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

/* ---- the keeper ---- */

static void count_hello(void *user, const Attnd__Request *r)
{
    if (r->body_case == ATTND__REQUEST__BODY_HELLO)
        sem_post(user);
}

/* Until n more have come. */
static void await_hellos(sem_t *hellos, unsigned int n)
{
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += LONG_US / 1000000;
    while (sem_trywait(hellos) == 0) /* those that came before */
        continue;
    for (; n > 0; n--)
        assert_int_equal(sem_timedwait(hellos, &until), 0);
}

struct on_thread {
    struct work w;
    pthread_t thread;
    uint32_t n_elsewhere;
};

static void on_done_here(void *user, attn_ticket ticket, const struct attn_result *r)
{
    struct on_thread *a = user;
    on_done(&a->w, ticket, r);
    a->n_elsewhere += !pthread_equal(a->thread, pthread_self());
}

static void an_idle_client_renews_and_runs_no_callback(void **state)
{
    (void)state;
    sem_t hellos;
    struct fixture f = {.daemon = {.see = count_hello, .user = &hellos, .lease_us = 6000}};
    char url[96];
    assert_int_equal(sem_init(&hellos, 0, 0), 0);
    struct on_thread *a = calloc(1, sizeof *a);
    snprintf(url, sizeof url, "ipc:///tmp/attn_keep_%d.sock", (int)getpid());
    fake_daemon_start(&f.daemon, url);
    open_client(&f, NULL);
    a->thread = pthread_self();
    for (uint32_t i = 0; i < 300; i++) { /* now and then the keeper reads when the answer comes */
        if (i % 3 == 0)
            await_hellos(&hellos, 1);
        work_init(&a->w, i, 2);
        assert_int_equal(attn_step_start(f.pool, &a->w.step, on_done_here, a, NULL), ATTN_OK);
        if (i % 100 == 99)
            await_hellos(&hellos, 3); /* in flight and not read: the session is renewed still */
        while (a->w.n_calls == 0)
            assert_int_equal(attn_client_poll(f.client, LONG_US, NULL), ATTN_OK);
        assert_good(&a->w);
        assert_int_equal(a->n_elsewhere, 0);
    }
    assert_int_equal(counters_of(&f).n_stray, 0);

    struct pollfd p = {.fd = attn_client_fd(f.client), .events = POLLIN};
    for (uint32_t i = 0; i < 200; i++) { /* the same in an event loop */
        work_init(&a->w, i, 2);
        assert_int_equal(attn_step_start(f.pool, &a->w.step, on_done_here, a, NULL), ATTN_OK);
        while (a->w.n_calls == 0) {
            poll(&p, 1, LONG_US / 1000);
            assert_int_equal(attn_client_poll(f.client, 0, NULL), ATTN_OK);
        }
        assert_good(&a->w);
        assert_int_equal(a->n_elsewhere, 0);
        if (i % 2 == 0)
            await_hellos(&hellos, 1);
    }
    free(a);
    close_client(&f);
    fake_daemon_stop(&f.daemon);
    sem_destroy(&hellos);
    unlink(url + strlen("ipc://"));
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
                    a->n_bad += w[j].out[t] != 2 * w[j].q[t] + (float)w[j].items[k].seq.id;
            }
        }
        work_init(&w[0], a->index + i, 2);
        a->n_bad += attn_step(a->f->pool, &w[0].step, NULL) != ATTN_OK;
        a->n_bad += w[0].out[0] != 2 * w[0].q[0] + (float)w[0].items[0].seq.id;
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

static void a_forked_child_opens_its_own_and_the_parent_goes_on(void **state)
{
    struct fixture *f = *state;
    struct attn_client_options o = {.struct_size = sizeof o};
#ifdef __SANITIZE_THREAD__
    o.has_no_keeper = 1; /* the thread sanitizer knows no threads in a child */
#endif
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
        close_client(f);
        bad += attn_client_open(f->daemon.url, &o, LONG_US, &c) != ATTN_OK; /* one of its own */
        bad += bad == 0 && attn_client_ping(c, LONG_US, NULL) != ATTN_OK;
        attn_client_close(bad == 0 ? c : NULL);
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

static void a_forked_child_may_close_what_still_waits_to_be_sent(void **state)
{
    struct fixture *f = *state;
    struct work w, queued;
    char url[96];
    memcpy(url, f->daemon.url, sizeof url);
    fake_daemon_stop(&f->daemon);
    work_init(&w, 1, 2);
    w.step.timeout_us = SOON_US;
    assert_int_equal(attn_step(f->pool, &w.step, NULL), ATTN_ECONN); /* noticed by now */
    work_init(&queued, 2, 2);
    assert_int_equal(attn_step_start(f->pool, &queued.step, on_done, &queued, NULL), ATTN_OK);
    pid_t pid = fork();
    if (pid == 0) {
        close_client(f);
        _exit(queued.n_calls); /* the parent's callback */
    }
    int status = -1;
    assert_true(pid > 0);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_int_equal(status, 0);
    fake_daemon_start(&f->daemon, url);
    close_client(f);
    assert_int_equal(queued.n_calls, 1);
    assert_int_equal(queued.result.status, ATTN_ECONN);
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

/* Answers and requests larger than socket buffers. */
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
    struct attn_item item = {.seq = {3, 1, 0}, .n_tokens = TOKENS};
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
        items[i] = (struct attn_item){.seq = {10 + (uint64_t)i, 1, 0}, .n_tokens = TOKENS};
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

int main(void)
{
    const struct CMUnitTest tests[] = {
        T(hello_tells_session_and_limits),
        T(a_pool_comes_back_as_it_was_made),
        T(sequences_carry_epochs_and_lengths),
        T(a_step_gathers_and_scatters),
        T(a_step_in_place_is_filled_and_read_in_its_message),
        T(a_step_for_a_device_carries_the_same),
        T(many_items_need_no_more_than_memory),
        T(answers_out_of_order_find_their_steps),
        T(repeated_answers_are_counted_and_dropped),
        T(a_callback_may_start_but_not_wait),
        T(the_descriptor_tells_when_to_poll),
        T(too_many_in_flight_are_refused),
        T(many_threads_share_one_client),
        T(a_forked_child_opens_its_own_and_the_parent_goes_on),
        T(a_forked_child_may_close_what_still_waits_to_be_sent),
        T(large_messages_pass),
        T(many_large_messages_wait_for_their_turn),
        cmocka_unit_test(tcp_works_as_ipc_does),
        cmocka_unit_test(an_idle_client_renews_and_runs_no_callback),
    };
    return cmocka_run_group_tests_name("libattn", tests, NULL, NULL);
}
