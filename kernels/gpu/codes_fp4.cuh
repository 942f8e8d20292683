/* codes_fp4.cuh: nvfp4 and mxfp4 for attend_codes.cu: how a tile of them lies in shared memory, and
 * products with its K and its V.
 *
 * A word of 8 codes gives the values i and i + 4 in one register, which is the order that K is
 * multiplied in, q with it. Of V two tokens' codes of one column make a register. A group's scale
 * is multiplied into its values: bf16 holds the products exactly.
 *
 * A code's bits in a bf16's place have an exponent that is 126 too small. Of nvfp4 one product
 * mends that and has the group's scale, but for 2^8, which a bf16 has no room for: rows' scales
 * have it. mxfp4's scales need all of a bf16's exponents, so there it takes two.
 */
#ifndef ATTND_GPU_CODES_FP4_CUH
#define ATTND_GPU_CODES_FP4_CUH

#include "kernels/gpu/attend_matrix.cuh"

namespace gpu
{

/* The codes in the top four bits of either half, as bf16, times what group_scales gives. */
template <bool is_nv> GPU_DEVICE uint32_t fp4_pair(uint32_t codes, uint32_t scales)
{
    const uint32_t two = (codes & 0x80008000) | (codes >> 6 & 0x01c001c0);
    return bf16x2_multiply(is_nv ? two : bf16x2_multiply(two, 0x7e807e80), scales); /* 2^126 */
}

/* Two groups' scales as bf16, of nvfp4 times 2^118. */
template <bool is_nv> GPU_DEVICE uint32_t group_scales(uint32_t low, uint32_t high)
{
    if (is_nv) {
        const uint32_t two = (low | high << 16) << 4 & 0x07f007f0; /* 2^120 too small */
        return bf16x2_multiply(bf16x2_multiply(two, 0x7b807b80), 0x7a807a80);
    }
    low = low == 0 ? 0x40 : low > 252 ? 0 : low << 7; /* as e8m0_decode */
    high = high == 0 ? 0x40 : high > 252 ? 0 : high << 7;
    return low | high << 16;
}

template <int dim_, int tile, bool is_nv> struct four_bits {
    static constexpr int dim = dim_, row_bytes = dim / 2, chunks = row_bytes / 16;
    static constexpr int part_bytes = tile * row_bytes;
    static constexpr int groups_at = is_nv ? 4 : 0; /* in a row's scales */
    static constexpr int record = groups_at + (dim / (is_nv ? 16 : 32) + 3) / 4 * 4;
    static constexpr int records_at = 2 * part_bytes;
    static constexpr int stage_bytes = (records_at + 2 * tile * record + 15) / 16 * 16;

    /* Where 16 bytes of a row lie: so that the lanes of one read meet different banks. */
    static GPU_DEVICE uint32_t chunk_at(uint32_t row, uint32_t chunk)
    {
        const uint32_t flip = dim == 128 ? row & 2 : dim == 256 ? (row & 3) << 1 : 0;
        return row * row_bytes + ((chunk ^ flip) << 4);
    }

    /* Rows of V lie so that those of the tokens that a read takes, every other one, are
     * neighbours. */
    static GPU_DEVICE uint32_t v_row(uint32_t token)
    {
        return token >> 1 | (token & 1) << 3;
    }

    /* A row's q, of the lane's part: as multiply_keys takes it. src: 16 bytes of 8 values a word of
     * codes. */
    static GPU_DEVICE void load_q(uint32_t (&q)[dim / 64][4][4], int h, const char *src,
                                  bool is_live, int t)
    {
#pragma unroll
        for (int i = 0; i < dim / 64; ++i)
#pragma unroll
            for (int w = 0; w < 2; ++w) {
                const uint4 x = *(const uint4 *)(src + ((t + 4 * i) * 16 + 8 * w) * 2);
                const uint32_t a[2] = {x.x, x.y}, b[2] = {x.z, x.w};
#pragma unroll
                for (int k = 0; k < 2; ++k) {
                    q[i][2 * w + k][h] = is_live ? (a[k] & 0xffff) | b[k] << 16 : 0;
                    q[i][2 * w + k][2 + h] = is_live ? a[k] >> 16 | (b[k] & 0xffff0000) : 0;
                }
            }
    }

    /* Starts bringing a tile. at(r, block) gives a token's slot and its block; is_live(r). */
    template <class At, class Live>
    static GPU_DEVICE void bring(const gpu_kv &kv, const part &pk, const part &pv, uint32_t head,
                                 shared_at to, int lane, At at, Live is_live)
    {
        uint32_t block;
#pragma unroll
        for (int i = lane; i < tile * chunks; i += warp_width) {
            const uint32_t r = i / chunks, c = i % chunks, slot = at(r, block);
            const char *k = row_address(kv, pk, block, head, slot);
            const char *v = row_address(kv, pv, block, head, slot);
            copy16_async(to + chunk_at(r, c), k + c * 16, is_live(r));
            copy16_async(to + part_bytes + chunk_at(v_row(r), c), v + c * 16, is_live(r));
        }
        const uint32_t r = lane % tile, slot = at(r, block);
        const char *from = scale_address(kv, lane < tile ? pk : pv, block, head, slot);
#pragma unroll
        for (int w = 0; w < record; w += 4)
            copy_async<4>(to + records_at + lane * record + w, from + w, is_live(r));
    }

    /* The same of a tile whose tokens lie behind one another, `left` of them. k, v: the lane's 16
     * bytes of the first, lane * 16 from the row's start; scales: of its token of K, or of V. */
    static GPU_DEVICE void bring_run(const char *k, const char *v, const char *scales, shared_at to,
                                     int lane, uint32_t left)
    {
        constexpr int rows = warp_width / chunks; /* at a time */
#pragma unroll
        for (int i = 0; i < tile / rows; ++i) {
            const uint32_t r = i * rows + lane / chunks, c = lane % chunks;
            copy16_async(to + chunk_at(r, c), k + i * rows * row_bytes, r < left);
            copy16_async(to + part_bytes + chunk_at(v_row(r), c), v + i * rows * row_bytes,
                         r < left);
        }
#pragma unroll
        for (int w = 0; w < record; w += 4)
            copy_async<4>(to + records_at + lane * record + w, scales + w, lane % tile < left);
    }

    static GPU_DEVICE float scale_of(const char *stage, bool is_v, uint32_t token)
    {
        const char *scales = stage + records_at + (is_v * tile + token) * record;
        return row_scale(scales, is_nv ? ATTN_NVFP4 : ATTN_MXFP4) * (is_nv ? 256.0f : 1.0f);
    }

    /* The code of the scale of the value `e` of a token's row. */
    static GPU_DEVICE uint32_t group_code(const char *stage, bool is_v, uint32_t token, uint32_t e)
    {
        const char *groups = stage + records_at + (is_v * tile + token) * record + groups_at;
        return *(const uint8_t *)(groups + e / (is_nv ? 16 : 32));
    }

    /* s: the dot products of the 16 query rows with the tile. */
    static GPU_DEVICE void multiply_keys(float (&s)[2][4], const uint32_t (&q)[dim / 64][4][4],
                                         const char *stage, int g, int t)
    {
#pragma unroll
        for (int i = 0; i < dim / 64; ++i)
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const uint32_t token = j * 8 + g, piece = t + 4 * i; /* of 16 codes */
                const char *src = stage + chunk_at(token, piece / 2) + piece % 2 * 8;
                const uint2 two = *(const uint2 *)src;
                const uint32_t group = group_code(stage, false, token, piece * 16);
                const uint32_t scales = group_scales<is_nv>(group, group);
#pragma unroll
                for (int w = 0; w < 2; ++w) {
                    const uint32_t c = w == 0 ? two.x : two.y;
                    mma_16816<true>(s[j], q[i][2 * w], fp4_pair<is_nv>(c << 12, scales),
                                    fp4_pair<is_nv>(c << 8, scales));
                    mma_16816<true>(s[j], q[i][2 * w + 1], fp4_pair<is_nv>(c << 4, scales),
                                    fp4_pair<is_nv>(c, scales));
                }
            }
    }

