/* sp_frame.c: reads handshake, length and ids from bytes, and writes the head of a reply. */
#include "daemon/transport/sp_frame.h"

#include <assert.h>
#include <string.h>

enum { HANDSHAKE, LENGTH, IDS, BAD };
enum { PROTOCOL_REQ = 0x30, PROTOCOL_REP = 0x31, IPC_MESSAGE = 1 };

const uint8_t sp_handshake[SP_HANDSHAKE_BYTES] = {0, 'S', 'P', 0, 0, PROTOCOL_REP, 0, 0};

void sp_frame_init(struct sp_frame *f, bool is_ipc)
{
    memset(f, 0, sizeof(*f));
    f->is_ipc = is_ipc;
    f->state = HANDSHAKE;
}

static enum sp_event bad(struct sp_frame *f, const char *why)
{
    f->state = BAD;
    f->why = why;
    return SP_BAD;
}

static uint64_t load_be64(const uint8_t *p)
{
    uint64_t v = 0;
    for (int i = 0; i < 8; i++)
        v = v << 8 | p[i];
    return v;
}

static enum sp_event finish_handshake(struct sp_frame *f)
{
    static const uint8_t start[4] = {0, 'S', 'P', 0};
    if (memcmp(f->part, start, 4) != 0)
        return bad(f, "handshake is not of nanomsg's protocol, version 0");
    if (f->part[4] != 0 || f->part[5] != PROTOCOL_REQ)
        return bad(f, "peer's socket is not a REQ");
    if (f->part[6] != 0 || f->part[7] != 0)
        return bad(f, "reserved bytes of the handshake are not 0");
    f->state = LENGTH;
    return SP_READY;
}

static enum sp_event finish_length(struct sp_frame *f)
{
    if (f->is_ipc && f->part[0] != IPC_MESSAGE)
        return bad(f, "message type byte is not 1");
    f->body_left = load_be64(f->part + (f->is_ipc ? 1 : 0));
    if (f->body_left < 4)
        return bad(f, "message is too short for a request id");
    f->n_ids = 0;
    f->state = IDS;
    return SP_MORE;
}

static enum sp_event finish_id(struct sp_frame *f)
{
    memcpy(f->ids + 4 * (size_t)f->n_ids, f->part, 4);
    f->n_ids++;
    f->body_left -= 4;
    if ((f->part[0] & 0x80) != 0) {
        f->state = LENGTH;
        return SP_MESSAGE;
    }
    if (f->n_ids == SP_MAX_IDS)
        return bad(f, "more than 16 ids in front of a message");
    if (f->body_left < 4)
        return bad(f, "message ends inside its id stack");
    return SP_MORE;
}

size_t sp_frame_feed(struct sp_frame *f, const uint8_t *bytes, size_t n, enum sp_event *out_event)
{
    assert(f->state == IDS || f->body_left == 0);
    size_t at = 0;
    *out_event = SP_MORE;
    while (at < n && *out_event == SP_MORE) {
        if (f->state == BAD) {
            *out_event = SP_BAD;
            break;
        }
        size_t want = f->state == HANDSHAKE ? 8 : f->state == IDS ? 4 : f->is_ipc ? 9 : 8;
        size_t k = want - f->n_have < n - at ? want - f->n_have : n - at;
        memcpy(f->part + f->n_have, bytes + at, k);
        f->n_have = (uint8_t)(f->n_have + k);
        at += k;
        if (f->n_have < want)
            break;
        f->n_have = 0;
        *out_event = f->state == HANDSHAKE ? finish_handshake(f)
                     : f->state == LENGTH  ? finish_length(f)
                                           : finish_id(f);
    }
    return at;
}

void sp_frame_took(struct sp_frame *f, uint64_t n)
{
    assert(n <= f->body_left);
    f->body_left -= n;
}

bool sp_frame_is_inside(const struct sp_frame *f)
{
    return f->state == IDS || (f->state == LENGTH && (f->n_have > 0 || f->body_left > 0));
}

size_t sp_head_encode(bool is_ipc, const uint8_t *ids, uint32_t n_ids, uint64_t body_bytes,
                      uint8_t out[SP_MAX_HEAD_BYTES])
{
    uint64_t length = body_bytes + 4 * (uint64_t)n_ids;
    size_t at = 0;
    if (is_ipc)
        out[at++] = IPC_MESSAGE;
    for (int shift = 56; shift >= 0; shift -= 8)
        out[at++] = (uint8_t)(length >> shift);
    memcpy(out + at, ids, 4 * (size_t)n_ids);
    return at + 4 * (size_t)n_ids;
}
