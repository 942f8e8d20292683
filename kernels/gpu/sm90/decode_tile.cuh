/* decode_tile.cuh: one warp's work on one tile of 16 cached tokens: scores, online softmax,
 * weighted sum, for up to 8 * NT query rows of one kv head.
 *
 * The operands are swapped: S^T = K q^T (M = 16 tokens, N = 8 rows) and O^T = V^T P^T (M =
 * head_dim, N = rows). K and V come from shared memory, as the tensor map leaves them (128-byte
 * swizzle, slabs of 64 elements), q stays in registers, and a row's maximum sits in the lanes that
 * hold its sums. Lane l = 4g + t holds, of each 16 x 8 result, token (or element) g and g + 8 of
 * rows 2t and 2t + 1.
 */
#ifndef ATTND_GPU_DECODE_TILE_CUH
#define ATTND_GPU_DECODE_TILE_CUH

#include "kernels/gpu/device.cuh"
#include "kernels/gpu/sm90/decode_ptx.cuh"

namespace decode
{

/* What a unit's rows are: row r of the unit is query token (first_row + r) / group of the item,
 * head (first_row + r) % group of the kv head's group. */
struct unit_rows {
    uint32_t first, count; /* rows of this unit that exist */
    uint32_t group;
    bool is_one_token;

    GPU_DEVICE uint32_t token(uint32_t r) const
    {
        r = first + (r < count ? r : count - 1);
        return is_one_token ? 0 : r / group;
    }
    /* row r of the unit as a row of q, out and lse, whose rows are [token][num_q_heads] */
    GPU_DEVICE uint32_t query_row(uint32_t r, uint32_t num_q_heads, uint32_t head) const
    {
        uint32_t tok = token(r);
        r = first + (r < count ? r : count - 1);
        return tok * num_q_heads + head * group + (r - tok * group);
    }
};

/* Keys that some row of a unit sees: below `end`, and from `begin` on or below `sinks`. */
struct seen_by_some {
    uint32_t begin, end, sinks;
    bool is_same; /* all rows see the same */

    GPU_DEVICE bool has(uint32_t key) const
    {
        return key < end && (key >= begin || key < sinks);
    }
};

/* Which keys the rows of a unit see. A key below `end_all` and not below `begin_all` is seen by
 * all. */
struct unit_keys {
    uint32_t total; /* pos + n_tokens: cached tokens of the item; nothing lies behind */
    uint32_t pos, window, sinks;
    uint32_t end_all, begin_all;
    bool is_full;

