/* load.h: finds a backend, or what its module has beside it, by the backend's name. All that is
 * asked of the backend afterwards goes through the table that was found (backend.h).
 */
#ifndef ATTND_KERNELS_LOAD_H
#define ATTND_KERNELS_LOAD_H

#include "kernels/backend_bench.h"

/* Finds a backend by name ("cpu", "cuda", "hip", another module's): built in, or attnd-NAME.so next
 * to the running binary, in ../lib/attnd beside it, or in $ATTND_MODULE_DIR. The module stays
 * loaded. ATTN_ENOTFOUND: the reason is in why. */
attn_status backend_load(const char *name, const struct backend_ops **out_ops, char *why,
                         size_t why_bytes);

/* The same for the table of what it can measure of itself. */
attn_status backend_bench_load(const char *name, const struct backend_bench_ops **out_ops,
                               char *why, size_t why_bytes);

/* Finds attnd-NAME.so as backend_load does and looks up a symbol; the module stays loaded. */
attn_status backend_module_symbol(const char *name, const char *symbol, void **out_symbol,
                                  char *why, size_t why_bytes);

#endif
