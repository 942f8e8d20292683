/* shm.c: shm:// on the same host: messages are written into memory shared with the
 * daemon. shm_connect.c makes the connection.
 *
 * The thread that receives connects, waits and notices a lost connection; any thread sends. A
 * message is built in the region where the daemon will read it; without room for all of it there,
 * or without a connection, there is no memory for it. A region whose connection is gone stays
 * mapped until the last message in it is freed.
 *
 * Waiting is a spin on the completed count, as long as that has been worth it lately, then a futex
 * in the region; with attn_client_fd in use, or without a connection, an epoll descriptor over the
 * socket, to which the daemon sends a byte, and an eventfd for wake.
 */
#include "clients/libattn/transport/transport.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "clients/libattn/transport/shm_internal.h"
#include "proto/attn_time.h"

#define SHM_MAX_SPIN_NS 250000u /* covers a short step; longer ones are not worth a core */
#define SHM_MIN_SPIN_NS 1000u
#define SHM_POLITE_NS 20000u /* spinning for longer lets others run in between */
#define SHM_MESSAGE_OVERHEAD (64u << 10) /* of a request and its reply, beside tensors */

/* ---- life ---- */

static void free_all(struct shm *sh)
{
    if (sh->socket >= 0)
        close(sh->socket);
    if (sh->epoll_fd >= 0)
        close(sh->epoll_fd);
    if (sh->wake_fd >= 0)
        close(sh->wake_fd);
    if (sh->region != NULL)
        region_close(sh->region);
    while (!SLIST_EMPTY(&sh->old)) {
        struct shm_region *r = SLIST_FIRST(&sh->old);
        SLIST_REMOVE_HEAD(&sh->old, link);
        region_close(r);
    }
    free(sh);
}

static void shm_close(struct client_transport *t)
{
    free_all((struct shm *)t);
}

/* Nothing but descriptors and memory of our own. */
static void shm_abandon(struct client_transport *t)
{
    struct shm *sh = (struct shm *)t;
    struct shm_region *r;
    if (sh->region != NULL)
        sh->region->unpin = NULL; /* it is the parent's driver that knows it */
    SLIST_FOREACH(r, &sh->old, link) {
        r->unpin = NULL;
    }
    free_all(sh);
}

static attn_status shm_open_url(const char *url, const struct client_credentials *files,
                                struct client_transport **out_t, char *why, size_t why_bytes)
{
    (void)files; /* the socket's file says who may connect */
    const char *path = url + strlen("shm://");
    struct shm *sh = calloc(1, sizeof *sh);
    if (sh == NULL) {
        snprintf(why, why_bytes, "no memory for a connection to %s", url);
        return ATTN_ENOMEM;
    }
    sh->base.ops = &transport_shm_ops;
    sh->socket = sh->epoll_fd = sh->wake_fd = -1;
    attn_status st = ATTN_EINVAL;
    if (strlen(path) >= sizeof sh->address.sun_path) {
        snprintf(why, why_bytes, "url %s: the path has %zu bytes, a Unix socket's at most %zu", url,
                 strlen(path), sizeof sh->address.sun_path - 1);
        goto fail;
    }
    sh->address.sun_family = AF_UNIX;
    strcpy(sh->address.sun_path, path);
    struct epoll_event ev = {.events = EPOLLIN};
    sh->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    sh->wake_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (sh->epoll_fd < 0 || sh->wake_fd < 0 ||
        epoll_ctl(sh->epoll_fd, EPOLL_CTL_ADD, sh->wake_fd, &ev) != 0) {
        snprintf(why, why_bytes, "set up a connection to %s: %s", url, strerror(errno));
        st = ATTN_ENOMEM;
        goto fail;
    }
    pthread_mutex_init(&sh->lock, NULL);
    sh->retry_ns = SHM_RETRY_NS;
    sh->has_spare_core = sysconf(_SC_NPROCESSORS_ONLN) > 1;
    sh->spin_ns = SHM_MAX_SPIN_NS;
    shm_connect_begin(sh);
    *out_t = &sh->base;
    return ATTN_OK;
fail:
    free_all(sh);
    return st;
}

/* ---- messages ---- */

static void *shm_message_alloc(struct client_transport *t, size_t bytes, size_t reply_bytes)
{
    struct shm *sh = (struct shm *)t;
    pthread_mutex_lock(&sh->lock);
    void *m = sh->region != NULL ? region_alloc(sh->region, bytes, reply_bytes) : NULL;
    pthread_mutex_unlock(&sh->lock);
    return m;
}