    GPU_DEVICE uint32_t end_of(uint32_t token) const
    {
        return visible_end(is_full, pos + token, total);
    }
    GPU_DEVICE uint32_t begin_of(uint32_t token) const
    {
        return visible_first(window, pos + token);
    }
    GPU_DEVICE bool sees(uint32_t token, uint32_t key) const
    {
        return key < end_of(token) && (key >= begin_of(token) || key < sinks);
    }
    /* The same for the keys of the tile that begins at `key`: bit i is key + i. */
    GPU_DEVICE uint32_t sees_of_tile(uint32_t token, uint32_t key) const
    {
        auto below = [key](uint32_t end) {
            return (1u << (end > key ? min(end - key, (uint32_t)DECODE_TILE) : 0)) - 1;
        };
        return below(end_of(token)) & (~below(begin_of(token)) | below(sinks));
    }
    GPU_DEVICE seen_by_some seen_by(const unit_rows &rows) const
    {
        const uint32_t low = rows.token(0), high = rows.token(rows.count - 1);
        return {begin_of(low), end_of(high), sinks, low == high};
    }
    /* some row does not see all of keys [key, key + n) */
    GPU_DEVICE bool must_mask(uint32_t key, uint32_t n) const
    {
        return key + n > end_all || (key < begin_all && key + n > sinks);
    }
};

GPU_DEVICE unit_rows rows_of(const decode_dev_item &it, uint32_t unit, uint32_t rows_per_unit,
                             uint32_t group)
{
    unit_rows r;
    r.first = unit * rows_per_unit;
    r.group = group;
    r.is_one_token = it.n_tokens == 1;
    uint32_t all = it.n_tokens * group;
    r.count = r.first >= all ? 0 : min(all - r.first, rows_per_unit);
    return r;
}

GPU_DEVICE unit_keys keys_of(const decode_dev_item &it, const unit_rows &rows,
                             const gpu_layer *layers)
{
    unit_keys k;
    k.pos = it.pos;
    k.total = it.pos + it.n_tokens;
    k.is_full = it.flags & DECODE_IS_FULL;
    k.window = k.sinks = 0;
    if (it.flags & DECODE_HAS_WINDOW) {
        k.window = layers[it.layer].window_tokens;
        k.sinks = layers[it.layer].sink_tokens;
    }
    k.end_all = k.end_of(rows.token(0));
    k.begin_all = k.window ? k.begin_of(rows.token(rows.count - 1)) : 0;
    return k;
}

/* Soft cap and ALiBi, for pools that have them. Slopes are in log 2 units. */
template <int NT> struct unit_extras {
    float cap; /* 0: none */
    float slope[NT][2];
};

/* ---- NaN and inf in V, two 16-bit floats a word */

template <bool is_bf16> GPU_DEVICE bool has_bad(uint4 v)
{
    constexpr uint32_t lo = is_bf16 ? 0x7f80 : 0x7c00, hi = lo << 16;
    const uint32_t w[4] = {v.x, v.y, v.z, v.w};
    bool is_bad = false;
#pragma unroll
    for (int i = 0; i < 4; ++i)
        is_bad |= (w[i] & lo) == lo || (w[i] & hi) == hi;
    return is_bad;
}

/* The element at a shared address if it is NaN or inf, else 0. The warp has read when is_clearing
 * threads clear it. */
template <bool is_bf16> GPU_DEVICE float take_bad(uint32_t at, bool is_clearing)
{
    constexpr uint32_t exponent = is_bf16 ? 0x7f80 : 0x7c00;
    const uint16_t bits = shared_load2(at);
    gpu::sync_warp();
    if ((bits & exponent) != exponent)
        return 0.0f;
    if (is_clearing)
        shared_store2(at, 0);
    return is_bf16 ? gpu::bf16_decode(bits) : gpu::f16_decode(bits);
}

/* A unit's rows in one warp: queries, running sums, maxima, and sums of weights. */
template <bool is_bf16, int D, int NT> struct warp_rows {
    static constexpr int steps = D / 16;
    static constexpr uint32_t tile_bytes = 64 * D; /* K, then V */
    static constexpr uint32_t v_offset = 32 * D;
    /* q stays in registers where there is room, else it is read from shared memory for every
     * tile */
    static constexpr bool has_q = D * NT <= 256;
    uint32_t q[has_q ? steps : 1][NT][2];
    uint32_t q_at;
    float o[steps][NT][4], m[NT][2], l[NT][2];

    GPU_DEVICE void clear()
    {
#pragma unroll
        for (int x = 0; x < NT; ++x) {
            m[x][0] = m[x][1] = nothing;
            l[x][0] = l[x][1] = 0.0f;
#pragma unroll
            for (int j = 0; j < steps; ++j)
                o[j][x][0] = o[j][x][1] = o[j][x][2] = o[j][x][3] = 0.0f;
        }
    }

    /* Straight to MMA operands: four bytes a load, all in flight together. */
    GPU_DEVICE void load_q(uint64_t q_address, const unit_rows &rows, uint32_t num_q_heads,
                           uint32_t head)
    {
        const uint32_t g = gpu::lane_id() / 4, t = gpu::lane_id() % 4;
#pragma unroll
        for (int x = 0; x < NT; ++x) {
            const uint32_t *row = (const uint32_t *)q_address +
                                  rows.query_row(x * 8 + g, num_q_heads, head) * (D / 2) + t;
#pragma unroll
            for (int j = 0; j < steps; ++j) {
                q[j][x][0] = __ldg(row + j * 8);
                q[j][x][1] = __ldg(row + j * 8 + 4);
            }
        }
    }

    /* q of the unit into shared memory, by all threads: rows of D elements, 16-byte chunks
     * swizzled. Then, when it has arrived for all, from there to MMA operands. */
    static GPU_DEVICE void ask_q(uint32_t s_q, uint64_t q_address, const unit_rows &rows,
                                 uint32_t num_q_heads, uint32_t head)
    {
        for (uint32_t i = threadIdx.x; i < 8 * NT * (D / 8); i += blockDim.x) {
            const uint32_t r = i / (D / 8), c = i % (D / 8);
            gpu::copy16_async(s_q + r * D * 2 + (c ^ r % 8) * 16,
                              (const char *)q_address +
                                  rows.query_row(r, num_q_heads, head) * (D * 2) + c * 16,
                              true);
        }
    }
    GPU_DEVICE void q_fragments(uint32_t (&b)[4], int x, int j) /* of steps j and j + 1 */
    {
        const uint32_t lane = gpu::lane_id();
        gpu::load_matrix4(b, q_at + (x * 8 + lane % 8) * D * 2 +
                                 ((j * 2 + lane / 8) ^ (lane % 8)) * 16);
    }
    GPU_DEVICE void take_q(uint32_t s_q)
    {
        q_at = s_q;
        if constexpr (has_q)
#pragma unroll
            for (int x = 0; x < NT; ++x)
#pragma unroll
                for (int j = 0; j < steps; j += 2) {
                    uint32_t b[4];
                    q_fragments(b, x, j);
                    q[j][x][0] = b[0];
                    q[j][x][1] = b[1];
                    q[j + 1][x][0] = b[2];
                    q[j + 1][x][1] = b[3];
                }
    }

    /* The tile whose K and V lie at `stage` and whose first token is `key`. */
    template <bool has_extras>
    GPU_DEVICE void tile(uint32_t stage, uint32_t key, float scale_log2, const unit_rows &rows,
                         const unit_keys &keys, const unit_extras<NT> &extras)
    {
        const uint32_t lane = gpu::lane_id();
        const uint32_t kr = lane % 16, kc = lane / 16;
        const uint32_t vr = lane % 8 + lane / 16 * 8, vc = lane / 8 % 2;
        const uint32_t k_at = stage + kr * 128, k_chunk = (kc ^ (kr % 8)) * 16;
        const uint32_t v_at = stage + v_offset + vr * 128, v_chunk = (vc ^ (vr % 8)) * 16;

        float s[NT][4], s2[NT][4];
#pragma unroll
        for (int x = 0; x < NT; ++x)
#pragma unroll
            for (int c = 0; c < 4; ++c)
                s[x][c] = s2[x][c] = 0.0f;
        uint32_t b[NT][4];
#pragma unroll
        for (int j = 0; j < steps; ++j) {
            uint32_t a[4];
            gpu::load_matrix4(a, k_at + j / 4 * 2048 + (k_chunk ^ (j % 4 * 32)));
#pragma unroll
            for (int x = 0; x < NT; ++x) {
                if constexpr (has_q) {
                    b[x][j % 2 * 2] = q[j][x][0];
                    b[x][j % 2 * 2 + 1] = q[j][x][1];
                } else if (j % 2 == 0) {
                    q_fragments(b[x], x, j);
                }
                gpu::mma_16816<is_bf16>(j % 2 ? s2[x] : s[x], a, b[x][j % 2 * 2],
                                        b[x][j % 2 * 2 + 1]);
            }
        }
#pragma unroll
        for (int x = 0; x < NT; ++x)
#pragma unroll
            for (int c = 0; c < 4; ++c)
                s[x][c] = (s[x][c] + s2[x][c]) * scale_log2;
        if (has_extras)
            apply_extras(s, key, rows, keys, extras);
        const bool is_masked = keys.must_mask(key, DECODE_TILE);
        if (is_masked)
            mask(s, key, rows, keys);

        uint32_t p[NT][2];
#pragma unroll
        for (int x = 0; x < NT; ++x) {
            float x0 = fmaxf(s[x][0], s[x][2]), x1 = fmaxf(s[x][1], s[x][3]);
#pragma unroll
            for (int d = 4; d < 32; d *= 2) {
                x0 = fmaxf(x0, gpu::shuffle_xor(x0, d));
                x1 = fmaxf(x1, gpu::shuffle_xor(x1, d));
            }
            /* the maximum follows only when it has grown by more than 2^8: weights stay below 256
             * and the division at the end makes the result exact all the same */
            if (__any_sync(~0u, x0 > m[x][0] + 8.0f || x1 > m[x][1] + 8.0f)) {
                x0 = fmaxf(x0, m[x][0]);
                x1 = fmaxf(x1, m[x][1]);
                const float f0 = gpu::exp2_fast(m[x][0] - x0), f1 = gpu::exp2_fast(m[x][1] - x1);
                m[x][0] = x0;
                m[x][1] = x1;
                l[x][0] *= f0;
                l[x][1] *= f1;
#pragma unroll
                for (int j = 0; j < steps; ++j) {
                    o[j][x][0] *= f0;
                    o[j][x][1] *= f1;
                    o[j][x][2] *= f0;
                    o[j][x][3] *= f1;
                }
            }
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                s[x][c] = gpu::exp2_fast(s[x][c] - m[x][c % 2]);
                l[x][c % 2] += s[x][c];
            }
            p[x][0] = transpose8(encode2<is_bf16>(s[x][0], s[x][1]));
            p[x][1] = transpose8(encode2<is_bf16>(s[x][2], s[x][3]));
        }
        if (is_masked)
            hide_values(stage, key, rows, keys);
#pragma unroll
        for (int j = 0; j < steps; ++j) {
            uint32_t a[4];
            gpu::load_matrix4_transposed(a, v_at + j / 4 * 2048 + (v_chunk ^ (j % 4 * 32)));
#pragma unroll
            for (int x = 0; x < NT; ++x)
                gpu::mma_16816<is_bf16>(o[j][x], a, p[x][0], p[x][1]);
        }
    }

