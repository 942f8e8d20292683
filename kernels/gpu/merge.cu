/* merge.cu: partial outputs as one, one warp a row (a query's head): of several devices, where
 * those of the others have been stored here by their kernels, or are read over the link; and of an
 * item and the groups that it is in.
 */
#include "kernels/gpu/device.cuh"

using namespace gpu;

namespace
{

constexpr int merge_threads = 256, merge_warps = merge_threads / warp_width;

/* The item that has the row. */
GPU_DEVICE const gpu_merge_item &item_of(const gpu_merge_parts &a, uint32_t row)
{
    uint32_t lo = 0, hi = a.n_items;
    while (hi - lo > 1) {
        const uint32_t mid = (lo + hi) / 2;
        if (a.items[mid].row0 <= row)
            lo = mid;
        else
            hi = mid;
    }
    return a.items[lo];
}

__global__ void __launch_bounds__(merge_threads) merge_parts(GPU_PARAM(gpu_merge_parts, by_value))
{
    const gpu_merge_parts &a = params(by_value);
    const uint32_t at = blockIdx.x * merge_warps + warp_id();
    if (at >= a.n_rows)
        return;
    const gpu_merge_item &it = item_of(a, at);
    const uint64_t row = at - it.row0;
    const uint32_t last = it.pos + (it.is_full ? it.n_tokens - 1 : (uint32_t)row / a.num_q_heads);
    const uint64_t row_bytes = (uint64_t)a.dv * element_bytes(a.q_dtype);
    float lse[GPU_MERGE_PARTS], most = -INFINITY, sum = 0.0f;
#pragma unroll
    for (int k = 0; k < GPU_MERGE_PARTS; ++k) {
        bool has = k < a.n_parts && (uint64_t)k * a.stripe <= last;
        lse[k] = has ? ((const float *)(a.parts[k] + it.lse_at))[row] : -INFINITY;
        most = fmaxf(most, lse[k]);
    }
#pragma unroll
    for (int k = 0; k < GPU_MERGE_PARTS; ++k)
        if (lse[k] != -INFINITY)
            sum += exp2_fast((lse[k] - most) * log2e);
    for (uint32_t e = lane_id() * 8; e < a.dv; e += warp_width * 8) {
        float x[8] = {};
#pragma unroll
        for (int k = 0; k < GPU_MERGE_PARTS; ++k) {
            if (lse[k] == -INFINITY)
                continue;
            const float weight = exp2_fast((lse[k] - most) * log2e) / sum;
            float y[8];
            load8(y, a.parts[k] + it.out_at + row * row_bytes + e * element_bytes(a.q_dtype),
                  a.q_dtype);
#pragma unroll
            for (int j = 0; j < 8; ++j)
                x[j] = fmaf(weight, y[j], x[j]);
        }
        store8(it.out + row * row_bytes + e * element_bytes(a.q_dtype), x, a.q_dtype);
    }
    if (lane_id() == 0 && it.lse)
        it.lse[row] = sum == 0.0f ? -INFINITY : most + log2_fast(sum) * ln2;
}

__global__ void __launch_bounds__(merge_threads) join(GPU_PARAM(gpu_join, by_value))
{
    const gpu_join &a = params(by_value);
    chain_release();
    chain_wait();
    const gpu_joined it = a.items[blockIdx.x];
    const uint32_t row = blockIdx.y * merge_warps + warp_id();
    if (row >= it.n_rows)
        return;
    const uint64_t row_bytes = (uint64_t)a.dv * element_bytes(a.q_dtype);
    const float *const sinks = a.layers[it.layer].sink_logits;
    float weight[GPU_SHARED_LEVELS + 1], most = -INFINITY, sum = 0.0f;
#pragma unroll
    for (int k = 0; k <= GPU_SHARED_LEVELS; ++k) {
        const uint64_t at = (uint64_t)k * a.n_rows + it.row0 + row;
        weight[k] = k < it.n_parts ? a.lses[at] * log2e : -INFINITY;
        most = fmaxf(most, weight[k]);
    }
#pragma unroll
    for (int k = 0; k <= GPU_SHARED_LEVELS; ++k) {
        weight[k] = weight[k] != -INFINITY ? exp2_fast(weight[k] - most) : 0.0f;
        sum += weight[k];
    }
    if (sinks != nullptr) /* every part has counted it */
        sum -= (float)(it.n_parts - 1) * exp2_fast(sinks[row % a.num_q_heads] * log2e - most);
    for (uint32_t e = lane_id() * 8; e < a.dv; e += warp_width * 8) {
        float x[8] = {};
#pragma unroll
        for (int k = 0; k <= GPU_SHARED_LEVELS; ++k) {
            if (weight[k] == 0.0f)
                continue;
            const uint64_t at = (uint64_t)k * a.n_rows + it.row0 + row;
            float y[8];
            load8(y, a.outs + at * row_bytes + e * element_bytes(a.q_dtype), a.q_dtype);
#pragma unroll
            for (int i = 0; i < 8; ++i)
                x[i] = fmaf(weight[k] / sum, y[i], x[i]);
        }
        store8(it.out + row * row_bytes + e * element_bytes(a.q_dtype), x, a.q_dtype);
    }
    if (lane_id() == 0 && it.lse)
        it.lse[row] = sum == 0.0f ? -INFINITY : (most + log2_fast(sum)) * ln2;
}

} // namespace

int gpu_join_launch(const struct gpu_join *a, void *stream, int chained)
{
    return launch(join, dim3(a->n_items, (a->most_rows + merge_warps - 1) / merge_warps),
                  dim3(merge_threads), 0, stream, chained, *a);
}

int gpu_merge_parts_launch(const struct gpu_merge_parts *a, void *stream)
{
    return launch(merge_parts, dim3((a->n_rows + merge_warps - 1) / merge_warps),
                  dim3(merge_threads), 0, stream, false, *a);
}
