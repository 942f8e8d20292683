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
    uint32_t step; /* from one token of its rows to the next */
    union {
        uint32_t n_branches; /* behind the unit, as unit_branch; 0: the layer is not dilated */
        uint32_t list0; /* of items with lists: where its query's begins */
        uint32_t node0; /* of trees: of the item's nodes, in those of the launch */
    };
    uint32_t n_rows; /* 0: there are no more units */
    uint32_t head; /* of K and V */
    uint32_t pos, total; /* of the item: position of its first query token, cached tokens */
    uint32_t layer, window, sinks, is_full; /* is_full: or SEES_NODES */
    float scale_log2, soft_cap;
    /* of keys that some row sees, from the unit's first on; not dilated */
    visible_tiles tiles;
    uint32_t n_tiles; /* of them: the unit's */
    uint16_t slot0; /* of the first part; the others' are num_kv_heads apart */
    uint8_t part, n_parts; /* of the rows' keys; 1: all are the unit's */
    uint32_t block0; /* of a quantised pool: of the head's decoded keys */
};
static_assert(sizeof(unit) <= PREFILL_UNIT_BYTES, "fits");

/* unit.is_full of trees: rows see what is cached before them, and nodes. */
constexpr uint32_t SEES_NODES = 2;

/* x over the group, for x below 2^32 / group. */
GPU_DEVICE uint32_t over_group(const prefill_params &p, uint32_t x)
{
    return p.group_reciprocal ? (uint32_t)((uint64_t)x * p.group_reciprocal >> 32) : x;
}

/* Token of row r; rows behind the last count as the last. */
GPU_DEVICE uint32_t token_of(const prefill_params &p, const unit &u, uint32_t r)
{
    return u.token0 + over_group(p, u.first + min(r, u.n_rows - 1)) * u.step;
}

/* Row r as a row of q, out and lse, whose rows are [token][num_q_heads]. */
GPU_DEVICE uint32_t query_row(const prefill_params &p, const unit &u, uint32_t r)
{
    const uint32_t x = u.first + min(r, u.n_rows - 1), token = over_group(p, x);
    return (u.token0 + token * u.step) * p.num_q_heads + u.head * p.group + (x - token * p.group);
}

/* The nodes that a tree's row sees, a bit each, the first one's lowest; of what is no tree 0. */
GPU_DEVICE uint64_t nodes_seen(const prefill_params &p, const unit &u, uint32_t token)
{
    return u.is_full == SEES_NODES ? p.nodes[u.node0 + token].seen : 0;
}

GPU_DEVICE bool has_node(uint64_t nodes, uint32_t node)
{
    return node < 64 && (nodes >> node & 1) != 0;
}

/* What the rows of a unit see: some of them, and all of them. */
struct seen_together {
    visible some, all;
};

/* Tiles with keys that some row of the unit does not see: those before n_first, which the causal
 * edge or the end cuts, and those from `last` on, which the window's edge, the sink tokens' or a
 * segment's beginning cuts. */
struct masked_tiles {
    uint32_t n_first, last;

    GPU_DEVICE bool has(uint32_t i) const
    {
        return i < n_first || i >= last;
    }
};

GPU_DEVICE masked_tiles masked_of(const visible_tiles &tiles, const seen_together &seen,
                                  uint32_t keys)
{
    const uint32_t n_seen = seen.all.end / keys; /* whole tiles below the end */
    const uint32_t n_main = tiles.n - tiles.sinks, first = tiles.sinks + tiles.skip;
    const uint32_t end = first + n_main; /* tiles [first, end), the last one first, then sinks */
    const uint32_t from = (seen.all.first + keys - 1) / keys; /* first tile that no window cuts */
    masked_tiles m;
    m.n_first = end > n_seen ? min(end - n_seen, tiles.n) : 0;
    m.last = from > first ? end - min(from, end) : tiles.n;
    if (tiles.sinks != 0)
        m.last = min(m.last, n_main);
    return m;
}

/* A branch in which all rows of a unit take part, behind the unit in shared memory. */
struct unit_branch {
    branch of;
    visible_tiles tiles; /* of keys that some row sees */
    seen_together seen;
    masked_tiles masked;
};
static_assert(sizeof(unit_branch) == PREFILL_BRANCH_BYTES, "fits");

/* The keys that a unit goes through one after the other: all that its rows see, or of a dilated
 * layer those of its nth branch, numbered as in dilated.h. has_nodes: units may be of trees. */
template <bool is_dilated, bool has_nodes = false> struct part;

