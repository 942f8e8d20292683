/* runtime_cuda.h: the one way a kernel is launched; for CUDA sources only.
 */
#ifndef ATTND_GPU_RUNTIME_CUDA_H
#define ATTND_GPU_RUNTIME_CUDA_H

#include <cuda_runtime.h>

#include "kernels/gpu/vendor/runtime.h"

#ifdef __cplusplus
extern "C" {
#endif

/* c without its stream. args: one pointer a parameter, read before it returns. is_graph: as a graph
 * of this kernel alone, which the stream keeps: less of the host's time where the parameters are
 * few (docs/kernels.md, "Short batches are one launch"). Gives the runtime's code. */
int runtime_launch(runtime_stream *s, const void *kernel, cudaLaunchConfig_t *c, void **args,
                   int is_graph);

#ifdef __cplusplus
}
#endif
#endif
