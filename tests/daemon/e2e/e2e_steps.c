/* e2e_steps.c: what the running daemon computes, whoever sends it, however often, in whatever
 * order. */
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>
#include <jansson.h>

#include "kernels/kv_layout.h"
#include "tests/daemon/e2e/e2e.h"
#include "tests/random.h"

static struct e2e d;
static struct e2e_seq s[8];

static int start(void **state)
{
    (void)state;
    e2e_start(&d, NULL);
    return 0;
}

static int stop(void **state)
{
    (void)state;
    e2e_stop(&d);
    return 0;
}

static void outputs_match_the_reference(void **state)
{
    (void)state;
    static const attn_dtype dtypes[] = {ATTN_BF16, ATTN_F16, ATTN_F32};
    for (size_t k = 0; k < 3; k++) {
        struct e2e other;
        struct e2e_client a, b;
        e2e_start(&other, NULL);
        e2e_connect(&a, &other);
        e2e_connect(&b, &other);
        e2e_make_pool(&a, dtypes[k], 128);
        e2e_make_pool(&b, dtypes[k], 0); /* the same pool */
        assert_int_equal(a.pool, b.pool);
        for (uint32_t i = 0; i < 3; i++)
            assert_int_equal(e2e_open_seq(&a, &s[i], 100 + i, 1 + i), ATTN_OK);
        for (uint32_t i = 3; i < 6; i++)
            assert_int_equal(e2e_open_seq(&b, &s[i], 100 + i, 1 + i), ATTN_OK);
        for (uint32_t layer = 0; layer < E2E_LAYERS; layer++) {
            struct e2e_item prompts[] = {{&s[0], 0, 33}, {&s[1], 0, 1}, {&s[2], 0, 100}};
            struct e2e_item more[] = {{&s[3], 0, 16}, {&s[4], 0, 64}, {&s[5], 0, 5}};
            uint64_t id = e2e_send_step(&b, layer, E2E_BOTH, more, 3, 0);
            e2e_step(&a, layer, prompts, 3);
            e2e_check_step(e2e_await(&b, id), layer, E2E_BOTH, more, 3);
        }
        uint32_t len[6] = {33, 1, 100, 16, 64, 5};
        for (uint32_t t = 0; t < 20; t++) {
            for (uint32_t layer = 0; layer < E2E_LAYERS; layer++) {
                struct e2e_item x[3], y[3];
                for (uint32_t i = 0; i < 3; i++) {
                    x[i] = (struct e2e_item){&s[i], len[i] + t * (i + 1), i + 1}; /* speculative */
                    y[i] = (struct e2e_item){&s[3 + i], len[3 + i] + t, 1};
                }
                uint64_t id = e2e_send_step(&b, layer, E2E_BOTH, y, 3, 0);
                e2e_step(&a, layer, x, 3);
                e2e_check_step(e2e_await(&b, id), layer, E2E_BOTH, y, 3);
            }
        }
        e2e_disconnect(&a);
        e2e_disconnect(&b);
        e2e_stop(&other);
    }
}

static void steps_in_pieces_and_layers_at_once_compute_the_same(void **state)
{
    (void)state;
    struct e2e_client c;
    e2e_connect(&c, &d);
    e2e_make_pool(&c, ATTN_BF16, 512);
    assert_int_equal(e2e_open_seq(&c, &s[0], 1, 7), ATTN_OK);
    enum { N = 40 };
    uint64_t id[N][E2E_LAYERS];
    struct e2e_item it[N];
    uint32_t pos = 0;
    for (uint32_t i = 0; i < N; i++) { /* everything is sent before anything is awaited */
        it[i] = (struct e2e_item){&s[0], pos, 1 + i % 7};
        pos += it[i].n_tokens;
        for (uint32_t layer = 0; layer < E2E_LAYERS; layer++)
            id[i][layer] = e2e_send_step(&c, layer, E2E_BOTH, &it[i], 1, 0);
    }
    for (uint32_t i = 0; i < N; i++)
        for (uint32_t layer = 0; layer < E2E_LAYERS; layer++)
            e2e_check_step(e2e_await(&c, id[i][layer]), layer, E2E_BOTH, &it[i], 1);
    assert_int_equal(e2e_close_seq(&c, &s[0]), ATTN_OK);
    e2e_disconnect(&c);
}

