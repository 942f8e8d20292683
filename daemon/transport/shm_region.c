/* shm_region.c: makes and frees the memory that is shared with one client, on the loop's thread. */
#define _GNU_SOURCE /* memfd_create */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include "daemon/transport/shm_internal.h"
#include "kernels/backend.h"

enum { MIN_REGION_BYTES = 64 << 10, PAGE_BYTES = 4096 };

static uint32_t power_of_two(uint32_t n)
{
    while ((n & (n - 1)) != 0)
        n &= n - 1;
    return n;
}

attn_status shm_memory_take(struct shm_client *c, uint64_t bytes, char *why, size_t why_bytes)
{
    struct transport_env *env = c->t->env;
    uint64_t all = config_now(env->cfg, shm_memory_bytes);
    if (all > env->shared_most)
        all = env->shared_most;
    uint64_t n_free = all > env->shared_bytes ? all - env->shared_bytes : 0;
    if (bytes > n_free) {
        snprintf(why, why_bytes,
                 "%" PRIu64 " bytes of shared memory, %" PRIu64 " of listen.shm_memory's %" PRIu64
                 " are free",
                 bytes, n_free, all);
        return ATTN_EQUOTA;
    }
    const struct share *full = share_take(c->share, SHARE_SHM_BYTES, bytes, n_free, all);
    if (full != NULL) {
        char text[SHARE_TEXT_BYTES];
        snprintf(why, why_bytes, "%s", share_say(full, SHARE_SHM_BYTES, n_free, text));
        return ATTN_EQUOTA;
    }
    env->shared_bytes += bytes;
    c->shared_bytes += bytes;
    return ATTN_OK;
}

void shm_memory_give(struct shm_client *c)
{
    c->t->env->shared_bytes -= c->shared_bytes;
    share_give(c->share, SHARE_SHM_BYTES, c->shared_bytes);
    c->shared_bytes = 0;
}

attn_status shm_region_open(struct shm_client *c, const struct shm_hello *h, int *out_fd, char *why,
                            size_t why_bytes)
{
    struct transport_shm *t = c->t;
    const struct config *cfg = t->env->cfg;
    uint64_t bytes = h->region_bytes, most_bytes = config_now(cfg, shm_client_bytes);
    uint32_t n_slots = config_now(cfg, shm_slots);
    if (bytes == 0 || bytes > most_bytes)
        bytes = most_bytes;
    if (bytes < MIN_REGION_BYTES)
        bytes = MIN_REGION_BYTES;
    bytes = bytes / PAGE_BYTES * PAGE_BYTES;
    c->n_slots = power_of_two(h->n_slots == 0 || h->n_slots > n_slots ? n_slots : h->n_slots);
    attn_status st = shm_memory_take(c, bytes + shm_slots_bytes(c), why, why_bytes);
    if (st != ATTN_OK)
        return st;
    st = ATTN_ENOMEM;
    int fd = memfd_create("attnd-shm", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    void *p = MAP_FAILED;
    if (fd < 0 || ftruncate(fd, (off_t)bytes) != 0 ||
        fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
        snprintf(why, why_bytes, "a sealed memfd of %" PRIu64 " bytes: %s", bytes, strerror(errno));
        goto fail;
    }
    p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    c->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (p == MAP_FAILED || c->wake_fd < 0) {
        snprintf(why, why_bytes, "mapping %" PRIu64 " bytes: %s", bytes, strerror(errno));
        goto fail;
    }
    st = t->env->backend_ops->host_register(t->env->backend, p, bytes);
    if (st != ATTN_OK) {
        snprintf(why, why_bytes, "the device does not take %" PRIu64 " bytes of host memory",
                 bytes);
        goto fail;
    }
    c->base = p; /* from here on shm_region_close frees everything */
    c->region_bytes = bytes;
    *out_fd = fd;
    st = shm_client_init(c);
    if (st != ATTN_OK)
        snprintf(why, why_bytes, "no memory for %" PRIu32 " slots", c->n_slots);
    return st;
fail:
    if (p != MAP_FAILED)
        munmap(p, bytes);
    if (fd >= 0)
        close(fd);
    return st;
}

void shm_region_close(struct shm_client *c)
{
    struct transport_env *env = c->t->env;
    if (c->base != NULL) {
        env->backend_ops->host_unregister(env->backend, c->base, c->region_bytes);
        munmap(c->base, c->region_bytes);
    }
    shm_client_fini(c);
    if (c->wake_fd >= 0)
        close(c->wake_fd);
}

bool shm_send_packet(int fd, const void *bytes, size_t n_bytes, const int *fds, size_t n_fds)
{
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(2 * sizeof(int))];
    } control = {0};
    struct iovec iov = {(void *)(uintptr_t)bytes, n_bytes};
    struct msghdr m = {.msg_iov = &iov, .msg_iovlen = 1};
    if (n_fds > 0) {
        m.msg_control = control.bytes;
        m.msg_controllen = CMSG_SPACE(n_fds * sizeof *fds);
        control.align.cmsg_len = CMSG_LEN(n_fds * sizeof *fds);
        control.align.cmsg_level = SOL_SOCKET;
        control.align.cmsg_type = SCM_RIGHTS;
        memcpy(CMSG_DATA(&control.align), fds, n_fds * sizeof *fds);
    }
    return sendmsg(fd, &m, MSG_DONTWAIT | MSG_NOSIGNAL) == (ssize_t)n_bytes;
}
