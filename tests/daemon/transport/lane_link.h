/* lane_link.h: a worker of gpu:// written from the protocol's page, with every part of its lane in
 * reach, on a daemon whose backend is the cpu: regions are memfds, words are plain memory. */
#ifndef TESTS_DAEMON_LANE_LINK_H
#define TESTS_DAEMON_LANE_LINK_H

#include <stdbool.h>
#include <stddef.h>

#include "proto/lane_words.h"

struct lane_link {
    int socket;
    struct lane_welcome welcome;
    struct lane_page *page;
    uint8_t *in, *out; /* the daemon's region, and the worker's */
    size_t out_bytes;
    uint32_t count; /* bells rung */
};

/* A hello and a region as they should be. */
struct lane_hello lane_link_hello(uint64_t in_bytes, uint64_t out_bytes);
int lane_link_memfd(size_t bytes, bool is_sealed);
/* Connects and says h with a descriptor (-1: none), which is closed. false: the daemon hung up, or
 * answered with another status, which is in l->welcome. */
bool lane_link_say(struct lane_link *l, const char *path, const void *h, size_t h_bytes, int fd);
/* The whole of it, as it should be. */
bool lane_link_open(struct lane_link *l, const char *path, uint64_t in_bytes, uint64_t out_bytes);
void lane_link_close(struct lane_link *l);

/* Rings for the next layer and waits for its answer: the status, or 1 when none came in time. */
int lane_link_ring(struct lane_link *l, int timeout_ms);
/* The same without ringing: bell was rung. */
int lane_link_await(struct lane_link *l, uint32_t bell, int timeout_ms);
/* true: the daemon hung up. */
bool lane_link_is_gone(struct lane_link *l, int timeout_ms);

#endif
