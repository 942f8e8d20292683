/* attend_matrix.cuh: attention on tensor cores for what no other kernel computes: quantised K and
 * V, also of items that choose blocks; on HIP all of bf16 and f16. Tiles as in FlashAttention-2
 * (Dao, 2023): S = Q K^T and O += P V by 16 x 16 tiles of 16-bit products, S and P stay in
 * registers.
 *
 * A thread block takes 16 * row_warps query rows (token x head of a group) of one kv head and one
 * split of the cached tokens, in tiles of `tile` tokens, copy_stages of which are in shared memory.
 * row_warps share a tile's tokens; token_warps cut it and meet at the end. Rows of Q, K and V lie
 * in shared memory as 16-byte pieces, piece c of row r at c ^ (r % 8), so that matrix loads meet no
 * bank twice.
 */
#ifndef ATTND_GPU_ATTEND_MATRIX_CUH
#define ATTND_GPU_ATTEND_MATRIX_CUH

#include "kernels/gpu/device.cuh"

namespace gpu
{

template <bool is_bf16_, bool is_quantised_, int dim_, int row_warps_> struct matrix_config {
    static constexpr bool is_bf16 = is_bf16_, is_quantised = is_quantised_;
    static constexpr int dim = dim_; /* head dim, rounded up: 64, 128, 256 */
    static constexpr int tile = matrix_tile(dim, row_warps_, is_quantised_);
    static constexpr int row_warps = row_warps_, token_warps = row_warps == 1 ? tile / 16 : 1;
    static constexpr int warps = row_warps * token_warps, threads = warps * warp_width;
    static constexpr int rows = 16 * row_warps, warp_tokens = tile / token_warps;
    static constexpr int row_bytes = dim * 2, pieces = dim / 8;
    static constexpr int q_bytes = rows * row_bytes, tile_bytes = tile * row_bytes;
    /* results on their way out, over K and V: with row warps only, in slices of 64 elements */
    static constexpr int slice = token_warps > 1 ? dim : 64, slice_stride = slice + 4;
    static constexpr int merge_bytes = warps * 16 * (slice_stride * 4 + 8);
    /* copy_stages of K and V; quantised: one of K and V as the products take them, behind it
     * copy_stages of codes of K, of V, scales of K, of V. Codes of FP4 take half of their place,
     * behind them are their groups' scales, `groups` bytes a row */
    static constexpr int code_bytes = tile * dim, groups = dim / 16;
    static constexpr int part_bytes = is_quantised ? code_bytes : tile_bytes;
    /* V's scales meet the probabilities; those of an f16 kernel have no room for it, there they go
     * into V */
    static constexpr bool scales_p = is_quantised && is_bf16;
    static constexpr int stage_bytes = is_quantised ? 2 * code_bytes + 8 * tile : 2 * tile_bytes;
    static constexpr int stages_at = q_bytes + (is_quantised ? 2 * tile_bytes : 0);
    static constexpr int kv_end = stages_at + copy_stages * stage_bytes,
                         merge_end = q_bytes + merge_bytes;
    static constexpr int shared_bytes = kv_end > merge_end ? kv_end : merge_end;
};

template <class C> GPU_DEVICE uint32_t row_piece(uint32_t row, uint32_t piece)
{
    return row * C::row_bytes + ((piece ^ (row & 7)) << 4);
}

template <class C> GPU_DEVICE shared_at piece_at(shared_at base, uint32_t row, uint32_t piece)
{
    return base + row_piece<C>(row, piece);
}

/* Where and what a thread block reads. */
struct matrix_source {
    const uint32_t *table;
    part k, v;
    uint32_t head;
};

/* load_tile of FP4, by 16 values. The row's scale goes where other types have theirs; mxfp4 has
 * none, and decode_fp4_part writes what stands for it. */
template <class C>
GPU_DEVICE void load_fp4_tile(const gpu_kv &kv, const matrix_source &src, const branch &from,
                              uint32_t end, uint32_t base, shared_at dst)
{
    const bool is_nv = kv.kv_dtype == ATTN_NVFP4;
    const uint32_t per_word = is_nv ? 4 : 8; /* of 16 values, whose groups' scales fill a word */
#pragma unroll 4
    for (int i = threadIdx.x; i < C::tile * C::groups; i += C::threads) {
        const uint32_t row = i / C::groups, piece = i % C::groups, key = base + row;
        const bool is_live = key < end;
        const uint32_t token = is_live ? branch_token(from, key) : 0;
        const uint32_t block = is_live ? src.table[token >> kv.block_shift] : 0;
        const uint32_t slot = token & (kv.block_tokens - 1);
#pragma unroll
        for (int is_v = 0; is_v < 2; ++is_v) {
            const part &p = is_v ? src.v : src.k;
            const bool has = is_live && piece * 16 < (is_v ? kv.dv : kv.dk);
            const char *codes = row_address(kv, p, block, src.head, slot);
            const char *scales = scale_address(kv, p, block, src.head, slot);
            const shared_at to = dst + is_v * C::part_bytes;
            copy_async<8>(to + i * 8, codes + (has ? piece * 8 : 0), has);
            if (piece % per_word == 0) {
                const uint32_t at = piece / per_word * 4;
                copy_async<4>(to + C::code_bytes / 2 + row * C::groups + at,
                              scales + (has ? groups_at(kv.kv_dtype) + at : 0), has);
            }
            if (piece == 0 && is_nv)
                copy_async<4>(dst + 2 * C::part_bytes + (is_v * C::tile + row) * 4, scales,
                              is_live);
        }
    }
}

/* Starts bringing one tile of a branch's K and V to a stage; keys from end on and pieces past the
 * head dim become zero. Quantised: codes as they are, and their scales. */
template <class C>
GPU_DEVICE void load_tile(const gpu_kv &kv, const matrix_source &src, const branch &from,
                          uint32_t end, uint32_t base, shared_at dst)
{
    const char *k0 = kv.base + src.k.codes + src.head * src.k.head_bytes;
    const char *v0 = kv.base + src.v.codes + src.head * src.v.head_bytes;
    if (C::is_quantised && is_fp4(kv.kv_dtype)) {
        load_fp4_tile<C>(kv, src, from, end, base, dst);
        return;
    }
#pragma unroll 4
    for (int i = threadIdx.x; i < C::tile * C::pieces; i += C::threads) {
        uint32_t row = i / C::pieces, piece = i % C::pieces, key = base + row;
        uint32_t token = branch_token(from, key);
        bool is_live = key < end;
        uint32_t block = is_live ? src.table[token >> kv.block_shift] : 0;
        uint32_t slot = is_live ? token & (kv.block_tokens - 1) : 0;
        uint64_t at = block * kv.block_bytes;
        bool has_k = is_live && piece * 8 < kv.dk, has_v = is_live && piece * 8 < kv.dv;
        uint32_t bytes = C::is_quantised ? piece * 8 : piece * 16;
        const char *k = k0 + at + slot * src.k.row_bytes + (has_k ? bytes : 0);
        const char *v = v0 + at + slot * src.v.row_bytes + (has_v ? bytes : 0);
        if (!C::is_quantised) {
            copy16_async(piece_at<C>(dst, row, piece), k, has_k);
            copy16_async(piece_at<C>(dst + C::part_bytes, row, piece), v, has_v);
            continue;
        }
        copy_async<8>(dst + i * 8, k, has_k);
        copy_async<8>(dst + C::part_bytes + i * 8, v, has_v);
        if (piece == 0) {
            shared_at scales = dst + 2 * C::part_bytes + row * 4;
            copy_async<4>(scales, scale_address(kv, src.k, block, src.head, slot), is_live);
            copy_async<4>(scales + 4 * C::tile, scale_address(kv, src.v, block, src.head, slot),
                          is_live);
        }
    }
}

/* Codes to 16-bit floats, exact but for an f16 kernel's V, which takes its scales here. */
template <class C, bool is_v>
GPU_DEVICE void decode_part(const char *codes, const float *scales, uint32_t dtype, char *dst)
{
#pragma unroll 4
    for (int i = threadIdx.x; i < C::tile * C::pieces; i += C::threads) {
        uint32_t row = i / C::pieces, piece = i % C::pieces, w[4];
        if (C::is_bf16 && dtype == ATTN_FP8_E4M3) {
            uint2 c = *(const uint2 *)(codes + i * 8);
            w[0] = e4m3_to_bf16x2<0>(c.x);
            w[1] = e4m3_to_bf16x2<1>(c.x);
            w[2] = e4m3_to_bf16x2<0>(c.y);
            w[3] = e4m3_to_bf16x2<1>(c.y);
        } else {
            float x[8];
            load8(x, codes + i * 8, dtype);
#pragma unroll
            for (int e = 0; e < 8 && is_v && !C::scales_p; ++e)
                x[e] *= scales[row];
#pragma unroll
            for (int e = 0; e < 4; ++e)
                w[e] = C::is_bf16 ? bf16_encode2(x[2 * e], x[2 * e + 1])
                                  : f16_encode2(x[2 * e], x[2 * e + 1]);
        }
        *(uint4 *)(dst + row_piece<C>(row, piece)) = make_uint4(w[0], w[1], w[2], w[3]);
    }
}

/* Eight FP4 values with their group's scale, as bf16: products of so few bits are exact. */
GPU_DEVICE uint4 fp4_to_bf16(uint32_t codes, float scale)
{
    const uint32_t s = __float_as_uint(scale), scales = (s & 0xffff0000) | s >> 16;
    const uint32_t two126 = 0x7e807e80; /* a code's three bits as a bf16's are too small by it */
    uint32_t x[4]; /* values i and i + 4 */
#pragma unroll
    for (int i = 3; i >= 0; --i, codes <<= 4) {
        const uint32_t two = (codes & 0x80008000) | (codes >> 6 & 0x01c001c0);
        x[i] = bf16x2_multiply(bf16x2_multiply(two, two126), scales);
    }
    return make_uint4((x[0] & 0xffff) | x[1] << 16, (x[2] & 0xffff) | x[3] << 16,
                      x[0] >> 16 | (x[1] & 0xffff0000), x[2] >> 16 | (x[3] & 0xffff0000));
}

/* The same with V's row scale, if it is not 1, as f16, which has all but mxfp4's 65536. */
GPU_DEVICE uint4 fp4_to_f16(uint32_t codes, float scale, float row_scale)
{
    float x[8];
    uint32_t w[4];
    decode_fp4(x, codes, scale);
#pragma unroll
    for (int e = 0; e < 8; ++e)
        x[e] = (x[e] == 65536.0f ? 65504.0f : x[e] == -65536.0f ? -65504.0f : x[e]) * row_scale;
#pragma unroll
    for (int e = 0; e < 4; ++e)
        w[e] = f16_encode2(x[2 * e], x[2 * e + 1]);
    return make_uint4(w[0], w[1], w[2], w[3]);
}

/* decode_part of FP4: a group's scale goes into its values. */
template <class C, bool is_v>
GPU_DEVICE void decode_fp4_part(const char *codes, float *scales, uint32_t dtype, char *dst)
{
    const uint8_t *groups = (const uint8_t *)codes + C::code_bytes / 2;
#pragma unroll 4
    for (int i = threadIdx.x; i < C::tile * C::pieces; i += C::threads) {
        const uint32_t row = i / C::pieces, piece = i % C::pieces;
        const uint8_t *of_row = groups + row * C::groups;
        const float scale =
            dtype == ATTN_MXFP4 ? row_scale((const char *)of_row, dtype) : scales[row];
        const float of_group = group_decode(of_row[piece * 8 / group_of(dtype)], dtype);
        const uint32_t eight = *(const uint32_t *)(codes + i * 4);
        if (piece == 0 && dtype == ATTN_MXFP4)
            scales[row] = scale;
        *(uint4 *)(dst + row_piece<C>(row, piece)) =
            C::is_bf16 ? fp4_to_bf16(eight, of_group)
                       : fp4_to_f16(eight, of_group, is_v ? scale : 1.0f);
    }
}

/* One query row as its warp's lanes know it. */
struct matrix_row : softmax_row {
    visible see;
    float slope;
    uint32_t position;
};

/* Where the results of a thread block go: to out, or to a slot of its split. */
struct row_sink {
    const gpu_attend &a;
    const gpu_item &it;
    const gpu_layer &layer;
    token_order order;
    uint32_t head, row0, split;

