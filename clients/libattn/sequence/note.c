/* note.c: the note of a sequence.
 */
#include <stdio.h>
#include <string.h>

#include "clients/libattn/sequence/blocks.h"

_Static_assert(ATTN_NOTE_BYTES == WIRE_MAX_STRING_BYTES, "the most that a message carries");

struct note_taking {
    uint8_t *bytes; /* [ATTN_NOTE_BYTES] */
    uint32_t n;
};

static attn_status take_note(struct client_request *r, const struct wire_reply *reply)
{
    struct note_taking *t = r->take_arg;
    if (reply->header->body_case != ATTND__REPLY__BODY_NOTE)
        return pool_reply_without_body(r, "note");
    const ProtobufCBinaryData *note = &reply->header->note->note;
    t->n = (uint32_t)note->len; /* the decoder allows no more */
    if (t->bytes != NULL && note->len > 0)
        memcpy(t->bytes, note->data, note->len);
    return ATTN_OK;
}

static attn_status note_call(struct attn_client *c, Attnd__Note *note, uint64_t timeout_us,
                             struct note_taking *t)
{
    Attnd__Request req = ATTND__REQUEST__INIT;
    req.body_case = ATTND__REQUEST__BODY_NOTE;
    req.note = note;
    return client_call(c, &req, timeout_us, take_note, t);
}

attn_status attn_seq_note(attn_pool *p, const struct attn_seq *seq, const void *note,
                          uint32_t n_bytes, uint64_t timeout_us)
{
    Attnd__Note body = ATTND__NOTE__INIT;
    struct note_taking none = {0};
    if (p == NULL || seq == NULL || (note == NULL && n_bytes > 0))
        return error_set(ATTN_EINVAL, "pool, seq or note is NULL");
    if (n_bytes > ATTN_NOTE_BYTES)
        return error_set(ATTN_EINVAL, "note has %u bytes, at most %d", n_bytes, ATTN_NOTE_BYTES);
    attn_status st = client_check(p->client);
    if (st == ATTN_OK)
        st = pool_check(p);
    if (st != ATTN_OK)
        return st;
    body.seq = seq->id;
    body.epoch = seq->epoch;
    body.has_note = true;
    body.note.data = (uint8_t *)(uintptr_t)note; /* packing only reads it */
    body.note.len = n_bytes;
    return note_call(p->client, &body, timeout_us, &none);
}

attn_status attn_seq_note_get(attn_client *c, uint64_t id, uint64_t timeout_us,
                              uint8_t out_note[ATTN_NOTE_BYTES], uint32_t *out_n_bytes)
{
    Attnd__Note body = ATTND__NOTE__INIT;
    if (out_note == NULL || out_n_bytes == NULL)
        return error_set(ATTN_EINVAL, "out_note or out_n_bytes is NULL");
    struct note_taking t = {.bytes = out_note};
    attn_status st = client_check(c);
    if (st != ATTN_OK)
        return st;
    body.seq = id;
    st = note_call(c, &body, timeout_us, &t);
    if (st == ATTN_OK)
        *out_n_bytes = t.n;
    return st;
}

attn_status seq_note_read(struct attn_client *c, uint64_t id, uint64_t timeout_us,
                          struct seq_note *out)
{
    out->n_bytes = 0;
    attn_status st = attn_seq_note_get(c, id, timeout_us, out->bytes, &out->n_bytes);
    return st == ATTN_ENOTSUP ? ATTN_OK : st;
}

attn_status seq_note_write(attn_pool *p, const struct attn_seq *seq, const struct seq_note *note,
                           uint64_t timeout_us)
{
    if (note->n_bytes == 0)
        return ATTN_OK;
    return attn_seq_note(p, seq, note->bytes, note->n_bytes, timeout_us);
}
