/* bench_prefix.c: measures what prefix sharing costs, and how much of a trace it finds. Not a test.
 *   bench_prefix            nanoseconds per block of append, publish, open with a hit, evict, close
 *                           and free; the median of five runs for each size of the cache
 *   bench_prefix TRACE      the share of a trace's blocks that are found, by the size of the cache
 *
 * A trace is Mooncake's: JSON lines whose hash_ids name the blocks of a prompt in order. Each
 * request is opened with them, appended and closed before the next one: only metadata, no K and V.
 * The cache is compared with a list of blocks by last use (lru) and with one that knows the future
 * and evicts what is needed last or never again (optimum). A block counts as found only if those
 * before it are found, too.
 */
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "cache/kv_append.h"
#include "cache/kv_owner.h"
#include "cache/kv_pool.h"
#include "cache/kv_seq.h"
#include "tests/cache/open.h"

enum { BLOCK_TOKENS = 16, TRACE_BLOCK_TOKENS = 8, MAX_ROW = 4096, RUNS = 5 };

static struct kv *kv;
static kv_pool_id pool;
static struct kv_patch patches[2 * MAX_ROW];
static struct kv_copy copies[16];

static void die(const char *what)
{
    fprintf(stderr, "bench_prefix: %s: %s\n", what, kv == NULL ? "" : kv_last_error(kv));
    exit(1);
}

static void *allocate(size_t n, size_t bytes)
{
    void *p = calloc(n, bytes);
    if (p == NULL)
        die("no memory");
    return p;
}

static double now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

static void cache_open(uint32_t n_blocks, uint32_t block_tokens, uint32_t row, uint32_t n_seqs)
{
    struct kv_config c = {.max_pools = 1,
                          .max_blocks = n_blocks,
                          .max_sequences = n_seqs,
                          .max_seq_blocks = row,
                          .max_seq_tokens = row * block_tokens,
                          .max_block_tokens = block_tokens,
                          .max_layers = 1,
                          .max_owners = 1,
                          .block_layout = 1,
                          .events_kept = 1 << 16};
    struct kv_pool_spec s = {
        .name = "bench", .n_layers = 1, .block_tokens = block_tokens, .n_blocks = n_blocks};
    char why[256];
    if (kv_open(&c, -1, &kv, why, sizeof why) != ATTN_OK ||
        kv_pool_create(kv, &s, &pool) != ATTN_OK)
        die("open");
    kv_owner_begin(kv, 0, 1, 0, "bench");
}

/* Opens a sequence with these tokens; returns the tokens that it begins with. */
static uint32_t seq_open(const uint32_t *ids, uint32_t n, kv_seq_id *out)
{
    struct kv_effects fx = {.patches = patches,
                            .copies = copies,
                            .patches_capacity = 2 * MAX_ROW,
                            .copies_capacity = 16};
    struct kv_tokens t = {.ids = ids, .n = n};
    struct kv_seq_info info;
    if (kv_seq_open_with(kv, 0, 1, pool, 0, KV_NO_REQUEST, &t, &fx, out) != ATTN_OK)
        die("open with");
    kv_seq_info(kv, *out, &info);
    return info.n_cached;
}

static void seq_append(kv_seq_id seq, uint32_t pos, uint32_t n)
{
    struct kv_effects fx = {.patches = patches,
                            .copies = copies,
                            .patches_capacity = 2 * MAX_ROW,
                            .copies_capacity = 16};
    if (kv_append_reserve(kv, seq, 0, pos, n, &fx) != ATTN_OK)
        die("reserve");
    kv_append_commit(kv, seq, 0, pos, n);
}

/* --- costs ------------------------------------------------------------------------------------ */

enum { PER_SEQ = 64, N_IDS = PER_SEQ * BLOCK_TOKENS + 1, SEQ_ROW = PER_SEQ + 1 };

/* What is timed, of all blocks of the cache. */
enum cost { NEW, HIT, SHUT, OLD, EVICT, FREE, APPEND, PUBLISH, N_COSTS };
static const char *const cost_names[N_COSTS] = {
    [NEW] = "append and publish, memory that is new",
    [HIT] = "open with a hit",
    [SHUT] = "close what others can find",
    [OLD] = "evict, append and publish",
    [EVICT] = "evict and append",
    [FREE] = "free",
    [APPEND] = "append",
    [PUBLISH] = "publish",
};

static const uint32_t *ids_of(uint32_t seq, uint32_t salt)
{
    static uint32_t ids[N_IDS];
    for (uint32_t i = 0; i < N_IDS; i++)
        ids[i] = salt * 0x40000000u + seq * 1031 + i;
    return ids;
}

