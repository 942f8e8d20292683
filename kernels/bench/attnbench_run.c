/* attnbench_run.c: one cell of attnbench: a pool of random bf16 K and V with shuffled block tables,
 * and its times.
 *
 * Block i of a pool is a stretch of one buffer of random values, so the reference can look the
 * values up without reading them back.
 */
#include "kernels/bench/bench.h"

#include "kernels/kv_layout.h"
#include "kernels/load.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define RANDOM_BYTES ((size_t)64 << 20)
#define ROTATE_BYTES ((uint64_t)256 << 20) /* successive runs read other bytes until this much */
#define MAX_LAYERS 32
#define PATCHES_A_BATCH 256

static bool fail(struct bench *x, const char *what)
{
    snprintf(x->error, sizeof x->error, "%s: %s", what, x->ops->last_error(x->b));
    return false;
}

static uint64_t next_random(struct bench *x)
{
    x->rng ^= x->rng << 13;
    x->rng ^= x->rng >> 7;
    x->rng ^= x->rng << 17;
    return x->rng;
}

/* The sum of four uniform bytes, scaled to unit variance: enough of a bell, and quick. */
static uint16_t random_bf16(uint32_t bits)
{
    uint16_t h;
    int sum = (int)(bits & 255) + (int)(bits >> 8 & 255) + (int)(bits >> 16 & 255) +
              (int)(bits >> 24) - 510;
    float f = (float)sum / 147.8f + 1e-3f;
    uint32_t u;
    memcpy(&u, &f, sizeof u);
    h = (uint16_t)(u >> 16);
    return h;
}

static bool open_backend(struct bench *x)
{
    struct backend_config c = {.kv_bytes = x->kv_bytes,
                               .max_batch_items = BENCH_MAX_BATCH,
                               .max_batch_tokens = x->options.max_tokens,
                               .n_threads = x->options.n_threads,
                               .device_index = (int32_t)x->options.device_index,
                               .import_fd = -1};
    attn_status st = x->ops->open(&c, &x->b);
    if (st == ATTN_OK)
        return true;
    fail(x, "opening the backend");
    x->ops->close(x->b);
    x->b = NULL;
    return false;
}

bool bench_open(struct bench *x, const struct bench_options *o, uint64_t largest_bytes)
{
    *x = (struct bench){.options = *o, .rng = 0x9e3779b97f4a7c15u};
    if (backend_load(o->backend, &x->ops, x->error, sizeof x->error) != ATTN_OK ||
        backend_bench_load(o->backend, &x->own, x->error, sizeof x->error) != ATTN_OK)
        return false;
    x->kv_bytes = o->memory_bytes > largest_bytes ? o->memory_bytes : largest_bytes;
    x->random = malloc(RANDOM_BYTES);
    if (x->random == NULL) {
        snprintf(x->error, sizeof x->error, "no memory for random values");
        return false;
    }
    for (size_t i = 0; i < RANDOM_BYTES / 2; i += 2) {
        uint64_t r = next_random(x);
        x->random[i] = random_bf16((uint32_t)r);
        x->random[i + 1] = random_bf16((uint32_t)(r >> 32));
    }
    return open_backend(x);
}

void bench_close(struct bench *x)
{
    if (x->ops != NULL && x->b != NULL)
        x->ops->close(x->b);
    free(x->random);
    x->random = NULL;
    x->b = NULL;
}

static uint32_t layers_of(const struct bench_cell *c)
{
    uint64_t n = c->new_tokens > 0 ? 2 : ROTATE_BYTES / bench_kv_bytes(c);
    return n < 2 ? 2 : n > MAX_LAYERS ? MAX_LAYERS : (uint32_t)n;
}

static uint32_t blocks_of(const struct bench_cell *c, uint32_t item)
{
    return (bench_context(c, item) + BENCH_BLOCK_TOKENS - 1) / BENCH_BLOCK_TOKENS;
}

/* Blocks of the item that none before it has. */
static uint32_t own_blocks_of(const struct bench_cell *c, uint32_t item)
{
    return blocks_of(c, item) - (item > 0 ? c->shared_tokens / BENCH_BLOCK_TOKENS : 0);
}

