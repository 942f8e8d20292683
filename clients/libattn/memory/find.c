/* find.c: loads libattn-cuda.so, which lies beside this library, when it is first asked for: the
 * library itself needs no CUDA. */
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "clients/libattn/memory/memory.h"

#define LANE_CUDA_LIBRARY "libattn-cuda.so.0"

const struct lane_memory_ops *lane_memory_find_cuda(char *why, size_t why_bytes)
{
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    static const struct lane_memory_ops *found;
    char path[4096] = LANE_CUDA_LIBRARY;
    Dl_info self;
    if (dladdr((void *)(uintptr_t)lane_memory_find_cuda, &self) != 0 &&
        strrchr(self.dli_fname, '/') != NULL)
        snprintf(path, sizeof path, "%.*s/%s", (int)(strrchr(self.dli_fname, '/') - self.dli_fname),
                 self.dli_fname, LANE_CUDA_LIBRARY);
    pthread_mutex_lock(&lock);
    if (found == NULL) {
        void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
        if (library == NULL && access(path, F_OK) != 0)
            library = dlopen(LANE_CUDA_LIBRARY, RTLD_NOW | RTLD_LOCAL);
        const struct lane_memory_ops *ops =
            library != NULL ? dlsym(library, LANE_CUDA_SYMBOL) : NULL;
        if (ops == NULL)
            snprintf(why, why_bytes, "%s", dlerror());
        else if (ops->abi != LANE_CUDA_ABI)
            snprintf(why, why_bytes, "%s is of another version of this library", path);
        else
            found = ops;
    }
    pthread_mutex_unlock(&lock);
    return found;
}
