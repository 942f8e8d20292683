/* cpu_bench.c: what the cpu backend measures of itself (backend_bench.h). Caches are emptied before
 * each run by reading a buffer several times their size; the clock runs from the call on the engine
 * thread to its return.
 */
#include "kernels/backend_bench.h"
#include "kernels/cpu/cpu.h"
#include "proto/attn_time.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define PART_BYTES (64 << 10)

static const char *const variants[] = {"naive", "portable", "avx2", "avx512", "avx512bf16", NULL};

struct read_job {
    const struct cpu_isa *isa;
    const uint8_t *base;
    uint64_t bytes;
    _Atomic uint64_t next;
    _Atomic uint64_t sum; /* keeps the reads from being left out */
};

static void read_parts(void *arg, uint32_t thread)
{
    (void)thread;
    struct read_job *job = arg;
    uint64_t at, sum = 0;
    while ((at = atomic_fetch_add(&job->next, PART_BYTES)) < job->bytes) {
        uint64_t n = job->bytes - at < PART_BYTES ? job->bytes - at : PART_BYTES;
        sum += job->isa->read(job->base + at, n);
    }
    atomic_fetch_add(&job->sum, sum);
}

static void read_all(struct backend *b, const uint8_t *base, uint64_t bytes)
{
    struct read_job job = {.isa = b->isa, .base = base, .bytes = bytes};
    cpu_threads_run(b->threads, read_parts, &job);
}

static attn_status evict_caches(struct backend *b)
{
    if (b->evict == NULL) {
        long cache = sysconf(_SC_LEVEL3_CACHE_SIZE);
        b->evict_bytes = cache > (16 << 20) ? 4 * (size_t)cache : 64 << 20;
        b->evict = aligned_alloc(4096, b->evict_bytes);
        if (b->evict == NULL) {
            cpu_fail(b, "no memory for %zu bytes to empty the caches with", b->evict_bytes);
            return ATTN_ENOMEM;
        }
        memset(b->evict, 1, b->evict_bytes);
    }
    read_all(b, b->evict, b->evict_bytes);
    return ATTN_OK;
}

static attn_status cpu_time_batch(struct backend *b, const char *variant,
                                  struct backend_batch *const *batches, uint32_t n_batches,
                                  uint32_t n_runs, bool is_alone, uint64_t *out_ns)
{
    const struct cpu_isa *isas[4], *isa = variant == NULL ? b->isa : NULL;
    bool is_naive = variant != NULL && strcmp(variant, "naive") == 0;
    uint32_t n_isas = cpu_isa_supported(isas);
    (void)is_alone; /* it always is */
    for (uint32_t i = 0; isa == NULL && i < n_isas; i++)
        if (strcmp(isas[i]->name, variant) == 0)
            isa = isas[i];
    if (isa == NULL && !is_naive) {
        cpu_fail(b, "variant '%s' is unknown or needs another CPU", variant);
        return ATTN_ENOTSUP;
    }
    for (uint32_t run = 0; run < n_runs; run++) {
        struct backend_batch *batch = batches[run % n_batches];
        attn_status st = evict_caches(b);
        if (st != ATTN_OK)
            return st;
        uint64_t start = attn_now_ns();
        cpu_append(b, batch);
        st = is_naive ? cpu_attend_naive(b, batch) : cpu_attend(b, isa, batch);
        out_ns[run] = attn_now_ns() - start;
        batch->status = st;
        if (st != ATTN_OK)
            return st;
    }
    return ATTN_OK;
}

static attn_status cpu_time_read(struct backend *b, uint64_t bytes, uint32_t n_runs, bool is_alone,
                                 uint64_t *out_ns)
{
    (void)is_alone;
    if (bytes > b->memory.bytes) {
        cpu_fail(b, "cannot read %llu bytes of %llu", (unsigned long long)bytes,
                 (unsigned long long)b->memory.bytes);
        return ATTN_ENOTSUP;
    }
    for (uint32_t run = 0; run < n_runs; run++) {
        attn_status st = evict_caches(b);
        if (st != ATTN_OK)
            return st;
        uint64_t room = b->memory.bytes - bytes;
        uint64_t at = room > 0 ? (run * bytes) % room / 4096 * 4096 : 0;
        uint64_t start = attn_now_ns();
        read_all(b, b->memory.base + at, bytes / 64 * 64);
        out_ns[run] = attn_now_ns() - start;
    }
    return ATTN_OK;
}

static const struct backend_bench_ops ops = {
    .abi = BACKEND_ABI,
    .name = "cpu",
    .variants = variants,
    .time_batch = cpu_time_batch,
    .time_read = cpu_time_read,
};

const struct backend_bench_ops *backend_cpu_bench(void)
{
    return &ops;
}
