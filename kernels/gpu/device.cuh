/* device.cuh: what all kernels of a pool share: element loads of any stored type, where a token's K
 * and V live, which keys a query sees and what an option does to a score.
 */
#ifndef ATTND_GPU_DEVICE_CUH
#define ATTND_GPU_DEVICE_CUH

#include "kernels/gpu/params.h"
#include "kernels/gpu/softmax.cuh"
#include "kernels/gpu/vendor/gpu.h"
#include "kernels/visible.h"
#include "proto/attn_types.h"

namespace gpu
{

/* Eight neighbouring elements of a stored array as floats; p is aligned to 8 elements. */
GPU_DEVICE void load8(float (&x)[8], const char *p, uint32_t dtype)
{
    if (dtype == ATTN_BF16 || dtype == ATTN_F16) {
        uint4 v = *(const uint4 *)p;
        uint32_t w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            x[2 * i] = dtype == ATTN_BF16 ? bf16_decode(w[i] & 0xffff) : f16_decode(w[i] & 0xffff);
            x[2 * i + 1] = dtype == ATTN_BF16 ? bf16_decode(w[i] >> 16) : f16_decode(w[i] >> 16);
        }
    } else if (dtype == ATTN_F32) {
        float4 a = *(const float4 *)p, b = *(const float4 *)(p + 16);
        x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w;
        x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
    } else {
        uint2 v = *(const uint2 *)p;
        uint32_t w[2] = {v.x, v.y};
#pragma unroll
        for (int i = 0; i < 8; i += 2) {
            if (dtype == ATTN_FP8_E4M3) {
                e4m3_decode2(w[i / 4] >> (i % 4 * 8) & 0xffff, x[i], x[i + 1]);
            } else {
                x[i] = int8_decode(w[i / 4], i % 4);
                x[i + 1] = int8_decode(w[i / 4], i % 4 + 1);
            }
        }
    }
}

/* Eight floats to an array of the travelling type (f32, f16, bf16). */
GPU_DEVICE void store8(char *p, const float (&x)[8], uint32_t dtype)
{
    if (dtype == ATTN_F32) {
        *(float4 *)p = make_float4(x[0], x[1], x[2], x[3]);
        *(float4 *)(p + 16) = make_float4(x[4], x[5], x[6], x[7]);
        return;
    }
    uint32_t w[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
        w[i] = dtype == ATTN_BF16 ? bf16_encode2(x[2 * i], x[2 * i + 1])
                                  : f16_encode2(x[2 * i], x[2 * i + 1]);
    *(uint4 *)p = make_uint4(w[0], w[1], w[2], w[3]);
}

GPU_DEVICE uint32_t element_bytes(uint32_t dtype)
{
    return dtype == ATTN_F32 ? 4 : dtype == ATTN_BF16 || dtype == ATTN_F16 ? 2 : 1;
}

/* The item whose range [start, next item's start) holds x; starts grow. start0 is the range's
 * origin: items[0]'s start. */
template <uint32_t gpu_item::*start>
GPU_DEVICE uint32_t find_item(const gpu_item *items, uint32_t n_items, uint32_t x)
{
    uint32_t lo = 0, hi = n_items;
    while (hi - lo > 1) {
        uint32_t mid = (lo + hi) / 2;
        if (items[mid].*start <= x)
            lo = mid;
        else
            hi = mid;
    }
    return lo;
}

/* Where the K or V row of (block, layer, head, slot in block) lies, and its scale. */
struct part {
    uint64_t codes, scales; /* offsets of this layer's part within a block */
    uint64_t head_bytes;
    uint32_t row_bytes, block_tokens;
};

GPU_DEVICE part part_of(const gpu_kv &kv, uint32_t layer, bool is_v)
{
    part p;
    uint64_t base = layer * kv.layer_bytes;
    p.codes = base + (is_v ? kv.v_offset : 0);
    p.scales = base + (is_v ? kv.v_scales : kv.k_scales);
    p.head_bytes = is_v ? kv.v_head_bytes : kv.k_head_bytes;
    p.row_bytes = (is_v ? kv.dv : kv.dk) * element_bytes(kv.kv_dtype);
    p.block_tokens = kv.block_tokens;
    return p;
}

GPU_DEVICE char *row_address(const gpu_kv &kv, const part &p, uint32_t block, uint32_t head,
                             uint32_t slot)
{
    return kv.base + block * kv.block_bytes + p.codes + head * p.head_bytes + slot * p.row_bytes;
}

GPU_DEVICE float *scale_address(const gpu_kv &kv, const part &p, uint32_t block, uint32_t head,
                                uint32_t slot)
{
    return (float *)(kv.base + block * kv.block_bytes + p.scales) + head * p.block_tokens + slot;
}

/* What the query at `position` of an item of kv_len tokens sees. */
GPU_DEVICE visible visible_to(const gpu_layer &l, uint32_t position, uint32_t kv_len)
{
    return ::visible_to(l.window_tokens, l.sink_tokens, l.is_full, position, kv_len);
}

GPU_DEVICE bool is_visible(const visible &v, uint32_t key)
{
    return visible_has(&v, key);
}

/* The score of a visible key in units of log 2, from the plain dot product. */
GPU_DEVICE float score_of(const gpu_layer &l, float dot, float slope, uint32_t position,
                          uint32_t key)
{
    float s = dot * l.scale;
    if (l.soft_cap > 0.0f)
        s = l.soft_cap * tanhf(s / l.soft_cap);
    if (slope != 0.0f)
        s += slope * ((float)key - (float)position);
    return s * log2e;
}

/* What this thread knows to be done is done. */
GPU_DEVICE void tell_host(const gpu_finish &a)
{
    __threadfence_system();
    *(volatile uint64_t *)a.out_done = (uint64_t)a.value << 32 | (uint32_t)time_ns();
}

} // namespace gpu
#endif
