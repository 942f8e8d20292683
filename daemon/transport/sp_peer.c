/* sp_peer.c: one connection of a worker: reads its bytes into requests.
 *
 * Small messages and all heads are read through the transport's shared read-ahead buffer, the
 * bodies of large ones straight into their request's buffer. That grows as bytes arrive, so
 * announcing a large size takes no memory; incomplete large messages together hold at most half of
 * cache.io_memory, and must keep arriving. Replies are written in transport/sp_write.c.
 */
#include <errno.h>
#include <netinet/tcp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "daemon/base/address.h"
#include "daemon/base/clock.h"
#include "daemon/base/log.h"
#include "daemon/transport/sp_internal.h"

enum {
    BEGIN_BYTES = 16 << 10, /* most that is read at once but of a large body */
    DIRECT_MIN_BYTES = 32 << 10, /* a body with this much missing is read in place */
    DIRECT_MAX_BYTES = 128 << 10,
    FIRST_ROOM_BYTES = 64 << 10, /* first buffer of a large message */
    RETRY_AFTER_US = 10000, /* for want of buffers */
    TURN_BYTES = 512 << 10, /* after which other peers' turn comes: 0.1 ms or so */
    HEADER_COST = 8, /* decoding a byte of a header takes as long as reading so many; one that
                        codes become, as reading it */
    MESSAGE_COST = 8 << 10, /* and all else of a message as these */
};

/* Records that the message being received holds a large buffer of n bytes (0: none), and watches
 * its progress. */
static void hold_large(struct sp_peer *p, size_t n)
{
    if (p->n_large != n)
        atomic_fetch_add(&p->t->env->arriving_bytes, n - p->n_large);
    p->n_large = n;
    sp_wait_stop(&p->progress_wait);
    if (n > 0) {
        p->n_looked = p->n_body;
        sp_wait_start(&p->on->progress, &p->progress_wait);
    }
}

/* Counts n bytes for it before it has such a buffer. false: incomplete large messages would hold
 * more than they may, and nothing has changed. */
static bool large_take(struct sp_peer *p, size_t n)
{
    struct transport_env *env = p->t->env;
    uint64_t most = iobuf_pool_bytes(env->bufs) / 2;
    uint64_t largest = config_now(env->cfg, max_message_bytes);
    uint64_t all = atomic_load(&env->arriving_bytes), then;
    most = most > largest ? most : largest;
    do {
        then = all - p->n_large + n;
        if (all > 0 && then > most)
            return false;
    } while (!atomic_compare_exchange_weak(&env->arriving_bytes, &all, then));
    p->n_large = n;
    return true;
}

/* ---- the end of a peer ---- */

void sp_peer_free_if_done(struct sp_peer *p)
{
    if (!p->is_closed || p->n_requests > 0)
        return;
    share_unref(p->share);
    free(p);
}

/* A message counts from its first byte until its reply is written. */
static void message_uncount(struct transport_sp *t, struct share *share)
{
    share_give(share, SHARE_MESSAGES, 1);
    atomic_fetch_sub(&t->env->n_messages, 1);
}

void sp_message_free(struct transport_sp *t, struct request *req)
{
    if (req != NULL)
        message_uncount(t, req->share);
    request_free(req);
}

void sp_request_done(struct sp_loop *on, struct request *req)
{
    sp_message_free(on->t, req);
    atomic_fetch_sub(&on->n_owed, 1);
}

static void on_closed(uv_handle_t *handle)
{
    struct sp_peer *p = handle->data;
    struct sp_loop *on = p->on;
    while (!STAILQ_EMPTY(&p->replies)) {
        struct request *req = STAILQ_FIRST(&p->replies);
        STAILQ_REMOVE_HEAD(&p->replies, queued);
        sp_request_done(on, req);
    }
    sp_tls_free(p);
    p->is_closed = true;
    sp_peer_free_if_done(p);
    on->n_handles--;
    sp_loop_finish(on);
}

static void peer_uncount(struct sp_peer *p)
{
    share_give(p->share, SHARE_PEERS, 1);
    atomic_fetch_sub(&p->t->env->n_peers, 1);
    atomic_fetch_sub(&p->on->loop->n_peers, 1);
    stats_sub(peers, 1);
}

