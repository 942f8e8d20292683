/* decode_wide.cuh: the kernel for more than 16 query rows a kv head: R = 32 or 64 rows a thread
 * block on the warpgroup matrix instructions. Those have 64 rows; 32 fill half of each warp's, so
 * that products take as long as those of 64 and everything else about half.
 *
 * Four warps ask for K and V, in stages of 64 tokens; two warpgroups take every second stage each.
 * A warpgroup computes the scores of its stage, their weights in its registers, and the weighted
 * sums of the whole head dim, and meets nobody: while one works on weights, the other's products
 * keep the matrix units busy. At the end they exchange halves of their sums, so that each holds
 * half the head dim of all tokens.
 *
 * decode_wide_stage.cuh has the steps of a stage. The blocks of a cluster share a segment;
 * decode_wide_parts.cuh says how their sums meet.
 *
 * What runs once is kept short and early: it costs about 3 cycles an instruction, unrolled loops
 * more than their latency, a barrier 65 cycles to set up. So q is asked for first, while the
 * loaders look up their first blocks, the computing warps share the barriers, and registers change
 * hands while q is on its way.
 */
#ifndef ATTND_GPU_DECODE_WIDE_CUH
#define ATTND_GPU_DECODE_WIDE_CUH

#include "kernels/gpu/sm90/decode_wide_stage.cuh"

namespace decode
{

#ifdef ATTND_RACECHECK
/* So that compute-sanitizer's racecheck can follow both warpgroups: where one met among itself more
 * often than the other, it takes what they exchange for races, whatever barrier of both stands
 * between (tests/kernels/README.md). The one that met less often makes up for it. met: [2], shared,
 * 0. */
GPU_DEVICE void meet_as_often(uint32_t half, uint32_t n_met, uint32_t *met)
{
    if (threadIdx.x % 128 == 0)
        atomicAdd(&met[half], n_met);
    sync_consumers();
    const uint32_t other = atomicAdd(&met[half ^ 1], 0); /* racecheck leaves atomics alone */
    while (n_met < other)
        warpgroup_any(half, false, n_met);
}
#endif

/* The row of the matrix instructions' 64 that row r of the unit is: of 32 rows, eight in each
 * warp's sixteen, so that all threads have half as much to do. */
template <int R> GPU_DEVICE uint32_t matrix_row(uint32_t r)
{
    return R == 64 ? r : r / 8 * 16 + r % 8;
}

/* Half of the sums o stay, in a, the others are written as f16, times their row's factor, for the
 * other warpgroup. Of four elements of o those of the first H rows count. */
template <int D, int H, bool is_high>
GPU_DEVICE void swap_sums(const float (&o)[D / 2], const float (&factor)[H], float (&a)[D * H / 8],
                          uint4 *mail)
{
    constexpr int stays = is_high ? D / 4 : 0, goes = is_high ? 0 : D / 4;
#pragma unroll
    for (int j = 0; j < D * H / 64; ++j) {
        uint32_t w[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const int h = k % H;
            const float *x = &o[goes + (4 * j + k) / H * 4 + 2 * h];
            w[k] = gpu::f16_encode2(x[0] * factor[h], x[1] * factor[h]);
        }
        mail[j * 128] = make_uint4(w[0], w[1], w[2], w[3]);
    }
#pragma unroll
    for (int k = 0; k < D * H / 8; ++k)
        a[k] = o[stays + k / (2 * H) * 4 + k % (2 * H)];
}

/* Asks for q of the unit's rows: slabs of 64 elements, [matrix row][128 bytes], swizzled. */
template <int D, int R>
GPU_DEVICE void ask_for_q(const decode_params &p, const decode_dev_item &it, const unit_rows &rows,
                          uint32_t head, uint32_t s_q)
{
    /* of 16 bytes per row; rows per pass */
    constexpr uint32_t chunks = D / 8, step = 256 / chunks;
    const uint32_t tid = threadIdx.x, c = tid % chunks, r0 = tid / chunks;
    const uint32_t to = s_q + c / 8 * 8192 + matrix_row<R>(r0) * 128 + (c % 8 ^ r0 % 8) * 16;
    const char *q = (const char *)it.q + c * 16;
    if (rows.is_one_token) {
        q += rows.query_row(r0, p.num_q_heads, head) * (D * 2);
#pragma unroll
        for (uint32_t i = 0; i < R / step; ++i) {
            const bool is_there = r0 + i * step < rows.count;
            gpu::copy16_async(to + matrix_row<R>(i * step) * 128,
                              q + (is_there ? i * step * D * 2 : 0), is_there);
        }
    } else {
#pragma unroll 1
        for (uint32_t r = r0; r < R; r += step)
            gpu::copy16_async(to + matrix_row<R>(r - r0) * 128,
                              q + rows.query_row(r, p.num_q_heads, head) * (D * 2), r < rows.count);
    }
}

/* What a thread has after the warpgroups have exchanged halves: sums of its warpgroup's half of the
 * head dim, own ones of its tokens as f32, the other warpgroup's as f16 in shared memory. */
template <int D, int H> struct wide_halves {
    const float (&a)[D * H / 8];
    const uint4 *mail;
    float (&f)[H], (&e)[H]; /* factors of a row's own sums, and of the others' */

    /* The thread's eight of columns 32j on, of both warpgroups' tokens. */
    GPU_DEVICE void operator()(int j, float (&x)[H][8]) const
    {
#pragma unroll
        for (int i = 0; i < H; ++i) {
            const uint4 v = mail[(j * H + i) * 128];
            const uint32_t w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const int h = k % H, c = (4 * i + k) / H * 2;
                const float *own = &a[2 * (4 * (j * H + i) + k)];
                x[h][c] = own[0] * f[h] + gpu::f16_decode(w[k] & 0xffff) * e[h];
                x[h][c + 1] = own[1] * f[h] + gpu::f16_decode(w[k] >> 16) * e[h];
            }
        }
    }
};

