/* prefill_body.cuh: attention of many query rows a kv head: 128 rows a unit (of head dim 64 192, or
 * in short calls 64), 64 for each warpgroup that computes.
 *
 * One block a processor (units of 64 rows: two) takes units until there are none, long ones first.
 * Four warps of it load: one asks for K and one for V, tile by tile, straight from the cache's
 * blocks; two bring q, of the next unit already while this one is computed (a block's first q:
 * those that compute). The computing warpgroups keep scores, weights and sums in registers: they
 * ask for the scores of a tile and the weighted sums of the tile before together, and turn those
 * scores into weights while the sums are made. They take turns at asking, so that the weights of
 * one are computed while the matrix units work for another.
 *
 * Tiles of keys go from the last down: those that the causal edge cuts come first. Only such tiles
 * are masked. Of a dilated layer the branches follow each other, each as if it were all keys.
 */
#ifndef ATTND_GPU_PREFILL_BODY_CUH
#define ATTND_GPU_PREFILL_BODY_CUH

#include "kernels/gpu/sm90/prefill_kernels.h"

#include "kernels/gpu/sm90/decode_tile.cuh"
#include "kernels/gpu/sm90/prefill_load.cuh"

namespace prefill
{

/* Named barriers: of the computing threads, of each warpgroup's turn, of a warpgroup's threads. */
enum { ALL_COMPUTING = 1, TURN = 2, OWN_ROWS = 5 };

/* What is known when a step is compiled. */
template <bool x> struct known {
    static constexpr bool value = x;
};
using yes = known<true>;
using no = known<false>;

/* A warpgroup's 64 rows: thread 4g + t of warp w has rows 16w + g and eight further on. */
template <bool is_bf16, class S, bool has_extras> struct rows {
    static constexpr int D = S::D, N = S::N;
    typedef typename S::keys part;
    float o[D / 2], s[N / 2], m[2], l[2];
    uint32_t weights[N / 16][4]; /* two a word, as the products want them */
    float factor[2]; /* that the sums still miss */
    bool is_behind; /* factor is not 1 in some thread of the warp */
    uint32_t token[2];
    visible sees[2];
    float slope[2];

    GPU_DEVICE void begin(const prefill_params &p, const unit &u, uint32_t row0)
    {
#pragma unroll
        for (int j = 0; j < D / 2; ++j)
            o[j] = 0.0f;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            m[h] = nothing;
            l[h] = 0.0f;
            token[h] = token_of(p, u, row0 + h * 8);
            slope[h] = 0.0f;
            if (has_extras && u.alibi_slopes)
                slope[h] =
                    u.alibi_slopes[query_row(p, u, row0 + h * 8) % p.num_q_heads] * gpu::log2e;
        }
    }

    GPU_DEVICE void go_on_with(const part &keys)
    {
#pragma unroll
        for (int h = 0; h < 2; ++h)
            sees[h] = keys.seen_by(token[h]);
    }

    /* q, k, v: low words of the matrices that begin the tiles */
    GPU_DEVICE void ask_scores(uint32_t q, uint32_t k)
    {
#pragma unroll
        for (int i = 0; i < D / 16; ++i)
            wgmma_scores<is_bf16>(s, beyond(q, (i / 4 * 8192 + i % 4 * 32) / 16),
                                  beyond(k, (i / 4 * S::slab_bytes + i % 4 * 32) / 16), i > 0);
        wgmma_commit();
    }

    GPU_DEVICE void ask_sums(uint32_t v)
    {
#pragma unroll
        for (int i = 0; i < N / 16; ++i)
            wgmma_values<is_bf16>(o, weights[i], beyond(v, i * 2048 / 16));
        wgmma_commit();
    }

    /* Scores of codes: times their keys' scales. */
    GPU_DEVICE void scale_scores(const float *scales)
    {
#pragma unroll
        for (int j = 0; j < N / 8; ++j) {
            const float2 two = *(const float2 *)(scales + j * 8 + 2 * (gpu::lane_id() % 4));
            s[4 * j] *= two.x;
            s[4 * j + 1] *= two.y;
            s[4 * j + 2] *= two.x;
            s[4 * j + 3] *= two.y;
        }
        gpu::sync_warp();
    }

