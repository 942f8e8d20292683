/* decode_wide_parts.cuh: what surrounds the products of decode_wide: the ring that its four loading
 * warps fill, and the merging of a segment's parts.
 *
 * A part is one block's sums of all its rows: f16, each row times its own power of two, so that
 * nothing overflows and nothing is rounded more coarsely than the output. With one cluster a
 * segment every row's part goes straight to the rank that finishes the row: by st.async, where data
 * and arrival are one message but a block sends 16 bytes a cycle, and by plain stores where that
 * rank is the block itself. Maxima and sums of weights go first, so that the loading warps, which
 * have nothing left to load, compute what each part counts while the rest is under way. With more
 * clusters parts go through scratch, and the last cluster to arrive brings them in by bulk copies,
 * rank by rank.
 */
#ifndef ATTND_GPU_DECODE_WIDE_PARTS_CUH
#define ATTND_GPU_DECODE_WIDE_PARTS_CUH

#include "kernels/gpu/sm90/decode_narrow.cuh"

namespace decode
{

/* Those that load and those that compute, from different places. */
GPU_DEVICE void sync_all()
{
    sync_some<4, 384>();
}

/* The 256 threads that compute. */
GPU_DEVICE void sync_consumers()
{
    sync_some<1, 256>();
}

/* The tiles of a block: of whole stages, so that only the last one of the segment may be short. */
struct wide_share {
    uint32_t first, n; /* tiles */
    uint32_t count; /* stages */
};

/* x over the parts of a segment, for x below 2^32 / parts. */
GPU_DEVICE uint32_t over_parts(const decode_params &p, uint32_t x)
{
    return p.n_parts == 1 ? x : (uint32_t)((uint64_t)x * p.part_reciprocal >> 32);
}

/* As decode_wide_begin has it. */
GPU_DEVICE wide_share share_of(const decode_params &p, const decode_dev_item &it, uint32_t part)
{
    constexpr uint32_t TB = DECODE_WIDE_TOKENS / DECODE_TILE;
    const uint32_t stages = (it.n_tiles + TB - 1) / TB;
    const uint32_t begin = over_parts(p, stages * part), end = over_parts(p, stages * (part + 1));
    return {begin * TB, min(end * TB, it.n_tiles) - begin * TB, end - begin};
}

/* The ring: slots of 64 tokens of K or of V, filled in the order K, K, V, V of a stage of each
 * warpgroup, so that a slot is of one warpgroup always (there is an even number of them). Barriers
 * in shared memory: */
struct wide_ring {
    uint32_t at, n_slots;
    uint32_t full, empty; /* [n_slots] */
    uint32_t merge; /* [2]: (m, l) and sums of the parts */
    uint32_t *is_last; /* of the segment's clusters; two words of meet_as_often follow */
};

/* A place in the ring, and the parity of its current use. */
struct wide_place {
    uint32_t slot, phase;

