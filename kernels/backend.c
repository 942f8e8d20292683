/* backend.c: finds backends by name.
 *
 * The cpu backend is linked in; the others are modules, so that this program needs no driver to
 * start. A module that was loaded stays loaded until the process ends.
 */
#include "kernels/backend.h"

#include <dlfcn.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Loads path and takes its table; false leaves the reason in why. */
static bool module_load(const char *path, const char *name, const struct backend_ops **out_ops,
                        char *why, size_t why_bytes)
{
    void *handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (handle == NULL) {
        snprintf(why, why_bytes, "%s", dlerror());
        return false;
    }
    backend_module_fn fn;
    void *symbol = dlsym(handle, BACKEND_MODULE_SYMBOL);
    memcpy(&fn, &symbol, sizeof fn);
    const struct backend_ops *ops = symbol ? fn() : NULL;
    if (ops == NULL) {
        snprintf(why, why_bytes, "%s has no %s", path, BACKEND_MODULE_SYMBOL);
    } else if (ops->abi != BACKEND_ABI) {
        snprintf(why, why_bytes, "%s speaks backend ABI %" PRIu32 ", this program %d", path,
                 ops->abi, BACKEND_ABI);
    } else if (strcmp(ops->name, name) != 0) {
        snprintf(why, why_bytes, "%s is the backend '%s', not '%s'", path, ops->name, name);
    } else {
        *out_ops = ops;
        return true;
    }
    dlclose(handle);
    return false;
}

attn_status backend_load(const char *name, const struct backend_ops **out_ops, char *why,
                         size_t why_bytes)
{
    if (strcmp(name, "cpu") == 0) {
        *out_ops = backend_cpu();
        return ATTN_OK;
    }
    if (*name == 0 || name[strspn(name, "abcdefghijklmnopqrstuvwxyz0123456789")] != 0) {
        snprintf(why, why_bytes, "no backend is called '%s' (cpu, cuda, hip)", name);
        return ATTN_ENOTFOUND;
    }

    char exe[PATH_MAX], path[PATH_MAX + 64];
    ssize_t n = readlink("/proc/self/exe", exe, sizeof exe - 1);
    exe[n > 0 ? n : 0] = 0;
    char *slash = strrchr(exe, '/');
    if (slash != NULL)
        *slash = 0;
    const char *env = getenv("ATTND_MODULE_DIR");
    const char *formats[] = {"%s/attnd-%s.so", "%s/../lib/attnd/attnd-%s.so"};

    snprintf(why, why_bytes, "attnd-%s.so is neither beside %s, nor in ../lib/attnd, nor in %s",
             name, exe, env ? env : "$ATTND_MODULE_DIR (not set)");
    for (size_t i = 0; i < 3; i++) {
        const char *dir = i < 2 ? exe : env;
        if (dir == NULL)
            continue;
        snprintf(path, sizeof path, formats[i % 2], dir, name);
        if (access(path, F_OK) != 0)
            continue;
        return module_load(path, name, out_ops, why, why_bytes) ? ATTN_OK : ATTN_ENOTFOUND;
    }
    return ATTN_ENOTFOUND;
}
