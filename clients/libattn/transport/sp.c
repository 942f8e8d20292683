/* sp.c: ipc://, tcp:// and tls+tcp:// as the REQ side of the SP protocol
 * (docs/protocol.md, "The connection"), on a socket that never blocks.
 *
 * The thread that receives connects, reads, and notices a lost connection; any thread sends. A
 * message is written where send is called, as far as the socket takes it; what is left, at most one
 * message, is written by later calls: send, recv, or a wait that ends because the socket is
 * writable. One epoll descriptor over the socket and an eventfd (wake) is what waits; before that
 * it is asked again and again, as long as answers have come soon lately. No thread, nothing global:
 * a forked process can open clients of its own.
 *
 * Large messages that may go beside others have a second connection, so that these wait neither for
 * their bytes nor for their encryption. What the receiving thread writes and reads of it goes in
 * slices, between which the first one is looked at.
 */
#include <errno.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "clients/libattn/transport/secure.h"
#include "clients/libattn/transport/sp_internal.h"
#include "proto/attn_time.h"

#define SP_MAX_SPIN_NS 200000u /* as long as news came within that time lately */
#define SP_MIN_SPIN_NS 5000u
#define SP_LOOK_NS 1000000u /* between looks at a lookup, which wakes nobody */
#define SP_POLITE_NS 20000u /* spinning for longer lets others run in between */
#define SP_SLICE_BYTES (64u << 10) /* beside, before others are looked for */

/* ---- sending and receiving ---- */

static bool connection_send(struct sp *sp, uint32_t id, void *message)
{
    if (!atomic_load(&sp->is_ready))
        return false;
    pthread_mutex_lock(&sp->lock);
    bool had_rest = sp->out != NULL;
    bool is_taken = sp->socket >= 0 && (!had_rest || sp_message_write_locked(sp, SIZE_MAX));
    if (is_taken) {
        sp->has_sent = true;
        sp->out = (struct sp_message *)message - 1;
        sp->out_at = 0;
        sp_message_put_head(sp, sp->out->bytes, id);
        bool has_rest = !sp_message_write_locked(sp, SIZE_MAX);
        if (has_rest != had_rest)
            sp_watch(sp, EPOLL_CTL_MOD, has_rest);
    }
    pthread_mutex_unlock(&sp->lock);
    return is_taken;
}

static void begin_beside(struct sp *sp);

/* While the second connection is not there yet, or has no room, the first one serves. */
static bool sp_send(struct client_transport *t, uint32_t id, void *message, bool is_beside)
{
    struct sp *sp = (struct sp *)t, *beside = atomic_load(&sp->beside);
    if (is_beside && beside == NULL)
        begin_beside(sp);
    if (is_beside && beside != NULL) {
        if (connection_send(beside, id, message))
            return true;
        atomic_store(&beside->is_wanted, true);
    }
    return connection_send(sp, id, message);
}

static void send_rest(struct sp *sp, size_t max)
{
    pthread_mutex_lock(&sp->lock);
    if (sp->out != NULL && sp_message_write_locked(sp, max))
        sp_watch(sp, EPOLL_CTL_MOD, false);
    pthread_mutex_unlock(&sp->lock);
}

static void drain_wakes(struct sp *sp)
{
    uint64_t n_wakes;
    if (atomic_exchange(&sp->is_woken, false) && read(sp->wake_fd, &n_wakes, sizeof n_wakes) < 0)
        return; /* drained already */
}

static bool connection_recv(struct sp *sp, size_t max, bool *out_has_more,
                            struct client_message *out_m)
{
    *out_has_more = false;
    sp_connect_on(sp);
    if (sp->state != SP_READY)
        return false;
    send_rest(sp, max);
    if (!sp_message_read(sp, max, out_has_more))
        return false;
    *out_m = (struct client_message){.base = sp->in + 1, .bytes = sp->in->bytes, .id = sp->in_id};
    sp->in = NULL;
    return true;
}

static bool sp_recv(struct client_transport *t, struct client_message *out_m)
{
    struct sp *sp = (struct sp *)t;
    bool has_more;
    drain_wakes(sp);
    do {
        if (connection_recv(sp, SIZE_MAX, &has_more, out_m))
            return true;
        struct sp *beside = atomic_load(&sp->beside);
        if (beside != NULL && connection_recv(beside, SP_SLICE_BYTES, &has_more, out_m))
            return true;
    } while (has_more);
    return false;
}

/* ---- waiting ---- */

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
    if (sp->state == SP_LOOKING_UP)
        ns = SP_LOOK_NS < ns ? SP_LOOK_NS : ns;
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
static void free_all(struct sp *sp, bool is_ours)
{
    struct sp *beside = atomic_load(&sp->beside);
    if (beside != NULL)
        free_all(beside, is_ours);
    if (sp->socket >= 0)
        close(sp->socket);
    if (sp->epoll_fd >= 0)
        close(sp->epoll_fd);
    if (sp->wake_fd >= 0)
        close(sp->wake_fd);
    secure_close(sp->secure);
    sp_message_free(sp->memory, sp->in);
    sp_message_free(sp->memory, sp->out);
    sp_memory_end(&sp->own_memory, is_ours);
    free(sp->url);
    free(sp->ca_file);
    free(sp->cert_file);
    free(sp->cert_key_file);
    free(sp);
}