    /* Soft cap and ALiBi; scores are in units of log 2 then. */
    GPU_DEVICE void apply_extras(const unit &u, const part &keys, uint32_t key)
    {
        const float cap = u.soft_cap, to_cap = cap > 0.0f ? 2.0f * u.scale_log2 / cap : 0.0f;
        const uint32_t first = keys.token_of_key(key + 2 * (gpu::lane_id() % 4));
        const float distance[2] = {gpu::distance_of(first, u.pos + token[0]),
                                   gpu::distance_of(first, u.pos + token[1])};
#pragma unroll
        for (int j = 0; j < N / 2; ++j) {
            const int h = j / 2 % 2;
            float x = s[j] * u.scale_log2;
            if (cap > 0.0f) /* tanh y = 1 - 2 / (e^2y + 1) */
                x = cap * gpu::log2e *
                    (1.0f - __fdividef(2.0f, gpu::exp2_fast(s[j] * to_cap) + 1.0f));
            s[j] = x + slope[h] * (distance[h] + (float)(j / 4 * 8 + j % 2) * keys.apart());
        }
    }

    GPU_DEVICE void mask(uint32_t key)
    {
        const uint32_t key0 = key + 2 * (gpu::lane_id() % 4);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int end = (int)(sees[h].end - key0), first = (int)(sees[h].first - key0);
            const int sink = (int)(sees[h].sinks - key0);
#pragma unroll
            for (int j = 2 * h; j < N / 2; j += j % 2 ? 3 : 1) {
                const int c = j / 4 * 8 + j % 2;
                if (c >= end || (c < first && c >= sink))
                    s[j] = -INFINITY;
            }
        }
    }

    /* The same of a tree's rows. */
    GPU_DEVICE void mask_nodes(const prefill_params &p, const unit &u, uint32_t key)
    {
        const uint32_t key0 = key + 2 * (gpu::lane_id() % 4);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const uint64_t nodes = nodes_seen(p, u, token[h]);
            const int end = (int)(u.pos - key0);
#pragma unroll
            for (int j = 2 * h; j < N / 2; j += j % 2 ? 3 : 1) {
                const int c = j / 4 * 8 + j % 2;
                if (c >= end && !has_node(nodes, (uint32_t)(c - end)))
                    s[j] = -INFINITY;
            }
        }
    }

    /* Scores to weights, unrounded. The maximum follows only when it has grown by more than 2^8:
     * weights stay below 256, and the division at the end makes the result exact all the same. */
    GPU_DEVICE void weigh(float scale)
    {
        float x[2];
        bool is_more = false;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float top[4]; /* short chains */
#pragma unroll
            for (int k = 0; k < 4; ++k)
                top[k] = fmaxf(s[4 * k + 2 * h], s[4 * k + 2 * h + 1]);
#pragma unroll
            for (int j = 4; j < N / 8; ++j)
                top[j % 4] = fmaxf(top[j % 4], fmaxf(s[4 * j + 2 * h], s[4 * j + 2 * h + 1]));
            x[h] = fmaxf(fmaxf(top[0], top[1]), fmaxf(top[2], top[3]));
            x[h] = gpu::warp_max<4>(x[h]) * scale;
            is_more |= x[h] > m[h] + 8.0f;
        }
        is_behind = __any_sync(~0u, is_more);
        if (is_behind)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const float top = fmaxf(x[h], m[h]);
                factor[h] = gpu::exp2_fast(m[h] - top);
                m[h] = top;
                l[h] *= factor[h];
            }
        float sum[2][4] = {};
#pragma unroll
        for (int j = 0; j < N / 2; ++j) {
            s[j] = gpu::exp2_fast(fmaf(s[j], scale, -m[j / 2 % 2]));
            sum[j / 2 % 2][j % 2 + j / 4 % 2 * 2] += s[j];
        }
