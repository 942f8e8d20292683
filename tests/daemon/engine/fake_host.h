/* fake_host.h: a backend that gives host memory and nothing else, for tests of the daemon's
 * parts. */
#ifndef TESTS_DAEMON_FAKE_HOST_H
#define TESTS_DAEMON_FAKE_HOST_H

#include <stdlib.h>

#include "kernels/backend.h"

static inline attn_status fake_host_alloc(struct backend *b, size_t bytes, void **out_p)
{
    (void)b;
    void *p = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
    if (p == NULL)
        return ATTN_ENOMEM;
    *out_p = p;
    return ATTN_OK;
}

static inline void fake_host_free(struct backend *b, void *p, size_t bytes)
{
    (void)b;
    (void)bytes;
    free(p);
}

static const struct backend_ops fake_host = {
    .abi = BACKEND_ABI,
    .name = "fake",
    .host_alloc = fake_host_alloc,
    .host_free = fake_host_free,
};

#endif
