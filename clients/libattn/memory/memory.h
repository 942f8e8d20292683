/* memory.h: the memory that a lane's regions are in, as a table of functions: host memory (host.c)
 * or a GPU's (cuda.cu, which is libattn-cuda.so, loaded by find.c when it is first needed).
 *
 * The table knows regions, words and layers to be rung for, not pools, plans or messages. Page
 * locking of other host memory for GPUs is in the same library, so in the same table.
 */
#ifndef ATTN_MEMORY_H
#define ATTN_MEMORY_H

#include <stdatomic.h>

#include "proto/attn_types.h"
#include "proto/lane_words.h"

#define LANE_PARTS 3

/* One tensor of a layer: rows of row_bytes, each `stride` behind the one before, go to where they
 * follow each other. In bytes, all but lse's multiples of 16. */
struct lane_part {
    const void *from; /* NULL, or where it goes: not copied */
    void *to;
    uint64_t bytes; /* of all rows */
    uint64_t row_bytes, stride; /* stride 0: they follow each other already */
};

/* One layer as it is enqueued. Addresses are as the lane's memory has them. */
struct lane_layer {
    struct lane_part in[LANE_PARTS], out[2]; /* q, k, v; out, lse */
    void *poison; /* NaN after a failure: out and lse of the region */
    uint64_t poison_bytes;
    struct lane_page *page; /* where the memory sees it */
    uint32_t *done;
    uint64_t wait_ns;
};

/* What module exports under LANE_CUDA_SYMBOL; changes with LANE_CUDA_ABI. */
#define LANE_CUDA_SYMBOL "attn_lane_cuda"
#define LANE_CUDA_ABI 4

/* Unless said otherwise: one thread at a time; 0 or a status, and why says what was not to be
 * had. */
struct lane_memory;
struct lane_memory_ops {
    uint32_t abi; /* LANE_CUDA_ABI */
    /* The calling thread's current device. ATTN_ENOTSUP: there is none that can. */
    attn_status (*open)(struct lane_memory **out_m, struct lane_device *out_device, char *why,
                        size_t why_bytes);
    /* Frees what the others made, too; nothing enqueued is unfinished. */
    void (*close)(struct lane_memory *m);
    /* The worker's region, zeroed; *out_fd is the caller's. */
    attn_status (*region_make)(struct lane_memory *m, uint64_t bytes, int *out_fd, void **out_p,
                               char *why, size_t why_bytes);
    /* The daemon's region. fd stays the caller's. */
    attn_status (*region_map)(struct lane_memory *m, int fd, uint64_t bytes, void **out_p,
                              char *why, size_t why_bytes);
    /* The page, which the caller has mapped and unmaps after close. */
    attn_status (*page_map)(struct lane_memory *m, struct lane_page *page, struct lane_page **out_p,
                            char *why, size_t why_bytes);
    /* The next layer rings `count` + 1, and a failure is forgotten. Nothing enqueued is
     * unfinished. */
    attn_status (*restart)(struct lane_memory *m, uint32_t count, char *why, size_t why_bytes);
    attn_status (*enqueue)(struct lane_memory *m, void *stream, const struct lane_layer *l,
                           char *why, size_t why_bytes);
    /* Is what is enqueued there kept for later instead? */
    bool (*is_capturing)(struct lane_memory *m, void *stream);
    /* Page-locks host memory for all devices, from *device's context on; -1 becomes the calling
     * thread's. NULL: not this memory's. */
    attn_status (*pin)(void *p, uint64_t bytes, int *device, char *why, size_t why_bytes);
    void (*unpin)(void *p);
};

extern const struct lane_memory_ops lane_memory_host;

/* Has the bell been answered? *out_status then says how. */
static inline bool lane_is_answered(const struct lane_page *page, const uint32_t *done,
                                    uint32_t bell, int32_t *out_status)
{
    uint64_t verdict = atomic_load_explicit(&page->verdict, memory_order_acquire);
    if ((uint32_t)(__atomic_load_n(done, __ATOMIC_ACQUIRE) - bell) < 65536u)
        *out_status = 0;
    else if ((uint32_t)((uint32_t)verdict - bell) < 65536u)
        *out_status = (int32_t)(verdict >> 32);
    else
        return false;
    return true;
}

/* The table of libattn-cuda.so, which lies beside this library; NULL: why says what is missing. It
 * stays loaded. */
const struct lane_memory_ops *lane_memory_find_cuda(char *why, size_t why_bytes);

#endif