#pragma unroll
        for (int h = 0; h < 2; ++h)
            l[h] += (sum[h][0] + sum[h][1]) + (sum[h][2] + sum[h][3]);
    }

    GPU_DEVICE void take_scores(const prefill_params &p, const unit &u, const part &keys,
                                float scale, uint32_t i, bool is_masked)
    {
        const uint32_t key = is_masked || has_extras ? tile_key(keys.tiles(), i, N) : 0;
        if (has_extras) {
            apply_extras(u, keys, key);
            scale = 1.0f;
        }
        if (is_masked && S::has_nodes)
            mask_nodes(p, u, key);
        else if (is_masked)
            mask(key);
        weigh(scale);
    }

    /* The sums' maximum is that of the weights from here on. */
    GPU_DEVICE void catch_up()
    {
#pragma unroll
        for (int j = 0; j < D / 2; ++j)
            o[j] *= factor[j / 2 % 2];
    }

    GPU_DEVICE void round_weights()
    {
#pragma unroll
        for (int j = 0; j < N / 2; j += 2)
            weights[j / 8][j % 8 / 2] = encode2<is_bf16>(s[j], s[j + 1]);
    }

    /* Weights of hidden keys are 0, but 0 times NaN is NaN: V rows of the tile that no row of the
     * unit sees are cleared; where rows see different keys, a NaN or inf is added to the sums of
     * those that see it and cleared too. All computing threads come here. */
    GPU_DEVICE void hide_values(const prefill_params &p, const unit &u, const seen_together &seen,
                                uint32_t v, uint32_t key)
    {
        constexpr uint32_t pieces = D / 8, computing = S::computing;
        const bool is_cut = key < seen.all.first;
        const uint32_t first = is_cut || seen.all.end <= key ? 0 : seen.all.end - key;
        bool is_found = false;
#pragma unroll 4
        for (uint32_t e = first * pieces + threadIdx.x; e < N * pieces; e += computing) {
            const uint32_t r = e / pieces, c = e % pieces;
            const uint32_t piece = v + c / 8 * S::slab_bytes + r * 128 + c % 8 * 16;
            const bool is_seen = visible_has(&seen.some, key + r);
            is_found |= has_bad<is_bf16>(shared_load16(piece)) && is_seen;
            if (!is_seen)
                shared_store16(piece, make_uint4(0, 0, 0, 0));
        }
        proxy_fence();
        if (!sync_some_any<ALL_COMPUTING, computing>(is_found))
            return;
        const uint32_t t = gpu::lane_id() % 4;
        uint64_t nodes[2] = {};
        if (S::has_nodes)
            nodes[0] = nodes_seen(p, u, token[0]), nodes[1] = nodes_seen(p, u, token[1]);
#pragma unroll 1
        for (uint32_t e = 0; e < N * pieces; ++e) {
            const uint32_t r = e / pieces, c = e % pieces;
            const uint32_t two = v + c / 8 * S::slab_bytes + r * 128 + (c % 8 ^ r % 8) * 16 + t * 4;
            const float bad[2] = {take_bad<is_bf16>(two, false), take_bad<is_bf16>(two + 2, false)};
            if (!__any_sync(~0u, bad[0] != 0.0f || bad[1] != 0.0f))
                continue;
            bool has[2];
#pragma unroll
            for (int h = 0; h < 2; ++h)
                has[h] = visible_has(&sees[h], key + r) ||
                         (S::has_nodes && has_node(nodes[h], key + r - u.pos));
#pragma unroll
            for (int j = 0; j < D / 2; ++j)
                if (j / 4 == (int)c && has[j / 2 % 2])
                    o[j] += bad[j % 2];
        }
        sync_some<ALL_COMPUTING, computing>();
#pragma unroll 1
        for (uint32_t e = threadIdx.x; e < N * D; e += computing)
            take_bad<is_bf16>(v + e * 2, true);
        proxy_fence();
        sync_some<ALL_COMPUTING, computing>();
    }

    /* One of several parts of the rows' keys: puts the sums where the others' are. The last to come
     * gets true and all parts' sums, added in the order of the keys whoever is last. All computing
     * threads come here. */
    GPU_DEVICE bool join(const prefill_params &p, const unit &u, uint32_t first_row)
    {
        constexpr uint32_t computing = S::computing;
        const uint32_t thread = threadIdx.x, t = gpu::lane_id() % 4;
        const uint32_t row = first_row + gpu::warp_id() % 4 * 16 + gpu::lane_id() / 4;
        auto slot_of = [&](uint32_t k) { return u.slot0 + k * p.num_kv_heads; };
        auto o_of = [&](uint32_t k) {
            return p.part_o + (uint64_t)slot_of(k) * (S::R * D) + thread;
        };
        auto ml_of = [&](uint32_t k, int h) {
            return (float2 *)p.part_ml + slot_of(k) * S::R + row + h * 8;
        };
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            l[h] = gpu::warp_sum<4>(l[h]);
            if (t == 0)
                *ml_of(u.part, h) = make_float2(m[h], l[h]);
        }
