/* device.cuh: what all kernels of a pool share: element loads of any stored type, where a token's K
 * and V live, which keys a query sees and what an option does to a score.
 */
#ifndef ATTND_GPU_DEVICE_CUH
#define ATTND_GPU_DEVICE_CUH

#include "kernels/choice.h"
#include "kernels/gpu/params.h"
#include "kernels/gpu/softmax.cuh"
#include "kernels/gpu/vendor/gpu.h"
#include "proto/attn_types.h"

namespace gpu
{

/* Eight neighbouring elements of a stored array as floats; p is aligned to 8 elements. */
GPU_DEVICE void load8(float (&x)[8], const char *p, uint32_t dtype)
{
    if (dtype == ATTN_BF16 || dtype == ATTN_F16) {
        uint4 v = *(const uint4 *)p;
        uint32_t w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            x[2 * i] = dtype == ATTN_BF16 ? bf16_decode(w[i] & 0xffff) : f16_decode(w[i] & 0xffff);
            x[2 * i + 1] = dtype == ATTN_BF16 ? bf16_decode(w[i] >> 16) : f16_decode(w[i] >> 16);
        }
    } else if (dtype == ATTN_F32) {
        float4 a = *(const float4 *)p, b = *(const float4 *)(p + 16);
        x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w;
        x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
    } else {
        uint2 v = *(const uint2 *)p;
        uint32_t w[2] = {v.x, v.y};
#pragma unroll
        for (int i = 0; i < 8; i += 2) {
            if (dtype == ATTN_FP8_E4M3) {
                e4m3_decode2(w[i / 4] >> (i % 4 * 8) & 0xffff, x[i], x[i + 1]);
            } else {
                x[i] = int8_decode(w[i / 4], i % 4);
                x[i + 1] = int8_decode(w[i / 4], i % 4 + 1);
            }
        }
    }
}

