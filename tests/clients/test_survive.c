/* test_survive.c: attnd --supervise is killed, upgraded and loses its device while workers over
 * every transport check all that they are answered (survive.h): nothing that was acknowledged is
 * lost or changed, and no call of theirs fails.
 *
 * Environment: SURVIVE_KILLS (10), SURVIVE_UPGRADES (5), SURVIVE_SEED (1), SURVIVE_BACKEND (cpu; on
 * another one no faults are injected), SURVIVE_KV_DTYPE (f32). Prints how long it took to serve
 * again.
 */
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "proto/attn_time.h"
#include "tests/clients/survive.h"
#include "tests/daemon/e2e/e2e.h"
#include "tests/daemon/transport/certs.h"
#include "tests/random.h"

enum { N_WORKERS = 5, PATIENCE_S = 300 };

static struct e2e d;
static struct survive_worker workers[N_WORKERS];
static attn_client *prober;
static uint64_t seed, n_random;
static bool is_running; /* a test that failed leaves its workers behind */

static uint64_t environment(const char *name, uint64_t otherwise)
{
    const char *text = getenv(name);
    return text == NULL ? otherwise : strtoull(text, NULL, 10);
}

static uint64_t next_random(void)
{
    return random_next(&n_random);
}

/* Sleeps: a kill at any instant is what is tested, and nothing tells when that is. */
static void let_pass_ms(uint64_t ms)
{
    usleep((useconds_t)ms * 1000);
}

/* The daemon's process; 0: there is none at the moment. */
static pid_t child(void)
{
    char path[64];
    long pid = 0;
    snprintf(path, sizeof path, "/proc/%d/task/%d/children", (int)d.pid, (int)d.pid);
    FILE *f = fopen(path, "r");
    if (f != NULL && fscanf(f, "%ld", &pid) != 1)
        pid = 0;
    if (f != NULL)
        fclose(f);
    return (pid_t)pid;
}

static void end_child(pid_t pid)
{
    if (pid != 0)
        kill(pid, SIGKILL);
}

static uint64_t boot_id(void)
{
    struct attn_client_info info = {.struct_size = sizeof info};
    if (attn_client_ping(prober, PATIENCE_S * UINT64_C(1000000), NULL) != ATTN_OK ||
        attn_client_info(prober, &info) != ATTN_OK)
        fail_msg("nobody answers: %s", attn_last_error()->message);
    return info.boot_id;
}

/* Until another process answers: its boot. */
static uint64_t await_another_than(uint64_t boot)
{
    uint64_t now, until_ns = attn_now_ns() + PATIENCE_S * UINT64_C(1000000000);
    while ((now = boot_id()) == boot)
        if (attn_now_ns() > until_ns)
            fail_msg("seed %llu: no other process serves", (unsigned long long)seed);
    return now;
}

/* --- the log ---------------------------------------------------------------------------------- */

static uint32_t count_in_log(const char *text)
{
    char line[1024];
    uint32_t n = 0;
    FILE *f = fopen(d.log, "r");
    assert_non_null(f);
    while (fgets(line, sizeof line, f) != NULL)
        n += strstr(line, text) != NULL;
    fclose(f);
    return n;
}

/* --- everybody works -------------------------------------------------------------------------- */

static void start(const char *const *more)
{
    const char *flags[32] = {"--supervise",
                             "--listen",
                             "tcp://127.0.0.1:0 tls+tcp://127.0.0.1:0",
                             "--cache.io_memory",
                             "64M",
                             "--engine.lease",
                             "10m",
                             NULL};
    char shm[128], *ca = certs_file(CERTS_GOOD, "ca.crt");
    if (is_running)
        skip();
    is_running = true;
    int n = 7;
    if (getenv("SURVIVE_BACKEND") != NULL) {
        flags[n++] = "--backend";
        flags[n++] = getenv("SURVIVE_BACKEND");
    }
    for (; more != NULL && *more != NULL; more++)
        flags[n++] = *more;
    flags[n] = NULL;
    e2e_start(&d, flags);
    snprintf(shm, sizeof shm, "shm://%s", d.shm_path);
    const char *const urls[N_WORKERS] = {d.url, shm, d.tcp_url, d.tls_url, shm};
    assert_int_equal(setenv("ATTND_CA_FILE", ca, 1), 0);
    free(ca);
    seed = environment("SURVIVE_SEED", 1);
    n_random = seed;
    for (uint32_t i = 0; i < N_WORKERS; i++)
        if (!survive_start(&workers[i], urls[i], i, seed))
            fail_msg("%s", workers[i].failure);
    assert_int_equal(attn_client_open(d.url, NULL, PATIENCE_S * UINT64_C(1000000), &prober),
                     ATTN_OK);
}

