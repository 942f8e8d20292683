/* core/engine.h: an engine as all others see it, those who hand requests over and those who ask how
 * it is; and what it works with. Opening and closing one is in engine/engine.h.
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

/* What an engine works with: all of one device. Borrowed until engine_close. */
struct engine_env {
    const struct config *cfg;
    const struct backend_ops *ops;
    struct backend *backend; /* open */
    struct iobuf_pool *bufs;
    struct kv *kv; /* opened with engine_kv_config; the engine is its only writer */
    struct session_table *sessions;
    struct tenants *tenants; /* NULL: clients are not asked who they are */
    bool is_kept; /* a successor will take up the cache */
    struct settings *settings; /* what operators may change; NULL: nothing */
    struct peers *peers; /* all engines of the daemon; NULL: it is the only one */
    uint32_t card; /* its index; 0 is the primary */
    const struct idle_memory *idle; /* as kv knows of it; NULL: none */
};

/* --- requests --------------------------------------------------------------------------------- */

/* Hands a decoded request over. Any thread; never blocks. Over the queue bound it is answered at
 * once with ATTN_EOVERLOAD and retry-after (transport->reply runs inside the call). */
void engine_submit(struct engine *e, struct request *req);
/* Renews the lease of the session that a request names which its transport refuses; 0: none. Any
 * thread. */
void engine_renew(struct engine *e, uint64_t session);

/* --- pollers ---------------------------------------------------------------------------------- */

/* Something that brings requests on the engine's own thread: rings in shared memory. poll and the
 * others run on the engine thread; poll hands requests to engine_submit. */
struct engine_poller {
    struct engine_poller *next; /* the engine's */
    /* true: there was something. Called at every turn, and without pause while the engine spins. */
    bool (*poll)(struct engine_poller *p);
    /* The engine is about to sleep: from now on new work must make a watched descriptor readable.
     * false: there is work already. */
    bool (*may_sleep)(struct engine_poller *p);
    void (*awake)(
        struct engine_poller *p); /* after each may_sleep: no wake-up is needed any more */
    /* The longest that the engine may sleep while work can arrive without waking it; 0: not at all.
     * NULL: no limit. */
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

/* --- operating -------------------------------------------------------------------------------- */

/* Another file of tenants; sessions, sequences and pools of tenants that are not in it end; it is
 * the engine's from now on. NULL, where there are no tenants, changes nothing. Any thread. */
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

#endif
