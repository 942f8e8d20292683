/* lane_link.c: hello and welcome with their descriptors over the socket, the mapped page and
 * regions, and waiting for the word that says how far the daemon is.
 */
#define _GNU_SOURCE
#include "tests/daemon/transport/lane_link.h"

#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "tests/daemon/transport/shm_link.h"

struct lane_hello lane_link_hello(uint64_t in_bytes, uint64_t out_bytes)
{
    return (struct lane_hello){
        .magic = LANE_MAGIC, .version = LANE_VERSION, .in_bytes = in_bytes, .out_bytes = out_bytes};
}

int lane_link_memfd(size_t bytes, bool is_sealed)
{
    int fd = memfd_create("worker", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (ftruncate(fd, (off_t)bytes) != 0 ||
        (is_sealed && fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0))
        abort();
    return fd;
}

static bool send_hello(int socket, const void *h, size_t h_bytes, int fd)
{
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(sizeof fd)];
    } control = {0};
    struct iovec iov = {(void *)(uintptr_t)h, h_bytes};
    struct msghdr m = {.msg_iov = &iov, .msg_iovlen = 1};
    if (fd >= 0) {
        m.msg_control = control.bytes;
        m.msg_controllen = sizeof control.bytes;
        control.align.cmsg_len = CMSG_LEN(sizeof fd);
        control.align.cmsg_level = SOL_SOCKET;
        control.align.cmsg_type = SCM_RIGHTS;
        memcpy(CMSG_DATA(&control.align), &fd, sizeof fd);
    }
    return sendmsg(socket, &m, MSG_NOSIGNAL) == (ssize_t)h_bytes;
}

static bool take_welcome(struct lane_link *l, int out_fds[2])
{
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(2 * sizeof(int))];
    } control = {0};
    struct iovec iov = {&l->welcome, sizeof l->welcome};
    struct msghdr m = {.msg_iov = &iov,
                       .msg_iovlen = 1,
                       .msg_control = control.bytes,
                       .msg_controllen = sizeof control.bytes};
    struct pollfd p = {.fd = l->socket, .events = POLLIN};
    if (poll(&p, 1, 20000) != 1 || recvmsg(l->socket, &m, MSG_CMSG_CLOEXEC) != sizeof l->welcome ||
        l->welcome.status != 0)
        return false;
    memcpy(out_fds, CMSG_DATA(&control.align), 2 * sizeof(int));
    return true;
}

bool lane_link_say(struct lane_link *l, const char *path, const void *h, size_t h_bytes, int fd)
{
    int fds[2];
    *l = (struct lane_link){.socket = shm_link_connect(path)};
    bool is_open = l->socket >= 0 && send_hello(l->socket, h, h_bytes, fd) && take_welcome(l, fds);
    if (is_open) {
        int both = PROT_READ | PROT_WRITE;
        l->page = mmap(NULL, LANE_PAGE_BYTES, both, MAP_SHARED, fds[0], 0);
        l->in = mmap(NULL, l->welcome.in_bytes, both, MAP_SHARED, fds[1], 0);
        l->out_bytes = (size_t)((const struct lane_hello *)h)->out_bytes;
        l->out = mmap(NULL, l->out_bytes, both, MAP_SHARED, fd, 0);
        close(fds[0]);
        close(fds[1]);
        if (l->page == MAP_FAILED || l->in == MAP_FAILED || l->out == MAP_FAILED)
            abort();
    } else if (l->socket >= 0) {
        close(l->socket);
        l->socket = -1;
    }
    if (fd >= 0)
        close(fd);
    return is_open;
}

bool lane_link_open(struct lane_link *l, const char *path, uint64_t in_bytes, uint64_t out_bytes)
{
    struct lane_hello h = lane_link_hello(in_bytes, out_bytes);
    return lane_link_say(l, path, &h, sizeof h, lane_link_memfd(out_bytes, true));
}

void lane_link_close(struct lane_link *l)
{
    if (l->socket < 0)
        return;
    close(l->socket);
    munmap(l->page, LANE_PAGE_BYTES);
    munmap(l->in, l->welcome.in_bytes);
    munmap(l->out, l->out_bytes);
}

int lane_link_await(struct lane_link *l, uint32_t bell, int timeout_ms)
{
    const _Atomic uint32_t *done = (const _Atomic uint32_t *)(void *)l->out;
    struct timespec start, now;
    clock_gettime(CLOCK_MONOTONIC, &start);
    for (;;) {
        uint64_t verdict = atomic_load(&l->page->verdict);
        if (atomic_load(done) == bell)
            return 0;
        if ((uint32_t)verdict == bell && bell != 0)
            return (int32_t)(verdict >> 32);
        clock_gettime(CLOCK_MONOTONIC, &now);
        if ((now.tv_sec - start.tv_sec) * 1000 + (now.tv_nsec - start.tv_nsec) / 1000000 >
            timeout_ms)
            return 1;
        poll(NULL, 0, 0);
    }
}

int lane_link_ring(struct lane_link *l, int timeout_ms)
{
    atomic_store(&l->page->bell, ++l->count);
    return lane_link_await(l, l->count, timeout_ms);
}

bool lane_link_is_gone(struct lane_link *l, int timeout_ms)
{
    struct pollfd p = {.fd = l->socket, .events = POLLIN};
    char byte;
    return poll(&p, 1, timeout_ms) == 1 && recv(l->socket, &byte, 1, MSG_DONTWAIT) <= 0;
}
