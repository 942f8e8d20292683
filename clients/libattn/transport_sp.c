/* transport_sp.c: ipc:// and tcp:// over libnanomsg, as a raw REQ socket with our own message ids.
 *
 * Raw, because a cooked REQ socket has one request outstanding and repeats it on its own clock. The
 * id travels in the SP header. libnanomsg writes in the sender's thread and reads in its own; we
 * wait on one epoll descriptor over its two event descriptors and one of ours (wake).
 */
#include "clients/libattn/transport.h"

#include <errno.h>
#include <limits.h>
#include <nanomsg/nn.h>
#include <nanomsg/reqrep.h>
#include <nanomsg/tcp.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#define SP_BUFFER_BYTES (8 << 20)
#define SP_RECONNECT_MS 10
#define SP_RECONNECT_MAX_MS 500
#define SP_REPLY_BIT 0x80000000u
#define SP_ID_BYTES 4

struct sp {
    struct client_transport base;
    int socket, recv_fd, send_fd, wake_fd, epoll_fd;
    bool is_send_polled; /* of the thread that waits */
};

/* nanomsg's threads do not exist in a forked child, and its state cannot be made anew there. */
static atomic_uint sp_n_open;
static atomic_bool sp_is_lost;
static pthread_once_t sp_once = PTHREAD_ONCE_INIT;

static void sp_forked(void)
{
    if (atomic_load(&sp_n_open) > 0)
        atomic_store(&sp_is_lost, true);
}

static void sp_init(void)
{
    pthread_atfork(NULL, NULL, sp_forked);
}

static bool sp_watch(int epoll_fd, int op, int fd, bool is_on)
{
    struct epoll_event ev = {.events = is_on ? EPOLLIN : 0, .data.fd = fd};
    return epoll_ctl(epoll_fd, op, fd, &ev) == 0;
}

static bool sp_set(int s, int level, int option, int value)
{
    return nn_setsockopt(s, level, option, &value, sizeof value) == 0;
}

static bool sp_set_options(int s)
{
    return sp_set(s, NN_TCP, NN_TCP_NODELAY, 1) &&
           sp_set(s, NN_SOL_SOCKET, NN_SNDBUF, SP_BUFFER_BYTES) &&
           sp_set(s, NN_SOL_SOCKET, NN_RCVBUF, SP_BUFFER_BYTES) &&
           sp_set(s, NN_SOL_SOCKET, NN_RECONNECT_IVL, SP_RECONNECT_MS) &&
           sp_set(s, NN_SOL_SOCKET, NN_RECONNECT_IVL_MAX, SP_RECONNECT_MAX_MS);
}

static bool sp_get_fd(int s, int option, int *out_fd)
{
    size_t n = sizeof *out_fd;
    return nn_getsockopt(s, NN_SOL_SOCKET, option, out_fd, &n) == 0;
}

static void sp_close(struct client_transport *t)
{
    struct sp *sp = (struct sp *)t;
    if (sp == NULL)
        return;
    if (sp->epoll_fd >= 0)
        close(sp->epoll_fd);
    if (sp->wake_fd >= 0)
        close(sp->wake_fd);
    if (sp->socket >= 0) {
        nn_close(sp->socket);
        atomic_fetch_sub(&sp_n_open, 1);
    }
    free(sp);
}

static void sp_abandon(struct client_transport *t)
{
    struct sp *sp = (struct sp *)t;
    close(sp->epoll_fd);
    close(sp->wake_fd);
    free(sp);
}

