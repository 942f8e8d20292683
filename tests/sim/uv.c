/* uv.c: as much of libuv as the daemon uses, over virtual time and net.c's connections. The linker
 * finds these functions before the library's. Handles are the caller's memory; what is known of one
 * is kept apart, so that a killed process's can be forgotten. */
#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <uv.h>

#include "net.h"

enum { LISTEN_FD = SIM_LISTEN_FD, FAKE_FD = 1 << 20, MAX_SIGNAL = 32, MAX_LOOPS = 8 };

struct handle {
    struct handle *next; /* of all, newest first */
    uv_handle_t *h;
    bool is_active, is_closing, is_closed;
    bool is_unref; /* the loop does not wait for its end */
    uint64_t serial; /* of what was started last: older events are of no use */
    struct sim_loop *loop;
    uint64_t repeat_ns;
    /* of streams */
    struct conn *conn;
    bool is_reading;
    uv_write_t *write; /* under way; NULL: none */
    uv_buf_t pieces[64];
    unsigned n_pieces, piece; /* the first not gone */
    uv_shutdown_t *shutdown;
};

/* An event that waits for its loop's thread. */
struct turn {
    struct turn *next;
    sim_fn fn;
    struct handle *x;
    uint64_t word;
};

/* The first is the default loop, whose callbacks are events. Each other one has a thread (thread.c)
 * that its events wait for. */
static struct sim_loop {
    uv_loop_t *loop;
    bool runs; /* inside of uv_run, and not told to stop */
    uint32_t n_open;
    struct turn *first, **last;
    bool is_turning; /* a callback is under way, on this thread: */
    const void *thread;
} loops[MAX_LOOPS];
static uint32_t n_loops;
static uv_loop_t default_loop;
static struct handle *handles, *listening;
static uv_signal_t *signals[MAX_SIGNAL];

int __wrap_poll(struct pollfd *at, nfds_t n, int timeout_ms);
int __real_poll(struct pollfd *at, nfds_t n, int timeout_ms);
int __wrap_shutdown(int fd, int how);
int __real_shutdown(int fd, int how);
int __wrap_accept4(int fd, struct sockaddr *sa, socklen_t *n, int flags);
int __wrap_close(int fd);
int __real_close(int fd);

void uv_process_begin(void)
{
    handles = listening = NULL;
    memset(loops, 0, sizeof loops);
    loops[0].loop = &default_loop;
    n_loops = 1;
    memset(signals, 0, sizeof signals);
}

void uv_process_end(void)
{
    for (uint32_t i = 0; i < n_loops; i++)
        loops[i].runs = false;
}

static struct sim_loop *loop_of(const uv_loop_t *l)
{
    for (uint32_t i = 0; i < n_loops; i++)
        if (loops[i].loop == l)
            return &loops[i];
    sim_fail("a loop was never initialised");
}

/* Whether the event is another thread's than the one that runs, which gets it then. */
static bool is_for_thread(struct handle *x, sim_fn fn, uint64_t word)
{
    struct sim_loop *l = x->loop;
    if (l == &loops[0] || (l->is_turning && l->thread == thread_running()))
        return false;
    struct turn *t = sim_alloc(sizeof *t);
    *t = (struct turn){.fn = fn, .x = x, .word = word};
    *l->last = t;
    l->last = &t->next;
    return true;
}

static struct handle *of(const void *h)
{
    return ((const uv_handle_t *)h)->u.reserved[1];
}

static int handle_init(uv_loop_t *l, uv_handle_t *h, uv_handle_type type)
{
    struct handle *x = sim_alloc(sizeof *x);
    void *data = h->data;
    process_point();
    h->loop = l;
    h->type = type;
    h->data = data;
    h->u.reserved[1] = x;
    x->h = h;
    x->loop = loop_of(l);
    x->loop->n_open++;
    x->next = handles;
    handles = x;
    return 0;
}

/* --- the loop --------------------------------------------------------------------------------- */

uv_loop_t *uv_default_loop(void)
{
    return &default_loop;
}

