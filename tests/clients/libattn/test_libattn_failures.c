/* test_libattn_failures.c: the client library when the daemon, the way to it, or the caller is
 * wrong. */
#include "tests/clients/libattn/libattn_rig.h"

#include <pthread.h>
#include <sched.h>

/* ---- failures that the daemon reports ---- */

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
    assert_true(w.out[0] == 2 * w.q[0] + (float)w.items[0].seq.id);
    assert_string_equal(attn_last_error()->message, "item is out of blocks");

    work_init(&w, 4, 3);
    work_in_place(&w);
    assert_int_equal(attn_step(f->pool, &w.step, &w.result), ATTN_ENOBLOCKS);
    assert_int_equal(w.n_takes, 1);
    assert_int_equal(w.n_failed_seen, 1);
    assert_true(w.out[0] == 2 * w.q[0] + (float)w.items[0].seq.id);
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
    uint64_t t0 = attn_now_ns();
    assert_int_equal(attn_step(f->pool, &w.step, &w.result), ATTN_OK);
    assert_good(&w);
    assert_int_equal(w.result.n_sends, 4);
    assert_true(attn_now_ns() - t0 >= 3 * 2000000u);
    assert_int_equal(counters_of(f).n_retried, 3);

    atomic_store(&f->daemon.plan.n_fail, 2);
    work_init(&w, 9, 2);
    work_in_place(&w);
    assert_int_equal(attn_step(f->pool, &w.step, &w.result), ATTN_OK);
    assert_good(&w);
    assert_int_equal(w.n_fills, 3); /* for every sending */
    assert_int_equal(w.n_takes, 1); /* a failure as a whole has no tensors */

    atomic_store(&f->daemon.plan.n_fail, 5); /* more than it may retry */
    work_init(&w, 8, 2);
    assert_int_equal(attn_step(f->pool, &w.step, &w.result), ATTN_EOVERLOAD);
    assert_int_equal(w.result.n_sends, 4);
    atomic_store(&f->daemon.plan.n_fail, 1);
    atomic_store(&f->daemon.plan.status, ATTN_EINVAL); /* not retryable */
    assert_int_equal(attn_step(f->pool, &w.step, &w.result), ATTN_EINVAL);
    assert_int_equal(w.result.n_sends, 1);
}

/* ---- failures without an answer ---- */

/* The last handle releases the pool; a release without an answer can be repeated, and then nothing
 * is left. */
static void a_release_without_an_answer_can_be_made_again(void **state)
{
    struct fixture *f = *state;
    attn_pool *second, *third;
    assert_int_equal(attn_pool_describe(f->client, "test", LONG_US, &second), ATTN_OK);
    uint32_t n = atomic_load(&f->daemon.n_requests);
    assert_int_equal(attn_pool_release(f->pool, LONG_US), ATTN_OK);
    assert_int_equal(attn_pool_release(f->pool, LONG_US), ATTN_OK);
    assert_int_equal(atomic_load(&f->daemon.n_requests), n); /* the second handle holds on */
    atomic_store(&f->daemon.plan.n_swallow, 1);
    assert_int_equal(attn_pool_release(second, SOON_US), ATTN_ETIMEDOUT);
    assert_int_equal(atomic_load(&f->daemon.n_requests), n + 1);
    assert_int_equal(attn_pool_release(second, LONG_US), ATTN_OK);
    assert_int_equal(atomic_load(&f->daemon.n_requests), n + 2);
    assert_int_equal(attn_pool_release(second, LONG_US), ATTN_OK);
    assert_int_equal(atomic_load(&f->daemon.n_requests), n + 2);
    assert_int_equal(attn_pool_describe(f->client, "test", LONG_US, &third), ATTN_OK);
    assert_int_equal(attn_pool_release(third, LONG_US), ATTN_OK); /* it held again */
    assert_int_equal(atomic_load(&f->daemon.n_requests), n + 4);
    assert_int_equal(attn_pool_release(NULL, LONG_US), ATTN_EINVAL);
    attn_pool_close(second);
    attn_pool_close(third);
}

static void every_call_ends_by_its_timeout(void **state)
{
    struct fixture *f = *state;
    struct work w;
    struct attn_seq a = {.id = 1, .epoch = 1};
    attn_pool *p = NULL;
    char *json = NULL;
    struct attn_pool_spec spec = spec_of_test();
    uint64_t t0 = attn_now_ns();
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
    assert_int_equal(attn_client_drain(f->client, 0, SOON_US), ATTN_ETIMEDOUT);
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
    assert_true(attn_now_ns() - t0 >= 13ull * SOON_US * 1000u);
    assert_int_equal(counters_of(f).n_timed_out, 12);
}

struct waiting {
    struct fixture *f;
    struct work w;
};

static void *step_of_thread(void *arg)
{
    struct waiting *x = arg;
    attn_step(x->f->pool, &x->w.step, &x->w.result);
    return NULL;
}

