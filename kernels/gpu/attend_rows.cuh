/* attend_rows.cuh: attention over bf16 and f16: prompts and decode steps. For warps of 32 lanes,
 * with the instructions that every device from sm_80 on has: asynchronous copies, ldmatrix,
 * mma.sync. Tiles as in FlashAttention-2 (Dao, 2023).
 *
 * A thread block takes `rows` query rows (token x head of a group) of one kv head and one split of
 * the cached tokens, in tiles of `tile` tokens. `stages` tiles of K and V are in shared memory: one
 * is computed, the others are on their way, and the block meets once a tile. Each warp has
 * row_tiles * 16 rows, so that what it loads of K and V serves as many products: to itself, or,
 * where rows are few, with others that take other tokens of the tile (token_warps), whose results
 * meet at the end. Rows lie in shared memory as 16-byte pieces, piece c of row r at c ^ (r % 8).
 *
 * The splits of rows meet in device memory. Where that is little, the thread block that is the last
 * to arrive there joins them (is_joined), else a launch behind this one does.
 *
 * Stripes of a dilated layer's tokens are known where they are even (kernels/stripes.h): then only
 * the ends of what a query sees are other ones. Distances are not, so there is no ALiBi.
 *
 * A row's maximum lags behind by up to 2^rows_lag, so that most tiles leave the sums as they are.
 */
#ifndef ATTND_GPU_ATTEND_ROWS_CUH
#define ATTND_GPU_ATTEND_ROWS_CUH

#include "kernels/gpu/attend_matrix.cuh"
#include "kernels/gpu/merge_splits.cuh"

