/* cpu_bench.c: what the cpu backend measures of itself (backend_bench.h). Caches are emptied before
 * each run by reading a buffer several times their size; the clock runs from the call on the engine
 * thread to its return.
 */
#include "kernels/backend_bench.h"
#include "kernels/bench/cpu_layer.h"
#include "kernels/cpu/cpu.h"
#include "proto/attn_time.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define PART_BYTES (64 << 10)

static const char *const variants[] = {"naive",      "portable", "avx2", "avx512",
                                       "avx512bf16", "apart",    NULL};

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
    uint32_t n_shards = backend_bench_shards(variant);
    const bool is_apart = variant != NULL && strcmp(variant, "apart") == 0;
    const struct cpu_isa *isas[4];
    const struct cpu_isa *isa = variant == NULL || n_shards > 0 || is_apart ? b->isa : NULL;
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
    for (uint32_t i = 0; is_naive && i < n_batches; i++)
        for (uint32_t k = 0; k < batches[i]->n_items; k++)
            if (batches[i]->pool->layers[batches[i]->items[k].layer].n_branches > 0) {
                cpu_fail(b, "variant naive: layer %u is dilated", batches[i]->items[k].layer);
                return ATTN_ENOTSUP;
            }
    for (uint32_t run = 0; run < n_runs; run++) {
        struct backend_batch *batch = batches[run % n_batches];
        attn_status st = evict_caches(b);
        if (st != ATTN_OK)
            return st;
        uint64_t start = attn_now_ns();
        cpu_append(b, batch);
        b->shared.is_off = is_apart;
        st = is_naive ? cpu_attend_naive(b, batch) : cpu_attend(b, isa, batch, n_shards);
        b->shared.is_off = false;
        out_ns[run] = attn_now_ns() - start;
        batch->status = st;
        if (st != ATTN_OK)
            return st;
    }
    return ATTN_OK;
}

static attn_status cpu_time_layer(struct backend *b, struct backend_batch *batch,
                                  const struct backend_bench_layer *layer, uint32_t n_runs,
                                  bool is_alone, uint64_t *out_ns)
{
    (void)is_alone;
    struct cpu_layer l;
    attn_status st = ATTN_OK;
    if (!cpu_layer_open(&l, batch->pool->config.q_dtype, layer, batch)) {
        cpu_fail(b, "no memory for a layer of dim %u", layer->dim);
        st = ATTN_ENOMEM;
    }
    for (uint32_t run = 0; run < n_runs && st == ATTN_OK; run++) {
        st = evict_caches(b);
        uint64_t start = attn_now_ns();
        if (st == ATTN_OK)
            st = cpu_layer_run(b, &l, batch);
        out_ns[run] = attn_now_ns() - start;
    }
    cpu_layer_close(&l);
    return st;
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

/* ---- a batch as work */

struct cpu_work {
    struct bench_work work;
    struct backend *b;
    struct backend_batch *batch;
};

static attn_status work_run(struct bench_work *work, void *stream)
{
    struct cpu_work *w = (struct cpu_work *)work;
    (void)stream;
    cpu_append(w->b, w->batch);
    w->batch->status = cpu_attend(w->b, w->b->isa, w->batch, 0);
    return w->batch->status;
}

static void work_close(struct bench_work *work)
{
    free(work);
}

static attn_status cpu_work_open(struct backend *b, struct backend_batch *batch,
                                 struct bench_work **out_w)
{
    struct cpu_work *w = malloc(sizeof *w);
    if (w == NULL) {
        cpu_fail(b, "no memory for a batch");
        return ATTN_ENOMEM;
    }
    *w = (struct cpu_work){{work_run, work_close}, b, batch};
    *out_w = &w->work;
    return ATTN_OK;
}

static const struct backend_bench_ops ops = {
    .abi = BACKEND_ABI,
    .name = "cpu",
    .variants = variants,
    .time_batch = cpu_time_batch,
    .time_layer = cpu_time_layer,
    .time_read = cpu_time_read,
    .work_open = cpu_work_open,
};

const struct backend_bench_ops *backend_cpu_bench(void)
{
    return &ops;
}