static attn_status sp_open(const char *url, struct client_transport **out_t, char *why,
                           size_t why_bytes)
{
    pthread_once(&sp_once, sp_init);
    if (atomic_load(&sp_is_lost)) {
        snprintf(why, why_bytes,
                 "this process was forked while its parent had a client open; libnanomsg cannot be "
                 "used in it (spawn the process, or fork before opening a client)");
        return ATTN_ENOTSUP;
    }
    attn_status st = ATTN_ENOMEM;
    struct sp *sp = calloc(1, sizeof *sp);
    if (sp == NULL) {
        snprintf(why, why_bytes, "no memory for a connection to %s", url);
        return ATTN_ENOMEM;
    }
    sp->base.ops = &transport_sp_ops;
    sp->epoll_fd = sp->wake_fd = -1;
    sp->socket = nn_socket(AF_SP_RAW, NN_REQ);
    if (sp->socket < 0) {
        snprintf(why, why_bytes, "socket for %s: %s", url, nn_strerror(nn_errno()));
        goto fail;
    }
    atomic_fetch_add(&sp_n_open, 1);
    sp->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    sp->wake_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (!sp_set_options(sp->socket) || !sp_get_fd(sp->socket, NN_RCVFD, &sp->recv_fd) ||
        !sp_get_fd(sp->socket, NN_SNDFD, &sp->send_fd) || sp->epoll_fd < 0 || sp->wake_fd < 0 ||
        !sp_watch(sp->epoll_fd, EPOLL_CTL_ADD, sp->recv_fd, true) ||
        !sp_watch(sp->epoll_fd, EPOLL_CTL_ADD, sp->send_fd, false) ||
        !sp_watch(sp->epoll_fd, EPOLL_CTL_ADD, sp->wake_fd, true)) {
        snprintf(why, why_bytes, "set up a socket for %s: %s", url, strerror(errno));
        goto fail;
    }
    if (nn_connect(sp->socket, url) < 0) {
        snprintf(why, why_bytes, "url %s: %s", url, nn_strerror(nn_errno()));
        st = ATTN_EINVAL;
        goto fail;
    }
    *out_t = &sp->base;
    return ATTN_OK;
fail:
    sp_close(&sp->base);
    return st;
}

static void *sp_message_alloc(struct client_transport *t, size_t bytes, size_t reply_bytes)
{
    (void)t, (void)reply_bytes;
    return nn_allocmsg(bytes, 0);
}

static void sp_message_free(struct client_transport *t, void *message)
{
    (void)t;
    nn_freemsg(message);
}

/* libnanomsg's control buffer: one SP_HDR whose data are a size_t and that many bytes. */
union sp_control {
    struct nn_cmsghdr align;
    unsigned char bytes[128];
};

static bool sp_send(struct client_transport *t, uint32_t id, void *message)
{
    struct sp *sp = (struct sp *)t;
    union sp_control control = {0};
    size_t data_bytes = sizeof(size_t) + SP_ID_BYTES, id_bytes = SP_ID_BYTES;
    control.align.cmsg_len = NN_CMSG_LEN(data_bytes);
    control.align.cmsg_level = PROTO_SP;
    control.align.cmsg_type = SP_HDR;
    unsigned char *p = NN_CMSG_DATA(&control.align);
    memcpy(p, &id_bytes, sizeof id_bytes);
    id |= SP_REPLY_BIT;
    for (int i = 0; i < SP_ID_BYTES; i++)
        p[sizeof(size_t) + i] = (unsigned char)(id >> (24 - 8 * i)); /* network order */

    struct nn_iovec iov = {.iov_base = &message, .iov_len = NN_MSG};
    struct nn_msghdr hdr = {.msg_iov = &iov,
                            .msg_iovlen = 1,
                            .msg_control = control.bytes,
                            .msg_controllen = NN_CMSG_SPACE(data_bytes)};
    return nn_sendmsg(sp->socket, &hdr, NN_DONTWAIT) >= 0;
}

