/* prefill.h: the tuned attention of prompts and of their chunks (more than DECODE_MAX_TOKENS tokens
 * of a sequence) over the paged cache, of trees, and of pools whose V is in K, for sm_90. The host
 * side of it: what can be computed, the order of the work, and the launch.
 *
 * Way of use      prefill_pool_init once per pool. For every batch prefill_prepare (pure host
 *                 work), the caller brings the upload to the device if there is one, then
 *                 prefill_launch.
 * Who owns what   everything is the caller's. A call may be launched many times; launches that
 *                 share scratch must follow each other on one stream.
 * Same bytes      a batch gives the same bytes every time. In batch-invariant pools a row's result
 *                 depends on its item alone; elsewhere the keys of few long units are cut.
 * Nothing hangs   no thread block waits for another.
 */
#ifndef ATTND_GPU_PREFILL_H
#define ATTND_GPU_PREFILL_H

#include "kernels/backend.h"
#include "kernels/gpu/params.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Rates of dilated layers that the kernels compute: 1, 2, 4, ... 2^(PREFILL_RATES - 1). */
#define PREFILL_RATES 6

/* A pool as the tuned kernels see it. */
struct prefill_pool {
    uint64_t map_k[16], map_v[16]; /* CUtensorMap of all K and of all V */
    struct gpu_kv kv; /* kv.layers and kv.table in device memory */
    const struct attn_layer_spec *specs; /* host, [num_layers]; scalars only are read */
    uint32_t num_layers, n_blocks;
    uint32_t n_processors;
    uint32_t dim; /* of the kernel: head_dim_k and head_dim_v are at most this */
    uint32_t box_tokens; /* that one copy brings */
    char *decoded; /* of a quantised pool: PREFILL_DECODED_BYTES of device memory; not its own */
    uint32_t decoded_blocks; /* there is room for, of PREFILL_DECODED_TOKENS of one kv head */
    uint32_t most_parts; /* units of a launch whose keys are cut that part_o has room for; 0: none
                            may be cut */
    bool has_extras; /* a layer has a soft cap or ALiBi slopes */
    bool has_dilated; /* a layer is dilated, and computed */
} __attribute__((aligned(64)));

/* Where a launch's K and V lie that were decoded. Its items' are decoded for as many kv heads
 * together as there is room for, so an item has at most what fits for one head. */
#ifndef PREFILL_DECODED_BYTES
#define PREFILL_DECODED_BYTES (128u << 20)
#endif
#define PREFILL_DECODED_TOKENS 128 /* of a block of it */

/* This geometry is computed on this device: f16 or bf16, head dims from 64 to 256 (quantised KV: to
 * 128, and no mxfp4 for f16, which can't hold its scales), or V in K that is not quantised, K to
 * 576 and V to 512; block_tokens 16 to 256. major: of the compute capability. */
bool prefill_supported(const struct backend_pool_config *c, int major);

/* Of the kernels that compute it. */
uint32_t prefill_dim(const struct backend_pool_config *c);

/* Is a layer dilated, and its items are computed if they are long enough? */
bool prefill_has_dilated(const struct prefill_pool *p);

/* Fills *p. kv and specs are kept (specs borrowed for the pool's life); kv.layers has been written.
 * decoded: as prefill_pool has it, NULL where the pool is not quantised. part_slots: as
 * prefill_launch's part_o has. 0 or the driver's error code (loads every kernel, so
 * that later launches allocate nothing). */
int prefill_pool_init(struct prefill_pool *p, const struct backend_pool_config *c,
                      const struct gpu_kv *kv, const struct attn_layer_spec *specs,
                      uint32_t n_processors, char *decoded, uint64_t part_slots);

/* Units of a launch whose keys are cut; the scratch has a counter for each. */
#define PREFILL_MAX_CUT 510

/* Device memory of a launch, zeroed once at start. */
#define PREFILL_SCRATCH_BYTES (8 + PREFILL_MAX_CUT * 4)

/* A tile of rows of an item, or one of the parts of its keys; one unit of work for each kv head.
 * Parts of a tile follow each other. */
struct prefill_entry {
    uint32_t item : 25, last_part : 7;
    uint32_t tile : 25, part : 7;
};
#define PREFILL_MAX_PARTS 16 /* each reads the others' sums if it is the last */
#define PREFILL_MAX_LATENT_PARTS 128

