/* test_libattn_trees.c: trees of tokens at a real daemon: each node attends as the end of its path
 * does in a sequence of its own, a sequence whose path was committed goes on as one that never
 * branched, and what a tree is in the way of is refused by name. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/clients/libattn/seq_rig.h"
#include "tests/random.h"

enum { MOST = 65, N_BLOCKS = 256 };

static attn_client *client;
static uint64_t chance = 29, next_id = 1;

static int start(void **state)
{
    (void)state;
    e2e_start(&seq_daemons[0], NULL);
    client = client_of(0, false);
    return 0;
}

static int stop(void **state)
{
    (void)state;
    attn_client_close(client);
    e2e_stop(&seq_daemons[0]);
    return 0;
}

/* A row that depends on the token's code: equal tokens have equal q, k and v. */
static void fill_row(float *x, uint32_t layer, uint32_t code, uint32_t n, uint32_t what)
{
    uint64_t seed = layer * 1000003u + code * 10007u + what + 1;
    for (uint32_t i = 0; i < n; i++)
        x[i] = (float)random_below(&seed, 2001) / 1000 - 1.0005f;
}

/* These tokens at pos, of one layer; out [n][Q_HEADS][DIM]. */
static attn_status put(attn_pool *p, const struct attn_seq *seq, uint32_t layer, uint32_t pos,
                       const uint32_t *codes, uint32_t n, const int32_t *parents, float *out)
{
    static float q[MAX_TOKENS * Q_HEADS * DIM];
    static float k[MAX_TOKENS * KV_HEADS * DIM], v[MAX_TOKENS * KV_HEADS * DIM];
    struct attn_item item = {.seq = *seq, .pos = pos, .n_tokens = n};
    for (uint32_t i = 0; i < n; i++) {
        fill_row(q + (size_t)i * Q_HEADS * DIM, layer, codes[i], Q_HEADS * DIM, 1);
        fill_row(k + (size_t)i * KV_HEADS * DIM, layer, codes[i], KV_HEADS * DIM, 2);
        fill_row(v + (size_t)i * KV_HEADS * DIM, layer, codes[i], KV_HEADS * DIM, 3);
    }
    for (uint32_t i = 0; i < n * Q_HEADS * DIM; i++)
        out[i] = NAN;
    struct attn_step s = {.struct_size = sizeof s,
                          .layer = layer,
                          .n_items = 1,
                          .items = &item,
                          .q = q,
                          .k = k,
                          .v = v,
                          .out = out,
                          .parents = parents,
                          .timeout_us = LONG_US};
    return attn_step(p, &s, NULL);
}

static struct attn_seq prompted(attn_pool *p, const uint32_t *codes, uint32_t n)
{
    static float out[MAX_TOKENS * Q_HEADS * DIM];
    struct attn_seq seq;
    ok(attn_seq_open(p, next_id++, LONG_US, &seq));
    for (uint32_t l = 0; l < LAYERS && n > 0; l++)
        ok(put(p, &seq, l, 0, codes, n, NULL, out));
    return seq;
}

static void assert_near(const float *a, const float *b, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        if (!(fabsf(a[i] - b[i]) <= 2e-5f))
            fail_msg("[%u] is %.9g, not %.9g", i, (double)a[i], (double)b[i]);
}

/* The path to a node, in order; returns its length. */
static uint32_t path_of(const int32_t *parents, uint32_t node, uint32_t *out)
{
    uint32_t n = 0;
    for (int32_t i = (int32_t)node; i >= 0; i = parents[i])
        n++;
    for (int32_t i = (int32_t)node, at = (int32_t)n; i >= 0; i = parents[i])
        out[--at] = (uint32_t)i;
    return n;
}

