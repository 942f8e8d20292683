/* stats.c: the counters and their two writers. Readers take no lock: a scrape is a set of single
 * atomic reads, each exact, together of nearly the same moment.
 */
#include "daemon/stats.h"

#include <assert.h>
#include <inttypes.h>
#include <jansson.h>
#include <string.h>

struct stats stats;

static const char *const transport_names[STATS_N_TRANSPORTS] = {"ipc", "tcp", "shm"};
static const char *const time_names[STATS_N_TIMES] = {"queue", "device", "total"};
static const char *const time_help[STATS_N_TIMES] = {
    "Time of steps between arrival and launch",
    "Time of steps' batches on the device",
    "Time of steps between arrival and reply",
};

/* The map's values are 0, -1, -2, ...: as many as there are, each other than the rest (a switch
 * over them would not compile else), none beyond. */
#define X(name, value, message, is_retryable)                                                      \
    static_assert((value) <= 0 && -(value) < STATS_N_STATUS, #name " leaves a gap");
ATTN_STATUS_MAP(X)
#undef X

void stats_count_answer(attn_status st)
{
    if (st > 0 || st <= -(int)STATS_N_STATUS)
        st = ATTN_EINTERNAL;
    atomic_fetch_add_explicit(&stats.steps_answered[-st], 1, memory_order_relaxed);
}

/* Bucket b counts times up to 2^b microseconds; the last counts all longer ones. */
void stats_observe_ns(enum stats_transport t, enum stats_time what, uint64_t ns)
{
    uint64_t us = (ns + 999) / 1000;
    uint32_t b = us <= 1 ? 0 : 64 - (uint32_t)__builtin_clzll(us - 1);
    if (b >= STATS_BUCKETS)
        b = STATS_BUCKETS - 1;
    struct stats_histogram *h = &stats.time[t][what];
    atomic_fetch_add_explicit(&h->bucket[b], 1, memory_order_relaxed);
    atomic_fetch_add_explicit(&h->sum_ns, ns, memory_order_relaxed);
}

static uint64_t load(const _Atomic uint64_t *v)
{
    return atomic_load_explicit(v, memory_order_relaxed);
}

static bool is_ns(const char *field)
{
    size_t n = strlen(field);
    return n > 3 && strcmp(field + n - 3, "_ns") == 0;
}

static void write_value(FILE *f, const char *field, uint64_t v)
{
    if (is_ns(field))
        fprintf(f, "%.9f", (double)v * 1e-9);
    else
        fprintf(f, "%" PRIu64, v);
}

static void write_metric(FILE *f, const char *field, const char *name, const char *type,
                         const char *help, uint64_t v)
{
    fprintf(f, "# HELP attnd_%s %s.\n# TYPE attnd_%s %s\nattnd_%s ", name, help, name, type, name);
    write_value(f, field, v);
    fputc('\n', f);
}

static void write_histogram(FILE *f, const char *what, const char *transport,
                            const struct stats_histogram *h)
{
    uint64_t sum = 0;
    for (int b = 0; b < STATS_BUCKETS; b++) {
        sum += load(&h->bucket[b]);
        if (b < STATS_BUCKETS - 1)
            fprintf(f, "attnd_step_%s_seconds_bucket{transport=\"%s\",le=\"%.9g\"} %" PRIu64 "\n",
                    what, transport, (double)(1ull << b) * 1e-6, sum);
    }
    fprintf(f, "attnd_step_%s_seconds_bucket{transport=\"%s\",le=\"+Inf\"} %" PRIu64 "\n", what,
            transport, sum);
    fprintf(f, "attnd_step_%s_seconds_sum{transport=\"%s\"} %.9f\n", what, transport,
            (double)load(&h->sum_ns) * 1e-9);
    fprintf(f, "attnd_step_%s_seconds_count{transport=\"%s\"} %" PRIu64 "\n", what, transport, sum);
}

void stats_write_prometheus(FILE *f)
{
#define X(field, name, help) write_metric(f, #field, name, "counter", help, load(&stats.field));
    STATS_COUNTER_MAP(X)
#undef X
#define X(field, name, help) write_metric(f, #field, name, "gauge", help, load(&stats.field));
    STATS_GAUGE_MAP(X)
#undef X
    fprintf(f, "# HELP attnd_steps_answered_total Steps answered, by status.\n"
               "# TYPE attnd_steps_answered_total counter\n");
    for (int i = 0; i < STATS_N_STATUS; i++)
        fprintf(f, "attnd_steps_answered_total{status=\"%s\"} %" PRIu64 "\n",
                attn_status_message((attn_status)-i), load(&stats.steps_answered[i]));
    for (int what = 0; what < STATS_N_TIMES; what++) {
        fprintf(f, "# HELP attnd_step_%s_seconds %s.\n# TYPE attnd_step_%s_seconds histogram\n",
                time_names[what], time_help[what], time_names[what]);
        for (int t = 0; t < STATS_N_TRANSPORTS; t++)
            write_histogram(f, time_names[what], transport_names[t], &stats.time[t][what]);
    }
}

/* --- JSON ------------------------------------------------------------------------------------- */

static int put_value(json_t *object, const char *field, const char *name, uint64_t v)
{
    return json_object_set_new(
        object, name, is_ns(field) ? json_real((double)v * 1e-9) : json_integer((json_int_t)v));
}

/* Buckets that counted something, by their upper bounds. */
static json_t *json_of_histogram(const struct stats_histogram *h)
{
    json_t *object = json_object(), *buckets = json_object();
    uint64_t count = 0;
    int rc = 0;
    for (int b = 0; b < STATS_BUCKETS; b++) {
        char bound[32] = "+Inf";
        uint64_t n = load(&h->bucket[b]);
        count += n;
        if (b < STATS_BUCKETS - 1)
            snprintf(bound, sizeof(bound), "%.9g", (double)(1ull << b) * 1e-6);
        if (n != 0)
            rc |= json_object_set_new(buckets, bound, json_integer((json_int_t)n));
    }
    rc |= json_object_set_new(object, "buckets", buckets);
    rc |= put_value(object, "sum_ns", "sum", load(&h->sum_ns));
    rc |= put_value(object, "count", "count", count);
    if (rc == 0)
        return object;
    json_decref(object);
    return NULL;
}

attn_status stats_write_json(FILE *f)
{
    json_t *root = json_object(), *answered = json_object();
    int rc = 0;
#define X(field, name, help) rc |= put_value(root, #field, name, load(&stats.field));
    STATS_COUNTER_MAP(X)
    STATS_GAUGE_MAP(X)
#undef X
    for (int i = 0; i < STATS_N_STATUS; i++)
        rc |= put_value(answered, "", attn_status_message((attn_status)-i),
                        load(&stats.steps_answered[i]));
    rc |= json_object_set_new(root, "steps_answered_total", answered);
    for (int what = 0; what < STATS_N_TIMES; what++) {
        char name[64];
        json_t *times = json_object();
        for (int t = 0; t < STATS_N_TRANSPORTS; t++)
            rc |= json_object_set_new(times, transport_names[t],
                                      json_of_histogram(&stats.time[t][what]));
        snprintf(name, sizeof(name), "step_%s_seconds", time_names[what]);
        rc |= json_object_set_new(root, name, times);
    }
    if (rc == 0) /* 15 digits: a nanosecond in eleven days */
        rc = json_dumpf(root, f, JSON_COMPACT | JSON_PRESERVE_ORDER | JSON_REAL_PRECISION(15));
    json_decref(root);
    return rc == 0 && fputc('\n', f) != EOF ? ATTN_OK : ATTN_ENOMEM;
}
