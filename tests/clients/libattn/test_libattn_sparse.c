/* test_libattn_sparse.c: sparse steps at a real daemon: a query attends as it does in a sequence of
 * the tokens that it visits, neither the order of indices nor blocks for tokens change a byte, and
 * what a query cannot visit is refused by name. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/clients/libattn/seq_rig.h"
#include "tests/random.h"

enum { CACHED = 200, N_BLOCKS = 256, ROW = Q_HEADS * DIM, KV_ROW = KV_HEADS * DIM };

static attn_client *client;
static uint64_t chance = 31, next_id = 1;
static float q[MAX_TOKENS * ROW], k[MAX_TOKENS * KV_ROW], v[MAX_TOKENS * KV_ROW];

static int start(void **state)
{
    (void)state;
    e2e_start(&seq_daemons[0], (const char *const[]){"--device.kv_memory", "64M", NULL});
    client = client_of(0, false);
    for (uint32_t i = 0; i < MAX_TOKENS * ROW; i++)
        q[i] = (float)random_below(&chance, 2001) / 1000 - 1.0005f;
    for (uint32_t i = 0; i < MAX_TOKENS * KV_ROW; i++) {
        k[i] = (float)random_below(&chance, 2001) / 1000 - 1.0005f;
        v[i] = (float)random_below(&chance, 2001) / 1000 - 1.0005f;
    }
    return 0;
}

static int stop(void **state)
{
    (void)state;
    attn_client_close(client);
    e2e_stop(&seq_daemons[0]);
    return 0;
}

static uint32_t choose_blocks; /* of the steps that follow */

/* What a step of one sequence visits. */
struct visits {
    const int32_t *indices; /* NULL: all */
    uint32_t n, unit;
};

/* Tokens [pos, pos + n): their own q, k and v; out [n][ROW], lse [n][Q_HEADS]. */
static attn_status put(attn_pool *p, const struct attn_seq *seq, uint32_t pos, uint32_t n,
                       bool is_append, const struct visits *x, float *out, float *lse)
{
    struct attn_item item = {.seq = *seq, .pos = pos, .n_tokens = n};
    struct attn_step s = {.struct_size = sizeof s,
                          .n_items = 1,
                          .items = &item,
                          .q = out != NULL ? q + (size_t)pos * ROW : NULL,
                          .k = is_append ? k + (size_t)pos * KV_ROW : NULL,
                          .v = is_append ? v + (size_t)pos * KV_ROW : NULL,
                          .out = out,
                          .lse = lse,
                          .choose_blocks = choose_blocks,
                          .timeout_us = LONG_US};
    if (x != NULL) {
        s.indices = x->indices;
        s.n_indices = x->n;
        s.index_tokens = x->unit;
    }
    for (uint32_t i = 0; out != NULL && i < n * ROW; i++)
        out[i] = NAN;
    return attn_step(p, &s, NULL);
}

static struct attn_seq cached(attn_pool *p, uint32_t n)
{
    struct attn_seq seq;
    ok(attn_seq_open(p, next_id++, LONG_US, &seq));
    if (n > 0)
        ok(put(p, &seq, 0, n, true, NULL, NULL, NULL));
    return seq;
}

static void assert_near(const float *a, const float *b, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        if (!(a[i] == b[i] || fabsf(a[i] - b[i]) <= 2e-5f))
            fail_msg("[%u] is %.9g, not %.9g", i, (double)a[i], (double)b[i]);
}

/* What the query at pos gives in a sequence of these tokens, in their order. */
static void attend_to(attn_pool *p, uint32_t pos, const int32_t *tokens, uint32_t n, float *out,
                      float *lse)
{
    struct attn_seq seq = cached(p, 0);
    for (uint32_t i = 0; i < n; i++) {
        struct attn_item item = {.seq = seq, .pos = i, .n_tokens = 1};
        const bool is_last = i + 1 == n;
        struct attn_step s = {.struct_size = sizeof s,
                              .n_items = 1,
                              .items = &item,
                              .q = is_last ? q + (size_t)pos * ROW : NULL,
                              .k = k + (size_t)tokens[i] * KV_ROW,
                              .v = v + (size_t)tokens[i] * KV_ROW,
                              .out = is_last ? out : NULL,
                              .lse = is_last ? lse : NULL,
                              .timeout_us = LONG_US};
        ok(attn_step(p, &s, NULL));
    }
    ok(attn_seq_close(p, &seq, LONG_US));
}