uint64_t bench_setup_bytes(const struct bench_cell *c)
{
    uint64_t blocks = 0;
    for (uint32_t i = 0; i < c->batch; i++)
        blocks += own_blocks_of(c, i);
    uint64_t block =
        (uint64_t)layers_of(c) * c->g->num_kv_heads * BENCH_BLOCK_TOKENS * c->g->head_dim_k * 4;
    return blocks * block + 4096;
}

/* Scales of the i-th row of a block that make about unit size of random codes. */
static void make_scales(attn_dtype kv, uint64_t i, uint32_t n_bytes, uint8_t *out)
{
    const float largest = kv == ATTN_INT8 ? 64 : kv == ATTN_NVFP4 ? 4 : 1;
    const float scale = (1.0f + (float)(i % 7) / 8) / largest;
    if (kv == ATTN_MXFP4 || kv == ATTN_NVFP4) /* of groups: 2^-2, 1 */
        memset(out, kv == ATTN_MXFP4 ? 125 : 0x38, n_bytes);
    if (kv != ATTN_MXFP4)
        memcpy(out, &scale, sizeof scale);
}

const uint8_t *bench_block(const struct bench *x, const struct bench_setup *s, uint32_t block,
                           uint8_t *made)
{
    const struct kv_layout *l = &s->layout;
    const attn_dtype kv = bench_kv_dtype(s->cell);
    const uint64_t room = (RANDOM_BYTES - l->block_bytes) / 128;
    const uint8_t *bytes = (const uint8_t *)x->random + (uint64_t)block * 40503 % room * 128;
    if (!l->is_quantised)
        return bytes;
    memcpy(made, bytes, l->block_bytes);
    for (uint64_t i = 0; kv == ATTN_FP8_E4M3 && i < l->block_bytes; i++)
        made[i] &= 0xbf;
    for (uint64_t i = 0; i < (uint64_t)s->n_layers * s->cell->g->num_kv_heads * BENCH_BLOCK_TOKENS;
         i++) {
        const uint32_t rows = s->cell->g->num_kv_heads * BENCH_BLOCK_TOKENS;
        uint8_t *layer = made + i / rows * l->layer_bytes;
        make_scales(kv, i, l->k_scale_bytes, layer + l->k_scales + i % rows * l->k_scale_bytes);
        make_scales(kv, i, l->v_scale_bytes, layer + l->v_scales + i % rows * l->v_scale_bytes);
    }
    return made;
}

attn_status bench_pool_open(struct bench *x, const struct backend_pool_config *c,
                            struct backend_pool **out)
{
    attn_status st = x->ops->pool_open(x->b, c, out);
    if (st != ATTN_ENOMEM)
        return st;
    x->ops->close(x->b); /* earlier cells have used the memory up */
    x->b = NULL;
    return open_backend(x) ? x->ops->pool_open(x->b, c, out) : ATTN_ENOMEM;
}

static attn_status open_pool(struct bench *x, struct bench_setup *s)
{
    const struct bench_cell *c = s->cell;
    struct attn_layer_spec specs[MAX_LAYERS];
    uint32_t max_blocks = 0;
    for (uint32_t i = 0; i < c->batch; i++)
        max_blocks = blocks_of(c, i) > max_blocks ? blocks_of(c, i) : max_blocks;
    struct backend_pool_config p = {.num_layers = s->n_layers,
                                    .num_q_heads = c->g->num_q_heads,
                                    .num_kv_heads = c->g->num_kv_heads,
                                    .head_dim_k = c->g->head_dim_k,
                                    .head_dim_v = c->g->head_dim_v,
                                    .is_v_in_k = c->g->is_v_in_k,
                                    .block_tokens = BENCH_BLOCK_TOKENS,
                                    .n_blocks = s->n_blocks,
                                    .n_table_rows = c->batch,
                                    .max_row_blocks = max_blocks,
                                    .q_dtype = ATTN_BF16,
                                    .kv_dtype = bench_kv_dtype(c),
                                    .layers = specs};
    for (uint32_t i = 0; i < s->n_layers; i++)
        specs[i] = (struct attn_layer_spec){.scale = 1.0f / sqrtf((float)c->g->head_dim_k)};
    s->layout = kv_layout_of(&p);
    return bench_pool_open(x, &p, &s->pool);
}

