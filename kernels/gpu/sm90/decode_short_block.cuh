/* decode_short_block.cuh: a thread block of decode_short (decode_short.cuh): where it is in the
 * launch and in shared memory, and the names of its steps, which are in decode_short_score.cuh (1,
 * 2), decode_short_sum.cuh (3) and decode_short.cuh (4, 5).
 */
#ifndef ATTND_GPU_DECODE_SHORT_BLOCK_CUH
#define ATTND_GPU_DECODE_SHORT_BLOCK_CUH

#include "kernels/gpu/sm90/decode_narrow.cuh"

namespace decode
{

/* The larger of two rows' maxima. */
GPU_DEVICE float2 larger(float2 a, float2 b)
{
    return make_float2(fmaxf(a.x, b.x), fmaxf(a.y, b.y));
}

/* Over the lanes that hold the same rows. */
GPU_DEVICE float2 largest(float2 m)
{
#pragma unroll
    for (int d = 4; d < 32; d *= 2)
        m = larger(m, make_float2(gpu::shuffle_xor(m.x, d), gpu::shuffle_xor(m.y, d)));
    return m;
}

GPU_DEVICE float2 added(float2 l)
{
#pragma unroll
    for (int d = 4; d < 32; d *= 2) {
        l.x += gpu::shuffle_xor(l.x, d);
        l.y += gpu::shuffle_xor(l.y, d);
    }
    return l;
}

/* A direct call's newest row of K and V, which the warp that has its tile brings from the host:
 * chunks of 16 bytes, of K and then of V, one after the other to the lanes. */
template <int D> struct new_row {
    static constexpr uint32_t chunks = D / 8; /* of K, of V */
    uint4 x[2 * chunks / 32];

    GPU_DEVICE void ask(const decode_source &src, uint32_t head)
    {
#pragma unroll
        for (uint32_t u = 0; u < 2 * chunks / 32; ++u) {
            const uint32_t e = gpu::lane_id() + u * 32;
            const uint4 *row = (const uint4 *)(e < chunks ? src.k : src.v);
            x[u] = row[head * chunks + e % chunks];
        }
    }

    /* Into row r of a tile of K or V. */
    GPU_DEVICE void put(uint32_t tile, bool is_v, uint32_t r) const
    {
#pragma unroll
        for (uint32_t u = 0; u < 2 * chunks / 32; ++u) {
            const uint32_t e = gpu::lane_id() + u * 32, c = e % chunks;
            if ((e >= chunks) == is_v)
                shared_store16(tile + c / 8 * 2048 + r * 128 + (c % 8 ^ r % 8) * 16, x[u]);
        }
    }

    /* Into the cache; k, v: the head's row. */
    GPU_DEVICE void append(char *k, char *v) const
    {
#pragma unroll
        for (uint32_t u = 0; u < 2 * chunks / 32; ++u) {
            const uint32_t e = gpu::lane_id() + u * 32;
            ((uint4 *)(e < chunks ? k : v))[e % chunks] = x[u];
        }
    }
};

/* What rows with maxima m count where the maxima are `top`. */
GPU_DEVICE float2 weight(float2 m, float2 top)
{
    return make_float2(gpu::exp2_fast(m.x - top.x), gpu::exp2_fast(m.y - top.y));
}

/* A thread block: where it is in the launch and in shared memory, and its steps. */
template <bool is_bf16, int D, int NT, bool is_direct, class Words> struct short_block {
    static constexpr uint32_t R = 8 * NT, W = 8, slots = 2 * W, steps = D / 16, own = steps / W;
    static constexpr uint32_t lg_steps = D == 256 ? 4 : 3;
    static_assert(steps == 1 << lg_steps, "head_dim 128 or 256");
    static constexpr uint32_t part_bytes = 32 * D; /* K or V of a tile */
    struct shared { /* a float2: of rows 2t and 2t + 1 */
        uint8_t q[R * D * 2];
        uint2 weights[slots][NT][32];
        float4 warp_top[R][W / 4], warp_sum[R][W / 4]; /* of four warps each */
        float4 in_ml[DECODE_MAX_CLUSTER][NT][4]; /* maxima and sums of weights of both rows */
        uint64_t k_full[slots], v_full[W], v_late, met, merged; /* late: all V from tile 8 on */
        float4 in[steps * NT * 32]; /* [rank][slice][x][lane]; not there in a cluster of one */
    };

    const decode_params &p;
    const Words &w;
    const CUtensorMap &map;
    const uint32_t warp, lane, g, t, head, T, lg, csize, rank;
    uint8_t *const base;
    const uint32_t tiles;
    const bool is_tight;
    shared &s;
    const uint32_t k_full, v_full, v_late, met, merged;
    const uint32_t late_at; /* where V of tile W lies */
    const decode_dev_item it;
    const uint32_t first, n; /* tiles of this block */
    const uint32_t row0, rows, q_head;
    /* Our tiles are numbered from the last on, so that the one with a hidden end, and a direct
     * call's newest row, is tile 0, whose V is not late */
    const bool has_newest;
    const uint32_t lg_slices; /* slices a rank finishes */
    uint32_t window, sinks, begin, end;
    new_row<D> fresh;

    GPU_DEVICE short_block(const decode_params &p_, const Words &w_, const CUtensorMap &map_)
        : p(p_), w(w_), map(map_), warp(__shfl_sync(~0u, threadIdx.x / 32, 0)),
          lane(gpu::lane_id()), g(lane / 4), t(lane % 4), head(blockIdx.y), T(p.stages),
          lg(p.lg_cluster), csize(1u << lg), rank(blockIdx.x & (csize - 1)), base(aligned_shared()),
          tiles(gpu::shared_address(base)), is_tight(D == 256 || p.is_tight),
          s(*(shared *)(base + (is_tight ? T + min(T, W) : 2 * T) * part_bytes)),
          k_full(gpu::shared_address(s.k_full)), v_full(gpu::shared_address(s.v_full)),
          v_late(gpu::shared_address(&s.v_late)), met(gpu::shared_address(&s.met)),
          merged(gpu::shared_address(&s.merged)), late_at(is_tight ? 0 : T + W),
          it(*(const decode_dev_item *)(w.w + blockIdx.z * (sizeof it / 4))),
          first(decode_cluster_begin(it.n_tiles, rank, lg)),
          n(decode_cluster_begin(it.n_tiles, rank + 1, lg) - first), row0((blockIdx.x >> lg) * R),
          rows(min(p.group - row0, R)), q_head(head * p.group + row0),
          has_newest(is_direct && n > 0 && first + n == it.n_tiles), lg_slices(lg_steps - lg)
    {
    }

    GPU_DEVICE uint32_t k_at(uint32_t i) const
    {
        return tiles + i * part_bytes;
    }

    GPU_DEVICE uint32_t v_at(uint32_t i) const
    {
        return tiles + (i < W ? T + i : late_at + i - W) * part_bytes;
    }

    GPU_DEVICE uint32_t block_of(uint32_t tile) const
    {
        return w.w[p.ids_at + blockIdx.z * p.ids_stride + (tile >> p.tiles_shift)];
    }

    GPU_DEVICE uint32_t tile_of(uint32_t i) const
    {
        return visible_tile_at(first + n - 1 - i, it.sink_tiles, it.skip_tiles);
    }

    /* Asks for K (part 0) or V (1) of tile i. */
    GPU_DEVICE void ask(uint32_t i, uint32_t part, uint32_t at, uint32_t bar) const
    {
        const uint32_t tile = tile_of(i);
        barrier_expect(bar, part_bytes);
        map_copy(at, &map, bar,
                 (it.layer * 2 * p.num_kv_heads + head) * p.block_tokens +
                     (tile & ((1u << p.tiles_shift) - 1)) * DECODE_TILE,
                 part, block_of(tile));
    }

    GPU_DEVICE bool sees(uint32_t key) const
    {
        return key < end && (key >= begin || key < sinks);
    }

    GPU_DEVICE bool is_partly_hidden(uint32_t key) const
    {
        return key + DECODE_TILE > end || (key < begin && key + DECODE_TILE > sinks);
    }

    /* Steps 1 and 2 */
    GPU_DEVICE void clear_hidden(uint32_t i) const;
    GPU_DEVICE void ask_for_all();
    GPU_DEVICE void score(float (&c)[2][NT][4]);
    GPU_DEVICE void weigh(const float (&c)[2][NT][4]);

    /* What step 3 gives step 4, of this warp's slices of head_dim and of rows 2t and 2t + 1: */
    struct sums {
        float o[own][NT][4];
        float2 top[NT], sum[NT]; /* the block's maxima and sums of weights */
        uint32_t peers; /* the segment's first block in its cluster */
    };

    /* Four tiles are loaded while four are multiplied, always the same four warps'. */
    static constexpr int depth = 4;
    struct values {
        uint32_t v[depth][own][4];
        uint2 w[depth][NT];
    };
    struct lane_addresses { /* of the first tile; made once, not in the loop */
        uint32_t v[own], w;
    };

    GPU_DEVICE lane_addresses wait_for_values();
    GPU_DEVICE void load(values &to, const lane_addresses &a, uint32_t i0, uint32_t stop) const;
    GPU_DEVICE void top_of_warps(uint32_t (&factor)[NT][W], sums &of) const;
    GPU_DEVICE void signal_peers(const sums &of);
    GPU_DEVICE void multiply(float (&o)[own][NT][4], float (&odd)[own][NT][4], const values &by,
                             const uint32_t (&factor)[NT][W], uint32_t warp0, uint32_t i0,
                             uint32_t stop) const;
    GPU_DEVICE void sum(sums &of);

    /* Step 4 */
    GPU_DEVICE float2 factors(uint32_t x, float2 m, float2 l, bool is_first) const;
    GPU_DEVICE void store(uint32_t x, uint32_t slice, float4 a, float2 f) const;
    GPU_DEVICE void finish_alone(const sums &of) const;
    GPU_DEVICE void send(sums &of) const;
    GPU_DEVICE void finish(const sums &of) const;
};

} // namespace decode
#endif