/* Opens all prompts one after another, and closes them; those of round 1 are found. */
static void prompts(uint32_t n_seqs, uint32_t salt, double *open, double *append, double *shut)
{
    uint32_t n_found = 0;
    kv_seq_id seq;
    for (uint32_t s = 0; s < n_seqs; s++) {
        const uint32_t *ids = ids_of(s, salt);
        double t0 = now_ns();
        uint32_t n = seq_open(ids, N_IDS, &seq);
        double t1 = now_ns();
        if (n == 0)
            seq_append(seq, 0, N_IDS);
        double t2 = now_ns();
        kv_seq_close(kv, seq);
        n_found += n;
        *open += t1 - t0;
        *append += t2 - t1;
        *shut += now_ns() - t2;
    }
    if (n_found != 0 && n_found != n_seqs * PER_SEQ * BLOCK_TOKENS)
        die("some were found again, not all");
}

/* Sequences of tokens that nobody knows, all open at once. */
static double appends(uint32_t n_seqs, kv_seq_id *seqs)
{
    double spent = 0;
    for (uint32_t s = 0; s < n_seqs; s++) {
        if (kv_seq_open(kv, 0, 1 + s, pool, 0, KV_NO_REQUEST, &seqs[s]) != ATTN_OK)
            die("open");
        double t0 = now_ns();
        seq_append(seqs[s], 0, N_IDS);
        spent += now_ns() - t0;
    }
    return spent;
}

static double publishes(uint32_t n_seqs, const kv_seq_id *seqs)
{
    double spent = 0;
    for (uint32_t s = 0; s < n_seqs; s++) {
        const uint32_t *ids = ids_of(s, 3);
        double t0 = now_ns();
        if (kv_seq_tokens(kv, seqs[s], 0, ids, N_IDS) != ATTN_OK)
            die("tokens");
        spent += now_ns() - t0;
    }
    return spent;
}

static double frees(uint32_t n_seqs, const kv_seq_id *seqs)
{
    double t0 = now_ns();
    for (uint32_t s = 0; s < n_seqs; s++)
        kv_seq_close(kv, seqs[s]);
    return now_ns() - t0;
}

/* A cache of n blocks is filled with prompts of 64 blocks, all are opened again, and replaced;
 * then by sequences that are all open at once. */
static void costs(uint32_t n, double out_ns[N_COSTS])
{
    uint32_t n_seqs = n / SEQ_ROW;
    double other = 0;
    kv_seq_id *seqs = allocate(n_seqs, sizeof *seqs);
    memset(out_ns, 0, N_COSTS * sizeof *out_ns);
    cache_open(n, BLOCK_TOKENS, SEQ_ROW, n_seqs + 1);
    prompts(n_seqs, 0, &other, &out_ns[NEW], &other);
    prompts(n_seqs, 0, &out_ns[HIT], &other, &out_ns[SHUT]);
    prompts(n_seqs, 2, &other, &out_ns[OLD], &other);
    out_ns[EVICT] = appends(n_seqs, seqs);
    out_ns[FREE] = frees(n_seqs, seqs);
    out_ns[APPEND] = appends(n_seqs, seqs);
    out_ns[PUBLISH] = publishes(n_seqs, seqs);
    for (int i = 0; i < N_COSTS; i++)
        out_ns[i] /= (double)n_seqs * PER_SEQ;
    free(seqs);
    kv_close(kv);
}

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void print_costs(void)
{
    static const uint32_t sizes[] = {1000, 100000, 1000000};
    enum { N_SIZES = sizeof sizes / sizeof sizes[0] };
    static double ns[N_SIZES][N_COSTS][RUNS];
    for (int s = 0; s < N_SIZES; s++)
        for (int r = 0; r < RUNS; r++) {
            double one[N_COSTS];
            costs(sizes[s], one);
            for (int c = 0; c < N_COSTS; c++)
                ns[s][c][r] = one[c];
        }
    printf("| ns per block, in a cache of | %u | %u | %u |\n|---|---|---|---|\n", sizes[0],
           sizes[1], sizes[2]);
    for (int c = 0; c < N_COSTS; c++) {
        printf("| %s |", cost_names[c]);
        for (int s = 0; s < N_SIZES; s++) {
            qsort(ns[s][c], RUNS, sizeof(double), compare);
            printf(" %.0f |", ns[s][c][RUNS / 2]);
        }
        putchar('\n');
    }
}

/* --- a trace ---------------------------------------------------------------------------------- */

struct trace {
    uint32_t *id, n_ids; /* of all requests */
    uint32_t *first, n_requests; /* of each request; one more */
    uint32_t n_distinct;
};

static struct trace trace_load(const char *path)
{
    struct trace t = {.id = allocate(1 << 24, 4), .first = allocate(1 << 20, 4)};
    static char line[1 << 20];
    FILE *f = fopen(path, "r");
    if (f == NULL)
        die(path);
    while (fgets(line, sizeof line, f) != NULL && t.n_requests + 1 < 1 << 20) {
        json_t *o = json_loads(line, 0, NULL), *ids = json_object_get(o, "hash_ids");
        if (o == NULL || json_array_size(ids) > MAX_ROW - 1 || t.n_ids + MAX_ROW > 1 << 24)
            die("a line of the trace");
        for (size_t i = 0; i < json_array_size(ids); i++) {
            uint32_t id = (uint32_t)json_integer_value(json_array_get(ids, i));
            t.n_distinct = id >= t.n_distinct ? id + 1 : t.n_distinct;
            t.id[t.n_ids++] = id;
        }
        t.first[++t.n_requests] = t.n_ids;
        json_decref(o);
    }
    fclose(f);
    return t;
}