static void queries_attend_as_in_a_sequence_of_what_they_visit(void **state)
{
    (void)state;
    enum { QUERIES = 5, MOST = 40 };
    static const attn_dtype dtypes[] = {ATTN_F32, ATTN_MXFP4};
    float out[QUERIES * ROW], again[QUERIES * ROW], alone[ROW];
    float lse[QUERIES * Q_HEADS], lse_alone[Q_HEADS];
    for (uint32_t d = 0; d < 2; d++) {
        attn_pool *p = pool_of(client, dtypes[d], "sparse", 0.2f, N_BLOCKS);
        struct attn_seq seq = cached(p, CACHED);
        int32_t indices[QUERIES][MOST], other[QUERIES][MOST];
        for (uint32_t t = 0; t < QUERIES; t++) { /* a random subset, ascending; then -1 */
            uint32_t n = 0;
            for (int32_t j = 0; j <= (int32_t)(CACHED + t) && n < 8 * t; j++)
                if (random_below(&chance, 5) == 0)
                    indices[t][n++] = j;
            if (t > 0)
                indices[t][n - 1] = (int32_t)(CACHED + t); /* itself, appended by this step */
            for (uint32_t i = n; i < MOST; i++)
                indices[t][i] = -1;
            for (uint32_t i = 0; i < MOST; i++) /* backwards, and one twice */
                other[t][i] = indices[t][MOST - 1 - i];
            other[t][0] = other[t][MOST - 1];
        }
        struct visits x = {indices[0], MOST, 0}, y = {other[0], MOST, 1};
        ok(put(p, &seq, CACHED, QUERIES, true, &x, out, lse));
        ok(put(p, &seq, CACHED, QUERIES, false, &y, again, NULL));
        assert_memory_equal(out, again, sizeof out);
        for (uint32_t t = 1; t < QUERIES; t++) {
            attend_to(p, CACHED + t, indices[t], 8 * t, alone, lse_alone);
            assert_near(out + t * ROW, alone, ROW);
            assert_near(lse + t * Q_HEADS, lse_alone, Q_HEADS);
        }
        for (uint32_t i = 0; i < ROW; i++) /* the first visits nothing */
            assert_true(out[i] == 0);
        for (uint32_t i = 0; i < Q_HEADS; i++)
            assert_true(lse[i] == -INFINITY);
        attn_pool_close(p);
    }
}

static void all_tokens_by_positions_or_blocks_are_what_dense_steps_see(void **state)
{
    (void)state;
    enum { QUERIES = 20, END = CACHED + QUERIES };
    static float out[QUERIES * ROW], by_tokens[QUERIES * ROW], by_blocks[QUERIES * ROW];
    static int32_t tokens[QUERIES][END], blocks[QUERIES][END / BLOCK + 1];
    for (uint32_t w = 0; w < 2; w++) {
        seq_window = w * 50;
        seq_sinks = w * 4;
        attn_pool *p = pool_of(client, ATTN_F32, "all", 0.2f, N_BLOCKS);
        struct attn_seq seq = cached(p, CACHED);
        for (uint32_t t = 0; t < QUERIES; t++) {
            const int32_t pos = (int32_t)(CACHED + t);
            for (int32_t j = 0; j < END; j++) {
                const bool is_seen = j <= pos && (w == 0 || j > pos - 50 || j < 4);
                tokens[t][j] = is_seen ? j : -1;
            }
            for (int32_t b = 0; b < END / BLOCK + 1; b++) { /* blocks that have a visible token */
                const bool is_seen = b * BLOCK <= pos && (w == 0 || (b + 1) * BLOCK > pos - 49);
                blocks[t][b] = is_seen || b == 0 ? b : -1;
            }
        }
        ok(put(p, &seq, CACHED, QUERIES, true, NULL, out, NULL));
        ok(put(p, &seq, CACHED, QUERIES, false, &(struct visits){tokens[0], END, 1}, by_tokens,
               NULL));
        ok(put(p, &seq, CACHED, QUERIES, false, &(struct visits){blocks[0], END / BLOCK + 1, BLOCK},
               by_blocks, NULL));
        assert_near(by_tokens, out, QUERIES * ROW);
        assert_memory_equal(by_tokens, by_blocks, sizeof by_blocks);
        attn_pool_close(p);
    }
    seq_window = seq_sinks = 0;
}