int uv_replace_allocator(uv_malloc_func m, uv_realloc_func r, uv_calloc_func c, uv_free_func f)
{
    (void)m, (void)r, (void)c, (void)f;
    return 0;
}

int uv_loop_init(uv_loop_t *l)
{
    process_point();
    if (memory_fails())
        return UV_ENOMEM;
    if (n_loops == MAX_LOOPS)
        sim_fail("the daemon has more than %d loops", MAX_LOOPS);
    struct sim_loop *x = &loops[n_loops++];
    *x = (struct sim_loop){.loop = l};
    x->last = &x->first;
    return 0;
}

static bool has_turn(void *arg)
{
    const struct sim_loop *l = arg;
    return l->first != NULL;
}

/* The callbacks of a loop that is not the default one, on the thread that runs. */
static void run_turns(struct sim_loop *l)
{
    while (l->n_open > 0) {
        thread_wait(has_turn, l, UINT64_MAX);
        struct turn *t = l->first;
        l->first = t->next;
        if (l->first == NULL)
            l->last = &l->first;
        l->is_turning = true;
        l->thread = thread_running();
        t->fn(t->x, t->word);
        l->is_turning = false;
        thread_lose_core();
    }
}

int uv_run(uv_loop_t *of, uv_run_mode mode)
{
    struct sim_loop *l = loop_of(of);
    l->runs = true;
    if (l != &loops[0])
        run_turns(l);
    else if (mode == UV_RUN_DEFAULT)
        while (l->runs && l->n_open > 0)
            sim_step(UINT64_MAX);
    else
        while (l->runs && sim_step(sim_now_ns)) {
        }
    l->runs = false;
    return (int)l->n_open;
}

void uv_stop(uv_loop_t *l)
{
    loop_of(l)->runs = false;
}

int uv_loop_close(uv_loop_t *l)
{
    return loop_of(l)->n_open > 0 ? UV_EBUSY : 0;
}

