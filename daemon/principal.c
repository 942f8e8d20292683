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

void principal_set_certificate(struct principal *p, const char *name)
{
    snprintf(p->certificate, sizeof p->certificate, "%s", name);
}

const char *principal_format(const struct principal *p, char out[PRINCIPAL_TEXT_BYTES])
{
    const char *family = p->family == AF_INET6 ? "IPv6" : p->family == AF_INET ? "IPv4" : "?";
    int n = 0;
    switch (p->kind) {
    case PRINCIPAL_USER:
        n = snprintf(out, PRINCIPAL_TEXT_BYTES, "uid %ld, gid %ld, pid %ld", (long)p->uid,
                     (long)p->gid, (long)p->pid);
        break;
    case PRINCIPAL_ANONYMOUS:
        n = snprintf(out, PRINCIPAL_TEXT_BYTES, "anonymous over %s", family);
        break;
    case PRINCIPAL_UNKNOWN:
        n = snprintf(out, PRINCIPAL_TEXT_BYTES, "unknown");
        break;
    }
    if (p->certificate[0] != '\0')
        n += snprintf(out + n, PRINCIPAL_TEXT_BYTES - (size_t)n, ", certificate of %.63s",
                      p->certificate);
    if (p->tenant[0] != '\0')
        snprintf(out + n, PRINCIPAL_TEXT_BYTES - (size_t)n, ", tenant %.63s", p->tenant);
    return out;
}