    /* Adds to o the values of the tile, weighted by p. A lane's columns: dim / 8 of the tokens 2t,
     * 2t + 1, 2t + 8, 2t + 9. */
    static GPU_DEVICE void multiply_values(float (&o)[dim / 8][4], const uint32_t (&p)[4],
                                           const char *stage, int g, int t)
    {
        constexpr int n_words = dim / 64; /* of 8 codes */
        uint32_t codes[4][n_words];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint32_t token = 2 * t + i % 2 + i / 2 * 8, at = g * (dim / 16);
            const char *src = stage + part_bytes + chunk_at(v_row(token), at / 16) + at % 16;
#pragma unroll
            for (int w = 0; w < n_words; ++w)
                codes[i][w] = ((const uint32_t *)src)[w];
        }
#pragma unroll
        for (int w = 0; w < n_words; ++w) {
            uint32_t group[4];
#pragma unroll
            for (int i = 0; i < 4; ++i)
                group[i] =
                    group_code(stage, true, 2 * t + i % 2 + i / 2 * 8, g * (dim / 8) + w * 8);
            const uint32_t low = group_scales<is_nv>(group[0], group[1]);
            const uint32_t high = group_scales<is_nv>(group[2], group[3]);
            /* two codes of each of two tokens, in a byte of either half */
#pragma unroll
            for (int b = 0; b < 4; ++b) {
                const uint32_t pick = (4 + b) << 12 | b << 4;
                const uint32_t x = __byte_perm(codes[0][w], codes[1][w], pick);
                const uint32_t y = __byte_perm(codes[2][w], codes[3][w], pick);
                mma_16816<true>(o[w * 8 + 2 * b], p, fp4_pair<is_nv>(x << 4, low),
                                fp4_pair<is_nv>(y << 4, high));
                mma_16816<true>(o[w * 8 + 2 * b + 1], p, fp4_pair<is_nv>(x, low),
                                fp4_pair<is_nv>(y, high));
            }
        }
    }
};

} // namespace gpu
#endif