#pragma unroll
        for (int j = 0; j < D / 2; ++j)
            o_of(u.part)[j * computing] = o[j];
        __threadfence();
        sync_some<ALL_COMPUTING, computing>();
        bool is_last = false;
        if (thread == 0) {
            uint32_t *const n_done = p.counters + 2 + u.slot0;
            is_last = atomicAdd(n_done, 1) == u.n_parts - 1u;
            if (is_last)
                *n_done = 0;
        }
        if (!sync_some_any<ALL_COMPUTING, computing>(is_last))
            return false;
        __threadfence();
#pragma unroll
        for (int h = 0; h < 2; ++h)
            for (uint32_t k = 0; k < u.n_parts; ++k)
                m[h] = fmaxf(m[h], ml_of(k, h)->x);
        l[0] = l[1] = 0.0f;
#pragma unroll
        for (int j = 0; j < D / 2; ++j)
            o[j] = 0.0f;
#pragma unroll 1
        for (uint32_t k = 0; k < u.n_parts; ++k) {
            float f[2];
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const float2 ml = *ml_of(k, h);
                f[h] = gpu::exp2_fast(ml.x - m[h]);
                l[h] += t == 0 ? f[h] * ml.y : 0.0f; /* finish adds those of four lanes */
            }
#pragma unroll
            for (int j = 0; j < D / 2; ++j)
                o[j] = fmaf(o_of(k)[j * computing], f[j / 2 % 2], o[j]);
        }
        return true;
    }

    /* Sums over the quad's keys, then the rows' results to out and lse. */
    GPU_DEVICE void finish(const prefill_params &p, const unit &u, uint32_t row0)
    {
        const uint32_t t = gpu::lane_id() % 4;
        float f[2];
        char *to[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const uint32_t r = row0 + h * 8, row = query_row(p, u, r);
            float lse;
            f[h] = finish_row(u, row % p.num_q_heads, m[h], gpu::warp_sum<4>(l[h]), &lse);
            to[h] = r < u.n_rows ? u.out + (uint64_t)row * p.dv * 2 : nullptr;
            if (u.lse && to[h] && t == 0)
                u.lse[row] = lse;
        }
        /* four words of four neighbouring lanes change places, so that each lane stores 16 bytes */
        const bool is_odd = t & 1, is_high = t & 2;
#pragma unroll
        for (int j = 0; j < D / 32; ++j)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                uint32_t x[4];
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    const float *two = &o[(4 * j + k) * 4 + 2 * h];
                    x[k] = encode2<is_bf16>(two[0] * f[h], two[1] * f[h]);
                }
                swap_words(x[0], x[1], is_odd, 1);
                swap_words(x[2], x[3], is_odd, 1);
                swap_words(x[0], x[2], is_high, 2);
                swap_words(x[1], x[3], is_high, 2);
                const uint32_t column = 32 * j + 8 * t;
                if (to[h] && column < p.dv)
                    *(uint4 *)(to[h] + column * 2) = make_uint4(x[0], x[1], x[2], x[3]);
            }
    }

    /* a of the lane with is_high and b of the one without, `apart` lanes away, change places. */
    static GPU_DEVICE void swap_words(uint32_t &a, uint32_t &b, bool is_high, int apart)
    {
        const uint32_t got =
            __float_as_uint(gpu::shuffle_xor(__uint_as_float(is_high ? a : b), apart));
        if (is_high)
            a = got;
        else
            b = got;
    }
};

