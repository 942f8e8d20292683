/* decode_narrow.cuh: kernels for up to 16 query rows a kv head. A warp takes one 16-token tile at a
 * time, alone: one tensor-map copy brings its K and V into the warp's own stages, the warp waits on
 * its own barrier, computes and refills. No barrier of the thread block lies in the main loop.
 *
 *   decode_cluster   one run a thread block, computed from the block index; neighbours in a cluster
 *                    share a segment and merge through each other's shared memory
 *   decode_runs      a list of runs a thread block, shared by its warps or, of short items, a kv
 *                    head each; splits meet in device memory (the last to arrive merges). Or a list
 *                    of whole segments a warp, with nothing to merge
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

/* The barriers of a warp's ring, by the warp. */
GPU_DEVICE void init_ring(uint32_t bar, uint32_t stages)
{
    if (elect_one()) {
#pragma unroll 1
        for (uint32_t s = 0; s < stages; ++s)
            barrier_init(bar + s * 8, 1);
        barrier_init_fence();
    }
    gpu::sync_warp();
}

/* From the parameters or from memory. */
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

template <class words>
GPU_DEVICE decode_dev_run run_at(const decode_params &p, const words &w, uint32_t i)
{
    if (p.runs)
        return p.runs[i];
    decode_dev_run r;
    const uint4 *at = (const uint4 *)(w.w + p.runs_at);
#pragma unroll
    for (int k = 0; k < (int)(sizeof r / 16); ++k)
        ((uint4 *)&r)[k] = at[i * (sizeof r / 16) + k];
    return r;
}

/* ---- one run a thread block, merged by its cluster */

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

/* ---- lists of runs */

