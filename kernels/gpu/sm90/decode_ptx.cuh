/* decode_ptx.cuh: the sm_90 instructions of the decode kernels: transaction barriers, tensor-map
 * copies, clusters. The only kernels that name them are decode_*; what every GPU has is in gpu.h.
 * Shared memory is named by 32-bit addresses. The tests spell these functions for the host
 * (ATTND_DECODE_SPELLING names their header, which stands for the assembly of decode_wgmma.cuh,
 * too).
 */
#ifndef ATTND_GPU_DECODE_PTX_CUH
#define ATTND_GPU_DECODE_PTX_CUH

#include <cuda.h>

#include "kernels/gpu/sm90/decode_params.h"
#include "kernels/gpu/vendor/gpu.h"

#ifdef ATTND_DECODE_SPELLING
#include ATTND_DECODE_SPELLING
#else
namespace decode
{

/* One lane of a warp whose lanes are all here. For copies: where the condition is a lane's number,
 * the compiler makes a loop over lanes around each. */
GPU_DEVICE bool elect_one()
{
    uint32_t is_it;
    asm volatile("{\n"
                 ".reg .pred p;\n"
                 "elect.sync _|p, 0xffffffff;\n"
                 "selp.u32 %0, 1, 0, p;\n"
                 "}"
                 : "=r"(is_it));
    return is_it != 0;
}

GPU_DEVICE void barrier_init(uint32_t bar, uint32_t count)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}

/* Makes this thread's barrier_init visible to copies and to the cluster. */
GPU_DEVICE void barrier_init_fence()
{
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

/* Arrives, and adds bytes to what the barrier's phase waits for. */
GPU_DEVICE void barrier_expect(uint32_t bar, uint32_t bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes)
                 : "memory");
}

GPU_DEVICE void barrier_arrive(uint32_t bar)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}

GPU_DEVICE void barrier_wait(uint32_t bar, uint32_t phase)
{
    asm volatile("{\n"
                 ".reg .pred p;\n"
                 "again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
                 "@!p bra again;\n"
                 "}" ::"r"(bar),
                 "r"(phase)
                 : "memory");
}

GPU_DEVICE uint4 shared_load16(uint32_t at)
{
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(at)
                 : "memory");
    return v;
}

GPU_DEVICE void shared_store16(uint32_t at, uint4 v)
{
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(v.x), "r"(v.y), "r"(v.z),
                 "r"(v.w)
                 : "memory");
}

GPU_DEVICE uint2 shared_load8(uint32_t at)
{
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(at) : "memory");
    return v;
}

GPU_DEVICE void shared_store4(uint32_t at, uint32_t v)
{
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(v) : "memory");
}

GPU_DEVICE uint16_t shared_load2(uint32_t at)
{
    uint16_t v;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(at) : "memory");
    return v;
}

GPU_DEVICE void shared_store2(uint32_t at, uint16_t v)
{
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(at), "h"(v) : "memory");
}

/* All that this thread has asked for by gpu::copy16_async has arrived. */
GPU_DEVICE void copies_wait()
{
    asm volatile("cp.async.wait_all;" ::: "memory");
}

/* Adds one; what this block has written is seen by who adds later, and what those before wrote by
 * this one. */
GPU_DEVICE uint32_t arrive_at(uint32_t *counter)
{
    uint32_t before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;"
                 : "=r"(before)
                 : "l"(counter)
                 : "memory");
    return before;
}

