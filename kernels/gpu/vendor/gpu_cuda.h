/* gpu_cuda.h: the CUDA spelling of gpu.h; only gpu.h includes it. */
#ifndef ATTND_GPU_CUDA_H
#define ATTND_GPU_CUDA_H

#include <cuda_runtime.h>
#include <stdint.h>
#include <type_traits>

#include "kernels/gpu/vendor/launch_cuda.h"

#define GPU_DEVICE __device__ __forceinline__
#define GPU_PARAM(type, name) const __grid_constant__ type name
#define GPU_SHARED(type, name) extern __shared__ __align__(128) type name[]
/* From a multiple of 1024 on, at an address that the compiler knows: what lies there takes no
 * registers. */
#define GPU_SHARED_1024(type, name) extern __shared__ __align__(1024) type name[]

#include "kernels/gpu/number.h"

namespace gpu
{

constexpr int warp_width = 32;

GPU_DEVICE void sync_warp()
{
    __syncwarp();
}

GPU_DEVICE float shuffle_xor(float v, int mask)
{
    return __shfl_xor_sync(~0u, v, mask);
}

/* Is v true in any lane? */
GPU_DEVICE bool warp_any(bool v)
{
    return __any_sync(~0u, v);
}

/* Is v true in any thread of the block? A barrier. */
GPU_DEVICE bool block_any(bool v)
{
    return __syncthreads_or(v);
}

/* ---- special functions: 2^x, log2 x; 2^-inf is 0 */

GPU_DEVICE float exp2_fast(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

GPU_DEVICE float log2_fast(float x)
{
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* What is at p is wanted soon. */
GPU_DEVICE void prefetch(const void *p)
{
    asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}

GPU_DEVICE uint64_t time_ns()
{
    uint64_t t;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
    return t;
}

/* ---- element conversions; encoding rounds to nearest even */

GPU_DEVICE float f16_decode(uint32_t bits)
{
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"((uint16_t)bits));
    return f;
}

/* Two values in one word, lo in the low half. */
GPU_DEVICE uint32_t bf16_encode2(float lo, float hi)
{
    uint32_t r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
    return r;
}

GPU_DEVICE uint32_t f16_encode2(float lo, float hi)
{
    uint32_t r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
    return r;
}

/* Two e4m3 codes of a word's low half. Exact. */
GPU_DEVICE void e4m3_decode2(uint32_t codes, float &lo, float &hi)
{
#if __CUDA_ARCH__ >= 890
    uint32_t h;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(h) : "h"((uint16_t)codes));
    lo = f16_decode(h & 0xffff);
    hi = f16_decode(h >> 16);
#else
    e4m3_decode2_portable(codes, lo, hi);
#endif
}

/* Two e4m3 codes of a word, bytes 2 * pair and 2 * pair + 1, as bf16. Exact; the NaN code reads as
 * 480 (no quantiser here stores it). The code's bits in a bf16's place have an exponent that is 120
 * too small; conversions proper would take a quarter of the rate. */
template <int pair> GPU_DEVICE uint32_t e4m3_to_bf16x2(uint32_t codes)
{
    uint32_t w = __byte_perm(codes, 0, pair ? 0x3424 : 0x1404), r;
    w = (w & 0x80008000) | (w & 0x7f007f00) >> 4;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(w), "r"(0x7b807b80), "r"(0x80008000));
    return r;
}

/* As bf16x2_multiply_portable: subnormal numbers are not flushed. */
GPU_DEVICE uint32_t bf16x2_multiply(uint32_t a, uint32_t b)
{
    uint32_t x;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(x) : "r"(a), "r"(b), "r"(0x80008000)); /* + -0 */
    return x;
}

/* Bytes `odd` and `odd` + 2 of a word, as e4m3_to_bf16x2 has them: no byte changes its half. */
template <bool odd> GPU_DEVICE uint32_t e4m3_apart_to_bf16x2(uint32_t codes)
{
    const uint32_t w = odd ? (codes & 0x80008000) | (codes >> 4 & 0x07f007f0)
                           : (codes << 8 & 0x80008000) | (codes << 4 & 0x07f007f0);
    return bf16x2_multiply(w, 0x7b807b80);
}

/* The same of int8. Exact: 128 + the low 7 bits, and -128 or -256. */
template <bool odd> GPU_DEVICE uint32_t int8_apart_to_bf16x2(uint32_t codes)
{
    const uint32_t c = odd ? codes >> 8 : codes;
    const uint32_t low = (c & 0x007f007f) | 0x43004300, sign = (c & 0x00800080) | 0xc300c300;
    uint32_t x;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(x) : "r"(low), "r"(0x3f803f80), "r"(sign));
    return x;
}

/* Byte `index` of four int8 codes. Exact: the byte becomes the low bits of 2^23 + 128 + code. */
GPU_DEVICE float int8_decode(uint32_t codes, int index)
{
    return __uint_as_float(__byte_perm(codes ^ 0x80808080, 0x4b000000, 0x7440 + index)) -
           8388736.0f;
}

