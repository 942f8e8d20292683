/* test_quantise.c: what an append stores in a quantised pool is reference_quantise's, bit by bit,
 * as docs/protocol/quantised.md promises to those who compare implementations.
 *
 *   test_quantise [BACKEND]
 */
#include "kernels/kv_layout.h"
#include "kernels/load.h"
#include "kernels/reference.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
// clang-format off
#include <cmocka.h>
// clang-format on

enum { TOKENS = 24, BLOCK_TOKENS = 8, HEADS = 2, MAX_DIM = BACKEND_MAX_LATENT_K, POISON = 0xa5 };

static const struct backend_ops *ops;
static struct backend *backend;
static uint64_t rng = 11;

static uint32_t random_bits(void)
{
    rng ^= rng << 13;
    rng ^= rng >> 7;
    rng ^= rng << 17;
    return (uint32_t)(rng >> 32);
}

static float unit(void)
{
    return (float)(random_bits() >> 8) / (1 << 23) - 1.0f;
}

/* Rows of every kind: ordinary, zeros, ties (the largest is the largest code, so the scale is 1),
 * very small, very large, one with a NaN, one with an inf. */
static float value_of(uint32_t row, uint32_t i)
{
    switch (row % 9) {
    case 8: /* all of FP4's ties and values, in groups of other sizes; a group of zeros */
        return i / 16 % 4 == 2
                   ? 0.0f
                   : ldexpf((float)(random_bits() % 49) / 4 - 6, (int)(i / 16 * 3) - 20);
    case 0:
        return i % 2 ? 0.0f : -0.0f;
    case 1: /* ties of int8; of e4m3 those that rounding to 3 bits makes */
        return i == 0 ? 127.0f : (float)(random_bits() % 508) / 4 - 63.5f;
    case 2:
        return i == 0 ? -448.0f
                      : ldexpf((float)(random_bits() % 64), (int)(random_bits() % 13) - 10);
    case 3:
        return unit() * 0x1p-20f;
    case 4:
        return unit() * 60000.0f;
    case 5:
        return row % 16 < 8 && i == 3 ? NAN : unit();
    case 6:
        return row % 16 < 8 && i == 5 ? -INFINITY : unit();
    default:
        return unit();
    }
}

static void check_row(const struct backend_pool_config *c, const void *sent, size_t at, uint32_t n,
                      const uint8_t *codes, const uint8_t *scales)
{
    double row[MAX_DIM];
    uint8_t want[MAX_DIM], want_scales[MAX_DIM];
    const uint32_t n_codes = kv_row_bytes(c->kv_dtype, n), per_code = n / n_codes;
    const uint32_t n_f32 = c->kv_dtype == ATTN_MXFP4 ? 0 : sizeof(float);
    float want_scale = 0, scale = 0;
    for (uint32_t i = 0; i < n; i++)
        row[i] = reference_get(c->q_dtype, sent, at + i);
    reference_quantise(c->kv_dtype, row, n, want, want_scales);
    memcpy(&want_scale, want_scales, n_f32);
    memcpy(&scale, scales, n_f32);
    if (isnan(want_scale))
        assert_true(isnan(scale));
    else
        assert_memory_equal(&scale, &want_scale, sizeof scale);
    for (uint32_t i = n_f32; i < kv_scale_bytes(c->kv_dtype, n); i++)
        if (scales[i] != want_scales[i])
            fail_msg("%s of %s: scale %u of a row of %u is %02x, should be %02x",
                     attn_dtype_name(c->kv_dtype), attn_dtype_name(c->q_dtype), i - n_f32, n,
                     scales[i], want_scales[i]);
    for (uint32_t i = 0; i < n_codes; i++)
        if (codes[i] != want[i])
            fail_msg("%s of %s: %a with scale %a is code %02x, should be %02x",
                     attn_dtype_name(c->kv_dtype), attn_dtype_name(c->q_dtype), row[i * per_code],
                     scale, codes[i], want[i]);
}

