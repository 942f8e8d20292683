/* isa.h: the part of the cpu backend that is compiled once an instruction set: attention of a tile
 * of query rows over a range of cached tokens. tile.h is the one body; isa_*.c compile it with
 * their flags.
 *
 * Scores, maxima and sums are in base 2 (a score is multiplied by log2 e); lse leaves as natural
 * log.
 */
#ifndef ATTND_KERNELS_CPU_ISA_H
#define ATTND_KERNELS_CPU_ISA_H

#include "kernels/kv_layout.h"
#include "kernels/layer_visible.h"

#define TILE_TOKENS 32 /* cached tokens of a tile, the unit of the plan */
#define MAX_ROWS 128 /* query rows of a kv head, (token, q head), in one pass over K and V */
/* Rows of all kv heads of a segment, whose sums stay in the L2 cache; MAX_ROWS of wider heads than
 * NARROW_DIM. */
#define MAX_SEGMENT_ROWS 256
#define NARROW_DIM 256
#define MAX_K_DIM BACKEND_MAX_LATENT_K
#define MAX_V_DIM BACKEND_MAX_HEAD_DIM
#define MAX_Q_FLOATS (MAX_ROWS * MAX_K_DIM) /* q of a segment */
#define MAX_O_FLOATS (MAX_ROWS * MAX_V_DIM)
_Static_assert(MAX_Q_FLOATS >= MAX_SEGMENT_ROWS * NARROW_DIM &&
                   MAX_O_FLOATS >= MAX_SEGMENT_ROWS * NARROW_DIM,
               "room for either kind of segment");

/* Rows of one head, up to CPU_PROJECT_ROWS, and the weights [n][latent] that they meet: elements of
 * the pool's q_dtype. */
#define CPU_PROJECT_ROWS 4
struct project_rows {
    const uint8_t *w;
    uint32_t n, latent; /* multiples of 8 */
    uint32_t n_rows;
    const uint8_t *in[CPU_PROJECT_ROWS];
    uint8_t *out[CPU_PROJECT_ROWS];
};

/* What a pool's kernels need to know, made once a pool. */
struct attend_geometry {
    struct kv_layout layout;
    uint32_t num_q_heads, group; /* group: q heads of one kv head */
    uint32_t dk, dv, block_tokens, block_shift;
    struct stripes stripes;
    uint32_t first_kv_head; /* of the sequence's */
    attn_dtype q_dtype, kv_dtype;
};

/* As backend_extremes_dtype says it. */
static inline attn_dtype cpu_extremes_dtype(const struct attend_geometry *g)
{
    return g->layout.is_quantised ? ATTN_F32 : g->kv_dtype;
}

/* One query of several items' that share keys. */
struct shared_query {
    const struct backend_item *item;
    uint32_t token;
};

/* The rows of one segment: rows row0 .. row0 + n_rows of each of n_heads kv heads of one item; row
 * r of kv head h is query token r / group, q head h * group + r % group. All heads of a tile are
 * done before the next tile, because the heads of a block lie behind one another in memory.
 *
 * With queries, the rows are those of several items that have their first keys in common: row r is
 * of query queries[r / group], all rows see keys [0, n_shared), whole tiles, and no others are
 * computed; item is any of them. */
struct attend_rows {
    const struct attend_geometry *g;
    const struct attn_layer_spec *spec;
    const struct backend_item *item;
    const uint8_t *layer; /* this layer of block 0 */
    uint32_t kv_head, row0, n_rows;
    uint32_t n_heads; /* 1 if the layer is dilated: its kv heads see different tokens */
    /* [n_listed] of items with lists, whose segments are of one query each: its list, in whose
     * order keys are counted. NULL: keys are the sequence's tokens */
    const uint32_t *list;
    /* Of choosing items, whose segments are of one query and kv head each: the blocks that it
     * visits, which ascend, of n_listed keys, which are counted in their order. Else NULL */
    const uint32_t *blocks;
    uint32_t n_listed;
    const struct shared_query *queries; /* NULL: rows of one item; else row0 is 0 */
    uint32_t n_shared;
};

/* Where a row's q is, and where its query is. */
static inline struct shared_query rows_query(const struct attend_rows *r, uint32_t row)
{
    const uint32_t token = row / r->g->group;
    return r->queries != NULL ? r->queries[token] : (struct shared_query){r->item, token};
}

