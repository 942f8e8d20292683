/* memory.c: reads /proc/meminfo and the limits of control groups of both versions. */
#define _GNU_SOURCE
#include "daemon/process/memory.h"

#include <inttypes.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

enum { ITSELF_BYTES = 24 << 20 }; /* of the program, its libraries and threads */

static const uint64_t NO_LIMIT = UINT64_MAX;

/* Opens a file below root; NULL: there is none. */
static FILE *open_below(const char *format, ...) __attribute__((format(printf, 1, 2)));
static FILE *open_below(const char *format, ...)
{
    char path[PATH_MAX];
    va_list args;
    va_start(args, format);
    int n = vsnprintf(path, sizeof path, format, args);
    va_end(args);
    return n < (int)sizeof path ? fopen(path, "re") : NULL;
}

/* Reads the number in a file and closes it; NO_LIMIT: it has none (as in "max"), or f is NULL. */
static uint64_t read_number(FILE *f)
{
    uint64_t n;
    if (f == NULL)
        return NO_LIMIT;
    if (fscanf(f, "%" SCNu64, &n) != 1)
        n = NO_LIMIT;
    fclose(f);
    return n;
}

/* The number behind a word at the beginning of a line; `otherwise` if there is no such line. Closes
 * the file. */
static uint64_t read_line(FILE *f, const char *word, uint64_t otherwise)
{
    char line[256];
    uint64_t n = otherwise;
    while (f != NULL && fgets(line, sizeof line, f) != NULL)
        if (strncmp(line, word, strlen(word)) == 0)
            n = strtoull(line + strlen(word), NULL, 10);
    if (f != NULL)
        fclose(f);
    return n;
}

static void take_least(struct memory_room *room, uint64_t free_bytes, uint64_t limit_bytes,
                       const char *what)
{
    if (limit_bytes < room->most_bytes) {
        room->most_bytes = limit_bytes;
        snprintf(room->most_what, sizeof room->most_what, "%s", what);
    }
    if (free_bytes >= room->free_bytes)
        return;
    room->free_bytes = free_bytes;
    room->limit_bytes = limit_bytes;
    snprintf(room->what, sizeof room->what, "%s", what);
}

struct version {
    const char *mount, *limit, *usage, *cache;
};
static const struct version version_1 = {"/sys/fs/cgroup/memory", "memory.limit_in_bytes",
                                         "memory.usage_in_bytes", "total_inactive_file "};
static const struct version version_2 = {"/sys/fs/cgroup", "memory.max", "memory.current",
                                         "inactive_file "};

static void look_at_group(const char *root, const struct version *v, const char *path,
                          struct memory_room *room)
{
    char what[256];
    uint64_t limit = read_number(open_below("%s%s%s/%s", root, v->mount, path, v->limit));
    uint64_t used = read_number(open_below("%s%s%s/%s", root, v->mount, path, v->usage));
    uint64_t cache = read_line(open_below("%s%s%s/memory.stat", root, v->mount, path), v->cache, 0);
    if (limit == NO_LIMIT || used == NO_LIMIT)
        return;
    used -= cache < used ? cache : used;
    snprintf(what, sizeof what, "%s%s/%s", v->mount, path, v->limit);
    take_least(room, limit > used ? limit - used : 0, limit, what);
}

/* Looks at the group and all above it. A container may see its own group as the root; then the
 * inner groups of the path do not exist, and the root is used. */
static void look_at_groups(const char *root, const struct version *v, char *path,
                           struct memory_room *room)
{
    for (char *slash; (slash = strrchr(path, '/')) != NULL; *slash = '\0')
        if (path[1] != '\0')
            look_at_group(root, v, path, room);
    look_at_group(root, v, "", room);
}

