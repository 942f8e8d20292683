/* e2e_options.c: the option product of kernels/cases.h through a daemon of several cards, in pools
 * that lie whole on one of them, are split by kv heads and split by tokens, against float64. Every
 * other case without a window is dilated, and of those that are not some are sparse. What a
 * batch-invariant pool of heads answers has the bytes of the whole one's.
 *
 *     e2e_options [EVERY [OFFSET]]
 *
 * The product is walked in steps of EVERY (a prime to the tables' sizes); E2E_CARDS says which
 * cards there are, 0,1 if nothing does.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "clients/libattn/attn.h"
#include "tests/daemon/e2e/e2e.h"
#include "tests/kernels/cases.h"
#include "tests/random.h"

enum { TIMEOUT_US = 600000000, MOST_TOKENS = 1024, N_INDICES = 48 };

#ifndef EVERY
#define EVERY 151
#endif
static uint32_t every = EVERY, offset;
static struct e2e d;
static attn_client *client;
static uint64_t rng = 1, next_seq = 1;

#define MUST_OK(call)                                                                              \
    do {                                                                                           \
        if ((call) != ATTN_OK)                                                                     \
            fail_msg("%s: %s", #call, attn_last_error()->message);                                 \
    } while (0)

static double random_value(void)
{
    double sum = 0;
    for (int i = 0; i < 4; i++) {
        sum += (double)random_next(&rng) / 0x1p31 - 0.5;
    }
    return sum * 1.7320508 + 1e-4;
}

/* Rates that divide a card's stripes and first heads, that do not, that are larger than both. */
static const struct dilation {
    uint32_t n;
    struct attn_branch branches[ATTN_MAX_BRANCHES];
} none, dilations[] = {
            {3, {{64, 1}, {128, 2}, {256, 4}}},
            {5, {{16, 1}, {32, 2}, {64, 4}, {96, 6}, {192, 12}}},
            {4, {{10, 1}, {30, 3}, {500, 5}, {640, 32}}},
};

/* One case, as all splits get it. */
struct option_case {
    const struct case_geometry *g;
    struct case_dtype dtype;
    struct case_options o;
    const struct case_shape *shape;
    const struct dilation *dilation;
    uint32_t n_items, n_history, n_step; /* items; tokens of the two steps */
    float sink_logits[1024], alibi_slopes[1024];
    uint8_t *q, *k[2], *v[2]; /* of the step; of history and step */
    int32_t (*indices)[N_INDICES]; /* of the step; NULL: it is not sparse */
};

static uint8_t *random_rows(const struct option_case *c, size_t n)
{
    uint8_t *x = malloc(n * attn_dtype_bytes(c->dtype.q) + 1);
    assert_non_null(x);
    for (size_t i = 0; i < n; i++)
        reference_put(c->dtype.q, x, i, random_value());
    return x;
}

/* Tokens that each query of the step sees, some twice, and -1. */
static void make_indices(struct option_case *c)
{
    const struct case_options *o = &c->o;
    uint32_t row = 0;
    c->indices = malloc(c->n_step * sizeof *c->indices);
    assert_non_null(c->indices);
    for (uint32_t i = 0; i < c->n_items; i++) {
        const struct case_item *it = &c->shape->items[i];
        for (uint32_t t = 0; t < it->n_tokens; t++, row++) {
            const uint32_t p = it->n_before + t, chance = random_below(&rng, 4);
            const uint32_t end = o->is_full ? it->n_before + it->n_tokens : p + 1;
            for (uint32_t j = 0; j < N_INDICES; j++) {
                const uint32_t token = random_below(&rng, end);
                const bool is_seen =
                    o->window_tokens == 0 || token + o->window_tokens > p || token < o->sink_tokens;
                c->indices[row][j] =
                    is_seen && random_below(&rng, 4) < chance ? (int32_t)token : -1;
            }
        }
    }
}

