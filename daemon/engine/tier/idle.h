/* idle.h: when a pool runs out of blocks, pages those of idle sequences out to host memory
 * (cache.idle_memory), and in again when a request needs them.
 *
 * The request that has waited longest is served first. If an item needs more blocks than eviction
 * can free, idle sequences are paged out, least recently used first: first those whose layers all
 * have the same number of tokens, then those in the middle of a token, then those whose own
 * requests came later and only wait for blocks. So the oldest request always proceeds, and "out of
 * blocks" means that no sequence may go. A waiting item is in its sequence's queue; its batch goes
 * without it.
 *
 * A trailer after a block's bytes has its checksum, sequence and place. It is compared when the
 * block comes back. If it differs, the sequence is dropped; damaged data is never used.
 */
#ifndef ATTND_DAEMON_ENGINE_TIER_IDLE_H
#define ATTND_DAEMON_ENGINE_TIER_IDLE_H

#include "daemon/engine/core/effects.h"
#include "daemon/engine/core/state.h"

/* ATTN_ENOMEM, ATTN_EDEVICE: why names the setting. */
attn_status idle_init(struct engine *e, char *why, size_t why_bytes);
void idle_fini(struct engine *e); /* no move may be running; also for a half-opened engine */
/* Pages of idle memory that a block takes. */
uint32_t idle_block_pages(uint64_t block_bytes);

/* The request that needs room: its sequence and stamp. is_begun: the batch being built already has
 * items. */
struct idle_ask {
    uint32_t seq;
    uint64_t stamp;
    bool is_begun;
};
/* Makes room for n more blocks. true: not yet, ask again when a move has ended; false: there is
 * room, or there never will be. */
bool idle_makes_room(struct engine *e, struct pool *p, const struct idle_ask *a, uint64_t n);
/* The same for callers that cannot wait: returns when there is room, or no more can be made, or
 * after 5 s. */
void idle_make_room_now(struct engine *e, struct pool *p, const struct idle_ask *a, uint64_t n);
/* Brings the sequence's blocks back, a group at a time. COMES: ask again when something has come;
 * NEVER: there is no room and none can be made, see why; NEEDS_PATCHES: a batch must take the
 * pool's patches first. */
enum idle_is { IDLE_HERE, IDLE_COMES, IDLE_NEVER, IDLE_NEEDS_PATCHES };
enum idle_is idle_brings(struct engine *e, const struct idle_ask *a, char *why, size_t why_bytes);
/* Whether blocks of the sequence are in idle memory, or on their way there. */
bool idle_has(const struct engine *e, uint32_t seq);
/* Reads layers of a block from idle memory. ATTN_ENOTFOUND: it was damaged; the sequence was
 * dropped. */
attn_status idle_layers_read(struct engine *e, const struct pool *p, kv_seq_id seq, uint32_t index,
                             struct pool_layers layers, uint8_t *out, char *why, size_t why_bytes);
/* Whether no block of the pool is being paged out or in; NULL: of any pool. */
bool idle_is_drained(const struct engine *e, const struct pool *p);
void idle_publish(struct engine *e);

#endif
