/* test_gpu.c: what a gpu backend must do beyond the option product that all backends share: the same
 * as the cpu backend over long random histories, large pools, large batches, memory that outlives its
 * maker, refusals in words. Usage: test_gpu [NAME [TESTS]], NAME cuda (the default), hip or a module of
 * the executor; TESTS a pattern of the tests to run; exit 77 where there is no device.
 */
#include "kernels/kv_layout.h"
#include "kernels/reference.h"
#include "tests/gpu/rig.h"

#include <errno.h>
#include <math.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

static const char *backend_name = "cuda";
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

static void the_same_step_twice_gives_the_same_bytes(void **state)
{
    (void)state;
    for (int is_fixed = 0; is_fixed < 2; is_fixed++) {
        struct backend_pool_config c = rig_config(plain, 2);
        c.head_dim_k = c.head_dim_v = 128;
        c.max_row_blocks = 256;
        c.n_blocks = 2048;
        c.is_batch_invariant = is_fixed;
        static struct rig r;
        rig_open(&r, gpu, &c, 0, -1);
        uint64_t s = seed;
        const uint32_t lens[] = {1, 17, 900, 3000, 64};
        for (uint32_t i = 0; i < 5; i++) {
            rig_begin(&r);
            rig_step(&r, i, 0, 0, lens[i], BACKEND_APPEND, &s);
            rig_run(&r);
        }
        rig_begin(&r);
        for (uint32_t i = 0; i < 5; i++)
            rig_step(&r, i, 0, lens[i], i == 2 ? 40 : 1, BACKEND_APPEND | BACKEND_ATTEND, &s);
        rig_run(&r);
        size_t bytes = r.memory_used;
        char *first = malloc(bytes);
        memcpy(first, r.memory, bytes);
        for (uint32_t i = 0; i < 5; i++)
            memset(r.items[i].out, 0xff, (size_t)r.items[i].n_tokens * 8 * 128 * 2);
        r.n_patches = r.n_copies = 0;
        rig_run(&r);
        assert_memory_equal(first, r.memory, bytes);

        if (is_fixed) { /* each alone, too */
            struct backend_item all[5];
            memcpy(all, r.items, sizeof all);
            for (uint32_t i = 0; i < 5; i++) {
                memset(all[i].out, 0xff, (size_t)all[i].n_tokens * 8 * 128 * 2);
                r.items[0] = all[i];
                r.n_items = 1;
                rig_run(&r);
            }
            assert_memory_equal(first, r.memory, bytes);
        }
        free(first);
        rig_close(&r);
    }
}

static void pools_beyond_65536_blocks_and_4_gib_hold_their_tokens(void **state)
{
    (void)state;
    struct backend_pool_config c = rig_config(plain, 1);
    c.num_q_heads = 16;
    c.num_kv_heads = 8;
    c.head_dim_k = c.head_dim_v = 128; /* 64 KiB a block */
    c.n_blocks = 140000;
    for (int kind = 0; kind < 2; kind++) {
        c.kv_dtype = kind ? ATTN_FP8_E4M3 : ATTN_BF16;
        assert_true(gpu->pool_bytes(NULL, &c) > (uint64_t)1 << 32);
        struct backend_pool_config small = c;
        small.n_blocks = 256;
        static struct rig a, b;
        rig_open(&a, gpu, &c, 0, -1);
        rig_open(&b, gpu, &small, 0, -1);
        a.first_block = c.n_blocks - 256;
        uint64_t sa = seed, sb = seed;
        for (int i = 0; i < 6; i++) {
            rig_begin(&a);
            rig_begin(&b);
            for (uint32_t s = 0; s < 4; s++) {
                uint32_t n = i == 0 ? 100 + s : 1 + s * 7;
                rig_step(&a, s, 0, a.seqs[s].len[0], n, 3, &sa);
                rig_step(&b, s, 0, b.seqs[s].len[0], n, 3, &sb);
            }
            rig_run(&a);
            rig_run(&b);
            assert_int_equal(a.memory_used, b.memory_used);
            assert_memory_equal(a.memory, b.memory, a.memory_used);
        }
        /* and a copy from the last blocks: a fork, then a write into its shared block */
        rig_begin(&a);
        rig_begin(&b);
        rig_fork(&a, 1, 9, 90);
        rig_fork(&b, 1, 9, 90);
        rig_step(&a, 9, 0, 90, 2, 3, &sa);
        rig_step(&b, 9, 0, 90, 2, 3, &sb);
        assert_int_equal(a.n_copies, 1);
        rig_run(&a);
        rig_run(&b);
        assert_memory_equal(a.memory, b.memory, a.memory_used);
        rig_close(&a);
        rig_close(&b);
    }
}

