/* idle.h: blocks of idle sequences make way for others when blocks run out, to host memory
 * (cache.idle_memory), and come back when a request needs them.
 *
 * The request that has waited longest is served first. For an item that wants more blocks than can
 * be had, even by eviction, idle sequences are paged out, the least recently used first: those
 * whose layers have equally many tokens before those in the middle of one; and, if there are none
 * left, those whose requests came later and only wait for blocks themselves. So the oldest request
 * always gets on, and "out of blocks" is said when nothing may go any more. Whoever waits is in its
 * sequence's queue; its batch goes without it.
 *
 * Behind a block's bytes stands what they are: checksum, sequence and place. It is compared when
 * they are back; what differs costs the sequence, and is never served.
 */
#ifndef ATTND_DAEMON_ENGINE_TIER_IDLE_H
#define ATTND_DAEMON_ENGINE_TIER_IDLE_H

#include "daemon/engine/core/effects.h"
#include "daemon/engine/core/state.h"

/* ATTN_ENOMEM, ATTN_EDEVICE: why names the setting. */
attn_status idle_init(struct engine *e, char *why, size_t why_bytes);
void idle_fini(struct engine *e); /* when all is back; of a half-opened engine, too */
/* Pages that a block takes. */
uint32_t idle_block_pages(uint64_t block_bytes);

/* The request that needs room: its stamp and sequence. is_begun: some of its items are in a batch
 * being built */
struct idle_ask {
    uint32_t seq;
    uint64_t stamp;
    bool is_begun;
};
/* Makes room for n more blocks. true: not yet, ask again when a move has ended; false: there is
 * room, or there never will be. */
bool idle_makes_room(struct engine *e, struct pool *p, const struct idle_ask *a, uint64_t n);
/* The same for callers that cannot wait; returns when no more room can be made. */
void idle_make_room_now(struct engine *e, struct pool *p, const struct idle_ask *a, uint64_t n);
/* Brings the sequence's blocks back, a group at a time. COMES: ask again when something has come;
 * NEVER: there is no room for them, and none can be made: why says so; NEEDS_PATCHES: a batch must
 * take the pool's patches first. */
enum idle_is { IDLE_HERE, IDLE_COMES, IDLE_NEVER, IDLE_NEEDS_PATCHES };
enum idle_is idle_brings(struct engine *e, const struct idle_ask *a, char *why, size_t why_bytes);
/* Blocks of the sequence are there, or on their way there. */
bool idle_has(const struct engine *e, uint32_t seq);
/* Reads layers of a block from idle memory. Also ATTN_ENOTFOUND: its bytes are not as they were put
 * there; the sequence is dropped. */
attn_status idle_layers_read(struct engine *e, const struct pool *p, kv_seq_id seq, uint32_t index,
                             struct pool_layers layers, uint8_t *out, char *why, size_t why_bytes);
/* Nothing of the pool is on its way; NULL: of any. */
bool idle_is_drained(const struct engine *e, const struct pool *p);
void idle_publish(struct engine *e);

#endif
