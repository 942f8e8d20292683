/* idle.h: when a pool runs out of blocks, pages those of idle sequences out to host memory
 * (cache.idle_memory), and in again when a request needs them.
 *
 * The request that has waited longest is served first. If an item needs more blocks than eviction
 * can free, idle sequences are paged out, least recently used first: first those whose layers all
 * have the same number of tokens, then those in the middle of a token, then blocks of the item's
 * own sequence that it can do without (hot.h), then those whose own requests came later and only
 * wait for blocks. So the oldest request always proceeds, and "out of blocks" means that no
 * sequence may go. A waiting item is in its sequence's queue; its batch goes without it. Of a
 * sequence whose steps choose blocks those go that were not chosen for the longest time, and leave
 * summaries; then the move ends when both bytes and summaries are there.
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
    /* Of an item that can go by summaries (summaries.h) of its sequence's blocks: not 0 for the
     * [n_needs] entries of the table that must be there; the others may make way for it. NULL: all
     * must be there */
    const uint8_t *needs;
    uint32_t n_needs;
};
/* Makes room for n more blocks. true: not yet, ask again when a move has ended; false: there is
 * room, or there never will be. */
bool idle_makes_room(struct engine *e, struct pool *p, const struct idle_ask *a, uint64_t n);
/* The same for callers that cannot wait: returns when there is room, or no more can be made, or
 * after 5 s. */
void idle_make_room_now(struct engine *e, struct pool *p, const struct idle_ask *a, uint64_t n);
/* Brings the sequence's blocks back that must be there, a group at a time; of an item with needs
 * those that have no summary come, too, and may go again. COMES: ask again when something has come;
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
/* A batch has taken the pool's copies, or has come back or was refused: those of blocks that go may
 * be among them. */
void idle_copies_sent(struct engine *e, const struct batch *b);
void idle_copies_came(struct engine *e, const struct batch *b, attn_status st);
/* The pool whose next batch is waited for, though it has no items; NULL: none. */
struct pool *idle_waits_for_batch(const struct engine *e);
/* For callers that launch no batch: blocks that go leave no summaries. */
void idle_hurry(struct engine *e);
/* Whether no block of the pool is being paged out or in; NULL: of any pool. */
bool idle_is_drained(const struct engine *e, const struct pool *p);
void idle_publish(struct engine *e);

#endif
