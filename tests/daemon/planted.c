/* planted.c: the cpu backend as a module, of sources with a bug (CMakeLists.txt), under the name of
 * one that the daemon knows. */
#include "kernels/backend.h"

const struct backend_ops *attnd_backend_module(void);

__attribute__((visibility("default"))) const struct backend_ops *attnd_backend_module(void)
{
    static struct backend_ops ops;
    ops = *backend_cpu();
    ops.name = "hip";
    return &ops;
}
