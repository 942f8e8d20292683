/* memory.c: the cpu backend's KV memory: one memfd. Threads take its pages after open, so that a
 * large memory keeps nobody waiting; a pool's are there when it is made, so that nothing can run
 * out later, and a thread of their own takes and zeroes them beforehand, so that nobody waits for
 * that. Its size is sealed, so that no other holder of the descriptor can shrink it.
 *
 * Pages of 2 MiB where the machine has set enough aside (vm.nr_hugepages): blocks lie scattered,
 * and with 4 KiB pages each piece of a block costs a page walk.
 */
#define _GNU_SOURCE
#include "kernels/cpu/cpu.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define HUGE_BYTES (2 << 20)
#define SLICE_BYTES (UINT64_C(2) << 20)
#define AT_ONCE_BYTES (UINT64_C(1) << 20) /* no thread for less */

static uint64_t file_number(const char *path)
{
    char text[64] = "";
    FILE *f = fopen(path, "re");
    if (f == NULL)
        return UINT64_MAX;
    char *got = fgets(text, sizeof text, f);
    fclose(f);
    /* "max" is no limit */
    return got != NULL && text[0] >= '0' && text[0] <= '9' ? strtoull(text, NULL, 10) : UINT64_MAX;
}

/* What the machine and, where visible, the control group leave. */
static uint64_t available_bytes(void)
{
    uint64_t available = UINT64_MAX, kib;
    char line[128];
    FILE *f = fopen("/proc/meminfo", "re");
    while (f != NULL && fgets(line, sizeof line, f) != NULL)
        if (sscanf(line, "MemAvailable: %" SCNu64, &kib) == 1)
            available = kib * 1024;
    if (f != NULL)
        fclose(f);
    uint64_t limit = file_number("/sys/fs/cgroup/memory.max");
    uint64_t current = file_number("/sys/fs/cgroup/memory.current");
    if (limit != UINT64_MAX && current != UINT64_MAX) {
        uint64_t left = limit > current ? limit - current : 0;
        available = left < available ? left : available;
    }
    return available;
}

/* Huge pages are reserved by mapping them; false: there are too few, nothing is held. */
static bool take_huge(struct cpu_memory *m)
{
    uint64_t bytes = (m->bytes + HUGE_BYTES - 1) & ~(uint64_t)(HUGE_BYTES - 1);
    int fd = memfd_create("attnd-kv", MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_HUGETLB);
    if (fd < 0)
        return false;
    void *p = MAP_FAILED;
    if (ftruncate(fd, (off_t)bytes) == 0 &&
        fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) == 0)
        p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (p == MAP_FAILED) {
        close(fd);
        return false;
    }
    *m = (struct cpu_memory){.base = p, .bytes = bytes, .fd = fd};
    return true;
}

