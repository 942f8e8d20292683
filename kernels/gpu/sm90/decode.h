/* decode.h: the tuned attention of the newest tokens (1 to 16 a sequence) over the paged cache, for
 * sm_90. The host side of it: what can be computed, how a batch is cut, and the launch.
 *
 * Way of use      decode_pool_init once per pool. For every batch decode_prepare (pure host work:
 *                 picks the kernel, cuts the work, fills the call and, for larger batches, an
 *                 upload); the caller brings the upload to the device if there is one;
 *                 decode_launch.
 * Who owns what   everything is the caller's. A call may be launched many times (it is not
 *                 changed); launches that share scratch must follow each other on one stream.
 * Nothing hangs   no thread block waits for another except inside one cluster, whose blocks run
 *                 together by definition. Splits that meet in memory are merged by the last to
 *                 arrive.
 */
#ifndef ATTND_GPU_DECODE_H
#define ATTND_GPU_DECODE_H

#include "kernels/backend.h"
#include "kernels/gpu/params.h"
#include "kernels/plan.h"

#ifdef __cplusplus
extern "C" {
#endif

#define DECODE_MAX_TOKENS 16 /* query tokens of one item */

/* One item of a batch. Pointers but blocks are read and written by the device. */
struct decode_item {
    const void *q; /* [n_tokens][num_q_heads][head_dim] q_dtype, 16-byte aligned */
    void *out; /* [n_tokens][num_q_heads][head_dim] q_dtype, 16-byte aligned */
    float *lse; /* [n_tokens][num_q_heads] natural log, or NULL */
    /* where q, and the k and v to append, are in host memory; NULL: a direct launch is not
     * wanted */
    const void *q_src, *k_src, *v_src;
    const uint32_t *blocks; /* host: [ceil((pos + n_tokens) / block_tokens)] block ids */
    uint32_t table_at; /* entry of the device's block table from which the same ids are there */
    uint32_t layer;
    uint32_t pos;
    uint32_t n_tokens; /* 1 to DECODE_MAX_TOKENS */
    uint32_t is_full; /* also where its layer is causal */
};

/* A pool as the tuned kernels see it. */
struct decode_pool {
    uint64_t map16[16]; /* CUtensorMap of the whole pool: 16 tokens of a head, K and V together */
    uint64_t map16_part[16]; /* 16 tokens, K or V */
    uint64_t map8[16]; /* 8 tokens, K or V */
    struct gpu_kv kv; /* kv.layers and kv.table in device memory */
    const struct attn_layer_spec *specs; /* host, [num_layers]; scalars only are read */
    uint32_t num_layers, n_blocks;
    uint32_t n_processors;
    uint32_t is_batch_invariant;
    uint32_t has_extras; /* a layer has a soft cap or ALiBi slopes */
    uint32_t has_sinks; /* a layer has sink logits */
} __attribute__((aligned(64)));

/* The tuned path computes this geometry on this device: head_dim_k == head_dim_v in {64, 128, 256},
 * f16 or bf16, KV not quantised, block_tokens 16 to 256. major, minor: compute capability. */
bool decode_supported(const struct backend_pool_config *c, int major, int minor);

/* Fills *p. kv and specs are kept (specs borrowed for the pool's life); kv.layers has been written.
 * 0 or the driver's error code (loads every kernel, so that later launches allocate nothing). */
int decode_pool_init(struct decode_pool *p, const struct backend_pool_config *c,
                     const struct gpu_kv *kv, const struct attn_layer_spec *specs,
                     uint32_t n_processors);

/* Sizes that hold for every batch within the limits. scratch: device memory, zeroed once at
 * start. */
uint64_t decode_scratch_bytes(const struct decode_pool *p, uint32_t max_items, uint32_t max_tokens);
uint64_t decode_upload_bytes(const struct decode_pool *p, uint32_t max_items, uint32_t max_tokens);

enum decode_kernel {
    DECODE_CLUSTER, /* one run a thread block, computed from its index; a cluster merges */
    DECODE_WARP, /* whole segments, one per warp at a time; nothing to merge */
    DECODE_LIST, /* runs of a plan, those of short items by head; splits meet in scratch */
    DECODE_SHORT, /* like DECODE_CLUSTER, for so few tiles that shared memory holds all at once */
    DECODE_WIDE, /* more than 16 query rows a kv head: wgmma, 32 or 64 rows; a cluster merges */
};

/* What travels in a kernel's parameters, in those of the kernels for short calls, and for a few
 * short items. */
#define DECODE_INLINE_WORDS 7680
#define DECODE_SHORT_WORDS 1152
#define DECODE_FEW_WORDS 192

/* A prepared batch. Only decode_launch.cu and the kernels look inside; the scalars are good for
 * statistics. */
struct decode_call {
    const struct decode_pool *pool;
    enum decode_kernel kernel;
    uint32_t rows; /* query rows (token x head of a group) computed together */
    uint32_t row_span; /* rows of the widest item in a unit, rounded up to a power of two */
    uint32_t n_items;
    uint32_t cluster, n_groups; /* thread blocks of a segment's cluster, such clusters a segment */
    uint32_t launch_cluster; /* thread blocks a cluster of the launch: of one or more segments */
    uint32_t grid[3];
    uint32_t block; /* threads */
    uint32_t shared_bytes;
    uint32_t stages;
    bool is_tight; /* as in decode_params */
    uint32_t n_processors;
    uint32_t n_segments;
    uint32_t ids_at, ids_stride; /* block ids in inline_words, ids_stride 0: none */
    uint32_t runs_at; /* runs in inline_words */
    uint32_t
        sources_at; /* of the items' q, k and v in inline_words; 0: the call cannot be direct */
    uint32_t n_words; /* used of inline_words */
    uint32_t n_runs; /* parts the work was cut into */
    uint64_t kv_bytes; /* cached K and V read */
    uint64_t upload_bytes; /* 0: everything travels in the kernel's parameters */
    uint32_t inline_words[DECODE_INLINE_WORDS] __attribute__((aligned(16)));
};

/* What a list's plan cuts: an item's tiles, of one kv head that all warps share or of one for each
 * warp. */
struct decode_segment {
    uint32_t item, head_unit, lg_team, slot; /* as in decode_dev_run */
};

/* Memory that decode_prepare reuses; zero it first. */
struct decode_planner {
    struct plan plan;
    struct decode_segment *segments;
    uint32_t *rounds; /* of each segment, which the plan cuts as its tiles */
    uint32_t n_segments, segments_capacity, rounds_capacity;
};
void decode_planner_fini(struct decode_planner *w);

/* Cuts a batch: chooses the kernel by the one rule there is (decode_select.c), fills *out_call and
 * up to upload_capacity bytes at upload, of which the first out_call->upload_bytes must be at a
 * device address (64-byte aligned) when the call runs. Same items, same call.
 * Errors   ATTN_ENOTSUP an item has more than DECODE_MAX_TOKENS tokens; ATTN_ENOMEM */
attn_status decode_prepare(const struct decode_pool *p, const struct decode_item *items,
                           uint32_t n_items, struct decode_planner *w, void *upload,
                           uint64_t upload_capacity, struct decode_call *out_call);

/* May the call tell the host by itself that it is done? */
bool decode_can_finish(const struct decode_call *c);
/* May it be direct: read q from the host and append k and v by itself, so that nothing need be
 * launched before it? Items as backend.h has them: no two append to the same (row, layer). */
bool decode_can_be_direct(const struct decode_call *c);

enum decode_way {
    DECODE_BEHIND_PREP,
    DECODE_BY_ITSELF, /* a direct call */
    DECODE_EARLY, /* the same, but nothing is launched: the stream is told what it will be */
};

/* 0 or the runtime's error code; never waits. upload NULL if the call has none. finish: what it
 * tells the host at its end, of a direct call also at its start; NULL: nothing. chained: the kernel
 * before it on the stream ends with gpu::chain_release (programmatic dependent launch); this one
 * releases its own successor when its blocks are near their end. */
int decode_launch(const struct decode_call *c, const void *upload, void *scratch,
                  const struct gpu_finish *finish, void *stream, int chained, enum decode_way way);

#ifdef __cplusplus
}
#endif
#endif
