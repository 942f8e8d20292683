/* attend_codes.cu: decode attention (up to 16 query rows of a kv head) over quantised K and V, bf16
 * queries: codes go from shared memory into the operands of matrix instructions, decoded on the way
 * by integer operations. What follows is of codes of a byte, codes_fp4.cuh has those of FP4.
 *
 * A warp works alone on tiles of 16 tokens, its copies three tiles ahead; the four warps of a block
 * meet once, at the end. The order of d in a dot product and of columns in a product is free, so
 * that every lane reads 16 neighbouring codes: of K, product k's columns 2t .. and 2t + 8 .. are
 * the codes 4k, 4k + 2 and 4k + 1, 4k + 3 of the lane's piece; of V, product e's column g is
 * element g * dim / 8 + e. Scales of K meet the scores, those of V the probabilities.
 */
#include "kernels/gpu/codes_fp4.cuh"

using namespace gpu;

namespace
{

constexpr int threads = 128, n_warps = 4, tile = 16, n_stages = 3, step = n_warps * tile;

template <int dim> struct layout {
    static constexpr int pieces = dim / 16; /* of 16 codes, in a row */
    static constexpr int part_bytes = tile * dim;
    static constexpr int stage_bytes = 2 * part_bytes + 2 * tile * 4; /* K, V, their scales */

    /* Where piece c of a row lies: so that the lanes of one read meet different banks. */
    static GPU_DEVICE uint32_t k_at(uint32_t row, uint32_t c)
    {
        return row * dim + ((dim > 64 ? c ^ ((row & 1) << 2) : c) << 4);
    }

    static GPU_DEVICE uint32_t v_at(uint32_t row, uint32_t c)
    {
        uint32_t t = row >> 1 & 3;
        uint32_t flip = dim == 128 ? t << 1 : dim == 256 ? (t & 1) << 2 | t >> 1 : (t & 1) << 1;
        return row * dim + ((c ^ flip) << 4);
    }
};

/* Codes `odd` and `odd` + 2 of a word. */
template <bool is_fp8, bool odd> GPU_DEVICE uint32_t decode_apart(uint32_t w)
{
    return is_fp8 ? e4m3_apart_to_bf16x2<odd>(w) : int8_apart_to_bf16x2<odd>(w);
}

GPU_DEVICE uint32_t word_of(const uint4 &v, int i)
{
    return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

/* s: the dot products of the 16 query rows with the tile at s_k. */
template <int dim, bool is_fp8>
GPU_DEVICE void multiply_keys(float (&s)[2][4], const uint32_t (&q)[dim / 64][4][4],
                              const char *s_k, const int &g, const int &t)
{
    using L = layout<dim>;
#pragma unroll
    for (int i = 0; i < dim / 64; ++i)
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            uint4 c = *(const uint4 *)(s_k + L::k_at(j * 8 + g, t + 4 * i));
#pragma unroll
            for (int k = 0; k < 4; ++k)
                mma_16816<true>(s[j], q[i][k], decode_apart<is_fp8, false>(word_of(c, k)),
                                decode_apart<is_fp8, true>(word_of(c, k)));
        }
}

/* Adds to o the values at s_v, weighted by p. A lane's columns: dim / 8 codes of the tokens 2t, 2t
 * + 1, 2t + 8, 2t + 9. */
template <int dim, bool is_fp8>
GPU_DEVICE void multiply_values(float (&o)[dim / 8][4], const uint32_t (&p)[4], const char *s_v,
                                const int &g, const int &t)
{
    using L = layout<dim>;
    constexpr int n_words = dim == 64 ? 2 : 4;
#pragma unroll
    for (int e = 0; e < dim / 8; e += n_words * 4) {
        uint4 from[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            uint32_t r = 2 * t + i % 2 + i / 2 * 8, at = g * (dim / 8) + e;
            const char *src = s_v + L::v_at(r, at / 16) + at % 16;
            if (n_words == 4) {
                from[i] = *(const uint4 *)src;
            } else {
                uint2 x = *(const uint2 *)src;
                from[i] = make_uint4(x.x, x.y, 0, 0);
            }
        }
#pragma unroll
        for (int w = 0; w < n_words; ++w)
#pragma unroll
            for (int k = 0; k < 4; k += 2) { /* codes k and k + 1 of two tokens each */
                const uint32_t pick = k == 0 ? 0x5410 : 0x7632;
                const uint32_t x = __byte_perm(word_of(from[0], w), word_of(from[1], w), pick);
                const uint32_t y = __byte_perm(word_of(from[2], w), word_of(from[3], w), pick);
                mma_16816<true>(o[e + w * 4 + k], p, decode_apart<is_fp8, false>(x),
                                decode_apart<is_fp8, false>(y));
                mma_16816<true>(o[e + w * 4 + k + 1], p, decode_apart<is_fp8, true>(x),
                                decode_apart<is_fp8, true>(y));
            }
    }
}

/* As four_bits of codes_fp4.cuh, whose functions say what these do. */
template <int dim_, bool is_fp8> struct eight_bits {
    using L = layout<dim_>;
    static constexpr int dim = dim_, row_bytes = dim, stage_bytes = L::stage_bytes;

    static GPU_DEVICE void load_q(uint32_t (&q)[dim / 64][4][4], int h, const char *src,
                                  bool is_live, int t)
    {
#pragma unroll
        for (int i = 0; i < dim / 64; ++i)
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                uint2 x = *(const uint2 *)(src + ((t + 4 * i) * 16 + 4 * k) * 2);
                q[i][k][h] = is_live ? __byte_perm(x.x, x.y, 0x5410) : 0;
                q[i][k][2 + h] = is_live ? __byte_perm(x.x, x.y, 0x7632) : 0;
            }
    }

