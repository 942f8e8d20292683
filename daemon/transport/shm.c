/* shm.c: the transport shm:///PATH, for workers on this host through shared memory. This is the
 * loop's side: listening, who may connect, handing a client's memory (transport/shm_region.c) over
 * to the engine, and taking it back.
 *
 * Each client gets a sealed memfd with rings of its own (proto/shm_ring.h) and an eventfd. From
 * then on the engine's thread serves the rings (shm_client.c): a request is decoded, launched and
 * answered on one thread, and its tensors are read and written where the client put them. The
 * socket stays open to notice when a client is gone.
 *
 * Each client has its own eventfd, because one that shared it could swallow another's wake-ups. A
 * client divides the data area itself: the tensors of a step have between 12 KB and 3 MB, and the
 * pool's geometry is not known when a client connects, so equal slots would fit none.
 */
#define _GNU_SOURCE /* accept4 */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "daemon/base/clock.h"
#include "daemon/base/log.h"
#include "daemon/base/stack.h"
#include "daemon/keeper/sockets.h"
#include "daemon/transport/shm_internal.h"

enum {
    BACKLOG = 128,
    ACCEPT_AGAIN_MS = 100, /* after running out of descriptors */
    MAX_GROUPS = 256,
};

static void say_gone(struct shm_client *c, const char *why)
{
    log_limited("shm clients cut", LOG_LEVEL_WARN, log_write, "%s: %s: %s", c->t->url, c->name,
                why);
}

/* --- freeing ---------------------------------------------------------------------------------- */

static void transport_finish(struct transport_shm *t)
{
    if (t->is_closing && t->n_handles == 0 && t->n_clients == 0)
        free(t);
}

static void client_free(struct shm_client *c)
{
    struct transport_shm *t = c->t;
    lane_free(c);
    shm_region_close(c);
    shm_memory_give(c);
    if (c->fd >= 0)
        close(c->fd);
    share_give(c->share, SHARE_PEERS, 1);
    share_unref(c->share);
    free(c);
    t->n_clients--;
    atomic_fetch_sub(&t->env->n_peers, 1);
    stats_sub(peers, 1);
    transport_finish(t);
}

static void on_client_handle_closed(uv_handle_t *h)
{
    struct shm_client *c = h->data;
    if (--c->n_handles == 0)
        client_free(c);
}

/* Closes a client that belongs to the loop. */
static void client_close(struct shm_client *c)
{
    if (c->is_closing)
        return;
    c->is_closing = true;
    LIST_REMOVE(c, entry);
    uv_close((uv_handle_t *)&c->poll, on_client_handle_closed);
    uv_close((uv_handle_t *)&c->deadline, on_client_handle_closed);
}

static void take_back(struct shm_client *c)
{
    c->is_shared = false;
    LIST_INSERT_HEAD(&c->t->unshared, c, entry);
}

/* Closes the clients that the engine has retired. */
static void on_async(uv_async_t *async)
{
    struct transport_shm *t = async->data;
    stack_for_each(struct shm_client, c, stack_take_all(&t->retired)) {
        take_back(c);
        if (c->why[0] != '\0') {
            stats_add(peers_cut_malformed, 1);
            say_gone(c, c->why);
        }
        client_close(c);
    }
}

/* --- handing over ----------------------------------------------------------------------------- */

void shm_hand_over(struct shm_client *c)
{
    struct transport_shm *t = c->t;
    LIST_REMOVE(c, entry);
    c->is_shared = true;
    uv_timer_stop(&c->deadline);
    (void)stack_push(&t->incoming, c);
    atomic_store(&t->has_news, true);
    engine_wake(t->env->engine);
}

