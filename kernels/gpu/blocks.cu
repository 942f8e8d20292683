/* blocks.cu: whole blocks, all layers of them: copies before they are written; and tokens. */
#include "kernels/gpu/device.cuh"

using namespace gpu;

namespace
{

__global__ void __launch_bounds__(256) copy_blocks(GPU_PARAM(gpu_copy, a))
{
    const uint4 *src = (const uint4 *)(a.base + a.list[2 * blockIdx.y] * a.block_bytes);
    uint4 *dst = (uint4 *)(a.base + a.list[2 * blockIdx.y + 1] * a.block_bytes);
    uint64_t n = a.block_bytes / 16, step = (uint64_t)gridDim.x * blockDim.x;
    for (uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step)
        dst[i] = src[i];
}

/* A token's rows of one layer's K or V part, and their scales. */
__global__ void __launch_bounds__(128) copy_tokens(GPU_PARAM(gpu_tokens_copy, a))
{
    const gpu_kv &kv = a.kv;
    const uint32_t *from = a.list + 4 * blockIdx.x, *to = from + 2;
    const uint32_t layer = blockIdx.y / 2;
    const bool is_v = blockIdx.y % 2 != 0;
    if (is_v && kv.v_offset == 0)
        return;
    const part p = part_of(kv, layer, is_v);
    const uint32_t n = p.row_bytes / 8; /* head dims are multiples of 8 */
    for (uint32_t i = threadIdx.x; i < n * kv.num_kv_heads; i += blockDim.x) {
        const uint32_t head = i / n;
        ((uint2 *)row_address(kv, p, to[0], head, to[1]))[i % n] =
            ((const uint2 *)row_address(kv, p, from[0], head, from[1]))[i % n];
    }
    const uint32_t w = kv.is_quantised ? p.scale_bytes / 4 : 0;
    for (uint32_t i = threadIdx.x; i < w * kv.num_kv_heads; i += blockDim.x) {
        const uint32_t head = i / w;
        ((uint32_t *)scale_address(kv, p, to[0], head, to[1]))[i % w] =
            ((const uint32_t *)scale_address(kv, p, from[0], head, from[1]))[i % w];
    }
}

dim3 block_grid(uint64_t block_bytes, uint32_t n)
{
    uint64_t x = (block_bytes / 16 + 1023) / 1024; /* four loads a thread */
    return dim3((uint32_t)(x < 64 ? x : 64), n);
}

} // namespace

int gpu_copy_launch(const struct gpu_copy *a, void *stream)
{
    return launch(copy_blocks, block_grid(a->block_bytes, a->n), dim3(256), 0, stream, false, *a);
}

int gpu_tokens_copy_launch(const struct gpu_tokens_copy *a, void *stream)
{
    return launch(copy_tokens, dim3(a->n, 2 * a->num_layers), dim3(128), 0, stream, false, *a);
}
