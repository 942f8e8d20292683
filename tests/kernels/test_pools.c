/* test_pools.c: any backend's pools: what is refused, and the bytes of their blocks: written and
 * read back, moved, exported, cleared, and let go by windows.
 *
 *     test_pools [NAME [EVERY [OFFSET [TESTS]]]]
 *
 * As test_backend; EVERY and OFFSET choose nothing here.
 */
#include "tests/kernels/check.h"

#include "kernels/cpu/cpu.h"
#include "kernels/moves.h"

#include <float.h>
#include <inttypes.h>
#include <math.h>
#include <sched.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
// clang-format off
#include <cmocka.h>
// clang-format on

static uint32_t every = 1, offset;
static struct check check;

/* --- what is refused ------------------------------------------------------------------------- */

static void a_geometry_out_of_range_is_refused_by_field_and_value(void **state)
{
    (void)state;
    struct attn_layer_spec spec = {.scale = 1};
    struct backend_pool_config good = case_config(&case_geometries[0], case_dtypes[0],
                                                  &case_options[CASE_PLAIN]),
                               bad;
    good.num_layers = good.n_blocks = good.n_table_rows = good.max_row_blocks = 1;
    good.layers = &spec;
    assert_int_equal(check.ops->pool_check(check.b, &good), ATTN_OK);
#define REFUSES(field, value, text)                                                                \
    bad = good;                                                                                    \
    bad.field = value;                                                                             \
    assert_int_equal(check.ops->pool_check(check.b, &bad), ATTN_EINVAL);                           \
    assert_non_null(strstr(check.ops->last_error(check.b), #field));                               \
    assert_non_null(strstr(check.ops->last_error(check.b), text))
    REFUSES(num_layers, 0, "0");
    REFUSES(num_q_heads, 9, "9");
    REFUSES(num_kv_heads, 0, "0");
    REFUSES(head_dim_k, 100, "100");
    REFUSES(head_dim_v, 520, "must be 8 to 512");
    REFUSES(block_tokens, 4, "4");
    REFUSES(block_tokens, 48, "48");
    REFUSES(n_blocks, 0, "0");
    REFUSES(q_dtype, ATTN_INT8, "int8");
    REFUSES(kv_dtype, ATTN_F32, "f32");
    REFUSES(kv_dtype, (attn_dtype)8, "must be bf16 (as q_dtype), fp8_e4m3, int8, nvfp4 or mxfp4");
    good.kv_dtype = ATTN_NVFP4;
    REFUSES(head_dim_k, 104, "104, not a multiple of 16 with kv_dtype nvfp4");
    REFUSES(head_dim_v, 24, "24, not a multiple of 16 with kv_dtype nvfp4");
    good.kv_dtype = ATTN_MXFP4;
    REFUSES(head_dim_v, 80, "80, not a multiple of 32 with kv_dtype mxfp4");
    good.kv_dtype = ATTN_BF16;
    good.is_v_in_k = true;
    good.head_dim_k = BACKEND_MAX_LATENT_K;
    good.head_dim_v = BACKEND_MAX_HEAD_DIM;
    REFUSES(head_dim_k, 584, "must be 8 to 576");
    REFUSES(head_dim_k, 504, "head_dim_v is 512, more than head_dim_k 504 with V in K");
    REFUSES(head_dim_v, 520, "must be 8 to 512");
#undef REFUSES
}

/* What would make NaN of finite values, or what rounding would spoil. */
static void a_layers_setting_out_of_range_is_refused_by_field_value_and_bound(void **state)
{
    static const struct {
        float scale, soft_cap, sink, slope;
        const char *says; /* NULL: it is taken */
    } cases[] = {
        {1, 0, 0, 0, NULL},
        {1e4f, 1e3f, -INFINITY, -1e20f, NULL},
        {1e-30f, 1e-6f, 1e20f, 1e20f, NULL},
        {0, 0, 0, 0, "layers[0].scale is 0, must be above 0, 10000 at most"},
        {NAN, 0, 0, 0, "layers[0].scale is nan"},
        {FLT_MAX, 0, 0, 0, "layers[0].scale is 3.40282e+38, must be above 0, 10000 at most"},
        {1, -1, 0, 0, "layers[0].soft_cap is -1, must be 0 (none) or 1e-06 to 1000"},
        {1, 1e-7f, 0, 0, "layers[0].soft_cap is 1e-07, must be"},
        {1, FLT_MAX, 0, 0, "layers[0].soft_cap is 3.40282e+38, must be 0 (none) or"},
        {1, NAN, 0, 0, "layers[0].soft_cap is nan"},
        {1, 0, FLT_MAX, 0, "layers[0].sink_logits[7] is 3.40282e+38, must be -1e+20 to 1e+20"},
        {1, 0, -FLT_MAX, 0, "layers[0].sink_logits[7] is -3.40282e+38, must be"},
        {1, 0, INFINITY, 0, "layers[0].sink_logits[7] is inf"},
        {1, 0, 0, FLT_MAX, "layers[0].alibi_slopes[7] is 3.40282e+38, must be -1e+20 to 1e+20"},
        {1, 0, 0, -INFINITY, "layers[0].alibi_slopes[7] is -inf"},
    };
    (void)state;
    struct backend_pool_config c =
        case_config(&case_geometries[0], case_dtypes[0], &case_options[CASE_PLAIN]);
    c.num_layers = c.n_blocks = c.n_table_rows = c.max_row_blocks = 1;
    for (size_t i = 0; i < CASE_COUNT(cases); i++) {
        float sinks[8] = {0}, slopes[8] = {0};
        sinks[7] = cases[i].sink;
        slopes[7] = cases[i].slope;
        struct attn_layer_spec spec = {.scale = cases[i].scale,
                                       .soft_cap = cases[i].soft_cap,
                                       .sink_logits = sinks,
                                       .alibi_slopes = slopes};
        c.layers = &spec;
        attn_status st = check.ops->pool_check(check.b, &c);
        assert_int_equal(st, cases[i].says == NULL ? ATTN_OK : ATTN_EINVAL);
        if (cases[i].says != NULL && strstr(check.ops->last_error(check.b), cases[i].says) == NULL)
            fail_msg("%s does not say %s", check.ops->last_error(check.b), cases[i].says);
    }
}

static void a_pool_larger_than_the_memory_is_refused_with_both_sizes(void **state)
{
    (void)state;
    struct attn_layer_spec spec = {.scale = 1};
    struct backend_pool_config c =
        case_config(&case_geometries[0], case_dtypes[0], &case_options[CASE_PLAIN]);
    struct backend_pool *pool = NULL;
    char size[32];
    c.num_layers = c.n_table_rows = c.max_row_blocks = 1;
    c.n_blocks = 1 << 20;
    c.layers = &spec;
    assert_int_equal(check.ops->pool_open(check.b, &c, &pool), ATTN_ENOMEM);
    assert_null(pool);
    snprintf(size, sizeof size, "%" PRIu64, check.ops->pool_bytes(check.b, &c));
    assert_non_null(strstr(check.ops->last_error(check.b), size));
}

/* --- blocks, and moves of them ---------------------------------------------------------------- */

static void blocks_are_read_back_as_written(void **state)
{
    (void)state;
    assert_int_equal(check_begin(&check, &case_geometries[0], case_dtypes[0], &case_options[0], 1),
                     ATTN_OK);
    uint64_t bytes = kv_layout_of(&check.config).block_bytes;
    uint8_t *in = malloc(bytes), *out = malloc(bytes);
    for (uint64_t i = 0; i < bytes; i++)
        in[i] = (uint8_t)(check_random(&check, 255) + 1);
    memset(out, 0xff, bytes);
    assert_int_equal(check.ops->block_write(check.pool, 5, in), ATTN_OK);
    assert_int_equal(check.ops->block_read(check.pool, 5, out), ATTN_OK);
    assert_memory_equal(in, out, bytes);
    assert_int_equal(check.ops->block_read(check.pool, 6, out), ATTN_OK);
    for (uint64_t i = 0; i < bytes; i++)
        assert_int_equal(out[i], 0xff);
    assert_int_equal(check.ops->block_read(check.pool, check.config.n_blocks, out), ATTN_EINVAL);
    free(in);
    free(out);
}

static void moves_done(struct backend_moves *m)
{
    atomic_store((_Atomic bool *)m->user, true);
}

static attn_status move_all(struct backend_move *list, uint32_t n)
{
    _Atomic bool is_done = false;
    struct backend_moves m = {.list = list, .n = n, .done = moves_done, .user = (void *)&is_done};
    attn_status st = check.ops->moves_submit(check.b, &m);
    while (st == ATTN_OK && !atomic_load(&is_done))
        sched_yield();
    for (uint32_t i = 0; st == ATTN_OK && i < n; i++)
        st = list[i].status;
    return st;
}

static struct backend_move move_of(uint32_t block, uint8_t *bytes, bool is_in)
{
    const uint64_t n_bytes = kv_layout_of(&check.config).block_bytes;
    return (struct backend_move){.pool = check.pool,
                                 .block = block,
                                 .bytes = bytes,
                                 .n_bytes = n_bytes,
                                 .is_in = is_in,
                                 .sum = {~0ull, ~0ull},
                                 .status = ATTN_EINTERNAL};
}

/* n blocks out and back in to others, some of them neighbours on both sides, some on neither. */
static void move_out_and_in(uint32_t n, uint32_t step)
{
    const uint64_t bytes = kv_layout_of(&check.config).block_bytes;
    struct backend_move *list = calloc(n, sizeof *list);
    uint64_t sum[2];
    void *memory;
    uint8_t *in = malloc(n * bytes), *back = malloc(bytes);
    assert_int_equal(check.ops->host_alloc(check.b, n * bytes, &memory), ATTN_OK);
    uint8_t *host = memory;
    for (uint64_t i = 0; i < n * bytes; i++)
        in[i] = (uint8_t)check_random(&check, 256);
    for (uint32_t i = 0; i < n; i++) {
        assert_int_equal(check.ops->block_write(check.pool, i, in + i * bytes), ATTN_OK);
        list[i] = move_of(i, host + i * step % n * bytes, false);
    }
    memset(host, 0xee, n * bytes);
    assert_int_equal(move_all(list, n), ATTN_OK);
    for (uint32_t i = 0; i < n; i++) {
        assert_memory_equal(list[i].bytes, in + i * bytes, bytes);
        moves_sum(in + i * bytes, bytes, sum);
        assert_memory_equal(list[i].sum, sum, sizeof sum);
        list[i] = move_of((i + 1) % n, list[i].bytes, true);
    }
    assert_int_equal(move_all(list, n), ATTN_OK);
    for (uint32_t i = 0; i < n; i++) {
        moves_sum(in + i * bytes, bytes, sum);
        assert_memory_equal(list[i].sum, sum, sizeof sum);
        assert_int_equal(check.ops->block_read(check.pool, (i + 1) % n, back), ATTN_OK);
        assert_memory_equal(back, in + i * bytes, bytes);
    }
    list[n - 1].block = check.config.n_blocks;
    assert_int_equal(move_all(list, n), ATTN_EINVAL);
    check.ops->host_free(check.b, host, n * bytes);
    free(list);
    free(in);
    free(back);
}

static void blocks_move_out_and_in_with_their_checksums(void **state)
{
    (void)state;
    assert_int_equal(check_begin(&check, &case_geometries[0], case_dtypes[0], &case_options[0], 1),
                     ATTN_OK);
    move_out_and_in(6, 1);
}

/* More of the small ones than are moved together. */
static void blocks_of_every_size_move(void **state)
{
    (void)state;
    uint32_t n_run = 0;
    for (uint32_t i = 0; i < 2 * CASE_N_PRODUCT; i++) {
        const struct case_geometry *g = &case_geometries[i / 2];
        const struct case_dtype d = case_dtypes[i % 2 ? CASE_BF16_INT8 : CASE_BF16];
        if (check_begin(&check, g, d, &case_options[0], CHECK_MAX_SEQS) != ATTN_OK) {
            assert_non_null(check.b);
            continue;
        }
        const uint64_t bytes = kv_layout_of(&check.config).block_bytes;
        const uint32_t n = bytes < 16384 && check.config.n_blocks > 67 ? 67 : 7;
        move_out_and_in(n, i % 3 + 1);
        n_run++;
    }
    assert_true(n_run > 0);
}

/* Blocks that are neighbours on the device, and in host memory that was page-locked in two
 * pieces. */
static void move_over_a_seam(uint64_t half, uint64_t bytes)
{
    enum { N = 8, PAGE = 4096 };
    struct backend_move list[N];
    uint8_t *in = malloc(N * bytes), *host = NULL, *back = malloc(bytes);
    assert_int_equal(posix_memalign((void **)&host, PAGE, N * bytes), 0);
    for (int i = 0; i < 2; i++)
        assert_int_equal(check.ops->host_register(check.b, host + i * half, half), ATTN_OK);
    for (uint64_t i = 0; i < N * bytes; i++)
        in[i] = (uint8_t)check_random(&check, 256);
    memset(host, 0xee, N * bytes);
    for (uint32_t i = 0; i < N; i++) {
        assert_int_equal(check.ops->block_write(check.pool, i, in + i * bytes), ATTN_OK);
        list[i] = move_of(i, host + i * bytes, false);
    }
    assert_int_equal(move_all(list, N), ATTN_OK);
    assert_memory_equal(host, in, N * bytes);
    for (uint32_t i = 0; i < N; i++) {
        memset(back, 0xdd, bytes);
        assert_int_equal(check.ops->block_write(check.pool, i, back), ATTN_OK);
        list[i] = move_of(i, host + i * bytes, true);
    }
    assert_int_equal(move_all(list, N), ATTN_OK);
    for (uint32_t i = 0; i < N; i++) {
        assert_int_equal(check.ops->block_read(check.pool, i, back), ATTN_OK);
        assert_memory_equal(back, in + i * bytes, bytes);
    }
    for (int i = 0; i < 2; i++)
        check.ops->host_unregister(check.b, host + i * half, half);
    free(host);
    free(in);
    free(back);
}

static void blocks_cross_a_seam_of_host_memory(void **state)
{
    (void)state;
    uint32_t n_run = 0;
    for (uint32_t i = 0; i < CASE_N_PRODUCT; i++) {
        if (check_begin(&check, &case_geometries[i], case_dtypes[CASE_BF16], &case_options[0],
                        CHECK_MAX_SEQS) != ATTN_OK)
            continue;
        const uint64_t bytes = kv_layout_of(&check.config).block_bytes;
        if (check.config.n_blocks < 8 || 4 * bytes % 4096 != 0)
            continue;
        move_over_a_seam(4 * bytes, bytes);
        n_run++;
    }
    assert_true(n_run > 0);
}

static void blocks_come_from_the_pool_of_another_backend(void **state)
{
    enum { N = 5 };
    struct backend_move list[N];
    struct backend_config config = {.kv_bytes = 64 << 20, .max_batch_items = 4};
    struct backend *other = NULL;
    struct backend_pool *from = NULL;
    (void)state;
    assert_int_equal(check_begin(&check, &case_geometries[0], case_dtypes[0], &case_options[0], 1),
                     ATTN_OK);
    uint64_t bytes = kv_layout_of(&check.config).block_bytes;
    config.max_batch_tokens = 64;
    config.n_threads = 1;
    config.device_index = 0;
    config.import_fd = -1;
    assert_int_equal(check.ops->open(&config, &other), ATTN_OK);
    assert_int_equal(check.ops->pool_open(other, &check.config, &from), ATTN_OK);
    uint8_t *in = malloc(N * bytes), *back = malloc(bytes);
    for (uint64_t i = 0; i < N * bytes; i++)
        in[i] = (uint8_t)check_random(&check, 256);
    for (uint32_t i = 0; i < N; i++) {
        assert_int_equal(check.ops->block_write(from, i, in + i * bytes), ATTN_OK);
        list[i] = (struct backend_move){.pool = check.pool,
                                        .block = N - 1 - i,
                                        .is_in = true,
                                        .peer = from,
                                        .peer_block = i,
                                        .n_bytes = bytes,
                                        .status = ATTN_EINTERNAL};
    }
    assert_int_equal(move_all(list, N), ATTN_OK);
    for (uint32_t i = 0; i < N; i++) {
        assert_int_equal(check.ops->block_read(check.pool, N - 1 - i, back), ATTN_OK);
        assert_memory_equal(back, in + i * bytes, bytes);
        assert_int_equal(check.ops->block_read(from, i, back), ATTN_OK);
        assert_memory_equal(back, in + i * bytes, bytes);
    }
    list[1].peer_block = check.config.n_blocks;
    assert_int_equal(move_all(list, N), ATTN_EINVAL);
    check.ops->pool_close(from);
    check.ops->close(other);
    free(in);
    free(back);
}

/* --- memory that others have next ------------------------------------------------------------- */

/* Exported memory outlives the backend; an import finds the bytes in pools opened alike. */
static void exported_memory_is_found_again_by_an_import(void **state)
{
    (void)state;
    int fd = -1;
    struct check_small s;
    check_small_open(&check, &s, 8 << 20, 8);
    struct backend_pool *first, *second;
    attn_status st = check.ops->export_memory(s.b, &fd);
    if (st == ATTN_ENOTSUP) {
        check_small_close(&check, &s);
        skip();
    }
    assert_int_equal(st, ATTN_OK);
    assert_int_equal(check.ops->pool_open(s.b, &s.pool, &first), ATTN_OK);
    assert_int_equal(check.ops->pool_open(s.b, &s.pool, &second), ATTN_OK);
    assert_int_equal(check.ops->block_write(second, 7, s.in), ATTN_OK);
    uint64_t place = check.ops->pool_place(second);
    check.ops->close(s.b);

    s.config.import_fd = fd;
    assert_int_equal(check.ops->open(&s.config, &s.b), ATTN_OK);
    s.pool.kv_place = place; /* without the first: a pool may have been dropped */
    assert_int_equal(check.ops->pool_open(s.b, &s.pool, &second), ATTN_OK);
    assert_int_equal(check.ops->pool_open(s.b, &s.pool, &first), ATTN_ENOMEM); /* it is taken */
    check_small_blocks(&check, &s, second, 7, 8, s.in);
    check_small_close(&check, &s);
}

/* A closed pool's memory is the next pool's, as zeros; its neighbours keep theirs. */
static void a_closed_pools_memory_is_found_by_the_next(void **state)
{
    (void)state;
    struct check_small s;
    struct backend_pool *pools[3];
    check_small_open(&check, &s, 4 << 20, 4);
    for (int i = 0; i < 3; i++) {
        assert_int_equal(check.ops->pool_open(s.b, &s.pool, &pools[i]), ATTN_OK);
        for (uint32_t k = 0; k < 4; k++)
            assert_int_equal(check.ops->block_write(pools[i], k, s.in), ATTN_OK);
    }
    for (int round = 0; round < 3; round++) {
        uint64_t place = check.ops->pool_place(pools[1]);
        check.ops->pool_close(pools[1]);
        assert_int_equal(check.ops->pool_open(s.b, &s.pool, &pools[1]), ATTN_OK);
        assert_int_equal(check.ops->pool_place(pools[1]), place); /* the first gap that fits */
        check_small_blocks(&check, &s, pools[1], 0, 4, s.zeros);
        for (uint32_t k = 0; k < 4; k++)
            assert_int_equal(check.ops->block_write(pools[1], k, s.in), ATTN_OK);
    }
    for (int i = 0; i < 3; i += 2)
        check_small_blocks(&check, &s, pools[i], 0, 4, s.in);
    check_small_close(&check, &s);
}

/* --- blocks that windows have let go: they are other sequences' ------------------------------- */

static const uint32_t windowed[] = {CASE_WINDOW, CASE_WINDOW_OF_ONE, CASE_WINDOW_AND_SINKS,
                                    CASE_ALL};
/* Blocks that fill pages, several to a tile of the cpu's. */
static const struct case_geometry paged = {"blocks of 8, dim 256", 4, 2, 256, 256, 8, false};

/* Sequences that have let blocks go, and a step of each. */
static void begin_windowed(uint32_t options, uint32_t dtype, struct check_item step[3])
{
    static const struct case_item items[3] = {{230, 1}, {90, 20}, {167, 3}};
    struct check_item history[3];
    assert_int_equal(check_begin(&check, &paged, case_dtypes[dtype], &case_options[options], 3),
                     ATTN_OK);
    for (uint32_t i = 0; i < 3; i++) {
        history[i] =
            (struct check_item){.seq = i, .n_tokens = items[i].n_before, .flags = BACKEND_APPEND};
        step[i] = (struct check_item){.seq = i,
                                      .pos = items[i].n_before,
                                      .n_tokens = items[i].n_tokens,
                                      .flags = BACKEND_APPEND | BACKEND_ATTEND};
    }
    assert_true(check_submit(&check, history, 3));
}

/* It would be a data race: they may be written to on other threads. Nothing can be read there. */
static void the_cpu_reads_no_block_that_a_window_has_let_go(void **state)
{
    (void)state;
    if (strcmp(check.name, "cpu") != 0)
        skip();
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    for (uint32_t i = 0; i < CASE_COUNT(windowed); i++)
        for (uint32_t dtype = i; dtype < CASE_COUNT(case_dtypes); dtype += 4) {
            struct check_item step[3];
            begin_windowed(windowed[i], dtype, step);
            const uint64_t bytes = check.pool->geometry.layout.block_bytes;
            uintptr_t first = (uintptr_t)check.pool->base + check.foreign_block * bytes;
            uintptr_t end = (first + bytes) / page * page;
            first = (first + page - 1) / page * page;
            assert_true(end - first > bytes / 2);
            assert_int_equal(mprotect((void *)first, end - first, PROT_NONE), 0);
            assert_true(check_submit(&check, step, 3));
            assert_int_equal(mprotect((void *)first, end - first, PROT_READ | PROT_WRITE), 0);
            assert_true(check_outputs(&check, step, 3));
        }
}

/* Whatever a kernel reads there, before, after or in the middle of a write, does not matter. */
static void blocks_that_windows_have_let_go_may_be_written_meanwhile(void **state)
{
    enum { N = 400 };
    (void)state;
    for (uint32_t i = 0; i < CASE_COUNT(windowed); i++)
        for (uint32_t dtype = i; dtype < CASE_COUNT(case_dtypes); dtype += 4) {
            struct check_item step[3];
            struct backend_move list[N];
            begin_windowed(windowed[i], dtype, step);
            const uint64_t bytes = kv_layout_of(&check.config).block_bytes;
            void *host;
            assert_int_equal(check.ops->host_alloc(check.b, 2 * bytes, &host), ATTN_OK);
            memset(host, 0xff, bytes);
            for (uint64_t k = 0; k < bytes; k++)
                ((uint8_t *)host)[bytes + k] = (uint8_t)check_random(&check, 256);
            for (uint32_t k = 0; k < N; k++)
                list[k] = move_of(check.foreign_block, (uint8_t *)host + k % 2 * bytes, true);
            _Atomic bool is_done = false;
            struct backend_moves moves = {
                .list = list, .n = N, .done = moves_done, .user = (void *)&is_done};
            assert_int_equal(check.ops->moves_submit(check.b, &moves), ATTN_OK);
            for (uint32_t k = 0; k < 2 || (k < 8 && !atomic_load(&is_done)); k++) {
                assert_true(check_submit(&check, step, 3));
                assert_true(check_outputs(&check, step, 3));
                assert_true(check_again(&check, step, 3));
            }
            while (!atomic_load(&is_done))
                sched_yield();
            check.ops->host_free(check.b, host, 2 * bytes);
        }
}

int main(int argc, char **argv)
{
    int rc = check_start(&check, argc, argv, 20251, &every, &offset);
    if (rc != 0)
        return rc;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(blocks_are_read_back_as_written),
        cmocka_unit_test(blocks_move_out_and_in_with_their_checksums),
        cmocka_unit_test(blocks_of_every_size_move),
        cmocka_unit_test(blocks_cross_a_seam_of_host_memory),
        cmocka_unit_test(blocks_come_from_the_pool_of_another_backend),
        cmocka_unit_test(a_geometry_out_of_range_is_refused_by_field_and_value),
        cmocka_unit_test(a_layers_setting_out_of_range_is_refused_by_field_value_and_bound),
        cmocka_unit_test(a_pool_larger_than_the_memory_is_refused_with_both_sizes),
        cmocka_unit_test(exported_memory_is_found_again_by_an_import),
        cmocka_unit_test(a_closed_pools_memory_is_found_by_the_next),
        cmocka_unit_test(the_cpu_reads_no_block_that_a_window_has_let_go),
        cmocka_unit_test(blocks_that_windows_have_let_go_may_be_written_meanwhile),
    };
    return cmocka_run_group_tests(tests, NULL, check_close);
}
