/* sp.c: the transports ipc://, tcp://, tls+tcp:// and admin://: listening, deadlines, and passing
 * replies from the engine's thread to the loop.
 *
 * Replies are pushed on a stack (stack.h) and the loop is woken with uv_async_send; the loop takes
 * all of them, queues each at its peer and then flushes every such peer once. Deadlines are in
 * lists, each ordered because its members wait equally long; one timer checks the heads by the
 * daemon's clock.
 *
 * close may be called while the engine still has requests; then memory is freed after the last.
 *
 * Why not a library (both of Debian 12, behind the same raw client). libnanomsg 1.1.5 as a server:
 * of 128 replies of 64 KiB sent back to back to a busy peer 15 % arrive, and send reports success
 * for all; 19 of 21 failed allocations end the process; descriptors passed over ipc leak; at the
 * descriptor limit it burns a core; there is no cap on connections, no peer's identity, no deadline
 * for a body; a round trip of 20 KB takes 35 to 75 us, on a raw Unix socket 12. libnng 1.5.2: 68 us
 * for it, 35 here; 14 threads and 4.0 KiB per idle peer, 3 and 0.9 KiB here; a message that stops
 * halfway stays open; a peer that reads none of its replies takes all 64 contexts; no cap on peers;
 * it receives into messages of its own, so every body would be copied once more.
 */
#define _GNU_SOURCE /* POLLRDHUP */
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include "daemon/base/clock.h"
#include "daemon/base/log.h"
#include "daemon/base/stack.h"
#include "daemon/keeper/sockets.h"
#include "daemon/transport/sp_internal.h"
#include "daemon/transport/tls_server.h"

enum {
    BACKLOG = 1024,
    SPARE_DESCRIPTORS = 64, /* for the process itself, beside peers */
};

static struct transport_sp *of(struct transport *base)
{
    return (struct transport_sp *)base; /* its first member */
}

/* ---- deadlines ---- */

static const uint64_t PROGRESS_US = 2000000;

static uint64_t tick_of(const struct config *cfg)
{
    uint64_t us = config_now(cfg, handshake_timeout_us);
    uint64_t body_us = config_now(cfg, body_timeout_us),
             write_us = config_now(cfg, write_timeout_us);
    us = body_us < us ? body_us : us;
    return clock_tick_ms(write_us < us ? write_us : us);
}

/* A wait of this list that began before the returned moment is over. */
static uint64_t oldest_of(const struct sp_waits *list, uint64_t now_ns)
{
    uint64_t ns = __atomic_load_n(list->timeout_us, __ATOMIC_RELAXED) * 1000;
    return now_ns > ns ? now_ns - ns : 0;
}

static void on_timer(uv_timer_t *timer)
{
    struct transport_sp *t = timer->data;
    struct sp_waits *lists[] = {&t->handshakes, &t->hellos, &t->bodies, &t->progress, &t->writes};
    uint64_t now_ns = clock_now_ns();
    bool is_empty = true;
    for (size_t i = 0; i < sizeof(lists) / sizeof(lists[0]); i++) {
        struct sp_wait *w;
        uint64_t oldest_ns = oldest_of(lists[i], now_ns);
        while ((w = TAILQ_FIRST(&lists[i]->waiting)) != NULL && w->began_ns <= oldest_ns) {
            sp_wait_stop(w);
            lists[i]->expire(w->peer);
        }
        is_empty &= w == NULL;
    }
    if (t->is_accept_waiting) {
        t->is_accept_waiting = false;
        if (!t->is_stopped)
            sp_peer_accept(t);
    }
    if (is_empty && !t->is_accept_waiting)
        uv_timer_stop(timer);
    else
        uv_timer_set_repeat(timer, tick_of(t->env->cfg));
}

static void timer_start(struct transport_sp *t)
{
    uint64_t tick_ms = tick_of(t->env->cfg);
    if (!uv_is_active((uv_handle_t *)&t->timer) && !t->is_closing)
        uv_timer_start(&t->timer, on_timer, tick_ms, tick_ms);
}

void sp_accept_later(struct transport_sp *t)
{
    t->is_accept_waiting = true;
    timer_start(t);
}

