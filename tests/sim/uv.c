/* uv.c: as much of libuv as the daemon uses, over virtual time and net.c's connections. The linker
 * finds these functions before the library's. Handles are the caller's memory; what is known of one
 * is kept apart, so that a killed process's can be forgotten. */
#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <uv.h>

#include "net.h"

enum { FAKE_FD = 1 << 20, MAX_SIGNAL = 32 };

struct handle {
    struct handle *next; /* of all, newest first */
    uv_handle_t *h;
    bool is_active, is_closing, is_closed;
    uint64_t serial; /* of what was started last: older events are of no use */
    uint64_t repeat_ns;
    /* of streams */
    struct conn *conn;
    bool is_reading;
    uv_write_t *write; /* under way; NULL: none */
    uv_buf_t pieces[64];
    unsigned n_pieces, piece; /* the first not gone */
    uv_shutdown_t *shutdown;
};

bool sim_loop_runs;

static uv_loop_t loop;
static struct handle *handles, *listening;
static uint32_t n_open;
static uv_signal_t *signals[MAX_SIGNAL];

int __wrap_poll(struct pollfd *at, nfds_t n, int timeout_ms);
int __real_poll(struct pollfd *at, nfds_t n, int timeout_ms);
int __wrap_shutdown(int fd, int how);
int __real_shutdown(int fd, int how);

void uv_process_begin(void)
{
    handles = listening = NULL;
    n_open = 0;
    sim_loop_runs = false;
    memset(&loop, 0, sizeof loop);
    memset(signals, 0, sizeof signals);
}

static struct handle *of(const void *h)
{
    return ((const uv_handle_t *)h)->u.reserved[1];
}

static int handle_init(uv_handle_t *h, uv_handle_type type)
{
    struct handle *x = sim_alloc(sizeof *x);
    void *data = h->data;
    process_point();
    h->loop = &loop;
    h->type = type;
    h->data = data;
    h->u.reserved[1] = x;
    x->h = h;
    x->next = handles;
    handles = x;
    n_open++;
    return 0;
}

/* --- the loop --------------------------------------------------------------------------------- */

uv_loop_t *uv_default_loop(void)
{
    return &loop;
}

int uv_replace_allocator(uv_malloc_func m, uv_realloc_func r, uv_calloc_func c, uv_free_func f)
{
    (void)m, (void)r, (void)c, (void)f;
    return 0;
}

int uv_run(uv_loop_t *l, uv_run_mode mode)
{
    (void)l;
    sim_loop_runs = true;
    if (mode == UV_RUN_DEFAULT)
        while (sim_loop_runs && n_open > 0)
            sim_step(UINT64_MAX);
    else
        while (sim_loop_runs && sim_step(sim_now_ns)) {
        }
    sim_loop_runs = false;
    return (int)n_open;
}

void uv_stop(uv_loop_t *l)
{
    (void)l;
    sim_loop_runs = false;
}

int uv_loop_close(uv_loop_t *l)
{
    (void)l;
    return n_open > 0 ? UV_EBUSY : 0;
}

void uv_walk(uv_loop_t *l, uv_walk_cb cb, void *arg)
{
    (void)l;
    for (struct handle *x = handles; x != NULL; x = x->next)
        if (!x->is_closed)
            cb(x->h, arg);
}

const char *uv_strerror(int code)
{
    return code == UV_ENOMEM ? "out of memory" : "an error of the virtual loop";
}

uv_buf_t uv_buf_init(char *base, unsigned len)
{
    return (uv_buf_t){.base = base, .len = len};
}

int uv_is_closing(const uv_handle_t *h)
{
    return of(h)->is_closing;
}

int uv_is_active(const uv_handle_t *h)
{
    return of(h)->is_active;
}

static void on_close(void *arg, uint64_t word)
{
    struct handle *x = arg;
    uv_close_cb cb = (uv_close_cb)(uintptr_t)word;
    x->is_closed = true;
    n_open--;
    if (x->write != NULL)
        x->write->cb(x->write, UV_ECANCELED);
    if (x->shutdown != NULL)
        x->shutdown->cb(x->shutdown, UV_ECANCELED);
    if (cb != NULL)
        cb(x->h);
}

