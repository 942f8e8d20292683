/* decode_narrow.cuh: kernels for up to 16 query rows a kv head. A warp takes one 16-token tile at a
 * time, alone: one tensor-map copy brings its K and V into the warp's own stages, the warp waits on
 * its own barrier, computes and refills. No barrier of the thread block lies in the main loop.
 *
 *   decode_cluster   one run a thread block, computed from the block index; neighbours in a cluster
 *                    share a segment and merge through each other's shared memory
 *   decode_runs      a list of runs a thread block or a warp (decode_runs.cuh)
 *
 * Both are launched with 32 * W threads; the ring has p.stages stages a warp.
 */
#ifndef ATTND_GPU_DECODE_NARROW_CUH
#define ATTND_GPU_DECODE_NARROW_CUH

#include "kernels/gpu/sm90/decode_tile.cuh"

namespace decode
{

GPU_DEVICE uint8_t *aligned_shared()
{
    GPU_SHARED(uint8_t, raw);
    return raw + ((DECODE_ALIGN - (gpu::shared_address(raw) % DECODE_ALIGN)) % DECODE_ALIGN);
}

/* An item, from the parameters or from memory. */
template <class words>
GPU_DEVICE decode_dev_item item_at(const decode_params &p, const words &w, uint32_t i)
{
    if (p.items)
        return p.items[i];
    decode_dev_item it;
#pragma unroll
    for (int k = 0; k < (int)(sizeof it / 16); ++k)
        ((uint4 *)&it)[k] = ((const uint4 *)w.w)[i * (sizeof it / 16) + k];
    return it;
}

template <bool is_bf16, int D, int NT, bool has_extras>
__global__ void __launch_bounds__(256, D <= 128 && NT == 1 && !has_extras ? 2 : 1)
    decode_cluster(GPU_PARAM(decode_params, p), GPU_PARAM(decode_short_words, w),
                   GPU_PARAM(CUtensorMap, map))
{
    using rows_t = warp_rows<is_bf16, D, NT>;
    constexpr uint32_t R = 8 * NT, row_floats = D + 4;
    const uint32_t W = blockDim.x / 32, S = p.stages, warp = gpu::warp_id(), lane = gpu::lane_id();
    const uint32_t lg = p.lg_cluster, csize = 1u << lg;
    const uint32_t rank = blockIdx.x & (csize - 1), head = blockIdx.x >> lg, unit = blockIdx.y;
    const uint32_t warp_bytes = decode_warp_bytes(D, R, S);
    uint8_t *base = aligned_shared();
    const uint32_t s_q = gpu::shared_address(base) + W * warp_bytes;
    float4 *s_in = (float4 *)(base + W * warp_bytes + R * D * 2);
    float2 *s_ml = (float2 *)(s_in + R * D / 4);
    float2 *s_in_ml = s_ml + W * R;
    uint64_t *bars = (uint64_t *)(s_in_ml + 8 * R);
    const uint32_t ring = gpu::shared_address(base) + warp * warp_bytes;
    const uint32_t bar = gpu::shared_address(bars) + warp * S * 8;
    const uint32_t merge_bar = gpu::shared_address(bars) + W * S * 8;
    const uint32_t span4 = p.row_span * (D / 4), per = span4 >> lg; /* float4s a rank finishes */
    const uint32_t lg_per = 31 - __clz(per);

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
    /* q before K and V: behind them it would wait for the whole ring */
    rows_t::ask_q(s_q, it.q, rows, p.num_q_heads, head);
    const uint32_t first = decode_cluster_begin(it.n_tiles, rank, lg);
    const uint32_t n = decode_cluster_begin(it.n_tiles, rank + 1, lg) - first;
    const uint32_t lg_w = 31 - __clz(W), count = (n + W - 1 - warp) >> lg_w;
    const uint32_t kv_row = (it.layer * 2 * p.num_kv_heads + head) * p.block_tokens;
    const uint32_t in_block = (1u << p.tiles_shift) - 1;
    /* Block ids, one per lane, of the warp's next 32 tiles; those of its first ones came with the
     * parameters. */
    const uint32_t n_known = min(p.ids_stride >> lg_w, count);
    uint32_t ids = 0;
    auto load_ids = [&](uint32_t i) {
        if (i + lane < count) {
            uint32_t tile =
                visible_tile_at(first + warp + (i + lane) * W, it.sink_tiles, it.skip_tiles);
            ids = __ldg((const uint32_t *)it.table + (tile >> p.tiles_shift));
        }
    };
    auto copy_tile = [&](uint32_t i, uint32_t s, uint32_t id) {
        const uint32_t tile = visible_tile_at(first + warp + i * W, it.sink_tiles, it.skip_tiles);
        barrier_expect(bar + s * 8, rows_t::tile_bytes);
        map_copy(ring + s * rows_t::tile_bytes, &map, bar + s * 8,
                 kv_row + (tile & in_block) * DECODE_TILE, 0, id);
    };
    auto fill = [&](uint32_t i, uint32_t s) {
        const uint32_t id = __shfl_sync(~0u, ids, i % 32);
        if (elect_one())
            copy_tile(i, s, id);
    };
    /* a copy as soon as its barrier is ready; q has not waited for barriers either */
    if (elect_one())
#pragma unroll 1
        for (uint32_t s = 0; s < S; ++s) {
            barrier_init(bar + s * 8, 1);
            barrier_init_fence();
            if (s < n_known)
                copy_tile(s, s,
                          w.w[p.ids_at + (blockIdx.z << lg | rank) * p.ids_stride + s * W + warp]);
        }
    gpu::sync_warp();
    if (count > n_known) /* what the first copies need not wait for */
        load_ids(0);
#pragma unroll 1
    for (uint32_t i = n_known; i < min(S, count); ++i)
        fill(i, i);
    if (csize > 1) {
        if (threadIdx.x == 0) {
            barrier_init(merge_bar, 1);
            barrier_init_fence();
            barrier_expect(merge_bar, csize * (per * 16 + (per > D / 4 ? per / (D / 4) : 1) * 8));
        }
        gpu::sync_warp();
        cluster_arrive();
    }

    const unit_keys keys = keys_of(it, rows, p.layers);
    unit_extras<NT> extras;
    if (has_extras)
        extras = extras_of<NT>(it, rows, p.layers, head);
    rows_t acc;
    acc.clear();
    copies_wait();
    __syncthreads();
    acc.take_q(s_q);
    uint32_t stage = 0, phase = 0;
#pragma unroll 1
    for (uint32_t i = 0; i < count; ++i) {
        barrier_wait(bar + stage * 8, phase);
        uint32_t tile = visible_tile_at(first + warp + i * W, it.sink_tiles, it.skip_tiles);
        acc.template tile<has_extras>(ring + stage * rows_t::tile_bytes, tile * DECODE_TILE,
                                      it.scale_log2, rows, keys, extras);
        gpu::sync_warp();
        if (i + S < count) {
            if ((i + S) % 32 == 0)
                load_ids(i + S);
            fill(i + S, stage);
        }
        if (++stage == S) {
            stage = 0;
            phase ^= 1;
        }
    }
    if (p.is_chained)
        gpu::chain_release();
    if (count) { /* the warp's stages are done: its sums lie over them */
        acc.sum_weights();
        acc.to_shared((float *)(base + warp * warp_bytes), s_ml + warp * R, row_floats, rows.count);
    }
    __syncthreads();
    if (csize > 1)
        cluster_wait(); /* long since complete: every block of the cluster has its barrier ready */

    const uint32_t n_warps = min(n, W);
#pragma unroll 1
    for (uint32_t e = threadIdx.x; e < span4; e += blockDim.x) {
        const uint32_t r = e / (D / 4), d4 = e % (D / 4);
        float m, l;
        const float4 a = merge_parts<8>(
            r < rows.count ? n_warps : 0,
            [&](uint32_t k) {
                return *(const float4 *)(base + k * warp_bytes + (r * row_floats + d4 * 4) * 4);
            },
            [&](uint32_t k) { return s_ml[k * R + r]; }, &m, &l);
        if (csize == 1) {
            if (r < rows.count) {
                const uint32_t row = rows.query_row(r, p.num_q_heads, head);
                store_out4<is_bf16>(it, (uint64_t)row * D + d4 * 4, a,
                                    finish_row(it, p, row, m, l, d4 == 0));
            }
        } else {
            const uint32_t at = e & (per - 1);
            const uint32_t to = cluster_rank() - rank + (e >> lg_per); /* as the launch counts */
            const uint32_t there = cluster_address(merge_bar, to);
            cluster_store4(cluster_address(gpu::shared_address(s_in + rank * per + at), to), a,
                           there);
            if (at == 0 || d4 == 0)
                cluster_store2(cluster_address(gpu::shared_address(s_in_ml + rank * R + r), to), m,
                               l, there);
        }
    }
    if (csize == 1)
        return;
    barrier_wait(merge_bar, 0);
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < per; i += blockDim.x) {
        const uint32_t e = rank * per + i, r = e / (D / 4), d4 = e % (D / 4);
        if (r >= rows.count)
            break;
        float m, l;
        const float4 a = merge_parts<8>(
            csize, [&](uint32_t c) { return s_in[c * per + i]; },
            [&](uint32_t c) { return s_in_ml[c * R + r]; }, &m, &l);
        const uint32_t row = rows.query_row(r, p.num_q_heads, head);
        store_out4<is_bf16>(it, (uint64_t)row * D + d4 * 4, a,
                            finish_row(it, p, row, m, l, d4 == 0));
    }
}

} // namespace decode
#endif
