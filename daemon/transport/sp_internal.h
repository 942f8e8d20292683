/* sp_internal.h: nanomsg's REP side (SP wire protocol) on libuv streams, for ipc://, tcp:// and
 * tls+tcp://. Shared by transport/sp.c (listening, deadlines, replies from the engine),
 * transport/sp_peer.c (one connection: reading, cutting), transport/sp_write.c (writing) and
 * transport/sp_tls.c (both through TLS).
 *
 * The listener is the first loop's. What it accepts goes to one of all loops (loops.h) and stays
 * there: a peer, its reading, deadlines and writing are that loop's alone, and struct sp_loop is
 * what a transport has on each. Only what is pushed on a stack of that struct comes from elsewhere:
 * connections from the first loop, replies from any thread. There is one exception: while nothing
 * waits to be written to a peer, the thread that has a short reply for it writes it (sp_writer).
 *
 * Every nanomsg and nng client can talk to it. A message's id stack is kept with the request; its
 * body is received straight into an iobuf. Each peer has limits and deadlines; one that breaks any
 * is cut and counted by reason, never dropped silently.
 *
 * Lifetime   A peer lives until its handle is closed and the engine has given back all its
 *            requests. A transport lives until its handles on all loops are closed and the engine
 *            has none of its requests; the loop that is through last frees it.
 */
#ifndef ATTND_DAEMON_TRANSPORT_SP_INTERNAL_H
#define ATTND_DAEMON_TRANSPORT_SP_INTERNAL_H

#include <stdatomic.h>
#include <sys/queue.h>
#include <uv.h>

#include "daemon/base/address.h"
#include "daemon/base/principal.h"
#include "daemon/engine/core/engine.h"
#include "daemon/transport/loops.h"
#include "daemon/transport/sp_frame.h"
#include "daemon/transport/transport.h"
#include "proto/tls_stream.h"

struct sp_peer;

/* A member of a list of deadlines. All members of a list wait equally long, so adding at its end
 * keeps it in order, even if the setting changes. */
struct sp_wait {
    TAILQ_ENTRY(sp_wait) entry;
    uint64_t began_ns;
    struct sp_waits *list; /* NULL: not waiting */
    struct sp_peer *peer;
};
struct sp_waits {
    TAILQ_HEAD(, sp_wait) waiting;
    const uint64_t *timeout_us; /* a setting, which may change */
    void (*expire)(struct sp_peer *p);
};

union sp_stream {
    uv_handle_t handle;
    uv_stream_t stream;
    uv_pipe_t pipe;
    uv_tcp_t tcp;
};

enum {
    SP_MAX_GATHER = 32, /* replies in one write */
    SP_MAX_PIECES = 2 * SP_MAX_GATHER,
    SP_READ_AHEAD_BYTES = 64 << 10,
    SP_READING_BYTES = SP_READ_AHEAD_BYTES + TLS_STREAM_RECORD_BYTES, /* of a transport on a loop */
    SP_LOOP_BYTES = 1 << 10, /* of libuv and the allocator, for a peer */
    SP_TLS_BYTES = 64 << 10, /* of OpenSSL for a peer, with a record of each direction */
    SP_PROGRESS_BYTES = 128 << 10, /* least progress of a large message in two seconds */
};

/* What a transport has on one loop. */
struct sp_loop {
    struct transport_sp *t;
    struct loop *loop;
    bool is_open, is_stopped, is_closing, is_async_closing;
    bool has_hung_up; /* the answer of the last call of hang_up */

    uv_timer_t timer; /* runs while a list below has members */
    uv_prepare_t turn; /* before each turn of the loop, while there are TLS handshakes */
    struct sp_peer *shaking; /* whose handshake goes on in this turn; NULL: nobody's */
    TAILQ_HEAD(, sp_peer) line; /* who wait for their turn, and are not read meanwhile */
    struct sp_waits handshakes, hellos, bodies, progress, writes;

    LIST_HEAD(, sp_peer) peers;
    _Atomic uint64_t n_owed; /* requests not yet freed: in the engine, or replies being written */
    uint32_t n_handles; /* open or closing, with those of peers */
    uint8_t *read_ahead; /* [SP_READ_AHEAD_BYTES] shared: emptied before a read callback returns */
    uint8_t *plain; /* [TLS_STREAM_RECORD_BYTES] of tls+tcp://, shared like read_ahead */

