/* prefill.h: the tuned attention of prompts and of their chunks (more than DECODE_MAX_TOKENS tokens of a
 * sequence) over the paged cache, for sm_90. The host side of it: what can be computed, the order of the
 * work, and the launch.
 *
 * Way of use      prefill_pool_init once a pool. For every batch prefill_prepare (pure host work), the
 *                 caller brings the upload to the device if there is one, then prefill_launch.
 * Who owns what   everything is the caller's. A call may be launched many times; launches that share
 *                 scratch must follow each other on one stream.
 * Same bytes      a row's result depends on its item alone: nothing is cut over keys.
 * Nothing hangs   no thread block waits for another.
 */
#ifndef ATTND_GPU_PREFILL_H
#define ATTND_GPU_PREFILL_H

#include "kernels/backend.h"
#include "kernels/gpu/params.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A pool as the tuned kernels see it. */
struct prefill_pool {
    uint64_t map_k[16], map_v[16]; /* CUtensorMap of all K and of all V */
    struct gpu_kv kv; /* kv.layers and kv.table in device memory */
    const struct attn_layer_spec *specs; /* host, [num_layers]; scalars only are read */
    uint32_t num_layers, n_blocks;
    uint32_t n_processors;
    uint32_t dim; /* of the kernel: head_dim_k and head_dim_v are at most this */
    uint32_t box_tokens; /* that one copy brings */
    bool has_extras; /* a layer has a soft cap or ALiBi slopes */
} __attribute__((aligned(64)));

/* This geometry is computed on this device: head dims from 64 to 256, f16 or bf16, KV not
 * quantised, block_tokens 16 to 256. major: of the compute capability. */
bool prefill_supported(const struct backend_pool_config *c, int major);

/* Fills *p. kv and specs are kept (specs borrowed for the pool's life); kv.layers has been
 * written. 0 or the driver's error code (loads every kernel, so that later launches allocate
 * nothing). */
int prefill_pool_init(struct prefill_pool *p, const struct backend_pool_config *c,
                      const struct gpu_kv *kv, const struct attn_layer_spec *specs,
                      uint32_t n_processors);

/* Device memory of a launch, zeroed once at start. */
#define PREFILL_SCRATCH_BYTES 256

/* A tile of rows of an item; one unit of work for each kv head. */
struct prefill_entry {
    uint32_t item, tile;
};

#define PREFILL_INLINE_ENTRIES 960

/* A prepared batch. */
struct prefill_call {
    const struct prefill_pool *pool;
    const struct gpu_item *items; /* device */
    uint32_t n_entries; /* n_entries * num_kv_heads units */
    uint32_t section_heads; /* kv heads whose units come before those of the others */
    uint64_t kv_bytes; /* K and V of the items */
    uint64_t upload_bytes; /* 0: the entries travel in the kernel's parameters */
    struct prefill_entry inline_entries[PREFILL_INLINE_ENTRIES];
};

/* Holds for every batch within the limits. */
uint64_t prefill_upload_bytes(const struct prefill_pool *p, uint32_t max_items,
                              uint32_t max_tokens);

/* Orders the work of n items, host copies of those at device_items: long units first. Fills
 * *out_call and out_call->upload_bytes, if they are not 0, at upload (8-byte aligned; also on the
 * device). Same items, same call. */
void prefill_prepare(const struct prefill_pool *p, const struct gpu_item *items, uint32_t n,
                     const struct gpu_item *device_items, void *upload,
                     struct prefill_call *out_call);

/* upload: where the upload is on the device. chained: may begin while the kernel before on the
 * stream still runs. The driver's error code. */
int prefill_launch(const struct prefill_call *c, const void *upload, void *scratch, void *stream,
                   int chained);

#ifdef __cplusplus
}
#endif
#endif
