/* open.c: a lane's handshake with the daemon, and its watcher thread, which does nothing but
 * release what waits when the daemon hangs up. */
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "clients/libattn/core/core.h"
#include "clients/libattn/lane/lane.h"

#define LANE_DEFAULT_BYTES (16u << 20)
#define LANE_WELCOME_MS 5000

/* ---- the watcher ---- */

static void *watch(void *arg)
{
    struct attn_lane *l = arg;
    struct pollfd fds[] = {{.fd = l->socket.fd, .events = POLLIN},
                           {.fd = l->wake_fd, .events = POLLIN}};
    while (poll(fds, 2, -1) < 0 && errno == EINTR)
        ;
    if (fds[1].revents == 0) {
        atomic_store(&l->is_hung_up, true);
        atomic_store(&l->page->stop, 1);
    }
    return NULL;
}

static attn_status start_watcher(struct attn_lane *l)
{
    sigset_t all, old;
    sigfillset(&all);
    l->wake_fd = eventfd(0, EFD_CLOEXEC);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    l->has_watcher = l->wake_fd >= 0 && pthread_create(&l->watcher, NULL, watch, l) == 0;
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    return l->has_watcher ? ATTN_OK : error_set(ATTN_ENOMEM, "no thread for a lane");
}

/* ---- the handshake ---- */

static int connect_to(const char *path)
{
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    struct timeval limit = {.tv_sec = LANE_WELCOME_MS / 1000};
    if (strlen(path) >= sizeof a.sun_path) {
        errno = ENAMETOOLONG;
        return -1;
    }
    strcpy(a.sun_path, path);
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return -1;
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
    if (connect(fd, (struct sockaddr *)&a, sizeof a) == 0)
        return fd;
    int error = errno;
    close(fd);
    errno = error;
    return -1;
}

static bool send_hello(int socket, const struct lane_hello *h, int region_fd)
{
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(sizeof region_fd)];
    } control = {0};
    struct iovec iov = {(void *)(uintptr_t)h, sizeof *h};
    struct msghdr m = {.msg_iov = &iov,
                       .msg_iovlen = 1,
                       .msg_control = control.bytes,
                       .msg_controllen = sizeof control.bytes};
    control.align.cmsg_len = CMSG_LEN(sizeof region_fd);
    control.align.cmsg_level = SOL_SOCKET;
    control.align.cmsg_type = SCM_RIGHTS;
    memcpy(CMSG_DATA(&control.align), &region_fd, sizeof region_fd);
    return sendmsg(socket, &m, MSG_NOSIGNAL) == sizeof *h;
}

/* The welcome, and with status 0 its two descriptors. false: none came. */
static bool take_welcome(int socket, struct lane_welcome *w, int out_fds[2])
{
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(2 * sizeof(int))];
    } control = {0};
    struct iovec iov = {w, sizeof *w};
    struct msghdr m = {.msg_iov = &iov,
                       .msg_iovlen = 1,
                       .msg_control = control.bytes,
                       .msg_controllen = sizeof control.bytes};
    if (recvmsg(socket, &m, MSG_CMSG_CLOEXEC) != sizeof *w || w->magic != LANE_MAGIC)
        return false;
    w->message[sizeof w->message - 1] = 0;
    const struct cmsghdr *h = CMSG_FIRSTHDR(&m);
    if (h != NULL && h->cmsg_type == SCM_RIGHTS && h->cmsg_len == CMSG_LEN(2 * sizeof(int)))
        memcpy(out_fds, CMSG_DATA(h), 2 * sizeof(int));
    return w->status != ATTN_OK || out_fds[0] >= 0;
}

/* Everything of a lane in this kind of memory. *out_is_host: the daemon's is host memory. */
static attn_status open_in(struct attn_lane *l, const char *path, uint64_t in_bytes,
                           uint64_t out_bytes, bool *out_is_host)
{
    static const uint8_t none[16];
    struct lane_hello h = {.magic = LANE_MAGIC, .version = LANE_VERSION};
    struct lane_welcome w = {0};
    char why[ATTN_MESSAGE_BYTES] = "";
    void *p = NULL;
    int region_fd = -1, fds[2] = {-1, -1};
    attn_status st = l->ops->open(&l->memory, &h.device, why, sizeof why);
    if (st == ATTN_OK)
        st = l->ops->region_make(l->memory, out_bytes, &region_fd, &p, why, sizeof why);
    if (st != ATTN_OK)
        return error_set(st, "%s", why);
    l->out = p;
    l->out_bytes = h.out_bytes = out_bytes;
    h.in_bytes = in_bytes;
    l->socket.fd = connect_to(path);
    if (l->socket.fd < 0)
        st = error_set(ATTN_ECONN, "gpu://%s: %s", path, connect_error(errno, path));
    else
        st = client_socket_add(l->client, &l->socket);
    if (st != ATTN_OK) {
        close(region_fd);
        return st;
    }
    if (!send_hello(l->socket.fd, &h, region_fd) || !take_welcome(l->socket.fd, &w, fds))
        st = error_set(ATTN_ECONN, "%s: no attnd that opens lanes listens there, or it hung up",
                       path);
    else if (w.status != ATTN_OK)
        st = error_set((attn_status)w.status, "%s", w.message);
    close(region_fd);
    *out_is_host = w.magic == LANE_MAGIC && memcmp(w.device.uuid, none, sizeof none) == 0;
    if (st == ATTN_OK) {
        l->id = w.lane;
        l->in_bytes = w.in_bytes;
        p = mmap(NULL, LANE_PAGE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fds[0], 0);
        l->page = p != MAP_FAILED ? p : NULL;
        if (l->page == NULL)
            snprintf(why, sizeof why, "mapping a lane's page: %s", strerror(errno));
        st = l->page == NULL
                 ? ATTN_ENOMEM
                 : l->ops->region_map(l->memory, fds[1], l->in_bytes, &p, why, sizeof why);
        l->in = p;
        if (st == ATTN_OK)
            st = l->ops->page_map(l->memory, l->page, &l->memory_page, why, sizeof why);
        if (st == ATTN_OK)
            st = l->ops->restart(l->memory, 0, why, sizeof why);
        if (st != ATTN_OK)
            error_set(st, "%s", why);
    }
    for (int i = 0; i < 2; i++)
        if (fds[i] >= 0)
            close(fds[i]);
    return st == ATTN_OK ? start_watcher(l) : st;
}

