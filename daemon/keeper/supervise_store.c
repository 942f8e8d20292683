/* supervise_store.c: reads the child's messages that store or drop descriptors, and hands all
 * descriptors to the next child. */
#define _GNU_SOURCE /* struct ucred */
#include "daemon/keeper/supervise_store.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "daemon/base/log.h"
#include "daemon/keeper/notify.h"

enum {
    FIRST_FD = 3, /* SD_LISTEN_FDS_START */
    MESSAGE_BYTES = 1024,
    MAX_MESSAGE_FDS = 16,
    DEFAULT_WATCHDOG_US = 60 * 1000 * 1000,
};

attn_status store_open(struct store *s)
{
    int ends[2], one = 1;
    uint64_t asked_us = notify_watchdog_us(); /* of our own supervisor, which gets the beats */
    *s = (struct store){.notify_fd = -1,
                        .child_fd = -1,
                        .watchdog_us = asked_us != 0 ? asked_us : DEFAULT_WATCHDOG_US};
    if (socketpair(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0, ends) != 0)
        return ATTN_EINTERNAL;
    s->notify_fd = ends[0];
    s->child_fd = ends[1];
    /* messages tell which child sent them: one may have ended since */
    return setsockopt(s->notify_fd, SOL_SOCKET, SO_PASSCRED, &one, sizeof one) == 0
               ? ATTN_OK
               : ATTN_EINTERNAL;
}

static void unlink_socket(int fd)
{
    struct sockaddr_un a;
    socklen_t n = sizeof a;
    if (getsockname(fd, (struct sockaddr *)&a, &n) == 0 && a.sun_family == AF_UNIX &&
        n > offsetof(struct sockaddr_un, sun_path) && a.sun_path[0] == '/')
        unlink(a.sun_path);
}

static void forget(struct store *s, uint32_t i)
{
    close(s->fds[i].fd);
    s->n_fds--;
    memmove(&s->fds[i], &s->fds[i + 1], (s->n_fds - i) * sizeof s->fds[0]);
}

void store_close(struct store *s)
{
    while (s->n_fds > 0) {
        unlink_socket(s->fds[0].fd);
        forget(s, 0);
    }
    if (s->notify_fd >= 0) {
        close(s->notify_fd);
        close(s->child_fd);
    }
    s->notify_fd = s->child_fd = -1;
}

void store_drop(struct store *s, const char *prefix)
{
    for (uint32_t i = s->n_fds; i-- > 0;)
        if (strncmp(s->fds[i].name, prefix, strlen(prefix)) == 0)
            forget(s, i);
}

/* --- messages --------------------------------------------------------------------------------- */

/* The value of the line VARIABLE=VALUE in a message; NULL: it is not there. */
static const char *line_of(const char *message, const char *variable, size_t *out_bytes)
{
    size_t n = strlen(variable);
    for (const char *p = message; *p != '\0'; p += strcspn(p, "\n"), p += *p == '\n') {
        if (strncmp(p, variable, n) != 0 || p[n] != '=')
            continue;
        *out_bytes = strcspn(p + n + 1, "\n");
        return p + n + 1;
    }
    return NULL;
}

static bool has_line(const char *message, const char *variable)
{
    size_t n;
    const char *value = line_of(message, variable, &n);
    return value != NULL && n == 1 && value[0] == '1';
}

static void keep_fd(struct store *s, const char *name, int fd)
{
    if (s->n_fds == KEEP_MAX_FDS) {
        log_warn("%s is not kept: %d descriptors are", name, KEEP_MAX_FDS);
        close(fd);
        return;
    }
    struct kept_fd *k = &s->fds[s->n_fds++];
    k->fd = fd;
    snprintf(k->name, sizeof k->name, "%s", name);
}