namespace gpu
{

constexpr float rows_lag = 8.0f; /* powers of 2 */

/* A query row, as the block's threads find it in shared memory. */
struct rows_row {
    visible see; /* keys of the branch */
    float slope;
    uint32_t position;
    uint32_t at; /* of [n_tokens][num_q_heads] */
};

/* Where a token's K and V lie from the start of a head's part. */
struct alignas(16) rows_key {
    uint64_t k, v;
};

template <bool is_bf16_, int dim_, int row_warps_, int row_tiles_, int token_warps_, int tile_,
          int stages_, int blocks_, bool has_branches_, bool is_sparse_>
struct rows_form {
    static constexpr bool is_bf16 = is_bf16_;
    static constexpr bool has_branches = has_branches_; /* else no layer is dilated: less code */
    static constexpr bool is_sparse = is_sparse_; /* a thread block has one query: lists, choices */
    static constexpr bool is_short =
        row_warps_ == 1; /* the code is fetched about as long as it runs */
    static constexpr int dim = dim_; /* head dim, rounded up: 64, 128, 256 */
    static constexpr int row_warps = row_warps_, row_tiles = row_tiles_, token_warps = token_warps_;
    static constexpr int tile = tile_, warp_tokens = tile / token_warps, stages = stages_;
    static constexpr int blocks = blocks_; /* of a processor, that registers must be enough for */
    static constexpr int warps = row_warps * token_warps, threads = warps * warp_width;
    static constexpr int rows = row_warps * row_tiles * 16;
    static constexpr int row_bytes = dim * 2, pieces = dim / 8;
    static constexpr bool keeps_q = row_tiles == 1 && dim <= 128; /* in registers */
    static constexpr int q_bytes = rows * row_bytes, part_bytes = tile * row_bytes;
    static constexpr int stage_bytes = 2 * part_bytes;
    static constexpr int stages_at = q_bytes, keys_at = stages_at + stages * stage_bytes;
    static constexpr int rows_at = keys_at + stages * tile * (int)sizeof(rows_key);
    static constexpr int shared_bytes = rows_at + rows * (int)sizeof(rows_row);
    /* over the stages when they have been used: the results of token_warps, [token_warp][rows] of
     * sums and behind them (m, sum); what splits are multiplied by, [rows][GPU_MAX_SPLITS], and a
     * word */
    static constexpr int o_stride = dim + 4;
    static constexpr int o_bytes = token_warps * rows * (o_stride * 4 + 8);
    static constexpr int weights_bytes = rows * GPU_MAX_SPLITS * 4 + 16;
    static_assert(threads % pieces == 0 && tile % (threads / pieces) == 0 && tile <= threads,
                  "rows are dealt to threads");
    static_assert(token_warps == 1 || o_bytes <= stages * stage_bytes, "results lie over stages");
    static_assert(weights_bytes <= stages * stage_bytes, "weights lie over stages");
};

/* The token that a key is. */
template <class C> GPU_DEVICE uint32_t rows_token(const branch &from, uint32_t key)
{
    return C::has_branches ? branch_token(from, key) : key;
}

/* Not 0: an element of the word is NaN or inf. */
template <bool is_bf16> GPU_DEVICE uint32_t bad_of(uint32_t two)
{
    return is_bf16 ? ((two & 0x7f807f80) + 0x00800080) & 0x80008000
                   : ((two & 0x7c007c00) + 0x04000400) & 0x80008000;
}

/* What a thread block is of its item. */
struct rows_place {
    uint32_t head, split, row0, n; /* n rows from row0 on */
};

/* Blocks of the longest rows first, all heads beside each other. */
template <class C>
GPU_DEVICE rows_place rows_place_of(const gpu_kv &kv, const gpu_item &it, uint32_t unit)
{
    const uint32_t n_rows = it.n_tokens * kv.group, n_chunks = (n_rows + C::rows - 1) / C::rows;
    rows_place p;
    p.split = unit % it.n_splits;
    unit /= it.n_splits;
    p.head = unit % kv.num_kv_heads;
    if (C::is_sparse) {
        const row_range own = row_range_at<of_list>(kv, it, unit / kv.num_kv_heads, C::rows);
        p.row0 = own.row0;
        p.n = own.n;
        return p;
    }
    p.row0 = (n_chunks - 1 - unit / kv.num_kv_heads) * C::rows;
    p.n = min(n_rows - p.row0, (uint32_t)C::rows);
    return p;
}

/* NaN and inf in V must not reach rows that do not see their key, but 0 * NaN is NaN. In a tile
 * where some key is hidden from some row, such elements are added here to the rows that see them
 * and become zero in shared memory. Collective. */
template <class C>
GPU_DEVICE void rows_hide_bad(char *v, float (&o)[C::row_tiles][C::dim / 16][tile_values],
                              const rows_row *rows, int warp_row, int warp_token, uint32_t base,
                              uint32_t end)
{
    constexpr int n = C::part_bytes / 16;
    uint32_t found = 0;
#pragma unroll(C::is_short ? 2 : n / C::threads)
    for (int i = threadIdx.x; i < n; i += C::threads) {
        const uint4 x = ((const uint4 *)v)[i];
        found |= bad_of<C::is_bf16>(x.x) | bad_of<C::is_bf16>(x.y) | bad_of<C::is_bf16>(x.z) |
                 bad_of<C::is_bf16>(x.w);
    }
    if (!block_any(found != 0))
        return;
    const int lane = lane_id();
    for (int t = warp_token; t < warp_token + C::warp_tokens; ++t) {
#pragma unroll
        for (int m = 0; m < C::row_tiles; ++m)
#pragma unroll
            for (int r = 0; r < tile_rows; ++r) {
                const visible &see = rows[warp_row + m * 16 + tile_row(lane, r)].see;
                if (base + t >= end || !is_visible(see, base + t))
                    continue;
#pragma unroll
                for (int j = 0; j < C::dim / 16; ++j)
#pragma unroll
                    for (int i = 0; i < tile_values; i += 2) {
                        if (tile_row_of(i) != r)
                            continue;
                        const uint32_t e = j * 16 + tile_column(lane, i);
                        const uint32_t two =
                            *(const uint32_t *)(v + t * C::row_bytes + ((e / 8 ^ (t & 7)) << 4) +
                                                e % 8 * 2);
                        o[m][j][i] += bad_only<C::is_bf16>(two & 0xffff);
                        o[m][j][i + 1] += bad_only<C::is_bf16>(two >> 16);
                    }
            }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < n * 4; i += C::threads) {
        uint32_t x = ((const uint32_t *)v)[i];
        if (bad_of<C::is_bf16>(x & 0xffff))
            x &= 0xffff0000;
        if (bad_of<C::is_bf16>(x & 0xffff0000))
            x &= 0xffff;
        ((uint32_t *)v)[i] = x;
    }
    __syncthreads();
}

/* cap * tanh(s / cap) to 2^-20 of the result, without divisions. */
GPU_DEVICE float rows_capped(float s, float cap, float inverse)
{
    const float x = s * inverse, x2 = x * x;
    const float near0 = fmaf(fmaf(fmaf(-17.0f / 315, x2, 2.0f / 15), x2, -1.0f / 3), x2, 1.0f) * x;
    const float e = exp2_fast(x * (2 * log2e));
    return cap * (fabsf(x) < 0.125f ? near0 : fmaf(-2.0f, exp2_fast(-log2_fast(e + 1.0f)), 1.0f));
}

/* Products become scores in units of log 2. */
template <class C>
GPU_DEVICE void rows_scores(float (&s)[C::row_tiles][C::warp_tokens / 16][tile_values],
                            const gpu_layer &layer, const rows_row *rows, const branch &from,
                            uint32_t base, bool is_plain)
{
    const int lane = lane_id();
    const float scale_log2 = layer.scale * log2e;
    if (is_plain) {
#pragma unroll
        for (int m = 0; m < C::row_tiles; ++m)
#pragma unroll
            for (int j = 0; j < C::warp_tokens / 16; ++j)
#pragma unroll
                for (int i = 0; i < tile_values; ++i)
                    s[m][j][i] *= scale_log2;
        return;
    }
    const float cap = layer.soft_cap, inverse = 1.0f / cap;
#pragma unroll
    for (int m = 0; m < C::row_tiles; ++m)
#pragma unroll
        for (int r = 0; r < tile_rows; ++r) {
            const rows_row &row = rows[m * 16 + tile_row(lane, r)];
            const float slope = row.slope;
            const uint32_t position = row.position;
#pragma unroll
            for (int j = 0; j < C::warp_tokens / 16; ++j)
#pragma unroll
                for (int i = 0; i < tile_values; ++i) {
                    if (tile_row_of(i) != r)
                        continue;
                    float x = s[m][j][i] * layer.scale;
                    if (cap > 0.0f)
                        x = rows_capped(x, cap, inverse);
                    const uint32_t key = rows_token<C>(from, base + j * 16 + tile_column(lane, i));
                    if (slope != 0.0f)
                        x += slope * distance_of(key, position);
                    s[m][j][i] = x * log2e;
                }
        }
}

/* Keys that a row does not see. */
template <class C>
GPU_DEVICE void rows_hide_keys(float (&s)[C::row_tiles][C::warp_tokens / 16][tile_values],
                               const rows_row *rows, uint32_t base, uint32_t end)
{
    const int lane = lane_id();
#pragma unroll
    for (int m = 0; m < C::row_tiles; ++m)
#pragma unroll
        for (int r = 0; r < tile_rows; ++r) {
            const visible see = rows[m * 16 + tile_row(lane, r)].see;
            const uint32_t n = max(min(see.end, end), see.first) - see.first;
            const uint32_t sinks = min(see.sinks, end);
#pragma unroll
            for (int j = 0; j < C::warp_tokens / 16; ++j)
#pragma unroll
                for (int i = 0; i < tile_values; ++i) {
                    const uint32_t key = base + j * 16 + tile_column(lane, i);
                    if (tile_row_of(i) == r && key - see.first >= n && key >= sinks)
                        s[m][j][i] = -INFINITY;
                }
        }
}

/* The item of a thread block: every lane of a warp looks at another one. */
GPU_DEVICE uint32_t rows_item(const gpu_item *items, uint32_t n_items, uint32_t unit)
{
    uint32_t lo = 0;
    for (uint32_t n = n_items; n > 1;) {
        const uint32_t step = (n + warp_width - 1) / warp_width, at = lane_id() * step;
        const bool is_before = at < n && items[lo + at].unit0 <= unit;
        const uint32_t skipped = (uint32_t)warp_max(is_before ? (float)lane_id() : 0.0f) * step;
        lo += skipped;
        n = min(step, n - skipped);
    }
    return lo;
}

/* The results of token_warps as those of the thread block. Collective. */
template <class C>
GPU_DEVICE void rows_join_warps(const gpu_attend &a, const gpu_item &it, const gpu_layer &layer,
                                const rows_place &place, const rows_row *rows, uint64_t slot0,
                                const float (&o)[C::row_tiles][C::dim / 16][tile_values],
                                const float (&top)[C::row_tiles][tile_rows],
                                const float (&sum)[C::row_tiles][tile_rows], float *all_o)
{
    constexpr int stride = C::o_stride, count = C::token_warps * C::rows;
    constexpr uint32_t dtype = C::is_bf16 ? ATTN_BF16 : ATTN_F16;
    const gpu_kv &kv = a.kv;
    const int lane = lane_id(), first = warp_id() / C::row_warps * C::rows +
                                        warp_id() % C::row_warps * C::row_tiles * 16;
    float2 *const all_ml = (float2 *)(all_o + count * stride);
#pragma unroll
    for (int m = 0; m < C::row_tiles; ++m)
#pragma unroll
        for (int r = 0; r < tile_rows; ++r) {
            const int row = first + m * 16 + tile_row(lane, r);
            const float all = warp_sum<tile_lanes, tile_step>(sum[m][r]);
            if (tile_is_first(lane))
                all_ml[row] = make_float2(top[m][r], all);
#pragma unroll
            for (int j = 0; j < C::dim / 16; ++j)
#pragma unroll
                for (int i = 0; i < tile_values; i += 2)
                    if (tile_row_of(i) == r)
                        *(float2 *)(all_o + row * stride + j * 16 + tile_column(lane, i)) =
                            make_float2(o[m][j][i], o[m][j][i + 1]);
        }
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < C::rows * C::dim / 4; i += C::threads) {
        const uint32_t row = i / (C::dim / 4), e = i % (C::dim / 4) * 4;
        if (row >= place.n || e >= kv.dv)
            continue;
        softmax_row all;
        float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int w = 0; w < C::token_warps; ++w)
            all.m = fmaxf(all.m, all_ml[w * C::rows + row].x);
#pragma unroll
        for (int w = 0; w < C::token_warps; ++w) {
            const float f = all.take((const float *)&all_ml[w * C::rows + row]);
            const float4 y = *(const float4 *)(all_o + (w * C::rows + row) * stride + e);
            x.x = fmaf(f, y.x, x.x);
            x.y = fmaf(f, y.y, x.y);
            x.z = fmaf(f, y.z, x.z);
            x.w = fmaf(f, y.w, x.w);
        }
        const uint32_t at = rows[row].at;
        if (it.n_splits > 1) {
            *(float4 *)(a.part_o + (slot0 + at) * kv.dv + e) = x;
            if (e == 0)
                *(float2 *)(a.part_ml + (slot0 + at) * 2) = make_float2(all.m, all.sum);
            continue;
        }
        float lse;
        const float f = finish_row(layer, at % kv.num_q_heads, all.m, all.sum, lse);
        x = make_float4(x.x * f, x.y * f, x.z * f, x.w * f);
        store4((char *)it.out + ((uint64_t)at * kv.dv + e) * element_bytes(dtype), x, dtype);
        if (e == 0 && it.lse)
            it.lse[at] = lse;
    }
}

