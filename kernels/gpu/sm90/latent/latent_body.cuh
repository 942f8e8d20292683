/* latent_body.cuh: attention of pools whose V is in K (MLA): 64 query rows a unit, whatever their
 * number of tokens, over tiles of 48 tokens, each brought once and used as K and as V.
 *
 * One block a processor takes units until there are none, as the prefill kernels do, and has three
 * warpgroups. The first has q in registers and makes scores and weights. The others have half of
 * the sums' columns each and add the values: the weights lie for them in the tile itself, where it
 * holds the part of K behind V's 512 elements, which nobody reads any more. While they add the
 * values of one tile, the first makes the scores of the next. So a tile's place is free when its
 * values are added; there is room for four, and those who free it ask for the tile that is next.
 * Tokens that queries list are copied one by one, by all warps that add values.
 *
 * The parts of a unit whose keys are cut are joined by latent_join, the next launch.
 */
#ifndef ATTND_GPU_LATENT_BODY_CUH
#define ATTND_GPU_LATENT_BODY_CUH

#include "kernels/gpu/sm90/prefill_kernels.h"

#include "kernels/gpu/sm90/decode_tile.cuh"
#include "kernels/gpu/sm90/latent/latent_wgmma.cuh"
#include "kernels/gpu/sm90/prefill_load.cuh"

namespace prefill
{

struct latent_shape {
    static constexpr bool is_dilated = false, is_listed = false, has_nodes = true;
    static constexpr uint32_t R = prefill_rows(PREFILL_LATENT_DIM, false);
    static constexpr uint32_t N = prefill_keys(PREFILL_LATENT_DIM);
    static constexpr uint32_t slabs = PREFILL_LATENT_DIM / 64, q_slabs = slabs - 1;
    static constexpr uint32_t stages = LATENT_STAGES, slab_bytes = N * 128;
    static constexpr uint32_t tile_bytes = slabs * slab_bytes, slot_bytes = PREFILL_UNIT_BYTES;
    static constexpr uint32_t q_slab_bytes = R * 128, q_uses = 2; /* stages that q goes through */
    static constexpr uint32_t columns = LATENT_COLUMNS / 2; /* of a warpgroup that adds values */
    static constexpr uint32_t slots = LATENT_SLOTS;
    static constexpr int score_registers = 184, sum_registers = 160;
    static constexpr uint32_t loading = 2; /* warps that ask for a tile's slabs */
};

/* Of items whose queries visit the tokens that they list: a tile's are anywhere in the cache. */
struct listed_shape : latent_shape {
    static constexpr bool is_listed = true;
    static constexpr uint32_t loading = 8, rows = N / 4; /* of a tile, that a warp asks for */
};
static_assert(latent_shape::R == 64 && latent_shape::N == 48, "tiles of one product");
/* With more, more_registers never returns; the compiler doesn't see it, nor does the executor. */
static_assert(latent_shape::score_registers + 2 * latent_shape::sum_registers <=
                  65536 / LATENT_THREADS / 8 * 8 * 3,
              "three warpgroups share what the launch has been given");

/* Shared memory. Uses of a stage: halves of q, then the tiles, of one unit after the other; what is
 * passed with the weights is numbered by tiles alone. */
struct latent_places {
    using S = latent_shape;
    uint32_t tiles, q_last; /* the last slab of q: the others are in registers */
    uint8_t *units;
    float *factors; /* [stages][R] that the sums miss when the tile's values are added */
    float2 *ml; /* [R] maximum and sum of weights of a unit that is done */
    uint32_t *is_behind; /* [stages][4] some factor of the warp's rows is not 1 */
    masked_tiles *masked; /* [4] of the unit whose scores the warp makes */
    ring<S::stages> ring_tiles;
    uint32_t weighed; /* barriers [stages] */
    ring<1> ml_ring;
    ring<S::slots> unit_ring;

    GPU_DEVICE explicit latent_places(uint8_t *base)
    {
        tiles = gpu::shared_address(base);
        q_last = tiles + S::stages * S::tile_bytes;
        units = base + (q_last + S::q_slab_bytes - tiles);
        factors = (float *)(units + S::slots * S::slot_bytes);
        ml = (float2 *)(factors + S::stages * S::R);
        is_behind = (uint32_t *)(ml + S::R);
        masked = (masked_tiles *)(is_behind + S::stages * 4);
        ring_tiles.at = gpu::shared_address(masked + 4);
        weighed = ring_tiles.at + 2 * S::stages * 8;
        ml_ring.at = weighed + S::stages * 8;
        unit_ring.at = ml_ring.at + 16;
    }
    GPU_DEVICE unit *slot(uint32_t n) const
    {
        return (unit *)(units + n % S::slots * S::slot_bytes);
    }
    GPU_DEVICE uint32_t tile(uint32_t use) const
    {
        return tiles + use % S::stages * S::tile_bytes;
    }
    /* Where the weights lie in a tile. */
    GPU_DEVICE uint32_t weights(uint32_t use) const
    {
        return tile(use) + (S::slabs - 1) * S::slab_bytes;
    }
    GPU_DEVICE uint32_t weighed_bar(uint32_t nth) const
    {
        return weighed + nth % S::stages * 8;
    }
};

/* The warp of each warpgroup that adds values which asks for the tiles' slabs [first, first + n),
 * first and n as its half has them: how far it has come. */
struct latent_loader {
    using S = latent_shape;
    uint32_t n, i, use; /* unit, tile, and use of a stage that are next; before tile 0: its q */
    uint32_t ids; /* blocks of the next tile's boxes, one a lane */
    bool is_done;

