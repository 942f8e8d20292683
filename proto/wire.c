/* wire.c: decodes and encodes whole messages: preamble, header and the place of the payload.
 * wire_scan checks a header before protobuf-c unpacks it into the caller's arena.
 */
#include "proto/wire.h"

#include <assert.h>
#include <stdio.h>
#include <string.h>

#include "proto/wire_scan.h"

enum {
    FIRST_BODY_FIELD = 10, /* of Request; attnd.proto says so */
    LAST_BODY_FIELD = 63,
    STEP_PLAN_FIELD = 9, /* of Step: a plan in place of items, which is reserved now */
};

/* The parts of a message that do not depend on the kind of its header. */
struct message {
    struct wire_preamble preamble;
    const ProtobufCMessage *header;
    uint8_t *payload;
};

static uint64_t align_up(uint64_t n)
{
    return (n + (WIRE_ALIGN - 1)) & ~(uint64_t)(WIRE_ALIGN - 1);
}

static uint64_t head_bytes_of(uint64_t header_bytes)
{
    return align_up(WIRE_PREAMBLE_BYTES + header_bytes);
}

uint64_t wire_message_bytes(const struct wire_preamble *p)
{
    return head_bytes_of(p->header_bytes) + p->payload_bytes;
}

uint64_t wire_head_bytes(const struct wire_preamble *p)
{
    return head_bytes_of(p->header_bytes);
}

attn_status wire_preamble_decode(const uint8_t bytes[WIRE_PREAMBLE_BYTES],
                                 uint64_t max_message_bytes, struct wire_preamble *out, char *why,
                                 size_t why_bytes)
{
    uint32_t magic;
    *out = (struct wire_preamble){0};
    memcpy(&magic, bytes, 4);
    if (magic != WIRE_MAGIC) {
        snprintf(why, why_bytes, "magic is %02x %02x %02x %02x, it must be \"ATND\"", bytes[0],
                 bytes[1], bytes[2], bytes[3]);
        return ATTN_EPROTO;
    }
    memcpy(&out->version, bytes + 4, 2);
    memcpy(&out->flags, bytes + 6, 2);
    memcpy(&out->header_bytes, bytes + 8, 4);
    memcpy(&out->payload_bytes, bytes + 12, 4);
    memcpy(&out->request_id, bytes + 16, 8);
    if (out->version != WIRE_VERSION) {
        snprintf(why, why_bytes, "version is %u, this side speaks %u", out->version, WIRE_VERSION);
        return ATTN_ENOTSUP;
    }
    if (out->flags & ~WIRE_FLAG_REPLY) {
        snprintf(why, why_bytes, "flags are 0x%x, only 0x%x is known", out->flags, WIRE_FLAG_REPLY);
        return ATTN_ENOTSUP;
    }
    if (out->header_bytes > WIRE_MAX_HEADER_BYTES) {
        snprintf(why, why_bytes, "header bytes are %u, the most is %u", out->header_bytes,
                 WIRE_MAX_HEADER_BYTES);
        return ATTN_EPROTO;
    }
    if (wire_message_bytes(out) > max_message_bytes) {
        snprintf(why, why_bytes, "message has %llu bytes, the most is %llu",
                 (unsigned long long)wire_message_bytes(out),
                 (unsigned long long)max_message_bytes);
        return ATTN_EPROTO;
    }
    return ATTN_OK;
}

uint64_t wire_session_peek(const uint8_t bytes[WIRE_PEEK_BYTES])
{
    enum { TAG = 1 << 3 | 1 }; /* Request.session, field 1, fixed64 */
    uint64_t session;
    memcpy(&session, bytes + WIRE_PREAMBLE_BYTES + 1, sizeof session);
    return bytes[WIRE_PREAMBLE_BYTES] == TAG ? session : 0;
}

static void *arena_alloc(void *arena, size_t bytes)
{
    return wire_arena_alloc(arena, bytes);
}

static void arena_free(void *arena, void *p)
{
    (void)arena;
    (void)p; /* the arena is reset as a whole */
}