static void assert_reads_back_alike(struct e2e_client *c, struct e2e_seq *a, struct e2e_seq *b,
                                    uint32_t len)
{
    for (uint32_t layer = 0; layer < E2E_LAYERS; layer++) {
        size_t n, m;
        void *x = e2e_read_back(c, a, layer, len, &n), *y = e2e_read_back(c, b, layer, len, &m);
        assert_int_equal(n, m);
        assert_memory_equal(x, y, n);
        free(x);
        free(y);
    }
}

/* A clean run and one with every step repeated, some early, some late, end in the same cache. */
static void repeated_and_out_of_order_steps_leave_the_cache_as_a_clean_run(void **state)
{
    (void)state;
    struct e2e_client c;
    e2e_connect(&c, &d);
    e2e_make_pool(&c, ATTN_BF16, 512);
    assert_int_equal(e2e_open_seq(&c, &s[0], 10, 5), ATTN_OK);
    assert_int_equal(e2e_open_seq(&c, &s[1], 11, 5), ATTN_OK); /* the same tokens */
    enum { N = 60, CHUNK = 3 };
    for (uint32_t i = 0; i < N; i++)
        for (uint32_t layer = 0; layer < E2E_LAYERS; layer++)
            assert_int_equal(e2e_item(&c, &s[0], layer, i * CHUNK, CHUNK), ATTN_OK);
    uint64_t seed = 42;
    for (uint32_t i = 0; i < N; i++) {
        for (uint32_t layer = 0; layer < E2E_LAYERS; layer++) {
            struct e2e_item early = {&s[1], (i + 1 + random_below(&seed, 3)) * CHUNK, CHUNK};
            struct e2e_item now = {&s[1], i * CHUNK, CHUNK};
            struct e2e_item late = {&s[1], random_below(&seed, i + 1) * CHUNK, CHUNK};
            uint64_t gap = e2e_send_step(&c, layer, E2E_BOTH, &early, 1, 0);
            uint64_t first = e2e_send_step(&c, layer, E2E_BOTH, &now, 1, 0);
            uint64_t again = e2e_send_step(&c, layer, E2E_BOTH, &now, 1, 0);
            uint64_t old = e2e_send_step(&c, layer, E2E_BOTH, &late, 1, 0);
            assert_int_equal(e2e_await(&c, gap)->header->status, ATTN_EINVAL);
            const struct wire_reply *x = e2e_await(&c, first), *y = e2e_await(&c, again);
            e2e_check_step(x, layer, E2E_BOTH, &now, 1);
            assert_int_equal(x->payload_bytes, y->payload_bytes);
            assert_memory_equal(x->payload, y->payload, x->payload_bytes);
            e2e_check_step(e2e_await(&c, old), layer, E2E_BOTH, &late, 1);
        }
    }
    assert_reads_back_alike(&c, &s[0], &s[1], N * CHUNK);
    assert_int_equal(e2e_close_seq(&c, &s[0]), ATTN_OK);
    assert_int_equal(e2e_close_seq(&c, &s[1]), ATTN_OK);
    e2e_disconnect(&c);
}

static void forks_diverge_without_touching_each_other(void **state)
{
    (void)state;
    struct e2e_client c;
    e2e_connect(&c, &d);
    e2e_make_pool(&c, ATTN_BF16, 512);
    assert_int_equal(e2e_open_seq(&c, &s[0], 20, 1), ATTN_OK);
    for (uint32_t layer = 0; layer < E2E_LAYERS; layer++) {
        struct e2e_item it = {&s[0], 0, 70};
        e2e_step(&c, layer, &it, 1);
    }
    /* at a block's edge, inside a block, everything, nothing */
    const uint32_t len[] = {64, 37, 70, 0};
    for (uint32_t i = 0; i < 4; i++)
        assert_int_equal(e2e_fork(&c, &s[0], &s[1 + i], 21 + i, len[i], 2 + i), ATTN_OK);
    assert_int_equal(e2e_fork(&c, &s[0], &s[5], 25, 71, 9), ATTN_EINVAL);
    for (uint32_t t = 0; t < 30; t++) {
        for (uint32_t layer = 0; layer < E2E_LAYERS; layer++) {
            struct e2e_item it[5] = {{&s[0], 70 + t, 1}};
            for (uint32_t i = 0; i < 4; i++)
                it[1 + i] = (struct e2e_item){&s[1 + i], len[i] + t, 1};
            e2e_step(&c, layer, it, 5);
        }
    }
    /* a fork of a fork, written over from the middle, while its parents are attended */
    assert_int_equal(e2e_fork(&c, &s[2], &s[5], 26, 60, 11), ATTN_OK);
    for (uint32_t i = 40; i < 60; i++)
        s[5].stream[i] = 12;
    for (uint32_t layer = 0; layer < E2E_LAYERS; layer++) {
        struct e2e_item it[3] = {{&s[5], 40, 20}, {&s[0], 100, 1}, {&s[2], 67, 1}};
        e2e_step(&c, layer, it, 3);
    }
    for (uint32_t i = 0; i < 6; i++) {
        const uint32_t total[] = {101, 94, 68, 100, 30, 60};
        for (uint32_t layer = 0; layer < E2E_LAYERS; layer++) {
            struct e2e_item it = {&s[i], 0, total[i]};
            uint64_t id = e2e_send_step(&c, layer, WIRE_STEP_ATTEND, &it, 1, 0);
            e2e_check_step(e2e_await(&c, id), layer, WIRE_STEP_ATTEND, &it, 1);
        }
        assert_int_equal(e2e_close_seq(&c, &s[i]), ATTN_OK);
    }
    e2e_disconnect(&c);
}