/* The results of warps that have their rows to themselves. shared: the block's memory. */
template <class C>
GPU_DEVICE void rows_store(const gpu_attend &a, const gpu_item &it, const gpu_layer &layer,
                           const rows_place &place, const rows_row *rows, uint64_t slot0,
                           const float (&o)[C::row_tiles][C::dim / 16][tile_values],
                           const float (&top)[C::row_tiles][tile_rows],
                           const float (&sum)[C::row_tiles][tile_rows], char *shared)
{
    const bool is_part = it.n_splits > 1;
    constexpr uint32_t dtype = C::is_bf16 ? ATTN_BF16 : ATTN_F16;
    constexpr int n_m = C::row_tiles, n_o = C::dim / 16;
    const gpu_kv &kv = a.kv;
    const int lane = lane_id(), warp_row = warp_id() * n_m * 16;
#pragma unroll
    for (int m = 0; m < n_m; ++m)
#pragma unroll
        for (int r = 0; r < tile_rows; ++r) {
            const uint32_t r_warp = m * 16 + tile_row(lane, r), row = warp_row + r_warp;
            const bool is_live = row < place.n;
            const uint32_t at = rows[row].at;
            const float all = warp_sum<tile_lanes, tile_step>(sum[m][r]);
            if (is_part) {
                float *to = a.part_o + (slot0 + at) * kv.dv;
#pragma unroll
                for (int j = 0; j < n_o; ++j)
#pragma unroll
                    for (int i = 0; i < tile_values; i += 2) {
                        const uint32_t e = j * 16 + tile_column(lane, i);
                        if (tile_row_of(i) == r && is_live && e < kv.dv)
                            *(float2 *)(to + e) = make_float2(o[m][j][i], o[m][j][i + 1]);
                    }
                if (is_live && tile_is_first(lane))
                    *(float2 *)(a.part_ml + (slot0 + at) * 2) = make_float2(top[m][r], all);
                continue;
            }
            float lse;
            const float f = finish_row(layer, at % kv.num_q_heads, top[m][r], all, lse);
            if (is_live && tile_is_first(lane) && it.lse)
                it.lse[at] = lse;
#pragma unroll
            for (int j = 0; j < n_o; ++j)
#pragma unroll
                for (int i = 0; i < tile_values; i += 2) {
                    if (tile_row_of(i) != r)
                        continue;
                    const float x = o[m][j][i] * f, y = o[m][j][i + 1] * f;
                    const uint32_t e = j * 16 + tile_column(lane, i);
                    char *to = shared + row * C::row_bytes + ((e / 8 ^ (row & 7)) << 4) + e % 8 * 2;
                    *(uint32_t *)to = C::is_bf16 ? bf16_encode2(x, y) : f16_encode2(x, y);
                }
        }
    if (is_part)
        return;
    sync_warp(); /* each warp's own rows, where its rows of Q were */
    for (uint32_t i = lane; i < n_m * 16 * C::pieces; i += warp_width) {
        const uint32_t row = warp_row + i / C::pieces, piece = i % C::pieces;
        if (row < place.n && piece * 8 < kv.dv)
            *(uint4 *)((char *)it.out +
                       ((uint64_t)rows[row].at * kv.dv + piece * 8) * element_bytes(dtype)) =
                *(const uint4 *)(shared + row * C::row_bytes + ((piece ^ (row & 7)) << 4));
    }
}

