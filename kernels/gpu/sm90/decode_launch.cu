/* decode_launch.cu: a pool's tensor maps, and the launch of a prepared call.
 */
#include <cuda_runtime.h>
#include <stddef.h>
#include <string.h>

#include "kernels/gpu/sm90/decode_kernels.h"
#include "kernels/gpu/sm90/tensor_map.h"
#include "kernels/gpu/vendor/launch_cuda.h"

static decode::kernel_fn kernel_for(const struct decode_pool *p, enum decode_kernel kernel,
                                    uint32_t rows, decode::decode_start start)
{
    const auto find = p->kv.q_dtype == ATTN_BF16 ? decode::kernel_bf16 : decode::kernel_f16;
    return find(kernel, p->kv.dk, rows, p->has_extras, start);
}

/* The pool as (64 elements, token rows of a block, slabs of 64, K or V, block); a box is `tokens`
 * rows of one head, of K or of K and V, each slab 128 bytes wide and swizzled. */
static int make_map(const struct decode_pool *p, uint32_t tokens, uint32_t parts, uint64_t *out_map)
{
    const uint64_t row = p->kv.dk * 2, part = (uint64_t)p->kv.num_kv_heads * p->kv.block_tokens;
    const cuuint64_t dims[5] = {64, p->num_layers * 2 * part, p->kv.dk / 64, 2, p->n_blocks};
    const cuuint64_t strides[4] = {row, 128, part * row, p->kv.block_bytes};
    const cuuint32_t box[5] = {64, tokens, p->kv.dk / 64, parts, 1};
    return tensor_map_make(&p->kv, p->kv.base, 5, dims, strides, box, out_map);
}

