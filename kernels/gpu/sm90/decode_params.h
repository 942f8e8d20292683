/* decode_params.h: what decode_prepare writes and the decode kernels read, on both sides of the
 * bus. Plain structs of fixed size; internal to decode_*.
 *
 * Words used here: a tile is 16 cached tokens; a row is one (query token, head of a group); a unit
 * is the rows that one thread block (or warp) computes together; a segment is (item, kv head,
 * unit).
 */
#ifndef ATTND_GPU_DECODE_PARAMS_H
#define ATTND_GPU_DECODE_PARAMS_H

#include "kernels/gpu/sm90/decode.h"
#include "kernels/visible.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { DECODE_TILE = 16 };

enum {
    DECODE_IS_FULL = 1, /* not causal */
    DECODE_HAS_WINDOW = 2,
    DECODE_HAS_SINKS = 4, /* sink logits */
};

/* An item. n_tiles, sink_tiles, skip_tiles: what its queries see, as struct visible_tiles has
 * it. */
struct decode_dev_item {
    uint64_t q, out, lse; /* addresses; lse 0: not wanted */
    uint64_t table; /* block ids, in device memory */
    uint32_t n_tiles, sink_tiles, skip_tiles;
    uint32_t pos, n_tokens;
    uint32_t layer;
    uint32_t flags;
    float scale_log2; /* scale * log2(e) */
} __attribute__((aligned(16)));

/* Of an item of a direct call: where q, k and v are in host memory. */
struct decode_source {
    uint64_t q, k, v;
};

/* A run, and where its processor finds the next one. */
struct decode_dev_run {
    uint32_t item;
    uint32_t head_unit; /* kv head, or the first of one for each warp | unit << 16 */
    uint32_t tile0, n_tiles;
    uint32_t next; /* index of the processor's next run, DECODE_NO_RUN at the end */
    uint32_t split_of; /* split | n_splits << 16 */
    uint32_t slot; /* first partial slot of the segment; those of its next head follow */
    uint32_t lg_team; /* log2 of the warps that share a kv head: of all, or 0 */
} __attribute__((aligned(16)));

#define DECODE_NO_RUN 0xffffffffu

/* Parameters are in no cache: a kernel waits for each line of 64 bytes that it comes to. So what
 * all begin with is in the first 48 bytes, which are the rest of a line, and the words behind the
 * struct begin with a line. */
struct decode_params {
    const struct decode_dev_item *items; /* NULL: in the words, from the first on */
    uint32_t num_q_heads, num_kv_heads, group;
    uint32_t block_tokens;
    /* Block ids in the words: of DECODE_SHORT all of every item; else those of the first tiles, a
     * ring's or as many as there is room for, of every part of every item (DECODE_CLUSTER,
     * DECODE_WIDE), processor (DECODE_LIST) or item (DECODE_WARP). */
    uint32_t ids_at, ids_stride; /* word of the first; words for each */
    uint32_t tiles_shift; /* tiles a block = 1 << tiles_shift */
    uint32_t stages; /* of a ring; DECODE_SHORT: tiles a thread block, at most */
    uint32_t part_reciprocal; /* DECODE_WIDE: 2^32 over n_parts, rounded up */
    uint8_t n_parts; /* DECODE_WIDE: thread blocks a segment */
    uint8_t lg_cluster; /* DECODE_CLUSTER, DECODE_SHORT: log2 of the cluster's size */
    uint8_t is_chained; /* launched while the kernel before may still run */
    uint8_t is_tight; /* DECODE_SHORT: V from the ninth tile on comes when K has left its place */

    const struct decode_dev_run *runs; /* processor p begins at runs[p]; NULL: in the words */
    uint32_t runs_at; /* word of the first run */
    uint32_t n_segments; /* DECODE_WARP */
    uint32_t n_processors; /* warps or thread blocks with runs */
    uint32_t row_span; /* DECODE_CLUSTER: rows of a unit rounded up to a power of two */
    const struct gpu_layer *layers;
    float *part_o; /* DECODE_LIST: [slot][rows of a unit][head_dim] sums */
    float *part_ml; /* DECODE_LIST: [slot][rows of a unit][2] maximum (base 2), sum; DECODE_WIDE:
                       [slot] eight pieces of decode_wide_piece_bytes, up to the end of scratch */
    uint32_t *
        /* [slot], of DECODE_WIDE [segment][rank], of DECODE_SHORT one; zero between launches */
        arrivals;
    /* DECODE_WIDE: for every rank of a cluster and its end, in four bits each, the first of a
     * part's eight pieces that it finishes; shared memory before the kernel's (m, l) */
    uint64_t pieces;
    uint32_t wide_body;
    /* DECODE_SHORT: */
    uint32_t sources_at; /* of a direct call: word of the first item's decode_source */
    struct gpu_finish
        finish; /* what the last thread block tells the host; out_done NULL: nothing */
    char *kv_base; /* of a direct call: where k and v go */
    uint64_t block_bytes;
    uint64_t pad[2]; /* up to a line's end */
};

/* A direct call reads q over the bus once a block of a cluster: so many bytes take less than a
 * launch. */
#define DECODE_DIRECT_BYTES 131072

/* Items, block ids and runs in the kernel's parameters: no memory to wait for, nothing to bring
 * over. 26 or 32 KB of them cost 0.2 us a launch, so the short calls have their own size. */
struct decode_words {
    uint32_t w[DECODE_INLINE_WORDS];
} __attribute__((aligned(16)));

