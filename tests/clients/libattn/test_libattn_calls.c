/* test_libattn_calls.c: several requests in one message do what they do alone, over sockets and
 * shared memory, for a worker that takes over what a scheduler has opened; and a probe says what an
 * open finds. attn_merge, which needs no daemon. */
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/clients/libattn/seq_rig.h"
#include "tests/random.h"

enum { N_SEQS = 300, N_BLOCKS = 512, PROMPT = 70, FIRST = 1000 };

static struct attn_seq_call calls[N_SEQS];

static int start(void **state)
{
    (void)state;
    e2e_start(&seq_daemons[0], NULL);
    return 0;
}

static int stop(void **state)
{
    (void)state;
    e2e_stop(&seq_daemons[0]);
    return 0;
}

static struct attn_seq_call *call(uint32_t i, attn_call_kind kind, struct attn_seq seq)
{
    memset(&calls[i], 0xee, sizeof calls[i]); /* what is not given is not looked at */
    calls[i].struct_size = sizeof calls[i];
    calls[i].kind = kind;
    calls[i].seq = seq;
    calls[i].tokens = (struct attn_tokens){.n = 0};
    calls[i].layer_len = NULL;
    return &calls[i];
}

static void run(attn_pool *p, uint32_t n)
{
    uint32_t n_done = UINT32_MAX;
    ok(attn_seq_calls(p, calls, n, LONG_US, &n_done));
    assert_int_equal(n_done, n);
}

static void all_ok(uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        if (calls[i].error.status != ATTN_OK)
            fail_msg("call %u: %s", i, calls[i].error.message);
}

static void a_worker_takes_over_what_a_scheduler_has_opened(bool is_shm)
{
    attn_client *scheduler = client_of(0, is_shm), *worker = client_of(0, is_shm);
    attn_pool *p = pool_of(scheduler, ATTN_F32, "m", 0.25f, N_BLOCKS);
    attn_pool *q = pool_of(worker, ATTN_F32, "m", 0.25f, N_BLOCKS);
    uint32_t n_before = n_free(scheduler, p), lens[N_SEQS][LAYERS];
    struct attn_seq seqs[N_SEQS];
    float out[Q_HEADS * DIM];
    for (uint32_t i = 0; i < N_SEQS; i++)
        call(i, ATTN_CALL_OPEN, (struct attn_seq){.id = FIRST + i});
    run(p, N_SEQS);
    all_ok(N_SEQS);
    for (uint32_t i = 0; i < N_SEQS; i++)
        seqs[i] = calls[i].seq;
    for (uint32_t i = 0; i < N_SEQS; i += 50)
        for (uint32_t l = 0; l < LAYERS; l++)
            ok(step(p, &seqs[i], l, 0, 3, true, NULL));

    for (uint32_t i = 0; i < N_SEQS; i++) {
        call(i, ATTN_CALL_ADOPT, (struct attn_seq){.id = FIRST + i});
        calls[i].layer_len = memset(lens[i], 0xee, sizeof lens[i]);
    }
    call(7, ATTN_CALL_ADOPT, (struct attn_seq){.id = 5});
    run(q, N_SEQS);
    for (uint32_t i = 0; i < N_SEQS; i++) {
        assert_int_equal(calls[i].error.status, i == 7 ? ATTN_ENOTFOUND : ATTN_OK);
        if (i == 7)
            continue;
        assert_true(calls[i].seq.epoch > seqs[i].epoch);
        for (uint32_t l = 0; l < LAYERS; l++)
            assert_int_equal(lens[i][l], i % 50 == 0 ? 3 : 0);
        seqs[i].epoch = calls[i].seq.epoch;
    }
    assert_non_null(strstr(calls[7].error.message, "sequence 5"));
    ok(step(q, &seqs[50], 0, 3, 1, true, out)); /* each is the worker's */

    call(0, ATTN_CALL_TRUNCATE, seqs[50])->len = 2;
    call(1, ATTN_CALL_FORK, seqs[100]);
    calls[1].new_id = 1;
    calls[1].len = ATTN_ALL_TOKENS;
    call(2, ATTN_CALL_TRUNCATE, seqs[100])->len = 99;
    call(3, ATTN_CALL_PROBE, (struct attn_seq){.id = 0});
    run(q, 4);
    assert_int_equal(calls[0].error.status, ATTN_OK);
    assert_true(calls[0].seq.epoch > seqs[50].epoch);
    assert_int_equal(calls[1].error.status, ATTN_OK);
    assert_int_equal(calls[1].seq.id, 1);
    assert_int_equal(calls[2].error.status, ATTN_EINVAL);
    assert_int_equal(calls[3].error.status, ATTN_OK);
    assert_int_equal(calls[3].probe.cached_tokens, 0);
    seqs[50] = calls[0].seq;
    ok(attn_seq_close(q, &calls[1].seq, LONG_US));

    for (uint32_t i = 0; i < N_SEQS; i++)
        call(i, ATTN_CALL_CLOSE, seqs[i]);
    run(q, N_SEQS);
    for (uint32_t i = 0; i < N_SEQS; i++) /* the seventh is the scheduler's still */
        assert_int_equal(calls[i].error.status, i == 7 ? ATTN_ESTALE : ATTN_OK);
    ok(attn_seq_close(p, &seqs[7], LONG_US));
    await_free(scheduler, p, n_before);
    attn_pool_close(p);
    attn_pool_close(q);
    attn_client_close(scheduler);
    attn_client_close(worker);
}

