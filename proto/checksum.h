/* checksum.h: the checksum of blocks and of file heads: 128-bit XXH3 (libxxhash). It finds damage;
 * it does not protect against forgery.
 */
#ifndef ATTND_PROTO_CHECKSUM_H
#define ATTND_PROTO_CHECKSUM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct checksum {
    uint64_t low, high;
};

struct checksum checksum_of(const void *bytes, size_t n);

static inline bool checksum_is_equal(struct checksum a, struct checksum b)
{
    return a.low == b.low && a.high == b.high;
}

#endif
