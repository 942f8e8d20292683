/* prefill_wgmma.cuh: the instructions of sm_90a that the prefill kernels use besides those of
 * decode_ptx.cuh and decode_wgmma.cuh, which says how matrices and sums lie: products in more
 * shapes that are committed and finished in groups, barriers where some arrive and others wait, and
 * copies by a map of four dimensions.
 *
 *   wgmma_scores   128, 96 or 80 columns; A and B in shared memory, both with the inner dimension
 *                  contiguous
 *   wgmma_values   64, 128, 192 or 256 columns; A in registers, B in shared memory, its columns
 *                  contiguous
 */
#ifndef ATTND_GPU_PREFILL_WGMMA_CUH
#define ATTND_GPU_PREFILL_WGMMA_CUH

#include "kernels/gpu/sm90/decode_wgmma.cuh"

#ifndef ATTND_DECODE_SPELLING

namespace prefill
{

/* 64 elements from `element` on of tokens [row, row + box) of a layer of a block; bytes count on
 * bar. Elements behind the head dim are zero. */
GPU_DEVICE void map_copy(uint32_t dst, const CUtensorMap *map, uint32_t bar, uint32_t element,
                         uint32_t row, uint32_t layer, uint32_t block)
{
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(dst),
                 "l"(map), "r"(bar), "r"(element), "r"(row), "r"(layer), "r"(block)
                 : "memory");
}

/* Barrier `id` of the thread block, for n threads in whole warps: those that arrive and those that
 * wait. */
GPU_DEVICE void barrier_some_arrive(uint32_t id, uint32_t n)
{
    asm volatile("barrier.arrive %0, %1;" ::"r"(id), "r"(n) : "memory");
}

GPU_DEVICE void barrier_some_wait(uint32_t id, uint32_t n)
{
    asm volatile("barrier.sync %0, %1;" ::"r"(id), "r"(n) : "memory");
}

/* The products asked for so far are a group. */
GPU_DEVICE void wgmma_commit()
{
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

/* All groups but the newest `pending` are made; d, the sums of the last of them, may be read from
 * here on. */
template <int pending, int n> GPU_DEVICE void wgmma_wait(float (&d)[n])
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
#pragma unroll
    for (int i = 0; i < n; ++i)
        asm volatile("" : "+f"(d[i])::"memory");
}

/* x is computed here: left to itself the compiler moves arithmetic behind the wait that it should
 * fill. */
template <int n> GPU_DEVICE void settle_here(float (&x)[n])
{
#pragma unroll
    for (int i = 0; i < n; ++i)
        asm volatile("" : "+f"(x[i])::"memory");
}

// clang-format off
#define TEN(tens) "%" #tens "0, %" #tens "1, %" #tens "2, %" #tens "3, %" #tens "4, " \
                  "%" #tens "5, %" #tens "6, %" #tens "7, %" #tens "8, %" #tens "9, "
#define SUMS8(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), \
                 "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define SUMS32(i) SUMS8(i), SUMS8(i + 8), SUMS8(i + 16), SUMS8(i + 24)
#define TEXT32 TEN() TEN(1) TEN(2) "%30, %31"
#define TEXT40 TEN() TEN(1) TEN(2) "%30, %31, %32, %33, %34, %35, %36, %37, %38, %39"
#define TEXT48 TEN() TEN(1) TEN(2) TEN(3) "%40, %41, %42, %43, %44, %45, %46, %47"
#define TEXT64 TEN() TEN(1) TEN(2) TEN(3) TEN(4) TEN(5) "%60, %61, %62, %63"
#define TEXT96 TEN() TEN(1) TEN(2) TEN(3) TEN(4) TEN(5) TEN(6) TEN(7) TEN(8) \
               "%90, %91, %92, %93, %94, %95"
#define TEXT128 TEN() TEN(1) TEN(2) TEN(3) TEN(4) TEN(5) TEN(6) TEN(7) TEN(8) TEN(9) TEN(10) \
                TEN(11) "%120, %121, %122, %123, %124, %125, %126, %127"

#define SCORES(columns, text, a_at, b_at, add_at, ...) \
    template <bool is_bf16> \
    GPU_DEVICE void wgmma_scores(float (&d)[columns / 2], uint64_t a, uint64_t b, bool add) \
    { \
        if (is_bf16) \
            SCORES_OF("bf16", columns, text, a_at, b_at, add_at, __VA_ARGS__); \
        else \
            SCORES_OF("f16", columns, text, a_at, b_at, add_at, __VA_ARGS__); \
    }
#define SCORES_OF(type, columns, text, a_at, b_at, add_at, ...) \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " add_at ", 0;\n" \
        "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." type "." type " {" text "}, " \
        a_at ", " b_at ", p, 1, 1, 0, 0;\n}" \
        : __VA_ARGS__ : "l"(a), "l"(b), "r"((int)add))

SCORES(80, TEXT40, "%40", "%41", "%42", SUMS32(0), SUMS8(32))
SCORES(96, TEXT48, "%48", "%49", "%50", SUMS32(0), SUMS8(32), SUMS8(40))
SCORES(128, TEXT64, "%64", "%65", "%66", SUMS32(0), SUMS32(32))

#define VALUES(columns, text, a_at, b_at, ...) \
    template <bool is_bf16> \
    GPU_DEVICE void wgmma_values(float (&d)[columns / 2], const uint32_t (&a)[4], uint64_t b) \
    { \
        if (is_bf16) \
            VALUES_OF("bf16", columns, text, a_at, b_at, __VA_ARGS__); \
        else \
            VALUES_OF("f16", columns, text, a_at, b_at, __VA_ARGS__); \
    }
#define VALUES_OF(type, columns, text, a_at, b_at, ...) \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." type "." type \
        " {" text "}, {" a_at "}, " b_at ", 1, 1, 1, 1;" \
        : __VA_ARGS__ : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))

VALUES(64, TEXT32, "%32, %33, %34, %35", "%36", SUMS32(0))
VALUES(128, TEXT64, "%64, %65, %66, %67", "%68", SUMS32(0), SUMS32(32))
VALUES(192, TEXT96, "%96, %97, %98, %99", "%100", SUMS32(0), SUMS32(32), SUMS32(64))
VALUES(256, TEXT128, "%128, %129, %130, %131", "%132", SUMS32(0), SUMS32(32), SUMS32(64),
       SUMS32(96))

#undef TEN
#undef SUMS8
#undef SUMS32
#undef TEXT32
#undef TEXT40
#undef TEXT48
#undef TEXT64
#undef TEXT96
#undef TEXT128
#undef SCORES
#undef SCORES_OF
#undef VALUES
#undef VALUES_OF
// clang-format on

} // namespace prefill
#endif

namespace prefill
{

using namespace decode;

/* The low word of a matrix of 8-row groups 1024 bytes apart, and the matrix 16 * n bytes beyond it:
 * 32-bit arithmetic, for addresses do not carry. */
GPU_DEVICE uint32_t low_word(uint32_t address, uint32_t lbo)
{
    return (uint32_t)wgmma_matrix(address, lbo, 1024);
}

GPU_DEVICE uint64_t beyond(uint32_t low, uint32_t n)
{
    return wgmma_matrix(0, 0, 1024) | (low + n);
}

} // namespace prefill
#endif