attn_status wire_unpack(const ProtobufCMessageDescriptor *desc, const uint8_t *bytes,
                        size_t n_bytes, struct wire_arena *a, const ProtobufCMessage **out,
                        char *why, size_t why_bytes)
{
    attn_status st = wire_scan(desc, bytes, n_bytes, why, why_bytes);
    if (st != ATTN_OK)
        return st;
    ProtobufCAllocator allocator = {arena_alloc, arena_free, a};
    *out = protobuf_c_message_unpack(desc, &allocator, n_bytes, bytes);
    if (*out != NULL)
        return ATTN_OK;
    if (a->is_out_of_memory) {
        snprintf(why, why_bytes, "no memory to unpack a header of %zu bytes", n_bytes);
        return ATTN_ENOMEM;
    }
    if (a->is_over_limit)
        snprintf(why, why_bytes, "header of %zu bytes needs more than %zu bytes unpacked", n_bytes,
                 a->limit_bytes);
    else
        snprintf(why, why_bytes, "header of %zu bytes does not unpack", n_bytes);
    return ATTN_EPROTO;
}

/* Decodes what requests and replies share. msg is readable up to the payload, which may be
 * elsewhere. out->preamble is filled as soon as the magic is right. */
static attn_status message_decode(uint8_t *msg, size_t msg_bytes, bool is_reply,
                                  struct wire_arena *a, struct message *out, char *why,
                                  size_t why_bytes)
{
    struct wire_preamble *p = &out->preamble;
    if (msg_bytes < WIRE_PREAMBLE_BYTES) {
        snprintf(why, why_bytes, "message has %zu bytes, a preamble alone has %u", msg_bytes,
                 WIRE_PREAMBLE_BYTES);
        return ATTN_EPROTO;
    }
    attn_status st = wire_preamble_decode(msg, UINT64_MAX, p, why, why_bytes);
    if (st != ATTN_OK)
        return st;
    if (!(p->flags & WIRE_FLAG_REPLY) != !is_reply) {
        snprintf(why, why_bytes, "flags are 0x%x, this is not a %s", p->flags,
                 is_reply ? "reply" : "request");
        return ATTN_EPROTO;
    }
    if (!is_reply && p->request_id == 0) {
        snprintf(why, why_bytes, "request id is 0, it must be another number");
        return ATTN_EPROTO;
    }
    if (wire_message_bytes(p) != msg_bytes) {
        snprintf(why, why_bytes,
                 "message has %zu bytes, header bytes %u and payload bytes %u make %llu", msg_bytes,
                 p->header_bytes, p->payload_bytes, (unsigned long long)wire_message_bytes(p));
        return ATTN_EPROTO;
    }
    size_t head_bytes = head_bytes_of(p->header_bytes);
    for (size_t i = WIRE_PREAMBLE_BYTES + p->header_bytes; i < head_bytes; i++) {
        if (msg[i] == 0)
            continue;
        snprintf(why, why_bytes, "padding byte at offset %zu is 0x%02x, it must be 0", i, msg[i]);
        return ATTN_EPROTO;
    }
    out->payload = msg + head_bytes;
    return wire_unpack(is_reply ? &attnd__reply__descriptor : &attnd__request__descriptor,
                       msg + WIRE_PREAMBLE_BYTES, p->header_bytes, a, &out->header, why, why_bytes);
}