    GPU_DEVICE void begin()
    {
        n = use = ids = 0;
        i = 0 - S::q_uses;
        is_done = false;
    }

    GPU_DEVICE uint32_t id_of(const prefill_params &p, const unit &u, uint32_t tile) const
    {
        const uint32_t lane = gpu::lane_id();
        const uint32_t key = tile_key(u.tiles, tile, S::N) + lane * p.box_tokens;
        const bool is_there = tile < u.n_tiles && lane * p.box_tokens < S::N && key < u.total;
        return is_there ? __ldg(u.table + (key >> p.block_shift)) : 0;
    }

    /* Asks for all up to use `last`, when their stages are free. */
    GPU_DEVICE void go_on(const prefill_params &p, const CUtensorMap *map, const latent_places &at,
                          uint32_t half, uint32_t last)
    {
        while (!is_done && use <= last) {
            const unit &u = *at.slot(n);
            if (i == 0 - S::q_uses) {
                at.unit_ring.wait_full(n);
                is_done = u.n_rows == 0;
                if (!is_done)
                    ids = id_of(p, u, 0);
            } else if (i < u.n_tiles) {
                ask(p, map, at, half, u);
            }
            ++use;
            if (++i == u.n_tiles) {
                i = 0 - S::q_uses;
                ++n;
            }
        }
    }

    GPU_DEVICE void ask(const prefill_params &p, const CUtensorMap *map, const latent_places &at,
                        uint32_t half, const unit &u)
    {
        const bool is_asking = elect_one();
        const uint32_t key = tile_key(u.tiles, i, S::N), now = ids;
        const uint32_t n_boxes = (min(S::N, u.total - key) + p.box_tokens - 1) / p.box_tokens;
        const uint32_t full = at.ring_tiles.full(use), layer = u.layer;
        const uint32_t first = half * 4, n_slabs = half ? S::slabs - 4 : 4;
        const uint32_t to = at.tile(use) + first * S::slab_bytes;
        ids = id_of(p, u, i + 1);
        at.ring_tiles.wait_empty(use);
        if (is_asking)
            barrier_expect(full, n_boxes * p.box_tokens * n_slabs * 128);
#pragma unroll 1
        for (uint32_t b = 0; b < n_boxes; ++b) {
            const uint32_t id = __shfl_sync(~0u, now, b), in_tile = b * p.box_tokens;
            const uint32_t row = u.head * p.block_tokens + ((key + in_tile) & (p.block_tokens - 1));
            if (is_asking)
#pragma unroll 1
                for (uint32_t s = 0; s < n_slabs; ++s)
                    map_copy(to + s * S::slab_bytes + in_tile * 128, map, full, (first + s) * 64,
                             row, layer, id);
        }
        gpu::sync_warp();
    }
};

/* The same of items with lists, in every warp of both warpgroups: it copies its rows of a tile,
 * half of their slabs. What it has copied it passes on when it has asked for what is next. */
struct listed_loader {
    using S = listed_shape;
    static constexpr uint32_t none = ~0u;
    uint32_t n, i, use; /* as latent_loader's */
    uint32_t token; /* of the tile after the next: the listed token of the lane's row */
    uint32_t asked; /* use of a stage that has not been passed on; 0: there is none */
    const char *row; /* of the next tile: the lane's; NULL: it has none */
    bool is_done;

    GPU_DEVICE void begin()
    {
        n = use = asked = 0;
        i = 0 - S::q_uses;
        is_done = false;
    }

    static GPU_DEVICE uint32_t first_row()
    {
        return gpu::warp_id() % 4 * S::rows;
    }

    GPU_DEVICE uint32_t token_in(const prefill_params &p, const unit &u, uint32_t tile) const
    {
        const uint32_t lane = gpu::lane_id();
        const uint32_t key = tile_key(u.tiles, tile, S::N) + first_row() + lane;
        const bool is_there = tile < u.n_tiles && lane < S::rows && key < u.total;
        return is_there ? __ldg(p.list_tokens + u.list0 + key) : none;
    }

