/* grow.h: an array that grows as more of it is needed, by half more than that, so that steady use
 * allocates nothing.
 */
#ifndef ATTND_KERNELS_GROW_H
#define ATTND_KERNELS_GROW_H

#include "proto/attn_types.h"

#include <stdlib.h>
#include <string.h>

/* array: where the pointer to the array is; it and *capacity stay as they are where this fails.
 * Errors   ATTN_EINVAL more than 2^31 elements; ATTN_ENOMEM */
static inline attn_status array_reserve(void *array, uint32_t *capacity, uint64_t n,
                                        size_t element_bytes)
{
    void *p;
    if (n <= *capacity)
        return ATTN_OK;
    if (n > UINT32_MAX / 2)
        return ATTN_EINVAL;
    uint64_t want = n + n / 2;
    memcpy(&p, array, sizeof p);
    p = realloc(p, want * element_bytes);
    if (p == NULL)
        return ATTN_ENOMEM;
    memcpy(array, &p, sizeof p);
    *capacity = (uint32_t)want;
    return ATTN_OK;
}

#endif