void sp_peer_close(struct sp_peer *p)
{
    if (p->is_closing)
        return;
    struct transport_sp *t = p->t;
    sp_peer_hold(p);
    p->is_closing = true;
    sp_wait_stop(&p->read_wait);
    sp_wait_stop(&p->hello_wait);
    sp_wait_stop(&p->write_wait);
    sp_tls_leave_line(p);
    hold_large(p, 0);
    sp_message_free(t, p->req);
    p->req = NULL;
    LIST_REMOVE(p, entry);
    peer_uncount(p);
    log_debug("%s: peer left (%s)", t->url, p->name);
    uv_close(&p->io.handle, on_closed);
}

static void log_cut(const struct sp_peer *p, const char *why)
{
    log_limited("peers cut", LOG_LEVEL_INFO, log_write, "%s: peer cut (%s): %s", p->t->url, p->name,
                why);
}

void sp_peer_cut(struct sp_peer *p, const char *why)
{
    log_cut(p, why);
    sp_peer_close(p);
}

void sp_peer_expire_handshake(struct sp_peer *p)
{
    stats_add(peers_cut_handshake, 1);
    sp_peer_cut(p, "no handshake within listen.handshake_timeout");
}

void sp_peer_expire_hello(struct sp_peer *p)
{
    if (p->n_requests > 0 && !p->is_late) { /* the engine may still identify its tenant */
        p->is_late = true;
        sp_wait_start(&p->on->hellos, &p->hello_wait);
        return;
    }
    stats_add(peers_cut_handshake, 1);
    sp_peer_cut(p, "nothing of a tenant's within listen.handshake_timeout");
}

void sp_peer_expire_body(struct sp_peer *p)
{
    if (p->is_shut) { /* it was counted already; its time to read the answer is over */
        sp_peer_close(p);
        return;
    }
    stats_add(peers_cut_body_timeout, 1);
    sp_peer_cut(p, "message not complete within listen.body_timeout");
}

void sp_peer_expire_progress(struct sp_peer *p)
{
    if (p->n_body - p->n_looked >= SP_PROGRESS_BYTES) {
        hold_large(p, p->n_large); /* checks again later */
        return;
    }
    stats_add(peers_cut_body_timeout, 1);
    sp_peer_cut(p, "a large message arrives at less than 64 KiB/s");
}

void sp_peer_expire_write(struct sp_peer *p)
{
    stats_add(peers_cut_slow_reader, 1);
    sp_peer_cut(p, "replies not taken within listen.write_timeout");
}

/* ---- reading ---- */

/* The messages that there is room for, and those that n others leave. */
static uint32_t messages_most(const struct transport_env *env)
{
    return config_now(env->cfg, max_queue_requests) + config_now(env->cfg, max_peers);
}

static uint32_t messages_free(const struct transport_env *env, uint32_t n)
{
    uint32_t all = messages_most(env);
    return all > n ? all - n : 0;
}

/* Answers a message that is refused; p->req has as many of its first bytes as have come. */
static void refuse_message(struct sp_peer *p)
{
    struct transport_sp *t = p->t;
    struct request *req = p->req;
    enum sp_refusal refusal = p->refusal;
    struct wire_preamble preamble;
    char why[SHARE_TEXT_BYTES];
    p->req = NULL;
    p->refusal = SP_ACCEPTED;
    p->n_requests++;
    p->on->n_owed++;
    if (req->msg->n_bytes >= WIRE_PREAMBLE_BYTES && p->n_body >= WIRE_PREAMBLE_BYTES &&
        wire_preamble_decode(req->msg->data, UINT64_MAX, &preamble, why, sizeof(why)) == ATTN_OK) {
        req->wire.request_id = preamble.request_id;
        if (req->msg->n_bytes == WIRE_PEEK_BYTES && p->n_body >= WIRE_PEEK_BYTES)
            engine_renew(t->env->engine, wire_session_peek(req->msg->data));
    }
    if (refusal == SP_OVERSIZE) {
        stats_add(peers_cut_oversize, 1);
        log_limited("oversized messages", LOG_LEVEL_INFO, log_write,
                    "%s: peer sent a message of %llu bytes, over listen.max_message (%s)", t->url,
                    (unsigned long long)p->body_bytes, p->name);
        sp_peer_hold(p); /* whatever is answered, the loop closes it */
        p->is_doomed = true;
        request_reply_error(req, ATTN_EINVAL, 0,
                            "message of %llu bytes is over the limit of %llu (listen.max_message)",
                            (unsigned long long)p->body_bytes,
                            (unsigned long long)config_now(t->env->cfg, max_message_bytes));
    } else if (refusal == SP_TOO_MANY) {
        stats_add(requests_refused_overload, 1);
        request_reply_error(req, ATTN_EOVERLOAD, RETRY_AFTER_US, "%s",
                            share_say(p->full, SHARE_MESSAGES,
                                      messages_free(t->env, atomic_load(&t->env->n_messages)),
                                      why));
    } else {
        stats_add(requests_refused_overload, 1);
        request_reply_error(req, ATTN_EOVERLOAD, RETRY_AFTER_US,
                            "no buffer for a message of %llu bytes: cache.io_memory, or this "
                            "connection's share of it (listen.peer_share), is used up",
                            (unsigned long long)p->body_bytes);
    }
}