/* A sequence that is decoded by trees, and beside it one of the same tokens that has none. */
static void decode_by_trees(attn_pool *p, uint32_t n_prompt, bool has_window)
{
    static float out[LAYERS][MOST * Q_HEADS * DIM], plain[MOST * Q_HEADS * DIM];
    uint32_t codes[MAX_TOKENS], len = n_prompt;
    for (uint32_t i = 0; i < n_prompt; i++)
        codes[i] = 100000 + i;
    struct attn_seq a = prompted(p, codes, len), b = prompted(p, codes, len);
    for (uint32_t round = 0; round < 12; round++) {
        int32_t parents[MOST];
        uint32_t drafts[MOST], path[MOST], n = 1 + random_below(&chance, round % 4 == 3 ? 64 : 12);
        for (uint32_t i = 0; i < n; i++) {
            parents[i] =
                round % 3 == 0 ? (int32_t)i - 1 : (int32_t)random_below(&chance, i + 1) - 1;
            drafts[i] = 1000 * round + i;
        }
        for (uint32_t l = 0; l < LAYERS; l++)
            ok(put(p, &a, l, len, drafts, n, parents, out[l]));
        uint32_t node = random_below(&chance, n), n_path = path_of(parents, node, path);
        if (round == 5)
            n_path = 0;
        for (uint32_t i = 0; i < n_path; i++, len++) {
            codes[len] = drafts[path[i]];
            for (uint32_t l = 0; l < LAYERS; l++) {
                ok(put(p, &b, l, len, &codes[len], 1, NULL, plain));
                assert_near(out[l] + path[i] * Q_HEADS * DIM, plain, Q_HEADS * DIM);
            }
        }
        ok(attn_seq_commit(p, &a, path, n_path, LONG_US));
        for (uint32_t l = 0; l < LAYERS; l++) { /* the same bytes are cached */
            uint32_t next = 500000 + round;
            ok(put(p, &a, l, len, &next, 1, NULL, out[l]));
            ok(put(p, &b, l, len, &next, 1, NULL, plain));
            assert_memory_equal(out[l], plain, Q_HEADS * DIM * sizeof(float));
        }
        len++;
        if (round % 5 == 4 && !has_window) { /* and shared */
            struct attn_seq fork;
            ok(attn_seq_fork(p, &a, next_id++, ATTN_ALL_TOKENS, LONG_US, &fork, NULL));
            ok(attn_seq_close(p, &a, LONG_US));
            a = fork;
        }
    }
    ok(attn_seq_close(p, &a, LONG_US));
    ok(attn_seq_close(p, &b, LONG_US));
}

static void
nodes_attend_as_their_paths_and_a_path_that_is_kept_as_if_it_had_come_alone(void **state)
{
    (void)state;
    static const attn_dtype dtypes[] = {ATTN_F32, ATTN_NVFP4};
    for (uint32_t i = 0; i < 4; i++) {
        seq_window = i < 2 ? 0 : 9;
        seq_sinks = i < 2 ? 0 : 2;
        attn_pool *p = pool_of(client, dtypes[i % 2], "trees", 0.2f, N_BLOCKS);
        for (uint32_t n = 0; n < 40; n += 13)
            decode_by_trees(p, n, seq_window > 0);
        attn_pool_close(p);
    }
    seq_window = seq_sinks = 0;
}

#define REFUSED(call, status, text)                                                                \
    do {                                                                                           \
        assert_int_equal(call, status);                                                            \
        if (strstr(attn_last_error()->message, text) == NULL)                                      \
            fail_msg("%s", attn_last_error()->message);                                            \
    } while (0)

