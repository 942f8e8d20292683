/* fuzz_header.c: fuzz target: the input is a header alone; the first byte says whose and how much
 * memory the arena may take. Steps go on to the layout. */
#include "fuzz.h"

#include <stdlib.h>
#include <string.h>

#include "samples.h"

/* The tensors of a layout lie inside their payloads, in order, aligned. */
static void layout_check(const Attnd__Step *s, const uint8_t *data, size_t n)
{
    uint32_t geometry[4] = {32, 8, 128, 128};
    const bool is_v_in_k = data[1] & 2;
    struct wire_step_layout l;
    char why[128];
    if (n > sizeof geometry && data[1] & 1)
        memcpy(geometry, data + n - sizeof geometry, sizeof geometry);
    if (wire_step_layout_of(s,
                            &(struct wire_shape){geometry[0], geometry[1], geometry[2], geometry[3],
                                                 is_v_in_k, (attn_dtype)s->dtype, 0, 0},
                            &l, why, sizeof why) != ATTN_OK)
        return;
    if (l.request_bytes > UINT32_MAX || l.reply_bytes > UINT32_MAX || l.n_tokens < s->n_seq ||
        (l.q_offset | l.k_offset | l.v_offset | l.out_offset | l.lse_offset | l.indices_offset) %
            WIRE_ALIGN ||
        l.q_offset > l.request_bytes || (l.k_offset > l.v_offset && !is_v_in_k) ||
        l.v_offset > l.request_bytes || l.indices_offset > l.request_bytes ||
        l.out_offset > l.reply_bytes || l.lse_offset > l.reply_bytes)
        abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    if (n < 2 || n > WIRE_MAX_HEADER_BYTES)
        return 0;
    bool is_reply = data[0] & 1;
    size_t limit = data[0] & 2 ? (size_t)(data[0] >> 2) * 64 : WIRE_ARENA_LIMIT_BYTES;
    uint32_t magic = WIRE_MAGIC, header_bytes = (uint32_t)(n - 1);
    size_t msg_bytes = (WIRE_PREAMBLE_BYTES + n - 1 + WIRE_ALIGN - 1) / WIRE_ALIGN * WIRE_ALIGN;
    uint8_t *msg = aligned_alloc(WIRE_ALIGN, msg_bytes);
    memset(msg, 0, msg_bytes);
    memcpy(msg, &magic, 4);
    msg[4] = WIRE_VERSION;
    msg[6] = is_reply ? WIRE_FLAG_REPLY : 0;
    memcpy(msg + 8, &header_bytes, 4);
    msg[16] = 1;
    memcpy(msg + WIRE_PREAMBLE_BYTES, data + 1, n - 1);

    struct wire_arena a;
    struct wire_request q;
    struct wire_reply r;
    char why[128] = "";
    wire_arena_init(&a, NULL, 0, limit);
    attn_status st = is_reply ? wire_reply_decode(msg, msg_bytes, &a, &r, why, sizeof why)
                              : wire_request_decode(msg, msg_bytes, &a, &q, why, sizeof why);
    if ((st == ATTN_OK) != (why[0] == 0))
        abort();
    /* the scan bounds what unpacking takes: a full arena never ends it */
    if (limit == WIRE_ARENA_LIMIT_BYTES && (a.is_over_limit || strstr(why, "does not unpack")))
        abort();
    if (st == ATTN_OK && !is_reply && q.header->body_case == ATTND__REQUEST__BODY_STEP)
        layout_check(q.header->step, data, n);
    wire_arena_reset(&a);
    free(msg);
    return 0;
}

size_t fuzz_seed(size_t i, uint8_t *out, size_t out_bytes)
{
    size_t n = 0;
    uint8_t *msg = i < n_samples ? sample_build(&samples[i], &n) : NULL;
    if (msg == NULL)
        return 0;
    uint32_t header_bytes;
    memcpy(&header_bytes, msg + 8, 4);
    n = 1 + header_bytes < out_bytes ? 1 + header_bytes : out_bytes;
    out[0] = samples[i].is_reply;
    memcpy(out + 1, msg + WIRE_PREAMBLE_BYTES, n - 1);
    free(msg);
    return n;
}
