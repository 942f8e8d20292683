/* bench_overload.c: not a test: what an overloaded attnd does, on the cpu backend with one thread.
 * Prints its capacity (closed loop), then for each load of an open loop with deadlines: goodput,
 * times of what was done and of what was refused, and how soon all is well after three times the
 * capacity. scripts/bench-overload runs it.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

#include "proto/attn_time.h"
#include "tests/daemon/e2e/e2e.h"

enum { SEQS = 64, CONTEXT = 1800, ITEMS = 8, DEADLINE_MS = 100, MAX_SENT = 1 << 18, WINDOW = 32 };

struct sent {
    uint64_t id, at_ns, answered_ns;
    attn_status st;
};

static struct e2e d;
static struct e2e_client c;
static struct e2e_seq seqs[SEQS];
static struct sent sent[MAX_SENT];
static uint64_t n_sent, n_answered, first_id;

/* Attention of ITEMS sequences' newest tokens; nothing is appended. timeout_us 0: no deadline.
 */
static void send_one(uint64_t timeout_us)
{
    struct e2e_item items[ITEMS];
    for (uint32_t i = 0; i < ITEMS; i++)
        items[i] = (struct e2e_item){&seqs[(n_sent * ITEMS + i) % SEQS], CONTEXT - 1, 1};
    uint64_t now_ns = attn_now_ns();
    uint64_t id = e2e_send_step(&c, 0, WIRE_STEP_ATTEND, items, ITEMS, timeout_us);
    if (n_sent == 0)
        first_id = id;
    sent[n_sent++] = (struct sent){.id = id, .at_ns = now_ns};
}

/* Takes what has been answered within so many ms. */
static void take_answers(int timeout_ms)
{
    e2e_await_ms(&c, 0, timeout_ms); /* nothing has this id: receives what there is */
    uint64_t now_ns = attn_now_ns();
    for (const struct e2e_reply *r = c.replies; r != NULL; r = r->next) {
        struct sent *s = &sent[r->wire.request_id - first_id];
        s->answered_ns = now_ns;
        s->st = (attn_status)r->wire.header->status;
        n_answered++;
    }
    e2e_forget(&c);
}

/* Takes answers until then; a core that waits is left to the daemon. */
static void await(uint64_t until_ns)
{
    for (uint64_t now_ns = attn_now_ns(); now_ns < until_ns; now_ns = attn_now_ns()) {
        uint64_t left_ns = until_ns - now_ns;
        if (left_ns < 1500000)
            nanosleep(&(struct timespec){.tv_nsec = left_ns < 100000 ? (long)left_ns : 100000},
                      NULL);
        take_answers(left_ns < 1500000 ? 0 : 1);
    }
}

static void begin(void)
{
    n_sent = n_answered = 0;
}

static void finish(void)
{
    while (n_answered < n_sent)
        take_answers(1);
}

static double closed_loop(double seconds)
{
    uint64_t until_ns = attn_now_ns() + (uint64_t)(seconds * 1e9);
    begin();
    while (attn_now_ns() < until_ns) {
        while (n_sent - n_answered < WINDOW)
            send_one(0);
        take_answers(0);
    }
    finish();
    return (double)n_sent / seconds;
}

static int by_time(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void print_times(const char *what, attn_status st)
{
    static double ms[MAX_SENT];
    size_t n = 0;
    for (uint64_t i = 0; i < n_sent; i++)
        if (sent[i].st == st)
            ms[n++] = (double)(sent[i].answered_ns - sent[i].at_ns) * 1e-6;
    qsort(ms, n, sizeof *ms, by_time);
    if (n > 0)
        printf("  %s %zu: p50 %.1f ms, p99 %.1f ms, most %.1f ms\n", what, n, ms[n / 2],
               ms[n * 99 / 100], ms[n - 1]);
}

static void open_loop(double rate, double seconds)
{
    uint64_t start_ns = attn_now_ns(), n_total = (uint64_t)(rate * seconds);
    uint64_t n_good = 0, n_late = 0;
    begin();
    for (uint64_t i = 0; i < n_total && n_sent < MAX_SENT; i++) {
        uint64_t at_ns = start_ns + (uint64_t)((double)i / rate * 1e9);
        await(at_ns);
        n_late += attn_now_ns() > at_ns + 5000000;
        send_one(DEADLINE_MS * 1000);
        if (i % 16 == 0)
            take_answers(0);
    }
    double took_s = (double)(attn_now_ns() - start_ns) * 1e-9;
    finish();
    for (uint64_t i = 0; i < n_sent; i++)
        n_good += sent[i].st == ATTN_OK &&
                  sent[i].answered_ns - sent[i].at_ns <= DEADLINE_MS * UINT64_C(1000000);
    printf("  sent %.0f/s for %.1f s (%.1f %% more than 5 ms late), good %.0f/s\n",
           (double)n_sent / took_s, took_s, 100.0 * (double)n_late / (double)n_sent,
           (double)n_good / took_s);
    print_times("done", ATTN_OK);
    print_times("refused", ATTN_EOVERLOAD);
    print_times("taken and not done in time", ATTN_EDEADLINE);
}

/* How long after now something is last refused, at half of the capacity. */
static void recovery(double capacity)
{
    uint64_t start_ns = attn_now_ns(), last_ns = start_ns;
    open_loop(capacity / 2, 2);
    for (uint64_t i = 0; i < n_sent; i++)
        if (sent[i].st != ATTN_OK && sent[i].at_ns > last_ns)
            last_ns = sent[i].at_ns;
    printf("  the last refusal was %.0f ms after the load fell\n",
           (double)(last_ns - start_ns) * 1e-6);
}

int main(int argc, char **argv)
{
    static const char *const flags[] = {"--device.threads", "1", "--device.kv_memory", "512M",
                                        NULL};
    double seconds = argc > 1 ? atof(argv[1]) : 4;
    e2e_start(&d, flags);
    e2e_connect(&c, &d);
    e2e_make_pool(&c, ATTN_BF16, SEQS * (E2E_MAX_TOKENS / E2E_BLOCK_TOKENS));
    for (uint32_t i = 0; i < SEQS; i++) {
        if (e2e_open_seq(&c, &seqs[i], i + 1, i) != ATTN_OK)
            return 1;
        struct e2e_item all = {&seqs[i], 0, CONTEXT};
        e2e_await(&c, e2e_send_step(&c, 0, WIRE_STEP_APPEND, &all, 1, 0));
        e2e_forget(&c);
    }
    double capacity = closed_loop(seconds);
    printf("closed loop, %d steps of %d items in flight: %.0f steps/s\n", WINDOW, ITEMS, capacity);
    print_times("done", ATTN_OK);
    static const double loads[] = {0.5, 0.9, 1.5, 3};
    for (size_t i = 0; i < sizeof loads / sizeof loads[0]; i++) {
        printf("open loop at %.1f times that, deadline %d ms:\n", loads[i], DEADLINE_MS);
        open_loop(loads[i] * capacity, seconds);
    }
    printf("then at half of it:\n");
    recovery(capacity);
    e2e_disconnect(&c);
    e2e_stop(&d);
    return 0;
}
