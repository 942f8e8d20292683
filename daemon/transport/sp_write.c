/* sp_write.c: writes replies to a connection. They wait in the peer's queue and are written many at
 * a time, first without waiting (uv_try_write), the rest with one uv_write at a time. Those of a
 * TLS peer go through transport/sp_tls.c. A single short reply does not come here: the engine's
 * thread has written it already.
 */
#include <sched.h>
#include <string.h>
#include <sys/socket.h>

#include "daemon/transport/sp_internal.h"

enum {
    MAX_GATHER_BYTES = 4 << 20,
    ANSWER_BYTES = 32 << 10, /* a reply of this size takes some 5 us to write */
    ANSWER_MESSAGES = 2, /* with more on their way the loops do better side by side */
};

static void on_shutdown(uv_shutdown_t *shutdown, int status)
{
    (void)shutdown;
    (void)status; /* in any case the peer's end of file or the deadline closes it */
}

void sp_peer_leave_if_done(struct sp_peer *p)
{
    if (p->is_closing || p->n_requests > 0 || !STAILQ_EMPTY(&p->replies) || p->cipher != NULL)
        return;
    if (p->tls != NULL && (p->is_eof || (p->is_doomed && !p->is_shut)))
        sp_tls_end(p);
    if (p->is_closing)
        return;
    if (p->is_eof) {
        sp_peer_close(p);
    } else if (p->is_doomed && !p->is_shut) {
        /* closing with unread bytes would reset the connection and lose the answer: so end our
         * side, drop what still comes, and wait for the peer to close */
        p->is_shut = true;
        sp_wait_start(&p->on->bodies, &p->read_wait);
        if (uv_shutdown(&p->shutdown, &p->io.stream, on_shutdown) != 0)
            sp_peer_close(p);
    }
}

static size_t reply_bytes(const struct request *req)
{
    return req->peer_data_bytes + req->reply->n_bytes;
}

static void write_pop(struct sp_peer *p)
{
    struct request *req = STAILQ_FIRST(&p->replies);
    STAILQ_REMOVE_HEAD(&p->replies, queued);
    p->write_bytes -= reply_bytes(req);
    stats_add(sent_bytes, reply_bytes(req));
    request_sent(req);
    sp_request_done(p->on, req);
}

/* Collects the first replies of the queue as buffers, without the write_offset bytes written. */
static uint32_t write_gather(struct sp_peer *p, uv_buf_t bufs[SP_MAX_PIECES], uint32_t *out_n_bufs,
                             size_t *out_bytes)
{
    uint32_t n = 0, n_bufs = 0;
    size_t bytes = 0, skip = p->write_offset;
    struct request *req;
    STAILQ_FOREACH(req, &p->replies, queued) {
        if (n == SP_MAX_GATHER)
            break;
        if (n > 0 && bytes + reply_bytes(req) > MAX_GATHER_BYTES)
            break;
        size_t head = req->peer_data_bytes;
        uint8_t *body = req->reply->data + req->reply->offset;
        if (skip < head)
            bufs[n_bufs++] = uv_buf_init((char *)req->peer_data + skip, (unsigned)(head - skip));
        size_t body_skip = skip > head ? skip - head : 0;
        bufs[n_bufs++] =
            uv_buf_init((char *)body + body_skip, (unsigned)(req->reply->n_bytes - body_skip));
        bytes += reply_bytes(req) - skip;
        skip = 0;
        n++;
    }
    *out_n_bufs = n_bufs;
    *out_bytes = bytes;
    return n;
}

size_t sp_peer_gather(struct sp_peer *p, struct iovec pieces[SP_MAX_PIECES])
{
    uv_buf_t bufs[SP_MAX_PIECES];
    uint32_t n_bufs;
    size_t bytes;
    write_gather(p, bufs, &n_bufs, &bytes);
    for (uint32_t i = 0; i < n_bufs; i++)
        pieces[i] = (struct iovec){bufs[i].base, bufs[i].len};
    return n_bufs;
}

void sp_peer_wrote(struct sp_peer *p, size_t n)
{
    for (; n > 0 && n + p->write_offset >= reply_bytes(STAILQ_FIRST(&p->replies)); write_pop(p)) {
        n -= reply_bytes(STAILQ_FIRST(&p->replies)) - p->write_offset;
        p->write_offset = 0;
    }
    p->write_offset += n;
}

static void on_written(uv_write_t *write, int status)
{
    struct sp_peer *p = write->handle->data;
    if (p->is_closing)
        return; /* on_closed frees the queue */
    if (status < 0) {
        sp_peer_close(p);
        return;
    }
    sp_wait_stop(&p->write_wait);
    atomic_store_explicit(&p->share->is_behind, false, memory_order_relaxed);
    p->write_offset = 0;
    for (; p->n_writing > 0; p->n_writing--)
        write_pop(p);
    sp_peer_flush(p);
}

void sp_peer_hold(struct sp_peer *p)
{
    enum sp_writer writer = SP_WRITER_NOBODY;
    while (!atomic_compare_exchange_strong(&p->writer, &writer, SP_WRITER_LOOP) &&
           writer != SP_WRITER_LOOP && writer != SP_WRITER_TORN) {
        writer = SP_WRITER_NOBODY;
        sched_yield();
    }
}

void sp_peer_let_go(struct sp_peer *p)
{
    if (STAILQ_EMPTY(&p->replies) && !p->is_closing && !p->is_eof && !p->is_doomed &&
        p->hello_wait.list == NULL && atomic_load(&p->writer) == SP_WRITER_LOOP &&
        (p->tls == NULL || sp_tls_is_quiet(p)))
        atomic_store(&p->writer, SP_WRITER_NOBODY);
}

