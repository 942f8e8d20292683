/* canary_watch.h: the canary: of live items, one in stats.canary is computed again by the float64
 * reference. An item is chosen when its batch has come back. Its K and V are copied while the
 * engine is idle, a block at a time, and a thread of its own compares. So no batch waits for it; if
 * the sequence changes before the copy is complete, the item is dropped.
 *
 * An output that is beyond its bound is computed again, from the q that was kept, in a batch of its
 * own: only if that one is beyond it, too, the device is said to compute wrong. All on the engine's
 * thread, except for the judge.
 */
#ifndef ATTND_DAEMON_ENGINE_STEP_CANARY_WATCH_H
#define ATTND_DAEMON_ENGINE_STEP_CANARY_WATCH_H

#include "daemon/engine/core/state.h"
#include "daemon/engine/step/canary.h"

enum { CANARY_FREE, CANARY_READING, CANARY_JUDGING, CANARY_DOUBTED, CANARY_REPEATING };

/* The item being checked. */
struct canary_watch {
    /* CANARY_JUDGING: item and verdict are the judge's to write */
    _Atomic int state;
    uint64_t n_since; /* items since the last chosen one */
    uint64_t chance;
    struct canary item;
    uint32_t seq, tenant, epoch;
    uint64_t name;
    char pool_name[KV_NAME_BYTES];
    uint32_t n_taken; /* blocks copied */
    bool is_written; /* what the item saw may have been, since its blocks were copied */
    bool is_again; /* the output is that of the second time */
    struct canary_verdict verdict; /* the last */
    /* memory for the second time: queries, then out, then lse; of the pool's backend */
    struct pool *pool;
    uint8_t *memory;
    size_t memory_bytes, out_at, lse_at;
    uint64_t block_bytes;
    uint8_t *block;
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t wake;
    bool has_thread, is_ending;
};

attn_status canary_open(struct engine *e); /* ATTN_ENOMEM */
uint64_t canary_most_bytes(void); /* what the copies of an item take at most */
/* May choose an item of a batch that succeeded and is not answered yet. */
void canary_choose(struct engine *e, const struct batch *b);
/* Call before tokens from pos on are written in this layer of the sequence: drops the chosen item
 * if it saw them, or what it would compute again. */
void canary_forget(struct engine *e, uint32_t seq, uint32_t layer, uint32_t pos);
/* Copies a block. Call it while the engine is idle and nothing is in flight. true: did something,
 * call it again. */
bool canary_work(struct engine *e);
/* What was computed again (canary_repeat.h) has come back. */
void canary_repeated(struct engine *e, attn_status st);
/* The item's block table; NULL: its sequence has changed. */
const uint32_t *canary_table(struct engine *e, const struct canary_watch *w,
                             struct pool **out_pool);
/* Ends with what is doubted: it can't be computed again, or that failed. Frees w->memory. */
void canary_leave(struct canary_watch *w, const char *why);
/* Ends the thread. Does nothing if there is no canary. */
void canary_close(struct engine *e);

#endif