/* 600 queries of 1,024 indices are more than one message may have. */
static void large_steps_are_cut(void **state)
{
    (void)state;
    enum { QUERIES = 600, MOST = 1024 };
    static int32_t indices[QUERIES][MOST];
    static float out[QUERIES * ROW];
    attn_pool *p = pool_of(client, ATTN_F32, "cut", 0.2f, N_BLOCKS);
    struct attn_seq seq = cached(p, 0);
    for (int32_t t = 0; t < QUERIES; t++)
        for (int32_t i = 0; i < MOST; i++)
            indices[t][i] = i == t ? t / 2 : -1;
    ok(put(p, &seq, 0, QUERIES, true, &(struct visits){indices[0], MOST, 1}, out, NULL));
    for (uint32_t t = 0; t < QUERIES; t++)
        for (uint32_t h = 0; h < Q_HEADS; h++)
            assert_near(out + t * ROW + h * DIM,
                        v + t / 2 * KV_ROW + h / (Q_HEADS / KV_HEADS) * DIM, DIM);
    attn_pool_close(p);
}

#define REFUSED(call, status, text)                                                                \
    do {                                                                                           \
        assert_int_equal(call, status);                                                            \
        if (strstr(attn_last_error()->message, text) == NULL)                                      \
            fail_msg("%s", attn_last_error()->message);                                            \
    } while (0)

static void what_a_query_cannot_visit_is_refused_by_name(void **state)
{
    (void)state;
    float out[2 * ROW], kept[2 * ROW];
    const struct {
        int32_t indices[4];
        uint32_t unit;
        const char *why;
    } bad[] = {
        {{50, 49, 51, 2},
         1,
         "indices[1][1] is 2 of 1 tokens each: the query at 51 sees [0, 2) and "
         "[32, 52)"},
        {{0, 51, 2, 51}, 1, "indices[0][1] is 51 of 1 tokens each: the query at 50"},
        {{0, 1, -2, 51}, 1, "indices[1][0] is -2, must be -1 (none) or more"},
        {{0, 1, 2147483647, 51}, 1, "indices[1][0] is 2147483647"},
        {{0, 0, 0, 2147483647}, 4294967295u, "indices[1][1] is 2147483647"},
        {{31, -1, 31, -1}, 1, "indices[1][0] is 31"},
        {{0, 4, 5, 1}, 8, "indices[1][1] is 1 of 8 tokens each: the query at 51"},
    };
    seq_window = 20;
    seq_sinks = 2;
    attn_pool *p = pool_of(client, ATTN_F32, "refused", 0.2f, N_BLOCKS);
    struct attn_seq seq = cached(p, 50);
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        REFUSED(
            put(p, &seq, 50, 2, true, &(struct visits){bad[i].indices, 2, bad[i].unit}, out, NULL),
            ATTN_EINVAL, bad[i].why);
    }
    ok(put(p, &seq, 50, 2, true, NULL, kept, NULL)); /* nothing was appended */

    static const int32_t some[2] = {51, 51}, parents[2] = {-1, 0};
    struct attn_item item = {.seq = seq, .pos = 52, .n_tokens = 2};
    struct attn_step s = {.struct_size = sizeof s,
                          .n_items = 1,
                          .items = &item,
                          .k = k,
                          .v = v,
                          .indices = some,
                          .n_indices = 1,
                          .timeout_us = LONG_US};
    REFUSED(attn_step(p, &s, NULL), ATTN_EINVAL, "a sparse step has q and no parents");
    s.q = q;
    s.out = out;
    s.parents = parents;
    REFUSED(attn_step(p, &s, NULL), ATTN_EINVAL, "a sparse step has q and no parents");
    s.parents = NULL;
    s.n_indices = 0;
    REFUSED(attn_step(p, &s, NULL), ATTN_EINVAL, "indices is not NULL, n_indices 0");
    s.n_indices = 1u << 20;
    REFUSED(attn_step(p, &s, NULL), ATTN_EINVAL, "n_indices is 1048576, a query has 524288");
    s.n_indices = 1;
    ok(attn_step(p, &s, NULL));
    attn_pool_close(p);
    seq_window = seq_sinks = 0;
}

