/* bench_flood.c: not a test: how long a good tenant's decode steps take beside another tenant's
 * flood of each kind of request, on the cpu backend. Prints a table: its times alone and beside,
 * and what of the flood was answered. scripts/bench-flood runs it.
 */
#include "tests/daemon/flood/flood.h"

#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "proto/attn_time.h"

enum {
    CONTEXT = 256, /* tokens that a good step attends to */
    MAX_TIMES = 1 << 18,
    MAX_FLOODERS = 256,
};
#define GOOD_TOKEN "bench-flood-good"

static const char tenants_text[] =
    "[good]\ntoken_sha256 = b07f0a49ba2f1185d0bce55cc9b69a00ff8a7e06628bcac39d89e8b4d173ac21\n"
    "[bad]\ntoken_sha256 = 322f8f57a4ebfdc6a51ee5fa5afa5046ac25adb57a135e58d9a80fcf72c5bbd3\n";

static int n_connections = 4;
static struct flood_answered *answered; /* [MAX_FLOODERS] */

static struct e2e_client good;
static struct e2e_seq own;
static double ms[MAX_TIMES];

static int by_time(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

struct times {
    size_t n, n_failed;
    char why[96]; /* of the first that failed */
    double p50, p99, most;
};

/* A step every millisecond or so, one at a time. */
static struct times measure(double seconds)
{
    struct times t = {0};
    struct e2e_item item = {&own, CONTEXT - 1, 1};
    uint64_t until_ns = attn_now_ns() + (uint64_t)(seconds * 1e9), sent_ns;
    while ((sent_ns = attn_now_ns()) < until_ns && t.n < MAX_TIMES) {
        const struct wire_reply *r = e2e_await(&good, e2e_send_zeros(&good, 0, &item, 0));
        ms[t.n++] = (double)(attn_now_ns() - sent_ns) * 1e-6;
        if (r->header->status != ATTN_OK && t.n_failed++ == 0)
            snprintf(t.why, sizeof t.why, " (%s)", r->header->message);
        e2e_forget(&good);
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    }
    qsort(ms, t.n, sizeof *ms, by_time);
    t.p50 = ms[t.n / 2];
    t.p99 = ms[t.n * 99 / 100];
    t.most = ms[t.n - 1];
    return t;
}

static pid_t flooders[MAX_FLOODERS];
static uint32_t n_started;

static void begin_flood(const struct flood_kind *k, uint32_t first)
{
    bool is_none = (k->send == NULL && k->connect == NULL) || !flood_is_possible(k);
    int n = is_none ? 0 : n_connections;
    for (int i = 0; i < n; i++)
        flooders[first + (uint32_t)i] = flood_start(k, ++n_started, &answered[first + (uint32_t)i]);
    for (int i = 0; i < n; i++)
        while (!atomic_load(&answered[first + (uint32_t)i].is_ready)) {
            if (waitpid(flooders[first + (uint32_t)i], NULL, WNOHANG) != 0)
                fail_msg("%s: the flood did not begin", k->name);
            measure(0.01); /* whose session is kept alive */
        }
}

static void end_flood(uint32_t first)
{
    for (uint32_t i = first; i < first + (uint32_t)n_connections; i++)
        if (flooders[i] > 0) {
            kill(flooders[i], SIGKILL);
            waitpid(flooders[i], NULL, 0);
            flooders[i] = 0;
        }
}

static void sum_up(uint32_t first, uint32_t n, double seconds, const uint64_t before[3])
{
    uint64_t sum[3] = {0};
    int other = 0;
    for (uint32_t i = first; i < first + n; i++) {
        sum[0] += answered[i].n_ok;
        sum[1] += answered[i].n_other;
        sum[2] += answered[i].bytes;
        other = answered[i].last_other != 0 ? answered[i].last_other : other;
    }
    printf(" %8.0f | %8.0f %s", (double)(sum[0] - before[0]) / seconds,
           (double)(sum[1] - before[1]) / seconds,
           other != 0 ? attn_status_name((attn_status)other) : "");
}

static void print_line(const char *name, const struct times *alone, const struct times *beside)
{
    bool is_within = beside->p99 <= 3 * alone->p99 + 2;
    printf("| %-24s | %7.3f | %7.3f | %7.3f | %7.3f | %8.2f | %s%s |", name, alone->p50, alone->p99,
           beside->p50, beside->p99, beside->most, is_within ? "yes" : "NO", beside->why);
}

static void run_kind(const struct flood_kind *k, double seconds)
{
    uint64_t before[3] = {0};
    struct times alone = measure(seconds);
    begin_flood(k, 0);
    measure(0.3);
    for (int i = 0; i < n_connections; i++) {
        before[0] += answered[i].n_ok;
        before[1] += answered[i].n_other;
    }
    uint64_t from_ns = attn_now_ns();
    struct times beside = measure(seconds);
    print_line(k->name, &alone, &beside);
    sum_up(0, (uint32_t)n_connections, (double)(attn_now_ns() - from_ns) * 1e-9, before);
    printf(" |\n");
    fflush(stdout);
    end_flood(0);
    measure(0.5); /* what is queued is done */
}

static void run_all(double seconds)
{
    uint64_t before[3] = {0};
    struct times alone = measure(5);
    n_connections = 1;
    for (uint32_t i = 1; i < flood_n_kinds; i++)
        begin_flood(&flood_kinds[i], i);
    struct times beside = measure(seconds);
    print_line("all at once", &alone, &beside);
    sum_up(1, flood_n_kinds - 1, seconds, before);
    printf(" |\n");
    for (uint32_t i = 1; i < flood_n_kinds; i++) {
        before[0] = before[1] = 0;
        printf("  %-24s", flood_kinds[i].name);
        sum_up(i, 1, seconds, before);
        printf("\n");
        end_flood(i);
    }
}

/* --- the run ---------------------------------------------------------------------------------- */

static void begin(const char *threads)
{
    char file[64];
    snprintf(file, sizeof file, "/tmp/attnd_flood_%ld", (long)getpid());
    FILE *f = fopen(file, "w");
    assert_non_null(f);
    fchmod(fileno(f), 0600);
    fputs(tenants_text, f);
    fclose(f);
    const char *const flags[] = {"--listen.tenants",
                                 file,
                                 "--device.threads",
                                 threads,
                                 "--device.kv_memory",
                                 "1536M",
                                 "--cache.io_memory",
                                 "512M",
                                 "--engine.lease",
                                 "3s",
                                 "--engine.max_queue",
                                 "512M",
                                 "--cache.max_seq_tokens",
                                 "131072",
                                 NULL};
    e2e_start(&flood_daemon, flags);
    unlink(file);
    for (uint32_t i = 0; i < FLOOD_IDS; i++)
        flood_ids[i] = i * 7919 % 128000;
    flood_enter(&good, GOOD_TOKEN);
    e2e_make_pool(&good, ATTN_F16, 64);
    struct e2e_item all = {&own, 0, CONTEXT};
    if (e2e_open_seq(&good, &own, 1, 1) != ATTN_OK ||
        e2e_await(&good, e2e_send_step(&good, 0, WIRE_STEP_APPEND, &all, 1, 0))->header->status !=
            ATTN_OK)
        fail_msg("the good tenant has no sequence");
    e2e_forget(&good);
    measure(1); /* the memory's pages are taken by now, or soon */
}

static const char usage[] =
    "usage: bench_flood [--seconds S] [--all S] [--only NAME] [--connections N] [--in-flight N]\n"
    "                   [--threads N] [--tls] [--alone]\n";

int main(int argc, char **argv)
{
    double seconds = 3, all_seconds = 0;
    const char *only = NULL, *threads = "2";
    bool is_alone = false;
    for (int i = 1; i < argc; i++) {
        const char *value = i + 1 < argc ? argv[i + 1] : "";
        if (strcmp(argv[i], "--tls") == 0)
            setenv("E2E_TRANSPORT", "tls", 1);
        else if (strcmp(argv[i], "--alone") == 0)
            is_alone = true;
        else if (strcmp(argv[i], "--seconds") == 0)
            seconds = atof(value), i++;
        else if (strcmp(argv[i], "--all") == 0)
            all_seconds = atof(value), i++;
        else if (strcmp(argv[i], "--only") == 0)
            only = value, i++;
        else if (strcmp(argv[i], "--connections") == 0)
            n_connections = atoi(value), i++;
        else if (strcmp(argv[i], "--in-flight") == 0)
            flood_in_flight = atoi(value), i++;
        else if (strcmp(argv[i], "--threads") == 0)
            threads = value, i++;
        else
            return fputs(usage, stderr), 2;
    }
    if (n_connections < 1 || n_connections > MAX_FLOODERS || flood_in_flight < 1 || seconds <= 0)
        return fputs(usage, stderr), 2;
    answered = mmap(NULL, MAX_FLOODERS * sizeof *answered, PROT_READ | PROT_WRITE,
                    MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (is_alone &&
        sched_setscheduler(0, SCHED_RR, &(struct sched_param){.sched_priority = 10}) != 0)
        return perror("bench_flood: --alone"), 1;
    begin(threads);
    printf(
        "A good tenant's decode steps beside a flood of %d connections with %d requests in "
        "flight, ms.\n\n| flood | alone p50 | p99 | beside p50 | p99 | most | p99 <= 3 x alone + "
        "2 | done/s | refused/s |\n|---|---|---|---|---|---|---|---|---|\n",
        n_connections, flood_in_flight);
    for (size_t i = 0; i < flood_n_kinds && all_seconds == 0; i++)
        if (flood_is_possible(&flood_kinds[i]) &&
            (only == NULL || strstr(flood_kinds[i].name, only) != NULL))
            run_kind(&flood_kinds[i], seconds);
    if (all_seconds > 0)
        run_all(all_seconds);
    e2e_disconnect(&good);
    e2e_stop(&flood_daemon);
    return 0;
}
