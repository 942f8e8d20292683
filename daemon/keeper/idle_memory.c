/* idle_memory.c: opens a memfd of the wanted size: a predecessor's if it fits, else a new one. */
#define _GNU_SOURCE /* memfd_create */
#include "daemon/keeper/idle_memory.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "daemon/base/log.h"

#define SEALS (F_SEAL_SHRINK | F_SEAL_GROW)

/* Whether a predecessor's memfd has this size and is sealed; if not, fd is closed. */
static bool is_usable(int fd, uint64_t bytes)
{
    struct stat sb;
    int seals = fcntl(fd, F_GET_SEALS);
    if (fstat(fd, &sb) == 0 && (uint64_t)sb.st_size == bytes && seals >= 0 &&
        (seals & SEALS) == SEALS)
        return true;
    log_warn("the kept idle memory is not of %" PRIu64 " bytes (cache.idle_memory): sequences with "
             "blocks there are dropped",
             bytes);
    close(fd);
    return false;
}

static int memory_new(uint64_t bytes)
{
    int fd = memfd_create("attnd-idle", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0 ||
        (ftruncate(fd, (off_t)bytes) == 0 && fcntl(fd, F_ADD_SEALS, SEALS | F_SEAL_SEAL) == 0))
        return fd;
    int err = errno;
    close(fd);
    errno = err;
    return -1;
}

attn_status idle_memory_open(uint64_t bytes, int fd, struct idle_memory *out, char *why,
                             size_t why_bytes)
{
    struct idle_memory m = {.fd = -1, .bytes = bytes};
    if (fd >= 0 && is_usable(fd, bytes))
        m.fd = fd;
    if (bytes == 0) {
        *out = m;
        return ATTN_OK;
    }
    m.is_new = m.fd < 0;
    if (m.is_new)
        m.fd = memory_new(bytes);
    void *base =
        m.fd < 0 ? MAP_FAILED
                 : mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, m.fd, 0);
    if (base == MAP_FAILED) {
        snprintf(why, why_bytes, "cache.idle_memory: %" PRIu64 " bytes: %s", bytes,
                 strerror(errno));
        if (m.fd >= 0)
            close(m.fd);
        return ATTN_ENOMEM;
    }
    m.base = base;
    *out = m;
    return ATTN_OK;
}

void idle_memory_close(struct idle_memory *m)
{
    if (m->base != NULL) {
        munmap(m->base, m->bytes);
        close(m->fd);
    }
    *m = (struct idle_memory){.fd = -1};
}