/* The thread block has stored its split's results; if all others of its rows have, it joins them.
 * Collective. memory: of weights_bytes, that no thread needs any more after a barrier. */
template <class C>
GPU_DEVICE void rows_join_splits(const gpu_attend &a, const gpu_item &it, const rows_place &place,
                                 const rows_row *rows, float *memory)
{
    constexpr uint32_t dtype = C::is_bf16 ? ATTN_BF16 : ATTN_F16, quads = C::dim / 4;
    constexpr int at_once = 4;
    const gpu_kv &kv = a.kv;
    uint32_t *const is_last = (uint32_t *)(memory + C::rows * GPU_MAX_SPLITS);
    __syncthreads(); /* all have stored */
    if (threadIdx.x == 0) {
        uint32_t *const arrivals = a.arrivals + (blockIdx.x - place.split);
        __threadfence();
        *is_last = atomicAdd(arrivals, 1) == it.n_splits - 1;
        if (*is_last)
            *arrivals = 0;
        __threadfence();
    }
    __syncthreads();
    if (!*is_last)
        return;
#pragma unroll 1
    for (uint32_t row = threadIdx.x / split_lanes; row < C::rows; row += C::threads / split_lanes) {
        const uint32_t at = rows[row].at;
        float lse;
        split_weights(memory + row * GPU_MAX_SPLITS, a, it, at, lse);
        if (threadIdx.x % split_lanes == 0 && row < place.n && it.lse)
            it.lse[at] = lse;
    }
    __syncthreads();
    const uint64_t stride = (uint64_t)it.n_tokens * kv.num_q_heads * kv.dv;
    const float *const parts = a.part_o + it.slot0 * (uint64_t)kv.dv;
#pragma unroll 1
    for (uint32_t i0 = threadIdx.x; i0 < place.n * quads; i0 += C::threads * at_once) {
        const float *from[at_once], *weights[at_once];
        float4 x[at_once];
#pragma unroll
        for (int k = 0; k < at_once; ++k) {
            const uint32_t i = min(i0 + k * C::threads, place.n * quads - 1), row = i / quads;
            weights[k] = memory + row * GPU_MAX_SPLITS;
            from[k] = parts + (uint64_t)rows[row].at * kv.dv + min(i % quads * 4, kv.dv - 4);
        }
        sum_splits(x, from, weights, stride, it.n_splits);
#pragma unroll
        for (int k = 0; k < at_once; ++k) {
            const uint32_t i = i0 + k * C::threads, row = i / quads, e = i % quads * 4;
            if (row < place.n && e < kv.dv)
                store4((char *)it.out + ((uint64_t)rows[row].at * kv.dv + e) * element_bytes(dtype),
                       x[k], dtype);
        }
    }
}

