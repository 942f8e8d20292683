/* test_stats.c: what the two writers say against what was counted, and the HTTP pages around
 * them. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <arpa/inet.h>
#include <fcntl.h>
#include <jansson.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#include "daemon/base/clock.h"
#include "daemon/base/health.h"
#include "daemon/base/stats.h"
#include "daemon/http/http.h"

static int reset(void **state)
{
    (void)state;
    memset(&stats, 0, sizeof(stats));
    health_end(HEALTH_ENGINE);
    health_end(HEALTH_LOOP);
    health_set_ready(false);
    health_set_draining(false);
    clock_use(NULL);
    return 0;
}

static _Atomic uint64_t test_now_ns;

static uint64_t test_clock(void)
{
    return test_now_ns;
}

/* Before http_up: its thread reads it. */
static void use_test_clock(void)
{
    test_now_ns = 1000000000000;
    clock_use(test_clock);
}

static _Atomic uint64_t n_polls; /* the listener's thread waits by them */
static pthread_mutex_t may_turn = PTHREAD_MUTEX_INITIALIZER; /* held: it stands still there */

int __real_poll(struct pollfd *fds, nfds_t n, int timeout_ms);
int __wrap_poll(struct pollfd *fds, nfds_t n, int timeout_ms);
int __wrap_poll(struct pollfd *fds, nfds_t n, int timeout_ms)
{
    atomic_fetch_add(&n_polls, 1);
    pthread_mutex_lock(&may_turn);
    pthread_mutex_unlock(&may_turn);
    return __real_poll(fds, n, timeout_ms);
}

static _Atomic uint64_t n_rendered; /* of /metrics */

void __real_stats_write_prometheus(FILE *f);
void __wrap_stats_write_prometheus(FILE *f);
void __wrap_stats_write_prometheus(FILE *f)
{
    atomic_fetch_add(&n_rendered, 1);
    __real_stats_write_prometheus(f);
}

static void json_to(FILE *f)
{
    assert_int_equal(stats_write_json(f), ATTN_OK);
}

static char *rendered(void (*write)(FILE *))
{
    char *text;
    size_t n;
    FILE *f = open_memstream(&text, &n);
    write(f);
    fclose(f);
    return text;
}

/* The value of a sample by its whole name with labels; fails if it is not there exactly once. */
static double sample(const char *text, const char *name)
{
    double v = -1;
    int n_found = 0;
    size_t n = strlen(name);
    for (const char *p = text; *p != '\0'; p += strcspn(p, "\n"), p += *p == '\n')
        if (strncmp(p, name, n) == 0 && p[n] == ' ') {
            v = strtod(p + n, NULL);
            n_found++;
        }
    if (n_found != 1)
        fail_msg("%s is there %d times", name, n_found);
    return v;
}

