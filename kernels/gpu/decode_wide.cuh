/* decode_wide.cuh: the kernel for more than 16 query rows a kv head: 64 rows a thread block on the
 * warpgroup matrix instructions.
 *
 * One warp asks for K and V, in stages of 64 tokens (three more only lend their registers); two
 * warpgroups take every second stage each. A warpgroup computes the scores of its stage, their weights in its
 * registers, and the weighted sums of the whole head dim, and meets nobody: while one works on weights, the
 * other's products keep the matrix units busy. At the end they exchange halves of their sums, so that each
 * holds half the head dim of all tokens.
 *
 * The blocks of a cluster share a segment. Their sums go to scratch as f16, each row times its own
 * power of two (64 rows are too much for the way between shared memories, about 10 bytes a cycle), the
 * cluster's barrier makes them visible, and each rank brings its slice of the rows of all blocks into
 * shared memory by bulk copies and finishes it. With more than one cluster a segment, the last cluster to
 * arrive does that, rank by rank.
 *
 * What runs once is kept short: it costs about 3 cycles an instruction, unrolled loops more than their
 * latency.
 */
#ifndef ATTND_GPU_DECODE_WIDE_CUH
#define ATTND_GPU_DECODE_WIDE_CUH

#include "kernels/gpu/decode_narrow.cuh"
#include "kernels/gpu/decode_wgmma.cuh"

