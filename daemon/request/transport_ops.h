/* transport_ops.h: how requests of workers come in and replies go back: the table of functions that
 * each transport fills in, and that a request carries to find its way back.
 *
 * A life: open, serve, stop, then (once the engine has given back every request) hang_up until it
 * says true or patience ends, close.
 */
#ifndef ATTND_DAEMON_REQUEST_TRANSPORT_OPS_H
#define ATTND_DAEMON_REQUEST_TRANSPORT_OPS_H

#include "daemon/base/stats.h"
#include "proto/attn_types.h"

struct config;
struct request;
struct transport;
struct transport_env; /* transport/transport.h */

#define TRANSPORT_GPU_SCHEME "gpu://" /* hello names its url */

/* Every request that a transport submits has its principal set.
 *
 * Unless said otherwise: on the loop's thread, never blocks. */
struct transport_ops {
    const char *scheme; /* "ipc://": the beginning of its urls */
    enum stats_transport label; /* of its histograms */
    bool is_polled; /* reply is for the thread of the engine that polls it alone */
    bool is_admin; /* its clients may change the daemon for all */

    /* Listens at url and serves from the loop's next turn on. A stale socket file is replaced, a
     * live one is an error; its mode is 0660. May block for the moment that making the file takes.
     * On failure nothing is left to tear down but handles that the loop still has to close. why
     * gets url and reason: ATTN_EINVAL the address, ATTN_ENOMEM. */
    attn_status (*open)(struct transport_env *env, const char *url, struct transport **out_t,
                        char *why, size_t why_bytes);
    /* Where it listens: as given, but with the port that was taken where 0 was asked for. */
    const char *(*url)(const struct transport *t);
    /* Accepts no connections and takes no requests from now on; those taken are still answered.
     * Before engine_close; may be repeated. */
    void (*stop)(struct transport *t);
    /* No reply is owed to any peer and none is waiting to be written. */
    bool (*is_idle)(const struct transport *t);
    /* After stop and engine_close: once idle, ends our side of every connection. True: all peers
     * have ended theirs, as they do when they have read everything. libnanomsg forgets replies that
     * it has not handed out yet when a connection is closed under it. Call again until true. */
    bool (*hang_up)(struct transport *t);
    /* Closes all peers; stops first if that was not done. Only after engine_close: by then the
     * engine has given back every request. the caller must not use t any more; it is freed by the
     * loop's last close callback. */
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

#endif
