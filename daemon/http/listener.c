/* listener.c: accepts connections and passes them to libmicrohttpd, all on the listener's thread
 * except for opening and closing. */
#define _GNU_SOURCE /* accept4, names of threads */
#include "daemon/http/listener.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/queue.h>
#include <sys/socket.h>
#include <unistd.h>

enum {
    MEMORY_BYTES = 16 << 10, /* per connection */
    ACCEPT_AGAIN_MS = 100, /* wait when no descriptor was left at all */
};

struct place {
    TAILQ_ENTRY(place) link; /* in the list of free or of taken places; these longest idle first */
    int fd;
};
TAILQ_HEAD(place_list, place);

struct http_listener {
    struct MHD_Daemon *daemon;
    MHD_AccessHandlerCallback answer;
    void (*begin_turn)(void *user);
    void *user;
    int listen_fd, stop_fd, daemon_fd;
    pthread_t thread;
    struct place places[HTTP_MAX_CONNECTIONS];
    struct place_list free, taken;
    uint32_t n_free;
    uint32_t n_new; /* accepted, and without a place so far */
    int reserve[HTTP_RESERVE];
    uint32_t n_reserve;
};

static void close_fd(int fd)
{
    if (fd >= 0)
        close(fd);
}

/* Fills the reserve of descriptors up again, as far as there are any. */
static void reserve_fill(struct http_listener *d)
{
    while (d->n_reserve < HTTP_RESERVE) {
        int fd = fcntl(d->stop_fd, F_DUPFD_CLOEXEC, 0);
        if (fd < 0)
            return;
        d->reserve[d->n_reserve++] = fd;
    }
}

/* --- libmicrohttpd's callbacks ---------------------------------------------------------------- */

static void on_connection(void *user, struct MHD_Connection *connection, void **context,
                          enum MHD_ConnectionNotificationCode what)
{
    struct http_listener *d = user;
    if (what == MHD_CONNECTION_NOTIFY_STARTED) {
        struct place *p = TAILQ_FIRST(&d->free); /* there is one: has_place looked */
        p->fd = MHD_get_connection_info(connection, MHD_CONNECTION_INFO_CONNECTION_FD)->connect_fd;
        TAILQ_REMOVE(&d->free, p, link);
        TAILQ_INSERT_TAIL(&d->taken, p, link);
        d->n_free--;
        d->n_new -= d->n_new > 0;
        *context = p;
    } else {
        TAILQ_REMOVE(&d->taken, (struct place *)*context, link);
        TAILQ_INSERT_TAIL(&d->free, (struct place *)*context, link);
        d->n_free++;
    }
}

/* Moves the connection to the end of the list, since it is not idle now. */
static enum MHD_Result on_request(void *user, struct MHD_Connection *connection, const char *url,
                                  const char *method, const char *version, const char *upload,
                                  size_t *upload_bytes, void **state)
{
    struct http_listener *d = user;
    struct place *p =
        MHD_get_connection_info(connection, MHD_CONNECTION_INFO_SOCKET_CONTEXT)->socket_context;
    TAILQ_REMOVE(&d->taken, p, link);
    TAILQ_INSERT_TAIL(&d->taken, p, link);
    return d->answer(d->user, connection, url, method, version, upload, upload_bytes, state);
}

/* --- accepting -------------------------------------------------------------------------------- */

/* Answers what has come, and makes places of what was accepted: libmicrohttpd 0.9 told of that when
 * it was added, 1.0 does now. */
static void turn(struct http_listener *d)
{
    d->begin_turn(d->user);
    MHD_run(d->daemon);
    d->n_new = 0;
}

/* Whether one more may be accepted. */
static bool has_place(struct http_listener *d)
{
    if (d->n_new > 0 && d->n_new >= d->n_free)
        turn(d);
    return d->n_free > 0;
}

/* Ends the connection that has been idle longest. false: none could be ended. */
static bool evict(struct http_listener *d)
{
    struct place *p = TAILQ_FIRST(&d->taken);
    if (p == NULL)
        return false;
    shutdown(p->fd, SHUT_RDWR);
    turn(d); /* sees its end */
    return p != TAILQ_FIRST(&d->taken);
}

