/* test_gpu_values.c: what a gpu backend computes, against the cpu backend: long random histories,
 * and NaN and inf in shapes that take each of the tuned kernels. Usage as test_gpu.
 */
#include "kernels/reference.h"
#include "tests/gpu/rig.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>

#include <cmocka.h>

static const struct backend_ops *gpu;
static uint64_t seed;

static const struct attn_layer_spec plain[2] = {{.scale = 0.125f}, {.scale = 0.1f}};

/* One random batch: the same decisions on both sides, as both draw from the same state. */
static void random_batch(struct rig *r, uint64_t *state, uint32_t n_seqs, bool is_wide)
{
    rig_begin(r);
    uint32_t n_ops = is_wide ? 140 : 1 + rig_random(state) % 12, taken[RIG_MAX_SEQS] = {0};
    uint32_t max = r->config.max_row_blocks * r->config.block_tokens;
    for (uint32_t i = 0; i < n_ops; i++) {
        uint32_t s = is_wide ? i % n_seqs : rig_random(state) % n_seqs;
        uint32_t kind = rig_random(state) % 16, layer = rig_random(state) % r->config.num_layers;
        if (taken[s])
            continue;
        struct rig_seq *q = &r->seqs[s];
        uint32_t least = q->len[0], most = q->len[0];
        for (uint32_t k = 1; k < r->config.num_layers; k++) {
            least = q->len[k] < least ? q->len[k] : least;
            most = q->len[k] > most ? q->len[k] : most;
        }
        if (kind == 0 && least > 0) {
            uint32_t to = rig_random(state) % n_seqs;
            if (taken[to] || to == s)
                continue;
            taken[to] = 1; /* its items come in later batches */
            taken[s] = 1;
            rig_fork(r, s, to, 1 + rig_random(state) % least);
        } else if (kind == 1 && most > 0) {
            rig_truncate(r, s, rig_random(state) % most);
        } else if (kind == 2 && most > 0) {
            rig_drop(r, s);
        } else {
            uint32_t longest = is_wide ? 24 : 90;
            uint32_t n = 1 + rig_random(state) % (kind < 6 ? longest : 3);
            uint32_t pos = q->len[layer], flags = BACKEND_APPEND | BACKEND_ATTEND;
            if (kind == 7)
                flags = BACKEND_APPEND;
            if (kind == 8 && pos > 4) { /* written again */
                pos -= 3;
                n = 3;
            }
            if (pos + n > max)
                continue;
            taken[s] = 1;
            rig_step(r, s, layer, pos, n, flags, state);
        }
    }
}

static void walk(const struct backend_pool_config *c, uint32_t n_steps, const char *what)
{
    static struct rig a, b;
    rig_open(&a, gpu, c, 0, -1);
    rig_open(&b, backend_cpu(), c, 0, -1);
    uint64_t sa = seed, sb = seed;
    for (uint32_t i = 0; i < n_steps; i++) {
        bool is_wide = i % 8 == 5;
        uint32_t n_seqs = i % 8 == 5 ? RIG_MAX_SEQS : 12;
        random_batch(&a, &sa, n_seqs, is_wide);
        random_batch(&b, &sb, n_seqs, is_wide);
        rig_run(&a);
        rig_run(&b);
        rig_compare_items(&a, &b, what, seed);
        if (i % 16 == 15) {
            for (uint32_t s = 12; s < RIG_MAX_SEQS; s++) { /* keeps the pool from filling up */
                rig_drop(&a, s);
                rig_drop(&b, s);
            }
            rig_compare_blocks(&a, &b, what, seed);
        }
    }
    rig_close(&a);
    rig_close(&b);
}

