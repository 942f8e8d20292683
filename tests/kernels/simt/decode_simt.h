/* decode_simt.h: the tests' spelling of decode_ptx.cuh, decode_wgmma.cuh and prefill_wgmma.cuh:
 * sm_90 as sm90.h models it.
 * Before it, the functions of CUDA C++ that only the tuned kernels use.
 */
#ifndef ATTND_TESTS_DECODE_SIMT_H
#define ATTND_TESTS_DECODE_SIMT_H

#include "tests/kernels/simt/gpu_simt.h"
#include "tests/kernels/simt/sm90.h"

template <class T> T __ldg(const T *p)
{
    return *p;
}

template <class T> T __ldcg(const T *p)
{
    return *p;
}

template <class T> void __stcg(T *p, T v)
{
    *p = v;
}

static inline int __clz(uint32_t x)
{
    return x ? __builtin_clz(x) : 32;
}

/* x / y by the device's approximation, which gives 0 for a y above 2^126. */
static inline float __fdividef(float x, float y)
{
    return fabsf(y) > 0x1p126f && !std::isinf(y) ? x * 0.0f : x / y;
}

namespace simt
{

struct vote {
    uint32_t in, from;
    uint32_t *out;
};

} // namespace simt

static inline bool __any_sync(uint32_t, bool v)
{
    uint32_t out;
    simt::vote mine = {v, 0, &out};
    simt::meet("a vote", &mine, [](const void *const *votes, int n) {
        uint32_t any = 0;
        for (int i = 0; i < n; i++)
            any |= ((const simt::vote *)votes[i])->in;
        for (int i = 0; i < n; i++)
            *((const simt::vote *)votes[i])->out = any;
    });
    return out != 0;
}

static inline uint32_t __shfl_sync(uint32_t, uint32_t v, uint32_t from)
{
    uint32_t out;
    simt::vote mine = {v, from, &out};
    simt::meet("an indexed shuffle", &mine, [](const void *const *votes, int n) {
        for (int i = 0; i < n; i++) {
            const simt::vote *x = (const simt::vote *)votes[i];
            *x->out = ((const simt::vote *)votes[x->from % n])->in;
        }
    });
    return out;
}

static inline float __shfl_sync(uint32_t mask, float v, uint32_t from)
{
    uint32_t bits;
    memcpy(&bits, &v, sizeof bits);
    bits = __shfl_sync(mask, bits, from);
    memcpy(&v, &bits, sizeof v);
    return v;
}

