/* test_libattn_life.c: clients at the real daemon that outlive silence and the daemon itself, over
 * ipc and shared memory. */
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "clients/libattn/pool/pool.h"
#include "proto/attn_time.h"
#include "tests/daemon/e2e/e2e.h"

enum { HEADS = 2, DIM = 32, ROW = HEADS * DIM, LONG_US = 20000000 };

static const char *const flags[] = {"--engine.lease", "2s", NULL};
static struct e2e d;

static int start(void **state)
{
    (void)state;
    e2e_start(&d, flags);
    return 0;
}

static int stop(void **state)
{
    (void)state;
    e2e_stop(&d);
    return 0;
}

#define MUST_OK(call)                                                                              \
    do {                                                                                           \
        if ((call) != ATTN_OK)                                                                     \
            fail_msg("%s: %s", #call, attn_last_error()->message);                                 \
    } while (0)

/* A client with a pool and a sequence that has a token. */
struct worker {
    attn_client *c;
    attn_pool *p;
    struct attn_seq seq;
    struct attn_item item;
    struct attn_step step;
    float x[ROW], out[ROW];
    int n_calls;
    attn_gone gone;
};

static const char *url_of(bool is_shm)
{
    static char url[128];
    snprintf(url, sizeof url, "shm://%s", d.shm_path);
    return is_shm ? url : d.url;
}

static attn_status step(struct worker *w)
{
    w->item.seq = w->seq;
    return attn_step(w->p, &w->step, NULL);
}

static void make(struct worker *w, uint64_t id)
{
    struct attn_pool_spec spec = {.struct_size = sizeof spec,
                                  .layer_struct_size = sizeof(struct attn_layer),
                                  .name = "life",
                                  .num_layers = 1,
                                  .num_q_heads = HEADS,
                                  .num_kv_heads = HEADS,
                                  .head_dim_k = DIM,
                                  .n_blocks = 64,
                                  .q_dtype = ATTN_F32};
    MUST_OK(attn_pool_create(w->c, &spec, LONG_US, &w->p));
    MUST_OK(attn_seq_open(w->p, id, LONG_US, &w->seq));
    for (int i = 0; i < ROW; i++) {
        w->x[i] = (float)i;
        w->out[i] = -1;
    }
    w->item = (struct attn_item){.n_tokens = 1};
    w->step = (struct attn_step){.struct_size = sizeof w->step,
                                 .n_items = 1,
                                 .items = &w->item,
                                 .q = w->x,
                                 .k = w->x,
                                 .v = w->x,
                                 .out = w->out,
                                 .timeout_us = LONG_US};
    MUST_OK(step(w));
    assert_memory_equal(w->out, w->x, sizeof w->x); /* one key: its value */
}

static void open_worker(struct worker *w, bool is_shm, bool has_no_keeper, uint64_t id)
{
    struct attn_client_options o = {.struct_size = sizeof o, .has_no_keeper = has_no_keeper};
    memset(w, 0, sizeof *w);
    MUST_OK(attn_client_open(url_of(is_shm), &o, LONG_US, &w->c));
    make(w, id);
}

static void close_worker(struct worker *w)
{
    attn_pool_close(w->p);
    attn_client_close(w->c);
}

/* Requests that open a sequence are known by their ids, which begin anew in a new client object. */
static void a_resumed_session_goes_on_with_higher_ids(void **state)
{
    (void)state;
    struct worker a, b = {0};
    struct attn_seq seq;
    open_worker(&a, false, false, 400);
    for (uint64_t id = 401; id < 410; id++)
        MUST_OK(attn_seq_open(a.p, id, LONG_US, &seq));
    struct attn_client_info info = {.struct_size = sizeof info};
    MUST_OK(attn_client_info(a.c, &info));
    struct attn_client_options o = {.struct_size = sizeof o, .resume_session = info.session};
    MUST_OK(attn_client_open(d.url, &o, LONG_US, &b.c));
    make(&b, 410);
    for (uint64_t id = 411; id < 420; id++)
        MUST_OK(attn_seq_open(b.p, id, LONG_US, &seq));
    close_worker(&b);
    close_worker(&a);
}

static unsigned int n_expired(attn_client *c)
{
    static const char name[] = "\"leases_expired_total\":";
    char *json = NULL;
    MUST_OK(attn_client_stats(c, LONG_US, &json));
    const char *at = strstr(json, name);
    assert_non_null(at);
    unsigned int n = (unsigned int)strtoul(at + strlen(name), NULL, 10);
    attn_free(json);
    return n;
}

static void assert_gone(attn_status st, attn_gone gone)
{
    if (st != ATTN_ENOTFOUND || attn_last_error_gone() != gone)
        fail_msg("status %d, gone %d, expected %d: %s", (int)st, (int)attn_last_error_gone(),
                 (int)gone, attn_last_error()->message);
}

/* The silent one is made last: when its lease is over, the others have been idle for longer. */
static void an_idle_client_keeps_its_session(void **state)
{
    (void)state;
    struct worker kept[2], silent;
    attn_client *watcher = NULL;
    open_worker(&kept[0], false, false, 1);
    open_worker(&kept[1], true, false, 2);
    open_worker(&silent, false, true, 3);
    MUST_OK(attn_client_open(d.url, NULL, LONG_US, &watcher));
    unsigned int n_before = n_expired(watcher);
    uint64_t until_ns = attn_now_ns() + UINT64_C(300000000000);
    while (n_expired(watcher) == n_before)
        assert_true(attn_now_ns() < until_ns);
    assert_int_equal(n_expired(watcher), n_before + 1);
    assert_gone(step(&silent), ATTN_GONE_SESSION);
    for (int i = 0; i < 2; i++) {
        MUST_OK(step(&kept[i]));
        MUST_OK(attn_seq_close(kept[i].p, &kept[i].seq, LONG_US));
        close_worker(&kept[i]);
    }
    MUST_OK(attn_seq_close(silent.p, &silent.seq, LONG_US)); /* went with its session */
    close_worker(&silent);
    attn_client_close(watcher);
}

static void errors_tell_what_is_gone(void **state)
{
    (void)state;
    struct attn_seq none = {.id = 999, .epoch = 1}, out;
    attn_pool *p = NULL;
    for (int is_shm = 0; is_shm < 2; is_shm++) {
        struct worker w;
        open_worker(&w, is_shm, false, 10);
        assert_gone(attn_seq_truncate(w.p, &none, 0, LONG_US), ATTN_GONE_SEQ);
        assert_gone(attn_seq_fork(w.p, &none, 998, 0, LONG_US, &out, NULL), ATTN_GONE_SEQ);
        assert_gone(attn_seq_adopt(w.p, 999, LONG_US, &out, NULL), ATTN_GONE_SEQ);
        assert_gone(attn_seq_close(w.p, &none, LONG_US), ATTN_GONE_SEQ);
        assert_gone(attn_pool_describe(w.c, "nothing", LONG_US, &p), ATTN_GONE_POOL);
        w.item.seq = none;
        assert_gone(attn_step(w.p, &w.step, NULL), ATTN_GONE_SEQ);
        uint32_t id = w.p->id;
        w.p->id = 4711;
        assert_gone(step(&w), ATTN_GONE_POOL);
        assert_gone(attn_seq_open(w.p, 11, LONG_US, &out), ATTN_GONE_POOL);
        w.p->id = id;
        w.item.pos = 5; /* a gap: another error */
        assert_int_equal(step(&w), ATTN_EINVAL);
        assert_int_equal(attn_last_error_gone(), ATTN_GONE_NOTHING);
        w.item.pos = 0;
        MUST_OK(step(&w));
        MUST_OK(attn_seq_close(w.p, &w.seq, LONG_US));
        close_worker(&w);
    }
}

static void on_done(void *user, attn_ticket ticket, const struct attn_result *r)
{
    struct worker *w = user;
    (void)ticket;
    assert_int_equal(r->status, ATTN_ENOTFOUND);
    w->gone = attn_last_error_gone();
    w->n_calls++;
}

static void a_client_goes_on_after_the_daemon_was_killed(void **state)
{
    (void)state;
    struct worker w[2];
    struct attn_client_info before = {.struct_size = sizeof before}, after = before;
    for (int i = 0; i < 2; i++)
        open_worker(&w[i], i == 1, false, 20 + (uint64_t)i);
    MUST_OK(attn_client_info(w[0].c, &before));
    e2e_signal(&d, SIGKILL);
    assert_int_equal(e2e_wait(&d), -SIGKILL);
    e2e_restart(&d, flags);
    for (int i = 0; i < 2; i++) {
        attn_pool *old = w[i].p;
        struct attn_seq old_seq = w[i].seq, out;
        w[i].item.seq = old_seq;
        MUST_OK(attn_step_start(old, &w[i].step, on_done, &w[i], NULL));
        while (w[i].n_calls == 0)
            MUST_OK(attn_client_poll(w[i].c, LONG_US, NULL));
        assert_int_equal(w[i].gone, ATTN_GONE_SESSION);
        assert_gone(step(&w[i]), ATTN_GONE_SESSION);
        assert_gone(attn_client_ping(w[i].c, LONG_US, NULL), ATTN_GONE_SESSION);
        assert_gone(attn_pool_describe(w[i].c, "life", LONG_US, &w[i].p), ATTN_GONE_SESSION);
        MUST_OK(attn_seq_close(old, &old_seq, LONG_US));

        MUST_OK(attn_client_reopen(w[i].c, LONG_US));
        MUST_OK(attn_client_ping(w[i].c, LONG_US, NULL));
        assert_gone(step(&w[i]), ATTN_GONE_POOL); /* its number may be another pool's by now */
        assert_gone(attn_seq_open(old, 5, LONG_US, &out), ATTN_GONE_POOL);
        MUST_OK(attn_seq_close(old, &old_seq, LONG_US));
        make(&w[i], 20 + (uint64_t)i);
        MUST_OK(step(&w[i]));
        attn_pool_close(old);
    }
    MUST_OK(attn_client_info(w[0].c, &after));
    assert_true(after.session != 0 && after.session != before.session);
    for (int i = 0; i < 2; i++) {
        MUST_OK(attn_seq_close(w[i].p, &w[i].seq, LONG_US));
        close_worker(&w[i]);
    }
}

/* Of a little more than half of the daemon's memory. */
static attn_status make_large(attn_client *c, const char *name, attn_pool **out)
{
    struct attn_pool_spec spec = {.struct_size = sizeof spec,
                                  .layer_struct_size = sizeof(struct attn_layer),
                                  .name = name,
                                  .num_layers = 1,
                                  .num_q_heads = HEADS,
                                  .num_kv_heads = HEADS,
                                  .head_dim_k = DIM,
                                  .n_blocks = 1250,
                                  .q_dtype = ATTN_F32};
    return attn_pool_create(c, &spec, LONG_US, out);
}

static void a_pools_memory_is_anothers_when_its_last_handle_lets_go(void **state)
{
    (void)state;
    for (int is_shm = 0; is_shm < 2; is_shm++) {
        attn_client *c, *other;
        attn_pool *a, *again, *b;
        struct attn_seq seq;
        MUST_OK(attn_client_open(url_of(is_shm), NULL, LONG_US, &c));
        MUST_OK(attn_client_open(url_of(!is_shm), NULL, LONG_US, &other));
        MUST_OK(make_large(c, "a", &a));
        MUST_OK(make_large(c, "a", &again));
        assert_int_equal(make_large(other, "b", &b), ATTN_ENOMEM);
        MUST_OK(attn_pool_release(a, LONG_US));
        assert_int_equal(make_large(other, "b", &b), ATTN_ENOMEM);
        MUST_OK(attn_seq_open(again, 500, LONG_US, &seq));
        MUST_OK(attn_pool_release(again, LONG_US));
        assert_int_equal(make_large(other, "b", &b), ATTN_ENOMEM); /* a sequence lives in it */
        MUST_OK(attn_seq_close(again, &seq, LONG_US));
        MUST_OK(make_large(other, "b", &b));
        assert_gone(attn_seq_open(again, 500, LONG_US, &seq), ATTN_GONE_POOL);
        attn_pool_close(a);
        attn_pool_close(again);

        MUST_OK(attn_client_reopen(other, LONG_US)); /* the session that held it is over */
        MUST_OK(attn_pool_release(b, LONG_US));
        attn_pool_close(b);
        MUST_OK(make_large(c, "a", &a));
        attn_client_close(c); /* with its hold */
        attn_pool_close(a);
        MUST_OK(make_large(other, "b", &b));
        MUST_OK(attn_pool_release(b, LONG_US));
        attn_pool_close(b);
        attn_client_close(other);
    }
}

static void a_session_may_be_left_for_a_new_one(void **state)
{
    (void)state;
    struct worker w;
    open_worker(&w, false, false, 30);
    attn_pool *old = w.p;
    MUST_OK(attn_client_reopen(w.c, LONG_US));
    assert_gone(step(&w), ATTN_GONE_POOL);
    attn_pool_close(old);
    make(&w, 31);
    MUST_OK(step(&w));
    MUST_OK(attn_seq_close(w.p, &w.seq, LONG_US));
    close_worker(&w);
}

static void a_client_that_fails_fast_does_not_wait_for_a_daemon(void **state)
{
    (void)state;
    static const struct {
        const char *url, *why;
    } cases[] = {
        {"ipc:///tmp/attnd-nobody/here", "no such path"},
        {"shm:///tmp/attnd-nobody/here", "no such path"},
        {"shm:///dev/null", "not a socket"},
        {"tcp://127.0.0.1:1", "nobody listens"},
        {NULL, "another type"},
    };
    char other[400];
    struct attn_client_options o = {.struct_size = sizeof o, .fail_fast = 1};
    snprintf(other, sizeof other, "shm://%s", d.url + strlen("ipc://"));
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        attn_client *c = NULL;
        const char *url = cases[i].url != NULL ? cases[i].url : other;
        /* an hour: the test's time limit says whether it waits */
        assert_int_equal(attn_client_open(url, &o, 3600000000u, &c), ATTN_ECONN);
        if (strstr(attn_last_error()->message, cases[i].why) == NULL)
            fail_msg("\"%s\" lacks \"%s\"", attn_last_error()->message, cases[i].why);
        assert_non_null(strstr(attn_last_error()->message, url));
    }
    struct worker w;
    open_worker(&w, false, false, 40);
    close_worker(&w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(an_idle_client_keeps_its_session),
        cmocka_unit_test(errors_tell_what_is_gone),
        cmocka_unit_test(a_client_goes_on_after_the_daemon_was_killed),
        cmocka_unit_test(a_pools_memory_is_anothers_when_its_last_handle_lets_go),
        cmocka_unit_test(a_session_may_be_left_for_a_new_one),
        cmocka_unit_test(a_client_that_fails_fast_does_not_wait_for_a_daemon),
        cmocka_unit_test(a_resumed_session_goes_on_with_higher_ids), /* its sessions expire later */
    };
    return cmocka_run_group_tests_name("libattn_life", tests, start, stop);
}
