/* canary_watch.h: the canary: of live items one in stats.canary is computed again by the float64
 * reference. An item is chosen when its batch has come back; its K and V are copied while the
 * engine is idle, a block at a time; a thread of its own compares. So no batch waits for it, and
 * what changes before the engine is idle is not looked at. All but the judge is the engine
 * thread's.
 */
#ifndef ATTND_DAEMON_ENGINE_STEP_CANARY_WATCH_H
#define ATTND_DAEMON_ENGINE_STEP_CANARY_WATCH_H

#include "daemon/engine/core/state.h"
#include "daemon/engine/step/canary.h"

enum { CANARY_FREE, CANARY_READING, CANARY_JUDGING };

/* The item that is looked at. */
struct canary_watch {
    _Atomic int state; /* CANARY_JUDGING: all below belongs to the thread, except the counts */
    uint64_t n_since; /* items since the last that was chosen */
    uint64_t chance;
    struct canary item;
    uint32_t seq, tenant, epoch;
    uint64_t name;
    char pool_name[KV_NAME_BYTES];
    uint32_t n_taken; /* blocks */
    uint64_t block_bytes;
    uint8_t *block;
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t wake;
    bool has_thread, is_ending;
};

attn_status canary_open(struct engine *e); /* ATTN_ENOMEM */
/* A batch came back whole, and its items are not answered yet. */
void canary_choose(struct engine *e, const struct batch *b);
/* Tokens from pos on will be written in this layer of the sequence. */
void canary_forget(struct engine *e, uint32_t seq, uint32_t layer, uint32_t pos);
/* The engine is idle, and nothing is in flight. true: something was done, look again. */
bool canary_work(struct engine *e);
/* Ends the thread. Of an engine without a canary, too. */
void canary_close(struct engine *e);

#endif
