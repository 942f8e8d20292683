/* prefill_launch.cu: a pool's tensor maps for the prefill kernels, and the launch of a prepared
 * call.
 */
#include <cuda_runtime.h>
#include <string.h>

#include "kernels/gpu/sm90/prefill_kernels.h"
#include "kernels/gpu/sm90/tensor_map.h"
#include "kernels/gpu/vendor/launch_cuda.h"

using prefill::prefill_maps;

static bool is_latent(const struct prefill_pool *p)
{
    return p->dim == PREFILL_LATENT_DIM;
}

static prefill::kernel_fn kernel_for(const struct prefill_pool *p, bool is_dilated)
{
    if (is_latent(p))
        return p->kv.q_dtype == ATTN_BF16 ? prefill::latent_kernel_bf16(p->has_extras)
                                          : prefill::latent_kernel_f16(p->has_extras);
    if (p->kv.is_quantised)
        return p->kv.q_dtype == ATTN_BF16 ? prefill::codes_kernel_bf16(p->dim, p->has_extras)
                                          : prefill::codes_kernel_f16(p->dim, p->has_extras);
    if (is_dilated)
        return p->kv.q_dtype == ATTN_BF16 ? prefill::dilated_kernel_bf16(p->dim, p->has_extras)
                                          : prefill::dilated_kernel_f16(p->dim, p->has_extras);
    return p->kv.q_dtype == ATTN_BF16 ? prefill::kernel_bf16(p->dim, p->has_extras)
                                      : prefill::kernel_f16(p->dim, p->has_extras);
}

static bool is_narrow(const struct prefill_pool *p, bool is_dilated)
{
    return is_dilated || p->kv.is_quantised;
}

static uint32_t shared_bytes(const struct prefill_pool *p, bool is_dilated)
{
    if (is_latent(p))
        return latent_shared_bytes();
    return prefill_shared_bytes(p->dim, is_narrow(p, is_dilated)) +
           prefill_scales_bytes(p->dim, p->kv.is_quantised);
}

/* K or V of the pool as (elements, token rows of all heads of a layer, layers, blocks); a box is 64
 * elements of box_tokens rows, 128 bytes wide and swizzled. */
static int make_map(const struct prefill_pool *p, bool is_v, uint64_t *out_map)
{
    const uint32_t dim = is_v ? p->kv.dv : p->kv.dk;
    const cuuint64_t dims[4] = {dim, (uint64_t)p->kv.num_kv_heads * p->kv.block_tokens,
                                p->num_layers, p->n_blocks};
    const cuuint64_t strides[3] = {dim * 2, p->kv.layer_bytes, p->kv.block_bytes};
    const cuuint32_t box[4] = {64, p->box_tokens, 1, 1};
    const char *base = p->kv.base + (is_v ? p->kv.v_offset : 0);
    return tensor_map_make(&p->kv, base, 4, dims, strides, box, out_map);
}

static int init_dilated(struct prefill_pool *p)
{
    p->has_dilated = prefill_has_dilated(p);
    int e = 0;
    if (p->has_dilated)
        e = cudaFuncSetAttribute(kernel_for(p, true), cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 (int)shared_bytes(p, true));
    return e;
}

int prefill_pool_init(struct prefill_pool *p, const struct backend_pool_config *c,
                      const struct gpu_kv *kv, const struct attn_layer_spec *specs,
                      uint32_t n_processors, uint64_t part_slots)
{
    memset(p, 0, sizeof *p);
    p->kv = *kv;
    p->specs = specs;
    p->num_layers = c->num_layers;
    p->n_blocks = c->n_blocks;
    p->n_processors = n_processors;
    p->dim = prefill_dim(c);
    if (!c->is_batch_invariant) {
        const uint64_t rows = prefill_rows(p->dim, kv->is_quantised);
        const uint64_t columns = is_latent(p) ? LATENT_COLUMNS : p->dim;
        const uint64_t most = part_slots * kv->dv / (rows * columns);
        p->most_parts = most < PREFILL_MAX_CUT ? (uint32_t)most : PREFILL_MAX_CUT;
    }
    p->box_tokens = kv->block_tokens;
    while (prefill_keys(p->dim) % p->box_tokens != 0)
        p->box_tokens /= 2;
    int e = 0;
    for (uint32_t i = 0; i < c->num_layers && e == 0; i++) {
        struct gpu_layer l;
        e = (int)cudaMemcpy(&l, &kv->layers[i], sizeof l, cudaMemcpyDeviceToHost);
        p->has_extras |= e == 0 && (l.soft_cap > 0.0f || l.alibi_slopes != NULL);
    }
    if (e == 0 && !kv->is_quantised)
        e = make_map(p, false, p->map_k);
    if (e == 0 && !kv->is_quantised && !c->is_v_in_k)
        e = make_map(p, true, p->map_v);
    if (e == 0)
        e = cudaFuncSetAttribute(kernel_for(p, false), cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 (int)shared_bytes(p, false));
    return e ? e : init_dilated(p);
}

