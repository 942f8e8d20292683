/* sockets.c: takes over a kept listening socket, or makes one. */
#include "daemon/keeper/sockets.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "daemon/keeper/keep.h"

/* Makes a name for the keeper, without colons, since those separate names. */
static void keep_name(const char *what, char out[KEEP_NAME_BYTES])
{
    snprintf(out, KEEP_NAME_BYTES, "%s", what);
    for (char *p = out; *p != '\0'; p++)
        if (*p == ':')
            *p = '=';
}

static socklen_t address_bytes(const struct address *a)
{
    switch (a->sa.any.sa_family) {
    case AF_UNIX:
        return sizeof a->sa.un;
    case AF_INET6:
        return sizeof a->sa.in6;
    default:
        return sizeof a->sa.in;
    }
}

/* Whether clients can reach a kept socket: its file may have been removed. */
static bool is_reachable(const struct address *a)
{
    struct stat sb;
    return a->sa.any.sa_family != AF_UNIX ||
           (lstat(a->sa.un.sun_path, &sb) == 0 && S_ISSOCK(sb.st_mode));
}

/* A new listening socket, or -1 with errno. */
static int listen_once(const struct address *a, int backlog)
{
    int one = 1, zero = 0, type = a->is_shm ? SOCK_SEQPACKET : SOCK_STREAM;
    bool is_unix = a->sa.any.sa_family == AF_UNIX;
    int fd = socket(a->sa.any.sa_family, type | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return -1;
    if (!is_unix)
        setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (a->is_every)
        setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &zero, sizeof zero);
    /* the group may connect, except to the admin socket; others may not. The mode is set in time,
     * because nothing can connect before listen */
    mode_t mode = a->is_admin ? 0600 : 0660;
    if (bind(fd, &a->sa.any, address_bytes(a)) == 0 &&
        (!is_unix || chmod(a->sa.un.sun_path, mode) == 0) && listen(fd, backlog) == 0)
        return fd;
    int error = errno;
    close(fd);
    errno = error;
    return -1;
}

/* The same. All addresses are those of IPv4 on a host without IPv6. */
static int listen_at(const struct address *a, int backlog)
{
    int fd = listen_once(a, backlog);
    if (fd >= 0 || !a->is_every || (errno != EAFNOSUPPORT && errno != EADDRNOTAVAIL))
        return fd;
    struct address v4 = {.sa.in = {.sin_family = AF_INET, .sin_port = a->sa.in6.sin6_port}};
    return listen_once(&v4, backlog);
}

attn_status socket_listen(const char *what, const struct address *a, int backlog, int *out_fd,
                          char *why, size_t why_bytes)
{
    char name[KEEP_NAME_BYTES];
    keep_name(what, name);
    int fd = keep_take(name);
    if (fd >= 0 && is_reachable(a) && fcntl(fd, F_SETFL, O_NONBLOCK) == 0) {
        *out_fd = fd; /* made non-blocking, since that of a socket unit blocks */
        return ATTN_OK;
    }
    if (fd >= 0) {
        close(fd);
        keep_drop(name);
    }
    if (a->sa.any.sa_family == AF_UNIX) {
        attn_status st = address_claim_path(a, why, why_bytes);
        if (st != ATTN_OK)
            return st;
    }
    fd = listen_at(a, backlog);
    if (fd < 0) {
        snprintf(why, why_bytes, "cannot listen: %s", strerror(errno));
        return ATTN_EINVAL;
    }
    keep_put(name, fd);
    *out_fd = fd;
    return ATTN_OK;
}

void socket_unlisten(int fd, const struct address *a)
{
    if (fd >= 0)
        close(fd);
    if (a->sa.any.sa_family == AF_UNIX && !keep_is_there())
        unlink(a->sa.un.sun_path);
}
