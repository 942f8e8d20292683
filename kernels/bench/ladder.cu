/* ladder.cu: the first steps from a straightforward kernel to the fast ones, for attnbench --grid
 * variants:
 * 0  naive: a thread block a query row, a thread a key; one pass for the maximum, one for the sums
 * 1  online softmax: one pass
 * 2  shared tiles: the query rows of a kv head share K and V tiles in shared memory
 * The next steps are attend_vector.cu (a group of lanes a key, 16-byte loads, no barrier in the
 * loop), attend_matrix.cuh (tensor cores; then split-K) and the tuned kernels of decode.h.
 */
#include "kernels/gpu/device.cuh"

using namespace gpu;

namespace
{

constexpr int threads = 128, n_warps = threads / warp_width, max_dim = 256;

/* What a thread block of one query row needs to know. */
struct row_work {
    const gpu_item *item;
    gpu_layer layer;
    visible see;
    uint32_t head, q_head, position;
    uint64_t out_row;
    float slope;
    const char *q;
};

GPU_DEVICE row_work row_of(const gpu_attend &a, uint32_t unit, uint32_t row, uint32_t head)
{
    const gpu_kv &kv = a.kv;
    row_work w;
    w.item = &a.items[find_item<&gpu_item::unit0>(a.items, a.n_items, unit)];
    w.layer = layer_of(kv, *w.item);
    w.head = head;
    w.q_head = head * kv.group + row % kv.group;
    w.position = w.item->pos + row / kv.group;
    w.see = visible_to(kv, w.layer, branch_of(0, 1, 0), w.position, w.item->pos + w.item->n_tokens);
    w.out_row = (uint64_t)(row / kv.group) * kv.num_q_heads + w.q_head;
    w.slope = w.layer.alibi_slopes ? w.layer.alibi_slopes[w.q_head] : 0.0f;
    w.q = (const char *)w.item->q + w.out_row * kv.dk * element_bytes(kv.q_dtype);
    return w;
}

/* A row of K or V, with its scale. */
GPU_DEVICE const char *key_row(const gpu_kv &kv, const row_work &w, uint32_t key, bool is_v,
                               float &scale)
{
    part p = part_of(kv, w.item->layer, is_v);
    uint32_t block = kv.table[w.item->table_at + (key >> kv.block_shift)];
    uint32_t slot = key & (kv.block_tokens - 1);
    scale =
        kv.is_quantised ? row_scale(scale_address(kv, p, block, w.head, slot), kv.kv_dtype) : 1.0f;
    return row_address(kv, p, block, w.head, slot);
}

GPU_DEVICE float score_at(const gpu_kv &kv, const row_work &w, const float *q, uint32_t key)
{
    if (!is_visible(w.see, key))
        return -INFINITY;
    float scale, dot = 0.0f;
    const char *k = key_row(kv, w, key, false, scale);
    uint32_t size = element_bytes(kv.kv_dtype);
    for (uint32_t e = 0; e < kv.dk; e += 8) {
        float x[8];
        load8(x, k + e * size, kv.kv_dtype);
#pragma unroll
        for (int i = 0; i < 8; ++i)
            dot = fmaf(q[e + i], x[i], dot);
    }
    return score_of(w.layer, dot * scale, w.slope, w.position, key);
}

/* One element of a stored row, by the 8 that surround it: coalesced only by luck. */
GPU_DEVICE float element_at(const char *row, uint32_t e, uint32_t dtype)
{
    float x[8];
    load8(x, row + e / 8 * 8 * element_bytes(dtype), dtype);
    float y = x[0];
#pragma unroll
    for (int i = 1; i < 8; ++i)
        y = e % 8 == i ? x[i] : y;
    return y;
}

GPU_DEVICE float block_max(float x, float *s_warp)
{
    x = warp_max(x);
    __syncthreads();
    if (lane_id() == 0)
        s_warp[warp_id()] = x;
    __syncthreads();
    for (int i = 0; i < n_warps; ++i)
        x = fmaxf(x, s_warp[i]);
    return x;
}

GPU_DEVICE float block_sum(float x, float *s_warp)
{
    x = warp_sum(x);
    __syncthreads();
    if (lane_id() == 0)
        s_warp[warp_id()] = x;
    __syncthreads();
    x = 0.0f;
    for (int i = 0; i < n_warps; ++i)
        x += s_warp[i];
    return x;
}

GPU_DEVICE void store_element(const gpu_kv &kv, const row_work &w, uint32_t e, float x)
{
    char *out = (char *)w.item->out + (w.out_row * kv.dv + e) * element_bytes(kv.q_dtype);
    if (kv.q_dtype == ATTN_F32)
        *(float *)out = x;
    else
        *(uint16_t *)out =
            (uint16_t)(kv.q_dtype == ATTN_BF16 ? bf16_encode2(x, 0.0f) : f16_encode2(x, 0.0f));
}

template <bool is_online>
__global__ void __launch_bounds__(threads) one_row(GPU_PARAM(gpu_attend, a))
{
    __shared__ float s_q[max_dim], s_p[threads], s_warp[n_warps];
    const gpu_kv &kv = a.kv;
    const gpu_item &it = a.items[find_item<&gpu_item::unit0>(a.items, a.n_items, blockIdx.x)];
    uint32_t unit = blockIdx.x - it.unit0, n_rows = it.n_tokens * kv.group;
    row_work w = row_of(a, blockIdx.x, unit % n_rows, unit / n_rows);
    for (uint32_t e = threadIdx.x; e < kv.dk; e += threads)
        s_q[e] = element_at(w.q, e, kv.q_dtype);
    __syncthreads();

    float o[max_dim / threads] = {};
    softmax_row row;
    if (!is_online) {
        for (uint32_t key = threadIdx.x; key < w.see.end; key += threads)
            row.m = fmaxf(row.m, score_at(kv, w, s_q, key));
        row.m = block_max(row.m, s_warp);
    }
    for (uint32_t base = 0; base < w.see.end; base += threads) {
        uint32_t key = base + threadIdx.x;
        float s = key < w.see.end ? score_at(kv, w, s_q, key) : -INFINITY;
        if (is_online) {
            float f = row.raise(fmaxf(row.m, block_max(s, s_warp)));
#pragma unroll
            for (int i = 0; i < max_dim / threads; ++i)
                o[i] *= f;
        }
        s = row.add(s);
        __syncthreads();
        s_p[threadIdx.x] = s;
        __syncthreads();
        uint32_t n = min(w.see.end - base, (uint32_t)threads);
        for (uint32_t i = 0; i < n; ++i) {
            if (s_p[i] == 0.0f)
                continue;
            float scale;
            const char *v = key_row(kv, w, base + i, true, scale);
#pragma unroll
            for (int j = 0; j < max_dim / threads; ++j) {
                uint32_t e = threadIdx.x + j * threads;
                if (e < kv.dv)
                    o[j] = fmaf(s_p[i] * scale, element_at(v, e, kv.kv_dtype), o[j]);
            }
        }
    }
    row.sum = block_sum(row.sum, s_warp);
    float lse, f = finish_row(w.layer, w.q_head, row.m, row.sum, lse);
#pragma unroll
    for (int j = 0; j < max_dim / threads; ++j)
        if (threadIdx.x + j * threads < kv.dv)
            store_element(kv, w, threadIdx.x + j * threads, o[j] * f);
    if (threadIdx.x == 0 && it.lse)
        it.lse[w.out_row] = lse;
}

constexpr int shared_rows = GPU_SHARED_ROWS, shared_tile = 16;
constexpr int shared_threads_a_row = threads / shared_rows;

/* A thread works for one row: one key of the tile at a time for its scores, dv / 16 elements of
 * O. */
__global__ void __launch_bounds__(threads) shared_tiles(GPU_PARAM(gpu_attend, a))
{
    __shared__ float s_q[shared_rows][max_dim], s_p[shared_rows][shared_tile];
    __shared__ float s_kv[shared_tile][max_dim + 1];
    const gpu_kv &kv = a.kv;
    const gpu_item &it = a.items[find_item<&gpu_item::unit0>(a.items, a.n_items, blockIdx.x)];
    uint32_t unit = blockIdx.x - it.unit0, n_rows = it.n_tokens * kv.group;
    uint32_t n_chunks = (n_rows + shared_rows - 1) / shared_rows;
    uint32_t head = unit / n_chunks, row0 = unit % n_chunks * shared_rows;
    uint32_t r = threadIdx.x / shared_threads_a_row, t = threadIdx.x % shared_threads_a_row;
    bool is_live = row0 + r < n_rows;
    row_work w = row_of(a, blockIdx.x, is_live ? row0 + r : n_rows - 1, head);
    for (uint32_t e = t; e < kv.dk; e += shared_threads_a_row)
        s_q[r][e] = element_at(w.q, e, kv.q_dtype);

    uint32_t end =
        visible_to(kv, w.layer, branch_of(0, 1, 0),
                   it.pos + (min(row0 + shared_rows, n_rows) - 1) / kv.group, it.pos + it.n_tokens)
            .end;
    float o[max_dim / shared_threads_a_row] = {};
    softmax_row sums;
    auto load = [&](uint32_t base, bool is_v) {
        uint32_t d = is_v ? kv.dv : kv.dk;
        for (uint32_t i = threadIdx.x; i < shared_tile * d / 8; i += threads) {
            uint32_t row = i / (d / 8), e = i % (d / 8) * 8;
            float scale = 0.0f, x[8] = {};
            if (base + row < end)
                load8(x, key_row(kv, w, base + row, is_v, scale) + e * element_bytes(kv.kv_dtype),
                      kv.kv_dtype);
#pragma unroll
            for (int j = 0; j < 8; ++j)
                s_kv[row][e + j] = x[j] * scale;
        }
        __syncthreads();
    };
    for (uint32_t base = 0; base < end; base += shared_tile) {
        __syncthreads();
        load(base, false);
        float s = -INFINITY;
        uint32_t key = base + t;
        if (is_visible(w.see, key)) {
            float dot = 0.0f;
            for (uint32_t e = 0; e < kv.dk; ++e)
                dot = fmaf(s_q[r][e], s_kv[t][e], dot);
            s = score_of(w.layer, dot, w.slope, w.position, key);
        }
        float f = sums.raise(fmaxf(sums.m, warp_max<shared_threads_a_row>(s)));
        s = sums.add(s);
        s_p[r][t] = s;
        __syncthreads();
        load(base, true);
#pragma unroll
        for (int j = 0; j < max_dim / shared_threads_a_row; ++j) {
            uint32_t e = t + j * shared_threads_a_row;
            if (e >= kv.dv)
                break;
            o[j] *= f;
            for (int i = 0; i < shared_tile; ++i)
                if (s_p[r][i] != 0.0f)
                    o[j] = fmaf(s_p[r][i], s_kv[i][e], o[j]);
        }
    }
    sums.sum = warp_sum<shared_threads_a_row>(sums.sum);
    if (!is_live)
        return;
    float lse, f = finish_row(w.layer, w.q_head, sums.m, sums.sum, lse);
#pragma unroll
    for (int j = 0; j < max_dim / shared_threads_a_row; ++j)
        if (t + j * shared_threads_a_row < kv.dv)
            store_element(kv, w, t + j * shared_threads_a_row, o[j] * f);
    if (t == 0 && it.lse)
        it.lse[w.out_row] = lse;
}
static_assert(shared_tile == shared_threads_a_row, "a thread takes one key of a tile");

} // namespace

int gpu_ladder_launch(const struct gpu_attend *a, int step, void *stream)
{
    const decltype(&shared_tiles) kernels[] = {one_row<false>, one_row<true>, shared_tiles};
    return launch(kernels[step], dim3(a->n_units), dim3(threads), 0, stream, false, *a);
}