static void message_complete(struct sp_peer *p)
{
    struct transport_sp *t = p->t;
    sp_wait_stop(&p->read_wait);
    hold_large(p, 0);
    if (p->refusal != SP_ACCEPTED) {
        refuse_message(p);
        return;
    }
    struct request *req = p->req;
    char why[256];
    p->req = NULL;
    p->n_requests++;
    p->on->n_owed++;
    attn_status st =
        request_decode(req, clock_now_ns(), config_now(t->env->cfg, default_timeout_us),
                       config_now(t->env->cfg, max_timeout_us),
                       config_now(t->env->cfg, max_message_bytes), why, sizeof(why));
    p->turn_bytes += MESSAGE_COST + HEADER_COST * (req->msg->n_bytes - req->wire.payload_bytes) +
                     (req->msg->n_bytes - p->body_bytes);
    if (st == ATTN_OK)
        engine_submit(t->env->engine, req);
    else
        request_reply_error(req, st, st == ATTN_EOVERLOAD ? RETRY_AFTER_US : 0, "%s", why);
}

/* Refuses the message: the rest of it is dropped as it arrives. Its first bytes are kept, so that
 * the answer can name its id and its session is renewed. false: no memory even for that; the peer
 * was cut. */
static bool message_drop(struct sp_peer *p, enum sp_refusal refusal)
{
    struct transport_sp *t = p->t;
    uint64_t kept = p->body_bytes < WIRE_PEEK_BYTES ? p->body_bytes : WIRE_PEEK_BYTES;
    struct request *req = request_new(t->base.ops, p, p->share, NULL, (size_t)kept);
    if (req == NULL) {
        stats_add(peers_cut_memory, 1);
        sp_peer_cut(p, "out of memory");
        return false;
    }
    if (p->req != NULL) {
        memcpy(req->msg->data, p->req->msg->data, p->n_body < kept ? (size_t)p->n_body : kept);
        memcpy(req->peer_data, p->req->peer_data, sizeof(req->peer_data));
        req->peer_data_bytes = p->req->peer_data_bytes;
        req->principal = p->principal;
        request_free(p->req);
    }
    p->req = req;
    p->refusal = refusal;
    hold_large(p, 0);
    return true;
}

/* The next buffer size for a message of body_bytes that has filled `has` bytes: for a small
 * message, or one of at most 32 times that, all of it; else sixteen times that. */
static size_t next_room(uint64_t body_bytes, size_t has)
{
    return body_bytes <= (has == 0 ? IOBUF_SMALL_BYTES : 32 * (uint64_t)has) ? (size_t)body_bytes
           : has == 0                                                        ? FIRST_ROOM_BYTES
                                                                             : 16 * has;
}

/* The buffer is full before the message is complete: takes a larger one, or drops the message. */
static void message_grow(struct sp_peer *p)
{
    struct transport_sp *t = p->t;
    size_t n = next_room(p->body_bytes, p->req->msg->n_bytes);
    if (large_take(p, n) && request_grow(p->req, t->env->bufs, n, (size_t)p->n_body) == ATTN_OK)
        hold_large(p, n);
    else
        message_drop(p, SP_OVERLOAD);
}

/* Counts one more message of the peer. One over its share is refused, or if its replies are not
 * read, or few messages are left for others, the peer was cut: false. */
static bool message_count(struct sp_peer *p)
{
    struct transport_env *env = p->t->env;
    uint32_t n_free = messages_free(env, atomic_fetch_add(&env->n_messages, 1));
    p->full = share_take(p->share, SHARE_MESSAGES, 1, n_free, messages_most(env));
    if (p->full == NULL)
        return true;
    if (!atomic_load_explicit(&p->share->is_behind, memory_order_relaxed) &&
        n_free > messages_most(env) / 8) {
        share_add(p->share, SHARE_MESSAGES, 1);
        return true;
    }
    atomic_fetch_sub(&env->n_messages, 1);
    char why[SHARE_TEXT_BYTES];
    stats_add(peers_cut_slow_reader, 1);
    sp_peer_cut(p, share_say(p->full, SHARE_MESSAGES, n_free, why));
    return false;
}

