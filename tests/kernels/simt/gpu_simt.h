/* gpu_simt.h: the tests' spelling of gpu.h: kernels run on the host by simt.h, warps of SIMT_WIDTH
 * lanes, matrix instructions emulated by their documented lane layout: CUDA's of mma.sync and
 * ldmatrix at 32 lanes, CDNA's of mfma at 64.
 */
#ifndef ATTND_TESTS_GPU_SIMT_H
#define ATTND_TESTS_GPU_SIMT_H

#include "tests/kernels/simt/simt.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#define GPU_DEVICE inline
#define GPU_PARAM(type, name) const type &name
#define GPU_SHARED(type, name) type *const name = (type *)simt::shared()
#define GPU_SHARED_1024(type, name)                                                                \
    type *const name = (type *)((char *)simt::shared() +                                           \
                                (1024 - simt::shared_address(simt::shared()) % 1024) % 1024)
#define __global__ static
#define __device__
#define __shared__ static
#define __launch_bounds__(...)
#define threadIdx (simt::current->index)
#define blockIdx (simt::current->home->index)
#define blockDim simt::block_dim
#define gridDim simt::grid_dim
#define __syncthreads() ((void)simt::barrier(__LINE__, false))

using std::isfinite;
using std::max;
using std::min;

struct alignas(8) uint2 {
    uint32_t x, y;
};
struct alignas(16) uint4 {
    uint32_t x, y, z, w;
};
struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};

static inline uint2 make_uint2(uint32_t x, uint32_t y)
{
    return {x, y};
}

static inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w)
{
    return {x, y, z, w};
}

static inline float2 make_float2(float x, float y)
{
    return {x, y};
}

static inline float4 make_float4(float x, float y, float z, float w)
{
    return {x, y, z, w};
}

static inline uint32_t __float_as_uint(float x)
{
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    return u;
}

static inline float __uint_as_float(uint32_t u)
{
    float x;
    memcpy(&x, &u, sizeof x);
    return x;
}

static inline int __float2int_rn(float x)
{
    return (int)lrintf(x);
}

static inline float __fmaf_rn(float a, float b, float c)
{
    return fmaf(a, b, c);
}

static inline float __fmul_rn(float a, float b)
{
    return a * b;
}

/* Byte i of the result is byte (selector >> 4i & 7) of b:a. */
static inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t selector)
{
    uint64_t both = (uint64_t)b << 32 | a;
    uint32_t r = 0;
    for (int i = 0; i < 4; i++)
        r |= (uint32_t)(both >> ((selector >> (4 * i) & 7) * 8) & 0xff) << (8 * i);
    return r;
}

static inline void __threadfence_system()
{
}

static inline void __threadfence()
{
}

static inline uint32_t atomicAdd(uint32_t *p, uint32_t v)
{
    uint32_t before = *p;
    *p += v;
    return before;
}

#include "kernels/gpu/number.h"
#include "proto/attn_time.h"

namespace simt
{

/* Gives work to a stream (runtime_simt.cpp). A runtime's error code. */
int enqueue(void *stream, std::function<void()> work);

} // namespace simt

