/* test_libattn_shm.c: libattn through shared memory at the real daemon: right outputs, many more in
 * flight than fit the memory, threads, an event loop, a restarted daemon, forks. */
#include <poll.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "clients/libattn/attn.h"
#include "kernels/reference.h"
#include "tests/daemon/e2e/e2e.h"
#include "tests/random.h"

enum { HEADS = 4, DIM = 32, ROW = HEADS * DIM, MAX_TOKENS = 64, LONG_US = 300000000 };

static struct e2e d;
static char url[128];

static attn_client *open_client(void)
{
    attn_client *c = NULL;
    snprintf(url, sizeof url, "shm://%s", d.shm_path);
    if (attn_client_open(url, NULL, LONG_US, &c) != ATTN_OK)
        fail_msg("%s", attn_last_error()->message);
    return c;
}

static attn_pool *open_pool(attn_client *c)
{
    attn_pool *p = NULL;
    struct attn_pool_spec spec = {.struct_size = sizeof spec,
                                  .layer_struct_size = sizeof(struct attn_layer),
                                  .name = "shm",
                                  .num_layers = 1,
                                  .num_q_heads = HEADS,
                                  .num_kv_heads = HEADS,
                                  .head_dim_k = DIM,
                                  .block_tokens = 16,
                                  .n_blocks = 2048,
                                  .q_dtype = ATTN_F32};
    if (attn_pool_create(c, &spec, LONG_US, &p) != ATTN_OK)
        fail_msg("%s", attn_last_error()->message);
    return p;
}

/* One sequence: its tokens' q, k, v so far, and a step of the next n of them. */
struct worker {
    attn_pool *pool;
    struct attn_seq seq;
    uint64_t seed;
    uint32_t n;
    float q[MAX_TOKENS * ROW], k[MAX_TOKENS * ROW], v[MAX_TOKENS * ROW], out[MAX_TOKENS * ROW];
    struct attn_item item;
    struct attn_step step;
    int n_calls;
    attn_status status;
};

static void fill(float *x, size_t n, uint64_t *seed)
{
    for (size_t i = 0; i < n; i++)
        x[i] = (float)random_below(seed, 2001) / 1000 - 1.0005f;
}

static void worker_open(struct worker *w, attn_pool *p, uint64_t id)
{
    *w = (struct worker){.pool = p, .seed = id};
    fill(w->q, MAX_TOKENS * ROW, &w->seed);
    fill(w->k, MAX_TOKENS * ROW, &w->seed);
    fill(w->v, MAX_TOKENS * ROW, &w->seed);
    if (attn_seq_open(p, id, LONG_US, &w->seq) != ATTN_OK)
        fail_msg("%s", attn_last_error()->message);
}

static struct attn_step *next_step(struct worker *w, uint32_t n_tokens)
{
    w->item = (struct attn_item){.seq = w->seq, .pos = w->n, .n_tokens = n_tokens};
    w->step = (struct attn_step){.struct_size = sizeof w->step,
                                 .n_items = 1,
                                 .items = &w->item,
                                 .q = w->q + w->n * ROW,
                                 .k = w->k + w->n * ROW,
                                 .v = w->v + w->n * ROW,
                                 .out = w->out + w->n * ROW,
                                 .timeout_us = LONG_US};
    for (uint32_t i = 0; i < n_tokens * ROW; i++)
        w->out[w->n * ROW + i] = 12345;
    w->n += n_tokens;
    return &w->step;
}

/* What the sequence's outputs are, from its first token to its last. */
static void assert_right(const struct worker *w)
{
    double *ref = calloc((size_t)w->n * ROW, sizeof *ref);
    double *lse = calloc((size_t)w->n * HEADS, sizeof *lse);
    struct attn_layer_spec spec = {.scale = 0.1767766952966369f};
    assert_int_equal(reference_attend(&spec, HEADS, HEADS, DIM, DIM, ATTN_F32, w->q, w->n, 0, w->k,
                                      w->v, w->n, ref, lse),
                     ATTN_OK);
    struct reference_bound b = reference_bound_of(ATTN_F32, ATTN_F32);
    for (uint32_t i = 0; i < w->n * ROW; i++) {
        double e = w->out[i] - ref[i];
        if (!(e * e <= (b.atol + 1e-6) * (b.atol + 1e-6)) && !(e * e <= 1e-8))
            fail_msg("sequence %llu: output %u is %g, the reference %g",
                     (unsigned long long)w->seq.id, i, (double)w->out[i], ref[i]);
    }
    free(ref);
    free(lse);
}

