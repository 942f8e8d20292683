/* test_libattn_hot.c: steps that choose blocks, at a daemon whose pool is smaller than one of its
 * sequences and whose other blocks are in idle memory (cache.idle_memory), against one whose pool
 * holds all: every output and lse is the same, bit for bit, over decode steps, prompts in chunks,
 * forks, truncations, steps that come twice, several workers at once, and kills of the daemon.
 * Pools are batch-invariant.
 *
 *   test_libattn_hot [ROUNDS]
 */
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/clients/libattn/seq_rig.h"
#include "tests/random.h"

enum {
    SMALL = 40, /* blocks */
    LARGE = 1000,
    N_SEQS = 4,
    MOST = 60 * BLOCK, /* tokens of a sequence */
    CHUNK = 40,
    ROW = Q_HEADS * DIM,
    KV_ROW = KV_HEADS * DIM,
    NO_QUERIES = INT32_MAX, /* in place of blocks to choose: tokens are only appended */
};
static_assert((int)MOST <= (int)MAX_TOKENS, "a sequence has room");

#ifndef ROUNDS
#define ROUNDS 120
#endif
static uint32_t n_rounds = ROUNDS;
static _Thread_local uint64_t chance = 17;
static uint64_t next_id;

/* One daemon's side. */
static struct side {
    attn_client *client;
    attn_pool *pool;
    struct attn_seq seq[N_SEQS];
} sides[2];
static uint32_t len[N_SEQS], stream[N_SEQS];

static uint32_t below(uint32_t n)
{
    return random_below(&chance, n);
}

/* Numbers of a stream's token in a layer. */
static void fill(float *x, uint32_t of, uint32_t layer, uint32_t pos, uint32_t n, uint32_t row)
{
    for (uint32_t i = 0; i < n; i++) {
        uint64_t seed = ((uint64_t)of * LAYERS + layer) * 1000003u + (pos + i) * 10007u + row;
        for (uint32_t k = 0; k < row; k++)
            x[i * row + k] = (float)random_below(&seed, 4001) / 1000 - 2.0005f;
    }
}

struct result {
    attn_status status;
    float out[CHUNK * ROW], lse[CHUNK * Q_HEADS];
};

static void put(struct side *side, uint32_t which, uint32_t layer, uint32_t pos, uint32_t n,
                bool is_append, uint32_t choose, struct result *r)
{
    static _Thread_local float q[CHUNK * ROW], k[CHUNK * KV_ROW], v[CHUNK * KV_ROW];
    fill(q, 3 * stream[which], layer, pos, n, ROW);
    fill(k, 3 * stream[which] + 1, layer, pos, n, KV_ROW);
    fill(v, 3 * stream[which] + 2, layer, pos, n, KV_ROW);
    struct attn_item item = {.seq = side->seq[which], .pos = pos, .n_tokens = n};
    struct attn_step s = {.struct_size = sizeof s,
                          .layer = layer,
                          .n_items = 1,
                          .items = &item,
                          .q = choose == NO_QUERIES ? NULL : q,
                          .k = is_append ? k : NULL,
                          .v = is_append ? v : NULL,
                          .out = choose == NO_QUERIES ? NULL : r->out,
                          .lse = choose == NO_QUERIES ? NULL : r->lse,
                          .choose_blocks = choose == NO_QUERIES ? 0 : choose,
                          .timeout_us = LONG_US};
    memset(r, 0x7f, sizeof *r); /* NaN */
    r->status = attn_step(side->pool, &s, NULL);
}

/* The same step once more, beside. */
struct other {
    uint32_t which, layer, pos, n, choose;
    struct result r;
};

static void *put_other(void *arg)
{
    struct other *x = arg;
    put(&sides[0], x->which, x->layer, x->pos, x->n, true, x->choose, &x->r);
    return NULL;
}