static void over_sockets(void **state)
{
    (void)state;
    a_worker_takes_over_what_a_scheduler_has_opened(false);
}

static void over_shared_memory(void **state)
{
    (void)state;
    a_worker_takes_over_what_a_scheduler_has_opened(true);
}

static void a_probe_says_what_an_open_finds(void **state)
{
    (void)state;
    attn_client *c = client_of(0, false);
    attn_pool *p = pool_of(c, ATTN_F32, "probed", 0.25f, N_BLOCKS);
    uint64_t rng = 11;
    uint32_t ids[PROMPT], n_cached;
    for (uint32_t i = 0; i < PROMPT; i++)
        ids[i] = (uint32_t)random_mixed(&rng);
    struct attn_tokens t = {.ids = ids, .n = PROMPT};
    struct attn_probe probe;
    struct attn_seq seq, again;
    ok(attn_seq_probe(p, &t, LONG_US, &probe));
    assert_int_equal(probe.cached_tokens, 0);
    assert_true(probe.n_blocks >= N_BLOCKS);
    assert_int_equal(probe.n_free_blocks, probe.n_blocks);
    ok(attn_seq_open_with(p, 1, &t, LONG_US, &seq, &n_cached));
    for (uint32_t l = 0; l < LAYERS; l++)
        ok(step(p, &seq, l, 0, PROMPT, true, NULL));
    memset(&probe, 0xee, sizeof probe);
    ok(attn_seq_probe(p, &t, LONG_US, &probe));
    assert_cached(probe.cached_tokens, PROMPT);
    assert_int_equal(probe.tier_tokens, 0);
    ok(attn_seq_open_with(p, 2, &t, LONG_US, &again, &n_cached));
    assert_cached(n_cached, probe.cached_tokens + 1);
    t.adapter = 9;
    ok(attn_seq_probe(p, &t, LONG_US, &probe));
    assert_int_equal(probe.cached_tokens, 0);
    ok(attn_seq_close(p, &seq, LONG_US));
    ok(attn_seq_close(p, &again, LONG_US));
    attn_pool_close(p);
    attn_client_close(c);
}

/* Calls with many tokens go in as many messages as they need. */
static void calls_larger_than_a_message_are_sent_in_several(void **state)
{
    (void)state;
    enum { N = 120, N_IDS = 4000 }; /* 20 KB each, of messages up to 1 MiB */
    attn_client *c = client_of(0, false);
    attn_pool *p = pool_of(c, ATTN_F32, "m", 0.25f, N_BLOCKS);
    uint32_t *ids = malloc(N_IDS * sizeof *ids);
    uint64_t rng = 12;
    for (uint32_t i = 0; i < N_IDS; i++)
        ids[i] = (uint32_t)random_mixed(&rng) | 1u << 31; /* five bytes each */
    for (uint32_t i = 0; i < N; i++) {
        call(i, ATTN_CALL_OPEN, (struct attn_seq){.id = 1 + i});
        calls[i].tokens = (struct attn_tokens){.ids = ids + i, .n = N_IDS - i};
    }
    run(p, N);
    all_ok(N);
    for (uint32_t i = 0; i < N; i++)
        call(i, ATTN_CALL_CLOSE, calls[i].seq);
    run(p, N);
    all_ok(N);
    free(ids);
    attn_pool_close(p);
    attn_client_close(c);
}