    uv_async_t async;
    _Atomic(struct sp_peer *) accepted; /* a stack, from the first loop */
    _Atomic(struct request *) replies; /* a stack, from any thread */
    _Atomic uint32_t n_pushing; /* threads between their push and the end of uv_async_send */
};

struct transport_sp {
    struct transport base; /* first */
    struct transport_env *env;
    bool is_ipc;
    char url[256];
    struct address address;
    struct tls_server *tls; /* of tls+tcp://; NULL: no TLS */

    /* the first loop's */
    bool is_stopped, is_closing;
    int listen_fd, spare_fd; /* -1: none; the spare one is given up to refuse a connection */
    uv_poll_t listener;
    uv_timer_t accept_again;

    _Atomic uint32_t n_left; /* loops that still have anything of it */
    uint32_t n_loops;
    struct sp_loop loops[];
};

/* Who may write to a peer's socket and close it, or use its TLS stream. A loop takes it from
 * nobody, or waits the few microseconds that another thread has it, and gives it up when nothing is
 * left to be written. */
enum sp_writer {
    SP_WRITER_LOOP,
    SP_WRITER_NOBODY, /* no bytes wait */
    SP_WRITER_OTHER, /* the thread that brings a reply */
    SP_WRITER_TORN, /* that thread has written a part of p->torn, which is on its way to the loop */
};

enum sp_refusal { SP_ACCEPTED, SP_OVERSIZE, SP_OVERLOAD, SP_TOO_MANY };

struct sp_peer {
    struct transport_sp *t;
    struct sp_loop *on;
    struct sp_peer *next; /* while it is on its way to its loop */
    int fd; /* its loop has it in io, too */
    LIST_ENTRY(sp_peer) entry;
    union sp_stream io;
    struct principal principal;
    struct share *share;
    char name[96]; /* for logs: the principal or an address */
    struct sp_frame frame;
    bool is_eof; /* it sends no more; closed when all is answered */
    bool is_doomed; /* what it sends is dropped; closed when all is answered */
    bool is_shut, is_closing, is_closed, is_dirty;
    bool is_late; /* it was not identified in time, and waits for an answer for as long again */

    struct sp_wait read_wait, progress_wait, write_wait;
    struct sp_wait hello_wait; /* until the connection's tenant is known */

    struct request *req; /* the message being received */
    uint64_t n_body; /* its body's bytes so far */
    uint64_t body_bytes; /* and in all */
    uint64_t turn_bytes; /* of work since others were last given a turn */
    uint64_t n_looked; /* n_body when its progress was last checked */
    size_t n_large; /* bytes of its buffer, if that is a large one */
    enum sp_refusal refusal;
    const struct share *full; /* of SP_TOO_MANY: itself or its principal */

    _Atomic uint32_t n_requests; /* in the engine */
    _Atomic enum sp_writer writer;
    struct request *torn;
    STAILQ_HEAD(, request) replies; /* to be written, oldest first */
    uint64_t write_bytes; /* of the queue, with heads */
    size_t write_offset; /* bytes of the first reply that are already written */
    uint32_t n_writing; /* replies under an active uv_write */
    uv_write_t write;
    uv_shutdown_t shutdown;
    SLIST_ENTRY(sp_peer) dirty; /* while is_dirty */

    struct tls_stream *tls; /* NULL: none */
    bool is_secure; /* the TLS handshake is over */
    bool is_in_line;
    TAILQ_ENTRY(sp_peer) line; /* while is_in_line */
    uint8_t *cipher; /* encrypted bytes under an active uv_write; NULL: none */
    size_t cipher_bytes; /* how many */
};

/* transport/sp.c */
void sp_wait_start(struct sp_waits *list, struct sp_wait *w);
void sp_wait_stop(struct sp_wait *w);
void sp_loop_finish(struct sp_loop *on); /* closes what can be closed by now */

/* transport/sp_peer.c */
/* A peer for the next connection; NULL: out of memory. First loop, like sp_peer_admit. */
struct sp_peer *sp_peer_new(struct transport_sp *t);
/* Finds who has connected, which is p->fd now, and chooses a loop. false: there is no room among
 * all peers or those of its principal; it was counted, closed and freed. */
