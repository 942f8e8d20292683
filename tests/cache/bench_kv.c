/* bench_kv.c: measures what the bookkeeping of a step costs on the host, by the number of open
 * sequences.
 *
 * A decode item is: find by name, reserve one token, commit. Items come in batches of 64: all are
 * found and reserved, then all committed, as the engine does it. Only these calls are timed; names
 * and positions are computed, not loaded.
 *   layer by layer   each batch has other sequences than the one before: at 100,000 sequences every
 *                    record is out of the near caches (the worst order)
 *   batch by batch   the same 64 sequences for all 32 layers, then the next 64 (as workers do it)
 * Open, fork and close are timed with that many other sequences open. Medians of 5 runs.
 */
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "cache/kv_append.h"
#include "cache/kv_pool.h"
#include "cache/kv_seq.h"
#include "tests/cache/open.h"

#define N_LAYERS 32
#define BLOCK_TOKENS 16
#define PROMPT_TOKENS 100
#define BATCH 64
#define RUNS 5
#define SPARE 1000 /* sequences opened and closed beside the others */

static struct kv *kv;
static kv_pool_id pool;
static struct kv_patch patches[4096];
static struct kv_copy copies[4096];

static void die(const char *what)
{
    fprintf(stderr, "bench_kv: %s: %s\n", what, kv == NULL ? "" : kv_last_error(kv));
    exit(1);
}

static double now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *v)
{
    qsort(v, RUNS, sizeof *v, compare);
    return v[RUNS / 2];
}

static uint64_t name_of(uint64_t i)
{
    return (i + 1) * UINT64_C(0x9e3779b97f4a7c15);
}

/* A permutation of 0..n-1, so that neighbours in a batch are not neighbours in memory. */
static uint32_t shuffled(uint32_t i, uint32_t n)
{
    return (uint32_t)((uint64_t)i * 7919 % n); /* 7919 is prime and divides no n used here */
}

static struct kv_effects fx_new(void)
{
    return (struct kv_effects){
        .patches = patches, .copies = copies, .patches_capacity = 4096, .copies_capacity = 4096};
}

static void append(kv_seq_id seq, uint32_t layer, uint32_t pos, uint32_t n)
{
    struct kv_effects fx = fx_new();
    if (kv_append_reserve(kv, seq, layer, pos, n, &fx) != ATTN_OK)
        die("reserve");
    kv_append_commit(kv, seq, layer, pos, n);
}

static void batch(uint32_t first, uint32_t n_open, uint32_t layer, uint32_t pos)
{
    kv_seq_id ids[BATCH];
    uint32_t n = n_open - first < BATCH ? n_open - first : BATCH;
    struct kv_effects fx = fx_new();
    for (uint32_t i = 0; i < n; i++) {
        if (kv_seq_find(kv, 1, name_of(shuffled(first + i, n_open)), &ids[i]) != ATTN_OK)
            die("find");
        if (kv_append_reserve(kv, ids[i], layer, pos, 1, &fx) != ATTN_OK)
            die("reserve");
    }
    for (uint32_t i = 0; i < n; i++)
        kv_append_commit(kv, ids[i], layer, pos, 1);
}

/* Nanoseconds an item of `rounds` tokens for every sequence. */
static double decode(uint32_t n_open, uint32_t rounds, uint32_t *pos, bool is_by_layer)
{
    double t0 = now_ns();
    for (uint32_t r = 0; r < rounds; r++, ++*pos) {
        if (is_by_layer) {
            for (uint32_t layer = 0; layer < N_LAYERS; layer++)
                for (uint32_t i = 0; i < n_open; i += BATCH)
                    batch(i, n_open, layer, *pos);
        } else {
            for (uint32_t i = 0; i < n_open; i += BATCH)
                for (uint32_t layer = 0; layer < N_LAYERS; layer++)
                    batch(i, n_open, layer, *pos);
        }
    }
    return (now_ns() - t0) / ((double)n_open * rounds * N_LAYERS);
}

struct control {
    double open_ns, fork_ns, close_ns;
};