static void sp_abandon(struct client_transport *t)
{
    free_all((struct sp *)t, false);
}

/* Says goodbye and ends what others would have to. */
static void end(struct sp *sp)
{
    if (sp->secure != NULL && sp->socket >= 0)
        secure_goodbye(sp->secure, sp->socket);
    sp_lookup_end(sp->lookup); /* in a forked child its thread is not there */
}

static void sp_close(struct client_transport *t)
{
    struct sp *sp = (struct sp *)t, *beside = atomic_load(&sp->beside);
    if (beside != NULL)
        end(beside);
    end(sp);
    free_all(sp, true);
}

/* A copy of a file's name; NULL stays NULL. false: no memory. */
static bool keep(char **out, const char *name)
{
    *out = name != NULL ? strdup(name) : NULL;
    return name == NULL || *out != NULL;
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
    sp->memory = &sp->own_memory;
    sp->socket = sp->epoll_fd = sp->wake_fd = -1;
    static const struct client_credentials none;
    files = files != NULL ? files : &none;
    if (!keep(&sp->url, url) || !keep(&sp->ca_file, files->ca_file) ||
        !keep(&sp->cert_file, files->cert_file) ||
        !keep(&sp->cert_key_file, files->cert_key_file)) {
        snprintf(why, why_bytes, "no memory for a connection to %s", url);
        goto fail;
    }
    sp->retry_ns = SP_RETRY_NS;
    atomic_store(&sp->is_wanted, true);
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
    sp_connect_begin(sp);
    *out_t = &sp->base;
    return ATTN_OK;
fail:
    free_all(sp, true);
    return st;
}

/* Makes the second connection, by any thread. What fails leaves the first one alone. */
static void begin_beside(struct sp *sp)
{
    const struct client_credentials files = {sp->ca_file, sp->cert_file, sp->cert_key_file};
    struct client_transport *t;
    struct epoll_event ev = {.events = EPOLLIN};
    char why[256];
    if (atomic_exchange(&sp->has_beside, true) ||
        sp_open(sp->url, &files, &t, why, sizeof why) != ATTN_OK)
        return;
    struct sp *beside = (struct sp *)t;
    beside->is_beside = true;
    beside->memory = sp->memory;
    atomic_store(&beside->max_message_bytes, atomic_load(&sp->max_message_bytes));
    (void)epoll_ctl(sp->epoll_fd, EPOLL_CTL_ADD, beside->epoll_fd, &ev); /* else ticks go on */
    atomic_store(&sp->beside, beside);
}

/* ---- the rest ---- */

static void *sp_alloc(struct client_transport *t, size_t bytes, size_t reply_bytes)
{
    (void)reply_bytes;
    struct sp_message *m = sp_message_new(((struct sp *)t)->memory, bytes);
    return m != NULL ? m + 1 : NULL;
}

static void sp_cut(void *message, size_t bytes)
{
    ((struct sp_message *)message - 1)->bytes = bytes;
}

static void sp_free(struct client_transport *t, void *message)
{
    sp_message_free(((struct sp *)t)->memory, (struct sp_message *)message - 1);
}

static uint64_t sp_generation(struct client_transport *t)
{
    struct sp *sp = (struct sp *)t, *beside = atomic_load(&sp->beside);
    return atomic_load(&sp->generation) + (beside != NULL ? atomic_load(&beside->n_lost) : 0);
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
    struct sp *sp = (struct sp *)t, *beside = atomic_load(&sp->beside);
    atomic_store(&sp->max_message_bytes, bytes);
    if (beside != NULL)
        atomic_store(&beside->max_message_bytes, bytes);
}

static attn_status sp_pin(struct client_transport *t, const struct lane_memory_ops *ops, char *why,
                          size_t why_bytes)
{
    return sp_memory_pin(((struct sp *)t)->memory, ops, why, why_bytes);
}

const struct client_transport_ops transport_sp_ops = {
    .schemes = {"ipc://", "tcp://", "tls+tcp://", NULL},
    .open = sp_open,
    .close = sp_close,
    .abandon = sp_abandon,
    .message_alloc = sp_alloc,
    .message_cut = sp_cut,
    .message_free = sp_free,
    .send = sp_send,
    .recv = sp_recv,
    .wait = sp_wait,
    .wake = sp_wake,
    .fd = sp_fd,
    .generation = sp_generation,
    .is_connected = sp_is_connected,
    .n_failures = sp_n_failures,
    .why_not = sp_why_not,
    .max_message = sp_max_message,
    .set_max_message = sp_set_max_message,
    .pin = sp_pin,
};