/* Eight floats to an array of the travelling type (f32, f16, bf16). */
GPU_DEVICE void store8(char *p, const float (&x)[8], uint32_t dtype)
{
    if (dtype == ATTN_F32) {
        *(float4 *)p = make_float4(x[0], x[1], x[2], x[3]);
        *(float4 *)(p + 16) = make_float4(x[4], x[5], x[6], x[7]);
        return;
    }
    uint32_t w[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
        w[i] = dtype == ATTN_BF16 ? bf16_encode2(x[2 * i], x[2 * i + 1])
                                  : f16_encode2(x[2 * i], x[2 * i + 1]);
    *(uint4 *)p = make_uint4(w[0], w[1], w[2], w[3]);
}

GPU_DEVICE uint32_t element_bytes(uint32_t dtype)
{
    return dtype == ATTN_F32 ? 4 : dtype == ATTN_BF16 || dtype == ATTN_F16 ? 2 : 1;
}

/* The item whose range [start, next item's start) holds x; starts grow. start0 is the range's
 * origin: items[0]'s start. */
template <uint32_t gpu_item::*start>
GPU_DEVICE uint32_t find_item(const gpu_item *items, uint32_t n_items, uint32_t x)
{
    uint32_t lo = 0, hi = n_items;
    while (hi - lo > 1) {
        uint32_t mid = (lo + hi) / 2;
        if (items[mid].*start <= x)
            lo = mid;
        else
            hi = mid;
    }
    return lo;
}

GPU_DEVICE bool is_fp4(uint32_t dtype)
{
    return dtype == ATTN_NVFP4 || dtype == ATTN_MXFP4;
}

/* Where the scales of a row's groups begin among the row's scales, and the values of a group. */
GPU_DEVICE uint32_t groups_at(uint32_t dtype)
{
    return dtype == ATTN_MXFP4 ? 0 : 4;
}

GPU_DEVICE uint32_t group_of(uint32_t dtype)
{
    return dtype == ATTN_MXFP4 ? 32 : 16;
}

GPU_DEVICE float group_decode(uint32_t code, uint32_t dtype)
{
    return dtype == ATTN_MXFP4 ? e8m0_decode(code) : e4m3_scale_decode(code);
}

/* What is left to multiply by where groups' scales have been: a row's scale, NaN if its values are
 * to be read as NaN. scales: the row's. */
GPU_DEVICE float row_scale(const char *scales, uint32_t dtype)
{
    if (dtype == ATTN_MXFP4)
        return *(const uint8_t *)scales == 255 ? NAN : 1.0f;
    return *(const float *)scales;
}

/* Eight FP4 values, with their group's scale; the first is in the low bits. */
GPU_DEVICE void decode_fp4(float (&x)[8], uint32_t codes, float scale)
{
#pragma unroll
    for (int i = 0; i < 8; ++i)
        x[i] = e2m1_decode(codes >> (4 * i)) * scale;
}

/* Eight neighbouring values of a row of a cache, from e on, but for the row's scale. scales: the
 * row's, if it has any. */
GPU_DEVICE void load_stored8(float (&x)[8], const char *row, const char *scales, uint32_t e,
                             uint32_t dtype)
{
    if (!is_fp4(dtype)) {
        load8(x, row + e * element_bytes(dtype), dtype);
        return;
    }
    const uint32_t code = *(const uint8_t *)(scales + groups_at(dtype) + e / group_of(dtype));
    decode_fp4(x, *(const uint32_t *)(row + e / 2), group_decode(code, dtype));
}

/* Bytes of a row of n stored elements, and of its scales where it has any. */
GPU_DEVICE uint32_t stored_bytes(uint32_t dtype, uint32_t n)
{
    return is_fp4(dtype) ? n / 2 : n * element_bytes(dtype);
}

GPU_DEVICE uint32_t scale_bytes(uint32_t dtype, uint32_t n)
{
    return is_fp4(dtype) ? groups_at(dtype) + (n / group_of(dtype) + 3) / 4 * 4 : 4;
}

/* Where the K or V row of (block, layer, head, slot in block) lies, and its scales. */
struct part {
    uint64_t codes, scales; /* offsets of this layer's part within a block */
    uint64_t head_bytes;
    uint32_t row_bytes, scale_bytes, block_tokens;
};

GPU_DEVICE part part_of(const gpu_kv &kv, uint32_t layer, bool is_v)
{
    part p;
    uint64_t base = layer * kv.layer_bytes;
    p.codes = base + (is_v ? kv.v_offset : 0);
    p.scales = base + (is_v ? kv.v_scales : kv.k_scales);
    p.head_bytes = is_v ? kv.v_head_bytes : kv.k_head_bytes;
    p.row_bytes = stored_bytes(kv.kv_dtype, is_v ? kv.dv : kv.dk);
    p.scale_bytes = scale_bytes(kv.kv_dtype, is_v ? kv.dv : kv.dk);
    p.block_tokens = kv.block_tokens;
    return p;
}

GPU_DEVICE char *row_address(const gpu_kv &kv, const part &p, uint32_t block, uint32_t head,
                             uint32_t slot)
{
    return kv.base + block * kv.block_bytes + p.codes + head * p.head_bytes + slot * p.row_bytes;
}

GPU_DEVICE char *scale_address(const gpu_kv &kv, const part &p, uint32_t block, uint32_t head,
                               uint32_t slot)
{
    return kv.base + block * kv.block_bytes + p.scales +
           (head * p.block_tokens + slot) * p.scale_bytes;
}

/* A layer's branches as a kv head has them; one of all tokens where it is not dilated. The layer is
 * the one in device memory: a copy would be indexed in local memory. */
GPU_DEVICE uint32_t n_branches_of(const gpu_layer &l)
{
    return l.n_branches ? l.n_branches : 1;
}

GPU_DEVICE branch branch_at(const gpu_kv &kv, const gpu_layer &l, uint32_t i, uint32_t kv_head)
{
    return l.n_branches ? branch_of(l.branches[i].segment_tokens, l.branches[i].rate,
                                    kv.first_kv_head + kv_head)
                        : branch_of(0, 1, 0);
}

/* The item's layer as it is for the item. A copy: branches are indexed in device memory. */
GPU_DEVICE gpu_layer layer_of(const gpu_kv &kv, const gpu_item &it)
{
    gpu_layer l = kv.layers[it.layer];
    l.is_full |= it.is_full;
    return l;
}

/* The pool's, in a kernel that is compiled for them: they take registers of those that know
 * them. */
template <bool has_stripes> GPU_DEVICE stripes stripes_in(const gpu_kv &kv)
{
    const stripes none = {0, 0, 0};
    return has_stripes ? kv.stripes : none;
}

/* The keys of the branch that the query at `position` of an item of kv_len tokens sees, of those
 * that are here. */
template <bool has_stripes = false>
GPU_DEVICE visible visible_to(const gpu_kv &kv, const gpu_layer &l, const branch &b,
                              uint32_t position, uint32_t kv_len)
{
    const stripes s = stripes_in<has_stripes>(kv);
    return b.segment_tokens
               ? stripes_visible(s, b, branch_visible(b, l.is_full, position, kv_len))
               : ::visible_to(l.window_tokens, l.sink_tokens, l.is_full, position, kv_len);
}

/* The token that a key of the branch is, and its position. */
template <bool has_stripes = false>
GPU_DEVICE uint32_t token_of(const gpu_kv &kv, const branch &b, uint32_t key)
{
    return stripes_token(stripes_in<has_stripes>(kv), b, key);
}

template <bool has_stripes = false>
GPU_DEVICE uint32_t position_of(const gpu_kv &kv, const branch &b, uint32_t key)
{
    const uint32_t token = token_of<has_stripes>(kv, b, key);
    return b.segment_tokens ? stripes_position(stripes_in<has_stripes>(kv), token) : token;
}

/* The order of an item's tokens in rows. In a prompt of a dilated layer tokens that are equal
 * modulo the largest rate come together, so that those of a thread block take part in the same
 * branches; else they come as they are. */
struct token_order {
    uint32_t stride, n_tokens;
};

GPU_DEVICE token_order order_of(const gpu_layer &l, const gpu_item &it)
{
    token_order o = {1, it.n_tokens};
    for (uint32_t i = 0; i < l.n_branches; ++i)
        o.stride = max(o.stride, l.branches[i].rate);
    bool is_all = it.n_tokens / 16 >= o.stride;
    for (uint32_t i = 0; i < l.n_branches; ++i)
        is_all = is_all && o.stride % l.branches[i].rate == 0;
    o.stride = is_all ? o.stride : 1;
    return o;
}

/* The item's token that is i-th in the order. */
GPU_DEVICE uint32_t token_at(const token_order &o, uint32_t i)
{
    if (o.stride == 1)
        return i;
    const uint32_t few = o.n_tokens / o.stride, n_more = o.n_tokens % o.stride;
    const uint32_t more = n_more * (few + 1); /* tokens of the remainders that have one more */
    return i < more ? i / (few + 1) + i % (few + 1) * o.stride
                    : n_more + (i - more) / few + (i - more) % few * o.stride;
}

/* Positions of a thread block's first and last query; all others lie between them, `step` or a
 * multiple of it apart. */
struct query_range {
    uint32_t low, high, step;
};

GPU_DEVICE query_range queries_of(const token_order &o, const gpu_item &it, uint32_t first,
                                  uint32_t last)
{
    const uint32_t low = token_at(o, first), high = token_at(o, last);
    query_range q = {it.pos + low, it.pos + high, o.stride};
    if (low % o.stride != high % o.stride) {
        q.low = it.pos;
        q.high = it.pos + it.n_tokens - 1;
        q.step = 1;
    }
    return q;
}

/* A branch's keys as one thread block has them: those that the first and the last of its queries
 * that take part see, and the part of them that is its split's. */
struct branch_part {
    visible lowest, highest;
    uint32_t begin, end;
    bool all_take_part; /* every query of the thread block */
};

template <bool has_stripes = false, bool is_even = false>
GPU_DEVICE branch_part part_of_branch(const gpu_kv &kv, const gpu_layer &l, const branch &b,
                                      const gpu_item &it, const query_range &q, uint32_t split)
{
    const uint32_t kv_len = it.pos + it.n_tokens;
    branch_part x = {};
    if (b.segment_tokens == 0) {
        const uint32_t is_full = l.is_full | it.is_full;
        x.lowest = ::visible_to(l.window_tokens, l.sink_tokens, is_full, q.low, kv_len);
        x.highest = ::visible_to(l.window_tokens, l.sink_tokens, is_full, q.high, kv_len);
        x.begin = split * it.split_tokens;
        x.end = min(x.begin + it.split_tokens, x.highest.end);
        x.all_take_part = true;
        return x;
    }
    const bool is_all_or_none = q.step % b.rate == 0 || q.low == q.high;
    if (is_all_or_none && q.low % b.rate != b.offset)
        return x;
    const branch_range seen = branch_visible_to(b, l.is_full, q.low, q.high, kv_len);
    const stripes s = stripes_in<has_stripes>(kv);
    x.lowest =
        is_even ? stripes_even_visible(s, b, seen.lowest) : stripes_visible(s, b, seen.lowest);
    x.highest =
        is_even ? stripes_even_visible(s, b, seen.highest) : stripes_visible(s, b, seen.highest);
    const uint32_t share = (x.highest.end - x.lowest.first + it.n_splits - 1) / it.n_splits;
    x.begin = x.lowest.first + split * share;
    x.end = min(x.begin + share, x.highest.end);
    x.all_take_part = is_all_or_none;
    return x;
}

GPU_DEVICE bool is_visible(const visible &v, uint32_t key)
{
    return visible_has(&v, key);
}

/* What the kernels for every geometry are compiled for: stripes, trees and lists take registers of
 * those that know them. */
enum item_kind { of_tokens, of_stripes, of_tree, of_list };

/* Query rows of one kv head that a thread block has, `most` at most: neighbours; where queries have
 * lists, of one query. */
struct row_range {
    uint32_t row0, n;
};

template <item_kind kind>
GPU_DEVICE uint32_t row_ranges(const gpu_kv &kv, const gpu_item &it, uint32_t most)
{
    if (kind == of_list)
        return (kv.group + most - 1) / most * it.n_tokens;
    return (it.n_tokens * kv.group + most - 1) / most;
}

template <item_kind kind>
GPU_DEVICE row_range row_range_at(const gpu_kv &kv, const gpu_item &it, uint32_t nth, uint32_t most)
{
    const uint32_t each = (kv.group + most - 1) / most;
    const uint32_t first = kind == of_list ? nth / each * kv.group : 0;
    const uint32_t end = kind == of_list ? kv.group : it.n_tokens * kv.group;
    const uint32_t at = (kind == of_list ? nth % each : nth) * most;
    const row_range x = {first + at, min(end - at, most)};
    return x;
}

/* What the item's query `token` visits of the blocks that it sees. */
GPU_DEVICE choice_size choice_at(const gpu_kv &kv, const gpu_item &it, uint32_t n_chosen,
                                 uint32_t token)
{
    const bool is_full = it.is_full || kv.layers[it.layer].is_full;
    return choice_of(n_chosen, kv.block_shift, kv.stripes,
                     it.pos + (is_full ? it.n_tokens : token + 1));
}

/* Where the blocks that it chose for the kv head begin. */
GPU_DEVICE uint32_t chosen_at(const gpu_kv &kv, const gpu_item &it, uint32_t n_chosen,
                              uint32_t token, uint32_t head)
{
    return it.node0 + (token * kv.num_kv_heads + head) * n_chosen;
}

/* The item's row of the block table. */
GPU_DEVICE const uint32_t *table_of(const gpu_kv &kv, const gpu_item &it)
{
    return kv.table + it.table_at;
}

/* The part of n keys that is a split's, whatever they are: every query of the thread block sees
 * them all. */
GPU_DEVICE branch_part part_of_all(const gpu_item &it, uint32_t n, uint32_t split)
{
    branch_part x = {};
    x.lowest = x.highest = ::visible_to(0, 0, 1, 0, n);
    x.begin = split * it.split_tokens;
    x.end = min(x.begin + it.split_tokens, n);
    x.all_take_part = true;
    return x;
}

/* The tokens that a thread block's query visits. */
template <item_kind kind> struct query_list {
    GPU_DEVICE query_list(const gpu_attend &, const gpu_item &, uint32_t, uint32_t)
    {
    }
    GPU_DEVICE const uint32_t *table(const gpu_kv &kv, const gpu_item &it) const
    {
        return table_of(kv, it);
    }
    GPU_DEVICE void cut(const gpu_item &, uint32_t, branch_part &) const
    {
    }
    GPU_DEVICE uint32_t operator()(const gpu_kv &kv, const branch &b, uint32_t key, bool) const
    {
        return token_of<kind == of_stripes>(kv, b, key);
    }
};

template <> struct query_list<of_list> {
    const uint32_t *tokens; /* NULL: it has chosen blocks, and visits all of them */
    const uint32_t *chosen;
    uint32_t n;

    GPU_DEVICE query_list(const gpu_attend &a, const gpu_item &it, uint32_t query, uint32_t head)
    {
        if (a.chosen) {
            tokens = nullptr;
            chosen = a.chosen + chosen_at(a.kv, it, a.n_chosen, query, head);
            n = choice_at(a.kv, it, a.n_chosen, query).n_keys;
            return;
        }
        const uint32_t *starts = a.list_starts + it.node0 + query;
        tokens = a.list_tokens + starts[0];
        chosen = nullptr;
        n = starts[1] - starts[0];
    }
    GPU_DEVICE const uint32_t *table(const gpu_kv &kv, const gpu_item &it) const
    {
        return chosen ? chosen : table_of(kv, it);
    }
    /* Keys are places in the list. */
    GPU_DEVICE void cut(const gpu_item &it, uint32_t split, branch_part &keys) const
    {
        keys = {};
        keys.begin = split * it.split_tokens;
        keys.end = min(keys.begin + it.split_tokens, n);
    }
    GPU_DEVICE uint32_t operator()(const gpu_kv &, const branch &, uint32_t key, bool is_live) const
    {
        return !is_live ? 0 : tokens ? tokens[key] : key;
    }
};

/* What a query sees of a branch's keys. */
template <item_kind kind> struct query_view {
    visible seen;

    GPU_DEVICE void look(const gpu_attend &a, const gpu_layer &l, const branch &b,
                         const gpu_item &it, uint32_t position, uint32_t)
    {
        seen = visible_to<kind == of_stripes>(a.kv, l, b, position, it.pos + it.n_tokens);
    }
    GPU_DEVICE bool has(const gpu_item &, uint32_t key) const
    {
        return is_visible(seen, key);
    }
};

/* Of a tree's, the node `token` of the item: cached tokens, and nodes. */
template <> struct query_view<of_tree> {
    visible seen;
    uint64_t nodes;

    GPU_DEVICE void look(const gpu_attend &a, const gpu_layer &l, const branch &,
                         const gpu_item &it, uint32_t, uint32_t token)
    {
        const tree_node node = a.nodes[it.node0 + token];
        seen = tree_visible(&node, l.window_tokens, l.sink_tokens, it.pos);
        nodes = tree_seen(&node, l.window_tokens, l.sink_tokens, it.pos);
    }
    GPU_DEVICE bool has(const gpu_item &it, uint32_t key) const
    {
        return key < it.pos ? is_visible(seen, key) : (nodes >> (key - it.pos) & 1) != 0;
    }
};

/* Whatever a query lists it sees. */
template <> struct query_view<of_list> {
    GPU_DEVICE void look(const gpu_attend &, const gpu_layer &, const branch &, const gpu_item &,
                         uint32_t, uint32_t)
    {
    }
    GPU_DEVICE bool has(const gpu_item &, uint32_t) const
    {
        return true;
    }
};

/* The position of the item's token. */
template <item_kind kind>
GPU_DEVICE uint32_t query_position(const gpu_attend &a, const gpu_item &it, uint32_t token)
{
    return it.pos + (kind == of_tree ? a.nodes[it.node0 + token].depth : token);
}

/* The position of a branch's key, which is one of the item's and stored as `token`. */
template <item_kind kind>
GPU_DEVICE uint32_t key_position(const gpu_attend &a, const gpu_item &it, const branch &b,
                                 uint32_t key, uint32_t token)
{
    if (kind == of_list)
        return token;
    if (kind != of_tree)
        return position_of<kind == of_stripes>(a.kv, b, key);
    const uint32_t node = key - it.pos;
    return key < it.pos || node >= it.n_tokens ? key : it.pos + a.nodes[it.node0 + node].depth;
}

/* queries_of, but any of a tree's nodes may be its root. */
template <item_kind kind>
GPU_DEVICE query_range queries_in(const token_order &o, const gpu_item &it, uint32_t first,
                                  uint32_t last)
{
    if (kind != of_tree)
        return queries_of(o, it, first, last);
    const query_range all = {it.pos, it.pos + it.n_tokens - 1, 1};
    return all;
}

/* How far a key is from a query, negative before it. Exact up to 2^24, wherever they are: positions
 * beyond that are not, as floats. */
GPU_DEVICE float distance_of(uint32_t key, uint32_t position)
{
    return (float)(int32_t)(key - position);
}

/* The score of a visible key in units of log 2, from the plain dot product. */
GPU_DEVICE float score_of(const gpu_layer &l, float dot, float slope, uint32_t position,
                          uint32_t key)
{
    float s = dot * l.scale;
    if (l.soft_cap > 0.0f)
        s = l.soft_cap * tanhf(s / l.soft_cap);
    if (slope != 0.0f)
        s += slope * distance_of(key, position);
    return s * log2e;
}

/* What this thread knows to be done is done. The signals are stored in their order, and no fence
 * holds one back until those before it have landed. None has to: whoever sees a later one and
 * needs an earlier one, a successor that takes up the cache, looks when the driver has let go of
 * this process's memory, by when all that was stored is there. */
GPU_DEVICE void signal_host(const gpu_finish &a)
{
    __threadfence_system();
    for (uint32_t i = 0; i < a.n_signals; ++i)
        *(volatile uint32_t *)a.signals[i] = a.signal_values[i];
    *(volatile uint64_t *)a.out_done = (uint64_t)a.value << 32 | (uint32_t)time_ns();
}

} // namespace gpu
#endif
