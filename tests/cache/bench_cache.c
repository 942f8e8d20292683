/* bench_cache.c: measures what a fork of a long prefix costs, and how fast blocks go to host memory
 * and back.
 *
 *   forks   1,000 forks of one prefix: time each, arena memory each (resident pages of its memfd),
 *           and blocks: none until a fork writes
 *   swaps   blocks of 2 MiB (Llama-3-8B's, 16 tokens) along the path of the host tier on a CPU: a
 *           place, copy and checksum in one pass; find, copy back likewise, verify; next to memcpy
 * Medians of 5 runs.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

#include "cache/kv_append.h"
#include "cache/kv_pool.h"
#include "cache/tier_store.h"
#include "kernels/moves.h"
#include "tests/cache/open.h"

enum { BLOCK_TOKENS = 16, N_FORKS = 1000, RUNS = 5, N_LAYERS = 32, SWAP_BLOCKS = 256 };
#define SWAP_BYTES ((size_t)2 << 20)

static double now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

static void die(const char *what)
{
    fprintf(stderr, "bench_cache: %s\n", what);
    exit(1);
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

static double resident_bytes(const struct kv *kv)
{
    struct stat s;
    if (fstat(kv_fd(kv), &s) != 0)
        die("fstat");
    return (double)s.st_blocks * 512;
}

struct fork_cost {
    double fork_ns, bytes; /* each */
    double write_ns; /* the first token of one: its table and ids become its own */
    uint64_t n_blocks; /* that all of them took before they wrote */
};

/* The next token of a fork, in one layer. */
static double write_ns(struct kv *kv, kv_seq_id seq, uint32_t pos, struct kv_effects *fx)
{
    double begun = now_ns();
    fx->n_patches = 0;
    if (kv_append_reserve(kv, seq, 0, pos, 1, fx) != ATTN_OK)
        die(kv_last_error(kv));
    kv_append_commit(kv, seq, 0, pos, 1);
    return now_ns() - begun;
}

/* Forks of a prefix of n tokens with ids. */
static struct fork_cost forks(uint32_t n)
{
    struct fork_cost cost;
    uint32_t row = n / BLOCK_TOKENS + 1;
    uint32_t *ids = calloc(n, sizeof *ids);
    struct kv_config c = {.max_pools = 1,
                          .max_blocks = row + 8,
                          .max_sequences = N_FORKS + 1,
                          .max_seq_blocks = row,
                          .max_layers = N_LAYERS,
                          .max_seq_tokens = n,
                          .max_block_tokens = BLOCK_TOKENS,
                          .max_owners = 1,
                          .block_layout = 1};
    struct kv_pool_spec spec = {
        .name = "p", .n_layers = N_LAYERS, .n_blocks = row, .block_tokens = BLOCK_TOKENS};
    struct kv_patch *patches = malloc(row * sizeof *patches);
    struct kv_effects fx = {.patches = patches, .patches_capacity = row};
    struct kv *kv;
    kv_pool_id pool;
    kv_seq_id first, seq;
    char why[256];
    struct kv_stats before, after;
    if (patches == NULL || ids == NULL || kv_open(&c, -1, &kv, why, sizeof why) != ATTN_OK ||
        kv_pool_create(kv, &spec, &pool) != ATTN_OK ||
        kv_seq_open(kv, 0, 1, pool, 0, KV_NO_REQUEST, &first) != ATTN_OK)
        die("no prefix");
    for (uint32_t l = 0; l < N_LAYERS; l++) {
        fx.n_patches = 0;
        if (kv_append_reserve(kv, first, l, 0, n, &fx) != ATTN_OK)
            die(kv_last_error(kv));
        kv_append_commit(kv, first, l, 0, n);
    }
    for (uint32_t i = 0; i < n; i++)
        ids[i] = i * 2654435761u;
    if (kv_seq_tokens(kv, first, 0, ids, n) != ATTN_OK)
        die(kv_last_error(kv));
    kv_stats_read(kv, &before);
    double bytes = resident_bytes(kv), begun = now_ns();
    for (uint64_t i = 0; i < N_FORKS; i++) {
        if (kv_seq_fork(kv, first, 2 + i, n, 0, KV_NO_REQUEST, &seq) != ATTN_OK)
            die(kv_last_error(kv));
    }
    cost.fork_ns = (now_ns() - begun) / N_FORKS;
    cost.bytes = (resident_bytes(kv) - bytes) / N_FORKS;
    kv_stats_read(kv, &after);
    cost.n_blocks = after.blocks_used - before.blocks_used;
    cost.write_ns = write_ns(kv, seq, n, &fx);
    free(patches);
    free(ids);
    kv_close(kv);
    return cost;
}

