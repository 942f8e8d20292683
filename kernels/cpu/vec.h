/* vec.h: VEC floats at once, for the instruction set this file is compiled for. GCC's vector types
 * do the arithmetic; intrinsics stand only where an instruction has no other name.
 */
#ifndef ATTND_KERNELS_CPU_VEC_H
#define ATTND_KERNELS_CPU_VEC_H

#include "proto/attn_types.h"

#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
#include <immintrin.h>
#define VEC 16
#elif defined(__AVX2__)
#include <immintrin.h>
#define VEC 8
#else
#define VEC 4
#endif

#define VEC_TAIL (VEC < 8 ? VEC : 8) /* lanes of what is left of a multiple of 8 */

#define INLINE static inline __attribute__((always_inline))

typedef float vf __attribute__((vector_size(VEC * 4)));
typedef int32_t vi __attribute__((vector_size(VEC * 4)));
typedef uint32_t vu __attribute__((vector_size(VEC * 4)));
typedef uint16_t vh __attribute__((vector_size(VEC * 2)));
typedef int8_t vb __attribute__((vector_size(VEC)));
typedef uint8_t vub __attribute__((vector_size(VEC)));

/* attn_dtype_bytes where the compiler sees through it */
INLINE uint32_t dtype_bytes(attn_dtype d)
{
    return d == ATTN_F32 ? 4 : d == ATTN_F16 || d == ATTN_BF16 ? 2 : 1;
}

INLINE vf vf_set(float x)
{
#if defined(__AVX512F__)
    return (vf)_mm512_set1_ps(x);
#elif defined(__AVX2__)
    return (vf)_mm256_set1_ps(x);
#else
    return (vf){x, x, x, x};
#endif
}

/* c + a * b, rounded once on x86 where there is an instruction for it. Left to itself, as it is
 * elsewhere, a compiler decides that for each copy of a loop, and rows of different counts may get
 * other bits. */
INLINE vf vf_fma(vf a, vf b, vf c)
{
#if defined(__AVX512F__)
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return c + a * b;
#endif
}

INLINE vf vf_load(const float *p)
{
    vf v;
    memcpy(&v, p, sizeof v);
    return v;
}

INLINE void vf_store(float *p, vf v)
{
    memcpy(p, &v, sizeof v);
}

/* yes where the mask is all ones, else no */
INLINE vf vf_select(vi mask, vf yes, vf no)
{
    return (vf)(((vi)yes & mask) | ((vi)no & ~mask));
}

/* a where it is larger, else b; a NaN in a is ignored */
INLINE vf vf_max(vf a, vf b)
{
    return vf_select(a > b, a, b);
}

INLINE vu vu_from_u16(vh h)
{
#if defined(__AVX512F__)
    return (vu)_mm512_cvtepu16_epi32((__m256i)h);
#elif defined(__AVX2__)
    return (vu)_mm256_cvtepu16_epi32((__m128i)h);
#else
    return __builtin_convertvector(h, vu);
#endif
}

INLINE vf vf_from_i8(vb b)
{
#if defined(__AVX512F__)
    return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)b));
#elif defined(__AVX2__)
    __m128i low = _mm_loadl_epi64((const __m128i *)(const void *)&b);
    return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(low));
#else
    return __builtin_convertvector(__builtin_convertvector(b, vi), vf);
#endif
}

INLINE vh vh_from_u8(vub b)
{
#if defined(__AVX512F__)
    return (vh)_mm256_cvtepu8_epi16((__m128i)b);
#elif defined(__AVX2__)
    return (vh)_mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i *)(const void *)&b));
#else
    return __builtin_convertvector(b, vh);
#endif
}

INLINE vf vf_from_half(vh h)
{
#if defined(__AVX512F__)
    return (vf)_mm512_cvtph_ps((__m256i)h);
#elif defined(__F16C__)
    return (vf)_mm256_cvtph_ps((__m128i)h);
#else
    vu u = vu_from_u16(h);
    vf x = (vf)((u & 0x7fff) << 13) * 0x1p112f;
    vi is_special = (vi)((u & 0x7c00) == 0x7c00);
    vu bits = (vu)x | ((vu)is_special & 0x7f800000);
    return (vf)(bits | (u & 0x8000) << 16);
#endif
}

