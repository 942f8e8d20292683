/* stats.c: the metrics and their two writers. Reading counters takes no lock: a scrape is a set of
 * atomic reads, each exact and all of nearly the same moment.
 */
#include "daemon/base/stats.h"

#include <assert.h>
#include <inttypes.h>
#include <jansson.h>
#include <math.h>
#include <pthread.h>
#include <string.h>

#include "daemon/base/process.h"

struct stats stats;
static const char *commit = "unknown";

void stats_set_commit(const char *name)
{
    commit = name;
}

static const char *const transport_names[STATS_N_TRANSPORTS] = {"ipc", "tcp", "shm", "gpu", "tls"};
static const char *const time_names[STATS_N_TIMES] = {"queue", "device", "total"};
static const char *const time_help[STATS_N_TIMES] = {
    "Time of steps between arrival and launch",
    "Time of steps' batches on the device",
    "Time of steps between arrival and reply",
};

/* The map's values are 0, -1, -2, ... without a gap: they are distinct (else a switch over them
 * would not compile), and none is beyond their number. */
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

const char *stats_transport_name(enum stats_transport t)
{
    return transport_names[t];
}

/* Bucket b counts times up to 2^b microseconds; the last counts all longer ones. */
static void observe(struct stats_histogram *h, uint64_t ns)
{
    uint64_t us = (ns + 999) / 1000;
    uint32_t b = us <= 1 ? 0 : 64 - (uint32_t)__builtin_clzll(us - 1);
    if (b >= STATS_BUCKETS)
        b = STATS_BUCKETS - 1;
    atomic_fetch_add_explicit(&h->bucket[b], 1, memory_order_relaxed);
    atomic_fetch_add_explicit(&h->sum_ns, ns, memory_order_relaxed);
}

void stats_observe_ns(enum stats_transport t, enum stats_time what, uint64_t ns)
{
    observe(&stats.time[t][what], ns);
}

void stats_observe_stage_ns(enum stage s, uint64_t ns)
{
    observe(&stats.stage[s], ns);
}

static uint64_t load(const _Atomic uint64_t *v)
{
    return atomic_load_explicit(v, memory_order_relaxed);
}

/* Upper bound of a bucket; the last has none. */
static double canary_bound(int b)
{
    return ldexp(1, b - 10);
}

void stats_observe_canary(double ratio)
{
    int b = 0;
    while (b < STATS_CANARY_BUCKETS - 1 && !(ratio <= canary_bound(b)))
        b++;
    stats_add(canary_items, 1);
    atomic_fetch_add_explicit(&stats.canary_ratio[b], 1, memory_order_relaxed);
    atomic_fetch_add_explicit(&stats.canary_ratio_sum, (uint64_t)(fmin(ratio, 1e6) * 1e6),
                              memory_order_relaxed);
}

static bool is_ns(const char *field)
{
    size_t n = strlen(field);
    return n > 3 && strcmp(field + n - 3, "_ns") == 0;
}

/* The value as exported: a moment becomes its age. */
static uint64_t exported(const char *field, uint64_t v)
{
    size_t n = strlen(field);
    if (n <= 6 || strcmp(field + n - 6, "_at_ns") != 0 || v == 0)
        return v;
    uint64_t now_ns = clock_now_ns();
    return now_ns > v ? now_ns - v : 0;
}