    template <class At, class Live>
    static GPU_DEVICE void bring(const gpu_kv &kv, const part &pk, const part &pv, uint32_t head,
                                 shared_at to, int lane, At at, Live is_live)
    {
        uint32_t block;
#pragma unroll
        for (int i = lane; i < tile * L::pieces; i += warp_width) {
            uint32_t r = i / L::pieces, c = i % L::pieces, slot = at(r, block);
            const char *k = row_address(kv, pk, block, head, slot);
            const char *v = row_address(kv, pv, block, head, slot);
            copy16_async(to + L::k_at(r, c), k + c * 16, is_live(r));
            copy16_async(to + L::part_bytes + L::v_at(r, c), v + c * 16, is_live(r));
        }
        const uint32_t slot = at(lane % tile, block);
        const char *k = scale_address(kv, pk, block, head, slot);
        const char *v = scale_address(kv, pv, block, head, slot);
        copy_async<4>(to + 2 * L::part_bytes + lane * 4, lane < tile ? k : v, is_live(lane % tile));
    }

    static GPU_DEVICE void bring_run(const char *k, const char *v, const char *scales, shared_at to,
                                     int lane, uint32_t left)
    {
        constexpr int rows = warp_width / L::pieces; /* at a time */
#pragma unroll
        for (int i = 0; i < tile / rows; ++i) {
            const uint32_t r = i * rows + lane / L::pieces, c = lane % L::pieces;
            copy16_async(to + L::k_at(r, c), k + i * rows * row_bytes, r < left);
            copy16_async(to + L::part_bytes + L::v_at(r, c), v + i * rows * row_bytes, r < left);
        }
        copy_async<4>(to + 2 * L::part_bytes + lane * 4, scales, lane % tile < left);
    }

    static GPU_DEVICE float scale_of(const char *stage, bool is_v, uint32_t token)
    {
        return ((const float *)(stage + 2 * L::part_bytes))[is_v * tile + token];
    }

    static GPU_DEVICE void multiply_keys(float (&s)[2][4], const uint32_t (&q)[dim / 64][4][4],
                                         const char *stage, int g, int t)
    {
        ::multiply_keys<dim, is_fp8>(s, q, stage, g, t);
    }

    static GPU_DEVICE void multiply_values(float (&o)[dim / 8][4], const uint32_t (&p)[4],
                                           const char *stage, int g, int t)
    {
        ::multiply_values<dim, is_fp8>(o, p, stage + L::part_bytes, g, t);
    }
};

