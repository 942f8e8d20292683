/* rung_vectorised.cu: the same three passes, where numbers that were fetched are used again, and
 * the plain matrix product that the encoder takes where there is no library for it.
 *
 * A thread block computes a tile of 64 x 64 results. It brings 64 rows of the one factor and 64
 * columns of the other to shared memory, 16 elements of the sum at a time, by vector loads (four
 * elements a thread). A thread keeps a square of 4 x 4 results in registers, so that eight numbers
 * out of shared memory serve 16 multiply-adds, and each number from memory serves 64.
 *
 * Arithmetic is fp32. The matrix of scores still travels to memory and back twice.
 */
#include "kernels/bench/rungs/three_passes.cuh"

using namespace gpu;

namespace
{

constexpr int threads = 256, tile = 64, depth = 16, stride = tile + 4;

/* The 4 x 4 results of this thread at rows 4 * (t / 16), columns 4 * (t % 16) of a tile: sums over
 * n_sum. row(i, k): elements k .. k + 3 of row i of the first factor; column likewise of the
 * second, which lies by columns if is_turned, else column(k, j) gives elements j .. j + 3 of its
 * row k. */
template <bool is_turned, class Row, class Column>
GPU_DEVICE void multiply(float (&x)[4][4], uint32_t n_sum, Row row, Column column)
{
    __shared__ float s_a[depth][stride], s_b[depth][stride];
    const int t = threadIdx.x, r = t / 4, k4 = t % 4 * 4;
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j)
            x[i][j] = 0.0f;
    for (uint32_t k0 = 0; k0 < n_sum; k0 += depth) {
        const float4 a = row(r, k0 + k4);
        const float4 b = is_turned ? column(r, k0 + k4) : column(k0 + t / 16, t % 16 * 4);
        __syncthreads(); /* the tile before has been used */
        s_a[k4][r] = a.x, s_a[k4 + 1][r] = a.y, s_a[k4 + 2][r] = a.z, s_a[k4 + 3][r] = a.w;
        if (is_turned)
            s_b[k4][r] = b.x, s_b[k4 + 1][r] = b.y, s_b[k4 + 2][r] = b.z, s_b[k4 + 3][r] = b.w;
        else
            *(float4 *)&s_b[t / 16][t % 16 * 4] = b;
        __syncthreads();
#pragma unroll
        for (int k = 0; k < depth; ++k) {
            const float4 va = *(const float4 *)&s_a[k][t / 16 * 4];
            const float4 vb = *(const float4 *)&s_b[k][t % 16 * 4];
            const float ra[4] = {va.x, va.y, va.z, va.w}, rb[4] = {vb.x, vb.y, vb.z, vb.w};
#pragma unroll
            for (int i = 0; i < 4; ++i)
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    x[i][j] = fmaf(ra[i], rb[j], x[i][j]);
        }
    }
}

template <bool is_f32> __global__ void __launch_bounds__(threads) scores(GPU_PARAM(rung_pass, p))
{
    const rung_call &c = p.c;
    const uint32_t key0 = blockIdx.x * tile, row0 = blockIdx.y * tile,
                   head = p.t.head0 + blockIdx.z;
    float x[4][4];
    multiply<true>(
        x, c.dim,
        [&](uint32_t i, uint32_t k) {
            return load4<is_f32>(c.q, token_at(c, head, p.t.row0 + row0 + i) + k);
        },
        [&](uint32_t j, uint32_t k) {
            return load4<is_f32>(c.k, token_at(c, head, key0 + j) + k);
        });
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        float *s = score_row(p, blockIdx.z, row0 + threadIdx.x / 16 * 4 + i);
        *(float4 *)(s + key0 + threadIdx.x % 16 * 4) =
            make_float4(x[i][0] * c.scale, x[i][1] * c.scale, x[i][2] * c.scale, x[i][3] * c.scale);
    }
}

template <bool is_f32> __global__ void __launch_bounds__(threads) output(GPU_PARAM(rung_pass, p))
{
    const rung_call &c = p.c;
    const uint32_t e0 = blockIdx.x * tile, row0 = blockIdx.y * tile, head = p.t.head0 + blockIdx.z;
    const float *s = score_row(p, blockIdx.z, row0);
    float x[4][4];
    multiply<false>(
        x, c.n, [&](uint32_t i, uint32_t k) { return load4<true>(s, (uint64_t)i * c.n + k); },
        [&](uint32_t k, uint32_t j) { return load4<is_f32>(c.v, token_at(c, head, k) + e0 + j); });
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const uint32_t row = p.t.row0 + row0 + threadIdx.x / 16 * 4 + i;
        store4<is_f32>(c.out, token_at(c, head, row) + e0 + threadIdx.x % 16 * 4,
                       make_float4(x[i][0], x[i][1], x[i][2], x[i][3]));
    }
}

template <bool is_f32> int launch_tile(const rung_pass &p, void *stream)
{
    const rung_call &c = p.c;
    const dim3 score_tiles(c.n / tile, p.t.n_rows / tile, p.t.n_heads);
    const dim3 output_tiles(c.dim / tile, p.t.n_rows / tile, p.t.n_heads);
    int code = launch(scores<is_f32>, score_tiles, dim3(threads), 0, stream, false, p);
    if (!code)
        code = launch_weights<true>(p, stream);
    return code ? code : launch(output<is_f32>, output_tiles, dim3(threads), 0, stream, false, p);
}

template <bool is_f32> __global__ void __launch_bounds__(threads) matmul(GPU_PARAM(rung_matmul, m))
{
    const uint32_t row0 = blockIdx.y * tile, column0 = blockIdx.x * tile;
    float x[4][4];
    multiply<false>(
        x, m.k,
        [&](uint32_t i, uint32_t k) { return load4<is_f32>(m.a, (uint64_t)(row0 + i) * m.k + k); },
        [&](uint32_t k, uint32_t j) {
            return load4<is_f32>(m.b, (uint64_t)k * m.n + column0 + j);
        });
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const uint64_t at =
            (uint64_t)(row0 + threadIdx.x / 16 * 4 + i) * m.n + column0 + threadIdx.x % 16 * 4;
        float4 y = make_float4(x[i][0], x[i][1], x[i][2], x[i][3]);
        if (m.is_added) {
            const float4 c = load4<is_f32>(m.c, at);
            y = make_float4(y.x + c.x, y.y + c.y, y.z + c.z, y.w + c.w);
        }
        store4<is_f32>(m.c, at, y);
    }
}

} // namespace

int rung_vectorised_launch(const struct rung_call *c, void *stream)
{
    int code = 0;
    rung_pass p = {*c, {}};
    while (!code && rung_tile_next(c, c->scratch_bytes, &p.t))
        code = c->is_f32 ? launch_tile<true>(p, stream) : launch_tile<false>(p, stream);
    return code;
}

int rung_matmul_launch(const struct rung_matmul *m, void *stream)
{
    const dim3 tiles(m->n / tile, m->m / tile);
    return m->is_f32 ? launch(matmul<true>, tiles, dim3(threads), 0, stream, false, *m)
                     : launch(matmul<false>, tiles, dim3(threads), 0, stream, false, *m);
}
