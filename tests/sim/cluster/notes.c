/* notes.c: what workers write beside their sequences. A note says which sequence it is of and its
 * number, which rises; whoever reads one has to find the last that was acknowledged, or one that
 * was sent after it. */
#include <string.h>

#include "cluster.h"

enum { HEAD = 16 }; /* seed, number */

/* Bytes of the number-th note, at most C_NOTE_BYTES; 0: none. */
static size_t make(const struct note *n, uint64_t number, uint8_t *out)
{
    size_t bytes = number == 0 ? 0 : HEAD + sim_mix(n->seed + number) % (C_NOTE_BYTES - HEAD + 1);
    uint64_t x = n->seed ^ number;
    for (size_t i = HEAD; i < bytes; i++)
        out[i] = (uint8_t)(x = sim_mix(x));
    if (number != 0) {
        memcpy(out, &n->seed, 8);
        memcpy(out + 8, &number, 8);
    }
    return bytes;
}

static uint64_t number_of(const struct note *n, const struct ask *a, const ProtobufCBinaryData *b)
{
    uint8_t want[C_NOTE_BYTES];
    uint64_t number = 0;
    if (b->len >= HEAD)
        memcpy(&number, b->data + 8, 8);
    if (number > n->latest || b->len != make(n, number, want) ||
        (b->len > 0 && memcmp(b->data, want, b->len) != 0))
        sim_fail("daemon %u, request %llu of %04x: a note of %zu bytes that nobody wrote",
                 node_number(a->node), (unsigned long long)a->id, (unsigned)(a->name & 0xffff),
                 b->len);
    return number;
}

void note_begin(struct note *n)
{
    n->seed = sim_random();
    n->latest = n->least = 0;
    n->is_asked = n->is_lost = false;
}

size_t note_next(struct note *n, uint8_t *out)
{
    return make(n, ++n->latest, out);
}

void note_is_said(struct note *n, const struct ask *a, const ProtobufCBinaryData *b)
{
    uint64_t number = number_of(n, a, b);
    uint64_t least = a->sets_note != NULL ? n->latest : n->least;
    if (number < least)
        sim_fail("daemon %u, request %llu of %04x: note %llu, and %llu was acknowledged",
                 node_number(a->node), (unsigned long long)a->id, (unsigned)(a->name & 0xffff),
                 (unsigned long long)number, (unsigned long long)least);
    n->least = number;
    cluster_counts.notes++;
}
