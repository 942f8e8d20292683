/* e2e_life.c: start, signals, overload, deadlines, leases and the end of the running daemon. */
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cmocka.h>

#include "tests/daemon/e2e/e2e.h"

static struct e2e d;
static struct e2e_client c;
static struct e2e_seq s[64];

enum { HEAVY_TOKENS = 1500 }; /* some milliseconds of work */
#define HAS_ROOM "--device.kv_memory", "64M" /* for some dozens of such sequences */

static void begin(const char *const *flags)
{
    e2e_start(&d, flags);
    e2e_connect(&c, &d);
    e2e_make_pool(&c, ATTN_BF16, 0);
}

static uint64_t send_heavy(struct e2e_seq *seq)
{
    struct e2e_item it = {seq, 0, HEAVY_TOKENS};
    return e2e_send_zeros(&c, 0, &it, 0);
}

static uint64_t send_one(struct e2e_seq *seq, uint32_t pos, uint64_t timeout_us)
{
    struct e2e_item it = {seq, pos, 1};
    return e2e_send_step(&c, 0, E2E_BOTH, &it, 1, timeout_us);
}

/* Requests of one peer are read in order. With several cards, by each: a few new sequences are on
 * all of them. */
static void all_have_arrived(void)
{
    struct e2e_seq more;
    for (uint32_t i = 0; i < 6 && getenv("E2E_CARDS") != NULL; i++)
        assert_int_equal(e2e_open_seq(&c, &more, 100 + i, 1), ATTN_OK);
    Attnd__Stats b = ATTND__STATS__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT;
    h.session = c.session;
    h.body_case = ATTND__REQUEST__BODY_STATS;
    h.stats = &b;
    assert_int_equal(e2e_call(&c, &h)->status, ATTN_OK);
}

static void sigterm_finishes_what_is_in_flight(void **state)
{
    (void)state;
    begin((const char *const[]){HAS_ROOM, NULL});
    uint64_t id[20];
    for (uint32_t i = 0; i < 20; i++) {
        assert_int_equal(e2e_open_seq(&c, &s[i], i + 1, i), ATTN_OK);
        id[i] = send_heavy(&s[i]);
    }
    all_have_arrived();
    e2e_signal(&d, SIGTERM);
    for (uint32_t i = 0; i < 20; i++)
        assert_int_equal(e2e_await(&c, id[i])->header->status, ATTN_OK);
    assert_int_equal(e2e_wait(&d), 0);
    assert_true(e2e_log_has(&d, "drained"));
    e2e_disconnect(&c);
    e2e_stop(&d);
}

static void what_was_received_is_computed_after_the_drain_timeout_too(void **state)
{
    (void)state;
    begin((const char *const[]){"--engine.drain_timeout", "1ms", HAS_ROOM, NULL});
    uint64_t id[20];
    for (uint32_t i = 0; i < 20; i++) {
        assert_int_equal(e2e_open_seq(&c, &s[i], i + 1, i), ATTN_OK);
        id[i] = send_heavy(&s[i]);
    }
    all_have_arrived();
    e2e_signal(&d, SIGTERM);
    for (uint32_t i = 0; i < 20; i++)
        assert_int_equal(e2e_await(&c, id[i])->header->status, ATTN_OK);
    e2e_disconnect(&c);
    assert_int_equal(e2e_wait(&d), 0);
    e2e_stop(&d);
}

static void a_draining_daemon_takes_steps_and_nothing_new(void **state)
{
    (void)state;
    begin((const char *const[]){HAS_ROOM, NULL});
    for (uint32_t i = 0; i < 20; i++)
        assert_int_equal(e2e_open_seq(&c, &s[i], i + 1, i), ATTN_OK);
    Attnd__Drain b = ATTND__DRAIN__INIT;
    Attnd__Open o = ATTND__OPEN__INIT;
    Attnd__Request h = ATTND__REQUEST__INIT, g = ATTND__REQUEST__INIT;
    h.session = g.session = c.session;
    h.body_case = ATTND__REQUEST__BODY_DRAIN;
    h.drain = &b;
    o.seq = 99;
    o.pool = c.pool;
    g.body_case = ATTND__REQUEST__BODY_OPEN;
    g.open = &o;
    uint64_t heavy[19];
    for (uint32_t i = 1; i < 20; i++) /* keeps it from ending at once */
        heavy[i - 1] = send_heavy(&s[i]);
    assert_int_equal(e2e_call(&c, &h)->status, ATTN_OK);
    uint64_t opened = e2e_send(&c, &g, NULL, 0), step = send_one(&s[0], 0, 0);
    assert_int_equal(e2e_await(&c, opened)->header->status, ATTN_EDRAINING);
    assert_int_equal(e2e_await(&c, step)->header->status, ATTN_OK);
    for (uint32_t i = 0; i < 19; i++)
        assert_int_equal(e2e_await(&c, heavy[i])->header->status, ATTN_OK);
    assert_int_equal(e2e_wait(&d), 0);
    e2e_disconnect(&c);
    e2e_stop(&d);
}

