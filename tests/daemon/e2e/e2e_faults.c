/* e2e_faults.c: what a worker sees when the device fails: the real daemon with faults injected
 * (kernels/faults.h), and nobody who keeps its cache. Environment: FAULT_ROUNDS devices are
 * lost, with eight steps each; how soon it is told is printed. */
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sysexits.h>

#include <cmocka.h>

#include "proto/attn_time.h"
#include "tests/daemon/e2e/e2e.h"

static struct e2e d;
static struct e2e_client c;
static struct e2e_seq seq;

static void begin(const char *backend)
{
    const char *const flags[] = {"--danger-inject-faults", "--backend", backend, NULL};
    e2e_start(&d, flags);
    assert_true(e2e_log_has(&d, "faults are injected"));
    e2e_connect(&c, &d);
    e2e_make_pool(&c, ATTN_F32, 64);
    assert_int_equal(e2e_open_seq(&c, &seq, 1, 1), ATTN_OK);
}

static void end(int code)
{
    e2e_disconnect(&c);
    if (code == 0)
        e2e_signal(&d, SIGTERM);
    if (d.pid != 0)
        assert_int_equal(e2e_wait(&d), code);
    e2e_stop(&d);
}

static void faults_need_a_flag_that_names_the_danger(void **state)
{
    (void)state;
    const char *const flags[] = {"--check-config", "--backend", "cpu+faults:fail@1", NULL};
    assert_int_equal(e2e_run(&d, flags), EX_USAGE);
    assert_true(e2e_log_has(&d, "--danger-inject-faults"));
    e2e_stop(&d);
}

static void a_fault_that_means_nothing_is_refused_by_name(void **state)
{
    (void)state;
    static const char *const bad[] = {"melt@1",  "fail",     "fail@0", "fail%2",
                                      "delay@1", "hang=5@1", "seed="};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        char backend[64], says[64];
        snprintf(backend, sizeof backend, "cpu+faults:lose@9,%s", bad[i]);
        snprintf(says, sizeof says, "faults: \\\"%s\\\" is none of", bad[i]); /* quoted twice */
        const char *const flags[] = {"--danger-inject-faults", "--backend",     backend, "--listen",
                                     "tcp://[::1]:0",          "--listen.http", "off",   NULL};
        assert_int_equal(e2e_run(&d, flags), EX_UNAVAILABLE);
        assert_true(e2e_log_has(&d, says));
        e2e_stop(&d);
    }
}

static void a_batch_that_fails_leaves_the_sequence_as_it_was(void **state)
{
    (void)state;
    begin("cpu+faults:fail@2");
    e2e_step(&c, 0, &(struct e2e_item){&seq, 0, 20}, 1);
    assert_int_equal(e2e_item(&c, &seq, 0, 20, 5), ATTN_EINTERNAL);
    assert_int_equal(e2e_item(&c, &seq, 0, 25, 1), ATTN_EINVAL); /* its length did not move */
    e2e_step(&c, 0, &(struct e2e_item){&seq, 20, 5}, 1);
    end(EX_OK);
}

static int by_size(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void print_ms(const char *what, double *ms, uint32_t n)
{
    qsort(ms, n, sizeof *ms, by_size);
    printf("%s, %u times: p50 %.1f ms, most %.1f ms\n", what, n, ms[n / 2], ms[n - 1]);
}

/* Steps that wait behind the one that loses it are told, too. From when they were sent: a little
 * more than from when the device was lost. */
static void a_lost_device_is_reported_and_ends_the_process(void **state)
{
    (void)state;
    enum { MOST_WAITING = 8, MOST_ROUNDS = 1000 };
    static double answered_ms[MOST_ROUNDS], ended_ms[MOST_ROUNDS];
    const char *rounds = getenv("FAULT_ROUNDS");
    uint32_t n = rounds == NULL ? 1 : (uint32_t)atoi(rounds);
    /* several only where time is measured: a busy machine may send the last too late */
    uint32_t n_waiting = rounds == NULL ? 1 : MOST_WAITING;
    assert_in_range(n, 1, MOST_ROUNDS);
    for (uint32_t i = 0; i < n; i++) {
        uint64_t id[MOST_WAITING];
        begin("cpu+faults:lose@2");
        e2e_step(&c, 0, &(struct e2e_item){&seq, 0, 20}, 1);
        uint64_t start_ns = attn_now_ns();
        for (uint32_t k = 0; k < n_waiting; k++)
            id[k] = e2e_send_zeros(&c, 0, &(struct e2e_item){&seq, 20, 5}, 0);
        for (uint32_t k = 0; k < n_waiting; k++)
            assert_int_equal(e2e_await(&c, id[k])->header->status, ATTN_EDEVICE);
        answered_ms[i] = (double)(attn_now_ns() - start_ns) * 1e-6;
        assert_int_equal(e2e_wait(&d), EX_TEMPFAIL);
        ended_ms[i] = (double)(attn_now_ns() - start_ns) * 1e-6;
        end(EX_TEMPFAIL);
    }
    print_ms("device lost: steps told", answered_ms, n);
    print_ms("device lost: process ended", ended_ms, n);
}

static void a_corrupt_output_is_seen_by_who_compares(void **state)
{
    (void)state;
    begin("cpu+faults:corrupt@2");
    size_t bytes;
    e2e_step(&c, 0, &(struct e2e_item){&seq, 0, 20}, 1);
    void *bad = e2e_read_back(&c, &seq, 0, 20, &bytes);
    void *good = e2e_read_back(&c, &seq, 0, 20, &bytes);
    assert_true(memcmp(bad, good, bytes) != 0);
    free(bad);
    free(good);
    end(EX_OK);
}

static void chances_follow_the_seed(void **state)
{
    (void)state;
    char seen[2][65] = {"", ""};
    for (int round = 0; round < 2; round++) {
        begin("cpu+faults:fail%0.5,seed=7");
        uint32_t n_failed = 0;
        for (uint32_t i = 0; i < 64; i++) {
            bool is_good = e2e_item(&c, &seq, 0, 0, 1) == ATTN_OK;
            seen[round][i] = is_good ? '1' : '0';
            n_failed += !is_good;
        }
        assert_in_range(n_failed, 10, 54);
        end(EX_OK);
    }
    assert_string_equal(seen[0], seen[1]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(faults_need_a_flag_that_names_the_danger),
        cmocka_unit_test(a_fault_that_means_nothing_is_refused_by_name),
        cmocka_unit_test(a_batch_that_fails_leaves_the_sequence_as_it_was),
        cmocka_unit_test(a_lost_device_is_reported_and_ends_the_process),
        cmocka_unit_test(a_corrupt_output_is_seen_by_who_compares),
        cmocka_unit_test(chances_follow_the_seed),
    };
    return cmocka_run_group_tests_name("faults", tests, NULL, NULL);
}
