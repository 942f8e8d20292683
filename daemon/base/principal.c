/* principal.c: the peer of a socket, and principals as text. */
#define _GNU_SOURCE /* struct ucred */
#include "daemon/base/principal.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <stdio.h>
#include <string.h>

struct principal principal_of_socket(int fd)
{
    struct ucred who;
    socklen_t n = sizeof who;
    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &who, &n) != 0)
        return (struct principal){.kind = PRINCIPAL_UNKNOWN, .family = AF_UNIX};
    return (struct principal){
        .kind = PRINCIPAL_USER, .family = AF_UNIX, .uid = who.uid, .gid = who.gid, .pid = who.pid};
}

static const unsigned char mapped[12] = {[10] = 0xff, [11] = 0xff};

static bool is_ipv4(const struct principal *p)
{
    return memcmp(p->host, mapped, sizeof mapped) == 0;
}

struct principal principal_of_address(const struct sockaddr *address)
{
    struct principal p = {.kind = PRINCIPAL_ANONYMOUS, .family = address->sa_family};
    if (address->sa_family == AF_INET) {
        memcpy(p.host, mapped, sizeof mapped);
        memcpy(p.host + 12, &((const struct sockaddr_in *)(const void *)address)->sin_addr, 4);
    } else if (address->sa_family == AF_INET6) {
        memcpy(p.host, &((const struct sockaddr_in6 *)(const void *)address)->sin6_addr, 16);
        if (is_ipv4(&p)) /* it came to a socket of both */
            p.family = AF_INET;
    }
    return p;
}

bool principal_is_same(const struct principal *a, const struct principal *b)
{
    if (a->kind != b->kind || strcmp(a->certificate, b->certificate) != 0)
        return false;
    if (a->kind == PRINCIPAL_USER)
        return a->uid == b->uid;
    bool is_whole = is_ipv4(a) || is_ipv4(b);
    return a->certificate[0] != '\0' || memcmp(a->host, b->host, is_whole ? 16 : 8) == 0;
}

void principal_set_certificate(struct principal *p, const char *name)
{
    snprintf(p->certificate, sizeof p->certificate, "%s", name);
}

const char *principal_format(const struct principal *p, char out[PRINCIPAL_TEXT_BYTES])
{
    const char *family = p->family == AF_INET6 ? "IPv6" : p->family == AF_INET ? "IPv4" : "?";
    char host[INET6_ADDRSTRLEN];
    int n = 0;
    switch (p->kind) {
    case PRINCIPAL_USER:
        n = snprintf(out, PRINCIPAL_TEXT_BYTES, "uid %ld, gid %ld, pid %ld", (long)p->uid,
                     (long)p->gid, (long)p->pid);
        break;
    case PRINCIPAL_ANONYMOUS:
        if (is_ipv4(p))
            inet_ntop(AF_INET, p->host + sizeof mapped, host, sizeof host);
        else
            inet_ntop(AF_INET6, p->host, host, sizeof host);
        n = snprintf(out, PRINCIPAL_TEXT_BYTES, "anonymous over %s from %s", family, host);
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