static double found_by_cache(const struct trace *t, uint32_t n_blocks)
{
    static uint32_t ids[MAX_ROW * TRACE_BLOCK_TOKENS];
    uint64_t n_found = 0;
    kv_seq_id seq;
    /* one for the token that is not looked for */
    cache_open(n_blocks + 1, TRACE_BLOCK_TOKENS, MAX_ROW, 4);
    for (uint32_t r = 0; r < t->n_requests; r++) {
        uint32_t n = t->first[r + 1] - t->first[r];
        for (uint32_t i = 0; i < n * TRACE_BLOCK_TOKENS; i++)
            ids[i] = t->id[t->first[r] + i / TRACE_BLOCK_TOKENS];
        uint32_t have = seq_open(ids, n * TRACE_BLOCK_TOKENS + 1, &seq);
        n_found += have / TRACE_BLOCK_TOKENS;
        seq_append(seq, have, n * TRACE_BLOCK_TOKENS + 1 - have);
        kv_seq_close(kv, seq);
    }
    kv_close(kv);
    return (double)n_found / t->n_ids;
}

/* One that keeps n_blocks by their rank: what has the lowest goes. rank_at[i]: of the block of the
 * trace's i-th place from then on. */
static double found_by_rank(const struct trace *t, uint32_t n_blocks, const uint32_t *rank_at)
{
    struct entry {
        uint32_t rank, id;
    } *heap = allocate(t->n_ids + 1, sizeof *heap);
    uint32_t *rank = allocate(t->n_distinct, 4); /* of what is there, plus one; 0: it is not */
    uint32_t n_heap = 0, n_there = 0;
    uint64_t n_found = 0;
    for (uint32_t r = 0; r < t->n_requests; r++) {
        bool is_leading = true;
        for (uint32_t i = t->first[r]; i < t->first[r + 1]; i++) {
            uint32_t id = t->id[i], at = n_heap++;
            is_leading &= rank[id] != 0;
            n_found += is_leading;
            n_there += rank[id] == 0;
            rank[id] = rank_at[i] + 1;
            for (; at > 0 && heap[(at - 1) / 2].rank > rank_at[i]; at = (at - 1) / 2)
                heap[at] = heap[(at - 1) / 2];
            heap[at] = (struct entry){rank_at[i], id};
            while (n_there > n_blocks) { /* the lowest goes, if it is still its rank */
                struct entry low = heap[0], last = heap[--n_heap];
                uint32_t to = 0, child;
                while ((child = 2 * to + 1) < n_heap) {
                    child += child + 1 < n_heap && heap[child + 1].rank < heap[child].rank;
                    if (heap[child].rank >= last.rank)
                        break;
                    heap[to] = heap[child];
                    to = child;
                }
                heap[to] = last;
                if (rank[low.id] == low.rank + 1) {
                    rank[low.id] = 0;
                    n_there--;
                }
            }
        }
    }
    free(heap);
    free(rank);
    return (double)n_found / t->n_ids;
}

static void trace_table(const char *path)
{
    static const uint32_t percents[] = {100, 50, 25, 10};
    struct trace t = trace_load(path);
    uint32_t *by_use = allocate(t.n_ids, 4), *by_need = allocate(t.n_ids, 4);
    uint32_t *next = allocate(t.n_distinct, 4);
    for (uint32_t i = 0; i < t.n_ids; i++)
        by_use[i] = i;
    for (uint32_t i = t.n_ids; i-- > 0;) { /* needed soon: a high rank; never again: 0 */
        by_need[i] = next[t.id[i]];
        next[t.id[i]] = t.n_ids - i;
    }
    printf("%u requests, %u blocks, %u of them distinct\n\n", t.n_requests, t.n_ids, t.n_distinct);
    printf("| blocks kept | attnd | lru | optimum |\n|---|---|---|---|\n");
    for (uint32_t i = 0; i < sizeof percents / sizeof percents[0]; i++) {
        uint32_t n = (uint32_t)((uint64_t)t.n_distinct * percents[i] / 100);
        printf("| %u (%u %%) | %.3f | %.3f | %.3f |\n", n, percents[i], found_by_cache(&t, n),
               found_by_rank(&t, n, by_use), found_by_rank(&t, n, by_need));
    }
}

int main(int argc, char **argv)
{
    if (argc > 1) {
        trace_table(argv[1]);
        return 0;
    }
    print_costs();
    return 0;
}
