/* blocks.cu: whole blocks, all layers of them: copies before they are written. */
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
