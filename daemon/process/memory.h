/* memory.h: how much memory this process may still take: what the machine has, and what the control
 * groups that it is in allow. Asked once, at start, so that too large settings are a sentence and
 * not a kill later. */
#ifndef ATTND_DAEMON_PROCESS_MEMORY_H
#define ATTND_DAEMON_PROCESS_MEMORY_H

#include <stddef.h>
#include <stdint.h>

#include "proto/attn_types.h"

/* Of the machine or one control group, whichever leaves least. */
struct memory_room {
    uint64_t free_bytes, limit_bytes; /* UINT64_MAX: nothing says */
    char what[256]; /* "MemAvailable of this machine", or the file that has the limit */
};

/* root: "" for the real one; tests give a directory that has proc/ and sys/. Version 2's
 * memory.max and version 1's memory.limit_in_bytes, of this process's group and of all above it.
 * Page cache that can be dropped counts as free. */
void memory_room_read(const char *root, struct memory_room *out);

/* kv_bytes of host memory (0: a device has its own), io_bytes, tier_bytes of evicted blocks, and
 * what the process needs beside them, fit. ATTN_ENOMEM: why names all sizes and settings. */
attn_status memory_check(const char *root, uint64_t kv_bytes, uint64_t io_bytes,
                         uint64_t tier_bytes, char *why, size_t why_bytes);

#endif