void sp_wait_start(struct sp_waits *list, struct sp_wait *w)
{
    sp_wait_stop(w);
    w->list = list;
    w->began_ns = clock_now_ns();
    TAILQ_INSERT_TAIL(&list->waiting, w, entry);
    timer_start(w->peer->t);
}

void sp_wait_stop(struct sp_wait *w)
{
    if (w->list == NULL)
        return;
    TAILQ_REMOVE(&w->list->waiting, w, entry);
    w->list = NULL;
}

/* ---- replies ---- */

static void sp_reply(struct request *req)
{
    struct sp_peer *p = req->peer;
    struct transport_sp *t = p->t;
    /* as soon as the reply is pushed, the loop may send it and close the transport; it waits for
     * n_pushing before it closes what uv_async_send uses */
    atomic_fetch_add(&t->n_pushing, 1);
    if (stack_push(&t->replies, req))
        uv_async_send(&t->async);
    atomic_fetch_sub(&t->n_pushing, 1);
}

static void on_async(uv_async_t *async)
{
    struct transport_sp *t = async->data;
    SLIST_HEAD(, sp_peer) dirty = SLIST_HEAD_INITIALIZER(dirty);
    stack_for_each(struct request, req, stack_take_all(&t->replies)) {
        struct sp_peer *p = req->peer;
        if (!p->is_closing && !p->is_dirty) {
            p->is_dirty = true;
            SLIST_INSERT_HEAD(&dirty, p, dirty);
        }
        sp_peer_queue(p, req);
    }
    /* a peer that was cut is still valid: its close callback frees it later */
    while (!SLIST_EMPTY(&dirty)) {
        struct sp_peer *p = SLIST_FIRST(&dirty);
        SLIST_REMOVE_HEAD(&dirty, dirty);
        p->is_dirty = false;
        sp_peer_flush(p);
    }
    sp_transport_finish(t);
}

/* ---- listening ---- */

static void on_connection(uv_stream_t *listener, int status)
{
    struct transport_sp *t = listener->data;
    if (status < 0) {
        log_limited("accept", LOG_LEVEL_WARN, log_write,
                    "%s: a connection could not be accepted: %s", t->url, uv_strerror(status));
        return;
    }
    sp_peer_accept(t);
}

/* Raises the limit of descriptors to suffice for all peers, as far as the hard limit allows. */
static void raise_descriptor_limit(const struct config *cfg)
{
    struct rlimit limit;
    rlim_t wanted = (rlim_t)cfg->max_peers + SPARE_DESCRIPTORS;
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= wanted)
        return;
    limit.rlim_cur = limit.rlim_max < wanted ? limit.rlim_max : wanted;
    if (setrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur < wanted)
        log_warn("listen.max_peers = %u needs %llu descriptors, the limit is %llu", cfg->max_peers,
                 (unsigned long long)wanted, (unsigned long long)limit.rlim_cur);
}

/* Accepts connections from a listening socket, which the transport then owns. */
static int accept_from(struct transport_sp *t, int fd)
{
    int rc = t->is_ipc ? uv_pipe_open(&t->listener.pipe, fd) : uv_tcp_open(&t->listener.tcp, fd);
    if (rc != 0)
        close(fd);
    else
        rc = uv_listen(&t->listener.stream, BACKLOG, on_connection);
    return rc;
}

static void on_handle_closed(uv_handle_t *handle)
{
    struct transport_sp *t = handle->data;
    t->n_handles--;
    sp_transport_finish(t);
}

static int init_handles(struct transport_sp *t)
{
    int rc = uv_timer_init(t->env->loop, &t->timer);
    if (rc == 0)
        rc = t->is_ipc ? uv_pipe_init(t->env->loop, &t->listener.pipe, 0)
                       : uv_tcp_init(t->env->loop, &t->listener.tcp);
    t->timer.data = t;
    t->listener.handle.data = t;
    t->async.data = t;
    if (rc == 0)
        t->n_handles = 2;
    if (rc == 0)
        rc = uv_async_init(t->env->loop, &t->async, on_async);
    if (rc == 0)
        t->n_handles = 3;
    return rc;
}

static void transport_free(struct transport_sp *t)
{
    tls_server_close(t->tls);
    free(t->plain);
    free(t->read_ahead);
    free(t);
}

