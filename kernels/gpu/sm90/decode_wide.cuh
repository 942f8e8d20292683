/* decode_wide.cuh: the kernel for more than 16 query rows a kv head: R = 32 or 64 rows a thread
 * block on the warpgroup matrix instructions. Those have 64 rows; 32 fill half of each warp's, so
 * that products take as long as those of 64 and everything else about half.
 *
 * Four warps ask for K and V, in stages of 64 tokens; two warpgroups take every second stage each.
 * A warpgroup computes the scores of its stage, their weights in its registers, and the weighted
 * sums of the whole head dim, and meets nobody: while one works on weights, the other's products
 * keep the matrix units busy. At the end they exchange halves of their sums, so that each holds
 * half the head dim of all tokens.
 *
 * The blocks of a cluster share a segment; decode_wide_parts.cuh says how their sums meet.
 *
 * What runs once is kept short and early: it costs about 3 cycles an instruction, unrolled loops
 * more than their latency, a barrier 65 cycles to set up. So q is asked for first, while the
 * loaders look up their first blocks, the computing warps share the barriers, and registers change
 * hands while q is on its way.
 */
#ifndef ATTND_GPU_DECODE_WIDE_CUH
#define ATTND_GPU_DECODE_WIDE_CUH

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

#ifdef ATTND_RACECHECK
/* So that compute-sanitizer's racecheck can follow both warpgroups: where one met among itself more
 * often than the other, it takes what they exchange for races, whatever barrier of both stands
 * between (tests/kernels/README.md). The one that met less often makes up for it. met: [2], shared,
 * 0. */
GPU_DEVICE void meet_as_often(uint32_t half, uint32_t n_met, uint32_t *met)
{
    if (threadIdx.x % 128 == 0)
        atomicAdd(&met[half], n_met);
    sync_consumers();
    const uint32_t other = atomicAdd(&met[half ^ 1], 0); /* racecheck leaves atomics alone */
    while (n_met < other)
        warpgroup_any(half, false, n_met);
}
#endif

/* The row of the matrix instructions' 64 that row r of the unit is: of 32 rows, eight in each
 * warp's sixteen, so that all threads have half as much to do. */
template <int R> GPU_DEVICE uint32_t matrix_row(uint32_t r)
{
    return R == 64 ? r : r / 8 * 16 + r % 8;
}

/* Half of the sums o stay, in a, the others are written as f16, times their row's factor, for the
 * other warpgroup. Of four elements of o those of the first H rows count. */
template <int D, int H, bool is_high>
GPU_DEVICE void swap_sums(const float (&o)[D / 2], const float (&factor)[H], float (&a)[D * H / 8],
                          uint4 *mail)
{
    constexpr int stays = is_high ? D / 4 : 0, goes = is_high ? 0 : D / 4;
#pragma unroll
    for (int j = 0; j < D * H / 64; ++j) {
        uint32_t w[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const int h = k % H;
            const float *x = &o[goes + (4 * j + k) / H * 4 + 2 * h];
            w[k] = gpu::f16_encode2(x[0] * factor[h], x[1] * factor[h]);
        }
        mail[j * 128] = make_uint4(w[0], w[1], w[2], w[3]);
    }
#pragma unroll
    for (int k = 0; k < D * H / 8; ++k)
        a[k] = o[stays + k / (2 * H) * 4 + k % (2 * H)];
}