static void case_open(struct option_case *c, uint32_t i)
{
    const uint32_t n_g = CASE_N_PRODUCT, n_d = CASE_COUNT(case_dtypes),
                   n_o = CASE_COUNT(case_options);
    *c = (struct option_case){.g = &case_geometries[i % n_g],
                              .dtype = case_dtypes[i / n_g % n_d],
                              .o = case_options[i / n_g / n_d % n_o],
                              .shape = &case_shapes[i / n_g / n_d / n_o]};
    c->dilation =
        i % 2 == 0 || c->o.window_tokens > 0 ? &none : &dilations[i / 2 % CASE_COUNT(dilations)];
    if (i % 3 != 0) /* of whole blocks, as those of pools split by tokens must be */
        c->o.window_tokens =
            (c->o.window_tokens + c->g->block_tokens - 1) / c->g->block_tokens * c->g->block_tokens;
    for (; c->n_items < CASE_MAX_ITEMS && c->shape->items[c->n_items].n_tokens > 0; c->n_items++) {
        c->n_history += c->shape->items[c->n_items].n_before;
        c->n_step += c->shape->items[c->n_items].n_tokens;
    }
    for (uint32_t h = 0; h < c->g->num_q_heads; h++) {
        c->sink_logits[h] = (float)random_value() * 2;
        c->alibi_slopes[h] = -0.02f * (float)(1 + h % 10);
    }
    c->q = random_rows(c, (size_t)c->n_step * c->g->num_q_heads * c->g->head_dim_k);
    for (int is_step = 0; is_step < 2; is_step++) {
        const size_t rows = (size_t)(is_step ? c->n_step : c->n_history) * c->g->num_kv_heads;
        c->k[is_step] = random_rows(c, rows * c->g->head_dim_k);
        c->v[is_step] = random_rows(c, rows * c->g->head_dim_v);
    }
    if (c->dilation->n == 0 && i / 2 % 2 == 0)
        make_indices(c);
}

static void case_close(struct option_case *c)
{
    free(c->q);
    free(c->indices);
    for (int i = 0; i < 2; i++) {
        free(c->k[i]);
        free(c->v[i]);
    }
}

/* --- the daemon's answer ---------------------------------------------------------------------- */

static attn_status make_pool(const struct option_case *c, attn_split split, attn_pool **out)
{
    const struct case_options *o = &c->o;
    static uint32_t n;
    char name[32];
    struct attn_layer layer = {.window_tokens = o->window_tokens,
                               .sink_tokens = o->sink_tokens,
                               .soft_cap = o->soft_cap,
                               .is_full = o->is_full,
                               .sink_logits = o->has_sink_logits ? c->sink_logits : NULL,
                               .alibi_slopes = o->has_alibi ? c->alibi_slopes : NULL,
                               .n_branches = c->dilation->n,
                               .branches = c->dilation->branches};
    struct attn_pool_spec spec = {.struct_size = sizeof spec,
                                  .layer_struct_size = sizeof layer,
                                  .name = name,
                                  .num_layers = 1,
                                  .num_q_heads = c->g->num_q_heads,
                                  .num_kv_heads = c->g->num_kv_heads,
                                  .head_dim_k = c->g->head_dim_k,
                                  .head_dim_v = c->g->head_dim_v,
                                  .is_v_in_k = c->g->is_v_in_k,
                                  .block_tokens = c->g->block_tokens,
                                  .n_blocks = CASE_MAX_ITEMS * 128,
                                  .q_dtype = c->dtype.q,
                                  .kv_dtype = c->dtype.kv,
                                  .is_batch_invariant = o->is_batch_invariant,
                                  .n_layers = 1,
                                  .split = split,
                                  .layers = &layer};
    if (spec.n_blocks > 2 * CASE_MAX_ITEMS * MOST_TOKENS / spec.block_tokens)
        spec.n_blocks = 2 * CASE_MAX_ITEMS * MOST_TOKENS / spec.block_tokens;
    snprintf(name, sizeof name, "p%u", n++);
    return attn_pool_create(client, &spec, TIMEOUT_US, out);
}

