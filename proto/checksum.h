/* checksum.h: the checksum of a block's bytes, of a file's head: XXH3 of 128 bits (libxxhash). It
 * finds damage; it is none against who would forge one.
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