    GPU_DEVICE const char *row_of(const prefill_params &p, const unit &u, uint32_t listed) const
    {
        if (listed == none)
            return nullptr;
        const uint64_t block = __ldg(u.table + (listed >> p.block_shift));
        const uint32_t slot = u.head * p.block_tokens + (listed & (p.block_tokens - 1));
        return p.base + block * p.block_bytes + u.layer * p.layer_bytes + (uint64_t)slot * p.dk * 2;
    }

    GPU_DEVICE void go_on(const prefill_params &p, const CUtensorMap *, const latent_places &at,
                          uint32_t half, uint32_t last)
    {
        while (!is_done && use <= last) {
            const unit &u = *at.slot(n);
            if (i == 0 - S::q_uses) {
                pass_on<0>(at);
                at.unit_ring.wait_full(n);
                is_done = u.n_rows == 0;
                if (!is_done) {
                    row = row_of(p, u, token_in(p, u, 0));
                    token = token_in(p, u, 1);
                }
            } else if (i < u.n_tiles) {
                ask(p, at, half, u);
                pass_on<1>(at);
                asked = use;
            }
            ++use;
            if (++i == u.n_tiles) {
                i = 0 - S::q_uses;
                ++n;
            }
        }
    }

    /* `pending` copies have been asked for since. */
    template <int pending> GPU_DEVICE void pass_on(const latent_places &at)
    {
        if (asked == 0)
            return;
        gpu::copy_wait<pending>();
        proxy_fence();
        warp_arrives(at.ring_tiles.full(asked));
        asked = 0;
    }

    GPU_DEVICE void ask(const prefill_params &p, const latent_places &at, uint32_t half,
                        const unit &u)
    {
        const uint32_t lane = gpu::lane_id(), row_bytes = p.dk * 2;
        const char *const now = row;
        row = row_of(p, u, token);
        token = token_in(p, u, i + 2);
        at.ring_tiles.wait_empty(use);
        const uint32_t to = at.tile(use);
#pragma unroll 4
        for (uint32_t k = 0; k < S::rows; ++k)
            copy_piece(p, to, now, k, half * 32 + lane, row_bytes);
        if (half)
#pragma unroll 1
            for (uint32_t k = lane / 8; k < S::rows; k += 4)
                copy_piece(p, to, now, k, 64 + lane % 8, row_bytes);
        gpu::copy_commit();
    }