/* out and lse of the step, which may have been refused: `unsupported`. */
static attn_status answer(const struct option_case *c, attn_split split, uint8_t *out, float *lse)
{
    attn_pool *p;
    attn_status st = make_pool(c, split, &p);
    if (st == ATTN_ENOTSUP)
        return st;
    MUST_OK(st);
    struct attn_item items[2][CASE_MAX_ITEMS];
    struct attn_seq seqs[CASE_MAX_ITEMS];
    uint32_t n_before = 0;
    for (uint32_t i = 0; i < c->n_items; i++) {
        const struct case_item *it = &c->shape->items[i];
        MUST_OK(attn_seq_open(p, next_seq++, TIMEOUT_US, &seqs[i]));
        if (it->n_before > 0)
            items[0][n_before++] = (struct attn_item){.seq = seqs[i], .n_tokens = it->n_before};
        items[1][i] =
            (struct attn_item){.seq = seqs[i], .pos = it->n_before, .n_tokens = it->n_tokens};
    }
    struct attn_step step = {.struct_size = sizeof step,
                             .n_items = n_before,
                             .items = items[0],
                             .k = c->k[0],
                             .v = c->g->is_v_in_k ? NULL : c->v[0],
                             .timeout_us = TIMEOUT_US};
    if (n_before > 0)
        MUST_OK(attn_step(p, &step, NULL));
    step.n_items = c->n_items;
    step.items = items[1];
    step.q = c->q;
    step.k = c->k[1];
    step.v = c->g->is_v_in_k ? NULL : c->v[1];
    step.out = out;
    step.lse = lse;
    step.indices = c->indices != NULL ? c->indices[0] : NULL;
    step.n_indices = c->indices != NULL ? N_INDICES : 0;
    MUST_OK(attn_step(p, &step, NULL));
    for (uint32_t i = 0; i < c->n_items; i++)
        MUST_OK(attn_seq_close(p, &seqs[i], TIMEOUT_US));
    MUST_OK(attn_pool_release(p, TIMEOUT_US));
    attn_pool_close(p);
    return ATTN_OK;
}

/* --- the reference ---------------------------------------------------------------------------- */

static bool is_close(double got, double want, double atol, double rtol)
{
    return got == want || fabs(got - want) <= atol + rtol * fabs(want);
}

/* n rows, of tokens `at` on, as the cache has them. */
static void cached(const struct option_case *c, const uint8_t *from, size_t at, uint32_t n,
                   uint32_t dim, float *to)
{
    for (size_t r = 0; r < (size_t)n * c->g->num_kv_heads; r++)
        reference_cached_row(c->dtype.q, c->dtype.kv, from, (at * c->g->num_kv_heads + r) * dim,
                             dim, to + r * dim);
}

