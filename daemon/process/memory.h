/* memory.h: how much memory this process may still take, by what the machine has and what its
 * control groups allow. Checked once, at start, so that settings that are too large are an error
 * message and do not get the process killed later. */
#ifndef ATTND_DAEMON_PROCESS_MEMORY_H
#define ATTND_DAEMON_PROCESS_MEMORY_H

#include <stddef.h>
#include <stdint.h>

#include "proto/attn_types.h"

/* The room that the machine or one of the control groups leaves, whichever is least. */
struct memory_room {
    uint64_t free_bytes, limit_bytes; /* UINT64_MAX: not known */
    char what[256]; /* "MemAvailable of this machine", or the file that has the limit */
    uint64_t
        most_bytes; /* least of all limits, and of what the machine has: the most there can be */
    char most_what[256];
};

/* Reads memory.max (control groups version 2) and memory.limit_in_bytes (version 1) of this
 * process's group and all above it, and what the machine has. Page cache that can be dropped counts
 * as free. root: "", or for tests a directory with proc/ and sys/. */
void memory_room_read(const char *root, struct memory_room *out);

/* The most that the daemon will take of host memory, beside what the process itself needs. */
struct memory_need {
    uint64_t kv_bytes; /* 0: the device has its own */
    uint64_t io_bytes; /* of message buffers */
    uint64_t tier_bytes; /* of evicted and idle blocks */
    uint64_t table_bytes; /* of arenas and engines */
    uint64_t client_bytes; /* of connections and of requests that are not answered */
    uint64_t taken_bytes; /* of all these, what a predecessor's memory has taken already */
};

struct memory_fit {
    uint64_t all_bytes; /* what the daemon takes at most */
    uint64_t left_bytes; /* beside that; UINT64_MAX: not known */
};

/* Checks that all of it fits. ATTN_ENOMEM: why names all sizes and settings. */
attn_status memory_check(const char *root, const struct memory_need *need,
                         struct memory_fit *out_fit, char *why, size_t why_bytes);
/* The same against all that there is, used or not: a process that has these settings already, or
 * ends before, doesn't count. */
attn_status memory_check_at_all(const char *root, const struct memory_need *need, char *why,
                                size_t why_bytes);

#endif
