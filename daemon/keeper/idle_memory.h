/* idle_memory.h: host memory that outlives the process, for blocks of idle sequences: a sealed
 * memfd, mapped once. The cache decides what lies where in it (cache/idle.h). */
#ifndef ATTND_DAEMON_KEEPER_IDLE_MEMORY_H
#define ATTND_DAEMON_KEEPER_IDLE_MEMORY_H

#include "proto/attn_types.h"

struct idle_memory {
    int fd; /* the memfd; -1: there is none */
    uint8_t *base;
    uint64_t bytes;
    bool is_new; /* it holds no data of a predecessor */
};

/* Opens memory of so many bytes; 0: none. fd: a predecessor's memfd (-1: there is none), which is
 * used if it has the same size and closed if not. ATTN_ENOMEM: why names the setting. */
attn_status idle_memory_open(uint64_t bytes, int fd, struct idle_memory *out, char *why,
                             size_t why_bytes);
void idle_memory_close(struct idle_memory *m); /* a zeroed one is fine */

#endif