template <class C>
__global__ void __launch_bounds__(C::threads, C::blocks) attend_rows(GPU_PARAM(gpu_attend, a))
{
    GPU_SHARED(char, shared);
    constexpr int n_m = C::row_tiles, n_s = C::warp_tokens / 16, n_o = C::dim / 16;
    const gpu_kv &kv = a.kv;
    constexpr bool has_own_rows = C::token_warps == 1;
    const int lane = lane_id();
    const int warp_row = (has_own_rows ? warp_id() : warp_id() % C::row_warps) * n_m * 16;
    const int warp_token = has_own_rows ? 0 : warp_id() / C::row_warps * C::warp_tokens;
    rows_key *const all_keys = (rows_key *)(shared + C::keys_at);
    rows_row *const rows = (rows_row *)(shared + C::rows_at);
    const shared_at s_q = shared_address(shared) + warp_row * C::row_bytes;
    chain_release();
    chain_wait();

    /* the faster search leaves the compiler without the knowledge that all lanes have one item,
     * which takes registers */
    const gpu_item &it =
        a.items[C::has_branches ? find_item<&gpu_item::unit0>(a.items, a.n_items, blockIdx.x)
                                : rows_item(a.items, a.n_items, blockIdx.x)];
    const rows_place place = rows_place_of<C>(kv, it, blockIdx.x - it.unit0);
    const uint32_t kv_len = it.pos + it.n_tokens;
    const gpu_layer &layer = kv.layers[it.layer];
    /* the first blocks' numbers come while the layer does; that of a window is elsewhere */
    if (!C::has_branches && !C::is_sparse && threadIdx.x < C::stages * C::tile)
        prefetch(kv.table + it.table_at +
                 (min(place.split * it.split_tokens + threadIdx.x, kv_len - 1) >> kv.block_shift));
    const uint32_t is_full = layer.is_full | it.is_full;
    token_order order = {1, it.n_tokens};
    if (C::has_branches)
        order = order_of(layer, it);
    const query_range queries =
        queries_of(order, it, place.row0 / kv.group, (place.row0 + place.n - 1) / kv.group);

    for (int r = threadIdx.x; r < C::rows; r += C::threads) {
        const uint32_t row = place.row0 + min((uint32_t)r, place.n - 1);
        const uint32_t token = token_at(order, row / kv.group);
        const uint32_t q_head = place.head * kv.group + row % kv.group;
        rows[r].position = it.pos + token;
        rows[r].slope = layer.alibi_slopes ? layer.alibi_slopes[q_head] : 0.0f;
        rows[r].at = token * kv.num_q_heads + q_head;
    }
    __syncthreads();

    /* one piece of every step-th row is this thread's, of Q, K and V */
    const uint32_t my_row = threadIdx.x / C::pieces, my_piece = threadIdx.x % C::pieces;
    constexpr uint32_t step = C::threads / C::pieces;
    const bool has_k = my_piece * 8 < kv.dk, has_v = my_piece * 8 < kv.dv;
    const uint32_t at_piece = (my_piece ^ (my_row & 7)) << 4;
    auto piece_of = [&](uint32_t row) { /* `row` is my_row and a number of steps */
                                        return row * C::row_bytes +
                                               (step % 8 == 0 ? at_piece
                                                              : (my_piece ^ (row & 7)) << 4);
    };
#pragma unroll 4
    for (int i = 0; i < C::rows / (int)step; ++i) {
        const uint32_t r = my_row + i * step;
        const bool is_live = r < place.n && has_k;
        const char *from = (const char *)it.q + ((uint64_t)rows[r].at * kv.dk + my_piece * 8) * 2;
        copy16_async(shared_address(shared) + piece_of(r), is_live ? from : (const char *)it.q,
                     is_live);
    }

    const query_list<C::is_sparse ? of_list : of_tokens> list(a, it, place.row0 / kv.group,
                                                              place.head);
    const uint32_t *const table = list.table(kv, it);
    const part k_part = part_of(kv, it.layer, false), v_part = part_of(kv, it.layer, true);
    const char *const k_from =
        kv.base + k_part.codes + place.head * k_part.head_bytes + (has_k ? my_piece * 16 : 0);
    const char *const v_from =
        kv.base + v_part.codes + place.head * v_part.head_bytes + (has_v ? my_piece * 16 : 0);
    const bool is_plain = layer.soft_cap == 0.0f && !layer.alibi_slopes;
    const float scale_log2 = layer.scale * log2e;
    /* products of larger scales may overflow, those of smaller ones change the order */
    const bool folds_scale = is_plain && scale_log2 > 0.0f && scale_log2 <= 1.0f;
    branch from = {};
    branch_part keys = {};

    /* jumps over tiles that no row sees */
    auto next_tile = [&](uint32_t base) {
        if (base >= keys.highest.sinks && base + C::tile <= keys.lowest.first)
            base += (keys.lowest.first - base) / C::tile * C::tile;
        return base;
    };
    auto token_of = [&](uint32_t key) {
        if constexpr (C::is_sparse)
            return list(kv, from, key, true);
        else
            return rows_token<C>(from, key);
    };
    auto block_of = [&](uint32_t base) { /* of this thread's key, of C::tile from base on */
                                         const uint32_t key = base + threadIdx.x;
                                         return threadIdx.x < C::tile && key < keys.end
                                                    ? table[token_of(key) >> kv.block_shift]
                                                    : 0;
    };
    auto keep_key = [&](uint32_t base, uint32_t block, rows_key *to) {
        const uint32_t key = base + threadIdx.x;
        if (threadIdx.x >= C::tile)
            return;
        const bool is_live = key < keys.end;
        const uint32_t slot = (is_live ? token_of(key) : 0) & (kv.block_tokens - 1);
        const uint64_t at = block * kv.block_bytes;
        to[threadIdx.x].k = is_live ? at + slot * k_part.row_bytes : 0;
        to[threadIdx.x].v = is_live ? at + slot * v_part.row_bytes : 0;
    };
    auto load_tile = [&](uint32_t base, int stage) {
        const shared_at dst = shared_address(shared) + C::stages_at + stage * C::stage_bytes;
        if (base < keys.end) {
#pragma unroll(C::is_short ? 4 : C::tile / step)
            for (int i = 0; i < C::tile / (int)step; ++i) {
                const uint32_t r = my_row + i * step;
                const rows_key key = all_keys[stage * C::tile + r];
                const bool is_live = base + r < keys.end;
                copy16_async(dst + piece_of(r), k_from + key.k, is_live && has_k);
                copy16_async(dst + C::part_bytes + piece_of(r), v_from + key.v, is_live && has_v);
            }
        }
        copy_commit();
    };

    float o[n_m][n_o][tile_values];
    float top[n_m][tile_rows], sum[n_m][tile_rows]; /* of this lane's rows */
#pragma unroll
    for (int m = 0; m < n_m; ++m) {
#pragma unroll
        for (int j = 0; j < n_o; ++j)
#pragma unroll
            for (int i = 0; i < tile_values; ++i)
                o[m][j][i] = 0.0f;
#pragma unroll
        for (int r = 0; r < tile_rows; ++r)
            top[m][r] = -INFINITY, sum[m][r] = 0.0f;
    }
    tile_operand kept_q[C::keeps_q ? n_o : 1];
    bool has_q = false;

    const uint32_t n_branches = C::has_branches ? n_branches_of(layer) : 1;
    for (uint32_t nth = 0; nth < n_branches; ++nth) {
        from = C::has_branches ? branch_at(kv, layer, nth, place.head) : branch_of(0, 1, 0);
        if constexpr (C::is_sparse)
            keys = part_of_all(it, list.n, place.split);
        else
            keys = part_of_branch<C::has_branches, true>(kv, layer, from, it, queries, place.split);
        for (int r = threadIdx.x; r < C::rows; r += C::threads) {
            const uint32_t position = rows[r].position;
            rows[r].see =
                C::is_sparse ? keys.highest
                : from.segment_tokens
                    ? stripes_even_visible(kv.stripes, from,
                                           branch_visible(from, is_full, position, kv_len))
                    : ::visible_to(layer.window_tokens, layer.sink_tokens, is_full, position,
                                   kv_len);
        }
        /* base: what is computed; brought: what is loaded next, and then its keys */
        uint32_t base = next_tile(keys.begin), brought = base;
        for (int s = 0; s < C::stages; ++s) {
            keep_key(brought, block_of(brought), all_keys + s * C::tile);
            brought = next_tile(brought + C::tile);
        }
        __syncthreads();
        uint32_t fetched = base;
#pragma unroll(C::is_short ? 1 : C::stages)
        for (int i = 0; i < C::stages; ++i) {
            load_tile(fetched, i);
            fetched = next_tile(fetched + C::tile);
        }
        copy_wait<C::stages - 1>();
        __syncthreads(); /* the first tile is there */
        int stage = 0;
        while (base < keys.end) {
            const uint32_t next_block = block_of(brought);

            if (C::keeps_q && !has_q) {
                has_q = true;
#pragma unroll
                for (int kk = 0; kk < (C::keeps_q ? n_o : 0); ++kk)
                    tile_load_rows(kept_q[kk], lane, [&](uint32_t r, uint32_t piece) {
                        return s_q + r * C::row_bytes + (((piece ^ (r & 7)) << 4) ^ (kk * 32));
                    });
            }
            char *const parts = shared + C::stages_at + stage * C::stage_bytes;
            const shared_at s_k = shared_address(parts), s_v = s_k + C::part_bytes;
            float s[n_m][n_s][tile_values];
#pragma unroll
            for (int m = 0; m < n_m; ++m)
#pragma unroll
                for (int j = 0; j < n_s; ++j)
#pragma unroll
                    for (int i = 0; i < tile_values; ++i)
                        s[m][j][i] = 0.0f;
#pragma unroll
            for (int kk = 0; kk < n_o; ++kk) {
                if (C::dim == 256 && kk == 12 && kv.dk <= 192)
                    break;
                tile_operand q[n_m];
#pragma unroll
                for (int m = 0; m < n_m; ++m)
                    if (C::keeps_q)
                        q[m] = kept_q[C::keeps_q ? kk : 0];
                    else
                        tile_load_rows(q[m], lane, [&](uint32_t r, uint32_t piece) {
                            return s_q + (r + m * 16) * C::row_bytes +
                                   (((piece ^ (r & 7)) << 4) ^ (kk * 32));
                        });
#pragma unroll
                for (int j = 0; j < n_s; ++j) {
                    tile_operand k;
                    tile_load_columns(k, lane, [&](uint32_t r, uint32_t piece) {
                        return s_k + (warp_token + r + j * 16) * C::row_bytes +
                               (((piece ^ (r & 7)) << 4) ^ (kk * 32));
                    });
#pragma unroll
                    for (int m = 0; m < n_m; ++m)
                        tile_multiply<C::is_bf16>(s[m][j], q[m], k);
                }
            }

            const bool is_open = keys.all_take_part && base >= keys.highest.first &&
                                 base + C::tile <= min(keys.lowest.end, keys.end);
            /* of the scores, in units of log 2; no other in tiles where all is seen, so that a
             * row's bits do not depend on the rows beside it */
            const float unit = folds_scale ? scale_log2 : 1.0f;
            if (!folds_scale)
                rows_scores<C>(s, layer, rows + warp_row, from, base + warp_token, is_plain);
            if (!is_open)
                rows_hide_keys<C>(s, rows + warp_row, base + warp_token, keys.end);
#pragma unroll
            for (int m = 0; m < n_m; ++m) {
                float factor[tile_rows];
                bool is_raised = false;
#pragma unroll
                for (int r = 0; r < tile_rows; ++r) {
                    float x = -INFINITY;
#pragma unroll
                    for (int j = 0; j < n_s; ++j)
#pragma unroll
                        for (int i = 0; i < tile_values; ++i)
                            if (tile_row_of(i) == r)
                                x = fmaxf(x, s[m][j][i]);
                    x = warp_max<tile_lanes, tile_step>(x) * unit;
                    const float m_new = x > top[m][r] + rows_lag ? x : top[m][r];
                    factor[r] = m_new == top[m][r] ? 1.0f : exp2_diff(top[m][r], m_new);
                    is_raised |= m_new != top[m][r];
                    top[m][r] = m_new;
                }
                if (warp_any(is_raised)) { /* as one: products follow */
#pragma unroll
                    for (int j = 0; j < n_o; ++j)
#pragma unroll
                        for (int i = 0; i < tile_values; ++i)
                            o[m][j][i] *= factor[tile_row_of(i)];
                }
#pragma unroll
                for (int r = 0; r < tile_rows; ++r) {
                    const float zero = top[m][r] == -INFINITY ? 0.0f : top[m][r];
                    float x = 0.0f;
#pragma unroll
                    for (int j = 0; j < n_s; ++j)
#pragma unroll
                        for (int i = 0; i < tile_values; ++i)
                            if (tile_row_of(i) == r) {
                                s[m][j][i] = exp2_fast(fmaf(s[m][j][i], unit, -zero));
                                x += s[m][j][i];
                            }
                    sum[m][r] = fmaf(sum[m][r], factor[r], x);
                }
            }
            if (!is_open)
                rows_hide_bad<C>(parts + C::part_bytes, o, rows, warp_row, warp_token, base,
                                 keys.end);

#pragma unroll
            for (int j = 0; j < n_s; ++j) {
                tile_operand p[n_m];
#pragma unroll
                for (int m = 0; m < n_m; ++m)
                    tile_pack<C::is_bf16>(p[m], s[m][j]);
#pragma unroll
                for (int d = 0; d < n_o; ++d) {
                    if (C::dim == 256 && d == 12 && kv.dv <= 192)
                        break;
                    tile_operand v;
                    tile_load_transposed(v, lane, [&](uint32_t r, uint32_t piece) {
                        return s_v + (warp_token + r + j * 16) * C::row_bytes +
                               (((piece ^ (r & 7)) << 4) ^ (d * 32));
                    });
#pragma unroll
                    for (int m = 0; m < n_m; ++m)
                        tile_multiply<C::is_bf16>(o[m][d], p[m], v);
                }
            }
            keep_key(brought, next_block, all_keys + stage * C::tile);
            brought = next_tile(brought + C::tile);
            base = next_tile(base + C::tile);
            copy_wait<C::stages - 2>();
            __syncthreads(); /* the next tile is there; this one has been used */
            load_tile(fetched, stage);
            fetched = next_tile(fetched + C::tile);
            stage = stage == C::stages - 1 ? 0 : stage + 1;
        }
        copy_wait<0>();
        __syncthreads();
    }

    const uint64_t slot0 = it.slot0 + (uint64_t)place.split * it.n_tokens * kv.num_q_heads;
    if constexpr (C::token_warps > 1)
        rows_join_warps<C>(a, it, layer, place, rows, slot0, o, top, sum,
                           (float *)(shared + C::stages_at));
    else
        rows_store<C>(a, it, layer, place, rows, slot0, o, top, sum, shared);
    if (C::is_short && it.n_splits > 1 && a.is_joined)
        rows_join_splits<C>(a, it, place, rows, (float *)(shared + C::stages_at));
}

