/* three_passes.cuh: the matrix of scores of the rungs that have one, and the pass over it that
 * makes weights: a warp per row. The vectorised one reads and writes 16 bytes per lane.
 */
#ifndef ATTND_BENCH_THREE_PASSES_CUH
#define ATTND_BENCH_THREE_PASSES_CUH

#include "kernels/bench/rungs/rung.cuh"

namespace gpu
{

/* The scores of row `row` of the tile's head `head`. */
GPU_DEVICE float *score_row(const rung_pass &p, uint32_t head, uint32_t row)
{
    return (float *)p.c.scratch + ((uint64_t)head * p.t.n_rows + row) * p.c.n;
}

constexpr int weights_threads = 128, weights_warps = weights_threads / warp_width;

template <bool is_vector>
__global__ void __launch_bounds__(weights_threads) weights(GPU_PARAM(rung_pass, p))
{
    const uint32_t row = blockIdx.x * weights_warps + warp_id();
    constexpr int step = is_vector ? 4 : 1;
    float *const s = score_row(p, 0, 0) + (uint64_t)row * p.c.n;
    float top = -INFINITY, sum = 0.0f;
    for (uint32_t i = lane_id() * step; i < p.c.n; i += warp_width * step) {
        if (is_vector) {
            const float4 x = *(const float4 *)(s + i);
            top = fmaxf(fmaxf(top, fmaxf(x.x, x.y)), fmaxf(x.z, x.w));
        } else {
            top = fmaxf(top, s[i]);
        }
    }
    top = warp_max(top);
    for (uint32_t i = lane_id() * step; i < p.c.n; i += warp_width * step)
#pragma unroll
        for (int j = 0; j < step; ++j)
            sum += exp2_fast((s[i + j] - top) * log2e);
    sum = warp_sum(sum);
    const float f = 1.0f / sum;
    for (uint32_t i = lane_id() * step; i < p.c.n; i += warp_width * step) {
        if (is_vector) {
            float4 x = *(const float4 *)(s + i);
            x = make_float4(exp2_fast((x.x - top) * log2e) * f, exp2_fast((x.y - top) * log2e) * f,
                            exp2_fast((x.z - top) * log2e) * f, exp2_fast((x.w - top) * log2e) * f);
            *(float4 *)(s + i) = x;
        } else {
            s[i] = exp2_fast((s[i] - top) * log2e) * f;
        }
    }
}

template <bool is_vector> int launch_weights(const rung_pass &p, void *stream)
{
    return launch(weights<is_vector>, dim3(p.t.n_heads * p.t.n_rows / weights_warps),
                  dim3(weights_threads), 0, stream, false, p);
}

} // namespace gpu
#endif
