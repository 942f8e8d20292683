/* test_libattn_windows.c: sequences that have released blocks under their windows go into files,
 * out of them, and from one daemon to another: they have the same blocks there, are refused the
 * same, and every output is that of one that stays. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tests/clients/libattn/seq_rig.h"
#include "tests/random.h"

enum { WINDOW = 40, SINKS = 5, PROMPT = 300, N_BLOCKS = 64, MOST = 4000 };

static char path[] = "/tmp/attnd_windows_XXXXXX";

static int start(void **state)
{
    (void)state;
    int fd = mkstemp(path);
    assert_true(fd >= 0);
    close(fd);
    seq_window = WINDOW;
    seq_sinks = SINKS;
    e2e_start(&seq_daemons[0], NULL);
    e2e_start(&seq_daemons[1], NULL);
    return 0;
}

static int stop(void **state)
{
    (void)state;
    e2e_stop(&seq_daemons[0]);
    e2e_stop(&seq_daemons[1]);
    unlink(path);
    return 0;
}

/* Tokens [pos, pos + n), one after another, in both: they attend alike. */
static void both_decode(attn_pool *p, const struct attn_seq *a, attn_pool *q,
                        const struct attn_seq *b, uint32_t pos, uint32_t n)
{
    float x[Q_HEADS * DIM], y[Q_HEADS * DIM];
    for (; n > 0; n--, pos++)
        for (uint32_t l = 0; l < LAYERS; l++) {
            ok(step(p, a, l, pos, 1, true, x));
            ok(step(q, b, l, pos, 1, true, y));
            assert_memory_equal(x, y, sizeof x);
        }
}

static struct attn_seq decoded(attn_pool *p, uint64_t id, uint32_t n_prompt, uint32_t n)
{
    float x[Q_HEADS * DIM];
    struct attn_seq seq = make_seq(p, id, n_prompt, n_prompt, n_prompt);
    for (uint32_t pos = n_prompt; pos < n; pos++)
        for (uint32_t l = 0; l < LAYERS; l++)
            ok(step(p, &seq, l, pos, 1, true, x));
    return seq;
}

/* Lengths at random, and what is appended behind them: both take them, or neither does. */
static void assert_cut_alike(attn_pool *p, struct attn_seq *a, attn_pool *q, struct attn_seq *b,
                             uint32_t n)
{
    uint64_t seed = 7;
    uint32_t n_cut = 0, n_refused = 0;
    for (int i = 0; i < 60; i++) {
        uint32_t len = i == 40 ? 3 : n - random_below(&seed, i % 2 == 0 ? 2 * WINDOW : 9);
        len = len > n ? 0 : len;
        attn_status st = attn_seq_truncate(p, a, len, LONG_US);
        assert_int_equal(attn_seq_truncate(q, b, len, LONG_US), st);
        if (st != ATTN_OK) {
            assert_int_equal(st, ATTN_EINVAL);
            assert_non_null(strstr(attn_last_error()->message, "sees tokens that are freed"));
        }
        n = st == ATTN_OK ? len : n;
        n_cut += st == ATTN_OK;
        n_refused += st != ATTN_OK;
        both_decode(p, a, q, b, n, 3);
        n += 3;
        for (; i == 40 && n < PROMPT; n++)
            both_decode(p, a, q, b, n, 1);
    }
    assert_true(n_cut > 5 && n_refused > 5);
}

