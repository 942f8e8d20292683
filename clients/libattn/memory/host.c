/* host.c: lanes in host memory, to a daemon that computes on the CPU: regions are memfds, and
 * to enqueue a layer is to do it. */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "clients/libattn/memory/memory.h"
#include "proto/attn_time.h"

#define POLITE_NS 20000u /* spinning for longer lets others run in between */

struct lane_memory {
    struct {
        void *p;
        uint64_t bytes;
    } maps[2];
    uint32_t n_maps;
    uint32_t count;
    bool is_broken; /* a layer failed: those behind it do nothing */
};

static attn_status host_open(struct lane_memory **out_m, struct lane_device *out_device, char *why,
                             size_t why_bytes)
{
    struct lane_memory *m = calloc(1, sizeof *m);
    if (m == NULL) {
        snprintf(why, why_bytes, "no memory for a lane");
        return ATTN_ENOMEM;
    }
    *out_device = (struct lane_device){0};
    *out_m = m;
    return ATTN_OK;
}

static void host_close(struct lane_memory *m)
{
    for (uint32_t i = 0; i < m->n_maps; i++)
        munmap(m->maps[i].p, m->maps[i].bytes);
    free(m);
}

static attn_status host_map(struct lane_memory *m, int fd, uint64_t bytes, void **out_p, char *why,
                            size_t why_bytes)
{
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (p == MAP_FAILED) {
        snprintf(why, why_bytes, "mapping a region of %llu bytes: %s", (unsigned long long)bytes,
                 strerror(errno));
        return ATTN_ENOMEM;
    }
    m->maps[m->n_maps].p = p;
    m->maps[m->n_maps++].bytes = bytes;
    *out_p = p;
    return ATTN_OK;
}

static attn_status host_make(struct lane_memory *m, uint64_t bytes, int *out_fd, void **out_p,
                             char *why, size_t why_bytes)
{
    int fd = memfd_create("attn-lane", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0 || ftruncate(fd, (off_t)bytes) != 0 ||
        fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0) {
        snprintf(why, why_bytes, "a memfd of %llu bytes: %s", (unsigned long long)bytes,
                 strerror(errno));
        if (fd >= 0)
            close(fd);
        return ATTN_ENOMEM;
    }
    attn_status st = host_map(m, fd, bytes, out_p, why, why_bytes);
    if (st == ATTN_OK)
        *out_fd = fd;
    else
        close(fd);
    return st;
}

static attn_status host_page_map(struct lane_memory *m, struct lane_page *page,
                                 struct lane_page **out_p, char *why, size_t why_bytes)
{
    (void)m, (void)why, (void)why_bytes;
    *out_p = page;
    return ATTN_OK;
}

static attn_status host_restart(struct lane_memory *m, uint32_t count, char *why, size_t why_bytes)
{
    (void)why, (void)why_bytes;
    m->count = count;
    m->is_broken = false;
    return ATTN_OK;
}

static int32_t wait_for(const struct lane_layer *l, uint32_t bell)
{
    uint64_t start_ns = attn_now_ns(), passed_ns = 0;
    int32_t status;
    while (!lane_is_answered(l->page, l->done, bell, &status)) {
        if (atomic_load(&l->page->stop))
            return ATTN_ECONN;
        if (passed_ns > l->wait_ns)
            return ATTN_ETIMEDOUT;
        passed_ns = attn_now_ns() - start_ns;
        if (passed_ns > POLITE_NS)
            sched_yield();
        else
            attn_cpu_pause();
    }
    return status;
}

static void copy(const struct lane_part *p)
{
    const uint64_t row = p->stride != 0 ? p->row_bytes : p->bytes;
    for (uint64_t at = 0, i = 0; at < p->bytes; at += row, i++)
        memcpy((char *)p->to + at, (const char *)p->from + i * p->stride, row);
}

static attn_status host_enqueue(struct lane_memory *m, void *stream, const struct lane_layer *l,
                                char *why, size_t why_bytes)
{
    (void)stream, (void)why, (void)why_bytes;
    if (!m->is_broken) {
        for (int i = 0; i < LANE_PARTS; i++)
            if (l->in[i].from != NULL && l->in[i].from != l->in[i].to)
                copy(&l->in[i]);
        atomic_store_explicit(&l->page->bell, ++m->count, memory_order_release);
        int32_t status = wait_for(l, m->count);
        if (status != ATTN_OK) {
            m->is_broken = true;
            atomic_store(&l->page->fault, status);
        }
    }
    if (m->is_broken)
        memset(l->poison, 0xff, l->poison_bytes);
    for (int i = 0; i < 2; i++)
        if (l->out[i].to != NULL)
            copy(&l->out[i]);
    return ATTN_OK;
}

static bool host_is_capturing(struct lane_memory *m, void *stream)
{
    (void)m, (void)stream;
    return false;
}

const struct lane_memory_ops lane_memory_host = {
    .abi = LANE_CUDA_ABI,
    .open = host_open,
    .close = host_close,
    .region_make = host_make,
    .region_map = host_map,
    .page_map = host_page_map,
    .restart = host_restart,
    .enqueue = host_enqueue,
    .is_capturing = host_is_capturing,
};