template <bool is_bf16, class S, bool has_extras>
GPU_DEVICE void compute(const prefill_params &p, const places<S> &at)
{
    constexpr uint32_t D = S::D, N = S::N;
    const uint32_t group = __shfl_sync(~0u, threadIdx.x / 128, 0), lane = gpu::lane_id();
    const uint32_t row0 = group * 64 + gpu::warp_id() % 4 * 16 + lane / 4;
    const uint32_t turn = TURN + group, next_turn = TURN + (group + 1 == S::groups ? 0 : group + 1);
    constexpr bool has_turns = S::groups > 1;
    rows<is_bf16, S, has_extras> x;
    uint32_t use = 0;
    if (has_turns && group == 0)
        barrier_some_arrive(TURN, 256);
    if (!S::is_dilated) { /* the first unit's q: two warps would take longer */
        const uint32_t row = threadIdx.x / 32 * 16;
        ask_for_rows<S, 16>(p, *at.slot(0), row, row + 16, at.q);
        copies_wait();
        proxy_fence();
        barrier_some_wait(OWN_ROWS + group, 128);
    }
#pragma unroll 1
    for (uint32_t n = 0;; ++n) {
        at.unit_ring.wait_full(n);
        const unit &u = *at.slot(n);
        if (u.n_rows == 0)
            break;
        typename S::keys keys(p, u, N);
        bool is_first_part = true;
        uint32_t n_tiles = keys.n_tiles();
        const float scale = u.scale_log2;
        const uint32_t q_at = at.q + n % S::q_stages * S::q_bytes + group * (64 * D * 2);
        const uint32_t q = low_word(__shfl_sync(~0u, q_at, 0), 16);
        auto k_tile = [&] { return low_word(at.k + use % S::stages * S::tile_bytes, 16); };
        auto v_at = [&](uint32_t x) { return at.v + x % S::stages * S::tile_bytes; };
        x.begin(p, u, row0);
        x.go_on_with(keys);
        at.q_ring.wait_full(n);

        /* Asks for tile i's scores and the sums of the one before, and weighs the scores. `use`
         * counts tiles: tile i is its use of K, and of V. */
        auto ask = [&](auto is_first, bool is_masked, uint32_t i) {
            const uint32_t k = k_tile(), v = low_word(v_at(use - 1), S::slab_bytes);
            at.k_ring.wait_full(use);
            if (has_turns && !is_first.value)
                barrier_some_wait(turn, 256);
            wgmma_fence();
            x.ask_scores(q, k);
            if (is_first.value) {
                wgmma_wait<0>(x.s);
            } else {
                at.v_ring.wait_full(use - 1);
                wgmma_fence();
                x.ask_sums(v);
                if (has_turns)
                    barrier_some_arrive(next_turn, 256);
                wgmma_wait<1>(x.s);
            }
            if (S::has_codes)
                x.scale_scores(at.k_scales(use));
            if (lane < S::arriving)
                barrier_arrive(at.k_ring.empty(use));
            x.take_scores(p, u, keys, scale, i, is_masked);
            settle_here(x.s);
        };
        /* Waits for the sums asked for with tile i's scores; then its weights are ready to be
         * used. */
        auto settle = [&](bool is_masked, uint32_t i) {
            wgmma_wait<0>(x.o);
            if (lane < S::arriving && (i > 0 || !is_first_part))
                barrier_arrive(at.v_ring.empty(use - 1));
            if (x.is_behind)
                x.catch_up();
            x.round_weights();
            if (is_masked) {
                at.v_ring.wait_full(use);
                x.hide_values(p, u, keys.seen(), v_at(use), tile_key(keys.tiles(), i, N));
            }
            ++use;
        };
        /* The wait comes behind the loop's branch: in one piece with the weights, the compiler has
         * it before them. */
        masked_tiles masked = keys.masked();
        ask(yes(), masked.has(0), 0);
#pragma unroll 1
        for (uint32_t i = 1; i < n_tiles || keys.has_next();)
            if (masked.has(i - 1) || masked.has(i)) {
                settle(masked.has(i - 1), i - 1);
                if (S::is_dilated && i == n_tiles) {
                    keys.next();
                    is_first_part = false;
                    i = 0;
                    n_tiles = keys.n_tiles();
                    masked = keys.masked();
                    x.go_on_with(keys);
                }
                ask(no(), masked.has(i), i);
                ++i;
            } else {
#pragma unroll 1
                for (; i < masked.last; ++i) {
                    settle(false, i - 1);
                    ask(no(), false, i);
                }
            }
        settle(masked.has(n_tiles - 1), n_tiles - 1);
        if (lane == 0)
            barrier_arrive(at.q_ring.empty(n));
        at.v_ring.wait_full(use - 1);
        wgmma_fence();
        x.ask_sums(low_word(v_at(use - 1), S::slab_bytes));
        wgmma_wait<0>(x.o);
        if (lane < S::arriving)
            barrier_arrive(at.v_ring.empty(use - 1));
        if (S::is_dilated || u.n_parts == 1 || x.join(p, u, group * 64))
            x.finish(p, u, row0);
        warp_is_done(at.unit_ring.empty(n));
    }
    if (has_turns && group == 0)
        barrier_some_wait(TURN, 256);
}

