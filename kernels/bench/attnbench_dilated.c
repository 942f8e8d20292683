/* attnbench_dilated.c: attnbench's grid of dilated attention: whole sequences that are not causal,
 * head dim 64, in the rows of an earlier benchmark of LongNet's attention.
 *
 * Rows        standard  attention of the sequence
 *             improved  the same; as that benchmark ran it (below), over the heads of each token
 *             multihead_standard, multihead_improved
 *                       those two inside a layer: norm, products of q, k, v, append, attention,
 *                       product of the output, x added
 *             ring_v2   standard with each query's keys in 1, 2, 4, 8 parts, which are computed
 *                       apart on one device and meet by their sums of weights
 * Readings    seed      what that benchmark ran: one segment of the whole sequence, not dilated;
 *                       its `improved` handed (batch, tokens, heads, dim) to a function that takes
 *                       (batch, heads, tokens, dim), so that every token attends over its heads
 *             dilated   what its name says: segments of 2048, 4096 and 8192 tokens, or all there
 *                       are, with rates 1, 2 and 4
 *
 * K and V are appended as a worker would append them; attention is timed as in the other grids, in
 * bursts. The last tokens of each sequence are compared with the float64 reference, all outputs
 * must be finite; of a layer, the last product is compared, given attention's output.
 */
#include "kernels/bench/bench.h"

#include "kernels/layer_visible.h"
#include "kernels/reference.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define DIM 64
#define N_BRANCHES 3
#define CHECK_WORK 5e7 /* multiplications in float64 of a row of the table */
#define MATMUL_TFLOPS 802.0 /* of the card that the best public times were measured on */
#define READ_TBPS 4.65

enum impl { STANDARD, IMPROVED, MULTIHEAD_STANDARD, MULTIHEAD_IMPROVED, RING_V2 };
static const char *const impl_names[] = {"standard", "improved", "multihead_standard",
                                         "multihead_improved", "ring_v2"};

struct cell {
    enum impl impl;
    bool is_dilated;
    uint32_t batch, seq_tokens, heads, shards; /* shards 0: as the daemon computes it */
    attn_dtype dtype;
};

/* A cell as the backend sees it: sequences of `tokens` tokens of `heads` heads, in one layer. */
struct setup {
    const struct cell *cell;
    struct attn_layer_spec spec;
    uint32_t tokens, heads;
    struct backend_pool *pool;
    uint32_t n_blocks; /* of a sequence */
    uint32_t *table; /* [batch][n_blocks] */
    uint8_t *host; /* from host_alloc: q, k, v, out, each [batch][tokens][heads][DIM] */
    size_t host_bytes, part_bytes;
    uint8_t *weights; /* of a layer, whose x is where q is, and y where k is */
    struct backend_bench_layer layer;
    struct backend_item *items; /* [batch] */
    struct backend_patch *patches;
};

struct result {
    const char *status; /* "ok", or why there are no figures */
    struct bench_times times;
    struct bench_error error;
};

/* us of the best public kernel on one NVIDIA H200 for batch 1, bf16, dilated: strided views into
 * FlashAttention-3, the fastest of those measured; many calls in one graph. */
static const struct {
    uint32_t seq_tokens, heads;
    double us;
} public_times[] = {
    {2048, 8, 138.9},  {4096, 8, 215.5},   {8192, 8, 299.5},    {16384, 8, 448.9},
    {32768, 8, 655.9}, {65536, 8, 1247.0}, {2048, 16, 169.9},   {4096, 16, 259.7},
    {8192, 16, 446.1}, {16384, 16, 656.5}, {32768, 16, 1264.4}, {65536, 16, 2402.8},
};