static int start(void **state)
{
    static const char *const flags[] = {
        "--listen.shm_client", "1M", "--listen.shm_slots", "16", "--device.kv_memory", "64M", NULL};
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

static void fill_all(void *user, void *q, void *k, void *v)
{
    const struct worker *w = user;
    memcpy(q, w->q, w->n * sizeof(float) * ROW);
    memcpy(k, w->k, w->n * sizeof(float) * ROW);
    memcpy(v, w->v, w->n * sizeof(float) * ROW);
}

static void take_all(void *user, const void *out, const float *lse, uint32_t n_failed)
{
    struct worker *w = user;
    assert_int_equal(n_failed, 0);
    assert_null(lse);
    memcpy(w->out, out, w->n * sizeof(float) * ROW);
}

/* All tokens again as one step of a new sequence, in place. */
static void step_in_place(struct worker *w, uint64_t id)
{
    struct attn_in_place in_place = {
        .is_append = true, .is_attend = true, .fill = fill_all, .take = take_all, .user = w};
    struct attn_item item = {.n_tokens = w->n};
    struct attn_step step = {.struct_size = sizeof step,
                             .n_items = 1,
                             .items = &item,
                             .timeout_us = LONG_US,
                             .in_place = &in_place};
    assert_int_equal(attn_seq_open(w->pool, id, LONG_US, &item.seq), ATTN_OK);
    assert_int_equal(attn_step(w->pool, &step, NULL), ATTN_OK);
    assert_int_equal(attn_seq_close(w->pool, &item.seq, LONG_US), ATTN_OK);
}

static void calls_and_steps_give_what_they_should(void **state)
{
    (void)state;
    attn_client *c = open_client();
    attn_pool *p = open_pool(c);
    struct worker *w = calloc(1, sizeof *w);
    struct attn_seq fork;
    uint32_t len = 0;
    char *json = NULL;
    worker_open(w, p, 1);
    for (uint32_t i = 0; w->n + 1 + i % 5 <= MAX_TOKENS; i++)
        assert_int_equal(attn_step(p, next_step(w, 1 + i % 5), NULL), ATTN_OK);
    assert_right(w);
    memset(w->out, 0xff, sizeof w->out);
    step_in_place(w, 3);
    assert_right(w);
    assert_int_equal(attn_seq_fork(p, &w->seq, 2, 10, LONG_US, &fork, &len), ATTN_OK);
    assert_int_equal(len, 10);
    assert_int_equal(attn_seq_truncate(p, &fork, 5, LONG_US), ATTN_OK);
    assert_int_equal(attn_seq_close(p, &fork, LONG_US), ATTN_OK);
    assert_int_equal(attn_client_stats(c, LONG_US, &json), ATTN_OK); /* a long answer */
    assert_non_null(strstr(json, "steps_received_total"));
    attn_free(json);
    assert_int_equal(attn_client_ping(c, LONG_US, NULL), ATTN_OK);
    assert_int_equal(attn_seq_close(p, &w->seq, LONG_US), ATTN_OK);
    attn_pool_close(p);
    attn_client_close(c);
    free(w);
}

static void on_done(void *user, attn_ticket ticket, const struct attn_result *r)
{
    struct worker *w = user;
    (void)ticket;
    w->n_calls++;
    if (r->status != ATTN_OK)
        w->status = r->status;
}

/* 200 requests of 48 KB and as much for the answers: 16 slots and 1 MB hold a few of them. */
static void more_in_flight_than_the_memory_holds(void **state)
{
    (void)state;
    attn_client *c = open_client();
    attn_pool *p = open_pool(c);
    enum { N = 200 };
    struct worker *w = calloc(N, sizeof *w);
    for (uint32_t i = 0; i < N; i++)
        worker_open(&w[i], p, 100 + i);
    for (uint32_t i = 0; i < N; i++)
        assert_int_equal(attn_step_start(p, next_step(&w[i], 32), on_done, &w[i], NULL), ATTN_OK);
    uint32_t n = 0;
    while (n < N) {
        uint32_t some = 0;
        assert_int_equal(attn_client_poll(c, LONG_US, &some), ATTN_OK);
        assert_true(some > 0);
        n += some;
    }
    for (uint32_t i = 0; i < N; i++) {
        assert_int_equal(w[i].n_calls, 1);
        assert_int_equal(w[i].status, ATTN_OK);
        assert_right(&w[i]);
        assert_int_equal(attn_seq_close(p, &w[i].seq, LONG_US), ATTN_OK);
    }
    attn_pool_close(p);
    attn_client_close(c);
    free(w);
}

/* 48 KB of q, k and v for every 32 tokens: six times what a message of a 1 MB region may have. */
static void a_prompt_larger_than_the_memory_goes_in_pieces(void **state)
{
    (void)state;
    enum { TOKENS = 1500 };
    attn_client *c = open_client();
    attn_pool *p = open_pool(c);
    struct attn_client_info info = {.struct_size = sizeof info};
    assert_int_equal(attn_client_info(c, &info), ATTN_OK);
    assert_true(info.max_message_bytes > 300000 && info.max_message_bytes < 524288);
    float *x[4]; /* q, k, v, out */
    uint64_t seed = 7;
    for (int i = 0; i < 4; i++) {
        x[i] = malloc(TOKENS * ROW * sizeof **x);
        fill(x[i], TOKENS * ROW, &seed);
    }
    struct attn_item item = {.n_tokens = TOKENS};
    struct attn_step s = {.struct_size = sizeof s,
                          .n_items = 1,
                          .items = &item,
                          .q = x[0],
                          .k = x[1],
                          .v = x[2],
                          .out = x[3],
                          .timeout_us = LONG_US};
    assert_int_equal(attn_seq_open(p, 700, LONG_US, &item.seq), ATTN_OK);
    if (attn_step(p, &s, NULL) != ATTN_OK)
        fail_msg("%s", attn_last_error()->message);
    double *ref = calloc(TOKENS * ROW, sizeof *ref), *lse = calloc(TOKENS * HEADS, sizeof *lse);
    struct attn_layer_spec spec = {.scale = 0.1767766952966369f};
    assert_int_equal(reference_attend(&spec, HEADS, HEADS, DIM, DIM, ATTN_F32, x[0], TOKENS, 0,
                                      x[1], x[2], TOKENS, ref, lse),
                     ATTN_OK);
    for (uint32_t i = 0; i < TOKENS * ROW; i++) {
        double e = x[3][i] - ref[i];
        if (!(e * e <= 1e-8))
            fail_msg("output %u is %g, the reference %g", i, (double)x[3][i], ref[i]);
    }
    assert_int_equal(attn_seq_close(p, &item.seq, LONG_US), ATTN_OK);
    for (int i = 0; i < 4; i++)
        free(x[i]);
    free(ref);
    free(lse);
    attn_pool_close(p);
    attn_client_close(c);
}

static void *run_worker(void *arg)
{
    struct worker *w = arg;
    while (w->n < MAX_TOKENS && w->status == ATTN_OK)
        w->status = attn_step(w->pool, next_step(w, 1), NULL);
    return NULL;
}

static void threads_share_a_client(void **state)
{
    (void)state;
    attn_client *c = open_client();
    attn_pool *p = open_pool(c);
    enum { N = 8 };
    struct worker *w = calloc(N, sizeof *w);
    pthread_t threads[N];
    for (uint32_t i = 0; i < N; i++)
        worker_open(&w[i], p, 400 + i);
    for (uint32_t i = 0; i < N; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, run_worker, &w[i]), 0);
    for (uint32_t i = 0; i < N; i++) {
        pthread_join(threads[i], NULL);
        assert_int_equal(w[i].status, ATTN_OK);
        assert_right(&w[i]);
        assert_int_equal(attn_seq_close(p, &w[i].seq, LONG_US), ATTN_OK);
    }
    attn_pool_close(p);
    attn_client_close(c);
    free(w);
}

