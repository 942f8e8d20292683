/* shm_link.c: hello and welcome over the socket, the mapped rings, and messages through their
 * slots with the wakes that either side asks for.
 */
#define _GNU_SOURCE
#include "tests/daemon/transport/shm_link.h"
#include "proto/attn_time.h"

#include <errno.h>
#include <linux/futex.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

int shm_link_connect(const char *path)
{
    struct sockaddr_un un = {.sun_family = AF_UNIX};
    snprintf(un.sun_path, sizeof un.sun_path, "%s", path);
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (fd >= 0 && connect(fd, (struct sockaddr *)&un, sizeof un) == 0)
        return fd;
    close(fd);
    return -1;
}

bool shm_link_open(struct shm_link *l, const char *path, uint32_t n_slots, uint64_t region_bytes)
{
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(2 * sizeof(int))];
    } control;
    struct iovec iov = {&l->welcome, sizeof l->welcome};
    struct msghdr m = {.msg_iov = &iov,
                       .msg_iovlen = 1,
                       .msg_control = control.bytes,
                       .msg_controllen = sizeof control.bytes};
    struct shm_hello h = {.magic = SHM_MAGIC,
                          .version = SHM_VERSION,
                          .n_slots = n_slots,
                          .region_bytes = region_bytes};
    *l = (struct shm_link){.memfd = -1, .wake_fd = -1};
    l->socket = shm_link_connect(path);
    if (l->socket < 0)
        return false;
    if (send(l->socket, &h, sizeof h, MSG_NOSIGNAL) != sizeof h ||
        recvmsg(l->socket, &m, MSG_CMSG_CLOEXEC) != sizeof l->welcome || l->welcome.status != 0 ||
        m.msg_controllen < CMSG_LEN(2 * sizeof(int))) {
        shm_link_close(l);
        return false;
    }
    memcpy(&l->memfd, CMSG_DATA(&control.align), sizeof(int));
    memcpy(&l->wake_fd, CMSG_DATA(&control.align) + sizeof(int), sizeof(int));
    void *p = mmap(NULL, l->welcome.region_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, l->memfd, 0);
    if (p == MAP_FAILED) {
        shm_link_close(l);
        return false;
    }
    l->base = p;
    l->control = p;
    l->submits = (struct shm_submit *)(void *)(l->base + l->welcome.submit_offset);
    l->completes = (struct shm_complete *)(void *)(l->base + l->welcome.complete_offset);
    l->part_bytes =
        (l->welcome.region_bytes - l->welcome.data_offset) / l->welcome.n_slots / 128 * 128;
    return true;
}

void shm_link_close(struct shm_link *l)
{
    if (l->base != NULL)
        munmap(l->base, l->welcome.region_bytes);
    if (l->memfd >= 0)
        close(l->memfd);
    if (l->wake_fd >= 0)
        close(l->wake_fd);
    if (l->socket >= 0)
        close(l->socket);
    l->base = NULL;
    l->memfd = l->wake_fd = l->socket = -1;
}

void shm_link_wake(struct shm_link *l)
{
    uint64_t one = 1;
    if (write(l->wake_fd, &one, sizeof one) < 0)
        return; /* it is full, which is as good */
}

void shm_link_submit(struct shm_link *l, const struct shm_submit *e)
{
    l->submits[l->submitted % l->welcome.n_slots] = *e;
    l->submitted++;
    atomic_store(&l->control->submitted, l->submitted);
    if (atomic_exchange(&l->control->daemon_sleeps, 0) != 0)
        shm_link_wake(l);
}

bool shm_link_send(struct shm_link *l, const void *message, size_t bytes)
{
    uint32_t slot = 0;
    while (slot < l->welcome.n_slots && l->is_busy[slot])
        slot++;
    if (slot == l->welcome.n_slots || bytes > l->part_bytes / 2)
        return false;
    struct shm_submit e = {
        .request_offset = l->welcome.data_offset + slot * l->part_bytes,
        .request_bytes = (uint32_t)bytes,
        .room_bytes = (uint32_t)(l->part_bytes / 2),
        .slot = slot,
    };
    e.room_offset = e.request_offset + l->part_bytes / 2;
    memcpy(l->base + e.request_offset, message, bytes);
    l->is_busy[slot] = true;
    l->n_busy++;
    shm_link_submit(l, &e);
    return true;
}

bool shm_link_is_gone(struct shm_link *l, int timeout_ms)
{
    struct pollfd p = {.fd = l->socket, .events = POLLIN};
    char byte;
    for (;;) {
        if (poll(&p, 1, timeout_ms) <= 0)
            return false;
        ssize_t n = recv(l->socket, &byte, 1, MSG_DONTWAIT);
        if (n == 0 || (n < 0 && errno != EAGAIN))
            return true;
    }
}

static int64_t now_ms(void)
{
    return (int64_t)(attn_now_ns() / 1000000);
}

bool shm_link_receive(struct shm_link *l, int timeout_ms, const uint8_t **out_reply,
                      size_t *out_bytes)
{
    int64_t until = now_ms() + timeout_ms;
    while (atomic_load(&l->control->completed) == l->completed) {
        struct timespec slice = {.tv_nsec = 20000000};
        atomic_store(&l->control->client_sleeps, SHM_WAITS_ON_FUTEX);
        if (atomic_load(&l->control->completed) == l->completed)
            syscall(SYS_futex, &l->control->client_sleeps, FUTEX_WAIT, SHM_WAITS_ON_FUTEX, &slice,
                    NULL, 0);
        atomic_store(&l->control->client_sleeps, SHM_AWAKE);
        if (atomic_load(&l->control->completed) == l->completed &&
            (now_ms() >= until || shm_link_is_gone(l, 0)))
            return false;
    }
    struct shm_complete e = l->completes[l->completed++ % l->welcome.n_slots];
    if (e.slot < l->welcome.n_slots && l->is_busy[e.slot]) {
        l->is_busy[e.slot] = false;
        l->n_busy--;
    }
    if (e.reply_offset > l->welcome.region_bytes ||
        e.reply_bytes > l->welcome.region_bytes - e.reply_offset)
        return false; /* the test itself wrote over the ring */
    *out_reply = l->base + e.reply_offset;
    *out_bytes = e.reply_bytes;
    return true;
}
