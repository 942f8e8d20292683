/* params.h: what the host hands to the kernels: plain structs, read by C and by device code, and
 * the C entry points that launch them. Launches return 0 or the runtime's error code; they never
 * wait.
 *
 * Who owns what   device memory belongs to the backend; a kernel reads items, block table and
 *                 layers from device memory, and k, v, q_src from host memory that the device can
 *                 read.
 */
#ifndef ATTND_GPU_PARAMS_H
#define ATTND_GPU_PARAMS_H

#include "kernels/stripes.h"
#include "kernels/tree.h"
#include "proto/attn_types.h"

#ifdef __cplusplus
extern "C" {
#endif

/* struct attn_layer_spec with its arrays in device memory */
struct gpu_layer {
    float scale;
    float soft_cap; /* 0: none */
    uint32_t window_tokens; /* 0: unlimited */
    uint32_t sink_tokens;
    uint32_t is_full;
    uint32_t n_branches; /* 0: not dilated */
    const float *sink_logits; /* [num_q_heads] or NULL */
    const float *alibi_slopes; /* [num_q_heads] or NULL */
    struct attn_branch branches[ATTN_MAX_BRANCHES];
};

/* One pool. Offsets as struct kv_layout. */
struct gpu_kv {
    char *base;
    uint64_t block_bytes, layer_bytes, v_offset, k_head_bytes, v_head_bytes, k_scales, v_scales;
    uint32_t *table; /* [n_table_rows][row_blocks] block ids */
    const struct gpu_layer *layers; /* [num_layers] */
    uint32_t row_blocks;
    uint32_t num_q_heads, num_kv_heads, group; /* group = num_q_heads / num_kv_heads */
    uint32_t dk, dv;
    uint32_t block_tokens, block_shift; /* block_tokens = 1 << block_shift */
    uint32_t q_dtype, kv_dtype; /* attn_dtype */
    uint32_t is_quantised;
    struct stripes stripes;
    uint32_t first_kv_head; /* of the sequence's */
    uint32_t pad;
};

/* One item of a batch. Arrays are ordered by kind of kernel; token0 and unit0 grow along them. */
struct gpu_item {
    const void *q_src; /* [n_tokens][num_q_heads][dk], host; NULL: q is in place, or no ATTEND */
    const void *k_src, *v_src; /* [n_tokens][num_kv_heads][dk or dv], host; NULL: no APPEND */
    void *q; /* where attention reads q: device, as q_src */
    void *out; /* [n_tokens][num_q_heads][dv] */
    float *lse; /* [n_tokens][num_q_heads] or NULL */
    uint32_t table_at; /* entry of gpu_kv.table that has its first block */
    uint32_t pos, n_tokens, layer; /* pos: as backend_item's, of those that table_at begins with */
    uint32_t token0; /* tokens of the items before this one */
    uint32_t blocks0; /* this item's first entry in the append's block list */
    uint32_t unit0; /* thread blocks of the items before this one (of the same kernel) */
    uint32_t n_splits; /* parts its cached tokens are cut into, >= 1 */
    uint32_t split_tokens; /* tokens in each part but the last; dilated: see split_of */
    uint32_t slot0; /* first partial slot; a slot is one query row's part of one split */
    uint32_t is_full; /* every query sees all, also where its layer is causal */
    /* of a tree: its first token's in gpu_attend.nodes; of one with lists: in list_starts; of one
     * that chooses: in chosen; of a prompt over codes: its first decoded block (sm90/prefill.h) */
    uint32_t node0;
} __attribute__((aligned(16))); /* moved in pieces of 16 bytes, out of the parameters too */

struct gpu_patch {
    uint32_t row, index, block;
};

/* Small batches travel in the kernel's parameters, which saves a trip over the bus. */
#define GPU_INLINE_ITEMS 24
#define GPU_INLINE_PATCHES 64
#define GPU_INLINE_BLOCKS 64
#define GPU_MAX_SPLITS 32 /* of an item */
#define GPU_LIST 480 /* words of a list that travels in parameters */

/* prep: patches the block table, appends k and v (quantising), brings q to the device, and for an
 * inline batch stores the items where the attention kernels read them. bring: copies q, k and v to
 * the device and nothing else, so that it may run while the batch before is computed; the batch's
 * prep follows it.
 *
 * Shapes   items [n_items]; patches [n_patches]; blocks: for each appended item the ids of the
 *          blocks that [pos, pos + n_tokens) touches, in order. NULL: the inline arrays are
 *          used. */
struct gpu_prep {
    struct gpu_kv kv;
    const struct gpu_item *items;
    const struct gpu_patch *patches;
    const uint32_t *blocks;
    struct gpu_item *out_items; /* inline only */
    /* device, [n_tokens][num_kv_heads * (dk + dv)] each token's k, then v; NULL: they were not
     * brought */
    char *brought;
    uint64_t *out_start_ns; /* host memory, NULL: not wanted */
    /* device, [n_tokens] each token's q as it comes, which the projections read; NULL: q goes to
     * where its item has it */
    char *heads;
    uint32_t n_items, n_patches, n_tokens;
    uint32_t q_dim; /* of a head's q as it comes */
    struct gpu_item inline_items[GPU_INLINE_ITEMS];
    struct gpu_patch inline_patches[GPU_INLINE_PATCHES];
    uint32_t inline_blocks[GPU_INLINE_BLOCKS];
};
int gpu_prep_launch(const struct gpu_prep *a, void *stream);
int gpu_bring_launch(const struct gpu_prep *a, void *stream);
/* Settles how the kernels around attention share a processor with it. */
int gpu_prep_init(void);

/* A query token whose heads are projected (heads/heads.cu). */
struct gpu_head_row {
    char *out; /* [num_q_heads][out_dim], where its item has it */
    uint32_t token, layer; /* token: of the batch, as gpu_item.token0 counts them */
};
/* Rows of one layer, GPU_HEAD_ROWS at most. */
#define GPU_HEAD_ROWS 64
struct gpu_head_tile {
    uint32_t first, n;
};

/* The projections of a batch (backend.h, q_nope_dim): absorb makes q of heads, expand makes outs of
 * latents, both rounded to q_dtype. A row's bytes depend on its own elements and the weights only.
 *
 * Shapes   rows [n_rows], tiles [n_tiles]: device; heads [n_tokens][num_q_heads][nope + dk - dv];
 *          q [n_tokens][num_q_heads][dk]; latents [n_tokens][num_q_heads][dv], which may lie where
 *          heads do; weights: as kernels/weights.h has them, layer_bytes apart. */
struct gpu_heads {
    const char *weights;
    uint64_t layer_bytes;
    const struct gpu_head_row *rows;
    const struct gpu_head_tile *tiles;
    const char *heads;
    char *q;
    const char *latents;
    uint32_t n_tiles; /* 0: the pool has no projections, or no item attends */
    uint32_t num_q_heads, dk, dv, nope, out_dim, q_dtype, pad;
};
int gpu_absorb_launch(const struct gpu_heads *a, void *stream, int chained);
int gpu_expand_launch(const struct gpu_heads *a, void *stream, int chained);

/* Whole blocks, up to GPU_LIST / 2 pairs (src, dst) a launch. */
struct gpu_copy {
    char *base;
    uint64_t block_bytes; /* a multiple of 128 */
    uint32_t n, pad;
    uint32_t list[GPU_LIST];
};
int gpu_copy_launch(const struct gpu_copy *a, void *stream);

/* Tokens of all layers, up to GPU_LIST / 4 (block, slot, to block, to slot) a launch. No block is
 * both read and written. */
struct gpu_tokens_copy {
    struct gpu_kv kv;
    uint32_t num_layers, n;
    uint32_t list[GPU_LIST];
};
int gpu_tokens_copy_launch(const struct gpu_tokens_copy *a, void *stream);

#define GPU_FINISH_SIGNALS 5 /* four workers', behind one of the caller's own */

/* Tells the host, and whoever waits for a signal, that everything before it is done. */
struct gpu_finish {
    uint64_t
        *out_done; /* host memory: value in the upper half, the lower half of the device's time */
    uint64_t *
        /* host memory: when it began; of a direct call (decode.h), else prep writes it */
        out_start_ns;
    uint32_t value, n_signals;
    /* written first, in this order, to where the device can write */
    uint32_t *signals[GPU_FINISH_SIGNALS];
    uint32_t signal_values[GPU_FINISH_SIGNALS];
    uint32_t pad;
};
int gpu_finish_launch(const struct gpu_finish *a, void *stream, int chained);

/* Attention of n_items items (a range of the batch's array, unit0 counted from its start).
 *
 * Items of n_splits > 1 leave partial results: split s of query row r (token, then q head) in slot
 * slot0 + s * n_tokens * num_q_heads + r.
 */
struct gpu_attend {
    struct gpu_kv kv;
    const struct gpu_item *items;
    float *part_o; /* [n_slots][dv] */
    float *part_ml; /* [n_slots][2] */
    uint32_t *arrivals; /* [n_units], 0 between launches; is_joined only */
    uint32_t n_items;
    uint32_t n_units; /* thread blocks */
    uint32_t n_rows; /* n_tokens * num_q_heads over all items, for the merge */
    uint32_t rows_per_unit;
    uint32_t any_split; /* some item has n_splits > 1 */
    uint32_t
        is_joined; /* by the thread blocks themselves (attend_rows.cuh), else a merge follows */
    uint32_t is_dilated; /* the layer of some item is */
    uint32_t shared_bytes; /* that a thread block may have on the device */
    const struct tree_node *nodes; /* of the batch's trees; NULL: the items are none */
    /* of the batch's lists: a query's begin in list_tokens, its end next to it; NULL: the items
     * have none */
    const uint32_t *list_starts, *list_tokens;
    /* of items whose queries choose n_chosen blocks at most: an item's [n_tokens][num_kv_heads]
     * [n_chosen] of their numbers, as a query's choice is (kernels/choice.h); NULL: they choose
     * none. In place of what is not there they have block 0: such a query's outputs are
     * worthless */
    const uint32_t *chosen;
    uint32_t n_chosen, pad;
};

/* What is kept of blocks' keys: [backend_n_names][num_layers][num_kv_heads] their largest, then
 * their smallest value in each of dk dimensions; in the cache's type, of a quantised pool in
 * f32. */
struct gpu_extremes {
    char *base;
    uint32_t num_layers, pad;
};

/* Makes them of up to GPU_LIST / 2 (block, layer) a launch: where they are kept, or in bytes
 * [n][num_kv_heads] of them, which the device reaches. is_given: keeps those that bytes has.
 * is_summary: of (block, summary), in all layers, where the summary's are kept. */
struct gpu_extremes_make {
    struct gpu_kv kv;
    struct gpu_extremes extremes;
    char *bytes; /* NULL: they are kept */
    uint32_t n; /* in the list, times num_layers of summaries */
    uint32_t is_given, is_summary, pad;
    uint32_t list[GPU_LIST];
};
int gpu_extremes_launch(const struct gpu_extremes_make *a, void *stream, int chained);

/* The choices of n_items items, of their rows (token, then kv head, of all items one after
 * another) [row0, row0 + n_rows): first the bounds of their blocks, which lie in device memory
 * until the thread block that is a row's last takes the blocks. */
struct gpu_choose {
    struct gpu_kv kv;
    struct gpu_extremes extremes;
    const struct gpu_item *items;
    uint32_t *bounds; /* [n_rows][n_longest], in an order of integers */
    uint32_t *arrivals; /* [n_rows], 0 between launches */
    uint32_t *chosen; /* as gpu_attend has it */
    uint32_t *places; /* host memory: in the table, as backend_item.chosen; NULL: nobody asks */
    uint32_t n_items, n_chosen;
    uint32_t n_blocks, pad; /* of the pool; what the table has from here on is not there */
    uint32_t row0, n_rows;
    uint32_t n_longest; /* blocks that a query of them sees, at most */
    uint32_t n_each; /* blocks whose bounds a thread block makes; the launch sets it */
};
int gpu_choose_launch(const struct gpu_choose *a, void *stream, int chained);

/* Plain fp32 arithmetic, every geometry and option; trees, lists and choices. rows_per_unit 4. */
#define GPU_VECTOR_ROWS 4
int gpu_attend_vector_launch(const struct gpu_attend *a, void *stream, int chained);
/* Joins the splits of the items that have any; after an attend kernel that has not. */
int gpu_merge_launch(const struct gpu_attend *a, void *stream);
#define GPU_MERGE_PARTS 8
#define GPU_MERGE_ITEMS 64 /* of one launch */

/* Outputs of several devices as one, as struct backend_merges has them. */
struct gpu_merge_item {
    uint64_t out_at, lse_at;
    char *out;
    float *lse; /* or NULL */
    uint32_t pos, n_tokens, is_full;
    uint32_t row0; /* rows (query, then head) of the items before this one */
};
struct gpu_merge_parts {
    const char *parts[GPU_MERGE_PARTS];
    uint32_t n_parts, n_items, n_rows, stripe;
    uint32_t num_q_heads, dv, q_dtype, pad;
    struct gpu_merge_item items[GPU_MERGE_ITEMS];
};
int gpu_merge_parts_launch(const struct gpu_merge_parts *a, void *stream);

/* What is left of an item, and the groups that it is in (gpu_shared.c), as one. */
struct gpu_joined {
    char *out; /* as gpu_item's */
    float *lse; /* or NULL */
    uint32_t row0, n_rows; /* [n_tokens][num_q_heads], of a level's rows */
    uint32_t n_parts; /* levels that have results of it, the first ones */
    uint32_t layer;
};

/* Shapes   items [n_items]; outs [levels][n_rows][dv]; lses [levels][n_rows]: device. Each part's
 *          results are with the layer's sink logits. */
#define GPU_SHARED_LEVELS 3 /* beside the first */
struct gpu_join {
    const struct gpu_joined *items;
    const struct gpu_layer *layers;
    const char *outs;
    const float *lses;
    uint32_t n_items, n_rows;
    uint32_t most_rows; /* of an item */
    uint32_t num_q_heads, dv, q_dtype;
};
int gpu_join_launch(const struct gpu_join *a, void *stream, int chained);

#define GPU_MATRIX_MAX_DIM 256
/* Tensor cores; head dims up to GPU_MATRIX_MAX_DIM. rows_per_unit 16 or 64, or 128 where there is
 * one; f32 queries 64; of choices 16, and no f32. shared_bytes: as gpu_attend has them. */
int gpu_attend_matrix_init(uint32_t shared_bytes);
/* How many thread blocks of so many rows, 16, 64 or 128, a processor has at once where
 * attend_rows.cuh has a kernel for this pool; 0: it has none. */
uint32_t gpu_attend_matrix_blocks(const struct gpu_kv *kv, uint32_t rows, uint32_t shared_bytes);
/* This pool's items of so many rows for each kv head are computed: f32 over f32 from 17 rows on,
 * where there is a kernel for it; bf16 and f16 always. */
bool gpu_attend_matrix_takes(const struct gpu_kv *kv, uint64_t rows);
int gpu_attend_matrix_launch(const struct gpu_attend *a, void *stream, int chained);
/* The source file, without its ending, of the kernel that it launches. */
const char *gpu_attend_matrix_name(const struct gpu_kv *kv, uint32_t rows_per_unit, bool is_sparse);

/* The steps of the ladder before the kernels above: 0 naive, 1 online, 2 shared tiles. No splits.
 * rows_per_unit 1, 1, GPU_SHARED_ROWS. */
#define GPU_SHARED_ROWS 8
int gpu_ladder_launch(const struct gpu_attend *a, int step, void *stream);

/* Reads bytes (a multiple of 16) and stores next to nothing. shape: 0 .. GPU_READ_SHAPES - 1. */
#define GPU_READ_SHAPES 6
int gpu_read_launch(const void *p, uint64_t bytes, uint32_t *sink, int shape, uint32_t n_processors,
                    void *stream);

#ifdef __cplusplus
}
#endif
#endif
