/* number.h: element conversions in plain arithmetic, for devices that have no instruction for them.
 * Encoding rounds to nearest even. Included by the spellings of gpu.h, which define GPU_DEVICE.
 */
#ifndef ATTND_GPU_NUMBER_H
#define ATTND_GPU_NUMBER_H

#include <stdint.h>

namespace gpu
{

GPU_DEVICE float f16_decode(uint32_t bits); /* the spelling's */

GPU_DEVICE float bf16_decode(uint32_t bits)
{
    return __uint_as_float(bits << 16);
}

GPU_DEVICE uint32_t bf16_encode_portable(float x)
{
    uint32_t u = __float_as_uint(x);
    if ((u & 0x7fffffff) > 0x7f800000) /* rounding could make a NaN an infinity */
        return u >> 16 | 0x40;
    return (u + 0x7fff + (u >> 16 & 1)) >> 16;
}

/* Two e4m3 codes of a word's low half: sign and 7 bits moved into an f16's place have an exponent
 * that is 8 too small. Exact but for the code of NaN, which no append writes. */
GPU_DEVICE void e4m3_decode2_portable(uint32_t codes, float &lo, float &hi)
{
    lo = f16_decode((codes & 0x80) << 8 | (codes & 0x7f) << 7) * 256.0f;
    hi = f16_decode((codes & 0x8000) | (codes & 0x7f00) >> 1) * 256.0f;
}

/* Two e4m3 codes of a word, bytes 2 * pair and 2 * pair + 1, as bf16. */
template <int pair> GPU_DEVICE uint32_t e4m3_to_bf16x2_portable(uint32_t codes)
{
    float lo, hi;
    e4m3_decode2_portable(codes >> (16 * pair), lo, hi);
    return __float_as_uint(lo) >> 16 | (__float_as_uint(hi) & 0xffff0000);
}

/* Bytes `odd` and `odd` + 2 of a word of e4m3 codes, as bf16. */
template <bool odd> GPU_DEVICE uint32_t e4m3_apart_to_bf16x2_portable(uint32_t codes)
{
    codes >>= odd ? 8 : 0;
    return e4m3_to_bf16x2_portable<0>((codes & 0xff) | (codes >> 8 & 0xff00));
}

/* The same of int8. */
template <bool odd> GPU_DEVICE uint32_t int8_apart_to_bf16x2_portable(uint32_t codes)
{
    codes >>= odd ? 8 : 0;
    const float lo = (float)(int8_t)(codes & 0xff), hi = (float)(int8_t)(codes >> 16 & 0xff);
    return __float_as_uint(lo) >> 16 | (__float_as_uint(hi) & 0xffff0000);
}

/* Byte `index` of four int8 codes. */
GPU_DEVICE float int8_decode_portable(uint32_t codes, int index)
{
    return (float)(int8_t)(codes >> (8 * index) & 0xff);
}

/* Products of the bf16 in the low and in the high half, that a bf16 holds exactly. */
GPU_DEVICE uint32_t bf16x2_multiply_portable(uint32_t a, uint32_t b)
{
    const uint32_t lo = __float_as_uint(bf16_decode(a & 0xffff) * bf16_decode(b & 0xffff));
    const uint32_t hi = __float_as_uint(bf16_decode(a >> 16) * bf16_decode(b >> 16));
    return lo >> 16 | (hi & 0xffff0000);
}

/* An E2M1 code, of the low four bits. */
GPU_DEVICE float e2m1_decode(uint32_t code)
{
    return __uint_as_float((code & 8) << 28 | (code & 7) << 22) * 0x1p126f;
}

/* The code that is nearest, of two the even one. */
GPU_DEVICE uint32_t e2m1_encode(float x)
{
    const float a = fabsf(x);
    return (__float_as_uint(x) >> 28 & 8) + (a > 0.25f) + (a >= 0.75f) + (a > 1.25f) +
           (a >= 1.75f) + (a > 2.5f) + (a >= 3.5f) + (a > 5.0f);
}

/* Scales of groups of such codes: with them values are finite, whatever the codes are. That a row
 * reads as NaN is said elsewhere (row_scale). */
GPU_DEVICE float e4m3_scale_decode(uint32_t code)
{
    return __uint_as_float((code & 0x7f) << 20) * 0x1p120f;
}

GPU_DEVICE float e8m0_decode(uint32_t code)
{
    return __uint_as_float(code == 0 ? 0x400000 : code > 252 ? 0 : code << 23);
}

/* One value, saturating at 448. */
GPU_DEVICE uint32_t e4m3_encode_portable(float x)
{
    uint32_t sign = __float_as_uint(x) >> 24 & 0x80;
    float a = fminf(fabsf(x), 448.0f);
    if (a < 0.015625f) /* subnormal: multiples of 2^-9; 8 of them are the first normal */
        return sign | (uint32_t)__float2int_rn(a * 512.0f);
    uint32_t u = __float_as_uint(a);
    u += 0x7ffff + (u >> 20 & 1); /* 3 mantissa bits stay */
    return sign | ((u >> 20) - (120 << 3));
}

} // namespace gpu
#endif
