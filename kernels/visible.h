/* visible.h: which keys a query sees: the window, sink tokens and causality of a layer as ranges of
 * cached tokens. Pure arithmetic on plain numbers, for C and for device code: what the daemon
 * counts, what the cpu backend computes and what kernels mask is one rule. Written again elsewhere
 * are: the float64 reference's rule, so that the tests would see an error here; and, for the code
 * that compilers make of it, the comparisons of a key in the tuned kernels (sm90/decode_tile.cuh,
 * decode_short.cuh).
 */
#ifndef ATTND_KERNELS_VISIBLE_H
#define ATTND_KERNELS_VISIBLE_H

#include <stdbool.h>
#include <stdint.h>

#if defined(__CUDACC__) || defined(__HIP__)
#define VISIBLE_FN static inline __host__ __device__ __attribute__((always_inline))
#else
#define VISIBLE_FN static inline
#endif

/* Keys [0, sinks) and [first, end); sinks <= first. */
struct visible {
    uint32_t sinks, first, end;
};

/* The first key of the window of the query at `position`; window_tokens 0: unlimited. */
VISIBLE_FN uint32_t visible_first(uint32_t window_tokens, uint32_t position)
{
    const uint32_t end = position + 1 > window_tokens ? position + 1 : window_tokens; /* one max */
    return window_tokens == 0 ? 0 : end - window_tokens;
}

/* One past the last key that the query at `position` sees, of n_keys (those of its own item
 * included). is_full is a number because kernels have it so. */
VISIBLE_FN uint32_t visible_end(uint32_t is_full, uint32_t position, uint32_t n_keys)
{
    return is_full ? n_keys : position + 1;
}

/* What the query at `position` sees. */
VISIBLE_FN struct visible visible_to(uint32_t window_tokens, uint32_t sink_tokens, uint32_t is_full,
                                     uint32_t position, uint32_t n_keys)
{
    struct visible v;
    v.end = visible_end(is_full, position, n_keys);
    v.first = visible_first(window_tokens, position);
    v.sinks = sink_tokens < v.first ? sink_tokens : v.first;
    return v;
}

/* What some query of neighbouring ones sees, from what the first and the last of them see. */
VISIBLE_FN struct visible visible_to_some(struct visible first, struct visible last)
{
    last.first = first.first;
    last.sinks = last.sinks < first.first ? last.sinks : first.first;
    return last;
}

VISIBLE_FN bool visible_has(const struct visible *v, uint32_t key)
{
    return key < v->end && (key >= v->first || key < v->sinks);
}

/* Number of keys. */
VISIBLE_FN uint32_t visible_count(struct visible v)
{
    return v.end - v.first + v.sinks;
}

/* Visible keys as tiles of a fixed number of tokens, numbered without a gap: the first `sinks`
 * are the first of the cache, the others lie `skip` tiles further on. */
struct visible_tiles {
    uint32_t n, sinks, skip;
};

VISIBLE_FN struct visible_tiles visible_tiles_of(struct visible v, uint32_t tile_tokens)
{
    uint32_t first = v.first / tile_tokens, end = v.end / tile_tokens + (v.end % tile_tokens != 0);
    uint32_t sinks = v.sinks / tile_tokens + (v.sinks % tile_tokens != 0);
    if (sinks >= first)
        first = sinks = 0;
    struct visible_tiles t;
    t.n = end - first + sinks;
    t.sinks = sinks;
    t.skip = first - sinks;
    return t;
}

/* Where the i-th visible tile lies in the cache. */
VISIBLE_FN uint32_t visible_tile_at(uint32_t i, uint32_t sink_tiles, uint32_t skip_tiles)
{
    return i + (i >= sink_tiles ? skip_tiles : 0);
}

#endif
