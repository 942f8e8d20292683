/* resize.h: pools that are given more blocks, or fewer, while they are used. */
#ifndef ATTND_DAEMON_ENGINE_POOL_RESIZE_H
#define ATTND_DAEMON_ENGINE_POOL_RESIZE_H

#include "daemon/engine/core/state.h"

/* The pool has so many blocks then, on every card. It stays where it is, and so does every sequence
 * in it: fewer blocks come of evicting what is cached and moving what is not, more where memory
 * behind it is free. Waits for batches of the pool, and for blocks of it that are on their way.
 * Errors   nothing changed: ATTN_EINVAL n_blocks is 0; ATTN_ENOBLOCKS more are in use, or pinned;
 *          ATTN_ENOMEM there is no room behind it; ATTN_EQUOTA its tenant's blocks; ATTN_EOVERLOAD
 *          blocks of it are on their way; ATTN_EDEVICE. why names field and value, and where each
 *          of several devices has its own which one */
attn_status pool_resize(struct engine *e, struct pool *p, uint32_t n_blocks, char *why,
                        size_t why_bytes);

/* The device and the cache have given it so many: what the engine and others know of it follows. */
void pool_note_size(struct engine *e, struct pool *p, uint32_t n_blocks, uint32_t row_blocks,
                    uint32_t n_moved);

#endif
