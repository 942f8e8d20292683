/* transport/shm_internal.h: what transport/shm.c (listening, handing memory over, taking it back),
 * transport/shm_region.c (a client's memory) and transport/shm_client.c (rings, requests, replies)
 * share. A client of gpu:// has a lane instead of rings (transport/gpu.c); the rest is the same.
 *
 * A client is the loop's until its region is handed over, the engine's until it is retired, and
 * then the loop's again, which frees it. Retired is who hung up or broke the protocol and has no
 * request in the engine any more: until then the backend may be reading and writing its memory.
 */
#ifndef ATTND_DAEMON_TRANSPORT_SHM_INTERNAL_H
#define ATTND_DAEMON_TRANSPORT_SHM_INTERNAL_H

#include <stdatomic.h>
#include <sys/queue.h>
#include <uv.h>

#include "daemon/base/address.h"
#include "daemon/base/principal.h"
#include "daemon/engine/core/engine.h"
#include "daemon/transport/transport.h"
#include "proto/lane_words.h"
#include "proto/shm_ring.h"

/* One request in flight. */
struct shm_slot {
    struct request req;
    struct iobuf msg, room; /* in the client's region */
    bool is_busy;
};

struct lane;
union shm_first_packet {
    struct shm_hello shm;
    struct lane_hello lane;
};

struct shm_client {
    struct transport_shm *t;
    struct shm_client *next; /* of a stack */
    LIST_ENTRY(shm_client) entry; /* of the loop's or the engine's */
    struct principal principal;
    struct share *share;
    char name[PRINCIPAL_TEXT_BYTES]; /* for logs: the same */
    int fd; /* the socket; -1: none */
    int wake_fd; /* the eventfd the client has, too; -1: none */

    /* the loop's */
    uv_poll_t poll;
    uv_timer_t deadline; /* ticks until the hello is there or late */
    uint64_t hello_until_ns;
    uint8_t n_handles; /* open or closing */
    bool is_shared; /* handed to the engine, not given back */
    bool is_closing;

    /* written by the loop before it is handed over */
    struct lane *lane; /* NULL: rings */
    uint8_t *base; /* NULL: no region yet */
    uint64_t region_bytes, data_offset;
    struct shm_control *control;
    const volatile struct shm_submit *submits; /* [n_slots] */
    volatile struct shm_complete *completes; /* [n_slots] */
    struct shm_slot *slots; /* [n_slots] */
    uint32_t n_slots;
    _Atomic bool is_hung_up;

    /* the engine's */
    uint32_t taken, completed; /* entries of the rings so far */
    uint32_t n_busy;
    bool is_dead; /* nothing is taken any more */
    char why[160]; /* it was cut; empty: it hung up */
};

struct transport_shm {
    struct transport base; /* first */
    struct transport_env *env;
    struct engine_poller poller;
    char url[256];
    struct address address;

    /* Gives a client that said hello what it shares; ATTN_OK: it is the engine's now, else why says
     * what is wrong and the client was answered. fd: the descriptor that came with the hello, or
     * -1; it stays the caller's. */
    attn_status (*welcome)(struct shm_client *c, const union shm_first_packet *hello,
                           size_t hello_bytes, int fd, char *why, size_t why_bytes);
    bool wants_descriptor; /* with a hello */

    /* the loop's */
    int listen_fd;
    uv_poll_t listener;
    uv_timer_t accept_again;
    uv_async_t async; /* clients are retired */
    LIST_HEAD(, shm_client) unshared; /* not handed over, or given back */
    uint32_t n_handles, n_clients;
    bool has_async, has_listener, is_closing;
    bool is_polled; /* the engine knows the poller: from the first client on */

    _Atomic bool is_stopped, has_news;
    _Atomic(struct shm_client *) incoming; /* a stack: loop to engine */
    _Atomic(struct shm_client *) retired; /* a stack: engine to loop */

    LIST_HEAD(, shm_client) clients; /* the engine's; the loop's after engine_close */
};

/* transport/shm_region.c */

/* What the hello asks for within the settings: a memfd that can neither shrink nor grow, mapped,
 * known to the backend, and an eventfd; c's rings are in it. *out_fd is the memfd, to be sent and
 * closed. ATTN_EQUOTA, ATTN_ENOMEM: why says which; shm_region_close gives back what there is. */
attn_status shm_region_open(struct shm_client *c, const struct shm_hello *h, int *out_fd, char *why,
                            size_t why_bytes);
void shm_region_close(struct shm_client *c); /* of one that was never opened, too */
/* A packet of bytes with n_fds descriptors. false: it was not sent. */
bool shm_send_packet(int fd, const void *bytes, size_t n_bytes, const int *fds, size_t n_fds);

/* transport/gpu.c */

attn_status lane_welcome(struct shm_client *c, const union shm_first_packet *hello,
                         size_t hello_bytes, int fd, char *why, size_t why_bytes);
void lane_free(struct shm_client *c); /* of one that has none, too */

/* transport/shm.c */

/* open of shm:// and gpu://, which differ in ops and welcome. */
attn_status shm_listen(const struct transport_ops *ops, struct transport_env *env, const char *url,
                       struct transport **out_t, char *why, size_t why_bytes);
/* c's memory is there: the engine's from now on. */
void shm_hand_over(struct shm_client *c);
const char *shm_url(const struct transport *base);
void shm_stop(struct transport *base);
bool shm_is_idle(const struct transport *base);
bool shm_hang_up(struct transport *base);
void shm_close(struct transport *base);

/* transport/shm_client.c */

/* The rings of a mapped region of zeros; c->region_bytes, n_slots and base are set. ATTN_ENOMEM. */
attn_status shm_client_init(struct shm_client *c);
void shm_client_fini(struct shm_client *c); /* of one that never was initialised, too */
/* Offsets of a region with n_slots; returns where the data area begins. */
uint64_t shm_layout(uint32_t n_slots, uint64_t *out_submits, uint64_t *out_completes);

/* Completes a request; the slot is free when the client sees it. */
void shm_reply(struct request *req);

bool shm_poll(struct engine_poller *p);
bool shm_may_sleep(struct engine_poller *p);
void shm_awake(struct engine_poller *p);
uint64_t shm_nap_ns(struct engine_poller *p);

#endif
