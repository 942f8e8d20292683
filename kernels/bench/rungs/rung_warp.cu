/* rung_warp.cu: online softmax with a warp per query row: what the rung before does with one thread
 * is done by all lanes, so that few tokens occupy many.
 *
 * A thread block has 8 warps, so 8 rows share a tile of 64 keys and values, brought to shared
 * memory by 16-byte loads (f32; 8-byte loads of bf16). For the scores a lane takes a key: rows of K
 * are padded to 68 floats, so that the lanes' 16-byte reads meet no bank twice. Maximum and sum are
 * found by shuffles. For the output a lane takes elements: it walks the keys, whose weights the
 * warp has left in shared memory.
 *
 * Arithmetic is fp32. Each K and V in shared memory serves 8 rows only.
 */
#include "kernels/bench/rungs/rung.cuh"

using namespace gpu;

namespace
{

constexpr int dim = 64, rows = 8, threads = rows * warp_width, tile = 64, stride = dim + 4;
constexpr int keys_a_lane = tile / warp_width, elements = dim / warp_width;

template <bool is_f32> __global__ void __launch_bounds__(threads) attend(GPU_PARAM(rung_call, c))
{
    __shared__ float s_k[tile][stride], s_v[tile][dim], s_q[rows][dim], s_p[rows][tile];
    const uint32_t head = blockIdx.y, row = blockIdx.x * rows + warp_id();
    const int lane = lane_id(), warp = warp_id();
    const float scale = c.scale * log2e;
    for (int e = lane * 4; e < dim; e += warp_width * 4) {
        const float4 x = load4<is_f32>(c.q, token_at(c, head, row) + e);
        *(float4 *)&s_q[warp][e] = make_float4(x.x * scale, x.y * scale, x.z * scale, x.w * scale);
    }
    float o[elements] = {};
    softmax_row sums;
    for (uint32_t base = 0; base < c.n; base += tile) {
        __syncthreads();
        for (int i = threadIdx.x * 4; i < tile * dim; i += threads * 4) {
            const uint64_t at = token_at(c, head, base + i / dim) + i % dim;
            *(float4 *)&s_k[i / dim][i % dim] = load4<is_f32>(c.k, at);
            *(float4 *)&s_v[i / dim][i % dim] = load4<is_f32>(c.v, at);
        }
        __syncthreads();
        float s[keys_a_lane] = {}, top = sums.m;
#pragma unroll
        for (int e = 0; e < dim; e += 4) {
            const float4 q = *(const float4 *)&s_q[warp][e];
#pragma unroll
            for (int j = 0; j < keys_a_lane; ++j) {
                const float4 k = *(const float4 *)&s_k[j * warp_width + lane][e];
                s[j] = fmaf(q.x, k.x, fmaf(q.y, k.y, fmaf(q.z, k.z, fmaf(q.w, k.w, s[j]))));
            }
        }
#pragma unroll
        for (int j = 0; j < keys_a_lane; ++j)
            top = fmaxf(top, s[j]);
        const float f = sums.raise(warp_max(top));
#pragma unroll
        for (int j = 0; j < keys_a_lane; ++j)
            s_p[warp][j * warp_width + lane] = sums.add(s[j]);
#pragma unroll
        for (int i = 0; i < elements; ++i)
            o[i] *= f;
        sync_warp();
        for (int j = 0; j < tile; ++j)
#pragma unroll
            for (int i = 0; i < elements; ++i)
                o[i] = fmaf(s_p[warp][j], s_v[j][i * warp_width + lane], o[i]);
    }
    const float f = 1.0f / warp_sum(sums.sum); /* a lane has added its own keys */
#pragma unroll
    for (int i = 0; i < elements; ++i)
        store1<is_f32>(c.out, token_at(c, head, row) + i * warp_width + lane, o[i] * f);
}

} // namespace

int rung_warp_launch(const struct rung_call *c, void *stream)
{
    const dim3 blocks(c->n / rows, c->batch * c->heads);
    return c->is_f32 ? launch(attend<true>, blocks, dim3(threads), 0, stream, false, *c)
                     : launch(attend<false>, blocks, dim3(threads), 0, stream, false, *c);
}