/* The keys that some row sees; of several kv heads all have the same. */
static inline struct visible rows_visible(const struct attend_rows *r, struct branch b)
{
    uint32_t first = r->row0 / r->g->group;
    uint32_t last = (r->row0 + r->n_rows - 1) / r->g->group;
    if (r->list != NULL || r->blocks != NULL)
        return (struct visible){.end = r->n_listed};
    if (r->queries != NULL)
        return (struct visible){.end = r->n_shared};
    if (r->item->nodes != NULL) { /* any node may be the root, or the deepest */
        first = 0;
        last = r->item->n_tokens - 1;
    }
    return layer_visible_to_some(r->spec, r->g->stripes, r->item, b, first, last);
}

/* The i-th branch as the rows' kv head has it. */
static inline struct branch rows_branch(const struct attend_rows *r, uint32_t i)
{
    return layer_branch(r->spec, i, r->g->first_kv_head + r->kv_head);
}

/* Rows before they are divided by their sums. */
struct attend_partial {
    float *o; /* [n_heads][n_rows][o_stride] */
    float *max; /* [n_heads][n_rows]; -inf: nothing seen */
    float *sum; /* [n_heads][n_rows] */
    uint32_t o_stride; /* dv rounded up to 16 */
};

/* A thread's own memory; everything is written before it is read. */
struct attend_scratch {
    _Alignas(64) float q[MAX_Q_FLOATS];
    _Alignas(64) float o[MAX_O_FLOATS];
    _Alignas(64) float s[MAX_ROWS * TILE_TOKENS];
    _Alignas(64) uint8_t k[TILE_TOKENS * MAX_K_DIM * 4]; /* a tile whose tokens lie apart */
    _Alignas(64) uint8_t v[TILE_TOKENS * MAX_V_DIM * 4]; /* unless V is in K */
    _Alignas(64) float k_scales[TILE_TOKENS];
    _Alignas(64) float v_scales[TILE_TOKENS];
    _Alignas(64) float max[MAX_SEGMENT_ROWS];
    _Alignas(64) float sum[MAX_SEGMENT_ROWS];
    _Alignas(64) float k_laid[MAX_K_DIM * TILE_TOKENS]; /* keys_f32.h */
    _Alignas(64) uint32_t k_pairs[MAX_K_DIM / 2 * TILE_TOKENS]; /* pairs_bf16.h, as those below */
    _Alignas(64) uint16_t v_pairs[TILE_TOKENS * MAX_V_DIM];
    _Alignas(64) uint32_t weights[MAX_ROWS * TILE_TOKENS / 2];
};

struct cpu_isa {
    const char *name;
    bool has_pairs; /* tiles of bf16 K and V are laid once for many rows (pairs_bf16.h) */
    /* visible tiles tile0 .. tile0 + n_tiles of the rows, those of all branches behind one
     * another, into *out */
    void (*attend)(const struct attend_rows *r, uint32_t tile0, uint32_t n_tiles,
                   struct attend_scratch *scratch, const struct attend_partial *out);
    /* divides, applies the sink logits, writes the item's out and lse; not of rows with queries */
    void (*finish)(const struct attend_rows *r, const struct attend_partial *p);
    /* of a block's keys of one kv head each dimension's largest value, then its smallest: two rows
     * of dk elements of cpu_extremes_dtype. NaNs are left out */
    void (*extremes)(const struct attend_geometry *g, const uint8_t *k, const uint8_t *scales,
                     uint8_t *out);
    /* out[i], for blocks 1 to end - 1 of the rows' item, the highest bound that a row of the rows
     * has for q.k; extremes are those of block b at extremes + b * block_bytes */
    void (*bounds)(const struct attend_rows *r, const uint8_t *extremes, size_t block_bytes,
                   uint32_t end, float *out);
    /* rows of n elements become rows of latent: sums over w's rows, each times an element */
    void (*absorb)(attn_dtype dtype, const struct project_rows *p);
    /* rows of latent elements become rows of n: their products with w's rows */
    void (*expand)(attn_dtype dtype, const struct project_rows *p);
    /* reads bytes (a multiple of 64) and returns something made of all of them */
    uint64_t (*read)(const void *p, size_t bytes);
};

extern const struct cpu_isa cpu_isa_portable;
#if defined(ATTND_CPU_X86)
extern const struct cpu_isa cpu_isa_avx2, cpu_isa_avx512, cpu_isa_avx512bf16;
#endif

/* The variants this CPU can run, slowest first; returns their number (at most 4). */
uint32_t cpu_isa_supported(const struct cpu_isa *out[4]);

#endif
