/* attend_latent.cuh: attention in plain fp32 arithmetic of pools whose V is in K (MLA), as
 * attend_vector.cu, which launches it, has it for others.
 */
#ifndef ATTND_GPU_ATTEND_LATENT_CUH
#define ATTND_GPU_ATTEND_LATENT_CUH

#include "kernels/gpu/device.cuh"

namespace gpu
{

constexpr int latent_threads = 128, latent_rows = GPU_VECTOR_ROWS;
constexpr int latent_lanes = 32, latent_pieces = 3, latent_width = 512;

/* The rows of a thread block's groups joined: to out, or to the slots of the split. */
template <int n_groups, int width>
GPU_DEVICE void store_groups(const gpu_attend &a, const gpu_item &it, const gpu_layer &layer,
                             const token_order &order, uint32_t head, uint32_t row0, uint32_t n,
                             uint32_t split, const float *s_o, const float *s_ml)
{
    const gpu_kv &kv = a.kv;
    uint32_t pieces = kv.dv / 8;
    for (uint32_t i = threadIdx.x; i < n * pieces; i += latent_threads) {
        uint32_t r = i / pieces, at8 = i % pieces * 8, row = row0 + r;
        uint32_t token = token_at(order, row / kv.group);
        uint32_t q_head = head * kv.group + row % kv.group;
        float x[8] = {};
        softmax_row all;
        for (int g = 0; g < n_groups; ++g)
            all.m = fmaxf(all.m, s_ml[(g * latent_rows + r) * 2]);
        for (int g = 0; g < n_groups; ++g) {
            float f = all.take(s_ml + (g * latent_rows + r) * 2);
#pragma unroll
            for (int j = 0; j < 8; ++j)
                x[j] = fmaf(f, s_o[(g * latent_rows + r) * width + at8 + j], x[j]);
        }
        uint64_t out_row = (uint64_t)token * kv.num_q_heads + q_head;
        if (it.n_splits > 1) {
            uint64_t at = it.slot0 + (uint64_t)split * it.n_tokens * kv.num_q_heads + out_row;
            store8((char *)(a.part_o + at * kv.dv + at8), x, ATTN_F32);
            if (at8 == 0)
                *(float2 *)(a.part_ml + at * 2) = make_float2(all.m, all.sum);
            continue;
        }
        float lse, f = finish_row(layer, q_head, all.m, all.sum, lse);
#pragma unroll
        for (int j = 0; j < 8; ++j)
            x[j] *= f;
        store8((char *)it.out + (out_row * kv.dv + at8) * element_bytes(kv.q_dtype), x, kv.q_dtype);
        if (at8 == 0 && it.lse)
            it.lse[out_row] = lse;
    }
}

/* Pools whose V is in K (rows of up to BACKEND_MAX_LATENT_K elements): a token's K is
 * read once. A lane holds pieces of 8 elements, latent_lanes pieces apart, and those that are V's
 * serve as V, too. */

template <item_kind kind>
__global__ void __launch_bounds__(latent_threads) attend_latent(GPU_PARAM(gpu_attend, a))
{
    GPU_SHARED(float, shared);
    constexpr int n_groups = latent_threads / latent_lanes, n_pieces = latent_pieces;
    float *s_o = shared; /* [n_groups][latent_rows][latent_width] */
    float *s_ml = shared + n_groups * latent_rows * latent_width; /* [n_groups][latent_rows][2] */
    chain_release();
    chain_wait();

    const gpu_kv &kv = a.kv;
    const gpu_item &it = a.items[find_item<&gpu_item::unit0>(a.items, a.n_items, blockIdx.x)];
    uint32_t unit = blockIdx.x - it.unit0, n_rows = it.n_tokens * kv.group;
    uint32_t n_chunks = (n_rows + latent_rows - 1) / latent_rows;
    uint32_t split = unit % it.n_splits, chunk = unit / it.n_splits % n_chunks;
    uint32_t head = unit / it.n_splits / n_chunks;
    uint32_t row0 = chunk * latent_rows,
             n = n_rows - row0 < latent_rows ? n_rows - row0 : latent_rows;
    const gpu_layer layer = layer_of(kv, it);
    uint32_t q_bytes = element_bytes(kv.q_dtype);
    int group = threadIdx.x / latent_lanes, lane = threadIdx.x % latent_lanes;

    const gpu_layer &stored = kv.layers[it.layer];
    const token_order order = order_of(stored, it);
    float q[latent_rows][n_pieces][8], o[latent_rows][n_pieces][8], slope[latent_rows];
    softmax_row sums[latent_rows];
    uint32_t position[latent_rows];
#pragma unroll
    for (int r = 0; r < latent_rows; ++r) {
        uint32_t row = row0 + (r < n ? r : 0), token = token_at(order, row / kv.group);
        uint32_t q_head = head * kv.group + row % kv.group;
        position[r] = query_position<kind>(a, it, token);
        slope[r] = layer.alibi_slopes ? layer.alibi_slopes[q_head] : 0.0f;
        const char *src =
            (const char *)it.q + ((uint64_t)token * kv.num_q_heads + q_head) * kv.dk * q_bytes;
#pragma unroll
        for (int c = 0; c < n_pieces; ++c) {
            uint32_t e = (c * latent_lanes + lane) * 8;
#pragma unroll
            for (int i = 0; i < 8; ++i)
                q[r][c][i] = o[r][c][i] = 0.0f;
            if (e < kv.dk)
                load8(q[r][c], src + e * q_bytes, kv.q_dtype);
        }
    }

    const query_range queries =
        queries_in<kind>(order, it, row0 / kv.group, (row0 + n - 1) / kv.group);
    part pk = part_of(kv, it.layer, false);
    const uint32_t *table = kv.table + (uint64_t)it.row * kv.row_blocks;
    uint32_t kv_bytes = element_bytes(kv.kv_dtype);
    for (uint32_t nth = 0; nth < n_branches_of(stored); ++nth) {
        const branch b = branch_at(kv, stored, nth, head);
        const branch_part keys =
            part_of_branch<kind == of_stripes>(kv, layer, b, it, queries, split);
        query_view<kind> see[latent_rows];
#pragma unroll
        for (int r = 0; r < latent_rows; ++r)
            see[r].look(a, layer, b, it, position[r],
                        token_at(order, (row0 + (r < n ? r : 0)) / kv.group));
        for (uint32_t base = keys.begin; base < keys.end; base += n_groups) {
            if (base >= keys.highest.sinks && base + n_groups <= keys.lowest.first) {
                base = keys.lowest.first - n_groups; /* the loop adds n_groups */
                continue;
            }
            uint32_t key = base + group, token = token_of<kind == of_stripes>(kv, b, key);
            uint32_t at = key_position<kind>(a, it, b, key);
            bool is_live = key < keys.end;
            uint32_t block = is_live ? table[token >> kv.block_shift] : 0;
            const char *k = row_address(kv, pk, block, head, token & (kv.block_tokens - 1));
            float kx[n_pieces][8] = {};
#pragma unroll
            for (int c = 0; c < n_pieces; ++c) {
                uint32_t e = (c * latent_lanes + lane) * 8;
                if (is_live && e < kv.dk)
                    load8(kx[c], k + e * kv_bytes, kv.kv_dtype);
            }
#pragma unroll
            for (int r = 0; r < latent_rows; ++r) {
                float dot = 0.0f;
#pragma unroll
                for (int c = 0; c < n_pieces; ++c)
#pragma unroll
                    for (int i = 0; i < 8; ++i)
                        dot = fmaf(q[r][c][i], kx[c][i], dot);
                dot = warp_sum<latent_lanes>(dot);
                if (!is_live || !see[r].has(it, key))
                    continue;
                float s = score_of(layer, dot, slope[r], position[r], at);
                if (s > sums[r].m) {
                    float f = sums[r].raise(s);
#pragma unroll
                    for (int c = 0; c < n_pieces; ++c)
#pragma unroll
                        for (int i = 0; i < 8; ++i)
                            o[r][c][i] *= f;
                }
                float p = sums[r].add(s);
#pragma unroll
                for (int c = 0; c < n_pieces; ++c)
#pragma unroll
                    for (int i = 0; i < 8; ++i)
                        o[r][c][i] = fmaf(p, kx[c][i], o[r][c][i]);
            }
        }
    }

#pragma unroll
    for (int r = 0; r < latent_rows; ++r) {
        float *dst = s_o + (group * latent_rows + r) * latent_width;
#pragma unroll
        for (int c = 0; c < n_pieces; ++c) {
            uint32_t e = (c * latent_lanes + lane) * 8;
#pragma unroll
            for (int i = 0; i < 8; ++i)
                if (e < kv.dv)
                    dst[e + i] = o[r][c][i];
        }
        if (lane == 0) {
            s_ml[(group * latent_rows + r) * 2] = sums[r].m;
            s_ml[(group * latent_rows + r) * 2 + 1] = sums[r].sum;
        }
    }
    __syncthreads();
    store_groups<n_groups, latent_width>(a, it, layer, order, head, row0, n, split, s_o, s_ml);
}

inline int launch_latent(const gpu_attend *a, void *stream, bool chained)
{
    constexpr int n_groups = latent_threads / latent_lanes;
    size_t shared = (size_t)n_groups * latent_rows * (latent_width + 2) * sizeof(float);
    return launch(a->nodes              ? attend_latent<of_tree>
                  : a->kv.stripes.every ? attend_latent<of_stripes>
                                        : attend_latent<of_tokens>,
                  dim3(a->n_units), dim3(latent_threads), shared, stream, chained, *a);
}

} // namespace gpu
#endif
