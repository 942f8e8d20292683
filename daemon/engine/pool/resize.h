/* resize.h: gives a pool more or fewer blocks while it is used. Engine thread. */
#ifndef ATTND_DAEMON_ENGINE_POOL_RESIZE_H
#define ATTND_DAEMON_ENGINE_POOL_RESIZE_H

#include "daemon/engine/core/state.h"

/* Sets the pool's number of blocks on every card. The pool stays where it is and keeps all
 * sequences: to shrink, it evicts cached blocks and moves blocks in use; to grow, it needs free
 * memory behind it. Waits for the pool's batches and for its blocks that are being moved.
 * Errors   nothing changed: ATTN_EINVAL n_blocks is 0; ATTN_ENOBLOCKS more are in use, or pinned;
 *          ATTN_ENOMEM no room behind it; ATTN_EQUOTA its tenant's blocks; ATTN_EOVERLOAD its
 *          blocks are being moved; ATTN_EDEVICE. why names field and value, and the card if each
 *          has a pool of its own */
attn_status pool_resize(struct engine *e, struct pool *p, uint32_t n_blocks, char *why,
                        size_t why_bytes);

/* Updates the engine's own and published data after the device and the cache have resized the
 * pool. */
void pool_note_size(struct engine *e, struct pool *p, uint32_t n_blocks, uint32_t row_blocks,
                    uint32_t n_moved);

#endif
