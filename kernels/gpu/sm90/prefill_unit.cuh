/* prefill_unit.cuh: the prefill kernels' units of work: how a block finds one and tells its warps,
 * where its rows of q and out lie, and which keys they see.
 */
#ifndef ATTND_GPU_PREFILL_UNIT_CUH
#define ATTND_GPU_PREFILL_UNIT_CUH

#include "kernels/gpu/device.cuh"
#include "kernels/gpu/sm90/prefill_params.h"
#include "kernels/gpu/sm90/prefill_wgmma.cuh"

namespace prefill
{

/* A unit as its block keeps it in shared memory. */
struct unit {
    const char *q;
    char *out;
    float *lse; /* NULL: not wanted */
    const uint32_t *table; /* of the item */
    const float *sink_logits, *alibi_slopes; /* NULL: none */
    uint32_t token0, first; /* token of row 0 and its place in that token's group */
    uint32_t n_rows; /* 0: there are no more units */
    uint32_t head; /* of K and V */
    uint32_t pos, total; /* of the item: position of its first query token, cached tokens */
    uint32_t layer, window, sinks, is_full;
    float scale_log2, soft_cap;
    visible_tiles tiles; /* of keys that some row sees */
};
static_assert(sizeof(unit) <= PREFILL_SLOT_BYTES, "fits");

/* x over the group, for x below 2^32 / group. */
GPU_DEVICE uint32_t over_group(const prefill_params &p, uint32_t x)
{
    return p.group_reciprocal ? (uint32_t)((uint64_t)x * p.group_reciprocal >> 32) : x;
}

/* Token of row r; rows behind the last count as the last. */
GPU_DEVICE uint32_t token_of(const prefill_params &p, const unit &u, uint32_t r)
{
    return u.token0 + over_group(p, u.first + min(r, u.n_rows - 1));
}

/* Row r as a row of q, out and lse, whose rows are [token][num_q_heads]. */
GPU_DEVICE uint32_t query_row(const prefill_params &p, const unit &u, uint32_t r)
{
    const uint32_t x = u.first + min(r, u.n_rows - 1), token = over_group(p, x);
    return (u.token0 + token) * p.num_q_heads + u.head * p.group + (x - token * p.group);
}

GPU_DEVICE visible seen_by(const unit &u, uint32_t token)
{
    return visible_to(u.window, u.sinks, u.is_full, u.pos + token, u.total);
}

/* What rows [r, r + n) see: some of them, and all of them. */
struct seen_together {
    visible some, all;
};

GPU_DEVICE seen_together seen_by_rows(const prefill_params &p, const unit &u, uint32_t r,
                                      uint32_t n)
{
    const visible low = seen_by(u, token_of(p, u, r)), high = seen_by(u, token_of(p, u, r + n - 1));
    return {visible_to_some(low, high), {low.sinks, high.first, low.end}};
}

/* Tiles with keys that some row of the unit does not see: those before n_first, which the causal
 * edge or the end cuts, and those from `last` on, which the window's edge or the sink tokens'
 * cuts. */
struct masked_tiles {
    uint32_t n_first, last;

    GPU_DEVICE bool has(uint32_t i) const
    {
        return i < n_first || i >= last;
    }
};

GPU_DEVICE masked_tiles masked_of(const unit &u, const seen_together &seen, uint32_t keys)
{
    const uint32_t n_seen = seen.all.end / keys; /* whole tiles below the end */
    const uint32_t n_main = u.tiles.n - u.tiles.sinks, first = u.tiles.sinks + u.tiles.skip;
    const uint32_t end = first + n_main; /* tiles [first, end), the last one first, then sinks */
    const uint32_t from = (seen.all.first + keys - 1) / keys; /* first tile that no window cuts */
    masked_tiles m;
    m.n_first = end > n_seen ? min(end - n_seen, u.tiles.n) : 0;
    m.last = from > first ? end - min(from, end) : u.tiles.n;
    if (u.tiles.sinks != 0)
        m.last = min(m.last, n_main);
    return m;
}

/* First key of the unit's i-th tile: they are computed from the last one down. */
GPU_DEVICE uint32_t tile_key(const unit &u, uint32_t i, uint32_t keys)
{
    return visible_tile_at(u.tiles.n - 1 - i, u.tiles.sinks, u.tiles.skip) * keys;
}

/* Unit w of the launch: sections of heads, in each all entries, of each all heads of the section. */
template <int D>
GPU_DEVICE unit unit_at(const prefill_params &p, const prefill_words &words, uint32_t w)
{
    constexpr uint32_t R = prefill_rows(D), N = prefill_keys(D);
    const uint32_t section = w / (p.n_entries * p.section_heads);
    const uint32_t head0 = section * p.section_heads;
    const uint32_t n_heads = min(p.section_heads, p.num_kv_heads - head0);
    const uint32_t i = (w - head0 * p.n_entries) / n_heads;
    const prefill_entry e = p.entries ? p.entries[i] : words.e[i];
    const gpu_item &it = p.items[e.item];
    const gpu_layer &layer = p.layers[it.layer];
    unit u;
    u.q = (const char *)it.q;
    u.out = (char *)it.out;
    u.lse = it.lse;
    u.table = p.table + (uint64_t)it.row * p.row_blocks;
    u.sink_logits = layer.sink_logits;
    u.alibi_slopes = layer.alibi_slopes;
    u.token0 = e.tile * R / p.group;
    u.first = e.tile * R - u.token0 * p.group;
    u.n_rows = min(it.n_tokens * p.group - e.tile * R, R);
    u.head = head0 + (w - head0 * p.n_entries) % n_heads;
    u.pos = it.pos;
    u.total = it.pos + it.n_tokens;
    u.layer = it.layer;
    u.window = layer.window_tokens;
    u.sinks = layer.sink_tokens;
    u.is_full = layer.is_full;
    u.scale_log2 = layer.scale * gpu::log2e;
    u.soft_cap = layer.soft_cap;
    u.tiles = visible_tiles_of(seen_by_rows(p, u, 0, u.n_rows).some, N);
    return u;
}

/* Ends a row with maximum m and sum l: adds its sink logit, gives its lse and the factor for its
 * sums. A row that saw no key has l = 0, factor 0; one that saw a NaN has l = NaN, and so
 * everything. */
GPU_DEVICE float finish_row(const unit &u, uint32_t q_head, float m, float l, float *out_lse)
{
    float scale = 1.0f;
    if (u.sink_logits) {
        const float sink = u.sink_logits[q_head] * gpu::log2e, top = fmaxf(m, sink);
        scale = l != 0.0f ? gpu::exp2_fast(m - top) : 0.0f;
        l = l * scale + gpu::exp2_fast(sink - top);
        m = top;
    }
    *out_lse = l != 0.0f ? gpu::ln2 * (m + gpu::log2_fast(l)) : -INFINITY;
    return l != 0.0f ? __fdividef(scale, l) : 0.0f;
}

} // namespace prefill
#endif
