/* request.h: one message on its way through the daemon: from the transport that received it,
 * through the engine, back to the transport that answers it.
 *
 * Owner    the transport until engine_submit, the engine until request_reply (or _reply_error)
 *          hands it to transport->reply, then the transport again, which sends the reply and frees
 *          both.
 * Memory   the message and its reply sit in iobufs: host memory the backend reads and writes in
 *          place. The header is unpacked into the request's own arena; all goes in request_free.
 */
#ifndef ATTND_DAEMON_REQUEST_REQUEST_H
#define ATTND_DAEMON_REQUEST_REQUEST_H

#include <sys/queue.h>

#include "daemon/base/iobuf.h"
#include "daemon/base/principal.h"
#include "daemon/request/charge.h"
#include "daemon/request/transport_ops.h"
#include "kernels/backend.h"
#include "proto/wire.h"

enum {
    REQUEST_ARENA_BYTES = 4096,
    REQUEST_MAX_ARENA_BYTES = 4 << 20, /* a header unpacked, chunks included */
    REQUEST_MIN_MSG_BYTES = 1024, /* room of every msg: an error can be answered in its place */
    REQUEST_MAX_REUSED_BYTES = 64 << 10, /* a larger msg is given back before its error is sent */
};

/* Of a step that came without a message, by a bell (lane.h). */
struct request_bell {
    uint8_t *out; /* where its outputs go */
    struct backend_word done; /* written by the device where the step is whole in one batch: */
    bool is_signalled; /* the batch carries its signal */
    char why[192]; /* of its failure, on the way back from another card */
};

struct engine;
struct step_shard;

struct request {
    struct request *next; /* of the inbox or queue that holds it */
    STAILQ_ENTRY(request) queued; /* of the watchers; of its transport's, once it is answered */
    const struct transport_ops *transport;
    void *peer; /* the transport's own */
    uint64_t peer_data[10]; /* the transport's own: reply address (ids of REQ), ring slot */
    uint32_t peer_data_bytes;
    struct principal principal; /* its sender, from the transport */
    struct share *share; /* of its connection: what it holds is counted there; NULL: nowhere */
    struct charge charge; /* what it holds beside its buffers, until it is answered */
    struct iobuf *msg; /* received message */
    struct iobuf *room; /* where its reply must go, the transport's; NULL: taken from the pool */
    struct iobuf *reply; /* message to send; NULL until replied */
    struct wire_request wire;
    struct wire_arena arena;
    struct request_bell *bell; /* NULL: it is a message */
    const char *why; /* of a bell's failure, while transport->reply runs */
    /* with several cards (cards.h) */
    struct step_shard *shard; /* NULL: it is not one card's shard of a step */
    struct engine *primary; /* its thread passes the reply to polled->reply */
    const struct transport_ops *polled; /* NULL: the reply goes its way by itself */
    bool is_promoted; /* an open: it goes on with what is there (engine/tier/mover.c) */
    uint64_t received_ns; /* CLOCK_MONOTONIC */
    uint64_t deadline_ns; /* answered by then */
    uint64_t batched_ns; /* left the queue; 0: not yet */
    uint64_t device_ns;
    /* further moments for stages.h; 0: there was none */
    uint64_t began_ns; /* its first byte came */
    uint64_t taken_ns; /* the engine took it up */
    uint64_t done_ns; /* its last batch came back */
    uint64_t replied_ns; /* its reply was handed to the transport */
    attn_status status; /* of the reply */
    uint8_t arena_bytes[REQUEST_ARENA_BYTES];
};

/* A request for a message of msg_bytes, with msg allocated from pool; pool NULL: from the heap, for
 * messages that are refused unread. share is its connection's and outlives it; NULL: none is
 * counted. NULL: out of memory or buffers (an overload; the transport answers or cuts). Any thread.
 */
struct request *request_new(const struct transport_ops *t, void *peer, struct share *share,
                            struct iobuf_pool *pool, size_t msg_bytes);
