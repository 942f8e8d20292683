/* transport_sp.c: ipc://, tcp:// and tls+tcp:// as the REQ side of the SP protocol
 * (docs/protocol.md, section 1), on a socket that never blocks.
 *
 * The thread that receives connects, reads, and notices a lost connection; any thread sends. A
 * message is written where send is called, as far as the socket takes it; what is left, at most one
 * message, is written by later calls: send, recv, or a wait that ends because the socket is
 * writable. One epoll descriptor over the socket and an eventfd (wake) is what waits; before that
 * it is asked again and again, as long as answers have come soon lately. No thread, nothing global:
 * a forked process can open clients of its own.
 */
#include "clients/libattn/transport.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "clients/libattn/secure.h"
#include "clients/libattn/sp_address.h"
#include "proto/attn_time.h"

#define SP_READ_BYTES 4096u /* read at once where no message is known yet */
#define SP_RETRY_NS 10000000u
#define SP_MAX_RETRY_NS 500000000u
#define SP_CONNECT_NS 5000000000u /* for connecting and the handshake */
#define SP_MAX_SPIN_NS 200000u /* as long as news came within that time lately */
#define SP_MIN_SPIN_NS 5000u
#define SP_POLITE_NS 20000u /* spinning for longer lets others run in between */
#define SP_ID_BIT 0x80000000u
#define SP_HANDSHAKE_BYTES 8u
#define SP_HEAD_BYTES (9u + 4u) /* on ipc; on tcp without the first */
#define SP_ALIGN 64u

enum sp_state { SP_CLOSED, SP_CONNECTING, SP_SECURING, SP_HANDSHAKE, SP_READY };

struct sp {
    struct client_transport base;
    struct sp_address address;
    struct secure *secure; /* of a tls+tcp:// url; NULL: no TLS */
    int epoll_fd, wake_fd; /* never change */
    atomic_bool is_ready, is_woken;
    atomic_uint_fast64_t generation, n_failures, max_message_bytes;

    pthread_mutex_t lock;
    int socket; /* -1: none. Changed by the receiving thread alone, under the lock */
    struct sp_message *out; /* partly written, or NULL */
    uint8_t out_head[SP_HEAD_BYTES];
    size_t out_at; /* bytes of head and message that are written */
    char why_not[256]; /* there is no connection; "" if there is one */

    /* the receiving thread's */
    enum sp_state state;
    bool has_spare_core;
    uint64_t spin_ns;
    uint64_t retry_ns, retry_at_ns, connect_until_ns;
    uint8_t read[SP_READ_BYTES]; /* [read_at, read_end) is not looked at yet */
    size_t read_at, read_end;
    struct sp_message *in; /* partly read, or NULL */
    size_t in_at;
    uint32_t in_id;
};

/* A message's memory; the message is behind it. */
struct sp_message {
    _Alignas(SP_ALIGN) size_t bytes;
};

static const uint8_t handshake_req[SP_HANDSHAKE_BYTES] = {0, 'S', 'P', 0, 0, 0x30, 0, 0};
static const uint8_t handshake_rep[SP_HANDSHAKE_BYTES] = {0, 'S', 'P', 0, 0, 0x31, 0, 0};

static struct sp_message *message_new(size_t bytes)
{
    if (bytes > SIZE_MAX / 2)
        return NULL;
    size_t all = sizeof(struct sp_message) + (bytes + SP_ALIGN - 1) / SP_ALIGN * SP_ALIGN;
    struct sp_message *m = aligned_alloc(SP_ALIGN, all);
    if (m != NULL)
        m->bytes = bytes;
    return m;
}

/* ---- connecting; the receiving thread ---- */

static void watch(struct sp *sp, int op, bool wants_write)
{
    struct epoll_event ev = {
        .events = EPOLLIN | (wants_write ? EPOLLOUT : 0),
    };
    epoll_ctl(sp->epoll_fd, op, sp->socket, &ev); /* fails for want of memory: ticks go on */
}