static void to_a_file_and_back(attn_dtype kv_dtype, uint32_t n)
{
    attn_client *a = client_of(0, false), *b = client_of(1, true);
    attn_pool *p = pool_of(a, kv_dtype, "m", 0.25f, N_BLOCKS);
    attn_pool *q = pool_of(b, kv_dtype, "m", 0.25f, N_BLOCKS);
    uint32_t n_before = n_free(b, q), lens[LAYERS];
    struct attn_seq seq = decoded(p, 7, PROMPT, n), got;
    struct attn_seq_file file = {.struct_size = sizeof file}, again = file;
    ok(attn_seq_export(a, 7, path, LONG_US, &file));
    assert_int_equal(file.n_tokens, n);
    assert_int_equal(file.n_ids, PROMPT);
    assert_int_equal(file.n_blocks, (n + BLOCK - 1) / BLOCK);
    assert_int_equal(file.freed_first, 1);
    assert_int_equal(file.freed_past, (n - WINDOW) / BLOCK);
    uint32_t n_left = file.n_blocks - (file.freed_past - file.freed_first);

    ok(attn_seq_import(q, path, 7, LONG_US, &got, lens));
    for (uint32_t l = 0; l < LAYERS; l++)
        assert_int_equal(lens[l], n);
    await_free(b, q, n_before - n_left);
    struct stat first, second;
    assert_int_equal(stat(path, &first), 0);
    ok(attn_seq_export(b, 7, path, LONG_US, &again)); /* the same once more */
    assert_int_equal(stat(path, &second), 0);
    assert_int_equal(first.st_size, second.st_size);
    assert_int_equal(again.freed_past, file.freed_past);
    both_decode(p, &seq, q, &got, n, 2 * WINDOW);
    await_free(b, q, n_free(a, p));
    assert_cut_alike(p, &seq, q, &got, n + 2 * WINDOW);

    ok(attn_seq_close(q, &got, LONG_US));
    await_free(b, q, n_before);
    ok(attn_seq_close(p, &seq, LONG_US));
    attn_pool_close(p);
    attn_pool_close(q);
    attn_client_close(a);
    attn_client_close(b);
}

static void a_file_has_what_windows_have_left(void **state)
{
    (void)state;
    for (uint32_t n = PROMPT + 20; n < PROMPT + 20 + BLOCK; n += 5)
        to_a_file_and_back(ATTN_F32, n);
    to_a_file_and_back(ATTN_MXFP4, PROMPT + 31);
}

static void write_file(const uint8_t *bytes, size_t n)
{
    FILE *f = fopen(path, "we");
    assert_non_null(f);
    assert_int_equal(fwrite(bytes, 1, n, f), n);
    assert_int_equal(fclose(f), 0);
}

static void refused(attn_pool *q, attn_status st, const char *says)
{
    struct attn_seq got = {.id = 99};
    attn_status is = attn_seq_import(q, path, 5, LONG_US, &got, NULL);
    if (is != st && !(st == ATTN_EPROTO && is == ATTN_ENOTSUP)) /* a flipped version */
        fail_msg("%d, not %d: %s", is, st, attn_last_error()->message);
    if (strstr(attn_last_error()->message, says) == NULL)
        fail_msg("no \"%s\": %s", says, attn_last_error()->message);
    assert_int_equal(got.id, 99);
}

