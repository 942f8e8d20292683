/* address.c: parses and formats addresses, and clears the path of a Unix socket. */
#include "daemon/base/address.h"

#include <arpa/inet.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

attn_status address_parse_host_port(const char *text, struct address *out, char *why,
                                    size_t why_bytes)
{
    struct address a;
    memset(&a, 0, sizeof(a));
    const char *colon = strrchr(text, ':');
    if (colon == NULL || colon[1] == '\0') {
        snprintf(why, why_bytes, "\"%s\" has no port: HOST:PORT, as 127.0.0.1:7471", text);
        return ATTN_EINVAL;
    }
    char *end;
    unsigned long port = strtoul(colon + 1, &end, 10);
    if (colon[1] < '0' || colon[1] > '9' || *end != '\0' || port > 65535) {
        snprintf(why, why_bytes, "port \"%s\" is not a number from 0 to 65535", colon + 1);
        return ATTN_EINVAL;
    }
    char host[64];
    size_t n = (size_t)(colon - text);
    bool is_v6 = n >= 2 && text[0] == '[' && text[n - 1] == ']';
    if (is_v6) {
        text++;
        n -= 2;
    }
    if (n == 0 || n >= sizeof(host)) {
        snprintf(why, why_bytes, "host is %s", n == 0 ? "empty" : "too long for an address");
        return ATTN_EINVAL;
    }
    memcpy(host, text, n);
    host[n] = '\0';
    if (is_v6) {
        a.sa.in6.sin6_family = AF_INET6;
        a.sa.in6.sin6_port = htons((uint16_t)port);
        if (inet_pton(AF_INET6, host, &a.sa.in6.sin6_addr) == 1) {
            a.is_loopback = IN6_IS_ADDR_LOOPBACK(&a.sa.in6.sin6_addr);
            *out = a;
            return ATTN_OK;
        }
    } else if (strcmp(host, "*") == 0) {
        a.sa.in6.sin6_family = AF_INET6;
        a.sa.in6.sin6_port = htons((uint16_t)port);
        a.sa.in6.sin6_addr = in6addr_any;
        a.is_every = true;
        *out = a;
        return ATTN_OK;
    } else {
        const char *numeric = strcmp(host, "localhost") == 0 ? "127.0.0.1" : host;
        a.sa.in.sin_family = AF_INET;
        a.sa.in.sin_port = htons((uint16_t)port);
        if (inet_pton(AF_INET, numeric, &a.sa.in.sin_addr) == 1) {
            a.is_loopback = (ntohl(a.sa.in.sin_addr.s_addr) >> 24) == 127;
            *out = a;
            return ATTN_OK;
        }
    }
    snprintf(why, why_bytes, "host \"%s\" is not an IPv4 address, [IPv6 address] or localhost",
             host);
    return ATTN_EINVAL;
}

attn_status address_parse_url(const char *url, struct address *out, char *why, size_t why_bytes)
{
    bool is_tls = strncmp(url, "tls+tcp://", 10) == 0;
    if (is_tls || strncmp(url, "tcp://", 6) == 0) {
        attn_status st = address_parse_host_port(url + (is_tls ? 10 : 6), out, why, why_bytes);
        if (st == ATTN_OK)
            out->is_tls = is_tls;
        return st;
    }
    bool is_shm = strncmp(url, "shm://", 6) == 0 || strncmp(url, "gpu://", 6) == 0;
    bool is_admin = strncmp(url, "admin://", 8) == 0;
    if (strncmp(url, "ipc://", 6) != 0 && !is_shm && !is_admin) {
        snprintf(why, why_bytes,
                 "\"%s\" begins with none of ipc://, shm://, gpu://, tcp:// and tls+tcp://", url);
        return ATTN_EINVAL;
    }
    const char *path = url + (is_admin ? 8 : 6);
    struct address a;
    memset(&a, 0, sizeof(a));
    if (path[0] != '/') {
        snprintf(why, why_bytes, "path \"%s\" is not absolute (%.*s/run/...)", path,
                 is_admin ? 0 : 6, url);
        return ATTN_EINVAL;
    }
    if (strlen(path) >= sizeof(a.sa.un.sun_path)) {
        snprintf(why, why_bytes, "path of %zu bytes is over the limit of %zu of Unix sockets",
                 strlen(path), sizeof(a.sa.un.sun_path) - 1);
        return ATTN_EINVAL;
    }
    a.sa.un.sun_family = AF_UNIX;
    strcpy(a.sa.un.sun_path, path);
    a.is_loopback = true;
    a.is_shm = is_shm;
    a.is_admin = is_admin;
    *out = a;
    return ATTN_OK;
}

/* The folder of a path; "": the root. */
struct folder {
    char path[sizeof(((struct sockaddr_un *)0)->sun_path)];
};

static struct folder folder_of(const char *path)
{
    struct folder f;
    snprintf(f.path, sizeof(f.path), "%.*s", (int)(strrchr(path, '/') - path), path);
    return f;
}

