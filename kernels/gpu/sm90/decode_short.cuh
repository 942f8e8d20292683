/* decode_short.cuh: the kernel for short calls: one query token an item, so few tiles that the
 * thread blocks of a segment have them all at work once. What such a call takes is latency:
 *
 *   1. ask: each warp asks for its tiles (warp, warp + 8): for K of both before V, so that scores
 *      are made while V is on its way. In a direct call q, and the newest row of K and V, come from
 *      the host; the warp that has the row's tile puts it there and into the cache
 *   2. score, weigh: each warp makes its tiles' scores, q in registers, and weights against the
 *      maxima of both, rounded up to integers. It leaves the weights, as operands, the maxima and
 *      the sums of weights in shared memory
 *   3. sum: one barrier; then each warp sums its own eighth of head_dim over all tiles, with a
 *      warp's weights times 2^(maximum of that warp - maximum of all), which is exact. Nothing is
 *      left to merge in the block
 *   4. send, finish: meanwhile the blocks of a segment have sent each other their maxima and sums
 *      of weights; each scales its sums and sends every slice of them, in the order registers have,
 *      to the rank that finishes it by adding
 *   5. leave: the last block of all tells the host, if it wants to know: another kernel would take
 *      its launch's time
 *
 * V of a warp's second tile is late: the last sums of 3 wait for it. Where sixteen tiles are more
 * than shared memory holds (head_dim 256, or two thread blocks a processor) it takes the place of
 * the first K.
 */
#ifndef ATTND_GPU_DECODE_SHORT_CUH
#define ATTND_GPU_DECODE_SHORT_CUH

#include "kernels/gpu/sm90/decode_short_score.cuh"
#include "kernels/gpu/sm90/decode_short_sum.cuh"

