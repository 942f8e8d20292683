/* bytes.h: builds messages byte by byte, right or wrong, without any encoder. */
#ifndef ATTND_TESTS_PROTO_BYTES_H
#define ATTND_TESTS_PROTO_BYTES_H

#include <stdlib.h>
#include <string.h>

#include "proto/wire.h"

struct bytes {
    uint8_t *at; /* malloc */
    size_t n;
};

static inline void put(struct bytes *b, const void *p, size_t n)
{
    b->at = realloc(b->at, b->n + n + 1);
    memcpy(b->at + b->n, p, n);
    b->n += n;
}

static inline void put_varint(struct bytes *b, uint64_t v)
{
    for (; v >= 0x80; v >>= 7)
        put(b, &(uint8_t){(uint8_t)(v | 0x80)}, 1);
    put(b, &(uint8_t){(uint8_t)v}, 1);
}

static inline void put_tag(struct bytes *b, uint32_t field, uint32_t wire_type)
{
    put_varint(b, (uint64_t)field << 3 | wire_type);
}

static inline void put_uint(struct bytes *b, uint32_t field, uint64_t v)
{
    put_tag(b, field, 0);
    put_varint(b, v);
}

static inline void put_fixed64(struct bytes *b, uint32_t field, uint64_t v)
{
    put_tag(b, field, 1);
    put(b, &v, 8);
}

static inline void put_float(struct bytes *b, uint32_t field, float v)
{
    put_tag(b, field, 5);
    put(b, &v, 4);
}

static inline void put_string(struct bytes *b, uint32_t field, const void *p, size_t n)
{
    put_tag(b, field, 2);
    put_varint(b, n);
    put(b, p, n);
}

/* body becomes the field's submessage or packed array and is freed */
static inline void put_body(struct bytes *b, uint32_t field, struct bytes body)
{
    put_string(b, field, body.at ? body.at : (const uint8_t *)"", body.n);
    free(body.at);
}

/* A whole request around header, which is freed; exactly as long as it must be, so that a sanitizer
 * sees one byte too many. */
static inline struct bytes request_of(struct bytes header, const void *payload,
                                      uint32_t payload_bytes)
{
    uint32_t magic = WIRE_MAGIC, header_bytes = (uint32_t)header.n;
    uint16_t version = 1, flags = 0;
    uint64_t id = 42;
    struct bytes msg = {0};
    put(&msg, &magic, 4);
    put(&msg, &version, 2);
    put(&msg, &flags, 2);
    put(&msg, &header_bytes, 4);
    put(&msg, &payload_bytes, 4);
    put(&msg, &id, 8);
    if (header.n)
        put(&msg, header.at, header.n);
    static const uint8_t zeros[WIRE_ALIGN];
    put(&msg, zeros, (WIRE_ALIGN - msg.n % WIRE_ALIGN) % WIRE_ALIGN);
    if (payload_bytes)
        put(&msg, payload, payload_bytes);
    free(header.at);
    struct bytes exact = {malloc(msg.n), msg.n};
    memcpy(exact.at, msg.at, msg.n);
    free(msg.at);
    return exact;
}

#endif
