/* wire_arena.c: the bump allocator into which a message's header is unpacked.
 *
 * It takes memory from the caller's base first, then from its source in chunks of at least
 * CHUNK_BYTES unless the limit leaves less. Nothing is freed one by one: the header of a request
 * lives as long as the request.
 */
#include "proto/wire.h"

#include <stdlib.h>

enum { ARENA_ALIGN = 16, CHUNK_BYTES = 16 << 10 };

struct wire_arena_chunk {
    struct wire_arena_chunk *next;
    void *handle; /* the source's */
    size_t capacity_bytes, used_bytes;
    _Alignas(ARENA_ALIGN) uint8_t bytes[];
};

/* Takes bytes from [base, base + capacity), from *used on; NULL if they do not fit. */
static void *bump(uint8_t *base, size_t capacity_bytes, size_t *used_bytes, size_t bytes)
{
    size_t misaligned = ((uintptr_t)base + *used_bytes) % ARENA_ALIGN;
    size_t skip = misaligned ? ARENA_ALIGN - misaligned : 0;
    size_t left = capacity_bytes - *used_bytes;
    if (left < skip || left - skip < bytes)
        return NULL;
    void *p = base + *used_bytes + skip;
    *used_bytes += skip + bytes;
    return p;
}

void wire_arena_init(struct wire_arena *a, void *base, size_t base_bytes, size_t limit_bytes)
{
    *a = (struct wire_arena){
        .base = base,
        .capacity_bytes = base_bytes < limit_bytes ? base_bytes : limit_bytes,
        .limit_bytes = limit_bytes,
    };
}

void *wire_arena_alloc(struct wire_arena *a, size_t bytes)
{
    if (bytes == 0)
        bytes = 1; /* protobuf-c takes NULL for a failure */
    void *p = a->capacity_bytes ? bump(a->base, a->capacity_bytes, &a->used_bytes, bytes) : NULL;
    if (p == NULL && a->chunks != NULL)
        p = bump(a->chunks->bytes, a->chunks->capacity_bytes, &a->chunks->used_bytes, bytes);
    if (p != NULL)
        return p;

    size_t left = a->limit_bytes - a->capacity_bytes - a->chunk_bytes;
    if (left < sizeof(struct wire_arena_chunk) || left - sizeof(struct wire_arena_chunk) < bytes) {
        a->is_over_limit = true;
        return NULL;
    }
    size_t size = sizeof(struct wire_arena_chunk) + bytes;
    if (size < CHUNK_BYTES)
        size = left < CHUNK_BYTES ? left : CHUNK_BYTES;
    void *handle = NULL;
    struct wire_arena_chunk *c =
        a->source.take == NULL ? malloc(size) : a->source.take(a->source.user, &size, &handle);
    if (c == NULL) {
        a->is_out_of_memory = true;
        return NULL;
    }
    c->handle = handle;
    c->next = a->chunks;
    c->capacity_bytes = size - sizeof *c;
    c->used_bytes = 0;
    a->chunks = c;
    a->chunk_bytes += size;
    return bump(c->bytes, c->capacity_bytes, &c->used_bytes, bytes);
}

void wire_arena_reset(struct wire_arena *a)
{
    while (a->chunks != NULL) {
        struct wire_arena_chunk *next = a->chunks->next;
        if (a->source.take == NULL)
            free(a->chunks);
        else
            a->source.give(a->chunks->handle);
        a->chunks = next;
    }
    a->used_bytes = a->chunk_bytes = 0;
    a->is_over_limit = a->is_out_of_memory = false;
}
