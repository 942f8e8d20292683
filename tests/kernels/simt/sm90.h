/* sm90.h: what decode_simt.h's functions do: the asynchronous side of sm_90, on simt.h's fibers.
 *
 * Barriers    8 bytes of shared memory: arrivals and bytes that a phase waits for, as mbarrier
 *             counts them. Nothing but barrier_init makes one; others may use it after the maker's
 *             fence.
 * Copies      (bulk, tensor map, to the cluster) arrive when no thread can run, oldest first (order
 *             0) or newest first (2), or as soon as they are asked for (1). A block that has left
 *             gets none.
 * Two views   copies and wgmma see shared memory through block.shared_async: ordinary stores come
 *             there with the storing thread's proxy fence, and a copy over a store without one is
 *             an error.
 * wgmma       products are asked for after a fence and made, in order, when the four warps wait for
 *             their group, from the matrices that descriptors name (128-byte swizzle, A also of 32)
 *             and by the documented layout. Until then nobody may have changed their registers.
 *
 * Not seen: stores by plain C++ (no kernel lets copies or wgmma read those), the order of stores to
 * device memory between clusters (they run one after another), what a compiler moves, timing, and
 * lanes that leave a warp's instruction to others, where the emulation needs no meeting.
 */
#ifndef ATTND_TESTS_SM90_H
#define ATTND_TESTS_SM90_H

#include "tests/kernels/simt/cuda/cuda.h"
#include "tests/kernels/simt/simt.h"

namespace simt
{

void barrier_init(uint32_t bar, uint32_t count);
void barrier_init_fence();
void barrier_arrive(uint32_t bar, uint32_t expected_bytes);
void barrier_wait(uint32_t bar, uint32_t phase);
bool barrier_test(uint32_t bar, uint32_t phase);

void shared_store(uint32_t at, const void *bytes, uint32_t n);
void proxy_fence();
void proxy_fence_all();

/* data: 8 or 16 bytes for another block, or nullptr: from src */
void async_copy(uint32_t dst, const void *src, uint32_t bytes, uint32_t bar, const void *data);
/* at: coordinates, of as many dimensions as the map has, then zeroes */
void map_copy(uint32_t dst, const CUtensorMap *map, uint32_t bar, const uint64_t (&at)[5]);
/* For a launch of the tuned kernels. */
bool deliver_copy();

void cluster_sync();

void multiply_fence();
/* p: all but group and sums. A product may have changed neither d nor A's registers when it is
 * made. */
void multiply(product p);
void multiply_commit();
void multiply_wait(uint32_t pending);

} // namespace simt
#endif
