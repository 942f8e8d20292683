/* decode_short.cuh: the kernel for short calls: one query token an item, so few tiles that the
 * thread blocks of a segment have them all at work once. What such a call takes is latency:
 *
 *   1. ask: each warp asks for its tiles (warp, warp + 8): for K of both before V, so that scores
 *      are made while V is on its way. In a direct call q, and the newest row of K and V, come from
 *      the host; the warp that has the row's tile puts it there and into the cache
 *   2. score, weigh: each warp makes its tiles' scores, q in registers, and weights against the
 *      maxima of both, rounded up to integers. It leaves the weights, as operands, the maxima and
 *      the sums of weights in shared memory
 *   3. sum: one barrier; then each warp sums its own eighth of head_dim over all tiles, with a
 *      warp's weights times 2^(maximum of that warp - maximum of all), which is exact. Nothing is
 *      left to merge in the block
 *   4. send, finish: meanwhile the blocks of a segment have sent each other their maxima and sums
 *      of weights; each scales its sums and sends every slice of them, in the order registers have,
 *      to the rank that finishes it by adding
 *   5. leave: the last block of all tells the host, if it wants to know: another kernel would take
 *      its launch's time
 *
 * V of a warp's second tile is late: the last sums of 3 wait for it. Where sixteen tiles are more
 * than shared memory holds (head_dim 256, or two thread blocks a processor) it takes the place of
 * the first K.
 */
#ifndef ATTND_GPU_DECODE_SHORT_CUH
#define ATTND_GPU_DECODE_SHORT_CUH

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