/* The frame has the ids and the size: takes a buffer for the begin of the body. */
static void message_begin(struct sp_peer *p)
{
    struct transport_sp *t = p->t;
    p->body_bytes = p->frame.body_left;
    p->n_body = 0;
    p->refusal = SP_ACCEPTED;
    bool is_oversize = p->body_bytes > config_now(t->env->cfg, max_message_bytes);
    if (!message_count(p))
        return;
    if (!is_oversize && p->full == NULL)
        p->req = request_new(t->base.ops, p, p->share, t->env->bufs, next_room(p->body_bytes, 0));
    if (p->req == NULL && !message_drop(p, is_oversize       ? SP_OVERSIZE
                                           : p->full != NULL ? SP_TOO_MANY
                                                             : SP_OVERLOAD)) {
        message_uncount(t, p->share);
        return;
    }
    p->req->began_ns = clock_now_ns();
    p->req->principal = p->principal;
    memcpy(p->req->peer_data, p->frame.ids, 4 * (size_t)p->frame.n_ids);
    p->req->peer_data_bytes = 4 * p->frame.n_ids;
    if (p->body_bytes == 0)
        message_complete(p);
}

/* Takes n bytes of the body; bytes NULL: they are in place already. */
static void message_body(struct sp_peer *p, const uint8_t *bytes, size_t n)
{
    struct iobuf *msg = p->req->msg;
    if (bytes != NULL && p->n_body < msg->n_bytes) {
        size_t room = msg->n_bytes - (size_t)p->n_body;
        memcpy(msg->data + p->n_body, bytes, n < room ? n : room);
    }
    p->n_body += n;
    sp_frame_took(&p->frame, n);
    if (p->refusal == SP_ACCEPTED && p->n_body == msg->n_bytes && p->frame.body_left > 0) {
        message_grow(p);
        if (p->is_closing)
            return;
    }
    if (p->frame.body_left == 0 || (p->refusal == SP_OVERSIZE && p->n_body >= WIRE_PREAMBLE_BYTES))
        message_complete(p);
}

/* How many bytes of the body can be taken now: what fits the buffer, or all if they are dropped. */
static size_t room_left(const struct sp_peer *p)
{
    uint64_t n = p->frame.body_left;
    uint64_t room = p->req->msg->n_bytes - p->n_body;
    return (size_t)(p->refusal == SP_ACCEPTED && room < n ? room : n);
}

static void consume(struct sp_peer *p, const uint8_t *bytes, size_t n)
{
    while (n > 0 && !p->is_closing && !p->is_doomed) {
        size_t k;
        if (p->req != NULL) {
            k = room_left(p) < n ? room_left(p) : n;
            message_body(p, bytes, k);
        } else {
            enum sp_event event;
            k = sp_frame_feed(&p->frame, bytes, n, &event);
            if (event == SP_READY) {
                sp_wait_stop(&p->read_wait);
                /* a network peer must be identified in time, to keep its place */
                if (!p->t->is_ipc && p->t->env->cfg->tenants[0] != '\0')
                    sp_wait_start(&p->on->hellos, &p->hello_wait);
            } else if (event == SP_MESSAGE) {
                message_begin(p);
            } else if (event == SP_BAD) {
                if (p->read_wait.list == &p->on->handshakes)
                    stats_add(peers_cut_handshake, 1);
                else
                    stats_add(peers_cut_malformed, 1);
                sp_peer_cut(p, p->frame.why);
            }
        }
        bytes += k;
        n -= k;
    }
}

uint8_t *sp_peer_room(struct sp_peer *p, size_t *out_n)
{
    if (p->req == NULL || p->refusal != SP_ACCEPTED)
        return NULL;
    *out_n = room_left(p);
    return p->req->msg->data + p->n_body;
}

