/* load.c: finds backends by name.
 *
 * The cpu backend is linked in; the others are modules, so that this program needs no driver to
 * start. A module that was loaded stays loaded until the process ends.
 */
#include "kernels/load.h"

#include <dlfcn.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct module {
    void *handle;
    void *symbol; /* the function that gives the table */
    char path[PATH_MAX + 64];
};

static bool module_open(struct module *m, const char *symbol, char *why, size_t why_bytes)
{
    m->handle = dlopen(m->path, RTLD_NOW | RTLD_LOCAL);
    if (m->handle == NULL) {
        snprintf(why, why_bytes, "%s", dlerror());
        return false;
    }
    m->symbol = dlsym(m->handle, symbol);
    if (m->symbol != NULL)
        return true;
    snprintf(why, why_bytes, "%s has no %s", m->path, symbol);
    dlclose(m->handle);
    return false;
}

/* Finds attnd-NAME.so and opens the first there is. */
static bool module_find(struct module *m, const char *name, const char *symbol, char *why,
                        size_t why_bytes)
{
    if (*name == 0 || name[strspn(name, "abcdefghijklmnopqrstuvwxyz0123456789")] != 0) {
        snprintf(why, why_bytes, "no backend is called '%s' (cpu, cuda, hip)", name);
        return false;
    }
    char exe[PATH_MAX];
    ssize_t n = readlink("/proc/self/exe", exe, sizeof exe - 1);
    exe[n > 0 ? n : 0] = 0;
    char *slash = strrchr(exe, '/');
    if (slash != NULL)
        *slash = 0;
    const char *env = getenv("ATTND_MODULE_DIR");
    const char *formats[] = {"%s/attnd-%s.so", "%s/../lib/attnd/attnd-%s.so"};

    for (size_t i = 0; i < 3; i++) {
        const char *dir = i < 2 ? exe : env;
        if (dir == NULL)
            continue;
        snprintf(m->path, sizeof m->path, formats[i % 2], dir, name);
        if (access(m->path, F_OK) == 0)
            return module_open(m, symbol, why, why_bytes);
    }
    snprintf(why, why_bytes, "attnd-%s.so is neither beside %s, nor in ../lib/attnd, nor in %s",
             name, exe, env ? env : "$ATTND_MODULE_DIR (not set)");
    return false;
}

/* Is a module's table what this program wants? */
static bool table_fits(const struct module *m, uint32_t abi, const char *is_of, const char *name,
                       char *why, size_t why_bytes)
{
    if (abi != BACKEND_ABI)
        snprintf(why, why_bytes, "%s speaks backend ABI %" PRIu32 ", this program %d", m->path, abi,
                 BACKEND_ABI);
    else if (strcmp(is_of, name) != 0)
        snprintf(why, why_bytes, "%s is the backend '%s', not '%s'", m->path, is_of, name);
    else
        return true;
    dlclose(m->handle);
    return false;
}

attn_status backend_module_symbol(const char *name, const char *symbol, void **out_symbol,
                                  char *why, size_t why_bytes)
{
    struct module m;
    if (!module_find(&m, name, symbol, why, why_bytes))
        return ATTN_ENOTFOUND;
    *out_symbol = m.symbol;
    return ATTN_OK;
}

attn_status backend_load(const char *name, const struct backend_ops **out_ops, char *why,
                         size_t why_bytes)
{
    if (strcmp(name, "cpu") == 0) {
        *out_ops = backend_cpu();
        return ATTN_OK;
    }
    struct module m;
    if (!module_find(&m, name, BACKEND_MODULE_SYMBOL, why, why_bytes))
        return ATTN_ENOTFOUND;
    backend_module_fn fn;
    memcpy(&fn, &m.symbol, sizeof fn);
    const struct backend_ops *ops = fn();
    if (!table_fits(&m, ops->abi, ops->name, name, why, why_bytes))
        return ATTN_ENOTFOUND;
    *out_ops = ops;
    return ATTN_OK;
}

attn_status backend_bench_load(const char *name, const struct backend_bench_ops **out_ops,
                               char *why, size_t why_bytes)
{
    if (strcmp(name, "cpu") == 0) {
        *out_ops = backend_cpu_bench();
        return ATTN_OK;
    }
    struct module m;
    if (!module_find(&m, name, BACKEND_BENCH_SYMBOL, why, why_bytes))
        return ATTN_ENOTFOUND;
    backend_bench_fn fn;
    memcpy(&fn, &m.symbol, sizeof fn);
    const struct backend_bench_ops *ops = fn();
    if (!table_fits(&m, ops->abi, ops->name, name, why, why_bytes))
        return ATTN_ENOTFOUND;
    *out_ops = ops;
    return ATTN_OK;
}
