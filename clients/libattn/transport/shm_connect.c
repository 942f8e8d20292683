/* shm_connect.c: a worker's way to its region: connecting to the daemon's socket, the welcome with
 * the region's descriptors, and the end. The receiving thread's.
 */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "clients/libattn/memory/memory.h"
#include "clients/libattn/transport/shm_internal.h"
#include "proto/attn_time.h"

#define SHM_MAX_RETRY_NS 500000000u
#define SHM_WELCOME_NS 5000000000u

/* Closes the socket, keeps why, and sets when to try again. */
static void drop_socket(struct shm *sh, const char *why)
{
    pthread_mutex_lock(&sh->lock);
    snprintf(sh->why_not, sizeof sh->why_not, "%s", why);
    pthread_mutex_unlock(&sh->lock);
    atomic_fetch_add(&sh->n_failures, 1);
    if (sh->socket >= 0)
        close(sh->socket); /* leaves the epoll set by itself */
    sh->socket = -1;
    sh->is_hung_up = false;
    sh->retry_at_ns = attn_now_ns() + sh->retry_ns;
    sh->retry_ns = 2 * sh->retry_ns < SHM_MAX_RETRY_NS ? 2 * sh->retry_ns : SHM_MAX_RETRY_NS;
}

void shm_disconnect(struct shm *sh)
{
    drop_socket(sh, "the daemon hung up");
    struct shm_region *r = sh->region;
    if (r == NULL)
        return;
    atomic_store(&sh->is_connected, false);
    pthread_mutex_lock(&sh->lock);
    sh->region = NULL;
    region_forget(r);
    if (r->n_used > 0) {
        SLIST_INSERT_HEAD(&sh->old, r, link);
        r = NULL;
    }
    pthread_mutex_unlock(&sh->lock);
    if (r != NULL)
        region_close(r);
}

void shm_connect_begin(struct shm *sh)
{
    struct shm_hello h = {.magic = SHM_MAGIC, .version = SHM_VERSION};
    struct epoll_event ev = {.events = EPOLLIN};
    sh->socket = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (sh->socket < 0 ||
        connect(sh->socket, (struct sockaddr *)&sh->address, sizeof sh->address) != 0 ||
        send(sh->socket, &h, sizeof h, MSG_NOSIGNAL) != sizeof h ||
        epoll_ctl(sh->epoll_fd, EPOLL_CTL_ADD, sh->socket, &ev) != 0) {
        drop_socket(sh, connect_error(errno, sh->address.sun_path));
        return;
    }
    sh->welcome_until_ns = attn_now_ns() + SHM_WELCOME_NS;
}

/* The two descriptors of a welcome; what else came is closed. false: not those two. */
static bool take_descriptors(struct msghdr *m, int out_fds[2])
{
    size_t n = 0;
    for (struct cmsghdr *c = CMSG_FIRSTHDR(m); c != NULL; c = CMSG_NXTHDR(m, c)) {
        if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS)
            continue;
        for (size_t i = 0; CMSG_LEN((i + 1) * sizeof(int)) <= c->cmsg_len; i++) {
            int fd;
            memcpy(&fd, CMSG_DATA(c) + i * sizeof fd, sizeof fd);
            if (n < 2)
                out_fds[n] = fd;
            else
                close(fd);
            n++;
        }
    }
    if (n == 1)
        close(out_fds[0]);
    else if (n > 2) {
        close(out_fds[0]);
        close(out_fds[1]);
    }
    return n == 2;
}

attn_status shm_pin_region(struct shm *sh, struct shm_region *r, char *why, size_t why_bytes)
{
    attn_status st = sh->pins->pin(r->base, r->bytes, &sh->pin_device, why, why_bytes);
    r->unpin = st == ATTN_OK ? sh->pins->unpin : NULL;
    return st;
}

static void take_welcome(struct shm *sh)
{
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(4 * sizeof(int))];
    } control;
    struct shm_welcome w;
    struct iovec iov = {&w, sizeof w};
    struct msghdr m = {.msg_iov = &iov,
                       .msg_iovlen = 1,
                       .msg_control = control.bytes,
                       .msg_controllen = sizeof control.bytes};
    int fds[2];
    ssize_t n = recvmsg(sh->socket, &m, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) {
        if (attn_now_ns() > sh->welcome_until_ns)
            drop_socket(sh, "whoever listens there does not answer");
        return;
    }
    bool has_fds = n >= 0 && take_descriptors(&m, fds);
    struct shm_region *r = NULL;
    if (n == sizeof w && has_fds && w.magic == SHM_MAGIC && w.version == SHM_VERSION &&
        w.status == ATTN_OK && region_open(&w, fds[0], fds[1], &r) != ATTN_OK)
        r = NULL;
    if (has_fds) {
        close(fds[0]);
        if (r == NULL)
            close(fds[1]);
    }
    if (r == NULL) {
        const char *why = "whoever listens there is no attnd that this library understands";
        if (n == 0)
            why = "the daemon hung up: it serves its own user, root and the socket's group";
        else if (n == sizeof w && w.magic == SHM_MAGIC && w.status != ATTN_OK)
            why = w.message;
        w.message[sizeof w.message - 1] = 0;
        drop_socket(sh, why);
        return;
    }
    sh->retry_ns = SHM_RETRY_NS;
    pthread_mutex_lock(&sh->lock);
    if (sh->pins != NULL)
        shm_pin_region(sh, r, w.message, sizeof w.message);
    sh->region = r;
    sh->why_not[0] = 0;
    pthread_mutex_unlock(&sh->lock);
    atomic_fetch_add(&sh->generation, 1);
    atomic_store(&sh->is_connected, true);
}

void shm_connect_on(struct shm *sh)
{
    if (sh->socket < 0 && attn_now_ns() >= sh->retry_at_ns)
        shm_connect_begin(sh);
    if (sh->socket >= 0 && sh->region == NULL)
        take_welcome(sh);
}

void shm_look_at_socket(struct shm *sh)
{
    uint8_t bytes[64];
    ssize_t n;
    do
        n = recv(sh->socket, bytes, sizeof bytes, MSG_DONTWAIT);
    while (n > 0 || (n < 0 && errno == EINTR));
    sh->is_hung_up = n == 0 || errno != EAGAIN;
}
