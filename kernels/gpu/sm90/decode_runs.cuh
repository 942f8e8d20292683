/* decode_runs.cuh: decode_runs, the kernel of decode_narrow.cuh for lists of runs. A run is a range
 * of one segment's tiles. A thread block has a list of them, shared by its warps or, of short
 * items, a kv head each; the splits of a segment meet in device memory, where the last to arrive
 * merges. Or a warp has a list of whole segments, with nothing to merge.
 *
 * In each warp a loading side runs ahead of the computing side by the ring, across runs.
 */
#ifndef ATTND_GPU_DECODE_RUNS_CUH
#define ATTND_GPU_DECODE_RUNS_CUH

#include "kernels/gpu/sm90/decode_narrow.cuh"

namespace decode
{

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

/* A run, from the parameters or from memory. */
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

/* Where a warp is in the launch, and which runs it has. */
template <bool is_warp> struct runs_place {
    const decode_params &p;
    const decode_words &w;
    uint32_t warp;

    /* DECODE_WARP: a warp's runs are whole segments, every n_processors-th. DECODE_LIST: a block's
     * come from the list; all warps share the run's kv head, or each has the next one. */
    GPU_DEVICE decode_dev_run fetch(uint32_t i, decode_dev_item &it) const
    {
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
    }

    /* A team of 2^lg_team warps, all or one, takes the tiles of a run in turn, this warp from its
     * first on. */
    GPU_DEVICE uint32_t first_of(uint32_t lg_team) const
    {
        return warp & ((1u << lg_team) - 1);
    }

    GPU_DEVICE uint32_t tiles_of(uint32_t n, uint32_t lg_team) const
    {
        return (n + (1u << lg_team) - 1 - first_of(lg_team)) >> lg_team;
    }
};

/* What loading a run takes. */
struct run_source {
    const uint32_t *table;
    uint64_t q;
    uint32_t q_bytes; /* of the first token's rows */
    uint32_t tile0, n_tiles, lg_team, kv_row, sink_tiles, skip_tiles, next;
};

/* The run after the one being loaded: there is none, it is known, its first block ids are there. */
enum run_ahead { NONE, KNOWN, READY };

/* The loading side of a warp. `in` is the run being loaded, `ahead` the one after it, whose block
 * ids are fetched before they are needed. What changes are variables of the kernel: as members they
 * cost a dozen instructions more. */
template <int D, int NT, bool is_warp> struct runs_loader {
    static constexpr uint32_t tile_bytes = 64 * D, R = 8 * NT;
    const runs_place<is_warp> &at;
    const CUtensorMap &map;
    uint32_t ring, bar, in_block, lane;
    run_source &in, &ahead;
    uint32_t &in_i, &in_count; /* tiles asked for, of how many */
    uint32_t &in_ids, &ahead_ids; /* block ids of the lane's tile, of the next 32 */
    run_ahead &ahead_state;

    GPU_DEVICE run_source source_of(const decode_dev_run &r, const decode_dev_item &it) const
    {
        const decode_params &p = at.p;
        run_source s;
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
    }

    GPU_DEVICE run_source look(uint32_t i) const
    {
        decode_dev_item it;
        const decode_dev_run r = at.fetch(i, it);
        return source_of(r, it);
    }

    /* Block ids, one a lane, of the warp's tiles of a run from i on. */
    GPU_DEVICE uint32_t load_ids(const run_source &r, uint32_t i) const
    {
        const uint32_t k = at.first_of(r.lg_team) + ((i + lane) << r.lg_team);
        if (k >= r.n_tiles)
            return 0u;
        return __ldg(r.table + (visible_tile_at(r.tile0 + k, r.sink_tiles, r.skip_tiles) >>
                                at.p.tiles_shift));
    }

    GPU_DEVICE void copy_next(uint32_t s, uint32_t ids)
    {
        const uint32_t id = __shfl_sync(~0u, ids, in_i % 32);
        if (elect_one()) {
            const uint32_t tile =
                visible_tile_at(in.tile0 + at.first_of(in.lg_team) + (in_i << in.lg_team),
                                in.sink_tiles, in.skip_tiles);
            barrier_expect(bar + s * 8, tile_bytes);
            map_copy(ring + s * tile_bytes, &map, bar + s * 8,
                     in.kv_row + (tile & in_block) * DECODE_TILE, 0, id);
        }
        ++in_i;
    }

    GPU_DEVICE void look_ahead()
    {
        ahead_state = in.next != DECODE_NO_RUN ? KNOWN : NONE;
        if (ahead_state == KNOWN)
            ahead = look(in.next);
    }

    /* Asks for the next tile, if there is one, into stage s. */
    GPU_DEVICE void fill(uint32_t s)
    {
        if (in_i == in_count) {
            while (ahead_state != NONE) {
                in = ahead;
                in_i = 0;
                in_count = at.tiles_of(in.n_tiles, in.lg_team);
                in_ids = ahead_state == READY ? ahead_ids : load_ids(in, 0);
                if (lane * 128 < in.q_bytes) /* needed when the ring has been computed */
                    prefetch_line(in.q + lane * 128);
                look_ahead();
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
    }
};

/* A run whose sums are brought together by its team of warps. */
template <bool is_bf16, int D, int NT> struct team_run {
    static constexpr uint32_t R = 8 * NT, row_floats = D + 4;
    const decode_params &p;
    const decode_dev_run &run;
    const decode_dev_item &it;
    const unit_rows &rows;
    uint32_t head, n_splits, lg_team;
    uint32_t n_team, n_warps; /* its warps, and those that had tiles */
    uint32_t thread; /* of the team */

    GPU_DEVICE void sync() const
    {
        if (lg_team)
            __syncthreads();
        else
            gpu::sync_warp();
    }

    GPU_DEVICE void store(uint32_t r, uint32_t d4, float4 a, float m, float l) const
    {
        const uint32_t row = rows.query_row(r, p.num_q_heads, head);
        store_out4<is_bf16>(it, (uint64_t)row * D + d4 * 4, a,
                            finish_row(it, p, row, m, l, d4 == 0));
    }

    /* Adds the sums of the warps that had tiles: to the outputs, or to a split's slot in
     * scratch. */
    GPU_DEVICE void merge_warps(const float *slab, const float2 *ml, uint32_t slot) const
    {
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
            store(r, d4, a, m, l);
        }
    }

    /* The last split to arrive merges all, in split order. */
    GPU_DEVICE void merge_splits(uint32_t *is_last) const
    {
        sync();
        if (thread == 0) {
            *is_last = arrive_at(p.arrivals + run.slot) + 1 == n_splits;
            if (*is_last)
                p.arrivals[run.slot] = 0;
        }
        sync();
        if (!*is_last)
            return;
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
            store(r, d4, a, m, l);
        }
    }
};

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

