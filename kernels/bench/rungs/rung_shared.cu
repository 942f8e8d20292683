/* rung_shared.cu: one pass. The softmax is computed online (Milakov and Gimelshein, 2018), so that
 * no score leaves the processor.
 *
 * A thread keeps a query row and its output in registers. The rows of a thread block share tiles of
 * 32 keys and values in shared memory, which all threads read in step: a broadcast. For each tile a
 * row's scores are computed first; if the largest of them is a new maximum, what has been summed is
 * scaled down once; then the weighted values are added.
 *
 * Memory is read once for 64 rows. Arithmetic is fp32, and few tokens occupy few threads: a block
 * is 64 threads, and 64 tokens are one block per head.
 */
#include "kernels/bench/rungs/rung.cuh"

using namespace gpu;

namespace
{

constexpr int dim = 64, rows = 64, tile = 32;

template <bool is_f32> __global__ void __launch_bounds__(rows) attend(GPU_PARAM(rung_call, c))
{
    __shared__ float s_k[tile][dim], s_v[tile][dim], s_s[rows][tile + 1];
    const uint32_t head = blockIdx.y, row = blockIdx.x * rows + threadIdx.x;
    const float scale = c.scale * log2e;
    float q[dim], o[dim];
    softmax_row sums;
#pragma unroll
    for (int e = 0; e < dim; e += 4) {
        const float4 x = load4<is_f32>(c.q, token_at(c, head, row) + e);
        q[e] = x.x * scale, q[e + 1] = x.y * scale, q[e + 2] = x.z * scale, q[e + 3] = x.w * scale;
        o[e] = o[e + 1] = o[e + 2] = o[e + 3] = 0.0f;
    }
    for (uint32_t base = 0; base < c.n; base += tile) {
        __syncthreads();
        for (int i = threadIdx.x * 4; i < tile * dim; i += rows * 4) {
            const uint64_t at = token_at(c, head, base + i / dim) + i % dim;
            *(float4 *)&s_k[i / dim][i % dim] = load4<is_f32>(c.k, at);
            *(float4 *)&s_v[i / dim][i % dim] = load4<is_f32>(c.v, at);
        }
        __syncthreads();
        float top = sums.m;
        for (int j = 0; j < tile; ++j) {
            float dot = 0.0f;
#pragma unroll
            for (int e = 0; e < dim; e += 4) {
                const float4 k = *(const float4 *)&s_k[j][e];
                dot = fmaf(q[e], k.x, dot);
                dot = fmaf(q[e + 1], k.y, dot);
                dot = fmaf(q[e + 2], k.z, dot);
                dot = fmaf(q[e + 3], k.w, dot);
            }
            s_s[threadIdx.x][j] = dot;
            top = fmaxf(top, dot);
        }
        const float f = sums.raise(top);
#pragma unroll
        for (int e = 0; e < dim; ++e)
            o[e] *= f;
        for (int j = 0; j < tile; ++j) {
            const float w = sums.add(s_s[threadIdx.x][j]);
#pragma unroll
            for (int e = 0; e < dim; e += 4) {
                const float4 v = *(const float4 *)&s_v[j][e];
                o[e] = fmaf(w, v.x, o[e]);
                o[e + 1] = fmaf(w, v.y, o[e + 1]);
                o[e + 2] = fmaf(w, v.z, o[e + 2]);
                o[e + 3] = fmaf(w, v.w, o[e + 3]);
            }
        }
    }
    const float f = 1.0f / sums.sum;
#pragma unroll
    for (int e = 0; e < dim; e += 4)
        store4<is_f32>(c.out, token_at(c, head, row) + e,
                       make_float4(o[e] * f, o[e + 1] * f, o[e + 2] * f, o[e + 3] * f));
}

} // namespace

int rung_shared_launch(const struct rung_call *c, void *stream)
{
    const dim3 blocks(c->n / rows, c->batch * c->heads);
    return c->is_f32 ? launch(attend<true>, blocks, dim3(rows), 0, stream, false, *c)
                     : launch(attend<false>, blocks, dim3(rows), 0, stream, false, *c);
}
