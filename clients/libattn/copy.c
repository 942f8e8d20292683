/* copy.c: see copy.h. */
#include "clients/libattn/copy.h"

#include <stdint.h>
#include <string.h>

#ifdef __x86_64__
#include <emmintrin.h>
#endif

void copy_streamed(void *dst, const void *src, size_t bytes)
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