/* The same step at both; is_twice: two equal ones at the small one, at the same time. */
static void both(uint32_t which, uint32_t layer, uint32_t pos, uint32_t n, bool is_append,
                 uint32_t choose)
{
    static _Thread_local struct result r[2];
    static _Thread_local struct other other;
    const bool is_twice = is_append && n < BLOCK && below(4) == 0;
    pthread_t thread;
    other = (struct other){which, layer, pos, n, choose, {0}};
    if (is_twice)
        assert_int_equal(pthread_create(&thread, NULL, put_other, &other), 0);
    for (uint32_t i = 0; i < 2; i++) {
        put(&sides[i], which, layer, pos, n, is_append, choose, &r[i]);
        if (r[i].status != ATTN_OK)
            fail_msg("%s: sequence %u layer %u pos %u n %u choose %u: %s",
                     i == 0 ? "small" : "large", which, layer, pos, n, choose,
                     attn_last_error()->message);
    }
    if (is_twice) {
        assert_int_equal(pthread_join(thread, NULL), 0);
        assert_int_equal(other.r.status, ATTN_OK);
        assert_memory_equal(other.r.out, r[1].out, n * ROW * sizeof(float));
        assert_memory_equal(other.r.lse, r[1].lse, n * Q_HEADS * sizeof(float));
    }
    for (uint32_t i = 0; i < n * ROW; i++)
        if (!(fabsf(r[1].out[i]) < 100))
            fail_msg("out[%u] is %g", i, (double)r[1].out[i]);
    if (memcmp(r[0].out, r[1].out, n * ROW * sizeof(float)) != 0 ||
        memcmp(r[0].lse, r[1].lse, n * Q_HEADS * sizeof(float)) != 0)
        fail_msg("sequence %u layer %u pos %u n %u choose %u: not the same bytes", which, layer,
                 pos, n, choose);
}

static uint32_t some_blocks(void)
{
    return 2 + below(6);
}

static void grow(uint32_t which, uint32_t n)
{
    const uint32_t choose = some_blocks();
    for (uint32_t layer = 0; layer < LAYERS; layer++)
        both(which, layer, len[which], n, true, choose);
    len[which] += n;
}

/* Tokens that do not attend. */
static void append(uint32_t which, uint32_t n)
{
    static _Thread_local struct result r;
    for (uint32_t layer = 0; layer < LAYERS; layer++)
        for (uint32_t i = 0; i < 2; i++) {
            put(&sides[i], which, layer, len[which], n, true, NO_QUERIES, &r);
            if (r.status != ATTN_OK)
                fail_msg("appending: %s", attn_last_error()->message);
        }
    len[which] += n;
}

/* Tokens that are there attend again, with k and v (a step that is repeated) or without. */
static void again(uint32_t which)
{
    const uint32_t n = 1 + below(CHUNK < len[which] ? CHUNK : len[which]);
    const bool is_repeated = below(3) == 0;
    const uint32_t pos = is_repeated ? len[which] - n : below(len[which] - n + 1);
    both(which, below(LAYERS), pos, n, is_repeated && n < BLOCK, some_blocks());
}

static void begin(const char *const *flags)
{
    static const char *const plain[] = {"--device.kv_memory", "64M", NULL};
    e2e_start(&seq_daemons[0], flags);
    e2e_start(&seq_daemons[1], plain);
    next_id = 1;
    for (uint32_t i = 0; i < 2; i++) {
        sides[i].client = client_of((int)i, false);
        sides[i].pool = pool_of(sides[i].client, ATTN_F32, "hot", 0.2f, i == 0 ? SMALL : LARGE);
    }
    for (uint32_t k = 0; k < N_SEQS; k++) {
        for (uint32_t i = 0; i < 2; i++)
            ok(attn_seq_open(sides[i].pool, next_id + k, LONG_US, &sides[i].seq[k]));
        stream[k] = k;
        len[k] = 0;
    }
    next_id += N_SEQS;
}

static void end(void)
{
    for (uint32_t i = 0; i < 2; i++) {
        attn_pool_close(sides[i].pool);
        attn_client_close(sides[i].client);
        e2e_stop(&seq_daemons[i]);
    }
}

static void cut(uint32_t which, uint32_t to)
{
    for (uint32_t i = 0; i < 2; i++)
        ok(attn_seq_truncate(sides[i].pool, &sides[i].seq[which], to, LONG_US));
    len[which] = to;
}