static void shm_message_free(struct client_transport *t, void *message)
{
    struct shm *sh = (struct shm *)t;
    struct shm_region *unused = NULL;
    struct shm_extent *x = NULL;
    pthread_mutex_lock(&sh->lock);
    if (sh->region != NULL && (x = region_find(sh->region, message)) != NULL)
        region_free(sh->region, x);
    struct shm_region *r;
    SLIST_FOREACH(r, &sh->old, link) {
        if (x != NULL || (x = region_find(r, message)) == NULL)
            continue;
        region_free(r, x);
        unused = r->n_used == 0 ? r : NULL;
    }
    if (unused != NULL)
        SLIST_REMOVE(&sh->old, unused, shm_region, link);
    pthread_mutex_unlock(&sh->lock);
    if (unused != NULL)
        region_close(unused);
}

static bool shm_send(struct client_transport *t, uint32_t id, void *message, bool is_beside)
{
    (void)is_beside; /* nobody waits for the bytes of others here */
    struct shm *sh = (struct shm *)t;
    pthread_mutex_lock(&sh->lock);
    struct shm_extent *x = sh->region != NULL ? region_find(sh->region, message) : NULL;
    if (x != NULL)
        region_submit(sh->region, x, id);
    pthread_mutex_unlock(&sh->lock);
    return x != NULL;
}

static bool take_reply(struct shm *sh, struct client_message *out_m)
{
    struct shm_extent *x;
    uint32_t bytes;
    void *reply;
    pthread_mutex_lock(&sh->lock);
    attn_status st = region_take(sh->region, &x, &reply, &bytes);
    if (st == ATTN_OK)
        *out_m = (struct client_message){.base = reply, .bytes = bytes, .id = x->id};
    pthread_mutex_unlock(&sh->lock);
    if (st == ATTN_EPROTO)
        shm_disconnect(sh);
    return st == ATTN_OK;
}

static void drain_wakes(struct shm *sh)
{
    uint64_t n_wakes;
    if (atomic_exchange(&sh->is_woken, false) && read(sh->wake_fd, &n_wakes, sizeof n_wakes) < 0)
        return; /* drained already */
}

/* Makes the descriptor quiet, and asks the daemon for a byte on the socket at the next reply. */
static void arm_socket(struct shm *sh)
{
    drain_wakes(sh);
    shm_look_at_socket(sh);
    atomic_store(&sh->region->control->client_sleeps, SHM_WAITS_ON_SOCKET);
}

static bool shm_recv(struct client_transport *t, struct client_message *out_m)
{
    struct shm *sh = (struct shm *)t;
    if (sh->region == NULL) {
        shm_connect_on(sh);
        return false;
    }
    if (!region_has_completed(sh->region) && !sh->is_hung_up && atomic_load(&sh->is_fd_used))
        arm_socket(sh);
    if (region_has_completed(sh->region))
        return take_reply(sh, out_m);
    if (sh->is_hung_up)
        shm_disconnect(sh);
    return false;
}

/* ---- waiting; the receiving thread ---- */

static void wait_on_descriptors(struct shm *sh, uint64_t ns)
{
    struct epoll_event ready[2];
    uint64_t now = attn_now_ns();
    if (sh->socket < 0) {
        uint64_t until_ns = sh->retry_at_ns > now ? sh->retry_at_ns - now : 0;
        ns = until_ns < ns ? until_ns : ns;
    }
    struct timespec ts = {.tv_sec = (time_t)(ns / 1000000000u),
                          .tv_nsec = (long)(ns % 1000000000u)};
    epoll_pwait2(sh->epoll_fd, ready, 2, &ts, NULL);
    drain_wakes(sh);
}

static bool has_news(struct shm *sh)
{
    return region_has_completed(sh->region) ||
           atomic_load_explicit(&sh->is_woken, memory_order_relaxed);
}

/* True: there is news. */
static bool spin(struct shm *sh, uint64_t start_ns, uint64_t ns)
{
    for (uint64_t passed_ns = 0; passed_ns < ns; passed_ns = attn_now_ns() - start_ns) {
        for (int i = 0; i < 16; i++) {
            if (has_news(sh))
                return true;
            attn_cpu_pause();
        }
        if (passed_ns > SHM_POLITE_NS)
            sched_yield();
    }
    return has_news(sh);
}

static void sleep_on_futex(struct shm *sh, uint64_t ns)
{
    _Atomic uint32_t *word = &sh->region->control->client_sleeps;
    struct timespec ts = {.tv_sec = (time_t)(ns / 1000000000u),
                          .tv_nsec = (long)(ns % 1000000000u)};
    atomic_store(word, SHM_WAITS_ON_FUTEX);
    if (!region_has_completed(sh->region) && !atomic_load(&sh->is_woken))
        syscall(SYS_futex, word, FUTEX_WAIT, SHM_WAITS_ON_FUTEX, &ts, NULL, 0);
    atomic_store(word, SHM_AWAKE);
}

