/* engine.h: opens, runs and closes an engine: the one thread that writes a device's cache and calls
 * its backend.
 *
 * Transports submit requests; the engine validates them, runs control requests itself, collects
 * steps of all workers, sequences and layers into batches, and answers each request on its
 * transport. It is work-conserving: an idle device gets what is queued at once, a busy one lets the
 * queue grow; no timer delays a lone request.
 *
 * What others may do with an open engine is in core/engine.h.
 */
#ifndef ATTND_DAEMON_ENGINE_ENGINE_H
#define ATTND_DAEMON_ENGINE_ENGINE_H

#include "daemon/engine/core/engine.h"

/* Limits of a cache for a device with kv_bytes of KV memory. */
struct kv_config engine_kv_config(const struct config *cfg, uint64_t kv_bytes);
/* The most that an engine's own tables take, beside the cache's. */
uint64_t engine_table_bytes(const struct config *cfg);

/* Opens an engine without a thread; engine_start gives it one. why gets the reason of a failure.
 * Errors   ATTN_ENOMEM; ATTN_EINVAL a tier setting that cannot be met; ATTN_EINTERNAL */
attn_status engine_open(const struct engine_env *env, struct engine **out_engine, char *why,
                        size_t why_bytes);
attn_status engine_start(struct engine *e, char *why, size_t why_bytes);
/* What a predecessor left in the cache and was restored. */
struct engine_kept {
    uint32_t n_sequences, n_pools, n_sessions;
    uint64_t n_tokens;
    uint64_t n_dropped; /* sequences and pools that failed a check */
};
/* Restore the pools, then the sequences and sessions, of a cache that kv_open took over from a
 * predecessor, with its KV memory imported by the backend. Between engine_open and engine_start.
 * Pools that can't be made again are dropped with their sequences, and logged.
 * Errors   ATTN_EDEVICE, ATTN_ENOMEM: nothing is dropped, another engine may restore it */
attn_status engine_restore_pools(struct engine *e, struct engine_kept *out_kept);
attn_status engine_restore(struct engine *e, struct engine_kept *kept);
/* One turn of the loop; waits at most max_wait_ns for work or a batch. false: nothing was done. The
 * engine's thread calls it; tests without a thread call it themselves. */
bool engine_turn(struct engine *e, uint64_t max_wait_ns);

/* Applies changed settings that the engine keeps a copy of. Any thread. */
void engine_reload(struct engine *e, const struct config *cfg);

/* The first half of engine_close: everything but freeing. With several cards, all engines stop
 * before the first is freed. */
attn_status engine_stop(struct engine *e);
/* Handles messages from other engines, and sends replies that only this thread may send. Called
 * every turn, and once more when all engines have stopped. */
void engine_take_messages(struct engine *e);
/* Answers what is left with ATTN_EDRAINING (ATTN_EDEVICE if the device is lost), stops the thread,
 * frees everything. NULL is fine.
 * ATTN_ETIMEDOUT: the backend did not give its batches back in time. The engine and its buffers
 * stay as they are; the process should end without using the backend again. */
attn_status engine_close(struct engine *e);

#endif