template <class C> constexpr int codes_shared_bytes()
{
    constexpr int stages_bytes = n_warps * n_stages * C::stage_bytes;
    constexpr int merge_bytes = n_warps * 16 * ((C::dim + 4) * 4 + 8);
    constexpr int bytes = stages_bytes > merge_bytes ? stages_bytes : merge_bytes;
    static_assert(bytes <= shared_limit, "more shared memory than a block may have");
    return bytes;
}

/* Thread blocks of a processor that registers must be enough for. */
template <class C> constexpr int blocks_of = C::dim == 64 ? 4 : C::dim == 128 ? 3 : 2;

/* f(score, which of the lane's rows, token of the tile) of a lane's scores. */
template <class F> GPU_DEVICE void each_score(float (&s)[2][4], int t, F f)
{
#pragma unroll
    for (int j = 0; j < 2; ++j)
#pragma unroll
        for (int c = 0; c < 4; ++c)
            f(s[j][c], c / 2, j * 8 + 2 * t + c % 2);
}

template <class C>
GPU_DEVICE void scale_scores(float (&s)[2][4], const char *stage, int t, float unit)
{
#pragma unroll
    for (int j = 0; j < 2; ++j)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            const float scale = C::scale_of(stage, false, j * 8 + 2 * t + c) * unit;
            s[j][c] *= scale;
            s[j][2 + c] *= scale;
        }
}

/* Weights with V's scales, as an operand. A hidden key's scale may be NaN. */
template <class C, bool may_hide>
GPU_DEVICE void pack_weights(uint32_t (&p)[4], const float (&s)[2][4], const char *stage, int t)
{
#pragma unroll
    for (int j = 0; j < 2; ++j) {
        const float low = C::scale_of(stage, true, j * 8 + 2 * t);
        const float high = C::scale_of(stage, true, j * 8 + 2 * t + 1);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float x = s[j][h * 2], y = s[j][h * 2 + 1];
            p[j * 2 + h] = bf16_encode2(may_hide && x == 0.0f ? 0.0f : x * low,
                                        may_hide && y == 0.0f ? 0.0f : y * high);
        }
    }
}

template <class C>
__global__ void __launch_bounds__(threads, blocks_of<C>) attend_codes(GPU_PARAM(gpu_attend, a))
{
    GPU_SHARED(char, shared);
    constexpr int dim = C::dim, n_o = dim / 8, n_q = dim / 64;
    const gpu_kv &kv = a.kv;
    const int lane = lane_id(), g = lane / 4, t = lane % 4;
    chain_release();
    chain_wait();

    const gpu_item &it = a.items[find_item<&gpu_item::unit0>(a.items, a.n_items, blockIdx.x)];
    const uint32_t n = it.n_tokens * kv.group, unit = blockIdx.x - it.unit0;
    const uint32_t split = unit % it.n_splits, head = unit / it.n_splits;
    const gpu_layer layer = layer_of(kv, it);
    const uint32_t kv_len = it.pos + it.n_tokens;

    matrix_row row[2];
    uint32_t q[n_q][4][4]; /* [piece][product][operand register] */
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        uint32_t r = g + h * 8, at = r < n ? r : n - 1, q_head = head * kv.group + at % kv.group;
        row[h].position = it.pos + at / kv.group;
        row[h].slope = layer.alibi_slopes ? layer.alibi_slopes[q_head] : 0.0f;
        const char *src =
            (const char *)it.q + ((uint64_t)(at / kv.group) * kv.num_q_heads + q_head) * dim * 2;
        C::load_q(q, h, src, r < n, t);
    }
    const gpu_layer &stored = kv.layers[it.layer];
    const token_order order = {1, it.n_tokens}; /* too few for another */
    const query_range queries = queries_of(order, it, 0, (n - 1) / kv.group);
    const bool is_plain = layer.soft_cap == 0.0f && !layer.alibi_slopes;
    const float scale_log2 = layer.scale * log2e;
    const part pk = part_of(kv, it.layer, false), pv = part_of(kv, it.layer, true);
    const uint32_t *table = kv.table + it.table_at, scale_bytes = pk.scale_bytes;
    /* what the lane brings of a tile in block 0 */
    const char *const own_k = row_address(kv, pk, 0, head, 0) + lane * 16;
    const char *const own_v = row_address(kv, pv, 0, head, 0) + lane * 16;
    const char *const own_scales =
        scale_address(kv, lane < tile ? pk : pv, 0, head, (uint32_t)lane % tile);
    char *stages = shared + warp_id() * n_stages * C::stage_bytes;

    float o[n_o][4];