/* prefix: of field names in why, "" or "plan." */
static attn_status step_check(const Attnd__Step *s, const char *prefix, char *why, size_t why_bytes)
{
    const struct {
        const char *name;
        size_t n;
    } arrays[] = {{"epoch", s->n_epoch}, {"pos", s->n_pos}, {"n_tokens", s->n_n_tokens}};
    const bool is_part = (s->flags & WIRE_STEP_PART) != 0;
    const bool is_behind = is_part && (s->flags & WIRE_STEP_FULL) != 0;
    for (unsigned i = 0; i < s->base.n_unknown_fields; i++) {
        if (s->base.unknown_fields[i].tag != STEP_PLAN_FIELD)
            continue;
        snprintf(why, why_bytes, "%sstep.plan is not supported: a step names its items", prefix);
        return ATTN_ENOTSUP;
    }
    if ((s->n_parent > 0) != ((s->flags & WIRE_STEP_TREE) != 0)) {
        snprintf(why, why_bytes, "%sstep.parent has %zu elements, step.flags is 0x%x: tree is 8",
                 prefix, s->n_parent, s->flags);
        return ATTN_EPROTO;
    }
    if ((s->n_indices > 0) != ((s->flags & WIRE_STEP_SPARSE) != 0) ||
        (s->n_indices == 0 && s->index_tokens > 0)) {
        snprintf(why, why_bytes,
                 "%sstep.n_indices is %u, index_tokens %u, step.flags is 0x%x: sparse is 32",
                 prefix, s->n_indices, s->index_tokens, s->flags);
        return ATTN_EPROTO;
    }
    if ((s->choose_blocks > 0) != ((s->flags & WIRE_STEP_CHOOSE) != 0)) {
        snprintf(why, why_bytes, "%sstep.choose_blocks is %u, step.flags is 0x%x: choose is 64",
                 prefix, s->choose_blocks, s->flags);
        return ATTN_EPROTO;
    }
    if (s->n_key_base != (is_part ? s->n_seq : 0) || s->n_n_keys != (is_behind ? s->n_seq : 0)) {
        snprintf(why, why_bytes,
                 "%sstep.key_base has %zu elements, n_keys %zu, %sstep.seq has %zu, step.flags is "
                 "0x%x: part is 128, full 16",
                 prefix, s->n_key_base, s->n_n_keys, prefix, s->n_seq, s->flags);
        return ATTN_EPROTO;
    }
    for (size_t i = 0; i < sizeof arrays / sizeof arrays[0]; i++) {
        if (arrays[i].n == s->n_seq)
            continue;
        snprintf(why, why_bytes, "%sstep.%s has %zu elements, %sstep.seq has %zu", prefix,
                 arrays[i].name, arrays[i].n, prefix, s->n_seq);
        return ATTN_EPROTO;
    }
    return ATTN_OK;
}

/* Refuses a payload where the body has no tensors. */
static attn_status payload_check(bool has_tensors, const struct message *m, char *why,
                                 size_t why_bytes)
{
    if (has_tensors || m->preamble.payload_bytes == 0)
        return ATTN_OK;
    snprintf(why, why_bytes, "payload bytes are %u, this body has no payload",
             m->preamble.payload_bytes);
    return ATTN_EPROTO;
}

/* The error for a request without a known body: a newer one, or malformed. */
static attn_status body_missing(const Attnd__Request *h, char *why, size_t why_bytes)
{
    for (unsigned i = 0; i < h->base.n_unknown_fields; i++) {
        uint32_t number = h->base.unknown_fields[i].tag;
        if (number < FIRST_BODY_FIELD || number > LAST_BODY_FIELD)
            continue;
        snprintf(why, why_bytes, "body is field %u, which this version does not know", number);
        return ATTN_ENOTSUP;
    }
    snprintf(why, why_bytes, "body is missing");
    return ATTN_EPROTO;
}

static attn_status request_decode(uint8_t *msg, size_t msg_bytes, uint8_t *payload,
                                  struct wire_arena *a, struct wire_request *out, char *why,
                                  size_t why_bytes)
{
    struct message m = {0};
    attn_status st = message_decode(msg, msg_bytes, false, a, &m, why, why_bytes);
    *out = (struct wire_request){.request_id = m.preamble.request_id};
    if (st != ATTN_OK)
        return st;
    const Attnd__Request *h = (const Attnd__Request *)m.header;
    if (h->body_case == ATTND__REQUEST__BODY__NOT_SET)
        return body_missing(h, why, why_bytes);
    if (h->body_case == ATTND__REQUEST__BODY_STEP)
        st = step_check(h->step, "", why, why_bytes);
    else if (h->body_case == ATTND__REQUEST__BODY_PLAN && h->plan->step != NULL)
        st = step_check(h->plan->step, "plan.", why, why_bytes);
    if (st != ATTN_OK)
        return st;
    st = payload_check(h->body_case == ATTND__REQUEST__BODY_STEP ||
                           h->body_case == ATTND__REQUEST__BODY_IMPORT ||
                           h->body_case == ATTND__REQUEST__BODY_WEIGHTS,
                       &m, why, why_bytes);
    if (st != ATTN_OK)
        return st;
    out->header = h;
    out->payload = payload != NULL ? payload : m.payload;
    out->payload_bytes = m.preamble.payload_bytes;
    return ATTN_OK;
}