static void truncated_tokens_are_replaced(void **state)
{
    (void)state;
    struct e2e_client c;
    e2e_connect(&c, &d);
    e2e_make_pool(&c, ATTN_BF16, 512);
    assert_int_equal(e2e_open_seq(&c, &s[0], 30, 1), ATTN_OK);
    uint32_t len = 0;
    uint64_t seed = 7;
    for (uint32_t i = 0; i < 40; i++) {
        uint32_t keep = random_below(&seed, len + 1), n = 1 + random_below(&seed, 40);
        assert_int_equal(e2e_truncate(&c, &s[0], keep), ATTN_OK);
        for (uint32_t t = keep; t < E2E_MAX_TOKENS; t++)
            s[0].stream[t] = i;
        for (uint32_t layer = 0; layer < E2E_LAYERS; layer++) {
            struct e2e_item it = {&s[0], keep, n};
            e2e_step(&c, layer, &it, 1);
        }
        len = keep + n;
    }
    assert_int_equal(e2e_close_seq(&c, &s[0]), ATTN_OK);
    e2e_disconnect(&c);
}

/* The worker: steps until it is killed; tells how far it got after each token of all layers. */
static void work_until_killed(struct e2e_seq *seq, int tell)
{
    struct e2e_client c;
    e2e_connect(&c, &d);
    e2e_make_pool(&c, ATTN_BF16, 512);
    if (e2e_open_seq(&c, seq, 40, 3) != ATTN_OK)
        _exit(1);
    for (uint32_t t = 0; t < E2E_MAX_TOKENS; t++) {
        for (uint32_t layer = 0; layer < E2E_LAYERS; layer++)
            if (e2e_item(&c, seq, layer, t, 1) != ATTN_OK)
                _exit(1);
        if (write(tell, &t, sizeof t) != sizeof t)
            _exit(1);
    }
    _exit(1);
}

static void a_killed_workers_sequence_is_adopted_and_goes_on(void **state)
{
    (void)state;
    int pipe_fds[2], status;
    uint32_t acknowledged = 0;
    assert_int_equal(pipe(pipe_fds), 0);
    pid_t worker = fork();
    if (worker == 0)
        work_until_killed(&s[0], pipe_fds[1]);
    close(pipe_fds[1]);
    while (acknowledged < 50)
        assert_int_equal(read(pipe_fds[0], &acknowledged, sizeof acknowledged),
                         sizeof acknowledged);
    kill(worker, SIGKILL);
    assert_int_equal(waitpid(worker, &status, 0), worker);
    assert_true(WIFSIGNALED(status));
    uint32_t last;
    while (read(pipe_fds[0], &last, sizeof last) == sizeof last)
        acknowledged = last;
    close(pipe_fds[0]);

    struct e2e_client c;
    uint32_t len[E2E_LAYERS];
    e2e_connect(&c, &d);
    e2e_make_pool(&c, ATTN_BF16, 512);
    struct e2e_seq *heir = &s[1], *clean = &s[2];
    assert_int_equal(e2e_open_seq(&c, clean, 41, 3), ATTN_OK);
    *heir = *clean;
    heir->name = 40;
    uint32_t epoch = heir->epoch = s[0].epoch; /* of the worker that was killed */
    assert_int_equal(e2e_item(&c, heir, 0, 0, 1), ATTN_ESTALE);
    assert_int_equal(e2e_adopt(&c, heir, len), ATTN_OK);
    assert_true(heir->epoch > epoch);
    for (uint32_t layer = 0; layer < E2E_LAYERS; layer++)
        assert_true(len[layer] >= acknowledged + 1); /* what was acknowledged is there */
    for (uint32_t layer = 0; layer < E2E_LAYERS; layer++) {
        for (uint32_t t = len[layer]; t < len[0] + 20; t++) {
            struct e2e_item it = {heir, t, 1};
            e2e_step(&c, layer, &it, 1);
        }
        for (uint32_t t = 0; t < len[0] + 20; t++)
            assert_int_equal(e2e_item(&c, clean, layer, t, 1), ATTN_OK);
    }
    assert_reads_back_alike(&c, heir, clean, len[0] + 20);
    assert_int_equal(e2e_close_seq(&c, heir), ATTN_OK);
    e2e_disconnect(&c);
}

