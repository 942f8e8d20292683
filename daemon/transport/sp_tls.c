/* sp_tls.c: peers of tls+tcp:// addresses: a TLS stream between the socket's bytes and what
 * transport/sp_peer.c and transport/sp_write.c read and write.
 *
 * The TLS and SP handshakes share one deadline. An incomplete record is waited for like an
 * incomplete message. Encrypted bytes are sent at once; those that the socket does not take are
 * kept in the peer's `cipher`, and nothing more is encrypted until they are sent. So a slow reader
 * costs the memory of its queue, as without TLS, and of one piece.
 */
#include <openssl/ssl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include "daemon/base/log.h"
#include "daemon/transport/sp_internal.h"
#include "daemon/transport/tls_server.h"

/* Of replies, encrypted and sent at a time, so that the worker decrypts a piece while the next is
 * encrypted; one record at a time while many pieces wait for slow readers. */
enum { PIECE_BYTES = 64 << 10, MANY_BYTES = 8 << 20 };

bool sp_tls_begin(struct sp_peer *p)
{
    SSL_CTX *context = tls_server_take(p->t->tls);
    p->tls = tls_stream_new(context, NULL);
    SSL_CTX_free(context); /* the stream has a reference of its own */
    return p->tls != NULL;
}

static void cipher_free(struct sp_peer *p)
{
    p->on->n_owed--;
    p->t->env->cipher_bytes -= p->cipher_bytes;
    free(p->cipher);
    p->cipher = NULL;
}

void sp_tls_free(struct sp_peer *p)
{
    tls_stream_free(p->tls);
    p->tls = NULL;
    if (p->cipher != NULL)
        cipher_free(p);
}

static void broken(struct sp_peer *p)
{
    char why[256];
    snprintf(why, sizeof why, "TLS: %s", tls_stream_why(p->tls));
    stats_add(peers_cut_tls, 1);
    sp_tls_flush(p); /* sends the alert, if the socket takes it */
    if (!p->is_closing)
        sp_peer_cut(p, why);
}

/* ---- writing ---- */

static void on_cipher_written(uv_write_t *write, int status)
{
    struct sp_peer *p = write->handle->data;
    if (p->is_closing)
        return; /* sp_tls_free frees the rest */
    if (status < 0) {
        sp_peer_close(p);
        return;
    }
    sp_wait_stop(&p->write_wait);
    atomic_store_explicit(&p->share->is_behind, false, memory_order_relaxed);
    cipher_free(p);
    sp_peer_flush(p);
}

/* Sends what is encrypted; what the socket does not take is kept in p->cipher. */
static void send_cipher(struct sp_peer *p)
{
    size_t n;
    const uint8_t *bytes = tls_stream_pending(p->tls, &n);
    uv_buf_t buf = uv_buf_init((char *)(uintptr_t)bytes, (unsigned)n);
    int written = n > 0 ? uv_try_write(&p->io.stream, &buf, 1) : 0;
    if (written < 0 && written != UV_EAGAIN) {
        sp_peer_close(p);
        return;
    }
    size_t at = written > 0 ? (size_t)written : 0;
    if (at == n) {
        tls_stream_sent(p->tls, n);
        return;
    }
    p->cipher = tls_stream_take(p->tls, &n);
    p->on->n_owed++; /* the transport is not idle until it is written */
    p->cipher_bytes = n;
    p->t->env->cipher_bytes += n;
    buf = uv_buf_init((char *)p->cipher + at, (unsigned)(n - at));
    sp_wait_start(&p->on->writes, &p->write_wait);
    atomic_store_explicit(&p->share->is_behind, true, memory_order_relaxed);
    if (uv_write(&p->write, &p->io.stream, &buf, 1, on_cipher_written) != 0)
        sp_peer_close(p);
}

ssize_t sp_tls_answer(struct sp_peer *p, const struct iovec *pieces, size_t n_pieces, bool *is_sent)
{
    size_t n;
    ssize_t taken = tls_stream_write(p->tls, pieces, n_pieces, SIZE_MAX);
    const uint8_t *bytes = tls_stream_pending(p->tls, &n);
    ssize_t sent = taken > 0 ? send(p->fd, bytes, n, MSG_DONTWAIT | MSG_NOSIGNAL) : -1;
    if (sent > 0)
        tls_stream_sent(p->tls, (size_t)sent);
    *is_sent = sent == (ssize_t)n;
    return taken;
}

bool sp_tls_is_quiet(const struct sp_peer *p)
{
    size_t n;
    tls_stream_pending(p->tls, &n);
    return p->is_secure && p->cipher == NULL && n == 0;
}

