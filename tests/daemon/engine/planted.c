/* planted.c: the cpu backend as a module, of sources with a bug (CMakeLists.txt), under the name of
 * one that the daemon knows. As a card's driver does, it says what its memory can give. */
#include "kernels/backend.h"

const struct backend_ops *attnd_backend_module(void);

static void info_with_bandwidth(const struct backend *b, struct backend_info *out)
{
    backend_cpu()->info(b, out);
    out->memory_bytes_per_s = UINT64_C(50000000000);
}

__attribute__((visibility("default"))) const struct backend_ops *attnd_backend_module(void)
{
    static struct backend_ops ops;
    ops = *backend_cpu();
    ops.name = "hip";
    ops.info = info_with_bandwidth;
    return &ops;
}