static void what_is_damaged_or_foreign_is_refused_by_name(void **state)
{
    (void)state;
    attn_client *a = client_of(0, false), *b = client_of(1, false);
    attn_pool *p = pool_of(a, ATTN_F32, "m", 0.25f, N_BLOCKS);
    attn_pool *q = pool_of(b, ATTN_F32, "m", 0.25f, N_BLOCKS);
    struct attn_seq seq = decoded(p, 7, PROMPT, PROMPT + 50), got;
    ok(attn_seq_export(a, 7, path, LONG_US, NULL));
    struct stat info;
    assert_int_equal(stat(path, &info), 0);
    size_t n = (size_t)info.st_size;
    uint8_t *bytes = malloc(n);
    FILE *f = fopen(path, "re");
    assert_true(f != NULL && bytes != NULL);
    assert_int_equal(fread(bytes, 1, n, f), n);
    fclose(f);
    uint32_t n_before = n_free(b, q);
    uint64_t seed = 1;
    for (int i = 0; i < 260; i++) {
        size_t at = i < 128 ? (size_t)i : random_below(&seed, (uint32_t)n);
        bytes[at] ^= (uint8_t)(1 << i % 8);
        write_file(bytes, n);
        refused(q, ATTN_EPROTO, path);
        bytes[at] ^= (uint8_t)(1 << i % 8);
        if (i % 8 > 0)
            continue;
        write_file(bytes, random_below(&seed, (uint32_t)n));
        refused(q, ATTN_EPROTO, path);
    }
    write_file(bytes, n);
    seq_window = WINDOW + 1;
    attn_pool *wider = pool_of(b, ATTN_F32, "m", 0.25f, N_BLOCKS);
    seq_window = seq_sinks = 0;
    attn_pool *all = pool_of(b, ATTN_F32, "m", 0.25f, N_BLOCKS);
    seq_window = WINDOW, seq_sinks = SINKS;
    attn_pool *small = pool_of(b, ATTN_F32, "m", 0.25f, 3);
    refused(wider, ATTN_EINVAL, "attention is ");
    refused(all, ATTN_EINVAL, "attention is ");
    refused(small, ATTN_ENOBLOCKS, "block");
    await_free(b, small, 3 * (uint32_t)(getenv("E2E_CARDS") != NULL ? 2 : 1));
    await_free(b, q, n_before);
    assert_gone(q, 5);
    ok(attn_seq_import(q, path, 5, LONG_US, &got, NULL));
    both_decode(p, &seq, q, &got, PROMPT + 50, WINDOW);
    ok(attn_seq_close(q, &got, LONG_US));
    ok(attn_seq_close(p, &seq, LONG_US));
    free(bytes);
    attn_pool_close(p);
    attn_pool_close(q);
    attn_pool_close(wider);
    attn_pool_close(all);
    attn_pool_close(small);
    attn_client_close(a);
    attn_client_close(b);
}

/* A worker that appends and takes back until its sequence is another's. */
struct worker {
    attn_pool *pool;
    struct attn_seq seq;
    atomic_uint n; /* tokens that stay */
    bool speculates;
    attn_status end; /* why */
};

static attn_status turn(struct worker *w, uint32_t n, uint64_t *seed)
{
    uint32_t n_good = n + LAST < MOST ? random_below(seed, 3) : 0;
    attn_status st = ATTN_OK;
    for (uint32_t l = 0; l < LAYERS && st == ATTN_OK; l++) {
        if (n_good > 0)
            st = step(w->pool, &w->seq, l, n, n_good, true, NULL);
        else if (!w->speculates)
            st = step(w->pool, &w->seq, l, n - 1, 1, true, NULL); /* again */
        seq_salt = 1 + random_below(seed, 100);
        if (st == ATTN_OK && w->speculates)
            st = step(w->pool, &w->seq, l, n + n_good, 4, true, NULL);
        seq_salt = 0;
    }
    if (st == ATTN_OK)
        atomic_store(&w->n, n + n_good);
    return st == ATTN_OK && w->speculates ? attn_seq_truncate(w->pool, &w->seq, n + n_good, LONG_US)
                                          : st;
}

static void *work(void *arg)
{
    struct worker *w = arg;
    uint64_t seed = 3;
    attn_status st;
    do
        st = turn(w, atomic_load(&w->n), &seed);
    while (st == ATTN_OK);
    w->end = st;
    return NULL;
}

static void await_tokens(const struct worker *w, uint32_t n)
{
    while (atomic_load(&w->n) < n)
        sched_yield();
}

/* What is left of the last draft goes, and the rest is as if it had never moved. */
static void assert_is_the_workers(attn_pool *q, struct attn_seq *got, uint32_t n)
{
    struct attn_seq twin = make_seq(q, 8, PROMPT, PROMPT, 0);
    for (uint32_t pos = PROMPT, part; pos < n; pos += part) {
        part = n - pos < MAX_TOKENS ? n - pos : MAX_TOKENS;
        for (uint32_t l = 0; l < LAYERS; l++)
            ok(step(q, &twin, l, pos, part, true, NULL));
    }
    ok(attn_seq_truncate(q, got, n, LONG_US));
    both_decode(q, got, q, &twin, n, LAST);
    ok(attn_seq_close(q, &twin, LONG_US));
}