/* Bytes from the daemon, as recv(2); through TLS, if that is spoken. */
static ssize_t sp_read(struct sp *sp, void *dst, size_t n)
{
    return sp->secure != NULL ? secure_recv(sp->secure, sp->socket, dst, n)
                              : recv(sp->socket, dst, n, 0);
}

/* What a failed connect, send or sp_read means. */
static const char *why_broken(const struct sp *sp)
{
    return sp->secure != NULL && errno == EPROTO
               ? secure_why(sp->secure)
               : connect_error(errno, sp_address_path(&sp->address));
}

/* Closes the connection, keeps why there is none, and sets when to try again. */
__attribute__((format(printf, 2, 3))) static void disconnect(struct sp *sp, const char *format, ...)
{
    va_list args;
    atomic_store(&sp->is_ready, false);
    pthread_mutex_lock(&sp->lock);
    va_start(args, format);
    vsnprintf(sp->why_not, sizeof sp->why_not, format, args);
    va_end(args);
    if (sp->socket >= 0)
        close(sp->socket); /* leaves the epoll set by itself */
    sp->socket = -1;
    if (sp->secure != NULL)
        secure_end(sp->secure);
    free(sp->out);
    sp->out = NULL;
    pthread_mutex_unlock(&sp->lock);
    free(sp->in);
    sp->in = NULL;
    sp->read_at = sp->read_end = 0;
    sp->state = SP_CLOSED;
    sp->retry_at_ns = attn_now_ns() + sp->retry_ns;
    sp->retry_ns = 2 * sp->retry_ns < SP_MAX_RETRY_NS ? 2 * sp->retry_ns : SP_MAX_RETRY_NS;
    atomic_fetch_add(&sp->n_failures, 1);
}

static void start_connecting(struct sp *sp)
{
    int fd = sp_address_socket(&sp->address);
    if (fd < 0) {
        disconnect(sp, "socket: %s", strerror(errno));
        return;
    }
    pthread_mutex_lock(&sp->lock);
    sp->socket = fd;
    pthread_mutex_unlock(&sp->lock);
    if (connect(fd, (struct sockaddr *)&sp->address.any, sp->address.bytes) != 0 &&
        errno != EINPROGRESS) {
        disconnect(sp, "%s", why_broken(sp));
        return;
    }
    watch(sp, EPOLL_CTL_ADD, true);
    sp->state = SP_CONNECTING;
    sp->connect_until_ns = attn_now_ns() + SP_CONNECT_NS;
}

/* The TLS handshake, and after it our side of SP's. */
static void secure_connection(struct sp *sp)
{
    struct iovec hello = {(void *)(uintptr_t)handshake_req, sizeof handshake_req};
    enum secure_result r = secure_handshake(sp->secure, sp->socket);
    if (r == SECURE_NO)
        disconnect(sp, "%s", secure_why(sp->secure));
    if (r != SECURE_YES)
        return;
    sp->state = SP_HANDSHAKE;
    if (secure_send(sp->secure, sp->socket, &hello, 1) != (ssize_t)sizeof handshake_req)
        disconnect(sp, "TLS: the connection takes nothing");
}

