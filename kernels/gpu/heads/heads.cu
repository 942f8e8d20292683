/* heads.cu: heads to latents before attention (absorb), latents to heads behind it (expand): one
 * matrix product for each head, of the rows of a tile and the head's weights.
 *
 * A thread block computes GPU_HEAD_ROWS rows x side columns: of 16-bit elements by matrix products
 * over pieces of 8 elements, which come into shared memory stages ahead; of f32 by fp32 arithmetic.
 * A piece behind a row's end is zero, never what follows the row.
 */
#include "kernels/gpu/device.cuh"

using namespace gpu;

namespace
{

constexpr int side = 64; /* rows, columns and elements of a tile */
static_assert(side == GPU_HEAD_ROWS, "");

/* What a thread block multiplies: rows of x by w, whose rows are elements of x (absorb: [k][n]) or
 * columns of the product (expand: [n][k]). */
struct product {
    const char *w;
    uint32_t k, n; /* elements of a row of x; columns */
    uint32_t head, column0;
    const gpu_head_row *rows;
    uint32_t n_rows;
};

template <bool is_behind> GPU_DEVICE product product_of(const gpu_heads &a)
{
    const gpu_head_tile tile = a.tiles[blockIdx.x];
    const uint32_t e = element_bytes(a.q_dtype), head = blockIdx.z;
    product p;
    p.rows = a.rows + tile.first;
    p.n_rows = tile.n;
    p.head = head;
    p.column0 = blockIdx.y * side;
    p.w = a.weights + p.rows[0].layer * a.layer_bytes +
          ((uint64_t)head * (a.nope + a.out_dim) + (is_behind ? a.nope : 0)) * a.dv * e;
    p.k = is_behind ? a.dv : a.nope;
    p.n = is_behind ? a.out_dim : a.dv;
    return p;
}

/* A row of x: a head's q as it comes, or its latents. */
template <bool is_behind>
GPU_DEVICE const char *x_row(const gpu_heads &a, const product &p, uint32_t r)
{
    const uint64_t row = (uint64_t)p.rows[r].token * a.num_q_heads + p.head;
    const uint32_t e = element_bytes(a.q_dtype);
    return is_behind ? a.latents + row * a.dv * e : a.heads + row * (a.nope + a.dk - a.dv) * e;
}

/* A row of the product: a head's q as attention has it, or its out. */
template <bool is_behind> GPU_DEVICE char *y_row(const gpu_heads &a, const product &p, uint32_t r)
{
    const uint32_t e = element_bytes(a.q_dtype);
    if (is_behind)
        return p.rows[r].out + (uint64_t)p.head * a.out_dim * e;
    return a.q + ((uint64_t)p.rows[r].token * a.num_q_heads + p.head) * a.dk * e;
}

/* What absorb leaves as it is: the rotated part of q, behind its latents. */
template <int threads> GPU_DEVICE void copy_rotated(const gpu_heads &a, const product &p)
{
    const uint32_t e = element_bytes(a.q_dtype), n = (a.dk - a.dv) * e / 16;
    for (uint32_t i = threadIdx.x; i < p.n_rows * n; i += threads) {
        const uint32_t r = i / n, piece = i % n;
        ((uint4 *)(y_row<false>(a, p, r) + a.dv * e))[piece] =
            ((const uint4 *)(x_row<false>(a, p, r) + a.nope * e))[piece];
    }
}

/* ---- 16-bit elements */

constexpr int stages = 3, tile_bytes = side * side * 2, stage_bytes = 2 * tile_bytes;
constexpr int matrix_threads = 4 * warp_width;

/* Row r of a tile in shared memory: pieces of 16 bytes, piece c at c ^ (r % 8). */
GPU_DEVICE shared_at piece_of(shared_at base, uint32_t row, uint32_t piece)
{
    return base + row * side * 2 + ((piece ^ (row & 7)) << 4);
}

/* Elements [k0, k0 + side) of x and w begin to come. */
template <bool is_behind>
GPU_DEVICE void fetch(const gpu_heads &a, const product &p, uint32_t k0, shared_at s_x)
{
    const shared_at s_w = s_x + tile_bytes;
    for (int i = threadIdx.x; i < side * 8; i += matrix_threads) {
        const uint32_t r = i / 8, c = i % 8;
        const uint32_t k = k0 + c * 8;
        const bool has_x = r < p.n_rows && k < p.k;
        copy16_async(piece_of(s_x, r, c), has_x ? x_row<is_behind>(a, p, r) + k * 2 : p.w, has_x);
        const uint32_t w_row = is_behind ? p.column0 + r : k0 + r;
        const uint32_t w_at = is_behind ? k : p.column0 + c * 8;
        const bool has_w = w_row < (is_behind ? p.n : p.k) && w_at < (is_behind ? p.k : p.n);
        copy16_async(piece_of(s_w, r, c),
                     has_w ? p.w + ((uint64_t)w_row * (is_behind ? p.k : p.n) + w_at) * 2 : p.w,
                     has_w);
    }
}

/* s += a warp's 16 rows of x times w. */
template <bool is_bf16, bool is_behind>
GPU_DEVICE void multiply(float (&s)[side / 16][tile_values], shared_at s_x, uint32_t warp_row)
{
    const shared_at s_w = s_x + tile_bytes;
    const int lane = lane_id();
#pragma unroll
    for (int kk = 0; kk < side / 16; ++kk) {
        tile_operand x;
        tile_load_rows(x, lane, [&](uint32_t r, uint32_t piece) {
            return piece_of(s_x, warp_row + r, kk * 2 + piece);
        });
#pragma unroll
        for (int j = 0; j < side / 16; ++j) {
            tile_operand w;
            if (is_behind)
                tile_load_columns(w, lane, [&](uint32_t r, uint32_t piece) {
                    return piece_of(s_w, j * 16 + r, kk * 2 + piece);
                });
            else
                tile_load_transposed(w, lane, [&](uint32_t r, uint32_t piece) {
                    return piece_of(s_w, kk * 16 + r, j * 2 + piece);
                });
            tile_multiply<is_bf16>(s[j], x, w);
        }
    }
}

/* Through shared memory, so that what goes over a bus goes in whole pieces. */
template <bool is_bf16, bool is_behind>
GPU_DEVICE void store(const gpu_heads &a, const product &p,
                      const float (&s)[side / 16][tile_values], uint32_t warp_row, char *staged)
{
    const int lane = lane_id();
#pragma unroll
    for (int j = 0; j < side / 16; ++j)
#pragma unroll
        for (int i = 0; i < tile_values; i += 2) {
            const uint32_t row = warp_row + tile_row(lane, tile_row_of(i));
            const uint32_t column = j * 16 + tile_column(lane, i);
            *(uint32_t *)(staged + (row * side + column) * 2) =
                is_bf16 ? bf16_encode2(s[j][i], s[j][i + 1]) : f16_encode2(s[j][i], s[j][i + 1]);
        }
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < p.n_rows * 8; i += matrix_threads) {
        const uint32_t r = i / 8, column = p.column0 + i % 8 * 8;
        if (column < p.n)
            *(uint4 *)(y_row<is_behind>(a, p, r) + column * 2) =
                *(const uint4 *)(staged + (r * side + i % 8 * 8) * 2);
    }
}

