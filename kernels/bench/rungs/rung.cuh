/* rung.cuh: what the rungs' kernels share: their launches, and elements of f32 and bf16 tensors. */
#ifndef ATTND_BENCH_RUNG_CUH
#define ATTND_BENCH_RUNG_CUH

#include "kernels/bench/rungs/rungs_gpu.h"
#include "kernels/gpu/device.cuh"

namespace gpu
{

/* A pass of a three-pass rung over one tile of rows. */
struct rung_pass {
    rung_call c;
    rung_tile t;
};

template <bool is_f32> constexpr uint32_t dtype_of = is_f32 ? ATTN_F32 : ATTN_BF16;
template <bool is_f32> constexpr uint32_t bytes_of = is_f32 ? 4 : 2;

template <bool is_f32> GPU_DEVICE float load1(const void *p, uint64_t at)
{
    return is_f32 ? ((const float *)p)[at] : bf16_decode(((const uint16_t *)p)[at]);
}

template <bool is_f32> GPU_DEVICE void store1(void *p, uint64_t at, float x)
{
    if (is_f32)
        ((float *)p)[at] = x;
    else
        ((uint16_t *)p)[at] = (uint16_t)bf16_encode2(x, 0.0f);
}

/* Four neighbouring elements; at is a multiple of 4. */
template <bool is_f32> GPU_DEVICE float4 load4(const void *p, uint64_t at)
{
    if (is_f32)
        return *(const float4 *)((const float *)p + at);
    const uint2 w = *(const uint2 *)((const uint16_t *)p + at);
    return make_float4(bf16_decode(w.x & 0xffff), bf16_decode(w.x >> 16), bf16_decode(w.y & 0xffff),
                       bf16_decode(w.y >> 16));
}

template <bool is_f32> GPU_DEVICE void store4(void *p, uint64_t at, float4 x)
{
    if (is_f32)
        *(float4 *)((float *)p + at) = x;
    else
        *(uint2 *)((uint16_t *)p + at) = make_uint2(bf16_encode2(x.x, x.y), bf16_encode2(x.z, x.w));
}

/* Where token `row` of head `head` (of batch * heads) begins in q, k, v and out. */
GPU_DEVICE uint64_t token_at(const rung_call &c, uint32_t head, uint32_t row)
{
    const uint64_t token = (uint64_t)(head / c.heads) * c.n + row;
    return (token * c.heads + head % c.heads) * c.dim;
}

} // namespace gpu
#endif