static void take_message(struct store *s, const char *message, const int *fds, uint32_t n_fds)
{
    char name[KEEP_NAME_BYTES] = "stored";
    size_t n;
    const char *given = line_of(message, "FDNAME", &n);
    if (given != NULL)
        snprintf(name, sizeof name, "%.*s", (int)n, given);
    if (has_line(message, "FDSTOREREMOVE")) {
        for (uint32_t i = s->n_fds; i-- > 0;)
            if (strcmp(s->fds[i].name, name) == 0)
                forget(s, i);
    }
    bool is_store = has_line(message, "FDSTORE");
    for (uint32_t i = 0; i < n_fds; i++) {
        if (is_store)
            keep_fd(s, name, fds[i]);
        else
            close(fds[i]); /* if it is a barrier's, this answers it */
    }
    s->is_ready |= has_line(message, "READY");
    s->n_beats += has_line(message, "WATCHDOG");
    if (n_fds == 0)
        notify_send(message); /* to our own supervisor, if there is one */
}

bool store_read(struct store *s, pid_t child)
{
    char text[MESSAGE_BYTES + 1];
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(sizeof(struct ucred)) + CMSG_SPACE(MAX_MESSAGE_FDS * sizeof(int))];
    } control;
    struct iovec iov = {text, MESSAGE_BYTES};
    struct msghdr m = {.msg_iov = &iov,
                       .msg_iovlen = 1,
                       .msg_control = control.bytes,
                       .msg_controllen = sizeof control.bytes};
    ssize_t n;
    do
        n = recvmsg(s->notify_fd, &m, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
    while (n < 0 && errno == EINTR);
    if (n < 0)
        return false;
    text[n] = '\0';
    int fds[MAX_MESSAGE_FDS];
    uint32_t n_fds = 0;
    pid_t sender = 0;
    for (struct cmsghdr *c = CMSG_FIRSTHDR(&m); c != NULL; c = CMSG_NXTHDR(&m, c)) {
        if (c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS) {
            n_fds = (uint32_t)((c->cmsg_len - CMSG_LEN(0)) / sizeof(int));
            memcpy(fds, CMSG_DATA(c), n_fds * sizeof(int));
        } else if (c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_CREDENTIALS) {
            struct ucred who;
            memcpy(&who, CMSG_DATA(c), sizeof who);
            sender = who.pid;
        }
    }
    if (child != 0 && sender == child) { /* sender is 0 if it is in another pid namespace */
        take_message(s, text, fds, n_fds);
        return true;
    }
    for (uint32_t i = 0; i < n_fds; i++)
        close(fds[i]);
    return true;
}

/* --- the child's side ------------------------------------------------------------------------- */

bool store_hand_over(const struct store *s)
{
    char number[16], watchdog[24], notify[32], names[KEEP_MAX_FDS * KEEP_NAME_BYTES] = "";
    size_t at = 0;
    int copies[KEEP_MAX_FDS];
    /* first all out of the way of the numbers that they get */
    int notify_fd = fcntl(s->child_fd, F_DUPFD, FIRST_FD + KEEP_MAX_FDS); /* open after exec */
    if (notify_fd < 0)
        return false;
    for (uint32_t i = 0; i < s->n_fds; i++) {
        copies[i] = fcntl(s->fds[i].fd, F_DUPFD_CLOEXEC, FIRST_FD + KEEP_MAX_FDS);
        if (copies[i] < 0)
            return false;
        at += (size_t)snprintf(names + at, sizeof names - at, "%s%s", i == 0 ? "" : ":",
                               s->fds[i].name);
    }
    for (uint32_t i = 0; i < s->n_fds; i++)
        if (dup2(copies[i], FIRST_FD + (int)i) < 0)
            return false;
    snprintf(notify, sizeof notify, "fd:%d", notify_fd);
    snprintf(number, sizeof number, "%u", (unsigned)s->n_fds);
    bool is_set = setenv("LISTEN_FDS", number, 1) == 0 && setenv("LISTEN_FDNAMES", names, 1) == 0;
    snprintf(number, sizeof number, "%d", (int)getpid());
    is_set = is_set && setenv("LISTEN_PID", number, 1) == 0;
    snprintf(number, sizeof number, "%d", KEEP_MAX_FDS);
    snprintf(watchdog, sizeof watchdog, "%" PRIu64, s->watchdog_us);
    return is_set && setenv("FDSTORE", number, 1) == 0 && setenv("NOTIFY_SOCKET", notify, 1) == 0 &&
           setenv("WATCHDOG_USEC", watchdog, 1) == 0 && unsetenv("WATCHDOG_PID") == 0;
}
