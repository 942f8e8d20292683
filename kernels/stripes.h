/* stripes.h: dilated layers of a pool that has stripes of its sequences' tokens only: which keys of
 * a branch are here. Pure arithmetic, for C and for device code.
 *
 * Every block of `every` tokens has one stripe of `tokens` here, from its token `first` on; the
 * pool's own tokens are those, numbered from 0 without a gap. A query's position is the sequence's,
 * for segments and offsets go by it. Keys of a branch that are here are numbered from 0, too: where
 * its rate divides a stripe they are as far apart as ever; else stripes differ in how many they
 * have, and repeat: what has to be counted one by one is less than the smaller of rate and `every`.
 */
#ifndef ATTND_KERNELS_STRIPES_H
#define ATTND_KERNELS_STRIPES_H

#include "kernels/dilated.h"

struct stripes {
    uint32_t tokens, every, first; /* powers of two, a multiple of tokens; every 0: all is here */
};

/* How many of the sequence's tokens before `position` are here. */
VISIBLE_FN uint32_t stripes_before(struct stripes s, uint32_t position)
{
    if (s.every == 0)
        return position;
    const uint32_t rest = position % s.every, more = rest > s.first ? rest - s.first : 0;
    return position / s.every * s.tokens + (more < s.tokens ? more : s.tokens);
}

/* Where in the sequence the pool's token is. */
VISIBLE_FN uint32_t stripes_position(struct stripes s, uint32_t token)
{
    return s.every == 0 ? token : token / s.tokens * s.every + s.first + token % s.tokens;
}

VISIBLE_FN bool stripes_have(struct stripes s, uint32_t position)
{
    return position % s.every - s.first < s.tokens;
}

VISIBLE_FN bool stripes_are_even(struct stripes s, struct branch b)
{
    return s.every == 0 || ((b.rate & (b.rate - 1)) == 0 && b.rate <= s.tokens);
}

/* What repeats: so many keys of the branch, in so many blocks, so many of them here. */
struct stripes_period {
    uint32_t keys, blocks, here;
};

VISIBLE_FN struct stripes_period stripes_period_of(struct stripes s, struct branch b)
{
    const uint32_t two = b.rate & (0 - b.rate), common = two < s.every ? two : s.every;
    const uint32_t skipped = (b.offset - s.first) & (common - 1);
    struct stripes_period p;
    p.keys = s.every / common;
    p.blocks = b.rate / common;
    p.here = skipped < s.tokens ? (s.tokens - skipped - 1) / common + 1 : 0;
    return p;
}

/* Tokens of the nth stripe before the branch's first there, and its keys among the first n. */
VISIBLE_FN uint32_t stripes_skipped(struct stripes s, struct branch b, uint32_t nth)
{
    const uint32_t residue = (nth * s.every + s.first) % b.rate;
    return b.offset >= residue ? b.offset - residue : b.offset + b.rate - residue;
}

VISIBLE_FN uint32_t stripes_keys(struct branch b, uint32_t skipped, uint32_t n)
{
    return skipped < n ? (n - skipped - 1) / b.rate + 1 : 0;
}

/* How many of the branch's keys before `key` are here, where stripes_are_even. */
VISIBLE_FN uint32_t stripes_even_before(struct stripes s, struct branch b, uint32_t key)
{
    return (stripes_before(s, branch_token(b, key)) + b.rate - 1 - b.offset) / b.rate;
}

/* The same of any. */
VISIBLE_FN uint32_t stripes_keys_before(struct stripes s, struct branch b, uint32_t key)
{
    const uint32_t position = branch_token(b, key);
    if (s.every == 0)
        return key;
    if (stripes_are_even(s, b))
        return stripes_even_before(s, b, key);
    const struct stripes_period p = stripes_period_of(s, b);
    uint32_t n = key / p.keys * p.here;
    if (b.rate > s.every) { /* fewer keys than blocks */
        for (uint32_t k = key - key % p.keys; k < key; k++)
            n += stripes_have(s, branch_token(b, k));
        return n;
    }
    const uint32_t nth = position / s.every, rest = position % s.every;
    const uint32_t more = rest > s.first ? rest - s.first : 0;
    n = nth / p.blocks * p.here;
    for (uint32_t i = nth - nth % p.blocks; i < nth; i++)
        n += stripes_keys(b, stripes_skipped(s, b, i), s.tokens);
    return n + stripes_keys(b, stripes_skipped(s, b, nth), more < s.tokens ? more : s.tokens);
}

/* The pool's token that is the branch's key of this number here; any if there is no such key. */
VISIBLE_FN uint32_t stripes_token(struct stripes s, struct branch b, uint32_t key)
{
    if (stripes_are_even(s, b))
        return branch_token(b, key);
    const struct stripes_period p = stripes_period_of(s, b);
    if (p.here == 0)
        return 0;
    const uint32_t nth = key / p.here;
    uint32_t left = key % p.here;
    if (b.rate > s.every) {
        for (uint32_t k = nth * p.keys;; k++) {
            const uint32_t position = branch_token(b, k);
            if (stripes_have(s, position) && left-- == 0)
                return stripes_before(s, position);
        }
    }
    for (uint32_t i = nth * p.blocks;; i++) {
        const uint32_t skipped = stripes_skipped(s, b, i);
        const uint32_t n = stripes_keys(b, skipped, s.tokens);
        if (left < n)
            return i * s.tokens + skipped + left * b.rate;
        left -= n;
    }
}

/* What is here of the keys that a query sees, those of dilated.h. */
VISIBLE_FN struct visible stripes_visible(struct stripes s, struct branch b, struct visible v)
{
    if (s.every == 0)
        return v;
    v.first = stripes_keys_before(s, b, v.first);
    v.end = stripes_keys_before(s, b, v.end);
    return v;
}

/* The same where stripes_are_even. */
VISIBLE_FN struct visible stripes_even_visible(struct stripes s, struct branch b, struct visible v)
{
    if (s.every == 0)
        return v;
    v.first = stripes_even_before(s, b, v.first);
    v.end = stripes_even_before(s, b, v.end);
    return v;
}

#endif
