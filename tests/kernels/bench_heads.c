/* bench_heads.c: what it takes a device that pools' items carry heads and not latents (projections,
 * docs/benchmarks/projections.md): medians of device times of steps of one layer, of DeepSeek-V3's
 * geometry in bf16, with q and out in the device's memory and in the host's.
 *
 *   bench_heads BACKEND [RUNS]
 *
 * Layers are taken in turn, so that neither weights nor keys are in a cache from the step before.
 */
#include "kernels/load.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    HEADS = 128,
    LATENT = 512,
    ROPE = 64,
    NOPE = 128,
    OUT = 128,
    N_LAYERS = 4,
    BLOCK_TOKENS = 64,
    MAX_SEQS = 128,
    MAX_TOKENS = 2048,
    MAX_RUNS = 1000,
};

/* Steps of n sequences, of so many new tokens each behind cached ones. */
static const struct cell {
    uint32_t n, new, cached;
} cells[] = {
    {1, 1, 8192},   {4, 1, 8192},  {16, 1, 8192}, {32, 1, 8192}, {64, 1, 8192}, {128, 1, 8192},
    {128, 1, 2048}, {128, 1, 512}, {32, 4, 8192}, {1, 512, 0},   {1, 2048, 0},
};
enum { N_CELLS = sizeof cells / sizeof cells[0] };

struct rig {
    const struct backend_ops *ops;
    struct backend *b;
    struct backend_pool *pool;
    struct backend_pool_config c;
    uint32_t *tables; /* [MAX_SEQS][max_row_blocks] */
    uint32_t n_runs;
};

static void need(const struct rig *r, attn_status st, const char *what)
{
    if (st == ATTN_OK)
        return;
    fprintf(stderr, "bench_heads: %s: %s: %s\n", what, attn_status_message(st),
            r->b ? r->ops->last_error(r->b) : "");
    exit(1);
}

static uint8_t *random_bf16(size_t bytes)
{
    static uint64_t x = 0x9e3779b97f4a7c15u;
    uint16_t *p = malloc(bytes);
    if (p == NULL)
        exit(1);
    for (size_t i = 0; i < bytes / 2; i++) {
        x = x * 6364136223846793005u + 1442695040888963407u;
        p[i] = (uint16_t)(0x3c00 | (x >> 60 & 1) << 15 | (x >> 40 & 0x1ff)); /* 0.008 to 0.12 */
    }
    return (uint8_t *)p;
}

static void open_pool(struct rig *r, bool has_heads)
{
    static const struct attn_layer_spec layers[N_LAYERS] = {
        {.scale = 0.1f}, {.scale = 0.1f}, {.scale = 0.1f}, {.scale = 0.1f}};
    const uint32_t row = 8192 / BLOCK_TOKENS + 1;
    r->c = (struct backend_pool_config){.num_layers = N_LAYERS,
                                        .num_q_heads = HEADS,
                                        .num_kv_heads = 1,
                                        .head_dim_k = LATENT + ROPE,
                                        .head_dim_v = LATENT,
                                        .is_v_in_k = true,
                                        .q_nope_dim = has_heads ? NOPE : 0,
                                        .out_dim = has_heads ? OUT : 0,
                                        .block_tokens = BLOCK_TOKENS,
                                        .n_blocks = MAX_SEQS * row,
                                        .n_table_rows = MAX_SEQS,
                                        .max_row_blocks = row,
                                        .q_dtype = ATTN_BF16,
                                        .kv_dtype = ATTN_BF16,
                                        .layers = layers};
    need(r, r->ops->pool_open(r->b, &r->c, &r->pool), "pool_open");
    const uint64_t bytes = backend_weights_bytes(&r->c);
    uint8_t *w = random_bf16(bytes > 0 ? bytes : 2);
    for (uint32_t l = 0; bytes > 0 && l < N_LAYERS; l++)
        need(r, r->ops->weights_write(r->pool, l, 0, w, bytes), "weights_write");
    free(w);
    uint8_t *block = random_bf16((size_t)N_LAYERS * BLOCK_TOKENS * (LATENT + ROPE) * 2);
    for (uint32_t i = 0; i < r->c.n_blocks; i++)
        need(r, r->ops->block_write(r->pool, i, block), "block_write");
    free(block);
    struct backend_patch *patches = malloc(r->c.n_blocks * sizeof *patches);
    for (uint32_t i = 0; i < r->c.n_blocks; i++) {
        r->tables[i] = (uint32_t)((uint64_t)i * 4099 % r->c.n_blocks);
        patches[i] = (struct backend_patch){i / row, i % row, r->tables[i]};
    }
    struct backend_batch batch = {.pool = r->pool, .patches = patches, .n_patches = r->c.n_blocks};
    need(r, r->ops->submit(r->b, &batch), "submit");
    r->ops->poll(r->b, UINT64_MAX);
    need(r, batch.status, "table");
    free(patches);
}

