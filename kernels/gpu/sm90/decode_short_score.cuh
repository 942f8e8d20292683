/* decode_short_score.cuh: steps 1 and 2 of decode_short (decode_short.cuh): K, V and q are asked
 * for, and weights made of K and q.
 */
#ifndef ATTND_GPU_DECODE_SHORT_SCORE_CUH
#define ATTND_GPU_DECODE_SHORT_SCORE_CUH

#include "kernels/gpu/sm90/decode_short_block.cuh"

namespace decode
{

/* Weights of hidden keys are 0, but 0 times NaN is NaN */
template <bool is_bf16, int D, int NT, bool is_direct, class Words>
GPU_DEVICE void short_block<is_bf16, D, NT, is_direct, Words>::clear_hidden(uint32_t i) const
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
template <bool is_bf16, int D, int NT, bool is_direct, class Words>
GPU_DEVICE void short_block<is_bf16, D, NT, is_direct, Words>::ask_for_all()
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
template <bool is_bf16, int D, int NT, bool is_direct, class Words>
GPU_DEVICE void short_block<is_bf16, D, NT, is_direct, Words>::score(float (&c)[2][NT][4])
{
    uint32_t q[steps / 2][NT][4];
#pragma unroll
    for (int j = 0; j < (int)steps; j += 2)
#pragma unroll
        for (int x = 0; x < NT; ++x)
            gpu::load_matrix4(q[j / 2][x], gpu::shared_address(s.q) + (x * 8 + lane % 8) * D * 2 +
                                               j / 4 * 128 +
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
                const uint64_t heads = p.num_kv_heads, row_bytes = 2 * D, tokens = p.block_tokens;
                char *k = p.kv_base + block_of(it.pos / DECODE_TILE) * p.block_bytes +
                          ((it.layer * 2 * heads + head) * tokens + it.pos % tokens) * row_bytes;
                fresh.append(k, k + heads * tokens * row_bytes);
            }
            gpu::sync_warp();
        }
#pragma unroll
        for (int j = 0; j < (int)steps; ++j) {
            uint32_t k[4];
            gpu::load_matrix4(k, k_row + j / 4 * 2048 + ((j % 4 * 2 + lane / 16) ^ lane % 8) * 16);
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
template <bool is_bf16, int D, int NT, bool is_direct, class Words>
GPU_DEVICE void short_block<is_bf16, D, NT, is_direct, Words>::weigh(const float (&c)[2][NT][4])
{
    const bool has_two = warp + W < n;
#pragma unroll
    for (int x = 0; x < NT; ++x) {
        float2 m = make_float2(nothing, nothing), l = make_float2(0, 0);
#pragma unroll
        for (int u = 0; u < 2; ++u)
            if (u || has_two)
                m = larger(
                    m, make_float2(fmaxf(c[u][x][0], c[u][x][2]), fmaxf(c[u][x][1], c[u][x][3])));
        m = largest(m);
        m = make_float2(ceilf(m.x), ceilf(m.y)); /* differences are powers of two */
#pragma unroll
        for (int u = 0; u < 2; ++u) {
            if (!u && !has_two)
                continue;
            const float2 lo = weight(make_float2(c[u][x][0], c[u][x][1]), m);
            const float2 hi = weight(make_float2(c[u][x][2], c[u][x][3]), m);
            s.weights[warp + (u && has_two ? W : 0)][x][lane] = make_uint2(
                transpose8(encode2<is_bf16>(lo.x, lo.y)), transpose8(encode2<is_bf16>(hi.x, hi.y)));
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

} // namespace decode
#endif
