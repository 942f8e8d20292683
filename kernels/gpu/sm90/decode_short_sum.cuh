/* decode_short_sum.cuh: step 3 of decode_short (decode_short.cuh): every warp sums its eighth of
 * head_dim over all tiles of the block.
 */
#ifndef ATTND_GPU_DECODE_SHORT_SUM_CUH
#define ATTND_GPU_DECODE_SHORT_SUM_CUH

#include "kernels/gpu/sm90/decode_short_block.cuh"

namespace decode
{

template <bool is_bf16, int D, int NT, bool is_direct, class Words>
GPU_DEVICE typename short_block<is_bf16, D, NT, is_direct, Words>::lane_addresses
short_block<is_bf16, D, NT, is_direct, Words>::wait_for_values()
{
    if (warp < n) {
        barrier_wait(v_full + warp * 8, 0);
        if (has_newest && warp == 0)
            fresh.put(v_at(0), true, it.pos % DECODE_TILE);
    }
    lane_addresses a;
#pragma unroll
    for (int j = 0; j < (int)own; ++j) {
        const uint32_t slice = warp * own + j, row = lane % 8 + lane / 16 * 8;
        a.v[j] = keep(v_at(0) + slice / 4 * 2048 + row * 128 +
                      ((slice % 4 * 2 + lane / 8 % 2) ^ row % 8) * 16);
    }
    a.w = keep(gpu::shared_address(s.weights[0][0]) + lane * 8);
    if (p.is_chained)
        gpu::chain_release();
    __syncthreads();
    return a;
}

/* Tiles i0 to i0 + depth, as far as they are before stop. */
template <bool is_bf16, int D, int NT, bool is_direct, class Words>
GPU_DEVICE void
short_block<is_bf16, D, NT, is_direct, Words>::load(values &to, const lane_addresses &a,
                                                    uint32_t i0, uint32_t stop) const
{
    const uint32_t at = v_at(i0) - v_at(0); /* eight tiles lie one behind the other */
#pragma unroll
    for (int k = 0; k < depth; ++k) {
        if (i0 + k >= stop)
            break;
#pragma unroll
        for (int j = 0; j < (int)own; ++j)
            gpu::load_matrix4_transposed(to.v[k][j], a.v[j] + at + k * part_bytes);
#pragma unroll
        for (int x = 0; x < NT; ++x)
            to.w[k][x] = shared_load8(a.w + ((i0 + k) * NT + x) * 256);
    }
}

/* The block's maxima and sums of weights, and in factor what a warp's weights count, of this
 * lane's row, twice a word. */
template <bool is_bf16, int D, int NT, bool is_direct, class Words>
GPU_DEVICE void
short_block<is_bf16, D, NT, is_direct, Words>::top_of_warps(uint32_t (&factor)[NT][W],
                                                            sums &of) const
{
#pragma unroll
    for (int x = 0; x < NT; ++x) {
        const float4 *m4 = s.warp_top[x * 8 + g], *l4 = s.warp_sum[x * 8 + g];
        const float m[W] = {m4[0].x, m4[0].y, m4[0].z, m4[0].w, m4[1].x, m4[1].y, m4[1].z, m4[1].w};
        const float l[W] = {l4[0].x, l4[0].y, l4[0].z, l4[0].w, l4[1].x, l4[1].y, l4[1].z, l4[1].w};
        float all = m[0], weights = 0.0f;
#pragma unroll
        for (int k = 1; k < (int)W; ++k)
            all = fmaxf(all, m[k]);
#pragma unroll
        for (int k = 0; k < (int)W; ++k) {
            const float f = gpu::exp2_fast(m[k] - all);
            weights += l[k] * f;
            factor[x][k] = encode2<is_bf16>(f, f);
        }
        of.top[x] = make_float2(__shfl_sync(~0u, all, 8 * t), __shfl_sync(~0u, all, 8 * t + 4));
        of.sum[x] =
            make_float2(__shfl_sync(~0u, weights, 8 * t), __shfl_sync(~0u, weights, 8 * t + 4));
    }
}

/* Every block of the segment learns ours. */
template <bool is_bf16, int D, int NT, bool is_direct, class Words>
GPU_DEVICE void short_block<is_bf16, D, NT, is_direct, Words>::signal_peers(const sums &of)
{
    cluster_wait(); /* long since complete: every block of the cluster has its barriers ready */
    if (warp < csize && g == 0)
#pragma unroll
        for (int x = 0; x < NT; ++x)
            cluster_store4(
                cluster_address(gpu::shared_address(&s.in_ml[rank][x][t]), of.peers + warp),
                make_float4(of.top[x].x, of.top[x].y, of.sum[x].x, of.sum[x].y),
                cluster_address(met, of.peers + warp));
}

/* Sums of even and of odd tiles, as chains half as long. */
template <bool is_bf16, int D, int NT, bool is_direct, class Words>
GPU_DEVICE void short_block<is_bf16, D, NT, is_direct, Words>::multiply(
    float (&o)[own][NT][4], float (&odd)[own][NT][4], const values &by,
    const uint32_t (&factor)[NT][W], uint32_t warp0, uint32_t i0, uint32_t stop) const
{
#pragma unroll
    for (int k = 0; k < depth; ++k) {
        if (i0 + k >= stop)
            break;
#pragma unroll
        for (int x = 0; x < NT; ++x) {
            const uint32_t f = warp0 ? factor[x][depth + k] : factor[x][k];
            const uint32_t lo = multiply2<is_bf16>(by.w[k][x].x, f);
            const uint32_t hi = multiply2<is_bf16>(by.w[k][x].y, f);
#pragma unroll
            for (int j = 0; j < (int)own; ++j)
                gpu::mma_16816<is_bf16>(k % 2 ? odd[j][x] : o[j][x], by.v[k][j], lo, hi);
        }
    }
}

/* Step 3. */
template <bool is_bf16, int D, int NT, bool is_direct, class Words>
GPU_DEVICE void short_block<is_bf16, D, NT, is_direct, Words>::sum(sums &of)
{
    const lane_addresses a = wait_for_values();
    const uint32_t n_fours = n & ~(depth - 1u);
    values near, far;
    load(near, a, 0, n);
    uint32_t factor[NT][W];
    top_of_warps(factor, of);
    of.peers = csize > 1 ? cluster_rank() - rank : 0;
    if (csize > 1)
        signal_peers(of);
    float odd[own][NT][4] = {};
#pragma unroll
    for (int j = 0; j < (int)own; ++j)
#pragma unroll
        for (int x = 0; x < NT; ++x)
#pragma unroll
            for (int e = 0; e < 4; ++e)
                of.o[j][x][e] = 0.0f;
#pragma unroll 1
    for (uint32_t i = 0; i < n_fours; i += W) {
        if (i + depth < n_fours)
            load(far, a, i + depth, i + W);
        multiply(of.o, odd, near, factor, 0, 0, depth);
        if (i + W < n_fours) {
            barrier_wait(v_late, 0);
            load(near, a, i + W, i + W + depth);
        }
        if (i + depth < n_fours)
            multiply(of.o, odd, far, factor, depth, 0, depth);
    }
    if (n_fours < n) {
        if (n > W)
            barrier_wait(v_late, 0);
        if (n_fours)
            load(near, a, n_fours, n);
        multiply(of.o, odd, near, factor, n_fours % W, n_fours, n);
    }
#pragma unroll
    for (int j = 0; j < (int)own; ++j)
#pragma unroll
        for (int x = 0; x < NT; ++x)
#pragma unroll
            for (int e = 0; e < 4; ++e)
                of.o[j][x][e] += odd[j][x][e];
}

} // namespace decode
#endif
