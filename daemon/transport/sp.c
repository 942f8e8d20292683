/* sp.c: the transports ipc://, tcp://, tls+tcp:// and admin://: listening, deadlines, and passing
 * connections from the first loop, and replies from the engine's thread, to a connection's loop.
 *
 * Replies that are not written at once (sp_peer_answer) are pushed on a stack (stack.h) and the
 * loop is woken with uv_async_send; the loop takes all of them, queues each at its peer and then
 * flushes every such peer once. Deadlines are in
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
#define _GNU_SOURCE /* POLLRDHUP, accept4 */
#include <errno.h>
#include <fcntl.h>
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
    MAX_ACCEPTS = 64, /* in one turn of the loop */
    ACCEPT_AGAIN_MS = 100, /* after running out of memory or descriptors */
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
    struct sp_loop *on = timer->data;
    struct sp_waits *lists[] = {&on->handshakes, &on->hellos, &on->bodies, &on->progress,
                                &on->writes};
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
    if (is_empty)
        uv_timer_stop(timer);
    else
        uv_timer_set_repeat(timer, tick_of(on->t->env->cfg));
}

static void timer_start(struct sp_loop *on)
{
    uint64_t tick_ms = tick_of(on->t->env->cfg);
    if (!uv_is_active((uv_handle_t *)&on->timer) && !on->is_closing)
        uv_timer_start(&on->timer, on_timer, tick_ms, tick_ms);
}

void sp_wait_start(struct sp_waits *list, struct sp_wait *w)
{
    sp_wait_stop(w);
    w->list = list;
    w->began_ns = clock_now_ns();
    TAILQ_INSERT_TAIL(&list->waiting, w, entry);
    timer_start(w->peer->on);
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
    struct sp_loop *on = p->on;
    sp_peer_put_head(p, req);
    if (sp_peer_answer(p, req))
        return;
    /* as soon as the reply is pushed, the loop may send it and close the transport; it waits for
     * n_pushing before it closes what uv_async_send uses */
    atomic_fetch_add(&on->n_pushing, 1);
    if (stack_push(&on->replies, req))
        uv_async_send(&on->async);
    atomic_fetch_sub(&on->n_pushing, 1);
}

static void begin_accepted(struct sp_loop *on)
{
    stack_for_each(struct sp_peer, p, stack_take_all(&on->accepted))
        if (on->is_stopped)
            sp_peer_drop(p);
        else
            sp_peer_begin(p);
}

