/* transport_shm.h: workers on this host, through shared memory: shm:///PATH.
 *
 * The event loop listens on a Unix socket, checks who connects, and hands each client a sealed memfd
 * with rings of its own (proto/shm_ring.h) and an eventfd. From then on the engine's thread serves the
 * rings (shm_client.c): a request is decoded, launched and answered without a hand-over, its tensors
 * are read and written where the client put them. The socket stays open to tell when a client is gone.
 */
#ifndef ATTND_DAEMON_TRANSPORT_SHM_H
#define ATTND_DAEMON_TRANSPORT_SHM_H

#include <uv.h>

#include "daemon/config.h"
#include "daemon/engine.h"

struct transport_shm;

/* Starts listening. A stale socket file is replaced, a live one is an error; its mode is 0660. Everything
 * borrowed is used until the loop has run the close callbacks, the engine until engine_close.
 * ATTN_EINVAL: why names url and reason; ATTN_ENOMEM. */
attn_status transport_shm_open(uv_loop_t *loop, const struct config *cfg, const char *url,
                               const struct backend_ops *ops, struct backend *b,
                               struct engine *engine, struct transport_shm **out_t, char *why,
                               size_t why_bytes);
/* Accepts nobody and takes no requests any more; those taken are still answered. */
void transport_shm_stop(struct transport_shm *t);
/* Hangs up. Only after engine_close; memory is freed when the loop has run the close callbacks. NULL is
 * fine. */
void transport_shm_close(struct transport_shm *t);

#endif
