/* shm_internal.h: clients of the shm:// and gpu:// transports, shared by transport/shm.c
 * (listening, handing memory over, taking it back), transport/shm_region.c (a client's memory),
 * transport/shm_client.c (rings, requests, replies) and transport/gpu.c (lanes, which clients of
 * gpu:// have instead of rings).
 *
 * A client belongs to the loop until its region is handed over, then to the engine until it is
 * retired, and then to the loop again, which frees it. A client is retired when it has hung up or
 * broken the protocol and has no request in the engine any more: until then the backend may be
 * reading and writing its memory.
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
    struct shm_client *next; /* in a stack */
    LIST_ENTRY(shm_client) entry; /* in the loop's or the engine's list */
    struct principal principal;
    struct share *share;
    char name[PRINCIPAL_TEXT_BYTES]; /* the principal as text, for logs */
    int fd; /* the socket; -1: none */
    int wake_fd; /* the eventfd that the client has, too; -1: none */

    /* the loop's */
    uv_poll_t poll;
    uv_timer_t deadline; /* checks whether the hello is late */
    uint64_t hello_until_ns;
    uint8_t n_handles; /* open or closing */
    bool is_shared; /* the engine has it */
    bool is_closing;

    /* written by the loop before it is handed over */
    struct lane *lane; /* NULL: rings */
    uint8_t *base; /* NULL: no region yet */
    uint64_t region_bytes, data_offset;
    uint64_t shared_bytes; /* counted for it in listen.shm_memory and in its share */
    struct shm_control *control;
    const volatile struct shm_submit *submits; /* [n_slots] */
    volatile struct shm_complete *completes; /* [n_slots] */
    struct shm_slot *slots; /* [n_slots] */
    uint32_t n_slots;
    _Atomic bool is_hung_up;

    /* the engine's */
    uint32_t taken, completed; /* entries of the rings so far */
    uint32_t n_busy;
    bool is_dead; /* nothing is taken from it any more */
    char why[160]; /* why it was cut; "": it hung up */
};

struct transport_shm {
    struct transport base; /* first */
    struct transport_env *env;
    struct engine_poller poller;
    char url[256];
    struct address address;

    /* Answers a client's hello with what is shared. ATTN_OK: the engine has the client now; else it
     * was answered with the reason, which is in why. fd: the descriptor that came with the hello,
     * or -1; it stays the caller's. */
    attn_status (*welcome)(struct shm_client *c, const union shm_first_packet *hello,
                           size_t hello_bytes, int fd, char *why, size_t why_bytes);
    bool wants_descriptor; /* a hello must come with one */

    /* the loop's */
    int listen_fd;
    uv_poll_t listener;
    uv_timer_t accept_again;
    uv_async_t async; /* sent when clients were retired */
    LIST_HEAD(, shm_client) unshared; /* clients that the engine does not have */
    uint32_t n_handles, n_clients;
    bool has_async, has_listener, is_closing;
    bool is_polled; /* the engine has the poller, which it gets with the first client */

    _Atomic bool is_stopped, has_news;
    _Atomic(struct shm_client *) incoming; /* a stack: loop to engine */
    _Atomic(struct shm_client *) retired; /* a stack: engine to loop */

    LIST_HEAD(, shm_client) clients; /* the engine's; the loop's after engine_close */
};

/* transport/shm_region.c */

/* Counts bytes more of listen.shm_memory for the client and in its share. ATTN_EQUOTA: nothing was
 * counted, and why names who has how much, and the setting. */
attn_status shm_memory_take(struct shm_client *c, uint64_t bytes, char *why, size_t why_bytes);
void shm_memory_give(struct shm_client *c); /* all that is counted for it */

/* Makes what the hello asks for, within the settings: a memfd that can neither shrink nor grow,
 * mapped and registered with the backend, with c's rings in it; and an eventfd. The caller sends
 * *out_fd, the memfd, and closes it. ATTN_EQUOTA, ATTN_ENOMEM: why says which limit;
 * shm_region_close frees what was made. */
attn_status shm_region_open(struct shm_client *c, const struct shm_hello *h, int *out_fd, char *why,
                            size_t why_bytes);
void shm_region_close(struct shm_client *c); /* also one that was never opened */
/* Sends a packet of bytes with n_fds descriptors. false: it was not sent. */
bool shm_send_packet(int fd, const void *bytes, size_t n_bytes, const int *fds, size_t n_fds);

/* transport/gpu.c */

attn_status lane_welcome(struct shm_client *c, const union shm_first_packet *hello,
                         size_t hello_bytes, int fd, char *why, size_t why_bytes);
void lane_free(struct shm_client *c); /* also of a client without a lane */

/* transport/shm.c */

/* transport_ops.open of shm:// and gpu://, which differ only in ops and welcome. */
attn_status shm_listen(const struct transport_ops *ops, struct transport_env *env, const char *url,
                       struct transport **out_t, char *why, size_t why_bytes);
/* Hands a client whose memory is ready over to the engine. */
void shm_hand_over(struct shm_client *c);
const char *shm_url(const struct transport *base);
void shm_stop(struct transport *base);
bool shm_is_idle(const struct transport *base);
bool shm_hang_up(struct transport *base);
void shm_close(struct transport *base);

/* transport/shm_client.c */

/* Sets up the rings in a mapped region of zeros; c->region_bytes, n_slots and base are set.
 * ATTN_ENOMEM. */
attn_status shm_client_init(struct shm_client *c);
void shm_client_fini(struct shm_client *c); /* also one that was never initialised */
uint64_t shm_slots_bytes(const struct shm_client *c); /* of the heap, for its n_slots */
/* Offsets of a region with n_slots; returns where the data area begins. */
uint64_t shm_layout(uint32_t n_slots, uint64_t *out_submits, uint64_t *out_completes);

/* transport_ops.reply: completes a request and frees its slot. */
void shm_reply(struct request *req);

bool shm_poll(struct engine_poller *p);
bool shm_may_sleep(struct engine_poller *p);
void shm_awake(struct engine_poller *p);
uint64_t shm_nap_ns(struct engine_poller *p);

#endif