template <bool is_bf16, int D, int NT, bool is_warp, bool has_extras>
__global__ void __launch_bounds__(256, 1)
    decode_runs(GPU_PARAM(decode_params, p), GPU_PARAM(decode_words, w),
                GPU_PARAM(CUtensorMap, map))
{
    using rows_t = warp_rows<is_bf16, D, NT>;
    constexpr uint32_t R = 8 * NT, row_floats = D + 4;
    const uint32_t W = blockDim.x / 32, S = p.stages, warp = gpu::warp_id(), lane = gpu::lane_id();
    const uint32_t processor = is_warp ? blockIdx.x * W + warp : blockIdx.x;
    uint8_t *base = aligned_shared();
    float *slabs = (float *)(base + W * S * rows_t::tile_bytes); /* [2][W][R][row_floats] */
    float2 *s_ml = (float2 *)(slabs + (is_warp ? 0 : 2 * W * R * row_floats)); /* [2][W][R] */
    uint64_t *bars = (uint64_t *)(s_ml + (is_warp ? 0 : 2 * W * R));
    uint32_t *s_last = (uint32_t *)(bars + W * S);
    const uint32_t ring = gpu::shared_address(base) + warp * S * rows_t::tile_bytes;
    const uint32_t bar = gpu::shared_address(bars) + warp * S * 8;
    const uint32_t in_block = (1u << p.tiles_shift) - 1;

    if (threadIdx.x == 0)
        map_prefetch(&map);
    init_ring(bar, S);
    if (p.is_chained)
        gpu::chain_wait();
    if (is_warp && processor >= p.n_processors)
        return;

    /* DECODE_WARP: a warp's runs are whole segments, every n_processors-th. DECODE_LIST: a block's
     * come from the list; all warps share the run's kv head, or each has the next one. */
    auto fetch = [&](uint32_t i, decode_dev_item &it) {
        decode_dev_run r;
        if (is_warp) {
            r.item = i / p.num_kv_heads;
            r.head_unit = i - r.item * p.num_kv_heads;
            r.tile0 = 0;
            r.next = i + p.n_processors < p.n_segments ? i + p.n_processors : DECODE_NO_RUN;
            r.split_of = 1 << 16;
            r.slot = r.lg_team = 0;
        } else {
            r = run_at(p, w, i);
            r.head_unit += warp >> r.lg_team;
            r.slot += (warp >> r.lg_team) * (r.split_of >> 16);
        }
        it = item_at(p, w, r.item);
        if (is_warp)
            r.n_tiles = it.n_tiles;
        return r;
    };
    /* A team of 2^lg_team warps, all or one, takes the tiles of a run in turn, this warp from its
     * first on. */
    auto first_of = [&](uint32_t lg_team) { return warp & ((1u << lg_team) - 1); };
    auto tiles_of = [&](uint32_t n, uint32_t lg_team) {
        return (n + (1u << lg_team) - 1 - first_of(lg_team)) >> lg_team;
    };

    /* Loading side: it runs ahead of the computing side by the ring, across runs. `in` is the run
     * being loaded, `ahead` the one after it, whose block ids are fetched before they are
     * needed. */
    struct source {
        const uint32_t *table;
        uint64_t q;
        uint32_t q_bytes; /* of the first token's rows */
        uint32_t tile0, n_tiles, lg_team, kv_row, sink_tiles, skip_tiles, next;
    } in = {}, ahead;
    uint32_t in_i = 0, in_count, in_ids = 0, ahead_ids = 0;
    enum { NONE, KNOWN, READY } ahead_state;
    auto source_of = [&](const decode_dev_run &r, const decode_dev_item &it) {
        source s;
        s.table = (const uint32_t *)it.table;
        const unit_rows rows = rows_of(it, r.head_unit >> 16, R, p.group);
        s.q = it.q + rows.query_row(0, p.num_q_heads, r.head_unit & 0xffff) * (D * 2);
        s.q_bytes = min(rows.count, p.group) * (D * 2);
        s.tile0 = r.tile0;
        s.n_tiles = r.n_tiles;
        s.lg_team = is_warp ? 0 : r.lg_team;
        s.kv_row = (it.layer * 2 * p.num_kv_heads + (r.head_unit & 0xffff)) * p.block_tokens;
        s.sink_tiles = it.sink_tiles;
        s.skip_tiles = it.skip_tiles;
        s.next = r.next;
        return s;
    };
    auto look = [&](uint32_t i) {
        decode_dev_item it;
        const decode_dev_run r = fetch(i, it);
        return source_of(r, it);
    };
    auto load_ids = [&](const source &r, uint32_t i) {
        const uint32_t k = first_of(r.lg_team) + ((i + lane) << r.lg_team);
        if (k >= r.n_tiles)
            return 0u;
        return __ldg(r.table +
                     (visible_tile_at(r.tile0 + k, r.sink_tiles, r.skip_tiles) >> p.tiles_shift));
    };
    auto copy_next = [&](uint32_t s, uint32_t ids) {
        const uint32_t id = __shfl_sync(~0u, ids, in_i % 32);
        if (elect_one()) {
            const uint32_t tile =
                visible_tile_at(in.tile0 + first_of(in.lg_team) + (in_i << in.lg_team),
                                in.sink_tiles, in.skip_tiles);
            barrier_expect(bar + s * 8, rows_t::tile_bytes);
            map_copy(ring + s * rows_t::tile_bytes, &map, bar + s * 8,
                     in.kv_row + (tile & in_block) * DECODE_TILE, 0, id);
        }
        ++in_i;
    };
    auto fill = [&](uint32_t s) {
        if (in_i == in_count) {
            while (ahead_state != NONE) {
                in = ahead;
                in_i = 0;
                in_count = tiles_of(in.n_tiles, in.lg_team);
                in_ids = ahead_state == READY ? ahead_ids : load_ids(in, 0);
                if (lane * 128 < in.q_bytes) /* needed when the ring has been computed */
                    prefetch_line(in.q + lane * 128);
                ahead_state = in.next != DECODE_NO_RUN ? KNOWN : NONE;
                if (ahead_state == KNOWN)
                    ahead = look(in.next);
                if (in_count)
                    break;
            }
        } else if (ahead_state == KNOWN) {
            ahead_ids = load_ids(ahead, 0);
            ahead_state = READY;
        }
        if (in_i == in_count)
            return;
        if (in_i && in_i % 32 == 0)
            in_ids = load_ids(in, in_i);
        copy_next(s, in_ids);
    };

    /* Computing side. q of the next run is asked for before this one is merged. */
    decode_dev_item next_it;
    decode_dev_run next = fetch(processor, next_it);
    rows_t acc;
    auto load_q = [&] {
        acc.load_q(next_it.q, rows_of(next_it, next.head_unit >> 16, R, p.group), p.num_q_heads,
                   next.head_unit & 0xffff);
    };

    /* Block ids of the first tiles came with the parameters; the others are fetched meanwhile. q
     * before K and V: behind a whole ring it would come late, behind one tile of more than one it
     * does not. */
    in = source_of(next, next_it);
    in_count = tiles_of(in.n_tiles, in.lg_team);
    const uint32_t n_known = min(p.ids_stride >> in.lg_team, S), n_first = min(n_known, in_count);
    uint32_t known = 0;
    if (lane < n_known)
        known = w.w[p.ids_at + (is_warp ? next.item : processor) * p.ids_stride +
                    first_of(in.lg_team) + (lane << in.lg_team)];
    if (is_warp && n_first)
        copy_next(0, known);
    load_q();
#pragma unroll 1
    while (in_i < n_first)
        copy_next(in_i, known);
    if (in_count > n_known)
        in_ids = load_ids(in, 0);
    ahead_state = in.next != DECODE_NO_RUN ? KNOWN : NONE;
    if (ahead_state == KNOWN)
        ahead = look(in.next);
#pragma unroll 1
    for (uint32_t s = in_i; s < S; ++s)
        fill(s);

    uint32_t stage = 0, phase = 0, half = 0;
#pragma unroll 1
    for (bool more = true; more;) {
        const decode_dev_run run = next;
        const decode_dev_item it = next_it;
        const uint32_t head = run.head_unit & 0xffff, n_splits = run.split_of >> 16;
        const uint32_t lg_team = is_warp ? 0 : run.lg_team;
        const unit_rows rows = rows_of(it, run.head_unit >> 16, R, p.group);
        const unit_keys keys = keys_of(it, rows, p.layers);
        unit_extras<NT> extras;
        if (has_extras)
            extras = extras_of<NT>(it, rows, p.layers, head);
        acc.clear();
        const uint32_t count = tiles_of(run.n_tiles, lg_team);
#pragma unroll 1
        for (uint32_t i = 0; i < count; ++i) {
            barrier_wait(bar + stage * 8, phase);
            uint32_t tile = visible_tile_at(run.tile0 + first_of(lg_team) + (i << lg_team),
                                            it.sink_tiles, it.skip_tiles);
            acc.template tile<has_extras>(ring + stage * rows_t::tile_bytes, tile * DECODE_TILE,
                                          it.scale_log2, rows, keys, extras);
            gpu::sync_warp();
            fill(stage);
            if (++stage == S) {
                stage = 0;
                phase ^= 1;
            }
        }
        acc.sum_weights();
        more = run.next != DECODE_NO_RUN;
        if (more) {
            next = fetch(run.next, next_it);
            load_q();
        } else if (p.is_chained) {
            gpu::chain_release();
        }

        const bool is_alone = is_warp || (lg_team == 0 && n_splits == 1);
        if (is_alone) { /* straight from the registers, turned to rows */
            const uint32_t g = lane / 4, t = lane % 4;
#pragma unroll
            for (int x = 0; x < NT; ++x) {
                float f[2];
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    const uint32_t r = x * 8 + 2 * t + c;
                    f[c] = finish_row(it, p, rows.query_row(r, p.num_q_heads, head), acc.m[x][c],
                                      acc.l[x][c], g == 0 && r < rows.count);
                }
                const uint32_t row = rows.query_row(x * 8 + g, p.num_q_heads, head);
                uint32_t *out = (uint32_t *)it.out + row * (D / 2) + t;
#pragma unroll
                for (int j = 0; j < D / 16; ++j) {
                    const float(&o)[4] = acc.o[j][x];
                    uint32_t lo = transpose8(encode2<is_bf16>(o[0] * f[0], o[1] * f[1]));
                    uint32_t hi = transpose8(encode2<is_bf16>(o[2] * f[0], o[3] * f[1]));
                    if (x * 8 + g < rows.count) {
                        out[j * 8] = lo;
                        out[j * 8 + 4] = hi;
                    }
                }
            }
            continue;
        }

        /* The team brings its sums together. */
        const uint32_t n_team = 1u << lg_team, n_warps = min(run.n_tiles, n_team);
        const uint32_t thread = lg_team ? threadIdx.x : lane;
        auto sync_team = [&] {
            if (lg_team)
                __syncthreads();
            else
                gpu::sync_warp();
        };
        const uint32_t mine = half * W + warp, of_team = lg_team ? half * W : mine;
        const float *slab = slabs + of_team * R * row_floats;
        const float2 *ml = s_ml + of_team * R;
        const uint32_t slot = run.slot + (run.split_of & 0xffff);
        if (count)
            acc.to_shared(slabs + mine * R * row_floats, s_ml + mine * R, row_floats, rows.count);
        /* what all read is written again two such runs later, with a barrier between */
        if (lg_team)
            half ^= 1;
        sync_team();
#pragma unroll 1
        for (uint32_t e = thread; e < rows.count * (D / 4); e += 32 * n_team) {
            const uint32_t r = e / (D / 4), d4 = e % (D / 4);
            float m, l;
            const float4 a = merge_parts<8>(
                n_warps,
                [&](uint32_t k) {
                    return *(const float4 *)(slab + (k * R + r) * row_floats + d4 * 4);
                },
                [&](uint32_t k) { return ml[k * R + r]; }, &m, &l);
            if (n_splits > 1) {
                __stcg((float4 *)p.part_o + (uint64_t)slot * (R * D / 4) + e, a);
                if (d4 == 0)
                    __stcg((float2 *)p.part_ml + slot * R + r, make_float2(m, l));
                continue;
            }
            const uint32_t row = rows.query_row(r, p.num_q_heads, head);
            store_out4<is_bf16>(it, (uint64_t)row * D + d4 * 4, a,
                                finish_row(it, p, row, m, l, d4 == 0));
        }
        if (n_splits == 1)
            continue;

        /* the last split to arrive merges all, in split order */
        uint32_t *is_last = s_last + (lg_team ? W : warp);
        sync_team();
        if (thread == 0) {
            *is_last = arrive_at(p.arrivals + run.slot) + 1 == n_splits;
            if (*is_last)
                p.arrivals[run.slot] = 0;
        }
        sync_team();
        if (!*is_last)
            continue;
#pragma unroll 1
        for (uint32_t e = thread; e < rows.count * (D / 4); e += 32 * n_team) {
            const uint32_t r = e / (D / 4), d4 = e % (D / 4);
            const float2 *part_ml = (const float2 *)p.part_ml + run.slot * R + r;
            const float4 *part_o = (const float4 *)p.part_o + (uint64_t)run.slot * (R * D / 4) + e;
            float m, l;
            /* so many at a time that most segments have no more: a call's last merge ends it */
            const float4 a = merge_parts<24>(
                n_splits, [&](uint32_t c) { return __ldcg(part_o + (uint64_t)c * (R * D / 4)); },
                [&](uint32_t c) { return __ldcg(part_ml + c * R); }, &m, &l);
            const uint32_t row = rows.query_row(r, p.num_q_heads, head);
            store_out4<is_bf16>(it, (uint64_t)row * D + d4 * 4, a,
                                finish_row(it, p, row, m, l, d4 == 0));
        }
    }
}

} // namespace decode
#endif