/* Makes the client's region and hands the client over to the engine. */
static attn_status region_welcome(struct shm_client *c, const union shm_first_packet *hello,
                                  size_t hello_bytes, int fd, char *why, size_t why_bytes)
{
    struct transport_shm *t = c->t;
    const struct shm_hello *h = &hello->shm;
    struct shm_welcome w = {.magic = SHM_MAGIC, .version = SHM_VERSION};
    int region_fd = -1;
    (void)fd;
    if (hello_bytes != sizeof *h) {
        stats_add(peers_cut_handshake, 1);
        snprintf(why, why_bytes, "its first packet is no hello");
        return ATTN_EPROTO;
    }
    attn_status st = ATTN_EPROTO;
    if (h->magic != SHM_MAGIC || h->reserved != 0)
        snprintf(w.message, sizeof w.message, "hello has magic 0x%x and reserved %u", h->magic,
                 h->reserved);
    else if (h->version != SHM_VERSION)
        snprintf(w.message, sizeof w.message, "version is %u, this side speaks %u", h->version,
                 SHM_VERSION);
    else
        st = shm_region_open(c, h, &region_fd, w.message, sizeof w.message);
    if (st == ATTN_OK)
        st = engine_watch(t->env->engine, c->wake_fd);
    w.status = st;
    if (st == ATTN_OK) {
        w.n_slots = c->n_slots;
        w.region_bytes = c->region_bytes;
        w.data_offset = shm_layout(c->n_slots, &w.submit_offset, &w.complete_offset);
    }
    const int fds[] = {region_fd, c->wake_fd};
    bool is_sent = shm_send_packet(c->fd, &w, sizeof w, fds, st == ATTN_OK ? 2 : 0);
    if (region_fd >= 0)
        close(region_fd);
    if (st != ATTN_OK) {
        snprintf(why, why_bytes, "%s", w.message);
    } else if (!is_sent) {
        engine_unwatch(t->env->engine, c->wake_fd);
        st = ATTN_ECONN;
    } else {
        shm_hand_over(c);
    }
    return st;
}

/* Reads the first packet, and the one descriptor that may come with it (else -1). */
static ssize_t read_packet(struct shm_client *c, void *bytes, size_t n_bytes, int *out_fd)
{
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(sizeof(int))];
    } control = {0};
    struct iovec iov = {bytes, n_bytes};
    struct msghdr m = {.msg_iov = &iov, .msg_iovlen = 1};
    if (c->t->wants_descriptor && !c->is_shared) {
        m.msg_control = control.bytes;
        m.msg_controllen = sizeof control.bytes;
    }
    ssize_t n = recvmsg(c->fd, &m, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    const struct cmsghdr *h = n < 0 ? NULL : CMSG_FIRSTHDR(&m);
    *out_fd = -1;
    if (h != NULL && h->cmsg_level == SOL_SOCKET && h->cmsg_type == SCM_RIGHTS &&
        h->cmsg_len == CMSG_LEN(sizeof *out_fd))
        memcpy(out_fd, CMSG_DATA(h), sizeof *out_fd);
    return n;
}

/* The client's socket is readable: its hello has come, or once memory is shared, it is gone. */
static void on_client(uv_poll_t *poll, int status, int events)
{
    struct shm_client *c = poll->data;
    union shm_first_packet hello;
    uint8_t more[sizeof hello + 1];
    char why[256] = "";
    int fd = -1;
    (void)events;
    ssize_t n = status < 0 ? 0 : read_packet(c, more, sizeof more, &fd);
    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    if (c->is_shared) {
        uv_poll_stop(poll);
        if (atomic_load(&c->t->is_stopped))
            return; /* the engine may be gone */
        atomic_store(&c->is_hung_up, true);
        atomic_store(&c->t->has_news, true);
        engine_wake(c->t->env->engine);
        return;
    }
    attn_status st = ATTN_ECONN;
    if (n > 0) {
        memcpy(&hello, more, sizeof hello);
        st = c->t->welcome(c, &hello, (size_t)n, fd, why, sizeof why);
    }
    if (fd >= 0)
        close(fd);
    if (st == ATTN_OK)
        return;
    if (why[0] != '\0')
        say_gone(c, why);
    client_close(c);
}

static void on_deadline(uv_timer_t *timer)
{
    struct shm_client *c = timer->data;
    if (clock_now_ns() < c->hello_until_ns)
        return; /* checks again at the next tick */
    stats_add(peers_cut_handshake, 1);
    client_close(c);
}

/* --- access ----------------------------------------------------------------------------------- */

/* Admits our own user, root, and those that the socket file's mode admits as group or other. The
 * kernel checks the mode at connect; this also covers a socket that was passed on, or a directory
 * that was bypassed. */