    /* 16 bytes of row k of the warp's. */
    static GPU_DEVICE void copy_piece(const prefill_params &p, uint32_t to, const char *rows,
                                      uint32_t k, uint32_t piece, uint32_t row_bytes)
    {
        const uint64_t at = (uint64_t)rows;
        const uint64_t from = (uint64_t)__shfl_sync(~0u, (uint32_t)(at >> 32), k) << 32 |
                              __shfl_sync(~0u, (uint32_t)at, k);
        const uint32_t r = first_row() + k;
        const bool has = from != 0 && piece * 16 < row_bytes;
        gpu::copy16_async(to + piece / 8 * S::slab_bytes + r * 128 + (piece % 8 ^ r % 8) * 16,
                          has ? (const char *)from + piece * 16 : p.base, has);
    }
};

/* The warpgroup that makes scores and weights: thread 4g + t of warp w has rows 16w + g and eight
 * further on. */
template <bool is_bf16, bool has_extras> struct latent_scores {
    using S = latent_shape;
    static constexpr int N = S::N;
    uint32_t q[4 * S::q_slabs][4];
    float s[N / 2], m[2], l[2];

    GPU_DEVICE void begin()
    {
        m[0] = m[1] = nothing;
        l[0] = l[1] = 0.0f;
    }

    /* A unit's rows of q on their way: the last slab to `last`, of the others the first half to
     * `to` and the second to `then`. By all 128 threads. */
    static GPU_DEVICE void ask_q(const prefill_params &p, const unit &u, uint32_t to, uint32_t then,
                                 uint32_t last)
    {
        constexpr uint32_t few = S::q_slabs / S::q_uses;
        const uint32_t piece = threadIdx.x % 8, row_bytes = p.dk * 2, n_rows = u.n_rows;
        const char *const q = u.q;
#pragma unroll 1
        for (uint32_t r = threadIdx.x / 8; r < S::R; r += 16) {
            const char *const from = q + (uint64_t)query_row(p, u, r) * row_bytes + piece * 16;
            const uint32_t dst = r * 128 + (piece ^ r % 8) * 16;
#pragma unroll
            for (uint32_t s = 0; s < S::slabs; ++s) {
                const bool has = r < n_rows && (s * 8 + piece) * 16 < row_bytes;
                const uint32_t slab = s < few          ? to + s * S::q_slab_bytes
                                      : s < S::q_slabs ? then + (s - few) * S::q_slab_bytes
                                                       : last;
                gpu::copy16_async(slab + dst, has ? from + s * 128 : q, has);
            }
        }
    }

    GPU_DEVICE void take_q(uint32_t first, uint32_t then)
    {
        constexpr int few = 4 * (int)S::q_slabs / (int)S::q_uses;
        const uint32_t lane = gpu::lane_id(), r = gpu::warp_id() % 4 * 16 + lane % 16;
#pragma unroll
        for (int i = 0; i < 4 * (int)S::q_slabs; ++i)
            gpu::load_matrix4(q[i], (i < few ? first : then) + i % few / 4 * S::q_slab_bytes +
                                        r * 128 + ((i % 4 * 2 + lane / 16) ^ r % 8) * 16);
    }

    GPU_DEVICE void ask_scores(uint32_t k, uint32_t q_last)
    {
#pragma unroll
        for (int i = 0; i < 4 * (int)S::q_slabs; ++i)
            wgmma_scores_by<is_bf16>(s, q[i], beyond(k, (i / 4 * S::slab_bytes + i % 4 * 32) / 16),
                                     i > 0);
#pragma unroll
        for (int i = 0; i < 4; ++i)
            wgmma_scores_of<is_bf16>(s, beyond(q_last, i * 2),
                                     beyond(k, S::q_slabs * S::slab_bytes / 16 + i * 2));
        wgmma_commit();
    }

    /* As the prefill kernels' (prefill_body.cuh). */
    GPU_DEVICE void apply_extras(const prefill_params &p, const unit &u, uint32_t row0,
                                 uint32_t key)
    {
        const float cap = u.soft_cap, to_cap = cap > 0.0f ? 2.0f * u.scale_log2 / cap : 0.0f;
        const uint32_t first = key + 2 * (gpu::lane_id() % 4);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const uint32_t token = token_of(p, u, row0 + h * 8);
            const uint32_t q_head = query_row(p, u, row0 + h * 8) % p.num_q_heads;
            const float slope = u.alibi_slopes ? u.alibi_slopes[q_head] * gpu::log2e : 0.0f;
            const float distance = gpu::distance_of(first, u.pos + token);
#pragma unroll
            for (int j = 2 * h; j < N / 2; j += j % 2 ? 3 : 1) {
                float x = s[j] * u.scale_log2;
                if (cap > 0.0f) /* tanh y = 1 - 2 / (e^2y + 1) */
                    x = cap * gpu::log2e *
                        (1.0f - __fdividef(2.0f, gpu::exp2_fast(s[j] * to_cap) + 1.0f));
                s[j] = x + slope * (distance + (float)(j / 4 * 8 + j % 2));
            }
        }
    }

    GPU_DEVICE void mask(const prefill_params &p, const unit &u, uint32_t row0, uint32_t key)
    {
        const uint32_t key0 = key + 2 * (gpu::lane_id() % 4);
        const part<false, true> keys(p, u, N);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const visible sees = keys.seen_by(token_of(p, u, row0 + h * 8));
            const int end = (int)(sees.end - key0), first = (int)(sees.first - key0);
            const int sink = (int)(sees.sinks - key0);
            const uint64_t nodes = nodes_seen(p, u, token_of(p, u, row0 + h * 8));
#pragma unroll
            for (int j = 2 * h; j < N / 2; j += j % 2 ? 3 : 1) {
                const int c = j / 4 * 8 + j % 2;
                if ((c >= end || (c < first && c >= sink)) && !has_node(nodes, (uint32_t)(c - end)))
                    s[j] = -INFINITY;
            }
        }
    }

    /* Scores to weights. The maximum follows only when it has grown by more than 2^8; then factors
     * (of row g of the warp) get what the sums miss. */
    GPU_DEVICE void weigh(float scale, float *factors, uint32_t *is_behind)
    {
        float x[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            x[h] = fmaxf(s[2 * h], s[2 * h + 1]);
#pragma unroll
            for (int j = 1; j < N / 8; ++j)
                x[h] = fmaxf(x[h], fmaxf(s[4 * j + 2 * h], s[4 * j + 2 * h + 1]));
            x[h] = gpu::warp_max<4>(x[h]) * scale;
        }
        const bool is_more = __any_sync(~0u, x[0] > m[0] + 8.0f || x[1] > m[1] + 8.0f);
        if (gpu::lane_id() == 0)
            *is_behind = is_more;
        if (is_more)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const float top = fmaxf(x[h], m[h]), factor = gpu::exp2_fast(m[h] - top);
                m[h] = top;
                l[h] *= factor;
                factors[h * 8] = factor; /* the same of four lanes */
            }