static void a_batch_may_carry_more_patches_than_its_staging(void **state)
{
    (void)state;
    struct backend_pool_config c = rig_config(plain, 1);
    c.num_q_heads = c.num_kv_heads = 1;
    c.max_row_blocks = 8192;
    c.n_blocks = 8300;
    static struct rig r;
    rig_open(&r, gpu, &c, 0, -1);
    uint64_t s = seed;
    const uint32_t len = 8000 * 16;
    for (uint32_t pos = 0; pos < len; pos += 4000) {
        rig_begin(&r);
        rig_step(&r, 0, 0, pos, 4000, BACKEND_APPEND, &s);
        rig_run(&r);
    }
    rig_begin(&r);
    for (uint32_t to = 1; to <= 12; to++)
        rig_fork(&r, 0, to, len);
    assert_true(r.n_patches > 90000);
    struct backend_item *it[13];
    uint64_t first = s;
    for (uint32_t to = 0; to <= 12; to++) {
        uint64_t same = first; /* the same q for all */
        it[to] = rig_step(&r, to, 0, len - 1, 1, BACKEND_ATTEND, &same);
    }
    rig_run(&r);
    for (uint32_t to = 1; to <= 12; to++)
        assert_memory_equal(it[0]->out, it[to]->out, 64 * 2);
    assert_true(isfinite(it[0]->lse[0]));
    rig_close(&r);
}

static void scrubbed_blocks_read_as_zero(void **state)
{
    (void)state;
    struct backend_pool_config c = rig_config(plain, 2);
    c.n_blocks = 1000;
    static struct rig r;
    rig_open(&r, gpu, &c, 0, -1);
    uint64_t bytes = kv_layout_of(&c).block_bytes;
    unsigned char *x = malloc(bytes);
    uint32_t *all = malloc(c.n_blocks * sizeof *all);
    for (uint32_t i = 0; i < c.n_blocks; i++) {
        memset(x, (int)(i % 255) + 1, bytes);
        assert_int_equal(gpu->block_write(r.pool, i, x), ATTN_OK);
        all[i] = i;
    }
    assert_int_equal(gpu->blocks_scrub(r.pool, all + 1, c.n_blocks - 2), ATTN_OK);
    for (uint32_t i = 0; i < c.n_blocks; i++) {
        unsigned char want = i == 0 || i == c.n_blocks - 1 ? (unsigned char)(i % 255 + 1) : 0;
        assert_int_equal(gpu->block_read(r.pool, i, x), ATTN_OK);
        for (uint64_t k = 0; k < bytes; k++)
            assert_int_equal(x[k], want);
    }
    free(x);
    free(all);
    rig_close(&r);
}

static void two_batches_may_be_in_flight_and_come_back_in_order(void **state)
{
    (void)state;
    struct backend_pool_config c = rig_config(plain, 1);
    static struct rig r;
    rig_open(&r, gpu, &c, 0, -1);
    uint64_t s = seed;
    rig_begin(&r);
    struct backend_batch batches[3];
    struct backend_item items[3];
    for (uint32_t i = 0; i < 3; i++) {
        uint32_t from = r.n_patches;
        items[i] = *rig_step(&r, 0, 0, r.seqs[0].len[0], 20, 3, &s);
        batches[i] = (struct backend_batch){.pool = r.pool,
                                            .items = &items[i],
                                            .n_items = 1,
                                            .patches = r.patches + from,
                                            .n_patches = r.n_patches - from};
    }
    assert_int_equal(gpu->submit(r.b, &batches[0]), ATTN_OK);
    assert_int_equal(gpu->submit(r.b, &batches[1]), ATTN_OK);
    assert_int_equal(gpu->submit(r.b, &batches[2]), ATTN_EOVERLOAD);
    assert_ptr_equal(gpu->poll(r.b, 10000000000u), &batches[0]);
    assert_int_equal(gpu->submit(r.b, &batches[2]), ATTN_OK);
    assert_ptr_equal(gpu->poll(r.b, 10000000000u), &batches[1]);
    assert_ptr_equal(gpu->poll(r.b, 10000000000u), &batches[2]);
    assert_null(gpu->poll(r.b, 0));
    for (uint32_t i = 0; i < 3; i++) {
        assert_int_equal(batches[i].status, ATTN_OK);
        assert_true(batches[i].device_ns > 0);
        assert_true(batches[i].kv_bytes > 0);
        for (uint32_t k = 0; k < 20 * 8; k++)
            assert_true(isfinite(items[i].lse[k]));
    }
    rig_close(&r);
}

/* Three batches of all sequences: 20 tokens, the next one, that one again and another. Up to `depth` are in
 * flight; the last two are large enough that their q, k and v come while the one before is computed. */
