/* gpu_hip.h: the HIP spelling of gpu.h, for CDNA devices (waves of 64 lanes); only gpu.h includes
 * it. */
#ifndef ATTND_GPU_HIP_H
#define ATTND_GPU_HIP_H

#include <hip/hip_runtime.h>
#include <stdint.h>

#define GPU_DEVICE __device__ __forceinline__
#define GPU_PARAM(type, name) const type name
#define GPU_SHARED(type, name) extern __shared__ __align__(128) type name[]

#include "kernels/gpu/number.h"

/* 16 bytes are a vector of the compiler's own: arrays of HIP's class lie in scratch memory where
 * clang 17 compiles them. */
#define uint4 gpu::words4
#define make_uint4 gpu::words4_of

namespace gpu
{

using words4 = __attribute__((ext_vector_type(4))) uint32_t;

GPU_DEVICE words4 words4_of(uint32_t x, uint32_t y, uint32_t z, uint32_t w)
{
    return words4{x, y, z, w};
}

constexpr int warp_width = 64;

GPU_DEVICE void sync_warp()
{
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "wavefront");
    __builtin_amdgcn_wave_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "wavefront");
}

GPU_DEVICE float shuffle_xor(float v, int mask)
{
    return __shfl_xor(v, mask);
}

/* Is v true in any lane? */
GPU_DEVICE bool warp_any(bool v)
{
    return __any(v);
}

/* Is v true in any thread of the block? A barrier. */
GPU_DEVICE bool block_any(bool v)
{
    return __syncthreads_or(v);
}

/* ---- special functions: 2^x, log2 x; 2^-inf is 0 */

GPU_DEVICE float exp2_fast(float x)
{
#if __has_builtin(__builtin_amdgcn_exp2f)
    return __builtin_amdgcn_exp2f(x);
#else
    return __builtin_exp2f(x); /* the instruction alone, where the builtin above is not known */
#endif
}

GPU_DEVICE float log2_fast(float x)
{
    return __log2f(x);
}

/* A counter of 100 MHz on all CDNA devices. */
GPU_DEVICE uint64_t time_ns()
{
    return __builtin_amdgcn_s_memrealtime() * 10;
}

/* ---- element conversions; encoding rounds to nearest even */

GPU_DEVICE float f16_decode(uint32_t bits)
{
    return (float)__builtin_bit_cast(_Float16, (uint16_t)bits);
}

/* Two values in one word, lo in the low half. */
GPU_DEVICE uint32_t bf16_encode2(float lo, float hi)
{
    return bf16_encode_portable(lo) | bf16_encode_portable(hi) << 16;
}

GPU_DEVICE uint32_t f16_encode2(float lo, float hi)
{
    uint32_t l = __builtin_bit_cast(uint16_t, (_Float16)lo);
    return l | (uint32_t) __builtin_bit_cast(uint16_t, (_Float16)hi) << 16;
}

GPU_DEVICE void e4m3_decode2(uint32_t codes, float &lo, float &hi)
{
    e4m3_decode2_portable(codes, lo, hi);
}

template <int pair> GPU_DEVICE uint32_t e4m3_to_bf16x2(uint32_t codes)
{
    return e4m3_to_bf16x2_portable<pair>(codes);
}

GPU_DEVICE uint32_t bf16x2_multiply(uint32_t a, uint32_t b)
{
    return bf16x2_multiply_portable(a, b);
}

GPU_DEVICE float int8_decode(uint32_t codes, int index)
{
    return int8_decode_portable(codes, index);
}

GPU_DEVICE uint32_t e4m3_encode(float x)
{
    return e4m3_encode_portable(x);
}

/* ---- shared memory; copies global -> shared go through registers and are done when they return */

using shared_at = char *;
constexpr int shared_limit = (64 << 10) - 256; /* bytes of a thread block; block_any has the rest */
constexpr int copy_stages = 1;

GPU_DEVICE shared_at shared_address(char *p)
{
    return p;
}

