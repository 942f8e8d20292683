/* bench_moves.c: how fast whole blocks go between a device and host memory, as the tiers move them:
 * groups of blocks with their checksums, by the backend's own threads. Not a test.
 *
 *   bench_moves [BACKEND]     cuda, hip or cpu; Llama-3-8B's blocks of 16 tokens, 2 MiB each
 *
 * Out, in, and both at once, of 512 MiB each way in groups of 16, as the daemon has them, no two
 * neighbours; medians of 5. The host memory was touched before, as the tiers' is once it has been
 * used. Then decode steps of 16 sequences over one layer's 4,096 tokens, alone and beside moves
 * both ways.
 */
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/kv_layout.h"
#include "kernels/load.h"
#include "proto/attn_time.h"

enum {
    N = 256,
    GROUP = 16,
    N_GROUPS = N / GROUP,
    RUNS = 5,
    SEQS = 16,
    MOST_STEPS = 100000,
};
static const uint64_t STEPS_NS = 1000000000;

struct groups {
    struct backend_moves moves[N_GROUPS];
    struct backend_move list[N];
    _Atomic uint32_t n_done;
};

static const struct backend_ops *ops;
static struct backend *b;
static struct backend_pool *pool;

static void die(const char *what)
{
    fprintf(stderr, "bench_moves: %s: %s\n", what, b == NULL ? "" : ops->last_error(b));
    exit(1);
}

static void done(struct backend_moves *m)
{
    atomic_fetch_add((_Atomic uint32_t *)m->user, 1);
}

static void begin(struct groups *g, uint8_t *host, uint32_t first_block, uint64_t bytes, bool is_in)
{
    atomic_store(&g->n_done, 0);
    for (uint32_t i = 0; i < N; i++) {
        g->list[i] = (struct backend_move){.pool = pool,
                                           .block = first_block + i * 77 % N, /* no neighbours */
                                           .bytes = host + i * bytes,
                                           .n_bytes = bytes,
                                           .is_in = is_in};
    }
    for (uint32_t i = 0; i < N_GROUPS; i++) {
        g->moves[i] = (struct backend_moves){
            .list = g->list + i * GROUP, .n = GROUP, .done = done, .user = &g->n_done};
        if (ops->moves_submit(b, &g->moves[i]) != ATTN_OK)
            die("moves_submit");
    }
}

static void await(struct groups *g)
{
    while (atomic_load(&g->n_done) < N_GROUPS)
        sched_yield();
    for (uint32_t i = 0; i < N; i++)
        if (g->list[i].status != ATTN_OK)
            die("a move failed");
}

static bool is_done(const struct groups *g)
{
    return atomic_load(&g->n_done) == N_GROUPS;
}

static int compare(const void *a, const void *c)
{
    double x = *(const double *)a, y = *(const double *)c;
    return (x > y) - (x < y);
}

static double median(double *v)
{
    qsort(v, RUNS, sizeof *v, compare);
    return v[RUNS / 2];
}

/* host NULL: nothing beside. */
static void time_steps(uint8_t *const host[2], uint64_t bytes)
{
    static struct groups out, in;
    static double us[MOST_STEPS];
    static uint32_t table[N];
    struct backend_item items[SEQS];
    struct backend_batch batch = {.pool = pool, .items = items, .n_items = SEQS};
    struct backend_patch patches[N];
    const uint64_t row_bytes = 32 * 128 * 2;
    uint32_t n = 0, n_moved = 0;
    void *memory;
    if (ops->host_alloc(b, 2 * SEQS * row_bytes, &memory) != ATTN_OK)
        die("host_alloc");
    memset(memory, 0x11, 2 * SEQS * row_bytes);
    uint8_t *q = memory;
    for (uint32_t i = 0; i < N; i++)
        table[i] = i;
    for (uint32_t i = 0; i < SEQS; i++)
        items[i] = (struct backend_item){.flags = BACKEND_ATTEND,
                                         .table_row = i,
                                         .pos = N * 16 - 1,
                                         .n_tokens = 1,
                                         .block_table = table,
                                         .q = q + i * row_bytes,
                                         .out = q + (SEQS + i) * row_bytes};
    atomic_store(&out.n_done, N_GROUPS);
    atomic_store(&in.n_done, N_GROUPS);
    uint64_t begun = attn_now_ns(), last = begun;
    for (uint32_t k = 0; n < MOST_STEPS && last < begun + STEPS_NS; k++) {
        for (uint32_t i = 0; k < SEQS && i < N; i++) /* its row of the table first */
            patches[i] = (struct backend_patch){k, i, i};
        batch.patches = patches;
        batch.n_patches = k < SEQS ? N : 0;
        batch.n_items = k < SEQS ? 0 : SEQS;
        if (host != NULL && is_done(&out) && k >= SEQS)
            begin(&out, host[1], 0, bytes, false), n_moved += n > 0 ? N : 0;
        if (host != NULL && is_done(&in) && k >= SEQS)
            begin(&in, host[0], N, bytes, true), n_moved += n > 0 ? N : 0;
        uint64_t t0 = attn_now_ns();
        if (ops->submit(b, &batch) != ATTN_OK || ops->poll(b, UINT64_C(5000000000)) != &batch ||
            batch.status != ATTN_OK)
            die("a step failed");
        last = attn_now_ns();
        if (k >= 2 * SEQS)
            us[n++] = (double)(last - t0) / 1e3;
    }
    double seconds = (double)(attn_now_ns() - begun) / 1e9;
    while (!is_done(&out) || !is_done(&in))
        sched_yield();
    qsort(us, n, sizeof *us, compare);
    printf("steps %s, us: p50 %.1f, p99 %.1f, p99.9 %.1f, latest %.0f; moved %.1f GB/s\n",
           host == NULL ? "alone" : "beside moves", us[n / 2], us[(size_t)n * 99 / 100],
           us[(size_t)n * 999 / 1000], us[n - 1], n_moved * (double)bytes / seconds / 1e9);
    ops->host_free(b, memory, 2 * SEQS * row_bytes);
}