static void random_histories_match_the_cpu_backend(void **state)
{
    (void)state;
    static const struct {
        attn_dtype q, kv;
        uint32_t q_heads, kv_heads, dk, dv, block_tokens;
    } cases[] = {
        {ATTN_BF16, ATTN_BF16, 8, 2, 64, 64, 16},
        {ATTN_F16, ATTN_F16, 8, 1, 128, 128, 32},
        {ATTN_F32, ATTN_F32, 4, 4, 80, 80, 16},
        {ATTN_BF16, ATTN_FP8_E4M3, 16, 2, 128, 128, 16},
        {ATTN_F16, ATTN_INT8, 6, 2, 96, 96, 64},
        {ATTN_BF16, ATTN_BF16, 24, 1, 192, 128, 16},
        {ATTN_BF16, ATTN_BF16, 64, 1, 256, 256, 16},
        {ATTN_F32, ATTN_INT8, 2, 1, 40, 56, 8},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct backend_pool_config c = rig_config(plain, 2);
        c.q_dtype = cases[i].q;
        c.kv_dtype = cases[i].kv;
        c.num_q_heads = cases[i].q_heads;
        c.num_kv_heads = cases[i].kv_heads;
        c.head_dim_k = cases[i].dk;
        c.head_dim_v = cases[i].dv;
        c.block_tokens = cases[i].block_tokens;
        c.n_blocks = 4096;
        char what[64];
        snprintf(what, sizeof what, "case %zu: %s/%s %u/%u heads of %u", i,
                 attn_dtype_name(c.q_dtype), attn_dtype_name(c.kv_dtype), c.num_q_heads,
                 c.num_kv_heads, c.head_dim_k);
        walk(&c, 64, what);
    }
}

/* NaN, inf or -inf (bf16), by i, into element e of K or V row (token, kv_head) of an item. */
static void poison(const struct rig *r, struct backend_item *it, uint32_t i, uint32_t token,
                   uint32_t e)
{
    static const uint16_t values[] = {0x7fc0, 0x7f80, 0xff80};
    size_t row = (size_t)token * r->config.num_kv_heads + i % r->config.num_kv_heads;
    bool is_v = i / 3 % 2 == 0;
    uint32_t dim = is_v ? r->config.head_dim_v : r->config.head_dim_k;
    ((uint16_t *)(uintptr_t)(is_v ? it->v : it->k))[row * dim + e % dim] = values[i % 3];
}

static bool is_alike(double a, double b)
{
    if (isnan(a) || isnan(b))
        return isnan(a) && isnan(b);
    if (isinf(a) || isinf(b))
        return a == b;
    return fabs(a - b) <= 3e-2 + 2e-2 * fabs(b);
}

/* Shapes that take each of the tuned kernels, with bad values that all, some and none of an item's
 * query tokens see. */