static bool may_connect(const struct transport_shm *t, int fd, const struct principal *who)
{
    struct stat sb;
    gid_t groups[MAX_GROUPS];
    socklen_t bytes = sizeof groups;
    if (who->uid == geteuid() || who->uid == 0)
        return true;
    if (stat(t->url + strlen(t->base.ops->scheme), &sb) != 0)
        return false;
    if (sb.st_uid == who->uid && (sb.st_mode & S_IWUSR))
        return true;
    if (sb.st_mode & S_IWOTH)
        return true;
    if (!(sb.st_mode & S_IWGRP))
        return false;
    if (who->gid == sb.st_gid)
        return true;
    if (getsockopt(fd, SOL_SOCKET, SO_PEERGROUPS, groups, &bytes) != 0)
        return false;
    for (size_t i = 0; i < bytes / sizeof groups[0]; i++)
        if (groups[i] == sb.st_gid)
            return true;
    return false;
}

static void client_open(struct transport_shm *t, int fd)
{
    struct principal who = principal_of_socket(fd);
    struct shm_client *c = calloc(1, sizeof *c);
    struct share *share = share_open(t->env->shares, &who);
    uint32_t all = config_now(t->env->cfg, max_peers);
    uint32_t n_peers = atomic_load(&t->env->n_peers); /* only this loop counts more */
    uint32_t n_free = all > n_peers ? all - n_peers : 0;
    bool is_taken = false;
    if (c != NULL && share != NULL && n_free > 0 && who.kind == PRINCIPAL_USER &&
        may_connect(t, fd, &who))
        is_taken = share_take(share, SHARE_PEERS, 1, n_free, all) == NULL;
    if (!is_taken || uv_poll_init(t->env->loop, &c->poll, fd) != 0) {
        stats_add(peers_refused, 1);
        if (is_taken)
            share_give(share, SHARE_PEERS, 1);
        share_unref(share);
        free(c);
        close(fd);
        return;
    }
    uv_timer_init(t->env->loop, &c->deadline);
    c->t = t;
    c->fd = fd;
    c->wake_fd = -1;
    c->n_handles = 2;
    c->poll.data = c->deadline.data = c;
    c->principal = who;
    c->share = share;
    principal_format(&c->principal, c->name);
    LIST_INSERT_HEAD(&t->unshared, c, entry);
    if (!t->is_polled)
        engine_poller_add(t->env->engine, &t->poller);
    t->is_polled = true;
    t->n_clients++;
    atomic_fetch_add(&t->env->n_peers, 1);
    stats_add(peers_accepted, 1);
    stats_add(peers, 1);
    uv_poll_start(&c->poll, UV_READABLE | UV_DISCONNECT, on_client);
    uint64_t timeout_us = config_now(t->env->cfg, handshake_timeout_us);
    c->hello_until_ns = clock_now_ns() + timeout_us * 1000;
    uint64_t tick_ms = clock_tick_ms(timeout_us);
    uv_timer_start(&c->deadline, on_deadline, tick_ms, tick_ms);
}

static void on_connection(uv_poll_t *poll, int status, int events);

static void on_accept_again(uv_timer_t *timer)
{
    struct transport_shm *t = timer->data;
    uv_poll_start(&t->listener, UV_READABLE, on_connection);
}