    /* Scores of keys that a row does not see. */
    GPU_DEVICE void mask(float (&s)[NT][4], uint32_t key, const unit_rows &rows,
                         const unit_keys &keys)
    {
        const uint32_t lane = gpu::lane_id(), g = lane / 4, t = lane % 4;
#pragma unroll
        for (int x = 0; x < NT; ++x)
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                const uint32_t token = rows.token(x * 8 + 2 * t + c);
                if (!keys.sees(token, key + g))
                    s[x][c] = -INFINITY;
                if (!keys.sees(token, key + g + 8))
                    s[x][c + 2] = -INFINITY;
            }
    }

    /* Weights of hidden keys are 0, but 0 times NaN is NaN. V rows that no row of the unit sees are
     * cleared; where the unit's rows see different keys, a NaN or inf is added to those that see it
     * and cleared too. */
    GPU_DEVICE void hide_values(uint32_t stage, uint32_t key, const unit_rows &rows,
                                const unit_keys &keys)
    {
        const uint32_t lane = gpu::lane_id(), v_at = stage + v_offset;
        const seen_by_some some = keys.seen_by(rows);
        const bool from_start = !some.is_same || keys.window != 0;
        const uint32_t r0 = from_start       ? 0
                            : some.end > key ? min(some.end - key, (uint32_t)DECODE_TILE)
                                             : 0;
        bool is_found = false;
#pragma unroll 1
        for (uint32_t e = r0 * (D / 8) + lane; e < DECODE_TILE * (D / 8); e += 32) {
            const uint32_t r = e / (D / 8), c = e % (D / 8);
            const uint32_t at = v_at + c / 8 * 2048 + r * 128 + c % 8 * 16;
            if (!some.has(key + r))
                shared_store16(at, make_uint4(0, 0, 0, 0));
            else if (!some.is_same)
                is_found |= has_bad<is_bf16>(shared_load16(at));
        }
        if (__any_sync(~0u, is_found)) {
            gpu::sync_warp();
            move_bad(v_at, key, rows, keys);
        }
        proxy_fence(); /* a later copy may refill the stage */
        gpu::sync_warp();
    }

    GPU_DEVICE void move_bad(uint32_t v_at, uint32_t key, const unit_rows &rows,
                             const unit_keys &keys)
    {
        const uint32_t g = gpu::lane_id() / 4, t = gpu::lane_id() % 4;
#pragma unroll 1
        for (uint32_t e = 0; e < DECODE_TILE * steps; ++e) {
            const uint32_t r = e / steps, step = e % steps;
            float bad[2];
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const uint32_t at =
                    v_at + step / 4 * 2048 + r * 128 + ((step % 4 * 2 + h) ^ (r % 8)) * 16 + g * 2;
                bad[h] = take_bad<is_bf16>(at, t == 0);
            }
            if (!__any_sync(~0u, bad[0] != 0.0f || bad[1] != 0.0f))
                continue;
#pragma unroll
            for (int x = 0; x < NT; ++x)
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    const bool sees = keys.sees(rows.token(x * 8 + 2 * t + c), key + r);
#pragma unroll
                    for (int j = 0; j < steps; ++j)
                        if (sees && j == (int)step) {
                            o[j][x][c] += bad[0];
                            o[j][x][c + 2] += bad[1];
                        }
                }
        }
    }

    GPU_DEVICE void apply_extras(float (&s)[NT][4], uint32_t key, const unit_rows &rows,
                                 const unit_keys &keys, const unit_extras<NT> &extras)
    {
        const uint32_t lane = gpu::lane_id(), g = lane / 4, t = lane % 4;
        constexpr float log2e = 1.44269504f, ln2 = 0.69314718f;
#pragma unroll
        for (int x = 0; x < NT; ++x)
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                if (extras.cap > 0.0f)
                    s[x][c] = extras.cap * log2e * tanhf(s[x][c] * ln2 / extras.cap);
                const uint32_t at = keys.pos + rows.token(x * 8 + 2 * t + c % 2);
                s[x][c] +=
                    extras.slope[x][c % 2] * (gpu::distance_of(key + g, at) + (float)(c / 2 * 8));
            }
    }

    /* Adds up the weights over the tokens' lanes, once all tiles are done. */
    GPU_DEVICE void sum_weights()
    {
#pragma unroll
        for (int x = 0; x < NT; ++x)
#pragma unroll
            for (int d = 4; d < 32; d *= 2) {
                l[x][0] += gpu::shuffle_xor(l[x][0], d);
                l[x][1] += gpu::shuffle_xor(l[x][1], d);
            }
    }

    /* The sums as [row][row_floats] in shared memory, (m, l) as [row]; rows from `count` on are
     * left. */
    GPU_DEVICE void to_shared(float *slab, float2 *ml, uint32_t row_floats, uint32_t count)
    {
        const uint32_t g = gpu::lane_id() / 4, t = gpu::lane_id() % 4;
#pragma unroll
        for (int x = 0; x < NT; ++x)
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                const uint32_t r = x * 8 + 2 * t + c;
                if (r >= count)
                    continue;
                float *row = slab + r * row_floats + g;
#pragma unroll
                for (int j = 0; j < steps; ++j) {
                    row[j * 16] = o[j][x][c];
                    row[j * 16 + 8] = o[j][x][c + 2];
                }
                if (g == 0)
                    ml[r] = make_float2(m[x][c], l[x][c]);
            }
    }
};

