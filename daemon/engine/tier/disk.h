/* disk.h: the file of cache.disk_path: places for blocks, and threads that read and write them
 * past the page cache where the file system lets them (O_DIRECT).
 *
 * The file has no name from the moment it is made, so it goes with the process, whatever ends that,
 * and nothing is left to be cleared or mistaken afterwards. Its size is taken at the start where
 * the file system can do that.
 */
#ifndef ATTND_DAEMON_ENGINE_TIER_DISK_H
#define ATTND_DAEMON_ENGINE_TIER_DISK_H

#include "kernels/backend.h"

enum { TIER_DISK_ALIGN = 4096 }; /* of places, sizes and memory */

struct tier_disk;

/* Makes a file in the folder `path`. why names the setting that cannot be met. */
attn_status tier_disk_open(const char *path, uint64_t bytes, struct tier_disk **out_disk, char *why,
                           size_t why_bytes);
void tier_disk_close(struct tier_disk *d); /* when all is read and written; NULL is fine */

/* Places: tier_memory's two (cache/tier_store.h); arg is the disk. */
bool tier_disk_take(void *arg, uint64_t bytes, uint64_t *out_place);
void tier_disk_give(void *arg, uint64_t place, uint64_t bytes);
/* A place as the block number of a backend_move; bytes and n_bytes are multiples of
 * TIER_DISK_ALIGN. */
uint32_t tier_disk_block(uint64_t place);
/* As backend moves_submit, of the file: is_in is out of it, to memory. No pool, no checksum.
 * A move's status: ATTN_EINTERNAL it could not be read or written whole. */
attn_status tier_disk_submit(struct tier_disk *d, struct backend_moves *m);

#endif
