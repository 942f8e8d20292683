/* journal.c: turns lines of key=value pairs into datagrams of fields for systemd's journal. The
 * socket stays unconnected, so that a restarted journal is found again.
 */
#include "daemon/base/journal.h"

#include <ctype.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

enum { MAX_DATAGRAM_BYTES = 8192 };

static struct sockaddr_un journal = {.sun_family = AF_UNIX,
                                     .sun_path = "/run/systemd/journal/socket"};
static _Atomic int journal_fd = -1;

void journal_set_path(const char *path)
{
    snprintf(journal.sun_path, sizeof journal.sun_path, "%s", path);
}

void journal_open(void)
{
    int none = -1;
    if (atomic_load(&journal_fd) >= 0)
        return;
    int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd >= 0 && !atomic_compare_exchange_strong(&journal_fd, &none, fd))
        close(fd);
}

struct datagram {
    char bytes[MAX_DATAGRAM_BYTES];
    size_t n;
    bool is_full;
};

static void put(struct datagram *d, const char *text, size_t n)
{
    if (n > sizeof d->bytes - d->n) {
        d->is_full = true;
        return;
    }
    memcpy(d->bytes + d->n, text, n);
    d->n += n;
}

/* Writes a field's name, made from the key. */
static void put_name(struct datagram *d, const char *key, size_t n)
{
    put(d, "ATTND_", 6);
    for (size_t i = 0; i < n; i++) {
        char c = isalnum((unsigned char)key[i]) ? (char)toupper((unsigned char)key[i]) : '_';
        put(d, &c, 1);
    }
    put(d, "=", 1);
}

/* Writes the value at p without its quotes; returns where it ends. */
static const char *put_value(struct datagram *d, const char *p)
{
    if (*p != '"') {
        size_t n = strcspn(p, " ");
        put(d, p, n);
        return p + n;
    }
    for (p++; *p != '\0' && *p != '"'; p++) {
        p += p[0] == '\\' && p[1] != '\0';
        put(d, p, 1);
    }
    return p + (*p == '"');
}

bool journal_send(int priority, const char *msg, const char *pairs)
{
    struct datagram d = {.n = 0};
    char head[64];
    int fd = atomic_load(&journal_fd);
    if (fd < 0)
        return false;
    snprintf(head, sizeof head, "PRIORITY=%d\nSYSLOG_IDENTIFIER=attnd\nMESSAGE=", priority);
    put(&d, head, strlen(head));
    put(&d, msg, strlen(msg));
    put(&d, " ", pairs[0] != '\0');
    put(&d, pairs, strlen(pairs));
    put(&d, "\n", 1);
    for (const char *p = pairs; *(p += strspn(p, " ")) != '\0';) {
        size_t n = strcspn(p, "= ");
        put_name(&d, p, n);
        p = put_value(&d, p + n + (p[n] == '='));
        put(&d, "\n", 1);
    }
    return !d.is_full && sendto(fd, d.bytes, d.n, MSG_NOSIGNAL, (struct sockaddr *)&journal,
                                sizeof journal) == (ssize_t)d.n;
}