/* The forms, and the least KiB of shared memory that a thread block has on cards they are for. Of
 * those of one head dim and as many rows the first that a card can have is taken. On a card all
 * forms of 64 and 128 rows and head dims up to 128 have tiles of one size: an output's bits are the
 * same whatever the rows. */
#define ROWS_FORMS(FORM)                                                                           \
    /* dim, row warps, row tiles, token warps, tokens, stages, blocks, has branches; KiB */        \
    FORM(64, 1, 1, 4, 64, 3, 4, false, 99)                                                         \
    FORM(64, 8, 1, 1, 64, 2, 2, true, 99)                                                          \
    FORM(64, 4, 1, 1, 64, 2, 3, true, 99)                                                          \
    FORM(128, 1, 1, 4, 64, 3, 2, false, 227)                                                       \
    FORM(128, 1, 1, 4, 64, 2, 2, false, 163)                                                       \
    FORM(128, 1, 1, 2, 32, 2, 2, false, 99)                                                        \
    FORM(128, 4, 2, 1, 64, 2, 2, true, 227) /* sm_90, sm_100 */                                    \
    FORM(128, 4, 1, 1, 64, 2, 2, true, 227)                                                        \
    FORM(128, 4, 2, 1, 32, 2, 2, true, 163) /* sm_80 */                                            \
    FORM(128, 8, 1, 1, 32, 2, 1, true, 99) /* sm_86, sm_89, sm_120 */                              \
    FORM(128, 4, 1, 1, 32, 2, 3, true, 99)                                                         \
    FORM(256, 1, 1, 4, 64, 2, 1, false, 163)                                                       \
    FORM(256, 1, 1, 2, 32, 2, 1, false, 99)                                                        \
    FORM(256, 4, 1, 1, 32, 2, 2, false, 99)                                                        \
    FORM(256, 8, 1, 1, 64, 2, 1, true, 227)                                                        \
    FORM(256, 8, 1, 1, 32, 2, 1, true, 163)                                                        \
    FORM(256, 4, 1, 1, 32, 2, 2, true, 99)