static void on_async(uv_async_t *async)
{
    struct sp_loop *on = async->data;
    SLIST_HEAD(, sp_peer) dirty = SLIST_HEAD_INITIALIZER(dirty);
    begin_accepted(on);
    loop_worked(on->loop, config_now(on->t->env->cfg, loop_spin_us));
    stack_for_each(struct request, req, stack_take_all(&on->replies)) {
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
    sp_loop_finish(on);
}

/* ---- listening ---- */

/* Hands the connection to its loop. */
static void hand_over(struct sp_peer *p)
{
    struct sp_loop *on = p->on;
    if (on == &p->t->loops[0])
        sp_peer_begin(p);
    else if (stack_push(&on->accepted, p))
        uv_async_send(&on->async); /* its loop closes it only when the first one says so */
}

static void on_connection(uv_poll_t *poll, int status, int events);

static void on_accept_again(uv_timer_t *timer)
{
    struct transport_sp *t = timer->data;
    uv_poll_start(&t->listener, UV_READABLE, on_connection);
}

/* Stops listening for a while, since the callback would be called again at once. */
static void accept_later(struct transport_sp *t)
{
    uv_poll_stop(&t->listener);
    uv_timer_start(&t->accept_again, on_accept_again, ACCEPT_AGAIN_MS, 0);
}

static int spare_open(void)
{
    return open("/dev/null", O_RDONLY | O_CLOEXEC);
}

/* Out of descriptors: accepts a connection with the spare one, and closes it. */
static void refuse_one(struct transport_sp *t)
{
    log_limited("accept", LOG_LEVEL_WARN, log_write, "%s: a connection could not be accepted: %s",
                t->url, strerror(errno));
    if (t->spare_fd < 0) {
        t->spare_fd = spare_open();
        accept_later(t);
        return;
    }
    close(t->spare_fd);
    int fd = accept4(t->listen_fd, NULL, NULL, SOCK_CLOEXEC);
    if (fd >= 0)
        close(fd);
    t->spare_fd = spare_open();
}

/* Accepts a connection; false: there are no more for now. */
static bool accept_one(struct transport_sp *t)
{
    struct sp_peer *p = sp_peer_new(t);
    if (p == NULL) {
        accept_later(t);
        return false;
    }
    p->fd = accept4(t->listen_fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (p->fd >= 0) {
        if (sp_peer_admit(p))
            hand_over(p);
        return true;
    }
    int err = errno;
    free(p);
    errno = err;
    if (err == EMFILE || err == ENFILE)
        refuse_one(t);
    else if (err == ENOMEM || err == ENOBUFS)
        accept_later(t);
    return err == ECONNABORTED || err == EINTR;
}

static void on_connection(uv_poll_t *poll, int status, int events)
{
    struct transport_sp *t = poll->data;
    (void)status, (void)events;
    for (int i = 0; i < MAX_ACCEPTS && accept_one(t); i++)
        continue;
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

static void transport_free(struct transport_sp *t)
{
    tls_server_close(t->tls);
    for (uint32_t i = 0; i < t->n_loops; i++) {
        free(t->loops[i].plain);
        free(t->loops[i].read_ahead);
    }
    if (t->spare_fd >= 0)
        close(t->spare_fd);
    free(t);
}

static void on_handle_closed(uv_handle_t *handle);

void sp_loop_finish(struct sp_loop *on)
{
    if (!on->is_closing)
        return;
    if (!on->is_async_closing && atomic_load(&on->n_owed) == 0) {
        while (atomic_load(&on->n_pushing) != 0)
            sched_yield(); /* a thread is about to leave uv_async_send */
        on->is_async_closing = true;
        uv_close((uv_handle_t *)&on->async, on_handle_closed);
    }
    if (on->n_handles == 0 && atomic_fetch_sub(&on->t->n_left, 1) == 1)
        transport_free(on->t);
}

/* ---- what a transport has on a loop ---- */

static void on_handle_closed(uv_handle_t *handle)
{
    struct sp_loop *on = handle->data;
    on->n_handles--;
    sp_loop_finish(on);
}

static void loop_open(void *arg)
{
    struct sp_loop *on = arg;
    on->timer.data = on->turn.data = on->async.data = on;
    on->is_open = uv_async_init(on->loop->uv, &on->async, on_async) == 0;
    on->n_handles = on->is_open ? 2 : 0;
    if (on->is_open) /* which can't fail */
        uv_timer_init(on->loop->uv, &on->timer);
    if (on->is_open && on->t->tls != NULL) {
        uv_prepare_init(on->loop->uv, &on->turn);
        on->n_handles++;
    }
}

static void loop_stop(void *arg)
{
    struct sp_loop *on = arg;
    struct sp_peer *p;
    if (on->is_stopped)
        return;
    on->is_stopped = true;
    begin_accepted(on);
    LIST_FOREACH(p, &on->peers, entry)
        sp_peer_stop_reading(p);
}

static void loop_close(void *arg)
{
    struct sp_loop *on = arg;
    loop_stop(on);
    on->is_closing = true;
    while (!LIST_EMPTY(&on->peers))
        sp_peer_close(LIST_FIRST(&on->peers));
    on->is_async_closing = !on->is_open;
    if (on->is_open)
        uv_close((uv_handle_t *)&on->timer, on_handle_closed);
    if (on->is_open && on->t->tls != NULL)
        uv_close((uv_handle_t *)&on->turn, on_handle_closed);
    sp_loop_finish(on);
}

static void loop_hang_up(void *arg)
{
    struct sp_loop *on = arg;
    struct sp_peer *p, *next;
    on->has_hung_up = atomic_load(&on->n_owed) == 0;
    for (p = LIST_FIRST(&on->peers); p != NULL && on->has_hung_up; p = next) {
        next = LIST_NEXT(p, entry);
        struct pollfd at = {.events = POLLRDHUP};
        if (uv_fileno(&p->io.handle, &at.fd) != 0)
            continue;
        if (p->tls != NULL)
            sp_tls_end(p); /* may have closed p */
        if (p->is_closing)
            continue;
        shutdown(at.fd, SHUT_WR);
        on->has_hung_up &= poll(&at, 1, 0) > 0;
    }
}

static void waits_init(struct sp_waits *list, const uint64_t *timeout_us,
                       void (*expire)(struct sp_peer *p))
{
    *list = (struct sp_waits){.timeout_us = timeout_us, .expire = expire};
    TAILQ_INIT(&list->waiting);
}

static bool loop_init(struct sp_loop *on, struct transport_sp *t, uint32_t i, bool is_tls)
{
    const struct config *cfg = t->env->cfg;
    on->t = t;
    on->loop = loops_at(t->env->loops, i);
    LIST_INIT(&on->peers);
    TAILQ_INIT(&on->line);
    waits_init(&on->handshakes, &cfg->handshake_timeout_us, sp_peer_expire_handshake);
    waits_init(&on->hellos, &cfg->handshake_timeout_us, sp_peer_expire_hello);
    waits_init(&on->bodies, &cfg->body_timeout_us, sp_peer_expire_body);
    waits_init(&on->progress, &PROGRESS_US, sp_peer_expire_progress);
    waits_init(&on->writes, &cfg->write_timeout_us, sp_peer_expire_write);
    on->read_ahead = malloc(SP_READ_AHEAD_BYTES);
    on->plain = is_tls ? malloc(TLS_STREAM_RECORD_BYTES) : NULL;
    return on->read_ahead != NULL && (!is_tls || on->plain != NULL);
}

/* Calls fn for what the transport has on each loop, there, one after another. */
static void each_loop(struct transport_sp *t, void (*fn)(void *on))
{
    for (uint32_t i = 0; i < t->n_loops; i++)
        loop_call(t->loops[i].loop, fn, &t->loops[i]);
}

/* ---- the listener ---- */

static void on_listener_closed(uv_handle_t *handle)
{
    struct transport_sp *t = handle->data;
    t->loops[0].n_handles--;
    sp_loop_finish(&t->loops[0]);
}

/* Accepts connections from a listening socket, which the transport then owns. */
static int accept_from(struct transport_sp *t, int fd)
{
    int rc = uv_poll_init(t->env->loop, &t->listener, fd);
    if (rc != 0) {
        close(fd);
        return rc;
    }
    uv_timer_init(t->env->loop, &t->accept_again);
    t->listener.data = t->accept_again.data = t;
    t->listen_fd = fd;
    t->spare_fd = spare_open();
    t->loops[0].n_handles += 2;
    return uv_poll_start(&t->listener, UV_READABLE, on_connection);
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
    uint32_t n = loops_count(env->loops);
    struct transport_sp *t = calloc(1, sizeof(*t) + n * sizeof(t->loops[0]));
    if (t == NULL)
        return NULL;
    t->base.ops = ops_of(a);
    t->env = env;
    t->is_ipc = a->sa.any.sa_family == AF_UNIX;
    t->listen_fd = t->spare_fd = -1;
    t->n_left = n;
    snprintf(t->url, sizeof(t->url), "%s", url);
    bool is_made = true;
    for (t->n_loops = 0; t->n_loops < n && is_made; t->n_loops++)
        is_made = loop_init(&t->loops[t->n_loops], t, t->n_loops, a->is_tls);
    if (is_made)
        return t;
    transport_free(t);
    return NULL;
}

/* Puts the actual port into the url. */
static void name_port(struct transport_sp *t)
{
    struct sockaddr_storage sa;
    socklen_t n = sizeof(sa);
    char text[64];
    memset(&sa, 0, sizeof(sa));
    (void)getsockname(t->listen_fd, (struct sockaddr *)&sa, &n);
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

    each_loop(t, loop_open);
    int fd, rc = 0;
    for (uint32_t i = 0; i < t->n_loops && rc == 0; i++)
        rc = t->loops[i].is_open ? 0 : UV_ENOMEM;
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
    if (t->listen_fd >= 0) {
        uv_close((uv_handle_t *)&t->listener, on_listener_closed);
        uv_close((uv_handle_t *)&t->accept_again, on_listener_closed);
    }
    socket_unlisten(t->listen_fd, &t->address);
    each_loop(t, loop_stop);
}

static bool sp_is_idle(const struct transport *base)
{
    const struct transport_sp *t = (const struct transport_sp *)base;
    for (uint32_t i = 0; i < t->n_loops; i++)
        if (atomic_load(&t->loops[i].n_owed) != 0)
            return false;
    return true;
}

static bool sp_hang_up(struct transport *base)
{
    struct transport_sp *t = of(base);
    bool is_done = true;
    if (!sp_is_idle(base))
        return false;
    each_loop(t, loop_hang_up);
    for (uint32_t i = 0; i < t->n_loops; i++)
        is_done &= t->loops[i].has_hung_up;
    return is_done;
}

static void sp_close(struct transport *base)
{
    struct transport_sp *t = of(base);
    if (t->is_closing)
        return;
    t->is_closing = true;
    sp_stop(base);
    for (uint32_t i = t->n_loops; i-- > 0;) /* the first loop's last: t may be gone with it */
        loop_call(t->loops[i].loop, loop_close, &t->loops[i]);
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
