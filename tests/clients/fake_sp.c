/* fake_sp.c: the REP side of SP for the fake daemon: sockets, handshakes and message frames. */
#include "tests/clients/fake_sp.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#define MAX_BODY_BYTES (64u << 20)

void fake_sp_die(const char *file, int line, const char *what)
{
    fprintf(stderr, "fake daemon: %s:%d: %s (%s)\n", file, line, what, strerror(errno));
    abort();
}

void fake_sp_open(struct fake_sp *s, const char *url)
{
    const int one = 1;
    *s = (struct fake_sp){.is_ipc = strncmp(url, "ipc://", 6) == 0};
    for (int i = 0; i < FAKE_SP_MAX_PEERS; i++)
        s->peers[i] = -1;
    if (s->is_ipc) {
        struct sockaddr_un a = {.sun_family = AF_UNIX};
        snprintf(a.sun_path, sizeof a.sun_path, "%s", url + 6);
        unlink(a.sun_path);
        s->listen_fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
        MUST(bind(s->listen_fd, (struct sockaddr *)&a, sizeof a) == 0);
    } else {
        struct sockaddr_in a = {.sin_family = AF_INET};
        a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        a.sin_port = htons((uint16_t)atoi(strrchr(url, ':') + 1));
        s->listen_fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
        setsockopt(s->listen_fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
        MUST(bind(s->listen_fd, (struct sockaddr *)&a, sizeof a) == 0);
    }
    MUST(listen(s->listen_fd, 16) == 0);
}

static void cut(struct fake_sp *s, int peer)
{
    close(s->peers[peer]);
    s->peers[peer] = -1;
}

void fake_sp_close(struct fake_sp *s)
{
    for (int i = 0; i < FAKE_SP_MAX_PEERS; i++) {
        if (s->peers[i] >= 0)
            cut(s, i);
    }
    close(s->listen_fd);
}

static bool read_all(int fd, void *dst, size_t bytes)
{
    return bytes == 0 || recv(fd, dst, bytes, MSG_WAITALL) == (ssize_t)bytes;
}

static bool write_all(int fd, const void *src, size_t bytes)
{
    const uint8_t *p = src;
    while (bytes > 0) {
        ssize_t n = send(fd, p, bytes, MSG_NOSIGNAL);
        if (n <= 0)
            return false;
        p += n;
        bytes -= (size_t)n;
    }
    return true;
}

static void accept_peer(struct fake_sp *s)
{
    static const uint8_t mine[8] = {0, 'S', 'P', 0, 0, 49, 0, 0}; /* REP */
    static const uint8_t theirs[8] = {0, 'S', 'P', 0, 0, 48, 0, 0}; /* REQ */
    const struct timeval patience = {.tv_sec = 5};
    const int one = 1;
    uint8_t hello[8];
    int fd = accept(s->listen_fd, NULL, NULL), i = 0;
    MUST(fd >= 0);
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
    if (!s->is_ipc)
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    if (!write_all(fd, mine, sizeof mine) || !read_all(fd, hello, sizeof hello) ||
        memcmp(hello, theirs, sizeof hello) != 0) {
        close(fd);
        return;
    }
    while (i < FAKE_SP_MAX_PEERS && s->peers[i] >= 0)
        i++;
    MUST(i < FAKE_SP_MAX_PEERS);
    s->peers[i] = fd;
    s->serials[i] = ++s->n_accepted;
}

static bool read_message(struct fake_sp *s, int peer, struct fake_message *out_m)
{
    uint8_t type, length[8];
    uint64_t bytes = 0;
    int fd = s->peers[peer];
    if ((s->is_ipc && (!read_all(fd, &type, 1) || type != 1)) || !read_all(fd, length, 8))
        return false;
    for (int i = 0; i < 8; i++)
        bytes = bytes << 8 | length[i];
    MUST(bytes >= sizeof out_m->id && bytes <= MAX_BODY_BYTES);
    bytes -= sizeof out_m->id;
    *out_m = (struct fake_message){.serial = s->serials[peer], .bytes = bytes};
    out_m->body = aligned_alloc(64, (bytes + 64) / 64 * 64);
    MUST(out_m->body != NULL);
    if (read_all(fd, out_m->id, sizeof out_m->id) && read_all(fd, out_m->body, bytes))
        return true;
    free(out_m->body);
    return false;
}

bool fake_sp_recv(struct fake_sp *s, int timeout_ms, struct fake_message *out_m)
{
    struct pollfd p[FAKE_SP_MAX_PEERS + 1];
    for (int i = 0; i < FAKE_SP_MAX_PEERS; i++)
        p[i] = (struct pollfd){.fd = s->peers[i], .events = POLLIN};
    p[FAKE_SP_MAX_PEERS] = (struct pollfd){.fd = s->listen_fd, .events = POLLIN};
    if (poll(p, FAKE_SP_MAX_PEERS + 1, timeout_ms) <= 0)
        return false;
    if (p[FAKE_SP_MAX_PEERS].revents != 0)
        accept_peer(s);
    for (int i = 0; i < FAKE_SP_MAX_PEERS; i++) {
        if (p[i].revents == 0)
            continue;
        if (read_message(s, i, out_m))
            return true;
        cut(s, i);
    }
    return false;
}

void fake_sp_send(struct fake_sp *s, const struct fake_message *m, const void *body, size_t bytes)
{
    uint8_t head[1 + 8 + sizeof m->id] = {1};
    uint64_t length = bytes + sizeof m->id;
    for (int i = 0; i < 8; i++)
        head[1 + i] = (uint8_t)(length >> (56 - 8 * i));
    memcpy(head + 9, m->id, sizeof m->id);
    size_t skip = s->is_ipc ? 0 : 1;
    for (int i = 0; i < FAKE_SP_MAX_PEERS; i++) {
        if (s->peers[i] < 0 || s->serials[i] != m->serial)
            continue;
        if (!write_all(s->peers[i], head + skip, sizeof head - skip) ||
            !write_all(s->peers[i], body, bytes))
            cut(s, i);
    }
}