    /* Elements e .. e + 7 of row r, not yet divided by the sum. */
    template <uint32_t dtype>
    GPU_DEVICE void store(uint32_t r, uint32_t e, float (&x)[8], float m, float sum) const
    {
        const gpu_kv &kv = a.kv;
        uint32_t row = row0 + r, q_head = head * kv.group + row % kv.group;
        uint64_t out_row = (uint64_t)token_at(order, row / kv.group) * kv.num_q_heads + q_head;
        if (it.n_splits > 1) {
            uint64_t at = it.slot0 + (uint64_t)split * it.n_tokens * kv.num_q_heads + out_row;
            store8((char *)(a.part_o + at * kv.dv + e), x, ATTN_F32);
            if (e == 0)
                *(float2 *)(a.part_ml + at * 2) = make_float2(m, sum);
            return;
        }
        float lse, f = finish_row(layer, q_head, m, sum, lse);
#pragma unroll
        for (int i = 0; i < 8; ++i)
            x[i] *= f;
        store8((char *)it.out + (out_row * kv.dv + e) * element_bytes(dtype), x, dtype);
        if (e == 0 && it.lse)
            it.lse[out_row] = lse;
    }
};

/* Joins the results of warps that took different tokens of the same 16 rows: [warp][16][dim + 4]
 * sums, behind them [warp][16] (m, sum). Called by all their threads after a barrier. */
template <int dim, int warps, bool is_bf16>
GPU_DEVICE void merge_warps(const float *all_o, const row_sink &sink, uint32_t n)
{
    constexpr int pieces = dim / 8, stride = dim + 4;
    const float *all_ml = all_o + warps * 16 * stride;
    for (int i = threadIdx.x; i < 16 * pieces; i += warps * warp_width) {
        uint32_t r = i / pieces, e = i % pieces * 8;
        if (r >= n || e >= sink.a.kv.dv)
            continue;
        float x[8] = {};
        softmax_row all;
#pragma unroll
        for (int w = 0; w < warps; ++w)
            all.m = fmaxf(all.m, all_ml[w * 32 + r * 2]);
#pragma unroll
        for (int w = 0; w < warps; ++w) {
            float f = all.take(all_ml + w * 32 + r * 2), y[8];
            load8(y, (const char *)(all_o + (w * 16 + r) * stride + e), ATTN_F32);
#pragma unroll
            for (int k = 0; k < 8; ++k)
                x[k] = fmaf(f, y[k], x[k]);
        }
        sink.template store<is_bf16 ? ATTN_BF16 : ATTN_F16>(r, e, x, all.m, all.sum);
    }
}

template <bool is_bf16> GPU_DEVICE bool is_bad(uint32_t bits)
{
    uint32_t exponent = is_bf16 ? 0x7f80 : 0x7c00;
    return (bits & exponent) == exponent;
}

/* The element if it is NaN or inf, else 0. */
template <bool is_bf16> GPU_DEVICE float bad_only(uint32_t bits)
{
    return !is_bad<is_bf16>(bits) ? 0.0f : is_bf16 ? bf16_decode(bits) : f16_decode(bits);
}

/* A NaN or inf in V must not reach rows that do not see its key, but 0 * NaN is NaN. In a tile
 * where some key is hidden from some row, such elements are added here to the rows that see them
 * and become zero in shared memory. Collective; true if there was one: a barrier must follow. */
template <class C>
GPU_DEVICE bool hide_bad(char *v, float (&o)[C::dim / 16][tile_values],
                         const matrix_row (&row)[tile_rows], uint32_t base, int warp_token,
                         uint32_t end)
{
    bool found = false;
    for (int i = threadIdx.x; i < C::tile * C::pieces; i += C::threads) {
        uint4 x = ((const uint4 *)v)[i];
        uint32_t w[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int k = 0; k < 4; ++k)
            found |= is_bad<C::is_bf16>(w[k]) || is_bad<C::is_bf16>(w[k] >> 16);
    }
    if (!block_any(found))
        return false;
    for (int t = warp_token; t < warp_token + C::warp_tokens; ++t) {
        uint32_t key = base + t;
#pragma unroll
        for (int r = 0; r < tile_rows; ++r) {
            if (key >= end || !is_visible(row[r].see, key))
                continue;
#pragma unroll
            for (int j = 0; j < C::dim / 16; ++j)
#pragma unroll
                for (int i = 0; i < tile_values; i += 2) {
                    if (tile_row_of(i) != r)
                        continue;
                    uint32_t e = j * 16 + tile_column(lane_id(), i);
                    uint32_t two = *(const uint32_t *)(v + row_piece<C>(t, e / 8) + e % 8 * 2);
                    o[j][i] += bad_only<C::is_bf16>(two & 0xffff);
                    o[j][i + 1] += bad_only<C::is_bf16>(two >> 16);
                }
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < C::tile * C::pieces * 4; i += C::threads) {
        uint32_t x = ((const uint32_t *)v)[i];
        if (is_bad<C::is_bf16>(x))
            x &= 0xffff0000;
        if (is_bad<C::is_bf16>(x >> 16))
            x &= 0xffff;
        ((uint32_t *)v)[i] = x;
    }
    return true;
}

template <class C>
__global__ void __launch_bounds__(C::threads) attend_matrix(GPU_PARAM(gpu_attend, a))
{
    GPU_SHARED(char, shared);
    constexpr int n_s = C::warp_tokens / 16, n_o = C::dim / 16;
    const gpu_kv &kv = a.kv;
    const shared_at s_q = shared_address(shared);
    const int lane = lane_id(), warp_row = warp_id() % C::row_warps * 16;
    const int warp_token = warp_id() / C::row_warps * C::warp_tokens;
    chain_release();
    chain_wait();

    const gpu_item &it = a.items[find_item<&gpu_item::unit0>(a.items, a.n_items, blockIdx.x)];
    const uint32_t unit = blockIdx.x - it.unit0;
    const bool is_choosing = a.chosen != nullptr; /* then every thread block has one query */
    const uint32_t n_chunks =
        is_choosing ? row_ranges<of_list>(kv, it, C::rows) : row_ranges<of_tokens>(kv, it, C::rows);
    const uint32_t split = unit % it.n_splits;
    /* later rows see more keys: they start first */
    const uint32_t chunk = n_chunks - 1 - unit / it.n_splits % n_chunks;
    const uint32_t head = unit / it.n_splits / n_chunks;
    const row_range own = is_choosing ? row_range_at<of_list>(kv, it, chunk, C::rows)
                                      : row_range_at<of_tokens>(kv, it, chunk, C::rows);
    const uint32_t row0 = own.row0, n = own.n;
    const gpu_layer layer = layer_of(kv, it);
    const uint32_t kv_len = it.pos + it.n_tokens;
    const gpu_layer &stored = kv.layers[it.layer];
    const token_order order = order_of(stored, it);

    for (int i = threadIdx.x; i < C::rows * C::pieces; i += C::threads) {
        uint32_t r = i / C::pieces, piece = i % C::pieces, row = row0 + r;
        bool is_live = r < n && piece * 8 < kv.dk;
        uint64_t at = (uint64_t)token_at(order, is_live ? row / kv.group : 0) * kv.num_q_heads +
                      head * kv.group + row % kv.group;
        const char *from = (const char *)it.q + (at * kv.dk + piece * 8) * 2;
        copy16_async(piece_at<C>(s_q, r, piece), is_live ? from : (const char *)it.q, is_live);
    }

    matrix_row row[tile_rows];
#pragma unroll
    for (int h = 0; h < tile_rows; ++h) {
        uint32_t r = warp_row + tile_row(lane, h);
        uint32_t at = row0 + (r < n ? r : n - 1);
        row[h].position = it.pos + token_at(order, at / kv.group);
        row[h].slope =
            layer.alibi_slopes ? layer.alibi_slopes[head * kv.group + at % kv.group] : 0.0f;
    }
    const query_range queries = queries_of(order, it, row0 / kv.group, (row0 + n - 1) / kv.group);
    const bool is_plain = layer.soft_cap == 0.0f && !layer.alibi_slopes;
    const float scale_log2 = layer.scale * log2e;
    const uint32_t *table = table_of(kv, it);
    if (is_choosing)
        table = a.chosen + chosen_at(kv, it, a.n_chosen, row0 / kv.group, head);
    const matrix_source src = {table, part_of(kv, it.layer, false), part_of(kv, it.layer, true),
                               head};
    branch from = {};
    branch_part keys = {};

    /* jumps over tiles that no row sees */
    auto next_tile = [&](uint32_t base) {
        if (base >= keys.highest.sinks && base + C::tile <= keys.lowest.first)
            base += (keys.lowest.first - base) / C::tile * C::tile;
        return base;
    };
    auto start_tile = [&](uint32_t base, int stage) {
        load_tile<C>(kv, src, from, keys.end, base, s_q + C::stages_at + stage * C::stage_bytes);
        copy_commit();
    };

    float o[n_o][tile_values];
#pragma unroll
    for (int j = 0; j < n_o; ++j)
#pragma unroll
        for (int i = 0; i < tile_values; ++i)
            o[j][i] = 0.0f;

    for (uint32_t nth = 0; nth < n_branches_of(stored); ++nth) {
        from = branch_at(kv, stored, nth, head);
        if (is_choosing)
            keys = part_of_all(it, choice_at(kv, it, a.n_chosen, row0 / kv.group).n_keys, split);
        else
            keys = part_of_branch(kv, layer, from, it, queries, split);
#pragma unroll
        for (int r = 0; r < tile_rows; ++r)
            row[r].see =
                is_choosing ? keys.highest : visible_to(kv, layer, from, row[r].position, kv_len);
        uint32_t base = next_tile(keys.begin);
        int stage = 0;
        if (copy_stages == 2 && base < keys.end)
            start_tile(base, 0);
        while (base < keys.end) {
            uint32_t next = next_tile(base + C::tile);
            if (copy_stages == 1)
                start_tile(base, 0);
            else if (next < keys.end)
                start_tile(next, stage ^ 1);
            if (copy_stages == 2 && next < keys.end)
                copy_wait<1>();
            else
                copy_wait<0>();
            __syncthreads();

            char *staged = shared + C::stages_at + stage * C::stage_bytes, *parts = staged;
            float *k_scales = (float *)(staged + 2 * C::code_bytes);
            float *v_scales = k_scales + C::tile;
            if (C::is_quantised) {
                parts = shared + C::q_bytes;
                if (is_fp4(kv.kv_dtype)) {
                    decode_fp4_part<C, false>(staged, k_scales, kv.kv_dtype, parts);
                    decode_fp4_part<C, true>(staged + C::code_bytes, v_scales, kv.kv_dtype,
                                             parts + C::tile_bytes);
                } else {
                    decode_part<C, false>(staged, k_scales, kv.kv_dtype, parts);
                    decode_part<C, true>(staged + C::code_bytes, v_scales, kv.kv_dtype,
                                         parts + C::tile_bytes);
                }
                __syncthreads();
            }
            const shared_at s_k = shared_address(parts), s_v = s_k + C::tile_bytes;
            float s[n_s][tile_values];
#pragma unroll
            for (int j = 0; j < n_s; ++j)
#pragma unroll
                for (int i = 0; i < tile_values; ++i)
                    s[j][i] = 0.0f;
#pragma unroll
            for (int kk = 0; kk < C::dim / 16; ++kk) {
                tile_operand q;
                tile_load_rows(q, lane, [&](uint32_t r, uint32_t piece) {
                    return piece_at<C>(s_q, warp_row + r, kk * 2 + piece);
                });
#pragma unroll
                for (int j = 0; j < n_s; ++j) {
                    tile_operand k;
                    tile_load_columns(k, lane, [&](uint32_t r, uint32_t piece) {
                        return piece_at<C>(s_k, warp_token + j * 16 + r, kk * 2 + piece);
                    });
                    tile_multiply<C::is_bf16>(s[j], q, k);
                }
            }

            if (C::is_quantised) {
                k_scales += warp_token;
#pragma unroll
                for (int j = 0; j < n_s; ++j)
#pragma unroll
                    for (int i = 0; i < tile_values; ++i)
                        s[j][i] *= k_scales[j * 16 + tile_column(lane, i)];
            }

            const bool is_open = keys.all_take_part && base >= keys.highest.first &&
                                 base + C::tile <= min(keys.lowest.end, keys.end);
            float top[tile_rows], factor[tile_rows];
#pragma unroll
            for (int r = 0; r < tile_rows; ++r)
                top[r] = row[r].m;
#pragma unroll
            for (int j = 0; j < n_s; ++j)
#pragma unroll
                for (int i = 0; i < tile_values; ++i) {
                    matrix_row &w = row[tile_row_of(i)];
                    uint32_t key = base + warp_token + j * 16 + tile_column(lane, i);
                    float x = is_plain ? s[j][i] * scale_log2
                                       : score_of(layer, s[j][i], w.slope, w.position,
                                                  branch_token(from, key));
                    s[j][i] = is_open || (key < keys.end && is_visible(w.see, key)) ? x : -INFINITY;
                    top[tile_row_of(i)] = fmaxf(top[tile_row_of(i)], s[j][i]);
                }
#pragma unroll
            for (int r = 0; r < tile_rows; ++r) {
                top[r] = warp_max<tile_lanes, tile_step>(top[r]);
                factor[r] = row[r].raise(top[r]);
            }
#pragma unroll
            for (int j = 0; j < n_o; ++j)
#pragma unroll
                for (int i = 0; i < tile_values; ++i)
                    o[j][i] *= factor[tile_row_of(i)];
#pragma unroll
            for (int j = 0; j < n_s; ++j)
#pragma unroll
                for (int i = 0; i < tile_values; ++i)
                    s[j][i] = row[tile_row_of(i)].add(s[j][i]);
            if (!is_open && !C::scales_p &&
                hide_bad<C>(parts + C::tile_bytes, o, row, base, warp_token, keys.end))
                __syncthreads();

#pragma unroll
            for (int j = 0; j < n_s; ++j) {
#pragma unroll
                for (int i = 0; i < tile_values && C::scales_p;
                     ++i) /* a hidden key's scale may be NaN */
                    s[j][i] = s[j][i] == 0.0f
                                  ? 0.0f
                                  : s[j][i] * v_scales[warp_token + j * 16 + tile_column(lane, i)];
                tile_operand p;
                tile_pack<C::is_bf16>(p, s[j]);
#pragma unroll
                for (int d = 0; d < n_o; ++d) {
                    tile_operand v;
                    tile_load_transposed(v, lane, [&](uint32_t r, uint32_t piece) {
                        return piece_at<C>(s_v, warp_token + j * 16 + r, d * 2 + piece);
                    });
                    tile_multiply<C::is_bf16>(o[d], p, v);
                }
            }
            __syncthreads(); /* the stage may be filled again */
            base = next;
            stage ^= copy_stages - 1;
        }
    }
    copy_wait<0>();
#pragma unroll
    for (int r = 0; r < tile_rows; ++r)
        row[r].sum = warp_sum<tile_lanes, tile_step>(row[r].sum);
    __syncthreads();

    /* results: [warp][16 rows][dim + 4] floats, then (m, sum), over K and V where they fit */
    const row_sink sink = {a, it, layer, order, head, row0, split};
    constexpr int slice = C::slice, stride = C::slice_stride;
    float *s_o = (float *)(shared + C::q_bytes) + warp_id() * 16 * stride;
    float *s_ml = (float *)(shared + C::q_bytes) + C::warps * 16 * stride + warp_id() * 32;
    if (tile_is_first(lane))
#pragma unroll
        for (int r = 0; r < tile_rows; ++r) {
            s_ml[tile_row(lane, r) * 2] = row[r].m;
            s_ml[tile_row(lane, r) * 2 + 1] = row[r].sum;
        }
#pragma unroll
    for (int d0 = 0; d0 < C::dim; d0 += slice) {
#pragma unroll
        for (int j = 0; j < slice / 16; ++j)
#pragma unroll
            for (int i = 0; i < tile_values; i += 2)
                *(float2 *)(s_o + tile_row(lane, tile_row_of(i)) * stride + j * 16 +
                            tile_column(lane, i)) =
                    make_float2(o[d0 / 16 + j][i], o[d0 / 16 + j][i + 1]);
        if (C::token_warps == 1) {
            sync_warp();
            for (int i = lane; i < 16 * slice / 8; i += warp_width) {
                uint32_t r = i / (slice / 8), e = d0 + i % (slice / 8) * 8;
                float x[8];
                load8(x, (const char *)(s_o + r * stride + i % (slice / 8) * 8), ATTN_F32);
                if (warp_row + r < n && e < kv.dv)
                    sink.template store<C::is_bf16 ? ATTN_BF16 : ATTN_F16>(
                        warp_row + r, e, x, s_ml[r * 2], s_ml[r * 2 + 1]);
            }
            sync_warp();
        }
    }
    if (C::token_warps == 1)
        return;

    __syncthreads();
    merge_warps<C::dim, C::warps, C::is_bf16>((const float *)(shared + C::q_bytes), sink, n);
}

template <class C> int launch_matrix(const gpu_attend *a, void *stream, bool chained)
{
    static_assert(C::shared_bytes <= shared_limit, "more shared memory than a block may have");
    return launch(attend_matrix<C>, dim3(a->n_units), dim3(C::threads), C::shared_bytes, stream,
                  chained, *a);
}

/* Calls use.run<config>() for the configuration of a, or for every one if a is NULL. */
template <bool is_bf16, bool is_quantised, int row_warps, class Use>
int with_dim(const gpu_attend *a, Use use)
{
    uint32_t d = a ? (a->kv.dk > a->kv.dv ? a->kv.dk : a->kv.dv) : 0;
    int code = 0;
    if (!a || d <= 64)
        code = use.template run<matrix_config<is_bf16, is_quantised, 64, row_warps>>();
    if (!code && (!a || (d > 64 && d <= 128)))
        code = use.template run<matrix_config<is_bf16, is_quantised, 128, row_warps>>();
    if (!code && (!a || d > 128))
        code = use.template run<matrix_config<is_bf16, is_quantised, 256, row_warps>>();
    return code;
}

template <bool is_bf16, class Use> int with_config(const gpu_attend *a, Use use)
{
    int code = 0;
    if constexpr (!has_fragment_kernels) {
        if (!a || (!a->kv.is_quantised && a->rows_per_unit == 16))
            code = with_dim<is_bf16, false, 1>(a, use);
        if (!code && (!a || (!a->kv.is_quantised && a->rows_per_unit == 64)))
            code = with_dim<is_bf16, false, 4>(a, use);
    }
    if (!code && (!a || (a->kv.is_quantised && a->rows_per_unit == 16)))
        code = with_dim<is_bf16, true, 1>(a, use);
    if (!code && (!a || (a->kv.is_quantised && a->rows_per_unit == 64)))
        code = with_dim<is_bf16, true, 4>(a, use);
    return code;
}

struct matrix_allow {
    template <class C> int run() const
    {
        return allow_shared(attend_matrix<C>, C::shared_bytes);
    }
};

struct matrix_run {
    const gpu_attend *a;
    void *stream;
    bool chained;
    template <class C> int run() const
    {
        return launch_matrix<C>(a, stream, chained);
    }
};

/* One translation unit an element type. */
int matrix_init_bf16();
int matrix_init_f16();
int matrix_launch_bf16(const gpu_attend *a, void *stream, bool chained);
int matrix_launch_f16(const gpu_attend *a, void *stream, bool chained);

/* Where has_fragment_kernels, from here on. attend_codes.cu: up to 16 query rows over quantised K
 * and V. */
int codes_init();
bool codes_fit(const gpu_kv &kv, uint32_t rows);
int codes_launch(const gpu_attend *a, void *stream, bool chained);

/* attend_rows.cuh: K and V that are not quantised. rows_blocks: as gpu_attend_matrix_blocks. */
int rows_init_bf16(uint32_t shared_bytes);
int rows_init_f16(uint32_t shared_bytes);
uint32_t rows_blocks(const gpu_kv &kv, uint32_t rows, uint32_t shared_bytes);
int rows_launch_bf16(const gpu_attend *a, void *stream, bool chained);
int rows_launch_f16(const gpu_attend *a, void *stream, bool chained);

/* attend_f32.cu: f32 over f32, from 64 rows a thread block. */
int f32_init();
bool f32_fits(const gpu_kv &kv);
int f32_launch(const gpu_attend *a, void *stream, bool chained);

} // namespace gpu
#endif
