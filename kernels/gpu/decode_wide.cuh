/* decode_wide.cuh: the kernel for more than 16 query rows a kv head: 64 rows a thread block on the
 * warpgroup matrix instructions.
 *
 * Two warpgroups work on the same stage of 64 tokens. Each computes the scores of 32 of them; the rows'
 * maxima and the weights meet in shared memory; then each computes the weighted sum of all 64 tokens
 * for its half of head_dim. So a thread holds D / 4 sums and nothing is merged inside the block.
 *
 * The blocks of a cluster share a segment. Their sums go to scratch in the order the registers have
 * (64 KB a block are too much for the way between shared memories, about 10 bytes a cycle), the
 * cluster's barrier makes them visible, and each rank brings its slice of the rows of all blocks into
 * shared memory by bulk copies and finishes it. With more than one cluster a segment, the last cluster to
 * arrive does that, rank by rank.
 *
 * What runs once is kept short: cold instructions cost about 3 cycles each, unrolled loops more than
 * their latency.
 */
#ifndef ATTND_GPU_DECODE_WIDE_CUH
#define ATTND_GPU_DECODE_WIDE_CUH

#include "kernels/gpu/decode_narrow.cuh"
#include "kernels/gpu/decode_wgmma.cuh"

namespace decode
{

/* All threads, from different places. */
GPU_DEVICE void sync_all()
{
    __syncthreads();
}

/* The 256 threads that compute. */
GPU_DEVICE void sync_consumers()
{
    sync_some<1, 256>();
}

/* Is x true in one of them? */
GPU_DEVICE bool consumers_any(bool x)
{
    return sync_some_any<1, 256>(x);
}

template <bool is_bf16, int D, bool has_extras>
__global__ void __launch_bounds__(288, 1)
    decode_wide(GPU_PARAM(decode_params, p), GPU_PARAM(decode_short_words, w),
                GPU_PARAM(CUtensorMap, map))
{
    constexpr uint32_t R = DECODE_WIDE_ROWS, TT = DECODE_WIDE_TOKENS, TB = TT / DECODE_TILE;
    constexpr uint32_t tile_bytes = 64 * D, stage_bytes = TB * tile_bytes;
    constexpr uint32_t group_bytes = 32 * D; /* 8 tokens: K slabs, then V slabs */
    constexpr uint32_t per_load = 32 / TB; /* stages whose block ids a warp holds */
    constexpr uint32_t loader = 8; /* the warp that asks for K and V */
    const uint32_t S = p.stages, tid = threadIdx.x, half = tid / 128, warp = gpu::warp_id();
    const uint32_t lane = gpu::lane_id(), g = lane / 4, t = lane % 4, head = blockIdx.y;
    const uint32_t csize = cluster_size(), rank = cluster_rank();
    const uint32_t parts = p.n_parts, unit = parts == gridDim.x ? 0 : blockIdx.x / parts;
    const uint32_t part = blockIdx.x - unit * parts;
    uint8_t *base = aligned_shared();
    float *s_max = (float *)(base + decode_wide_body(D, S, parts, csize)); /* [2][R] */
    float *s_sum = s_max + 2 * R; /* [2][R] */
    uint64_t *bars = (uint64_t *)(s_sum + 2 * R);
    uint32_t *s_last = (uint32_t *)(bars + 3 * S + 1);
    const uint32_t s_q = gpu::shared_address(base), s_w = s_q + 128 * D, ring = s_w + 8192;
    const uint32_t full = gpu::shared_address(bars); /* K [S], then V [S] */
    const uint32_t empty = full + 2 * S * 8, merge_bar = empty + S * 8;

    if (warp == loader) {
        if (lane == 0)
            map_prefetch(&map);
        if (lane < S) {
            barrier_init(full + lane * 8, 1);
            barrier_init(full + (S + lane) * 8, 1);
            barrier_init(empty + lane * 8, 8);
            barrier_init_fence();
        }
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
    const uint32_t first = it.n_tiles * part / parts;
    const uint32_t n = it.n_tiles * (part + 1) / parts - first, count = (n + TB - 1) / TB;
    const uint32_t kv_row = (it.layer * 2 * p.num_kv_heads + head) * p.block_tokens;
    const uint32_t in_block = (1u << p.tiles_shift) - 1;
    if (warp == loader) {
        uint32_t ids = 0; /* block ids of tiles, one a lane */
#pragma unroll 1
        for (uint32_t i = 0, s = 0, phase = 1; i < count; ++i) {
            if (i % per_load == 0 && i * TB + lane < n) {
                uint32_t tile = tile_at(first + i * TB + lane, it.sink_tiles, it.skip_tiles);
                tile >>= p.tiles_shift;
                ids = p.ids_at ? w.w[p.ids_at + blockIdx.z * p.ids_stride + tile]
                               : __ldg((const uint32_t *)it.table + tile);
            }
            const uint32_t here = min(TB, n - i * TB);
            const uint32_t k = lane / 2 % TB, is_v = lane / (2 * TB); /* a lane copies 8 tokens */
            const uint32_t id = __shfl_sync(~0u, ids, i % per_load * TB + k);
            if (i == 0)
                sync_all(); /* q is asked for: behind K and V it would wait for the whole ring */
            barrier_wait(empty + s * 8, phase);
            const uint32_t bar = full + (is_v * S + s) * 8;
            if (lane % (2 * TB) == 0 && is_v < 2)
                barrier_expect(bar, here * tile_bytes / 2);
            gpu::sync_warp();
            if (k < here && is_v < 2) {
                uint32_t tile = tile_at(first + i * TB + k, it.sink_tiles, it.skip_tiles);
                map_copy(
                    ring + s * stage_bytes + lane % (2 * TB) * group_bytes + is_v * group_bytes / 2,
                    &map, bar, kv_row + (tile & in_block) * DECODE_TILE + lane % 2 * 8, is_v, id);
            }
            if (++s == S) {
                s = 0;
                phase ^= 1;
            }
        }
        if (count == 0)
            sync_all();
        return;
    }
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

    float o[D / 4];
#pragma unroll
    for (int j = 0; j < D / 4; ++j)
        o[j] = 0.0f;
    float m0 = nothing, m1 = nothing, l0 = 0.0f, l1 = 0.0f; /* l: of this half's tokens */
    uint32_t s_at = 0, phase = 0;
#pragma unroll 1
    for (uint32_t i = 0; i < count; ++i) {
        const uint32_t stage = ring + s_at * stage_bytes, here = min(TB, n - i * TB);
        barrier_wait(full + s_at * 8, phase);
        float s[16];
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < D / 16; ++k)
            wgmma_scores<is_bf16>(
                s, wgmma_matrix(s_q + k / 4 * 8192 + k % 4 * 32, 16, 1024),
                wgmma_matrix(stage + half * 4 * group_bytes + k / 4 * 1024 + k % 4 * 32, 16,
                             group_bytes),
                k > 0);
        wgmma_finish();

        float scale = it.scale_log2;
        if (has_extras) {
            scale = 1.0f;
#pragma unroll
            for (int j = 0; j < 16; ++j) {
                const uint32_t r = j & 2 ? row0 + 8 : row0;
                const uint32_t c = half * 32 + j / 4 * 8 + 2 * t + j % 2;
                const uint32_t tile =
                    tile_at(first + i * TB + c / 16, it.sink_tiles, it.skip_tiles);
                float x = s[j] * it.scale_log2;
                if (cap > 0.0f)
                    x = cap * 1.44269504f * tanhf(x * 0.69314718f / cap);
                s[j] = x + (j & 2 ? slope1 : slope0) * ((float)(tile * DECODE_TILE + c % 16) -
                                                        (float)(keys.pos + rows.token(r)));
            }
        }
        bool is_masked = here < TB;
        for (uint32_t b = 0; b < here; ++b)
            is_masked |= keys.must_mask(tile_at(first + i * TB + b, it.sink_tiles, it.skip_tiles) *
                                            DECODE_TILE,
                                        DECODE_TILE);
        if (is_masked) {
            const uint32_t token0 = rows.token(row0), token1 = rows.token(row0 + 8);
#pragma unroll
            for (int j = 0; j < 16; ++j) {
                const uint32_t c = half * 32 + j / 4 * 8 + 2 * t + j % 2, b = c / 16;
                const uint32_t tile = tile_at(first + i * TB + b, it.sink_tiles, it.skip_tiles);
                if (b >= here || !keys.sees(j & 2 ? token1 : token0, tile * DECODE_TILE + c % 16))
                    s[j] = -INFINITY;
            }
        }
        float x0 = fmaxf(s[0], s[1]), x1 = fmaxf(s[2], s[3]);
#pragma unroll
        for (int j = 4; j < 16; j += 4) {
            x0 = fmaxf(x0, fmaxf(s[j], s[j + 1]));
            x1 = fmaxf(x1, fmaxf(s[j + 2], s[j + 3]));
        }
        x0 = gpu::warp_max<4>(x0) * scale;
        x1 = gpu::warp_max<4>(x1) * scale;
        if (t == 0) {
            s_max[half * R + row0] = x0;
            s_max[half * R + row0 + 8] = x1;
        }
        sync_consumers(); /* maxima are there; the weights of the stage before are used up */
        x0 = fmaxf(x0, s_max[(half ^ 1) * R + row0]);
        x1 = fmaxf(x1, s_max[(half ^ 1) * R + row0 + 8]);
        if (__any_sync(~0u, x0 > m0 + 8.0f || x1 > m1 + 8.0f)) { /* the same in both halves */
            x0 = fmaxf(x0, m0);
            x1 = fmaxf(x1, m1);
            const float f0 = gpu::exp2_fast(m0 - x0), f1 = gpu::exp2_fast(m1 - x1);
            m0 = x0;
            m1 = x1;
            l0 *= f0;
            l1 *= f1;
#pragma unroll
            for (int j = 0; j < D / 4; ++j)
                o[j] *= j & 2 ? f1 : f0;
        }
#pragma unroll
        for (int j = 0; j < 16; j += 2) {
            const float m = j & 2 ? m1 : m0;
            const float a = gpu::exp2_fast(fmaf(s[j], scale, -m));
            const float b = gpu::exp2_fast(fmaf(s[j + 1], scale, -m));
            if (j & 2)
                l1 += a + b;
            else
                l0 += a + b;
            /* row r, tokens 8c + 2t and the next: 128 bytes a row, swizzled like K */
            const uint32_t r = j & 2 ? row0 + 8 : row0, c = half * 4 + j / 4;
            shared_store4(s_w + r * 128 + (c ^ g) * 16 + t * 4, encode2<is_bf16>(a, b));
        }
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
            /* without a window the hidden ones are the last; behind `here` tiles nothing was loaded */
            const uint32_t r0 = keys.window == 0 && some.is_same && some.end >= key_of(0)
                                    ? min(some.end - key_of(0), here * DECODE_TILE)
                                    : 0;
            bool is_found = false;
            barrier_wait(full + (S + s_at) * 8, phase);
#pragma unroll 1
            for (uint32_t e = r0 / 8 * D + tid; e < TT * (D / 8); e += 256) {
                const uint32_t r = e / D * 8 + e / 8 % 8; /* a group has D pieces of V */
                const uint32_t at = stage + e / D * group_bytes + group_bytes / 2 + e % D * 16;
                if (r >= here * DECODE_TILE || !some.has(key_of(r)))
                    shared_store16(at, make_uint4(0, 0, 0, 0));
                else if (!some.is_same)
                    is_found |= has_bad<is_bf16>(shared_load16(at));
            }
            if (!some.is_same && consumers_any(is_found)) {
                /* added to the rows that see it, then cleared: 32 threads read each of them */
#pragma unroll 1
                for (uint32_t e = 0; e < here * DECODE_TILE * (D / 16); ++e) {
                    const uint32_t r = e / (D / 16), step = e % (D / 16);
                    const uint32_t c = half * (D / 16) + step, key = key_of(r);
                    const uint32_t at = stage + r / 8 * group_bytes + group_bytes / 2 +
                                        c / 8 * 1024 + r % 8 * 128 + (c % 8 ^ r % 8) * 16 + t * 4;
                    const float bad[2] = {take_bad<is_bf16>(at, false),
                                          take_bad<is_bf16>(at + 2, false)};
                    if (!__any_sync(~0u, bad[0] != 0.0f || bad[1] != 0.0f))
                        continue;
                    const bool sees[2] = {keys.sees(rows.token(row0), key),
                                          keys.sees(rows.token(row0 + 8), key)};
#pragma unroll
                    for (int j = 0; j < D / 4; ++j)
                        if (j / 4 == (int)step && sees[j / 2 % 2])
                            o[j] += bad[j % 2];
                }
                sync_consumers();
#pragma unroll 1
                for (uint32_t e = tid; e < TT * D; e += 256)
                    take_bad<is_bf16>(stage + e / (8 * D) * group_bytes + group_bytes / 2 +
                                          e % (8 * D) * 2,
                                      true);
            }
        }
        proxy_fence();
        barrier_wait(full + (S + s_at) * 8, phase);
        sync_consumers();
        wgmma_fence();
#pragma unroll
        for (uint32_t b = 0; b < TB; ++b)
            wgmma_values<is_bf16>(
                o, wgmma_matrix(s_w + b * 32, 16, 1024),
                wgmma_matrix(stage + group_bytes / 2 + half * (D / 128) * 1024 + b * tile_bytes,
                             1024, group_bytes));
        wgmma_finish();
        if (lane == 0)
            barrier_arrive(empty + s_at * 8);
        if (++s_at == S) {
            s_at = 0;
            phase ^= 1;
        }
    }
    if (p.is_chained)
        gpu::chain_release();
    l0 = gpu::warp_sum<4>(l0);
    l1 = gpu::warp_sum<4>(l1);
    if (t == 0) {
        s_sum[half * R + row0] = l0;
        s_sum[half * R + row0 + 8] = l1;
    }

