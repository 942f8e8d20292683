/* wire.h: encodes and decodes attnd's messages: preamble, protobuf header, payload.
 *
 * A message is a 24-byte little-endian preamble, a protobuf header (attnd.proto), zero bytes up to
 * a multiple of 64 from the start of the message, then tensors, each starting at a multiple of 64:
 *
 *   offset 0  u32 magic "ATND"      4  u16 version (1)    6  u16 flags (bit 0: this is a reply)
 *          8  u32 header bytes     12  u32 payload bytes  16  u64 request id
 *
 * The transports' framing (SP, shared memory) is not part of it. Nothing here blocks, logs or keeps
 * state; bytes are untrusted until decoded. A decoded message points into the caller's bytes for
 * its payload and into the caller's arena for its header: drop both at once.
 */
#ifndef ATTND_PROTO_WIRE_H
#define ATTND_PROTO_WIRE_H

#include "attnd.pb-c.h"
#include "proto/attn_types.h"
#include "proto/wire_limits.h"

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "attnd's messages are little-endian");

#define WIRE_MAGIC 0x444e5441u /* "ATND" as bytes */
#define WIRE_VERSION 1u
#define WIRE_PREAMBLE_BYTES 24u
#define WIRE_ALIGN 64u
#define WIRE_FLAG_REPLY 1u

/* an arena of this limit unpacks every header that is inside the limits (wire_limits.h) */
#define WIRE_ARENA_LIMIT_BYTES ((size_t)8 << 20)

enum {
    WIRE_STEP_APPEND = 1,
    WIRE_STEP_ATTEND = 2,
    WIRE_STEP_LSE = 4,
    WIRE_STEP_TREE = 8,
    WIRE_STEP_FULL = 16,
    WIRE_STEP_SPARSE = 32,
    WIRE_STEP_CHOOSE = 64,
    WIRE_STEP_PART = 128
};

struct wire_preamble {
    uint16_t version, flags;
    uint32_t header_bytes, payload_bytes;
    uint64_t request_id;
};

/* Where an arena has its chunks from. take: at least *bytes, which gets how many there are, or
 * NULL; *out_handle is given back. */
struct wire_arena_source {
    void *(*take)(void *user, size_t *bytes, void **out_handle);
    void (*give)(void *handle);
    void *user;
};

/* A bump allocator over the caller's memory; then in chunks, from malloc or another source, up to
 * limit_bytes. */
struct wire_arena {
    uint8_t *base;
    size_t capacity_bytes, used_bytes; /* of base */
    size_t limit_bytes; /* base and chunks together */
    size_t chunk_bytes;
    struct wire_arena_source source; /* all NULL: malloc */
    struct wire_arena_chunk *chunks; /* newest first */
    bool is_over_limit; /* an allocation failed at limit_bytes, */
    bool is_out_of_memory; /* or for want of memory; both stay set until reset */
};
/* base may be NULL with base_bytes 0. */
void wire_arena_init(struct wire_arena *a, void *base, size_t base_bytes, size_t limit_bytes);
/* Returns memory aligned to 16, not cleared; NULL: over the limit or out of memory. */
void *wire_arena_alloc(struct wire_arena *a, size_t bytes);
/* Frees everything at once; the arena can be used again. */
void wire_arena_reset(struct wire_arena *a);

/* Unpacks one protobuf message into the arena, with the checks of a header.
 * Errors   ATTN_EPROTO malformed or over the arena's limit; ATTN_ENOMEM. why gets a sentence. */
attn_status wire_unpack(const ProtobufCMessageDescriptor *desc, const uint8_t *bytes,
                        size_t n_bytes, struct wire_arena *a, const ProtobufCMessage **out,
                        char *why, size_t why_bytes);

struct wire_request {
    uint64_t request_id;
    const Attnd__Request *header; /* in the arena */
    uint8_t *payload; /* in the message, WIRE_ALIGN-aligned if the message is */
    size_t payload_bytes;
};
struct wire_reply {
    uint64_t request_id;
    const Attnd__Reply *header;
    uint8_t *payload;
    size_t payload_bytes;
};

/* Reads and checks a preamble alone: magic, version, flags, header limit, sum of sizes against
 * max_message_bytes. why gets a sentence naming field and value.
 * Errors   ATTN_EPROTO; ATTN_ENOTSUP version or flags. *out is filled whenever the magic is right,
 *          else zeroed. */
