/* engine.h: the one thread that writes the cache and calls the backend.
 *
 * Transports push requests; the engine validates them, runs control operations itself, collects
 * steps of all workers, sequences and layers into batches, and answers each request on the
 * transport it came from. Work-conserving: an idle device gets what is queued at once, a busy one
 * lets the queue grow; there is no timer that makes a lone request wait.
 */
#ifndef ATTND_DAEMON_ENGINE_ENGINE_H
#define ATTND_DAEMON_ENGINE_ENGINE_H

#include "cache/kv.h"
#include "daemon/config/config.h"
#include "daemon/request/request.h"
#include "daemon/request/session.h"
#include "daemon/request/tenant.h"

struct engine;
struct lane;
struct peers;

/* What an engine works with: all of one device. Borrowed until engine_close. */
struct idle_memory;
struct engine_parts {
    const struct config *cfg;
    const struct backend_ops *ops;
    struct backend *backend; /* open */
    struct iobuf_pool *bufs;
    struct kv *kv; /* opened with engine_kv_config; the engine is its only writer */
    struct session_table *sessions;
    struct tenants *tenants; /* NULL: nobody is asked who he is */
    bool is_kept; /* a successor will take up the cache */
    struct settings *settings; /* what operators may change; NULL: nothing */
    struct peers *peers; /* all engines of the daemon; NULL: it is the only one */
    uint32_t card; /* which it is of them; 0 is the lead */
    const struct idle_memory *idle; /* as kv knows of it; NULL: none */
};

/* The limits of a cache for a device with kv_bytes of KV memory. */
struct kv_config engine_kv_config(const struct config *cfg, uint64_t kv_bytes);

/* Makes an engine without a thread; engine_start gives it one. why gets the sentence of a failure.
 * Errors   ATTN_ENOMEM; ATTN_EINVAL a setting of the tiers that can't be had; ATTN_EINTERNAL */
attn_status engine_open(const struct engine_parts *parts, struct engine **out_engine, char *why,
                        size_t why_bytes);
attn_status engine_start(struct engine *e, char *why, size_t why_bytes);
/* What a predecessor left in the cache and could be taken up. */
struct engine_kept {
    uint32_t n_sequences, n_pools, n_sessions;
    uint64_t n_tokens;
    uint64_t n_dropped; /* sequences and pools that failed a check */
};
/* Takes up the pools, then the sequences and sessions of a cache that kv_open took from a
 * predecessor, whose KV memory the backend has imported. Between engine_open and engine_start.
 * Pools that can't be made again are dropped with their sequences, and logged.
 * Errors   ATTN_EDEVICE, ATTN_ENOMEM: nothing is dropped, another engine may take it up */
attn_status engine_restore_pools(struct engine *e, struct engine_kept *out_kept);
attn_status engine_restore(struct engine *e, struct engine_kept *kept);
/* One turn of the loop; false: nothing was done. Waits for work or a batch at most max_wait_ns. The
 * thread's body; tests without a thread call it themselves. */
bool engine_turn(struct engine *e, uint64_t max_wait_ns);

/* Hands a decoded request over. Any thread; never blocks. Over the queue bound it is answered at
 * once with ATTN_EOVERLOAD and retry-after (transport->reply runs inside the call). */
void engine_submit(struct engine *e, struct request *req);
/* Renews the lease of the session that a request names which its transport refuses; 0: none. Any
 * thread. */
void engine_renew(struct engine *e, uint64_t session);

/* Something that brings requests on the engine's own thread: rings in shared memory. poll and the
 * others run on the engine thread; poll hands requests to engine_submit. */
struct engine_poller {
    struct engine_poller *next; /* the engine's */
    /* true: there was something. Called at every turn, and without pause while the engine spins. */
    bool (*poll)(struct engine_poller *p);
    /* The engine is about to sleep: who brings something from now on must make a watched descriptor
     * readable. false: something is there already. */
    bool (*may_sleep)(struct engine_poller *p);
    void (*awake)(
        struct engine_poller *p); /* after each may_sleep: nobody needs to do so any more */
    /* How long the engine may sleep at most, though what it waits for cannot wake it; 0: not at
     * all. NULL: as long as it likes. */
    uint64_t (*nap_ns)(struct engine_poller *p);
};
/* p is used until engine_close. Any thread. */
void engine_poller_add(struct engine *e, struct engine_poller *p);
/* A descriptor that ends the engine's sleep each time it becomes readable; it is never read. Must
 * be unwatched before it is closed. ATTN_ENOMEM. Any thread. */
attn_status engine_watch(struct engine *e, int fd);
void engine_unwatch(struct engine *e, int fd);
/* Ends the engine's sleep, so that it polls. Any thread. */
void engine_wake(struct engine *e);

/* The bell of a lane wakes no engine: for so long after the last one the engines of its layers do
 * not sleep. */
static const uint64_t LANE_SOON_NS = 10 * 1000 * 1000;

/* A lane whose plans may come from now on, until it is removed. The engine's thread. */
void engine_lane_add(struct engine *e, struct lane *l);
void engine_lane_remove(struct lane *l);

/* Takes over what may change while running and is not looked up when it is needed. Any thread. */
void engine_reload(struct engine *e, const struct config *cfg);

/* Another file of tenants, whose sessions, sequences and pools end if they are not in it; it is the
 * engine's from now on. NULL, where there are no tenants, changes nothing. Any thread. */
void engine_take_tenants(struct engine *e, struct tenants *now);

/* No new sequences, sessions or pools from now on; steps go on. Any thread, also from a signal's
 * callback. A client's drain request does the same. */
void engine_drain(struct engine *e);
bool engine_is_draining(const struct engine *e);
/* Nor a token that no layer of its sequence has; tokens that are begun may still be finished. Any
 * thread. */
void engine_end_tokens(struct engine *e);
/* True once draining and nothing is queued or in flight, and no sequence is in the middle of a
 * token whose worker has been silent for less than engine.token_timeout. Any thread. */
bool engine_is_drained(const struct engine *e);
/* Every request handed over has been answered. Any thread. */
bool engine_is_idle(const struct engine *e);

/* ATTN_OK, or ATTN_EDEVICE once the backend has lost its device: every step is answered with it,
 * and the process should end. Where other cards are left they go on, and this card's sequences are
 * not found any more. Any thread. */
attn_status engine_health(const struct engine *e);

/* The first half of engine_close: all but the freeing. Engines of several cards all stop before the
 * first is freed. */
attn_status engine_stop(struct engine *e);
/* What engines of other cards have told this one, and their replies that only its thread may give:
 * at every turn, and once more when all have stopped. */
void engine_hear(struct engine *e);
/* Answers what is left with ATTN_EDRAINING, of a lost device with ATTN_EDEVICE, stops the thread,
 * frees all. NULL is fine.
 * ATTN_ETIMEDOUT: the backend did not give its batches back in time; the engine and its buffers are
 * left as they are, and the process should end without touching the backend again. */
attn_status engine_close(struct engine *e);

#endif
