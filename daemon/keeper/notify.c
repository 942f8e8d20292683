/* notify.c: sends states and descriptors to systemd by its notification protocol (sd_notify(3)). */
#define _GNU_SOURCE /* pipe2 */
#include "daemon/keeper/notify.h"

#include <fcntl.h>
#include <poll.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

enum { PATIENCE_S = 5 };

/* The socket of --supervise's child; -1: $NOTIFY_SOCKET has an address. */
static int inherited(const char *path)
{
    return strncmp(path, "fd:", 3) == 0 ? (int)strtol(path + 3, NULL, 10) : -1;
}

/* Parses a socket's path, or abstract name behind an @. */
static bool parse(const char *path, struct sockaddr_un *out, socklen_t *out_bytes)
{
    size_t n = strlen(path);
    if ((path[0] != '/' && path[0] != '@') || n >= sizeof out->sun_path)
        return false;
    *out = (struct sockaddr_un){.sun_family = AF_UNIX};
    memcpy(out->sun_path, path, n);
    if (path[0] == '@')
        out->sun_path[0] = '\0';
    *out_bytes = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + n);
    return true;
}

bool notify_send_fd(const char *state, int fd)
{
    const char *path = getenv("NOTIFY_SOCKET");
    struct sockaddr_un to;
    union {
        struct cmsghdr head;
        char bytes[CMSG_SPACE(sizeof(int))];
    } control = {0};
    struct iovec iov = {(void *)(uintptr_t)state, strlen(state)};
    struct msghdr m = {.msg_iov = &iov, .msg_iovlen = 1};
    int s = path != NULL ? inherited(path) : -1;
    if (s < 0) {
        if (path == NULL || !parse(path, &to, &m.msg_namelen))
            return false;
        m.msg_name = &to;
    }
    if (fd >= 0) {
        m.msg_control = control.bytes;
        m.msg_controllen = sizeof control.bytes;
        control.head.cmsg_level = SOL_SOCKET;
        control.head.cmsg_type = SCM_RIGHTS;
        control.head.cmsg_len = CMSG_LEN(sizeof fd);
        memcpy(CMSG_DATA(&control.head), &fd, sizeof fd);
    }
    /* most states may be lost if systemd does not read; for descriptors and READY=1 it waits */
    bool is_awaited = fd >= 0 || strncmp(state, "READY=1", 7) == 0;
    const struct timeval patience = {.tv_sec = PATIENCE_S};
    if (m.msg_name != NULL)
        s = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (s < 0)
        return false;
    setsockopt(s, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
    bool is_sent =
        sendmsg(s, &m, MSG_NOSIGNAL | (is_awaited ? 0 : MSG_DONTWAIT)) == (ssize_t)iov.iov_len;
    if (m.msg_name != NULL)
        close(s);
    return is_sent;
}

void notify_send(const char *state)
{
    (void)notify_send_fd(state, -1);
}

void notify_wait_until_read(void)
{
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0)
        return;
    bool is_sent = notify_send_fd("BARRIER=1", ends[1]);
    close(ends[1]);
    if (is_sent) { /* the reader closes its end when it has read all before it */
        struct pollfd p = {.fd = ends[0]};
        (void)poll(&p, 1, 1000 * PATIENCE_S);
    }
    close(ends[0]);
}

uint64_t notify_watchdog_us(void)
{
    const char *us = getenv("WATCHDOG_USEC"), *pid = getenv("WATCHDOG_PID");
    if (us == NULL || (pid != NULL && strtoll(pid, NULL, 10) != getpid()))
        return 0;
    return strtoull(us, NULL, 10);
}