static void an_event_loop_is_told_by_the_descriptor(void **state)
{
    (void)state;
    attn_client *c = open_client();
    attn_pool *p = open_pool(c);
    struct worker *w = calloc(1, sizeof *w);
    worker_open(w, p, 500);
    struct pollfd fd = {.fd = attn_client_fd(c), .events = POLLIN};
    for (uint32_t i = 0; i < MAX_TOKENS; i++) {
        assert_int_equal(attn_step_start(p, next_step(w, 1), on_done, w, NULL), ATTN_OK);
        while (w->n_calls == (int)i) {
            assert_int_equal(poll(&fd, 1, LONG_US / 1000), 1);
            assert_int_equal(attn_client_poll(c, 0, NULL), ATTN_OK);
        }
    }
    assert_int_equal(w->status, ATTN_OK);
    assert_right(w);
    while (poll(&fd, 1, 0) > 0) /* nothing is in flight: it gets quiet */
        assert_int_equal(attn_client_poll(c, 0, NULL), ATTN_OK);
    assert_int_equal(attn_seq_close(p, &w->seq, LONG_US), ATTN_OK);
    attn_pool_close(p);
    attn_client_close(c);
    free(w);
}

static void a_restarted_daemon_is_found_again(void **state)
{
    (void)state;
    attn_client *c = open_client();
    struct attn_client_counters n = {.struct_size = sizeof n};
    char path[sizeof d.shm_path];
    assert_int_equal(attn_client_ping(c, LONG_US, NULL), ATTN_OK);
    snprintf(path, sizeof path, "%s", d.shm_path);
    e2e_signal(&d, SIGKILL);
    assert_int_equal(e2e_wait(&d), -SIGKILL);
    assert_int_equal(attn_client_ping(c, 100000, NULL), ATTN_ECONN);
    e2e_restart(&d, NULL);
    attn_status st = attn_client_ping(c, LONG_US, NULL); /* the session is not known any more */
    assert_int_equal(st, ATTN_ENOTFOUND);
    assert_int_equal(attn_client_counters(c, &n), ATTN_OK);
    attn_client_close(c);
    c = open_client();
    assert_int_equal(attn_client_ping(c, LONG_US, NULL), ATTN_OK);
    attn_client_close(c);
}

