/* request.h: one message on its way through the daemon: from the transport that received it,
 * through the engine, back to the transport that answers it.
 *
 * Owner    the transport until engine_submit, the engine until request_reply (or _reply_error)
 *          passes it to transport->reply, then the transport again, which sends the reply and frees
 *          the request.
 * Memory   message and reply are in iobufs: host memory that the backend reads and writes in
 *          place. The header is unpacked into the request's own arena, a large one in iobufs, too.
 *          request_free frees all.
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
    REQUEST_MIN_MSG_BYTES = 1024, /* least room of a msg: an error reply can take its place */
    REQUEST_MAX_REUSED_BYTES = 64 << 10, /* a larger msg is given back before its error is sent */
};

/* A step that came by a bell (lane.h), without a message. */
struct request_bell {
    uint8_t *out; /* where its outputs go */
    struct backend_word done; /* written by the device where the step is whole in one batch: */
    bool is_signalled; /* the batch carries its signal */
    char why[192]; /* of its failure, on the way back from another card */
};

struct engine;
struct step_shard;
struct task;

struct request {
    struct request *next; /* of the inbox or queue that holds it */
    STAILQ_ENTRY(request) queued; /* in the list of watchers; once answered, in its transport's */
    const struct transport_ops *transport;
    void *peer; /* the transport's own */
    uint64_t peer_data[10]; /* the transport's own: reply address (ids of REQ), ring slot */
    uint32_t peer_data_bytes;
    struct principal principal; /* its sender, from the transport */
    struct iobuf_pool *bufs; /* of its arena's chunks; NULL: the heap */
    struct share *share; /* its connection's, where its buffers are counted; NULL: nowhere */
    struct charge charge; /* what else it holds until it is answered */
    /* while it waits for the engine's thread (engine/core/turns.h) */
    TAILQ_ENTRY(request) turn;
    uint32_t turn_of, turn_line; /* its place there */
    uint32_t turn_session; /* slot that it keeps alive; SESSION_NONE: none, or its task does */
    struct task *task; /* what goes on in its turn; NULL: it is served anew */
    struct iobuf *msg; /* received message */
    struct iobuf *room; /* the transport's buffer for the reply; NULL: the pool is used */
    struct iobuf *reply; /* message to send; NULL until replied */
    struct wire_request wire;
    struct wire_arena arena;
    struct request_bell *bell; /* NULL: it came as a message */
    const char *why; /* why a bell's step failed, while transport->reply runs */
    /* with several cards (cards.h) */
    struct step_shard *shard; /* one card's shard of a step; NULL: it is none */
    struct engine *primary; /* whose thread passes the reply to polled->reply */
    const struct transport_ops *polled; /* its own transport; NULL: transport->reply is called */
    bool is_widened; /* a step whose tensors came as codes: its dtype was fp8_e4m3 */
    bool is_promoted; /* an open: promotion fell short, no second try (engine/tier/promote.c) */
    uint64_t received_ns; /* CLOCK_MONOTONIC */
    uint64_t deadline_ns; /* when it must be answered */
    uint64_t batched_ns; /* when it left the queue; 0: not yet */
    uint64_t device_ns;
    /* further moments for stages.h; 0: there was none */
    uint64_t began_ns; /* its first byte came */
    uint64_t taken_ns; /* the engine took it up */
    uint64_t done_ns; /* its last batch came back */
    uint64_t replied_ns; /* its reply was handed to the transport */
    attn_status status; /* of the reply */
    uint8_t arena_bytes[REQUEST_ARENA_BYTES];
};

/* Makes a request for a message of msg_bytes. Its msg is from pool, or if that is NULL from the
 * heap, for messages that are refused unread. share is its connection's and outlives it; NULL:
 * nothing is counted. Returns NULL when out of memory or buffers (an overload: the transport
 * answers, or cuts the peer). Any thread. */
struct request *request_new(const struct transport_ops *t, void *peer, struct share *share,
                            struct iobuf_pool *pool, size_t msg_bytes);
/* Replaces msg by a larger one, with the first n_kept bytes copied, for a message that is still
 * arriving. ATTN_EOVERLOAD: no buffer; nothing has changed. */
