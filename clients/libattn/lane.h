/* lane.h: what a lane's files share, and what they ask of the memory that its regions are in:
 * lane_host.c, or libattn-cuda.so.
 *
 *   lane_find.c   libattn-cuda.so, when it is first asked for
 *   lane_open.c   the handshake, the watcher thread, closing
 *   lane.c        plans, layers, how they ended
 *   lane_cut.c    layers that are larger than the regions, in pieces
 */
#ifndef ATTN_LANE_H
#define ATTN_LANE_H

#include <pthread.h>
#include <stdatomic.h>

#include "clients/libattn/attn.h"
#include "proto/lane_words.h"

#define LANE_PARTS 3

/* One layer as it is enqueued. Addresses are as the lane's memory has them. */
struct lane_layer {
    struct {
        const void *from; /* NULL, or where it goes: not copied */
        void *to;
        uint64_t bytes; /* multiples of 16 */
    } in[LANE_PARTS], out[2]; /* q, k, v; out, lse */
    void *poison; /* NaN after a failure: out and lse of the region */
    uint64_t poison_bytes;
    struct lane_page *page; /* where the memory sees it */
    uint32_t *done;
    uint64_t wait_ns;
};

/* What module exports under LANE_CUDA_SYMBOL; changes with LANE_CUDA_ABI. */
#define LANE_CUDA_SYMBOL "attn_lane_cuda"
#define LANE_CUDA_ABI 3

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

extern const struct lane_memory_ops lane_host_ops;

struct attn_lane {
    attn_client *client;
    const struct lane_memory_ops *ops;
    struct lane_memory *memory;
    uint64_t id, in_bytes, out_bytes, wait_us;
    struct lane_page *page, *memory_page; /* mapped here; as the memory sees it */
    uint8_t *in, *out; /* regions, as the memory has them */
    bool is_host;
    uint32_t next_bell; /* behind what is planned */
    struct lane_cut *cut; /* a plan in pieces, not all of whose layers are enqueued; or NULL */
    int socket, wake_fd;
    pthread_t watcher;
    bool has_watcher;
    _Atomic bool is_hung_up;
};

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

/* lane_find.c */

/* The table of libattn-cuda.so, which lies beside this library; NULL: why says what is missing. It
 * stays loaded. */
const struct lane_memory_ops *lane_find_cuda(char *why, size_t why_bytes);

/* lane.c */

/* Sends a plan as it is. is_patient: where four are not finished, when one is. */
attn_status lane_plan_send(struct attn_lane *l, const attn_pool *p, const struct attn_plan *a,
                           bool is_patient);
/* A layer that fits the regions. */
attn_status lane_enqueue_whole(struct attn_lane *l, const attn_pool *p, void *stream,
                               const struct attn_lane_step *s);

/* lane_cut.c */

/* Sets l->cut, and sends the plan of the first piece, if the plan's layers don't fit; p is used
 * until the last of them is enqueued. */
attn_status lane_cut_begin(struct attn_lane *l, const attn_pool *p, const struct attn_plan *a);
/* The next layer of l->cut; the last one ends it. */
attn_status lane_cut_enqueue(struct attn_lane *l, const attn_pool *p, void *stream,
                             const struct attn_lane_step *s);
/* Forgets l->cut; NULL is fine. */
void lane_cut_end(struct attn_lane *l);

#endif