namespace decode
{

using simt::barrier_init;
using simt::barrier_init_fence;
using simt::barrier_wait;
using simt::cluster_arrive;
using simt::cluster_sync;
using simt::cluster_wait;
using simt::proxy_fence;
using simt::proxy_fence_all;

static inline void map_copy(uint32_t dst, const CUtensorMap *map, uint32_t bar, uint32_t row,
                            uint32_t part, uint32_t block)
{
    simt::map_copy(dst, map, bar, {0, row, 0, part, block});
}

static inline void barrier_expect(uint32_t bar, uint32_t bytes)
{
    simt::barrier_arrive(bar, bytes);
}

static inline void barrier_arrive(uint32_t bar)
{
    simt::barrier_arrive(bar, 0);
}

template <class T> T shared_load(uint32_t at)
{
    T v;
    memcpy(&v, simt::shared_pointer(at, sizeof v), sizeof v);
    return v;
}

static inline uint4 shared_load16(uint32_t at)
{
    return shared_load<uint4>(at);
}

static inline uint2 shared_load8(uint32_t at)
{
    return shared_load<uint2>(at);
}

static inline uint16_t shared_load2(uint32_t at)
{
    return shared_load<uint16_t>(at);
}

static inline void shared_store16(uint32_t at, uint4 v)
{
    simt::shared_store(at, &v, sizeof v);
}

static inline void shared_store4(uint32_t at, uint32_t v)
{
    simt::shared_store(at, &v, sizeof v);
}

static inline void shared_store2(uint32_t at, uint16_t v)
{
    simt::shared_store(at, &v, sizeof v);
}

/* All lanes meet; which is elected is not said: here the last. */
static inline bool elect_one()
{
    bool is_it = false;
    simt::meet("an election", &is_it,
               [](const void *const *lanes, int n) { *(bool *)lanes[n - 1] = true; });
    return is_it;
}

static inline void copies_wait()
{
    simt::copy_wait(-1);
}

template <int id, int n> bool sync_some_any(bool x)
{
    return simt::wait_at(&simt::current->home->some[id], n, "a barrier of some warps", 0, x);
}

template <int id, int n> void sync_some()
{
    sync_some_any<id, n>(false);
}

static inline uint32_t arrive_at(uint32_t *counter)
{
    return atomicAdd(counter, 1);
}

static inline void prefetch_line(uint64_t)
{
}

static inline void map_prefetch(const CUtensorMap *)
{
}

static inline void bulk_copy(uint32_t dst, const void *src, uint32_t bytes, uint32_t bar)
{
    simt::async_copy(dst, src, bytes, bar, nullptr);
}

static inline uint32_t cluster_size()
{
    return (uint32_t)simt::blocks.size();
}

static inline uint32_t cluster_rank()
{
    return (uint32_t)simt::current->home->rank;
}

static inline uint32_t cluster_address(uint32_t address, uint32_t rank)
{
    return address | (rank + 1) << 24;
}

static inline void cluster_store4(uint32_t dst, float4 v, uint32_t bar)
{
    simt::async_copy(dst, nullptr, sizeof v, bar, &v);
}

static inline void cluster_store2(uint32_t dst, float a, float b, uint32_t bar)
{
    float2 v = {a, b};
    simt::async_copy(dst, nullptr, sizeof v, bar, &v);
}

static inline uint32_t keep(uint32_t x)
{
    return x;
}

template <bool is_bf16> uint32_t multiply2(uint32_t a, uint32_t b)
{
    const auto decode = [](uint32_t x) {
        return is_bf16 ? gpu::bf16_decode(x & 0xffff) : gpu::f16_decode(x & 0xffff);
    };
    const float lo = decode(a) * decode(b), hi = decode(a >> 16) * decode(b >> 16);
    return is_bf16 ? gpu::bf16_encode2(lo, hi) : gpu::f16_encode2(lo, hi);
}

static inline uint32_t transpose8(uint32_t v)
{
    uint32_t out;
    simt::vote mine = {v, 0, &out};
    simt::meet("a transposition", &mine, [](const void *const *votes, int n) {
        auto at = [&](int row, int column) {
            uint32_t w = ((const simt::vote *)votes[row * 4 + column / 2])->in;
            return w >> (column % 2 * 16) & 0xffff;
        };
        for (int l = 0; l < n; l++)
            *((const simt::vote *)votes[l])->out = at(l % 4 * 2, l / 4) | at(l % 4 * 2 + 1, l / 4)
                                                                              << 16;
    });
    return out;
}

/* ---- decode_wgmma.cuh */

static inline void wgmma_fence()
{
    simt::multiply_fence();
}

template <int n> void wgmma_finish(float (&)[n])
{
    simt::multiply_commit();
    simt::multiply_wait(0);
}

template <bool is_bf16, int n> void wgmma_scores(float (&d)[n], uint64_t a, uint64_t b, bool add)
{
    simt::multiply({d, 2 * n, is_bf16, false, add, a, b, {}, nullptr, 0, {}});
}

template <bool is_bf16, int n> void wgmma_values(float (&d)[n], const uint32_t (&a)[4], uint64_t b)
{
    simt::multiply({d, 2 * n, is_bf16, true, true, 0, b, {a[0], a[1], a[2], a[3]}, a, 0, {}});
}

template <int n> void fewer_registers()
{
}

template <int n> void more_registers()
{
}

} // namespace decode

/* ---- prefill_wgmma.cuh */

namespace prefill
{

static inline void map_copy(uint32_t dst, const CUtensorMap *map, uint32_t bar, uint32_t element,
                            uint32_t row, uint32_t layer, uint32_t block)
{
    simt::map_copy(dst, map, bar, {element, row, layer, block, 0});
}

static inline void barrier_some_arrive(uint32_t id, uint32_t n)
{
    simt::arrive_at(&simt::current->home->some[id], (int)n);
}

static inline void barrier_some_wait(uint32_t id, uint32_t n)
{
    simt::wait_at(&simt::current->home->some[id], (int)n, "a warpgroup's turn", 0, false);
}

static inline void wgmma_commit()
{
    simt::multiply_commit();
}

template <int n> void settle_here(float (&)[n])
{
}

template <int pending, int n> void wgmma_wait(float (&)[n])
{
    simt::multiply_wait(pending);
}

/* ---- latent_wgmma.cuh */

static inline bool barrier_test(uint32_t bar, uint32_t phase)
{
    return simt::barrier_test(bar, phase);
}

static inline void wgmma_wait_for_older()
{
    simt::multiply_wait(1);
}

template <bool is_bf16, int n>
void wgmma_scores_by(float (&d)[n], const uint32_t (&a)[4], uint64_t b, bool add)
{
    simt::multiply({d, 2 * n, is_bf16, false, add, 0, b, {a[0], a[1], a[2], a[3]}, a, 0, {}});
}

template <bool is_bf16, int n> void wgmma_scores_of(float (&d)[n], uint64_t a, uint64_t b)
{
    simt::multiply({d, 2 * n, is_bf16, false, true, a, b, {}, nullptr, 0, {}});
}

template <bool is_bf16, int n> void wgmma_sums(float (&d)[n], uint64_t a, uint64_t b)
{
    simt::multiply({d, 2 * n, is_bf16, true, true, a, b, {}, nullptr, 0, {}});
}

} // namespace prefill
#endif
