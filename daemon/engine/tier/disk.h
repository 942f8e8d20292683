/* disk.h: the file of cache.disk_path: places for blocks, and threads that read and write them,
 * past the page cache if the file system allows it (O_DIRECT).
 *
 * The file has no name once it is made, so it goes with the process, however that ends, and nothing
 * is left over. Its space is allocated at the start if the file system can do that.
 */
#ifndef ATTND_DAEMON_ENGINE_TIER_DISK_H
#define ATTND_DAEMON_ENGINE_TIER_DISK_H

#include "kernels/backend.h"

enum { TIER_DISK_ALIGN = 4096 }; /* alignment of places, sizes and memory */

struct tier_disk;

/* Makes a file of that size in the folder `path`. ATTN_EINVAL: why names the setting that cannot be
 * met; ATTN_ENOMEM. */
attn_status tier_disk_open(const char *path, uint64_t bytes, struct tier_disk **out_disk, char *why,
                           size_t why_bytes);
void tier_disk_close(struct tier_disk *d); /* no move may be running; NULL is fine */

/* Allocate places in the file: callbacks of tier_memory (cache/tier_store.h); arg is the disk. */
bool tier_disk_take(void *arg, uint64_t bytes, uint64_t *out_place);
void tier_disk_give(void *arg, uint64_t place, uint64_t bytes);
/* A place as the block number of a backend_move. A move's bytes and n_bytes must be multiples of
 * TIER_DISK_ALIGN. */
uint32_t tier_disk_block(uint64_t place);
/* Like backend moves_submit, between the file and memory; is_in: from the file. No pool, no
 * checksum. A move's status is ATTN_EINTERNAL if it was not read or written whole. */
attn_status tier_disk_submit(struct tier_disk *d, struct backend_moves *m);

#endif