template <int NT>
GPU_DEVICE unit_extras<NT> extras_of(const decode_dev_item &it, const unit_rows &rows,
                                     const gpu_layer *layers, uint32_t head)
{
    unit_extras<NT> e;
    const gpu_layer &layer = layers[it.layer];
    const uint32_t t = gpu::lane_id() % 4;
    e.cap = layer.soft_cap;
#pragma unroll
    for (int x = 0; x < NT; ++x)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            uint32_t q_head = rows.query_row(x * 8 + 2 * t + c, 0, head);
            e.slope[x][c] = layer.alibi_slopes ? layer.alibi_slopes[q_head] * 1.44269504f : 0.0f;
        }
    return e;
}

/* Ends a row of q with maximum m and sum l: adds its sink logit, gives the factor for its sums, and
 * stores its lse where is_first (one thread a row). A row that saw no key has l = 0, factor 0; one
 * that saw a NaN has l = NaN, and so everything. */
GPU_DEVICE float finish_row(const decode_dev_item &it, const decode_params &p, uint32_t row,
                            float m, float l, bool is_first)
{
    float scale = 1.0f;
    if (it.flags & DECODE_HAS_SINKS) {
        const float *logits = p.layers[it.layer].sink_logits;
        if (logits) {
            const float sink = logits[row % p.num_q_heads] * 1.44269504f, top = fmaxf(m, sink);
            scale = l != 0.0f ? gpu::exp2_fast(m - top) : 0.0f;
            l = l * scale + gpu::exp2_fast(sink - top);
            m = top;
        }
    }
    if (is_first && it.lse)
        ((float *)it.lse)[row] = l != 0.0f ? 0.69314718f * (m + gpu::log2_fast(l)) : -INFINITY;
    return l != 0.0f ? __fdividef(scale, l) : 0.0f;
}

