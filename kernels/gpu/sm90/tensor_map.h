/* tensor_map.h: descriptors by which the tuned kernels ask for boxes of a pool's memory.
 */
#ifndef ATTND_GPU_TENSOR_MAP_H
#define ATTND_GPU_TENSOR_MAP_H

#include <cuda_runtime.h>
#include <string.h>

#include <cudaTypedefs.h>

#include "kernels/gpu/params.h"

/* Writes the map of the n-dimensional array of f16 or bf16 (as the pool's q) at `base`, of which a
 * copy brings `box`: dims and box in elements, strides in bytes, of all dimensions but the first.
 * The box's first dimension is 128 bytes, swizzled; what lies outside of the array reads as 0.
 * out_map: 128 bytes. Gives the runtime's code. */
static inline int tensor_map_make(const struct gpu_kv *kv, const char *base, uint32_t n,
                                  const cuuint64_t *dims, const cuuint64_t *strides,
                                  const cuuint32_t *box, uint64_t *out_map)
{
    PFN_cuTensorMapEncodeTiled_v12000 encode = NULL;
    cudaDriverEntryPointQueryResult found;
    cudaError_t e = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", (void **)&encode,
                                                     12000, cudaEnableDefault, &found);
    if (e != cudaSuccess || encode == NULL)
        return e != cudaSuccess ? (int)e : (int)cudaErrorNotSupported;
    const cuuint32_t steps[5] = {1, 1, 1, 1, 1};
    CUtensorMap map;
    if (encode(&map,
               kv->q_dtype == ATTN_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                        : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
               n, (void *)base, dims, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
               CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_NONE,
               CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) != CUDA_SUCCESS)
        return (int)cudaErrorInvalidValue;
    static_assert(sizeof map == 128, "a tensor map is 128 bytes");
    memcpy(out_map, &map, sizeof map);
    return 0;
}

#endif