static void on_alloc(uv_handle_t *handle, size_t suggested, uv_buf_t *buf)
{
    (void)suggested;
    struct sp_peer *p = handle->data;
    size_t room = BEGIN_BYTES, n;
    uint8_t *in_place = sp_peer_room(p, &n);
    if (p->turn_bytes >= TURN_BYTES || (p->tls != NULL && !sp_tls_may_take(p))) {
        p->turn_bytes = 0; /* no buffer: libuv goes on with other peers and comes back */
        *buf = uv_buf_init(NULL, 0);
        return;
    }
    if (in_place == NULL || n < DIRECT_MIN_BYTES) {
        in_place = NULL;
    } else if (p->tls != NULL) { /* what comes is encrypted */
        room = SP_READ_AHEAD_BYTES;
        in_place = NULL;
    } else {
        room = n < DIRECT_MAX_BYTES ? n : DIRECT_MAX_BYTES;
    }
    *buf = uv_buf_init((char *)(in_place != NULL ? in_place : p->on->read_ahead), (unsigned)room);
}

void sp_peer_take(struct sp_peer *p, const uint8_t *bytes, size_t n)
{
    if (bytes == NULL)
        message_body(p, NULL, n);
    else
        consume(p, bytes, n);
}

void sp_peer_end_of_file(struct sp_peer *p)
{
    /* a half-closed peer may still read its answers; an incomplete message is dropped */
    uv_read_stop(&p->io.stream);
    sp_peer_hold(p);
    p->is_eof = true;
    sp_wait_stop(&p->read_wait);
    hold_large(p, 0);
    sp_message_free(p->t, p->req);
    p->req = NULL;
    sp_peer_leave_if_done(p);
}

/* Starts or stops the deadline for the rest of a message or of a TLS record. */
static void watch_parts(struct sp_peer *p)
{
    bool is_inside = sp_frame_is_inside(&p->frame) || (p->tls != NULL && sp_tls_is_inside(p));
    if (p->is_closing || p->is_doomed || p->is_eof)
        return;
    if (is_inside && p->read_wait.list == NULL)
        sp_wait_start(&p->on->bodies, &p->read_wait);
    else if (!is_inside && p->read_wait.list == &p->on->bodies)
        sp_wait_stop(&p->read_wait);
}

static void on_read(uv_stream_t *stream, ssize_t n_read, const uv_buf_t *buf)
{
    struct sp_peer *p = stream->data;
    if (n_read == UV_ENOBUFS && p->tls != NULL && !sp_tls_may_take(p))
        sp_tls_line_up(p);
    if (n_read == 0 || n_read == UV_ENOBUFS)
        return;
    if (n_read == UV_EOF && p->tls != NULL && !p->is_doomed) {
        stats_add(peers_cut_tls, 1);
        sp_peer_cut(p, "TLS: the connection ended without close_notify");
        return;
    }
    if (n_read == UV_EOF) {
        sp_peer_end_of_file(p);
        return;
    }
    if (n_read < 0) {
        sp_peer_close(p);
        return;
    }
    stats_add(received_bytes, (uint64_t)n_read);
    p->turn_bytes += (uint64_t)n_read;
    loop_worked(p->on->loop, config_now(p->t->env->cfg, loop_spin_us));
    const uint8_t *bytes = (const uint8_t *)buf->base;
    if (p->tls != NULL && !p->is_doomed)
        sp_tls_take(p, bytes, (size_t)n_read);
    else if (p->tls == NULL)
        sp_peer_take(p, bytes != p->on->read_ahead ? NULL : bytes, (size_t)n_read);
    watch_parts(p);
    sp_peer_let_go(p); /* which TLS has held to read */
}

void sp_peer_read(struct sp_peer *p)
{
    if (uv_read_start(&p->io.stream, on_alloc, on_read) != 0)
        sp_peer_close(p);
}

void sp_peer_stop_reading(struct sp_peer *p)
{
    uv_read_stop(&p->io.stream);
    sp_tls_leave_line(p);
    if (!p->is_shut)
        sp_wait_stop(&p->read_wait);
    hold_large(p, 0);
    request_free(p->req);
    p->req = NULL;
}

/* ---- the beginning of a peer ---- */

/* Sets TCP_NODELAY, so that small messages leave at once, and how a host that does not answer is
 * noticed within listen.host_timeout: by TCP_USER_TIMEOUT where bytes wait for it, else by the
 * second of two keep-alive probes. */
static void set_tcp_options(int fd, const struct config *cfg)
{
    const unsigned ms = (unsigned)(config_now(cfg, host_timeout_us) / 1000);
    const int on = 1, probe_s = ms < 2000 ? 1 : (int)(ms / 2000);
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &probe_s, sizeof probe_s);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &probe_s, sizeof probe_s);
    setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &ms, sizeof ms);
}

