/* transport.h: the daemon's transports, one table of functions (request/transport_ops.h) per scheme
 * of urls, and the environment that they share.
 *
 * What a transport borrows belongs to its env, which outlives the loop's last close callback; what
 * it allocates is its own and is freed by that callback.
 */
#ifndef ATTND_DAEMON_TRANSPORT_TRANSPORT_H
#define ATTND_DAEMON_TRANSPORT_TRANSPORT_H

#include <stdatomic.h>

#include "daemon/config/config.h"
#include "daemon/request/transport_ops.h"

struct backend;
struct backend_ops;
struct engine;
struct iobuf_pool;
struct loops;
struct share_table;
struct uv_loop_s;

/* The environment of all transports. loop, loops and cfg are set when a transport is opened, all
 * else before the first loop runs. */
struct transport_env {
    struct uv_loop_s *loop; /* the first: listeners and shared memory */
    struct loops *loops; /* all, for connections; NULL: no transport over sockets is opened */
    const struct config *cfg;
    const struct backend_ops *backend_ops;
    struct backend *backend;
    struct engine *engine; /* not touched after engine_close */
    struct iobuf_pool *bufs;
    struct share_table *shares;
    uint64_t shared_most; /* what host memory has room for, whatever listen.shm_memory says */
    uint64_t shared_bytes; /* of listen.shm_memory, in use; the first loop's */
    /* counts by the transports, of all loops */
    _Atomic uint32_t n_peers; /* connected, over all transports */
    _Atomic uint32_t n_messages; /* over sockets: arriving, in the engine, or replies not read */
    _Atomic uint64_t cipher_bytes; /* encrypted replies that are not read */
    _Atomic uint64_t arriving_bytes; /* of bufs, held by large messages that are incomplete */
};

struct transport {
    const struct transport_ops *ops; /* first member of what a transport allocates */
};

/* transport/sp.c */
extern const struct transport_ops transport_ipc_ops, transport_tcp_ops, transport_tls_ops,
    transport_admin_ops;
extern const struct transport_ops transport_shm_ops; /* transport/shm.c */
extern const struct transport_ops transport_gpu_ops; /* transport/gpu.c */

/* The most that connections take of the heap, with their messages until they are answered and the
 * answers are read. */
uint64_t transport_client_bytes(const struct config *c);
/* The table for a url's scheme; NULL: no transport has it. */
const struct transport_ops *transport_find(const char *url);

#endif