/* n (VEC or VEC_TAIL) stored elements as floats; the rest is 0. e4m3 comes divided by 256. */
INLINE vf vf_load_as(attn_dtype dtype, const void *p, int n)
{
    if (dtype == ATTN_F32) {
        vf v = {0};
        memcpy(&v, p, (size_t)n * 4);
        return v;
    }
    if (dtype == ATTN_F16 || dtype == ATTN_BF16) {
        vh h = {0};
        memcpy(&h, p, (size_t)n * 2);
        return dtype == ATTN_F16 ? vf_from_half(h) : (vf)(vu_from_u16(h) << 16);
    }
    if (dtype == ATTN_INT8) {
        vb b = {0};
        memcpy(&b, p, (size_t)n);
        return vf_from_i8(b);
    }
    vub b = {0};
    memcpy(&b, p, (size_t)n);
    vh h = vh_from_u8(b);
    return vf_from_half((h & 0x80) << 8 | (h & 0x7f) << 7);
}

/* The VEC values of E2M1 codes at p, two to a byte. */
INLINE vf vf_load_e2m1(const uint8_t *p)
{
#if VEC == 4
    static const float values[16] = {0,     0.5f,  1,  1.5f,  2,  3,  4,  6,
                                     -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};
    return (vf){values[p[0] & 15], values[p[0] >> 4], values[p[1] & 15], values[p[1] >> 4]};
#elif VEC == 8
    const vu shifts = {0, 4, 8, 12, 16, 20, 24, 28};
    const __m256 values = _mm256_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6);
    uint32_t w;
    memcpy(&w, p, sizeof w);
    const vu codes = (vu)_mm256_set1_epi32((int)w) >> shifts;
    const vu x = (vu)_mm256_permutevar8x32_ps(values, (__m256i)codes); /* by three bits */
    return (vf)(x | (codes & 8) << 28);
#else
    const vu shifts = {0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28};
    const __m512 values =
        _mm512_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6);
    uint32_t w[2];
    memcpy(w, p, sizeof w);
    const __m512i both = _mm512_mask_set1_epi32(_mm512_set1_epi32((int)w[0]), 0xff00, (int)w[1]);
    return (vf)_mm512_permutexvar_ps((__m512i)((vu)both >> shifts), values); /* by four bits */
#endif
}

/* The scale of the group of values that value d of a row is in; scales are the row's. */
INLINE float vec_group_scale(attn_dtype kv_dtype, const uint8_t *scales, uint32_t d)
{
    uint32_t bits;
    float x, of_row;
    if (kv_dtype == ATTN_NVFP4) {
        memcpy(&of_row, scales, sizeof of_row);
        bits = (uint32_t)scales[sizeof of_row + d / 16] << 20; /* E4M3, not negative */
        memcpy(&x, &bits, sizeof x);
        return x * 0x1p120f * of_row;
    }
    const uint8_t code = scales[d / 32];
    bits = code == 255 ? 0x7fc00000 : code == 0 ? 0x400000 : (uint32_t)code << 23;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* what vf_load_as leaves out */
INLINE float vec_code_unit(attn_dtype dtype)
{
    return dtype == ATTN_FP8_E4M3 ? 256.0f : 1.0f;
}

/* The memory sanitizer wants all lanes of a named instruction's operand to have been written, also
 * those that are masked later. */
#if defined(__AVX512F__) && defined(__has_feature)
#if __has_feature(memory_sanitizer)
#define VEC_IS_WATCHED 1
#endif
#endif
#if defined(__AVX512F__) && !defined(VEC_IS_WATCHED)
#define VEC_HAS_MAX 1
#else
#define VEC_HAS_MAX 0
#endif

/* 2^x for x <= 0 within 2 ulp; below -126 at most 2^-126, below -127 0; NaN stays NaN. */
INLINE vf vf_exp2(vf x)
{
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */
#if VEC_HAS_MAX
    x = (vf)_mm512_max_ps(_mm512_set1_ps(-127), (__m512)x); /* the second where it is NaN */
#endif
    vf t = x + magic;
    vf f = x - (t - magic);
    /* 2^f interpolated at Chebyshev points on [-0.5, 0.5] */
    vf p = vf_set(0.000154614449f);
    p = p * f + 0.0013400428f;
    p = p * f + 0.00961805694f;
    p = p * f + 0.0555032715f;
    p = p * f + 0.240226507f;
    p = p * f + 0.693147182f;
    p = p * f + 1.0f;
    vf r = (vf)((vu)p + ((vu)t << 23));
#if !VEC_HAS_MAX
    r = vf_select(x < -126.0f, vf_set(0), r);
#endif
    return vf_select(x != x, x, r);
}

/* tanh within 1e-7; NaN stays NaN. */
INLINE vf vf_tanh(vf x)
{
    vf a = (vf)((vi)x & 0x7fffffff);
    /* near 0: an odd polynomial; else 1 - 2 / (e^2a + 1) with e^-2a, which cannot overflow */
    vf y = x * x;
    vf p = vf_set(0.0179887451f);
    p = p * y + -0.0533871092f;
    p = p * y + 0.13330476f;
    p = p * y + -0.333333105f;
    vf small = x + x * y * p;
    vf e = vf_exp2(a * -2.885390081777927f);
    vf large = (1.0f - e) / (1.0f + e);
    large = (vf)((vi)large | ((vi)x & (int32_t)0x80000000));
    return vf_select(a < 0.5f, small, vf_select(x != x, x, large));
}

INLINE float vf_hmax(vf v)
{
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)v);
#else
    float m = v[0];
    for (int i = 1; i < VEC; i++)
        m = v[i] > m ? v[i] : m;
    return m;