enum { N_THREADS = 8, N_ROUNDS = 6 };

struct opener {
    attn_pool *pool;
    uint64_t first_id;
    char why[ATTN_MESSAGE_BYTES];
};

/* Opens as many sequences as a message takes, and closes them. */
static void *open_and_close(void *arg)
{
    struct opener *o = arg;
    struct attn_seq_call mine[WIRE_MAX_CALLS];
    for (uint32_t k = 0; k < 2 * N_ROUNDS && o->why[0] == 0; k++) {
        for (uint32_t i = 0; i < WIRE_MAX_CALLS; i++) {
            struct attn_seq seq = {.id = o->first_id + i};
            mine[i] = (struct attn_seq_call){.struct_size = sizeof mine[i],
                                             .kind = k % 2 == 0 ? ATTN_CALL_OPEN : ATTN_CALL_CLOSE,
                                             .seq = k % 2 == 0 ? seq : mine[i].seq};
        }
        if (attn_seq_calls(o->pool, mine, WIRE_MAX_CALLS, LONG_US, NULL) != ATTN_OK)
            memcpy(o->why, attn_last_error()->message, sizeof o->why);
        for (uint32_t i = 0; i < WIRE_MAX_CALLS && o->why[0] == 0; i++)
            if (mine[i].error.status != ATTN_OK)
                memcpy(o->why, mine[i].error.message, sizeof o->why);
    }
    return NULL;
}

/* No thread's calls are too old because those of others, with higher ids, were carried out first.
 */
static void threads_of_one_client_send_calls_at_once(void **state)
{
    (void)state;
    attn_client *c = client_of(0, false);
    attn_pool *p = pool_of(c, ATTN_F32, "m", 0.25f, N_BLOCKS);
    struct opener openers[N_THREADS];
    pthread_t threads[N_THREADS];
    for (uint32_t i = 0; i < N_THREADS; i++) {
        openers[i] = (struct opener){.pool = p, .first_id = 1 + i * WIRE_MAX_CALLS};
        assert_int_equal(pthread_create(&threads[i], NULL, open_and_close, &openers[i]), 0);
    }
    for (uint32_t i = 0; i < N_THREADS; i++)
        pthread_join(threads[i], NULL);
    for (uint32_t i = 0; i < N_THREADS; i++)
        assert_string_equal(openers[i].why, "");
    attn_pool_close(p);
    attn_client_close(c);
}

static void what_is_no_call_is_refused_before_anything_is_sent(void **state)
{
    (void)state;
    attn_client *c = client_of(0, false);
    attn_pool *p = pool_of(c, ATTN_F32, "m", 0.25f, N_BLOCKS);
    uint32_t n_done = 77;
    call(0, ATTN_CALL_OPEN, (struct attn_seq){.id = 1});
    call(1, (attn_call_kind)9, (struct attn_seq){.id = 1});
    assert_int_equal(attn_seq_calls(p, calls, 2, LONG_US, &n_done), ATTN_EINVAL);
    assert_non_null(strstr(attn_last_error()->message, "calls[1].kind is 9"));
    assert_int_equal(n_done, 0);
    call(1, ATTN_CALL_TOKENS, (struct attn_seq){.id = 1})->tokens.n = 3;
    assert_int_equal(attn_seq_calls(p, calls, 2, LONG_US, NULL), ATTN_EINVAL);
    assert_non_null(strstr(attn_last_error()->message, "calls[1].tokens.ids is NULL, n is 3"));
    calls[1].struct_size = 8;
    assert_int_equal(attn_seq_calls(p, calls, 2, LONG_US, NULL), ATTN_EINVAL);
    assert_non_null(strstr(attn_last_error()->message, "calls[1].struct_size is 8"));
    assert_int_equal(attn_seq_calls(p, NULL, 1, LONG_US, NULL), ATTN_EINVAL);
    ok(attn_seq_calls(p, NULL, 0, LONG_US, &n_done));
    assert_gone(p, 1);
    attn_pool_close(p);
    attn_client_close(c);
}