/* Gives back all but the struct. */
static void undo(struct attn_lane *l)
{
    uint64_t one = 1;
    if (l->has_watcher) {
        bool is_written = write(l->wake_fd, &one, sizeof one) == sizeof one;
        (void)is_written; /* an eventfd that is not full takes it */
        pthread_join(l->watcher, NULL);
    }
    lane_cut_end(l);
    if (l->memory != NULL)
        l->ops->close(l->memory);
    if (l->page != NULL)
        munmap(l->page, LANE_PAGE_BYTES);
    client_socket_remove(&l->socket);
    if (l->socket.fd >= 0)
        close(l->socket.fd);
    if (l->wake_fd >= 0)
        close(l->wake_fd);
    const struct attn_lane empty = {
        .client = l->client, .wait_us = l->wait_us, .socket.fd = -1, .wake_fd = -1};
    memcpy(l, &empty, sizeof *l);
}

static uint64_t round_up(uint64_t bytes)
{
    bytes = bytes == 0 ? LANE_DEFAULT_BYTES : bytes;
    return (bytes + LANE_REGION_ALIGN - 1) / LANE_REGION_ALIGN * LANE_REGION_ALIGN;
}

attn_status attn_lane_open(attn_client *c, const char *url, const struct attn_lane_options *o,
                           attn_lane **out_lane)
{
    static const struct attn_lane_options none = {.struct_size = sizeof none};
    char known[sizeof c->lane_url], no_cuda[ATTN_MESSAGE_BYTES] = "";
    attn_status st = client_check(c);
    if (st != ATTN_OK)
        return st;
    o = o != NULL ? o : &none;
    if (out_lane == NULL || o->struct_size != sizeof *o)
        return error_set(ATTN_EINVAL, out_lane == NULL
                                          ? "out_lane is NULL"
                                          : "attn_lane_options.struct_size is another library's");
    pthread_mutex_lock(&c->lock);
    memcpy(known, c->lane_url, sizeof known);
    pthread_mutex_unlock(&c->lock);
    url = url != NULL ? url : known;
    if (url[0] == '\0')
        return error_set(ATTN_ENOTSUP, "the daemon opens no lanes: it does not listen at gpu://");
    if (strncmp(url, "gpu://", 6) != 0)
        return error_set(ATTN_EINVAL, "url \"%s\": lanes are at gpu://PATH", url);
    struct attn_lane *l = calloc(1, sizeof *l);
    if (l == NULL)
        return error_set(ATTN_ENOMEM, "no memory for a lane");
    l->client = c;
    l->wait_us = o->wait_us != 0 ? o->wait_us : c->default_timeout_us;
    l->socket.fd = l->wake_fd = -1;
    uint64_t in_bytes = round_up(o->in_bytes), out_bytes = round_up(o->out_bytes);

    bool is_host = true;
    l->ops = lane_memory_find_cuda(no_cuda, sizeof no_cuda);
    st = ATTN_ENOTSUP;
    if (l->ops != NULL) {
        st = open_in(l, url + 6, in_bytes, out_bytes, &is_host);
        if (st == ATTN_ENOTSUP && l->memory == NULL)
            is_host = true; /* no device here; whether the daemon has one it says itself */
    }
    if (st == ATTN_ENOTSUP && is_host) {
        undo(l);
        l->ops = &lane_memory_host;
        l->is_host = true;
        st = open_in(l, url + 6, in_bytes, out_bytes, &is_host);
        if (st == ATTN_ENOTSUP && no_cuda[0] != '\0')
            error_set(st, "%s", no_cuda);
    }
    if (st != ATTN_OK) {
        undo(l);
        free(l);
        return st;
    }
    l->next_bell = 1;
    *out_lane = l;
    return ATTN_OK;
}

void attn_lane_close(attn_lane *l)
{
    if (l == NULL)
        return;
    undo(l);
    free(l);
}