/* Who knows that the daemon is gone for good ends what waits for it, and what comes later. */
static void who_gives_a_daemon_up_waits_for_nothing(void **state)
{
    struct fixture *f = *state;
    static struct waiting waits[2];
    static struct work ticket, called, late;
    pthread_t threads[2];
    attn_ticket t;
    uint32_t n = 0;
    char *json = NULL;
    atomic_store(&f->daemon.plan.n_swallow, 1000000);
    for (uint32_t i = 0; i < 2; i++) {
        waits[i].f = f;
        work_init(&waits[i].w, i, 1);
        waits[i].w.step.timeout_us = LONG_US;
        assert_int_equal(pthread_create(&threads[i], NULL, step_of_thread, &waits[i]), 0);
    }
    work_init(&ticket, 3, 1);
    work_init(&called, 4, 1);
    work_init(&late, 5, 1);
    ticket.step.timeout_us = called.step.timeout_us = late.step.timeout_us = LONG_US;
    assert_int_equal(attn_step_start(f->pool, &called.step, on_done, &called, &t), ATTN_OK);
    assert_int_equal(attn_step_start(f->pool, &ticket.step, NULL, NULL, &t), ATTN_OK);
    while (counters_of(f).n_in_flight < 4)
        sched_yield();
    attn_client_give_up(f->client);
    for (int i = 0; i < 2; i++) {
        pthread_join(threads[i], NULL);
        assert_int_equal(waits[i].w.result.status, ATTN_ECONN);
        assert_non_null(strstr(waits[i].w.result.message, " was given up"));
        assert_untouched(&waits[i].w);
    }
    assert_int_equal(attn_step_wait(f->client, t, &ticket.result), ATTN_ECONN);
    while (called.n_calls == 0)
        attn_client_poll(f->client, SOON_US, &n);
    assert_int_equal(called.result.status, ATTN_ECONN);
    assert_int_equal(attn_step(f->pool, &late.step, &late.result), ATTN_ECONN);
    assert_int_equal(attn_client_stats(f->client, LONG_US, &json), ATTN_ECONN);
    assert_non_null(strstr(attn_last_error()->message, " was given up"));
    assert_int_equal(counters_of(f).n_in_flight, 0);
    attn_client_give_up(f->client); /* again, or nobody: nothing */
    attn_client_give_up(NULL);
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

static void the_environment_says_where_the_daemon_is(void **state)
{
    struct fixture *f = *state;
    attn_client *c = NULL;
    setenv("ATTND_ENDPOINT", f->daemon.url, 1);
    assert_string_equal(attn_default_url(), f->daemon.url);
    assert_int_equal(attn_client_open(NULL, NULL, SOON_US, &c), ATTN_OK);
    attn_client_close(c);
    setenv("ATTND_ENDPOINT", "", 1); /* is no url, but none */
    setenv("XDG_RUNTIME_DIR", "/nowhere", 1);
    assert_string_equal(attn_default_url(), "ipc:///run/attnd/attnd.sock");
    unsetenv("ATTND_ENDPOINT");
    assert_string_equal(attn_default_url(), "ipc:///run/attnd/attnd.sock");
}

static void wrong_arguments_are_named(void **state)
{
    struct fixture *f = *state;
    struct work w;
    attn_client *c = NULL;
    static const char *const urls[] = {"", "ipc://", "http://x", "shm://", "tcp://nohost"};
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
    REFUSED(w.items[1].n_tokens = 65536 - 10 + 1); /* past the longest sequence */
    REFUSED(w.items[0].n_tokens = w.items[1].n_tokens = UINT32_MAX);
    REFUSED(w.step.array_dtype = ATTN_BF16);
    REFUSED(w.step.array_dtype = (attn_dtype)77);
    REFUSED(work_in_place(&w); w.step.q = w.q);
    REFUSED(work_in_place(&w); w.step.lse = w.lse);
    REFUSED(work_in_place(&w); w.in_place.fill = NULL);
    REFUSED(work_in_place(&w); w.in_place.take = NULL);
    REFUSED(work_in_place(&w); w.in_place.is_attend = false);
    REFUSED(work_in_place(&w); w.in_place.is_append = w.in_place.is_attend = false);
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

int main(void)
{
    const struct CMUnitTest tests[] = {
        T(typed_errors_carry_the_daemons_sentence),
        T(one_failed_item_leaves_the_others),
        T(retries_are_off_until_asked_for),
        T(a_release_without_an_answer_can_be_made_again),
        T(every_call_ends_by_its_timeout),
        T(who_gives_a_daemon_up_waits_for_nothing),
        T(a_late_answer_changes_nothing),
        T(garbled_answers_are_errors_not_crashes),
        T(a_lost_connection_means_sending_again),
        T(without_a_daemon_calls_say_so),
        T(the_environment_says_where_the_daemon_is),
        T(wrong_arguments_are_named),
        T(a_spec_too_large_for_a_header_is_refused),
    };
    return cmocka_run_group_tests_name("libattn failures", tests, NULL, NULL);
}
