/* idle_memory.h: host memory that outlives the process, for blocks of idle sequences: a
 * sealed memfd, mapped once. What is where in it the cache knows (cache/idle.h). */
#ifndef ATTND_DAEMON_KEEPER_IDLE_MEMORY_H
#define ATTND_DAEMON_KEEPER_IDLE_MEMORY_H

#include "proto/attn_types.h"

struct idle_memory {
    int fd; /* this process's; -1: there is none */
    uint8_t *base;
    uint64_t bytes;
    bool is_new; /* it has no predecessor's data */
};

/* fd: what a predecessor left, which becomes this one's if it is as large, and is closed else; -1:
 * nothing. bytes 0: none. ATTN_ENOMEM: why names the setting. */
attn_status idle_memory_open(uint64_t bytes, int fd, struct idle_memory *out, char *why,
                             size_t why_bytes);
void idle_memory_close(struct idle_memory *m); /* a zeroed one is fine */

#endif