namespace decode
{

/* The loader and those that compute, from different places. */
GPU_DEVICE void sync_all()
{
    sync_some<4, 288>();
}

/* The 256 threads that compute. */
GPU_DEVICE void sync_consumers()
{
    sync_some<1, 256>();
}

/* Those of warpgroup `half`; is x true in one of them? */
GPU_DEVICE bool warpgroup_any(uint32_t half, bool x)
{
    return half ? sync_some_any<3, 128>(x) : sync_some_any<2, 128>(x);
}

/* Half of the sums stay, in a, the others are written for the other warpgroup. */
template <int D, bool is_high>
GPU_DEVICE void swap_sums(const float (&o)[D / 2], float (&a)[D / 4], float4 *mail)
{
    constexpr int stays = is_high ? D / 4 : 0, goes = is_high ? 0 : D / 4;
#pragma unroll
    for (int j = 0; j < D / 16; ++j) {
        const float *x = &o[goes + 4 * j];
        mail[j * 128] = make_float4(x[0], x[1], x[2], x[3]);
    }
#pragma unroll
    for (int k = 0; k < D / 4; ++k)
        a[k] = o[stays + k];
}

/* A row's sums are stored as f16 times `factor`, a power of two that brings the largest below 2^15. */
GPU_DEVICE float part_factor(float largest)
{
    const uint32_t exponent = __float_as_uint(largest) >> 23; /* at most 254 */
    return __uint_as_float(min(268 - exponent, 207u) << 23); /* at most 2^80 */
}

template <bool is_bf16, int D, bool has_extras>
__global__ void __launch_bounds__(384, 1)
    decode_wide(GPU_PARAM(decode_params, p), GPU_PARAM(decode_short_words, w),
                GPU_PARAM(CUtensorMap, map))
{
    constexpr uint32_t R = DECODE_WIDE_ROWS, TT = DECODE_WIDE_TOKENS, TB = TT / DECODE_TILE;
    constexpr uint32_t tile_bytes = 64 * D, stage_bytes = TB * tile_bytes;
    constexpr uint32_t group_bytes = 32 * D; /* 8 tokens: K slabs, then V slabs */
    constexpr uint32_t per_load = 32 / TB; /* stages whose block ids a warp holds */
    constexpr uint32_t loader = 8; /* the warp that asks for K and V */
    const uint32_t S = p.stages, tid = threadIdx.x, warp = gpu::warp_id();
    const uint32_t half = __shfl_sync(~0u, tid / 128, 0); /* the compiler sees one value a warp */
    const uint32_t lane = gpu::lane_id(), g = lane / 4, t = lane % 4, head = blockIdx.y;
    const uint32_t csize = cluster_size(), rank = cluster_rank();
    const uint32_t parts = p.n_parts, unit = parts == gridDim.x ? 0 : blockIdx.x / parts;
    const uint32_t part = blockIdx.x - unit * parts;
    uint8_t *base = aligned_shared();
    float2 *s_ml = (float2 *)(base + decode_wide_body(D, S, parts, csize)); /* [2][R] */
    uint64_t *bars = (uint64_t *)(s_ml + 2 * R);
    uint32_t *s_last = (uint32_t *)(bars + 6 * S + 1);
    const uint32_t s_q = gpu::shared_address(base), ring = s_q + 128 * D;
    /* A slot is filled for one warpgroup and the other in turn when S is odd. The parity of a barrier of
     * which a warpgroup has not seen every phase would tell it nothing, so stage i has full barriers
     * i % F, whose stages are all of one warpgroup. */
    const uint32_t F = 2 * S, full = gpu::shared_address(bars), v_full = full + F * 8;
    const uint32_t empty = v_full + F * 8, v_empty = empty + S * 8, merge_bar = v_empty + S * 8;

    if (warp == loader) {
        if (lane == 0)
            map_prefetch(&map);
        if (lane < 2 * F)
            barrier_init(full + lane * 8, 1);
        if (lane < 2 * S)
            barrier_init(empty + lane * 8, 4);
        barrier_init_fence();
        if (lane == 31) {
            barrier_init(merge_bar, 1);
            barrier_init_fence();
        }
        gpu::sync_warp();
    }
    if (p.is_chained)
        gpu::chain_wait();

    const decode_dev_item it = item_at(p, w, blockIdx.z);
    const unit_rows rows = rows_of(it, unit, R, p.group);
    if (rows.count == 0) /* a narrower item; the whole cluster leaves */
        return;
    /* whole stages, so that only the last one of the segment may be short */
    const uint32_t stages = (it.n_tiles + TB - 1) / TB, first = stages * part / parts * TB;
    const uint32_t n = min(stages * (part + 1) / parts * TB, it.n_tiles) - first;
    const uint32_t count = (n + TB - 1) / TB;
    const uint32_t kv_row = (it.layer * 2 * p.num_kv_heads + head) * p.block_tokens;
    const uint32_t in_block = (1u << p.tiles_shift) - 1;
    if (half == 2) {
        fewer_registers<40>();
        if (warp != loader)
            return;
        uint32_t ids = 0; /* block ids of tiles, one a lane */
#pragma unroll 1
        for (uint32_t i = 0, s = 0, j = 0, phase = 1; i < count; ++i) {
            if (i % per_load == 0 && i * TB + lane < n) {
                uint32_t tile = tile_at(first + i * TB + lane, it.sink_tiles, it.skip_tiles);
                tile >>= p.tiles_shift;
                ids = p.ids_at ? w.w[p.ids_at + blockIdx.z * p.ids_stride + tile]
                               : __ldg((const uint32_t *)it.table + tile);
            }
            const uint32_t here = min(TB, n - i * TB);
            const uint32_t k = lane / 2 % TB; /* a lane copies 8 tokens */
            const uint32_t id = __shfl_sync(~0u, ids, i % per_load * TB + k);
            const uint32_t tile = tile_at(first + i * TB + k, it.sink_tiles, it.skip_tiles);
            const uint32_t row = kv_row + (tile & in_block) * DECODE_TILE + lane % 2 * 8;
            const uint32_t dst = ring + s * stage_bytes + lane % (2 * TB) * group_bytes;
            if (i == 0)
                sync_all(); /* q is asked for: behind K and V it would wait for the whole ring */
#pragma unroll 1
            for (uint32_t is_v = 0; is_v < 2; ++is_v) {
                const uint32_t bar = full + (is_v * F + j) * 8;
                barrier_wait(empty + (is_v * S + s) * 8, phase);
                if (lane == 0)
                    barrier_expect(bar, here * tile_bytes / 2);
                gpu::sync_warp();
                if (lane < 2 * here)
                    map_copy(dst + is_v * group_bytes / 2, &map, bar, row, is_v, id);
            }
            j = j + 1 == F ? 0 : j + 1;
            if (++s == S) {
                s = 0;
                phase ^= 1;
            }
        }
        if (count == 0)
            sync_all();
        return;
    }
    more_registers<232>();
    {
        constexpr uint32_t chunks = D / 8, step = 256 / chunks; /* of 16 bytes a row; rows a pass */
        const uint32_t c = tid % chunks;
        const char *q = (const char *)it.q + c * 16;
#pragma unroll 1
        for (uint32_t r = tid / chunks; r < R; r += step)
            gpu::copy16_async(s_q + c / 8 * 8192 + r * 128 + (c % 8 ^ r % 8) * 16,
                              q + rows.query_row(r, p.num_q_heads, head) * (D * 2), r < rows.count);
    }
    sync_all();

    const unit_keys keys = keys_of(it, rows, p.layers);
    const uint32_t row0 = warp % 4 * 16 + g; /* this thread's rows: row0 and row0 + 8 */
    float cap = 0.0f, slope0 = 0.0f, slope1 = 0.0f;
    if (has_extras) {
        const gpu_layer &layer = p.layers[it.layer];
        cap = layer.soft_cap;
        if (layer.alibi_slopes) {
            slope0 = layer.alibi_slopes[rows.query_row(row0, 0, head)] * 1.44269504f;
            slope1 = layer.alibi_slopes[rows.query_row(row0 + 8, 0, head)] * 1.44269504f;
        }
    }
    copies_wait();
    proxy_fence();
    sync_consumers();

    float o[D / 2];
#pragma unroll
    for (int j = 0; j < D / 2; ++j)
        o[j] = 0.0f;
    float m0 = nothing, m1 = nothing, l0 = 0.0f, l1 = 0.0f; /* of this warpgroup's tokens */
    uint32_t j_at = half, phase = 0;
#pragma unroll 1
    for (uint32_t i = half; i < count; i += 2) {
        const uint32_t s_at = j_at < S ? j_at : j_at - S, here = min(TB, n - i * TB);
        const uint32_t stage = ring + s_at * stage_bytes;
        float s[32];
        barrier_wait(full + j_at * 8, phase);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < D / 16; ++k)
            wgmma_scores<is_bf16>(s, wgmma_matrix(s_q + k / 4 * 8192 + k % 4 * 32, 16, 1024),
                                  wgmma_matrix(stage + k / 4 * 1024 + k % 4 * 32, 16, group_bytes),
                                  k > 0);
        wgmma_finish(s);
        if (lane == 0)
            barrier_arrive(empty + s_at * 8);

        float scale = it.scale_log2;
        if (has_extras) {
            scale = 1.0f;
#pragma unroll
            for (int j = 0; j < 32; ++j) {
                const uint32_t r = j & 2 ? row0 + 8 : row0, c = j / 4 * 8 + 2 * t + j % 2;
                const uint32_t tile =
                    tile_at(first + i * TB + c / 16, it.sink_tiles, it.skip_tiles);
                float x = s[j] * it.scale_log2;
                if (cap > 0.0f)
                    x = cap * 1.44269504f * tanhf(x * 0.69314718f / cap);
                s[j] = x + (j & 2 ? slope1 : slope0) * ((float)(tile * DECODE_TILE + c % 16) -
                                                        (float)(keys.pos + rows.token(r)));
            }
        }
        const uint32_t key0 = tile_at(first + i * TB, it.sink_tiles, it.skip_tiles) * DECODE_TILE;
        const uint32_t key_last =
            tile_at(first + i * TB + here - 1, it.sink_tiles, it.skip_tiles) * DECODE_TILE;
        const bool is_masked = here < TB || keys.must_mask(key0, key_last + DECODE_TILE - key0);
        if (is_masked) {
            const uint32_t token0 = rows.token(row0), token1 = rows.token(row0 + 8);
#pragma unroll
            for (int b = 0; b < (int)TB; ++b) {
                const uint32_t key =
                    tile_at(first + i * TB + b, it.sink_tiles, it.skip_tiles) * DECODE_TILE;
                const uint32_t sees0 = b < here ? keys.sees_of_tile(token0, key) >> 2 * t : 0;
                const uint32_t sees1 = b < here ? keys.sees_of_tile(token1, key) >> 2 * t : 0;
#pragma unroll
                for (int j = 0; j < 8; ++j)
                    if (((j & 2 ? sees1 : sees0) & 1u << (j / 4 * 8 + j % 2)) == 0)
                        s[8 * b + j] = -INFINITY;
            }
        }
        float x0 = fmaxf(s[0], s[1]), x1 = fmaxf(s[2], s[3]);
#pragma unroll
        for (int j = 4; j < 32; j += 4) {
            x0 = fmaxf(x0, fmaxf(s[j], s[j + 1]));
            x1 = fmaxf(x1, fmaxf(s[j + 2], s[j + 3]));
        }
        x0 = gpu::warp_max<4>(x0) * scale;
        x1 = gpu::warp_max<4>(x1) * scale;
        if (__any_sync(~0u, x0 > m0 + 8.0f || x1 > m1 + 8.0f)) {
            x0 = fmaxf(x0, m0);
            x1 = fmaxf(x1, m1);
            const float f0 = gpu::exp2_fast(m0 - x0), f1 = gpu::exp2_fast(m1 - x1);
            m0 = x0;
            m1 = x1;
            l0 *= f0;
            l1 *= f1;
#pragma unroll
            for (int j = 0; j < D / 2; ++j)
                o[j] *= j & 2 ? f1 : f0;
        }
        uint32_t w[TB][4]; /* weights, two a word, as the products want them */
#pragma unroll
        for (int j = 0; j < 32; j += 2) {
            const float m = j & 2 ? m1 : m0;
            const float a = gpu::exp2_fast(fmaf(s[j], scale, -m));
            const float b = gpu::exp2_fast(fmaf(s[j + 1], scale, -m));
            if (j & 2)
                l1 += a + b;
            else
                l0 += a + b;
            w[j / 8][j % 8 / 2] = encode2<is_bf16>(a, b);
        }
        barrier_wait(v_full + j_at * 8, phase);
        if (is_masked) {
            /* Weights of hidden keys are 0, but 0 times NaN is NaN: V rows that no row sees are
             * cleared; where rows see different keys, NaN and inf are looked for */
            const seen_by_some some = keys.seen_by(rows);
            const uint32_t tiles = first + i * TB;
            auto key_of = [&](uint32_t r) {
                return tile_at(tiles + r / DECODE_TILE, it.sink_tiles, it.skip_tiles) *
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
                const uint32_t at = stage + e / D * group_bytes + group_bytes / 2 + e % D * 16;
                if (r >= here * DECODE_TILE || !some.has(key_of(r)))
                    shared_store16(at, make_uint4(0, 0, 0, 0));
                else if (!some.is_same)
                    is_found |= has_bad<is_bf16>(shared_load16(at));
            }
            if (!some.is_same && warpgroup_any(half, is_found)) {
                /* added to the rows that see it, then cleared: 32 threads read each of them */
#pragma unroll 1
                for (uint32_t e = 0; e < here * DECODE_TILE * (D / 8); ++e) {
                    const uint32_t r = e / (D / 8), c = e % (D / 8), key = key_of(r);
                    const uint32_t at = stage + r / 8 * group_bytes + group_bytes / 2 +
                                        c / 8 * 1024 + r % 8 * 128 + (c % 8 ^ r % 8) * 16 + t * 4;
                    const float bad[2] = {take_bad<is_bf16>(at, false),
                                          take_bad<is_bf16>(at + 2, false)};
                    if (!__any_sync(~0u, bad[0] != 0.0f || bad[1] != 0.0f))
                        continue;
                    const bool sees[2] = {keys.sees(rows.token(row0), key),
                                          keys.sees(rows.token(row0 + 8), key)};
#pragma unroll
                    for (int j = 0; j < D / 2; ++j)
                        if (j / 4 == (int)c && sees[j / 2 % 2])
                            o[j] += bad[j % 2];
                }
                warpgroup_any(half, false);
#pragma unroll 1
                for (uint32_t e = tid % 128; e < TT * D; e += 128)
                    take_bad<is_bf16>(stage + e / (8 * D) * group_bytes + group_bytes / 2 +
                                          e % (8 * D) * 2,
                                      true);
            }
            proxy_fence();
            warpgroup_any(half, false);
        }
        wgmma_fence();
#pragma unroll
        for (uint32_t b = 0; b < TB; ++b)
            wgmma_values<is_bf16>(
                o, w[b], wgmma_matrix(stage + group_bytes / 2 + b * tile_bytes, 1024, group_bytes));
        wgmma_finish(o);
        if (lane == 0)
            barrier_arrive(v_empty + s_at * 8);
        j_at += 2;
        if (j_at >= F) {
            j_at -= F;
            phase ^= 1;
        }
    }
    if (p.is_chained)
        gpu::chain_release();
    l0 = gpu::warp_sum<4>(l0);
    l1 = gpu::warp_sum<4>(l1);
    if (t == 0) {
        s_ml[half * R + row0] = make_float2(m0, l0);
        s_ml[half * R + row0 + 8] = make_float2(m1, l1);
    }
    sync_consumers(); /* the ring is free */

