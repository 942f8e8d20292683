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

static prefill::kernel_fn kernel_for(const struct prefill_pool *p, uint32_t rows, bool is_dilated,
                                     bool is_listed, bool has_nodes)
{
    if (is_latent(p))
        return p->kv.q_dtype == ATTN_BF16 ? prefill::latent_kernel_bf16(p->has_extras, is_listed)
                                          : prefill::latent_kernel_f16(p->has_extras, is_listed);
    if (p->kv.is_quantised)
        return p->kv.q_dtype == ATTN_BF16 ? prefill::codes_kernel_bf16(p->dim, p->has_extras)
                                          : prefill::codes_kernel_f16(p->dim, p->has_extras);
    if (has_nodes)
        return p->kv.q_dtype == ATTN_BF16 ? prefill::trees_kernel_bf16(p->dim, rows, p->has_extras)
                                          : prefill::trees_kernel_f16(p->dim, rows, p->has_extras);
    if (is_dilated)
        return p->kv.q_dtype == ATTN_BF16 ? prefill::dilated_kernel_bf16(p->dim, p->has_extras)
                                          : prefill::dilated_kernel_f16(p->dim, p->has_extras);
    return p->kv.q_dtype == ATTN_BF16 ? prefill::kernel_bf16(p->dim, rows, p->has_extras)
                                      : prefill::kernel_f16(p->dim, rows, p->has_extras);
}

static uint32_t shared_bytes(const struct prefill_pool *p, uint32_t rows, bool is_dilated)
{
    if (is_latent(p))
        return latent_shared_bytes();
    return prefill_shared_bytes(p->dim, rows, is_dilated) +
           prefill_scales_bytes(p->dim, p->kv.is_quantised);
}

/* Lets a kernel have its shared memory. */
static int init_kernel(const struct prefill_pool *p, uint32_t rows, bool is_dilated, bool is_listed,
                       bool has_nodes)
{
    return cudaFuncSetAttribute(kernel_for(p, rows, is_dilated, is_listed, has_nodes),
                                cudaFuncAttributeMaxDynamicSharedMemorySize,
                                (int)shared_bytes(p, rows, is_dilated));
}

/* All that calls of the pool may take. */
static int init_kernels(const struct prefill_pool *p)
{
    const uint32_t rows = prefill_rows(p->dim, false);
    const bool has_trees = p->dim <= 128 && !p->kv.is_quantised;
    int e = 0;
    for (int is_listed = 0; is_listed <= is_latent(p) && e == 0; is_listed++)
        e = init_kernel(p, rows, false, is_listed, false);
    if (e == 0 && has_trees)
        e = init_kernel(p, rows, false, false, true);
    if (prefill_has_few_rows(p->dim, p->kv.is_quantised))
        for (int has_nodes = 0; has_nodes < 2 && e == 0; has_nodes++)
            e = init_kernel(p, PREFILL_FEW_ROWS, false, false, has_nodes);
    if (e == 0 && p->has_dilated)
        e = init_kernel(p, prefill_rows(p->dim, true), true, false, false);
    return e;
}

/* K or V of the pool as (elements, token rows of all heads of a layer, layers, blocks); a box is 64
 * elements of box_tokens rows, 128 bytes wide and swizzled. Of a quantised pool what is decoded, as
 * blocks of one head and one layer. */
static int make_map(const struct prefill_pool *p, bool is_v, uint64_t *out_map)
{
    const struct gpu_kv *kv = &p->kv;
    const uint32_t dim = is_v ? kv->dv : kv->dk;
    const uint64_t bytes = prefill_block_bytes(kv->dk, kv->dv);
    const cuuint32_t box[4] = {64, p->box_tokens, 1, 1};
    if (kv->is_quantised) {
        const cuuint64_t dims[4] = {dim, PREFILL_DECODED_TOKENS, 1, p->decoded_blocks};
        const cuuint64_t strides[3] = {dim * 2, bytes, bytes};
        const char *base = p->decoded + (is_v ? PREFILL_DECODED_TOKENS * kv->dk * 2 : 0);
        return tensor_map_make(kv, base, 4, dims, strides, box, out_map);
    }
    const cuuint64_t dims[4] = {dim, (uint64_t)kv->num_kv_heads * kv->block_tokens, p->num_layers,
                                p->n_blocks};
    const cuuint64_t strides[3] = {dim * 2, kv->layer_bytes, kv->block_bytes};
    const char *base = kv->base + (is_v ? kv->v_offset : 0);
    return tensor_map_make(kv, base, 4, dims, strides, box, out_map);
}

/* Tokens of a block as the kernels see it. */
static uint32_t tokens_of_block(const struct gpu_kv *kv)
{
    return kv->is_quantised ? PREFILL_DECODED_TOKENS : kv->block_tokens;
}

