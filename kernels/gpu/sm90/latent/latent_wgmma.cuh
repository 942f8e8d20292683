/* latent_wgmma.cuh: the products that latent_body.cuh needs besides those of prefill_wgmma.cuh,
 * whose words it uses.
 *
 *   wgmma_scores_by   48 columns; A in registers, B in shared memory, its inner dimension
 *                     contiguous
 *   wgmma_scores_of   the same, A in shared memory, too
 *   wgmma_sums        256 columns, added; A and B in shared memory, B's columns contiguous
 */
#ifndef ATTND_GPU_LATENT_WGMMA_CUH
#define ATTND_GPU_LATENT_WGMMA_CUH

#include "kernels/gpu/sm90/prefill_wgmma.cuh"

#ifndef ATTND_DECODE_SPELLING

namespace prefill
{

/* Has the barrier's phase ended? */
GPU_DEVICE bool barrier_test(uint32_t bar, uint32_t phase)
{
    uint32_t has_ended;
    asm volatile("{\n"
                 ".reg .pred p;\n"
                 "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                 "selp.u32 %0, 1, 0, p;\n"
                 "}"
                 : "=r"(has_ended)
                 : "r"(bar), "r"(phase)
                 : "memory");
    return has_ended != 0;
}

/* All groups but the newest are made; their sums go into the newest, too, and are not looked at. */
GPU_DEVICE void wgmma_wait_for_older()
{
    asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
}

// clang-format off
#define TEN(tens) "%" #tens "0, %" #tens "1, %" #tens "2, %" #tens "3, %" #tens "4, " \
                  "%" #tens "5, %" #tens "6, %" #tens "7, %" #tens "8, %" #tens "9, "
#define SUMS8(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), \
                 "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define SUMS32(i) SUMS8(i), SUMS8(i + 8), SUMS8(i + 16), SUMS8(i + 24)

#define SCORES_BY(type) \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %29, 0;\n" \
        "wgmma.mma_async.sync.aligned.m64n48k16.f32." type "." type " {" \
        TEN() TEN(1) "%20, %21, %22, %23}, {%24, %25, %26, %27}, %28, p, 1, 1, 0;\n}" \
        : SUMS8(0), SUMS8(8), SUMS8(16) \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)add))

template <bool is_bf16>
GPU_DEVICE void wgmma_scores_by(float (&d)[24], const uint32_t (&a)[4], uint64_t b, bool add)
{
    if (is_bf16)
        SCORES_BY("bf16");
    else
        SCORES_BY("f16");
}

#define SCORES_OF(type) \
    asm volatile("wgmma.mma_async.sync.aligned.m64n48k16.f32." type "." type " {" \
        TEN() TEN(1) "%20, %21, %22, %23}, %24, %25, 1, 1, 1, 0, 0;" \
        : SUMS8(0), SUMS8(8), SUMS8(16) : "l"(a), "l"(b))

template <bool is_bf16> GPU_DEVICE void wgmma_scores_of(float (&d)[24], uint64_t a, uint64_t b)
{
    if (is_bf16)
        SCORES_OF("bf16");
    else
        SCORES_OF("f16");
}

#define SUMS(type) \
    asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32." type "." type " {" \
        TEN() TEN(1) TEN(2) TEN(3) TEN(4) TEN(5) TEN(6) TEN(7) TEN(8) TEN(9) TEN(10) TEN(11) \
        "%120, %121, %122, %123, %124, %125, %126, %127}, %128, %129, 1, 1, 1, 0, 1;" \
        : SUMS32(0), SUMS32(32), SUMS32(64), SUMS32(96) : "l"(a), "l"(b))

template <bool is_bf16> GPU_DEVICE void wgmma_sums(float (&d)[128], uint64_t a, uint64_t b)
{
    if (is_bf16)
        SUMS("bf16");
    else
        SUMS("f16");
}

#undef TEN
#undef SUMS8
#undef SUMS32
#undef SCORES_BY
#undef SCORES_OF
#undef SUMS
// clang-format on

} // namespace prefill
#endif

namespace prefill
{

/* 64 rows of 16 elements one after the other: pieces of 16 bytes lie as 32-byte swizzle has them,
 * the two of rows 4 to 7 of each eight in turned order. */
GPU_DEVICE uint64_t weights_matrix(uint32_t address)
{
    return (uint64_t)((address & 0x3ffff) >> 4) | 1ull << 16 | (uint64_t)(256 >> 4) << 32 |
           3ull << 62;
}

} // namespace prefill
#endif