    /* The sums of the other half of head_dim go to the other warpgroup, through the ring */
    float a[D / 4];
    float4 *mail = (float4 *)(base + 128 * D) + tid % 128;
    float4 *out_mail = mail + half * (D / 16 * 128), *in_mail = mail + (half ^ 1) * (D / 16 * 128);
    if (half)
        swap_sums<D, true>(o, a, out_mail);
    else
        swap_sums<D, false>(o, a, out_mail);
    sync_consumers();
    {
        const float2 x0 = s_ml[(half ^ 1) * R + row0], x1 = s_ml[(half ^ 1) * R + row0 + 8];
        const float top0 = fmaxf(m0, x0.x), top1 = fmaxf(m1, x1.x);
        const float f0 = gpu::exp2_fast(m0 - top0), f1 = gpu::exp2_fast(m1 - top1);
        const float e0 = gpu::exp2_fast(x0.x - top0), e1 = gpu::exp2_fast(x1.x - top1);
        m0 = top0;
        m1 = top1;
        l0 = l0 * f0 + x0.y * e0;
        l1 = l1 * f1 + x1.y * e1;
#pragma unroll
        for (int j = 0; j < D / 16; ++j) {
            const float4 x = in_mail[j * 128];
            a[4 * j] = a[4 * j] * f0 + x.x * e0;
            a[4 * j + 1] = a[4 * j + 1] * f0 + x.y * e0;
            a[4 * j + 2] = a[4 * j + 2] * f1 + x.z * e1;
            a[4 * j + 3] = a[4 * j + 3] * f1 + x.w * e1;
        }
    }
    if (parts == 1) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const uint32_t r = row0 + h * 8;
            if (r >= rows.count)
                continue;
            const uint32_t row = rows.query_row(r, p.num_q_heads, head);
            const float f = finish_row(it, p, row, h ? m1 : m0, h ? l1 : l0, half == 0 && t == 0);
            uint32_t *out = (uint32_t *)(it.out + (uint64_t)row * D * 2 + half * D) + t;
#pragma unroll
            for (int j = 0; j < D / 16; ++j)
                out[j * 4] = encode2<is_bf16>(a[4 * j + 2 * h] * f, a[4 * j + 2 * h + 1] * f);
        }
        return;
    }

    /* Rows 8i to 8i + 7 are unit i: [half][16 columns][row][8 bytes a lane], then (m, l) as [half][row] */
    const uint32_t segment =
        ((blockIdx.z * gridDim.y + blockIdx.y) * (gridDim.x / parts) + unit) * parts;
    constexpr uint32_t unit_bytes = decode_wide_unit_bytes(D);
    char *parts_at = (char *)p.part_ml + (uint64_t)segment * (8 * unit_bytes);
    char *mine = parts_at + part * (8 * unit_bytes) + warp % 4 * 2 * unit_bytes;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        float largest = 0.0f;