/* Both warpgroups meet: each keeps half of head_dim, in a, and gets the other's sums of it, f16,
 * through the ring, from where it is returned. From here on a row's sums and l are times a power of
 * two, which m knows; f and e bring the own sums and the other's together. s_ml: [2][R] */
template <int D, int R>
GPU_DEVICE const uint4 *meet(const float (&o)[D / 2], float (&m)[R / 32], float (&l)[R / 32],
                             float (&a)[D * (R / 32) / 8], float (&f)[R / 32], float (&e)[R / 32],
                             uint8_t *base, float2 *s_ml, uint32_t half, uint32_t row0, uint32_t t)
{
    constexpr int H = R / 32;
    const uint32_t tid = threadIdx.x;
    float factor[H];
    sum_factors<D, H>(o, factor);
#pragma unroll
    for (int h = 0; h < H; ++h) {
        m[h] -= gpu::log2_fast(factor[h]);
        l[h] = gpu::warp_sum<4>(l[h]) * factor[h];
        if (t == 0)
            s_ml[half * R + row0 + h * 8] = make_float2(m[h], l[h]);
    }
    sync_consumers(); /* the ring is free */
    uint4 *mail = (uint4 *)(base + 128 * D) + tid % 128;
    uint4 *out_mail = mail + half * (D / 32 * 128), *in_mail = mail + (half ^ 1) * (D / 32 * 128);
    if (half)
        swap_sums<D, H, true>(o, factor, a, out_mail);
    else
        swap_sums<D, H, false>(o, factor, a, out_mail);
    sync_consumers();
#pragma unroll
    for (int h = 0; h < H; ++h) {
        const float2 x = s_ml[(half ^ 1) * R + row0 + h * 8];
        const float top = fmaxf(m[h], x.x), own = gpu::exp2_fast(m[h] - top);
        e[h] = gpu::exp2_fast(x.x - top);
        m[h] = top;
        l[h] = l[h] * own + x.y * e[h];
        f[h] = factor[h] * own;
    }
    return in_mail;
}

