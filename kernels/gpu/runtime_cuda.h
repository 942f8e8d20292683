/* runtime_cuda.h: the one way a kernel is launched; for CUDA sources only.
 */
#ifndef ATTND_GPU_RUNTIME_CUDA_H
#define ATTND_GPU_RUNTIME_CUDA_H

#include <cuda_runtime.h>

#include "kernels/gpu/runtime.h"

#ifdef __cplusplus
extern "C" {
#endif

/* c without its stream. args: one pointer a parameter, read before it returns. is_graph: as a graph of this kernel
 * alone, which the stream keeps; with a kilobyte of parameters that takes the host 2.5 us instead of 3.5 to 4.5
 * and gains nothing with more. Gives the runtime's code. */
int runtime_launch(runtime_stream *s, const void *kernel, cudaLaunchConfig_t *c, void **args,
                   int is_graph);

#ifdef __cplusplus
}
#endif
#endif