template <bool has_nodes> struct part<false, has_nodes> {
    const unit *u;
    seen_together together;
    masked_tiles hidden;

    GPU_DEVICE part(const prefill_params &p, const unit &x, uint32_t keys) : u(&x)
    {
        const visible low = seen_by(token_of(p, x, 0));
        const visible high = seen_by(token_of(p, x, x.n_rows - 1));
        together = {visible_to_some(low, high), {low.sinks, high.first, low.end}};
        if (has_nodes && x.is_full == SEES_NODES)
            together.some.end = x.total;
        hidden = masked_of(x.tiles, together, keys);
        hidden.last = min(hidden.last, x.n_tiles); /* where loops over the rest end */
    }
    GPU_DEVICE uint32_t n_tiles() const
    {
        return u->n_tiles;
    }
    GPU_DEVICE bool has_next() const
    {
        return false;
    }
    GPU_DEVICE void next()
    {
    }
    GPU_DEVICE const visible_tiles &tiles() const
    {
        return u->tiles;
    }
    GPU_DEVICE const seen_together &seen() const
    {
        return together;
    }
    GPU_DEVICE const masked_tiles &masked() const
    {
        return hidden;
    }
    /* Of a tree's row: what is cached before the tree. */
    GPU_DEVICE visible seen_by(uint32_t token) const
    {
        if (has_nodes && u->is_full == SEES_NODES)
            return {0, 0, u->pos};
        return visible_to(u->window, u->sinks, u->is_full, u->pos + token, u->total);
    }
    GPU_DEVICE uint32_t token_of_key(uint32_t key) const
    {
        return key;
    }
    /* Tokens from one key to the next. */
    GPU_DEVICE float apart() const
    {
        return 1.0f;
    }
};

template <> struct part<true, false> {
    const unit *u;
    uint32_t nth;

    GPU_DEVICE part(const prefill_params &, const unit &x, uint32_t) : u(&x), nth(0)
    {
    }
    GPU_DEVICE unit_branch &at() const
    {
        return ((unit_branch *)((char *)u + PREFILL_UNIT_BYTES))[nth];
    }
    /* Makes it that of branch x. */
    GPU_DEVICE void begin(const prefill_params &p, branch x, uint32_t keys) const
    {
        unit_branch &b = at();
        b.of = x;
        const visible low = seen_by(token_of(p, *u, 0));
        const visible high = seen_by(token_of(p, *u, u->n_rows - 1));
        b.seen = {visible_to_some(low, high), {0, high.first, low.end}};
        b.tiles = visible_tiles_of(b.seen.some, keys);
        b.masked = masked_of(b.tiles, b.seen, keys);
    }
    GPU_DEVICE bool has_next() const
    {
        return nth + 1 < u->n_branches;
    }
    GPU_DEVICE void next()
    {
        ++nth;
    }
    GPU_DEVICE const visible_tiles &tiles() const
    {
        return at().tiles;
    }
    GPU_DEVICE uint32_t n_tiles() const
    {
        return at().tiles.n;
    }
    GPU_DEVICE const seen_together &seen() const
    {
        return at().seen;
    }
    GPU_DEVICE const masked_tiles &masked() const
    {
        return at().masked;
    }
    GPU_DEVICE visible seen_by(uint32_t token) const
    {
        return branch_visible(at().of, u->is_full, u->pos + token, u->total);
    }
    GPU_DEVICE uint32_t token_of_key(uint32_t key) const
    {
        return branch_token(at().of, key);
    }
    GPU_DEVICE float apart() const
    {
        return (float)at().of.rate;
    }
};

/* First key of the i-th tile: they are computed from the last one down. */
GPU_DEVICE uint32_t tile_key(const visible_tiles &tiles, uint32_t i, uint32_t keys)
{
    return visible_tile_at(tiles.n - 1 - i, tiles.sinks, tiles.skip) * keys;
}

/* Unit w of the launch: sections of its heads, in each all entries, of each all heads of the
 * section. */
struct unit_place {
    uint32_t entry, head;
};

GPU_DEVICE unit_place place_of(const prefill_params &p, uint32_t w)
{
    const uint32_t section = w / (p.n_entries * p.section_heads);
    const uint32_t head0 = section * p.section_heads;
    const uint32_t n_heads = min(p.section_heads, p.num_kv_heads - head0);
    const uint32_t at = w - head0 * p.n_entries;
    return {at / n_heads, head0 + at % n_heads};
}

