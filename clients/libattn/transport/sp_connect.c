/* sp_connect.c: a connection comes to be: the host's addresses, a socket, TLS, SP's handshake. One
 * address after the other is tried; when none is left they are looked up and tried again later,
 * each time after a longer while. The receiving thread.
 */
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "clients/libattn/transport/secure.h"
#include "clients/libattn/transport/sp_internal.h"
#include "proto/attn_time.h"

#define SP_MAX_RETRY_NS 500000000u
#define SP_CONNECT_NS 5000000000u /* for connecting and the handshake */
#define SP_NEXT_NS 1000000000u /* for connecting, where the host has another address */
#define SP_HANDSHAKE_BYTES 8u

static const uint8_t handshake_req[SP_HANDSHAKE_BYTES] = {0, 'S', 'P', 0, 0, 0x30, 0, 0};
static const uint8_t handshake_rep[SP_HANDSHAKE_BYTES] = {0, 'S', 'P', 0, 0, 0x31, 0, 0};

void sp_watch(struct sp *sp, int op, bool wants_write)
{
    struct epoll_event ev = {
        .events = EPOLLIN | (wants_write ? EPOLLOUT : 0),
    };
    epoll_ctl(sp->epoll_fd, op, sp->socket, &ev); /* fails for want of memory: ticks go on */
}

ssize_t sp_read(struct sp *sp, void *dst, size_t n)
{
    return sp->secure != NULL ? secure_recv(sp->secure, sp->socket, dst, n)
                              : recv(sp->socket, dst, n, 0);
}

const char *sp_why_broken(const struct sp *sp)
{
    return sp->secure != NULL && errno == EPROTO
               ? secure_why(sp->secure)
               : connect_error(errno, sp_address_path(&sp->address));
}

void sp_disconnect(struct sp *sp, const char *format, ...)
{
    va_list args;
    struct sp_address *a = &sp->address;
    bool has_next =
        sp->state != SP_READY && sp->state != SP_LOOKING_UP && a->at + 1 < a->n; /* to be tried */
    atomic_store(&sp->is_ready, false);
    pthread_mutex_lock(&sp->lock);
    if (sp->has_sent)
        atomic_fetch_add(&sp->n_lost, 1);
    sp->has_sent = false;
    if (sp->state >= sp->furthest) {
        va_start(args, format);
        vsnprintf(sp->why_furthest, sizeof sp->why_furthest, format, args);
        va_end(args);
        sp->furthest = sp->state;
    }
    if (!has_next) {
        memcpy(sp->why_not, sp->why_furthest, sizeof sp->why_not);
        sp->furthest = SP_CLOSED;
    }
    if (sp->socket >= 0)
        close(sp->socket); /* leaves the epoll set by itself */
    sp->socket = -1;
    if (sp->secure != NULL)
        secure_end(sp->secure);
    sp_message_free(sp->memory, sp->out);
    sp->out = NULL;
    pthread_mutex_unlock(&sp->lock);
    sp_message_free(sp->memory, sp->in);
    sp->in = NULL;
    sp->read_at = sp->read_end = 0;
    sp->state = SP_CLOSED;
    sp->retry_at_ns = attn_now_ns();
    a->at = has_next ? a->at + 1 : 0;
    if (has_next)
        return;
    if (sp->is_beside)
        atomic_store(&sp->is_wanted, false);
    sp->retry_at_ns += sp->retry_ns;
    sp->retry_ns = 2 * sp->retry_ns < SP_MAX_RETRY_NS ? 2 * sp->retry_ns : SP_MAX_RETRY_NS;
    atomic_fetch_add(&sp->n_failures, 1);
}

/* Tries the address whose turn it is. */
static void connect_next(struct sp *sp)
{
    const struct sp_address *a = &sp->address;
    int fd = sp_address_socket(a);
    sp->state = SP_CONNECTING; /* what fails from here on is an address; there may be more */
    if (fd < 0) {
        sp_disconnect(sp, "socket: %s", strerror(errno));
        return;
    }
    pthread_mutex_lock(&sp->lock);
    sp->socket = fd;
    pthread_mutex_unlock(&sp->lock);
    if (connect(fd, (const struct sockaddr *)&a->of[a->at].any, a->of[a->at].bytes) != 0 &&
        errno != EINPROGRESS) {
        sp_disconnect(sp, "%s", sp_why_broken(sp));
        return;
    }
    sp_watch(sp, EPOLL_CTL_ADD, true);
    sp->state = SP_CONNECTING;
    sp->connect_until_ns = attn_now_ns() + (a->at + 1 < a->n ? SP_NEXT_NS : SP_CONNECT_NS);
}

void sp_connect_begin(struct sp *sp)
{
    if (!sp->address.is_name || sp->address.at > 0) {
        connect_next(sp);
        return;
    }
    sp->state = SP_LOOKING_UP;
    sp->lookup = sp_lookup_start(&sp->address);
    if (sp->lookup == NULL)
        sp_disconnect(sp, "no memory to look up %s", sp->address.host);
}

/* The host's addresses are there, or it has none; then those of last time are tried. */
static void take_addresses(struct sp *sp)
{
    const char *why;
    if (!sp_lookup_take(sp->lookup, &sp->address, &why))
        return;
    sp->lookup = NULL;
    if (sp->address.n == 0)
        sp_disconnect(sp, "%s: %s", sp->address.host, why);
    else
        connect_next(sp);
}