/* Four neighbouring elements of a row of out. */
template <bool is_bf16>
GPU_DEVICE void store_out4(const decode_dev_item &it, uint64_t element, float4 a, float f)
{
    *(uint2 *)(it.out + element * 2) =
        make_uint2(encode2<is_bf16>(a.x * f, a.y * f), encode2<is_bf16>(a.z * f, a.w * f));
}

/* Brings N more partial results to a common maximum with (m, l, a). Missing ones are (nothing, 0),
 * 0. */
template <int N>
GPU_DEVICE void fold_parts(const float2 (&ml)[N], const float4 (&x)[N], float *m, float *l,
                           float4 *a)
{
    float top = *m;
#pragma unroll
    for (int k = 0; k < N; ++k)
        top = fmaxf(top, ml[k].x);
    const float old = gpu::exp2_fast(*m - top);
    *m = top;
    *l *= old;
    a->x *= old;
    a->y *= old;
    a->z *= old;
    a->w *= old;
#pragma unroll
    for (int k = 0; k < N; ++k) {
        const float f = gpu::exp2_fast(ml[k].x - top);
        *l += ml[k].y * f;
        a->x += x[k].x * f;
        a->y += x[k].y * f;
        a->z += x[k].z * f;
        a->w += x[k].w * f;
    }
}

/* n partial results, N at a time, so that the loads of all are in flight together. sum and ml give
 * part k. */
template <int N, class sum_fn, class ml_fn>
GPU_DEVICE float4 merge_parts(uint32_t n, sum_fn sum, ml_fn ml, float *out_m, float *out_l)
{
    float m = nothing, l = 0.0f;
    float4 a = make_float4(0, 0, 0, 0);
#pragma unroll 1
    for (uint32_t k0 = 0; k0 < n; k0 += N) {
        float2 part[N];
        float4 x[N];
#pragma unroll
        for (int k = 0; k < N; ++k) {
            part[k] = make_float2(nothing, 0.0f);
            x[k] = make_float4(0, 0, 0, 0);
            if (k0 + k < n) {
                part[k] = ml(k0 + k);
                x[k] = sum(k0 + k);
            }
        }
        fold_parts(part, x, &m, &l, &a);
    }
    *out_m = m;
    *out_l = l;
    return a;
}

} // namespace decode
#endif
