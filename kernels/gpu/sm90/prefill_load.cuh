/* prefill_load.cuh: what the prefill kernels have in shared memory, and the four warps that bring
 * it there: K and V by tensor-map copies, the rows of q, and which unit is next.
 */
#ifndef ATTND_GPU_PREFILL_LOAD_CUH
#define ATTND_GPU_PREFILL_LOAD_CUH

#include "kernels/gpu/sm90/prefill_unit.cuh"

namespace prefill
{

/* Lanes that arrive for their warp where units and scales are passed on: one, behind what all have
 * stored and loaded. racecheck takes that of the arriving lanes alone for done, so all arrive where
 * it is to follow (tests/kernels/README.md). */
#ifdef ATTND_RACECHECK
constexpr uint32_t ARRIVING = 32;
#else
constexpr uint32_t ARRIVING = 1;
#endif

template <int dim, bool is_dilated_, bool has_codes_, bool has_nodes_ = false,
          uint32_t rows = prefill_rows(dim, is_dilated_)>
struct shape {
    static constexpr int D = dim; /* head dim */
    static constexpr bool is_dilated = is_dilated_, has_codes = has_codes_; /* quantised K and V */
    static constexpr bool has_nodes = has_nodes_; /* items are trees */
    static constexpr bool is_narrow = is_dilated, is_listed = false;
    static constexpr uint32_t R = rows, N = prefill_keys(D), slabs = D / 64;
    static constexpr uint32_t groups = R / 64, computing = groups * 128;
    static constexpr uint32_t threads = computing + 128;
    static constexpr uint32_t tile_bytes = prefill_tile_bytes(D), slab_bytes = N * 128;
    static constexpr uint32_t stages = prefill_stages(D, is_narrow);
    static constexpr uint32_t q_stages = prefill_q_stages(D), q_bytes = R * D * 2;
    static constexpr uint32_t slot_bytes = prefill_slot_bytes(is_narrow);
    typedef part<is_dilated, has_nodes> keys;
    static constexpr uint32_t arriving = has_codes ? ARRIVING : 1; /* where keys are passed on */
    static constexpr int blocks = prefill_blocks_at_once(D, R); /* on a processor */
    static constexpr int few_registers = groups == 3 ? 32 : 40;
    static constexpr int many_registers = groups == 3 ? 160 : blocks == 2 ? 216 : 232;
};

/* A ring of barriers in shared memory, n full ones and n empty ones; use i is of stage i % n. */
template <uint32_t n> struct ring {
    uint32_t at;

    GPU_DEVICE uint32_t full(uint32_t i) const
    {
        return at + i % n * 8;
    }
    GPU_DEVICE uint32_t empty(uint32_t i) const
    {
        return at + (n + i % n) * 8;
    }
    GPU_DEVICE void wait_full(uint32_t i) const
    {
        barrier_wait(full(i), i / n & 1);
    }
    GPU_DEVICE void wait_empty(uint32_t i) const
    {
        barrier_wait(empty(i), (i / n & 1) ^ 1);
    }
    GPU_DEVICE void init(uint32_t n_full, uint32_t n_empty) const
    {
        for (uint32_t i = 0; i < n; ++i) {
            barrier_init(full(i), n_full);
            barrier_init(empty(i), n_empty);
        }
    }
};

template <class S> struct places {
    uint32_t k, v, q;
    uint8_t *units; /* [PREFILL_SLOTS] of slot_bytes */
    ring<S::stages> k_ring, v_ring;
    ring<S::q_stages> q_ring;
    ring<PREFILL_SLOTS> unit_ring;
    float *scales; /* [stages][N] of K, if S::has_codes */

    GPU_DEVICE float *k_scales(uint32_t use) const
    {
        return scales + use % S::stages * S::N;
    }
    GPU_DEVICE unit *slot(uint32_t n) const
    {
        return (unit *)(units + n % PREFILL_SLOTS * S::slot_bytes);
    }
};

template <class S> GPU_DEVICE places<S> places_in(uint8_t *base)
{
    places<S> x;
    x.k = gpu::shared_address(base);
    x.v = x.k + S::stages * S::tile_bytes;
    x.q = x.v + S::stages * S::tile_bytes;
    const uint32_t units = x.q + S::q_stages * S::q_bytes;
    x.units = base + (units - x.k);
    x.k_ring.at = units + PREFILL_SLOTS * S::slot_bytes;
    x.v_ring.at = x.k_ring.at + 2 * S::stages * 8;
    x.q_ring.at = x.v_ring.at + 2 * S::stages * 8;
    x.unit_ring.at = x.q_ring.at + 2 * S::q_stages * 8;
    x.scales = (float *)(base + (x.unit_ring.at + 2 * PREFILL_SLOTS * 8 - x.k));
    return x;
}

/* Dynamic shared memory from where swizzled layouts may begin. */
GPU_DEVICE uint8_t *aligned_shared()
{
    GPU_SHARED(uint8_t, raw);
    return raw + ((PREFILL_ALIGN - (gpu::shared_address(raw) % PREFILL_ALIGN)) % PREFILL_ALIGN);
}

/* By all lanes, when their stores are done: one arrival. */
GPU_DEVICE void warp_arrives(uint32_t bar)
{
    gpu::sync_warp();
    if (gpu::lane_id() == 0)
        barrier_arrive(bar);
}

/* By all lanes, when they have read a unit. */
GPU_DEVICE void warp_is_done(uint32_t bar)
{
    gpu::sync_warp();
    if (gpu::lane_id() < ARRIVING)
        barrier_arrive(bar);
}

/* A tile by tensor-map copies of box_tokens rows each, out of the block that lane b has for box b:
 * by all lanes, of which one asks. more: bytes that come beside them. */
template <class S>
GPU_DEVICE void ask_for_boxes(const prefill_params &p, const CUtensorMap *map, bool is_asking,
                              uint32_t ids, uint32_t n_boxes, uint32_t head_row, uint32_t layer,
                              uint32_t key, uint32_t to, uint32_t full, uint32_t more = 0)
{
    if (is_asking)
        barrier_expect(full, n_boxes * p.box_tokens * S::slabs * 128 + more);
#pragma unroll
    for (uint32_t b = 0; b < S::N / 16; ++b) {
        if (b >= n_boxes)
            break;
        const uint32_t id = __shfl_sync(~0u, ids, b), first = b * p.box_tokens;
        const uint32_t row = head_row + ((key + first) & (p.block_tokens - 1));
        if (is_asking)
#pragma unroll
            for (uint32_t s = 0; s < S::slabs; ++s)
                map_copy(to + s * S::slab_bytes + first * 128, map, full, s * 64, row, layer, id);
    }
}

/* One warp for K, one for V: one for both would take longer than the products. */
template <class S, bool is_v>
GPU_DEVICE void load_tiles(const prefill_params &p, const CUtensorMap *map, const places<S> &at)
{
    constexpr uint32_t N = S::N;
    const uint32_t lane = gpu::lane_id();
    const bool is_asking = elect_one();
    const ring<S::stages> tiles = is_v ? at.v_ring : at.k_ring;
    const uint32_t stages = is_v ? at.v : at.k;
    uint32_t n_asked = 0;
    if (S::has_codes) /* the launch before has written what copies bring */
        proxy_fence_all();
#pragma unroll 1
    for (uint32_t n = 0;; ++n) {
        const unit &u = *at.slot(n);
        at.unit_ring.wait_full(n);
        if (u.n_rows == 0)
            break;

        /* decoded keys lie one behind the other, in blocks of one head and layer */
        const uint32_t head_row = S::has_codes ? 0 : u.head * p.block_tokens;
        const uint32_t layer = S::has_codes ? 0 : u.layer, total = u.total;
        const uint32_t n_tiles = u.n_tiles, block0 = u.block0, *const table = u.table;
        auto load_id = [&](uint32_t i) {
            const uint32_t key = tile_key(u.tiles, i, N) + lane * p.box_tokens;
            const bool is_there = i < n_tiles && lane * p.box_tokens < N && key < total;
            if (S::has_codes)
                return block0 + (key >> p.block_shift);
            return is_there ? __ldg(table + (key >> p.block_shift)) : 0;
        };
        uint32_t next = load_id(0);
#pragma unroll 1
        for (uint32_t i = 0; i < n_tiles; ++i) {
            const uint32_t ids = next, x = n_asked + i, key = tile_key(u.tiles, i, N);
            const uint32_t n_boxes = (min(N, total - key) + p.box_tokens - 1) / p.box_tokens;
            const uint32_t to = stages + x % S::stages * S::tile_bytes, full = tiles.full(x);
            next = load_id(i + 1);
            tiles.wait_empty(x);
            const uint32_t scales = S::has_codes && !is_v ? N * 4 : 0;
            ask_for_boxes<S>(p, map, is_asking, ids, n_boxes, head_row, layer, key, to, full,
                             scales);
            if (scales > 0 && is_asking)
                bulk_copy(gpu::shared_address(at.k_scales(x)),
                          p.scales + (uint64_t)block0 * PREFILL_DECODED_TOKENS + key, scales, full);
        }
        n_asked += n_tiles;
        warp_is_done(at.unit_ring.empty(n));
    }
}

/* What a warp that loads K or V of a dilated layer knows of the branch it is at. */
struct branch_source {
    const char *base; /* of the layer and head, in block 0 */
    uint64_t block_bytes;
    const uint32_t *table;
    branch of;
    uint32_t n_keys, row_bytes; /* keys that are cached; of a token */
};

/* Of a tile from `key` on, the blocks of its rows: lane l has those of rows l, 32 + l, ... They are
 * asked for one tile ahead, because a warp that waits for them brings nothing meanwhile. */
template <class S> struct row_blocks {
    uint32_t ids[S::N / 32];

    GPU_DEVICE void load(const prefill_params &p, const branch_source &from, uint32_t key)
    {
#pragma unroll
        for (uint32_t i = 0; i < S::N / 32; ++i) {
            const uint32_t mine = key + i * 32 + gpu::lane_id();
            const uint32_t block = branch_token(from.of, mine) >> p.block_shift;
            ids[i] = mine < from.n_keys ? __ldg(from.table + block) : 0;
        }
    }
};

/* Asks for a tile of a branch whose tokens are apart, row by row: a lane knows where its rows lie,
 * and eight bring 16 bytes each of one. Rows that are not cached become zero. */
template <class S>
GPU_DEVICE void gather_tile(const prefill_params &p, const branch_source &from,
                            const row_blocks<S> &blocks, uint32_t key, uint32_t to)
{
    constexpr uint32_t pieces = 8, rows = 32 / pieces; /* of a slab, at a time */
    const uint32_t lane = gpu::lane_id(), piece = lane % pieces, nth = lane / pieces;
    const int n_left = (int)(from.n_keys - key - nth);
#pragma unroll
    for (uint32_t i = 0; i < S::N / 32; ++i) {
        const uint32_t token = branch_token(from.of, key + i * 32 + lane);
        const char *const row = from.base + blocks.ids[i] * from.block_bytes +
                                (token & (p.block_tokens - 1)) * from.row_bytes;
        const uint32_t low = (uint32_t)(uint64_t)row, high = (uint32_t)((uint64_t)row >> 32);
#pragma unroll
        for (uint32_t k = 0; k < 32; k += rows) {
            const uint64_t at =
                (uint64_t)__shfl_sync(~0u, high, k + nth) << 32 | __shfl_sync(~0u, low, k + nth);
            const uint32_t r = i * 32 + k;
            const uint32_t dst = to + (r + nth) * 128 + (piece ^ (r + nth) % 8) * 16;
            const bool has_row = n_left > (int)r;
#pragma unroll
            for (uint32_t s = 0; s < S::slabs; ++s) { /* head dims are 64 and more */
                const bool has = has_row && (s == 0 || (s * 8 + piece) * 16 < from.row_bytes);
                gpu::copy16_async(dst + s * S::slab_bytes, (const char *)at + piece * 16 + s * 128,
                                  has);
            }
        }
    }
}

/* The same of the branches of a dilated layer: with rate 1 by tensor-map copies, of other rates row
 * by row, which the next tile's copies overlap. */
template <class S, bool is_v>
GPU_DEVICE void load_dilated(const prefill_params &p, const CUtensorMap *map, const places<S> &at)
{
    constexpr uint32_t N = S::N;
    const uint32_t lane = gpu::lane_id();
    const bool is_asking = elect_one();
    const ring<S::stages> tiles = is_v ? at.v_ring : at.k_ring;
    const uint32_t stages = is_v ? at.v : at.k;
    branch_source from;
    from.block_bytes = p.block_bytes;
    from.row_bytes = (is_v ? p.dv : p.dk) * 2;
    uint32_t n_asked = 0;
#pragma unroll 1
    for (uint32_t n = 0;; ++n) {
        const unit &u = *at.slot(n);
        at.unit_ring.wait_full(n);
        if (u.n_rows == 0)
            break;
        from.table = u.table;
        from.base = p.base + u.layer * p.layer_bytes + (is_v ? p.v_offset : 0) +
                    (uint64_t)u.head * p.block_tokens * from.row_bytes;
        const uint32_t layer = u.layer, head_row = u.head * p.block_tokens;
#pragma unroll 1
        for (part<true> keys(p, u, N); keys.nth < u.n_branches; keys.next()) {
            from.of = keys.at().of;
            const uint32_t shift = 31 - __clz(from.of.rate), n_tiles = keys.tiles().n;
            from.n_keys = (u.total - from.of.offset + from.of.rate - 1) >> shift;
            row_blocks<S> blocks;
            if (from.of.rate > 1)
                blocks.load(p, from, tile_key(keys.tiles(), 0, N));
#pragma unroll 1
            for (uint32_t i = 0; i < n_tiles; ++i, ++n_asked) {
                const uint32_t x = n_asked, key = tile_key(keys.tiles(), i, N);
                const uint32_t to = stages + x % S::stages * S::tile_bytes, full = tiles.full(x);
                if (from.of.rate > 1) {
                    const row_blocks<S> now = blocks;
                    if (i + 1 < n_tiles)
                        blocks.load(p, from, tile_key(keys.tiles(), i + 1, N));
                    tiles.wait_empty(x);
                    gather_tile<S>(p, from, now, key, to);
                    gpu::copy_commit();
                    if (i > 0) {
                        gpu::copy_wait<1>();
                        proxy_fence();
                        warp_arrives(tiles.full(x - 1));
                    }
                    if (i + 1 == n_tiles) {
                        gpu::copy_wait<0>();
                        proxy_fence();
                        warp_arrives(full);
                    }
                    continue;
                }
                const uint32_t n_boxes =
                    (min(N, from.n_keys - key) + p.box_tokens - 1) / p.box_tokens;
                const uint32_t block = (key + lane * p.box_tokens) >> p.block_shift;
                const uint32_t ids = lane < n_boxes ? __ldg(from.table + block) : 0;
                tiles.wait_empty(x);
                ask_for_boxes<S>(p, map, is_asking, ids, n_boxes, head_row, layer, key, to, full);
            }
        }
        warp_is_done(at.unit_ring.empty(n));
    }
}

template <class S, bool is_v>
GPU_DEVICE void load_keys(const prefill_params &p, const CUtensorMap *map, const places<S> &at)
{
    if constexpr (S::is_dilated)
        load_dilated<S, is_v>(p, map, at);
    else
        load_tiles<S, is_v>(p, map, at);
}

/* Asks for rows [from, end) of a unit's q, multiples of `at_once`: lanes find where they lie and
 * bring 16 bytes each to where the swizzled layout has them. */
template <class S, uint32_t at_once>
GPU_DEVICE void ask_for_rows(const prefill_params &p, const unit &u, uint32_t from, uint32_t end,
                             uint32_t to)
{
    constexpr uint32_t pieces = 8, rows = 32 / pieces; /* of a slab, at a time */
    const uint32_t lane = gpu::lane_id(), piece = lane % pieces;
    const uint32_t row_bytes = p.dk * 2, n_rows = u.n_rows;
    const char *const q = u.q;
#pragma unroll 1
    for (; from < end; from += at_once) {
        const uint32_t mine = query_row(p, u, from + lane % at_once);
#pragma unroll
        for (uint32_t k = 0; k < at_once; k += rows) {
            const uint32_t r = from + k + lane / pieces;
            const uint64_t row = __shfl_sync(~0u, mine, k + lane / pieces);
            const char *const at = q + row * row_bytes + piece * 16;
            const uint32_t dst =
                to + r / 64 * (64 * S::D * 2) + r % 64 * 128 + (piece ^ r % 8) * 16;
#pragma unroll
            for (uint32_t s = 0; s < S::slabs; ++s) {
                const bool has = r < n_rows && (s * pieces + piece) * 16 < row_bytes;
                gpu::copy16_async(dst + s * 8192, has ? at + s * 128 : q, has);
            }
        }
    }
}

/* The number of a block's nth unit; n_units or more: it has none. A block takes a unit while the
 * one before is computed, so all take their second ones at the beginning. Where no block has more,
 * those that began with long ones have the short ones then. */
GPU_DEVICE uint32_t unit_number(const prefill_params &p, uint32_t nth)
{
    if (nth == 0)
        return blockIdx.x;
    if (p.n_units > 2 * gridDim.x)
        return gridDim.x + atomicAdd(&p.counters[0], 1);
    return nth == 1 ? 2 * gridDim.x - 1 - blockIdx.x : p.n_units;
}

/* Takes a unit into a slot; n_rows 0: there is none. nth: of the block's, counted on. */
template <class S>
GPU_DEVICE void take_unit(const prefill_params &p, const prefill_words &words, uint32_t *nth,
                          unit *u)
{
    u->n_rows = 0;
    for (uint32_t w; u->n_rows == 0 && (w = unit_number(p, (*nth)++)) < p.n_units;)
        if constexpr (S::is_dilated)
            dilated_unit_at<S>(p, words, w, u); /* may have no rows */
        else
            unit_at<S>(p, words, w, u);
}

/* Two warps: each brings half of q, but not the first unit's (compute). The first takes units and
 * tells the others: the next one when the one before the current is done. */
template <class S, bool is_taking>
GPU_DEVICE void load_queries(const prefill_params &p, const prefill_words &words,
                             const places<S> &at)
{
    constexpr uint32_t half = S::R / 2, from = is_taking ? 0 : half;
    uint32_t nth = S::is_dilated ? 0 : 1; /* the first was taken before the warps parted */
#pragma unroll 1
    for (uint32_t n = 0;; ++n) {
        unit &u = *at.slot(n);
        if (is_taking) {
            at.unit_ring.wait_empty(n);
            if (gpu::lane_id() == 0) {
                if (n > 0 || S::is_dilated)
                    take_unit<S>(p, words, &nth, &u);
                barrier_arrive(at.unit_ring.full(n));
            }
            gpu::sync_warp();
        } else {
            at.unit_ring.wait_full(n);
        }
        if (u.n_rows == 0)
            break;
        at.q_ring.wait_empty(n);
        if (n > 0 || S::is_dilated) /* else the warps that compute bring it */
            ask_for_rows<S, 32>(p, u, from, from + half, at.q + n % S::q_stages * S::q_bytes);
        copies_wait();
        proxy_fence();
        gpu::sync_warp();
        if (gpu::lane_id() == 0)
            barrier_arrive(at.q_ring.full(n));
        if (!is_taking && gpu::lane_id() < ARRIVING)
            barrier_arrive(at.unit_ring.empty(n));
    }
    if (is_taking && gpu::lane_id() == 0 && atomicAdd(&p.counters[1], 1) == gridDim.x - 1)
        p.counters[0] = p.counters[1] = 0; /* the last block: all have taken what they take */
}

} // namespace prefill
#endif
