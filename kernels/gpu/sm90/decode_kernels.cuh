/* decode_kernels.cuh: the useful instantiations of the decode kernels for one dtype. Included by
 * one .cu file a dtype.
 */
#ifndef ATTND_GPU_DECODE_KERNELS_CUH
#define ATTND_GPU_DECODE_KERNELS_CUH

#include "kernels/gpu/sm90/decode_kernels.h"
#include "kernels/gpu/sm90/decode_narrow.cuh"
#include "kernels/gpu/sm90/decode_runs.cuh"
#include "kernels/gpu/sm90/decode_short.cuh"
#include "kernels/gpu/sm90/decode_wide.cuh"

namespace decode
{

template <bool is_bf16, int D, int NT, bool has_extras>
kernel_fn narrow_kernel(decode_kernel kernel, decode_start start)
{
    switch (kernel) {
    case DECODE_CLUSTER:
        return (kernel_fn)decode_cluster<is_bf16, D, NT, has_extras>;
    case DECODE_SHORT:
        if constexpr (D >= 128 && !has_extras)
            return start == DECODE_AFTER_PREP
                       ? (kernel_fn)decode_short<is_bf16, D, NT, false, decode_short_words>
                   : start == DECODE_DIRECT
                       ? (kernel_fn)decode_short<is_bf16, D, NT, true, decode_short_words>
                       : (kernel_fn)decode_short<is_bf16, D, NT, true, decode_few_words>;
        return nullptr;
    case DECODE_LIST:
        if constexpr (D * NT <= 256)
            return (kernel_fn)decode_runs<is_bf16, D, NT, false, has_extras>;
        return nullptr;
    case DECODE_WARP:
        if constexpr (NT == 1 && !has_extras)
            return (kernel_fn)decode_runs<is_bf16, D, NT, true, has_extras>;
        return nullptr;
    default:
        return nullptr;
    }
}

template <bool is_bf16, bool has_extras>
kernel_fn kernel_of(decode_kernel kernel, uint32_t head_dim, uint32_t rows, decode_start start)
{
    if (kernel == DECODE_WIDE) {
        if (rows == 32 && head_dim == 256)
            return (kernel_fn)decode_wide<is_bf16, 256, 32, has_extras>;
        if (rows == 64 && head_dim == 256)
            return (kernel_fn)decode_wide<is_bf16, 256, 64, has_extras>;
        if (rows == 32 && head_dim == 128)
            return (kernel_fn)decode_wide<is_bf16, 128, 32, has_extras>;
        return rows == 64 && head_dim == 128 ? (kernel_fn)decode_wide<is_bf16, 128, 64, has_extras>
                                             : nullptr;
    }
    if (rows == 8 && head_dim == 64)
        return narrow_kernel<is_bf16, 64, 1, has_extras>(kernel, start);
    if (rows == 8 && head_dim == 128)
        return narrow_kernel<is_bf16, 128, 1, has_extras>(kernel, start);
    if (rows == 8 && head_dim == 256)
        return narrow_kernel<is_bf16, 256, 1, has_extras>(kernel, start);
    if (rows == 16 && head_dim == 64)
        return narrow_kernel<is_bf16, 64, 2, has_extras>(kernel, start);
    if (rows == 16 && head_dim == 128)
        return narrow_kernel<is_bf16, 128, 2, has_extras>(kernel, start);
    if (rows == 16 && head_dim == 256)
        return narrow_kernel<is_bf16, 256, 2, has_extras>(kernel, start);
    return nullptr;
}

} // namespace decode
#endif
