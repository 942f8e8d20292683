/* tile_mma.h: a 16 x 16 tile of scores or outputs in a warp of 32 lanes, computed by two 16 x 8 x
 * 16 products. Lane l holds rows l/4 and l/4 + 8, of each the columns 2(l%4), 2(l%4) + 1 and 8
 * more.
 *
 * An operand of 16 rows by 16 elements of 16 bits is four words per lane. Where it comes from is
 * said by at(row, piece): the shared address of elements 8 * piece and up (piece 0 or 1) of that
 * row.
 */
#ifndef ATTND_GPU_TILE_MMA_H
#define ATTND_GPU_TILE_MMA_H

namespace gpu
{

constexpr int tile_rows = 2; /* of a lane */
constexpr int tile_values = 8; /* of a lane; 2i and 2i + 1 are neighbours in a row */
constexpr int tile_lanes = 4, tile_step = 1; /* so many lanes, so far apart, share their rows */

/* The row of a tile that is a lane's r-th; the columns of its values; which of its rows a value is
 * in. */
GPU_DEVICE int tile_row(int lane, int r)
{
    return lane / 4 + r * 8;
}

GPU_DEVICE int tile_column(int lane, int value)
{
    return value / 4 * 8 + lane % 4 * 2 + value % 2;
}

GPU_DEVICE constexpr int tile_row_of(int value)
{
    return value / 2 % 2;
}

/* One lane of those that share rows. */
GPU_DEVICE bool tile_is_first(int lane)
{
    return lane % 4 == 0;
}

struct alignas(16) tile_operand {
    uint32_t w[4];
};

/* The first factor, by its rows. */
template <class At> GPU_DEVICE void tile_load_rows(tile_operand &x, int lane, At at)
{
    load_matrix4(x.w, at(lane % 16, lane / 16));
}

/* The second factor, by its columns: at(column, piece). */
template <class At> GPU_DEVICE void tile_load_columns(tile_operand &x, int lane, At at)
{
    load_matrix4(x.w, at(lane / 16 * 8 + lane % 8, lane / 8 % 2));
}

/* The second factor, stored by the rows that the product runs over. */
template <class At> GPU_DEVICE void tile_load_transposed(tile_operand &x, int lane, At at)
{
    load_matrix4_transposed(x.w, at(lane % 16, lane / 16));
}

/* 32 elements of each row as two operands, from device memory, in an order of elements that is the
 * same in both factors. at(row, piece): as above, piece 0 to 3, where it lies; NULL: zeroes. */
GPU_DEVICE uint4 tile_piece(const char *p)
{
    return p ? *(const uint4 *)p : make_uint4(0, 0, 0, 0);
}

template <class At> GPU_DEVICE void tile_fetch_rows(tile_operand (&x)[2], int lane, At at)
{
    const uint4 a = tile_piece(at(lane / 4, lane % 4)), b = tile_piece(at(lane / 4 + 8, lane % 4));
    x[0] = {{a.x, b.x, a.y, b.y}};
    x[1] = {{a.z, b.z, a.w, b.w}};
}

template <class At> GPU_DEVICE void tile_fetch_columns(tile_operand (&x)[2], int lane, At at)
{
    const uint4 a = tile_piece(at(lane / 4, lane % 4)), b = tile_piece(at(lane / 4 + 8, lane % 4));
    x[0] = {{a.x, a.y, b.x, b.y}};
    x[1] = {{a.z, a.w, b.z, b.w}};
}

/* A computed tile as the first factor of the next product. */
template <bool is_bf16> GPU_DEVICE void tile_pack(tile_operand &x, const float (&c)[tile_values])
{
#pragma unroll
    for (int i = 0; i < 4; ++i)
        x.w[i] =
            is_bf16 ? bf16_encode2(c[2 * i], c[2 * i + 1]) : f16_encode2(c[2 * i], c[2 * i + 1]);
}

template <bool is_bf16>
GPU_DEVICE void tile_multiply(float (&c)[tile_values], const tile_operand &a, const tile_operand &b)
{
    mma_16816<is_bf16>(*(float(*)[4]) & c[0], a.w, b.w[0], b.w[1]);
    mma_16816<is_bf16>(*(float(*)[4]) & c[4], a.w, b.w[2], b.w[3]);
}

/* Are attend_rows.cuh, attend_codes.cu and attend_f32.cu built, which lay out their operands as
 * mma.sync has its fragments? Else attend_matrix.cuh and attend_vector.cu do their work. */
constexpr bool has_fragment_kernels = true;

/* Tokens of K and V that attend_matrix.cuh holds at once: they fit shared_limit. */
constexpr int matrix_tile(int dim, int row_warps, bool is_quantised)
{
    (void)row_warps, (void)is_quantised;
    return dim == 256 ? 32 : 64;
}

} // namespace gpu
#endif
