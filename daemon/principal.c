/* principal.c: see principal.h. */
#define _GNU_SOURCE /* struct ucred */
#include "daemon/principal.h"

#include <stdio.h>
#include <sys/socket.h>

struct principal principal_of_socket(int fd)
{
    struct ucred who;
    socklen_t n = sizeof who;
    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &who, &n) != 0)
        return (struct principal){.kind = PRINCIPAL_UNKNOWN, .family = AF_UNIX};
    return (struct principal){
        .kind = PRINCIPAL_USER, .family = AF_UNIX, .uid = who.uid, .gid = who.gid, .pid = who.pid};
}

const char *principal_format(const struct principal *p, char out[PRINCIPAL_TEXT_BYTES])
{
    const char *family = p->family == AF_INET6 ? "IPv6" : p->family == AF_INET ? "IPv4" : "?";
    switch (p->kind) {
    case PRINCIPAL_USER:
        snprintf(out, PRINCIPAL_TEXT_BYTES, "uid %ld, gid %ld, pid %ld", (long)p->uid, (long)p->gid,
                 (long)p->pid);
        return out;
    case PRINCIPAL_ANONYMOUS:
        snprintf(out, PRINCIPAL_TEXT_BYTES, "anonymous over %s", family);
        return out;
    case PRINCIPAL_UNKNOWN:
        break;
    }
    snprintf(out, PRINCIPAL_TEXT_BYTES, "unknown");
    return out;
}