static void nobody_there_is_an_error_in_time(void **state)
{
    (void)state;
    attn_client *c = NULL;
    assert_int_equal(attn_client_open("shm:///tmp/attnd-nobody-here", NULL, 50000, &c), ATTN_ECONN);
    assert_null(c);
    char ipc[400]; /* not that kind of socket */
    snprintf(ipc, sizeof ipc, "shm://%s", d.url + strlen("ipc://"));
    assert_int_equal(attn_client_open(ipc, NULL, 50000, &c), ATTN_ECONN);
}

static void a_forked_child_leaves_the_parents_client_alone(void **state)
{
    (void)state;
    attn_client *c = open_client();
    int status;
    pid_t pid = fork();
    if (pid == 0) {
        bool is_refused = attn_client_ping(c, 1000000, NULL) == ATTN_EINVAL;
        attn_client_close(c);
        attn_client *own = NULL;
        bool is_open = attn_client_open(url, NULL, LONG_US, &own) == ATTN_OK &&
                       attn_client_ping(own, LONG_US, NULL) == ATTN_OK;
        attn_client_close(own);
        _exit(is_refused && is_open ? 0 : 1);
    }
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_int_equal(status, 0);
    for (int i = 0; i < 20; i++)
        assert_int_equal(attn_client_ping(c, LONG_US, NULL), ATTN_OK);
    attn_client_close(c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(calls_and_steps_give_what_they_should),
        cmocka_unit_test(more_in_flight_than_the_memory_holds),
        cmocka_unit_test(a_prompt_larger_than_the_memory_goes_in_pieces),
        cmocka_unit_test(threads_share_a_client),
        cmocka_unit_test(an_event_loop_is_told_by_the_descriptor),
        cmocka_unit_test(nobody_there_is_an_error_in_time),
        cmocka_unit_test(a_forked_child_leaves_the_parents_client_alone),
        cmocka_unit_test(a_restarted_daemon_is_found_again),
    };
    return cmocka_run_group_tests_name("libattn_shm", tests, start, stop);
}
