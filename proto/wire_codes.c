/* wire_codes.c: q, k and v as codes of 8 bits. Loops without branches, over one group, that the
 * compiler makes vector code of: of steps' bytes, this is the only arithmetic on event loops.
 */
#include "proto/wire_codes.h"

#include <math.h>
#include <string.h>

#define LARGEST 448.0f /* of E4M3 */
#define LEAST 0x1p-100f
#define INLINE static inline __attribute__((always_inline))
#define SCALE_BYTES sizeof(float)

enum {
    NAN_CODE = 0x7f,
    REBIAS = (127 - 7) << 23, /* between the exponents of f32 and E4M3 */
};

INLINE float float_of(int32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

INLINE int32_t bits_of(float x)
{
    int32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

size_t wire_codes_bytes(size_t n)
{
    return n + (n + WIRE_CODES_GROUP - 1) / WIRE_CODES_GROUP * SCALE_BYTES;
}

bool wire_codes_count(size_t bytes, size_t *out_n)
{
    const size_t whole = WIRE_CODES_GROUP + SCALE_BYTES, rest = bytes % whole;
    if (rest > 0 && rest <= SCALE_BYTES)
        return false;
    *out_n = bytes / whole * WIRE_CODES_GROUP + (rest > 0 ? rest - SCALE_BYTES : 0);
    return true;
}

/* x, by its bits, is at most 448 in size, or NaN. */
INLINE int32_t code_of(int32_t bits)
{
    const int32_t size = bits & 0x7fffffff;
    /* below 2^-6 codes are 2^-9 apart, which adding 2^14 rounds to */
    const int32_t small = bits_of(float_of(size) + 0x1p14f) - 0x46800000;
    const int32_t normal = (size - REBIAS + 0x7ffff + (size >> 20 & 1)) >> 20;
    const int32_t code = size < 0x3c800000 ? small : normal;
    return (size > 0x7f800000 ? NAN_CODE : code) | (bits >> 24 & 0x80);
}

INLINE void put_group(const uint16_t group[WIRE_CODES_GROUP], float *out_scale,
                      uint8_t out_codes[WIRE_CODES_GROUP])
{
    int16_t largest = 0;
    int32_t codes[WIRE_CODES_GROUP];
    for (int i = 0; i < WIRE_CODES_GROUP; i++) {
        const int16_t size = group[i] & 0x7fff, finite = size < 0x7f80 ? size : 0;
        largest = finite > largest ? finite : largest;
    }
    const float most = float_of(largest << 16);
    const float scale = most / LARGEST, by = most < LEAST ? INFINITY : scale;
    *out_scale = most < LEAST ? 0 : scale;
    for (int i = 0; i < WIRE_CODES_GROUP; i++) {
        const int32_t bits = (int32_t)((uint32_t)group[i] << 16);
        const int32_t finite = (bits & 0x7fffffff) < 0x7f800000 ? bits : 0x7fc00000;
        codes[i] = code_of(bits_of(float_of(finite) / by));
    }
    for (int i = 0; i < WIRE_CODES_GROUP; i++)
        out_codes[i] = (uint8_t)codes[i];
}

INLINE void put(const uint16_t *bf16, size_t n, uint8_t *out)
{
    for (size_t at = 0; at < n; at += WIRE_CODES_GROUP) {
        const size_t k = n - at < WIRE_CODES_GROUP ? n - at : WIRE_CODES_GROUP;
        uint16_t group[WIRE_CODES_GROUP] = {0};
        uint8_t codes[WIRE_CODES_GROUP];
        float scale;
        memcpy(group, bf16 + at, k * sizeof *group);
        put_group(group, &scale, codes);
        memcpy(out, &scale, SCALE_BYTES);
        memcpy(out + SCALE_BYTES, codes, k);
        out += SCALE_BYTES + k;
    }
}

/* k codes, or all of a group. */
INLINE void get_group(const uint8_t *codes, size_t k, float scale, uint16_t *out_bf16)
{
    int32_t bits[WIRE_CODES_GROUP];
    uint8_t group[WIRE_CODES_GROUP] = {0};
    memcpy(group, codes, k);
    for (int i = 0; i < WIRE_CODES_GROUP; i++) {
        const int32_t size = group[i] & 0x7f, sign = (group[i] & 0x80) << 8;
        const float from_1 = float_of((size << 20) + REBIAS); /* codes below 8 have no leading 1 */
        const float below_8 = (from_1 - 0x1p-7f) * 2, x = size < 8 ? below_8 : from_1;
        const int32_t y = bits_of(x * scale), nearest = (y + 0x7fff + (y >> 16 & 1)) >> 16;
        bits[i] = (size == NAN_CODE ? 0x7fc0 : nearest) | sign;
    }
    uint16_t bf16[WIRE_CODES_GROUP];
    for (int i = 0; i < WIRE_CODES_GROUP; i++)
        bf16[i] = (uint16_t)bits[i];
    memcpy(out_bf16, bf16, k * sizeof *bf16);
}

INLINE void get(const uint8_t *codes, size_t n, uint16_t *out_bf16)
{
    for (size_t at = 0; at < n; at += WIRE_CODES_GROUP) {
        const size_t k = n - at < WIRE_CODES_GROUP ? n - at : WIRE_CODES_GROUP;
        float scale;
        memcpy(&scale, codes, SCALE_BYTES);
        codes += SCALE_BYTES;
        if (!(scale >= 0) || isinf(scale)) {
            for (size_t i = 0; i < k; i++)
                out_bf16[at + i] = 0x7fc0;
        } else {
            get_group(codes, k, scale, out_bf16 + at);
        }
        codes += k;
    }
}

/* ---- for the instructions that the processor has ---- */

#ifdef __x86_64__
#define FOR(name, instructions)                                                                    \
    __attribute__((target(instructions))) static void put_##name(const uint16_t *bf16, size_t n,   \
                                                                 uint8_t *out)                     \
    {                                                                                              \
        put(bf16, n, out);                                                                         \
    }                                                                                              \
    __attribute__((target(instructions))) static void get_##name(const uint8_t *codes, size_t n,   \
                                                                 uint16_t *out_bf16)               \
    {                                                                                              \
        get(codes, n, out_bf16);                                                                   \
    }
FOR(avx512, "avx512f,avx512bw,avx512vl,avx512dq")
FOR(avx2, "avx2")

static bool has_avx512(void)
{
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
#endif

void wire_codes_put(const uint16_t *bf16, size_t n, uint8_t *out)
{
#ifdef __x86_64__
    if (has_avx512()) {
        put_avx512(bf16, n, out);
        return;
    }
    if (__builtin_cpu_supports("avx2")) {
        put_avx2(bf16, n, out);
        return;
    }
#endif
    put(bf16, n, out);
}

void wire_codes_get(const uint8_t *codes, size_t n, uint16_t *out_bf16)
{
#ifdef __x86_64__
    if (has_avx512()) {
        get_avx512(codes, n, out_bf16);
        return;
    }
    if (__builtin_cpu_supports("avx2")) {
        get_avx2(codes, n, out_bf16);
        return;
    }
#endif
    get(codes, n, out_bf16);
}
