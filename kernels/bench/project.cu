/* project.cu: see project.h. A thread block computes 64 x 64 outputs from tiles of 64 elements of x
 * and w: 16-bit ones by matrix products, f32 by fp32 arithmetic.
 */
#include "kernels/bench/project.h"
#include "kernels/gpu/device.cuh"

using namespace gpu;

namespace
{

constexpr int side = 64; /* rows, columns and elements of a tile */

GPU_DEVICE void store_one(const gpu_project &a, uint64_t at, float v)
{
    if (a.dtype == ATTN_F32)
        ((float *)a.y)[at] = v + (a.added ? ((const float *)a.added)[at] : 0.0f);
    else if (a.dtype == ATTN_BF16)
        ((uint16_t *)a.y)[at] = (uint16_t)bf16_encode2(
            v + (a.added ? bf16_decode(((const uint16_t *)a.added)[at]) : 0.0f), 0.0f);
    else
        ((uint16_t *)a.y)[at] = (uint16_t)f16_encode2(
            v + (a.added ? f16_decode(((const uint16_t *)a.added)[at]) : 0.0f), 0.0f);
}

/* Row r of a tile in shared memory: pieces of 16 bytes, piece c at c ^ (r % 8). */
GPU_DEVICE shared_at piece_of(shared_at base, uint32_t row, uint32_t piece)
{
    return base + row * side * 2 + ((piece ^ (row & 7)) << 4);
}

template <bool is_bf16>
__global__ void __launch_bounds__(4 * warp_width) project_matrix(GPU_PARAM(gpu_project, a))
{
    GPU_SHARED(char, shared);
    const shared_at s_x = shared_address(shared), s_w = s_x + side * side * 2;
    const uint32_t row0 = blockIdx.y * side, column0 = blockIdx.x * side;
    const int lane = lane_id(), warp_row = warp_id() * 16;
    float s[side / 16][tile_values] = {};
    for (uint32_t k0 = 0; k0 < a.dim; k0 += side) {
        for (int i = threadIdx.x; i < side * 8; i += 4 * warp_width) {
            const uint32_t r = i / 8, c = i % 8;
            const bool is_there = row0 + r < a.n;
            const uint64_t x_row = is_there ? row0 + r : 0;
            copy16_async(piece_of(s_x, r, c), (const char *)a.x + (x_row * a.dim + k0 + c * 8) * 2,
                         is_there);
            copy16_async(piece_of(s_w, r, c),
                         (const char *)a.w + ((uint64_t)(column0 + r) * a.dim + k0 + c * 8) * 2,
                         true);
        }
        copy_commit();
        copy_wait<0>();
        __syncthreads();
#pragma unroll
        for (int kk = 0; kk < side / 16; ++kk) {
            tile_operand x;
            tile_load_rows(x, lane, [&](uint32_t r, uint32_t piece) {
                return piece_of(s_x, warp_row + r, kk * 2 + piece);
            });
#pragma unroll
            for (int j = 0; j < side / 16; ++j) {
                tile_operand w;
                tile_load_columns(w, lane, [&](uint32_t r, uint32_t piece) {
                    return piece_of(s_w, j * 16 + r, kk * 2 + piece);
                });
                tile_multiply<is_bf16>(s[j], x, w);
            }
        }
        __syncthreads();
    }
#pragma unroll
    for (int j = 0; j < side / 16; ++j)
#pragma unroll
        for (int i = 0; i < tile_values; ++i) {
            const uint32_t row = row0 + warp_row + tile_row(lane, tile_row_of(i));
            if (row < a.n)
                store_one(a, (uint64_t)row * a.dim + column0 + j * 16 + tile_column(lane, i),
                          s[j][i]);
        }
}

constexpr int depth = 16, f32_threads = 256; /* a thread has 4 x 4 outputs */

__global__ void __launch_bounds__(f32_threads) project_f32(GPU_PARAM(gpu_project, a))
{
    GPU_SHARED(char, shared);
    float *s_x = (float *)shared, *s_w = s_x + depth * side; /* [depth][side] each */
    const uint32_t row0 = blockIdx.y * side, column0 = blockIdx.x * side;
    const int r0 = threadIdx.x / 16 * 4, c0 = threadIdx.x % 16 * 4;
    float s[4][4] = {};
    for (uint32_t k0 = 0; k0 < a.dim; k0 += depth) {
        for (int i = threadIdx.x; i < side * depth; i += f32_threads) {
            const uint32_t r = i / depth, k = i % depth;
            const float *x = (const float *)a.x + (uint64_t)(row0 + r) * a.dim + k0 + k;
            s_x[k * side + r] = row0 + r < a.n ? *x : 0.0f;
            s_w[k * side + r] = ((const float *)a.w)[(uint64_t)(column0 + r) * a.dim + k0 + k];
        }
        __syncthreads();
#pragma unroll
        for (int k = 0; k < depth; ++k) {
            const float4 x = *(const float4 *)(s_x + k * side + r0);
            const float4 w = *(const float4 *)(s_w + k * side + c0);
            const float xs[4] = {x.x, x.y, x.z, x.w}, ws[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
            for (int i = 0; i < 4; ++i)
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    s[i][j] = fmaf(xs[i], ws[j], s[i][j]);
        }
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j)
            if (row0 + r0 + i < a.n)
                store_one(a, (uint64_t)(row0 + r0 + i) * a.dim + column0 + c0 + j, s[i][j]);
}

constexpr int norm_warps = 4;

/* One warp per row. */
__global__ void __launch_bounds__(norm_warps *warp_width) norm(GPU_PARAM(gpu_project, a))
{
    const uint32_t row = blockIdx.x * norm_warps + warp_id(), e = element_bytes(a.dtype);
    if (row >= a.n)
        return;
    const uint64_t at = (uint64_t)row * a.dim;
    float x[8], sum = 0.0f, squares = 0.0f;
    for (uint32_t i = lane_id() * 8; i < a.dim; i += warp_width * 8) {
        load8(x, (const char *)a.x + (at + i) * e, a.dtype);
#pragma unroll
        for (int k = 0; k < 8; ++k)
            sum += x[k];
    }
    const float mean = warp_sum(sum) / a.dim;
    for (uint32_t i = lane_id() * 8; i < a.dim; i += warp_width * 8) {
        load8(x, (const char *)a.x + (at + i) * e, a.dtype);
#pragma unroll
        for (int k = 0; k < 8; ++k)
            squares += (x[k] - mean) * (x[k] - mean);
    }
    const float over = 1.0f / sqrtf(warp_sum(squares) / a.dim + PROJECT_EPSILON);
    for (uint32_t i = lane_id() * 8; i < a.dim; i += warp_width * 8) {
        load8(x, (const char *)a.x + (at + i) * e, a.dtype);
#pragma unroll
        for (int k = 0; k < 8; ++k)
            x[k] = (x[k] - mean) * over;
        store8((char *)a.y + (at + i) * e, x, a.dtype);
    }
}

} // namespace

int gpu_project_launch(const struct gpu_project *a, void *stream)
{
    const dim3 grid(a->dim / side, (a->n + side - 1) / side);
    if (a->dtype == ATTN_F32)
        return launch(project_f32, grid, dim3(f32_threads), 2 * depth * side * sizeof(float),
                      stream, false, *a);
    return launch(a->dtype == ATTN_BF16 ? project_matrix<true> : project_matrix<false>, grid,
                  dim3(4 * warp_width), 2 * side * side * 2, stream, false, *a);
}

int gpu_norm_launch(const struct gpu_project *a, void *stream)
{
    return launch(norm, dim3((a->n + norm_warps - 1) / norm_warps), dim3(norm_warps * warp_width),
                  0, stream, false, *a);
}