    GPU_DEVICE wide_place after(uint32_t n, uint32_t n_slots) const
    {
        const bool is_next = slot + n >= n_slots;
        return {is_next ? slot + n - n_slots : slot + n, phase ^ is_next};
    }
};

/* What a loader does, one of four warps: asks for K and V of one tile of each stage. (A warp that
 * asks for whole stages gets 40 bytes a cycle.) false: the unit has no rows, the whole cluster
 * leaves. */
template <int D, int R>
GPU_DEVICE bool load_tiles(const decode_params &p, const decode_short_words &w,
                           const CUtensorMap *map, const wide_ring &ring, uint32_t unit,
                           uint32_t part, uint32_t loader)
{
    constexpr uint32_t TB = DECODE_WIDE_TOKENS / DECODE_TILE;
    constexpr uint32_t group_bytes = 16 * D, slot_bytes = 8 * group_bytes; /* 8, 64 tokens */
    const uint32_t lane = gpu::lane_id();
    if (loader == 0 && lane == 0)
        map_prefetch(map);
    decode_dev_item it; /* from the parameters: asked for before anything is waited for */
    if (!p.items)
        it = item_at(p, w, blockIdx.z);
    if (p.is_chained)
        gpu::chain_wait();
    if (p.items)
        it = p.items[blockIdx.z];
    if (rows_of(it, unit, R, p.group).count == 0)
        return false;
    const wide_share share = share_of(p, it, part);
    auto tile_of = [&](uint32_t stage) {
        return visible_tile_at(share.first + stage * TB + loader, it.sink_tiles, it.skip_tiles);
    };
    /* two lanes copy 8 tokens each */
    const uint32_t row0 = (it.layer * 2 * p.num_kv_heads + blockIdx.y) * p.block_tokens + lane * 8;
    const uint32_t to = ring.at + (loader * 2 + lane) * group_bytes;
    const uint32_t in_block = (1u << p.tiles_shift) - 1;
    /* Block ids of the tile, a stage a lane: those of the first stages came with the parameters,
     * the others are fetched meanwhile. */
    const uint32_t n_known = p.ids_stride / TB;
    uint32_t known = 0, ids = 0;
    if (lane < n_known)
        known = w.w[p.ids_at + (blockIdx.z * p.n_parts + part) * p.ids_stride + lane * TB + loader];
    auto load_ids = [&](uint32_t stage0) {
        if ((stage0 + lane) * TB + loader < share.n)
            ids = __ldg((const uint32_t *)it.table + (tile_of(stage0 + lane) >> p.tiles_shift));
    };
    load_ids(0);
    sync_all(); /* q is asked for: behind the whole ring it would come late */
    wide_place place = {0, 0};
#pragma unroll 1
    for (uint32_t x = 0; x < (share.count + 1) / 2 * 4; ++x) {
        const uint32_t i = x / 4 * 2 + x % 2, is_v = x / 2 % 2;
        if (x % 64 == 0 && x > 0)
            load_ids(i);
        if (i < share.count) {
            const bool is_there = i * TB + loader < share.n;
            uint32_t id = __shfl_sync(~0u, known, i % 32);
            if (i >= n_known) /* else ids are not waited for */
                id = __shfl_sync(~0u, ids, i % 32);
            const uint32_t bar = ring.full + place.slot * 8;
            barrier_wait(ring.empty + place.slot * 8, place.phase ^ 1);
            if (lane == 0)
                barrier_expect(bar, is_there ? 2 * group_bytes : 0);
            gpu::sync_warp();
            if (is_there && lane < 2)
                map_copy(to + place.slot * slot_bytes, map, bar,
                         row0 + (tile_of(i) & in_block) * DECODE_TILE, is_v, id);
        }
        place = place.after(1, ring.n_slots);
    }
    return true;
}

/* ---- parts */

/* A part's sums, as they travel: eight pieces of 8 rows, of 64 rows the whole head dim, of 32 rows
 * half of it. A piece is [32 columns][lane][16 bytes], then [row] (m, l). */
template <int D, int R> struct wide_piece {
    static constexpr uint32_t columns = D * R / 64;
    static constexpr uint32_t sum_bytes = 8 * columns * 2;
    static constexpr uint32_t bytes = decode_wide_piece_bytes(D, R);

    GPU_DEVICE static uint32_t row(uint32_t piece)
    {
        return R == 64 ? piece * 8 : piece / 2 * 8;
    }
    GPU_DEVICE static uint32_t column(uint32_t piece)
    {
        return R == 64 ? 0 : piece % 2 * (D / 2);
    }
};

/* The way of a segment's parts. Rank r finishes pieces 8r / ranks to 8(r + 1) / ranks. */
struct wide_merge {
    uint32_t parts, n_ranks; /* blocks a segment and a cluster */
    uint32_t part, rank; /* this block */
    bool is_direct; /* one cluster a segment */
    uint64_t pieces; /* of the ranks: decode_params */
    uint32_t segment;
    uint32_t piece0, n_pieces, slice_bytes; /* this rank's of a part */
    uint8_t *inbox; /* shared: [part] slices */
    char *scratch; /* [part][8 pieces] */