static uint32_t least(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

static bool is_improved(const struct cell *c)
{
    return c->impl == IMPROVED || c->impl == MULTIHEAD_IMPROVED;
}

static bool is_layer(const struct cell *c)
{
    return c->impl == MULTIHEAD_STANDARD || c->impl == MULTIHEAD_IMPROVED;
}

static struct attn_layer_spec spec_of(const struct cell *c)
{
    struct attn_layer_spec s = {.scale = 1 / sqrtf(DIM), .is_full = true};
    if (c->is_dilated) {
        s.n_branches = N_BRANCHES;
        for (uint32_t i = 0; i < N_BRANCHES; i++)
            s.branches[i] = (struct attn_branch){least(2048u << i, c->seq_tokens), 1u << i};
    } else if (is_improved(c)) { /* the heads of a token as the tokens of a segment */
        s.n_branches = 1;
        s.branches[0] = (struct attn_branch){c->heads, 1};
    }
    return s;
}

static bool is_over_heads(const struct cell *c)
{
    return is_improved(c) && !c->is_dilated;
}

static void name_of(const struct cell *c, char *out, size_t bytes)
{
    int n = snprintf(out, bytes, "%s,%s,%s,b%u,s%u,h%u", impl_names[c->impl],
                     c->is_dilated ? "dilated" : "seed", attn_dtype_name(c->dtype), c->batch,
                     c->seq_tokens, c->heads);
    if (c->shards > 0)
        snprintf(out + n, bytes - (size_t)n, ",shards%u", c->shards);
}

/* ---- figures of a cell */

/* Multiplications and additions: each query of a branch with each key; a layer's products. */
static double flops_of(const struct cell *c)
{
    const struct attn_layer_spec s = spec_of(c);
    double tokens = is_over_heads(c) ? (double)c->seq_tokens * c->heads : c->seq_tokens, pairs = 0;
    for (uint32_t i = 0; i < s.n_branches; i++) {
        double r = s.branches[i].rate;
        pairs += tokens * s.branches[i].segment_tokens / (r * r);
    }
    if (s.n_branches == 0)
        pairs = tokens * tokens;
    double dim = (double)c->heads * DIM, rows = (double)c->batch * c->seq_tokens;
    return 4.0 * DIM * pairs * c->batch * (is_over_heads(c) ? 1 : c->heads) +
           (is_layer(c) ? 4 * 2 * rows * dim * dim : 0);
}

/* q, k, v and out, the partial results of shards, a layer's x, its norm and y, and weights. */
static double bytes_of(const struct cell *c)
{
    double rows = (double)c->batch * c->seq_tokens * c->heads, dim = (double)c->heads * DIM;
    double elements = rows * DIM * (is_layer(c) ? 7 : 4) + (is_layer(c) ? 4 * dim * dim : 0);
    return elements * (double)attn_dtype_bytes(c->dtype) +
           (c->shards > 1 ? rows * c->shards * (DIM + 2) * 4 : 0);
}

/* On the card of the public times, for bf16. */
static double floor_us(const struct cell *c)
{
    double flops = flops_of(c) / MATMUL_TFLOPS / 1e6;
    double bytes = (double)c->batch * c->seq_tokens * c->heads * DIM * 8 / READ_TBPS / 1e6;
    return c->dtype != ATTN_BF16 ? 0 : flops > bytes ? flops : bytes;
}

static double public_us(const struct cell *c)
{
    for (size_t i = 0; i < sizeof public_times / sizeof *public_times; i++)
        if (c->is_dilated && c->dtype == ATTN_BF16 && c->batch == 1 && c->shards == 0 &&
            public_times[i].seq_tokens == c->seq_tokens && public_times[i].heads == c->heads)
            return public_times[i].us;
    return 0;
}

/* ---- one cell */

static bool fail(struct bench *x, const char *what)
{
    snprintf(x->error, sizeof x->error, "%s: %s", what,
             x->b != NULL ? x->ops->last_error(x->b) : "no backend");
    return false;
}

/* About N(0, 1), of the cell's dtype. */
static void fill_random(const struct bench *x, attn_dtype dtype, void *to, size_t n, uint32_t salt)
{
    const size_t n_random = (size_t)1 << 24;
    uint16_t *halves = to;
    float *floats = to;
    for (size_t i = 0; i < n; i++) {
        const uint16_t bf16 = x->random[(i * 5 + (i >> 20) * 77777 + salt * 1234567u) % n_random];
        if (dtype == ATTN_BF16)
            halves[i] = bf16;
        else
            floats[i] = (float)reference_get(ATTN_BF16, &bf16, 0);
    }
}

static bool run_batch(struct bench *x, struct backend_batch *batch)
{
    struct backend_batch *back = NULL;
    if (x->ops->submit(x->b, batch) != ATTN_OK)
        return fail(x, "appending K and V");
    while (back == NULL)
        back = x->ops->poll(x->b, 1000000000);
    return back->status == ATTN_OK || fail(x, "appending K and V");
}

static void setup_close(struct bench *x, struct setup *s)
{
    if (s->host != NULL && x->b != NULL)
        x->ops->host_free(x->b, s->host, s->host_bytes);
    free(s->weights);
    free(s->table);
    free(s->items);
    free(s->patches);
}

static bool make_layer(const struct bench *x, struct setup *s)
{
    const size_t dim = (size_t)s->cell->heads * DIM, e = attn_dtype_bytes(s->cell->dtype);
    s->weights = malloc(4 * dim * dim * e);
    if (s->weights == NULL)
        return false;
    fill_random(x, s->cell->dtype, s->weights, 4 * dim * dim, 7);
    for (size_t i = 0; i < 4 * dim * dim; i++)
        reference_put(s->cell->dtype, s->weights, i,
                      reference_get(s->cell->dtype, s->weights, i) / sqrt((double)dim));
    s->layer = (struct backend_bench_layer){
        .dim = (uint32_t)dim, .x = s->host, .y = s->host + s->part_bytes};
    for (uint32_t i = 0; i < 4; i++)
        s->layer.weights[i] = s->weights + i * dim * dim * e;
    return true;
}

/* A pool with the cell's sequences in it, blocks in shuffled order. */
static bool setup_open(struct bench *x, const struct cell *c, struct setup *s)
{
    *s = (struct setup){.cell = c, .spec = spec_of(c), .tokens = c->seq_tokens, .heads = c->heads};
    if (is_over_heads(c)) {
        s->tokens = c->seq_tokens * c->heads;
        s->heads = 1;
    }
    s->n_blocks = (s->tokens + BENCH_BLOCK_TOKENS - 1) / BENCH_BLOCK_TOKENS;
    const uint32_t n_blocks = c->batch * s->n_blocks;
    struct backend_pool_config config = {.num_layers = 1,
                                         .num_q_heads = s->heads,
                                         .num_kv_heads = s->heads,
                                         .head_dim_k = DIM,
                                         .head_dim_v = DIM,
                                         .block_tokens = BENCH_BLOCK_TOKENS,
                                         .n_blocks = n_blocks,
                                         .n_table_rows = c->batch,
                                         .max_row_blocks = s->n_blocks,
                                         .q_dtype = c->dtype,
                                         .kv_dtype = c->dtype,
                                         .layers = &s->spec};
    if (bench_pool_open(x, &config, &s->pool) != ATTN_OK)
        return fail(x, "opening a pool");
    const size_t rows = (size_t)c->batch * s->tokens * s->heads;
    void *host = NULL;
    s->part_bytes = (rows * DIM * attn_dtype_bytes(c->dtype) + 4095) / 4096 * 4096;
    s->host_bytes = 4 * s->part_bytes;
    s->table = calloc(n_blocks, sizeof *s->table);
    s->items = calloc(c->batch, sizeof *s->items);
    s->patches = calloc(n_blocks, sizeof *s->patches);
    if (s->table == NULL || s->items == NULL || s->patches == NULL ||
        x->ops->host_alloc(x->b, s->host_bytes, &host) != ATTN_OK)
        return fail(x, "no memory for a cell");
    s->host = host;
    for (uint32_t i = 0; i < 3; i++)
        fill_random(x, c->dtype, s->host + i * s->part_bytes, rows * DIM, i);
    for (uint32_t i = 0; i < n_blocks; i++) {
        s->table[i] = (uint32_t)((uint64_t)i * 7919 % n_blocks);
        s->patches[i] = (struct backend_patch){i / s->n_blocks, i % s->n_blocks, s->table[i]};
    }
    const size_t seq_bytes = rows / c->batch * DIM * attn_dtype_bytes(c->dtype);
    for (uint32_t i = 0; i < c->batch; i++)
        s->items[i] = (struct backend_item){.flags = BACKEND_APPEND,
                                            .table_row = i,
                                            .n_tokens = s->tokens,
                                            .block_table = s->table + (size_t)i * s->n_blocks,
                                            .q = s->host + i * seq_bytes,
                                            .k = s->host + s->part_bytes + i * seq_bytes,
                                            .v = s->host + 2 * s->part_bytes + i * seq_bytes,
                                            .out = s->host + 3 * s->part_bytes + i * seq_bytes};
    struct backend_batch append = {.pool = s->pool,
                                   .items = s->items,
                                   .n_items = c->batch,
                                   .patches = s->patches,
                                   .n_patches = n_blocks};
    if (!run_batch(x, &append))
        return false;
    for (uint32_t i = 0; i < c->batch; i++)
        s->items[i].flags = BACKEND_ATTEND | (is_layer(c) ? BACKEND_APPEND : 0);
    return !is_layer(c) || make_layer(x, s) || fail(x, "no memory for weights");
}

static void compare(struct bench_error *e, const struct cell *c, double got, double want,
                    double *diff, double *norm)
{
    const struct reference_bound bound = reference_bound_of(c->dtype, c->dtype);
    double error = fabs(got - want);
    e->max_abs = error > e->max_abs ? error : e->max_abs;
    e->is_allclose = e->is_allclose && error <= bound.atol + bound.rtol * fabs(want);
    *diff += error * error;
    *norm += want * want;
}

/* The last rows of y from x and attention's output. */
static void check_layer(const struct setup *s, struct bench_error *out)
{
    const struct cell *c = s->cell;
    const size_t dim = s->layer.dim, rows = (size_t)c->batch * c->seq_tokens;
    double diff = 0, norm = 0;
    for (size_t r = rows - 2; r < rows; r++)
        for (size_t d = 0; d < dim; d++) {
            double want = reference_get(c->dtype, s->layer.x, r * dim + d);
            for (size_t k = 0; k < dim; k++)
                want += reference_get(c->dtype, s->host + 3 * s->part_bytes, r * dim + k) *
                        reference_get(c->dtype, s->layer.weights[3], d * dim + k);
            compare(out, c, reference_get(c->dtype, s->layer.y, r * dim + d), want, &diff, &norm);
        }
    out->n_rows_checked = 2;
    out->l2 = sqrt(diff / norm);
}

/* Outputs of the last run: all finite, and the last tokens of each sequence as the reference has
 * them. */
static bool check(struct bench *x, const struct setup *s, struct bench_error *out)
{
    const struct cell *c = s->cell;
    const size_t row = (size_t)s->heads * DIM;
    double diff = 0, norm = 0, cost = 2.0 * (double)s->tokens * (double)row * c->batch;
    uint32_t n = cost * 8 < CHECK_WORK ? 8 : cost * 2 < CHECK_WORK ? 2 : 1;
    double *want = malloc(n * row * sizeof *want);
    *out = (struct bench_error){.is_allclose = true,
                                .n_rows = (uint64_t)c->batch * s->tokens * s->heads};
    for (size_t i = 0; i < out->n_rows * DIM; i++)
        out->is_allclose =
            out->is_allclose && isfinite(reference_get(c->dtype, s->host + 3 * s->part_bytes, i));
    if (is_layer(c))
        check_layer(s, out);
    for (uint32_t i = 0; want != NULL && i < c->batch && !is_layer(c); i++) {
        const struct backend_item *it = &s->items[i];
        size_t at = (s->tokens - n) * row, e = attn_dtype_bytes(c->dtype);
        if (reference_attend(&s->spec, s->heads, s->heads, DIM, DIM, c->dtype,
                             (const char *)it->q + at * e, n, s->tokens - n, it->k, it->v,
                             s->tokens, want, NULL) != ATTN_OK)
            break;
        for (size_t k = 0; k < n * row; k++)
            compare(out, c, reference_get(c->dtype, it->out, at + k), want[k], &diff, &norm);
        out->l2 = norm > 0 ? sqrt(diff / norm) : 0;
        out->n_rows_checked += n * s->heads;
    }
    free(want);
    return out->n_rows_checked > 0 || fail(x, "no memory for the reference");
}

/* In bursts, as bench_time_in_bursts. */
static attn_status time_layer(struct bench *x, const struct setup *s, struct backend_batch *batch,
                              uint64_t *out_ns)
{
    attn_status st = ATTN_OK;
    for (uint32_t at = 0, n = 1; st == ATTN_OK && at < x->options.runs; at += n) {
        uint64_t fit = at > 0 ? BENCH_BURST_NS / (out_ns[at - 1] + 1) / 2 : 1;
        uint32_t left = x->options.runs - at;
        n = fit < 1 ? 1 : fit < left ? (uint32_t)fit : left;
        nanosleep(&(struct timespec){.tv_nsec = BENCH_REST_NS}, NULL);
        st = x->own->time_layer(x->b, batch, &s->layer, n, x->options.is_alone, out_ns + at);
    }
    return st;
}

/* false: the benchmark cannot go on. A cell that the device has no memory for has a status. */
static bool measure(struct bench *x, const struct setup *s, struct result *out)
{
    const struct cell *c = s->cell;
    struct backend_batch batch = {.pool = s->pool, .items = s->items, .n_items = c->batch};
    struct backend_batch *list[1] = {&batch};
    char variant[16];
    snprintf(variant, sizeof variant, "shards%u", c->shards);
    uint64_t *ns = calloc(x->options.runs, sizeof *ns);
    if (ns == NULL)
        return fail(x, "no memory for times");
    memset(s->host + 3 * s->part_bytes, 0xff, s->part_bytes);
    attn_status st = is_layer(c) ? time_layer(x, s, &batch, ns)
                                 : bench_time_in_bursts(x, list, 1, c->shards ? variant : NULL,
                                                        x->options.runs, ns);
    if (st == ATTN_OK)
        out->times = bench_times_of(ns, x->options.runs);
    free(ns);
    if (st == ATTN_ENOMEM) {
        out->status = "out of memory";
        return true;
    }
    if (st != ATTN_OK)
        return fail(x, "timing a batch");
    out->status = "ok";
    if (!check(x, s, &out->error))
        return false;
    if (!out->error.is_allclose)
        out->status = "WRONG";
    return true;
}

/* ---- output */

static void print_row(const struct cell *c, const struct result *r)
{
    char name[64], over[16] = "-", public_over[16] = "-";
    name_of(c, name, sizeof name);
    if (strcmp(r->status, "out of memory") == 0) {
        printf("%-42s %s\n", name, r->status);
        return;
    }
    if (floor_us(c) > 0)
        snprintf(over, sizeof over, "%.2f", r->times.median_us / floor_us(c));
    if (public_us(c) > 0)
        snprintf(public_over, sizeof public_over, "%.3f", r->times.median_us / public_us(c));
    printf("%-42s %12.1f %12.1f %10.1f %12.0f %8.2f %8s %9s %9.1e %s\n", name, r->times.median_us,
           r->times.min_us, bytes_of(c) / 1048576,
           (double)c->batch * c->seq_tokens / r->times.median_us * 1e6,
           flops_of(c) / r->times.median_us / 1e6, over, public_over, r->error.l2, r->status);
    fflush(stdout);
}

static void write_csv(FILE *f, const char *backend, const struct cell *c, const struct result *r)
{
    const struct attn_layer_spec s = spec_of(c);
    char segments[64] = "", rates[32] = "";
    size_t a = 0, b = 0;
    for (uint32_t i = 0; i < s.n_branches; i++) {
        a += (size_t)snprintf(segments + a, sizeof segments - a, "%s%u", i ? "/" : "",
                              s.branches[i].segment_tokens);
        b +=
            (size_t)snprintf(rates + b, sizeof rates - b, "%s%u", i ? "/" : "", s.branches[i].rate);
    }
    if (s.n_branches == 0) {
        snprintf(segments, sizeof segments, "%u", c->seq_tokens);
        snprintf(rates, sizeof rates, "1");
    }
    fprintf(f,
            "%s,%s,%s,%s,%u,%u,%u,%d,%u,%s,%s,%s,%.3f,%.3f,%.1f,%.0f,%.3f,%.1f,%.1f,%.3e,%.3e,"
            "%llu,%llu\n",
            backend, impl_names[c->impl], c->is_dilated ? "dilated" : "seed",
            attn_dtype_name(c->dtype), c->batch, c->seq_tokens, c->heads, DIM, c->shards, segments,
            rates, r->status, r->times.median_us, r->times.min_us, bytes_of(c) / 1048576,
            r->times.median_us > 0 ? (double)c->batch * c->seq_tokens / r->times.median_us * 1e6
                                   : 0,
            r->times.median_us > 0 ? flops_of(c) / r->times.median_us / 1e6 : 0, floor_us(c),
            public_us(c), r->error.max_abs, r->error.l2,
            (unsigned long long)r->error.n_rows_checked, (unsigned long long)r->error.n_rows);
    fflush(f);
}

/* ---- the grid */

enum { MAX_CELLS = 1024 };

static uint32_t add_cells(struct cell *to, uint32_t n, attn_dtype dtype, uint32_t batch,
                          uint32_t seq_tokens, uint32_t heads)
{
    for (int is_dilated = 0; is_dilated < 2; is_dilated++) {
        struct cell c = {STANDARD, is_dilated, batch, seq_tokens, heads, 0, dtype};
        for (; c.impl < RING_V2; c.impl++)
            to[n++] = c;
        for (c.shards = 1; c.shards <= 8; c.shards *= 2)
            to[n++] = c;
    }
    return n;
}

static uint32_t all_cells(struct cell *to)
{
    uint32_t n = 0;
    for (uint32_t batch = 1; batch <= 4; batch *= 2)
        for (uint32_t tokens = 1024; tokens <= 4096; tokens *= 2)
            for (uint32_t heads = 8; heads <= 16; heads *= 2)
                n = add_cells(to, n, ATTN_F32, batch, tokens, heads);
    for (uint32_t tokens = 1024; tokens <= 65536; tokens *= 2)
        for (uint32_t heads = 8; heads <= 16; heads *= 2)
            n = add_cells(to, n, ATTN_BF16, 1, tokens, heads);
    return n;
}

int bench_dilated(const struct bench_options *o, const char *match, FILE *csv)
{
    static struct cell cells[MAX_CELLS];
    struct bench_options options = *o;
    struct bench x;
    uint64_t largest = 0;
    uint32_t n = 0;
    for (uint32_t i = 0, all = all_cells(cells); i < all; i++) {
        char name[64];
        name_of(&cells[i], name, sizeof name);
        if (match != NULL && strstr(name, match) == NULL)
            continue;
        const struct cell *c = &cells[n++];
        cells[n - 1] = cells[i];
        uint64_t rows = (uint64_t)c->batch * c->seq_tokens * c->heads;
        uint64_t bytes = rows * DIM * 2 * attn_dtype_bytes(c->dtype) + 4096;
        uint32_t tokens = c->batch * c->seq_tokens * (is_over_heads(c) ? c->heads : 1);
        largest = bytes > largest ? bytes : largest;
        options.max_tokens = tokens > options.max_tokens ? tokens : options.max_tokens;
    }
    if (n == 0) {
        fprintf(stderr, "attnbench: no cell matches '%s'\n", match);
        return 2;
    }
    if (!bench_open(&x, &options, largest)) {
        fprintf(stderr, "attnbench: %s\n", x.error);
        bench_close(&x);
        return 69;
    }
    struct backend_info info;
    x.ops->info(x.b, &info);
    printf("%s: %s, %u processors; medians of %u runs, cold caches\n\n", info.name, info.device,
           info.n_processors, options.runs);
    printf("%-42s %12s %12s %10s %12s %8s %8s %9s %9s %s\n", "row", "us", "least us", "MiB",
           "tokens/s", "TFLOP/s", "x floor", "us/public", "rel L2", "status");
    if (csv != NULL)
        fputs("Backend,Impl,Reading,Dtype,Batch,SeqLen,Heads,HeadDim,Shards,Segments,Rates,Status,"
              "Time_us,Min_us,Memory_MiB,Tokens_per_s,TFLOP_per_s,Floor_us,Best_Public_us,"
              "Max_Abs_Error,Relative_L2_Error,Rows_Checked,Rows\n",
              csv);
    bool ok = true, is_wrong = false;
    for (uint32_t i = 0; ok && i < n; i++) {
        struct setup s;
        struct result r = {0};
        ok = setup_open(&x, &cells[i], &s) && measure(&x, &s, &r);
        setup_close(&x, &s);
        if (!ok)
            break;
        is_wrong = is_wrong || strcmp(r.status, "WRONG") == 0;
        print_row(&cells[i], &r);
        if (csv != NULL)
            write_csv(csv, info.name, &cells[i], &r);
    }
    if (!ok)
        fprintf(stderr, "attnbench: %s\n", x.error);
    bench_close(&x);
    return ok && !is_wrong ? 0 : 1;
}
