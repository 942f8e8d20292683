/* siphash.h: SipHash-2-4, a keyed hash. Without the key its values cannot be steered, so names
 * chosen by clients cannot be made to collide. Also seals records against damage (not against an
 * attacker who can read the arena).
 *
 * Source   J.-P. Aumasson, D. J. Bernstein, "SipHash: a fast short-input PRF", 2012.
 */
#ifndef ATTND_CACHE_SIPHASH_H
#define ATTND_CACHE_SIPHASH_H

#include <stddef.h>
#include <stdint.h>

uint64_t siphash(const uint64_t key[2], const void *bytes, size_t n_bytes);
/* The 128-bit variant, over the two words of before followed by the bytes. out may be before. */
void siphash128(const uint64_t key[2], const uint64_t before[2], const void *bytes, size_t n_bytes,
                uint64_t out[2]);

#endif