/* The 128 bytes at an address in device memory, to L2. */
GPU_DEVICE void prefetch_line(uint64_t address)
{
    asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

/* Barrier `id` of the thread block, for n threads in whole warps. `bar.sync` would demand that all
 * threads of the block come to the same instruction; here loaders and those that compute meet from
 * different ones. */
template <int id, int n> GPU_DEVICE void sync_some()
{
    asm volatile("barrier.sync %0, %1;" ::"n"(id), "n"(n) : "memory");
}

/* The same; is x true in one of them? */
template <int id, int n> GPU_DEVICE bool sync_some_any(bool x)
{
    uint32_t any;
    asm volatile("{\n"
                 ".reg .pred p, q;\n"
                 "setp.ne.u32 p, %1, 0;\n"
                 "barrier.red.or.pred q, %2, %3, p;\n"
                 "selp.u32 %0, 1, 0, q;\n"
                 "}"
                 : "=r"(any)
                 : "r"((uint32_t)x), "n"(id), "n"(n)
                 : "memory");
    return any;
}

/* Orders this thread's ordinary accesses to shared memory with later copies and wgmma. */
GPU_DEVICE void proxy_fence()
{
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/* The same for memory of every kind. */
GPU_DEVICE void proxy_fence_all()
{
    asm volatile("fence.proxy.async;" ::: "memory");
}

GPU_DEVICE void map_prefetch(const CUtensorMap *map)
{
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

/* K (part 0) and what follows it in the box (K and V of map16, K alone of the others), or V (part
 * 1), of tokens [row, row + box) of one block and head; bytes count on bar. */
GPU_DEVICE void map_copy(uint32_t dst, const CUtensorMap *map, uint32_t bar, uint32_t row,
                         uint32_t part, uint32_t block)
{
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4, %3, %5, %6}], [%2];" ::"r"(dst),
                 "l"(map), "r"(bar), "r"(0), "r"(row), "r"(part), "r"(block)
                 : "memory");
}

/* bytes (a multiple of 16) of device memory; they count on bar. */
GPU_DEVICE void bulk_copy(uint32_t dst, const void *src, uint32_t bytes, uint32_t bar)
{
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1], %2, [%3];" ::"r"(dst),
                 "l"(src), "r"(bytes), "r"(bar)
                 : "memory");
}

/* ---- clusters */

GPU_DEVICE uint32_t cluster_size()
{
    uint32_t n;
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(n));
    return n;
}

GPU_DEVICE uint32_t cluster_rank()
{
    uint32_t r;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
    return r;
}

/* Arrives and waits: what the cluster's threads wrote before is visible to them after. */
GPU_DEVICE void cluster_sync()
{
    asm volatile("barrier.cluster.arrive.release.aligned;\n"
                 "barrier.cluster.wait.acquire.aligned;" ::
                     : "memory");
}

GPU_DEVICE void cluster_arrive()
{
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

GPU_DEVICE void cluster_wait()
{
    asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
}

/* The address of this thread block's shared address in block `rank` of the cluster. */
GPU_DEVICE uint32_t cluster_address(uint32_t address, uint32_t rank)
{
    uint32_t r;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(address), "r"(rank));
    return r;
}

/* Stores into another block's shared memory; the bytes count on the barrier there. */
GPU_DEVICE void cluster_store4(uint32_t dst, float4 v, uint32_t bar)
{
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 "
                 "[%0], {%1, %2, %3, %4}, [%5];" ::"r"(dst),
                 "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(bar)
                 : "memory");
}

GPU_DEVICE void cluster_store2(uint32_t dst, float a, float b, uint32_t bar)
{
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 "
                 "[%0], {%1, %2}, [%3];" ::"r"(dst),
                 "f"(a), "f"(b), "r"(bar)
                 : "memory");
}

/* ---- registers */

/* Transposes an 8 x 8 matrix of 16-bit elements held as an MMA result, two a lane. */
GPU_DEVICE uint32_t transpose8(uint32_t v)
{
    uint32_t r;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(v));
    return r;
}

/* x, which the compiler cannot compute again: left to itself it does so with addresses, in the
 * innermost loop. */
GPU_DEVICE uint32_t keep(uint32_t x)
{
    uint32_t r;
    asm volatile("shfl.sync.idx.b32 %0, %1, %2, 0x1f, 0xffffffff;"
                 : "=r"(r)
                 : "r"(x), "r"(gpu::lane_id()));
    return r;
}

/* Two numbers a word times two. */
template <bool is_bf16> GPU_DEVICE uint32_t multiply2(uint32_t a, uint32_t b)
{
    uint32_t r;
    if (is_bf16)
        asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    else
        asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}

} // namespace decode
#endif

namespace decode
{

template <bool is_bf16> GPU_DEVICE uint32_t encode2(float lo, float hi)
{
    return is_bf16 ? gpu::bf16_encode2(lo, hi) : gpu::f16_encode2(lo, hi);
}

/* The maximum of a row that has seen no key, and a sink logit that is not there. */
constexpr float nothing = -1e30f;

} // namespace decode
#endif
