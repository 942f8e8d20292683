/* shm_internal.h: a connection of shm://, shared by shm.c (messages, waiting) and shm_connect.c
 * (connecting, the end). */
#ifndef ATTND_LIBATTN_SHM_INTERNAL_H
#define ATTND_LIBATTN_SHM_INTERNAL_H

#include <pthread.h>
#include <stdatomic.h>
#include <sys/un.h>

#include "clients/libattn/transport/shm_region.h"
#include "clients/libattn/transport/transport.h"

#define SHM_RETRY_NS 10000000u

struct shm {
    struct client_transport base;
    struct sockaddr_un address;
    int epoll_fd, wake_fd; /* never change */
    atomic_bool is_connected, is_woken, is_fd_used;
    atomic_uint_fast64_t generation, n_failures;

    pthread_mutex_t lock;
    struct shm_region *region; /* NULL: not connected. Written by the receiving thread alone */
    SLIST_HEAD(, shm_region) old; /* without connection, with messages in use */
    char why_not[sizeof((struct shm_welcome *)0)
                     ->message]; /* there is no connection; "" if there is one */
    const struct lane_memory_ops *pins; /* regions are page-locked with; NULL: they are not */
    int pin_device;

    /* the receiving thread's */
    int socket; /* -1: none. With one and no region: hello is sent */
    bool is_hung_up; /* dropped once the region's last replies are taken */
    bool has_spare_core;
    uint64_t retry_ns, retry_at_ns, welcome_until_ns;
    uint64_t spin_ns;
};

/* Those of the receiving thread: */

/* Tries to connect, now. */
void shm_connect_begin(struct shm *sh);
/* Goes on with that, or it is time to try again. */
void shm_connect_on(struct shm *sh);
/* The daemon hung up, or is not to be trusted. A region whose messages are in use stays. */
void shm_disconnect(struct shm *sh);
/* Takes wake-up bytes off the socket and notices that it was hung up. */
void shm_look_at_socket(struct shm *sh);

/* Page-locks a region; without that copies to and from a GPU are slower. Under the lock. */
attn_status shm_pin_region(struct shm *sh, struct shm_region *r, char *why, size_t why_bytes);

#endif