attn_status wire_preamble_decode(const uint8_t bytes[WIRE_PREAMBLE_BYTES],
                                 uint64_t max_message_bytes, struct wire_preamble *out, char *why,
                                 size_t why_bytes);

/* Bytes of the message a checked preamble announces: itself, header, padding and payload. */
uint64_t wire_message_bytes(const struct wire_preamble *p);
/* The same without the payload. */
uint64_t wire_head_bytes(const struct wire_preamble *p);

/* The session id of a request of which only the first bytes have come; 0: it has none, or the
 * session is not the first field of the header, where encoders that write in order put it. */
enum { WIRE_PEEK_BYTES = WIRE_PREAMBLE_BYTES + 9 };
uint64_t wire_session_peek(const uint8_t bytes[WIRE_PEEK_BYTES]);

/* Decodes a whole message. The request id is set once the magic is right, so that an error can be
 * answered; it is 0 only if it could not be read, as a request of id 0 is refused.
 * Errors   ATTN_EPROTO anything malformed (a missing body, parallel arrays of a step that differ in
 *          length, a payload where the body has none, a limit above or of the arena is passed);
 *          ATTN_ENOTSUP version, flags, or a body this version does not know; ATTN_ENOMEM. why gets
 *          a sentence naming field and value. */
attn_status wire_request_decode(uint8_t *msg, size_t msg_bytes, struct wire_arena *a,
                                struct wire_request *out, char *why, size_t why_bytes);
attn_status wire_reply_decode(uint8_t *msg, size_t msg_bytes, struct wire_arena *a,
                              struct wire_reply *out, char *why, size_t why_bytes);
/* Decodes a request whose head (the wire_head_bytes before the payload) was copied away from its
 * payload, for memory that others write to while it is read. Does not look at the payload; its
 * length is taken from the preamble in head. */
attn_status wire_request_decode_apart(uint8_t *head, uint8_t *payload, struct wire_arena *a,
                                      struct wire_request *out, char *why, size_t why_bytes);

/* Bytes before the payload (a multiple of WIRE_ALIGN) for this header; 0 if it is longer than
 * WIRE_MAX_HEADER_BYTES. */
size_t wire_request_head_bytes(const Attnd__Request *h);
size_t wire_reply_head_bytes(const Attnd__Reply *h);
/* Writes preamble, header and padding to dst (head_bytes big); the payload goes right behind. */
void wire_request_head_encode(const Attnd__Request *h, uint64_t request_id, size_t payload_bytes,
                              uint8_t *dst);
void wire_reply_head_encode(const Attnd__Reply *h, uint64_t request_id, size_t payload_bytes,
                            uint8_t *dst);

/* Where the tensors of a step are in its payload, computed from the header and the pool's
 * geometry. */
struct wire_step_layout {
    uint64_t n_tokens; /* of all items */
    /* valid where the flag is set; v: unless it is in k */
    uint64_t q_offset, k_offset, v_offset, indices_offset;
    uint64_t request_bytes; /* the exact payload of the request */
    uint64_t out_offset, lse_offset;
    uint64_t reply_bytes;
};
/* What a pool says of the tensors of its steps. */
struct wire_shape {
    uint32_t num_q_heads, num_kv_heads, head_dim_k, head_dim_v;
    bool is_v_in_k;
    attn_dtype q_dtype;
    uint32_t q_nope_dim, out_dim; /* 0: q and out are as the cache has them */
};
/* Elements of a head's q, and of its out. */
static inline uint32_t wire_q_dim(const struct wire_shape *w)
{
    return w->q_nope_dim == 0 ? w->head_dim_k : w->q_nope_dim + (w->head_dim_k - w->head_dim_v);
}
static inline uint32_t wire_out_dim(const struct wire_shape *w)
{
    return w->out_dim == 0 ? w->head_dim_v : w->out_dim;
}
/* Computes the layout of a step of a pool of this shape. The step was decoded or filled in by the
 * caller, with arrays of equal length.
 * Errors   ATTN_EINVAL flags are 0 or unknown, lse or sparse without attend, a tree without append
 *          and attend, or a sparse one, s->dtype is another, no items, an item of 0 tokens,
 *          positions or sizes that overflow 32 bits. *out is then untouched. */
attn_status wire_step_layout_of(const Attnd__Step *s, const struct wire_shape *shape,
                                struct wire_step_layout *out, char *why, size_t why_bytes);

#endif