attn_status wire_request_decode(uint8_t *msg, size_t msg_bytes, struct wire_arena *a,
                                struct wire_request *out, char *why, size_t why_bytes)
{
    return request_decode(msg, msg_bytes, NULL, a, out, why, why_bytes);
}

attn_status wire_request_decode_apart(uint8_t *head, uint8_t *payload, struct wire_arena *a,
                                      struct wire_request *out, char *why, size_t why_bytes)
{
    struct wire_preamble p;
    attn_status st = wire_preamble_decode(head, UINT64_MAX, &p, why, why_bytes);
    *out = (struct wire_request){.request_id = p.request_id};
    if (st != ATTN_OK)
        return st;
    return request_decode(head, wire_message_bytes(&p), payload, a, out, why, why_bytes);
}

attn_status wire_reply_decode(uint8_t *msg, size_t msg_bytes, struct wire_arena *a,
                              struct wire_reply *out, char *why, size_t why_bytes)
{
    struct message m = {0};
    attn_status st = message_decode(msg, msg_bytes, true, a, &m, why, why_bytes);
    *out = (struct wire_reply){.request_id = m.preamble.request_id};
    if (st != ATTN_OK)
        return st;
    const Attnd__Reply *h = (const Attnd__Reply *)m.header;
    if (h->status > 0) {
        snprintf(why, why_bytes, "status is %d, it must be 0 or negative", h->status);
        return ATTN_EPROTO;
    }
    st = payload_check(h->body_case == ATTND__REPLY__BODY_STEP ||
                           h->body_case == ATTND__REPLY__BODY_EXPORT,
                       &m, why, why_bytes);
    if (st != ATTN_OK)
        return st;
    out->header = h;
    out->payload = m.payload;
    out->payload_bytes = m.preamble.payload_bytes;
    return ATTN_OK;
}

static size_t header_head_bytes(const ProtobufCMessage *h)
{
    size_t n = protobuf_c_message_get_packed_size(h);
    return n > WIRE_MAX_HEADER_BYTES ? 0 : head_bytes_of(n);
}

static void header_encode(const ProtobufCMessage *h, uint16_t flags, uint64_t request_id,
                          size_t payload_bytes, uint8_t *dst)
{
    assert(payload_bytes <= UINT32_MAX);
    uint32_t magic = WIRE_MAGIC;
    uint16_t version = WIRE_VERSION;
    uint32_t header_bytes = (uint32_t)protobuf_c_message_pack(h, dst + WIRE_PREAMBLE_BYTES);
    uint32_t payload = (uint32_t)payload_bytes;
    assert(header_bytes <= WIRE_MAX_HEADER_BYTES);
    memcpy(dst, &magic, 4);
    memcpy(dst + 4, &version, 2);
    memcpy(dst + 6, &flags, 2);
    memcpy(dst + 8, &header_bytes, 4);
    memcpy(dst + 12, &payload, 4);
    memcpy(dst + 16, &request_id, 8);
    uint8_t *end = dst + WIRE_PREAMBLE_BYTES + header_bytes;
    memset(end, 0, (size_t)(dst + head_bytes_of(header_bytes) - end));
}

size_t wire_request_head_bytes(const Attnd__Request *h)
{
    return header_head_bytes(&h->base);
}

size_t wire_reply_head_bytes(const Attnd__Reply *h)
{
    return header_head_bytes(&h->base);
}

void wire_request_head_encode(const Attnd__Request *h, uint64_t request_id, size_t payload_bytes,
                              uint8_t *dst)
{
    header_encode(&h->base, 0, request_id, payload_bytes, dst);
}

void wire_reply_head_encode(const Attnd__Reply *h, uint64_t request_id, size_t payload_bytes,
                            uint8_t *dst)
{
    header_encode(&h->base, WIRE_FLAG_REPLY, request_id, payload_bytes, dst);
}