/* Accepts a connection. -1 with EAGAIN: none waits; with another errno: no descriptor is free. */
static int accept_one(struct http_listener *d)
{
    for (;;) {
        int fd = accept4(d->listen_fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (fd >= 0 || errno == EAGAIN)
            return fd;
        if (errno == EMFILE || errno == ENFILE) {
            if (d->n_reserve > 0)
                close(d->reserve[--d->n_reserve]);
            else if (!evict(d))
                return -1;
        } else if (errno == ENOMEM || errno == ENOBUFS) {
            return -1;
        }
    }
}

/* Accepts all connections that wait. false: nothing more can be accepted for a while. */
static bool accept_all(struct http_listener *d)
{
    static const struct sockaddr nobody = {.sa_family = AF_UNSPEC};
    /* bounded, so that accepted connections are served in between */
    for (uint32_t n = 0; n < HTTP_MAX_CONNECTIONS; n++) {
        if (!has_place(d) && !evict(d))
            return false;
        int fd = accept_one(d);
        if (fd < 0)
            return errno == EAGAIN;
        d->n_new++;
        if (MHD_add_connection(d->daemon, fd, &nobody, sizeof nobody) != MHD_YES)
            d->n_new--; /* it is closed */
    }
    return true;
}

static int timeout_ms(const struct http_listener *d, bool is_accepting)
{
    MHD_UNSIGNED_LONG_LONG ms;
    int most = is_accepting ? -1 : ACCEPT_AGAIN_MS;
    if (MHD_get_timeout(d->daemon, &ms) != MHD_YES)
        return most;
    return most >= 0 && ms > (unsigned)most ? most : ms > 10000 ? 10000 : (int)ms;
}

static void *run(void *arg)
{
    struct http_listener *d = arg;
    bool is_accepting = true;
    pthread_setname_np(pthread_self(), "attnd-http");
    for (;;) {
        struct pollfd at[] = {{d->stop_fd, POLLIN, 0},
                              {d->daemon_fd, POLLIN, 0},
                              {is_accepting ? d->listen_fd : -1, POLLIN, 0}};
        poll(at, 3, timeout_ms(d, is_accepting));
        if (at[0].revents != 0)
            return NULL;
        is_accepting = accept_all(d);
        turn(d);
        reserve_fill(d);
    }
}

/* --- life ------------------------------------------------------------------------------------- */

static void listener_free(struct http_listener *d)
{
    if (d->daemon != NULL)
        MHD_stop_daemon(d->daemon);
    while (d->n_reserve > 0)
        close(d->reserve[--d->n_reserve]);
    close_fd(d->listen_fd);
    close_fd(d->stop_fd);
    free(d);
}

attn_status http_listener_open(int fd, MHD_AccessHandlerCallback answer,
                               void (*begin_turn)(void *user), void *user,
                               struct http_listener **out_listener)
{
    struct http_listener *d = calloc(1, sizeof *d);
    if (d == NULL) {
        close(fd);
        return ATTN_ENOMEM;
    }
    d->answer = answer;
    d->begin_turn = begin_turn;
    d->user = user;
    d->listen_fd = fd;
    d->stop_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    TAILQ_INIT(&d->free);
    TAILQ_INIT(&d->taken);
    d->n_free = HTTP_MAX_CONNECTIONS;
    for (uint32_t i = 0; i < HTTP_MAX_CONNECTIONS; i++)
        TAILQ_INSERT_TAIL(&d->free, &d->places[i], link);
    if (d->stop_fd >= 0)
        d->daemon = MHD_start_daemon(MHD_USE_EPOLL | MHD_USE_NO_LISTEN_SOCKET, 0, NULL, NULL,
                                     on_request, d, MHD_OPTION_CONNECTION_LIMIT,
                                     (unsigned)HTTP_MAX_CONNECTIONS, MHD_OPTION_CONNECTION_TIMEOUT,
                                     (unsigned)HTTP_TIMEOUT_S, MHD_OPTION_CONNECTION_MEMORY_LIMIT,
                                     (size_t)MEMORY_BYTES, MHD_OPTION_NOTIFY_CONNECTION,
                                     on_connection, (void *)d, MHD_OPTION_END);
    const union MHD_DaemonInfo *info =
        d->daemon == NULL ? NULL : MHD_get_daemon_info(d->daemon, MHD_DAEMON_INFO_EPOLL_FD);
    if (info == NULL)
        goto fail;
    d->daemon_fd = info->epoll_fd;
    reserve_fill(d);
    if (pthread_create(&d->thread, NULL, run, d) != 0)
        goto fail;
    *out_listener = d;
    return ATTN_OK;
fail:
    listener_free(d);
    return ATTN_EINTERNAL;
}

void http_listener_close(struct http_listener *d)
{
    if (d == NULL)
        return;
    uint64_t one = 1;
    if (write(d->stop_fd, &one, sizeof one) == (ssize_t)sizeof one)
        pthread_join(d->thread, NULL);
    listener_free(d);
}
