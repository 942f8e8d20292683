/* decode_wgmma.cuh: the warpgroup matrix instructions of decode_wide, 64 rows, fp32 sums.
 *
 *   wgmma_scores   64 columns; A and B in shared memory, both with the inner dimension contiguous
 *   wgmma_values   128 or 256 columns; A in registers, B in shared memory, its columns contiguous
 *
 * Lane 4g + t of warp w holds rows 16w + g (elements 0, 1 of each four) and 16w + g + 8 (2, 3),
 * columns 8j + 2t and the next, at d[4j ...]. So the scores of 16 tokens, two a word, are the A of
 * their values.
 */
#ifndef ATTND_GPU_DECODE_WGMMA_CUH
#define ATTND_GPU_DECODE_WGMMA_CUH

#include "kernels/gpu/sm90/decode_ptx.cuh"

namespace decode
{

/* A matrix in shared memory with 128-byte swizzle: lbo and sbo are the byte strides between slabs
 * of 64 contiguous elements and between groups of 8 rows. */
GPU_DEVICE uint64_t wgmma_matrix(uint32_t address, uint32_t lbo, uint32_t sbo)
{
    return (uint64_t)((address & 0x3ffff) >> 4) | (uint64_t)(lbo >> 4) << 16 |
           (uint64_t)(sbo >> 4) << 32 | 1ull << 62;
}

#ifndef ATTND_DECODE_SPELLING

/* The warpgroup's threads have n registers each from now on: fewer, or more when others gave some
 * up. */
template <int n> GPU_DEVICE void fewer_registers()
{
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(n));
}

template <int n> GPU_DEVICE void more_registers()
{
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(n));
}

GPU_DEVICE void wgmma_fence()
{
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

/* The products asked for are made; d, their sums, may be read from here on. */
template <int n> GPU_DEVICE void wgmma_finish(float (&d)[n])
{
    asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
    for (int i = 0; i < n; ++i)
        asm volatile("" : "+f"(d[i])::"memory");
}

// clang-format off
#define TEN(tens) "%" #tens "0, %" #tens "1, %" #tens "2, %" #tens "3, %" #tens "4, " \
                  "%" #tens "5, %" #tens "6, %" #tens "7, %" #tens "8, %" #tens "9, "
#define SUMS8(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), \
                 "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define SUMS32(i) SUMS8(i), SUMS8(i + 8), SUMS8(i + 16), SUMS8(i + 24)

#define SCORES(type) \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n" \
        "wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type " {" \
        TEN() TEN(1) TEN(2) "%30, %31}, %32, %33, p, 1, 1, 0, 0;\n}" \
        : SUMS32(0) : "l"(a), "l"(b), "r"((int)add))

template <bool is_bf16>
GPU_DEVICE void wgmma_scores(float (&d)[32], uint64_t a, uint64_t b, bool add)
{
    if (is_bf16)
        SCORES("bf16");
    else
        SCORES("f16");
}

#define VALUES64(type) \
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type " {" \
        TEN() TEN(1) TEN(2) TEN(3) TEN(4) TEN(5) "%60, %61, %62, %63}, " \
        "{%64, %65, %66, %67}, %68, 1, 1, 1, 1;" \
        : SUMS32(0), SUMS32(32) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))

template <bool is_bf16>
GPU_DEVICE void wgmma_values(float (&d)[64], const uint32_t (&a)[4], uint64_t b)
{
    if (is_bf16)
        VALUES64("bf16");
    else
        VALUES64("f16");
}

#define VALUES128(type) \
    asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32." type "." type " {" \
        TEN() TEN(1) TEN(2) TEN(3) TEN(4) TEN(5) TEN(6) TEN(7) TEN(8) TEN(9) TEN(10) TEN(11) \
        "%120, %121, %122, %123, %124, %125, %126, %127}, " \
        "{%128, %129, %130, %131}, %132, 1, 1, 1, 1;" \
        : SUMS32(0), SUMS32(32), SUMS32(64), SUMS32(96) \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))

template <bool is_bf16>
GPU_DEVICE void wgmma_values(float (&d)[128], const uint32_t (&a)[4], uint64_t b)
{
    if (is_bf16)
        VALUES128("bf16");
    else
        VALUES128("f16");
}

#undef TEN
#undef SUMS8
#undef SUMS32
#undef SCORES
#undef VALUES64
#undef VALUES128
// clang-format on

#endif

} // namespace decode
#endif
