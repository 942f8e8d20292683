/* runtime_kept.h: what a kept graph's kernel was last given, so that a launch of the very same need
 * not say it again.
 */
#ifndef ATTND_GPU_RUNTIME_KEPT_H
#define ATTND_GPU_RUNTIME_KEPT_H

#include <string.h>

#include "kernels/gpu/vendor/launch_cuda.h"

struct kept_params {
    dim3 grid, block;
    size_t shared_bytes, arg_bytes[RUNTIME_KEPT_ARGS];
    unsigned char args[RUNTIME_KEPT_BYTES];
};

/* Notes what the kernel is given now. false: it is the very same as before. */
static inline bool kept_note(struct kept_params *k, const cudaLaunchConfig_t *c,
                             const struct runtime_args *args)
{
    bool is_new = memcmp(&k->grid, &c->gridDim, sizeof k->grid) != 0 ||
                  memcmp(&k->block, &c->blockDim, sizeof k->block) != 0 ||
                  k->shared_bytes != c->dynamicSmemBytes ||
                  memcmp(k->arg_bytes, args->bytes, sizeof k->arg_bytes) != 0;
    unsigned char *kept = k->args;
    for (int i = 0; i < RUNTIME_KEPT_ARGS; kept += args->bytes[i++]) {
        is_new = is_new || memcmp(kept, args->p[i], args->bytes[i]) != 0;
        if (is_new)
            memcpy(kept, args->p[i], args->bytes[i]);
    }
    k->grid = c->gridDim;
    k->block = c->blockDim;
    k->shared_bytes = c->dynamicSmemBytes;
    memcpy(k->arg_bytes, args->bytes, sizeof k->arg_bytes);
    return is_new;
}

#endif