void uv_close(uv_handle_t *h, uv_close_cb cb)
{
    struct handle *x = of(h);
    if (x->is_closing)
        sim_fail("uv_close of a handle that is closing");
    process_point();
    x->is_closing = true;
    x->is_active = x->is_reading = false;
    x->serial++;
    if (x == listening) {
        listening = NULL;
        net_listen(outside_has_kept());
    }
    if (x->conn != NULL)
        net_daemon_closed(x->conn);
    x->conn = NULL;
    sim_at(0, SIM_PROCESS, on_close, x, (uint64_t)(uintptr_t)cb);
}

/* --- timers, asyncs, signals ------------------------------------------------------------------ */

int uv_timer_init(uv_loop_t *l, uv_timer_t *t)
{
    (void)l;
    return handle_init((uv_handle_t *)t, UV_TIMER);
}

static void on_timer(void *arg, uint64_t serial)
{
    struct handle *x = arg;
    uv_timer_t *t = (uv_timer_t *)x->h;
    if (x->serial != serial || x->is_closing)
        return;
    if (!sim_loop_runs) { /* the loop's thread does something else: later */
        sim_at(SIM_MS, SIM_PROCESS, on_timer, x, serial);
        return;
    }
    if (x->repeat_ns > 0)
        sim_at(x->repeat_ns + sim_below(50000), SIM_PROCESS, on_timer, x, serial);
    else
        x->is_active = false;
    t->timer_cb(t);
}

int uv_timer_start(uv_timer_t *t, uv_timer_cb cb, uint64_t timeout_ms, uint64_t repeat_ms)
{
    struct handle *x = of(t);
    if (x->is_closing)
        return UV_EINVAL;
    t->timer_cb = cb;
    x->is_active = true;
    x->repeat_ns = repeat_ms * SIM_MS;
    sim_at(timeout_ms * SIM_MS + sim_below(50000), SIM_PROCESS, on_timer, x, ++x->serial);
    return 0;
}

int uv_timer_stop(uv_timer_t *t)
{
    of(t)->is_active = false;
    of(t)->serial++;
    return 0;
}

int uv_async_init(uv_loop_t *l, uv_async_t *a, uv_async_cb cb)
{
    (void)l;
    a->async_cb = cb;
    return handle_init((uv_handle_t *)a, UV_ASYNC);
}

static void on_async(void *arg, uint64_t serial)
{
    struct handle *x = arg;
    uv_async_t *a = (uv_async_t *)x->h;
    if (x->serial != serial || x->is_closing)
        return;
    if (!sim_loop_runs) {
        sim_at(100 * SIM_US, SIM_PROCESS, on_async, x, serial);
        return;
    }
    x->is_active = false;
    a->async_cb(a);
}

int uv_async_send(uv_async_t *a)
{
    struct handle *x = of(a);
    process_point();
    if (x->is_closing)
        sim_fail("uv_async_send to a handle that is closing");
    if (!x->is_active)
        sim_at(sim_below(30000), SIM_PROCESS, on_async, x, ++x->serial);
    x->is_active = true;
    thread_lose_core(); /* who was woken may be done before the thread goes on */
    return 0;
}

int uv_signal_init(uv_loop_t *l, uv_signal_t *s)
{
    (void)l;
    return handle_init((uv_handle_t *)s, UV_SIGNAL);
}

int uv_signal_start(uv_signal_t *s, uv_signal_cb cb, int number)
{
    s->signal_cb = cb;
    s->signum = number;
    signals[number] = s;
    return 0;
}

static void on_signal(void *arg, uint64_t number)
{
    uv_signal_t *s = arg;
    if (!of(s)->is_closing)
        s->signal_cb(s, (int)number);
}

void uv_deliver_signal(int number)
{
    if (signals[number] != NULL)
        sim_at(0, SIM_PROCESS, on_signal, signals[number], (uint64_t)number);
}

/* --- streams ---------------------------------------------------------------------------------- */

int uv_pipe_init(uv_loop_t *l, uv_pipe_t *p, int ipc)
{
    (void)l, (void)ipc;
    return handle_init((uv_handle_t *)p, UV_NAMED_PIPE);
}

int uv_tcp_init(uv_loop_t *l, uv_tcp_t *t)
{
    (void)l;
    return handle_init((uv_handle_t *)t, UV_TCP);
}

int uv_pipe_open(uv_pipe_t *p, uv_file fd)
{
    (void)p, (void)fd;
    return 0;
}