int main(int argc, char **argv)
{
    static struct groups out, in;
    const struct backend_config config = {.kv_bytes = (uint64_t)5 << 28,
                                          .max_batch_items = 64,
                                          .max_batch_tokens = 4096,
                                          .import_fd = -1};
    struct backend_pool_config c = {.n_blocks = 2 * N,
                                    .num_layers = 32,
                                    .num_q_heads = 32,
                                    .num_kv_heads = 8,
                                    .head_dim_k = 128,
                                    .head_dim_v = 128,
                                    .block_tokens = 16,
                                    .q_dtype = ATTN_BF16,
                                    .kv_dtype = ATTN_BF16,
                                    .n_table_rows = SEQS,
                                    .max_row_blocks = N};
    struct backend_info info;
    char why[256];
    void *host[2];
    if (backend_load(argc > 1 ? argv[1] : "cpu", &ops, why, sizeof why) != ATTN_OK)
        die(why);
    struct attn_layer_spec *layers = calloc(c.num_layers, sizeof *layers);
    for (uint32_t l = 0; layers != NULL && l < c.num_layers; l++)
        layers[l] = (struct attn_layer_spec){.scale = 0.088f};
    c.layers = layers;
    if (layers == NULL || ops->open(&config, &b) != ATTN_OK ||
        ops->pool_open(b, &c, &pool) != ATTN_OK)
        die("no pool");
    uint64_t bytes = kv_layout_of(&c).block_bytes;
    for (int i = 0; i < 2; i++) {
        if (ops->host_alloc(b, N * bytes, &host[i]) != ATTN_OK)
            die("host_alloc");
        memset(host[i], i + 1, N * bytes);
    }
    double ns[3][RUNS];
    for (int r = -1; r < RUNS; r++) { /* one to warm up */
        uint64_t t0 = attn_now_ns();
        begin(&out, host[0], 0, bytes, false);
        await(&out);
        uint64_t t1 = attn_now_ns();
        begin(&in, host[0], N, bytes, true);
        await(&in);
        uint64_t t2 = attn_now_ns();
        for (uint32_t i = 0; i < N; i++)
            if (memcmp(in.list[i].sum, out.list[i].sum, sizeof in.list[i].sum) != 0)
                die("other bytes came in than went out");
        uint64_t from = attn_now_ns();
        begin(&in, host[0], N, bytes, true);
        begin(&out, host[1], 0, bytes, false);
        await(&in);
        await(&out);
        uint64_t t3 = attn_now_ns();
        if (r < 0)
            continue;
        ns[0][r] = (double)(t1 - t0), ns[1][r] = (double)(t2 - t1), ns[2][r] = (double)(t3 - from);
    }
    ops->info(b, &info);
    double all = (double)(N * bytes);
    printf("%s, blocks of %llu KiB, GB/s: out %.1f, in %.1f, both at once %.1f each way\n",
           info.device, (unsigned long long)bytes >> 10, all / median(ns[0]), all / median(ns[1]),
           all / median(ns[2]));
    for (int i = 0; i < 2; i++) {
        time_steps(NULL, bytes);
        time_steps((uint8_t *const[]){host[0], host[1]}, bytes);
    }
    for (int i = 0; i < 2; i++)
        ops->host_free(b, host[i], N * bytes);
    ops->pool_close(pool);
    ops->close(b);
    free(layers);
    return 0;
}