/* A counter of /stats. */
static json_int_t counter(struct e2e_client *c, const char *name)
{
    Attnd__Request h = ATTND__REQUEST__INIT;
    Attnd__Stats b = ATTND__STATS__INIT;
    h.session = c->session;
    h.body_case = ATTND__REQUEST__BODY_STATS;
    h.stats = &b;
    json_t *root = json_loads(e2e_call(c, &h)->stats->json, 0, NULL);
    assert_non_null(root);
    json_int_t n = json_integer_value(json_object_get(root, name));
    json_decref(root);
    return n;
}

/* Eight forks decode together: the cached tokens that they have in common are read once. */
static void forks_that_decode_together_read_what_they_share_once(void **state)
{
    (void)state;
    enum { TRUNK = 512 };
    static const attn_dtype dtypes[] = {ATTN_BF16, ATTN_F32};
    for (size_t k = 0; k < 2; k++) {
        struct e2e other;
        struct e2e_client c;
        struct e2e_seq trunk;
        struct e2e_item items[8];
        e2e_start(&other, NULL);
        e2e_connect(&c, &other);
        e2e_is_batch_variant = true;
        e2e_make_pool(&c, dtypes[k], 256);
        e2e_is_batch_variant = false;
        assert_int_equal(e2e_open_seq(&c, &trunk, 50, 3), ATTN_OK);
        for (uint32_t layer = 0; layer < E2E_LAYERS; layer++)
            assert_int_equal(e2e_item(&c, &trunk, layer, 0, TRUNK), ATTN_OK);
        for (uint32_t i = 0; i < 8; i++) {
            const uint32_t len = TRUNK - i * 5; /* some take part of a block */
            assert_int_equal(e2e_fork(&c, &trunk, &s[i], 100 + i, len, 60 + i), ATTN_OK);
            items[i] = (struct e2e_item){&s[i], len, 1 + i * 3 % 7};
        }
        for (uint32_t layer = 0; layer < E2E_LAYERS; layer++)
            e2e_step(&c, layer, items, 8);
        const json_int_t before = counter(&c, "kv_shared_bytes_total");
        const json_int_t read = counter(&c, "kv_read_bytes_total");
        for (uint32_t t = 0; t < 4; t++) {
            for (uint32_t i = 0; i < 8; i++)
                items[i] = (struct e2e_item){&s[i], items[i].pos + items[i].n_tokens, 1};
            for (uint32_t layer = 0; layer < E2E_LAYERS; layer++)
                e2e_step(&c, layer, items, 8);
        }
        /* layers 0 and 2 have no window; the first 28 blocks are whole tiles of all eight. Other
         * cards' backends may read them for each */
        const json_int_t token = E2E_KV_HEADS * kv_row_bytes(e2e_kv_dtype(), E2E_DIM);
        const json_int_t shared = counter(&c, "kv_shared_bytes_total") - before;
        if (getenv("E2E_CARDS") == NULL) {
            assert_true(shared >= 4 * 2 * 7 * (28 * E2E_BLOCK_TOKENS) * token);
            assert_true(counter(&c, "kv_read_bytes_total") - read < shared);
        }
        e2e_disconnect(&c);
        e2e_stop(&other);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(outputs_match_the_reference),
        cmocka_unit_test(steps_in_pieces_and_layers_at_once_compute_the_same),
        cmocka_unit_test(repeated_and_out_of_order_steps_leave_the_cache_as_a_clean_run),
        cmocka_unit_test(forks_diverge_without_touching_each_other),
        cmocka_unit_test(forks_that_decode_together_read_what_they_share_once),
        cmocka_unit_test(truncated_tokens_are_replaced),
        cmocka_unit_test(a_killed_workers_sequence_is_adopted_and_goes_on),
    };
    return cmocka_run_group_tests(tests, start, stop);
}