int uv_tcp_open(uv_tcp_t *t, uv_os_sock_t fd)
{
    (void)t, (void)fd;
    return 0;
}

int uv_tcp_nodelay(uv_tcp_t *t, int is_on)
{
    (void)t, (void)is_on;
    return 0;
}

int uv_tcp_getpeername(const uv_tcp_t *t, struct sockaddr *sa, int *n)
{
    (void)t, (void)sa, (void)n;
    return UV_ENOTSUP;
}

int uv_tcp_getsockname(const uv_tcp_t *t, struct sockaddr *sa, int *n)
{
    return uv_tcp_getpeername(t, sa, n);
}

int uv_fileno(const uv_handle_t *h, uv_os_fd_t *fd)
{
    const struct handle *x = of(h);
    if (x->conn == NULL)
        return UV_EBADF;
    *fd = FAKE_FD + (int)x->conn->number;
    return 0;
}

static struct handle *of_fd(int fd)
{
    for (struct handle *x = handles; x != NULL; x = x->next)
        if (x->conn != NULL && FAKE_FD + (int)x->conn->number == fd)
            return x;
    sim_fail("descriptor %d is of no connection", fd);
}

int __wrap_poll(struct pollfd *at, nfds_t n, int timeout_ms)
{
    if (n != 1 || at->fd < FAKE_FD)
        return __real_poll(at, n, timeout_ms);
    return of_fd(at->fd)->conn->client_ended;
}

int __wrap_shutdown(int fd, int how)
{
    if (fd < FAKE_FD)
        return __real_shutdown(fd, how);
    struct conn *c = of_fd(fd)->conn;
    c->daemon_ended = true;
    net_flush(c);
    return 0;
}

static void on_waiting(void *arg, uint64_t word)
{
    struct handle *x = arg;
    uv_stream_t *s = (uv_stream_t *)x->h;
    (void)word;
    if (x != listening || !net_has_waiting())
        return;
    if (sim_loop_runs)
        s->connection_cb(s, 0);
    sim_at(sim_between(SIM_US, 50 * SIM_US), SIM_PROCESS, on_waiting, x, 0);
}

void uv_conn_waits(void)
{
    if (listening != NULL)
        sim_at(sim_below(20000), SIM_PROCESS, on_waiting, listening, 0);
}

int uv_listen(uv_stream_t *s, int backlog, uv_connection_cb cb)
{
    (void)backlog;
    s->connection_cb = cb;
    listening = of(s);
    net_listen(true);
    uv_conn_waits();
    return 0;
}

int uv_accept(uv_stream_t *server, uv_stream_t *client)
{
    (void)server;
    struct conn *c = net_accept();
    if (c == NULL)
        return UV_EAGAIN;
    of(client)->conn = c;
    c->stream = of(client);
    return 0;
}

static void on_input(void *arg, uint64_t word)
{
    struct handle *x = arg;
    uv_stream_t *s = (uv_stream_t *)x->h;
    (void)word;
    if (!x->is_reading || x->conn == NULL)
        return;
    struct conn *c = x->conn;
    if (!sim_loop_runs) {
        sim_at(100 * SIM_US, SIM_PROCESS, on_input, x, 0);
        return;
    }
    uv_buf_t buf = {0};
    if (c->in.n > 0) {
        s->alloc_cb(x->h, 64 << 10, &buf);
        size_t n = c->in.n < buf.len ? c->in.n : buf.len;
        if (n > 1 && sim_chance(200))
            n = 1 + sim_below((uint32_t)n);
        if (n > 0)
            memcpy(buf.base, c->in.p + c->in.first, n);
        bytes_take(&c->in, n);
        if (c->in.n > 0 || c->client_ended)
            sim_at(sim_between(200, 5000), SIM_PROCESS, on_input, x, 0);
        s->read_cb(s, n > 0 ? (ssize_t)n : UV_ENOBUFS, &buf);
    } else if (c->client_ended) {
        x->is_reading = false;
        s->read_cb(s, c->is_cut ? UV_ECONNRESET : UV_EOF, &buf);
    }
}

void uv_conn_has_input(struct handle *x)
{
    sim_at(0, SIM_PROCESS, on_input, x, 0);
}

int uv_read_start(uv_stream_t *s, uv_alloc_cb alloc, uv_read_cb read)
{
    struct handle *x = of(s);
    s->alloc_cb = alloc;
    s->read_cb = read;
    x->is_reading = true;
    uv_conn_has_input(x);
    return 0;
}