template <bool is_bf16, int D, int R, bool has_extras>
__global__ void __launch_bounds__(384, 1)
    decode_wide(GPU_PARAM(decode_params, p), GPU_PARAM(decode_short_words, w),
                GPU_PARAM(CUtensorMap, map))
{
    constexpr int H = R / 32; /* rows a thread */
    constexpr uint32_t TT = DECODE_WIDE_TOKENS, TB = TT / DECODE_TILE;
    constexpr uint32_t group_bytes = 16 * D, slot_bytes = 8 * group_bytes; /* 8, 64 tokens */
    const uint32_t S = p.stages, tid = threadIdx.x, warp = gpu::warp_id();
    const uint32_t half = __shfl_sync(~0u, tid / 128, 0); /* the compiler sees one value a warp */
    const uint32_t lane = gpu::lane_id(), g = lane / 4, t = lane % 4, head = blockIdx.y;
    const uint32_t parts = p.n_parts, unit = over_parts(p, blockIdx.x);
    const uint32_t part = blockIdx.x - unit * parts;
    uint8_t *base = aligned_shared();
    float2 *s_ml = (float2 *)(base + p.wide_body); /* [2][R] */
    uint64_t *s_bars = (uint64_t *)(s_ml + 2 * R);
    const uint32_t n_slots = 2 * S, s_full = gpu::shared_address(s_bars);
    const uint32_t s_q = gpu::shared_address(base);
    const wide_ring ring = {s_q + 128 * D,
                            n_slots,
                            s_full,
                            s_full + n_slots * 8,
                            s_full + n_slots * 16,
                            (uint32_t *)(s_bars + 2 * n_slots + 2)};
    if (half == 2) {
        fewer_registers<40>(); /* at once: the others wait for them */
        if (load_tiles<D, R>(p, w, &map, ring, unit, part, warp - 8) && parts > 1)
            weigh_parts<D, R>(p, w, merge_of<D, R>(p, base, unit), ring, unit);
        return;
    }

    decode_dev_item it; /* from the parameters: asked for before anything is waited for */
    if (!p.items)
        it = item_at(p, w, blockIdx.z);
    if (p.is_chained)
        gpu::chain_wait();
    if (p.items)
        it = p.items[blockIdx.z];
    const unit_rows rows = rows_of(it, unit, R, p.group);
    if (rows.count == 0) /* a narrower item; the whole cluster leaves */
        return;
    {
        /* of 16 bytes per row; rows per pass */
        constexpr uint32_t chunks = D / 8, step = 256 / chunks;
        const uint32_t c = tid % chunks, r0 = tid / chunks;
        const uint32_t to = s_q + c / 8 * 8192 + matrix_row<R>(r0) * 128 + (c % 8 ^ r0 % 8) * 16;
        const char *q = (const char *)it.q + c * 16;
        if (rows.is_one_token) {
            q += rows.query_row(r0, p.num_q_heads, head) * (D * 2);
#pragma unroll
            for (uint32_t i = 0; i < R / step; ++i) {
                const bool is_there = r0 + i * step < rows.count;
                gpu::copy16_async(to + matrix_row<R>(i * step) * 128,
                                  q + (is_there ? i * step * D * 2 : 0), is_there);
            }
        } else {
#pragma unroll 1
            for (uint32_t r = r0; r < R; r += step)
                gpu::copy16_async(to + matrix_row<R>(r - r0) * 128,
                                  q + rows.query_row(r, p.num_q_heads, head) * (D * 2),
                                  r < rows.count);
        }
    }
    for (uint32_t b = warp; b < 2 * n_slots + 2; b += 8) /* 65 cycles each */
        if (lane == 0)
            barrier_init(s_full + b * 8, b < n_slots ? TB : b < 2 * n_slots ? 4 : 1);
    barrier_init_fence();
#ifdef ATTND_RACECHECK
    if (tid < 2)
        ring.is_last[1 + tid] = 0;
#endif
    sync_all();
    const wide_share share = share_of(p, it, part);
    const uint32_t first = share.first, n = share.n, count = share.count;
    more_registers<232>();

    const unit_keys keys = keys_of(it, rows, p.layers);
    const uint32_t row0 =
        warp % 4 * 8 * H + g; /* this thread's rows: row0 and with H = 2 row0 + 8 */
    float cap = 0.0f, slope[H] = {};
    if (has_extras) {
        const gpu_layer &layer = p.layers[it.layer];
        cap = layer.soft_cap;
#pragma unroll
        for (int h = 0; h < H; ++h)
            if (layer.alibi_slopes)
                slope[h] = layer.alibi_slopes[rows.query_row(row0 + h * 8, 0, head)] * 1.44269504f;
    }
    copies_wait();
    proxy_fence();
    sync_consumers();

    float o[D / 2];
#pragma unroll
    for (int j = 0; j < D / 2; ++j)
        o[j] = 0.0f;
    float m[H], l[H]; /* of this warpgroup's tokens */
#pragma unroll
    for (int h = 0; h < H; ++h)
        m[h] = nothing, l[h] = 0.0f;
    uint32_t n_met = 0;
    wide_place k_at = {half, 0};
#pragma unroll 1
    for (uint32_t i = half; i < count; i += 2) {
        const wide_place v_at = k_at.after(2, n_slots);
        const uint32_t here = min(TB, n - i * TB);
        const uint32_t keys_at = ring.at + k_at.slot * slot_bytes;
        const uint32_t values_at = ring.at + v_at.slot * slot_bytes;
        float s[32];
        barrier_wait(ring.full + k_at.slot * 8, k_at.phase);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < D / 16; ++k)
            wgmma_scores<is_bf16>(
                s, wgmma_matrix(s_q + k / 4 * 8192 + k % 4 * 32, 16, 1024),
                wgmma_matrix(keys_at + k / 4 * 1024 + k % 4 * 32, 16, group_bytes), k > 0);
        wgmma_finish(s);
        if (lane == 0)
            barrier_arrive(ring.empty + k_at.slot * 8);

        float scale = it.scale_log2;
        if (has_extras) {
            scale = 1.0f;
#pragma unroll
            for (int j = 0; j < 32; ++j) {
                const int h = j / 2 % 2;
                if (h >= H)
                    continue;
                const uint32_t r = row0 + h * 8, c = j / 4 * 8 + 2 * t + j % 2;
                const uint32_t tile =
                    visible_tile_at(first + i * TB + c / 16, it.sink_tiles, it.skip_tiles);
                float x = s[j] * it.scale_log2;
                if (cap > 0.0f)
                    x = cap * 1.44269504f * tanhf(x * 0.69314718f / cap);
                s[j] = x + slope[h] * ((float)(tile * DECODE_TILE + c % 16) -
                                       (float)(keys.pos + rows.token(r)));
            }
        }
        const uint32_t key0 =
            visible_tile_at(first + i * TB, it.sink_tiles, it.skip_tiles) * DECODE_TILE;
        const uint32_t key_last =
            visible_tile_at(first + i * TB + here - 1, it.sink_tiles, it.skip_tiles) * DECODE_TILE;
        const bool is_masked = here < TB || keys.must_mask(key0, key_last + DECODE_TILE - key0);
        if (is_masked) {
#pragma unroll
            for (int b = 0; b < (int)TB; ++b) {
                const uint32_t key =
                    visible_tile_at(first + i * TB + b, it.sink_tiles, it.skip_tiles) * DECODE_TILE;
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
        if (__any_sync(~0u, is_more)) {
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
        uint32_t w[TB][4] = {}; /* weights, two a word, as the products want them */
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
        barrier_wait(ring.full + v_at.slot * 8, v_at.phase);
        if (is_masked) {
            /* Weights of hidden keys are 0, but 0 times NaN is NaN: V rows that no row sees are
             * cleared; where rows see different keys, NaN and inf are looked for */
            const seen_by_some some = keys.seen_by(rows);
            const uint32_t tiles = first + i * TB;
            auto key_of = [&](uint32_t r) {
                return visible_tile_at(tiles + r / DECODE_TILE, it.sink_tiles, it.skip_tiles) *
                           DECODE_TILE +
                       r % DECODE_TILE;
            };
            /* without a window the hidden ones are the last */
            const uint32_t r0 = keys.window == 0 && some.is_same && some.end >= key_of(0)
                                    ? some.end - key_of(0)
                                    : 0;
            bool is_found = false;
#pragma unroll 1
            for (uint32_t e = r0 / 8 * D + tid % 128; e < TT * (D / 8); e += 128) {
                const uint32_t r = e / D * 8 + e / 8 % 8; /* a group has D pieces of V */
                const uint32_t at = values_at + e / D * group_bytes + e % D * 16;
                if (r >= here * DECODE_TILE || !some.has(key_of(r)))
                    shared_store16(at, make_uint4(0, 0, 0, 0));
                else if (!some.is_same)
                    is_found |= has_bad<is_bf16>(shared_load16(at));
            }
            if (!some.is_same && warpgroup_any(half, is_found, n_met)) {
                /* added to the rows that see it, then cleared: 32 threads read each of them */
#pragma unroll 1
                for (uint32_t e = 0; e < here * DECODE_TILE * (D / 8); ++e) {
                    const uint32_t r = e / (D / 8), c = e % (D / 8), key = key_of(r);
                    const uint32_t at = values_at + r / 8 * group_bytes + c / 8 * 1024 +
                                        r % 8 * 128 + (c % 8 ^ r % 8) * 16 + t * 4;
                    const float bad[2] = {take_bad<is_bf16>(at, false),
                                          take_bad<is_bf16>(at + 2, false)};
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
                for (uint32_t e = tid % 128; e < TT * D; e += 128)
                    take_bad<is_bf16>(values_at + e / (8 * D) * group_bytes + e % (8 * D) * 2,
                                      true);
            }
            proxy_fence();
            warpgroup_any(half, false, n_met);
        }
        wgmma_fence();
#pragma unroll
        for (uint32_t b = 0; b < TB; ++b)
            wgmma_values<is_bf16>(o, w[b],
                                  wgmma_matrix(values_at + b * 2 * group_bytes, 1024, group_bytes));
        wgmma_finish(o);
        if (lane == 0)
            barrier_arrive(ring.empty + v_at.slot * 8);
        k_at = k_at.after(4, n_slots);
    }
#ifdef ATTND_RACECHECK
    meet_as_often(half, n_met, ring.is_last + 1);
#endif
    if (p.is_chained)
        gpu::chain_release();
    if (parts > 1)
        cluster_arrive(); /* once all have, the others may send their sums: the ring is free */

    /* Both warpgroups meet: each keeps half of head_dim and gets the other's sums of it, f16,
     * through the ring. From here on a row's sums and l are times a power of two, which m knows. */
    float factor[H];
    sum_factors<D, H>(o, factor);
#pragma unroll
    for (int h = 0; h < H; ++h) {
        m[h] -= gpu::log2_fast(factor[h]);
        l[h] = gpu::warp_sum<4>(l[h]) * factor[h];
        if (t == 0)
            s_ml[half * R + row0 + h * 8] = make_float2(m[h], l[h]);
    }
    sync_consumers(); /* the ring is free */
    float a[D * H / 8];
    uint4 *mail = (uint4 *)(base + 128 * D) + tid % 128;
    uint4 *out_mail = mail + half * (D / 32 * 128), *in_mail = mail + (half ^ 1) * (D / 32 * 128);
    if (half)
        swap_sums<D, H, true>(o, factor, a, out_mail);
    else
        swap_sums<D, H, false>(o, factor, a, out_mail);
    sync_consumers();
    float f[H], e[H];
#pragma unroll
    for (int h = 0; h < H; ++h) {
        const float2 x = s_ml[(half ^ 1) * R + row0 + h * 8];
        const float top = fmaxf(m[h], x.x), own = gpu::exp2_fast(m[h] - top);
        e[h] = gpu::exp2_fast(x.x - top);
        m[h] = top;
        l[h] = l[h] * own + x.y * e[h];
        f[h] = factor[h] * own;
    }
    /* This thread's eight of columns 32j on of its half, of both warpgroups' tokens. */
    auto sums = [&](int j, float(&x)[H][8]) {
#pragma unroll
        for (int i = 0; i < H; ++i) {
            const uint4 v = in_mail[(j * H + i) * 128];
            const uint32_t w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const int h = k % H, c = (4 * i + k) / H * 2;
                const float *own = &a[2 * (4 * (j * H + i) + k)];
                x[h][c] = own[0] * f[h] + gpu::f16_decode(w[k] & 0xffff) * e[h];
                x[h][c + 1] = own[1] * f[h] + gpu::f16_decode(w[k] >> 16) * e[h];
            }
        }
    };
    if (parts == 1) {
        uint32_t *out[H];
#pragma unroll
        for (int h = 0; h < H; ++h) {
            const uint32_t r = row0 + h * 8;
            out[h] = nullptr;
            if (r >= rows.count)
                continue;
            const uint32_t row = rows.query_row(r, p.num_q_heads, head);
            out[h] = (uint32_t *)(it.out + (uint64_t)row * D * 2 + half * D) + t;
            const float weight = finish_row(it, p, row, m[h], l[h], half == 0 && t == 0);
            f[h] *= weight;
            e[h] *= weight;
        }
#pragma unroll
        for (int j = 0; j < D / 64; ++j) {
            float x[H][8];
            sums(j, x);
#pragma unroll
            for (int k = 0; k < 4 * H; ++k)
                if (out[k % H])
                    out[k % H][16 * j + k / H * 4] =
                        encode2<is_bf16>(x[k % H][k / H * 2], x[k % H][k / H * 2 + 1]);
        }
        return;
    }

    const wide_merge merge = merge_of<D, R>(p, base, unit);
    send_parts<D, R>(merge, ring, half, m, l, sums);
    if (!merge.is_direct) {
        cluster_sync();
        sync_all();
        if (!*ring.is_last)
            return;
    }
    sync_all(); /* the loaders have put the weights of the parts in place of their maxima */
    barrier_wait(ring.merge + 8, 0);
    add_parts<is_bf16, D, R>(p, merge, it, rows, head);
}

} // namespace decode
#endif