/* The same of a dilated layer. For kv head h the rows are those of the tokens among
 * [from, from + n_tokens) of the item whose positions are h + residue modulo 2^shift. Which
 * branches they take part in follows from the residue alone. */
struct prefill_run {
    uint32_t item : 24, shift : 8;
    uint32_t from, n_tokens;
    uint32_t tile : 24, residue : 8;
};

#define PREFILL_INLINE_ENTRIES 960
#define PREFILL_INLINE_RUNS (PREFILL_INLINE_ENTRIES / 2)

union prefill_list {
    struct prefill_entry entries[PREFILL_INLINE_ENTRIES];
    struct prefill_run runs[PREFILL_INLINE_RUNS];
};

/* A prepared batch. */
struct prefill_call {
    const struct prefill_pool *pool;
    const struct gpu_item *items; /* device */
    bool is_dilated; /* entries are prefill_run */
    const uint32_t *list_starts, *list_tokens; /* device: the items' queries visit what they list,
                                                  to be set by the caller; NULL: all they see */
    const struct tree_node *nodes; /* device: the items are trees, to be set by the caller; NULL:
                                      they are none */
    bool is_cut; /* part_o and part_ml are written: nothing that does so may run beside it */
    uint32_t heads; /* kv heads of a launch; of a quantised pool maybe not all */
    uint32_t rows; /* of a unit: prefill_rows, or PREFILL_FEW_ROWS */
    uint32_t n_items, head_blocks; /* of a quantised pool: what one head's decoded keys take */
    uint32_t n_entries; /* n_entries * num_kv_heads units */
    uint32_t section_heads; /* kv heads whose units come before those of the others */
    uint64_t upload_bytes; /* 0: the entries travel in the kernel's parameters */
    union prefill_list inline_list;
};

/* How the keys of units are cut where they leave processors idle. 0: as those of prompts. */
struct prefill_shape {
    uint32_t n_processors; /* that the launch takes */
    uint32_t part_tiles; /* of a part at least */
    const uint32_t *list_starts; /* host: of items with lists, from their node0 on; V is in K */
};

/* Items of n_tokens of this layer, n_keys with those before, are computed: those of more than
 * DECODE_MAX_TOKENS tokens, where V is in K of any number, but not those of dilated layers whose
 * rates are no powers of two, whose head dims are above 128, whose KV is quantised or whose rows
 * are too far apart, nor those of quantised pools whose keys have no room when decoded. */
bool prefill_takes(const struct prefill_pool *p, uint32_t layer, uint32_t n_tokens,
                   uint32_t n_keys);

/* Trees of this layer are computed, of any number of nodes, as if it had no ALiBi slopes: not where
 * it is dilated or has a window, nor those of quantised pools or of head dims above 128 where V is
 * not in K. */
bool prefill_takes_trees(const struct prefill_pool *p, uint32_t layer);

/* Blocks of decoded keys of n_keys of one head; of a pool that is not quantised 0. */
uint32_t prefill_blocks(const struct prefill_pool *p, uint32_t n_keys);

#define PREFILL_UPLOAD_ALIGN 256 /* calls of a batch may lie so far apart */

/* Holds for every batch within the limits, with all kinds of calls. */
uint64_t prefill_upload_bytes(const struct prefill_pool *p, uint32_t max_items,
                              uint32_t max_tokens);

/* Orders the work of n items, host copies of those at device_items, all of them of dilated layers
 * or none: long units first. shape NULL: prompts, on all processors. Of a quantised pool an item's
 * node0 counts the blocks of decoded keys of those before it; all together have room. Fills
 * *out_call and out_call->upload_bytes, if they are not 0, at upload (8-byte aligned; also on the
 * device). Same items, same call. */
void prefill_prepare(const struct prefill_pool *p, const struct gpu_item *items, uint32_t n,
                     const struct gpu_item *device_items, const struct prefill_shape *shape,
                     void *upload, struct prefill_call *out_call);

/* upload: where the upload is on the device. part_o [part_slots][head_dim_v], part_ml
 * [part_slots][2]: of partial results, device. n_processors: that it takes, at most; 0: all.
 * chained: may begin while the kernel before on the stream still runs. The driver's error code. */
int prefill_launch(const struct prefill_call *c, const void *upload, void *scratch, float *part_o,
                   float *part_ml, uint32_t n_processors, void *stream, int chained);

#ifdef __cplusplus
}
#endif
#endif