static void run_three_batches(struct rig *r, uint32_t depth)
{
    enum { N_SEQS = 80, N_BATCHES = 3 };
    static const uint32_t pos[N_BATCHES] = {0, 20, 20}, n_tokens[N_BATCHES] = {20, 1, 2};
    struct backend_batch batches[N_BATCHES];
    uint64_t s = seed;
    rig_begin(r);
    for (uint32_t i = 0; i < N_BATCHES; i++) {
        uint32_t from = r->n_patches;
        for (uint32_t j = 0; j < N_SEQS; j++)
            rig_step(r, j, 0, pos[i], n_tokens[i], BACKEND_APPEND | BACKEND_ATTEND, &s);
        batches[i] = (struct backend_batch){.pool = r->pool,
                                            .items = r->items + i * N_SEQS,
                                            .n_items = N_SEQS,
                                            .patches = r->patches + from,
                                            .n_patches = r->n_patches - from};
    }
    for (uint32_t i = 0, n_back = 0; n_back < N_BATCHES; n_back++) {
        for (; i < N_BATCHES && i - n_back < depth; i++)
            assert_int_equal(r->ops->submit(r->b, &batches[i]), ATTN_OK);
        assert_ptr_equal(r->ops->poll(r->b, 10000000000u), &batches[n_back]);
        assert_int_equal(batches[n_back].status, ATTN_OK);
    }
}

static void large_batches_in_flight_agree_with_the_cpu_backend(void **state)
{
    (void)state;
    static const attn_dtype kv_dtypes[] = {ATTN_BF16, ATTN_INT8};
    for (uint32_t i = 0; i < 2; i++) {
        struct backend_pool_config c = rig_config(plain, 1);
        c.num_q_heads = 16;
        c.kv_dtype = kv_dtypes[i];
        static struct rig a, b;
        rig_open(&a, gpu, &c, 0, -1);
        rig_open(&b, backend_cpu(), &c, 0, -1);
        run_three_batches(&a, 2);
        run_three_batches(&b, 1);
        rig_compare_items(&a, &b, "large batches in flight", seed);
        rig_compare_blocks(&a, &b, "large batches in flight", seed);
        rig_close(&a);
        rig_close(&b);
    }
}

static void refusals_name_field_and_value(void **state)
{
    (void)state;
    struct backend *b = NULL;
    struct backend_config bc = {.kv_bytes = (uint64_t)1 << 50,
                                .max_batch_items = 8,
                                .max_batch_tokens = 8,
                                .import_fd = -1};
    assert_int_equal(gpu->open(&bc, &b), ATTN_ENOMEM);
    assert_non_null(strstr(gpu->last_error(b), "1125899906842624"));
    assert_non_null(strstr(gpu->last_error(b), "free"));
    gpu->close(b);
    bc.kv_bytes = 1 << 24;
    bc.device_index = 99;
    assert_int_equal(gpu->open(&bc, &b), ATTN_ENOTSUP);
    assert_non_null(strstr(gpu->last_error(b), "99"));
    gpu->close(b);
    bc.device_index = 0;
    assert_int_equal(gpu->open(&bc, &b), ATTN_OK);
    struct backend_pool_config c = rig_config(plain, 1);
    struct backend_pool *p = NULL;
    c.n_blocks = 1 << 20;
    assert_int_equal(gpu->pool_open(b, &c, &p), ATTN_ENOMEM);
    assert_non_null(strstr(gpu->last_error(b), "16777216"));
    c = rig_config(plain, 1);
    c.head_dim_k = 60;
    assert_int_not_equal(gpu->pool_check(b, &c), ATTN_OK);
    assert_non_null(strstr(gpu->last_error(b), "head_dim"));
    c = rig_config(plain, 1);
    assert_int_equal(gpu->pool_open(b, &c, &p), ATTN_OK);
    uint32_t table[1] = {c.n_blocks};
    struct backend_item it = {.flags = BACKEND_APPEND, .n_tokens = 1, .block_table = table};
    struct backend_batch batch = {.pool = p, .items = &it, .n_items = 1};
    assert_int_equal(gpu->submit(b, &batch), ATTN_EINVAL);
    assert_non_null(strstr(gpu->last_error(b), "block_table"));
    it.layer = 7;
    assert_int_equal(gpu->submit(b, &batch), ATTN_EINVAL);
    assert_non_null(strstr(gpu->last_error(b), "layer 7"));
    assert_null(gpu->poll(b, 0));
    gpu->close(b);
    gpu->close(NULL);
}

/* ---- memory that outlives its maker */

enum { kept_blocks = 64 };

static void kept_pattern(uint32_t block, unsigned char *x, uint64_t bytes)
{
    uint64_t s = 77 + block;
    for (uint64_t i = 0; i + 4 <= bytes; i += 4) {
        uint32_t u = rig_random(&s);
        memcpy(x + i, &u, 4);
    }
}