/* The other sequence begins anew, as a fork of this one; what they share can't go. */
static void fork_to(uint32_t which, uint32_t other)
{
    const uint32_t n = len[which];
    for (uint32_t i = 0; i < 2; i++) {
        ok(attn_seq_close(sides[i].pool, &sides[i].seq[other], LONG_US));
        ok(attn_seq_fork(sides[i].pool, &sides[i].seq[which], next_id, n, LONG_US,
                         &sides[i].seq[other], NULL));
    }
    next_id++;
    stream[other] = stream[which];
    len[other] = n;
}

static void round_of(void)
{
    const uint32_t k = below(N_SEQS), what = below(20);
    if (len[k] + CHUNK > MOST)
        cut(k, below(4) == 0 ? below(4 * BLOCK) : 30 * BLOCK + below(20 * BLOCK));
    else if (what < 8)
        grow(k, 1);
    else if (what == 11 && len[k] > 10 * BLOCK)
        append(k, 1 + below(CHUNK));
    else if (what < 12 || len[k] == 0)
        grow(k, 1 + below(CHUNK));
    else if (what < 18)
        again(k);
    else if (what == 18 && len[k] < 5 * BLOCK)
        fork_to(k, (k + 1) % N_SEQS);
    else if (what == 19 && len[k] > 5 * BLOCK)
        cut(k, len[k] - below(2 * BLOCK));
}

static const char *const small_flags[] = {"--device.kv_memory", "64M", "--cache.idle_memory", "16M",
                                          NULL};

static uint64_t count(const char *name)
{
    char key[64], *json = NULL;
    snprintf(key, sizeof key, "\"%s_total\":", name);
    ok(attn_client_stats(sides[0].client, LONG_US, &json));
    const char *at = strstr(json, key);
    if (at == NULL)
        fail_msg("no %s in the stats", name);
    const uint64_t n = strtoull(at + strlen(key), NULL, 10);
    attn_free(json);
    return n;
}

static void fill_up(void)
{
    for (uint32_t k = 0; k < N_SEQS; k++)
        while (len[k] < 50 * BLOCK) /* five times the pool in all, each more than it */
            grow(k, CHUNK);
}

static void same_bytes_as_a_pool_that_holds_all(void **state)
{
    (void)state;
    begin(small_flags);
    fill_up();
    for (uint32_t i = 0; i < n_rounds; i++)
        round_of();
    assert_true(count("chosen_here") > 1000 && count("chosen_away") > 100);
    end();
}

/* Which knows no summaries, and brings back whatever has none, a few blocks at a time. */
static void a_successor_goes_on_with_what_is_away(void **state)
{
    static const char *const flags[] = {
        "--supervise", "--device.kv_memory", "64M", "--cache.idle_memory", "16M", NULL};
    (void)state;
    begin(flags);
    fill_up();
    for (uint32_t kill = 0; kill < 6; kill++) {
        for (uint32_t i = 0; i < n_rounds / 8; i++)
            round_of();
        e2e_kill_child(&seq_daemons[0]); /* libattn repeats what is not answered */
    }
    for (uint32_t k = 0; k < N_SEQS; k++)
        again(k);
    end();
}

static _Atomic uint32_t n_running, n_kills;
enum { KILLS = 6 };

static void *run_one(void *arg)
{
    const uint32_t k = (uint32_t)((struct attn_seq *)arg - sides[0].seq);
    chance = 1000 + k;
    for (uint32_t i = 0; i < n_rounds || n_kills < KILLS; i++)
        if (len[k] + CHUNK > MOST)
            cut(k, 30 * BLOCK + below(20 * BLOCK));
        else if (below(2) == 0)
            grow(k, 1 + below(2) * below(CHUNK));
        else
            again(k);
    n_running--;
    return NULL;
}

/* All sequences at once, whose steps take each other's blocks, and the daemon dies when it
 * pleases. */