/* One value, saturating at 448. */
GPU_DEVICE uint32_t e4m3_encode(float x)
{
#if __CUDA_ARCH__ >= 890
    uint16_t r;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(0.0f), "f"(x));
    return r & 0xff;
#else
    return e4m3_encode_portable(x);
#endif
}

/* ---- shared memory by its own addresses; asynchronous copies global -> shared, 16 bytes a
 * thread */

using shared_at = uint32_t;
/* Bytes of a thread block on every card from sm_80 on: sm_86, sm_89 and sm_120 have no more. What
 * takes more where a card has it looks for itself (attend_rows.cuh, sm90). */
constexpr int shared_limit = 99 << 10;
constexpr int copy_stages = 2; /* copies run beside arithmetic: a second buffer pays */

GPU_DEVICE shared_at shared_address(const void *p)
{
    return (uint32_t)__cvta_generic_to_shared(p);
}

GPU_DEVICE void store_shared16(shared_at dst, uint4 v)
{
    asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(dst), "r"(v.x), "r"(v.y), "r"(v.z),
                 "r"(v.w)
                 : "memory");
}

/* valid false: the 16 bytes become zero and src is not read (it must still be a mapped address). */
GPU_DEVICE void copy16_async(shared_at dst, const void *src, bool valid)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src),
                 "r"(valid ? 16 : 0)
                 : "memory");
}

/* The same for 8 or 4 bytes. */
template <int bytes> GPU_DEVICE void copy_async(shared_at dst, const void *src, bool valid)
{
    static_assert(bytes == 4 || bytes == 8, "16 bytes: copy16_async");
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(dst), "l"(src), "n"(bytes),
                 "r"(valid ? bytes : 0)
                 : "memory");
}

GPU_DEVICE void copy_commit()
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}

/* All but the newest `pending` groups of this thread have arrived. */
template <int pending> GPU_DEVICE void copy_wait()
{
    asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

/* ---- matrix instructions: 16 x 8 x 16, fp32 sums. Lane l of the result holds rows l/4 and l/4 +
 * 8, columns 2(l%4) and 2(l%4) + 1: c[0], c[1] of the upper row, c[2], c[3] of the lower. */

template <bool is_bf16>
GPU_DEVICE void mma_16816(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
    if (is_bf16)
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},"
                     "{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    else
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},"
                     "{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* The same, 16 x 8 x 8, of tf32: f32 whose low 13 bits are not looked at. Lane 4g + t has a of rows
 * g, g + 8, g, g + 8 and inner indices t, t, t + 4, t + 4, b of column g, inner t and t + 4. */
GPU_DEVICE void mma_1688_tf32(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3},"
                 "{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* Four 8 x 8 matrices of 16-bit elements; lane l gives the address of row l%8 of matrix l/8. */
GPU_DEVICE void load_matrix4(uint32_t (&r)[4], shared_at address)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

GPU_DEVICE void load_matrix4_transposed(uint32_t (&r)[4], shared_at address)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

} // namespace gpu

#include "kernels/gpu/vendor/tile_mma.h"

namespace gpu
{

/* ---- chained launches: a kernel launched `chained` may start while the one before it still runs.
 * It must call chain_wait() in every thread block before it touches what earlier kernels write;
 * the earlier kernel calls chain_release() once it no longer minds company. */

GPU_DEVICE void chain_wait()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

GPU_DEVICE void chain_release()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/* A kernel's parameters where the launch has put them. */
template <class Params> GPU_DEVICE const Params &params(const Params &a)
{
    return a;
}

/* Returns the runtime's error code, 0 on success. */
template <class... Params>
int launch(void (*kernel)(Params...), dim3 grid, dim3 block, size_t shared_bytes, void *stream,
           bool chained, std::remove_const_t<Params>... args)
{
    void *pointers[] = {(void *)&args...};
    cudaLaunchConfig_t c = {};
    c.gridDim = grid;
    c.blockDim = block;
    c.dynamicSmemBytes = shared_bytes;
    cudaLaunchAttribute a = {};
    a.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    a.val.programmaticStreamSerializationAllowed = 1;
    c.attrs = &a;
    c.numAttrs = chained && runtime_can_chain((const void *)kernel) ? 1 : 0;
    return runtime_launch((runtime_stream *)stream, (const void *)kernel, &c, pointers);
}

/* Lets a kernel run on processors whose memory is nearly all shared memory, as others want it. */
template <class... Params> int share_memory(void (*kernel)(Params...))
{
    return (int)cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                     cudaSharedmemCarveoutMaxShared);
}

/* Lets a kernel take more shared memory than the default 48 KiB. */
template <class... Params> int allow_shared(void (*kernel)(Params...), size_t bytes)
{
    return (int)cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                     (int)bytes);
}

} // namespace gpu
#endif