attn_status request_grow(struct request *req, struct iobuf_pool *pool, size_t msg_bytes,
                         size_t n_kept);
/* Frees message, reply, arena and itself; NULL is fine. Any thread. */
void request_free(struct request *req);
/* Initialises a request in the transport's own memory, for a transport that brings msg and room
 * itself. Only the arena must be freed, by wire_arena_reset. */
void request_init(struct request *req, const struct transport_ops *t, void *peer);
/* Has the chunks of its arena come from these buffers, counted in its share, which is set. */
void request_set_bufs(struct request *req, struct iobuf_pool *bufs);

/* Decodes the complete req->msg into req->wire; the codes of a step (proto/wire_codes.h) become
 * bf16, in another req->msg of at most max_message_bytes. Sets received_ns, and the deadline from
 * the header's timeout (default_timeout_us if that is 0, at most max_timeout_us). Counts the
 * request, and a step as received and in flight. On failure answer with request_reply_error;
 * wire.request_id is 0 if it is not known. */
attn_status request_decode(struct request *req, uint64_t now_ns, uint64_t default_timeout_us,
                           uint64_t max_timeout_us, uint64_t max_message_bytes, char *why,
                           size_t why_bytes);
/* The same where the client can change req->msg at any time: head is a private copy of everything
 * before the payload (its preamble has the total length); payload points into req->msg. */
attn_status request_decode_apart(struct request *req, uint8_t *head, uint8_t *payload,
                                 uint64_t now_ns, uint64_t default_timeout_us,
                                 uint64_t max_timeout_us, char *why, size_t why_bytes);

/* The session of a decoded request, or the one that a hello resumes; 0: none. */
uint64_t request_session(const struct request *req);

/* Whether it may change the daemon for all clients: it came over the admin socket, or from root or
 * the daemon's own user, which could send signals anyway. */
bool request_may_administer(const struct request *req);

/* Fills in the step that a bell stands for, as if it had been decoded. header, payload (the
 * tensors) and bell are the transport's. The reply has no message: transport->reply gets status and
 * why. */
void request_take_bell(struct request *req, struct request_bell *bell, const Attnd__Request *header,
                       uint8_t *payload, size_t payload_bytes, uint64_t now_ns,
                       uint64_t timeout_us);

/* Gives req->reply n_bytes: in the room if there is one, else in a buffer. ATTN_EOVERLOAD: no
 * buffer; ATTN_EINVAL: the room is too small. May be repeated; the last call counts. */
attn_status request_reply_reserve(struct request *req, size_t n_bytes);

/* Builds the reply message from a header and room for payload_bytes of tensors (*out_payload, which
 * is WIRE_ALIGN-aligned), without sending it. The caller sets queue_ns and device_ns of the header.
 * Errors and repetition as request_reply_reserve. */
attn_status request_reply_begin(struct request *req, const Attnd__Reply *header,
                                size_t payload_bytes, uint8_t **out_payload);
/* How long each stage took of a step whose reply was written at sent_ns. */
void request_stages(const struct request *req, uint64_t sent_ns, uint64_t out_ns[STAGE_N]);
/* The transport has written the reply: counts the step's stages in the histograms, and records and
 * logs a slow one. Call it before the arena is reset. Any thread. */
void request_sent(const struct request *req);
/* Passes the request with its finished reply to the transport and gives back its charge; the caller
 * must not use the request any more. Counts a step as answered with st (the status of its first
 * failed item) and its times in the histograms. */
void request_reply(struct request *req, attn_status st);
/* Replies with only a status and a printf sentence. Needs no buffer, so it always answers: the
 * reply takes the room or the place of the message, which nothing may read or write any more. The
 * format's arguments may point into the request. */
void request_reply_error(struct request *req, attn_status st, uint64_t retry_after_us,
                         const char *format, ...) __attribute__((format(printf, 4, 5)));

/* Name and epoch of the sequence that a request names. false: it names none. */
bool request_seq(const Attnd__Request *h, uint64_t *out_name, uint32_t *out_epoch);

#endif