static attn_status take_new(struct cpu_memory *m, char *why, size_t why_bytes)
{
    uint64_t available = available_bytes();
    if (m->bytes > available || m->bytes > INT64_MAX) {
        snprintf(why, why_bytes,
                 "kv_bytes is %" PRIu64 " (%.1f GiB), available memory is %" PRIu64 " (%.1f GiB)",
                 m->bytes, (double)m->bytes / (1 << 30), available, (double)available / (1 << 30));
        return ATTN_ENOMEM;
    }
    m->fd = memfd_create("attnd-kv", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (m->fd < 0 || ftruncate(m->fd, (off_t)m->bytes) != 0 ||
        fcntl(m->fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0) {
        snprintf(why, why_bytes, "memfd of %" PRIu64 " bytes: %s", m->bytes, strerror(errno));
        return ATTN_ENOMEM;
    }
    return ATTN_OK;
}

static attn_status take_import(struct cpu_memory *m, int import_fd, char *why, size_t why_bytes)
{
    struct stat st;
    m->fd = fcntl(import_fd, F_DUPFD_CLOEXEC, 0);
    if (m->fd < 0 || fstat(m->fd, &st) != 0) {
        snprintf(why, why_bytes, "import_fd %d: %s", import_fd, strerror(errno));
        return ATTN_EINVAL;
    }
    /* a predecessor on huge pages rounded up */
    uint64_t huge = (m->bytes + HUGE_BYTES - 1) & ~(uint64_t)(HUGE_BYTES - 1);
    if ((uint64_t)st.st_blksize == HUGE_BYTES && (uint64_t)st.st_size == huge)
        m->bytes = huge;
    if ((uint64_t)st.st_size != m->bytes) {
        snprintf(why, why_bytes, "import_fd has %" PRIu64 " bytes, kv_bytes is %" PRIu64,
                 (uint64_t)st.st_size, m->bytes);
        return ATTN_EINVAL;
    }
    int seals = fcntl(m->fd, F_GET_SEALS);
    if (seals < 0 || (seals & F_SEAL_SHRINK) == 0) {
        snprintf(why, why_bytes, "import_fd %d is no KV memory: its size is not sealed", import_fd);
        return ATTN_EINVAL;
    }
    return ATTN_OK;
}

/* Pages that are in the memfd, taken by a predecessor or by a taker, need only be mapped: the first
 * touch does that, and can't fail for want of them. With many pages the wait for it is long. */
static bool is_taken(const struct cpu_memory *m, uint64_t offset, uint64_t bytes)
{
    return lseek(m->fd, (off_t)offset, SEEK_HOLE) >= (off_t)(offset + bytes);
}

/* What can't be taken now is the pool's to complain about that needs it. */
static void *take_slices(void *arg)
{
    struct cpu_memory *m = arg;
    while (!atomic_load(&m->is_closing)) {
        uint64_t at = atomic_fetch_add(&m->next_slice, 1) * SLICE_BYTES;
        if (at >= m->bytes)
            break;
        uint64_t left = m->bytes - at, bytes = left < SLICE_BYTES ? left : SLICE_BYTES;
        if (!is_taken(m, at, bytes))
            madvise(m->base + at, bytes, MADV_POPULATE_WRITE);
    }
    return NULL;
}

static void takers_start(struct cpu_memory *m, uint32_t n)
{
    while (m->n_takers < n && pthread_create(&m->takers[m->n_takers], NULL, take_slices, m) == 0)
        m->n_takers++;
}

attn_status cpu_memory_open(struct cpu_memory *m, uint64_t bytes, int import_fd, uint32_t n_threads,
                            char *why, size_t why_bytes)
{
    *m = (struct cpu_memory){.fd = -1, .bytes = (bytes + 4095) & ~(uint64_t)4095};
    if (m->bytes == 0) {
        snprintf(why, why_bytes, "kv_bytes is 0");
        return ATTN_EINVAL;
    }
    if (import_fd >= 0 || !take_huge(m)) {
        attn_status st = import_fd >= 0 ? take_import(m, import_fd, why, why_bytes)
                                        : take_new(m, why, why_bytes);
        if (st != ATTN_OK)
            return st;
        void *p = mmap(NULL, m->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, m->fd, 0);
        if (p == MAP_FAILED) {
            snprintf(why, why_bytes, "mapping kv_bytes %" PRIu64 ": %s", m->bytes, strerror(errno));
            return ATTN_ENOMEM;
        }
        m->base = p;
        madvise(p, m->bytes, MADV_HUGEPAGE); /* heeded where shmem_enabled says advise */
    }
    m->n_written = import_fd >= 0 ? m->bytes : 0;
    takers_start(m, n_threads < CPU_MAX_TAKERS ? n_threads : CPU_MAX_TAKERS);
    return ATTN_OK;
}

/* --- clearing --------------------------------------------------------------------------------- */

static void *clear_slices(void *arg)
{
    struct cpu_memory *m = arg;
    struct cpu_clear *c = &m->clear;
    uint64_t at = c->range.offset, end = at + c->range.bytes, n;
    for (; at < end && !atomic_load(&c->is_unwanted); at += n) {
        n = end - at < SLICE_BYTES ? end - at : SLICE_BYTES;
        if (madvise(m->base + at, n, MADV_POPULATE_WRITE) != 0)
            break; /* the pool that wants it says why */
        if (at < c->old_end)
            memset(m->base + at, 0, c->old_end - at < n ? c->old_end - at : n);
    }
    atomic_store(&c->is_unwanted, at < end);
    atomic_store(&c->is_done, true);
    return NULL;
}

/* Waits for the thread's present slice. */
static void clear_end(struct cpu_clear *c)
{
    if (c->has_thread) {
        atomic_store(&c->is_unwanted, true);
        pthread_join(c->thread, NULL);
    }
    *c = (struct cpu_clear){0};
}

static bool is_range(const struct cpu_clear *c, uint64_t offset, uint64_t bytes)
{
    return c->has_thread && c->range.offset == offset && c->range.bytes == bytes;
}

bool cpu_memory_ready(struct cpu_memory *m, uint64_t offset, uint64_t bytes)
{
    struct cpu_clear *c = &m->clear;
    if (bytes <= AT_ONCE_BYTES)
        return true;
    if (c->has_thread && (!atomic_load(&c->is_done) || is_range(c, offset, bytes)))
        return atomic_load(&c->is_done);
    clear_end(c);
    c->range = (struct kv_range){.offset = offset, .bytes = bytes};
    c->old_end = m->n_written;
    c->has_thread = pthread_create(&c->thread, NULL, clear_slices, m) == 0;
    return !c->has_thread; /* without one it's done when the pool is made */
}

/* The range is about to be a pool's. true: it has been cleared. */
static bool clear_claim(struct cpu_memory *m, uint64_t offset, uint64_t bytes)
{
    struct cpu_clear *c = &m->clear;
    uint64_t end = offset + bytes;
    if (!c->has_thread || end <= c->range.offset || c->range.offset + c->range.bytes <= offset)
        return false;
    bool is_clear =
        is_range(c, offset, bytes) && atomic_load(&c->is_done) && !atomic_load(&c->is_unwanted);
    clear_end(c);
    return is_clear;
}

attn_status cpu_memory_give(struct cpu_memory *m, uint64_t offset, uint64_t bytes, char *why,
                            size_t why_bytes)
{
    uint64_t end = offset + bytes, old = end < m->n_written ? end : m->n_written;
    if (!clear_claim(m, offset, bytes)) {
        attn_status st = cpu_memory_take(m, offset, bytes, why, why_bytes);
        if (st != ATTN_OK)
            return st;
        if (offset < old)
            memset(m->base + offset, 0, old - offset);
    }
    m->n_written = end > m->n_written ? end : m->n_written;
    return ATTN_OK;
}

attn_status cpu_memory_keep(struct cpu_memory *m, uint64_t offset, uint64_t bytes, char *why,
                            size_t why_bytes)
{
    uint64_t end = offset + bytes;
    clear_claim(m, offset, bytes);
    m->n_written = end > m->n_written ? end : m->n_written;
    return cpu_memory_take(m, offset, bytes, why, why_bytes);
}

attn_status cpu_memory_take(struct cpu_memory *m, uint64_t offset, uint64_t bytes, char *why,
                            size_t why_bytes)
{
    if (bytes == 0 || is_taken(m, offset, bytes) ||
        madvise(m->base + offset, bytes, MADV_POPULATE_WRITE) == 0)
        return ATTN_OK;
    snprintf(why, why_bytes, "taking %" PRIu64 " bytes of kv_bytes %" PRIu64 ": %s", bytes,
             m->bytes, strerror(errno));
    return ATTN_ENOMEM;
}

void cpu_memory_close(struct cpu_memory *m)
{
    clear_end(&m->clear);
    atomic_store(&m->is_closing, true);
    while (m->n_takers > 0)
        pthread_join(m->takers[--m->n_takers], NULL);
    if (m->base != NULL)
        munmap(m->base, m->bytes);
    if (m->fd >= 0)
        close(m->fd);
    *m = (struct cpu_memory){.fd = -1};
}