#pragma unroll
        for (int j = 0; j < D / 16; ++j)
            largest = fmaxf(largest, fmaxf(fabsf(a[4 * j + 2 * h]), fabsf(a[4 * j + 2 * h + 1])));
        largest = gpu::warp_max<4>(largest);
        if (__any_sync(~0u, !(largest < INFINITY))) { /* the largest that is finite */
            largest = 0.0f;
#pragma unroll
            for (int j = 0; j < D / 8; ++j) {
                const float x = fabsf(a[j / 2 * 4 + 2 * h + j % 2]);
                largest = fmaxf(largest, x < INFINITY ? x : 0.0f);
            }
            largest = gpu::warp_max<4>(largest);
        }
        const float f = part_factor(largest);
        char *dst = mine + h * unit_bytes + half * (D / 32) * 256 + lane * 8;
#pragma unroll
        for (int j = 0; j < D / 32; ++j) {
            const float *x = &a[8 * j + 2 * h];
            __stcg((uint2 *)(dst + j * 256), make_uint2(gpu::f16_encode2(x[0] * f, x[1] * f),
                                                        gpu::f16_encode2(x[4] * f, x[5] * f)));
        }
        if (t == 0) /* of sums and weights times f */
            __stcg((float2 *)(mine + h * unit_bytes + 8 * D * 2 + half * 64 + g * 8),
                   make_float2((h ? m1 : m0) - gpu::log2_fast(f), (h ? l1 : l0) * f));
    }
    cluster_sync();
    if (parts > csize) { /* only the last cluster goes on; its parts are all there */
        if (tid == 0) {
            const uint32_t n_clusters = parts / csize;
            uint32_t *arrivals = p.arrivals + segment / parts * DECODE_MAX_CLUSTER + rank;
            __threadfence();
            const uint32_t before = atomicAdd(arrivals, 1);
            *s_last = before + 1 == n_clusters;
            if (before + 1 == n_clusters) {
                *arrivals = 0;
                __threadfence();
            }
        }
        sync_consumers();
        if (!*s_last)
            return;
    }
    /* this rank's units of all parts come into shared memory, where q and ring were */
    const uint32_t unit0 = 8 * rank / csize, n_units = 8 * (rank + 1) / csize - unit0;
    const uint32_t slice_bytes = n_units * unit_bytes;
    if (tid == 0) {
        proxy_fence_all();
        barrier_expect(merge_bar, parts * slice_bytes);
#pragma unroll 1
        for (uint32_t c = 0; c < parts; ++c)
            bulk_copy(s_q + c * slice_bytes, parts_at + (c * 8 + unit0) * unit_bytes, slice_bytes,
                      merge_bar);
    }
    barrier_wait(merge_bar, 0);
    /* What each part counts in each row, where its maximum was */
    for (uint32_t e = tid; e < n_units * 16; e += 256) { /* unit, half, row */
        float2 *ml = (float2 *)(base + e / 16 * unit_bytes + 8 * D * 2) + e % 16;
        const uint32_t r = (unit0 + e / 16) * 8 + e % 8, part_step = slice_bytes / 8;
        float m = nothing, l = 0.0f;
#pragma unroll 1
        for (uint32_t c = 0; c < parts; ++c)
            m = fmaxf(m, ml[c * part_step].x);
#pragma unroll 1
        for (uint32_t c = 0; c < parts; ++c) {
            const float2 x = ml[c * part_step];
            const float f = gpu::exp2_fast(x.x - m);
            l += x.y * f;
            ml[c * part_step].x = f;
        }
        if (r >= rows.count)
            continue;
        const float f = finish_row(it, p, rows.query_row(r, p.num_q_heads, head), m, l, e % 16 < 8);
#pragma unroll 1
        for (uint32_t c = 0; c < parts; ++c)
            ml[c * part_step].x *= f;
    }
    sync_consumers();
