/* gpu.c: the transport gpu:///PATH: lanes for workers on this host that have q, k and v on one of
 * the daemon's GPUs, or on one that those reach. Listening and clients' lifetimes are those of
 * shm:// (transport/shm.c); here is what one client shares: a page of words, and two regions, one
 * made by each side (proto/lane_words.h). All cards use both; the daemon's region is on the
 * worker's GPU if that is one of the cards.
 *
 * A lane carries only bells; plans and everything else come as messages over any transport. With
 * the cpu backend regions are memfds, and all else is the same.
 */
#define _GNU_SOURCE /* memfd_create */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include "daemon/base/log.h"
#include "daemon/engine/step/lane.h"
#include "daemon/engine/step/lane_device.h"
#include "daemon/transport/shm_internal.h"

/* What a lane takes beside its regions: its page, its books, and plans of the most items. */
enum {
    LANE_BOOKS_BYTES = LANE_PAGE_BYTES + sizeof(struct lane) +
                       (LANE_MAX_PLANS + LANE_BELLS) * LANE_MAX_PLAN_BYTES +
                       LANE_BELLS * LANE_MAX_BELL_BYTES,
};

static attn_status check_hello(const struct shm_client *c, const struct lane_hello *h,
                               size_t hello_bytes, int fd, const struct lane_device *ours,
                               char *why, size_t why_bytes)
{
    uint64_t most = config_now(c->t->env->cfg, shm_client_bytes);
    if (hello_bytes != sizeof *h || h->magic != LANE_MAGIC) {
        stats_add(peers_cut_handshake, 1);
        snprintf(why, why_bytes, "its first packet is no hello of a lane");
        return ATTN_EPROTO;
    }
    if (h->version != LANE_VERSION) {
        snprintf(why, why_bytes, "version is %" PRIu32 ", this side speaks %u", h->version,
                 LANE_VERSION);
        return ATTN_ENOTSUP;
    }
    attn_status st = lane_device_check(&h->device, ours, why, why_bytes);
    if (st != ATTN_OK)
        return st;
    if (fd < 0) {
        snprintf(why, why_bytes, "the hello came without one descriptor, of the worker's region");
        return ATTN_EPROTO;
    }
    if (h->out_bytes == 0 || h->out_bytes % LANE_REGION_ALIGN != 0 || h->out_bytes > most) {
        snprintf(why, why_bytes,
                 "out_bytes is %" PRIu64 ", it must be a multiple of %u up to %" PRIu64
                 " (listen.shm_client)",
                 h->out_bytes, LANE_REGION_ALIGN, most);
        return ATTN_EINVAL;
    }
    return ATTN_OK;
}