int uv_read_stop(uv_stream_t *s)
{
    of(s)->is_reading = false;
    return 0;
}

static size_t room_of(const struct conn *c)
{
    return c->is_over || c->out.n >= c->window ? 0 : c->window - c->out.n;
}

int uv_try_write(uv_stream_t *s, const uv_buf_t bufs[], unsigned n_bufs)
{
    struct conn *c = of(s)->conn;
    size_t done = 0;
    process_point();
    if (c == NULL || c->is_over || c->peer == NULL)
        return UV_EPIPE;
    if (of(s)->write != NULL || room_of(c) == 0)
        return UV_EAGAIN;
    size_t most = room_of(c);
    if (sim_has_faults && sim_chance(50))
        most = 1 + sim_below((uint32_t)most);
    for (unsigned i = 0; i < n_bufs && done < most; i++) {
        size_t n = bufs[i].len < most - done ? bufs[i].len : most - done;
        bytes_add(&c->out, bufs[i].base, n);
        done += n;
    }
    net_flush(c);
    return (int)done;
}

static void on_written(void *arg, uint64_t status)
{
    struct handle *x = arg;
    uv_write_t *w = x->write;
    if (w == NULL || x->is_closing)
        return;
    if (!sim_loop_runs) {
        sim_at(100 * SIM_US, SIM_PROCESS, on_written, x, status);
        return;
    }
    x->write = NULL;
    w->cb(w, (int)(int64_t)status);
}

static void write_on(struct handle *x)
{
    struct conn *c = x->conn;
    if (x->write == NULL || c == NULL)
        return;
    if (c->peer == NULL) {
        sim_at(0, SIM_PROCESS, on_written, x, (uint64_t)(int64_t)UV_EPIPE);
        return;
    }
    while (x->piece < x->n_pieces && room_of(c) > 0) {
        uv_buf_t *b = &x->pieces[x->piece];
        size_t n = b->len < room_of(c) ? b->len : room_of(c);
        bytes_add(&c->out, b->base, n);
        b->base += n;
        b->len -= n;
        x->piece += b->len == 0;
    }
    net_flush(c);
    if (x->piece == x->n_pieces)
        sim_at(sim_below(10000), SIM_PROCESS, on_written, x, 0);
}

void uv_conn_has_room(struct handle *x)
{
    if (x->write != NULL && x->piece < x->n_pieces)
        write_on(x);
}

int uv_write(uv_write_t *w, uv_stream_t *s, const uv_buf_t bufs[], unsigned n_bufs, uv_write_cb cb)
{
    struct handle *x = of(s);
    process_point();
    if (x->write != NULL || n_bufs > sizeof x->pieces / sizeof x->pieces[0])
        sim_fail("the virtual loop takes one uv_write at a time, of 64 pieces");
    w->handle = s;
    w->cb = cb;
    x->write = w;
    memcpy(x->pieces, bufs, n_bufs * sizeof bufs[0]);
    x->n_pieces = n_bufs;
    x->piece = 0;
    write_on(x);
    return 0;
}

static void on_shut(void *arg, uint64_t word)
{
    struct handle *x = arg;
    uv_shutdown_t *r = x->shutdown;
    (void)word;
    x->shutdown = NULL;
    if (r != NULL && !x->is_closing)
        r->cb(r, 0);
}

int uv_shutdown(uv_shutdown_t *r, uv_stream_t *s, uv_shutdown_cb cb)
{
    struct handle *x = of(s);
    if (x->conn == NULL)
        return UV_ENOTCONN;
    r->handle = s;
    r->cb = cb;
    x->shutdown = r;
    x->conn->daemon_ended = true;
    net_flush(x->conn);
    sim_at(0, SIM_PROCESS, on_shut, x, 0);
    return 0;
}

/* --- not yet: what watches descriptors -------------------------------------------------------- */

int uv_poll_init(uv_loop_t *l, uv_poll_t *p, int fd)
{
    (void)l, (void)p, (void)fd;
    return UV_ENOTSUP;
}

int uv_poll_start(uv_poll_t *p, int events, uv_poll_cb cb)
{
    (void)p, (void)events, (void)cb;
    return UV_ENOTSUP;
}

int uv_poll_stop(uv_poll_t *p)
{
    (void)p;
    return 0;
}
