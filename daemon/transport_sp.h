/* transport_sp.h: nanomsg's REP side (SP wire protocol) on libuv streams, ipc:// and tcp://.
 *
 * Every nanomsg and nng client can talk to it. Runs on the loop thread. A message's id stack is kept
 * with the request, its body is received straight into an iobuf. Each peer has caps and deadlines; a
 * peer that breaks one is cut and counted by reason, never silently dropped.
 */
#ifndef ATTND_DAEMON_TRANSPORT_SP_H
#define ATTND_DAEMON_TRANSPORT_SP_H

#include <uv.h>

#include "daemon/config.h"
#include "daemon/engine.h"

struct transport_sp;

/* Starts listening on url ("ipc:///run/attnd/attnd.sock", "tcp://127.0.0.1:5555"). A stale socket file
 * is replaced, a live one is an error; its mode is 0660. cfg, engine and bufs are borrowed until the
 * loop has run the close callbacks. ATTN_EINVAL: why names url and reason. */
attn_status transport_sp_open(uv_loop_t *loop, const struct config *cfg, const char *url,
                              struct engine *engine, struct iobuf_pool *bufs,
                              struct transport_sp **out_t, char *why, size_t why_bytes);
/* As given, but with the port that was taken where 0 was asked for. */
const char *transport_sp_url(const struct transport_sp *t);
/* Stops accepting and reading; replies already owed are still written. */
void transport_sp_stop(struct transport_sp *t);
/* True when no reply is owed to any peer and no write is pending. */
bool transport_sp_is_idle(const struct transport_sp *t);
/* After stop, when idle: ends our side of every connection and tells whether all peers have ended theirs,
 * which they do when they have read everything. libnanomsg forgets replies it has not handed out yet
 * when a connection is closed under it. Call again until true or until patience ends. */
bool transport_sp_hang_up(struct transport_sp *t);
/* Closes all peers; memory is freed when the loop has run the close callbacks, and not before the engine
 * has given back every request (engine_close does). NULL is fine. */
void transport_sp_close(struct transport_sp *t);

#endif