/* The socket is connected, or it failed, or it is neither yet. */
static void finish_connecting(struct sp *sp)
{
    int error = 0;
    socklen_t n = sizeof error;
    struct sockaddr_storage peer;
    socklen_t peer_bytes = sizeof peer;
    if (sp->secure != NULL && getpeername(sp->socket, (struct sockaddr *)&peer, &peer_bytes) == 0) {
        watch(sp, EPOLL_CTL_MOD, false);
        sp->state = SP_SECURING;
        if (!secure_begin(sp->secure))
            disconnect(sp, "no memory for TLS");
        return;
    }
    if (sp->secure != NULL) {
        if (getsockopt(sp->socket, SOL_SOCKET, SO_ERROR, &error, &n) == 0 && error != 0)
            disconnect(sp, "%s", connect_error(error, NULL));
        return;
    }
    ssize_t sent = send(sp->socket, handshake_req, sizeof handshake_req, MSG_NOSIGNAL);
    if (sent == sizeof handshake_req) {
        watch(sp, EPOLL_CTL_MOD, false);
        sp->state = SP_HANDSHAKE;
        return;
    }
    if (sent < 0 && (errno == EAGAIN || errno == ENOTCONN || errno == EINTR))
        return;
    if (getsockopt(sp->socket, SOL_SOCKET, SO_ERROR, &error, &n) != 0 || error == 0)
        error = sent < 0 ? errno : EPIPE;
    disconnect(sp, "%s", connect_error(error, sp_address_path(&sp->address)));
}

/* ---- reading; the receiving thread ---- */

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
    if (n == 0)
        disconnect(sp, "the daemon hung up");
    else if (errno != EAGAIN && errno != EINTR)
        disconnect(sp, "%s", why_broken(sp));
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
            disconnect(sp, "the peer hung up in the handshake");
        else if (more > 0)
            sp->read_end += (size_t)more;
        return;
    }
    if (memcmp(sp->read, handshake_rep, sizeof handshake_rep) != 0) {
        disconnect(sp, "whoever listens there does not speak SP as a REP socket");
        return;
    }
    sp->read_at += SP_HANDSHAKE_BYTES;
    sp->retry_ns = SP_RETRY_NS;
    sp->state = SP_READY;
    pthread_mutex_lock(&sp->lock);
    sp->why_not[0] = '\0';
    pthread_mutex_unlock(&sp->lock);
    atomic_fetch_add(&sp->generation, 1);
    atomic_store(&sp->is_ready, true);
}

/* Makes sp->in of the head of a message, which is in sp->read from read_at on. */
static bool take_head(struct sp *sp)
{
    const uint8_t *p = sp->read + sp->read_at;
    uint64_t bytes = 0, most = atomic_load(&sp->max_message_bytes);
    uint32_t id = 0;
    if (sp->address.is_ipc && *p++ != 1) {
        disconnect(sp, "the daemon sent a message of an unknown type");
        return false;
    }
    for (int i = 0; i < 8; i++)
        bytes = bytes << 8 | *p++;
    for (int i = 0; i < 4; i++)
        id = id << 8 | *p++;
    if (bytes < 4 || bytes - 4 > most || !(id & SP_ID_BIT)) {
        disconnect(sp,
                   "the daemon sent a message of %llu bytes and id 0x%08x, expected at most %llu",
                   (unsigned long long)bytes, id, (unsigned long long)most);
        return false;
    }
    sp->in = message_new((size_t)bytes - 4);
    if (sp->in == NULL) {
        disconnect(sp, "no memory for an answer of %llu bytes", (unsigned long long)bytes);
        return false;
    }
    sp->in_at = 0;
    sp->in_id = id & ~SP_ID_BIT;
    sp->read_at = (size_t)(p - sp->read);
    return true;
}

/* Reads a head, which may come in pieces. */
static bool read_head(struct sp *sp)
{
    size_t want = SP_HEAD_BYTES - !sp->address.is_ipc, n = sp->read_end - sp->read_at;
    if (n > 0 && n < want && sp->read_at > 0) { /* room behind it */
        memmove(sp->read, sp->read + sp->read_at, n);
        sp->read_at = 0;
        sp->read_end = n;
    }
    while (n < want) {
        if (n == 0)
            sp->read_at = sp->read_end = 0;
        ssize_t more = sp_read(sp, sp->read + sp->read_end, sizeof sp->read - sp->read_end);
        if (more == 0)
            disconnect(sp, "the daemon hung up");
        else if (more < 0 && errno != EAGAIN && errno != EINTR)
            disconnect(sp, "%s", why_broken(sp));
        if (more <= 0)
            return false;
        sp->read_end += (size_t)more;
        n += (size_t)more;
    }
    return take_head(sp);
}

