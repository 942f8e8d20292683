/* disk.c: reads and writes blocks of the disk tier, with a few threads that call pread(2) and
 * pwrite(2); blocks of a megabyte keep a disk busy that way. Moves are submitted on the engine
 * thread and completed on those threads. */
#define _GNU_SOURCE
#include "daemon/engine/tier/disk.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "kernels/kv_range.h"
#include "kernels/moves.h"

enum { N_THREADS = 4 };

struct tier_disk {
    int fd;
    uint64_t bytes;
    struct kv_range *ranges;
    struct moves *moves;
};

/* Makes a file without a name. -1: see errno. */
static int make_file(const char *path, int flags)
{
    char name[4096];
    int fd = open(path, O_TMPFILE | O_RDWR | O_CLOEXEC | flags, 0600);
    if (fd >= 0 || (errno != EOPNOTSUPP && errno != EISDIR && errno != EINVAL))
        return fd;
    if (snprintf(name, sizeof name, "%s/attnd.XXXXXX", path) >= (int)sizeof name) {
        errno = ENAMETOOLONG;
        return -1;
    }
    fd = mkostemp(name, O_CLOEXEC | flags);
    if (fd >= 0)
        unlink(name);
    return fd;
}

/* With O_DIRECT, or without if the file system has none. */
static int make_direct(const char *path)
{
    int fd = make_file(path, O_DIRECT);
    return fd < 0 && errno == EINVAL ? make_file(path, 0) : fd;
}

static int take_size(int fd, uint64_t bytes)
{
    if (fallocate(fd, 0, 0, (off_t)bytes) == 0)
        return 0;
    return errno == EOPNOTSUPP ? ftruncate(fd, (off_t)bytes) : -1;
}

static attn_status transfer(void *arg, uint32_t thread, struct backend_move *m, uint32_t n_moves)
{
    struct tier_disk *d = arg;
    (void)thread, (void)n_moves;
    uint8_t *bytes = m->bytes;
    off_t offset = (off_t)m->block * TIER_DISK_ALIGN;
    for (size_t at = 0; at < m->n_bytes;) {
        ssize_t n = m->is_in ? pread(d->fd, bytes + at, m->n_bytes - at, offset + (off_t)at)
                             : pwrite(d->fd, bytes + at, m->n_bytes - at, offset + (off_t)at);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0 || n % TIER_DISK_ALIGN != 0) /* direct I/O could not continue at this offset */
            return ATTN_EINTERNAL;
        at += (size_t)n;
    }
    return ATTN_OK;
}

attn_status tier_disk_open(const char *path, uint64_t bytes, struct tier_disk **out_disk, char *why,
                           size_t why_bytes)
{
    struct tier_disk *d = calloc(1, sizeof *d);
    if (d == NULL) {
        snprintf(why, why_bytes, "no memory for the disk tier");
        return ATTN_ENOMEM;
    }
    const struct moves_device device = {.move = transfer, .arg = d};
    attn_status st = moves_open(&device, N_THREADS, &d->moves);
    d->bytes = bytes / TIER_DISK_ALIGN * TIER_DISK_ALIGN;
    d->fd = make_direct(path);
    if (d->fd < 0)
        snprintf(why, why_bytes, "cache.disk_path = %s: %s", path, strerror(errno));
    else if (take_size(d->fd, d->bytes) != 0)
        snprintf(why, why_bytes, "cache.disk_size: %" PRIu64 " MiB in cache.disk_path = %s: %s",
                 bytes >> 20, path, strerror(errno));
    else if (st != ATTN_OK)
        snprintf(why, why_bytes, "no memory for the disk tier");
    else {
        *out_disk = d;
        return ATTN_OK;
    }
    tier_disk_close(d);
    return ATTN_EINVAL;
}

void tier_disk_close(struct tier_disk *d)
{
    if (d == NULL)
        return;
    moves_close(d->moves);
    if (d->fd >= 0)
        close(d->fd);
    while (d->ranges != NULL) {
        struct kv_range *r = d->ranges;
        d->ranges = r->next;
        free(r);
    }
    free(d);
}

bool tier_disk_take(void *arg, uint64_t bytes, uint64_t *out_place)
{
    struct tier_disk *d = arg;
    uint64_t largest;
    struct kv_range *r = calloc(1, sizeof *r);
    if (r == NULL)
        return false;
    r->bytes = bytes;
    if (!kv_range_take(&d->ranges, d->bytes, false, r, &largest)) {
        free(r);
        return false;
    }
    *out_place = r->offset;
    return true;
}

void tier_disk_give(void *arg, uint64_t place, uint64_t bytes)
{
    struct tier_disk *d = arg;
    (void)bytes;
    struct kv_range *r = d->ranges;
    while (r != NULL && r->offset != place)
        r = r->next;
    if (r == NULL)
        return;
    kv_range_give(&d->ranges, r);
    free(r);
}

uint32_t tier_disk_block(uint64_t place)
{
    return (uint32_t)(place / TIER_DISK_ALIGN);
}

attn_status tier_disk_submit(struct tier_disk *d, struct backend_moves *m)
{
    return moves_submit(d->moves, m);
}