#pragma unroll
        for (int j = 0; j < N / 2; ++j) {
            s[j] = gpu::exp2_fast(fmaf(s[j], scale, -m[j / 2 % 2]));
            l[j / 2 % 2] += s[j];
        }
    }

    /* Weights, as A of the sums' products. */
    GPU_DEVICE void pass_on(uint32_t to) const
    {
        const uint32_t lane = gpu::lane_id(), g = lane / 4, t = lane % 4;
        const uint32_t row = to + (gpu::warp_id() % 4 * 16 + g) * 32 + t * 4;
#pragma unroll
        for (int j = 0; j < N / 8; ++j)
#pragma unroll
            for (int h = 0; h < 2; ++h)
                shared_store4(row + j / 2 * 2048 + h * 256 + (j % 2 ^ g / 4) * 16,
                              encode2<is_bf16>(s[4 * j + 2 * h], s[4 * j + 2 * h + 1]));
        proxy_fence();
        gpu::sync_warp();
    }
};

template <class S, bool is_bf16, bool has_extras>
GPU_DEVICE void score_latents(const prefill_params &p, const prefill_words &words,
                              const latent_places &at)
{
    const uint32_t lane = gpu::lane_id(), w = gpu::warp_id() % 4;
    const uint32_t row0 = w * 16 + lane / 4;
    const uint32_t q_last = low_word(__shfl_sync(~0u, at.q_last, 0), 16);
    latent_scores<is_bf16, has_extras> x;
    uint32_t use = 0, taken = 1;
#pragma unroll 1
    for (uint32_t n = 0;; ++n) {
        at.unit_ring.wait_full(n);
        const unit &u = *at.slot(n);
        if (u.n_rows == 0)
            break;
        if (lane == 0)
            at.masked[w] = part<false, true>(p, u, S::N).masked();
        at.ring_tiles.wait_empty(use);
        at.ring_tiles.wait_empty(use + 1);
        x.ask_q(p, u, at.tile(use), at.tile(use + 1), at.q_last);
        if (w == 3) { /* the unit after this one, meanwhile */
            at.unit_ring.wait_empty(n + 1);
            if (lane == 0) {
                take_unit<S>(p, words, &taken, at.slot(n + 1));
                barrier_arrive(at.unit_ring.full(n + 1));
            }
            gpu::sync_warp();
        }
        x.begin();
        copies_wait();
        proxy_fence();
        sync_some<3, 128>();
        x.take_q(at.tile(use), at.tile(use + 1));
        gpu::sync_warp();
        if (threadIdx.x < 2 * S::loading) /* as those that ask for a tile, of two stages */
            barrier_arrive(at.ring_tiles.full(use + lane % 2));
        if (lane < 4) /* as those that release one */
            barrier_arrive(at.ring_tiles.empty(use + lane % 2));
        use += S::q_uses;
        bool has_news = false; /* weights of the tile before that have not been passed on */
        const uint32_t end = use + u.n_tiles;
#pragma unroll 1
        for (; use < end; ++use) {
            const uint32_t k = low_word(__shfl_sync(~0u, at.tile(use), 0), 16);
            const uint32_t nth = use - (n + 1) * S::q_uses; /* of all tiles */
            at.ring_tiles.wait_full(use);
            wgmma_fence();
            x.ask_scores(k, q_last);
            wgmma_wait<0>(x.s);
            /* Values of the tile before are added while these scores become weights: earlier they
             * would only hold the scores up. */
            if (has_news && lane == 0)
                barrier_arrive(at.weighed_bar(nth - 1));
            const uint32_t i = u.n_tiles - (end - use);
            const bool is_masked = at.masked[w].has(i);
            const uint32_t key = is_masked || has_extras ? tile_key(u.tiles, i, S::N) : 0;
            if (has_extras)
                x.apply_extras(p, u, row0, key);
            if (is_masked)
                x.mask(p, u, row0, key);
            x.weigh(has_extras ? 1.0f : u.scale_log2, at.factors + nth % S::stages * S::R + row0,
                    at.is_behind + nth % S::stages * 4 + w);
            x.pass_on(at.weights(use));
            /* but nobody waits for scores whose tile is not there */
            has_news = use + 1 < end &&
                       barrier_test(at.ring_tiles.full(use + 1), (use + 1) / S::stages & 1);
            if (!has_news && lane == 0)
                barrier_arrive(at.weighed_bar(nth));
        }
        at.ml_ring.wait_empty(n);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float l = gpu::warp_sum<4>(x.l[h]);
            if (lane % 4 == 0)
                at.ml[row0 + h * 8] = make_float2(x.m[h], l);
        }
        warp_arrives(at.ml_ring.full(n));
        warp_is_done(at.unit_ring.empty(n));
    }
    if (threadIdx.x == 0 && atomicAdd(&p.counters[1], 1) == gridDim.x - 1)
        p.counters[0] = p.counters[1] = 0; /* the last block: all have taken what they take */
}

template <class S> struct loader_of {
    typedef latent_loader type;
};
template <> struct loader_of<listed_shape> {
    typedef listed_loader type;
};