static void stop(void)
{
    uint64_t n_calls = 0, n_tokens = 0;
    for (uint32_t i = 0; i < N_WORKERS; i++) {
        if (!survive_stop(&workers[i]))
            fail_msg("seed %llu: %s", (unsigned long long)seed, workers[i].failure);
        n_calls += workers[i].n_acknowledged;
        n_tokens += workers[i].n_tokens;
    }
    attn_client_close(prober);
    assert_int_equal(count_in_log("starting empty"), 0);
    assert_int_equal(count_in_log("; dropped: "), count_in_log("; dropped: 0"));
    printf("%llu calls acknowledged, %llu tokens appended, none lost or changed\n",
           (unsigned long long)n_calls, (unsigned long long)n_tokens);
    e2e_stop(&d);
    is_running = false;
}

/* Until every worker has had an answer. */
static void await_answers(void)
{
    uint64_t before[N_WORKERS], until_ns = attn_now_ns() + PATIENCE_S * UINT64_C(1000000000);
    for (uint32_t i = 0; i < N_WORKERS; i++)
        before[i] = atomic_load(&workers[i].n_acknowledged);
    for (uint32_t i = 0; i < N_WORKERS; i++)
        while (atomic_load(&workers[i].n_acknowledged) == before[i]) {
            if (atomic_load(&workers[i].has_failed) || attn_now_ns() > until_ns)
                fail_msg("seed %llu: worker %u does not go on: %s", (unsigned long long)seed, i,
                         workers[i].failure);
            sched_yield();
        }
}

/* --- figures ---------------------------------------------------------------------------------- */

struct figures {
    double *ms;
    uint32_t n;
};