static void shm_wait(struct client_transport *t, uint64_t ns)
{
    struct shm *sh = (struct shm *)t;
    if (sh->region == NULL || sh->is_hung_up || atomic_load(&sh->is_fd_used)) {
        wait_on_descriptors(sh, ns);
        return;
    }
    uint64_t start_ns = attn_now_ns();
    bool is_spun = sh->has_spare_core && sh->spin_ns >= SHM_MIN_SPIN_NS &&
                   spin(sh, start_ns, sh->spin_ns < ns ? sh->spin_ns : ns);
    if (!is_spun)
        sleep_on_futex(sh, ns);
    if (region_has_completed(sh->region))
        sh->spin_ns = is_spun || attn_now_ns() - start_ns <= SHM_MAX_SPIN_NS ? SHM_MAX_SPIN_NS
                                                                             : sh->spin_ns / 2;
    else if (!atomic_load(&sh->is_woken))
        shm_look_at_socket(sh);
    drain_wakes(sh);
}

static void shm_wake(struct client_transport *t)
{
    struct shm *sh = (struct shm *)t;
    uint64_t one = 1;
    bool is_written = write(sh->wake_fd, &one, sizeof one) == sizeof one;
    (void)is_written; /* else it is full, and readable already */
    atomic_store(&sh->is_woken, true);
    pthread_mutex_lock(&sh->lock);
    if (sh->region != NULL) {
        _Atomic uint32_t *word = &sh->region->control->client_sleeps;
        uint32_t how = SHM_WAITS_ON_FUTEX;
        if (atomic_compare_exchange_strong(word, &how, SHM_AWAKE))
            syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
    }
    pthread_mutex_unlock(&sh->lock);
}

static int shm_fd(struct client_transport *t)
{
    struct shm *sh = (struct shm *)t;
    if (!atomic_exchange(&sh->is_fd_used, true))
        shm_wake(t); /* readable once, so that the caller polls and recv asks for bytes */
    return sh->epoll_fd;
}

static uint64_t shm_generation(struct client_transport *t)
{
    return atomic_load(&((struct shm *)t)->generation);
}

static bool shm_is_connected(struct client_transport *t)
{
    return atomic_load(&((struct shm *)t)->is_connected);
}

static uint64_t shm_n_failures(struct client_transport *t)
{
    return atomic_load(&((struct shm *)t)->n_failures);
}

static void shm_why_not(struct client_transport *t, char *out, size_t out_bytes)
{
    struct shm *sh = (struct shm *)t;
    pthread_mutex_lock(&sh->lock);
    snprintf(out, out_bytes, "%s", sh->why_not);
    pthread_mutex_unlock(&sh->lock);
}

static uint64_t shm_max_message(struct client_transport *t)
{
    struct shm *sh = (struct shm *)t;
    pthread_mutex_lock(&sh->lock);
    uint64_t bytes = sh->region != NULL ? sh->region->bytes - sh->region->data_offset : 0;
    pthread_mutex_unlock(&sh->lock);
    return bytes / 2 > 2 * SHM_MESSAGE_OVERHEAD ? bytes / 2 - SHM_MESSAGE_OVERHEAD : bytes / 4;
}

static void shm_set_max_message(struct client_transport *t, uint64_t bytes)
{
    (void)t, (void)bytes; /* a reply's room is as large as was asked for */
}

static attn_status shm_pin(struct client_transport *t, const struct lane_memory_ops *ops, char *why,
                           size_t why_bytes)
{
    struct shm *sh = (struct shm *)t;
    attn_status st = ATTN_OK;
    pthread_mutex_lock(&sh->lock);
    if (sh->pins == NULL) {
        sh->pin_device = -1;
        sh->pins = ops;
        if (sh->region != NULL)
            st = shm_pin_region(sh, sh->region, why, why_bytes);
        if (st != ATTN_OK)
            sh->pins = NULL;
    }
    pthread_mutex_unlock(&sh->lock);
    return st;
}

const struct client_transport_ops transport_shm_ops = {
    .schemes = {"shm://", NULL},
    .is_shared = true,
    .open = shm_open_url,
    .close = shm_close,
    .abandon = shm_abandon,
    .message_alloc = shm_message_alloc,
    .message_free = shm_message_free,
    .send = shm_send,
    .recv = shm_recv,
    .wait = shm_wait,
    .wake = shm_wake,
    .fd = shm_fd,
    .generation = shm_generation,
    .is_connected = shm_is_connected,
    .n_failures = shm_n_failures,
    .why_not = shm_why_not,
    .max_message = shm_max_message,
    .set_max_message = shm_set_max_message,
    .pin = shm_pin,
};