int decode_pool_init(struct decode_pool *p, const struct backend_pool_config *c,
                     const struct gpu_kv *kv, const struct attn_layer_spec *specs,
                     uint32_t n_processors)
{
    memset(p, 0, sizeof *p);
    p->kv = *kv;
    p->specs = specs;
    p->num_layers = c->num_layers;
    p->n_blocks = c->n_blocks;
    p->n_processors = n_processors;
    p->is_batch_invariant = c->is_batch_invariant;
    int e = 0;
    for (uint32_t i = 0; i < c->num_layers && e == 0; i++) {
        struct gpu_layer l;
        e = (int)cudaMemcpy(&l, &kv->layers[i], sizeof l, cudaMemcpyDeviceToHost);
        p->has_extras |= e == 0 && (l.soft_cap > 0.0f || l.alibi_slopes != NULL);
        p->has_sinks |= e == 0 && l.sink_logits != NULL;
    }
    if (e == 0)
        e = make_map(p, 16, 2, p->map16);
    if (e == 0)
        e = make_map(p, 16, 1, p->map16_part);
    if (e == 0)
        e = make_map(p, 8, 1, p->map8);
    int shared = 0, device = 0;
    if (e == 0)
        e = cudaGetDevice(&device);
    if (e == 0)
        e = cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    for (int kernel = DECODE_CLUSTER; kernel <= DECODE_WIDE; kernel++)
        for (uint32_t rows = 8; rows <= 64 && e == 0; rows *= 2) {
            for (int start = 0; start <= decode::DECODE_DIRECT_FEW && e == 0; start++) {
                decode::kernel_fn fn =
                    kernel_for(p, (decode_kernel)kernel, rows, (decode::decode_start)start);
                if (fn == NULL)
                    continue;
                e = cudaFuncSetAttribute(fn, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
                if (e == 0)
                    e = cudaFuncSetAttribute(fn, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
            }
        }
    return e;
}

bool decode_can_finish(const struct decode_call *c)
{
    return c->kernel == DECODE_SHORT;
}

bool decode_can_be_direct(const struct decode_call *c)
{
    const uint64_t q_bytes = (uint64_t)c->n_items * c->pool->kv.num_q_heads * c->pool->kv.dk * 2;
    return c->sources_at != 0 && c->cluster * q_bytes <= DECODE_DIRECT_BYTES;
}

int decode_launch(const struct decode_call *c, const void *upload, void *scratch,
                  const struct gpu_finish *finish, void *stream, int chained, enum decode_way way)
{
    const bool is_direct = way != DECODE_BEHIND_PREP;
    const struct decode_pool *p = c->pool;
    const struct gpu_kv *kv = &p->kv;
    const decode::decode_start start = !is_direct                       ? decode::DECODE_AFTER_PREP
                                       : c->n_words <= DECODE_FEW_WORDS ? decode::DECODE_DIRECT_FEW
                                                                        : decode::DECODE_DIRECT;
    decode::kernel_fn fn = kernel_for(p, c->kernel, c->rows, start);
    if (fn == NULL)
        return (int)cudaErrorInvalidDeviceFunction;

    static_assert(offsetof(decode_params, runs) == 48 && sizeof(decode_params) % 64 == 48,
                  "lines of parameters, which begin at 16 of 64 bytes");
    decode_params a = {};
    if (c->upload_bytes) {
        a.items = (const decode_dev_item *)upload;
        if (c->kernel == DECODE_LIST)
            a.runs = (const decode_dev_run *)(a.items + c->n_items);
    }
    a.layers = kv->layers;
    a.arrivals = (uint32_t *)scratch;
    a.part_ml = (float *)(a.arrivals + p->n_processors * DECODE_SLOTS * DECODE_MAX_CLUSTER);
    a.part_o = a.part_ml + 2 * (uint64_t)p->n_processors * DECODE_WIDE_ROWS * 2;
    a.num_q_heads = kv->num_q_heads;
    a.num_kv_heads = kv->num_kv_heads;
    a.group = kv->group;
    a.block_tokens = kv->block_tokens;
    a.tiles_shift = kv->block_shift - 4;
    a.stages = c->stages;
    a.is_tight = c->is_tight;
    a.n_processors = c->n_processors;
    a.row_span = c->row_span;
    a.ids_at = c->ids_at;
    a.ids_stride = c->ids_stride;
    a.n_parts = c->cluster * c->n_groups;
    if (c->kernel == DECODE_WIDE) {
        a.part_reciprocal = UINT32_MAX / a.n_parts + 1; /* of one part 0, which is not used */
        for (uint32_t rank = 0; rank <= c->cluster; rank++)
            a.pieces |= (uint64_t)(8 * rank / c->cluster) << 4 * rank;
        a.wide_body = decode_wide_body(kv->dk, c->rows, c->stages, a.n_parts, c->cluster);
    }
    a.is_chained = chained != 0;
    for (a.lg_cluster = 0; 1u << a.lg_cluster < c->cluster;)
        a.lg_cluster++;
    a.runs_at = c->runs_at;
    a.n_segments = c->n_segments;
    if (finish)
        a.finish = *finish;
    if (is_direct) {
        a.sources_at = c->sources_at;
        a.kv_base = kv->base;
        a.block_bytes = kv->block_bytes;
    }

    cudaLaunchConfig_t l = {};
    l.gridDim = dim3(c->grid[0], c->grid[1], c->grid[2]);
    l.blockDim = c->block;
    l.dynamicSmemBytes = c->shared_bytes;
    cudaLaunchAttribute attributes[2] = {};
    if (c->launch_cluster > 1) {
        attributes[l.numAttrs].id = cudaLaunchAttributeClusterDimension;
        attributes[l.numAttrs++].val.clusterDim = {c->launch_cluster, 1, 1};
    }
    if (chained) {
        attributes[l.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attributes[l.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
    }
    l.attrs = attributes;
    CUtensorMap map;
    memcpy(&map,
           c->kernel == DECODE_WIDE    ? p->map8
           : c->kernel == DECODE_SHORT ? p->map16_part
                                       : p->map16,
           sizeof map);
    struct runtime_args args = {{&a, (void *)c->inline_words, &map},
                                {sizeof a, c->n_words * sizeof c->inline_words[0], sizeof map}};
    static_assert(sizeof a + sizeof(decode_few_words) + sizeof map <= RUNTIME_KEPT_BYTES,
                  "what a graph keeps");
    if (start == decode::DECODE_DIRECT_FEW)
        return runtime_launch_kept((runtime_stream *)stream, fn, &l, &args, way == DECODE_EARLY);
    return way == DECODE_EARLY ? 0 : runtime_launch((runtime_stream *)stream, fn, &l, args.p);
}