static void nan_and_inf_reach_the_rows_that_see_them(void **state)
{
    (void)state;
    static const struct {
        uint32_t q_heads, kv_heads, dim, n_items, len, ragged, n_tokens, window;
        bool is_full;
        uint32_t first; /* so many tokens the first item is longer */
    } cases[] = {
        /* those that the executor takes long for are last: planted bugs are found before them */
        {16, 4, 64, 6, 333, 3, 9, 70, false, 0}, /* clusters */
        {16, 4, 256, 6, 333, 3, 3, 20, true, 0},
        {32, 8, 64, 2, 900, 0, 1, 0, false, 0}, /* several in a launch's cluster */
        {32, 8, 128, 4, 700, 7, 3, 0, true, 0},
        {24, 1, 128, 8, 700, 1, 8, 0, false, 0}, /* 64 rows a block */
        {24, 1, 256, 8, 700, 1, 8, 200, false, 0},
        {64, 1, 256, 8, 1100, 1, 1, 200, false, 0},
        {64, 1, 128, 8, 1100, 5, 2, 0, true, 0},
        {8, 1, 128, 8, 2100, 1, 4, 0, false, 0}, /* 32 rows */
        {32, 1, 256, 8, 2090, 3, 1, 0, true, 0},
        {64, 1, 128, 1, 8200, 0, 1, 0, false, 0}, /* two clusters */
        {64, 1, 256, 3, 200, 9, 1, 0, false, 0}, /* direct, more tiles than K and V have room for */
        {8, 8, 128, 20, 200, 1, 1, 150, false, 0}, /* two short blocks a processor */
        {8, 8, 64, 120, 300, 0, 1, 0, false, 0}, /* a warp a segment */
        {8, 8, 64, 120, 300, 0, 1, 100, false, 0},
        {16, 8, 128, 40, 100, 9, 1, 0, false, 0}, /* a list */
        {16, 8, 128, 40, 100, 9, 4, 50, false, 0},
        {16, 2, 256, 40, 100, 9, 2, 30, false, 0},
        {16, 8, 128, 91, 25, 0, 1, 0, false, 8000}, /* with short items a head a warp */
        {8, 8, 64, 91, 25, 0, 3, 0, true, 8000},
        {16, 4, 128, 6, 333, 3, 5, 0, false, 0}, /* clusters, as the first */
    };
    for (uint32_t n = 0; n < sizeof cases / sizeof *cases; n++) {
        static struct rig rigs[2];
        uint32_t lens[RIG_MAX_SEQS];
        for (uint32_t i = 0; i < cases[n].n_items; i++)
            lens[i] = cases[n].len + i * cases[n].ragged + (i == 0 ? cases[n].first : 0);
        const uint32_t n_tokens = cases[n].n_tokens, window = cases[n].window;
        struct attn_layer_spec spec = {.scale = 0.1f,
                                       .window_tokens = window,
                                       .sink_tokens = window / 10,
                                       .is_full = cases[n].is_full};
        struct backend_pool_config c = rig_config(&spec, 1);
        c.num_q_heads = cases[n].q_heads;
        c.num_kv_heads = cases[n].kv_heads;
        c.head_dim_k = c.head_dim_v = cases[n].dim;
        c.max_row_blocks = 520;
        c.n_blocks = 16;
        for (uint32_t i = 0; i < cases[n].n_items; i++)
            c.n_blocks += (lens[i] + n_tokens) / c.block_tokens + 1;
        for (uint32_t side = 0; side < 2; side++) {
            struct rig *r = &rigs[side];
            uint64_t s = seed + n;
            rig_open(r, side ? backend_cpu() : gpu, &c, 0, -1);
            for (uint32_t i = 0; i < cases[n].n_items; i++) {
                uint32_t len = lens[i];
                for (uint32_t pos = 0, n_new; pos < len; pos += n_new) {
                    n_new = len - pos < 4000 ? len - pos : 4000;
                    rig_begin(r);
                    struct backend_item *it = rig_step(r, i, 0, pos, n_new, BACKEND_APPEND, &s);
                    if (window && i % 2) /* at the begin of what the last tokens see, and before */
                        poison(r, it, i / 2, len - window + n_tokens / 2 - i / 2 % 3, i * 7);
                    rig_run(r);
                }
            }
            rig_begin(r);
            for (uint32_t i = 0; i < cases[n].n_items; i++) {
                struct backend_item *it =
                    rig_step(r, i, 0, lens[i], n_tokens, BACKEND_APPEND | BACKEND_ATTEND, &s);
                if (i % 2 == 0)
                    poison(r, it, i / 2, n_tokens / 2, i * 5);
            }
            rig_run(r);
        }
        uint32_t n_bad = 0;
        for (uint32_t i = 0; i < cases[n].n_items; i++) {
            const struct backend_item *x = &rigs[0].items[i], *y = &rigs[1].items[i];
            uint32_t rows = n_tokens * c.num_q_heads;
            for (uint32_t k = 0; k < rows * c.head_dim_v; k++) {
                double u = reference_get(c.q_dtype, x->out, k),
                       v = reference_get(c.q_dtype, y->out, k);
                n_bad += !isfinite(v);
                if (!is_alike(u, v))
                    fail_msg("case %u (seed %llu): item %u: out[%u][%u] is %g, not %g", n,
                             (unsigned long long)seed, i, k / c.head_dim_v, k % c.head_dim_v, u, v);
            }
            for (uint32_t k = 0; k < rows; k++)
                if (!is_alike((double)x->lse[k], (double)y->lse[k]))
                    fail_msg("case %u (seed %llu): item %u: lse[%u] is %g, not %g", n,
                             (unsigned long long)seed, i, k, (double)x->lse[k], (double)y->lse[k]);
        }
        assert_true(n_bad > 0);
        rig_close(&rigs[0]);
        rig_close(&rigs[1]);
    }
}

int main(int argc, char **argv)
{
    int code = rig_start(argc, argv, &gpu, &seed);
    if (code != 0)
        return code;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(nan_and_inf_reach_the_rows_that_see_them),
        cmocka_unit_test(random_histories_match_the_cpu_backend),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
