/* request.h: one message on its way through the daemon: from the transport that received it, through
 * the engine, back to the transport that answers it.
 *
 * Owner    the transport until engine_submit, the engine until request_reply hands it to
 *          transport->reply, then the transport again, which sends the reply and frees both.
 * Memory   the message and its reply sit in iobufs: host memory the backend reads and writes in
 *          place. The header is unpacked into the request's own arena; all goes in request_free.
 */
#ifndef ATTND_DAEMON_REQUEST_H
#define ATTND_DAEMON_REQUEST_H

#include "daemon/iobuf.h"
#include "proto/wire.h"

struct request;

/* What a transport gives the engine; static, one a transport kind. */
struct transport_ops {
    const char *name; /* "ipc", "tcp", "shm": label of its histograms */
    /* Takes the request back with req->reply filled (a whole message). Called on the engine thread,
     * or inside engine_submit on the caller's; never blocks. */
    void (*reply)(struct request *req);
};

enum { REQUEST_ARENA_BYTES = 4096 };

struct request {
    struct request *next; /* of whatever queue holds it */
    const struct transport_ops *transport;
    void *peer; /* the transport's own */
    uint64_t peer_data[4]; /* the transport's own: reply address (ids of REQ), ring slot */
    struct iobuf *msg; /* received message */
    struct iobuf *reply; /* message to send; NULL until replied */
    struct wire_request wire;
    struct wire_arena arena;
    uint64_t received_ns; /* CLOCK_MONOTONIC */
    uint64_t deadline_ns; /* answered by then */
    uint64_t batched_ns; /* left the queue; 0: not yet */
    uint64_t device_ns;
    void *engine; /* the engine's own while it holds the request */
    uint8_t arena_bytes[REQUEST_ARENA_BYTES];
};

/* A request for a message of msg_bytes, with msg allocated from pool. NULL: out of memory or buffers
 * (an overload; the transport answers or cuts). Any thread. */
struct request *request_new(const struct transport_ops *t, void *peer, struct iobuf_pool *pool,
                            size_t msg_bytes);
/* Frees message, reply, arena and itself; NULL is fine. Any thread. */
void request_free(struct request *req);

/* Decodes req->msg (complete) into req->wire and sets the deadline from the header (capped by
 * max_timeout_us; default_timeout_us if 0). On failure the request must still be answered with
 * request_reply_error if wire.request_id is known. */
attn_status request_decode(struct request *req, uint64_t now_ns, uint64_t default_timeout_us,
                           uint64_t max_timeout_us, char *why, size_t why_bytes);

/* Builds the reply message from a header and payload_bytes of room behind it, without sending:
 * out_payload is where the tensors go. ATTN_EOVERLOAD: no buffer. */
attn_status request_reply_begin(struct request *req, const Attnd__Reply *header,
                                size_t payload_bytes, uint8_t **out_payload);
/* A reply of a status and a printf sentence alone, sent at once. Always answers: without a buffer it
 * falls back to a preallocated one. */
void request_reply_error(struct request *req, attn_status st, uint64_t retry_after_us,
                         const char *format, ...) __attribute__((format(printf, 4, 5)));

#endif
