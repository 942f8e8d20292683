/* engine.h: the one thread that writes the cache and calls the backend.
 *
 * Transports push requests; the engine validates them, runs control operations itself, collects steps
 * of all workers, sequences and layers into batches, and answers each request on the transport it came
 * from. Work-conserving: an idle device gets what is queued at once, a busy one lets the queue grow;
 * there is no timer that makes a lone request wait.
 */
#ifndef ATTND_DAEMON_ENGINE_H
#define ATTND_DAEMON_ENGINE_H

#include "daemon/config.h"
#include "daemon/request.h"

struct engine;

/* Opens cache and pools on an open backend and starts the thread. Borrows config, backend and
 * buffers until engine_close. out_why gets the sentence of a failure. */
attn_status engine_open(const struct config *cfg, const struct backend_ops *ops, struct backend *b,
                        struct iobuf_pool *bufs, struct engine **out_engine, char *why,
                        size_t why_bytes);

/* Hands a decoded request over. Any thread; never blocks. Over the queue bound it is answered at once
 * with ATTN_EOVERLOAD and retry-after (transport->reply runs inside the call). */
void engine_submit(struct engine *e, struct request *req);

/* No new sequences or sessions from now on; steps go on. Any thread, also from a signal's callback. */
void engine_drain(struct engine *e);
/* True once draining and nothing is queued or in flight. */
bool engine_is_drained(const struct engine *e);
/* Answers what is left with ATTN_EDRAINING, stops the thread, frees all. NULL is fine. */
void engine_close(struct engine *e);

#endif
