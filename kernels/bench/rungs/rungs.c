/* rungs.c: finds a backend's rungs. */
#include "kernels/bench/rungs/rungs.h"

#include <stdio.h>
#include <string.h>

#include "kernels/load.h"

attn_status rungs_load(const char *backend, const struct rungs_ops **out_ops, char *why,
                       size_t why_bytes)
{
    char name[64];
    void *symbol;
    if (strcmp(backend, "cpu") == 0) {
        *out_ops = rungs_cpu();
        return ATTN_OK;
    }
    snprintf(name, sizeof name, "%sbench", backend);
    attn_status st = backend_module_symbol(name, RUNGS_SYMBOL, &symbol, why, why_bytes);
    if (st != ATTN_OK)
        return st;
    rungs_fn fn;
    memcpy(&fn, &symbol, sizeof fn);
    const struct rungs_ops *ops = fn();
    if (ops->abi != RUNGS_ABI) {
        snprintf(why, why_bytes, "attnd-%s.so speaks rungs ABI %u, this program %d", name, ops->abi,
                 RUNGS_ABI);
        return ATTN_ENOTFOUND;
    }
    *out_ops = ops;
    return ATTN_OK;
}
