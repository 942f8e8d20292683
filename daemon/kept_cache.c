/* kept_cache.c: see kept_cache.h. */
#include "daemon/kept_cache.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "daemon/keep.h"
#include "daemon/log.h"

#define ARENA "arena-" /* and the id */
#define MEMORY "memory-" /* and the backend, a dash, the id */

bool kept_cache_take(struct kept_cache *out)
{
    struct kept_cache k = {.arena_fd = -1, .memory_fd = -1};
    char arena[KEEP_NAME_BYTES], memory[KEEP_NAME_BYTES];
    if (!keep_find(ARENA, arena) || !keep_find(MEMORY, memory))
        return false; /* a process died before it had put both, and had served nobody */
    const char *backend = memory + strlen(MEMORY), *dash = strchr(backend, '-');
    if (dash == NULL || strcmp(dash + 1, arena + strlen(ARENA)) != 0)
        return false;
    snprintf(k.backend, sizeof k.backend, "%.*s", (int)(dash - backend), backend);
    snprintf(k.arena_name, sizeof k.arena_name, "%.60s", arena);
    snprintf(k.memory_name, sizeof k.memory_name, "%.60s", memory);
    k.arena_fd = keep_take(arena);
    k.memory_fd = keep_take(memory);
    *out = k;
    return true;
}

void kept_cache_close(struct kept_cache *k)
{
    if (k->arena_fd >= 0)
        close(k->arena_fd);
    if (k->memory_fd >= 0)
        close(k->memory_fd);
    k->arena_fd = k->memory_fd = -1;
}

void kept_cache_drop(struct kept_cache *k)
{
    kept_cache_close(k);
    keep_drop(k->arena_name);
    keep_drop(k->memory_name);
}

bool kept_cache_put(const struct kv *kv, const struct device *d)
{
    struct backend_info info;
    char name[KEEP_NAME_BYTES];
    int memory_fd;
    if (!keep_is_there())
        return false;
    d->ops->info(d->backend, &info);
    if (d->ops->export_memory(d->backend, &memory_fd) != ATTN_OK) {
        log_warn("the cache ends with this process: %s", d->ops->last_error(d->backend));
        return false;
    }
    snprintf(name, sizeof name, MEMORY "%s-%016" PRIx64, info.name, kv_arena_id(kv));
    bool is_kept = keep_put(name, memory_fd);
    close(memory_fd);
    snprintf(name, sizeof name, ARENA "%016" PRIx64, kv_arena_id(kv));
    return is_kept && keep_put(name, kv_fd(kv));
}