template <bool is_bf16, class S, bool has_extras>
__global__ void __launch_bounds__(S::threads, S::blocks)
    prefill_rows_of(GPU_PARAM(prefill_params, p), GPU_PARAM(prefill_words, words),
                    GPU_PARAM(prefill_maps, maps))
{
    const places<S> at = places_in<S>(aligned_shared());
    const uint32_t group = __shfl_sync(~0u, threadIdx.x / 128, 0);
    if (threadIdx.x == 0) {
        at.k_ring.init(1, S::groups * 4 * S::arriving);
        at.v_ring.init(1, S::groups * 4 * S::arriving);
        at.q_ring.init(2, S::groups * 4);
        at.unit_ring.init(1, (S::groups * 4 + 3) * ARRIVING);
        barrier_init_fence();
        map_prefetch(&maps.k);
        map_prefetch(&maps.v);
    }
    if (p.is_chained)
        gpu::chain_wait();
    if (!S::is_dilated && threadIdx.x == S::computing)
        unit_at<S>(p, words, blockIdx.x, at.slot(0));
    __syncthreads();
    if (group == S::groups) {
        fewer_registers<S::few_registers>();
        switch (gpu::warp_id() % 4) {
        case 0:
            load_keys<S, false>(p, &maps.k, at);
            break;
        case 1:
            load_keys<S, true>(p, &maps.v, at);
            break;
        case 2:
            load_queries<S, true>(p, words, at);
            break;
        default:
            load_queries<S, false>(p, words, at);
        }
    } else {
        more_registers<S::many_registers>();
        compute<is_bf16, S, has_extras>(p, at);
    }
}

template <bool is_bf16, int dim, bool has_extras> kernel_fn plain_kernel()
{
    return (kernel_fn)prefill_rows_of<is_bf16, shape<dim, false, false>, has_extras>;
}

/* At dim 64. */
template <bool is_bf16, bool has_extras, bool has_nodes> kernel_fn few_rows_kernel()
{
    typedef shape<64, false, false, has_nodes, PREFILL_FEW_ROWS> few;
    return (kernel_fn)prefill_rows_of<is_bf16, few, has_extras>;
}

template <bool is_bf16, bool has_extras> kernel_fn kernel_of(uint32_t dim, uint32_t rows)
{
    return rows == PREFILL_FEW_ROWS ? few_rows_kernel<is_bf16, has_extras, false>()
           : dim == 64              ? plain_kernel<is_bf16, 64, has_extras>()
           : dim == 128             ? plain_kernel<is_bf16, 128, has_extras>()
           : dim == 192             ? plain_kernel<is_bf16, 192, has_extras>()
                                    : plain_kernel<is_bf16, 256, has_extras>();
}

template <bool is_bf16, bool has_extras> kernel_fn codes_kernel_of(uint32_t dim)
{
    if (dim == 64)
        return (kernel_fn)prefill_rows_of<is_bf16, shape<64, false, true>, has_extras>;
    return (kernel_fn)prefill_rows_of<is_bf16, shape<128, false, true>, has_extras>;
}

template <bool is_bf16, bool has_extras> kernel_fn trees_kernel_of(uint32_t dim, uint32_t rows)
{
    if (rows == PREFILL_FEW_ROWS)
        return few_rows_kernel<is_bf16, has_extras, true>();
    if (dim == 64)
        return (kernel_fn)prefill_rows_of<is_bf16, shape<64, false, false, true>, has_extras>;
    return (kernel_fn)prefill_rows_of<is_bf16, shape<128, false, false, true>, has_extras>;
}

template <bool is_bf16, bool has_extras> kernel_fn dilated_kernel_of(uint32_t dim)
{
    if (dim == 64)
        return (kernel_fn)prefill_rows_of<is_bf16, shape<64, true, false>, has_extras>;
    return (kernel_fn)prefill_rows_of<is_bf16, shape<128, true, false>, has_extras>;
}

} // namespace prefill
#endif
