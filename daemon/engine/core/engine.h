/* core/engine.h: an engine as the rest of the daemon sees it: its environment, and calls to submit
 * requests, to poll, and to drain. Opening and closing one is in engine/engine.h.
 */
#ifndef ATTND_DAEMON_ENGINE_CORE_ENGINE_H
#define ATTND_DAEMON_ENGINE_CORE_ENGINE_H

#include "cache/kv.h"
#include "daemon/config/config.h"
#include "daemon/request/request.h"
#include "daemon/request/session.h"
#include "daemon/request/tenant.h"

struct engine;
struct idle_memory;
struct peers;
struct settings;

/* What an engine works with; all of it belongs to one device. Borrowed until engine_close. */
struct engine_env {
    const struct config *cfg;
    const struct backend_ops *ops;
    struct backend *backend; /* open */
    struct iobuf_pool *bufs;
    struct kv *kv; /* opened with engine_kv_config; the engine is its only writer */
    struct session_table *sessions;
    struct tenants *tenants; /* NULL: clients need not identify themselves */
    bool is_kept; /* a successor will take up the cache */
    struct settings *settings; /* what operators may change; NULL: none */
    struct peers *peers; /* all engines of the daemon; NULL: it is the only one */
    uint32_t card; /* device index; 0 is the primary */
    const struct idle_memory *idle; /* the memory of idle sequences, as kv has it; NULL: none */
};

/* --- requests --------------------------------------------------------------------------------- */

/* Hands a decoded request over. Any thread; never blocks. Over the queue bound it is answered at
 * once with ATTN_EOVERLOAD and retry-after (transport->reply runs inside the call). */
void engine_submit(struct engine *e, struct request *req);
/* Renews the lease of a session whose request the transport refuses; 0: none. Any thread. */
void engine_renew(struct engine *e, uint64_t session);

/* --- pollers ---------------------------------------------------------------------------------- */

/* A source of requests that is polled on the engine's own thread, such as rings in shared memory.
 * All callbacks run on that thread; poll passes requests to engine_submit. */
struct engine_poller {
    struct engine_poller *next; /* for the engine's list */
    /* Returns whether it found work. Called every turn, and without pause while the engine
     * spins. */
    bool (*poll)(struct engine_poller *p);
    /* The engine is about to sleep: from now on new work must make a watched descriptor readable.
     * false: there is work already. */
    bool (*may_sleep)(struct engine_poller *p);
    void (*awake)(struct engine_poller *p); /* after each may_sleep: no wake-ups needed now */
    /* The longest that the engine may sleep while work can arrive without waking it; 0: not at all.
     * NULL: no limit. */
    uint64_t (*nap_ns)(struct engine_poller *p);
};
/* Adds a poller, which must live until engine_close. Any thread. */
void engine_poller_add(struct engine *e, struct engine_poller *p);
/* A descriptor that ends the engine's sleep each time it becomes readable; it is never read. Must
 * be unwatched before it is closed. ATTN_ENOMEM. Any thread. */
attn_status engine_watch(struct engine *e, int fd);
void engine_unwatch(struct engine *e, int fd);
/* Ends the engine's sleep, so that it polls. Any thread. */
void engine_wake(struct engine *e);

/* A lane's bell does not wake engines, so the engines of its layers stay awake this long after the
 * last bell. */
static const uint64_t LANE_SOON_NS = 10 * 1000 * 1000;

/* --- operating -------------------------------------------------------------------------------- */

/* Replaces the tenants; takes ownership of now. Sessions, sequences and pools of tenants that are
 * not among them end. NULL, if there are no tenants, changes nothing. Any thread. */
void engine_take_tenants(struct engine *e, struct tenants *now);

/* Refuses new sequences, sessions and pools from now on; steps go on. For hold_us, sequences hold
 * the drain up, so that they can move away, and operators get sessions; 0: they do not. Any thread,
 * also from a signal's callback. A client's drain request does the same. */
void engine_drain(struct engine *e, uint64_t hold_us);
bool engine_is_draining(const struct engine *e);
/* Whether sequences hold the drain up. Any thread. */
bool engine_is_held(const struct engine *e);
/* Also refuses tokens that no layer of their sequence has yet; a token that has begun may be
 * finished. Any thread. */
void engine_end_tokens(struct engine *e);
/* True once draining, not held, and nothing is queued or in flight, and no sequence is in the
 * middle of a token whose worker has been silent for less than engine.token_timeout. Any thread. */
bool engine_is_drained(const struct engine *e);
/* Whether every request submitted has been answered. Any thread. */
bool engine_is_idle(const struct engine *e);

/* ATTN_OK, or ATTN_EDEVICE once the backend has lost its device: every step is then refused with
 * it, and the process should end. If other cards are left, they go on, and this card's sequences
 * are no longer found. Any thread. */
attn_status engine_health(const struct engine *e);

#endif
