/* attn_half.h: f16 and bf16 as f32 and back, for host code of either side of the wire. To nearest,
 * ties to even; a NaN stays one. Integers only where it can be, so that rows are converted in
 * vectors.
 */
#ifndef ATTN_HALF_H
#define ATTN_HALF_H

#include <stdint.h>
#include <string.h>

static inline float attn_f32_of_bits(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static inline uint32_t attn_bits_of_f32(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline float attn_f32_of_bf16(uint16_t h)
{
    return attn_f32_of_bits((uint32_t)h << 16);
}

static inline uint16_t attn_bf16_of_f32(float x)
{
    const uint32_t bits = attn_bits_of_f32(x);
    const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16, nan = bits >> 16 | 0x40;
    return (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? nan : rounded);
}

static inline float attn_f32_of_f16(uint16_t h)
{
    const uint32_t sign = (uint32_t)(h & 0x8000) << 16, rest = h & 0x7fff;
    if (rest < 0x400) /* below 2^-14: multiples of 2^-24 */
        return sign != 0 ? -(float)rest * 0x1p-24f : (float)rest * 0x1p-24f;
    const uint32_t top = rest >= 0x7c00 ? 0x7f800000 - (0x7c00 << 13) : 112u << 23;
    return attn_f32_of_bits(sign | ((rest << 13) + top));
}

static inline uint16_t attn_f16_of_f32(float x)
{
    const uint16_t sign = (uint16_t)(attn_bits_of_f32(x) >> 16 & 0x8000);
    const uint32_t bits = attn_bits_of_f32(x) & 0x7fffffff;
    if (bits > 0x7f800000)
        return sign | 0x7e00;
    if (bits >= 0x477ff000) /* 65520 and more */
        return sign | 0x7c00;
    if (bits < 0x38800000) /* adding 0.5 rounds to multiples of 2^-24 */
        return (uint16_t)(sign | (attn_bits_of_f32(attn_f32_of_bits(bits) + 0.5f) -
                                  attn_bits_of_f32(0.5f)));
    return (uint16_t)(sign | (((bits + 0xfff + (bits >> 13 & 1)) >> 13) - (112u << 10)));
}

#endif