static void workers_beside_each_other_and_kills(void **state)
{
    static const char *const flags[] = {
        "--supervise", "--device.kv_memory", "64M", "--cache.idle_memory", "16M", NULL};
    pthread_t threads[N_SEQS];
    (void)state;
    begin(flags);
    fill_up();
    n_running = N_SEQS;
    n_kills = 0;
    for (uint32_t k = 0; k < N_SEQS; k++)
        assert_int_equal(pthread_create(&threads[k], NULL, run_one, &sides[0].seq[k]), 0);
    for (uint64_t before = 0; n_running > 0; before = count("steps_received")) {
        while (n_running > 0 && count("steps_received") < before + 40)
            ; /* a round trip each */
        if (n_kills < KILLS && n_running > 0) {
            e2e_kill_child(&seq_daemons[0]);
            n_kills++;
            before = 0;
        }
    }
    for (uint32_t k = 0; k < N_SEQS; k++)
        assert_int_equal(pthread_join(threads[k], NULL), 0);
    for (uint32_t k = 0; k < N_SEQS; k++)
        again(k);
    end();
}

/* A step that does not choose needs all, and so do forks; a query's blocks must fit together. */
static void what_does_not_fit_is_out_of_blocks_and_nothing_is_lost(void **state)
{
    static struct result r;
    (void)state;
    begin(small_flags);
    fill_up();
    struct side *small = &sides[0];
    const uint32_t n = len[0];
    struct attn_seq fork;
    put(small, 0, 0, n - 1, 1, false, 0, &r);
    assert_int_equal(r.status, ATTN_ENOBLOCKS);
    assert_int_equal(attn_seq_fork(small->pool, &small->seq[0], 999, n, LONG_US, &fork, NULL),
                     ATTN_ENOBLOCKS);
    again(0);
    put(small, 0, 0, n - 1, 1, false, SMALL + 5, &r);
    assert_int_equal(r.status, ATTN_ENOBLOCKS);
    const char *why = attn_last_error()->message;
    if (strstr(why, "of its blocks that a query visits are in idle memory, pool f32-hot") == NULL)
        fail_msg("%s", why);
    for (uint32_t k = 0; k < N_SEQS; k++)
        again(k);
    both(0, 0, n - 1, 1, false, SMALL / KV_HEADS - 2); /* heads may choose others each */
    cut(1, 20 * BLOCK); /* all of it fits */
    both(1, 1, 20 * BLOCK - 30, 30, false, 0);
    end();
}

/* KV memory for the pool, but not for as many summaries as idle memory has room for: sequences that
 * choose are idle as others are, as a whole. */
static void without_memory_for_summaries_sequences_stay_whole(void **state)
{
    static const char *const flags[] = {"--device.kv_memory", "4M", "--cache.idle_memory", "256M",
                                        NULL};
    static struct result r;
    (void)state;
    begin(flags);
    for (uint32_t k = 0; k < 2; k++)
        while (len[k] + CHUNK <= 30 * BLOCK)
            grow(k, CHUNK);
    for (uint32_t i = 0; i < 6; i++) {
        again(i % 2);
        grow(i % 2, 1);
    }
    while (len[0] + CHUNK <= SMALL * BLOCK)
        grow(0, CHUNK);
    put(&sides[0], 0, 0, len[0], CHUNK, true, 4, &r);
    assert_int_equal(r.status, ATTN_ENOBLOCKS);
    again(1);
    assert_int_equal(count("chosen_here") + count("chosen_away"), 0);
    end();
}

/* Without idle memory it is as ever: all of a sequence is on the device, or it does not grow. */
static void without_idle_memory_blocks_run_out(void **state)
{
    static const char *const flags[] = {"--device.kv_memory", "64M", NULL};
    static struct result r;
    (void)state;
    begin(flags);
    while (len[0] + CHUNK <= SMALL * BLOCK)
        grow(0, CHUNK);
    put(&sides[0], 1, 0, 0, 1, true, 4, &r);
    assert_int_equal(r.status, ATTN_ENOBLOCKS);
    again(0);
    assert_int_equal(count("chosen_here"), 0);
    end();
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(same_bytes_as_a_pool_that_holds_all),
        cmocka_unit_test(a_successor_goes_on_with_what_is_away),
        cmocka_unit_test(workers_beside_each_other_and_kills),
        cmocka_unit_test(what_does_not_fit_is_out_of_blocks_and_nothing_is_lost),
        cmocka_unit_test(without_memory_for_summaries_sequences_stay_whole),
        cmocka_unit_test(without_idle_memory_blocks_run_out),
    };
    if (argc > 1)
        n_rounds = (uint32_t)strtoul(argv[1], NULL, 10);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