static void write_value(FILE *f, const char *field, uint64_t v)
{
    v = exported(field, v);
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

/* The upper bounds of buckets as text: the same in every histogram of a page. */
struct bounds {
    char le[STATS_BUCKETS - 1][16];
};

static void bounds_init(struct bounds *at)
{
    for (int b = 0; b < STATS_BUCKETS - 1; b++)
        snprintf(at->le[b], sizeof at->le[b], "%.9g", (double)(1ull << b) * 1e-6);
}

/* label: name of the label and value, as name="value" */
static void write_histogram(FILE *f, const char *what, const char *label, const struct bounds *at,
                            const struct stats_histogram *h)
{
    uint64_t sum = 0;
    for (int b = 0; b < STATS_BUCKETS; b++) {
        sum += load(&h->bucket[b]);
        if (b < STATS_BUCKETS - 1)
            fprintf(f, "attnd_step_%s_seconds_bucket{%s,le=\"%s\"} %" PRIu64 "\n", what, label,
                    at->le[b], sum);
    }
    fprintf(f, "attnd_step_%s_seconds_bucket{%s,le=\"+Inf\"} %" PRIu64 "\n", what, label, sum);
    fprintf(f, "attnd_step_%s_seconds_sum{%s} %.9f\n", what, label,
            (double)load(&h->sum_ns) * 1e-9);
    fprintf(f, "attnd_step_%s_seconds_count{%s} %" PRIu64 "\n", what, label, sum);
}

static void write_canary(FILE *f)
{
    uint64_t sum = 0;
    fprintf(f, "# HELP attnd_canary_error_ratio Largest error of an output that the canary "
               "computed again, over its bound.\n# TYPE attnd_canary_error_ratio histogram\n");
    for (int b = 0; b < STATS_CANARY_BUCKETS; b++) {
        sum += load(&stats.canary_ratio[b]);
        if (b < STATS_CANARY_BUCKETS - 1)
            fprintf(f, "attnd_canary_error_ratio_bucket{le=\"%.9g\"} %" PRIu64 "\n",
                    canary_bound(b), sum);
    }
    fprintf(f,
            "attnd_canary_error_ratio_bucket{le=\"+Inf\"} %" PRIu64
            "\nattnd_canary_error_ratio_sum %.6f\nattnd_canary_error_ratio_count %" PRIu64 "\n",
            sum, (double)load(&stats.canary_ratio_sum) * 1e-6, sum);
}

static void write_cards(FILE *f)
{
    uint32_t n = atomic_load(&stats.n_cards);
#define X(i, field, metric, type, help)                                                            \
    if (n > 0)                                                                                     \
        fprintf(f, "# HELP attnd_" metric " " help ".\n# TYPE attnd_" metric " " type "\n");       \
    for (uint32_t c = 0; c < n; c++) {                                                             \
        fprintf(f, "attnd_" metric "{device=\"%s\"} ", stats.cards[c].name);                       \
        write_value(f, field, load(&stats.cards[c].value[i]));                                     \
        fputc('\n', f);                                                                            \
    }
    STATS_CARD_MAP(X)
#undef X
}

static void write_tenants(FILE *f)
{
    uint32_t n = atomic_load(&stats.n_tenants);
#define X(i, field, metric, type, help)                                                            \
    if (n > 0)                                                                                     \
        fprintf(f, "# HELP attnd_" metric " " help ".\n# TYPE attnd_" metric " " type "\n");       \
    for (uint32_t t = 0; t < n; t++) {                                                             \
        fprintf(f, "attnd_" metric "{tenant=\"%s\"} ", stats.tenants[t].name);                     \
        write_value(f, field, load(&stats.tenants[t].used[i]));                                    \
        fputc('\n', f);                                                                            \
    }
    STATS_TENANT_MAP(X)
#undef X
}

/* --- pools ------------------------------------------------------------------------------------ */

static pthread_mutex_t pools_lock = PTHREAD_MUTEX_INITIALIZER;
static struct stats_pool pools[STATS_MAX_POOLS + 1]; /* the last is all others */
static size_t n_pools;

void stats_set_pools(const struct stats_pool *now, size_t n)
{
    struct stats_pool others = {.name = "(others)"};
    size_t n_named = n < STATS_MAX_POOLS ? n : STATS_MAX_POOLS;
    for (size_t i = n_named; i < n; i++) {
        others.blocks += now[i].blocks;
        others.free += now[i].free;
        others.tiered += now[i].tiered;
        others.sequences += now[i].sequences;
    }
    pthread_mutex_lock(&pools_lock);
    if (n_named > 0)
        memcpy(pools, now, n_named * sizeof *now);
    pools[n_named] = others;
    n_pools = n_named + (n > n_named);
    pthread_mutex_unlock(&pools_lock);
}

static size_t read_pools(struct stats_pool out[STATS_MAX_POOLS + 1])
{
    pthread_mutex_lock(&pools_lock);
    size_t n = n_pools;
    memcpy(out, pools, n * sizeof *out);
    pthread_mutex_unlock(&pools_lock);
    return n;
}

static void write_label(FILE *f, const char *text)
{
    for (; *text != '\0'; text++) {
        if (*text == '"' || *text == '\\')
            fputc('\\', f);
        fputc(*text, f);
    }
}

static void write_pools(FILE *f)
{
    static const char *const names[] = {"blocks", "blocks_free", "blocks_tiered", "sequences"};
    static const char *const help[] = {"Blocks of a pool", "Blocks free in a pool",
                                       "Blocks of a pool's idle sequences in host memory",
                                       "Sequences open in a pool"};
    struct stats_pool p[STATS_MAX_POOLS + 1];
    size_t n = read_pools(p);
    for (size_t k = 0; k < 4; k++) {
        fprintf(f, "# HELP attnd_pool_%s %s.\n# TYPE attnd_pool_%s gauge\n", names[k], help[k],
                names[k]);
        for (size_t i = 0; i < n; i++) {
            fprintf(f, "attnd_pool_%s{pool=\"", names[k]);
            write_label(f, p[i].name);
            fprintf(f, "\"} %" PRIu64 "\n",
                    k == 0   ? p[i].blocks
                    : k == 1 ? p[i].free
                    : k == 2 ? p[i].tiered
                             : p[i].sequences);
        }
    }
}

void stats_write_prometheus(FILE *f)
{
    char label[64];
    struct bounds at;
    bounds_init(&at);
    fprintf(f,
            "# HELP attnd_build_info Version and commit of this daemon.\n# TYPE attnd_build_info "
            "gauge\n"
            "attnd_build_info{version=\"%s\",commit=\"%s\"} 1\n",
            ATTND_VERSION, commit);
    process_write_prometheus(f);
    write_pools(f);
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
        for (int t = 0; t < STATS_N_TRANSPORTS; t++) {
            snprintf(label, sizeof(label), "transport=\"%s\"", transport_names[t]);
            write_histogram(f, time_names[what], label, &at, &stats.time[t][what]);
        }
    }
    fprintf(f, "# HELP attnd_step_stage_seconds Time of steps by stage; the sum is from a "
               "message's first byte to its reply's last.\n"
               "# TYPE attnd_step_stage_seconds histogram\n");
    for (enum stage s = 0; s < STAGE_N; s++) {
        snprintf(label, sizeof(label), "stage=\"%s\"", stage_name(s));
        write_histogram(f, "stage", label, &at, &stats.stage[s]);
    }
    write_canary(f);
    write_cards(f);
    write_tenants(f);
}

