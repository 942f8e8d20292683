/* blake2b.c: RFC 7693, section 3. Words are little-endian, as on all hosts of attnd. */
#include "blake2b.h"

#include <string.h>

static const uint64_t iv[8] = {
    0x6a09e667f3bcc908, 0xbb67ae8584caa73b, 0x3c6ef372fe94f82b, 0xa54ff53a5f1d36f1,
    0x510e527fade682d1, 0x9b05688c2b3e6c1f, 0x1f83d9abfb41bd6b, 0x5be0cd19137e2179,
};
static const uint8_t sigma[10][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
    {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
    {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4},
    {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
    {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13},
    {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
    {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11},
    {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
    {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5},
    {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0},
};

static uint64_t turn(uint64_t x, int n)
{
    return x >> n | x << (64 - n);
}

static void mix(uint64_t *v, int a, int b, int c, int d, uint64_t x, uint64_t y)
{
    v[a] += v[b] + x;
    v[d] = turn(v[d] ^ v[a], 32);
    v[c] += v[d];
    v[b] = turn(v[b] ^ v[c], 24);
    v[a] += v[b] + y;
    v[d] = turn(v[d] ^ v[a], 16);
    v[c] += v[d];
    v[b] = turn(v[b] ^ v[c], 63);
}

static void compress(struct blake2b *b, int is_last)
{
    uint64_t v[16], m[16];
    b->n_hashed += b->n;
    memset(b->block + b->n, 0, sizeof b->block - b->n);
    memcpy(m, b->block, sizeof m);
    memcpy(v, b->h, sizeof b->h);
    memcpy(v + 8, iv, sizeof iv);
    v[12] ^= b->n_hashed;
    if (is_last)
        v[14] = ~v[14];
    for (int i = 0; i < 12; i++) {
        const uint8_t *s = sigma[i % 10];
        for (int j = 0; j < 4; j++)
            mix(v, j, 4 + j, 8 + j, 12 + j, m[s[2 * j]], m[s[2 * j + 1]]);
        for (int j = 0; j < 4; j++)
            mix(v, j, 4 + (j + 1) % 4, 8 + (j + 2) % 4, 12 + (j + 3) % 4, m[s[8 + 2 * j]],
                m[s[9 + 2 * j]]);
    }
    for (int i = 0; i < 8; i++)
        b->h[i] ^= v[i] ^ v[i + 8];
    b->n = 0;
}

void blake2b_begin(struct blake2b *b, size_t out_bytes, const void *key, size_t key_bytes)
{
    *b = (struct blake2b){.out_bytes = out_bytes};
    memcpy(b->h, iv, sizeof iv);
    b->h[0] ^= 0x01010000 ^ key_bytes << 8 ^ out_bytes;
    if (key_bytes > 0) {
        memcpy(b->block, key, key_bytes);
        b->n = sizeof b->block;
    }
}

void blake2b_add(struct blake2b *b, const void *data, size_t bytes)
{
    const uint8_t *from = data;
    while (bytes > 0) {
        if (b->n == sizeof b->block)
            compress(b, 0);
        size_t n = sizeof b->block - b->n < bytes ? sizeof b->block - b->n : bytes;
        memcpy(b->block + b->n, from, n);
        b->n += n;
        from += n;
        bytes -= n;
    }
}

uint64_t blake2b_digest(const struct blake2b *b)
{
    struct blake2b last = *b;
    compress(&last, 1);
    return __builtin_bswap64(last.h[0]) >> (64 - 8 * b->out_bytes);
}