/* A warpgroup that adds values: columns [half * 256, ...) of the 64 rows, which its threads have as
 * those of latent_scores do. */
template <bool is_bf16> struct latent_sums {
    using S = latent_shape;
    float o[S::columns / 2];

    static GPU_DEVICE bool meet(uint32_t half, bool x)
    {
        return half ? sync_some_any<2, 128>(x) : sync_some_any<1, 128>(x);
    }

    /* As the prefill kernels' (prefill_body.cuh): V rows of the tile that no row of the unit sees
     * are cleared; where rows see different keys, what a NaN or inf makes of the sums of those that
     * see it is added to them, and it is cleared too. v: this half's first slab. */
    GPU_DEVICE void hide_values(const prefill_params &p, const unit &u, uint32_t row0,
                                uint32_t half, uint32_t v, uint32_t key)
    {
        constexpr uint32_t N = S::N, pieces = S::columns / 8;
        const uint32_t thread = threadIdx.x % 128;
        const part<false, true> keys(p, u, N);
        const seen_together seen = keys.seen();
        const bool is_cut = key < seen.all.first;
        const uint32_t first = is_cut || seen.all.end <= key ? 0 : seen.all.end - key;
        bool is_found = false;
#pragma unroll 1
        for (uint32_t e = first * pieces + thread; e < N * pieces; e += 128) {
            const uint32_t r = e / pieces, c = e % pieces;
            const uint32_t piece = v + c / 8 * S::slab_bytes + r * 128 + c % 8 * 16;
            const bool is_seen = visible_has(&seen.some, key + r);
            is_found |= has_bad<is_bf16>(shared_load16(piece)) && is_seen;
            if (!is_seen)
                shared_store16(piece, make_uint4(0, 0, 0, 0));
        }
        proxy_fence();
        if (!meet(half, is_found))
            return;
        /* The sums step aside: indexed in registers they would need more than there are. */
        float aside[S::columns / 2];
#pragma unroll
        for (int j = 0; j < (int)S::columns / 2; ++j)
            aside[j] = o[j];
        /* It is in K, too: without a soft cap the key's score is inf, -inf or NaN, and its weight
         * NaN or 0. */
        const float weight = u.soft_cap > 0.0f ? 1.0f : 0.0f;
        const uint32_t t = gpu::lane_id() % 4;
        const uint32_t tokens[2] = {token_of(p, u, row0), token_of(p, u, row0 + 8)};
        const visible sees[2] = {keys.seen_by(tokens[0]), keys.seen_by(tokens[1])};
        const uint64_t nodes[2] = {nodes_seen(p, u, tokens[0]), nodes_seen(p, u, tokens[1])};
#pragma unroll 1
        for (uint32_t e = 0; e < N * pieces; ++e) {
            const uint32_t r = e / pieces, c = e % pieces;
            const uint32_t two = v + c / 8 * S::slab_bytes + r * 128 + (c % 8 ^ r % 8) * 16 + t * 4;
            const float bad[2] = {take_bad<is_bf16>(two, false), take_bad<is_bf16>(two + 2, false)};
            if (!__any_sync(~0u, bad[0] != 0.0f || bad[1] != 0.0f))
                continue;
#pragma unroll
            for (int j = 0; j < 4; ++j)
                if (visible_has(&sees[j / 2], key + r) || has_node(nodes[j / 2], key + r - u.pos))
                    aside[4 * c + j] += bad[j % 2] * weight;
        }
#pragma unroll
        for (int j = 0; j < (int)S::columns / 2; ++j)
            o[j] = aside[j];
        meet(half, false);
#pragma unroll 1
        for (uint32_t e = thread; e < N * 4 * 64; e += 128)
            take_bad<is_bf16>(v + e * 2, true);
        proxy_fence();
        meet(half, false);
    }

    GPU_DEVICE void catch_up(const float *factors)
    {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float f = factors[h * 8];
#pragma unroll
            for (int j = 2 * h; j < (int)S::columns / 2; j += j % 2 ? 3 : 1)
                o[j] *= f;
        }
    }

    GPU_DEVICE void ask_sums(uint32_t weights, uint32_t v)
    {
#pragma unroll
        for (int i = 0; i < (int)S::N / 16; ++i)
            wgmma_sums<is_bf16>(o, weights_matrix(weights + i * 2048), beyond(v, i * 2048 / 16));
        wgmma_commit();
    }

    /* Sums of one of several parts to where latent_join finds them. */
    GPU_DEVICE void store_part(const prefill_params &p, const unit &u, uint32_t row0, uint32_t half,
                               const float2 *ml) const
    {
        const uint32_t t = gpu::lane_id() % 4;
        const uint32_t slot = u.slot0 + u.part * p.num_kv_heads;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const uint32_t row = row0 + h * 8;
            if (row >= u.n_rows)
                continue;
            const uint64_t at = (uint64_t)slot * S::R + row;
            float *to = p.part_o + at * LATENT_COLUMNS + half * S::columns + 2 * t;
#pragma unroll
            for (int j = 0; j < (int)S::columns / 8; ++j)
                *(float2 *)(to + j * 8) = make_float2(o[4 * j + 2 * h], o[4 * j + 2 * h + 1]);
            if (half == 0 && t == 0)
                ((float2 *)p.part_ml)[at] = ml[row];
        }
    }

    GPU_DEVICE void store(const prefill_params &p, const unit &u, uint32_t row0, uint32_t half,
                          const float2 *ml) const
    {
        const uint32_t t = gpu::lane_id() % 4;
        float f[2];
        char *to[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const uint32_t r = row0 + h * 8, row = query_row(p, u, r);
            float lse;
            f[h] = finish_row(u, row % p.num_q_heads, ml[r].x, ml[r].y, &lse);
            to[h] = r < u.n_rows ? u.out + (uint64_t)row * p.dv * 2 : nullptr;
            if (u.lse && to[h] && t == 0 && half == 0)
                u.lse[row] = lse;
        }
#pragma unroll
        for (int j = 0; j < (int)S::columns / 8; ++j)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const float *two = &o[4 * j + 2 * h];
                const uint32_t column = half * S::columns + 8 * j;
                if (to[h] && column < p.dv)
                    *(uint32_t *)(to[h] + (column + 2 * t) * 2) =
                        encode2<is_bf16>(two[0] * f[h], two[1] * f[h]);
            }
    }
};