static bool sp_recv(struct client_transport *t, struct client_message *out_m)
{
    struct sp *sp = (struct sp *)t;
    for (;;) {
        union sp_control control;
        void *message = NULL;
        struct nn_iovec iov = {.iov_base = &message, .iov_len = NN_MSG};
        struct nn_msghdr hdr = {.msg_iov = &iov,
                                .msg_iovlen = 1,
                                .msg_control = control.bytes,
                                .msg_controllen = sizeof control.bytes};
        control.align.cmsg_len = 0;
        int n = nn_recvmsg(sp->socket, &hdr, NN_DONTWAIT);
        if (n < 0)
            return false;
        size_t id_bytes = 0;
        const unsigned char *p = NN_CMSG_DATA(&control.align);
        if (control.align.cmsg_len >= NN_CMSG_LEN(sizeof(size_t) + SP_ID_BYTES))
            memcpy(&id_bytes, p, sizeof id_bytes);
        if (id_bytes != SP_ID_BYTES) { /* no reply to a request of ours */
            nn_freemsg(message);
            continue;
        }
        uint32_t id = 0;
        for (int i = 0; i < SP_ID_BYTES; i++)
            id = id << 8 | p[sizeof(size_t) + i];
        *out_m =
            (struct client_message){.base = message, .bytes = (size_t)n, .id = id & ~SP_REPLY_BIT};
        return true;
    }
}

static void sp_want_send(struct client_transport *t, bool is_wanted)
{
    struct sp *sp = (struct sp *)t;
    if (is_wanted != sp->is_send_polled &&
        sp_watch(sp->epoll_fd, EPOLL_CTL_MOD, sp->send_fd, is_wanted))
        sp->is_send_polled = is_wanted;
}

static void sp_wait(struct client_transport *t, uint64_t ns)
{
    struct sp *sp = (struct sp *)t;
    struct epoll_event ready[3];
    uint64_t ms = ns / 1000000u + (ns % 1000000u != 0), n_wakes;
    int n = epoll_wait(sp->epoll_fd, ready, 3, ms > INT_MAX ? INT_MAX : (int)ms);
    for (int i = 0; i < n; i++) {
        if (ready[i].data.fd == sp->wake_fd && read(sp->wake_fd, &n_wakes, sizeof n_wakes) < 0)
            return; /* somebody else has read it: woken all the same */
    }
}

static void sp_wake(struct client_transport *t)
{
    struct sp *sp = (struct sp *)t;
    uint64_t one = 1;
    if (write(sp->wake_fd, &one, sizeof one) < 0) {
        /* full: it is readable already */
    }
}

static int sp_fd(struct client_transport *t)
{
    return ((struct sp *)t)->epoll_fd;
}

static uint64_t sp_generation(struct client_transport *t)
{
    return nn_get_statistic(((struct sp *)t)->socket, NN_STAT_ESTABLISHED_CONNECTIONS);
}

static bool sp_is_connected(struct client_transport *t)
{
    return (int)nn_get_statistic(((struct sp *)t)->socket, NN_STAT_CURRENT_CONNECTIONS) > 0;
}

static uint64_t sp_max_message(struct client_transport *t)
{
    (void)t;
    return 0;
}

static void sp_set_max_message(struct client_transport *t, uint64_t bytes)
{
    /* the SP header counts too; -1 is libnanomsg's "no limit" */
    sp_set(((struct sp *)t)->socket, NN_SOL_SOCKET, NN_RCVMAXSIZE,
           bytes > INT_MAX - SP_ID_BYTES ? -1 : (int)bytes + SP_ID_BYTES);
}

const struct client_transport_ops transport_sp_ops = {
    .schemes = {"ipc://", "tcp://", NULL},
    .open = sp_open,
    .close = sp_close,
    .abandon = sp_abandon,
    .message_alloc = sp_message_alloc,
    .message_free = sp_message_free,
    .send = sp_send,
    .recv = sp_recv,
    .want_send = sp_want_send,
    .wait = sp_wait,
    .wake = sp_wake,
    .fd = sp_fd,
    .generation = sp_generation,
    .is_connected = sp_is_connected,
    .max_message = sp_max_message,
    .set_max_message = sp_set_max_message,
};
