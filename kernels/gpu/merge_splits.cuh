/* merge_splits.cuh: one row's partial results, a split each, as its output. Thread blocks of
 * attend_rows.cuh that are the last of a row do this themselves; for all other kernels merge does
 * (attend_vector.cu). Both compute alike, to the bit.
 */
#ifndef ATTND_GPU_MERGE_SPLITS_CUH
#define ATTND_GPU_MERGE_SPLITS_CUH

#include "kernels/gpu/device.cuh"

namespace gpu
{

/* Lanes that make a row's weights together. */
constexpr uint32_t split_lanes = 8;
static_assert(GPU_MAX_SPLITS % split_lanes == 0, "each has as many splits");

/* What the sums of a row's splits are multiplied by, `row` of [n_tokens][num_q_heads]. By
 * split_lanes neighbouring lanes, and all groups of lanes of a warp, each for a row. Gives the
 * row's lse, too. */
GPU_DEVICE void split_weights(float *weights, const gpu_attend &a, const gpu_item &it, uint32_t row,
                              float &out_lse)
{
    constexpr uint32_t each = GPU_MAX_SPLITS / split_lanes;
    const uint32_t lane = lane_id() % split_lanes, n_rows = it.n_tokens * a.kv.num_q_heads;
    const float2 *const parts = (const float2 *)a.part_ml + it.slot0 + row;
    float2 part[each];
    float m = -INFINITY, sum = 0.0f;
#pragma unroll
    for (uint32_t k = 0; k < each; ++k) {
        const uint32_t split = k * split_lanes + lane;
        part[k] = make_float2(-INFINITY, 0.0f);
        if (split < it.n_splits)
            part[k] = parts[(uint64_t)split * n_rows];
        m = fmaxf(m, part[k].x);
    }
    m = warp_max<split_lanes>(m);
#pragma unroll
    for (uint32_t k = 0; k < each; ++k) {
        part[k].x = exp2_diff(part[k].x, m);
        sum = fmaf(part[k].x, part[k].y, sum);
    }
    sum = warp_sum<split_lanes>(sum);
    const float f = finish_row(a.kv.layers[it.layer], row % a.kv.num_q_heads, m, sum, out_lse);
#pragma unroll
    for (uint32_t k = 0; k < each; ++k)
        weights[k * split_lanes + lane] = part[k].x * f;
}

/* Adds `count` splits from `split` on to four neighbouring elements each of n rows: all are on
 * their way before the first is used. */
template <uint32_t count, int n>
GPU_DEVICE void add_splits(float4 (&x)[n], const float *const (&from)[n],
                           const float *const (&weights)[n], uint64_t stride, uint32_t split)
{
    float4 y[count][n];
#pragma unroll
    for (uint32_t k = 0; k < count; ++k)
#pragma unroll
        for (int i = 0; i < n; ++i)
            y[k][i] = *(const float4 *)(from[i] + (split + k) * stride);
#pragma unroll
    for (uint32_t k = 0; k < count; ++k)
#pragma unroll
        for (int i = 0; i < n; ++i) {
            const float w = weights[i][split + k];
            x[i].x = fmaf(w, y[k][i].x, x[i].x);
            x[i].y = fmaf(w, y[k][i].y, x[i].y);
            x[i].z = fmaf(w, y[k][i].z, x[i].z);
            x[i].w = fmaf(w, y[k][i].w, x[i].w);
        }
}

/* The sums of all splits, from[i] + k * stride the k-th split's, by their weights. */
template <int n>
GPU_DEVICE void sum_splits(float4 (&x)[n], const float *const (&from)[n],
                           const float *const (&weights)[n], uint64_t stride, uint32_t n_splits)
{
    constexpr uint32_t ahead = copy_stages > 1 ? 4 : 1; /* else registers are short, too */
#pragma unroll
    for (int i = 0; i < n; ++i)
        x[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    uint32_t split = 0;
#pragma unroll 1
    for (; split + ahead <= n_splits; split += ahead)
        add_splits<ahead>(x, from, weights, stride, split);
    if (ahead > 1 && (n_splits & 2)) {
        add_splits<2>(x, from, weights, stride, split);
        split += 2;
    }
    if (ahead > 1 && (n_splits & 1))
        add_splits<1>(x, from, weights, stride, split);
}

GPU_DEVICE void store4(char *p, const float4 &x, uint32_t dtype)
{
    if (dtype == ATTN_F32)
        *(float4 *)p = x;
    else if (dtype == ATTN_BF16)
        *(uint2 *)p = make_uint2(bf16_encode2(x.x, x.y), bf16_encode2(x.z, x.w));
    else
        *(uint2 *)p = make_uint2(f16_encode2(x.x, x.y), f16_encode2(x.z, x.w));
}

} // namespace gpu
#endif