/* Makes and maps the page; the caller sends and closes *out_fd. */
static attn_status page_open(struct lane *l, int *out_fd, char *why, size_t why_bytes)
{
    int fd = memfd_create("attnd-lane", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    void *p = MAP_FAILED;
    if (fd >= 0 && ftruncate(fd, LANE_PAGE_BYTES) == 0 &&
        fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0)
        p = mmap(NULL, LANE_PAGE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (p == MAP_FAILED) {
        snprintf(why, why_bytes, "a lane's page: %s", strerror(errno));
        if (fd >= 0)
            close(fd);
        return ATTN_ENOMEM;
    }
    l->page = p;
    *out_fd = fd;
    return ATTN_OK;
}

/* Maps the worker's region. If it is on another GPU and can't be mapped, that GPU can't be
 * reached. */
static attn_status worker_region_open(struct shm_client *c, const struct lane_hello *h, int fd,
                                      const struct lane_device *ours, char *why, size_t why_bytes)
{
    char a[LANE_DEVICE_TEXT_BYTES], cause[128];
    attn_status st =
        lane_region_open(c->lane->engine, h->out_bytes, fd, &c->lane->out, cause, sizeof cause);
    if (st == ATTN_OK)
        return st;
    if (st != ATTN_ENOTSUP && memcmp(h->device.uuid, ours->uuid, sizeof ours->uuid) == 0) {
        snprintf(why, why_bytes, "%s", cause);
        return st;
    }
    snprintf(why, why_bytes, "not all of the daemon reaches the worker's region, on %s: %s",
             lane_device_format(&h->device, a), cause);
    return ATTN_ENOTSUP;
}

/* Makes the daemon's region, within the settings, and maps the worker's. */
static attn_status regions_open(struct shm_client *c, const struct lane_hello *h, int worker_fd,
                                const struct lane_device *ours, int *out_fd, char *why,
                                size_t why_bytes)
{
    struct lane *l = c->lane;
    uint64_t most = config_now(c->t->env->cfg, shm_client_bytes), bytes = h->in_bytes;
    if (bytes == 0 || bytes > most)
        bytes = most;
    bytes = bytes / LANE_REGION_ALIGN * LANE_REGION_ALIGN;
    if (bytes == 0) {
        snprintf(why, why_bytes,
                 "listen.shm_client is %" PRIu64 ", a region of a lane has %u at least", most,
                 LANE_REGION_ALIGN);
        return ATTN_EQUOTA;
    }
    attn_status st = shm_memory_take(c, bytes + h->out_bytes + LANE_BOOKS_BYTES, why, why_bytes);
    if (st != ATTN_OK)
        return st;
    st = lane_region_open(l->engine, bytes, -1, &l->in, why, why_bytes);
    if (st != ATTN_OK)
        return st;
    st = worker_region_open(c, h, worker_fd, ours, why, why_bytes);
    if (st == ATTN_OK && l->ops->region_export(l->backend, &l->in, out_fd) != ATTN_OK) {
        snprintf(why, why_bytes, "the daemon's region has no descriptor: %s", strerror(errno));
        st = ATTN_ENOMEM;
    }
    return st;
}

static attn_status lane_open(struct shm_client *c, const struct lane_hello *h, int worker_fd,
                             struct engine *home, const struct lane_device *ours, int out_fds[2],
                             char *why, size_t why_bytes)
{
    struct lane *l = c->lane = calloc(1, sizeof *l);
    if (l == NULL) {
        snprintf(why, why_bytes, "no memory for a lane");
        return ATTN_ENOMEM;
    }
    stats_add(lanes, 1);
    l->engine = home;
    l->backend = lane_backend(home, &l->ops);
    l->transport = &transport_gpu_ops;
    l->out_news = &c->t->has_news;
    l->principal = c->principal;
    lane_init(l);
    attn_status st = page_open(l, &out_fds[0], why, why_bytes);
    if (st == ATTN_OK)
        st = regions_open(c, h, worker_fd, ours, &out_fds[1], why, why_bytes);
    if (st == ATTN_OK && getrandom(&l->id, sizeof l->id, 0) != (ssize_t)sizeof l->id) {
        snprintf(why, why_bytes, "no random bytes for the lane's name");
        st = ATTN_EINTERNAL;
    }
    return st;
}

void lane_free(struct shm_client *c)
{
    struct lane *l = c->lane;
    if (l == NULL)
        return;
    lane_fini(l);
    if (l->in.p != NULL && !l->is_stuck)
        l->ops->region_close(l->backend, &l->in);
    if (l->out.p != NULL && !l->is_stuck)
        l->ops->region_close(l->backend, &l->out);
    if (l->page != NULL)
        munmap(l->page, LANE_PAGE_BYTES);
    free(l);
    c->lane = NULL;
    stats_sub(lanes, 1);
}

attn_status lane_welcome(struct shm_client *c, const union shm_first_packet *hello,
                         size_t hello_bytes, int fd, char *why, size_t why_bytes)
{
    static const struct lane_device unsaid;
    bool is_hello = hello_bytes == sizeof hello->lane;
    struct engine *primary = c->t->env->engine;
    struct engine *home = lane_home(primary, (is_hello ? &hello->lane.device : &unsaid)->uuid);
    struct lane_welcome w = {.magic = LANE_MAGIC, .version = LANE_VERSION};
    const struct backend_ops *ops;
    struct backend_info info;
    int fds[2] = {-1, -1};
    struct backend *backend = lane_backend(home, &ops);
    ops->info(backend, &info);
    memcpy(w.device.uuid, info.id.uuid, sizeof w.device.uuid);
    w.device.driver_version = info.id.driver_version;
    w.device.is_shared = info.id.is_shared;
    attn_status st = lane_check(primary, w.message, sizeof w.message);
    if (st == ATTN_OK)
        st = check_hello(c, &hello->lane, hello_bytes, fd, &w.device, w.message, sizeof w.message);
    if (st == ATTN_OK)
        st = lane_open(c, &hello->lane, fd, home, &w.device, fds, w.message, sizeof w.message);
    w.status = st;
    if (st == ATTN_OK) {
        w.lane = c->lane->id;
        w.in_bytes = c->lane->in.bytes;
        log_limited("lanes", LOG_LEVEL_INFO, log_write, "%s: %s: a lane on %s for a worker on %s",
                    c->t->url, c->name,
                    lane_device_format(&w.device, (char[LANE_DEVICE_TEXT_BYTES]){0}),
                    lane_device_format(&hello->lane.device, (char[LANE_DEVICE_TEXT_BYTES]){0}));
        shm_hand_over(c); /* the engine knows the lane before the worker can name it */
    }
    bool is_sent = shm_send_packet(c->fd, &w, sizeof w, fds, st == ATTN_OK ? 2 : 0);
    for (int i = 0; i < 2; i++)
        if (fds[i] >= 0)
            close(fds[i]);
    if (st != ATTN_OK)
        snprintf(why, why_bytes, "%s", w.message);
    else if (!is_sent)
        shutdown(c->fd, SHUT_RDWR); /* is then handled as a hang-up */
    return st;
}

static attn_status gpu_open(struct transport_env *env, const char *url, struct transport **out_t,
                            char *why, size_t why_bytes)
{
    return shm_listen(&transport_gpu_ops, env, url, out_t, why, why_bytes);
}

const struct transport_ops transport_gpu_ops = {
    .scheme = TRANSPORT_GPU_SCHEME,
    .label = STATS_GPU,
    .is_polled = true,
    .open = gpu_open,
    .url = shm_url,
    .stop = shm_stop,
    .is_idle = shm_is_idle,
    .hang_up = shm_hang_up,
    .close = shm_close,
    .reply = lane_reply,
};