/* True: all of sp->in is there. */
static bool read_body(struct sp *sp)
{
    struct sp_message *m = sp->in;
    while (sp->in_at < m->bytes) {
        size_t left = m->bytes - sp->in_at, ready = sp->read_end - sp->read_at;
        uint8_t *dst = (uint8_t *)(m + 1) + sp->in_at;
        if (ready > 0) {
            size_t n = ready < left ? ready : left;
            memcpy(dst, sp->read + sp->read_at, n);
            sp->read_at += n;
            sp->in_at += n;
            continue;
        }
        ssize_t n = sp_read(sp, dst, left);
        if (n == 0)
            disconnect(sp, "the daemon hung up");
        else if (n < 0 && errno != EAGAIN && errno != EINTR)
            disconnect(sp, "%s", why_broken(sp));
        if (n <= 0)
            return false;
        sp->in_at += (size_t)n;
    }
    return true;
}

/* ---- sending ---- */

/* Writes of sp->out what the socket takes. True: all of it. Under the lock. */
static bool write_out_locked(struct sp *sp)
{
    struct sp_message *m = sp->out;
    size_t head_bytes = SP_HEAD_BYTES - !sp->address.is_ipc;
    while (sp->out_at < head_bytes + m->bytes) {
        size_t at = sp->out_at < head_bytes ? sp->out_at : head_bytes;
        size_t body_at = sp->out_at - at;
        struct iovec iov[2] = {{sp->out_head + at, head_bytes - at},
                               {(uint8_t *)(m + 1) + body_at, m->bytes - body_at}};
        struct msghdr hdr = {.msg_iov = iov, .msg_iovlen = 2};
        ssize_t n = sp->secure != NULL ? secure_send(sp->secure, sp->socket, iov, 2)
                                       : sendmsg(sp->socket, &hdr, MSG_NOSIGNAL);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return false; /* full; or broken, which the receiving thread is told by epoll */
        sp->out_at += (size_t)n;
    }
    if (sp->secure != NULL && !secure_flush(sp->secure, sp->socket))
        return false;
    free(m);
    sp->out = NULL;
    return true;
}

static void put_head(struct sp *sp, size_t message_bytes, uint32_t id)
{
    uint64_t bytes = (uint64_t)message_bytes + 4;
    uint8_t *p = sp->out_head;
    if (sp->address.is_ipc)
        *p++ = 1;
    for (int shift = 56; shift >= 0; shift -= 8)
        *p++ = (uint8_t)(bytes >> shift);
    for (int shift = 24; shift >= 0; shift -= 8)
        *p++ = (uint8_t)((id | SP_ID_BIT) >> shift);
}

static bool sp_send(struct client_transport *t, uint32_t id, void *message)
{
    struct sp *sp = (struct sp *)t;
    if (!atomic_load(&sp->is_ready))
        return false;
    pthread_mutex_lock(&sp->lock);
    bool had_rest = sp->out != NULL;
    bool is_taken = sp->socket >= 0 && (!had_rest || write_out_locked(sp));
    if (is_taken) {
        sp->out = (struct sp_message *)message - 1;
        sp->out_at = 0;
        put_head(sp, sp->out->bytes, id);
        bool has_rest = !write_out_locked(sp);
        if (has_rest != had_rest)
            watch(sp, EPOLL_CTL_MOD, has_rest);
    }
    pthread_mutex_unlock(&sp->lock);
    return is_taken;
}

static void send_rest(struct sp *sp)
{
    pthread_mutex_lock(&sp->lock);
    if (sp->out != NULL && write_out_locked(sp))
        watch(sp, EPOLL_CTL_MOD, false);
    pthread_mutex_unlock(&sp->lock);
}