static void print_forks(void)
{
    static const uint32_t n_blocks[] = {1, 1000, 100000, 1000000};
    printf("forks of one prefix, %d of them\n", N_FORKS);
    printf("%10s %12s %12s %12s %16s\n", "blocks", "us/fork", "bytes/fork", "blocks taken",
           "us/first write");
    for (size_t i = 0; i < sizeof n_blocks / sizeof n_blocks[0]; i++) {
        double ns[RUNS], write[RUNS];
        struct fork_cost c = {0};
        for (int r = 0; r < RUNS; r++) {
            c = forks(n_blocks[i] * BLOCK_TOKENS);
            ns[r] = c.fork_ns, write[r] = c.write_ns;
        }
        printf("%10u %12.3f %12.0f %12llu %16.1f\n", n_blocks[i], median(ns) / 1e3, c.bytes,
               (unsigned long long)c.n_blocks, median(write) / 1e3);
    }
}

static bool take(void *arg, uint64_t bytes, uint64_t *out_place)
{
    (void)arg;
    void *p = aligned_alloc(4096, bytes);
    if (p != NULL)
        memset(p, 1, bytes); /* pages, once */
    *out_place = (uintptr_t)p;
    return p != NULL;
}

static void give(void *arg, uint64_t place, uint64_t bytes)
{
    (void)arg, (void)bytes;
    free((void *)(uintptr_t)place);
}

static void *bytes_of(const struct tier_block *b)
{
    return (void *)(uintptr_t)tier_block_place(b);
}

static double gb_per_s(double ns)
{
    return (double)SWAP_BLOCKS * (double)SWAP_BYTES / ns;
}

static struct kv_content content_of(uint32_t i, const uint32_t *ids)
{
    return (struct kv_content){.n_ids = 1, .key = {i, 0}, .serial = i + 1, .ids = ids, .index = i};
}

static void print_swaps(void)
{
    const struct tier_memory m = {.take = take, .give = give};
    uint8_t *device = aligned_alloc(4096, SWAP_BLOCKS * SWAP_BYTES);
    uint8_t *plain = aligned_alloc(4096, SWAP_BLOCKS * SWAP_BYTES);
    double copy[RUNS], out[RUNS], in[RUNS];
    uint32_t id = 7;
    uint64_t sum[2];
    if (device == NULL || plain == NULL)
        die("no memory");
    memset(device, 3, SWAP_BLOCKS * SWAP_BYTES);
    memset(plain, 4, SWAP_BLOCKS * SWAP_BYTES);
    for (int r = 0; r < RUNS; r++) {
        struct tier_store *t;
        if (tier_store_open(SWAP_BLOCKS * SWAP_BYTES, &m, &t) != ATTN_OK)
            die("no tier");
        double spent = 0;
        for (int pass = 0; pass < 2; pass++) { /* the first takes the memory */
            spent = now_ns();
            for (uint32_t i = 0; i < SWAP_BLOCKS; i++) {
                struct kv_content c = content_of(i + (uint32_t)pass * SWAP_BLOCKS, &id);
                struct tier_block *b = tier_store_place(t, &c, SWAP_BYTES);
                if (b == NULL)
                    die("no place");
                moves_copy(bytes_of(b), device + i * SWAP_BYTES, SWAP_BYTES, sum);
                tier_store_filled(t, b, sum);
            }
            spent = now_ns() - spent;
        }
        out[r] = gb_per_s(spent);
        spent = now_ns();
        for (uint32_t i = 0; i < SWAP_BLOCKS; i++) {
            struct kv_content c = content_of(i + SWAP_BLOCKS, &id);
            struct tier_block *b = tier_store_find(t, &c);
            if (b == NULL)
                die("a block is lost");
            moves_copy(device + i * SWAP_BYTES, bytes_of(b), SWAP_BYTES, sum);
            if (!tier_store_verify(t, b, sum))
                die("a block is not what it was");
        }
        in[r] = gb_per_s(now_ns() - spent);
        tier_store_close(t);
        spent = now_ns();
        for (uint32_t i = 0; i < SWAP_BLOCKS; i++)
            memcpy(plain + i * SWAP_BYTES, device + i * SWAP_BYTES, SWAP_BYTES);
        copy[r] = gb_per_s(now_ns() - spent);
    }
    double memcpy_rate = median(copy), out_rate = median(out), in_rate = median(in);
    printf("swaps of blocks of %zu KiB, GB/s: memcpy %.1f, out %.1f (%.0f %%), in %.1f (%.0f %%)\n",
           SWAP_BYTES >> 10, memcpy_rate, out_rate, 100 * out_rate / memcpy_rate, in_rate,
           100 * in_rate / memcpy_rate);
    free(device);
    free(plain);
}

int main(void)
{
    print_forks();
    print_swaps();
    return 0;
}