int prefill_pool_init(struct prefill_pool *p, const struct backend_pool_config *c,
                      const struct gpu_kv *kv, const struct attn_layer_spec *specs,
                      uint32_t n_processors, char *decoded, uint64_t part_slots)
{
    memset(p, 0, sizeof *p);
    p->kv = *kv;
    p->specs = specs;
    p->num_layers = c->num_layers;
    p->n_blocks = c->n_blocks;
    p->n_processors = n_processors;
    p->dim = prefill_dim(c);
    if (!c->is_batch_invariant) {
        const uint64_t rows = prefill_rows(p->dim, false);
        const uint64_t columns = is_latent(p) ? LATENT_COLUMNS : p->dim;
        const uint64_t most = part_slots * kv->dv / (rows * columns);
        p->most_parts = most < PREFILL_MAX_CUT ? (uint32_t)most : PREFILL_MAX_CUT;
    }
    if (kv->is_quantised) { /* the last copy of scales may go beyond the last block */
        const uint64_t scales = PREFILL_DECODED_TOKENS * sizeof(float);
        p->decoded = decoded;
        p->decoded_blocks = (uint32_t)((PREFILL_DECODED_BYTES - scales) /
                                       (prefill_block_bytes(kv->dk, kv->dv) + scales));
    }
    p->box_tokens = tokens_of_block(kv);
    while (prefill_keys(p->dim) % p->box_tokens != 0)
        p->box_tokens /= 2;
    int e = 0;
    for (uint32_t i = 0; i < c->num_layers && e == 0; i++) {
        struct gpu_layer l;
        e = (int)cudaMemcpy(&l, &kv->layers[i], sizeof l, cudaMemcpyDeviceToHost);
        p->has_extras |= e == 0 && (l.soft_cap > 0.0f || l.alibi_slopes != NULL);
    }
    if (e == 0)
        e = make_map(p, false, p->map_k);
    if (e == 0 && !c->is_v_in_k)
        e = make_map(p, true, p->map_v);
    p->has_dilated = prefill_has_dilated(p);
    return e ? e : init_kernels(p);
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
                          p->kv.q_dtype == ATTN_BF16
                              ? prefill::latent_join_bf16(a->list_starts != NULL)
                              : prefill::latent_join_f16(a->list_starts != NULL),
                          &l, args);
}

static float *scales_of(const struct prefill_pool *p)
{
    return (float *)(p->decoded + p->decoded_blocks * prefill_block_bytes(p->kv.dk, p->kv.dv));
}

/* Of a quantised pool: K and V of as many kv heads from head0 on. */
static int launch_decode(const struct prefill_call *c, uint32_t head0, uint32_t n_heads,
                         void *stream, int chained)
{
    const struct prefill_pool *p = c->pool;
    prefill_decode a = {};
    a.kv = p->kv;
    a.items = c->items;
    a.values = p->decoded;
    a.scales = scales_of(p);
    a.block_bytes = prefill_block_bytes(p->kv.dk, p->kv.dv);
    a.n_items = c->n_items;
    a.head0 = head0;
    a.head_blocks = c->head_blocks;
    return prefill_decode_launch(&a, n_heads, stream, chained);
}

/* Units of the kv heads of *a. */
static int launch_units(const struct prefill_call *c, prefill_params *a, uint32_t n_blocks,
                        void *stream)
{
    const struct prefill_pool *p = c->pool;
    prefill_maps maps;
    memcpy(&maps.k, p->map_k, sizeof maps.k);
    memcpy(&maps.v, p->map_v, sizeof maps.v);
    a->n_units = c->n_entries * a->num_kv_heads;
    cudaLaunchConfig_t l = {};
    n_blocks *= prefill_blocks_at_once(p->dim, c->rows);
    l.gridDim = dim3(a->n_units < n_blocks ? a->n_units : n_blocks);
    l.blockDim = dim3(c->rows * 2 + 128);
    l.dynamicSmemBytes = shared_bytes(p, c->rows, c->is_dilated);
    cudaLaunchAttribute attribute = {};
    l.attrs = &attribute;
    if (a->is_chained) {
        attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attribute.val.programmaticStreamSerializationAllowed = 1;
        l.numAttrs = 1;
    }
    if (is_latent(p))
        l.blockDim = dim3(LATENT_THREADS);
    void *args[] = {a, (void *)&c->inline_list, &maps};
    const int e = runtime_launch(
        (runtime_stream *)stream,
        kernel_for(p, c->rows, c->is_dilated, c->list_starts != NULL, c->nodes != NULL), &l, args);
    return e || !is_latent(p) || !c->is_cut ? e : launch_join(p, a, args, stream);
}

int prefill_launch(const struct prefill_call *c, const void *upload, void *scratch, float *part_o,
                   float *part_ml, uint32_t n_processors, void *stream, int chained)
{
    const struct prefill_pool *p = c->pool;
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
    a.list_starts = c->list_starts;
    a.list_tokens = c->list_tokens;
    a.nodes = c->nodes;
    a.block_bytes = kv->block_bytes;
    a.layer_bytes = kv->layer_bytes;
    a.v_offset = kv->v_offset;
    a.n_entries = c->n_entries;
    a.section_heads = c->section_heads;
    a.num_q_heads = kv->num_q_heads;
    a.first_kv_head = kv->first_kv_head;
    a.group = kv->group;
    a.group_reciprocal = kv->group == 1 ? 0 : UINT32_MAX / kv->group + 1;
    a.dk = kv->dk;
    a.dv = kv->dv;
    a.block_tokens = tokens_of_block(kv);
    a.block_shift = (uint32_t)__builtin_ctz(a.block_tokens);
    a.box_tokens = p->box_tokens;
    a.is_chained = chained != 0;
    if (kv->is_quantised)
        a.scales = scales_of(p);
    a.head_blocks = c->head_blocks;
    int e = 0;
    for (; a.head0 < kv->num_kv_heads && e == 0; a.head0 += c->heads) {
        const uint32_t left = kv->num_kv_heads - a.head0;
        a.num_kv_heads = left < c->heads ? left : c->heads;
        if (kv->is_quantised) {
            e = launch_decode(c, a.head0, a.num_kv_heads, stream, (int)a.is_chained);
            a.is_chained = 1;
        }
        if (e == 0)
            e = launch_units(c, &a, n_processors ? n_processors : p->n_processors, stream);
    }
    return e;
}