/* Whether the path is free, or a socket's. */
static attn_status check_file(const struct sockaddr_un *un, bool *out_exists, char *why,
                              size_t why_bytes)
{
    struct stat sb;
    *out_exists = lstat(un->sun_path, &sb) == 0;
    if (!*out_exists || S_ISSOCK(sb.st_mode))
        return ATTN_OK;
    snprintf(why, why_bytes, "the path exists and is no socket");
    return ATTN_EINVAL;
}

static attn_status check_path(const struct sockaddr_un *un, char *why, size_t why_bytes)
{
    bool exists;
    struct folder in = folder_of(un->sun_path);
    if (in.path[0] != '\0' && access(in.path, F_OK) != 0) { /* can it be made? */
        struct folder above = folder_of(in.path);
        if (access(above.path[0] != '\0' ? above.path : "/", W_OK | X_OK) != 0) {
            snprintf(why, why_bytes, "directory %s cannot be made: %s", in.path, strerror(errno));
            return ATTN_EINVAL;
        }
    } else if (access(in.path[0] != '\0' ? in.path : "/", W_OK | X_OK) != 0) {
        snprintf(why, why_bytes, "directory %s: %s", in.path, strerror(errno));
        return ATTN_EINVAL;
    }
    return check_file(un, &exists, why, why_bytes);
}

attn_status address_check(const struct address *a, char *why, size_t why_bytes)
{
    if (a->sa.any.sa_family == AF_UNIX)
        return check_path(&a->sa.un, why, why_bytes);
    struct address any_port = *a; /* that of the address may be in use, by the attnd that serves */
    any_port.sa.in.sin_port = 0; /* at the same place in a sockaddr_in6 */
    int fd = socket(a->sa.any.sa_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    bool is_ours = fd >= 0 && bind(fd, &any_port.sa.any,
                                   a->sa.any.sa_family == AF_INET6 ? sizeof(any_port.sa.in6)
                                                                   : sizeof(any_port.sa.in)) == 0;
    if (!is_ours)
        snprintf(why, why_bytes, "cannot listen: %s", strerror(errno));
    if (fd >= 0)
        close(fd);
    return is_ours ? ATTN_OK : ATTN_EINVAL;
}

attn_status address_claim_path(const struct address *a, char *why, size_t why_bytes)
{
    const struct sockaddr_un *un = &a->sa.un;
    struct folder in = folder_of(un->sun_path);
    bool exists;
    if (in.path[0] != '\0' && mkdir(in.path, 0755) != 0 && errno != EEXIST) {
        snprintf(why, why_bytes, "directory %s cannot be made: %s", in.path, strerror(errno));
        return ATTN_EINVAL;
    }
    attn_status st = check_file(un, &exists, why, why_bytes);
    if (st != ATTN_OK || !exists)
        return st;
    int type = a->is_shm ? SOCK_SEQPACKET : SOCK_STREAM;
    int fd = socket(AF_UNIX, type | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0) {
        snprintf(why, why_bytes, "socket: %s", strerror(errno));
        return ATTN_EINVAL;
    }
    int rc = connect(fd, (const struct sockaddr *)un, sizeof(*un));
    int error = errno;
    close(fd);
    if (rc == 0 || error != ECONNREFUSED) {
        bool is_used = rc == 0 || error == EAGAIN || error == EPROTOTYPE;
        snprintf(why, why_bytes, "the socket is %s",
                 is_used ? "in use by another process" : strerror(error));
        return ATTN_EINVAL;
    }
    if (unlink(un->sun_path) != 0) {
        snprintf(why, why_bytes, "the stale socket cannot be removed: %s", strerror(errno));
        return ATTN_EINVAL;
    }
    return ATTN_OK;
}

void address_format(const struct sockaddr *sa, char *out, size_t out_bytes)
{
    char host[INET6_ADDRSTRLEN] = "?";
    if (sa->sa_family == AF_INET) {
        const struct sockaddr_in *in = (const struct sockaddr_in *)sa;
        inet_ntop(AF_INET, &in->sin_addr, host, sizeof(host));
        snprintf(out, out_bytes, "%s:%u", host, (unsigned)ntohs(in->sin_port));
    } else if (sa->sa_family == AF_INET6) {
        const struct sockaddr_in6 *in6 = (const struct sockaddr_in6 *)sa;
        bool is_mapped = IN6_IS_ADDR_V4MAPPED(&in6->sin6_addr);
        if (is_mapped)
            inet_ntop(AF_INET, &in6->sin6_addr.s6_addr[12], host, sizeof(host));
        else
            inet_ntop(AF_INET6, &in6->sin6_addr, host, sizeof(host));
        snprintf(out, out_bytes, is_mapped ? "%s:%u" : "[%s]:%u", host,
                 (unsigned)ntohs(in6->sin6_port));
    } else {
        snprintf(out, out_bytes, "?");
    }
}