/* A larger msg for a message that is still arriving, with its first n_kept bytes. ATTN_EOVERLOAD:
 * no buffer; nothing has changed. */
attn_status request_grow(struct request *req, struct iobuf_pool *pool, size_t msg_bytes,
                         size_t n_kept);
/* Frees message, reply, arena and itself; NULL is fine. Any thread. */
void request_free(struct request *req);
/* The same in the transport's own memory, for one that brings message and room itself. The arena is
 * all there is to give back: wire_arena_reset. */
void request_init(struct request *req, const struct transport_ops *t, void *peer);

/* Decodes req->msg (complete) into req->wire and sets received_ns and the deadline from the header
 * (capped by max_timeout_us; default_timeout_us if 0). Counts the request, and a step as received
 * and in flight. On failure answer with request_reply_error; wire.request_id is 0 if it is not
 * known. */
attn_status request_decode(struct request *req, uint64_t now_ns, uint64_t default_timeout_us,
                           uint64_t max_timeout_us, char *why, size_t why_bytes);
/* The same where the client can change req->msg at any time: head is a private copy of everything
 * before the payload (its preamble has the total length); payload points into req->msg. */
attn_status request_decode_apart(struct request *req, uint8_t *head, uint8_t *payload,
                                 uint64_t now_ns, uint64_t default_timeout_us,
                                 uint64_t max_timeout_us, char *why, size_t why_bytes);

/* The session that a decoded request is about, also the one that hello resumes; 0: none. */
uint64_t request_session(const struct request *req);

/* May change the daemon for all clients: it came over the admin socket, or from root or the
 * daemon's own user, which could send a signal anyway. */
bool request_may_administer(const struct request *req);

/* Fills in the step that a bell stands for, as if it had been decoded: header, tensors at payload,
 * and bell are the transport's. Its reply has no message: transport->reply gets status and why. */
void request_take_bell(struct request *req, struct request_bell *bell, const Attnd__Request *header,
                       uint8_t *payload, size_t payload_bytes, uint64_t now_ns,
                       uint64_t timeout_us);

/* Makes req->reply n_bytes big: the room if there is one, else a buffer. ATTN_EOVERLOAD: no buffer;
 * ATTN_EINVAL: the room is too small. May be repeated: the later replaces the earlier. */
attn_status request_reply_reserve(struct request *req, size_t n_bytes);

/* Builds the reply message from a header and payload_bytes of room behind it, without sending:
 * out_payload is where the tensors go (WIRE_ALIGN-aligned). queue_ns and device_ns of the header
 * are the caller's. Errors and repeating as request_reply_reserve. */
attn_status request_reply_begin(struct request *req, const Attnd__Reply *header,
                                size_t payload_bytes, uint8_t **out_payload);
/* How long each stage of a step took whose reply was written at sent_ns. */
void request_stages(const struct request *req, uint64_t sent_ns, uint64_t out_ns[STAGE_N]);
/* The transport has written the reply: the step's stages go to the histograms, a slow one to slow.h
 * and to the log. Before the arena is reset. Any thread. */
void request_sent(const struct request *req);
/* Hands the request with its built reply to the transport; the request is gone for the caller, and
 * with it all that it was charged with. A step is counted as answered with st (its first failed
 * item's), its times go to the histograms. */
void request_reply(struct request *req, attn_status st);
/* Builds a reply of a status and a printf sentence alone and sends it. Always answers: the reply
 * takes the room or the message's place, so no buffer is needed; nothing may read or write the
 * message any more.
 * The format's arguments may point into the request. */
void request_reply_error(struct request *req, attn_status st, uint64_t retry_after_us,
                         const char *format, ...) __attribute__((format(printf, 4, 5)));

/* Name and epoch of the sequence that a request is about. false: it is about none. */
bool request_seq(const Attnd__Request *h, uint64_t *out_name, uint32_t *out_epoch);

#endif