template <class S, bool is_bf16>
GPU_DEVICE void sum_latents(const prefill_params &p, const CUtensorMap *map,
                            const latent_places &at)
{
    const uint32_t half = __shfl_sync(~0u, threadIdx.x / 128, 0) - 1, lane = gpu::lane_id();
    const uint32_t w = gpu::warp_id() % 4, row0 = w * 16 + lane / 4;
    const uint32_t columns_at = half * (S::columns / 64) * S::slab_bytes;
    latent_sums<is_bf16> x;
    typename loader_of<S>::type loader;
    const bool is_loading = S::is_listed || w == 0;
    uint32_t use = 0, nth = 0;
    loader.begin();
    if (is_loading)
        loader.go_on(p, map, at, half, S::stages - 1);
#pragma unroll 1
    for (uint32_t n = 0;; ++n) {
        at.unit_ring.wait_full(n);
        const unit &u = *at.slot(n);
        if (u.n_rows == 0)
            break;
        masked_tiles masked;
        {
            const part<false, true> keys(p, u, S::N);
            masked = keys.masked();
        }
        const uint32_t n_tiles = u.n_tiles;
        use += S::q_uses;
#pragma unroll
        for (int j = 0; j < (int)S::columns / 2; ++j)
            x.o[j] = 0.0f;
#pragma unroll 1
        for (uint32_t i = 0; i < n_tiles; ++i, ++use, ++nth) {
            const uint32_t tile = __shfl_sync(~0u, at.tile(use), 0), v = tile + columns_at;
            barrier_wait(at.weighed_bar(nth), nth / S::stages & 1);
            const uint32_t *const behind = at.is_behind + nth % S::stages * 4;
            const bool is_behind = i > 0 && behind[w];
            const bool is_masked = masked.has(i);
            /* all four warps wait for products, or none does */
            if (is_masked || (i > 0 && (behind[0] | behind[1] | behind[2] | behind[3]))) {
                wgmma_wait<0>(x.o);
                if (is_behind)
                    x.catch_up(at.factors + nth % S::stages * S::R + row0);
                if (is_masked && !S::is_listed) /* which has zeroes there */
                    x.hide_values(p, u, row0, half, v, tile_key(u.tiles, i, S::N));
            }
            wgmma_fence();
            x.ask_sums(tile + (S::slabs - 1) * S::slab_bytes, low_word(v, S::slab_bytes));
            if (i > 0) {
                wgmma_wait_for_older();
                if (lane == 0)
                    barrier_arrive(at.ring_tiles.empty(use - 1));
            }
            if (is_loading)
                loader.go_on(p, map, at, half, use + S::stages - 1);
        }
        wgmma_wait<0>(x.o);
        if (lane == 0)
            barrier_arrive(at.ring_tiles.empty(use - 1));
        if (is_loading)
            loader.go_on(p, map, at, half, use + S::stages - 1);
        at.ml_ring.wait_full(n);
        if (u.n_parts > 1)
            x.store_part(p, u, row0, half, at.ml);
        else
            x.store(p, u, row0, half, at.ml);
        warp_arrives(at.ml_ring.empty(n));
        warp_is_done(at.unit_ring.empty(n));
    }
}