/* What joins the parts of a latent pool's units, behind the launch that makes them. */
static int launch_join(const struct prefill_pool *p, prefill_params *a, void **args, void *stream)
{
    cudaLaunchConfig_t l = {};
    cudaLaunchAttribute attribute = {};
    a->is_chained = 1;
    l.gridDim = dim3(a->n_units, prefill_rows(p->dim, false) / LATENT_JOIN_ROWS);
    l.blockDim = dim3(LATENT_JOIN_ROWS * 32);
    l.attrs = &attribute;
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    l.numAttrs = 1;
    return runtime_launch((runtime_stream *)stream,
                          p->kv.q_dtype == ATTN_BF16 ? prefill::latent_join_bf16()
                                                     : prefill::latent_join_f16(),
                          &l, args);
}

int prefill_launch(const struct prefill_call *c, const void *upload, void *scratch, float *part_o,
                   float *part_ml, uint32_t n_processors, void *stream, int chained)
{
    const struct prefill_pool *p = c->pool;
    const uint32_t n_blocks = n_processors ? n_processors : p->n_processors;
    const struct gpu_kv *kv = &p->kv;
    prefill_params a = {};
    a.items = c->items;
    a.entries = c->upload_bytes ? upload : NULL;
    a.layers = kv->layers;
    a.table = kv->table;
    a.counters = (uint32_t *)scratch;
    a.part_o = part_o;
    a.part_ml = part_ml;
    a.base = kv->base;
    a.block_bytes = kv->block_bytes;
    a.layer_bytes = kv->layer_bytes;
    a.v_offset = kv->v_offset;
    a.k_scales = kv->k_scales;
    a.v_scales = kv->v_scales;
    a.n_entries = c->n_entries;
    a.n_units = c->n_entries * kv->num_kv_heads;
    a.section_heads = c->section_heads;
    a.num_q_heads = kv->num_q_heads;
    a.num_kv_heads = kv->num_kv_heads;
    a.first_kv_head = kv->first_kv_head;
    a.group = kv->group;
    a.group_reciprocal = kv->group == 1 ? 0 : UINT32_MAX / kv->group + 1;
    a.dk = kv->dk;
    a.dv = kv->dv;
    a.block_tokens = kv->block_tokens;
    a.block_shift = kv->block_shift;
    a.box_tokens = p->box_tokens;
    a.is_chained = chained != 0;
    a.is_fp8 = kv->kv_dtype == ATTN_FP8_E4M3;
    prefill_maps maps;
    memcpy(&maps.k, p->map_k, sizeof maps.k);
    memcpy(&maps.v, p->map_v, sizeof maps.v);

    cudaLaunchConfig_t l = {};
    l.gridDim = dim3(a.n_units < n_blocks ? a.n_units : n_blocks);
    const uint32_t computing = prefill_rows(p->dim, is_narrow(p, c->is_dilated)) * 2;
    l.blockDim = dim3(computing + (kv->is_quantised ? 256 : 128));
    l.dynamicSmemBytes = shared_bytes(p, c->is_dilated);
    cudaLaunchAttribute attribute = {};
    l.attrs = &attribute;
    if (chained) {
        attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attribute.val.programmaticStreamSerializationAllowed = 1;
        l.numAttrs = 1;
    }
    if (is_latent(p))
        l.blockDim = dim3(LATENT_THREADS);
    void *args[] = {&a, (void *)&c->inline_list, &maps};
    const int e = runtime_launch((runtime_stream *)stream, kernel_for(p, c->is_dilated), &l, args);
    return e || !is_latent(p) || !c->is_cut ? e : launch_join(p, &a, args, stream);
}
