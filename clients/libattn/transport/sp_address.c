/* sp_address.c: parses ipc://, tcp:// and tls+tcp:// urls, and opens a socket with its options.
 * sp_lookup.c asks the name service for a host. */
#include "clients/libattn/transport/sp_address.h"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/un.h>

#define SP_BUFFER_BYTES (8 << 20) /* asked for; the system's limit is usually lower */

const char *sp_address_path(const struct sp_address *a)
{
    return a->is_ipc ? ((const struct sockaddr_un *)&a->of[0].any)->sun_path : NULL;
}

static bool parse_ipc(const char *path, struct sp_address *out, char *why, size_t why_bytes)
{
    struct sockaddr_un *a = (struct sockaddr_un *)&out->of[0].any;
    if (strlen(path) >= sizeof a->sun_path) {
        snprintf(why, why_bytes, "the path has %zu bytes, a Unix socket's at most %zu",
                 strlen(path), sizeof a->sun_path - 1);
        return false;
    }
    a->sun_family = AF_UNIX;
    strcpy(a->sun_path, path);
    out->of[0].bytes = sizeof *a;
    out->n = 1;
    return true;
}

void sp_address_set(struct sp_address *a, const struct addrinfo *list)
{
    a->n = a->at = 0;
    for (; list != NULL && a->n < SP_MAX_ADDRESSES; list = list->ai_next) {
        memcpy(&a->of[a->n].any, list->ai_addr, list->ai_addrlen);
        a->of[a->n++].bytes = list->ai_addrlen;
    }
}

/* HOST:PORT, HOST a name, a.b.c.d or [a:b::c]. */
static bool parse_tcp(const char *text, struct sp_address *out, char *why, size_t why_bytes)
{
    const char *colon = strrchr(text, ':');
    size_t n = colon != NULL ? (size_t)(colon - text) : 0;
    if (n == 0 || n >= sizeof out->host || colon[1] == '\0') {
        snprintf(why, why_bytes, "expected %stcp://HOST:PORT", out->is_tls ? "tls+" : "");
        return false;
    }
    char *end;
    unsigned long port = strtoul(colon + 1, &end, 10);
    if (colon[1] < '0' || colon[1] > '9' || *end != '\0' || port > UINT16_MAX) {
        snprintf(why, why_bytes, "port %.20s is no number up to %d", colon + 1, UINT16_MAX);
        return false;
    }
    bool has_brackets = text[0] == '[' && text[n - 1] == ']' && n > 2;
    snprintf(out->host, sizeof out->host, "%.*s", (int)(n - 2 * has_brackets), text + has_brackets);
    snprintf(out->port, sizeof out->port, "%lu", port);
    const struct addrinfo hints = {.ai_socktype = SOCK_STREAM,
                                   .ai_flags = AI_NUMERICSERV | AI_NUMERICHOST};
    struct addrinfo *found = NULL;
    int rc = getaddrinfo(out->host, out->port, &hints, &found);
    out->is_name = rc != 0 && !has_brackets;
    if (rc != 0 && has_brackets) {
        snprintf(why, why_bytes, "%s", gai_strerror(rc));
        return false;
    }
    if (rc == 0) {
        sp_address_set(out, found);
        freeaddrinfo(found);
    }
    return true;
}

bool sp_address_parse(const char *url, struct sp_address *out, char *why, size_t why_bytes)
{
    memset(out, 0, sizeof *out);
    out->is_ipc = strncmp(url, "ipc://", 6) == 0;
    out->is_tls = strncmp(url, "tls+", 4) == 0;
    const char *rest = strstr(url, "://") + 3;
    return (out->is_ipc ? parse_ipc : parse_tcp)(rest, out, why, why_bytes);
}

/* Small messages leave at once; a daemon whose host is gone is noticed in a minute. */
static void set_tcp_options(int fd)
{
    const int one = 1, idle_s = 30, interval_s = 10;
    const unsigned user_timeout_ms = 60000;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &one, sizeof one);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle_s, sizeof idle_s);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &interval_s, sizeof interval_s);
    setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &user_timeout_ms, sizeof user_timeout_ms);
}

int sp_address_socket(const struct sp_address *a)
{
    const int buffer_bytes = SP_BUFFER_BYTES;
    int fd = socket(a->of[a->at].any.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd >= 0 && a->is_ipc)
        setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &buffer_bytes, sizeof buffer_bytes);
    else if (fd >= 0)
        set_tcp_options(fd);
    return fd;
}