#pragma unroll
    for (int j = 0; j < n_o; ++j)
        o[j][0] = o[j][1] = o[j][2] = o[j][3] = 0.0f;

    for (uint32_t nth = 0; nth < n_branches_of(stored); ++nth) {
        const branch from = branch_at(kv, stored, nth, head);
        const branch_part keys = part_of_branch(kv, layer, from, it, queries, split);
#pragma unroll
        for (int h = 0; h < 2; ++h)
            row[h].see = visible_to(kv, layer, from, row[h].position, kv_len);
        /* jumps over tiles that no row sees */
        auto seen_from = [&](uint32_t base) {
            while (base < keys.end && base >= keys.highest.sinks &&
                   base + tile <= keys.lowest.first)
                base += max((keys.lowest.first - base) / step * step, (uint32_t)step);
            return base;
        };
        /* Rows past the end become zero. The tokens of a tile lie behind one another in one block
         * unless the layer is dilated. */
        auto start_tile = [&](uint32_t base, uint32_t its_block, int stage) {
            const shared_at to = shared_address(stages + stage * C::stage_bytes);
            auto is_live = [&](uint32_t r) { return base + r < keys.end; };
            auto apart = [&](uint32_t r, uint32_t &block) {
                const uint32_t token = branch_token(from, base + r);
                block = is_live(r) ? table[token >> kv.block_shift] : 0;
                return token & (kv.block_tokens - 1);
            };
            const uint32_t slot = base & (kv.block_tokens - 1);
            const uint64_t at = its_block * kv.block_bytes, row_at = at + slot * C::row_bytes;
            if (base < keys.end) {
                if (stored.n_branches == 0)
                    C::bring_run(own_k + row_at, own_v + row_at,
                                 own_scales + at + slot * scale_bytes, to, lane, keys.end - base);
                else
                    C::bring(kv, pk, pv, head, to, lane, apart, is_live);
            }
            copy_commit();
        };
        /* Read a turn before the tile is asked for. */
        auto block_of = [&](uint32_t base) {
            return base < keys.end ? table[branch_token(from, base) >> kv.block_shift] : 0;
        };
        uint32_t base = seen_from(keys.begin + warp_id() * tile);
        uint32_t next = seen_from(base + step), ahead = seen_from(next + step);
        static_assert(n_stages == 3, "of base, next and ahead");
        uint32_t ahead_block = block_of(ahead);
        start_tile(base, block_of(base), 0);
        start_tile(next, block_of(next), 1);
        int stage = 0;
#pragma unroll 1
        for (uint32_t after; base < keys.end; base = next, next = ahead, ahead = after) {
            start_tile(ahead, ahead_block, stage ? stage - 1 : n_stages - 1);
            after = seen_from(ahead + step);
            ahead_block = block_of(after);
            copy_wait<n_stages - 1>();
            sync_warp();
            const char *staged = stages + stage * C::stage_bytes;

            float s[2][4] = {};
            C::multiply_keys(s, q, staged, g, t);
            const bool is_open = keys.all_take_part && base >= keys.highest.first &&
                                 base + tile <= min(keys.lowest.end, keys.end);
            scale_scores<C>(s, staged, t, is_plain ? scale_log2 : 1.0f);
            if (!is_plain)
                each_score(s, t, [&](float &x, int h, uint32_t slot) {
                    x = score_of(layer, x, row[h].slope, row[h].position,
                                 branch_token(from, base + slot));
                });
            if (!is_open)
                each_score(s, t, [&](float &x, int h, uint32_t slot) {
                    const uint32_t key = base + slot;
                    x = key < keys.end && is_visible(row[h].see, key) ? x : -INFINITY;
                });
            float factor[2];
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                float top =
                    fmaxf(fmaxf(s[0][h * 2], s[0][h * 2 + 1]), fmaxf(s[1][h * 2], s[1][h * 2 + 1]));
                factor[h] = row[h].raise(fmaxf(row[h].m, warp_max<4>(top)));
            }
            if (warp_any(factor[0] != 1.0f || factor[1] != 1.0f)) { /* as one: products follow */
#pragma unroll
                for (int j = 0; j < n_o; ++j)
#pragma unroll
                    for (int c = 0; c < 4; ++c)
                        o[j][c] *= factor[c / 2];
            }
            each_score(s, t,
                       [&](float &x, int h,
                           uint32_t) { /* becomes its weight */
                                       x = exp2_fast(x - (row[h].m == -INFINITY ? 0.0f : row[h].m));
                                       row[h].sum += x;
                       });
            uint32_t p[4];
            if (is_open)
                pack_weights<C, false>(p, s, staged, t);
            else
                pack_weights<C, true>(p, s, staged, t);
            C::multiply_values(o, p, staged, g, t);
            sync_warp(); /* the stage may be filled again */
            stage = stage == n_stages - 1 ? 0 : stage + 1;
        }
    }
    copy_wait<0>();
    row[0].sum = warp_sum<4>(row[0].sum);
    row[1].sum = warp_sum<4>(row[1].sum);
    __syncthreads();

    constexpr int stride = dim + 4;
    float *all_o = (float *)shared, *s_o = all_o + warp_id() * 16 * stride;
    float *s_ml = all_o + n_warps * 16 * stride + warp_id() * 32;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        if (t == 0) {
            s_ml[(g + h * 8) * 2] = row[h].m;
            s_ml[(g + h * 8) * 2 + 1] = row[h].sum;
        }