static void check_item(const struct option_case *c, uint32_t item, size_t at_history,
                       size_t at_step, const uint8_t *out, const float *lse, const char *what)
{
    const struct case_geometry *g = c->g;
    const struct case_item *it = &c->shape->items[item];
    const uint32_t n_kv = it->n_before + it->n_tokens;
    const size_t rows = (size_t)it->n_tokens * g->num_q_heads, n = rows * g->head_dim_v;
    float *q = malloc(rows * g->head_dim_k * sizeof *q);
    float *k = malloc((size_t)n_kv * g->num_kv_heads * g->head_dim_k * sizeof *k);
    float *v = malloc((size_t)n_kv * g->num_kv_heads * g->head_dim_v * sizeof *v);
    double *want = malloc(n * sizeof *want), *want_lse = malloc(rows * sizeof *want_lse);
    struct attn_layer_spec spec = case_spec(g, &c->o);
    spec.sink_logits = c->o.has_sink_logits ? c->sink_logits : NULL;
    spec.alibi_slopes = c->o.has_alibi ? c->alibi_slopes : NULL;
    spec.n_branches = c->dilation->n;
    memcpy(spec.branches, c->dilation->branches, sizeof spec.branches);
    for (size_t i = 0; i < rows * g->head_dim_k; i++)
        q[i] = (float)reference_get(c->dtype.q, c->q, at_step * g->num_q_heads * g->head_dim_k + i);
    for (int is_step = 0; is_step < 2; is_step++) {
        const size_t at = is_step ? at_step : at_history;
        const size_t row = is_step ? (size_t)it->n_before * g->num_kv_heads : 0;
        const uint32_t n_rows = is_step ? it->n_tokens : it->n_before;
        cached(c, c->k[is_step], at, n_rows, g->head_dim_k, k + row * g->head_dim_k);
        for (size_t r = 0; g->is_v_in_k && r < (size_t)n_rows * g->num_kv_heads; r++)
            memcpy(v + (row + r) * g->head_dim_v, k + (row + r) * g->head_dim_k,
                   g->head_dim_v * sizeof *v);
        if (!g->is_v_in_k)
            cached(c, c->v[is_step], at, n_rows, g->head_dim_v, v + row * g->head_dim_v);
    }
    uint32_t starts[MOST_TOKENS];
    for (uint32_t t = 0; t <= it->n_tokens; t++)
        starts[t] = t * N_INDICES;
    const struct reference_seen seen = {
        .starts = c->indices != NULL ? starts : NULL,
        .tokens = c->indices != NULL ? (const uint32_t *)c->indices[at_step] : NULL};
    assert_int_equal(reference_attend_seen(&spec, g->num_q_heads, g->num_kv_heads, g->head_dim_k,
                                           g->head_dim_v, ATTN_F32, q, it->n_tokens, it->n_before,
                                           k, v, n_kv, &seen, want, want_lse),
                     ATTN_OK);
    const struct reference_bound bound = reference_bound_of(c->dtype.q, c->dtype.q);
    double diff = 0, norm = 0;
    for (size_t i = 0; i < n; i++) {
        double got = reference_get(c->dtype.q, out, at_step * g->num_q_heads * g->head_dim_v + i);
        if (!is_close(got, want[i], bound.atol, bound.rtol))
            fail_msg("%s: item %u, output %zu is %.9g, the reference %.9g", what, item, i, got,
                     want[i]);
        diff += (got - want[i]) * (got - want[i]);
        norm += want[i] * want[i];
    }
    /* of a few values one may be rounded by all that the bound allows */
    if (n >= 64 && !(diff <= bound.l2 * bound.l2 * norm))
        fail_msg("%s: item %u: relative L2 error %.3g", what, item, sqrt(diff / norm));
    for (size_t i = 0; i < rows; i++)
        if (!is_close((double)lse[at_step * g->num_q_heads + i], want_lse[i], bound.lse_atol,
                      bound.lse_rtol))
            fail_msg("%s: item %u, lse %zu is %.9g, the reference %.9g", what, item, i,
                     (double)lse[at_step * g->num_q_heads + i], want_lse[i]);
    free(q);
    free(k);
    free(v);
    free(want);
    free(want_lse);
}

/* --- the product ------------------------------------------------------------------------------ */

struct counts {
    uint32_t n_run[ATTN_SPLIT_TOKENS + 1], n_dilated, n_windows, n_sparse; /* of those by tokens */
};

