/* decode_wide_stage.cuh: what a warpgroup of decode_wide (decode_wide.cuh) does with one stage, 64
 * tokens of K and V: scores, the mask, weights, and V made safe where some row does not see all of
 * it. The products themselves are in the kernel's loop.
 *
 * A thread has H rows of the unit, row0 and with H = 2 row0 + 8. Of the scores s, element j is row
 * j / 2 % 2, token j / 4 * 8 + 2 * t + j % 2; of the sums o, element j / 2 * 4 + 2 * h + j % 2 is
 * row h.
 */
#ifndef ATTND_GPU_DECODE_WIDE_STAGE_CUH
#define ATTND_GPU_DECODE_WIDE_STAGE_CUH

#include "kernels/gpu/sm90/decode_wgmma.cuh"
#include "kernels/gpu/sm90/decode_wide_parts.cuh"

namespace decode
{

/* Those of warpgroup `half`; is x true in one of them? n_met counts how often they have met so, for
 * meet_as_often. */
GPU_DEVICE bool warpgroup_any(uint32_t half, bool x, uint32_t &n_met)
{
    ++n_met;
    return half ? sync_some_any<3, 128>(x) : sync_some_any<2, 128>(x);
}

/* A computing thread's part of the unit, and the steps of a stage. tile0: the stage's first tile,
 * as the item counts them; here: how many of the stage's tiles there are. */
template <bool is_bf16, int D, int R> struct wide_view {
    static constexpr int H = R / 32; /* rows a thread */
    static constexpr uint32_t TT = DECODE_WIDE_TOKENS, TB = TT / DECODE_TILE;
    static constexpr uint32_t group_bytes = 16 * D; /* 8 tokens of K or V */

    const decode_dev_item &it;
    const unit_rows &rows;
    const unit_keys &keys;
    uint32_t half, row0, t;

    /* The first token of the item's tile of this number. */
    GPU_DEVICE uint32_t key_of_tile(uint32_t tile) const
    {
        return visible_tile_at(tile, it.sink_tiles, it.skip_tiles) * DECODE_TILE;
    }

    GPU_DEVICE void apply_extras(float (&s)[32], uint32_t tile0, float cap,
                                 const float (&slope)[H]) const;
    GPU_DEVICE void mask(float (&s)[32], uint32_t tile0, uint32_t here) const;
    GPU_DEVICE void raise(const float (&s)[32], float scale, float (&m)[H], float (&l)[H],
                          float (&o)[D / 2]) const;
    GPU_DEVICE void weigh(const float (&s)[32], float scale, const float (&m)[H], float (&l)[H],
                          uint32_t (&w)[TB][4]) const;
    GPU_DEVICE void hide_values(uint32_t values_at, uint32_t tile0, uint32_t here,
                                float (&o)[D / 2], uint32_t &n_met) const;
    GPU_DEVICE void move_bad(uint32_t values_at, uint32_t tile0, uint32_t here, float (&o)[D / 2],
                             uint32_t &n_met) const;
};

/* Scale, soft cap and ALiBi, for pools that have them. cap 0: none; slopes in log 2 units. */
template <bool is_bf16, int D, int R>
GPU_DEVICE void wide_view<is_bf16, D, R>::apply_extras(float (&s)[32], uint32_t tile0, float cap,
                                                       const float (&slope)[H]) const
{
#pragma unroll
    for (int j = 0; j < 32; ++j) {
        const int h = j / 2 % 2;
        if (h >= H)
            continue;
        const uint32_t tile = visible_tile_at(tile0 + j / 8, it.sink_tiles, it.skip_tiles);
        const uint32_t at = keys.pos + rows.token(row0 + h * 8);
        float x = s[j] * it.scale_log2;
        if (cap > 0.0f)
            x = cap * 1.44269504f * tanhf(x * 0.69314718f / cap);
        s[j] = x + slope[h] * (gpu::distance_of(tile * DECODE_TILE + 2 * t, at) +
                               (float)(j / 4 % 2 * 8 + j % 2));
    }
}

/* Scores of keys that a row does not see become -inf. */
template <bool is_bf16, int D, int R>
GPU_DEVICE void wide_view<is_bf16, D, R>::mask(float (&s)[32], uint32_t tile0, uint32_t here) const
{
#pragma unroll
    for (int b = 0; b < (int)TB; ++b) {
        const uint32_t key = key_of_tile(tile0 + b);
#pragma unroll
        for (int h = 0; h < H; ++h) {
            const uint32_t sees =
                b < here ? keys.sees_of_tile(rows.token(row0 + h * 8), key) >> 2 * t : 0;
#pragma unroll
            for (int j = 2 * h; j < 8; j += j % 2 ? 3 : 1)
                if ((sees & 1u << (j / 4 * 8 + j % 2)) == 0)
                    s[8 * b + j] = -INFINITY;
        }
    }
}

/* The maxima m follow the scores where one has grown by more than 2^8; what was summed until then
 * is brought to the new one. */
template <bool is_bf16, int D, int R>
GPU_DEVICE void wide_view<is_bf16, D, R>::raise(const float (&s)[32], float scale, float (&m)[H],
                                                float (&l)[H], float (&o)[D / 2]) const
{
    float x[H];
    bool is_more = false;
#pragma unroll
    for (int h = 0; h < H; ++h) {
        x[h] = fmaxf(s[2 * h], s[2 * h + 1]);
#pragma unroll
        for (int j = 4; j < 32; j += 4)
            x[h] = fmaxf(x[h], fmaxf(s[j + 2 * h], s[j + 2 * h + 1]));
        x[h] = gpu::warp_max<4>(x[h]) * scale;
        is_more |= x[h] > m[h] + 8.0f;
    }
    if (!__any_sync(~0u, is_more))
        return;
#pragma unroll
    for (int h = 0; h < H; ++h) {
        const float top = fmaxf(x[h], m[h]), f = gpu::exp2_fast(m[h] - top);
        m[h] = top;
        l[h] *= f;
#pragma unroll
        for (int j = 0; j < D / 4; ++j)
            o[j / 2 * 4 + 2 * h + j % 2] *= f;
    }
}

/* The weights, two a word, as the products want them; their sums go to l. */
template <bool is_bf16, int D, int R>
GPU_DEVICE void wide_view<is_bf16, D, R>::weigh(const float (&s)[32], float scale,
                                                const float (&m)[H], float (&l)[H],
                                                uint32_t (&w)[TB][4]) const
{
#pragma unroll
    for (int j = 0; j < 32; j += 2) {
        const int h = j / 2 % 2;
        if (h >= H)
            continue;
        const float a = gpu::exp2_fast(fmaf(s[j], scale, -m[h]));
        const float b = gpu::exp2_fast(fmaf(s[j + 1], scale, -m[h]));
        l[h] += a + b;
        w[j / 8][j % 8 / 2] = encode2<is_bf16>(a, b);
    }
}

/* Weights of hidden keys are 0, but 0 times NaN is NaN. Rows of V that no query row sees are
 * cleared; where query rows see different keys, NaN and inf are looked for and moved to the sums of
 * those that see them. */
template <bool is_bf16, int D, int R>
GPU_DEVICE void wide_view<is_bf16, D, R>::hide_values(uint32_t values_at, uint32_t tile0,
                                                      uint32_t here, float (&o)[D / 2],
                                                      uint32_t &n_met) const
{
    const seen_by_some some = keys.seen_by(rows);
    auto key_of = [&](uint32_t r) {
        return key_of_tile(tile0 + r / DECODE_TILE) + r % DECODE_TILE;
    };
    /* without a window the hidden ones are the last */
    const uint32_t r0 =
        keys.window == 0 && some.is_same && some.end >= key_of(0) ? some.end - key_of(0) : 0;
    bool is_found = false;
#pragma unroll 1
    for (uint32_t e = r0 / 8 * D + threadIdx.x % 128; e < TT * (D / 8); e += 128) {
        const uint32_t r = e / D * 8 + e / 8 % 8; /* a group has D pieces of V */
        const uint32_t at = values_at + e / D * group_bytes + e % D * 16;
        if (r >= here * DECODE_TILE || !some.has(key_of(r)))
            shared_store16(at, make_uint4(0, 0, 0, 0));
        else if (!some.is_same)
            is_found |= has_bad<is_bf16>(shared_load16(at));
    }
    if (!some.is_same && warpgroup_any(half, is_found, n_met))
        move_bad(values_at, tile0, here, o, n_met);
    proxy_fence();
    warpgroup_any(half, false, n_met);
}

/* Adds what is NaN or inf in V to the rows that see it, then clears it: 32 threads read each
 * element. */
template <bool is_bf16, int D, int R>
GPU_DEVICE void wide_view<is_bf16, D, R>::move_bad(uint32_t values_at, uint32_t tile0,
                                                   uint32_t here, float (&o)[D / 2],
                                                   uint32_t &n_met) const
{
#pragma unroll 1
    for (uint32_t e = 0; e < here * DECODE_TILE * (D / 8); ++e) {
        const uint32_t r = e / (D / 8), c = e % (D / 8);
        const uint32_t key = key_of_tile(tile0 + r / DECODE_TILE) + r % DECODE_TILE;
        const uint32_t at = values_at + r / 8 * group_bytes + c / 8 * 1024 + r % 8 * 128 +
                            (c % 8 ^ r % 8) * 16 + t * 4;
        const float bad[2] = {take_bad<is_bf16>(at, false), take_bad<is_bf16>(at + 2, false)};
        if (!__any_sync(~0u, bad[0] != 0.0f || bad[1] != 0.0f))
            continue;
#pragma unroll
        for (int h = 0; h < H; ++h) {
            const bool sees = keys.sees(rows.token(row0 + h * 8), key);
#pragma unroll
            for (int j = 0; j < D / 4; ++j)
                if (j / 2 == (int)c && sees)
                    o[j / 2 * 4 + 2 * h + j % 2] += bad[j % 2];
        }
    }
    warpgroup_any(half, false, n_met);
#pragma unroll 1
    for (uint32_t e = threadIdx.x % 128; e < TT * D; e += 128)
        take_bad<is_bf16>(values_at + e / (8 * D) * group_bytes + e % (8 * D) * 2, true);
}

} // namespace decode
#endif