void memory_room_read(const char *root, struct memory_room *out)
{
    char line[PATH_MAX];
    struct memory_room room = {
        .free_bytes = NO_LIMIT, .limit_bytes = NO_LIMIT, .most_bytes = NO_LIMIT};
    uint64_t kib = read_line(open_below("%s/proc/meminfo", root), "MemAvailable:", NO_LIMIT);
    if (kib != NO_LIMIT)
        take_least(&room, kib * 1024,
                   1024 * read_line(open_below("%s/proc/meminfo", root), "MemTotal:", kib),
                   "MemAvailable of this machine");
    FILE *f = open_below("%s/proc/self/cgroup", root);
    while (f != NULL && fgets(line, sizeof line, f) != NULL) {
        char *controllers = strchr(line, ':');
        char *path = controllers != NULL ? strchr(controllers + 1, ':') : NULL;
        if (path == NULL)
            continue;
        *path++ = '\0';
        path[strcspn(path, "\n")] = '\0';
        controllers++;
        if (controllers[0] == '\0')
            look_at_groups(root, &version_2, path, &room);
        else if (strcmp(controllers, "memory") == 0)
            look_at_groups(root, &version_1, path, &room);
    }
    if (f != NULL)
        fclose(f);
    *out = room;
}

static uint64_t add(uint64_t a, uint64_t b)
{
    return a + b < a ? UINT64_MAX : a + b;
}

static uint64_t all_of(const struct memory_need *need, uint64_t *out_io)
{
    uint64_t io = need->io_bytes > 0 ? 1 : 0;
    while (io < need->io_bytes)
        io *= 2; /* iobuf.c rounds up, too */
    *out_io = io;
    uint64_t all = add(add(need->kv_bytes, io), add(need->tier_bytes, ITSELF_BYTES));
    return add(all, add(need->table_bytes, need->client_bytes));
}

/* have: what there is, with what says so. */
static attn_status refuse(const struct memory_need *need, const char *have, char *why,
                          size_t why_bytes)
{
    char kv_text[64] = "", tier_text[64] = "";
    uint64_t io;
    all_of(need, &io);
    if (need->tier_bytes > 0)
        snprintf(tier_text, sizeof tier_text, "cache.host_memory and idle_memory %" PRIu64 " MiB, ",
                 need->tier_bytes >> 20);
    if (need->kv_bytes > 0)
        snprintf(kv_text, sizeof kv_text, "device.kv_memory %" PRIu64 " MiB, ",
                 need->kv_bytes >> 20);
    snprintf(why, why_bytes,
             "%s%scache.io_memory %" PRIu64
             " MiB, tables (cache.max_sequences, table_memory) %" PRIu64
             " MiB, clients (listen.max_peers, engine.max_queue_requests) %" PRIu64
             " MiB and %d MiB for attnd itself do not fit: %s",
             kv_text, tier_text, io >> 20, need->table_bytes >> 20, need->client_bytes >> 20,
             ITSELF_BYTES >> 20, have);
    return ATTN_ENOMEM;
}

attn_status memory_check(const char *root, const struct memory_need *need,
                         struct memory_fit *out_fit, char *why, size_t why_bytes)
{
    struct memory_room room;
    char have[384];
    uint64_t io, all = all_of(need, &io);
    memory_room_read(root, &room);
    uint64_t more = need->taken_bytes < all ? all - need->taken_bytes : 0;
    if (more <= room.free_bytes) {
        bool is_known = room.free_bytes != NO_LIMIT;
        *out_fit = (struct memory_fit){all, is_known ? room.free_bytes - more : NO_LIMIT};
        return ATTN_OK;
    }
    snprintf(have, sizeof have, "%" PRIu64 " MiB of %" PRIu64 " are free (%s)",
             room.free_bytes >> 20, room.limit_bytes >> 20, room.what);
    return refuse(need, have, why, why_bytes);
}

attn_status memory_check_at_all(const char *root, const struct memory_need *need, char *why,
                                size_t why_bytes)
{
    struct memory_room room;
    char have[384];
    uint64_t io;
    memory_room_read(root, &room);
    if (all_of(need, &io) <= room.most_bytes)
        return ATTN_OK;
    snprintf(have, sizeof have, "there are %" PRIu64 " MiB (%s)", room.most_bytes >> 20,
             room.most_what);
    return refuse(need, have, why, why_bytes);
}
