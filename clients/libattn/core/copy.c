/* copy.c: memcpy with stores that go past the cache, for messages that a device reads; and
 * conversions between f32 and bf16 as tensors are copied into messages and out of them.
 */
#include "clients/libattn/core/copy.h"

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "clients/libattn/core/core.h"

#ifdef __x86_64__
#include <emmintrin.h>
#endif

/* memcpy past the cache; a plain one where the processor is not x86-64, and if dst or bytes is not
 * a multiple of 16. */
static void copy_streamed(void *dst, const void *src, size_t bytes)
{
#ifdef __x86_64__
    if (((uintptr_t)dst | bytes) % sizeof(__m128i) == 0) {
        __m128i *d = dst;
        const __m128i_u *s = src;
        for (size_t i = 0; i < bytes / sizeof *d; i++)
            _mm_stream_si128(d + i, _mm_loadu_si128(s + i));
        return;
    }
#endif
    memcpy(dst, src, bytes);
}

void copy_fence(void)
{
#ifdef __x86_64__
    _mm_sfence();
#endif
}

void copy_to_bf16(uint16_t *dst, const float *src, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, &src[i], sizeof bits);
        uint32_t nearest = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
        bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
        dst[i] = (uint16_t)(is_nan ? bits >> 16 | 0x40 : nearest);
    }
}

void copy_from_bf16(float *dst, const uint16_t *src, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        uint32_t bits = (uint32_t)src[i] << 16;
        memcpy(&dst[i], &bits, sizeof bits);
    }
}

void attn_client_copy(const attn_client *c, void *dst, const void *src, size_t bytes)
{
    if (c != NULL && c->is_streaming)
        copy_streamed(dst, src, bytes);
    else
        memcpy(dst, src, bytes);
}
