/* bench_moves.c: how fast whole blocks go between a device and host memory, as the tiers move them:
 * groups of blocks with their checksums, by the backend's own threads. Not a test.
 *
 *   bench_moves [BACKEND]     cuda, hip or cpu; Llama-3-8B's blocks of 16 tokens, 2 MiB each
 *
 * Out, in, and both at once, of 512 MiB each way in groups of 32; medians of 5. The host memory was
 * touched before, as the tiers' is once it has been used.
 */
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/backend.h"
#include "kernels/kv_layout.h"
#include "proto/attn_time.h"

enum { N = 256, GROUP = 32, N_GROUPS = N / GROUP, RUNS = 5 };

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
                                    .n_table_rows = 1,
                                    .max_row_blocks = 1};
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
    for (int i = 0; i < 2; i++)
        ops->host_free(b, host[i], N * bytes);
    ops->pool_close(pool);
    ops->close(b);
    free(layers);
    return 0;
}
