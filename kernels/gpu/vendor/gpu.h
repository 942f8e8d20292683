/* gpu.h: what differs between one vendor's device code and another's, in one place: warp width,
 * shuffles, matrix instructions, asynchronous copies, special functions, launches.
 *
 * Kernels are plain templates over these functions and hold no vendor intrinsic of their own (the
 * kernels tuned for one chip excepted, which say so). 16-bit floats travel as uint16_t bits, only
 * 32-bit values are shuffled. The functions are spelled in gpu_cuda.h, in gpu_hip.h, and by the
 * tests, whose spelling runs kernels on the host (ATTND_GPU_SPELLING names their header). A
 * spelling gives:
 *
 *     warp_width, shuffle_xor, sync_warp, *_any               warps and thread blocks
 *     exp2_fast, log2_fast, time_ns                          2^-inf is 0
 *     f16_decode, *_encode2, e4m3_*                          rounding to nearest even
 *     shared_at, shared_address, copy16_async, copy_wait     shared memory, copies into it
 *     tile_*, matrix_tile                                    16 x 16 tiles: tile_mma.h, tile_mfma.h
 *     chain_wait, chain_release, launch                      launches
 *     allow_shared, share_memory                             what a kernel asks of shared memory
 *     GPU_SHARED, GPU_PARAM, params                          dynamic shared memory, parameters
 */
#ifndef ATTND_GPU_H
#define ATTND_GPU_H

#ifdef ATTND_GPU_SPELLING
#include ATTND_GPU_SPELLING
#elif defined(__HIP__)
#include "kernels/gpu/vendor/gpu_hip.h"
#else
#include "kernels/gpu/vendor/gpu_cuda.h"
#endif

namespace gpu
{

GPU_DEVICE int lane_id()
{
    return threadIdx.x % warp_width;
}

GPU_DEVICE int warp_id()
{
    return threadIdx.x / warp_width;
}

/* Sum and maximum over groups of `width` lanes that are `step` apart, the result in every lane. */
template <int width = warp_width, int step = 1> GPU_DEVICE float warp_sum(float v)
{
#pragma unroll
    for (int d = step; d < width * step; d *= 2)
        v += shuffle_xor(v, d);
    return v;
}

template <int width = warp_width, int step = 1> GPU_DEVICE float warp_max(float v)
{
#pragma unroll
    for (int d = step; d < width * step; d *= 2)
        v = fmaxf(v, shuffle_xor(v, d));
    return v;
}

} // namespace gpu
#endif
