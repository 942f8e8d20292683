/* siphash.c: SipHash-2-4 with 64 and with 128 bits. It keeps no state and calls nothing. */
#include "cache/siphash.h"

struct sip {
    uint64_t v0, v1, v2, v3;
};

static inline uint64_t rotl(uint64_t x, unsigned n)
{
    return x << n | x >> (64 - n);
}

static inline void sip_round(struct sip *s)
{
    s->v0 += s->v1;
    s->v2 += s->v3;
    s->v1 = rotl(s->v1, 13) ^ s->v0;
    s->v3 = rotl(s->v3, 16) ^ s->v2;
    s->v0 = rotl(s->v0, 32);
    s->v2 += s->v1;
    s->v0 += s->v3;
    s->v1 = rotl(s->v1, 17) ^ s->v2;
    s->v3 = rotl(s->v3, 21) ^ s->v0;
    s->v2 = rotl(s->v2, 32);
}

static inline void sip_word(struct sip *s, uint64_t m)
{
    s->v3 ^= m;
    sip_round(s);
    sip_round(s);
    s->v0 ^= m;
}

/* Little-endian, 0 to 8 bytes. */
static inline uint64_t load(const uint8_t *p, size_t n)
{
    uint64_t m = 0;
    for (size_t i = 0; i < n; i++)
        m |= (uint64_t)p[i] << (8 * i);
    return m;
}

static struct sip sip_begin(const uint64_t key[2])
{
    return (struct sip){
        .v0 = key[0] ^ UINT64_C(0x736f6d6570736575),
        .v1 = key[1] ^ UINT64_C(0x646f72616e646f6d),
        .v2 = key[0] ^ UINT64_C(0x6c7967656e657261),
        .v3 = key[1] ^ UINT64_C(0x7465646279746573),
    };
}

/* Hashes the last bytes of a message of n_all bytes. */
static inline void sip_bytes(struct sip *s, const uint8_t *p, size_t n, size_t n_all)
{
    for (; n >= 8; n -= 8, p += 8)
        sip_word(s, load(p, 8));
    sip_word(s, load(p, n) | (uint64_t)n_all << 56);
}

static inline uint64_t sip_end(struct sip *s)
{
    for (int i = 0; i < 4; i++)
        sip_round(s);
    return s->v0 ^ s->v1 ^ s->v2 ^ s->v3;
}

uint64_t siphash(const uint64_t key[2], const void *bytes, size_t n_bytes)
{
    struct sip s = sip_begin(key);
    sip_bytes(&s, bytes, n_bytes, n_bytes);
    s.v2 ^= 0xff;
    return sip_end(&s);
}

void siphash128(const uint64_t key[2], const uint64_t before[2], const void *bytes, size_t n_bytes,
                uint64_t out[2])
{
    struct sip s = sip_begin(key);
    s.v1 ^= 0xee;
    sip_word(&s, before[0]);
    sip_word(&s, before[1]);
    sip_bytes(&s, bytes, n_bytes, n_bytes + 16);
    s.v2 ^= 0xee;
    uint64_t low = sip_end(&s);
    s.v1 ^= 0xdd;
    out[1] = sip_end(&s);
    out[0] = low;
}