static void a_sequence_moves_while_its_windows_release(void **state)
{
    (void)state;
    for (int round = 0; round < 6; round++) {
        attn_client *a = client_of(0, false), *b = client_of(1, false);
        attn_client *mover = client_of(0, round % 2 == 1);
        attn_pool *p = pool_of(a, ATTN_F32, "m", 0.25f, 160);
        attn_pool *q = pool_of(b, ATTN_F32, "m", 0.25f, 160);
        struct worker w = {.pool = p, .speculates = round % 3 > 0};
        struct attn_moved moved = {.struct_size = sizeof moved};
        struct attn_seq got;
        pthread_t thread;
        uint32_t n_before = n_free(b, q);
        w.seq = make_seq(p, 7, PROMPT, PROMPT, round % 2 == 0 ? PROMPT : 0);
        atomic_store(&w.n, PROMPT);
        assert_int_equal(pthread_create(&thread, NULL, work, &w), 0);
        await_tokens(&w, PROMPT + 10 + (uint32_t)round * 7);
        ok(attn_seq_move(mover, 7, q, LONG_US, &got, &moved));
        pthread_join(thread, NULL);
        assert_true(w.end == ATTN_ESTALE || w.end == ATTN_EMOVED);
        assert_in_range(moved.n_blocks, 3, 6); /* its window's, and the sinks' */
        assert_int_equal(moved.bytes % moved.n_blocks, 0);
        await_free(b, q, n_before - moved.n_blocks);
        assert_gone(p, 7);
        assert_is_the_workers(q, &got, atomic_load(&w.n));
        ok(attn_seq_close(q, &got, LONG_US));
        attn_pool_close(p);
        attn_pool_close(q);
        attn_client_close(a);
        attn_client_close(b);
        attn_client_close(mover);
    }
}

static void a_sequence_is_exported_while_its_windows_release(void **state)
{
    (void)state;
    for (int round = 0; round < 4; round++) {
        attn_client *a = client_of(0, false), *b = client_of(1, false);
        attn_client *reader = client_of(0, round % 2 == 1);
        attn_pool *p = pool_of(a, ATTN_F32, "m", 0.25f, 160);
        attn_pool *q = pool_of(b, ATTN_F32, "m", 0.25f, 160);
        struct worker w = {.pool = p, .speculates = round >= 2};
        struct attn_seq got, mine;
        pthread_t thread;
        mine = w.seq = make_seq(p, 7, PROMPT, PROMPT, PROMPT);
        atomic_store(&w.n, PROMPT);
        assert_int_equal(pthread_create(&thread, NULL, work, &w), 0);
        for (uint32_t i = 0; i < 5; i++) {
            struct attn_seq_file file = {.struct_size = sizeof file};
            uint32_t lens[LAYERS], least = UINT32_MAX;
            await_tokens(&w, PROMPT + 20 + 30 * i);
            ok(attn_seq_export(reader, 7, path, LONG_US, &file));
            assert_in_range(file.freed_past, 15, MOST / BLOCK);
            ok(attn_seq_import(q, path, 7, LONG_US, &got, lens));
            for (uint32_t l = 0; l < LAYERS; l++)
                least = lens[l] < least ? lens[l] : least;
            if (!w.speculates) /* else it is not known here which tokens are drafts */
                assert_is_the_workers(q, &got, least);
            ok(attn_seq_close(q, &got, LONG_US));
        }
        ok(attn_seq_adopt(p, 7, LONG_US, &mine, NULL));
        pthread_join(thread, NULL);
        assert_true(w.end == ATTN_ESTALE || w.end == ATTN_EMOVED);
        ok(attn_seq_close(p, &mine, LONG_US));
        attn_pool_close(p);
        attn_pool_close(q);
        attn_client_close(a);
        attn_client_close(b);
        attn_client_close(reader);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_file_has_what_windows_have_left),
        cmocka_unit_test(what_is_damaged_or_foreign_is_refused_by_name),
        cmocka_unit_test(a_sequence_moves_while_its_windows_release),
        cmocka_unit_test(a_sequence_is_exported_while_its_windows_release),
    };
    return cmocka_run_group_tests(tests, start, stop);
}