static void a_second_sigterm_stops_now(void **state)
{
    (void)state;
    if (e2e_is_spread())
        skip(); /* what is heavy for one card need not be for several */
    static const char *const flags[] = {"--listen.peer_share", "100", "--listen.principal_share",
                                        "100", NULL};
    begin(flags);
    enum { N = 40 };
    uint64_t id[N];
    for (uint32_t i = 0; i < N; i++)
        assert_int_equal(e2e_open_seq(&c, &s[i], i + 1, i), ATTN_OK);
    for (uint32_t i = 0; i < N; i++)
        id[i] = send_heavy(&s[i % 4]); /* of four sequences: one after another */
    e2e_await(&c, id[0]);
    all_have_arrived();
    e2e_signal(&d, SIGTERM);
    e2e_signal(&d, SIGINT); /* as good as a second SIGTERM, and never merged with the first */
    uint32_t n_ok = 0, n_draining = 0;
    for (uint32_t i = 0; i < N; i++) {
        attn_status st = (attn_status)e2e_await(&c, id[i])->header->status;
        n_ok += st == ATTN_OK;
        n_draining += st == ATTN_EDRAINING;
        if (st != ATTN_OK && st != ATTN_EDRAINING)
            fail_msg("%s: %s", attn_status_name(st), e2e_await(&c, id[i])->header->message);
    }
    assert_int_equal(n_ok + n_draining, N);
    assert_true(n_draining > 0);
    assert_int_equal(e2e_wait(&d), 0);
    e2e_disconnect(&c);
    e2e_stop(&d);
}

static void overload_is_answered_at_once(void **state)
{
    (void)state;
    if (e2e_is_spread())
        skip(); /* what is heavy for one card need not be for several */
    static const char *const flags[] = {"--engine.max_queue_requests",
                                        "8",
                                        "--listen.peer_share",
                                        "100",
                                        "--listen.principal_share",
                                        "100",
                                        HAS_ROOM,
                                        NULL};
    begin(flags);
    for (uint32_t i = 0; i < 60; i++)
        assert_int_equal(e2e_open_seq(&c, &s[i], i + 1, i), ATTN_OK);
    uint64_t id[60];
    for (uint32_t i = 0; i < 60; i++)
        id[i] = send_heavy(&s[i % 40]);
    uint32_t n_ok = 0, n_overload = 0;
    for (uint32_t i = 0; i < 60; i++) {
        const Attnd__Reply *r = e2e_await(&c, id[i])->header;
        n_ok += r->status == ATTN_OK;
        n_overload += r->status == ATTN_EOVERLOAD;
        if (r->status == ATTN_EOVERLOAD) {
            assert_true(r->retry_after_us > 0);
            assert_non_null(strstr(r->message, "8 requests are queued"));
        }
    }
    assert_int_equal(n_ok + n_overload, 60);
    assert_true(n_ok >= 8 && n_overload > 0);
    assert_int_equal(e2e_item(&c, &s[0], 1, 0, 1), ATTN_OK); /* admitted again */
    e2e_disconnect(&c);
    e2e_stop(&d);
}

static void a_deadline_that_passed_is_answered_and_the_step_not_run(void **state)
{
    (void)state;
    begin(NULL);
    assert_int_equal(e2e_open_seq(&c, &s[0], 1, 1), ATTN_OK);
    uint64_t heavy[4];
    for (uint32_t i = 0; i < 4; i++)
        heavy[i] = send_heavy(&s[0]); /* the same tokens, one after another */
    uint64_t late = send_one(&s[0], HEAVY_TOKENS, 1000);
    const Attnd__Reply *r = e2e_await(&c, late)->header;
    bool is_foreseen = r->status == ATTN_EOVERLOAD; /* by how long the heavy ones have taken */
    assert_true(is_foreseen || r->status == ATTN_EDEADLINE);
    assert_non_null(strstr(r->message, is_foreseen ? "requests are ahead" : "us passed"));
    for (uint32_t i = 0; i < 4; i++)
        assert_int_equal(e2e_await(&c, heavy[i])->header->status, ATTN_OK);
    assert_int_equal(e2e_item(&c, &s[0], 0, HEAVY_TOKENS + 1, 1), ATTN_EINVAL); /* a gap: not run */
    assert_int_equal(e2e_item(&c, &s[0], 0, HEAVY_TOKENS, 1), ATTN_OK);
    e2e_disconnect(&c);
    e2e_stop(&d);
}