/* The TLS handshake, and after it our side of SP's. */
static void secure_connection(struct sp *sp)
{
    struct iovec hello = {(void *)(uintptr_t)handshake_req, sizeof handshake_req};
    enum secure_result r = secure_handshake(sp->secure, sp->socket);
    if (r == SECURE_NO)
        sp_disconnect(sp, "%s", secure_why(sp->secure));
    if (r != SECURE_YES)
        return;
    sp->state = SP_HANDSHAKE;
    if (secure_send(sp->secure, sp->socket, &hello, 1) != (ssize_t)sizeof handshake_req)
        sp_disconnect(sp, "TLS: the connection takes nothing");
}

/* The socket is connected, or it failed, or it is neither yet. */
static void finish_connecting(struct sp *sp)
{
    const uint64_t until_ns = attn_now_ns() + SP_CONNECT_NS; /* for handshakes */
    int error = 0;
    socklen_t n = sizeof error;
    struct sockaddr_storage peer;
    socklen_t peer_bytes = sizeof peer;
    if (sp->secure != NULL && getpeername(sp->socket, (struct sockaddr *)&peer, &peer_bytes) == 0) {
        sp_watch(sp, EPOLL_CTL_MOD, false);
        sp->state = SP_SECURING;
        sp->connect_until_ns = until_ns;
        if (!secure_begin(sp->secure))
            sp_disconnect(sp, "no memory for TLS");
        return;
    }
    if (sp->secure != NULL) {
        if (getsockopt(sp->socket, SOL_SOCKET, SO_ERROR, &error, &n) == 0 && error != 0)
            sp_disconnect(sp, "%s", connect_error(error, NULL));
        return;
    }
    ssize_t sent = send(sp->socket, handshake_req, sizeof handshake_req, MSG_NOSIGNAL);
    if (sent == sizeof handshake_req) {
        sp_watch(sp, EPOLL_CTL_MOD, false);
        sp->state = SP_HANDSHAKE;
        sp->connect_until_ns = until_ns;
        return;
    }
    if (sent < 0 && (errno == EAGAIN || errno == ENOTCONN || errno == EINTR))
        return;
    if (getsockopt(sp->socket, SOL_SOCKET, SO_ERROR, &error, &n) != 0 || error == 0)
        error = sent < 0 ? errno : EPIPE;
    sp_disconnect(sp, "%s", connect_error(error, sp_address_path(&sp->address)));
}

static void hung_up_in_handshake(struct sp *sp)
{
    bool is_plain_tcp = !sp->address.is_ipc && sp->secure == NULL;
    sp_disconnect(sp, "%s",
                  is_plain_tcp ? "the peer hung up in the handshake: is its address tls+tcp://, or "
                                 "has it too many peers (listen.max_peers)?"
                               : "the peer hung up in the handshake");
}

/* True: there are bytes in sp->read. False: none yet, or the connection is gone. */
static bool read_more(struct sp *sp)
{
    if (sp->read_at < sp->read_end)
        return true;
    ssize_t n = sp_read(sp, sp->read, sizeof sp->read);
    if (n > 0) {
        sp->read_at = 0;
        sp->read_end = (size_t)n;
        return true;
    }
    if (n == 0 || errno == ECONNRESET)
        hung_up_in_handshake(sp);
    else if (errno != EAGAIN && errno != EINTR)
        sp_disconnect(sp, "%s", sp_why_broken(sp));
    return false;
}

static void take_handshake(struct sp *sp)
{
    if (!read_more(sp))
        return;
    size_t n = sp->read_end - sp->read_at;
    if (n < SP_HANDSHAKE_BYTES) { /* rare: wait until the rest is there, too */
        ssize_t more = sp_read(sp, sp->read + sp->read_end, SP_HANDSHAKE_BYTES - n);
        if (more == 0 || (more < 0 && errno != EAGAIN && errno != EINTR))
            hung_up_in_handshake(sp);
        else if (more > 0)
            sp->read_end += (size_t)more;
        return;
    }
    if (memcmp(sp->read, handshake_rep, sizeof handshake_rep) != 0) {
        sp_disconnect(sp, "whoever listens there does not speak SP as a REP socket");
        return;
    }
    sp->read_at += SP_HANDSHAKE_BYTES;
    sp->retry_ns = SP_RETRY_NS;
    sp->state = SP_READY;
    sp->furthest = SP_CLOSED;
    pthread_mutex_lock(&sp->lock);
    sp->why_not[0] = '\0';
    pthread_mutex_unlock(&sp->lock);
    atomic_fetch_add(&sp->generation, 1);
    atomic_store(&sp->is_ready, true);
}

void sp_connect_on(struct sp *sp)
{
    if (sp->state == SP_CLOSED && atomic_load(&sp->is_wanted) && attn_now_ns() >= sp->retry_at_ns)
        sp_connect_begin(sp);
    if (sp->state == SP_LOOKING_UP)
        take_addresses(sp);
    if (sp->state == SP_CONNECTING)
        finish_connecting(sp);
    if (sp->state == SP_SECURING)
        secure_connection(sp);
    if (sp->state == SP_HANDSHAKE)
        take_handshake(sp);
    if (sp->state > SP_LOOKING_UP && sp->state < SP_READY && attn_now_ns() >= sp->connect_until_ns)
        sp_disconnect(sp, "whoever listens there does not answer");
}