static bool fill_blocks(struct bench *x, struct bench_setup *s)
{
    uint8_t *bytes = malloc(s->layout.block_bytes);
    bool ok = bytes != NULL;
    for (uint32_t i = 0; ok && i < s->n_blocks; i++)
        ok = x->ops->block_write(s->pool, i, bench_block(x, s, i, bytes)) == ATTN_OK;
    free(bytes);
    return ok ? true : fail(x, "filling blocks");
}

/* All of a pool's block ids, shuffled. */
static bool shuffle_blocks(struct bench *x, struct bench_setup *s)
{
    uint32_t *ids = malloc(s->n_blocks * sizeof *ids), next = 0;
    if (ids == NULL) {
        snprintf(x->error, sizeof x->error, "no memory for a cell's tables");
        return false;
    }
    for (uint32_t i = 0; i < s->n_blocks; i++)
        ids[i] = i;
    for (uint32_t i = s->n_blocks; i > 1; i--) {
        uint32_t j = (uint32_t)(next_random(x) % i), t = ids[i - 1];
        ids[i - 1] = ids[j];
        ids[j] = t;
    }
    for (uint32_t i = 0; i < s->cell->batch; i++) {
        const uint32_t n = blocks_of(s->cell, i), n_shared = n - own_blocks_of(s->cell, i);
        for (uint32_t j = 0; j < n; j++)
            s->tables[s->first_block[i] + j] = j < n_shared ? s->tables[j] : ids[next++];
    }
    free(ids);
    return true;
}

/* Block tables, told to the device in batches without items. */
static bool make_tables(struct bench *x, struct bench_setup *s)
{
    struct backend_patch patches[PATCHES_A_BATCH];
    struct backend_batch batch = {.pool = s->pool, .patches = patches};
    if (!shuffle_blocks(x, s))
        return false;
    for (uint32_t i = 0; i < s->cell->batch; i++) {
        for (uint32_t j = 0; j < blocks_of(s->cell, i); j++) {
            patches[batch.n_patches++] = (struct backend_patch){
                .row = i, .index = j, .block = s->tables[s->first_block[i] + j]};
            bool is_last = i + 1 == s->cell->batch && j + 1 == blocks_of(s->cell, i);
            if (batch.n_patches < PATCHES_A_BATCH && !is_last)
                continue;
            if (x->ops->submit(x->b, &batch) != ATTN_OK)
                return fail(x, "patching block tables");
            struct backend_batch *back = NULL;
            while (back == NULL)
                back = x->ops->poll(x->b, 1000000000);
            if (back->status != ATTN_OK)
                return fail(x, "patching block tables");
            batch.n_patches = 0;
        }
    }
    return true;
}

static void make_batches(struct bench *x, struct bench_setup *s)
{
    const struct bench_cell *c = s->cell;
    const uint32_t n_tokens = bench_new_tokens(c);
    size_t row = (size_t)c->g->num_q_heads * c->g->head_dim_k * 2 * n_tokens;
    size_t n = row * c->batch / 2;
    uint16_t *q = (uint16_t *)(void *)s->host;
    for (size_t i = 0; i < n; i++)
        q[i] = random_bf16((uint32_t)(next_random(x) >> 16));
    for (uint32_t l = 0; l < s->n_layers; l++) {
        for (uint32_t i = 0; i < c->batch; i++)
            s->items[l * c->batch + i] = (struct backend_item){
                .flags = BACKEND_ATTEND,
                .layer = l,
                .table_row = i,
                .pos = bench_context(c, i) - bench_item_tokens(c, i),
                .n_tokens = bench_item_tokens(c, i),
                .block_table = s->tables + s->first_block[i],
                .q = s->host + i * row,
                .out = s->host + ((size_t)(l + 1) * c->batch + i) * row,
            };
        s->batches[l] = (struct backend_batch){
            .pool = s->pool, .items = s->items + (size_t)l * c->batch, .n_items = c->batch};
        s->list[l] = &s->batches[l];
    }
}