enum { N_HALVES = 1 << 16 };

static void a_merge_of_one_part_changes_no_number(void **state)
{
    (void)state;
    static uint16_t part[N_HALVES], out[N_HALVES];
    const float lse = 3;
    for (uint32_t i = 0; i < N_HALVES; i++)
        part[i] = (uint16_t)i;
    ok(attn_merge(ATTN_F16, 1, 1, N_HALVES, part, &lse, out, NULL));
    for (uint32_t i = 0; i < N_HALVES; i++) {
        const uint32_t have = out[i], want = i == 0x8000 ? 0 : i; /* -0: added to 0, it is 0 */
        const bool is_nan = (i & 0x7fff) > 0x7c00;
        if (is_nan ? (have & 0x7fff) <= 0x7c00 : have != want)
            fail_msg("%#x has become %#x", i, have);
    }
}

static void a_lse_that_is_no_number_makes_none_of_its_row(void **state)
{
    (void)state;
    const float outs[2][4] = {{1, 2, 3, 4}, {5, 6, 7, 8}};
    const float lses[2][4] = {{NAN, NAN, -INFINITY, -INFINITY}, {NAN, -INFINITY, NAN, -INFINITY}};
    float out[4], lse[4];
    ok(attn_merge(ATTN_F32, 2, 4, 1, outs, &lses[0][0], out, lse));
    for (uint32_t row = 0; row < 3; row++)
        if (!isnan(out[row]) || !isnan(lse[row]))
            fail_msg("row %u: %g, lse %g", row, (double)out[row], (double)lse[row]);
    assert_true(out[3] == 0 && lse[3] == -INFINITY); /* nothing is seen */
}

static void what_is_no_merge_is_refused_by_name(void **state)
{
    (void)state;
    float x[4] = {0}, out[4] = {77};
    const struct {
        attn_dtype dtype;
        uint32_t n_parts, dim;
        const float *outs, *lses;
        float *out;
        const char *why;
    } cases[] = {
        {ATTN_F32, 1, 4, NULL, x, out, "outs is NULL"},
        {ATTN_F32, 1, 4, x, NULL, out, "lses is NULL"},
        {ATTN_F32, 1, 4, x, x, NULL, "out is NULL"},
        {ATTN_F32, 0, 4, x, x, out, "n_parts is 0, dim 4: expected 1 or more"},
        {ATTN_F32, 1, 0, x, x, out, "n_parts is 1, dim 0: expected 1 or more"},
        {ATTN_FP8_E4M3, 1, 4, x, x, out, "dtype is fp8_e4m3: expected f32, f16 or bf16"},
    };
    for (uint32_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        assert_int_equal(attn_merge(cases[i].dtype, cases[i].n_parts, 1, cases[i].dim,
                                    cases[i].outs, cases[i].lses, cases[i].out, NULL),
                         ATTN_EINVAL);
        assert_string_equal(attn_last_error()->message, cases[i].why);
    }
    ok(attn_merge(ATTN_F32, 1, 0, 4, x, x, out, NULL)); /* of no rows: nothing is written */
    assert_true(out[0] == 77);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(over_sockets),
        cmocka_unit_test(over_shared_memory),
        cmocka_unit_test(a_probe_says_what_an_open_finds),
        cmocka_unit_test(calls_larger_than_a_message_are_sent_in_several),
        cmocka_unit_test(threads_of_one_client_send_calls_at_once),
        cmocka_unit_test(what_is_no_call_is_refused_before_anything_is_sent),
        cmocka_unit_test(a_merge_of_one_part_changes_no_number),
        cmocka_unit_test(a_lse_that_is_no_number_makes_none_of_its_row),
        cmocka_unit_test(what_is_no_merge_is_refused_by_name),
    };
    return cmocka_run_group_tests_name("calls", tests, start, stop);
}