/* The outputs of a thread block that has its segment alone. */
template <bool is_bf16, int D, int R>
GPU_DEVICE void store_alone(const decode_params &p, const decode_dev_item &it,
                            const unit_rows &rows, uint32_t head, uint32_t half, uint32_t row0,
                            uint32_t t, const float (&m)[R / 32], const float (&l)[R / 32],
                            const wide_halves<D, R / 32> &sums)
{
    constexpr int H = R / 32;
    uint32_t *out[H];
#pragma unroll
    for (int h = 0; h < H; ++h) {
        const uint32_t r = row0 + h * 8;
        out[h] = nullptr;
        if (r >= rows.count)
            continue;
        const uint32_t row = rows.query_row(r, p.num_q_heads, head);
        out[h] = (uint32_t *)(it.out + (uint64_t)row * D * 2 + half * D) + t;
        const float weight = finish_row(it, p, row, m[h], l[h], half == 0 && t == 0);
        sums.f[h] *= weight;
        sums.e[h] *= weight;
    }
#pragma unroll
    for (int j = 0; j < D / 64; ++j) {
        float x[H][8];
        sums(j, x);
#pragma unroll
        for (int k = 0; k < 4 * H; ++k)
            if (out[k % H])
                out[k % H][16 * j + k / H * 4] =
                    encode2<is_bf16>(x[k % H][k / H * 2], x[k % H][k / H * 2 + 1]);
    }
}

