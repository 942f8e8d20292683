/* engine.h: the one thread that writes the cache and calls the backend.
 *
 * Transports push requests; the engine validates them, runs control operations itself, collects
 * steps of all workers, sequences and layers into batches, and answers each request on the
 * transport it came from. Work-conserving: an idle device gets what is queued at once, a busy one
 * lets the queue grow; there is no timer that makes a lone request wait.
 *
 * This is its life, for those who open and close it; what others may do with an open one is in
 * core/engine.h.
 */
#ifndef ATTND_DAEMON_ENGINE_ENGINE_H
#define ATTND_DAEMON_ENGINE_ENGINE_H

#include "daemon/engine/core/engine.h"

/* The limits of a cache for a device with kv_bytes of KV memory. */
struct kv_config engine_kv_config(const struct config *cfg, uint64_t kv_bytes);

/* Makes an engine without a thread; engine_start gives it one. why gets the reason of a failure.
 * Errors   ATTN_ENOMEM; ATTN_EINVAL a tier setting that cannot be met; ATTN_EINTERNAL */
attn_status engine_open(const struct engine_env *env, struct engine **out_engine, char *why,
                        size_t why_bytes);
attn_status engine_start(struct engine *e, char *why, size_t why_bytes);
/* What a predecessor left in the cache and could be taken up. */
struct engine_kept {
    uint32_t n_sequences, n_pools, n_sessions;
    uint64_t n_tokens;
    uint64_t n_dropped; /* sequences and pools that failed a check */
};
/* Takes up the pools, then the sequences and sessions of a cache that kv_open took from a
 * predecessor, with its KV memory imported by the backend. Between engine_open and engine_start.
 * Pools that can't be made again are dropped with their sequences, and logged.
 * Errors   ATTN_EDEVICE, ATTN_ENOMEM: nothing is dropped, another engine may take it up */
attn_status engine_restore_pools(struct engine *e, struct engine_kept *out_kept);
attn_status engine_restore(struct engine *e, struct engine_kept *kept);
/* One turn of the loop; false: nothing was done. Waits for work or a batch at most max_wait_ns. The
 * thread's body; tests without a thread call it themselves. */
bool engine_turn(struct engine *e, uint64_t max_wait_ns);

/* Takes over what may change while running and is not looked up when it is needed. Any thread. */
void engine_reload(struct engine *e, const struct config *cfg);

/* The first half of engine_close: all but the freeing. Engines of several cards all stop before the
 * first is freed. */
attn_status engine_stop(struct engine *e);
/* Handles messages from other cards' engines, and gives the replies that only this thread may give.
 * At every turn, and once more when all have stopped. */
void engine_take_messages(struct engine *e);
/* Answers what is left with ATTN_EDRAINING, of a lost device with ATTN_EDEVICE, stops the thread,
 * frees all. NULL is fine.
 * ATTN_ETIMEDOUT: the backend did not give its batches back in time; the engine and its buffers are
 * left as they are, and the process should end without touching the backend again. */
attn_status engine_close(struct engine *e);

#endif