void sp_transport_finish(struct transport_sp *t)
{
    if (!t->is_closing)
        return;
    if (!t->is_async_closing && t->n_owed == 0) {
        while (atomic_load(&t->n_pushing) != 0)
            sched_yield(); /* a thread is about to leave uv_async_send */
        t->is_async_closing = true;
        uv_close((uv_handle_t *)&t->async, on_handle_closed);
    }
    if (t->n_handles == 0) {
        transport_free(t);
    }
}

static const struct transport_ops *ops_of(const struct address *a)
{
    return a->is_tls                        ? &transport_tls_ops
           : a->is_admin                    ? &transport_admin_ops
           : a->sa.any.sa_family == AF_UNIX ? &transport_ipc_ops
                                            : &transport_tcp_ops;
}

static struct transport_sp *transport_new(struct transport_env *env, const struct address *a,
                                          const char *url)
{
    const struct config *cfg = env->cfg;
    struct transport_sp *t = calloc(1, sizeof(*t));
    if (t == NULL)
        return NULL;
    t->read_ahead = malloc(SP_READ_AHEAD_BYTES);
    t->plain = a->is_tls ? malloc(TLS_STREAM_RECORD_BYTES) : NULL;
    if (t->read_ahead == NULL || (a->is_tls && t->plain == NULL)) {
        transport_free(t);
        return NULL;
    }
    t->base.ops = ops_of(a);
    t->env = env;
    t->is_ipc = a->sa.any.sa_family == AF_UNIX;
    LIST_INIT(&t->peers);
    t->handshakes = (struct sp_waits){.timeout_us = &cfg->handshake_timeout_us,
                                      .expire = sp_peer_expire_handshake};
    t->hellos =
        (struct sp_waits){.timeout_us = &cfg->handshake_timeout_us, .expire = sp_peer_expire_hello};
    t->bodies =
        (struct sp_waits){.timeout_us = &cfg->body_timeout_us, .expire = sp_peer_expire_body};
    t->progress = (struct sp_waits){.timeout_us = &PROGRESS_US, .expire = sp_peer_expire_progress};
    t->writes =
        (struct sp_waits){.timeout_us = &cfg->write_timeout_us, .expire = sp_peer_expire_write};
    TAILQ_INIT(&t->handshakes.waiting);
    TAILQ_INIT(&t->hellos.waiting);
    TAILQ_INIT(&t->bodies.waiting);
    TAILQ_INIT(&t->progress.waiting);
    TAILQ_INIT(&t->writes.waiting);
    snprintf(t->url, sizeof(t->url), "%s", url);
    return t;
}

/* Puts the actual port into the url. */
static void name_port(struct transport_sp *t)
{
    struct sockaddr_storage sa;
    int n = sizeof(sa);
    char text[64];
    uv_tcp_getsockname(&t->listener.tcp, (struct sockaddr *)&sa, &n);
    address_format((struct sockaddr *)&sa, text, sizeof(text));
    snprintf(t->url, sizeof(t->url), "%s%s", t->base.ops->scheme, text);
}

/* ---- the tables ---- */

static attn_status sp_open(struct transport_env *env, const char *url, struct transport **out_t,
                           char *why, size_t why_bytes)
{
    struct address a;
    char reason[256];
    attn_status st = address_parse_url(url, &a, reason, sizeof(reason));
    if (st != ATTN_OK) {
        snprintf(why, why_bytes, "%s: %s", url, reason);
        return st;
    }
    struct transport_sp *t = transport_new(env, &a, url);
    if (t == NULL) {
        snprintf(why, why_bytes, "%s: out of memory", url);
        return ATTN_ENOMEM;
    }
    if (a.is_tls && (st = tls_server_open(env->cfg, &t->tls, reason, sizeof(reason))) != ATTN_OK) {
        snprintf(why, why_bytes, "%s: %s", url, reason);
        transport_free(t);
        return st;
    }
    signal(SIGPIPE, SIG_IGN); /* a write to a peer that left must not end the process */
    raise_descriptor_limit(env->cfg);

    int fd, rc = init_handles(t);
    if (rc != 0)
        snprintf(reason, sizeof(reason), "cannot listen: %s", uv_strerror(rc));
    else if (socket_listen(url, &a, BACKLOG, &fd, reason, sizeof(reason)) != ATTN_OK)
        rc = UV_EADDRNOTAVAIL;
    else if ((rc = accept_from(t, fd)) != 0) {
        snprintf(reason, sizeof(reason), "cannot listen: %s", uv_strerror(rc));
        socket_unlisten(-1, &a);
    }
    if (rc != 0) {
        snprintf(why, why_bytes, "%s: %s", url, reason);
        t->is_async_closing = t->n_handles < 3;
        t->base.ops->close(&t->base);
        return ATTN_EINVAL;
    }
    t->address = a;
    if (!a.is_tls && !a.is_loopback)
        log_warn("%s is NOT ENCRYPTED (listen.insecure_tcp = yes): whoever sees the network's "
                 "packets can read tokens and tensors, and act as any worker",
                 url);
    if (!t->is_ipc)
        name_port(t);
    *out_t = &t->base;
    return ATTN_OK;
}