static void what_a_tree_is_in_the_way_of_is_refused_by_name(void **state)
{
    (void)state;
    static const int32_t parents[] = {-1, 0, 0, 2}, other[] = {-1, 0, 1, 2}, bad[] = {-1, 1, 0, 0};
    static const uint32_t codes[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17};
    static float out[MOST * Q_HEADS * DIM];
    static uint32_t many[65], ids[24];
    static int32_t chain[65];
    uint32_t n_cached;
    for (int32_t i = 0; i < 65; i++)
        chain[i] = i - 1;
    for (uint32_t i = 0; i < 24; i++)
        ids[i] = i + 1;
    attn_pool *p = pool_of(client, ATTN_F32, "refused", 0.2f, N_BLOCKS);
    struct attn_seq seq = prompted(p, codes, 14), fork, found, same;
    ok(attn_seq_tokens(p, &seq, 0, ids, 24, LONG_US));
    REFUSED(attn_seq_commit(p, &seq, codes, 0, LONG_US), ATTN_EINVAL, "has no tree");
    REFUSED(put(p, &seq, 0, 14, codes, 4, bad, out), ATTN_EINVAL, "step.parent[1] is 1");
    REFUSED(put(p, &seq, 0, 14, many, 65, chain, out), ATTN_EINVAL, "a tree has 64 nodes");
    REFUSED(put(p, &seq, 0, 13, codes, 4, parents, out), ATTN_EINVAL, "truncate first");

    ok(put(p, &seq, 0, 14, codes, 4, parents, out));
    ok(put(p, &seq, 0, 14, codes, 4, parents, out)); /* again */
    REFUSED(attn_seq_commit(p, &seq, (uint32_t[]){0}, 1, LONG_US), ATTN_EINVAL, "not yet the tree");
    REFUSED(put(p, &seq, 1, 14, codes, 4, other, out), ATTN_EINVAL, "it has another");
    REFUSED(put(p, &seq, 1, 14, codes, 3, parents, out), ATTN_EINVAL, "it has another");
    REFUSED(put(p, &seq, 1, 14, codes, 1, NULL, out), ATTN_EINVAL, "has a tree of 4 nodes at 14");
    ok(put(p, &seq, 1, 14, codes, 4, parents, out));
    REFUSED(put(p, &seq, 0, 18, codes, 1, NULL, out), ATTN_EINVAL, "commit a path of it");
    REFUSED(step(p, &seq, 0, 16, 2, false, out), ATTN_EINVAL, "commit a path of it");
    ok(step(p, &seq, 0, 6, 8, false, out));
    REFUSED(attn_seq_fork(p, &seq, next_id, 15, LONG_US, &fork, NULL), ATTN_EINVAL,
            "is not committed");
    REFUSED(attn_seq_truncate(p, &seq, 15, LONG_US), ATTN_EINVAL, "it has a tree at 14");
    REFUSED(attn_seq_export(client, seq.id, "/tmp/attnd_no_such_file", LONG_US, NULL), ATTN_EINVAL,
            "has a tree");
    REFUSED(attn_seq_commit(p, &seq, (uint32_t[]){1, 2}, 2, LONG_US), ATTN_EINVAL, "no path");
    REFUSED(attn_seq_commit(p, &seq, (uint32_t[]){0, 9}, 2, LONG_US), ATTN_EINVAL, "no path");
    ok(attn_seq_open_with(p, next_id++, &(struct attn_tokens){.ids = ids, .n = 24}, LONG_US, &found,
                          &n_cached));
    assert_int_equal(n_cached, 0); /* its first block has nodes */
    uint32_t lens[LAYERS];
    ok(attn_seq_fork(p, &seq, next_id++, ATTN_ALL_TOKENS, LONG_US, &fork, lens));
    assert_int_equal(lens[0], 14);
    assert_int_equal(lens[1], 14);
    for (uint32_t l = 0; l < LAYERS; l++)
        ok(put(p, &fork, l, 14, codes + 4, 2, NULL, out));

    same = seq;
    ok(attn_seq_commit(p, &seq, (uint32_t[]){0, 2, 3}, 3, LONG_US));
    assert_true(seq.epoch > same.epoch);
    REFUSED(put(p, &same, 0, 14, codes, 4, parents, out), ATTN_ESTALE, "epoch");
    ok(attn_seq_open_with(p, next_id++, &(struct attn_tokens){.ids = ids, .n = 24}, LONG_US, &found,
                          &n_cached));
    assert_cached(n_cached, 16); /* it was full once the path was */

    ok(put(p, &seq, 0, 17, codes, 4, parents, out));
    struct attn_seq_call calls[2] = {
        {.struct_size = sizeof calls[0], .kind = ATTN_CALL_COMMIT, .seq = seq},
        {.struct_size = sizeof calls[0], .kind = ATTN_CALL_COMMIT, .seq = found}};
    ok(attn_seq_calls(p, calls, 2, LONG_US, NULL));
    assert_int_equal(calls[0].error.status, ATTN_OK);
    assert_int_equal(calls[1].error.status, ATTN_EINVAL);
    seq = calls[0].seq;
    for (uint32_t l = 0; l < LAYERS; l++)
        ok(put(p, &seq, l, 17, codes, 2, NULL, out));
    ok(put(p, &seq, 0, 19, codes, 4, parents, out));
    ok(attn_seq_truncate(p, &seq, 18, LONG_US));
    ok(put(p, &seq, 0, 18, codes, 1, NULL, out));
    attn_pool_close(p);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(
            nodes_attend_as_their_paths_and_a_path_that_is_kept_as_if_it_had_come_alone),
        cmocka_unit_test(what_a_tree_is_in_the_way_of_is_refused_by_name),
    };
    return cmocka_run_group_tests(tests, start, stop);
}
