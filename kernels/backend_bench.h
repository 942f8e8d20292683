/* backend_bench.h: what a backend can measure of itself: a second table beside struct backend_ops,
 * which attnbench and the self test ask for. Nothing that serves a request calls it.
 */
#ifndef ATTND_KERNELS_BACKEND_BENCH_H
#define ATTND_KERNELS_BACKEND_BENCH_H

#include "kernels/backend.h"

#include <stdio.h>

/* Work that is enqueued again and again: attention whose tensors stay where they are. run enqueues
 * it on a stream of the device (a runtime_stream of vendor/runtime.h; a CPU has none and computes
 * at once). */
struct bench_work {
    attn_status (*run)(struct bench_work *w, void *stream);
    void (*close)(struct bench_work *w);
};

/* A layer around a batch's attention: y = x + attention(n Wq, n Wk, n Wv) Wo, n being x less each
 * row's mean over its deviation. Host memory, the pool's q_dtype; rows are those of all items. */
struct backend_bench_layer {
    uint32_t dim; /* of x: a multiple of 64. q, k, v have as many elements, in whatever heads */
    const void *x; /* [rows][dim] */
    const void *weights[4]; /* of q, k, v, out: [dim][dim], a row for each output element */
    void *y; /* [rows][dim] */
};

/* Slots are called between the backend's open and close, on the engine thread, while no batch is
 * in flight. They block; results of a run are left in the batch's buffers. out_ns is [n_runs].
 * is_alone: a run is enqueued when the one before is done, so that nothing is submitted while
 * the clock runs. Failures leave a sentence in the backend's last_error. */
struct backend_bench_ops {
    uint32_t abi; /* BACKEND_ABI */
    const char *name; /* the backend's */

    const char *const *variants; /* NULL-terminated, "naive" first, each faster by one idea */

    /* Device time of n_runs runs, run r computing batches[r % n_batches] with cold caches;
     * variant names one of variants[], NULL is what submit does; "shardsN", N from 1 to 32, cuts
     * what each query sees into N parts that are computed apart and meet by their sums of weights,
     * as the shards of a sequence would. Errors: ATTN_ENOTSUP no such
     * variant, or it cannot compute this geometry. */
    attn_status (*time_batch)(struct backend *b, const char *variant,
                              struct backend_batch *const *batches, uint32_t n_batches,
                              uint32_t n_runs, bool is_alone, uint64_t *out_ns);
    /* The same of the layer around one batch, whose items append and attend; their q, k and v are
     * not read, out is attention's. */
    attn_status (*time_layer)(struct backend *b, struct backend_batch *batch,
                              const struct backend_bench_layer *layer, uint32_t n_runs,
                              bool is_alone, uint64_t *out_ns);
    /* A plain read of bytes the best way the device knows, cold, of one place of the KV memory
     * after the other; bytes 0: an empty launch. Errors: ATTN_ENOTSUP more bytes than KV memory. */
    attn_status (*time_read)(struct backend *b, uint64_t bytes, uint32_t n_runs, bool is_alone,
                             uint64_t *out_ns);
    /* A batch as work, whose items' q, k, v and out are memory of the device. Patches are applied,
     * and q is read, here; a run appends what the batch appends (and reads q again if it does),
     * then attends. The batch stays the caller's until close; not more than one run at a time. */
    attn_status (*work_open)(struct backend *b, struct backend_batch *batch,
                             struct bench_work **out_w);
};

/* The table that a loadable module exports under this name. */
#define BACKEND_BENCH_SYMBOL "attnd_backend_bench"
typedef const struct backend_bench_ops *(*backend_bench_fn)(void);

/* N of a variant called "shardsN", else 0. */
static inline uint32_t backend_bench_shards(const char *variant)
{
    unsigned n = 0;
    int end = 0;
    if (variant == NULL || sscanf(variant, "shards%2u%n", &n, &end) != 1 || variant[end] != 0)
        return 0;
    return n <= 32 ? n : 0;
}

/* The built-in CPU backend's. */
const struct backend_bench_ops *backend_cpu_bench(void);

#endif