namespace gpu
{

constexpr int warp_width = SIMT_WIDTH;

static inline void nothing(const void *const *, int)
{
}

GPU_DEVICE void sync_warp()
{
    simt::meet("a warp barrier", nullptr, nothing);
}

struct shuffle_argument {
    float in, *out;
    int mask;
};

static inline void shuffle_all(const void *const *arguments, int n)
{
    for (int i = 0; i < n; ++i) {
        const shuffle_argument *a = (const shuffle_argument *)arguments[i];
        int from = i ^ a->mask;
        *a->out = from < n ? ((const shuffle_argument *)arguments[from])->in : NAN;
    }
}

GPU_DEVICE float shuffle_xor(float v, int mask)
{
    float out;
    shuffle_argument a = {v, &out, mask};
    simt::meet("a shuffle", &a, shuffle_all);
    return out;
}

struct any_argument {
    bool in, *out;
};

static inline void any_all(const void *const *arguments, int n)
{
    bool any = false;
    for (int i = 0; i < n; ++i)
        any |= ((const any_argument *)arguments[i])->in;
    for (int i = 0; i < n; ++i)
        *((const any_argument *)arguments[i])->out = any;
}

GPU_DEVICE bool warp_any(bool v)
{
    bool out;
    any_argument a = {v, &out};
    simt::meet("a vote", &a, any_all);
    return out;
}

#define block_any(v) simt::barrier(__LINE__, v)

GPU_DEVICE float exp2_fast(float x)
{
    return exp2f(x);
}

GPU_DEVICE float log2_fast(float x)
{
    return log2f(x);
}

/* Reads it, so that the address has to be one. */
GPU_DEVICE void prefetch(const void *p)
{
    (void)*(const volatile char *)p;
}

GPU_DEVICE uint64_t time_ns()
{
    return attn_now_ns();
}

/* ---- element conversions */

GPU_DEVICE float f16_decode(uint32_t bits)
{
    uint32_t sign = (bits & 0x8000) << 16, exponent = bits >> 10 & 31, mantissa = bits & 0x3ff;
    if (exponent == 31)
        return __uint_as_float(sign | 0x7f800000 | mantissa << 13);
    if (exponent == 0)
        return copysignf((float)mantissa * 0x1p-24f, __uint_as_float(sign | 0x3f800000));
    return __uint_as_float(sign | (exponent + 112) << 23 | mantissa << 13);
}

GPU_DEVICE uint32_t f16_encode(float x)
{
    uint32_t u = __float_as_uint(x), sign = u >> 16 & 0x8000;
    u &= 0x7fffffff;
    if (u > 0x7f800000)
        return sign | 0x7e00;
    if (u >= 0x477ff000) /* 65520 and more */
        return sign | 0x7c00;
    if (u < 0x38800000) /* below 2^-14: multiples of 2^-24 */
        return sign | (uint32_t)lrintf(__uint_as_float(u) * 0x1p24f);
    u += 0xfff + (u >> 13 & 1);
    return sign | ((u >> 13) - (112 << 10));
}

GPU_DEVICE uint32_t bf16_encode2(float lo, float hi)
{
    return bf16_encode_portable(lo) | bf16_encode_portable(hi) << 16;
}

GPU_DEVICE uint32_t f16_encode2(float lo, float hi)
{
    return f16_encode(lo) | f16_encode(hi) << 16;
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

template <bool odd> GPU_DEVICE uint32_t e4m3_apart_to_bf16x2(uint32_t codes)
{
    return e4m3_apart_to_bf16x2_portable<odd>(codes);
}

template <bool odd> GPU_DEVICE uint32_t int8_apart_to_bf16x2(uint32_t codes)
{
    return int8_apart_to_bf16x2_portable<odd>(codes);
}

GPU_DEVICE float int8_decode(uint32_t codes, int index)
{
    return int8_decode_portable(codes, index);
}

GPU_DEVICE uint32_t e4m3_encode(float x)
{
    return e4m3_encode_portable(x);
}

/* ---- shared memory and copies into it. At 32 lanes copies are asynchronous: what a thread asked
 * for arrives when it waits, as late as the device may do it. */

constexpr int shared_limit = SIMT_WIDTH == 32 ? 99 << 10 : (64 << 10) - 256; /* as the vendors */

#if SIMT_WIDTH == 32
using shared_at = uint32_t;

GPU_DEVICE shared_at shared_address(const void *p)
{
    return simt::shared_address(p);
}

static inline char *pointer_of(shared_at at, uint32_t bytes)
{
    return simt::shared_pointer(at, bytes);
}
#else
using shared_at = char *;

GPU_DEVICE shared_at shared_address(char *p)
{
    return p;
}

static inline char *pointer_of(shared_at at, uint32_t)
{
    return at;
}
#endif

GPU_DEVICE void store_shared16(shared_at dst, uint4 v)
{
    *(uint4 *)pointer_of(dst, 16) = v;
}

#if SIMT_WIDTH == 32
constexpr int copy_stages = 2;

GPU_DEVICE void copy16_async(shared_at dst, const void *src, bool valid)
{
    simt::copy(pointer_of(dst, 16), valid ? src : nullptr, 16);
}

template <int bytes> GPU_DEVICE void copy_async(shared_at dst, const void *src, bool valid)
{
    simt::copy(pointer_of(dst, bytes), valid ? src : nullptr, bytes);
}

GPU_DEVICE void copy_commit()
{
    simt::copy_commit();
}

template <int pending> GPU_DEVICE void copy_wait()
{
    simt::copy_wait(pending);
}
#else
constexpr int copy_stages = 1;

GPU_DEVICE void copy16_async(shared_at dst, const void *src, bool valid)
{
    store_shared16(dst, valid ? *(const uint4 *)src : uint4{0, 0, 0, 0});
}

template <int bytes> GPU_DEVICE void copy_async(shared_at dst, const void *src, bool valid)
{
    if (valid)
        memcpy(pointer_of(dst, bytes), src, bytes);
    else
        memset(pointer_of(dst, bytes), 0, bytes);
}

GPU_DEVICE void copy_commit()
{
}

template <int pending> GPU_DEVICE void copy_wait()
{
}
#endif

/* ---- matrix instructions */

template <bool is_bf16> float element(const uint32_t *words, int i)
{
    uint32_t bits = words[i / 2] >> (i % 2 * 16) & 0xffff;
    return is_bf16 ? bf16_decode(bits) : f16_decode(bits);
}

struct product_argument {
    const uint32_t *a, *b;
    float *c;
};

#if SIMT_WIDTH == 32
/* Eight columns of a product at once: each element's sum goes over k in the order it always had. */
typedef float columns8 __attribute__((vector_size(32)));

/* c of a product of 16 rows and 8 columns, whose elements lie with the lanes as m16n8 has them. */
template <int K>
void multiply_16x8(const void *const *arguments, const float (&a)[16][K], const columns8 (&b)[K])
{
    for (int row = 0; row < 16; ++row) {
        const void *const *lanes = arguments + row % 8 * 4;
        columns8 sum;
        for (int i = 0; i < 8; ++i)
            sum[i] = ((const product_argument *)lanes[i / 2])->c[row / 8 * 2 + i % 2];
        for (int k = 0; k < K; ++k)
            sum += a[row][k] * b[k];
        for (int i = 0; i < 8; ++i)
            ((const product_argument *)lanes[i / 2])->c[row / 8 * 2 + i % 2] = sum[i];
    }
}

/* mma.sync m16n8k16: lane l has of a the rows l/4 (words 0, 2) and l/4 + 8 (words 1, 3), elements
 * 2(l%4) and up of the first 8 (words 0, 1) and the last 8 (words 2, 3); of b column l/4, elements
 * 2(l%4) and up of the first 8 (word 0) and the last (word 1); of c rows l/4 and l/4 + 8, columns
 * 2(l%4) and up. */
template <bool is_bf16> void mma_all(const void *const *arguments, int n)
{
    float a[16][16];
    columns8 b[16];
    for (int l = 0; l < n; ++l) {
        const product_argument *x = (const product_argument *)arguments[l];
        for (int w = 0; w < 4; ++w)
            for (int i = 0; i < 2; ++i)
                a[l / 4 + w % 2 * 8][l % 4 * 2 + w / 2 * 8 + i] = element<is_bf16>(x->a + w, i);
        for (int w = 0; w < 2; ++w)
            for (int i = 0; i < 2; ++i)
                b[l % 4 * 2 + w * 8 + i][l / 4] = element<is_bf16>(x->b + w, i);
    }
    multiply_16x8(arguments, a, b);
}

template <bool is_bf16>
GPU_DEVICE void mma_16816(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
    uint32_t b[2] = {b0, b1};
    product_argument x = {a, b, c};
    simt::meet(is_bf16 ? "mma of bf16" : "mma of f16", &x, mma_all<is_bf16>);
}

/* m16n8k8 of tf32, the operands as gpu_cuda.h says. */
inline void mma_tf32_all(const void *const *arguments, int n)
{
    float a[16][8];
    columns8 b[8];
    auto value = [](uint32_t bits) { return __uint_as_float(bits & 0xffffe000); };
    for (int l = 0; l < n; ++l) {
        const product_argument *x = (const product_argument *)arguments[l];
        for (int w = 0; w < 4; ++w)
            a[l / 4 + w % 2 * 8][l % 4 + w / 2 * 4] = value(x->a[w]);
        for (int w = 0; w < 2; ++w)
            b[l % 4 + w * 4][l / 4] = value(x->b[w]);
    }
    multiply_16x8(arguments, a, b);
}

GPU_DEVICE void mma_1688_tf32(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
    uint32_t b[2] = {b0, b1};
    product_argument x = {a, b, c};
    simt::meet("mma of tf32", &x, mma_tf32_all);
}

struct load_argument {
    const char *address;
    uint32_t *words;
};

/* ldmatrix x4: lane l names row l%8 of matrix l/8; word m of lane l is elements 2(l%4) and 2(l%4) +
 * 1 of row l/4 of matrix m, transposed: of column l/4. */
template <bool is_transposed> void load_all(const void *const *arguments, int n)
{
    auto at = [&](int m, int row, int column) {
        uint16_t e;
        memcpy(&e, ((const load_argument *)arguments[m * 8 + row])->address + column * 2, 2);
        return (uint32_t)e;
    };
    for (int l = 0; l < n; ++l)
        for (int m = 0; m < 4; ++m) {
            int i = l / 4, j = l % 4 * 2;
            ((const load_argument *)arguments[l])->words[m] =
                is_transposed ? at(m, j, i) | at(m, j + 1, i) << 16
                              : at(m, i, j) | at(m, i, j + 1) << 16;
        }
}

GPU_DEVICE void load_matrix4(uint32_t (&r)[4], shared_at address)
{
    load_argument x = {pointer_of(address, 16), r};
    simt::meet("a matrix load", &x, load_all<false>);
}

GPU_DEVICE void load_matrix4_transposed(uint32_t (&r)[4], shared_at address)
{
    load_argument x = {pointer_of(address, 16), r};
    simt::meet("a transposed matrix load", &x, load_all<true>);
}
#else
/* v_mfma_f32_16x16x16: see gpu_hip.h for the layout. */
template <bool is_bf16> void mfma_all(const void *const *arguments, int n)
{
    typedef float rows4 __attribute__((vector_size(16)));
    rows4 a[4][16]; /* a lane's four rows side by side */
    float b[16][16];
    for (int l = 0; l < n; ++l) {
        const product_argument *x = (const product_argument *)arguments[l];
        for (int i = 0; i < 4; ++i) {
            a[l % 16 / 4][l / 16 * 4 + i][l % 4] = element<is_bf16>(x->a, i);
            b[l / 16 * 4 + i][l % 16] = element<is_bf16>(x->b, i);
        }
    }
    for (int l = 0; l < n; ++l) {
        float *c = ((const product_argument *)arguments[l])->c;
        rows4 sum = {c[0], c[1], c[2], c[3]};
        for (int k = 0; k < 16; ++k)
            sum += a[l / 16][k] * b[k][l % 16];
        for (int i = 0; i < 4; ++i)
            c[i] = sum[i];
    }
}

template <bool is_bf16>
GPU_DEVICE void mfma_16x16x16(float (&c)[4], const uint32_t (&a)[2], const uint32_t (&b)[2])
{
    product_argument x = {a, b, c};
    simt::meet(is_bf16 ? "mfma of bf16" : "mfma of f16", &x, mfma_all<is_bf16>);
}
#endif

/* ---- launches: chained ones run after one another, too; simt.h sees that they wait */

GPU_DEVICE void chain_wait()
{
    simt::current->has_chain_waited = true;
}

GPU_DEVICE void chain_release()
{
}

template <class Params> GPU_DEVICE const Params &params(const Params &a)
{
    return a;
}

template <class... Params, class... Args>
int launch(void (*kernel)(Params...), dim3 grid, dim3 block, size_t shared_bytes, void *stream,
           bool chained, Args... args)
{
    simt::launch l = {grid, block, shared_bytes};
    l.is_chained = chained;
    if (shared_bytes > simt::shared_limit)
        return 1;
    return simt::enqueue(stream, [=] {
        simt::width = warp_width;
        simt::run(l, [&] { kernel(args...); });
    });
}

template <class... Params> int share_memory(void (*kernel)(Params...))
{
    (void)kernel;
    return 0;
}

template <class... Params> int allow_shared(void (*kernel)(Params...), size_t bytes)
{
    (void)kernel;
    return bytes > simt::shared_limit;
}

} // namespace gpu

#if SIMT_WIDTH == 32
#include "kernels/gpu/vendor/tile_mma.h"
#else
#include "kernels/gpu/vendor/tile_mfma.h"
#endif

#endif