static void drain_wakes(struct sp *sp)
{
    uint64_t n_wakes;
    if (atomic_exchange(&sp->is_woken, false) && read(sp->wake_fd, &n_wakes, sizeof n_wakes) < 0)
        return; /* drained already */
}

static bool sp_recv(struct client_transport *t, struct client_message *out_m)
{
    struct sp *sp = (struct sp *)t;
    drain_wakes(sp);
    if (sp->state == SP_CLOSED && attn_now_ns() >= sp->retry_at_ns)
        start_connecting(sp);
    if (sp->state == SP_CONNECTING)
        finish_connecting(sp);
    if (sp->state == SP_SECURING)
        secure_connection(sp);
    if (sp->state == SP_HANDSHAKE)
        take_handshake(sp);
    if (sp->state != SP_CLOSED && sp->state != SP_READY && attn_now_ns() >= sp->connect_until_ns)
        disconnect(sp, "whoever listens there does not answer");
    if (sp->state != SP_READY)
        return false;
    send_rest(sp);
    if ((sp->in == NULL && !read_head(sp)) || !read_body(sp))
        return false;
    *out_m = (struct client_message){.base = sp->in + 1, .bytes = sp->in->bytes, .id = sp->in_id};
    sp->in = NULL;
    return true;
}

/* ---- waiting ---- */

static void sp_want_send(struct client_transport *t, bool is_wanted)
{
    (void)t, (void)is_wanted; /* a socket with a message left over is watched until it takes it */
}

/* News that comes within ns, without going to sleep; 0: none. */
static int spin(struct sp *sp, struct epoll_event ready[2], uint64_t start_ns, uint64_t ns)
{
    int n = 0;
    for (uint64_t passed_ns = 0; n == 0 && passed_ns < ns; passed_ns = attn_now_ns() - start_ns) {
        n = epoll_wait(sp->epoll_fd, ready, 2, 0);
        if (n == 0 && passed_ns > SP_POLITE_NS)
            sched_yield();
    }
    return n;
}

static void sp_wait(struct client_transport *t, uint64_t ns)
{
    struct sp *sp = (struct sp *)t;
    struct epoll_event ready[2];
    const uint64_t start_ns = attn_now_ns();
    if (sp->state == SP_CLOSED) {
        uint64_t until_ns = sp->retry_at_ns > start_ns ? sp->retry_at_ns - start_ns : 0;
        ns = until_ns < ns ? until_ns : ns;
    }
    struct timespec ts = {.tv_sec = (time_t)(ns / 1000000000u),
                          .tv_nsec = (long)(ns % 1000000000u)};
    bool may_spin = sp->has_spare_core && sp->state == SP_READY && sp->spin_ns >= SP_MIN_SPIN_NS;
    int n = may_spin ? spin(sp, ready, start_ns, sp->spin_ns < ns ? sp->spin_ns : ns) : 0;
    if (n == 0)
        n = epoll_pwait2(sp->epoll_fd, ready, 2, &ts, NULL);
    bool is_soon = n > 0 && attn_now_ns() - start_ns <= SP_MAX_SPIN_NS;
    sp->spin_ns = is_soon ? SP_MAX_SPIN_NS : sp->spin_ns / 2;
    drain_wakes(sp);
}

static void sp_wake(struct client_transport *t)
{
    struct sp *sp = (struct sp *)t;
    uint64_t one = 1;
    bool is_written = write(sp->wake_fd, &one, sizeof one) == sizeof one;
    (void)is_written; /* else it is full, and readable already */
    atomic_store(&sp->is_woken, true);
}

static int sp_fd(struct client_transport *t)
{
    return ((struct sp *)t)->epoll_fd;
}

/* ---- life ---- */

/* Nothing but descriptors and memory of our own, and no lock: right in a forked child, too. */
static void sp_abandon(struct client_transport *t)
{
    struct sp *sp = (struct sp *)t;
    if (sp->socket >= 0)
        close(sp->socket);
    if (sp->epoll_fd >= 0)
        close(sp->epoll_fd);
    if (sp->wake_fd >= 0)
        close(sp->wake_fd);
    secure_close(sp->secure);
    free(sp->in);
    free(sp->out);
    free(sp);
}

