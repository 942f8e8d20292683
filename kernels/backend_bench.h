/* backend_bench.h: what a backend can measure of itself: a second table beside struct backend_ops,
 * which attnbench and the self test ask for. Nothing that serves a request calls it.
 */
#ifndef ATTND_KERNELS_BACKEND_BENCH_H
#define ATTND_KERNELS_BACKEND_BENCH_H

#include "kernels/backend.h"

/* Slots are called between the backend's open and close, on the engine thread, while no batch is
 * in flight. They block; results of a run are left in the batch's buffers. out_ns is [n_runs].
 * is_alone: a run is enqueued when the one before is done, so that nothing is submitted while
 * the clock runs. Failures leave a sentence in the backend's last_error. */
struct backend_bench_ops {
    uint32_t abi; /* BACKEND_ABI */
    const char *name; /* the backend's */

    const char *const *variants; /* NULL-terminated, "naive" first, each faster by one idea */

    /* Device time of n_runs runs, run r computing batches[r % n_batches] with cold caches;
     * variant names one of variants[], NULL is what submit does. Errors: ATTN_ENOTSUP no such
     * variant, or it cannot compute this geometry. */
    attn_status (*time_batch)(struct backend *b, const char *variant,
                              struct backend_batch *const *batches, uint32_t n_batches,
                              uint32_t n_runs, bool is_alone, uint64_t *out_ns);
    /* A plain read of bytes the best way the device knows, cold, of one place of the KV memory
     * after the other; bytes 0: an empty launch. Errors: ATTN_ENOTSUP more bytes than KV memory. */
    attn_status (*time_read)(struct backend *b, uint64_t bytes, uint32_t n_runs, bool is_alone,
                             uint64_t *out_ns);
};

/* The table that a loadable module exports under this name. */
#define BACKEND_BENCH_SYMBOL "attnd_backend_bench"
typedef const struct backend_bench_ops *(*backend_bench_fn)(void);

/* The built-in CPU backend's. */
const struct backend_bench_ops *backend_cpu_bench(void);

/* Finds the table of a backend as backend_load finds the backend. ATTN_ENOTFOUND: the reason is
 * in why. */
attn_status backend_bench_load(const char *name, const struct backend_bench_ops **out_ops,
                               char *why, size_t why_bytes);

#endif