    GPU_DEVICE uint32_t first_piece(uint32_t of_rank) const
    {
        return (uint32_t)(pieces >> 4 * of_rank) & 15;
    }
};

template <int D, int R>
GPU_DEVICE wide_merge merge_of(const decode_params &p, uint8_t *base, uint32_t unit)
{
    using piece = wide_piece<D, R>;
    wide_merge m;
    m.parts = p.n_parts;
    m.n_ranks = cluster_size();
    m.part = blockIdx.x - unit * m.parts;
    m.rank = cluster_rank();
    m.is_direct = m.parts == m.n_ranks;
    m.segment = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x - m.part;
    m.pieces = p.pieces;
    m.piece0 = m.first_piece(m.rank);
    m.n_pieces = m.first_piece(m.rank + 1) - m.piece0;
    m.slice_bytes = m.n_pieces * piece::bytes;
    m.inbox = base + (m.is_direct ? 256 * D : 0); /* not where the warpgroups exchange sums */
    m.scratch = (char *)p.part_ml + (uint64_t)m.segment * (8 * piece::bytes);
    return m;
}

/* The powers of two that bring the largest of a row's sums o, of a warpgroup's tokens, below 2^14.
 * So as f16 they do not overflow, neither on their way to the other warpgroup nor added to its. */
template <int D, int H> GPU_DEVICE void sum_factors(const float (&o)[D / 2], float (&factor)[H])
{
    float largest[H];
    bool is_finite = true;
#pragma unroll
    for (int h = 0; h < H; ++h) {
        largest[h] = 0.0f;
#pragma unroll
        for (int j = 0; j < D / 4; ++j)
            largest[h] = fmaxf(largest[h], fabsf(o[j / 2 * 4 + 2 * h + j % 2]));
        largest[h] = gpu::warp_max<4>(largest[h]);
        is_finite &= largest[h] < INFINITY;
    }
    if (__any_sync(~0u, !is_finite)) /* the largest that are finite */
#pragma unroll
        for (int h = 0; h < H; ++h) {
            largest[h] = 0.0f;
#pragma unroll
            for (int j = 0; j < D / 4; ++j) {
                const float x = fabsf(o[j / 2 * 4 + 2 * h + j % 2]);
                largest[h] = fmaxf(largest[h], x < INFINITY ? x : 0.0f);
            }
            largest[h] = gpu::warp_max<4>(largest[h]);
        }
#pragma unroll
    for (int h = 0; h < H; ++h) {
        const uint32_t exponent = __float_as_uint(largest[h]) >> 23; /* at most 254 */
        factor[h] = __uint_as_float(min(267 - exponent, 207u) << 23); /* at most 2^80 */
    }
}

/* Sends the maxima m and sums of weights l of the thread's rows and, as they are made, their sums:
 * sums(j, x) gives the thread's eight of columns 32j on of the warpgroup's half of head_dim. */
template <int D, int R, class sums_function>
GPU_DEVICE void send_parts(const wide_merge &way, const wide_ring &ring, uint32_t half,
                           const float (&m)[R / 32], const float (&l)[R / 32], sums_function sums)
{
    using piece = wide_piece<D, R>;
    constexpr int H = R / 32;
    const uint32_t warp = gpu::warp_id(), lane = gpu::lane_id(), g = lane / 4, t = lane % 4;
    const uint32_t inbox = gpu::shared_address(way.inbox);
    cluster_wait(); /* their rings are free */
    uint32_t owner[H];
    uint32_t in_inbox[H]; /* of its rank, where the piece lies */
    char *dst[H]; /* in scratch */
#pragma unroll
    for (int h = 0; h < H; ++h) {
        const uint32_t u = warp % 4 * 2 + (H == 2 ? h : half);
        owner[h] = ((u + 1) * way.n_ranks - 1) / 8;
        const uint32_t first = way.first_piece(owner[h]), end = way.first_piece(owner[h] + 1);
        in_inbox[h] = (way.rank * (end - first) + u - first) * piece::bytes;
        dst[h] = way.scratch + (way.part * 8 + u) * piece::bytes;
        if (t == 0 && (H == 1 || half == 0)) {
            const uint32_t at = piece::sum_bytes + g * 8;
            if (way.is_direct)
                cluster_store2(cluster_address(inbox + in_inbox[h] + at, owner[h]), m[h], l[h],
                               cluster_address(ring.merge, owner[h]));
            else
                __stcg((float2 *)(dst[h] + at), make_float2(m[h], l[h]));
        }
    }
#pragma unroll
    for (int j = 0; j < D / 64; ++j) {
        const uint32_t at = ((H == 2 ? half * (D / 64) : 0) + j) * 512 + lane * 16;
        float x[H][8];
        sums(j, x);
#pragma unroll
        for (int h = 0; h < H; ++h) {
            float4 v;
            float *word = &v.x;
#pragma unroll
            for (int k = 0; k < 4; ++k)
                word[k] = __uint_as_float(gpu::f16_encode2(x[h][2 * k], x[h][2 * k + 1]));
            if (!way.is_direct)
                __stcg((float4 *)(dst[h] + at), v);
            else if (owner[h] == way.rank)
                *(float4 *)(way.inbox + in_inbox[h] + at) = v;
            else
                cluster_store4(cluster_address(inbox + in_inbox[h], owner[h]) + at, v,
                               cluster_address(ring.merge + 8, owner[h]));
        }
    }
}

/* What the 128 loading threads do: each part's maximum in a row gives way to what the part counts
 * there. */
template <int D, int R>
GPU_DEVICE void weigh_parts(const decode_params &p, const decode_short_words &w,
                            const wide_merge &way, const wide_ring &ring, uint32_t unit)
{
    using piece = wide_piece<D, R>;
    const uint32_t tid = threadIdx.x - 256;
    if (way.is_direct && tid == 0) {
        const uint32_t ml_bytes = way.n_pieces * 8 * 8;
        barrier_expect(ring.merge, way.parts * ml_bytes);
        barrier_expect(ring.merge + 8, (way.parts - 1) * (way.slice_bytes - ml_bytes));
    }
    const decode_dev_item it = item_at(p, w, blockIdx.z);
    const unit_rows rows = rows_of(it, unit, R, p.group);
    cluster_arrive();
    cluster_wait();
    if (!way.is_direct) {
        cluster_sync();
        if (tid == 0) { /* only the last cluster goes on; its parts are all there */
            const uint32_t n_clusters = way.parts / way.n_ranks;
            uint32_t *arrivals =
                p.arrivals + over_parts(p, way.segment) * DECODE_MAX_CLUSTER + way.rank;
            __threadfence();
            const uint32_t before = atomicAdd(arrivals, 1);
            *ring.is_last = before + 1 == n_clusters;
            if (before + 1 == n_clusters) {
                *arrivals = 0;
                __threadfence();
                proxy_fence_all();
                barrier_expect(ring.merge + 8, way.parts * way.slice_bytes);
#pragma unroll 1
                for (uint32_t c = 0; c < way.parts; ++c)
                    bulk_copy(gpu::shared_address(way.inbox) + c * way.slice_bytes,
                              way.scratch + (c * 8 + way.piece0) * piece::bytes, way.slice_bytes,
                              ring.merge + 8);
            }
        }
        sync_all();
        if (!*ring.is_last)
            return;
    }
    barrier_wait(ring.merge + (way.is_direct ? 0 : 8), 0);

    uint32_t lg = 1; /* the parts of a row are the lanes' */
    while (1u << lg < way.parts && lg < 5)
        ++lg;
    const uint32_t c0 = tid & ((1u << lg) - 1), c1 = c0 + 32, part_step = way.slice_bytes / 8;
    for (uint32_t e = tid >> lg; e < way.n_pieces * 8; e += 128 >> lg) {
        const uint32_t u = e / 8;
        float2 *ml = (float2 *)(way.inbox + u * piece::bytes + piece::sum_bytes) + e % 8;
        const float2 x0 = c0 < way.parts ? ml[c0 * part_step] : make_float2(nothing, 0.0f);
        const float2 x1 = c1 < way.parts ? ml[c1 * part_step] : make_float2(nothing, 0.0f);
        float m = fmaxf(x0.x, x1.x);
#pragma unroll 1
        for (uint32_t d = 1; d < 1u << lg; d *= 2)
            m = fmaxf(m, gpu::shuffle_xor(m, d));
        float f0 = gpu::exp2_fast(x0.x - m), f1 = gpu::exp2_fast(x1.x - m);
        float l = x0.y * f0 + x1.y * f1;
#pragma unroll 1
        for (uint32_t d = 1; d < 1u << lg; d *= 2)
            l += gpu::shuffle_xor(l, d);
        const uint32_t r = piece::row(way.piece0 + u) + e % 8;
        if (r >= rows.count)
            continue;
        const float f = finish_row(it, p, rows.query_row(r, p.num_q_heads, blockIdx.y), m, l,
                                   piece::column(way.piece0 + u) == 0 && c0 == 0);
        if (c0 < way.parts)
            ml[c0 * part_step].x = f0 * f;
        if (c1 < way.parts)
            ml[c1 * part_step].x = f1 * f;
    }
    sync_all(); /* weights */
}

/* What the 256 computing threads do when all is there: this rank's rows, 8 elements at a time,
 * twice side by side, as each is a chain of loads and sums. */
template <bool is_bf16, int D, int R>
GPU_DEVICE void add_parts(const decode_params &p, const wide_merge &way, const decode_dev_item &it,
                          const unit_rows &rows, uint32_t head)
{
    using piece = wide_piece<D, R>;
    const uint32_t n = way.n_pieces * piece::columns;
#pragma unroll 1
    for (uint32_t e0 = threadIdx.x; e0 < n; e0 += 512) {
        const uint8_t *value[2], *f[2];
        float x[2][8] = {};
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const uint32_t e = min(e0 + i * 256, n - 1), in_piece = e % piece::columns;
            const uint8_t *at = way.inbox + e / piece::columns * piece::bytes;
            value[i] = at + in_piece * 16;
            f[i] = at + piece::sum_bytes + in_piece / 4 % 8 * 8;
        }
#pragma unroll 4
        for (uint32_t c = 0; c < way.parts; ++c)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const uint4 v = *(const uint4 *)(value[i] + c * way.slice_bytes);
                const float w = *(const float *)(f[i] + c * way.slice_bytes);
                const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    x[i][2 * k] += gpu::f16_decode(words[k] & 0xffff) * w;
                    x[i][2 * k + 1] += gpu::f16_decode(words[k] >> 16) * w;
                }
            }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const uint32_t e = e0 + i * 256, in_piece = e % piece::columns;
            const uint32_t u = way.piece0 + e / piece::columns;
            const uint32_t r = piece::row(u) + in_piece / 4 % 8;
            if (e >= n || r >= rows.count)
                continue;
            const uint32_t column = piece::column(u) + in_piece / 32 * 32 + in_piece % 4 * 2;
            const uint32_t row = rows.query_row(r, p.num_q_heads, head);
            uint32_t *out = (uint32_t *)(it.out + ((uint64_t)row * D + column) * 2);
#pragma unroll
            for (int k = 0; k < 4; ++k)
                out[4 * k] = encode2<is_bf16>(x[i][2 * k], x[i][2 * k + 1]);
        }
    }
}

} // namespace decode
#endif
