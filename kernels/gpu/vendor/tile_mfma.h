/* tile_mfma.h: a 16 x 16 tile of scores or outputs in a wave of 64 lanes, computed by one 16 x 16 x
 * 16 product. Lane l holds row l%16, of it the columns 4(l/16) .. 4(l/16) + 3.
 *
 * The instruction leaves a lane with four rows of one column, so the factors are swapped: it
 * computes the transposed tile. A lane then has all it knows of one row, and its four columns are
 * what the next product wants of it as an operand. Interface as in tile_mma.h.
 */
#ifndef ATTND_GPU_TILE_MFMA_H
#define ATTND_GPU_TILE_MFMA_H

namespace gpu
{

constexpr int tile_rows = 1, tile_values = 4; /* of a lane */
constexpr int tile_lanes = 4, tile_step = 16; /* so many lanes, so far apart, share their row */

GPU_DEVICE int tile_row(int lane, int r)
{
    (void)r;
    return lane % 16;
}

GPU_DEVICE int tile_column(int lane, int value)
{
    return lane / 16 * 4 + value;
}

GPU_DEVICE constexpr int tile_row_of(int value)
{
    (void)value;
    return 0;
}

GPU_DEVICE bool tile_is_first(int lane)
{
    return lane < 16;
}

/* Elements 4(l/16) .. 4(l/16) + 3 of row (or column) l%16. */
struct alignas(8) tile_operand {
    uint32_t w[2];
};

template <class At> GPU_DEVICE void tile_load_rows(tile_operand &x, int lane, At at)
{
    uint2 v = *(const uint2 *)(at(lane % 16, lane / 32) + lane / 16 % 2 * 8);
    x.w[0] = v.x;
    x.w[1] = v.y;
}

template <class At> GPU_DEVICE void tile_load_columns(tile_operand &x, int lane, At at)
{
    tile_load_rows(x, lane, at);
}

template <class At> GPU_DEVICE void tile_load_transposed(tile_operand &x, int lane, At at)
{
    uint32_t e[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
        e[i] = *(const uint16_t *)(at(lane / 16 * 4 + i, lane % 16 / 8) + lane % 8 * 2);
    x.w[0] = e[0] | e[1] << 16;
    x.w[1] = e[2] | e[3] << 16;
}

template <class At> GPU_DEVICE void tile_fetch_rows(tile_operand (&x)[2], int lane, At at)
{
    const char *const p = at(lane % 16, lane / 16);
    const uint4 v = p ? *(const uint4 *)p : make_uint4(0, 0, 0, 0);
    x[0] = {{v.x, v.y}};
    x[1] = {{v.z, v.w}};
}

template <class At> GPU_DEVICE void tile_fetch_columns(tile_operand (&x)[2], int lane, At at)
{
    tile_fetch_rows(x, lane, at);
}

template <bool is_bf16> GPU_DEVICE void tile_pack(tile_operand &x, const float (&c)[tile_values])
{
#pragma unroll
    for (int i = 0; i < 2; ++i)
        x.w[i] =
            is_bf16 ? bf16_encode2(c[2 * i], c[2 * i + 1]) : f16_encode2(c[2 * i], c[2 * i + 1]);
}

template <bool is_bf16>
GPU_DEVICE void tile_multiply(float (&c)[tile_values], const tile_operand &a, const tile_operand &b)
{
    mfma_16x16x16<is_bf16>(c, b.w, a.w);
}

/* Are attend_rows.cuh, attend_codes.cu and attend_f32.cu built, which lay out their operands as
 * mma.sync has its fragments? Else attend_matrix.cuh and attend_vector.cu do their work. */
constexpr bool has_fragment_kernels = false;

/* Tokens of K and V that attend_matrix.cuh holds at once: a thread block has 64 KiB. */
constexpr int matrix_tile(int dim, int row_warps, bool is_quantised)
{
    if (dim == 128 && row_warps == 4 && is_quantised)
        return 32;
    return dim < 256 ? 64 : row_warps == 4 ? 16 : 32;
}

} // namespace gpu
#endif
