/* cuda.h: stands for CUDA's header where the tuned kernels are built for the executor: the little
 * of the driver's and the runtime's interface that decode_launch.cu uses. cuda_simt.cpp has the
 * functions.
 */
#ifndef ATTND_TESTS_SIMT_CUDA_H
#define ATTND_TESTS_SIMT_CUDA_H

#include "tests/kernels/simt/simt.h"

typedef uint32_t cuuint32_t;
typedef uint64_t cuuint64_t;

struct alignas(64) CUtensorMap {
    uint64_t opaque[16];
};

/* What cuTensorMapEncodeTiled here puts into one. */
constexpr uint32_t tensor_map_magic = 0x50414d54;
struct tensor_map {
    uint32_t magic, box[5];
    const char *base;
    uint64_t dims[5], strides[4]; /* strides: bytes, of dimensions 1 to 4 */
};
static_assert(sizeof(tensor_map) <= sizeof(CUtensorMap), "fits");

enum CUresult { CUDA_SUCCESS = 0, CUDA_ERROR_INVALID_VALUE = 1 };
enum CUtensorMapDataType { CU_TENSOR_MAP_DATA_TYPE_FLOAT16, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 };
enum CUtensorMapInterleave { CU_TENSOR_MAP_INTERLEAVE_NONE };
enum CUtensorMapSwizzle { CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_SWIZZLE_128B };
enum CUtensorMapL2promotion { CU_TENSOR_MAP_L2_PROMOTION_NONE };
enum CUtensorMapFloatOOBfill { CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE };
typedef CUresult (*PFN_cuTensorMapEncodeTiled_v12000)(
    CUtensorMap *, CUtensorMapDataType, cuuint32_t rank, void *base, const cuuint64_t *dims,
    const cuuint64_t *strides, const cuuint32_t *box, const cuuint32_t *steps,
    CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

enum cudaError_t {
    cudaSuccess = 0,
    cudaErrorInvalidValue = 1,
    cudaErrorInvalidDeviceFunction = 98,
    cudaErrorNotSupported = 801
};
enum cudaDriverEntryPointQueryResult { cudaDriverEntryPointSuccess };
enum { cudaEnableDefault = 0 };
enum cudaMemcpyKind { cudaMemcpyDeviceToHost = 2 };
enum cudaDeviceAttr { cudaDevAttrMaxSharedMemoryPerBlockOptin };
enum cudaFuncAttribute {
    cudaFuncAttributeMaxDynamicSharedMemorySize,
    cudaFuncAttributeNonPortableClusterSizeAllowed
};
enum cudaLaunchAttributeID {
    cudaLaunchAttributeClusterDimension,
    cudaLaunchAttributeProgrammaticStreamSerialization
};
struct cudaLaunchAttribute {
    cudaLaunchAttributeID id;
    struct {
        struct {
            unsigned x, y, z;
        } clusterDim;
        int programmaticStreamSerializationAllowed;
    } val;
};
struct cudaLaunchConfig_t {
    dim3 gridDim, blockDim;
    size_t dynamicSmemBytes;
    cudaLaunchAttribute *attrs;
    unsigned numAttrs;
};

cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **out_function,
                                             unsigned version, unsigned long long flags,
                                             cudaDriverEntryPointQueryResult *out_found);
cudaError_t cudaMemcpy(void *dst, const void *src, size_t bytes, cudaMemcpyKind);
cudaError_t cudaGetDevice(int *out_device);
cudaError_t cudaDeviceGetAttribute(int *out_value, cudaDeviceAttr, int device);
cudaError_t cudaFuncSetAttribute(const void *kernel, cudaFuncAttribute, int value);

#endif
