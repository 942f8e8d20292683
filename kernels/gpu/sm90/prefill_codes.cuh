/* prefill_codes.cuh: four warps that bring quantised K and V as the products take them: two for K,
 * two for V, each half the rows of every tile. Codes come from device memory into registers, the
 * next 16 rows while these are decoded, and go where a tensor-map copy would have put elements: of
 * K the codes as they are, which the type of the queries holds exactly, and beside the tile the
 * scales, which meet the scores; of V code times scale, rounded once. Rows that are not cached
 * become zero.
 */
#ifndef ATTND_GPU_PREFILL_CODES_CUH
#define ATTND_GPU_PREFILL_CODES_CUH

#include "kernels/gpu/sm90/prefill_load.cuh"

namespace prefill
{

/* 16 rows of a tile in a warp: lane l has codes 16 (l % pieces) and up of rows l / pieces, and so
 * many further on; lane r has the scale of row r. */
template <class S> struct code_rows {
    static constexpr uint32_t pieces = S::D / 16, apart = 32 / pieces, n = 16 / apart;
    uint4 codes[n];
    float scale;
};

struct code_source {
    const char *base, *scales; /* of the layer and head, in block 0 */
    uint64_t block_bytes;
    const uint32_t *table;
    uint32_t total, row_bytes, block_shift;
};

template <class S>
GPU_DEVICE void fetch_codes(const code_source &from, uint32_t key, code_rows<S> &x)
{
    const uint32_t lane = gpu::lane_id(), piece = lane % x.pieces, mine = key + lane % 16;
    const bool is_there = mine < from.total;
    const uint32_t id = is_there ? __ldg(from.table + (mine >> from.block_shift)) : 0;
    const uint32_t slot = is_there ? mine & ((1u << from.block_shift) - 1) : 0;
    const uint64_t block = id * from.block_bytes;
    const uint64_t row = (uint64_t)from.base + block + slot * from.row_bytes;
    x.scale = is_there ? *(const float *)(from.scales + block + slot * 4) : 0.0f;
#pragma unroll
    for (uint32_t i = 0; i < x.n; ++i) {
        const uint32_t r = i * x.apart + lane / x.pieces;
        const uint64_t at = (uint64_t)__shfl_sync(~0u, (uint32_t)(row >> 32), r) << 32 |
                            __shfl_sync(~0u, (uint32_t)row, r);
        x.codes[i] = make_uint4(0, 0, 0, 0);
        if (key + r < from.total && piece * 16 < from.row_bytes)
            x.codes[i] = *(const uint4 *)(at + piece * 16);
    }
}

/* Two codes of a word, the first of them in the low half; of V times the scale. */
template <bool is_bf16, bool is_fp8, bool is_v, int pair>
GPU_DEVICE uint32_t decode_two(uint32_t codes, float scale)
{
    float x, y;
    if (is_bf16 && is_fp8 && !is_v)
        return gpu::e4m3_to_bf16x2<pair>(codes);
    if (is_fp8) {
        const uint32_t two = gpu::e4m3_to_bf16x2<pair>(codes);
        x = __uint_as_float(two << 16);
        y = __uint_as_float(two & 0xffff0000);
    } else {
        x = gpu::int8_decode(codes, 2 * pair);
        y = gpu::int8_decode(codes, 2 * pair + 1);
    }
    return is_v ? encode2<is_bf16>(x * scale, y * scale) : encode2<is_bf16>(x, y);
}

template <bool is_bf16, bool is_fp8, bool is_v>
GPU_DEVICE uint4 decode_eight(uint32_t a, uint32_t b, float scale)
{
    return make_uint4(decode_two<is_bf16, is_fp8, is_v, 0>(a, scale),
                      decode_two<is_bf16, is_fp8, is_v, 1>(a, scale),
                      decode_two<is_bf16, is_fp8, is_v, 0>(b, scale),
                      decode_two<is_bf16, is_fp8, is_v, 1>(b, scale));
}

/* row: of the tile at `to` */
template <bool is_bf16, bool is_fp8, bool is_v, class S>
GPU_DEVICE void decode_rows(const code_rows<S> &x, uint32_t row, uint32_t to)
{
    const uint32_t lane = gpu::lane_id(), piece = lane % x.pieces * 2;
    const bool is_turned = piece >= 8; /* eight neighbouring lanes meet no bank twice */
#pragma unroll
    for (uint32_t i = 0; i < x.n; ++i) {
        const uint32_t r = i * x.apart + lane / x.pieces, at = row + r;
        const float scale = __shfl_sync(~0u, x.scale, r);
        const uint4 c = x.codes[i];
        uint4 low = decode_eight<is_bf16, is_fp8, is_v>(c.x, c.y, scale);
        uint4 high = decode_eight<is_bf16, is_fp8, is_v>(c.z, c.w, scale);
        const uint32_t dst = to + piece / 8 * S::slab_bytes + at * 128;
        const uint32_t first = dst + (piece % 8 ^ at % 8) * 16;
        const uint32_t second = dst + ((piece % 8 + 1) ^ at % 8) * 16;
        shared_store16(is_turned ? second : first, is_turned ? high : low);
        shared_store16(is_turned ? first : second, is_turned ? low : high);
    }
}

template <bool is_bf16, class S, bool is_v>
GPU_DEVICE void decode_tiles(const prefill_params &p, const places<S> &at)
{
    constexpr uint32_t N = S::N, half = N / 2, n_parts = half / 16;
    const uint32_t lane = gpu::lane_id(), row0 = gpu::warp_id() % 2 * half;
    const ring<S::stages> tiles = is_v ? at.v_ring : at.k_ring;
    const uint32_t stages = is_v ? at.v : at.k;
    code_source from;
    from.block_bytes = p.block_bytes;
    from.block_shift = p.block_shift;
    from.row_bytes = is_v ? p.dv : p.dk;
    uint32_t n_made = 0;
#pragma unroll 1
    for (uint32_t n = 0;; ++n) {
        const unit &u = *at.slot(n);
        at.unit_ring.wait_full(n);
        if (u.n_rows == 0)
            break;
        const uint64_t head = (uint64_t)u.head * p.block_tokens;
        const char *const layer = p.base + u.layer * p.layer_bytes;
        from.base = layer + (is_v ? p.v_offset : 0) + head * from.row_bytes;
        from.scales = layer + (is_v ? p.v_scales : p.k_scales) + head * 4;
        from.table = u.table;
        from.total = u.total;
        const uint32_t n_all = u.n_tiles * n_parts;
        auto fetch = [&](uint32_t i, code_rows<S> &x) {
            if (i < n_all)
                fetch_codes<S>(from, tile_key(u.tiles, i / n_parts, N) + row0 + i % n_parts * 16,
                               x);
        };
        auto decode = [&](uint32_t i, const code_rows<S> &x) {
            const uint32_t use = n_made + i / n_parts, row = row0 + i % n_parts * 16;
            const uint32_t to = stages + use % S::stages * S::tile_bytes;
            if (i % n_parts == 0)
                tiles.wait_empty(use);
            if (!is_v && lane < 16)
                at.k_scales(use)[row + lane] = x.scale;
            if (p.is_fp8)
                decode_rows<is_bf16, true, is_v, S>(x, row, to);
            else
                decode_rows<is_bf16, false, is_v, S>(x, row, to);
            if (i % n_parts != n_parts - 1)
                return;
            proxy_fence();
            gpu::sync_warp();
            if (lane < S::arriving)
                barrier_arrive(tiles.full(use));
        };
        code_rows<S> a, b;
        fetch(0, a);
#pragma unroll 1
        for (uint32_t i = 0; i < n_all; i += 2) { /* n_parts is even */
            fetch(i + 1, b);
            decode(i, a);
            fetch(i + 2, a);
            decode(i + 1, b);
        }
        n_made += u.n_tiles;
        warp_is_done(at.unit_ring.empty(n));
    }
}

} // namespace prefill
#endif