static void check_pool(attn_dtype q_dtype, attn_dtype kv_dtype, uint32_t dk, uint32_t dv,
                       bool is_v_in_k)
{
    const struct attn_layer_spec layer = {.scale = 1};
    const struct backend_pool_config c = {
        .num_layers = 1,
        .num_q_heads = HEADS,
        .num_kv_heads = HEADS,
        .head_dim_k = dk,
        .head_dim_v = dv,
        .is_v_in_k = is_v_in_k,
        .block_tokens = BLOCK_TOKENS,
        .n_blocks = TOKENS / BLOCK_TOKENS,
        .n_table_rows = 1,
        .max_row_blocks = TOKENS / BLOCK_TOKENS,
        .q_dtype = q_dtype,
        .kv_dtype = kv_dtype,
        .layers = &layer,
    };
    const struct kv_layout l = kv_layout_of(&c);
    struct backend_pool *pool;
    if (ops->pool_check(backend, &c) == ATTN_ENOTSUP)
        return;
    assert_int_equal(ops->pool_open(backend, &c, &pool), ATTN_OK);
    const size_t bytes = (size_t)TOKENS * HEADS * MAX_DIM * sizeof(float);
    void *kv[2];
    uint8_t *block = malloc(l.block_bytes);
    memset(block, POISON, l.block_bytes);
    for (uint32_t i = 0; i < c.n_blocks; i++)
        assert_int_equal(ops->block_write(pool, i, block), ATTN_OK);
    for (int is_v = 0; is_v < 2; is_v++) {
        const uint32_t n = is_v ? dv : dk;
        assert_int_equal(ops->host_alloc(backend, bytes, &kv[is_v]), ATTN_OK);
        for (uint32_t row = 0; row < TOKENS * HEADS; row++)
            for (uint32_t i = 0; i < n; i++)
                reference_put(q_dtype, kv[is_v], (size_t)row * n + i, value_of(row + 3 * is_v, i));
    }
    const uint32_t table[] = {2, 0, 1};
    const struct backend_patch patches[] = {{0, 0, 2}, {0, 1, 0}, {0, 2, 1}};
    const struct backend_item item = {
        .flags = BACKEND_APPEND, .n_tokens = TOKENS, .block_table = table, .k = kv[0], .v = kv[1]};
    struct backend_batch batch = {
        .pool = pool, .items = &item, .patches = patches, .n_items = 1, .n_patches = 3};
    assert_int_equal(ops->submit(backend, &batch), ATTN_OK);
    while (ops->poll(backend, 1000000000) == NULL)
        ;
    assert_int_equal(batch.status, ATTN_OK);
    for (uint32_t t = 0; t < TOKENS; t++) {
        if (t % BLOCK_TOKENS == 0)
            assert_int_equal(ops->block_read(pool, table[t / BLOCK_TOKENS], block), ATTN_OK);
        for (uint32_t h = 0; h < HEADS; h++) {
            const size_t row = (size_t)t * HEADS + h, slot = h * BLOCK_TOKENS + t % BLOCK_TOKENS;
            check_row(&c, kv[0], row * dk, dk, block + slot * l.k_row_bytes,
                      block + l.k_scales + slot * l.k_scale_bytes);
            if (is_v_in_k)
                continue;
            check_row(&c, kv[1], row * dv, dv, block + l.v_offset + slot * l.v_row_bytes,
                      block + l.v_scales + slot * l.v_scale_bytes);
        }
    }
    free(block);
    ops->host_free(backend, kv[0], bytes);
    ops->host_free(backend, kv[1], bytes);
}

static void codes_and_scales_are_the_references(void **state)
{
    (void)state;
    static const attn_dtype q[] = {ATTN_F32, ATTN_F16, ATTN_BF16},
                            kv[] = {ATTN_INT8, ATTN_FP8_E4M3, ATTN_NVFP4, ATTN_MXFP4};
    static const uint32_t dims[][3] = {{8, 8, 0},     {64, 128, 0}, {104, 16, 0}, {256, 256, 0},
                                       {576, 512, 1}, {80, 16, 0},  {32, 96, 0}};
    for (size_t i = 0; i < 3; i++)
        for (size_t j = 0; j < 4; j++)
            for (size_t d = 0; d < sizeof dims / sizeof *dims; d++)
                if (kv_group(kv[j]) == 0 ||
                    (dims[d][0] % kv_group(kv[j]) == 0 && dims[d][1] % kv_group(kv[j]) == 0))
                    check_pool(q[i], kv[j], dims[d][0], dims[d][1], dims[d][2] != 0);
}

int main(int argc, char **argv)
{
    const char *name = argc > 1 ? argv[1] : "cpu";
    const struct backend_config config = {
        .kv_bytes = 64 << 20, .max_batch_items = 4, .max_batch_tokens = 64, .import_fd = -1};
    const struct CMUnitTest tests[] = {cmocka_unit_test(codes_and_scales_are_the_references)};
    char why[256];
    if (backend_load(name, &ops, why, sizeof why) != ATTN_OK ||
        ops->open(&config, &backend) != ATTN_OK) {
        fprintf(stderr, "%s: no such backend here\n", name);
        return 77;
    }
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    ops->close(backend);
    return failed;
}