void uv_walk(uv_loop_t *l, uv_walk_cb cb, void *arg)
{
    for (struct handle *x = handles; x != NULL; x = x->next)
        if (!x->is_closed && x->loop->loop == l)
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

void uv_unref(uv_handle_t *h)
{
    struct handle *x = of(h);
    x->loop->n_open -= !x->is_unref;
    x->is_unref = true;
}

static void on_close(void *arg, uint64_t word)
{
    struct handle *x = arg;
    uv_close_cb cb = (uv_close_cb)(uintptr_t)word;
    if (is_for_thread(x, on_close, word))
        return;
    x->is_closed = true;
    x->loop->n_open -= !x->is_unref;
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
    return handle_init(l, (uv_handle_t *)t, UV_TIMER);
}

static void on_timer(void *arg, uint64_t serial)
{
    struct handle *x = arg;
    uv_timer_t *t = (uv_timer_t *)x->h;
    if (is_for_thread(x, on_timer, serial) || x->serial != serial || x->is_closing)
        return;
    if (!x->loop->runs) { /* the loop's thread does something else: later */
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
    a->async_cb = cb;
    return handle_init(l, (uv_handle_t *)a, UV_ASYNC);
}

static void on_async(void *arg, uint64_t serial)
{
    struct handle *x = arg;
    uv_async_t *a = (uv_async_t *)x->h;
    if (is_for_thread(x, on_async, serial) || x->serial != serial || x->is_closing)
        return;
    if (!x->loop->runs) {
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

int uv_idle_init(uv_loop_t *l, uv_idle_t *i)
{
    return handle_init(l, (uv_handle_t *)i, UV_IDLE);
}

int uv_idle_start(uv_idle_t *i, uv_idle_cb cb)
{
    (void)i, (void)cb;
    sim_fail("the virtual loop does not spin");
}

int uv_idle_stop(uv_idle_t *i)
{
    (void)i;
    return 0;
}

/* of TLS, which nobody speaks here */
int uv_prepare_init(uv_loop_t *l, uv_prepare_t *p)
{
    return handle_init(l, (uv_handle_t *)p, UV_PREPARE);
}

int uv_prepare_start(uv_prepare_t *p, uv_prepare_cb cb)
{
    (void)p, (void)cb;
    sim_fail("uv_prepare_start");
}

int uv_prepare_stop(uv_prepare_t *p)
{
    (void)p;
    return 0;
}

int uv_signal_init(uv_loop_t *l, uv_signal_t *s)
{
    return handle_init(l, (uv_handle_t *)s, UV_SIGNAL);
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

bool uv_deliver_signal(int number)
{
    if (signals[number] != NULL)
        sim_at(0, SIM_PROCESS, on_signal, signals[number], (uint64_t)number);
    return signals[number] != NULL;
}

/* --- streams ---------------------------------------------------------------------------------- */

int uv_pipe_init(uv_loop_t *l, uv_pipe_t *p, int ipc)
{
    (void)ipc;
    return handle_init(l, (uv_handle_t *)p, UV_NAMED_PIPE);
}

int uv_tcp_init(uv_loop_t *l, uv_tcp_t *t)
{
    return handle_init(l, (uv_handle_t *)t, UV_TCP);
}

int uv_pipe_open(uv_pipe_t *p, uv_file fd)
{
    struct conn *c = net_conn((uint64_t)(fd - FAKE_FD));
    process_point();
    of(p)->conn = c;
    c->stream = of(p);
    return 0;
}

int uv_tcp_open(uv_tcp_t *t, uv_os_sock_t fd)
{
    (void)t, (void)fd;
    return UV_ENOTSUP;
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
    uv_poll_t *p = (uv_poll_t *)x->h;
    (void)word;
    if (x != listening || !x->is_active || !net_has_waiting())
        return;
    if (x->loop->runs)
        p->poll_cb(p, 0, UV_READABLE);
    sim_at(sim_between(SIM_US, 50 * SIM_US), SIM_PROCESS, on_waiting, x, 0);
}

void uv_conn_waits(void)
{
    if (listening != NULL)
        sim_at(sim_below(20000), SIM_PROCESS, on_waiting, listening, 0);
}

int __wrap_accept4(int fd, struct sockaddr *sa, socklen_t *n, int flags)
{
    (void)sa, (void)n, (void)flags;
    process_point();
    if (fd != LISTEN_FD)
        sim_fail("descriptor %d accepts nothing", fd);
    if (memory_fails()) {
        errno = ENOMEM;
        return -1;
    }
    struct conn *c = net_accept();
    if (c == NULL) {
        errno = EAGAIN;
        return -1;
    }
    return FAKE_FD + (int)c->number;
}

/* A connection that has a handle is closed with it. */
int __wrap_close(int fd)
{
    if (fd < FAKE_FD)
        return fd == LISTEN_FD ? 0 : __real_close(fd);
    net_daemon_closed(net_conn((uint64_t)(fd - FAKE_FD)));
    return 0;
}

static void on_input(void *arg, uint64_t word)
{
    struct handle *x = arg;
    uv_stream_t *s = (uv_stream_t *)x->h;
    if (is_for_thread(x, on_input, word) || !x->is_reading || x->conn == NULL)
        return;
    struct conn *c = x->conn;
    if (!x->loop->runs) {
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
    if (is_for_thread(x, on_written, status) || w == NULL || x->is_closing)
        return;
    if (!x->loop->runs) {
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
    if (is_for_thread(x, on_shut, word))
        return;
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

/* --- the listener, the only descriptor that is watched ---------------------------------------- */

int uv_poll_init(uv_loop_t *l, uv_poll_t *p, int fd)
{
    if (fd != LISTEN_FD)
        return UV_ENOTSUP;
    return handle_init(l, (uv_handle_t *)p, UV_POLL);
}

int uv_poll_start(uv_poll_t *p, int events, uv_poll_cb cb)
{
    (void)events;
    p->poll_cb = cb;
    listening = of(p);
    listening->is_active = true;
    net_listen(true);
    uv_conn_waits();
    return 0;
}

int uv_poll_stop(uv_poll_t *p)
{
    of(p)->is_active = false;
    return 0;
}
