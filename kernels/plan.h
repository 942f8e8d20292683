/* plan.h: cuts a batch's attention into runs for processors that work at the same time. Pure C, no
 * device; tests check it without one.
 *
 * A segment is one (item, kv head): n_tiles tiles of cached tokens. A run is a range of one
 * segment's tiles that one processor (thread block, thread) computes; a segment's runs are its
 * splits. A segment of one split is stored directly; more splits leave partials in slots and are
 * merged.
 *
 * Who calls it: the cpu backend for everything, and the tuned kernels' lists (decode_fill.c), whose
 * runs travel to the device. Elsewhere a thread block's part of an item follows from its index
 * alone, so that nothing need travel, and there is no plan. The generic kernels (gpu_job.c) cut each
 * item by itself into equal splits of whole 64 tokens; a plan's runs would have to be looked up.
 * Clusters of the tuned kernels (decode_select.c) have one size for all items, and the kernels
 * compute their parts (decode_cluster_begin, decode_wide_begin).
 */
#ifndef ATTND_KERNELS_PLAN_H
#define ATTND_KERNELS_PLAN_H

#include "proto/attn_types.h"

#ifdef __cplusplus
extern "C" {
#endif

enum plan_kind {
    PLAN_AUTO, /* PLAN_DIRECT or PLAN_EQUAL where that is balanced within 5 %, else PLAN_STREAM */
    PLAN_DIRECT, /* one run a segment */
    PLAN_EQUAL, /* every segment in equal runs, as many as give each processor one */
    PLAN_STREAM, /* every processor the same number of tiles: segments that fit in a share stay
                    whole and are spread evenly, the others are cut to fill the gaps. A processor's
                    cut runs come before its whole ones, so that partials are early and the merge
                    finds them ready. Cuts snap to a segment's border when nearer than snap_percent
                    of a share */
    PLAN_FIXED, /* batch invariant: splits of a segment depend on its own tiles only */
};

struct plan_config {
    enum plan_kind kind;
    uint32_t n_processors; /* >= 1 */
    uint32_t max_splits; /* PLAN_EQUAL, PLAN_FIXED: of one segment, >= 1 */
    uint32_t min_run_tiles; /* PLAN_EQUAL, PLAN_STREAM: no run shorter unless its segment is */
    uint32_t snap_percent; /* PLAN_STREAM: 0 to 50 */
    uint32_t fixed_run_tiles; /* PLAN_FIXED: >= 1; a run's length until max_splits is reached */
};

struct plan_run {
    uint32_t segment;
    uint32_t tile0, n_tiles;
    uint32_t split,
        n_splits; /* this run is split `split` of the segment's n_splits, in tile order */
    uint32_t slot; /* first partial slot of the segment (n_splits of them); 0 if n_splits == 1 */
};

/* Runs of processor p are runs[first[p]] .. runs[first[p + 1] - 1]. */
struct plan {
    struct plan_run *runs;
    uint32_t *first; /* [n_processors + 1] */
    uint32_t n_runs, n_processors;
    uint32_t n_slots; /* PLAN_STREAM: at most 2 * n_processors, whatever the segments */
    enum plan_kind kind; /* what PLAN_AUTO became */
    uint32_t *scratch;
    uint32_t runs_capacity, first_capacity, scratch_capacity;
};

/* plan_make: fills *p, growing its arrays (reuse one plan to avoid allocation; zero it first).
 * Segments of 0 tiles get one run of 0 tiles, so that their output is still written.
 * Cost     O(n_segments + n_processors + runs)
 * Errors   ATTN_EINVAL config out of range, or more than 2^32 - 1 runs; ATTN_ENOMEM. *p then holds
 *          no runs and can be used again. */
attn_status plan_make(struct plan *p, const struct plan_config *c, const uint32_t *segment_tiles,
                      uint32_t n_segments);
/* Accepts NULL and zeroed plans. */
void plan_fini(struct plan *p);

#ifdef __cplusplus
}
#endif

#endif