#pragma unroll
        for (int c = 0; c < 2; ++c)
#pragma unroll
            for (int j = 0; j < n_o; j += 4)
                *(float4 *)(s_o + (g + h * 8) * stride + (2 * t + c) * (dim / 8) + j) = make_float4(
                    o[j][h * 2 + c], o[j + 1][h * 2 + c], o[j + 2][h * 2 + c], o[j + 3][h * 2 + c]);
    }
    __syncthreads();
    const row_sink sink = {a, it, layer, order, head, 0, split};
    merge_warps<dim, n_warps, true>(all_o, sink, n);
}

template <int dim> int allow()
{
    using fp8 = eight_bits<dim, true>;
    using int8 = eight_bits<dim, false>;
    using nvfp4 = four_bits<dim, tile, true>;
    using mxfp4 = four_bits<dim, tile, false>;
    int code = allow_shared(attend_codes<fp8>, codes_shared_bytes<fp8>());
    code = code ? code : allow_shared(attend_codes<int8>, codes_shared_bytes<int8>());
    code = code ? code : allow_shared(attend_codes<nvfp4>, codes_shared_bytes<nvfp4>());
    return code ? code : allow_shared(attend_codes<mxfp4>, codes_shared_bytes<mxfp4>());
}

template <class C> int run_codes(const gpu_attend *a, void *stream, bool chained)
{
    return launch(attend_codes<C>, dim3(a->n_units), dim3(threads), codes_shared_bytes<C>(), stream,
                  chained, *a);
}

template <int dim> int run(const gpu_attend *a, void *stream, bool chained)
{
    if (a->kv.kv_dtype == ATTN_FP8_E4M3)
        return run_codes<eight_bits<dim, true>>(a, stream, chained);
    if (a->kv.kv_dtype == ATTN_INT8)
        return run_codes<eight_bits<dim, false>>(a, stream, chained);
    if (a->kv.kv_dtype == ATTN_NVFP4)
        return run_codes<four_bits<dim, tile, true>>(a, stream, chained);
    return run_codes<four_bits<dim, tile, false>>(a, stream, chained);
}

} // namespace

int gpu::codes_init()
{
    int code = allow<64>();
    code = code ? code : allow<128>();
    return code ? code : allow<256>();
}

bool gpu::codes_fit(const gpu_kv &kv, uint32_t rows)
{
    return rows == 16 && kv.is_quantised && kv.q_dtype == ATTN_BF16 && kv.dk == kv.dv &&
           (kv.dk == 64 || kv.dk == 128 || kv.dk == 256) && kv.block_tokens >= tile;
}

int gpu::codes_launch(const gpu_attend *a, void *stream, bool chained)
{
    if (a->kv.dk == 64)
        return run<64>(a, stream, chained);
    return a->kv.dk == 128 ? run<128>(a, stream, chained) : run<256>(a, stream, chained);
}
