/* decode_kernels.h: where decode_launch.cu finds the kernel for a geometry. One file a dtype
 * instantiates them (decode_bf16.cu, decode_f16.cu), so that they compile side by side.
 */
#ifndef ATTND_GPU_DECODE_KERNELS_H
#define ATTND_GPU_DECODE_KERNELS_H

#include <cuda.h>

#include "kernels/gpu/sm90/decode_params.h"

namespace decode
{

/* How a call begins; DECODE_SHORT has a kernel for each. */
enum decode_start {
    DECODE_AFTER_PREP,
    DECODE_DIRECT,
    DECODE_DIRECT_FEW, /* with at most DECODE_FEW_WORDS words of parameters */
};

/* void (*)(decode_params, decode_words, CUtensorMap), with decode_short_words for DECODE_CLUSTER,
 * DECODE_SHORT and DECODE_WIDE, and with decode_few_words for DECODE_DIRECT_FEW. */
typedef const void *kernel_fn;

/* NULL where there is none. */
kernel_fn kernel_bf16(decode_kernel kernel, uint32_t head_dim, uint32_t rows, bool has_extras,
                      decode_start start);
kernel_fn kernel_f16(decode_kernel kernel, uint32_t head_dim, uint32_t rows, bool has_extras,
                     decode_start start);

} // namespace decode
#endif