static void a_silent_sessions_sequences_are_freed(void **state)
{
    (void)state;
    static const char *const flags[] = {"--engine.lease", "3s", NULL};
    struct e2e_client silent;
    struct e2e_seq again;
    begin(flags);
    e2e_connect(&silent, &d);
    silent.pool = c.pool;
    assert_int_equal(e2e_open_seq(&c, &s[40], 1, 1), ATTN_OK);
    /* each session stays alive by asking; then one is silent and its names become free */
    for (uint32_t i = 0; i < 40; i++) {
        assert_int_equal(e2e_open_seq(&silent, &s[i], 100 + i, 1), ATTN_OK);
        assert_int_equal(e2e_open_seq(&c, &again, 100 + i, 2), ATTN_EEXIST);
    }
    uint32_t n = 0;
    while (e2e_open_seq(&c, &again, 139, 2) == ATTN_EEXIST)
        assert_true(++n < 1000000);
    for (uint32_t i = 0; i < 39; i++)
        while (e2e_open_seq(&c, &again, 100 + i, 2) == ATTN_EEXIST)
            assert_true(++n < 1000000);
    assert_int_equal(e2e_item(&c, &s[40], 0, 0, 1), ATTN_OK);
    assert_int_equal(e2e_item(&silent, &s[0], 0, 0, 1), ATTN_ENOTFOUND);
    e2e_disconnect(&silent);
    e2e_disconnect(&c);
    e2e_stop(&d);
}

static void sighup_takes_over_what_may_change(void **state)
{
    (void)state;
    static char config[96];
    snprintf(config, sizeof config, "/tmp/attnd-e2e-config-%d", (int)getpid());
    FILE *f = fopen(config, "w");
    assert_non_null(f);
    fprintf(f, "[engine]\nmax_queue_requests = 100\n");
    fclose(f);
    const char *const flags[] = {"--config", config, NULL};
    begin(flags);
    f = fopen(config, "w");
    fprintf(f, "[engine]\nmax_queue_requests = 70\nmax_sessions = 9\n");
    fclose(f);
    e2e_signal(&d, SIGHUP);
    e2e_await_log(&d, "max_queue_requests is now 70");
    assert_true(e2e_log_has(&d, "engine.max_sessions changed; that needs a restart"));
    f = fopen(config, "w");
    fprintf(f, "[engine]\nno_such_key = 9\n");
    fclose(f);
    e2e_signal(&d, SIGHUP);
    e2e_await_log(&d, "no_such_key");
    assert_int_equal(e2e_open_seq(&c, &s[0], 1, 1), ATTN_OK); /* still there */
    e2e_disconnect(&c);
    e2e_stop(&d);
    unlink(config);
}

/* Reads what systemd would until it begins so; a daemon that only shows life does not keep it. */
static void await_notice(int fd, const char *text)
{
    for (int n = 0; n < 200; n++) {
        char buf[128] = "";
        assert_true(recv(fd, buf, sizeof buf - 1, 0) > 0);
        if (strncmp(buf, text, strlen(text)) == 0)
            return;
    }
    fail_msg("no %s, but life", text);
}

static void systemd_is_notified(void **state)
{
    (void)state;
    struct sockaddr_un at = {.sun_family = AF_UNIX};
    snprintf(at.sun_path, sizeof at.sun_path, "/tmp/attnd-e2e-notify-%d", (int)getpid());
    int fd = socket(AF_UNIX, SOCK_DGRAM, 0);
    struct timeval timeout = {20, 0};
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof timeout);
    assert_int_equal(bind(fd, (struct sockaddr *)&at, sizeof at), 0);
    setenv("NOTIFY_SOCKET", at.sun_path, 1);
    /* so long that a slow start does not fill the socket, which takes ten, before it is read */
    setenv("WATCHDOG_USEC", "4000000", 1);
    e2e_start(&d, NULL);
    unsetenv("NOTIFY_SOCKET");
    unsetenv("WATCHDOG_USEC");
    await_notice(fd, "READY=1");
    await_notice(fd, "WATCHDOG=1");
    /* its loop has waited now: a signal before that is lost at times by ThreadSanitizer, which
     * makes its list of signals of a thread when that thread waits first */
    await_notice(fd, "WATCHDOG=1");
    e2e_signal(&d, SIGTERM);
    await_notice(fd, "STOPPING=1");
    assert_int_equal(e2e_wait(&d), 0);
    e2e_stop(&d);
    close(fd);
    unlink(at.sun_path);
}

/* Hides all devices from what is started next. */
static void hide_devices(void)
{
    setenv("CUDA_VISIBLE_DEVICES", "-1", 1);
    setenv("HIP_VISIBLE_DEVICES", "-1", 1);
}

static void show_devices(void)
{
    unsetenv("CUDA_VISIBLE_DEVICES");
    unsetenv("HIP_VISIBLE_DEVICES");
}