/* By every thread of every block, as its last: the last block to come tells the host. */
GPU_DEVICE void leave(const decode_params &p)
{
    if (p.finish.out_done == nullptr)
        return;
    __syncthreads();
    if (threadIdx.x != 0)
        return;
    __threadfence_system();
    if (atomicAdd(p.arrivals, 1) + 1 < gridDim.x * gridDim.y * gridDim.z)
        return;
    *p.arrivals = 0;
    gpu::tell_host(p.finish);
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

    /* Weights of hidden keys are 0, but 0 times NaN is NaN */
    GPU_DEVICE void clear_hidden(uint32_t i) const
    {
#pragma unroll 1
        for (uint32_t r = lane / 8; r < DECODE_TILE; r += 4)
            if (!sees(tile_of(i) * DECODE_TILE + r))
#pragma unroll
                for (uint32_t slab = 0; slab < D / 64; ++slab)
                    shared_store16(v_at(i) + slab * 2048 + r * 128 + lane % 8 * 16,
                                   make_uint4(0, 0, 0, 0));
    }

    /* Step 1: q before K and V: behind them it would wait. */
    GPU_DEVICE void ask_for_all()
    {
        if (p.is_chained)
            gpu::chain_wait();
        decode_source src = {it.q, 0, 0};
        if (is_direct)
            src = *(const decode_source *)(w.w + p.sources_at + blockIdx.z * (sizeof src / 4));
        if (p.finish.out_start_ns && is_direct &&
            (blockIdx.x | blockIdx.y | blockIdx.z | threadIdx.x) == 0)
            *p.finish.out_start_ns = gpu::time_ns();
#pragma unroll
        for (uint32_t i = threadIdx.x; i < R * D / 8; i += 32 * W) {
            const uint32_t r = i / (D / 8), c = i % (D / 8);
            gpu::copy16_async(gpu::shared_address(s.q) + r * D * 2 + (c ^ r % 8) * 16,
                              (const char *)src.q + (q_head + min(r, rows - 1)) * (D * 2) + c * 16,
                              r < rows);
        }
        if (elect_one()) {
#pragma unroll
            for (uint32_t i = warp; i < slots; i += W)
                if (i < n) {
                    barrier_init(k_full + i * 8, 1);
                    barrier_init_fence();
                    ask(i, 0, k_at(i), k_full + i * 8);
                }
            if (warp < n) {
                barrier_init(v_full + warp * 8, 1);
                barrier_init_fence();
                ask(warp, 1, v_at(warp), v_full + warp * 8);
            }
        }
        if (has_newest && warp == 0)
            fresh.ask(src, head);
        if (n > W && threadIdx.x == 0) {
            barrier_init(v_late, n - W);
            barrier_init_fence();
        }
        if (threadIdx.x == 32 * W - 1 && csize > 1) {
            barrier_init(met, 1);
            barrier_init(merged, 1);
            barrier_init_fence();
            barrier_expect(met, csize * R * 8);
            barrier_expect(merged, steps * NT * 512);
        }
        gpu::sync_warp();
        if (csize > 1)
            cluster_arrive();
        window = sinks = 0;
        if (it.flags & DECODE_HAS_WINDOW) {
            window = p.layers[it.layer].window_tokens;
            sinks = p.layers[it.layer].sink_tokens;
        }
        end = it.pos + 1;
        begin = window != 0 && end > window ? end - window : 0;
        copies_wait();
        __syncthreads();
        if (!is_tight && warp + W < n && elect_one())
            ask(warp + W, 1, v_at(warp + W), v_late);
        gpu::sync_warp();
    }

    /* Step 2: scores of this warp's last two tiles: tokens g and g + 8 of rows 2t and 2t + 1. */
    GPU_DEVICE void score(float (&c)[2][NT][4])
    {
        uint32_t q[steps / 2][NT][4];
#pragma unroll
        for (int j = 0; j < (int)steps; j += 2)
#pragma unroll
            for (int x = 0; x < NT; ++x)
                gpu::load_matrix4(q[j / 2][x], gpu::shared_address(s.q) +
                                                   (x * 8 + lane % 8) * D * 2 + j / 4 * 128 +
                                                   ((j % 4 * 2 + lane / 8) ^ lane % 8) * 16);
#pragma unroll
        for (int x = 0; x < NT; ++x)
#pragma unroll
            for (int k = 0; k < 4; ++k)
                c[1][x][k] = -INFINITY;
#pragma unroll 1
        for (uint32_t i = warp; i < n; i += W) {
            const uint32_t k_row = k_at(i) + lane % 16 * 128;
            float a[4][NT][4] = {};
            barrier_wait(k_full + i * 8, 0);
            if (has_newest && i == 0) {
                fresh.put(k_at(i), false, it.pos % DECODE_TILE);
                if (is_tight)
                    proxy_fence(); /* late V comes here */
                if (row0 == 0) {
                    const uint64_t heads = p.num_kv_heads, row_bytes = 2 * D,
                                   tokens = p.block_tokens;
                    char *k =
                        p.kv_base + block_of(it.pos / DECODE_TILE) * p.block_bytes +
                        ((it.layer * 2 * heads + head) * tokens + it.pos % tokens) * row_bytes;
                    fresh.append(k, k + heads * tokens * row_bytes);
                }
                gpu::sync_warp();
            }
#pragma unroll
            for (int j = 0; j < (int)steps; ++j) {
                uint32_t k[4];
                gpu::load_matrix4(k,
                                  k_row + j / 4 * 2048 + ((j % 4 * 2 + lane / 16) ^ lane % 8) * 16);
#pragma unroll
                for (int x = 0; x < NT; ++x)
                    gpu::mma_16816<is_bf16>(a[j % 4][x], k, q[j / 2][x][j % 2 * 2],
                                            q[j / 2][x][j % 2 * 2 + 1]);
            }
            if (is_tight && i + W < n) {
                gpu::sync_warp();
                if (elect_one())
                    ask(i + W, 1, v_at(i + W), v_late);
            }
            const uint32_t key = tile_of(i) * DECODE_TILE;
            bool is_hidden[2] = {false, false};
            if (is_partly_hidden(key)) {
                is_hidden[0] = !sees(key + g);
                is_hidden[1] = !sees(key + g + 8);
                barrier_wait(i < W ? v_full + i * 8 : v_late, 0);
                clear_hidden(i);
            }
#pragma unroll
            for (int x = 0; x < NT; ++x)
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    c[0][x][k] = c[1][x][k];
                    c[1][x][k] =
                        is_hidden[k / 2]
                            ? -INFINITY
                            : (a[0][x][k] + a[1][x][k] + (a[2][x][k] + a[3][x][k])) * it.scale_log2;
                }
        }
    }

    /* Leaves weights, maxima and sums of weights in shared memory. */
    GPU_DEVICE void weigh(const float (&c)[2][NT][4])
    {
        const bool has_two = warp + W < n;
#pragma unroll
        for (int x = 0; x < NT; ++x) {
            float2 m = make_float2(nothing, nothing), l = make_float2(0, 0);
#pragma unroll
            for (int u = 0; u < 2; ++u)
                if (u || has_two)
                    m = larger(m, make_float2(fmaxf(c[u][x][0], c[u][x][2]),
                                              fmaxf(c[u][x][1], c[u][x][3])));
            m = largest(m);
            m = make_float2(ceilf(m.x), ceilf(m.y)); /* differences are powers of two */
#pragma unroll
            for (int u = 0; u < 2; ++u) {
                if (!u && !has_two)
                    continue;
                const float2 lo = weight(make_float2(c[u][x][0], c[u][x][1]), m);
                const float2 hi = weight(make_float2(c[u][x][2], c[u][x][3]), m);
                s.weights[warp + (u && has_two ? W : 0)][x][lane] =
                    make_uint2(transpose8(encode2<is_bf16>(lo.x, lo.y)),
                               transpose8(encode2<is_bf16>(hi.x, hi.y)));
                l.x += lo.x + hi.x;
                l.y += lo.y + hi.y;
            }
            l = added(l);
            if (g == 0) {
                float *to = (float *)s.warp_top[x * 8 + 2 * t] + warp;
                to[0] = m.x;
                to[W] = m.y;
                to = (float *)s.warp_sum[x * 8 + 2 * t] + warp;
                to[0] = l.x;
                to[W] = l.y;
            }
        }
    }

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

    GPU_DEVICE lane_addresses wait_for_values()
    {
        if (warp < n) {
            barrier_wait(v_full + warp * 8, 0);
            if (has_newest && warp == 0)
                fresh.put(v_at(0), true, it.pos % DECODE_TILE);
        }
        lane_addresses a;
#pragma unroll
        for (int j = 0; j < (int)own; ++j) {
            const uint32_t slice = warp * own + j, row = lane % 8 + lane / 16 * 8;
            a.v[j] = keep(v_at(0) + slice / 4 * 2048 + row * 128 +
                          ((slice % 4 * 2 + lane / 8 % 2) ^ row % 8) * 16);
        }
        a.w = keep(gpu::shared_address(s.weights[0][0]) + lane * 8);
        if (p.is_chained)
            gpu::chain_release();
        __syncthreads();
        return a;
    }

    /* Tiles i0 to i0 + depth, as far as they are before stop. */
    GPU_DEVICE void load(values &to, const lane_addresses &a, uint32_t i0, uint32_t stop) const
    {
        const uint32_t at = v_at(i0) - v_at(0); /* eight tiles lie one behind the other */
#pragma unroll
        for (int k = 0; k < depth; ++k) {
            if (i0 + k >= stop)
                break;
#pragma unroll
            for (int j = 0; j < (int)own; ++j)
                gpu::load_matrix4_transposed(to.v[k][j], a.v[j] + at + k * part_bytes);
#pragma unroll
            for (int x = 0; x < NT; ++x)
                to.w[k][x] = shared_load8(a.w + ((i0 + k) * NT + x) * 256);
        }
    }

    /* The block's maxima and sums of weights, and in factor what a warp's weights count, of this
     * lane's row, twice a word. */
    GPU_DEVICE void top_of_warps(uint32_t (&factor)[NT][W], sums &of) const
    {
#pragma unroll
        for (int x = 0; x < NT; ++x) {
            const float4 *m4 = s.warp_top[x * 8 + g], *l4 = s.warp_sum[x * 8 + g];
            const float m[W] = {m4[0].x, m4[0].y, m4[0].z, m4[0].w,
                                m4[1].x, m4[1].y, m4[1].z, m4[1].w};
            const float l[W] = {l4[0].x, l4[0].y, l4[0].z, l4[0].w,
                                l4[1].x, l4[1].y, l4[1].z, l4[1].w};
            float all = m[0], weights = 0.0f;
#pragma unroll
            for (int k = 1; k < (int)W; ++k)
                all = fmaxf(all, m[k]);
#pragma unroll
            for (int k = 0; k < (int)W; ++k) {
                const float f = gpu::exp2_fast(m[k] - all);
                weights += l[k] * f;
                factor[x][k] = encode2<is_bf16>(f, f);
            }
            of.top[x] = make_float2(__shfl_sync(~0u, all, 8 * t), __shfl_sync(~0u, all, 8 * t + 4));
            of.sum[x] =
                make_float2(__shfl_sync(~0u, weights, 8 * t), __shfl_sync(~0u, weights, 8 * t + 4));
        }
    }

    /* Every block of the segment learns ours. */
    GPU_DEVICE void tell_peers(const sums &of)
    {
        cluster_wait(); /* long since complete: every block of the cluster has its barriers ready */
        if (warp < csize && g == 0)
#pragma unroll
            for (int x = 0; x < NT; ++x)
                cluster_store4(
                    cluster_address(gpu::shared_address(&s.in_ml[rank][x][t]), of.peers + warp),
                    make_float4(of.top[x].x, of.top[x].y, of.sum[x].x, of.sum[x].y),
                    cluster_address(met, of.peers + warp));
    }

    /* Sums of even and of odd tiles, as chains half as long. */
    GPU_DEVICE void multiply(float (&o)[own][NT][4], float (&odd)[own][NT][4], const values &by,
                             const uint32_t (&factor)[NT][W], uint32_t warp0, uint32_t i0,
                             uint32_t stop) const
    {
#pragma unroll
        for (int k = 0; k < depth; ++k) {
            if (i0 + k >= stop)
                break;
#pragma unroll
            for (int x = 0; x < NT; ++x) {
                const uint32_t f = warp0 ? factor[x][depth + k] : factor[x][k];
                const uint32_t lo = multiply2<is_bf16>(by.w[k][x].x, f);
                const uint32_t hi = multiply2<is_bf16>(by.w[k][x].y, f);
#pragma unroll
                for (int j = 0; j < (int)own; ++j)
                    gpu::mma_16816<is_bf16>(k % 2 ? odd[j][x] : o[j][x], by.v[k][j], lo, hi);
            }
        }
    }

    /* Step 3. */
    GPU_DEVICE void sum(sums &of)
    {
        const lane_addresses a = wait_for_values();
        const uint32_t n_fours = n & ~(depth - 1u);
        values near, far;
        load(near, a, 0, n);
        uint32_t factor[NT][W];
        top_of_warps(factor, of);
        of.peers = csize > 1 ? cluster_rank() - rank : 0;
        if (csize > 1)
            tell_peers(of);
        float odd[own][NT][4] = {};
#pragma unroll
        for (int j = 0; j < (int)own; ++j)
#pragma unroll
            for (int x = 0; x < NT; ++x)
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    of.o[j][x][e] = 0.0f;
#pragma unroll 1
        for (uint32_t i = 0; i < n_fours; i += W) {
            if (i + depth < n_fours)
                load(far, a, i + depth, i + W);
            multiply(of.o, odd, near, factor, 0, 0, depth);
            if (i + W < n_fours) {
                barrier_wait(v_late, 0);
                load(near, a, i + W, i + W + depth);
            }
            if (i + depth < n_fours)
                multiply(of.o, odd, far, factor, depth, 0, depth);
        }
        if (n_fours < n) {
            if (n > W)
                barrier_wait(v_late, 0);
            if (n_fours)
                load(near, a, n_fours, n);
            multiply(of.o, odd, near, factor, n_fours % W, n_fours, n);
        }
#pragma unroll
        for (int j = 0; j < (int)own; ++j)
#pragma unroll
            for (int x = 0; x < NT; ++x)
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    of.o[j][x][e] += odd[j][x][e];
    }

    /* What rows with maxima m and sums of weights l are multiplied by at the end. */
    GPU_DEVICE float2 factors(uint32_t x, float2 m, float2 l, bool is_first) const
    {
        const uint32_t r = x * 8 + 2 * t;
        return make_float2(
            finish_row(it, p, q_head + min(r, rows - 1), m.x, l.x, is_first && g == 0 && r < rows),
            finish_row(it, p, q_head + min(r + 1, rows - 1), m.y, l.y,
                       is_first && g == 0 && r + 1 < rows));
    }

    GPU_DEVICE void store(uint32_t x, uint32_t slice, float4 a, float2 f) const
    {
        const uint32_t lo = transpose8(encode2<is_bf16>(a.x * f.x, a.y * f.y));
        const uint32_t hi = transpose8(encode2<is_bf16>(a.z * f.x, a.w * f.y));
        if (x * 8 + g < rows) {
            uint32_t *out = (uint32_t *)it.out + (q_head + x * 8 + g) * (D / 2) + slice * 8 + t;
            out[0] = lo;
            out[4] = hi;
        }
    }

    /* Step 4 of a block that has its segment alone. */
    GPU_DEVICE void finish_alone(const sums &of) const
    {
#pragma unroll
        for (int x = 0; x < NT; ++x) {
            const float2 end_f = factors(x, of.top[x], of.sum[x], warp == 0);
#pragma unroll
            for (int j = 0; j < (int)own; ++j)
                store(x, warp * own + j,
                      make_float4(of.o[j][x][0], of.o[j][x][1], of.o[j][x][2], of.o[j][x][3]),
                      end_f);
        }
    }

    /* Step 4: sends our sums, as parts of the segment's, whose maxima it leaves in of.top. */
    GPU_DEVICE void send(sums &of) const
    {
        barrier_wait(met, 0);
#pragma unroll
        for (int x = 0; x < NT; ++x) {
            float2 m = of.top[x];
#pragma unroll
            for (uint32_t c = 0; c < DECODE_MAX_CLUSTER; ++c)
                if (c < csize)
                    m = larger(m, *(const float2 *)&s.in_ml[c][x][t]);
            const float2 part = weight(of.top[x], m);
            of.top[x] = m;
#pragma unroll
            for (int j = 0; j < (int)own; ++j) {
                const uint32_t slice = warp * own + j, to = of.peers + (slice >> lg_slices);
                const uint32_t local = slice & ((1u << lg_slices) - 1);
                const uint32_t there = cluster_address(merged, to);
                cluster_store4(cluster_address(
                                   gpu::shared_address(
                                       &s.in[(((rank << lg_slices) + local) * NT + x) * 32 + lane]),
                                   to),
                               make_float4(of.o[j][x][0] * part.x, of.o[j][x][1] * part.y,
                                           of.o[j][x][2] * part.x, of.o[j][x][3] * part.y),
                               there);
            }
        }
    }

    /* Adds what the ranks sent of the slices that this one finishes. */
    GPU_DEVICE void finish(const sums &of) const
    {
        if (warp >= NT << lg_slices)
            return;
        /* a warp's slices are all of the same rows */
        const uint32_t x = warp % NT;
        const float2 m = x ? of.top[NT - 1] : of.top[0];
        float2 l = make_float2(0, 0);
#pragma unroll
        for (uint32_t c = 0; c < DECODE_MAX_CLUSTER; ++c)
            if (c < csize) {
                const float4 in = s.in_ml[c][x][t];
                const float2 f = weight(make_float2(in.x, in.y), m);
                l.x += in.z * f.x;
                l.y += in.w * f.y;
            }
        const float2 end_f = factors(x, m, l, rank == 0 && warp == x);
        barrier_wait(merged, 0);
#pragma unroll 1
        for (uint32_t u = warp; u < NT << lg_slices; u += W) {
            const uint32_t local = u / NT;
            float4 a = make_float4(0, 0, 0, 0);
#pragma unroll 4
            for (uint32_t c = 0; c < csize; ++c) {
                const float4 part = s.in[(((c << lg_slices) + local) * NT + x) * 32 + lane];
                a.x += part.x;
                a.y += part.y;
                a.z += part.z;
                a.w += part.w;
            }
            store(x, (rank << lg_slices) + local, a, end_f);
        }
    }
};

template <bool is_bf16, int D, int NT, bool is_direct, class Words>
__global__ void __launch_bounds__(256, D == 128 ? 2 : 1)
    decode_short(GPU_PARAM(decode_params, p), GPU_PARAM(Words, w), GPU_PARAM(CUtensorMap, map))
{
    using block = short_block<is_bf16, D, NT, is_direct, Words>;
    block b(p, w, map);
    b.ask_for_all();
    float c[2][NT][4];
    b.score(c);
    b.weigh(c);
    typename block::sums of;
    b.sum(of);
    if (b.csize == 1) {
        b.finish_alone(of);
    } else {
        b.send(of);
        b.finish(of);
    }
    leave(p);
}

} // namespace decode
#endif