template <class S, bool is_bf16, bool has_extras>
__global__ void __launch_bounds__(LATENT_THREADS, 1)
    latent_rows(GPU_PARAM(prefill_params, p), GPU_PARAM(prefill_words, words),
                GPU_PARAM(prefill_maps, maps))
{
    GPU_SHARED_1024(uint8_t, tiles_at_1024);
    const latent_places at(tiles_at_1024);
    const uint32_t group = __shfl_sync(~0u, threadIdx.x / 128, 0);
    if (threadIdx.x == 0) {
        at.ring_tiles.init(S::loading, 8);
        for (uint32_t i = 0; i < S::stages; ++i)
            barrier_init(at.weighed_bar(i), 4);
        at.ml_ring.init(4, 8);
        at.unit_ring.init(1, 12 * ARRIVING);
        barrier_init_fence();
        map_prefetch(&maps.k);
    }
    if (p.is_chained)
        gpu::chain_wait();
    if (threadIdx.x == 128)
        unit_at<S>(p, words, blockIdx.x, at.slot(0));
    __syncthreads();
    if (threadIdx.x == 128)
        barrier_arrive(at.unit_ring.full(0));
    if (group == 0) {
        more_registers<S::score_registers>();
        score_latents<S, is_bf16, has_extras>(p, words, at);
    } else {
        fewer_registers<S::sum_registers>();
        sum_latents<S, is_bf16>(p, &maps.k, at);
    }
}

/* Joins the parts of units whose keys were cut: a warp has a row of 512 columns, a block
 * LATENT_JOIN_ROWS rows of the unit's. */
template <bool is_bf16, class S>
__global__ void __launch_bounds__(LATENT_JOIN_ROWS * 32)
    latent_join(GPU_PARAM(prefill_params, p), GPU_PARAM(prefill_words, words),
                GPU_PARAM(prefill_maps, maps))
{
    (void)maps;
    if (p.is_chained)
        gpu::chain_wait();
    const unit_place place = place_of(p, blockIdx.x);
    const prefill_entry *list = (const prefill_entry *)p.entries;
    const prefill_entry e = list ? list[place.entry] : words.list.entries[place.entry];
    if (e.part != 0 || e.last_part == 0)
        return;
    unit u;
    unit_at<S>(p, words, blockIdx.x, &u);
    const uint32_t r = blockIdx.y * LATENT_JOIN_ROWS + gpu::warp_id(), lane = gpu::lane_id();
    if (r >= u.n_rows)
        return;
    auto at = [&](uint32_t k) { return (uint64_t)(u.slot0 + k * p.num_kv_heads) * S::R + r; };
    auto ml = [&](uint32_t k) { return ((const float2 *)p.part_ml)[at(k)]; };
    float m = nothing, l = 0.0f;
    for (uint32_t k = lane; k < u.n_parts; k += 32)
        m = fmaxf(m, ml(k).x);
    m = gpu::warp_max<32>(m);
    float x[4][4] = {};
#pragma unroll 4
    for (uint32_t k = 0; k < u.n_parts; ++k) {
        const float2 of = ml(k);
        const float f = gpu::exp2_fast(of.x - m);
        l = fmaf(of.y, f, l);
        const float4 *from = (const float4 *)(p.part_o + at(k) * LATENT_COLUMNS) + lane;
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            const float4 a = from[c * 32];
            x[c][0] = fmaf(a.x, f, x[c][0]);
            x[c][1] = fmaf(a.y, f, x[c][1]);
            x[c][2] = fmaf(a.z, f, x[c][2]);
            x[c][3] = fmaf(a.w, f, x[c][3]);
        }
    }
    const uint32_t row = query_row(p, u, r);
    float lse;
    const float f = finish_row(u, row % p.num_q_heads, m, l, &lse);
    if (u.lse && lane == 0)
        u.lse[row] = lse;
    char *const to = u.out + (uint64_t)row * p.dv * 2;
#pragma unroll
    for (uint32_t c = 0; c < 4; ++c) {
        const uint32_t column = (c * 32 + lane) * 4;
        if (column < p.dv)
            *(uint2 *)(to + column * 2) = make_uint2(encode2<is_bf16>(x[c][0] * f, x[c][1] * f),
                                                     encode2<is_bf16>(x[c][2] * f, x[c][3] * f));
    }
}

template <bool is_bf16> kernel_fn latent_kernel_of(bool has_extras, bool is_listed)
{
    if (is_listed)
        return has_extras ? (kernel_fn)latent_rows<listed_shape, is_bf16, true>
                          : (kernel_fn)latent_rows<listed_shape, is_bf16, false>;
    return has_extras ? (kernel_fn)latent_rows<latent_shape, is_bf16, true>
                      : (kernel_fn)latent_rows<latent_shape, is_bf16, false>;
}

} // namespace prefill
#endif
