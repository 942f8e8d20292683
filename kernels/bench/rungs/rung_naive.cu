/* rung_naive.cu: attention as its formula reads, in three passes over a matrix of scores.
 *
 *   1  scores    a thread computes one score: it walks the elements of one row of Q and one of K
 *   2  weights   a warp turns one row of scores into weights: maximum, sum, division
 *   3  output    a thread computes one element: it walks a row of weights and a column of V
 *
 * Every multiply-add fetches both of its numbers from memory, 16 neighbours share them through the
 * L1 cache by luck, and each score travels to memory and back twice. Of N tokens the matrix has N x
 * N floats per head: it is held for as many rows as its memory allows, tile by tile.
 */
#include "kernels/bench/rungs/three_passes.cuh"

using namespace gpu;

namespace
{

constexpr int threads = 256, side = 16;

template <bool is_f32> __global__ void __launch_bounds__(threads) scores(GPU_PARAM(rung_pass, p))
{
    const rung_call &c = p.c;
    const uint32_t key = blockIdx.x * side + threadIdx.x % side;
    const uint32_t row = blockIdx.y * side + threadIdx.x / side, head = p.t.head0 + blockIdx.z;
    const uint64_t q = token_at(c, head, p.t.row0 + row), k = token_at(c, head, key);
    float dot = 0.0f;
    for (uint32_t e = 0; e < c.dim; ++e)
        dot = fmaf(load1<is_f32>(c.q, q + e), load1<is_f32>(c.k, k + e), dot);
    score_row(p, blockIdx.z, row)[key] = dot * c.scale;
}

template <bool is_f32> __global__ void __launch_bounds__(threads) output(GPU_PARAM(rung_pass, p))
{
    const rung_call &c = p.c;
    const uint64_t at = (uint64_t)blockIdx.x * threads + threadIdx.x;
    const uint32_t row = (uint32_t)(at / c.dim), e = at % c.dim, head = p.t.head0 + blockIdx.z;
    const float *weights = score_row(p, blockIdx.z, row);
    float sum = 0.0f;
    for (uint32_t key = 0; key < c.n; ++key)
        sum = fmaf(weights[key], load1<is_f32>(c.v, token_at(c, head, key) + e), sum);
    store1<is_f32>(c.out, token_at(c, head, p.t.row0 + row) + e, sum);
}

template <bool is_f32> int launch_tile(const rung_pass &p, void *stream)
{
    const rung_call &c = p.c;
    const dim3 tiles(c.n / side, p.t.n_rows / side, p.t.n_heads);
    const dim3 elements(p.t.n_rows * c.dim / threads, 1, p.t.n_heads);
    int code = launch(scores<is_f32>, tiles, dim3(threads), 0, stream, false, p);
    if (!code)
        code = launch_weights<false>(p, stream);
    return code ? code : launch(output<is_f32>, elements, dim3(threads), 0, stream, false, p);
}

} // namespace

int rung_naive_launch(const struct rung_call *c, void *stream)
{
    int code = 0;
    rung_pass p = {*c, {}};
    while (!code && rung_tile_next(c, c->scratch_bytes, &p.t))
        code = c->is_f32 ? launch_tile<true>(p, stream) : launch_tile<false>(p, stream);
    return code;
}