bool sp_peer_admit(struct sp_peer *p);
/* Begins to serve it, or closes and frees it. On its loop, like all below. */
void sp_peer_begin(struct sp_peer *p);
void sp_peer_drop(struct sp_peer *p); /* instead of that: closes and frees it */
void sp_peer_read(struct sp_peer *p); /* from now on */
void sp_peer_stop_reading(struct sp_peer *p);
void sp_peer_close(struct sp_peer *p);
/* Whether there is room for it among all peers and those of its principal; if not, it is closed. */
bool sp_peer_is_welcome(struct sp_peer *p);
void sp_peer_free_if_done(struct sp_peer *p);
/* Frees a request, which no longer counts as a message. NULL is fine. Any thread. */
void sp_message_free(struct transport_sp *t, struct request *req);
/* The same for one that was owed. */
void sp_request_done(struct sp_loop *on, struct request *req);
/* Cuts a peer that has broken a rule; the caller has counted it by reason. */
void sp_peer_cut(struct sp_peer *p, const char *why);
/* Where the next bytes of a message's body can be put, and how many; NULL: what comes next is a
 * head, or is dropped. */
uint8_t *sp_peer_room(struct sp_peer *p, size_t *out_n);
/* Takes n bytes that have come; bytes NULL: they are in sp_peer_room's place already. */
void sp_peer_take(struct sp_peer *p, const uint8_t *bytes, size_t n);
/* The peer sends no more. */
void sp_peer_end_of_file(struct sp_peer *p);
void sp_peer_expire_handshake(struct sp_peer *p);
void sp_peer_expire_hello(struct sp_peer *p);
void sp_peer_expire_body(struct sp_peer *p);
void sp_peer_expire_progress(struct sp_peer *p);
void sp_peer_expire_write(struct sp_peer *p);

/* transport/sp_write.c */
/* Takes the writing from whoever else may have it, until nothing is left to write. */
void sp_peer_hold(struct sp_peer *p);
/* Lets other threads write, unless something is left that only the loop can do. */
void sp_peer_let_go(struct sp_peer *p);
/* Writes a short reply if nobody writes and few messages are on their way, so that no other thread
 * has to be woken for it. Any thread. true: the request is gone; false: it must be queued. */
bool sp_peer_answer(struct sp_peer *p, struct request *req);
/* Writes the head of a reply in its request. Any thread. */
void sp_peer_put_head(const struct sp_peer *p, struct request *req);
/* Queues a reply that came back from the engine; sp_peer_flush sends it. */
void sp_peer_queue(struct sp_peer *p, struct request *req);
void sp_peer_flush(struct sp_peer *p);
/* If everything owed is written, closes a peer that sends no more or that may not send more. */
void sp_peer_leave_if_done(struct sp_peer *p);
/* Collects the first replies of the queue, without what is already written; returns the number of
 * pieces. */
size_t sp_peer_gather(struct sp_peer *p, struct iovec pieces[SP_MAX_PIECES]);
/* Removes the next n bytes of the queue, which were written. */
void sp_peer_wrote(struct sp_peer *p, size_t n);

/* transport/sp_tls.c; for peers with tls */
bool sp_tls_begin(struct sp_peer *p); /* false: out of memory */
/* Whether what has come may be read in this turn of the loop: a handshake takes as long as many
 * messages, so a turn has one, and messages of others never wait for two. */
bool sp_tls_may_take(const struct sp_peer *p);
/* Reads it when its turn comes. */
void sp_tls_line_up(struct sp_peer *p);
void sp_tls_leave_line(struct sp_peer *p);
void sp_tls_free(struct sp_peer *p);
/* Bytes have come from the socket. */
void sp_tls_take(struct sp_peer *p, const uint8_t *bytes, size_t n);
bool sp_tls_is_inside(const struct sp_peer *p); /* part of a record is missing */
void sp_tls_flush(struct sp_peer *p);
/* Encrypts a short reply and sends what the socket takes: the loop sends the rest. By the thread
 * that brings it. Returns how much is encrypted, all of it, or -1. */
ssize_t sp_tls_answer(struct sp_peer *p, const struct iovec *pieces, size_t n_pieces,
                      bool *is_sent);
bool sp_tls_is_quiet(const struct sp_peer *p); /* nothing waits to be sent, or to be secured */
/* Sends close-notify if that is possible without waiting. */
void sp_tls_end(struct sp_peer *p);

#endif
