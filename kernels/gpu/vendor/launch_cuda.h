/* launch_cuda.h: the one way a kernel is launched; for CUDA sources only.
 */
#ifndef ATTND_GPU_LAUNCH_CUDA_H
#define ATTND_GPU_LAUNCH_CUDA_H

#include <cuda_runtime.h>

#include "kernels/gpu/vendor/runtime.h"

#ifdef __cplusplus
extern "C" {
#endif

/* c without its stream. args: one pointer a parameter, read before it returns. Gives the runtime's
 * code. */
int runtime_launch(runtime_stream *s, const void *kernel, cudaLaunchConfig_t *c, void **args);

/* Has the kernel, as the calling thread's device runs it, the instructions by which one waits for
 * the kernel before it? Code for devices before sm_90 has none, also where a later one runs it:
 * such kernels must not be launched to begin early. */
int runtime_can_chain(const void *kernel);

#define RUNTIME_KEPT_ARGS 3
#define RUNTIME_KEPT_BYTES 1536
struct runtime_args {
    void *p[RUNTIME_KEPT_ARGS];
    size_t bytes[RUNTIME_KEPT_ARGS]; /* that count; together RUNTIME_KEPT_BYTES at most */
};
/* As a graph of this kernel alone, which the stream keeps: less of the host's time where the
 * parameters are few (docs/kernels.md, "Around the kernels"). is_early: nothing is
 * launched; if the kernel's next launch on this stream is the very same, it takes less time. */
int runtime_launch_kept(runtime_stream *s, const void *kernel, cudaLaunchConfig_t *c,
                        struct runtime_args *args, int is_early);

#ifdef __cplusplus
}
#endif
#endif
