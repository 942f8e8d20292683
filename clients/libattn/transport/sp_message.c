/* sp_message.c: messages on a connection, in pieces as they come and go: a head of length and id,
 * on ipc with a byte before it, then the message.
 */
#include <errno.h>
#include <string.h>
#include <sys/socket.h>

#include "clients/libattn/transport/secure.h"
#include "clients/libattn/transport/sp_internal.h"

#define SP_ID_BIT 0x80000000u

/* Makes sp->in of the head of a message, which is in sp->read from read_at on. */
static bool take_head(struct sp *sp)
{
    const uint8_t *p = sp->read + sp->read_at;
    uint64_t bytes = 0, most = atomic_load(&sp->max_message_bytes);
    uint32_t id = 0;
    if (sp->address.is_ipc && *p++ != 1) {
        sp_disconnect(sp, "the daemon sent a message of an unknown type");
        return false;
    }
    for (int i = 0; i < 8; i++)
        bytes = bytes << 8 | *p++;
    for (int i = 0; i < 4; i++)
        id = id << 8 | *p++;
    if (bytes < 4 || bytes - 4 > most || !(id & SP_ID_BIT)) {
        sp_disconnect(
            sp, "the daemon sent a message of %llu bytes and id 0x%08x, expected at most %llu",
            (unsigned long long)bytes, id, (unsigned long long)most);
        return false;
    }
    sp->in = sp_message_new(sp->memory, (size_t)bytes - 4);
    if (sp->in == NULL) {
        sp_disconnect(sp, "no memory for an answer of %llu bytes", (unsigned long long)bytes);
        return false;
    }
    sp->in_at = 0;
    sp->in_id = id & ~SP_ID_BIT;
    sp->read_at = (size_t)(p - sp->read);
    return true;
}

/* Reads a head, which may come in pieces. */
static bool read_head(struct sp *sp)
{
    size_t want = SP_HEAD_BYTES - !sp->address.is_ipc, n = sp->read_end - sp->read_at;
    if (n > 0 && n < want && sp->read_at > 0) { /* room behind it */
        memmove(sp->read, sp->read + sp->read_at, n);
        sp->read_at = 0;
        sp->read_end = n;
    }
    while (n < want) {
        if (n == 0)
            sp->read_at = sp->read_end = 0;
        ssize_t more = sp_read(sp, sp->read + sp->read_end, sizeof sp->read - sp->read_end);
        if (more == 0)
            sp_disconnect(sp, "the daemon hung up");
        else if (more < 0 && errno != EAGAIN && errno != EINTR)
            sp_disconnect(sp, "%s", sp_why_broken(sp));
        if (more <= 0)
            return false;
        sp->read_end += (size_t)more;
        n += (size_t)more;
    }
    return take_head(sp);
}

static bool read_body(struct sp *sp, size_t max, bool *out_has_more)
{
    struct sp_message *m = sp->in;
    const size_t from = sp->in_at;
    while (sp->in_at < m->bytes) {
        size_t left = m->bytes - sp->in_at, ready = sp->read_end - sp->read_at;
        uint8_t *dst = (uint8_t *)(m + 1) + sp->in_at;
        if (ready > 0) {
            size_t n = ready < left ? ready : left;
            memcpy(dst, sp->read + sp->read_at, n);
            sp->read_at += n;
            sp->in_at += n;
            continue;
        }
        ssize_t n = sp_read(sp, dst, left);
        if (n == 0)
            sp_disconnect(sp, "the daemon hung up");
        else if (n < 0 && errno != EAGAIN && errno != EINTR)
            sp_disconnect(sp, "%s", sp_why_broken(sp));
        if (n <= 0)
            return false;
        sp->in_at += (size_t)n;
        *out_has_more = sp->in_at < m->bytes && sp->in_at - from >= max;
        if (*out_has_more)
            return false;
    }
    return true;
}

bool sp_message_write_locked(struct sp *sp, size_t max)
{
    struct sp_message *m = sp->out;
    size_t head_bytes = SP_HEAD_BYTES - !sp->address.is_ipc;
    const size_t end =
        max < head_bytes + m->bytes - sp->out_at ? sp->out_at + max : head_bytes + m->bytes;
    while (sp->out_at < end) {
        size_t at = sp->out_at < head_bytes ? sp->out_at : head_bytes;
        size_t body_at = sp->out_at - at;
        struct iovec iov[2] = {{sp->out_head + at, head_bytes - at},
                               {(uint8_t *)(m + 1) + body_at, end - head_bytes - body_at}};
        struct msghdr hdr = {.msg_iov = iov, .msg_iovlen = 2};
        ssize_t n = sp->secure != NULL ? secure_send(sp->secure, sp->socket, iov, 2)
                                       : sendmsg(sp->socket, &hdr, MSG_NOSIGNAL);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return false; /* full; or broken, which the receiving thread learns from epoll */
        sp->out_at += (size_t)n;
    }
    if (end < head_bytes + m->bytes)
        return false;
    if (sp->secure != NULL && !secure_flush(sp->secure, sp->socket))
        return false;
    sp_message_free(sp->memory, m);
    sp->out = NULL;
    return true;
}

void sp_message_put_head(struct sp *sp, size_t message_bytes, uint32_t id)
{
    uint64_t bytes = (uint64_t)message_bytes + 4;
    uint8_t *p = sp->out_head;
    if (sp->address.is_ipc)
        *p++ = 1;
    for (int shift = 56; shift >= 0; shift -= 8)
        *p++ = (uint8_t)(bytes >> shift);
    for (int shift = 24; shift >= 0; shift -= 8)
        *p++ = (uint8_t)((id | SP_ID_BIT) >> shift);
}

bool sp_message_read(struct sp *sp, size_t max, bool *out_has_more)
{
    *out_has_more = false;
    return (sp->in != NULL || read_head(sp)) && read_body(sp, max, out_has_more);
}