template <bool is_bf16, int D, int R, bool has_extras>
__global__ void __launch_bounds__(384, 1)
    decode_wide(GPU_PARAM(decode_params, p), GPU_PARAM(decode_short_words, w),
                GPU_PARAM(CUtensorMap, map))
{
    constexpr int H = R / 32; /* rows a thread */
    constexpr uint32_t TT = DECODE_WIDE_TOKENS, TB = TT / DECODE_TILE;
    constexpr uint32_t group_bytes = 16 * D, slot_bytes = 8 * group_bytes; /* 8, 64 tokens */
    const uint32_t S = p.stages, tid = threadIdx.x, warp = gpu::warp_id();
    const uint32_t half = __shfl_sync(~0u, tid / 128, 0); /* the compiler sees one value a warp */
    const uint32_t lane = gpu::lane_id(), g = lane / 4, t = lane % 4, head = blockIdx.y;
    const uint32_t parts = p.n_parts, unit = over_parts(p, blockIdx.x);
    const uint32_t part = blockIdx.x - unit * parts;
    uint8_t *base = aligned_shared();
    float2 *s_ml = (float2 *)(base + p.wide_body); /* [2][R] */
    uint64_t *s_bars = (uint64_t *)(s_ml + 2 * R);
    const uint32_t n_slots = 2 * S, s_full = gpu::shared_address(s_bars);
    const uint32_t s_q = gpu::shared_address(base);
    const wide_ring ring = {s_q + 128 * D,
                            n_slots,
                            s_full,
                            s_full + n_slots * 8,
                            s_full + n_slots * 16,
                            (uint32_t *)(s_bars + 2 * n_slots + 2)};
    if (half == 2) {
        fewer_registers<40>(); /* at once: the others wait for them */
        if (load_tiles<D, R>(p, w, &map, ring, unit, part, warp - 8) && parts > 1)
            weigh_parts<D, R>(p, w, merge_of<D, R>(p, base, unit), ring, unit);
        return;
    }

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
    ask_for_q<D, R>(p, it, rows, head, s_q);
    for (uint32_t b = warp; b < 2 * n_slots + 2; b += 8) /* 65 cycles each */
        if (lane == 0)
            barrier_init(s_full + b * 8, b < n_slots ? TB : b < 2 * n_slots ? 4 : 1);
    barrier_init_fence();
#ifdef ATTND_RACECHECK
    if (tid < 2)
        ring.is_last[1 + tid] = 0;
#endif
    sync_all();
    const wide_share share = share_of(p, it, part);
    const uint32_t first = share.first, n = share.n, count = share.count;
    more_registers<232>();

    const unit_keys keys = keys_of(it, rows, p.layers);
    const uint32_t row0 =
        warp % 4 * 8 * H + g; /* this thread's rows: row0 and with H = 2 row0 + 8 */
    float cap = 0.0f, slope[H] = {};
    if (has_extras) {
        const gpu_layer &layer = p.layers[it.layer];
        cap = layer.soft_cap;
#pragma unroll
        for (int h = 0; h < H; ++h)
            if (layer.alibi_slopes)
                slope[h] = layer.alibi_slopes[rows.query_row(row0 + h * 8, 0, head)] * 1.44269504f;
    }
    const wide_view<is_bf16, D, R> view = {it, rows, keys, half, row0, t};
    copies_wait();
    proxy_fence();
    sync_consumers();

    float o[D / 2];
#pragma unroll
    for (int j = 0; j < D / 2; ++j)
        o[j] = 0.0f;
    float m[H], l[H]; /* of this warpgroup's tokens */
#pragma unroll
    for (int h = 0; h < H; ++h)
        m[h] = nothing, l[h] = 0.0f;
    uint32_t n_met = 0;
    wide_place k_at = {half, 0};
#pragma unroll 1
    for (uint32_t i = half; i < count; i += 2) {
        const wide_place v_at = k_at.after(2, n_slots);
        const uint32_t here = min(TB, n - i * TB);
        const uint32_t keys_at = ring.at + k_at.slot * slot_bytes;
        const uint32_t values_at = ring.at + v_at.slot * slot_bytes;
        float s[32];
        barrier_wait(ring.full + k_at.slot * 8, k_at.phase);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < D / 16; ++k)
            wgmma_scores<is_bf16>(
                s, wgmma_matrix(s_q + k / 4 * 8192 + k % 4 * 32, 16, 1024),
                wgmma_matrix(keys_at + k / 4 * 1024 + k % 4 * 32, 16, group_bytes), k > 0);
        wgmma_finish(s);
        if (lane == 0)
            barrier_arrive(ring.empty + k_at.slot * 8);

        const float scale = has_extras ? 1.0f : it.scale_log2;
        if (has_extras)
            view.apply_extras(s, first + i * TB, cap, slope);
        const uint32_t key0 = view.key_of_tile(first + i * TB);
        const uint32_t key_last = view.key_of_tile(first + i * TB + here - 1);
        const bool is_masked = here < TB || keys.must_mask(key0, key_last + DECODE_TILE - key0);
        if (is_masked)
            view.mask(s, first + i * TB, here);
        view.raise(s, scale, m, l, o);
        uint32_t w[TB][4] = {};
        view.weigh(s, scale, m, l, w);
        barrier_wait(ring.full + v_at.slot * 8, v_at.phase);
        if (is_masked)
            view.hide_values(values_at, first + i * TB, here, o, n_met);
        wgmma_fence();
#pragma unroll
        for (uint32_t b = 0; b < TB; ++b)
            wgmma_values<is_bf16>(o, w[b],
                                  wgmma_matrix(values_at + b * 2 * group_bytes, 1024, group_bytes));
        wgmma_finish(o);
        if (lane == 0)
            barrier_arrive(ring.empty + v_at.slot * 8);
        k_at = k_at.after(4, n_slots);
    }
#ifdef ATTND_RACECHECK
    meet_as_often(half, n_met, ring.is_last + 1);
#endif
    if (p.is_chained)
        gpu::chain_release();
    if (parts > 1)
        cluster_arrive(); /* once all have, the others may send their sums: the ring is free */

    float a[D * H / 8], f[H], e[H];
    const uint4 *in_mail = meet<D, R>(o, m, l, a, f, e, base, s_ml, half, row0, t);
    const wide_halves<D, H> sums = {a, in_mail, f, e};
    if (parts == 1) {
        store_alone<is_bf16, D, R>(p, it, rows, head, half, row0, t, m, l, sums);
        return;
    }

    const wide_merge merge = merge_of<D, R>(p, base, unit);
    send_parts<D, R>(merge, ring, half, m, l, sums);
    if (!merge.is_direct) {
        cluster_sync();
        sync_all();
        if (!*ring.is_last)
            return;
    }
    sync_all(); /* the loaders have put the weights of the parts in place of their maxima */
    barrier_wait(ring.merge + 8, 0);
    add_parts<is_bf16, D, R>(p, merge, it, rows, head);
}

} // namespace decode
#endif