bool bench_setup_open(struct bench *x, const struct bench_cell *c, struct bench_setup *s)
{
    *s = (struct bench_setup){.cell = c, .n_layers = layers_of(c)};
    s->first_block = calloc(c->batch, sizeof *s->first_block);
    s->items = calloc((size_t)s->n_layers * c->batch, sizeof *s->items);
    s->batches = calloc(s->n_layers, sizeof *s->batches);
    s->list = calloc(s->n_layers, sizeof(struct backend_batch *));
    uint32_t n_entries = 0;
    for (uint32_t i = 0; s->first_block != NULL && i < c->batch; i++) {
        s->first_block[i] = n_entries;
        n_entries += blocks_of(c, i);
        s->n_blocks += own_blocks_of(c, i);
    }
    s->tables = calloc(n_entries, sizeof *s->tables);
    if (!s->first_block || !s->items || !s->batches || !s->list || !s->tables) {
        snprintf(x->error, sizeof x->error, "no memory for a cell's tables");
        return false;
    }
    if (open_pool(x, s) != ATTN_OK)
        return x->b == NULL ? false : fail(x, "opening a pool");
    void *host;
    s->host_bytes = (size_t)(s->n_layers + 1) * c->batch * bench_new_tokens(c) * c->g->num_q_heads *
                    c->g->head_dim_k * 2;
    s->host_bytes = (s->host_bytes + 4095) / 4096 * 4096;
    if (x->ops->host_alloc(x->b, s->host_bytes, &host) != ATTN_OK)
        return fail(x, "host memory");
    s->host = host;
    if (!fill_blocks(x, s) || !make_tables(x, s))
        return false;
    make_batches(x, s);
    return true;
}

void bench_setup_close(struct bench *x, struct bench_setup *s)
{
    if (s->host != NULL && x->b != NULL)
        x->ops->host_free(x->b, s->host, s->host_bytes);
    free(s->first_block);
    free(s->items);
    free(s->batches);
    free(s->list);
    free(s->tables);
    *s = (struct bench_setup){0};
}

static int compare_ns(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

struct bench_times bench_times_of(uint64_t *ns, uint32_t n)
{
    qsort(ns, n, sizeof *ns, compare_ns);
    double median = n % 2 ? (double)ns[n / 2] : ((double)ns[n / 2 - 1] + (double)ns[n / 2]) / 2;
    return (struct bench_times){.median_us = median / 1e3, .min_us = (double)ns[0] / 1e3};
}

/* Bursts end when they have taken their time, by what runs took so far; the first is of one run. */
attn_status bench_time_in_bursts(struct bench *x, struct backend_batch *const *list, uint32_t n,
                                 const char *variant, uint32_t runs, uint64_t *out_ns)
{
    attn_status st = ATTN_OK;
    for (uint32_t at = 0, burst = 1; st == ATTN_OK && at < runs; at += burst) {
        if (at > 0) {
            uint64_t fit = BENCH_BURST_NS / (out_ns[at - 1] + 1) / 2; /* as many runs warm up */
            burst = fit < 1 ? 1 : fit < runs - at ? (uint32_t)fit : runs - at;
        }
        nanosleep(&(struct timespec){.tv_nsec = BENCH_REST_NS}, NULL);
        st = x->own->time_batch(x->b, variant, list, n, burst, x->options.is_alone, out_ns + at);
    }
    return st;
}

bool bench_time(struct bench *x, struct bench_setup *s, const char *variant, uint32_t runs,
                struct bench_times *out, bool *out_is_supported)
{
    uint64_t *ns = calloc(runs, sizeof *ns);
    if (ns == NULL)
        return false;
    attn_status st = s->cell->new_tokens > 0
                         ? bench_time_in_bursts(x, s->list, s->n_layers, variant, runs, ns)
                         : x->own->time_batch(x->b, variant, s->list, s->n_layers, runs,
                                              x->options.is_alone, ns);
    *out_is_supported = st != ATTN_ENOTSUP;
    if (st == ATTN_OK)
        *out = bench_times_of(ns, runs);
    free(ns);
    return st == ATTN_OK || st == ATTN_ENOTSUP ? true : fail(x, "timing a batch");
}

bool bench_time_read(struct bench *x, uint64_t bytes, struct bench_times *out)
{
    uint64_t *ns = calloc(x->options.runs, sizeof *ns);
    if (ns == NULL)
        return false;
    attn_status st = x->own->time_read(x->b, bytes, x->options.runs, x->options.is_alone, ns);
    if (st == ATTN_OK)
        *out = bench_times_of(ns, x->options.runs);
    free(ns);
    return st == ATTN_OK ? true : fail(x, "timing a read");
}
