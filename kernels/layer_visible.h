/* layer_visible.h: visible.h, dilated.h and stripes.h for a layer as backends are told of it: on
 * the host. A layer that is not dilated counts as one branch of all tokens.
 */
#ifndef ATTND_KERNELS_LAYER_VISIBLE_H
#define ATTND_KERNELS_LAYER_VISIBLE_H

#include "kernels/kv_layout.h"
#include "kernels/stripes.h"

static inline struct stripes stripes_of(const struct backend_pool_config *c)
{
    struct stripes s = {0};
    if (c->n_stripes > 0)
        s = (struct stripes){c->block_tokens, c->block_tokens * c->n_stripes,
                             c->block_tokens * c->stripe};
    return s;
}

static inline uint32_t layer_n_branches(const struct attn_layer_spec *s)
{
    return s->n_branches > 0 ? s->n_branches : 1;
}

/* The i-th branch as the kv head has it, by its number in the sequence. */
static inline struct branch layer_branch(const struct attn_layer_spec *s, uint32_t i,
                                         uint32_t kv_head)
{
    if (s->n_branches == 0)
        return branch_of(0, 1, 0);
    return branch_of(s->branches[i].segment_tokens, s->branches[i].rate, kv_head);
}

/* Do all queries of an item see the same keys? */
static inline bool layer_is_full(const struct attn_layer_spec *s, uint32_t item_flags)
{
    return s->is_full || (item_flags & BACKEND_FULL) != 0;
}

/* The layer's sink tokens that are in a sequence which is the part from key_base on. */
static inline uint32_t layer_sinks(const struct attn_layer_spec *s, uint32_t key_base)
{
    return s->sink_tokens > key_base ? s->sink_tokens - key_base : 0;
}

/* What a query further on than all n_tokens keys sees of them. */
static inline struct visible layer_visible_behind(const struct attn_layer_spec *s, struct branch b,
                                                  uint32_t key_base, uint32_t position,
                                                  uint32_t n_tokens)
{
    if (b.segment_tokens > 0) {
        const uint32_t begin = position - position % b.segment_tokens;
        const uint32_t n_keys = (n_tokens + b.rate - 1 - b.offset) / b.rate; /* of the branch */
        if (begin < n_tokens)
            return branch_visible(b, true, position, n_tokens);
        return (struct visible){.first = n_keys, .end = n_keys};
    }
    struct visible v =
        visible_to(s->window_tokens, layer_sinks(s, key_base), true, position, n_tokens);
    v.first = v.first < v.end ? v.first : v.end;
    v.sinks = v.sinks < v.first ? v.sinks : v.first;
    return v;
}

/* The keys of the branch that the item's query `token` sees, of those that are here. */
static inline struct visible layer_visible(const struct attn_layer_spec *s, struct stripes stripes,
                                           const struct backend_item *item, struct branch b,
                                           uint32_t token)
{
    const uint32_t position = item->pos + token, n_tokens = item->pos + item->n_tokens;
    bool is_full = layer_is_full(s, item->flags);
    if (item->ahead > 0)
        return layer_visible_behind(s, b, item->key_base, position + item->ahead, n_tokens);
    if (b.segment_tokens > 0)
        return stripes_visible(stripes, b, branch_visible(b, is_full, position, n_tokens));
    return visible_to(s->window_tokens, layer_sinks(s, item->key_base), is_full, position,
                      n_tokens);
}

/* The keys that some query of the item's from token `low` to token `high` sees. */
static inline struct visible layer_visible_to_some(const struct attn_layer_spec *s,
                                                   struct stripes stripes,
                                                   const struct backend_item *item, struct branch b,
                                                   uint32_t low, uint32_t high)
{
    const uint32_t pos = item->pos + item->ahead;
    if (b.segment_tokens == 0)
        return visible_to_some(layer_visible(s, stripes, item, b, low),
                               layer_visible(s, stripes, item, b, high));
    if (item->ahead > 0) { /* from the first that the branch takes to the last */
        const uint32_t skipped = (b.offset + b.rate - (pos + low) % b.rate) % b.rate;
        if (skipped > high - low)
            return (struct visible){0};
        high = low + skipped + (high - low - skipped) / b.rate * b.rate;
        return visible_to_some(layer_visible(s, stripes, item, b, low + skipped),
                               layer_visible(s, stripes, item, b, high));
    }
    struct branch_range some = branch_visible_to(b, layer_is_full(s, item->flags), pos + low,
                                                 pos + high, item->pos + item->n_tokens);
    return stripes_visible(stripes, b, visible_to_some(some.lowest, some.highest));
}

/* Keys here that some query of the item's sees, summed over branches and kv heads. */
static inline uint64_t layer_keys_seen(const struct attn_layer_spec *s,
                                       const struct backend_pool_config *c,
                                       const struct backend_item *item)
{
    const uint32_t n_heads = s->n_branches > 0 ? c->num_kv_heads : 1, last = item->n_tokens - 1;
    uint64_t n = 0;
    for (uint32_t h = 0; h < n_heads; h++)
        for (uint32_t i = 0; i < layer_n_branches(s); i++) {
            struct branch b = layer_branch(s, i, c->first_kv_head + h);
            n += visible_count(layer_visible_to_some(s, stripes_of(c), item, b, 0, last));
        }
    return s->n_branches > 0 ? n : n * c->num_kv_heads;
}

/* Bytes of a key's K and V in one kv head, scales included. */
static inline uint64_t layer_key_bytes(const struct backend_pool_config *c)
{
    const struct kv_layout l = kv_layout_of(c);
    const uint64_t k = l.k_row_bytes + l.k_scale_bytes;
    return c->is_v_in_k ? k : k + l.v_row_bytes + l.v_scale_bytes;
}

/* Bytes of K and V of those that some query sees, each counted once however many rows read them. */
static inline uint64_t layer_bytes_seen(const struct attn_layer_spec *s,
                                        const struct backend_pool_config *c,
                                        const struct backend_item *item)
{
    return layer_keys_seen(s, c, item) * layer_key_bytes(c);
}

/* The same of a list's tokens: each list is read by itself. */
static inline uint64_t layer_bytes_listed(const struct backend_pool_config *c, uint64_t n_listed)
{
    return n_listed * c->num_kv_heads * layer_key_bytes(c);
}

#endif
