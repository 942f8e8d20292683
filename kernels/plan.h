/* plan.h: cuts a batch's attention into runs for processors that work at the same time. Pure C, no
 * device; every backend calls it, tests check it without one.
 *
 * A segment is one (item, kv head): n_tiles tiles of cached tokens. A run is a range of one
 * segment's tiles that one processor (thread block, thread) computes; a segment's runs are its
 * splits. A segment of one split is stored directly; more splits leave partials in slots and are
 * merged.
 */
#ifndef ATTND_KERNELS_PLAN_H
#define ATTND_KERNELS_PLAN_H

#include "proto/attn_types.h"

enum plan_kind {
    PLAN_AUTO, /* direct where segments fill the processors, equal splits where not, stream-K when
                    ragged */
    PLAN_DIRECT, /* one run a segment */
    PLAN_EQUAL, /* every segment in max_splits (or fewer) equal runs */
    PLAN_STREAM, /* stream-K: all tiles in a row, cut in n_processors equal shares; borders snap to a
                    segment's border when nearer than snap_percent of a share */
    PLAN_FIXED, /* batch invariant: splits of a segment depend on its own tiles only */
};

struct plan_config {
    enum plan_kind kind;
    uint32_t n_processors;
    uint32_t max_splits; /* of one segment, >= 1 */
    uint32_t min_run_tiles; /* no run shorter than this unless its segment is */
    uint32_t snap_percent; /* PLAN_STREAM */
    uint32_t fixed_run_tiles; /* PLAN_FIXED */
};

struct plan_run {
    uint32_t segment;
    uint32_t tile0, n_tiles;
    uint32_t split, n_splits; /* this run is split `split` of the segment's n_splits */
    uint32_t slot; /* first partial slot of the segment (n_splits of them); 0 if n_splits == 1 */
};

/* Runs of processor p are runs[first[p]] .. runs[first[p + 1] - 1]. */
struct plan {
    struct plan_run *runs;
    uint32_t *first;
    uint32_t n_runs, n_processors, n_slots;
    uint32_t runs_capacity, first_capacity;
};

/* plan_make: fills *p, growing its arrays (reuse one plan to avoid allocation; zero it first).
 * Segments of 0 tiles get one run of 0 tiles, so that their output is still written.
 * Errors   ATTN_EINVAL config out of range; ATTN_ENOMEM (*p stays valid) */
attn_status plan_make(struct plan *p, const struct plan_config *c, const uint32_t *segment_tiles,
                      uint32_t n_segments);
void plan_fini(struct plan *p);

#endif