/* Writes what the socket takes of a reply. Returns how much of it needs no more writing, by the
 * socket's or the TLS stream's doing; -1: none. is_sent: the socket has all of it. */
static ssize_t write_now(struct sp_peer *p, const struct request *req, bool *is_sent)
{
    struct iovec pieces[2] = {{(void *)(uintptr_t)req->peer_data, req->peer_data_bytes},
                              {req->reply->data + req->reply->offset, req->reply->n_bytes}};
    struct msghdr message = {.msg_iov = pieces, .msg_iovlen = 2};
    if (strcmp(req->principal.tenant, p->principal.tenant) != 0)
        return -1; /* the loop has to know the tenant that the engine has identified */
    if (p->tls != NULL)
        return sp_tls_answer(p, pieces, 2, is_sent);
    ssize_t written = sendmsg(p->fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    *is_sent = written == (ssize_t)reply_bytes(req);
    return written;
}

bool sp_peer_answer(struct sp_peer *p, struct request *req)
{
    struct sp_loop *on = p->on;
    size_t n = reply_bytes(req);
    enum sp_writer writer = SP_WRITER_NOBODY;
    if (n > ANSWER_BYTES || atomic_load(&p->t->env->n_messages) > ANSWER_MESSAGES ||
        !atomic_compare_exchange_strong(&p->writer, &writer, SP_WRITER_OTHER))
        return false;
    bool is_sent = false;
    ssize_t written = write_now(p, req, &is_sent);
    if (is_sent) {
        stats_add(sent_bytes, n);
        request_sent(req);
        sp_message_free(p->t, req);
        loop_stay(on->loop);
        atomic_fetch_sub(&p->n_requests, 1);
        atomic_fetch_sub(&on->n_owed, 1);
        atomic_store(&p->writer, SP_WRITER_NOBODY); /* all may be gone from here on */
        return true;
    }
    bool is_torn = written > 0;
    p->torn = is_torn ? req : NULL;
    p->write_offset = is_torn ? (size_t)written : 0;
    atomic_store(&p->writer, is_torn ? SP_WRITER_TORN : SP_WRITER_NOBODY);
    return false;
}

void sp_peer_flush(struct sp_peer *p)
{
    uv_buf_t bufs[SP_MAX_PIECES];
    sp_peer_hold(p);
    if (atomic_load(&p->writer) == SP_WRITER_TORN)
        return; /* the rest of that reply comes first */
    if (p->tls != NULL)
        sp_tls_flush(p);
    while (p->tls == NULL && !STAILQ_EMPTY(&p->replies) && p->n_writing == 0 && !p->is_closing) {
        uint32_t n_bufs;
        size_t bytes;
        write_gather(p, bufs, &n_bufs, &bytes);
        int written = uv_try_write(&p->io.stream, bufs, n_bufs);
        if (written < 0 && written != UV_EAGAIN) {
            sp_peer_close(p);
            return;
        }
        if (written > 0)
            sp_peer_wrote(p, (size_t)written);
        if (written >= 0 && (size_t)written == bytes)
            continue;
        p->n_writing = write_gather(p, bufs, &n_bufs, &bytes);
        sp_wait_start(&p->on->writes, &p->write_wait);
        atomic_store_explicit(&p->share->is_behind, true, memory_order_relaxed);
        if (uv_write(&p->write, &p->io.stream, bufs, n_bufs, on_written) != 0) {
            p->n_writing = 0;
            sp_peer_close(p);
        }
    }
    sp_peer_leave_if_done(p);
    sp_peer_let_go(p);
}

void sp_peer_put_head(const struct sp_peer *p, struct request *req)
{
    uint32_t n_ids = req->peer_data_bytes / 4;
    uint8_t ids[4 * SP_MAX_IDS];
    memcpy(ids, req->peer_data, req->peer_data_bytes);
    req->peer_data_bytes = (uint32_t)sp_head_encode(p->t->is_ipc, ids, n_ids, req->reply->n_bytes,
                                                    (uint8_t *)req->peer_data);
}

void sp_peer_queue(struct sp_peer *p, struct request *req)
{
    struct transport_sp *t = p->t;
    bool is_torn = atomic_load(&p->writer) == SP_WRITER_TORN && req == p->torn;
    p->n_requests--;
    if (p->is_closing) {
        sp_request_done(p->on, req);
        sp_peer_free_if_done(p);
        return;
    }
    if (req->principal.tenant[0] != '\0') { /* the engine has identified the connection's tenant */
        sp_peer_hold(p);
        p->principal = req->principal;
        sp_wait_stop(&p->hello_wait);
    }
    iobuf_release(req->msg); /* only the reply is needed from here */
    req->msg = NULL;
    if (is_torn) {
        p->torn = NULL;
        STAILQ_INSERT_HEAD(&p->replies, req, queued);
        atomic_store(&p->writer, SP_WRITER_LOOP);
    } else {
        STAILQ_INSERT_TAIL(&p->replies, req, queued);
    }
    bool is_first = is_torn || p->write_bytes == 0;
    p->write_bytes += reply_bytes(req);
    if (!is_first && p->write_bytes > config_now(t->env->cfg, max_peer_write_bytes)) {
        stats_add(peers_cut_slow_reader, 1);
        sp_peer_cut(p, "replies waiting for it are over listen.max_peer_write");
    } else if (is_torn && p->write_offset == reply_bytes(req)) {
        p->write_offset = 0; /* the TLS stream has all of it */
        write_pop(p);
    }
}