void sp_tls_flush(struct sp_peer *p)
{
    if (atomic_load(&p->writer) == SP_WRITER_TORN)
        return; /* the rest of that reply comes first */
    while (!p->is_closing && p->cipher == NULL) {
        size_t n;
        tls_stream_pending(p->tls, &n);
        if (n == 0 && p->is_secure && !STAILQ_EMPTY(&p->replies)) {
            struct iovec pieces[SP_MAX_PIECES];
            size_t n_pieces = sp_peer_gather(p, pieces);
            bool is_many = p->t->env->cipher_bytes > MANY_BYTES;
            ssize_t done = tls_stream_write(p->tls, pieces, n_pieces,
                                            is_many ? TLS_STREAM_RECORD_BYTES : PIECE_BYTES);
            if (done < 0) {
                stats_add(peers_cut_tls, 1);
                sp_peer_cut(p, "TLS: a reply cannot be encrypted");
                return;
            }
            sp_peer_wrote(p, (size_t)done);
        } else if (n == 0) {
            break;
        }
        send_cipher(p);
    }
}

void sp_tls_end(struct sp_peer *p)
{
    sp_peer_hold(p);
    if (p->is_secure && p->cipher == NULL) {
        tls_stream_end(p->tls);
        send_cipher(p);
    }
}

/* ---- reading ---- */

/* Counts the peer with the connections of its certificate from now on, not of its address. */
static void become_certificate(struct sp_peer *p, const char *name)
{
    share_give(p->share, SHARE_PEERS, 1);
    share_unref(p->share);
    p->share = NULL;
    principal_set_certificate(&p->principal, name);
    sp_peer_is_welcome(p);
}

bool sp_tls_may_take(const struct sp_peer *p)
{
    return p->is_secure || p->is_doomed || p->on->shaking == NULL || p->on->shaking == p;
}

void sp_tls_line_up(struct sp_peer *p)
{
    uv_read_stop(&p->io.stream);
    TAILQ_INSERT_TAIL(&p->on->line, p, line);
    p->is_in_line = true;
}

void sp_tls_leave_line(struct sp_peer *p)
{
    if (p->is_in_line)
        TAILQ_REMOVE(&p->on->line, p, line);
    p->is_in_line = false;
}

/* The turn is the next one's in the line, whose bytes the loop finds at once. */
static void on_turn(uv_prepare_t *turn)
{
    struct sp_loop *on = turn->data;
    struct sp_peer *p = on->shaking = TAILQ_FIRST(&on->line);
    if (p == NULL) {
        uv_prepare_stop(turn);
        return;
    }
    sp_tls_leave_line(p);
    sp_peer_read(p);
}

/* Continues the TLS handshake; SP's begins when it is over. false: it is not over. */
static bool shake_hands(struct sp_peer *p)
{
    p->on->shaking = p;
    uv_prepare_start(&p->on->turn, on_turn);
    enum tls_stream_result r = tls_stream_handshake(p->tls);
    char name[TLS_STREAM_NAME_BYTES];
    if (r != TLS_STREAM_DONE && r != TLS_STREAM_MORE) {
        broken(p);
        return false;
    }
    if (r == TLS_STREAM_DONE) {
        struct iovec hello = {(void *)(uintptr_t)sp_handshake, SP_HANDSHAKE_BYTES};
        stats_add(tls_handshakes, 1);
        stats_add(tls_resumed, tls_stream_is_resumed(p->tls));
        p->is_secure = tls_stream_write(p->tls, &hello, 1, SP_HANDSHAKE_BYTES) > 0;
        if (tls_stream_peer_name(p->tls, name))
            become_certificate(p, name);
    }
    sp_tls_flush(p);
    return p->is_secure && !p->is_closing;
}

void sp_tls_take(struct sp_peer *p, const uint8_t *bytes, size_t n)
{
    sp_peer_hold(p);
    tls_stream_feed(p->tls, bytes, n);
    if (!p->is_secure && !shake_hands(p))
        return;
    while (!p->is_closing && !p->is_doomed) {
        size_t room = TLS_STREAM_RECORD_BYTES;
        uint8_t *in_place = sp_peer_room(p, &room);
        enum tls_stream_result r =
            tls_stream_read(p->tls, in_place != NULL ? in_place : p->on->plain, room, &n);
        if (r == TLS_STREAM_DONE) {
            sp_peer_take(p, in_place != NULL ? NULL : p->on->plain, n);
            continue;
        }
        if (r == TLS_STREAM_CLOSED)
            sp_peer_end_of_file(p);
        else if (r == TLS_STREAM_BROKEN)
            broken(p);
        break;
    }
    if (!p->is_closing)
        sp_tls_flush(p); /* messages of TLS itself, such as a key update */
}

bool sp_tls_is_inside(const struct sp_peer *p)
{
    return p->is_secure && tls_stream_is_inside(p->tls);
}