static const char *sp_url(const struct transport *base)
{
    return ((const struct transport_sp *)base)->url;
}

static void sp_stop(struct transport *base)
{
    struct transport_sp *t = of(base);
    if (t->is_stopped)
        return;
    t->is_stopped = true;
    if (t->n_handles >= 2)
        uv_close(&t->listener.handle, on_handle_closed);
    if (t->address.sa.any.sa_family == AF_UNIX)
        socket_unlisten(-1, &t->address);
    struct sp_peer *p;
    LIST_FOREACH(p, &t->peers, entry)
        sp_peer_stop_reading(p);
}

static bool sp_is_idle(const struct transport *base)
{
    return ((const struct transport_sp *)base)->n_owed == 0;
}

static bool sp_hang_up(struct transport *base)
{
    struct transport_sp *t = of(base);
    struct sp_peer *p, *next;
    bool is_done = true;
    if (t->n_owed != 0)
        return false;
    for (p = LIST_FIRST(&t->peers); p != NULL; p = next) {
        next = LIST_NEXT(p, entry);
        struct pollfd at = {.events = POLLRDHUP};
        if (uv_fileno(&p->io.handle, &at.fd) != 0)
            continue;
        if (p->tls != NULL)
            sp_tls_end(p); /* may have closed p */
        if (p->is_closing)
            continue;
        shutdown(at.fd, SHUT_WR);
        is_done &= poll(&at, 1, 0) > 0;
    }
    return is_done;
}

static void sp_close(struct transport *base)
{
    struct transport_sp *t = of(base);
    if (t->is_closing)
        return;
    sp_stop(base);
    t->is_closing = true;
    while (!LIST_EMPTY(&t->peers))
        sp_peer_close(LIST_FIRST(&t->peers));
    if (t->n_handles >= 2)
        uv_close((uv_handle_t *)&t->timer, on_handle_closed);
    sp_transport_finish(t);
}

static attn_status sp_reload(struct transport *base, const struct config *cfg, char *why,
                             size_t why_bytes)
{
    struct transport_sp *t = of(base);
    return t->tls == NULL ? ATTN_OK : tls_server_reload(t->tls, cfg, why, why_bytes);
}

/* Functions that all four transports share. */
#define SP_OPERATIONS                                                                              \
    .open = sp_open, .url = sp_url, .stop = sp_stop, .is_idle = sp_is_idle, .hang_up = sp_hang_up, \
    .reload = sp_reload, .close = sp_close, .reply = sp_reply

const struct transport_ops transport_ipc_ops = {
    .scheme = "ipc://",
    .label = STATS_IPC,
    SP_OPERATIONS,
};

const struct transport_ops transport_tls_ops = {
    .scheme = "tls+tcp://",
    .label = STATS_TLS,
    SP_OPERATIONS,
};

const struct transport_ops transport_tcp_ops = {
    .scheme = "tcp://",
    .label = STATS_TCP,
    SP_OPERATIONS,
};

/* ipc:// on the admin socket */
const struct transport_ops transport_admin_ops = {
    .scheme = "admin://",
    .label = STATS_IPC,
    .is_admin = true,
    SP_OPERATIONS,
};
