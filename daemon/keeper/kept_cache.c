/* kept_cache.c: names the arena, the KV memory and the idle memory of each card for the keeper, and
 * finds a predecessor's by those names. */
#include "daemon/keeper/kept_cache.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "daemon/base/log.h"
#include "daemon/keeper/keep.h"

#define ARENA "arena-" /* then the card (kept_owner) and the arena's id */
#define MEMORY "memory-" /* then the card, the backend, a dash and the id */
#define IDLE "idle-" /* then the card and the id */

struct kept_owner kept_owner(uint32_t card, uint32_t n_cards, uint32_t device_index)
{
    struct kept_owner w = {""};
    if (n_cards > 1)
        snprintf(w.text, sizeof w.text, "card%" PRIu32 "of%" PRIu32 ".%" PRIu32 ".", card % 100,
                 n_cards % 100, device_index);
    return w;
}

bool kept_cache_take(struct kept_owner owner, struct kept_cache *out)
{
    struct kept_cache k = {.arena_fd = -1, .memory_fd = -1, .idle_fd = -1};
    char arena[KEEP_NAME_BYTES], memory[KEEP_NAME_BYTES], prefix[2][64];
    snprintf(prefix[0], sizeof prefix[0], ARENA "%s", owner.text);
    snprintf(prefix[1], sizeof prefix[1], MEMORY "%s", owner.text);
    if (!keep_find(prefix[0], arena) || !keep_find(prefix[1], memory))
        return false; /* a process died before it stored both, and so before it served */
    const char *backend = memory + strlen(prefix[1]), *dash = strchr(backend, '-');
    if (dash == NULL || strcmp(dash + 1, arena + strlen(prefix[0])) != 0)
        return false;
    snprintf(k.backend, sizeof k.backend, "%.*s", (int)(dash - backend), backend);
    snprintf(k.arena_name, sizeof k.arena_name, "%.127s", arena);
    snprintf(k.memory_name, sizeof k.memory_name, "%.127s", memory);
    k.arena_fd = keep_take(arena);
    k.memory_fd = keep_take(memory);
    snprintf(k.idle_name, sizeof k.idle_name, IDLE "%.100s", arena + strlen(ARENA));
    k.idle_fd = keep_take(k.idle_name);
    if (k.idle_fd < 0)
        k.idle_name[0] = '\0';
    *out = k;
    return true;
}

void kept_cache_close(struct kept_cache *k)
{
    if (k->arena_fd >= 0)
        close(k->arena_fd);
    if (k->memory_fd >= 0)
        close(k->memory_fd);
    if (k->idle_fd >= 0)
        close(k->idle_fd);
    k->arena_fd = k->memory_fd = k->idle_fd = -1;
}

void kept_cache_drop(struct kept_cache *k)
{
    kept_cache_close(k);
    keep_drop(k->arena_name);
    keep_drop(k->memory_name);
    if (k->idle_name[0] != '\0')
        keep_drop(k->idle_name);
}

void kept_cache_put_idle(struct kept_owner owner, const struct kv *kv, int fd, struct kept_cache *k)
{
    if (k->idle_name[0] != '\0')
        keep_drop(k->idle_name); /* it has another size, or is not wanted any more */
    k->idle_name[0] = '\0';
    if (fd < 0 || !keep_is_there())
        return;
    snprintf(k->idle_name, sizeof k->idle_name, IDLE "%s%016" PRIx64, owner.text, kv_arena_id(kv));
    keep_put(k->idle_name, fd);
}

bool kept_cache_put(struct kept_owner owner, const struct kv *kv, const struct backend_ops *ops,
                    struct backend *backend, struct kept_cache *out)
{
    struct backend_info info;
    struct kept_cache k = {.arena_fd = -1, .memory_fd = -1, .idle_fd = -1};
    int memory_fd;
    if (!keep_is_there())
        return false;
    ops->info(backend, &info);
    if (ops->export_memory(backend, &memory_fd) != ATTN_OK) {
        log_warn("the cache ends with this process: %s", ops->last_error(backend));
        return false;
    }
    snprintf(k.memory_name, sizeof k.memory_name, MEMORY "%s%s-%016" PRIx64, owner.text, info.name,
             kv_arena_id(kv));
    bool is_kept = keep_put(k.memory_name, memory_fd);
    close(memory_fd);
    snprintf(k.arena_name, sizeof k.arena_name, ARENA "%s%016" PRIx64, owner.text, kv_arena_id(kv));
    *out = k;
    return is_kept && keep_put(k.arena_name, kv_fd(kv));
}