/* Keys of one block point where q does, the others away from it. */
static void steps_choose_blocks(void **state)
{
    (void)state;
    enum { QUERIES = 30, KEY_BLOCK = 5 };
    static float out[QUERIES * ROW], all[QUERIES * ROW], one[ROW], few[ROW];
    static float was_k[BLOCK * KV_ROW];
    attn_pool *p = pool_of(client, ATTN_F32, "chosen", 0.2f, N_BLOCKS);
    struct attn_seq seq = cached(p, CACHED);
    ok(put(p, &seq, CACHED, QUERIES, true, NULL, all, NULL));
    for (uint32_t i = 0; i < 2; i++) {
        choose_blocks = i == 0 ? 15 : UINT32_MAX;
        ok(put(p, &seq, CACHED, QUERIES, false, NULL, out, NULL));
        assert_memory_equal(out, all, sizeof out);
    }
    choose_blocks = 0;

    float *at = k + (size_t)KEY_BLOCK * BLOCK * KV_ROW;
    memcpy(was_k, at, sizeof was_k);
    for (uint32_t i = 0; i < BLOCK * KV_ROW; i++) {
        const uint32_t h = i % KV_ROW / DIM * (Q_HEADS / KV_HEADS);
        at[i] = 3 * q[(size_t)CACHED * ROW + h * DIM + i % DIM];
    }
    struct attn_seq other = cached(p, CACHED);
    int32_t indices[] = {0, KEY_BLOCK, CACHED / BLOCK};
    for (choose_blocks = 3; choose_blocks > 1; choose_blocks--) {
        const uint32_t n = choose_blocks;
        ok(put(p, &other, CACHED, 1, n == 3, NULL, one, NULL));
        choose_blocks = 0;
        indices[1] = n == 3 ? KEY_BLOCK : -1;
        ok(put(p, &other, CACHED, 1, false, &(struct visits){indices, 3, BLOCK}, few, NULL));
        assert_near(one, few, ROW);
        choose_blocks = n;
    }
    choose_blocks = 0;
    memcpy(at, was_k, sizeof was_k);
    attn_pool_close(p);
}

static void where_blocks_cannot_be_chosen_it_is_refused_by_name(void **state)
{
    (void)state;
    static const char why[] = "choose_blocks is 3: such a step has q, no parents and no indices";
    float out[ROW];
    const int32_t index = 0;
    seq_window = 20;
    attn_pool *p = pool_of(client, ATTN_F32, "no choice", 0.2f, N_BLOCKS);
    struct attn_seq seq = cached(p, 50);
    choose_blocks = 3;
    REFUSED(put(p, &seq, 50, 1, true, NULL, out, NULL), ATTN_ENOTSUP,
            "step.choose_blocks: layer 0 has a window (window_tokens)");
    REFUSED(put(p, &seq, 50, 1, true, &(struct visits){&index, 1, 1}, out, NULL), ATTN_EINVAL, why);
    REFUSED(put(p, &seq, 50, 1, true, NULL, NULL, NULL), ATTN_EINVAL, why);
    choose_blocks = 0;
    ok(put(p, &seq, 50, 1, true, NULL, out, NULL)); /* nothing was appended */
    attn_pool_close(p);
    seq_window = 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(queries_attend_as_in_a_sequence_of_what_they_visit),
        cmocka_unit_test(all_tokens_by_positions_or_blocks_are_what_dense_steps_see),
        cmocka_unit_test(large_steps_are_cut),
        cmocka_unit_test(what_a_query_cannot_visit_is_refused_by_name),
        cmocka_unit_test(steps_choose_blocks),
        cmocka_unit_test(where_blocks_cannot_be_chosen_it_is_refused_by_name),
    };
    return cmocka_run_group_tests(tests, start, stop);
}