static int compare(const void *x, const void *y)
{
    const uint64_t a = *(const uint64_t *)x, b = *(const uint64_t *)y;
    return a < b ? -1 : a > b;
}

/* Median of device time, us. */
static double time_of(struct rig *r, const struct cell *x, uint8_t *q, uint8_t *out)
{
    static uint64_t ns[MAX_RUNS];
    static struct backend_item items[MAX_SEQS];
    const size_t q_row = (size_t)x->new *HEADS *backend_q_dim(&r->c) * 2;
    const size_t out_row = (size_t)x->new *HEADS *backend_out_dim(&r->c) * 2;
    for (uint32_t run = 0; run < r->n_runs + 5; run++) {
        for (uint32_t i = 0; i < x->n; i++)
            items[i] = (struct backend_item){.flags = BACKEND_ATTEND,
                                             .layer = run % N_LAYERS,
                                             .table_row = i,
                                             .pos = x->cached,
                                             .n_tokens = x->new,
                                             .block_table = r->tables + i * r->c.max_row_blocks,
                                             .q = q + i *q_row,
                                             .out = out + i *out_row};
        struct backend_batch batch = {.pool = r->pool, .items = items, .n_items = x->n};
        need(r, r->ops->submit(r->b, &batch), "submit");
        r->ops->poll(r->b, UINT64_MAX);
        need(r, batch.status, "batch");
        if (run >= 5)
            ns[run - 5] = batch.device_ns;
    }
    qsort(ns, r->n_runs, sizeof ns[0], compare);
    return (double)ns[r->n_runs / 2] / 1e3;
}

int main(int argc, char **argv)
{
    struct rig r = {.n_runs = argc > 2 ? (uint32_t)atoi(argv[2]) : 100};
    const struct backend_config config = {.kv_bytes = (uint64_t)6 << 30,
                                          .max_batch_items = MAX_SEQS,
                                          .max_batch_tokens = MAX_TOKENS,
                                          .import_fd = -1};
    const size_t bytes = (size_t)MAX_TOKENS * HEADS * (LATENT + ROPE) * 2;
    double us[2][2][N_CELLS] = {0}; /* [heads][host] */
    struct backend_info info;
    char why[256];
    if (argc < 2 || r.n_runs == 0 || r.n_runs > MAX_RUNS ||
        backend_load(argv[1], &r.ops, why, sizeof why) != ATTN_OK) {
        fprintf(stderr, "bench_heads BACKEND [RUNS]: %s\n", argc < 2 ? "which?" : why);
        return 2;
    }
    need(&r, r.ops->open(&config, &r.b), "open");
    r.ops->info(r.b, &info);
    r.tables = malloc(MAX_SEQS * 256 * sizeof *r.tables);
    void *host[2];
    struct backend_region region[2];
    uint8_t *random = random_bf16(bytes);
    for (uint32_t i = 0; i < 2; i++) {
        need(&r, r.ops->host_alloc(r.b, bytes, &host[i]), "host_alloc");
        memcpy(host[i], random, bytes);
        if (info.features & BACKEND_HAS_REGIONS)
            need(&r, r.ops->region_open(r.b, bytes, -1, &region[i], why, sizeof why), why);
    }
    free(random);
    for (uint32_t h = 0; h < 2; h++) {
        open_pool(&r, h);
        for (uint32_t i = 0; i < N_CELLS; i++) {
            if (info.features & BACKEND_HAS_REGIONS)
                us[h][0][i] = time_of(&r, &cells[i], region[0].p, region[1].p);
            us[h][1][i] = time_of(&r, &cells[i], host[0], host[1]);
        }
        r.ops->pool_close(r.pool);
    }
    printf("%s, medians of %u, us of the device\n", info.device, r.n_runs);
    puts("| sequences | new | cached | latents | heads | more | latents, host | heads, host | more "
         "|");
    puts("|---|---|---|---|---|---|---|---|---|");
    for (uint32_t i = 0; i < N_CELLS; i++)
        printf("| %u | %u | %u | %.1f | %.1f | %.1f | %.1f | %.1f | %.1f |\n", cells[i].n,
               cells[i].new, cells[i].cached, us[0][0][i], us[1][0][i], us[1][0][i] - us[0][0][i],
               us[0][1][i], us[1][1][i], us[1][1][i] - us[0][1][i]);
    r.ops->close(r.b);
    return 0;
}
