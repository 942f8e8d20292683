/* keep.c: finds handed-in descriptors by name, and sends messages to the keeper. */
#include "daemon/keeper/keep.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "daemon/base/log.h"
#include "daemon/keeper/notify.h"

enum { FIRST_FD = 3 }; /* SD_LISTEN_FDS_START */

static struct {
    struct handed_in {
        int fd; /* -1: it was taken */
        char name[KEEP_NAME_BYTES];
    } fds[KEEP_MAX_FDS];
    uint32_t n_fds;
} keep;

static long number_of(const char *variable)
{
    const char *text = getenv(variable);
    return text == NULL ? 0 : strtol(text, NULL, 10);
}

void keep_begin(void)
{
    long n = number_of("LISTEN_PID") == getpid() ? number_of("LISTEN_FDS") : 0;
    const char *names = getenv("LISTEN_FDNAMES");
    for (long i = 0; i < n; i++) {
        int fd = FIRST_FD + (int)i;
        size_t name_bytes = names == NULL ? 0 : strcspn(names, ":");
        if (keep.n_fds == KEEP_MAX_FDS || fcntl(fd, F_SETFD, FD_CLOEXEC) != 0) {
            close(fd);
        } else {
            struct handed_in *h = &keep.fds[keep.n_fds++];
            h->fd = fd;
            snprintf(h->name, sizeof h->name, "%.*s", (int)name_bytes, names == NULL ? "" : names);
        }
        if (names != NULL)
            names += name_bytes + (names[name_bytes] == ':');
    }
    const char *notify = getenv("NOTIFY_SOCKET");
    if (notify != NULL && strncmp(notify, "fd:", 3) == 0)
        fcntl((int)strtol(notify + 3, NULL, 10), F_SETFD, FD_CLOEXEC);
    unsetenv("LISTEN_PID"); /* child processes must not see these */
    unsetenv("LISTEN_FDS");
    unsetenv("LISTEN_FDNAMES");
}

bool keep_is_there(void)
{
    return getenv("NOTIFY_SOCKET") != NULL && number_of("FDSTORE") > 0;
}

static struct handed_in *find(const char *name, size_t n)
{
    for (uint32_t i = 0; i < keep.n_fds; i++)
        if (keep.fds[i].fd >= 0 && strncmp(keep.fds[i].name, name, n) == 0)
            return &keep.fds[i];
    return NULL;
}

int keep_take(const char *name)
{
    struct handed_in *h = find(name, strlen(name) + 1);
    int fd = h == NULL ? -1 : h->fd;
    if (h != NULL)
        h->fd = -1;
    return fd;
}

bool keep_find(const char *prefix, char out_name[KEEP_NAME_BYTES])
{
    const struct handed_in *h = find(prefix, strlen(prefix));
    if (h != NULL)
        memcpy(out_name, h->name, KEEP_NAME_BYTES);
    return h != NULL;
}

bool keep_put(const char *name, int fd)
{
    char state[KEEP_NAME_BYTES + 64];
    if (!keep_is_there())
        return false;
    /* without FDPOLL=0 systemd would drop a descriptor that reports an error */
    snprintf(state, sizeof state, "FDSTORE=1\nFDNAME=%s\nFDPOLL=0", name);
    bool is_sent = notify_send_fd(state, fd);
    if (!is_sent)
        log_warn("%s can't be given to whom $NOTIFY_SOCKET names: it ends with this process", name);
    return is_sent;
}

void keep_drop(const char *name)
{
    char state[KEEP_NAME_BYTES + 64];
    int fd = keep_take(name);
    if (fd >= 0)
        close(fd);
    snprintf(state, sizeof state, "FDSTOREREMOVE=1\nFDNAME=%s", name);
    notify_send(state);
    notify_wait_until_read();
}

void keep_drop_rest(void)
{
    char name[KEEP_NAME_BYTES];
    while (keep_find("", name)) {
        log_info("what was kept as %s is of no use any more", name);
        keep_drop(name);
    }
}
