/* blake2b.h: BLAKE2b (RFC 7693) with digests of up to 8 bytes, which OpenSSL 3.0 does not have. */
#ifndef BLAKE2B_H
#define BLAKE2B_H

#include <stddef.h>
#include <stdint.h>

struct blake2b {
    uint64_t h[8], n_hashed;
    uint8_t block[128];
    size_t n, out_bytes;
};

/* key_bytes up to 64; 0: none. out_bytes 1 to 8. */
void blake2b_begin(struct blake2b *b, size_t out_bytes, const void *key, size_t key_bytes);
void blake2b_add(struct blake2b *b, const void *data, size_t bytes);
/* Of what was added so far, as a number whose first byte is the highest; more may be added. */
uint64_t blake2b_digest(const struct blake2b *b);

#endif
