/* attend_vector.cu: attention in plain fp32 arithmetic for every geometry, stored type and option,
 * and the merge of split results that the tensor-core kernel shares.
 *
 * A thread block takes a few query rows of one kv head and one split of the cached tokens. A group
 * of lanes holds one token's K in 16-byte pieces, all rows' dot products are summed across the
 * group, and each group keeps its own online softmax; the groups of the block meet once, at the
 * end.
 */
#include "kernels/gpu/merge_splits.cuh"

using namespace gpu;

namespace
{

constexpr int threads = 128, n_warps = threads / warp_width;
constexpr int rows = GPU_VECTOR_ROWS; /* query rows of a thread block */

/* lanes: of one token's group; a lane holds n_pieces pieces of 8 elements of each row, the next one
 * `lanes` pieces further on. is_latent: V is in K, in all pieces but the last, and what is read of
 * a token's K serves as V, too. kind: the pool has some of the tokens only, whose dilated layers no
 * other kernel knows; the items are trees, or have lists. */
template <int lanes_, int n_pieces_, bool is_latent_, item_kind kind_> struct vector_form {
    static constexpr int lanes = lanes_, n_pieces = n_pieces_, n_groups = threads / lanes;
    static constexpr bool is_latent = is_latent_;
    static constexpr item_kind kind = kind_;
    static constexpr int v_pieces = n_pieces - is_latent, width = lanes * v_pieces * 8; /* of V */
    static constexpr size_t shared_bytes = (size_t)n_groups * rows * (width + 2) * sizeof(float);
    static_assert(shared_bytes <= 48 << 10, "more shared memory than a block has unasked");
};

template <class F> __global__ void __launch_bounds__(threads) attend(GPU_PARAM(gpu_attend, a))
{
    GPU_SHARED(float, shared);
    constexpr int lanes = F::lanes, n_pieces = F::n_pieces, n_groups = F::n_groups;
    constexpr int v_pieces = F::v_pieces, width = F::width;
    constexpr item_kind kind = F::kind;
    float *s_o = shared; /* [n_groups][rows][width] */
    float *s_ml = shared + n_groups * rows * width; /* [n_groups][rows][2] */
    chain_release();
    chain_wait();

    const gpu_kv &kv = a.kv;
    const gpu_item &it = a.items[find_item<&gpu_item::unit0>(a.items, a.n_items, blockIdx.x)];
    uint32_t unit = blockIdx.x - it.unit0, n_chunks = row_ranges<kind>(kv, it, rows);
    uint32_t split = unit % it.n_splits, chunk = unit / it.n_splits % n_chunks;
    uint32_t head = unit / it.n_splits / n_chunks;
    const row_range own = row_range_at<kind>(kv, it, chunk, rows);
    const uint32_t row0 = own.row0, n = own.n;
    const gpu_layer layer = layer_of(kv, it);
    uint32_t q_bytes = element_bytes(kv.q_dtype);
    int group = threadIdx.x / lanes, lane = threadIdx.x % lanes;
    uint32_t e0 = lane * 8; /* first element of this lane */

    const gpu_layer &stored = kv.layers[it.layer];
    const token_order order = order_of(stored, it);
    float q[rows][n_pieces][8], o[rows][v_pieces][8] = {}, slope[rows];
    softmax_row sums[rows];
    uint32_t position[rows];
#pragma unroll
    for (int r = 0; r < rows; ++r) {
        uint32_t row = row0 + (r < n ? r : 0), token = token_at(order, row / kv.group);
        uint32_t q_head = head * kv.group + row % kv.group;
        position[r] = query_position<kind>(a, it, token);
        slope[r] = layer.alibi_slopes ? layer.alibi_slopes[q_head] : 0.0f;
        const char *src =
            (const char *)it.q + ((uint64_t)token * kv.num_q_heads + q_head) * kv.dk * q_bytes;
#pragma unroll
        for (int c = 0; c < n_pieces; ++c) {
            uint32_t e = e0 + c * lanes * 8;
#pragma unroll
            for (int i = 0; i < 8; ++i)
                q[r][c][i] = 0.0f;
            if (e < kv.dk)
                load8(q[r][c], src + e * q_bytes, kv.q_dtype);
        }
    }

    const query_range queries =
        queries_in<kind>(order, it, row0 / kv.group, (row0 + n - 1) / kv.group);
    const query_list<kind> list(a, it, row0 / kv.group, head);
    part pk = part_of(kv, it.layer, false), pv = part_of(kv, it.layer, !F::is_latent);
    const uint32_t *table = list.table(kv, it);
    for (uint32_t nth = 0; nth < n_branches_of(stored); ++nth) {
        const branch b = branch_at(kv, stored, nth, head);
        branch_part keys = part_of_branch<kind == of_stripes>(kv, layer, b, it, queries, split);
        list.cut(it, split, keys);
        query_view<kind> see[rows];
#pragma unroll
        for (int r = 0; r < rows; ++r)
            see[r].look(a, layer, b, it, position[r],
                        token_at(order, (row0 + (r < n ? r : 0)) / kv.group));
        for (uint32_t base = keys.begin; base < keys.end; base += n_groups) {
            if (base >= keys.highest.sinks && base + n_groups <= keys.lowest.first) {
                base = keys.lowest.first - n_groups; /* the loop adds n_groups */
                continue;
            }
            uint32_t key = base + group;
            bool is_live = key < keys.end;
            uint32_t token = list(kv, b, key, is_live);
            uint32_t at = key_position<kind>(a, it, b, key, token);
            uint32_t block = is_live ? table[token >> kv.block_shift] : 0;
            uint32_t slot = token & (kv.block_tokens - 1);
            const char *k = row_address(kv, pk, block, head, slot);
            const char *v = row_address(kv, pv, block, head, slot);
            const char *k_scales = scale_address(kv, pk, block, head, slot);
            const char *v_scales = scale_address(kv, pv, block, head, slot);
            float kx[n_pieces][8] = {}, own[v_pieces][8] = {}, k_scale = 1.0f, v_scale = 1.0f;
            const float(*vx)[8] = F::is_latent ? kx : own;
#pragma unroll
            for (int c = 0; c < n_pieces; ++c) {
                uint32_t e = e0 + c * lanes * 8;
                if (is_live && e < kv.dk)
                    load_stored8(kx[c], k, k_scales, e, kv.kv_dtype);
                if constexpr (!F::is_latent)
                    if (is_live && e < kv.dv)
                        load_stored8(own[c], v, v_scales, e, kv.kv_dtype);
            }
            if (kv.is_quantised && is_live) {
                k_scale = row_scale(k_scales, kv.kv_dtype);
                v_scale = row_scale(v_scales, kv.kv_dtype);
            }
#pragma unroll
            for (int r = 0; r < rows; ++r) {
                float dot = 0.0f;
#pragma unroll
                for (int c = 0; c < n_pieces; ++c)
#pragma unroll
                    for (int i = 0; i < 8; ++i)
                        dot = fmaf(q[r][c][i], kx[c][i], dot);
                dot = warp_sum<lanes>(dot);
                if (!is_live || !see[r].has(it, key))
                    continue;
                float s = score_of(layer, dot * k_scale, slope[r], position[r], at);
                if (s > sums[r].m) {
                    float f = sums[r].raise(s);
#pragma unroll
                    for (int c = 0; c < v_pieces; ++c)
#pragma unroll
                        for (int i = 0; i < 8; ++i)
                            o[r][c][i] *= f;
                }
                float p = sums[r].add(s) * v_scale;
#pragma unroll
                for (int c = 0; c < v_pieces; ++c)
#pragma unroll
                    for (int i = 0; i < 8; ++i)
                        o[r][c][i] = fmaf(p, vx[c][i], o[r][c][i]);
            }
        }
    }

#pragma unroll
    for (int r = 0; r < rows; ++r) {
        float *dst = s_o + (group * rows + r) * width;
#pragma unroll
        for (int c = 0; c < v_pieces; ++c) {
            uint32_t e = e0 + c * lanes * 8;
#pragma unroll
            for (int i = 0; i < 8; ++i)
                if (e < kv.dv)
                    dst[e + i] = o[r][c][i];
        }
        if (lane == 0) {
            s_ml[(group * rows + r) * 2] = sums[r].m;
            s_ml[(group * rows + r) * 2 + 1] = sums[r].sum;
        }
    }
    __syncthreads();

    uint32_t pieces = kv.dv / 8;
    for (uint32_t i = threadIdx.x; i < n * pieces; i += threads) {
        uint32_t r = i / pieces, at8 = i % pieces * 8, row = row0 + r;
        uint32_t token = token_at(order, row / kv.group);
        uint32_t q_head = head * kv.group + row % kv.group;
        float x[8] = {};
        softmax_row all;
        for (int g = 0; g < n_groups; ++g)
            all.m = fmaxf(all.m, s_ml[(g * rows + r) * 2]);
        for (int g = 0; g < n_groups; ++g) {
            float f = all.take(s_ml + (g * rows + r) * 2);
#pragma unroll
            for (int j = 0; j < 8; ++j)
                x[j] = fmaf(f, s_o[(g * rows + r) * width + at8 + j], x[j]);
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
        store8((char *)it.out + (out_row * kv.dv + at8) * q_bytes, x, kv.q_dtype);
        if (at8 == 0 && it.lse)
            it.lse[out_row] = lse;
    }
}

/* One warp an output row. */
__global__ void __launch_bounds__(threads) merge(GPU_PARAM(gpu_attend, a))
{
    GPU_SHARED(float, shared);
    chain_release();
    chain_wait();
    const gpu_kv &kv = a.kv;
    uint32_t row = blockIdx.x * n_warps + warp_id();
    if (row >= a.n_rows)
        return;
    uint32_t token = row / kv.num_q_heads + a.items[0].token0;
    const gpu_item &it = a.items[find_item<&gpu_item::token0>(a.items, a.n_items, token)];
    if (it.n_splits == 1)
        return;
    row = (token - it.token0) * kv.num_q_heads + row % kv.num_q_heads;
    float *const weights = shared + warp_id() * GPU_MAX_SPLITS, lse;
    split_weights(weights, a, it, row, lse); /* all groups of lanes do the same */
    if (lane_id() == 0 && it.lse)
        it.lse[row] = lse;
    sync_warp();
    const uint64_t stride = (uint64_t)it.n_tokens * kv.num_q_heads * kv.dv;
    const float *const parts = a.part_o + (it.slot0 * (uint64_t)kv.dv + (uint64_t)row * kv.dv);
    char *const out = (char *)it.out + (uint64_t)row * kv.dv * element_bytes(kv.q_dtype);
    for (uint32_t e = lane_id() * 4; e < kv.dv; e += warp_width * 4) {
        float4 x[1];
        const float *const from[1] = {parts + e}, *const of[1] = {weights};
        sum_splits(x, from, of, stride, it.n_splits);
        store4(out + e * element_bytes(kv.q_dtype), x[0], kv.q_dtype);
    }
}

template <int lanes, int n_pieces, bool is_latent, item_kind kind>
int launch_form(const gpu_attend *a, void *stream, bool chained)
{
    using form = vector_form<lanes, n_pieces, is_latent, kind>;
    return launch(attend<form>, dim3(a->n_units), dim3(threads), form::shared_bytes, stream,
                  chained, *a);
}

template <int lanes, int n_pieces = 1, bool is_latent = false>
int launch_attend(const gpu_attend *a, void *stream, bool chained)
{
    if (a->list_starts || a->chosen)
        return launch_form<lanes, n_pieces, is_latent, of_list>(a, stream, chained);
    if (a->nodes)
        return launch_form<lanes, n_pieces, is_latent, of_tree>(a, stream, chained);
    if (a->kv.stripes.every && a->is_dilated)
        return launch_form<lanes, n_pieces, is_latent, of_stripes>(a, stream, chained);
    return launch_form<lanes, n_pieces, is_latent, of_tokens>(a, stream, chained);
}

} // namespace

int gpu_attend_vector_launch(const struct gpu_attend *a, void *stream, int chained)
{
    if (a->kv.v_offset == 0)
        return launch_attend<32, 3, true>(a, stream, chained);
    uint32_t d = a->kv.dk > a->kv.dv ? a->kv.dk : a->kv.dv;
    if (d <= 64)
        return launch_attend<8>(a, stream, chained);
    if (d <= 128)
        return launch_attend<16>(a, stream, chained);
    if (d <= 256)
        return launch_attend<32>(a, stream, chained);
    return launch_attend<32, 2>(a, stream, chained);
}

int gpu_merge_launch(const struct gpu_attend *a, void *stream)
{
    return launch(merge, dim3((a->n_rows + n_warps - 1) / n_warps), dim3(threads),
                  n_warps * GPU_MAX_SPLITS * sizeof(float), stream, true, *a);
}
