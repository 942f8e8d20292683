/* append.cuh: k and v of a new token into its block, by a thread block: as they are, or quantised
 * by reference_quantise's rule. prep.cu calls it for every token of a batch; a direct call of the
 * tuned kernels (sm90/decode_short.cuh) appends by itself.
 *
 * Block ids come from the batch, never from the block table, so patches and appends need no order
 * between them.
 */
#ifndef ATTND_GPU_APPEND_CUH
#define ATTND_GPU_APPEND_CUH

#include "kernels/gpu/device.cuh"

namespace gpu
{

constexpr int append_threads = 128;

constexpr float e4m3_max = 448.0f, int8_max = 127.0f, fp4_max = 6 * e4m3_max;

/* One head's row of n elements, by one warp: codes and their scale by reference_quantise's rule. A
 * lane has n_pieces pieces of 8 elements, the next one a warp's width of pieces further on. */
template <int n_pieces>
GPU_DEVICE void quantise_row(char *dst, char *dst_scale, const float (&x)[n_pieces][8], uint32_t n,
                             uint32_t dtype)
{
    float amax = 0.0f, bad = 0.0f;
#pragma unroll
    for (int c = 0; c < n_pieces; ++c)
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            amax = fmaxf(amax, fabsf(x[c][j]));
            bad = isfinite(x[c][j]) ? bad : 1.0f;
        }
    amax = warp_max(amax);
    float scale = amax / (dtype == ATTN_FP8_E4M3 ? e4m3_max : int8_max);
    if (warp_max(bad) > 0.0f)
        scale = NAN;
    float inverse = 1.0f / scale;
    bool is_tiny = scale < 0x1p-100f;
#pragma unroll
    for (int c = 0; c < n_pieces; ++c) {
        uint32_t w[2] = {0, 0}, e = (c * warp_width + lane_id()) * 8;
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            /* from / scale, rounded: a quotient from the rounded inverse, and one correction */
            const float from = x[c][j];
            float y = from * inverse;
            y = fmaf(fmaf(-y, scale, from), inverse, y);
            if (is_tiny)
                y = from / scale;
            if (from == 0.0f)
                y = from; /* the correction drops the sign of a zero, which e4m3 has */
            if (!(scale > 0.0f))
                y = 0.0f;
            uint32_t code;
            if (dtype == ATTN_FP8_E4M3)
                code = e4m3_encode(y);
            else
                code = (uint32_t)__float2int_rn(fminf(fmaxf(y, -int8_max), int8_max)) & 0xff;
            w[j / 4] |= code << (j % 4 * 8);
        }
        if (e < n)
            *(uint2 *)(dst + e) = make_uint2(w[0], w[1]);
    }
    if (lane_id() == 0)
        *(float *)dst_scale = scale;
}

/* The same of FP4, whose groups are of `lanes` neighbouring lanes. */
template <int n_pieces, int lanes>
GPU_DEVICE void quantise_groups(char *dst, char *dst_scales, const float (&x)[n_pieces][8],
                                uint32_t n, uint32_t dtype)
{
    constexpr bool is_nv = lanes == 2;
    float amax = 0.0f, bad = 0.0f;
#pragma unroll
    for (int c = 0; c < n_pieces; ++c)
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            amax = fmaxf(amax, fabsf(x[c][j]));
            bad = isfinite(x[c][j]) ? bad : 1.0f;
        }
    const bool is_bad = warp_max(bad) > 0.0f;
    const float of_row = is_bad ? NAN : is_nv ? warp_max(amax) / fp4_max : 1.0f;
    char *groups = dst_scales + groups_at(dtype);
#pragma unroll
    for (int c = 0; c < n_pieces; ++c) {
        const uint32_t e = (c * warp_width + lane_id()) * 8;
        float max = 0.0f;
#pragma unroll
        for (int j = 0; j < 8; ++j)
            max = fmaxf(max, fabsf(x[c][j]));
        max = warp_max<lanes>(max);
        uint32_t code = 0, w = 0;
        if (is_nv && of_row > 0.0f)
            code = e4m3_encode(max / of_row / 6.0f);
        if (!is_nv) {
            const uint32_t power = (__float_as_uint(max) + 0x200000) >> 23; /* 1.75 counts as 2 */
            code = is_bad ? 255 : power > 2 ? min(power - 2, 252u) : 0;
        }
        const float scale = group_decode(code, dtype) * of_row;
#pragma unroll
        for (int j = 0; j < 8; ++j)
            if (scale > 0.0f)
                w |= e2m1_encode(x[c][j] / scale) << (4 * j);
        if (e < n)
            *(uint32_t *)(dst + e / 2) = w;
        if (e < n && lane_id() % lanes == 0)
            *(uint8_t *)(groups + e / (8 * lanes)) = (uint8_t)code;
    }
    const uint32_t n_groups = n / (8 * lanes), at = n_groups + lane_id();
    if (at < (n_groups + 3) / 4 * 4)
        *(uint8_t *)(groups + at) = 0;
    if (is_nv && lane_id() == 0)
        *(float *)dst_scales = of_row;
}