namespace decode
{

/* What rows with maxima m and sums of weights l are multiplied by at the end. */
template <bool is_bf16, int D, int NT, bool is_direct, class Words>
GPU_DEVICE float2 short_block<is_bf16, D, NT, is_direct, Words>::factors(uint32_t x, float2 m,
                                                                         float2 l,
                                                                         bool is_first) const
{
    const uint32_t r = x * 8 + 2 * t;
    return make_float2(
        finish_row(it, p, q_head + min(r, rows - 1), m.x, l.x, is_first && g == 0 && r < rows),
        finish_row(it, p, q_head + min(r + 1, rows - 1), m.y, l.y,
                   is_first && g == 0 && r + 1 < rows));
}

template <bool is_bf16, int D, int NT, bool is_direct, class Words>
GPU_DEVICE void short_block<is_bf16, D, NT, is_direct, Words>::store(uint32_t x, uint32_t slice,
                                                                     float4 a, float2 f) const
{
    const uint32_t lo = transpose8(encode2<is_bf16>(a.x * f.x, a.y * f.y));
    const uint32_t hi = transpose8(encode2<is_bf16>(a.z * f.x, a.w * f.y));
    if (x * 8 + g < rows) {
        uint32_t *out = (uint32_t *)it.out + (q_head + x * 8 + g) * (D / 2) + slice * 8 + t;
        out[0] = lo;
        out[4] = hi;
    }
}

/* Step 4 of a block that has its segment alone. */
template <bool is_bf16, int D, int NT, bool is_direct, class Words>
GPU_DEVICE void short_block<is_bf16, D, NT, is_direct, Words>::finish_alone(const sums &of) const
{
#pragma unroll
    for (int x = 0; x < NT; ++x) {
        const float2 end_f = factors(x, of.top[x], of.sum[x], warp == 0);
#pragma unroll
        for (int j = 0; j < (int)own; ++j)
            store(x, warp * own + j,
                  make_float4(of.o[j][x][0], of.o[j][x][1], of.o[j][x][2], of.o[j][x][3]), end_f);
    }
}

/* Step 4: sends our sums, as parts of the segment's, whose maxima it leaves in of.top. */
template <bool is_bf16, int D, int NT, bool is_direct, class Words>
GPU_DEVICE void short_block<is_bf16, D, NT, is_direct, Words>::send(sums &of) const
{
    barrier_wait(met, 0);
#pragma unroll
    for (int x = 0; x < NT; ++x) {
        float2 m = of.top[x];
#pragma unroll
        for (uint32_t c = 0; c < DECODE_MAX_CLUSTER; ++c)
            if (c < csize)
                m = larger(m, *(const float2 *)&s.in_ml[c][x][t]);
        const float2 part = weight(of.top[x], m);
        of.top[x] = m;
#pragma unroll
        for (int j = 0; j < (int)own; ++j) {
            const uint32_t slice = warp * own + j, to = of.peers + (slice >> lg_slices);
            const uint32_t local = slice & ((1u << lg_slices) - 1);
            const uint32_t there = cluster_address(merged, to);
            cluster_store4(
                cluster_address(gpu::shared_address(
                                    &s.in[(((rank << lg_slices) + local) * NT + x) * 32 + lane]),
                                to),
                make_float4(of.o[j][x][0] * part.x, of.o[j][x][1] * part.y, of.o[j][x][2] * part.x,
                            of.o[j][x][3] * part.y),
                there);
        }
    }
}

/* Adds what the ranks sent of the slices that this one finishes. */
template <bool is_bf16, int D, int NT, bool is_direct, class Words>
GPU_DEVICE void short_block<is_bf16, D, NT, is_direct, Words>::finish(const sums &of) const
{
    if (warp >= NT << lg_slices)
        return;
    /* a warp's slices are all of the same rows */
    const uint32_t x = warp % NT;
    const float2 m = x ? of.top[NT - 1] : of.top[0];
    float2 l = make_float2(0, 0);
#pragma unroll
    for (uint32_t c = 0; c < DECODE_MAX_CLUSTER; ++c)
        if (c < csize) {
            const float4 in = s.in_ml[c][x][t];
            const float2 f = weight(make_float2(in.x, in.y), m);
            l.x += in.z * f.x;
            l.y += in.w * f.y;
        }
    const float2 end_f = factors(x, m, l, rank == 0 && warp == x);
    barrier_wait(merged, 0);
#pragma unroll 1
    for (uint32_t u = warp; u < NT << lg_slices; u += W) {
        const uint32_t local = u / NT;
        float4 a = make_float4(0, 0, 0, 0);
#pragma unroll 4
        for (uint32_t c = 0; c < csize; ++c) {
            const float4 part = s.in[(((c << lg_slices) + local) * NT + x) * 32 + lane];
            a.x += part.x;
            a.y += part.y;
            a.z += part.z;
            a.w += part.w;
        }
        store(x, (rank << lg_slices) + local, a, end_f);
    }
}

/* By every thread of every block, as its last: the last block to come tells the host. */
GPU_DEVICE void leave(const decode_params &p)
{
    if (p.finish.out_done == nullptr)
        return;
    __syncthreads();
    if (threadIdx.x != 0)
        return;
    __threadfence_system();
    if (atomicAdd(p.arrivals, 1) + 1 < gridDim.x * gridDim.y * gridDim.z)
        return;
    *p.arrivals = 0;
    gpu::signal_host(p.finish);
}

template <bool is_bf16, int D, int NT, bool is_direct, class Words>
__global__ void __launch_bounds__(256, D == 128 ? 2 : 1)
    decode_short(GPU_PARAM(decode_params, p), GPU_PARAM(Words, w), GPU_PARAM(CUtensorMap, map))
{
    using block = short_block<is_bf16, D, NT, is_direct, Words>;
    block b(p, w, map);
    b.ask_for_all();
    float c[2][NT][4];
    b.score(c);
    b.weigh(c);
    typename block::sums of;
    b.sum(of);
    if (b.csize == 1) {
        b.finish_alone(of);
    } else {
        b.send(of);
        b.finish(of);
    }
    leave(p);
}

} // namespace decode
#endif
