/* engine.h: the one thread that writes the cache and calls the backend.
 *
 * Transports push requests; the engine validates them, runs control operations itself, collects
 * steps of all workers, sequences and layers into batches, and answers each request on the
 * transport it came from. Work-conserving: an idle device gets what is queued at once, a busy one
 * lets the queue grow; there is no timer that makes a lone request wait.
 */
#ifndef ATTND_DAEMON_ENGINE_H
#define ATTND_DAEMON_ENGINE_H

#include "cache/kv.h"
#include "daemon/config.h"
#include "daemon/request.h"
#include "daemon/session.h"

struct engine;

/* What an engine works with: all of one device, but the sessions, which engines of several devices
 * may share. Borrowed until engine_close. */
struct engine_parts {
    const struct config *cfg;
    const struct backend_ops *ops;
    struct backend *backend; /* open */
    struct iobuf_pool *bufs;
    struct kv *kv; /* opened with engine_kv_config; the engine is its only writer */
    struct session_table *sessions;
};

/* The limits of a cache for a device with kv_bytes of KV memory. */
struct kv_config engine_kv_config(const struct config *cfg, uint64_t kv_bytes);

/* Makes an engine without a thread; engine_start gives it one. out_why gets the sentence of a
 * failure.
 * Errors   ATTN_ENOMEM */
attn_status engine_open(const struct engine_parts *parts, struct engine **out_engine, char *why,
                        size_t why_bytes);
attn_status engine_start(struct engine *e, char *why, size_t why_bytes);
/* One turn of the loop; false: nothing was done. Waits for work or a batch at most max_wait_ns. The
 * thread's body; tests without a thread call it themselves. */
bool engine_turn(struct engine *e, uint64_t max_wait_ns);

/* Hands a decoded request over. Any thread; never blocks. Over the queue bound it is answered at
 * once with ATTN_EOVERLOAD and retry-after (transport->reply runs inside the call). */
void engine_submit(struct engine *e, struct request *req);

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
};
/* p is used until engine_close. Any thread. */
void engine_poller_add(struct engine *e, struct engine_poller *p);
/* A descriptor that ends the engine's sleep each time it becomes readable; it is never read. Must
 * be unwatched before it is closed. ATTN_ENOMEM. Any thread. */
attn_status engine_watch(struct engine *e, int fd);
void engine_unwatch(struct engine *e, int fd);
/* Ends the engine's sleep, so that it polls. Any thread. */
void engine_wake(struct engine *e);

/* Takes over what may change while running: max_queue_requests and max_queue_bytes. Any thread. */
void engine_reload(struct engine *e, const struct config *cfg);

/* No new sequences, sessions or pools from now on; steps go on. Any thread, also from a signal's
 * callback. A client's drain request does the same. */
void engine_drain(struct engine *e);
bool engine_is_draining(const struct engine *e);
/* True once draining and nothing is queued or in flight. */
bool engine_is_drained(const struct engine *e);

/* ATTN_OK, or ATTN_EDEVICE once the backend has lost its device: every step is answered with it,
 * and the process should end. Any thread. */
attn_status engine_health(const struct engine *e);

/* Answers what is left with ATTN_EDRAINING, stops the thread, frees all. NULL is fine.
 * ATTN_ETIMEDOUT: the backend did not give its batches back in time; the engine and its buffers are
 * left as they are, and the process should end without touching the backend again. */
attn_status engine_close(struct engine *e);

#endif