    const uint32_t segment =
        ((blockIdx.z * gridDim.y + blockIdx.y) * (gridDim.x / parts) + unit) * parts;
    constexpr uint32_t unit_bytes = decode_wide_unit_bytes(D);
    char *parts_at = (char *)p.part_ml + (uint64_t)segment * (8 * unit_bytes);
    char *mine = parts_at + part * (8 * unit_bytes) + warp % 4 * 2 * unit_bytes;
    if (parts >
        1) { /* rows 8i to 8i + 7 are unit i: [half][8 columns][row][8 bytes a lane], then (m, l) */
        char *dst = mine + half * (D / 16) * 256 + lane * 8;
#pragma unroll
        for (int j = 0; j < D / 16; ++j) {
            __stcg((float2 *)(dst + j * 256), make_float2(o[4 * j], o[4 * j + 1]));
            __stcg((float2 *)(dst + unit_bytes + j * 256), make_float2(o[4 * j + 2], o[4 * j + 3]));
        }
    }
    sync_consumers();
    l0 = s_sum[row0] + s_sum[R + row0];
    l1 = s_sum[row0 + 8] + s_sum[R + row0 + 8];
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
                out[j * 4] = encode2<is_bf16>(o[4 * j + 2 * h] * f, o[4 * j + 2 * h + 1] * f);
        }
        return;
    }
    if (half == 0 && t == 0) {
        __stcg((float2 *)(mine + 8 * D * 4 + g * 8), make_float2(m0, l0));
        __stcg((float2 *)(mine + unit_bytes + 8 * D * 4 + g * 8), make_float2(m1, l1));
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
    /* this rank's units of all parts come into shared memory, where q, weights and ring were */
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
#pragma unroll 1
    for (uint32_t e = tid; e < n_units * (8 * D / 4); e += 256) {
        const uint32_t u = e / (8 * D / 4), in_unit = e % (8 * D / 4), r8 = in_unit / 2 % 8;
        const uint32_t r = (unit0 + u) * 8 + r8, column = in_unit / 16 * 8 + in_unit % 2 * 4;
        if (r >= rows.count)
            continue;
        const uint8_t *at = base + u * unit_bytes;
        float m, l;
        const float4 a = merge_parts<4>(
            parts,
            [&](uint32_t c) { return *(const float4 *)(at + c * slice_bytes + in_unit * 16); },
            [&](uint32_t c) {
                return *(const float2 *)(at + c * slice_bytes + 8 * D * 4 + r8 * 8);
            },
            &m, &l);
        const uint32_t row = rows.query_row(r, p.num_q_heads, head);
        store_out4<is_bf16>(it, (uint64_t)row * D + column, a,
                            finish_row(it, p, row, m, l, column == 0));
    }
}

} // namespace decode
#endif