#pragma unroll 1
    for (uint32_t e = tid; e < n_units * (2 * D); e += 256) { /* 4 elements of a row */
        const uint32_t u = e / (2 * D), in_unit = e % (2 * D), r8 = in_unit / 4 % 8;
        const uint32_t r = (unit0 + u) * 8 + r8, column = in_unit / 32 * 16 + in_unit % 4 * 2;
        if (r >= rows.count)
            continue;
        const uint8_t *at = base + u * unit_bytes;
        const uint8_t *value = at + in_unit * 8, *f = at + 8 * D * 2 + in_unit / D * 64 + r8 * 8;
        float4 x = make_float4(0, 0, 0, 0);
#pragma unroll 4
        for (uint32_t c = 0; c < parts; ++c) {
            const uint2 v = *(const uint2 *)(value + c * slice_bytes);
            const float w = *(const float *)(f + c * slice_bytes);
            x.x += gpu::f16_decode(v.x & 0xffff) * w;
            x.y += gpu::f16_decode(v.x >> 16) * w;
            x.z += gpu::f16_decode(v.y & 0xffff) * w;
            x.w += gpu::f16_decode(v.y >> 16) * w;
        }
        const uint32_t row = rows.query_row(r, p.num_q_heads, head);
        uint32_t *out = (uint32_t *)(it.out + ((uint64_t)row * D + column) * 2);
        out[0] = encode2<is_bf16>(x.x, x.y);
        out[4] = encode2<is_bf16>(x.z, x.w);
    }
}

} // namespace decode
#endif
