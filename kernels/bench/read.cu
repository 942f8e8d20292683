/* read.cu: plain reads, which measurements compare with and empty caches by. */
#include "kernels/gpu/device.cuh"

using namespace gpu;

namespace
{

/* Plain 16-byte loads, `unroll` of them in flight a thread. */
template <int unroll>
__global__ void __launch_bounds__(1024) read_bytes(const uint4 *p, uint64_t n, uint32_t *sink)
{
    uint64_t step = (uint64_t)gridDim.x * blockDim.x;
    uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x;
    uint32_t x = 0;
    for (; i + (unroll - 1) * step < n; i += unroll * step) {
        uint4 v[unroll];
#pragma unroll
        for (int u = 0; u < unroll; ++u)
            v[u] = p[i + u * step];
#pragma unroll
        for (int u = 0; u < unroll; ++u)
            x ^= v[u].x ^ v[u].y ^ v[u].z ^ v[u].w;
    }
    for (; i < n; i += step)
        x ^= p[i].x ^ p[i].y ^ p[i].z ^ p[i].w;
    if (x == 0x5eed5eed) /* so that the loads are not removed */
        *sink = x;
}

} // namespace

int gpu_read_launch(const void *p, uint64_t bytes, uint32_t *sink, int shape, uint32_t n_processors,
                    void *stream)
{
    const uint4 *q = (const uint4 *)p;
    uint64_t n = bytes / 16;
    struct {
        void (*kernel)(const uint4 *, uint64_t, uint32_t *);
        uint32_t threads, a_processor;
    } const shapes[GPU_READ_SHAPES] = {
        {read_bytes<8>, 512, 4},  {read_bytes<8>, 1024, 2}, {read_bytes<4>, 1024, 2},
        {read_bytes<16>, 256, 4}, {read_bytes<2>, 1024, 2}, {read_bytes<1>, 256, 8},
    };
    uint32_t threads = shapes[shape].threads;
    uint64_t grid = (n + threads - 1) / threads, cap = n_processors * shapes[shape].a_processor;
    if (grid > cap)
        grid = cap;
    return launch(shapes[shape].kernel, dim3(grid ? (uint32_t)grid : 1), dim3(threads), 0, stream,
                  false, q, n, sink);
}