/* What a unit has of its item and its head. */
GPU_DEVICE unit unit_of(const prefill_params &p, const gpu_item &it, uint32_t head)
{
    const gpu_layer &layer = p.layers[it.layer];
    unit u;
    u.q = (const char *)it.q;
    u.out = (char *)it.out;
    u.lse = it.lse;
    u.table = p.table + it.table_at;
    u.sink_logits = layer.sink_logits;
    u.alibi_slopes = layer.alibi_slopes;
    u.head = head;
    u.pos = it.pos;
    u.total = it.pos + it.n_tokens;
    u.layer = it.layer;
    u.window = layer.window_tokens;
    u.sinks = layer.sink_tokens;
    u.is_full = layer.is_full | it.is_full;
    u.scale_log2 = layer.scale * gpu::log2e;
    u.soft_cap = layer.soft_cap;
    u.step = 1;
    u.n_branches = 0;
    u.tiles = {};
    u.n_tiles = 0;
    u.part = 0;
    u.n_parts = 1;
    u.block0 = 0;
    return u;
}

/* Rows of one query of an item with lists: its keys are the places in the query's list, and all of
 * them are seen. */
GPU_DEVICE void take_listed_rows(const prefill_params &p, const gpu_item &it, uint32_t tile,
                                 uint32_t rows, unit *u)
{
    const uint32_t per_query = (p.group + rows - 1) / rows;
    u->token0 = tile / per_query;
    u->first = tile % per_query * rows;
    u->n_rows = min(p.group - u->first, rows);
    const uint32_t *const starts = p.list_starts + it.node0 + u->token0;
    u->list0 = starts[0];
    u->total = starts[1] - starts[0];
    u->pos = u->window = u->sinks = 0;
    u->is_full = 1;
}

/* Fills *u, which has room for branches behind it, with unit w; n_rows 0: it has none. */
template <class S>
GPU_DEVICE void unit_at(const prefill_params &p, const prefill_words &words, uint32_t w, unit *u)
{
    const unit_place at = place_of(p, w);
    const uint32_t head = p.head0 + at.head;
    const prefill_entry *list = (const prefill_entry *)p.entries;
    const prefill_entry e = list ? list[at.entry] : words.list.entries[at.entry];
    const gpu_item &it = p.items[e.item];
    unit x = unit_of(p, it, head);
    x.block0 = at.head * p.head_blocks + it.node0;
    if constexpr (S::is_listed) {
        take_listed_rows(p, it, e.tile, S::R, &x);
    } else {
        x.token0 = e.tile * S::R / p.group;
        x.first = e.tile * S::R - x.token0 * p.group;
        x.n_rows = min(it.n_tokens * p.group - e.tile * S::R, S::R);
    }
    if (S::has_nodes && p.nodes) {
        x.is_full = SEES_NODES;
        x.node0 = it.node0;
    }
    x.tiles = visible_tiles_of(part<false, S::has_nodes>(p, x, S::N).seen().some, S::N);
    if (S::is_listed)
        x.tiles.n = max(x.tiles.n, 1u);
    x.part = e.part;
    x.n_parts = e.last_part + 1;
    x.slot0 = (at.entry - e.part) * p.num_kv_heads + at.head;
    const uint32_t from = x.tiles.n * e.part / x.n_parts;
    x.n_tiles = x.tiles.n * (e.part + 1) / x.n_parts - from;
    x.tiles.n -= from;
    *u = x;
}

/* The same of dilated layers. A head may have no token in a short run. */
template <class S>
GPU_DEVICE void dilated_unit_at(const prefill_params &p, const prefill_words &words, uint32_t w,
                                unit *u)
{
    const unit_place at = place_of(p, w);
    const prefill_run *list = (const prefill_run *)p.entries;
    const prefill_run e = list ? list[at.entry] : words.list.runs[at.entry];
    const gpu_item &it = p.items[e.item];
    const gpu_layer &layer = p.layers[it.layer];
    unit x = unit_of(p, it, at.head);
    x.step = 1u << e.shift;
    const uint32_t head = p.first_kv_head + at.head;
    const uint32_t before = (head + e.residue - it.pos - e.from) & (x.step - 1);
    const uint32_t n_tokens = (e.n_tokens + x.step - 1 - min(before, e.n_tokens)) >> e.shift;
    const uint32_t n_rows = n_tokens * p.group, row = e.tile * S::R;
    const uint32_t token = row / p.group;
    x.token0 = e.from + before + token * x.step;
    x.first = row - token * p.group;
    x.n_rows = row < n_rows ? min(n_rows - row, S::R) : 0;
    *u = x;
    if (x.n_rows == 0)
        return;
    part<true> keys(p, *u, S::N);
    for (uint32_t i = 0; i < layer.n_branches; ++i) {
        const attn_branch b = layer.branches[i];
        if ((e.residue & (b.rate - 1)) != 0)
            continue;
        keys.begin(p, {b.segment_tokens, b.rate, head & (b.rate - 1)}, S::N);
        keys.next();
    }
    u->n_branches = keys.nth;
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
