/* transport.h: how requests of workers come in and replies go back: a table of functions for each
 * scheme of addresses. transport/sp.c and transport/shm.c end with theirs.
 *
 * A life: open, serve, stop, then (once the engine has given back every request) hang_up until it
 * says true or patience ends, close. Everything a transport borrows is its env's, which outlives
 * the loop's last close callback; what it allocates is its own, and goes with that callback.
 */
#ifndef ATTND_DAEMON_TRANSPORT_TRANSPORT_H
#define ATTND_DAEMON_TRANSPORT_TRANSPORT_H

#include "daemon/base/stats.h"
#include "daemon/config/config.h"

struct backend;
struct backend_ops;
struct engine;
struct iobuf_pool;
struct request;
struct share_table;
struct uv_loop_s;

/* What transports live on; one for all of them. loop and cfg are there when a transport is opened,
 * all else before the loop first runs. */
struct transport_env {
    struct uv_loop_s *loop;
    const struct config *cfg;
    const struct backend_ops *backend_ops;
    struct backend *backend;
    struct engine *engine; /* not touched after engine_close */
    struct iobuf_pool *bufs;
    struct share_table *shares;
    /* the transports' own, on the loop's thread */
    uint32_t n_peers; /* connected, of all transports */
    uint64_t shared_bytes; /* of listen.shm_memory, in use */
    uint64_t arriving_bytes; /* of bufs, held by large messages that are not complete */
};

struct transport {
    const struct transport_ops *ops; /* first member of what a transport allocates */
};

#define TRANSPORT_GPU_SCHEME "gpu://" /* hello names its url */

/* Every request that a transport submits has its principal set.
 *
 * Unless said otherwise: on the loop's thread, never blocks. */
struct transport_ops {
    const char *scheme; /* "ipc://": the beginning of its urls */
    enum stats_transport label; /* of its histograms */
    bool is_polled; /* reply is for the thread of the engine that polls it alone */
    bool is_admin; /* who can connect may do what changes the daemon for everybody */

    /* Listens at url and serves from the loop's next turn on. A stale socket file is replaced, a
     * live one is an error; its mode is 0660. May block for the moment that making the file takes.
     * On failure nothing is left to tear down but handles that the loop still has to close. why
     * gets url and reason: ATTN_EINVAL the address, ATTN_ENOMEM. */
    attn_status (*open)(struct transport_env *env, const char *url, struct transport **out_t,
                        char *why, size_t why_bytes);
    /* Where it listens: as given, but with the port that was taken where 0 was asked for. */
    const char *(*url)(const struct transport *t);
    /* Accepts nobody and takes no requests from now on; those taken are still answered. Before
     * engine_close; may be repeated. */
    void (*stop)(struct transport *t);
    /* No reply is owed to any peer and none is waiting to be written. */
    bool (*is_idle)(const struct transport *t);
    /* After stop and engine_close: once idle, ends our side of every connection. True: all peers
     * have ended theirs, as they do when they have read everything. libnanomsg forgets replies that
     * it has not handed out yet when a connection is closed under it. Call again until true. */
    bool (*hang_up)(struct transport *t);
    /* Closes all peers, stops first if nobody has. Only after engine_close: by then the engine has
     * given back every request. t is gone for the caller; its memory goes with the loop's last
     * close callback. */
    void (*close)(struct transport *t);

    /* Reads its files again, for connections that come from now on. ATTN_EINVAL, ATTN_ENOMEM: why
     * says which and why not, and all stays as it is. NULL: it has none. Any thread, before
     * stop. */
    attn_status (*reload)(struct transport *t, const struct config *cfg, char *why,
                          size_t why_bytes);

    /* Takes the request back with req->reply filled (a whole message). On the engine's thread, or
     * inside engine_submit on the caller's. */
    void (*reply)(struct request *req);
};

/* transport/sp.c */
extern const struct transport_ops transport_ipc_ops, transport_tcp_ops, transport_tls_ops,
    transport_admin_ops;
extern const struct transport_ops transport_shm_ops; /* transport/shm.c */
extern const struct transport_ops transport_gpu_ops; /* transport/gpu.c */

/* The table for a url's scheme; NULL: none has it. */
const struct transport_ops *transport_find(const char *url);

#endif