uint32_t stats_tenant_add(const char *name)
{
    uint32_t n = atomic_load(&stats.n_tenants), i = 0;
    while (i < n && strcmp(stats.tenants[i].name, name) != 0)
        i++;
    if (i == STATS_MAX_TENANTS)
        return i - 1;
    if (i == n) {
        snprintf(stats.tenants[i].name, sizeof stats.tenants[i].name, "%s", name);
        atomic_store(&stats.n_tenants, n + 1);
    }
    return i;
}

/* --- JSON ------------------------------------------------------------------------------------- */

static int put_value(json_t *object, const char *field, const char *name, uint64_t v)
{
    v = exported(field, v);
    return json_object_set_new(
        object, name, is_ns(field) ? json_real((double)v * 1e-9) : json_integer((json_int_t)v));
}

/* Only buckets that are not empty, by their upper bounds. */
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

static json_t *json_of_canary(void)
{
    json_t *object = json_object(), *buckets = json_object();
    uint64_t count = 0;
    int rc = 0;
    for (int b = 0; b < STATS_CANARY_BUCKETS; b++) {
        char bound[32] = "+Inf";
        uint64_t n = load(&stats.canary_ratio[b]);
        count += n;
        if (b < STATS_CANARY_BUCKETS - 1)
            snprintf(bound, sizeof(bound), "%.9g", canary_bound(b));
        if (n != 0)
            rc |= json_object_set_new(buckets, bound, json_integer((json_int_t)n));
    }
    rc |= json_object_set_new(object, "buckets", buckets);
    rc |= json_object_set_new(object, "count", json_integer((json_int_t)count));
    if (rc == 0)
        return object;
    json_decref(object);
    return NULL;
}

