/* random.h: pseudo-random numbers of all tests: two generators, each one number of state, which is
 * the seed. A seed gives the same draws with every compiler and on every machine; where a test's
 * cases, or the seeds that find planted bugs, depend on its draws, a generator must not change.
 */
#ifndef TESTS_RANDOM_H
#define TESTS_RANDOM_H

#include <stdint.h>

/* 31 bits of a linear congruence (Knuth's multiplier). Quick; the state may be any number. */
static inline uint64_t random_next(uint64_t *state)
{
    *state = *state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return *state >> 33;
}

static inline uint32_t random_below(uint64_t *state, uint32_t n)
{
    return (uint32_t)(random_next(state) % n);
}

/* 64 bits of splitmix64 (Steele, Lea and Flood, 2014), for seeds that are small numbers. */
static inline uint64_t random_mixed(uint64_t *state)
{
    uint64_t z = *state += UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
    return z ^ z >> 31;
}

#endif
