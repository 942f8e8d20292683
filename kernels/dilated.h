/* dilated.h: which keys a query sees in a layer of dilated attention (LongNet, Ding et al., 2023),
 * as visible.h has it for every other layer. Pure arithmetic, for C and for device code; the
 * float64 reference has the rule written again.
 *
 * A branch (segment_tokens, rate) takes, for kv head h, the tokens that are offset = h mod rate
 * modulo rate: its keys, numbered from 0 over the whole sequence, and its queries. A query among
 * them sees the branch's keys of its own segment, up to itself unless the layer is full. Branches
 * are mixed by their softmax denominators, which is one softmax over the keys of all branches, a
 * key counted once for each branch that shows it. So a kernel goes through the branches with one
 * running maximum and sum, and nothing is merged. segment_tokens is a multiple of rate: keys are
 * equally far apart across segments.
 */
#ifndef ATTND_KERNELS_DILATED_H
#define ATTND_KERNELS_DILATED_H

#include "kernels/visible.h"

/* One kv head's part of a branch. A layer that is not dilated is one branch with segment_tokens 0,
 * rate 1 and offset 0: key j is token j. */
struct branch {
    uint32_t segment_tokens, rate, offset;
};

VISIBLE_FN struct branch branch_of(uint32_t segment_tokens, uint32_t rate, uint32_t kv_head)
{
    struct branch b;
    b.segment_tokens = segment_tokens;
    b.rate = rate;
    b.offset = kv_head % rate;
    return b;
}

VISIBLE_FN uint32_t branch_token(struct branch b, uint32_t key)
{
    return key * b.rate + b.offset;
}

/* What the query at `position` sees of n_tokens (those of its own item included), as keys of the
 * branch; no key if the branch does not take it. */
VISIBLE_FN struct visible branch_visible(struct branch b, uint32_t is_full, uint32_t position,
                                         uint32_t n_tokens)
{
    const uint32_t begin = position - position % b.segment_tokens;
    const uint32_t left = n_tokens - begin, end = left < b.segment_tokens ? left : b.segment_tokens;
    struct visible v;
    v.sinks = v.first = v.end = 0;
    if (position % b.rate != b.offset)
        return v;
    v.first = begin / b.rate;
    v.end = is_full ? (begin + end + b.rate - 1 - b.offset) / b.rate : position / b.rate + 1;
    return v;
}

/* What the first and the last query that the branch takes of those at [low, high] see; two that see
 * nothing where it takes none. */
struct branch_range {
    struct visible lowest, highest;
};

VISIBLE_FN struct branch_range branch_visible_to(struct branch b, uint32_t is_full, uint32_t low,
                                                 uint32_t high, uint32_t n_tokens)
{
    const uint32_t first = low + (b.offset + b.rate - low % b.rate) % b.rate;
    const uint32_t last = first + (high - first) / b.rate * b.rate;
    struct branch_range r;
    r.lowest.sinks = r.lowest.first = r.lowest.end = 0;
    r.highest = r.lowest;
    if (first > high)
        return r;
    r.lowest = branch_visible(b, is_full, first, n_tokens);
    r.highest = branch_visible(b, is_full, last, n_tokens);
    return r;
}

#endif