static bool fd_send(int socket, int fd)
{
    char byte = 1, space[CMSG_SPACE(sizeof fd)] = {0};
    struct iovec v = {&byte, 1};
    struct msghdr m = {
        .msg_iov = &v, .msg_iovlen = 1, .msg_control = space, .msg_controllen = sizeof space};
    struct cmsghdr *h = CMSG_FIRSTHDR(&m);
    *h = (struct cmsghdr){CMSG_LEN(sizeof fd), SOL_SOCKET, SCM_RIGHTS};
    memcpy(CMSG_DATA(h), &fd, sizeof fd);
    return sendmsg(socket, &m, 0) == 1;
}

static int fd_receive(int socket)
{
    int fd = -1;
    char byte, space[CMSG_SPACE(sizeof fd)];
    struct iovec v = {&byte, 1};
    struct msghdr m = {
        .msg_iov = &v, .msg_iovlen = 1, .msg_control = space, .msg_controllen = sizeof space};
    if (recvmsg(socket, &m, 0) != 1 || !CMSG_FIRSTHDR(&m))
        return -1;
    memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&m)), sizeof fd);
    return fd;
}

/* The child: makes memory, writes it, hands its descriptor over, waits to be killed. */
static int maker(int socket)
{
    struct backend_pool_config c = rig_config(plain, 2);
    c.n_blocks = kept_blocks;
    struct backend_config bc = {.kv_bytes = gpu->pool_bytes(NULL, &c),
                                .max_batch_items = 8,
                                .max_batch_tokens = 64,
                                .import_fd = -1};
    struct backend *b;
    struct backend_pool *p;
    uint64_t bytes = kv_layout_of(&c).block_bytes;
    unsigned char *x = malloc(bytes);
    int fd = -1;
    if (gpu->open(&bc, &b) != ATTN_OK || gpu->pool_open(b, &c, &p) != ATTN_OK)
        return 1;
    for (uint32_t i = 0; i < kept_blocks; i++) {
        kept_pattern(i, x, bytes);
        if (gpu->block_write(p, i, x) != ATTN_OK)
            return 1;
    }
    if (gpu->export_memory(b, &fd) != ATTN_OK || !fd_send(socket, fd))
        return 1;
    for (;;)
        pause();
}

static void exported_memory_outlives_a_killed_process(void **state)
{
    (void)state;
    int pair[2], status;
    assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM, 0, pair), 0);
    char number[16];
    snprintf(number, sizeof number, "%d", pair[1]);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        close(pair[0]);
        execl("/proc/self/exe", "test_gpu", backend_name, "--maker", number, (char *)NULL);
        _exit(127);
    }
    close(pair[1]);
    int fd = fd_receive(pair[0]);
    kill(child, SIGKILL);
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(fd >= 0);

    struct backend_pool_config c = rig_config(plain, 2);
    c.n_blocks = kept_blocks;
    static struct rig r;
    rig_open(&r, gpu, &c, 0, fd);
    uint64_t bytes = kv_layout_of(&c).block_bytes;
    unsigned char *x = malloc(bytes), *want = malloc(bytes);
    for (uint32_t i = 0; i < kept_blocks; i++) {
        kept_pattern(i, want, bytes);
        assert_int_equal(gpu->block_read(r.pool, i, x), ATTN_OK);
        assert_memory_equal(x, want, bytes);
    }
    free(x);
    free(want);
    rig_close(&r);
    close(fd);
    close(pair[0]);
}

int main(int argc, char **argv)
{
    char why[512];
    if (argc > 1)
        backend_name = argv[1];
    const char *given = getenv("ATTND_TEST_SEED");
    seed = given ? strtoull(given, NULL, 0) : 1;
    if (backend_load(backend_name, &gpu, why, sizeof why) != ATTN_OK) {
        printf("failed: %s\n", why);
        return 1; /* it was built: it must load where there is no driver, too */
    }
    if (argc > 3 && strcmp(argv[2], "--maker") == 0)
        return maker(atoi(argv[3]));
    if (argc > 2)
        cmocka_set_test_filter(argv[2]);
    int code = rig_find_device(gpu);
    if (code != 0)
        return code;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(refusals_name_field_and_value),
        cmocka_unit_test(scrubbed_blocks_read_as_zero),
        cmocka_unit_test(two_batches_may_be_in_flight_and_come_back_in_order),
        cmocka_unit_test(large_batches_in_flight_agree_with_the_cpu_backend),
        cmocka_unit_test(exported_memory_outlives_a_killed_process),
        cmocka_unit_test(the_same_step_twice_gives_the_same_bytes),
        cmocka_unit_test(nan_and_inf_reach_the_rows_that_see_them),
        cmocka_unit_test(random_histories_match_the_cpu_backend),
        cmocka_unit_test(pools_beyond_65536_blocks_and_4_gib_hold_their_tokens),
        cmocka_unit_test(a_batch_may_carry_more_patches_than_its_staging),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