template <bool is_bf16, bool is_behind>
__global__ void __launch_bounds__(matrix_threads) project(GPU_PARAM(gpu_heads, by_value))
{
    const gpu_heads &a = params(by_value);
    GPU_SHARED(char, shared);
    const shared_at base = shared_address(shared);
    chain_release();
    chain_wait();
    const product p = product_of<is_behind>(a);
    const uint32_t warp_row = warp_id() * 16, n_steps = (p.k + side - 1) / side;
    float s[side / 16][tile_values] = {};
#pragma unroll
    for (int i = 0; i < stages - 1; ++i) {
        if (i < n_steps)
            fetch<is_behind>(a, p, i * side, base + i * stage_bytes);
        copy_commit();
    }
    if (!is_behind && blockIdx.y == 0)
        copy_rotated<matrix_threads>(a, p);
    for (uint32_t i = 0; i < n_steps; ++i) {
        const uint32_t next = i + stages - 1;
        if (next < n_steps)
            fetch<is_behind>(a, p, next * side, base + next % stages * stage_bytes);
        copy_commit();
        copy_wait<stages - 1>();
        __syncthreads(); /* the step is there */
        if (warp_row < p.n_rows)
            multiply<is_bf16, is_behind>(s, base + i % stages * stage_bytes, warp_row);
        __syncthreads(); /* its stage may be filled again */
    }
    store<is_bf16, is_behind>(a, p, s, warp_row, shared);
}