/* Loads over the bus take a microsecond: `at_once` of them are asked for before the first is
 * used. */
constexpr int at_once = 4;

/* Rows of a token's k and v, where there is v: heads of K, then of V, as codes. */
template <int n_pieces>
GPU_DEVICE void append_codes(const gpu_kv &kv, const part &k, const part &v, const char *src_k,
                             const char *src_v, uint32_t block, uint32_t slot)
{
    constexpr uint32_t n_warps = append_threads / warp_width;
    constexpr int rows_at_once = n_pieces > 1 ? 1 : 2;
    const uint32_t n = (kv.dv > 0 ? 2 : 1) * kv.num_kv_heads, size = element_bytes(kv.q_dtype);
    for (uint32_t r0 = warp_id(); r0 < n; r0 += n_warps * rows_at_once) {
        float x[rows_at_once][n_pieces][8] = {};
#pragma unroll
        for (int u = 0; u < rows_at_once; ++u) {
            uint32_t r = r0 + u * n_warps;
            bool is_v = r >= kv.num_kv_heads;
            uint32_t head = is_v ? r - kv.num_kv_heads : r, d = is_v ? kv.dv : kv.dk;
#pragma unroll
            for (int c = 0; c < n_pieces; ++c) {
                uint32_t e = (c * warp_width + lane_id()) * 8;
                if (r < n && e < d)
                    load8(x[u][c], (is_v ? src_v : src_k) + (head * d + e) * size, kv.q_dtype);
            }
        }
#pragma unroll
        for (int u = 0; u < rows_at_once; ++u) {
            uint32_t r = r0 + u * n_warps;
            bool is_v = r >= kv.num_kv_heads;
            uint32_t head = is_v ? r - kv.num_kv_heads : r;
            part p = v;
            if (!is_v)
                p = k;
            char *dst = row_address(kv, p, block, head, slot);
            char *scales = scale_address(kv, p, block, head, slot);
            const uint32_t d = is_v ? kv.dv : kv.dk;
            if (r >= n)
                continue;
            if (kv.kv_dtype == ATTN_NVFP4)
                quantise_groups<n_pieces, 2>(dst, scales, x[u], d, kv.kv_dtype);
            else if (kv.kv_dtype == ATTN_MXFP4)
                quantise_groups<n_pieces, 4>(dst, scales, x[u], d, kv.kv_dtype);
            else
                quantise_row(dst, scales, x[u], d, kv.kv_dtype);
        }
    }
}

/* brought: the token's k and v on the device, or NULL. */
GPU_DEVICE void append_token(const gpu_kv &kv, const gpu_item &it, const uint32_t *blocks,
                             uint32_t token, const char *brought)
{
    uint32_t position = it.pos + token, slot = position & (kv.block_tokens - 1);
    uint32_t block = blocks[it.blocks0 + (position >> kv.block_shift) - (it.pos >> kv.block_shift)];
    part k = part_of(kv, it.layer, false), v = part_of(kv, it.layer, true);
    uint32_t size = element_bytes(kv.q_dtype);
    const char *src_k = (const char *)it.k_src + (uint64_t)token * kv.num_kv_heads * kv.dk * size;
    const char *src_v = (const char *)it.v_src + (uint64_t)token * kv.num_kv_heads * kv.dv * size;
    if (brought) {
        src_k = brought;
        src_v = brought + kv.num_kv_heads * kv.dk * size;
    }
    if (kv.is_quantised) {
        if (kv.dk > warp_width * 8 || kv.dv > warp_width * 8)
            append_codes<3>(kv, k, v, src_k, src_v, block, slot);
        else
            append_codes<1>(kv, k, v, src_k, src_v, block, slot);
        return;
    }
    uint32_t nk = k.row_bytes / 16, nv = v.row_bytes / 16, n = kv.num_kv_heads * (nk + nv);
    for (uint32_t i0 = threadIdx.x; i0 < n; i0 += append_threads * at_once) {
        uint4 x[at_once];
#pragma unroll
        for (int u = 0; u < at_once; ++u) {
            uint32_t i = i0 + u * append_threads, at = kv.num_kv_heads * nk;
            if (i < n)
                x[u] = i < at ? ((const uint4 *)src_k)[i] : ((const uint4 *)src_v)[i - at];
        }
#pragma unroll
        for (int u = 0; u < at_once; ++u) {
            uint32_t i = i0 + u * append_threads;
            bool is_v = i >= kv.num_kv_heads * nk;
            uint32_t j = is_v ? i - kv.num_kv_heads * nk : i, w = is_v ? nv : nk;
            part p = v;
            if (!is_v)
                p = k;
            if (i < n)
                *(uint4 *)(row_address(kv, p, block, j / w, slot) + j % w * 16) = x[u];
        }
    }
}

} // namespace gpu
#endif