/* Does a card whose thread blocks have so many KiB have a form? */
constexpr bool rows_has_form(int dim, int rows, bool is_dilated, int kib)
{
    bool has = false;
#define ROWS_HAS(dim_, row_warps, row_tiles, token_warps, tile, stages, blocks, branches, kib_)    \
    has |= dim == dim_ && rows == row_warps * row_tiles * 16 && (branches || !is_dilated) &&       \
           kib >= kib_;
    ROWS_FORMS(ROWS_HAS)
#undef ROWS_HAS
    return has;
}

/* What every card has: 16 rows, and 64, of dilated layers, too. 128 are where there is room. */
constexpr bool rows_has_all(int kib)
{
    bool has = true;
    for (int dim = 64; dim <= 256; dim *= 2)
        has &= rows_has_form(dim, 16, false, kib) && rows_has_form(dim, 64, true, kib);
    return has;
}
static_assert(rows_has_all(shared_limit >> 10), "a card without a form");

/* Calls use.run<form>() for the form of so many rows, or, rows 0, for every one that the card can
 * have until one gives another code than 0. is_dilated: a layer is. No form: -1. Items with lists
 * or choices have forms of 16 rows. */
template <bool is_bf16, bool is_sparse, class Use>
int rows_with_form(uint32_t dim, uint32_t rows, bool is_dilated, uint32_t shared_bytes, Use use)
{
    int code = rows ? -1 : 0;
    bool is_found = false;
#define ROWS_TRY(dim_, row_warps, row_tiles, token_warps, tile, stages, blocks, branches, kib)     \
    if constexpr (!is_sparse || (row_warps * row_tiles == 1 && !branches)) {                       \
        using C = rows_form<is_bf16, dim_, row_warps, row_tiles, token_warps, tile, stages,        \
                            blocks, branches, is_sparse>;                                          \
        static_assert(C::shared_bytes <= kib << 10, "more shared memory than the card has");       \
        const bool fits = shared_bytes >= kib << 10;                                               \
        const bool is_it = rows == C::rows && dim <= dim_ && dim > (dim_ == 64 ? 0 : dim_ / 2) &&  \
                           (branches || !is_dilated);                                              \
        if (!is_found && fits && (rows == 0 || is_it)) {                                           \
            code = use.template run<C>();                                                          \
            is_found = rows > 0 || code != 0;                                                      \
        }                                                                                          \
    }
    ROWS_FORMS(ROWS_TRY)
#undef ROWS_TRY
    return code;
}

struct rows_allow {
    template <class C> int run() const
    {
        return allow_shared(attend_rows<C>, C::shared_bytes);
    }
};

struct rows_run {
    const gpu_attend *a;
    void *stream;
    bool chained;
    template <class C> int run() const
    {
        return launch(attend_rows<C>, dim3(a->n_units), dim3(C::threads), C::shared_bytes, stream,
                      chained, *a);
    }
};

/* Thread blocks that a processor has at once; it has a KiB more than one may have, which each
 * takes beside its own. */
struct rows_at_once {
    uint32_t shared_bytes;
    template <class C> int run() const
    {
        const uint32_t fit = (shared_bytes + 1024) / (C::shared_bytes + 1024);
        return (int)min(fit, (uint32_t)C::blocks);
    }
};

} // namespace gpu
#endif