    /* Computing side. q of the next run is asked for before this one is merged. */
    const runs_place<is_warp> at = {p, w, warp};
    run_source in = {}, ahead;
    uint32_t in_i = 0, in_count, in_ids = 0, ahead_ids = 0;
    run_ahead ahead_state;
    runs_loader<D, NT, is_warp> load = {at,    map,  ring,     bar,    in_block,  lane,       in,
                                        ahead, in_i, in_count, in_ids, ahead_ids, ahead_state};
    decode_dev_item next_it;
    decode_dev_run next = at.fetch(processor, next_it);
    rows_t acc;
    auto load_q = [&] {
        acc.load_q(next_it.q, rows_of(next_it, next.head_unit >> 16, R, p.group), p.num_q_heads,
                   next.head_unit & 0xffff);
    };

    /* Block ids of the first tiles came with the parameters; the others are fetched meanwhile. q
     * before K and V: behind a whole ring it would come late, behind one tile of more than one it
     * does not. */
    in = load.source_of(next, next_it);
    in_count = at.tiles_of(in.n_tiles, in.lg_team);
    const uint32_t n_known = min(p.ids_stride >> in.lg_team, S), n_first = min(n_known, in_count);
    uint32_t known = 0;
    if (lane < n_known)
        known = w.w[p.ids_at + (is_warp ? next.item : processor) * p.ids_stride +
                    at.first_of(in.lg_team) + (lane << in.lg_team)];
    if (is_warp && n_first)
        load.copy_next(0, known);
    load_q();
#pragma unroll 1
    while (in_i < n_first)
        load.copy_next(in_i, known);
    if (in_count > n_known)
        in_ids = load.load_ids(in, 0);
    load.look_ahead();
#pragma unroll 1
    for (uint32_t s = in_i; s < S; ++s)
        load.fill(s);

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
        const uint32_t count = at.tiles_of(run.n_tiles, lg_team);
#pragma unroll 1
        for (uint32_t i = 0; i < count; ++i) {
            barrier_wait(bar + stage * 8, phase);
            uint32_t tile = visible_tile_at(run.tile0 + at.first_of(lg_team) + (i << lg_team),
                                            it.sink_tiles, it.skip_tiles);
            acc.template tile<has_extras>(ring + stage * rows_t::tile_bytes, tile * DECODE_TILE,
                                          it.scale_log2, rows, keys, extras);
            gpu::sync_warp();
            load.fill(stage);
            if (++stage == S) {
                stage = 0;
                phase ^= 1;
            }
        }
        acc.sum_weights();
        more = run.next != DECODE_NO_RUN;
        if (more) {
            next = at.fetch(run.next, next_it);
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
        const team_run<is_bf16, D, NT> team = {p,        run,     it,     rows,    head,
                                               n_splits, lg_team, n_team, n_warps, thread};
        const uint32_t mine = half * W + warp, of_team = lg_team ? half * W : mine;
        const float *slab = slabs + of_team * R * row_floats;
        const float2 *ml = s_ml + of_team * R;
        const uint32_t slot = run.slot + (run.split_of & 0xffff);
        if (count)
            acc.to_shared(slabs + mine * R * row_floats, s_ml + mine * R, row_floats, rows.count);
        /* what all read is written again two such runs later, with a barrier between */
        if (lg_team)
            half ^= 1;
        team.sync();
        team.merge_warps(slab, ml, slot);
        if (n_splits == 1)
            continue;
        team.merge_splits(s_last + (lg_team ? W : warp));
    }
}

} // namespace decode
#endif