/* How many splits computed the case. */
static uint32_t run_case(uint32_t i, struct counts *counts)
{
    static const attn_split splits[] = {ATTN_SPLIT_WHOLE, ATTN_SPLIT_HEADS, ATTN_SPLIT_TOKENS};
    struct option_case c;
    case_open(&c, i);
    const size_t rows = (size_t)c.n_step * c.g->num_q_heads;
    const size_t bytes = rows * c.g->head_dim_v * attn_dtype_bytes(c.dtype.q);
    uint8_t *out = malloc(bytes), *whole = malloc(bytes);
    float *lse = malloc(rows * sizeof *lse);
    uint32_t n = 0;
    for (uint32_t s = 0; s < CASE_COUNT(splits); s++) {
        char what[160];
        snprintf(what, sizeof what, "case %u (%s, %s/%s, %s, %s), %u branches%s, %s", i, c.g->name,
                 attn_dtype_name(c.dtype.q), attn_dtype_name(c.dtype.kv), c.o.name, c.shape->name,
                 c.dilation->n, c.indices != NULL ? ", sparse" : "", attn_split_name(splits[s]));
        memset(out, 0xff, bytes);
        memset(lse, 0xff, rows * sizeof *lse);
        if (answer(&c, splits[s], out, lse) == ATTN_ENOTSUP)
            continue;
        n++;
        counts->n_run[splits[s]]++;
        counts->n_dilated += splits[s] == ATTN_SPLIT_TOKENS && c.dilation->n > 0;
        counts->n_windows += splits[s] == ATTN_SPLIT_TOKENS && c.o.window_tokens > 0;
        counts->n_sparse += splits[s] == ATTN_SPLIT_TOKENS && c.indices != NULL;
        size_t at_history = 0, at_step = 0;
        for (uint32_t k = 0; k < c.n_items; k++) {
            check_item(&c, k, at_history, at_step, out, lse, what);
            at_history += c.shape->items[k].n_before;
            at_step += c.shape->items[k].n_tokens;
        }
        if (splits[s] == ATTN_SPLIT_WHOLE)
            memcpy(whole, out, bytes);
        else if (splits[s] == ATTN_SPLIT_HEADS && c.o.is_batch_invariant && n == 2 &&
                 memcmp(out, whole, bytes) != 0)
            fail_msg("%s: other bytes than in a whole pool", what);
    }
    free(out);
    free(whole);
    free(lse);
    case_close(&c);
    return n;
}

static uint32_t cards_in(const char *list)
{
    uint32_t n = 1;
    for (; *list != '\0'; list++)
        n += *list == ',';
    return n;
}

static void every_option_of_every_split_agrees_with_the_reference(void **state)
{
    (void)state;
    const char *flags[] = {"--cache.max_pools", "64", "--device.kv_memory", "192M", NULL};
    const uint32_t n = CASE_N_PRODUCT * CASE_COUNT(case_dtypes) * CASE_COUNT(case_options) *
                       CASE_COUNT(case_shapes);
    struct counts c = {0};
    if (getenv("E2E_CARDS") == NULL)
        setenv("E2E_CARDS", "0,1", 1);
    e2e_start(&d, flags);
    MUST_OK(attn_client_open(d.url, NULL, TIMEOUT_US, &client));
    for (uint32_t i = offset; i < n; i += every)
        if (case_fits(&case_geometries[i % CASE_N_PRODUCT],
                      case_dtypes[i / CASE_N_PRODUCT % CASE_COUNT(case_dtypes)]))
            assert_true(run_case(i, &c) > 0);
    printf("%u cases whole, %u by heads, %u by tokens, of these %u dilated, %u with windows, %u "
           "sparse\n",
           c.n_run[ATTN_SPLIT_WHOLE], c.n_run[ATTN_SPLIT_HEADS], c.n_run[ATTN_SPLIT_TOKENS],
           c.n_dilated, c.n_windows, c.n_sparse);
    assert_true(c.n_run[ATTN_SPLIT_WHOLE] > 0);
    assert_true(c.n_run[ATTN_SPLIT_HEADS] > 0);
    /* tokens are split over 2, 4 or 8 */
    const uint32_t n_cards = cards_in(getenv("E2E_CARDS"));
    const bool is_by_tokens = (n_cards & (n_cards - 1)) == 0;
    assert_int_equal(c.n_run[ATTN_SPLIT_TOKENS] > 0, is_by_tokens);
    assert_int_equal(c.n_dilated > 0, is_by_tokens);
    assert_int_equal(c.n_windows > 0, is_by_tokens);
    assert_int_equal(c.n_sparse > 0, is_by_tokens);
    attn_client_close(client);
    e2e_stop(&d);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_option_of_every_split_agrees_with_the_reference),
    };
    if (argc > 1)
        every = (uint32_t)strtoul(argv[1], NULL, 10);
    if (argc > 2)
        offset = (uint32_t)strtoul(argv[2], NULL, 10);
    if (every == 0) {
        fprintf(stderr, "EVERY must be 1 or more\n");
        return 2;
    }
    rng = 0x9e3779b97f4a7c15u * (offset + 1);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
