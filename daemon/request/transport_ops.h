/* transport_ops.h: the table of functions of a transport, which takes requests from workers and
 * sends replies. A request carries its transport's table for its reply.
 *
 * Order of calls: open (it serves from then on), stop, then once the engine has given back every
 * request hang_up until it returns true or a time limit passes, close.
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

/* A transport sets the principal of every request that it submits. Unless said otherwise, functions
 * are called on the loop's thread and never block. */
struct transport_ops {
    const char *scheme; /* "ipc://": the beginning of its urls */
    enum stats_transport label; /* of its histograms */
    bool is_polled; /* only the thread of the engine that polls it may call reply */
    bool is_admin; /* its clients may change the daemon for all */

    /* Listens at url and serves from the loop's next turn on. A stale socket file is replaced, a
     * live one is an error; its mode is 0660. May block shortly, to make the file. On failure only
     * handles that the loop still closes are left. ATTN_EINVAL: the address; ATTN_ENOMEM; why gets
     * url and reason. */
    attn_status (*open)(struct transport_env *env, const char *url, struct transport **out_t,
                        char *why, size_t why_bytes);
    /* The url where it listens: as given, but port 0 is replaced by the actual port. */
    const char *(*url)(const struct transport *t);
    /* Accepts no connections and takes no requests from now on; those taken are still answered.
     * Before engine_close; may be repeated. */
    void (*stop)(struct transport *t);
    /* Whether no reply is owed to any peer and none is waiting to be written. */
    bool (*is_idle)(const struct transport *t);
    /* After stop and engine_close: once idle, ends our side of every connection. true: all peers
     * have ended theirs, too, as they do when they have read everything; call it until then. A
     * connection must not be closed earlier, because libnanomsg then drops replies that it has
     * received but not handed out. */
    bool (*hang_up)(struct transport *t);
    /* Closes all peers; stops first if that was not done. Only after engine_close, when the engine
     * has given back every request. The caller must not use t any more; the loop's last close
     * callback frees it. */
    void (*close)(struct transport *t);

    /* Reads its files again, for new connections. ATTN_EINVAL, ATTN_ENOMEM: why names file and
     * reason, and nothing changes. NULL: it has no files. Any thread, before stop. */
    attn_status (*reload)(struct transport *t, const struct config *cfg, char *why,
                          size_t why_bytes);

    /* Takes the request back with its reply, a complete message, in req->reply. On the engine's
     * thread, or within engine_submit on the caller's. */
    void (*reply)(struct request *req);
};

#endif