static void every_counter_and_gauge_is_exported_once_with_help_and_type(void **state)
{
    (void)state;
    uint64_t v = 1000;
#define X(field, name, help) stats_set(field, v++);
    STATS_COUNTER_MAP(X)
    STATS_GAUGE_MAP(X)
#undef X
    char *text = rendered(stats_write_prometheus);
    v = 1000;
    char line[256];
#define X(field, name, help)                                                                       \
    snprintf(line, sizeof(line), "# TYPE attnd_%s counter\nattnd_%s ", name, name);                \
    assert_non_null(strstr(text, line));                                                           \
    assert_non_null(strstr(text, "# HELP attnd_" name " " help ".\n"));                            \
    assert_true(strstr(#field, "_ns") != NULL || sample(text, "attnd_" name) == (double)v);        \
    v++;
    STATS_COUNTER_MAP(X)
#undef X
#define X(field, name, help)                                                                       \
    snprintf(line, sizeof(line), "# TYPE attnd_%s gauge\nattnd_%s ", name, name);                  \
    assert_non_null(strstr(text, line));                                                           \
    assert_true(strstr(#field, "_ns") != NULL || sample(text, "attnd_" name) == (double)v);        \
    v++;
    STATS_GAUGE_MAP(X)
#undef X
    free(text);
}

static void times_are_exported_in_seconds(void **state)
{
    (void)state;
    stats_add(device_ns, 1500000000);
    char *text = rendered(stats_write_prometheus);
    assert_true(sample(text, "attnd_device_seconds_total") == 1.5);
    free(text);
}

static void answered_steps_are_counted_by_status(void **state)
{
    (void)state;
    atomic_store(&stats.steps_answered[0], 7);
    atomic_store(&stats.steps_answered[-ATTN_EOVERLOAD], 3);
    char *text = rendered(stats_write_prometheus);
    assert_true(sample(text, "attnd_steps_answered_total{status=\"ok\"}") == 7);
    assert_true(sample(text, "attnd_steps_answered_total{status=\"overloaded\"}") == 3);
    assert_true(sample(text, "attnd_steps_answered_total{status=\"not found\"}") == 0);
    free(text);
}

static void a_status_that_is_none_counts_as_internal(void **state)
{
    (void)state;
    static const int none[] = {1, -STATS_N_STATUS, -STATS_N_STATUS - 1, -1000000, INT32_MIN};
    struct stats before = {0};
#define X(name, value, message, is_retryable) stats_count_answer(name);
    ATTN_STATUS_MAP(X)
#undef X
    for (size_t i = 0; i < sizeof(none) / sizeof(none[0]); i++)
        stats_count_answer((attn_status)none[i]);
    for (int i = 0; i < STATS_N_STATUS; i++)
        assert_int_equal(atomic_exchange(&stats.steps_answered[i], 0),
                         i == -ATTN_EINTERNAL ? 6 : 1);
    assert_memory_equal(&stats, &before, sizeof(stats)); /* and nothing beside it */
}

static void histograms_are_cumulative_and_count_each_time_once(void **state)
{
    (void)state;
    static const uint64_t times_ns[] = {0,    1,    1000,    1001,          2000,
                                        2001, 4000, 1000000, UINT64_MAX / 4};
    double sum = 0;
    for (size_t i = 0; i < sizeof(times_ns) / sizeof(times_ns[0]); i++) {
        stats_observe_ns(STATS_TCP, STATS_QUEUE, times_ns[i]);
        sum += (double)times_ns[i] * 1e-9;
    }
    char *text = rendered(stats_write_prometheus);
#define NAME(suffix) "attnd_step_queue_seconds_" suffix
    assert_true(sample(text, NAME("bucket{transport=\"tcp\",le=\"1e-06\"}")) == 3);
    assert_true(sample(text, NAME("bucket{transport=\"tcp\",le=\"2e-06\"}")) == 5);
    assert_true(sample(text, NAME("bucket{transport=\"tcp\",le=\"4e-06\"}")) == 7);
    assert_true(sample(text, NAME("bucket{transport=\"tcp\",le=\"0.001024\"}")) == 8);
    assert_true(sample(text, NAME("bucket{transport=\"tcp\",le=\"+Inf\"}")) == 9);
    assert_true(sample(text, NAME("count{transport=\"tcp\"}")) == 9);
    assert_true(sample(text, NAME("count{transport=\"ipc\"}")) == 0);
    double got = sample(text, NAME("sum{transport=\"tcp\"}"));
    assert_true(got > sum * 0.999999 && got < sum * 1.000001);
    free(text);
}

static json_type json_type_of(const char *field)
{
    size_t n = strlen(field);
    return n > 3 && strcmp(field + n - 3, "_ns") == 0 ? JSON_REAL : JSON_INTEGER;
}

static void the_json_is_json_and_says_the_same(void **state)
{
    (void)state;
    stats_set(peers, 12);
    use_test_clock();
    test_now_ns = 123456789012345;
    stats_set(engine_beat_at_ns, 123456789012345 - 1500000000);
    stats_set(steps_received, UINT32_MAX * 4ull);
    atomic_store(&stats.steps_answered[-ATTN_ENOBLOCKS], 5);
    stats_observe_ns(STATS_IPC, STATS_TOTAL, 3000);
    stats_observe_ns(STATS_IPC, STATS_TOTAL, UINT64_MAX / 4);
    char *text = rendered(json_to);
    json_error_t error;
    json_t *root = json_loads(text, JSON_REJECT_DUPLICATES, &error);
    if (root == NULL)
        fail_msg("line %d: %s", error.line, error.text);
#define X(field, name, help)                                                                       \
    assert_int_equal(json_typeof(json_object_get(root, name)), json_type_of(#field));
    STATS_COUNTER_MAP(X)
    STATS_GAUGE_MAP(X)
#undef X
    assert_int_equal(json_integer_value(json_object_get(root, "peers")), 12);
    assert_int_equal(json_integer_value(json_object_get(root, "steps_received_total")),
                     UINT32_MAX * 4ull);
    json_t *answered = json_object_get(root, "steps_answered_total");
    assert_int_equal(json_integer_value(json_object_get(answered, "out of blocks")), 5);
    assert_int_equal(json_object_size(answered), STATS_N_STATUS);
    json_t *seconds = json_object_get(root, "engine_heartbeat_age_seconds");
    assert_true(json_real_value(seconds) == 1.5);
    seconds = json_object_get(root, "oldest_request_age_seconds");
    assert_true(json_real_value(seconds) == 0); /* there is none */
    assert_int_equal(json_integer_value(json_object_get(root, "schema_version")), STATS_SCHEMA);
    assert_true(json_real_value(json_object_get(root, "start_time_seconds")) > 1.6e9);
    json_t *ipc = json_object_get(json_object_get(root, "step_total_seconds"), "ipc");
    assert_int_equal(json_integer_value(json_object_get(ipc, "count")), 2);
    json_t *buckets = json_object_get(ipc, "buckets");
    assert_int_equal(json_integer_value(json_object_get(buckets, "4e-06")), 1);
    assert_int_equal(json_integer_value(json_object_get(buckets, "+Inf")), 1);
    assert_int_equal(json_object_size(buckets), 2);
    assert_int_equal(text[strlen(text) - 1], '\n');
    json_decref(root);
    free(text);
}

/* ---- pages ---- */

static void connect_at(int fd, uint16_t port)
{
    struct sockaddr_in sa = {
        .sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    struct timeval patience = {.tv_sec = 20};
    assert_true(fd >= 0);
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
    assert_int_equal(connect(fd, (struct sockaddr *)&sa, sizeof(sa)), 0);
}

/* Sends raw request text; the whole answer until the server closes, malloc'ed. Closes fd. */
static char *ask_at(int fd, const char *request)
{
    assert_int_equal(send(fd, request, strlen(request), MSG_NOSIGNAL), strlen(request));
    size_t n = 0, capacity = 1 << 20;
    char *answer = malloc(capacity);
    ssize_t k;
    while ((k = recv(fd, answer + n, capacity - 1 - n, 0)) > 0)
        n += (size_t)k;
    assert_int_equal(k, 0);
    answer[n] = '\0';
    close(fd);
    return answer;
}

static char *ask(uint16_t port, const char *request)
{
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    connect_at(fd, port);
    return ask_at(fd, request);
}

static void expect_page(const struct http *h, const char *method, const char *path, int status,
                        const char *part)
{
    char request[256], line[64];
    snprintf(request, sizeof(request),
             "%s %s HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 0\r\n\r\n", method,
             path);
    snprintf(line, sizeof(line), "HTTP/1.1 %d ", status);
    char *answer = ask(http_port(h), request);
    if (strncmp(answer, line, strlen(line)) != 0 || strstr(answer, part) == NULL)
        fail_msg("%s %s: expected %d and \"%s\", got %.300s", method, path, status, part, answer);
    free(answer);
}

static struct http *http_up(uint64_t stall_timeout_us)
{
    char why[256] = "";
    struct http *h = NULL;
    if (http_open("127.0.0.1:0", stall_timeout_us, &h, why, sizeof(why)) != ATTN_OK)
        fail_msg("%s", why);
    return h;
}

static void pools_are_told_by_name_and_those_past_the_limit_as_one(void **state)
{
    (void)state;
    static struct stats_pool p[STATS_MAX_POOLS + 3];
    for (uint64_t i = 0; i < STATS_MAX_POOLS + 3; i++) {
        p[i] = (struct stats_pool){.blocks = 100 + i, .free = i, .sequences = 2 * i};
        snprintf(p[i].name, sizeof p[i].name, "pool \"%d\\", (int)i);
    }
    stats_set_pools(p, STATS_MAX_POOLS + 3);
    char *text = rendered(stats_write_prometheus);
    assert_true(sample(text, "attnd_pool_blocks{pool=\"pool \\\"0\\\\\"}") == 100);
    assert_true(sample(text, "attnd_pool_sequences{pool=\"pool \\\"31\\\\\"}") == 62);
    assert_null(strstr(text, "pool \\\"32"));
    assert_true(sample(text, "attnd_pool_blocks_free{pool=\"(others)\"}") == 32 + 33 + 34);
    free(text);
    stats_set_pools(p, 1);
    text = rendered(json_to);
    json_t *root = json_loads(text, JSON_REJECT_DUPLICATES, NULL);
    json_t *list = json_object_get(root, "pools");
    assert_int_equal(json_array_size(list), 1);
    assert_string_equal(json_string_value(json_object_get(json_array_get(list, 0), "name")),
                        "pool \"0\\");
    json_decref(root);
    free(text);
    stats_set_pools(NULL, 0);
}

static void the_process_and_the_build_are_told(void **state)
{
    (void)state;
    stats_set_commit("0a1b2c");
    char *text = rendered(stats_write_prometheus);
    assert_true(sample(text, "attnd_build_info{version=\"" ATTND_VERSION "\",commit=\"0a1b2c\"}") ==
                1);
    assert_true(sample(text, "process_resident_memory_bytes") > 100000);
    assert_true(sample(text, "process_open_fds") >= 3);
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    double began = sample(text, "process_start_time_seconds");
    assert_true(began > 1.6e9 && began <= (double)now.tv_sec + 1);
    free(text);
}

static void pages_answer_without_a_loop_or_an_engine(void **state)
{
    (void)state;
    struct http *h = http_up(1000000);
    stats_set(peers, 42);
    expect_page(h, "GET", "/metrics", 200, "\nattnd_peers 42\n");
    expect_page(h, "GET", "/metrics", 200, "text/plain; version=0.0.4");
    expect_page(h, "GET", "/stats", 200, "\"peers\":42,");
    expect_page(h, "GET", "/stats", 200, "application/json");
    expect_page(h, "GET", "/healthz", 200, "ok\n");
    expect_page(h, "HEAD", "/healthz", 200, "Content-Length: 3");
    http_close(h);
    http_close(NULL);
}

static void healthz_names_the_thread_that_stopped(void **state)
{
    (void)state;
    use_test_clock();
    struct http *h = http_up(1000000);
    expect_page(h, "GET", "/healthz", 200, "ok\n"); /* nobody has begun */
    health_beat(HEALTH_ENGINE);
    health_beat(HEALTH_LOOP);
    test_now_ns += 1000000000;
    expect_page(h, "GET", "/healthz", 200, "ok\n");
    health_beat(HEALTH_LOOP);
    test_now_ns += 1;
    expect_page(h, "GET", "/healthz", 503, "the engine has shown no life for 1000 ms\n");
    expect_page(h, "GET", "/healthz?verbose", 503,
                "[-] engine\n[+] event loop\n[+] canary: 0 of 0 outputs wrong\n[+] settings\n"
                "[-] ready\n");
    health_set_settings_good(false); /* people see it; it is served all the same */
    expect_page(h, "GET", "/healthz?verbose", 503, "[-] settings\n");
    health_set_settings_good(true);
    expect_page(h, "GET", "/livez", 200, "ok\n");
    test_now_ns += 1000000000;
    expect_page(h, "GET", "/healthz", 503, "the engine has shown no life for 2000 ms\nthe event");
    health_beat(HEALTH_ENGINE);
    test_now_ns += 5000000;
    expect_page(h, "GET", "/healthz", 503, "the event loop has shown no life for 1005 ms\n");
    health_beat(HEALTH_LOOP);
    expect_page(h, "GET", "/healthz", 200, "ok\n");
    test_now_ns -= 1; /* read just before the beat */
    expect_page(h, "GET", "/healthz", 200, "ok\n");
    test_now_ns += 10000000000;
    health_end(HEALTH_ENGINE);
    health_end(HEALTH_LOOP);
    expect_page(h, "GET", "/healthz", 200, "ok\n");
    http_close(h);
}

static void readyz_follows_ready_draining_and_health(void **state)
{
    (void)state;
    use_test_clock();
    struct http *h = http_up(1000000);
    expect_page(h, "GET", "/readyz", 503, "not ready\n");
    health_set_ready(true);
    expect_page(h, "GET", "/readyz", 200, "ok\n");
    health_set_draining(true);
    expect_page(h, "GET", "/readyz", 503, "draining\n");
    health_set_draining(false);
    health_beat(HEALTH_ENGINE);
    test_now_ns += 5000000000;
    expect_page(h, "GET", "/readyz", 503, "the engine has shown no life");
    http_close(h);
}

static void gauges_show_health_and_decide_nothing(void **state)
{
    (void)state;
    use_test_clock();
    struct http *h = http_up(1000000);
    health_beat(HEALTH_ENGINE);
    health_set_ready(true);
    assert_int_equal(stats_get(engine_beat_at_ns), test_now_ns);
    assert_int_equal(stats_get(is_ready), 1);
    stats_set(engine_beat_at_ns, 1);
    stats_set(is_ready, 0);
    stats_set(is_draining, 1);
    expect_page(h, "GET", "/readyz", 200, "ok\n");
    http_close(h);
}

static void other_paths_and_methods_are_refused(void **state)
{
    (void)state;
    struct http *h = http_up(1000000);
    expect_page(h, "GET", "/nothing", 404, "/metrics");
    expect_page(h, "GET", "/", 200, "<!doctype html>");
    expect_page(h, "GET", "/metrics/", 404, "no such page");
    expect_page(h, "POST", "/other", 404, "no such page");
    expect_page(h, "POST", "/metrics", 405, "Allow: GET, HEAD");
    expect_page(h, "DELETE", "/healthz", 405, "only GET and HEAD");
    char *answer = ask(http_port(h), "POST /stats HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
                                     "Content-Length: 5\r\n\r\nhello");
    assert_non_null(strstr(answer, "405"));
    free(answer);
    http_close(h);
}

static const char healthz[] = "GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";

static void half_sent_requests_keep_nobody_out(void **state)
{
    (void)state;
    enum { N = 300, HALF = 30 };
    struct http *h = http_up(1000000);
    int fds[N];
    for (int i = 0; i < N; i++) {
        fds[i] = socket(AF_INET, SOCK_STREAM, 0);
        connect_at(fds[i], http_port(h));
        assert_int_equal(send(fds[i], healthz, HALF, MSG_NOSIGNAL), HALF);
        if (i % 20 == 0)
            expect_page(h, "GET", "/healthz", 200, "ok\n");
    }
    expect_page(h, "GET", "/healthz", 200, "ok\n");
    /* one of the latest still has its place, and its time to go on */
    char *answer = ask_at(fds[N - 1], healthz + HALF);
    assert_non_null(strstr(answer, "200 OK"));
    free(answer);
    for (int i = 0; i < N - 1; i++)
        close(fds[i]);
    http_close(h);
}

static void healthz_answers_where_no_descriptor_is_left(void **state)
{
    (void)state;
    enum { N = 100, ASKED = 50 };
    struct http *h = http_up(1000000);
    struct rlimit before, tight;
    int fds[N];
    for (int i = 0; i < N; i++)
        fds[i] = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    int top = dup(0);
    close(top);
    getrlimit(RLIMIT_NOFILE, &before);
    tight = before;
    tight.rlim_cur = (rlim_t)top; /* the lowest that is free */
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &tight), 0);
    for (int i = 0; i < N - ASKED; i++) { /* more than are in reserve wait half-sent */
        connect_at(fds[i], http_port(h));
        assert_int_equal(send(fds[i], healthz, 10, MSG_NOSIGNAL), 10);
    }
    uint64_t turns = atomic_load(&n_polls);
    for (int i = N - ASKED; i < N; i++) {
        connect_at(fds[i], http_port(h));
        char *answer = ask_at(fds[i], healthz);
        assert_non_null(strstr(answer, "200 OK"));
        free(answer);
        /* what this process gives back would be descriptors again */
        setrlimit(RLIMIT_NOFILE, &tight);
        fds[i] = fcntl(0, F_DUPFD, 0);
    }
    turns = atomic_load(&n_polls) - turns;
    assert_true(turns > 0);
    if (turns > 50 * ASKED)
        fail_msg("%llu turns for %d requests", (unsigned long long)turns, ASKED);
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &before), 0);
    for (int i = 0; i < N; i++)
        close(fds[i]);
    expect_page(h, "GET", "/healthz", 200, "ok\n");
    http_close(h);
}

static void requests_sent_ahead_are_answered_once(void **state)
{
    (void)state;
    static const char metrics[] = "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n";
    enum { N = 200, BYTES = sizeof metrics - 1 };
    struct http *h = http_up(1000000);
    char *request = malloc(N * BYTES + 1), *answer = malloc(1 << 20);
    for (int i = 0; i < N; i++)
        memcpy(request + i * BYTES, metrics, BYTES + 1);
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    connect_at(fd, http_port(h));
    uint64_t before = atomic_load(&n_rendered);
    assert_int_equal(send(fd, request, N * BYTES, MSG_NOSIGNAL), N * BYTES);
    size_t n = 0;
    ssize_t k;
    while ((k = recv(fd, answer + n, (1 << 20) - 1 - n, 0)) > 0) /* until it hangs up */
        n += (size_t)k;
    answer[n] = '\0';
    assert_non_null(strstr(answer, "HTTP/1.1 200 OK"));
    assert_non_null(strstr(answer, "Connection: close"));
    assert_null(strstr(answer + 1, "HTTP/1.1"));
    assert_int_equal(atomic_load(&n_rendered) - before, 1);
    close(fd);
    free(request);
    free(answer);
    http_close(h);
}

/* So who asks next waits for one of each page, not for one for each of them. */
static void a_page_is_rendered_once_for_all_who_have_asked(void **state)
{
    (void)state;
    enum { N = 60 };
    static const char metrics[] = "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n";
    struct http *h = http_up(1000000);
    int fds[N];
    uint64_t before = atomic_load(&n_rendered);
    pthread_mutex_lock(&may_turn);
    for (int i = 0; i < N; i++) {
        fds[i] = socket(AF_INET, SOCK_STREAM, 0);
        connect_at(fds[i], http_port(h));
        assert_int_equal(send(fds[i], metrics, sizeof metrics - 1, MSG_NOSIGNAL),
                         sizeof metrics - 1);
    }
    pthread_mutex_unlock(&may_turn);
    stats_set(peers, 4711);
    for (int i = 0; i < N; i++) {
        char *answer = ask_at(fds[i], "");
        assert_non_null(strstr(answer, "\nattnd_peers "));
        free(answer);
    }
    uint64_t n = atomic_load(&n_rendered) - before;
    if (n < 1 || n > N / 4)
        fail_msg("%llu renderings for %d who asked at once", (unsigned long long)n, N);
    expect_page(h, "GET", "/metrics", 200, "\nattnd_peers 4711\n"); /* asked later: as of then */
    http_close(h);
}

static void an_address_that_is_taken_is_named(void **state)
{
    (void)state;
    struct http *h = http_up(1000000), *second = NULL;
    char address[64], why[256] = "";
    snprintf(address, sizeof(address), "127.0.0.1:%u", http_port(h));
    assert_int_equal(http_open(address, 1, &second, why, sizeof(why)), ATTN_EINVAL);
    assert_non_null(strstr(why, address));
    assert_non_null(strstr(why, "Address already in use"));
    assert_null(second);
    http_close(h);
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup(name, reset)
    const struct CMUnitTest tests[] = {
        TEST(every_counter_and_gauge_is_exported_once_with_help_and_type),
        TEST(times_are_exported_in_seconds),
        TEST(answered_steps_are_counted_by_status),
        TEST(a_status_that_is_none_counts_as_internal),
        TEST(histograms_are_cumulative_and_count_each_time_once),
        TEST(the_json_is_json_and_says_the_same),
        TEST(pools_are_told_by_name_and_those_past_the_limit_as_one),
        TEST(the_process_and_the_build_are_told),
        TEST(pages_answer_without_a_loop_or_an_engine),
        TEST(healthz_names_the_thread_that_stopped),
        TEST(readyz_follows_ready_draining_and_health),
        TEST(gauges_show_health_and_decide_nothing),
        TEST(other_paths_and_methods_are_refused),
        TEST(half_sent_requests_keep_nobody_out),
        TEST(healthz_answers_where_no_descriptor_is_left),
        TEST(requests_sent_ahead_are_answered_once),
        TEST(a_page_is_rendered_once_for_all_who_have_asked),
        TEST(an_address_that_is_taken_is_named),
    };
    return cmocka_run_group_tests_name("stats", tests, NULL, NULL);
}