static void sp_close(struct client_transport *t)
{
    struct sp *sp = (struct sp *)t;
    if (sp->secure != NULL && sp->socket >= 0)
        secure_goodbye(sp->secure, sp->socket);
    sp_abandon(t);
}

static attn_status sp_open(const char *url, const struct client_credentials *files,
                           struct client_transport **out_t, char *why, size_t why_bytes)
{
    char problem[128] = "";
    attn_status st = ATTN_ENOMEM;
    struct sp *sp = calloc(1, sizeof *sp);
    if (sp == NULL) {
        snprintf(why, why_bytes, "no memory for a connection to %s", url);
        return st;
    }
    sp->base.ops = &transport_sp_ops;
    sp->socket = sp->epoll_fd = sp->wake_fd = -1;
    sp->retry_ns = SP_RETRY_NS;
    sp->has_spare_core = sysconf(_SC_NPROCESSORS_ONLN) > 1;
    sp->spin_ns = SP_MAX_SPIN_NS;
    if (!sp_address_parse(url, &sp->address, problem, sizeof problem)) {
        snprintf(why, why_bytes, "url %.100s: %s", url, problem);
        st = ATTN_EINVAL;
        goto fail;
    }
    if (sp->address.is_tls) {
        st = secure_open(sp->address.host, files, &sp->secure, why, why_bytes);
        if (st != ATTN_OK)
            goto fail;
        st = ATTN_ENOMEM;
    }
    struct epoll_event ev = {.events = EPOLLIN};
    sp->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    sp->wake_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (sp->epoll_fd < 0 || sp->wake_fd < 0 ||
        epoll_ctl(sp->epoll_fd, EPOLL_CTL_ADD, sp->wake_fd, &ev) != 0) {
        snprintf(why, why_bytes, "set up a connection to %s: %s", url, strerror(errno));
        goto fail;
    }
    pthread_mutex_init(&sp->lock, NULL);
    start_connecting(sp);
    *out_t = &sp->base;
    return ATTN_OK;
fail:
    sp_abandon(&sp->base);
    return st;
}

/* ---- the rest ---- */

static void *sp_message_alloc(struct client_transport *t, size_t bytes, size_t reply_bytes)
{
    (void)t, (void)reply_bytes;
    struct sp_message *m = message_new(bytes);
    return m != NULL ? m + 1 : NULL;
}

static void sp_message_free(struct client_transport *t, void *message)
{
    (void)t;
    free((struct sp_message *)message - 1);
}

static uint64_t sp_generation(struct client_transport *t)
{
    return atomic_load(&((struct sp *)t)->generation);
}

static bool sp_is_connected(struct client_transport *t)
{
    return atomic_load(&((struct sp *)t)->is_ready);
}

static uint64_t sp_n_failures(struct client_transport *t)
{
    return atomic_load(&((struct sp *)t)->n_failures);
}

static void sp_why_not(struct client_transport *t, char *out, size_t out_bytes)
{
    struct sp *sp = (struct sp *)t;
    pthread_mutex_lock(&sp->lock);
    snprintf(out, out_bytes, "%s", sp->why_not);
    pthread_mutex_unlock(&sp->lock);
}

static uint64_t sp_max_message(struct client_transport *t)
{
    (void)t;
    return 0;
}

static void sp_set_max_message(struct client_transport *t, uint64_t bytes)
{
    atomic_store(&((struct sp *)t)->max_message_bytes, bytes);
}

const struct client_transport_ops transport_sp_ops = {
    .schemes = {"ipc://", "tcp://", "tls+tcp://", NULL},
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
    .n_failures = sp_n_failures,
    .why_not = sp_why_not,
    .max_message = sp_max_message,
    .set_max_message = sp_set_max_message,
};
