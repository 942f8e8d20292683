/* connect.c: the connection that a command asks over: to the daemon's admin socket where the
 * command is for operators or there is no other, and how long to wait for a daemon to come up.
 */
#define _GNU_SOURCE /* SOCK_NONBLOCK */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "clients/attnctl/attnctl.h"
#include "proto/attn_time.h"

enum { LOOK_AGAIN_US = 20000 };

static const char scheme[] = "ipc://";

static bool is_there(const char *endpoint)
{
    return access(endpoint + strlen(scheme), F_OK) == 0;
}

/* Does anybody listen there? A daemon that was killed, or has other addresses since, has left the
 * file of its socket. */
static bool is_served(const char *endpoint)
{
    struct sockaddr_un to = {.sun_family = AF_UNIX};
    const char *path = endpoint + strlen(scheme);
    if (strlen(path) >= sizeof to.sun_path)
        return true; /* the library says what is wrong with it */
    memcpy(to.sun_path, path, strlen(path));
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    bool is_gone = fd >= 0 && connect(fd, (const struct sockaddr *)&to, sizeof to) != 0 &&
                   (errno == ENOENT || errno == ECONNREFUSED);
    if (fd >= 0)
        close(fd);
    return !is_gone;
}

/* The admin socket beside an ipc endpoint; false: the endpoint has none. */
static bool admin_endpoint(const char *endpoint, char *out, size_t out_bytes)
{
    const char *runtime = getenv("XDG_RUNTIME_DIR");
    if (strncmp(endpoint, scheme, strlen(scheme)) != 0)
        return false;
    if (snprintf(out, out_bytes, "%s.admin", endpoint) >= (int)out_bytes)
        return false;
    /* a daemon of this user's that has no ipc address, and so none to be found at by default */
    if (strcmp(endpoint, attn_default_url()) == 0 && getenv("ATTND_ENDPOINT") == NULL &&
        !is_served(endpoint) && !is_there(out) && geteuid() != 0 && runtime != NULL)
        return snprintf(out, out_bytes, "%s%s/attnd.sock.admin", scheme, runtime) < (int)out_bytes;
    return true;
}

/* Until a daemon listens at an ipc endpoint or at the admin socket beside it, which may be its only
 * one; not longer than wait_us, of which it returns what is left. */
static uint64_t await_socket(const char *endpoint, uint64_t wait_us)
{
    char admin[256];
    uint64_t now = attn_now_ns(), until = now + wait_us * 1000;
    while (now < until && admin_endpoint(endpoint, admin, sizeof admin) && !is_served(endpoint) &&
           !is_served(admin)) {
        usleep(LOOK_AGAIN_US);
        now = attn_now_ns();
    }
    return now < until ? (until - now) / 1000 : 0;
}

/* What is for operators goes to the daemon's admin socket, and so does everything where that is the
 * daemon's only Unix socket; where it can't be reached, to the endpoint, which lets the daemon
 * decide. */
attn_status connect_to(const struct arguments *a, attn_client **out_client)
{
    struct attn_client_options o = {
        .struct_size = sizeof o, .client_name = "attnctl", .fail_fast = 1, .has_no_keeper = 1};
    char admin[256];
    uint64_t wait_us = await_socket(a->endpoint, a->wait_us);
    uint64_t open_us = wait_us > a->timeout_us ? wait_us : a->timeout_us;
    if (admin_endpoint(a->endpoint, admin, sizeof admin) &&
        (a->is_admin || (is_there(admin) && !is_served(a->endpoint))) &&
        attn_client_open(admin, &o, a->timeout_us, out_client) == ATTN_OK)
        return ATTN_OK;
    o.fail_fast = wait_us == 0;
    return attn_client_open(a->endpoint, &o, open_us, out_client);
}