static void without_a_device_auto_takes_the_cpu_and_says_why(void **state)
{
    (void)state;
    hide_devices();
    begin((const char *const[]){"--backend", "auto", NULL});
    show_devices();
    assert_true(e2e_log_has(&d, "backend cuda is not used: "));
    assert_true(e2e_log_has(&d, "backend hip is not used: "));
    assert_true(e2e_log_has(&d, "backend cpu on "));
    assert_int_equal(e2e_open_seq(&c, &s[0], 1, 1), ATTN_OK);
    e2e_step(&c, 0, &(struct e2e_item){&s[0], 0, 5}, 1);
    e2e_disconnect(&c);
    e2e_stop(&d);
}

static void without_a_device_a_gpu_backend_by_name_is_an_error(void **state)
{
    (void)state;
    static const struct {
        const char *name, *why, *not_built, *self_test, *self_test_not_built;
    } cases[] = {
        {"cuda", "backend cuda can't be used: no cuda device: ",
         "backend cuda can't be used: attnd-cuda.so is neither",
         "cuda: failed, it cannot be opened", "backend cuda: attnd-cuda.so is neither"},
        {"hip", "backend hip can't be used: no hip device: ",
         "backend hip can't be used: attnd-hip.so is neither", "hip: failed, it cannot be opened",
         "backend hip: attnd-hip.so is neither"},
    };
    char url[64]; /* this test runs in several ways at a time */
    snprintf(url, sizeof url, "ipc:///tmp/attnd-e2e-none-%ld", (long)getpid());
    for (size_t i = 0; i < 2; i++) {
        const char *name = cases[i].name;
        hide_devices();
        int code = e2e_run(&d, (const char *const[]){"--backend", name, "--listen.http", "off",
                                                     "--listen", url, NULL});
        if (code != 69 || (!e2e_log_has(&d, cases[i].why) && !e2e_log_has(&d, cases[i].not_built)))
            fail_msg("%s: exit code %d", name, code);
        e2e_stop(&d);

        code = e2e_run(&d, (const char *const[]){"--self-test", "--backend", name, NULL});
        show_devices();
        if (code != 69 || (!e2e_log_has(&d, cases[i].self_test) &&
                           !e2e_log_has(&d, cases[i].self_test_not_built)))
            fail_msg("self test of %s: exit code %d", name, code);
        e2e_stop(&d);
    }
}

static void exit_codes_follow_sysexits(void **state)
{
    (void)state;
    static const struct {
        const char *flags[8];
        int code;
        const char *log;
    } cases[] = {
        {{"--help"}, 0, "--engine.lease"},
        {{"--version"}, 0, " (commit "},
        {{"--no_such_flag"}, 64, "--no_such_flag"},
        {{"--config", "/nonexistent/attnd.conf"}, 78, "/nonexistent/attnd.conf"},
        {{"--backend", "cpu", "--listen.http", "off", "--listen", "ipc:///nonexistent/dir/s"},
         73,
         "/nonexistent/dir/s"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        int code = e2e_run(&d, cases[i].flags);
        if (code != cases[i].code || !e2e_log_has(&d, cases[i].log))
            fail_msg("case %zu: exit code %d", i, code);
        e2e_stop(&d);
    }
}

static void a_socket_in_use_is_not_taken_away(void **state)
{
    (void)state;
    begin(NULL);
    struct e2e second;
    const char *const flags[] = {"--backend",     "cpu", "--listen", d.url,
                                 "--listen.http", "off", NULL};
    assert_int_equal(e2e_run(&second, flags), 73);
    e2e_stop(&second);
    assert_int_equal(e2e_open_seq(&c, &s[0], 1, 1), ATTN_OK);
    e2e_disconnect(&c);
    e2e_stop(&d);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sigterm_finishes_what_is_in_flight),
        cmocka_unit_test(what_was_received_is_computed_after_the_drain_timeout_too),
        cmocka_unit_test(a_draining_daemon_takes_steps_and_nothing_new),
        cmocka_unit_test(a_second_sigterm_stops_now),
        cmocka_unit_test(overload_is_answered_at_once),
        cmocka_unit_test(a_deadline_that_passed_is_answered_and_the_step_not_run),
        cmocka_unit_test(a_silent_sessions_sequences_are_freed),
        cmocka_unit_test(sighup_takes_over_what_may_change),
        cmocka_unit_test(systemd_is_notified),
        cmocka_unit_test(without_a_device_auto_takes_the_cpu_and_says_why),
        cmocka_unit_test(without_a_device_a_gpu_backend_by_name_is_an_error),
        cmocka_unit_test(exit_codes_follow_sysexits),
        cmocka_unit_test(a_socket_in_use_is_not_taken_away),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