#endif
}

INLINE float vf_hsum(vf v)
{
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)v);
#else
    float s[VEC];
    vf_store(s, v);
    for (int n = VEC / 2; n > 0; n /= 2)
        for (int i = 0; i < n; i++)
            s[i] += s[i + n];
    return s[0];
#endif
}

/* VEC floats rounded to nearest even and stored as dtype (f32, f16, bf16) */
INLINE void vf_store_as(attn_dtype dtype, void *p, vf v, int n)
{
    vh h;
    if (dtype == ATTN_F32) {
        memcpy(p, &v, (size_t)n * 4);
        return;
    }
    if (dtype == ATTN_BF16) {
        vu u = (vu)v;
        vu r = (u + 0x7fff + (u >> 16 & 1)) >> 16;
        vu nan = (u >> 16) | 0x40;
        vu mask = (vu)(v != v);
        h = __builtin_convertvector((r & ~mask) | (nan & mask), vh);
    } else {
#if defined(__AVX512F__)
        h = (vh)_mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT);
#elif defined(__F16C__)
        h = (vh)_mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT);
#else
        vu u = (vu)v, sign = (u >> 16) & 0x8000;
        vf a = (vf)(u & 0x7fffffff);
        /* normal: round the mantissa to 10 bits; subnormal: adding 0.5 makes the last bit 2^-24 */
        vu normal = (((vu)a + 0xfff + ((vu)a >> 13 & 1)) >> 13) - (112 << 10);
        vu subnormal = (vu)(a + 0.5f) - 0x3f000000;
        vu big = ((vu)(a != a) & 0x7e00) | (~(vu)(a != a) & 0x7c00);
        vu is_small = (vu)(a < 0x1p-14f), is_big = ~(vu)(a < 65520.0f);
        vu r = (subnormal & is_small) | (normal & ~is_small);
        h = __builtin_convertvector(((r & ~is_big) | (big & is_big)) | sign, vh);
#endif
    }
    memcpy(p, &h, (size_t)n * 2);
}

/* Reads bytes and returns something made of all of them. */
__attribute__((unused)) static uint64_t vec_read(const void *p, size_t bytes)
{
    const uint8_t *from = p;
    vi sum[4] = {0};
    for (size_t i = 0; i + 4 * sizeof(vi) <= bytes; i += 4 * sizeof(vi)) {
        vi v[4];
        memcpy(v, from + i, sizeof v);
        __builtin_prefetch(from + i + 1024, 0, 2);
        for (int j = 0; j < 4; j++)
            sum[j] ^= v[j];
    }
    vi all = sum[0] ^ sum[1] ^ sum[2] ^ sum[3];
    uint64_t x = 0;
    for (int i = 0; i < VEC; i++)
        x += (uint32_t)all[i];
    return x;
}

#endif