/* ---- f32 */

constexpr int depth = 16, f32_threads = 256; /* a thread has 4 x 4 outputs */

template <bool is_behind>
__global__ void __launch_bounds__(f32_threads) project_f32(GPU_PARAM(gpu_heads, by_value))
{
    const gpu_heads &a = params(by_value);
    GPU_SHARED(char, shared);
    float *s_x = (float *)shared, *s_w = s_x + depth * side; /* [depth][side] each */
    chain_release();
    chain_wait();
    const product p = product_of<is_behind>(a);
    const float *w = (const float *)p.w;
    const int r0 = threadIdx.x / 16 * 4, c0 = threadIdx.x % 16 * 4;
    float s[4][4] = {};
    if (!is_behind && blockIdx.y == 0)
        copy_rotated<f32_threads>(a, p);
    for (uint32_t k0 = 0; k0 < p.k; k0 += depth) {
        for (int i = threadIdx.x; i < side * depth; i += f32_threads) {
            const uint32_t r = i / depth, k = i % depth;
            const bool has_x = r < p.n_rows && k0 + k < p.k;
            s_x[k * side + r] = has_x ? ((const float *)x_row<is_behind>(a, p, r))[k0 + k] : 0.0f;
            /* neighbours in memory are for neighbouring threads */
            const uint32_t wk = is_behind ? k : i / side, wc = is_behind ? r : i % side;
            const uint32_t column = p.column0 + wc;
            const bool has_w = column < p.n && k0 + wk < p.k;
            const uint64_t at =
                is_behind ? (uint64_t)column * p.k + k0 + wk : (uint64_t)(k0 + wk) * p.n + column;
            s_w[wk * side + wc] = has_w ? w[at] : 0.0f;
        }
        __syncthreads();
#pragma unroll
        for (int k = 0; k < depth; ++k) {
            const float4 x = *(const float4 *)(s_x + k * side + r0);
            const float4 y = *(const float4 *)(s_w + k * side + c0);
            const float xs[4] = {x.x, x.y, x.z, x.w}, ws[4] = {y.x, y.y, y.z, y.w};
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
        if (r0 + i < p.n_rows && p.column0 + c0 < p.n)
            *(float4 *)(y_row<is_behind>(a, p, r0 + i) + (p.column0 + c0) * 4) =
                make_float4(s[i][0], s[i][1], s[i][2], s[i][3]);
}

template <bool is_behind> int launch_product(const gpu_heads &a, void *stream, int chained)
{
    const uint32_t n = is_behind ? a.out_dim : a.dv;
    const dim3 grid(a.n_tiles, (n + side - 1) / side, a.num_q_heads);
    if (a.q_dtype == ATTN_F32)
        return launch(project_f32<is_behind>, grid, dim3(f32_threads),
                      2 * depth * side * sizeof(float), stream, chained != 0, a);
    return launch(a.q_dtype == ATTN_BF16 ? project<true, is_behind> : project<false, is_behind>,
                  grid, dim3(matrix_threads), stages * stage_bytes, stream, chained != 0, a);
}

} // namespace

int gpu_absorb_launch(const struct gpu_heads *a, void *stream, int chained)
{
    return launch_product<false>(*a, stream, chained);
}

int gpu_expand_launch(const struct gpu_heads *a, void *stream, int chained)
{
    return launch_product<true>(*a, stream, chained);
}