static json_t *json_of_cards(void)
{
    json_t *list = json_array();
    for (uint32_t c = 0; c < atomic_load(&stats.n_cards); c++) {
        json_t *object = json_pack("{s:I, s:s}", "device", (json_int_t)stats.cards[c].device,
                                   "name", stats.cards[c].name);
#define X(i, field, metric, type, help)                                                            \
    put_value(object, field, metric, load(&stats.cards[c].value[i]));
        STATS_CARD_MAP(X)
#undef X
        json_array_append_new(list, object);
    }
    return list;
}

static json_t *json_of_tenant(const struct stats_tenant *t)
{
    json_t *object = json_pack("{s:s}", "tenant", t->name);
#define X(i, field, metric, type, help) put_value(object, field, metric, load(&t->used[i]));
    STATS_TENANT_MAP(X)
#undef X
    return object;
}

static json_t *json_of_tenants(void)
{
    json_t *list = json_array();
    for (uint32_t t = 0; t < atomic_load(&stats.n_tenants); t++)
        json_array_append_new(list, json_of_tenant(&stats.tenants[t]));
    return list;
}

/* What everybody may know of the process. */
static int put_process(json_t *root)
{
    int rc = json_object_set_new(root, "schema_version", json_integer(STATS_SCHEMA));
    rc |= json_object_set_new(root, "version", json_string(ATTND_VERSION));
    return rc |
           json_object_set_new(root, "start_time_seconds", json_real(process_start_unix_seconds()));
}

attn_status stats_write_json(FILE *f)
{
    json_t *root = json_object(), *answered = json_object(), *list = json_array();
    struct stats_pool p[STATS_MAX_POOLS + 1];
    struct process_usage usage;
    process_usage_read(&usage);
    int rc = put_process(root);
    rc |= json_object_set_new(root, "commit", json_string(commit));
    rc |= json_object_set_new(root, "cpu_seconds_total", json_real(usage.cpu_seconds));
    rc |= json_object_set_new(root, "resident_memory_bytes", json_real(usage.resident_bytes));
    rc |= json_object_set_new(root, "max_fds", json_real(usage.max_fds));
    rc |= json_object_set_new(root, "max_locked_bytes", /* null: no limit */
                              isinf(usage.max_locked_bytes) ? json_null()
                                                            : json_real(usage.max_locked_bytes));
    size_t n_listed = read_pools(p);
    for (size_t i = 0; i < n_listed; i++)
        rc |= json_array_append_new(list, json_pack("{s:s, s:I, s:I, s:I, s:I}", "name", p[i].name,
                                                    "blocks", (json_int_t)p[i].blocks,
                                                    "blocks_free", (json_int_t)p[i].free,
                                                    "blocks_tiered", (json_int_t)p[i].tiered,
                                                    "sequences", (json_int_t)p[i].sequences));
    rc |= json_object_set_new(root, "pools", list);
    rc |= json_object_set_new(root, "cards", json_of_cards());
    rc |= json_object_set_new(root, "tenants", json_of_tenants());
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
    json_t *stages = json_object();
    for (enum stage s = 0; s < STAGE_N; s++)
        rc |= json_object_set_new(stages, stage_name(s), json_of_histogram(&stats.stage[s]));
    rc |= json_object_set_new(root, "step_stage_seconds", stages);
    rc |= json_object_set_new(root, "canary_error_ratio", json_of_canary());
    if (rc == 0) /* 15 digits resolve a nanosecond in eleven days */
        rc = json_dumpf(root, f, JSON_COMPACT | JSON_PRESERVE_ORDER | JSON_REAL_PRECISION(15));
    json_decref(root);
    return rc == 0 && fputc('\n', f) != EOF ? ATTN_OK : ATTN_ENOMEM;
}

attn_status stats_write_tenant_json(FILE *f, uint32_t tenant)
{
    json_t *root = json_of_tenant(&stats.tenants[tenant]);
    int rc = put_process(root);
    rc |= put_value(root, "", "draining", load(&stats.is_draining));
    rc |= put_value(root, "", "ready", load(&stats.is_ready));
    bool is_written = rc == 0 && json_dumpf(root, f, JSON_COMPACT | JSON_REAL_PRECISION(15)) == 0;
    json_decref(root);
    return is_written && fputc('\n', f) != EOF ? ATTN_OK : ATTN_ENOMEM;
}