static struct control control(uint32_t n_open)
{
    struct control c;
    kv_seq_id src, seq;
    if (kv_seq_find(kv, 1, name_of(n_open / 2), &src) != ATTN_OK)
        die("find");
    double t0 = now_ns();
    for (uint64_t i = 0; i < SPARE; i++)
        if (kv_seq_open(kv, 1, name_of(n_open + i), pool, 0, KV_NO_REQUEST, &seq) != ATTN_OK)
            die("open");
    double t1 = now_ns();
    c.open_ns = (t1 - t0) / SPARE;
    for (uint64_t i = 0; i < SPARE; i++)
        if (kv_seq_find(kv, 1, name_of(n_open + i), &seq) == ATTN_OK)
            kv_seq_close(kv, seq);
    t0 = now_ns();
    for (uint64_t i = 0; i < SPARE; i++) {
        if (kv_seq_fork(kv, src, name_of(n_open + i), PROMPT_TOKENS, 0, KV_NO_REQUEST, &seq) !=
            ATTN_OK)
            die("fork");
    }
    t1 = now_ns();
    c.fork_ns = (t1 - t0) / SPARE;
    t0 = now_ns();
    for (uint64_t i = 0; i < SPARE; i++)
        if (kv_seq_find(kv, 1, name_of(n_open + i), &seq) == ATTN_OK)
            kv_seq_close(kv, seq);
    c.close_ns = (now_ns() - t0) / SPARE;
    return c;
}

static void bench(uint32_t n_open)
{
    struct kv_config c = {.max_pools = 1,
                          .max_blocks = n_open * 16 + 100000,
                          .max_sequences = n_open + SPARE,
                          .max_seq_blocks = 1024,
                          .max_seq_tokens = 1024 * BLOCK_TOKENS,
                          .max_block_tokens = BLOCK_TOKENS,
                          .max_layers = N_LAYERS,
                          .max_owners = 16,
                          .block_layout = 1};
    struct kv_pool_spec s = {.name = "bench",
                             .n_layers = N_LAYERS,
                             .block_tokens = BLOCK_TOKENS,
                             .n_blocks = c.max_blocks};
    char why[256];
    kv = NULL;
    if (kv_open(&c, -1, &kv, why, sizeof why) != ATTN_OK)
        die(why);
    if (kv_pool_create(kv, &s, &pool) != ATTN_OK)
        die("pool");
    for (uint32_t i = 0; i < n_open; i++) {
        kv_seq_id seq;
        if (kv_seq_open(kv, 1, name_of(i), pool, 0, KV_NO_REQUEST, &seq) != ATTN_OK)
            die("open");
        for (uint32_t layer = 0; layer < N_LAYERS; layer++)
            append(seq, layer, 0, PROMPT_TOKENS);
    }
    uint32_t pos = PROMPT_TOKENS, rounds = n_open >= 10000 ? 1 : 10000 / n_open;
    double by_layer[RUNS], by_batch[RUNS], opened[RUNS], forked[RUNS], closed[RUNS];
    for (int i = 0; i < RUNS; i++) {
        by_layer[i] = decode(n_open, rounds, &pos, true);
        by_batch[i] = decode(n_open, rounds, &pos, false);
        struct control k = control(n_open);
        opened[i] = k.open_ns, forked[i] = k.fork_ns, closed[i] = k.close_ns;
    }
    printf("%9u %16.0f %16.0f %8.0f %16.0f %8.0f\n", n_open, median(by_layer), median(by_batch),
           median(opened), median(forked), median(closed));
    fflush(stdout);
    kv_close(kv);
}

int main(void)
{
    printf("nanoseconds; %d layers, blocks of %d tokens, batches of %d\n", N_LAYERS, BLOCK_TOKENS,
           BATCH);
    printf("%9s %16s %16s %8s %16s %8s\n", "sequences", "item, by layer", "item, by batch", "open",
           "fork 7 blocks", "close");
    bench(10);
    bench(1000);
    bench(100000);
    return 0;
}
