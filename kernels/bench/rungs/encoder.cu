/* encoder.cu: what an encoder has beside matrix products and attention. */
#include "kernels/bench/rungs/rung.cuh"

using namespace gpu;

namespace
{

constexpr int threads = 128;

struct norm_call {
    const void *x;
    void *out;
    uint32_t rows, width;
};

/* A warp per row. */
template <bool is_f32> __global__ void __launch_bounds__(threads) norm(GPU_PARAM(norm_call, a))
{
    const uint32_t row = blockIdx.x * (threads / warp_width) + warp_id();
    const uint64_t at = (uint64_t)row * a.width;
    if (row >= a.rows)
        return;
    float sum = 0.0f, squares = 0.0f;
    for (uint32_t i = lane_id(); i < a.width; i += warp_width)
        sum += load1<is_f32>(a.x, at + i);
    const float mean = warp_sum(sum) / (float)a.width;
    for (uint32_t i = lane_id(); i < a.width; i += warp_width) {
        const float d = load1<is_f32>(a.x, at + i) - mean;
        squares = fmaf(d, d, squares);
    }
    const float f = 1.0f / sqrtf(warp_sum(squares) / (float)a.width + 1e-5f);
    for (uint32_t i = lane_id(); i < a.width; i += warp_width)
        store1<is_f32>(a.out, at + i, (load1<is_f32>(a.x, at + i) - mean) * f);
}

struct gelu_call {
    void *x;
    uint64_t n;
};

GPU_DEVICE float gelu_of(float x)
{
    return 0.5f * x * (1.0f + tanhf(0.7978845608f * (x + 0.044715f * x * x * x)));
}

template <bool is_f32> __global__ void __launch_bounds__(threads) gelu(GPU_PARAM(gelu_call, a))
{
    const uint64_t at = ((uint64_t)blockIdx.x * threads + threadIdx.x) * 4;
    if (at >= a.n)
        return;
    const float4 x = load4<is_f32>(a.x, at);
    store4<is_f32>(a.x, at, make_float4(gelu_of(x.x), gelu_of(x.y), gelu_of(x.z), gelu_of(x.w)));
}

} // namespace

int rung_norm_launch(const void *x, void *out, uint32_t rows, uint32_t width, bool is_f32,
                     void *stream)
{
    const norm_call a = {x, out, rows, width};
    const dim3 blocks((rows + threads / warp_width - 1) / (threads / warp_width));
    return is_f32 ? launch(norm<true>, blocks, dim3(threads), 0, stream, false, a)
                  : launch(norm<false>, blocks, dim3(threads), 0, stream, false, a);
}

int rung_gelu_launch(void *x, uint64_t n, bool is_f32, void *stream)
{
    const gelu_call a = {x, n};
    const dim3 blocks((uint32_t)((n / 4 + threads - 1) / threads));
    return is_f32 ? launch(gelu<true>, blocks, dim3(threads), 0, stream, false, a)
                  : launch(gelu<false>, blocks, dim3(threads), 0, stream, false, a);
}