static int by_size(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void print_figures(const char *what, struct figures *f)
{
    qsort(f->ms, f->n, sizeof f->ms[0], by_size);
    printf("%s, %u times: p50 %.0f ms, p99 %.0f ms, most %.0f ms\n", what, f->n, f->ms[f->n / 2],
           f->ms[f->n * 99 / 100], f->ms[f->n - 1]);
    free(f->ms);
}

/* --- tests ------------------------------------------------------------------------------------ */

static void what_was_acknowledged_outlives_kills_at_any_instant(void **state)
{
    (void)state;
    uint32_t n_kills = (uint32_t)environment("SURVIVE_KILLS", 10);
    struct figures serving = {.ms = calloc(n_kills, sizeof(double))};
    struct figures resumed = {.ms = calloc(n_kills, sizeof(double))};
    assert_true(serving.ms != NULL && resumed.ms != NULL);
    start(NULL);
    for (uint32_t i = 0; i < n_kills; i++) {
        await_answers();
        let_pass_ms(next_random() % 300);
        bool is_twice = next_random() % 5 == 0; /* the successor, too, while it starts */
        uint64_t before = boot_id(), start_ns = attn_now_ns();
        end_child(child());
        if (is_twice) {
            let_pass_ms(next_random() % 60);
            start_ns = attn_now_ns();
            end_child(child());
        }
        await_another_than(before);
        serving.ms[serving.n++] = (double)(attn_now_ns() - start_ns) / 1e6;
        await_answers();
        resumed.ms[resumed.n++] = (double)(attn_now_ns() - start_ns) / 1e6;
    }
    stop();
    print_figures("serving again after a kill", &serving);
    print_figures("all workers answered again", &resumed);
}

static void an_upgrade_answers_what_was_received(void **state)
{
    (void)state;
    start(NULL);
    uint32_t n = (uint32_t)environment("SURVIVE_UPGRADES", 5);
    for (uint32_t i = 0; i < n; i++) {
        await_answers();
        uint64_t before = boot_id();
        e2e_signal(&d, SIGUSR2);
        await_another_than(before); /* it may still answer */
    }
    await_answers();
    assert_int_equal(count_in_log("all is answered"), n);
    stop();
}

/* In every process some launch ends in the fault; the workers notice nothing. */
static void survive_faults(const char *faults, const char *stall_timeout, const char *says)
{
    if (getenv("E2E_CARDS") != NULL)
        skip(); /* a lost card takes its sequences with it, and the others go on: e2e_cards.c */
    char backend[64];
    if (getenv("SURVIVE_BACKEND") != NULL)
        skip();
    snprintf(backend, sizeof backend, "cpu+faults:%s", faults);
    const char *const flags[] = {"--danger-inject-faults", "--backend",   backend,
                                 "--engine.stall_timeout", stall_timeout, NULL};
    start(flags);
    await_another_than(await_another_than(boot_id()));
    await_answers();
    assert_true(count_in_log(says) >= 2);
    assert_true(count_in_log("the device is lost; ending") >= 2);
    stop();
}

static void a_lost_device_is_a_pause(void **state)
{
    (void)state;
    survive_faults("lose@150", "30s", "injected fault: lose at launch 150");
}

static void a_device_that_hangs_is_lost(void **state)
{
    (void)state;
    survive_faults("hang@150,delay=20%0.01", "300ms", "no batch has come back for 300 ms");
}

/* A cache that kills each daemon that takes it up is dropped; clients see an empty daemon. */
static void a_process_that_never_gets_to_serve_starts_without_its_cache(void **state)
{
    (void)state;
    static const char *const flags[] = {"--supervise", NULL};
    e2e_start(&d, flags);
    assert_int_equal(attn_client_open(d.url, NULL, PATIENCE_S * UINT64_C(1000000), &prober),
                     ATTN_OK);
    pid_t last = child();
    end_child(last);
    uint64_t until_ns = attn_now_ns() + PATIENCE_S * UINT64_C(1000000000);
    while (attn_now_ns() < until_ns && count_in_log("it starts without its cache") == 0) {
        pid_t now = child();
        if (now != 0 && now != last)
            end_child(last = now);
        sched_yield();
    }
    assert_int_equal(attn_client_ping(prober, PATIENCE_S * UINT64_C(1000000), NULL),
                     ATTN_ENOTFOUND);
    assert_int_equal(attn_last_error_gone(), ATTN_GONE_SESSION);
    assert_int_equal(attn_client_reopen(prober, PATIENCE_S * UINT64_C(1000000)), ATTN_OK);
    attn_client_close(prober);
    e2e_stop(&d);
}

static void a_process_that_shows_no_life_is_replaced(void **state)
{
    (void)state;
    static const char *const flags[] = {"--supervise", NULL};
    setenv("WATCHDOG_USEC", "1000000", 1); /* as a service manager sets it */
    e2e_start(&d, flags);
    unsetenv("WATCHDOG_USEC");
    assert_int_equal(attn_client_open(d.url, NULL, PATIENCE_S * UINT64_C(1000000), &prober),
                     ATTN_OK);
    uint64_t before = boot_id();
    kill(child(), SIGSTOP);
    await_another_than(before);
    assert_true(count_in_log("has shown no life for") > 0);
    attn_client_close(prober);
    e2e_stop(&d);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_was_acknowledged_outlives_kills_at_any_instant),
        cmocka_unit_test(an_upgrade_answers_what_was_received),
        cmocka_unit_test(a_lost_device_is_a_pause),
        cmocka_unit_test(a_device_that_hangs_is_lost),
        cmocka_unit_test(a_process_that_shows_no_life_is_replaced),
        cmocka_unit_test(a_process_that_never_gets_to_serve_starts_without_its_cache),
    };
    return cmocka_run_group_tests_name("survive", tests, NULL, NULL);
}
