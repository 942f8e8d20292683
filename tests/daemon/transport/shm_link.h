/* shm_link.h: a client of shm:// written from the protocol's page, with every part of it in reach,
 * so that a test can also do what no client should. Its data area is cut into equal parts, one a
 * slot: half for the request, half for the reply. */
#ifndef TESTS_DAEMON_SHM_LINK_H
#define TESTS_DAEMON_SHM_LINK_H

#include <stdbool.h>
#include <stddef.h>

#include "proto/shm_ring.h"

struct shm_link {
    int socket, memfd, wake_fd;
    struct shm_welcome welcome;
    uint8_t *base;
    struct shm_control *control;
    struct shm_submit *submits;
    struct shm_complete *completes;
    uint64_t part_bytes;
    uint32_t submitted, completed;
    bool is_busy[SHM_MAX_SLOTS];
    uint32_t n_busy;
};

/* A connected socket that has not said hello; -1: refused. */
int shm_link_connect(const char *path);
/* Says hello and maps what comes. false: the daemon hung up or answered with another status, which
 * is in l->welcome. */
bool shm_link_open(struct shm_link *l, const char *path, uint32_t n_slots, uint64_t region_bytes);
void shm_link_close(struct shm_link *l);

/* Puts a message into a free slot and submits it. false: no slot is free, or it is too large. */
bool shm_link_send(struct shm_link *l, const void *message, size_t bytes);
/* Submits any entry. */
void shm_link_submit(struct shm_link *l, const struct shm_submit *e);
void shm_link_wake(struct shm_link *l); /* the daemon, whether it sleeps or not */
/* Waits for the next completed reply; its bytes are valid until the slot is used again. false: none
 * within timeout_ms, or the daemon hung up. */
bool shm_link_receive(struct shm_link *l, int timeout_ms, const uint8_t **out_reply,
                      size_t *out_bytes);
/* true: the daemon hung up. */
bool shm_link_is_gone(struct shm_link *l, int timeout_ms);

#endif
