/* test_gpu.c: what a gpu backend must do beyond the option product that all backends share: large
 * pools and large batches, batches in flight, the same bytes twice, refusals in words.
 *
 * Usage: test_gpu [NAME [TESTS]], NAME cuda (the default), hip or a module of the executor; TESTS a
 * pattern of the tests to run; exit 77 where there is no device.
 */
#include "kernels/kv_layout.h"
#include "tests/gpu/rig.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static const struct backend_ops *gpu;
static uint64_t seed;

static const struct attn_layer_spec plain[2] = {{.scale = 0.125f}, {.scale = 0.1f}};

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
    assert_ptr_equal(gpu->poll(r.b, RIG_POLL_NS), &batches[0]);
    assert_int_equal(gpu->submit(r.b, &batches[2]), ATTN_OK);
    assert_ptr_equal(gpu->poll(r.b, RIG_POLL_NS), &batches[1]);
    assert_ptr_equal(gpu->poll(r.b, RIG_POLL_NS), &batches[2]);
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

/* Three batches of all sequences: 20 tokens, the next one, that one again and another. Up to
 * `depth` are in flight; the last two are large enough that their q, k and v come while the one
 * before is computed. */
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
        assert_ptr_equal(r->ops->poll(r->b, RIG_POLL_NS), &batches[n_back]);
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

int main(int argc, char **argv)
{
    int code = rig_start(argc, argv, &gpu, &seed);
    if (code != 0)
        return code;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(refusals_name_field_and_value),
        cmocka_unit_test(two_batches_may_be_in_flight_and_come_back_in_order),
        cmocka_unit_test(large_batches_in_flight_agree_with_the_cpu_backend),
        cmocka_unit_test(the_same_step_twice_gives_the_same_bytes),
        cmocka_unit_test(pools_beyond_65536_blocks_and_4_gib_hold_their_tokens),
        cmocka_unit_test(a_batch_may_carry_more_patches_than_its_staging),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