struct decode_short_words {
    uint32_t w[DECODE_SHORT_WORDS];
} __attribute__((aligned(16)));

struct decode_few_words {
    uint32_t w[DECODE_FEW_WORDS];
} __attribute__((aligned(16)));

/* Scratch: arrivals, then part_ml, then part_o. */
enum {
    DECODE_SLOTS = 4, /* a processor of the device: partial slots of up to 16 rows, or one of 64 */
    DECODE_MAX_CLUSTER = 8,
    DECODE_WIDE_ROWS = 64,
};

#ifdef __CUDACC__
#define DECODE_BOTH __host__ __device__ constexpr
#elif defined(__cplusplus)
#define DECODE_BOTH constexpr
#else
#define DECODE_BOTH static inline
#endif

/* Shared memory. Everything begins at a multiple of DECODE_ALIGN, which costs up to as much. */
enum { DECODE_ALIGN = 1024 };

DECODE_BOTH uint32_t decode_max(uint32_t a, uint32_t b)
{
    return a > b ? a : b;
}

/* A segment's parts, of n visible tiles: the tile with which part k begins (part `parts` is the
 * end). */
enum { DECODE_WIDE_TOKENS = 64 }; /* of a stage of decode_wide, whose parts are whole stages */
DECODE_BOTH uint32_t decode_cluster_begin(uint32_t n, uint32_t k, uint32_t lg_parts)
{
    return n * k >> lg_parts;
}
DECODE_BOTH uint32_t decode_wide_begin(uint32_t n, uint32_t k, uint32_t parts)
{
    return (n + DECODE_WIDE_TOKENS / DECODE_TILE - 1) / (DECODE_WIDE_TOKENS / DECODE_TILE) * k /
           parts * (DECODE_WIDE_TOKENS / DECODE_TILE);
}

/* decode_cluster: a ring a warp, where later its sums lie | q | sums of the cluster | (m, l) of the
 * warps | (m, l) of the cluster | barriers */
DECODE_BOTH uint32_t decode_warp_bytes(uint32_t d, uint32_t rows, uint32_t stages)
{
    return (decode_max(stages * 64 * d, rows * (d + 4) * 4) + DECODE_ALIGN - 1) / DECODE_ALIGN *
           DECODE_ALIGN;
}
DECODE_BOTH uint32_t decode_cluster_bytes(uint32_t d, uint32_t rows, uint32_t warps,
                                          uint32_t stages)
{
    return DECODE_ALIGN + warps * decode_warp_bytes(d, rows, stages) + rows * d * (2 + 4) +
           warps * rows * 8 + 8 * rows * 8 + (warps * stages + 1) * 8;
}

/* decode_short: K of all tiles | V of all, or of the first eight (is_tight) | the kernel's struct
 * shared (q | weights of the tiles | (m, l) of eight warps and of the cluster | 16 barriers of K,
 * eight of V and three, to a multiple of 16 bytes | sums of the cluster) */
enum { DECODE_SHORT_TILES = 16 }; /* of a block at most */
DECODE_BOTH uint32_t decode_short_bytes(uint32_t d, uint32_t rows, uint32_t tiles, uint32_t cluster,
                                        bool is_tight)
{
    return DECODE_ALIGN + (is_tight && tiles > 8 ? tiles + 8 : 2 * tiles) * 32 * d + rows * d * 2 +
           DECODE_SHORT_TILES * rows * 32 + (8 * 2 + 2 * DECODE_MAX_CLUSTER) * rows * 4 + 28 * 8 +
           (cluster > 1 ? rows * d * 4 : 0);
}

/* decode_runs: ring | two slabs of sums per warp | (m, l) of both | barriers | who was last to
 * arrive. Slabs and the last are not there where warps take whole segments. */
DECODE_BOTH uint32_t decode_runs_bytes(uint32_t d, uint32_t rows, uint32_t warps, uint32_t stages,
                                       bool is_warp)
{
    return DECODE_ALIGN + warps * stages * 64 * d +
           (is_warp ? 0 : 2 * warps * rows * ((d + 4) * 4 + 8) + (warps + 1) * 4) +
           warps * stages * 8;
}

/* decode_wide: q | ring (later the sums that the warpgroups exchange, and the parts of a slice) |
 * (m, l) of the two halves | barriers. Partial results travel in eight pieces of 8 rows, f16 with
 * (m, l): of 64 rows the whole head_dim, of 32 rows half of it. */
DECODE_BOTH uint32_t decode_wide_piece_bytes(uint32_t d, uint32_t rows)
{
    return 8 * d * 2 * rows / 64 + 8 * 8;
}
DECODE_BOTH uint32_t decode_wide_body(uint32_t d, uint32_t rows, uint32_t stages, uint32_t parts,
                                      uint32_t cluster)
{
    return decode_max(128 * d + stages * DECODE_WIDE_TOKENS * 4 * d,
                      parts * ((7 + cluster) / cluster) * decode_wide_piece_bytes(d, rows));
}
DECODE_BOTH uint32_t decode_wide_bytes(uint32_t d, uint32_t rows, uint32_t stages, uint32_t parts,
                                       uint32_t cluster)
{
    return DECODE_ALIGN + decode_wide_body(d, rows, stages, parts, cluster) + 2 * rows * 8 +
           (4 * stages + 2) * 8 + 16;
}

#ifdef __cplusplus
}
#endif

#endif
