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

constexpr float e4m3_max = 448.0f, int8_max = 127.0f;

/* One head's row, by one warp, 8 elements a lane (n <= 256): codes and their scale by
 * reference_quantise's rule. */
GPU_DEVICE void quantise_row(char *dst, float *dst_scale, const float (&x)[8], uint32_t n,
                             uint32_t dtype)
{
    float amax = 0.0f, bad = 0.0f;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        amax = fmaxf(amax, fabsf(x[j]));
        bad = isfinite(x[j]) ? bad : 1.0f;
    }
    amax = warp_max(amax);
    float scale = amax / (dtype == ATTN_FP8_E4M3 ? e4m3_max : int8_max);
    if (warp_max(bad) > 0.0f)
        scale = NAN;
    float inverse = 1.0f / scale;
    bool is_tiny = scale < 0x1p-100f;
    uint32_t w[2] = {0, 0};
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        /* x / scale, correctly rounded: a quotient from the rounded inverse and one correction */
        float y = x[j] * inverse;
        y = fmaf(fmaf(-y, scale, x[j]), inverse, y);
        if (is_tiny)
            y = x[j] / scale;
        if (!(scale > 0.0f))
            y = 0.0f;
        uint32_t code;
        if (dtype == ATTN_FP8_E4M3)
            code = e4m3_encode(y);
        else
            code = (uint32_t)__float2int_rn(fminf(fmaxf(y, -int8_max), int8_max)) & 0xff;
        w[j / 4] |= code << (j % 4 * 8);
    }
    if (lane_id() * 8 < n)
        *(uint2 *)(dst + lane_id() * 8) = make_uint2(w[0], w[1]);
    if (lane_id() == 0)
        *dst_scale = scale;
}

/* Loads over the bus take a microsecond: `at_once` of them are asked for before the first is
 * used. */
constexpr int at_once = 4, rows_at_once = 2;

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
        constexpr uint32_t n_warps = append_threads / warp_width;
        for (uint32_t r0 = warp_id(); r0 < 2 * kv.num_kv_heads; r0 += n_warps * rows_at_once) {
            float x[rows_at_once][8] = {};
#pragma unroll
            for (int u = 0; u < rows_at_once; ++u) {
                uint32_t r = r0 + u * n_warps, e = lane_id() * 8;
                bool is_v = r >= kv.num_kv_heads;
                uint32_t head = is_v ? r - kv.num_kv_heads : r, d = is_v ? kv.dv : kv.dk;
                if (r < 2 * kv.num_kv_heads && e < d)
                    load8(x[u], (is_v ? src_v : src_k) + (head * d + e) * size, kv.q_dtype);
            }
#pragma unroll
            for (int u = 0; u < rows_at_once; ++u) {
                uint32_t r = r0 + u * n_warps;
                bool is_v = r >= kv.num_kv_heads;
                uint32_t head = is_v ? r - kv.num_kv_heads : r;
                part p = v;
                if (!is_v)
                    p = k;
                if (r < 2 * kv.num_kv_heads)
                    quantise_row(row_address(kv, p, block, head, slot),
                                 scale_address(kv, p, block, head, slot), x[u],
                                 is_v ? kv.dv : kv.dk, kv.kv_dtype);
            }
        }
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