GPU_DEVICE void store_shared16(shared_at dst, uint4 v)
{
    *(uint4 *)dst = v;
}

/* valid false: the 16 bytes become zero and src is not read. */
GPU_DEVICE void copy16_async(shared_at dst, const void *src, bool valid)
{
    uint4 v = make_uint4(0, 0, 0, 0);
    if (valid)
        v = *(const uint4 *)src;
    *(uint4 *)dst = v;
}

/* The same for 8 or 4 bytes. */
template <int bytes> GPU_DEVICE void copy_async(shared_at dst, const void *src, bool valid)
{
    static_assert(bytes == 4 || bytes == 8, "16 bytes: copy16_async");
    if (bytes == 4)
        *(uint32_t *)dst = valid ? *(const uint32_t *)src : 0;
    else
        *(uint2 *)dst = valid ? *(const uint2 *)src : make_uint2(0, 0);
}

GPU_DEVICE void copy_commit()
{
}

template <int pending> GPU_DEVICE void copy_wait()
{
}

/* ---- matrix instructions: 16 x 16 x 16, fp32 sums. Lane l gives elements 4(l/16) .. 4(l/16) + 3
 * of row l%16 of a and of column l%16 of b, and holds rows 4(l/16) .. 4(l/16) + 3 of column l%16 of
 * c. */

template <bool is_bf16>
GPU_DEVICE void mfma_16x16x16(float (&c)[4], const uint32_t (&a)[2], const uint32_t (&b)[2])
{
#if defined(__gfx90a__) || defined(__gfx940__) || defined(__gfx941__) || defined(__gfx942__)
    using float4_t = __attribute__((ext_vector_type(4))) float;
    using half4_t = __attribute__((ext_vector_type(4))) _Float16;
    using short4_t = __attribute__((ext_vector_type(4))) short;
    uint64_t x = a[0] | (uint64_t)a[1] << 32, y = b[0] | (uint64_t)b[1] << 32;
    float4_t d = {c[0], c[1], c[2], c[3]};
    if (is_bf16)
        d = __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(__builtin_bit_cast(short4_t, x),
                                                      __builtin_bit_cast(short4_t, y), d, 0, 0, 0);
    else
        d = __builtin_amdgcn_mfma_f32_16x16x16f16(__builtin_bit_cast(half4_t, x),
                                                  __builtin_bit_cast(half4_t, y), d, 0, 0, 0);
#pragma unroll
    for (int i = 0; i < 4; ++i)
        c[i] = d[i];
#else /* the host asks for the vector kernels there */
    __builtin_trap();
#endif
}

/* ---- launches; there are no chained ones */

GPU_DEVICE void chain_wait()
{
}

GPU_DEVICE void chain_release()
{
}

/* The parameters where the launch has put them; a copy of its own would cost every thread
 * memory. */
template <class Params> GPU_DEVICE const Params &params(const Params &a)
{
    (void)a;
    return *(const Params *)__builtin_amdgcn_kernarg_segment_ptr();
}

/* Returns the runtime's error code, 0 on success. */
template <class... Params, class... Args>
int launch(void (*kernel)(Params...), dim3 grid, dim3 block, size_t shared_bytes, void *stream,
           bool chained, Args... args)
{
    (void)chained;
    kernel<<<grid, block, shared_bytes, (hipStream_t)stream>>>(args...);
    return (int)hipGetLastError();
}

/* Shared memory has its own place here. */
template <class... Params> int share_memory(void (*kernel)(Params...))
{
    (void)kernel;
    return 0;
}

/* Loads a kernel that takes so much shared memory. */
template <class... Params> int allow_shared(void (*kernel)(Params...), size_t bytes)
{
    hipFuncAttributes a;
    int code = (int)hipFuncGetAttributes(&a, (const void *)kernel);
    return code ? code
                : (int)hipFuncSetAttribute((const void *)kernel,
                                           hipFuncAttributeMaxDynamicSharedMemorySize, (int)bytes);
}

} // namespace gpu

#include "kernels/gpu/vendor/tile_mfma.h"

#endif