static void on_connection(uv_poll_t *poll, int status, int events)
{
    struct transport_shm *t = poll->data;
    (void)status, (void)events;
    for (;;) {
        int fd = accept4(t->listen_fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (fd >= 0) {
            client_open(t, fd);
        } else if (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS) {
            log_limited("shm clients refused", LOG_LEVEL_WARN, log_write,
                        "%s: a connection can't be accepted: %s", t->url, strerror(errno));
            uv_poll_stop(&t->listener); /* or its callback would run again at once */
            uv_timer_start(&t->accept_again, on_accept_again, ACCEPT_AGAIN_MS, 0);
            return;
        } else if (errno != ECONNABORTED && errno != EINTR) {
            return;
        }
    }
}

/* --- the table -------------------------------------------------------------------------------- */

static void on_handle_closed(uv_handle_t *h)
{
    struct transport_shm *t = h->data;
    t->n_handles--;
    transport_finish(t);
}

static struct transport_shm *of(struct transport *base)
{
    return (struct transport_shm *)base; /* its first member */
}

attn_status shm_listen(const struct transport_ops *ops, struct transport_env *env, const char *url,
                       struct transport **out_t, char *why, size_t why_bytes)
{
    struct address a;
    char reason[256];
    attn_status st = address_parse_url(url, &a, reason, sizeof reason);
    int fd = -1;
    if (st == ATTN_OK)
        st = socket_listen(url, &a, BACKLOG, &fd, reason, sizeof reason);
    struct transport_shm *t = st != ATTN_OK ? NULL : calloc(1, sizeof *t);
    if (t == NULL) {
        snprintf(why, why_bytes, "%s: %s", url, st != ATTN_OK ? reason : "out of memory");
        if (fd >= 0)
            socket_unlisten(fd, &a);
        return st != ATTN_OK ? st : ATTN_ENOMEM;
    }
    *t = (struct transport_shm){
        .base = {.ops = ops},
        .env = env,
        .poller = {.poll = shm_poll,
                   .may_sleep = shm_may_sleep,
                   .awake = shm_awake,
                   .nap_ns = shm_nap_ns},
        .welcome = ops == &transport_gpu_ops ? lane_welcome : region_welcome,
        .wants_descriptor = ops == &transport_gpu_ops,
        .address = a,
        .listen_fd = fd,
    };
    snprintf(t->url, sizeof t->url, "%s", url);
    t->listener.data = t->async.data = t->accept_again.data = t;
    int rc = uv_async_init(env->loop, &t->async, on_async);
    t->has_async = rc == 0;
    if (rc == 0)
        rc = uv_poll_init(env->loop, &t->listener, fd);
    t->has_listener = rc == 0;
    t->n_handles = t->has_async + 2u * t->has_listener;
    if (rc != 0) {
        snprintf(why, why_bytes, "%s: cannot listen: %s", url, uv_strerror(rc));
        shm_close(&t->base);
        return ATTN_EINVAL;
    }
    uv_timer_init(env->loop, &t->accept_again);
    uv_poll_start(&t->listener, UV_READABLE, on_connection);
    *out_t = &t->base;
    return ATTN_OK;
}

const char *shm_url(const struct transport *base)
{
    return ((const struct transport_shm *)base)->url;
}

static void close_unshared(struct transport_shm *t)
{
    while (!LIST_EMPTY(&t->unshared))
        client_close(LIST_FIRST(&t->unshared));
}

void shm_stop(struct transport *base)
{
    struct transport_shm *t = of(base);
    if (atomic_exchange(&t->is_stopped, true))
        return;
    if (t->has_listener) {
        uv_close((uv_handle_t *)&t->listener, on_handle_closed);
        uv_close((uv_handle_t *)&t->accept_again, on_handle_closed);
    }
    socket_unlisten(t->listen_fd, &t->address);
    close_unshared(t);
}

/* Always idle: the engine writes replies straight into the clients' rings. */
bool shm_is_idle(const struct transport *base)
{
    (void)base;
    return true;
}

/* Nothing to wait for: a client can read its ring after the daemon has ended. */
bool shm_hang_up(struct transport *base)
{
    (void)base;
    return true;
}

void shm_close(struct transport *base)
{
    struct transport_shm *t = of(base);
    if (t->is_closing)
        return;
    shm_stop(base);
    t->is_closing = true;
    stack_for_each(struct shm_client, c, stack_take_all(&t->incoming))
        take_back(c);
    stack_for_each(struct shm_client, c, stack_take_all(&t->retired))
        take_back(c);
    while (!LIST_EMPTY(&t->clients)) {
        struct shm_client *c = LIST_FIRST(&t->clients);
        LIST_REMOVE(c, entry);
        take_back(c);
    }
    close_unshared(t);
    if (t->has_async)
        uv_close((uv_handle_t *)&t->async, on_handle_closed);
    transport_finish(t);
}

static attn_status shm_open_at(struct transport_env *env, const char *url, struct transport **out_t,
                               char *why, size_t why_bytes)
{
    return shm_listen(&transport_shm_ops, env, url, out_t, why, why_bytes);
}

const struct transport_ops transport_shm_ops = {
    .scheme = "shm://",
    .label = STATS_SHM,
    .is_polled = true,
    .open = shm_open_at,
    .url = shm_url,
    .stop = shm_stop,
    .is_idle = shm_is_idle,
    .hang_up = shm_hang_up,
    .close = shm_close,
    .reply = shm_reply,
};