static void peer_identify(struct sp_peer *p)
{
    char text[PRINCIPAL_TEXT_BYTES];
    if (p->t->is_ipc) {
        p->principal = principal_of_socket(p->fd);
        snprintf(p->name, sizeof(p->name), "%s", principal_format(&p->principal, text));
    } else {
        struct sockaddr_storage sa;
        socklen_t n = sizeof(sa);
        memset(&sa, 0, sizeof(sa));
        (void)getpeername(p->fd, (struct sockaddr *)&sa, &n);
        p->principal = principal_of_address((struct sockaddr *)&sa);
        address_format((struct sockaddr *)&sa, p->name, sizeof(p->name));
        set_tcp_options(p->fd, p->t->env->cfg);
    }
}

/* Finds room for it beside n_others peers, and among those of its principal. NULL: it has its
 * share; else why not, in why. */
static const char *place_take(struct sp_peer *p, uint32_t n_others, char why[SHARE_TEXT_BYTES])
{
    uint32_t most = config_now(p->t->env->cfg, max_peers);
    if (n_others >= most)
        return "listen.max_peers is reached";
    struct share *share = share_open(p->t->env->shares, &p->principal);
    if (share == NULL)
        return "out of memory";
    const struct share *full = share_take(share, SHARE_PEERS, 1, most - n_others, most);
    if (full == NULL) {
        p->share = share;
        return NULL;
    }
    share_say(full, SHARE_PEERS, most - n_others, why);
    share_unref(share);
    return why;
}

bool sp_peer_is_welcome(struct sp_peer *p)
{
    char text[SHARE_TEXT_BYTES];
    const char *why = place_take(p, atomic_load(&p->t->env->n_peers) - 1, text);
    if (why == NULL)
        return true;
    stats_add(peers_refused, 1);
    sp_peer_cut(p, why);
    return false;
}

struct sp_peer *sp_peer_new(struct transport_sp *t)
{
    struct sp_peer *p = calloc(1, sizeof(*p));
    if (p == NULL)
        return NULL;
    p->t = t;
    STAILQ_INIT(&p->replies);
    p->read_wait.peer = p->hello_wait.peer = p->progress_wait.peer = p->write_wait.peer = p;
    return p;
}

bool sp_peer_admit(struct sp_peer *p)
{
    struct transport_env *env = p->t->env;
    char text[SHARE_TEXT_BYTES];
    peer_identify(p);
    const char *why = place_take(p, atomic_load(&env->n_peers), text);
    if (why != NULL) {
        stats_add(peers_refused, 1);
        log_cut(p, why);
        close(p->fd);
        free(p);
        return false;
    }
    p->on = &p->t->loops[loops_choose(env->loops)];
    atomic_fetch_add(&env->n_peers, 1);
    atomic_fetch_add(&p->on->loop->n_peers, 1);
    stats_add(peers, 1);
    return true;
}

void sp_peer_drop(struct sp_peer *p)
{
    peer_uncount(p);
    share_unref(p->share);
    close(p->fd);
    free(p);
}

/* Makes a handle of the connection. */
static bool peer_open(struct sp_peer *p)
{
    struct sp_loop *on = p->on;
    int rc = p->t->is_ipc ? uv_pipe_init(on->loop->uv, &p->io.pipe, 0)
                          : uv_tcp_init(on->loop->uv, &p->io.tcp);
    if (rc != 0) {
        sp_peer_drop(p);
        return false;
    }
    p->io.handle.data = p;
    on->n_handles++;
    LIST_INSERT_HEAD(&on->peers, p, entry);
    rc = p->t->is_ipc ? uv_pipe_open(&p->io.pipe, p->fd) : uv_tcp_open(&p->io.tcp, p->fd);
    if (rc != 0) {
        close(p->fd);
        sp_peer_close(p);
    }
    return rc == 0;
}

void sp_peer_begin(struct sp_peer *p)
{
    struct transport_sp *t = p->t;
    if (!peer_open(p))
        return;
    stats_add(peers_accepted, 1);
    log_debug("%s: peer came (%s)", t->url, p->name);
    sp_frame_init(&p->frame, t->is_ipc);
    sp_wait_start(&p->on->handshakes, &p->read_wait);
    uv_buf_t hello = uv_buf_init((char *)(uintptr_t)sp_handshake, SP_HANDSHAKE_BYTES);
    bool is_begun = t->tls != NULL ? sp_tls_begin(p)
                                   : uv_try_write(&p->io.stream, &hello, 1) == SP_HANDSHAKE_BYTES;
    if (is_begun)
        sp_peer_read(p);
    else
        sp_peer_close(p);
}
