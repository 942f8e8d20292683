/* prep.cu: what a batch does before attention: block-table patches, appends (append.cuh), q to the
 * device; and the word to the host when it is done.
 */
#include "kernels/gpu/append.cuh"

using namespace gpu;

namespace
{

constexpr int prep_threads = append_threads;

/* About as many as keep the bus busy: more reads of host memory at a time hold up the attention
 * kernel's. */
constexpr int bring_threads = 64, bring_blocks = 128;

GPU_DEVICE uint64_t kv_row_bytes(const gpu_kv &kv)
{
    return (uint64_t)kv.num_kv_heads * (kv.dk + kv.dv) * element_bytes(kv.q_dtype);
}

/* 16 bytes each of a token's q as it comes. */
GPU_DEVICE uint32_t q_pieces(const gpu_prep &a)
{
    return a.kv.num_q_heads * a.q_dim * element_bytes(a.kv.q_dtype) / 16;
}

/* Where they go on the device. */
GPU_DEVICE uint4 *q_place(const gpu_prep &a, const gpu_item &it, uint32_t token)
{
    return a.heads ? (uint4 *)a.heads + (uint64_t)(it.token0 + token) * q_pieces(a)
                   : (uint4 *)it.q + (uint64_t)token * q_pieces(a);
}

/* One token's q to the device. */
GPU_DEVICE void bring_q(const gpu_prep &a, const gpu_item &it, uint32_t token)
{
    const uint32_t n = q_pieces(a);
    const uint4 *src = (const uint4 *)it.q_src + (uint64_t)token * n;
    uint4 *dst = q_place(a, it, token);
    for (uint32_t i0 = threadIdx.x; i0 < n; i0 += prep_threads * at_once) {
        uint4 x[at_once];
#pragma unroll
        for (int u = 0; u < at_once; ++u)
            if (i0 + u * prep_threads < n)
                x[u] = src[i0 + u * prep_threads];
#pragma unroll
        for (int u = 0; u < at_once; ++u)
            if (i0 + u * prep_threads < n)
                dst[i0 + u * prep_threads] = x[u];
    }
}

/* A token's item: in one go, and without a search where every item has one token, so that few loads
 * wait for each other. */
GPU_DEVICE gpu_item item_of(const gpu_prep &a, const gpu_item *items, uint32_t token)
{
    uint32_t i = token;
    if (a.n_items != a.n_tokens)
        i = find_item<&gpu_item::token0>(items, a.n_items, token);
    gpu_item it;
#pragma unroll
    for (int k = 0; k < (int)(sizeof it / 16); ++k)
        ((uint4 *)&it)[k] = ((const uint4 *)&items[i])[k];
    return it;
}

/* Two thread blocks a token, for k and v and for q; patches and the inline items are spread over
 * the first ones. */
__global__ void __launch_bounds__(prep_threads) prep(GPU_PARAM(gpu_prep, by_value))
{
    const gpu_prep &a = params(by_value);
    chain_release();
    uint32_t thread = blockIdx.x * prep_threads + threadIdx.x;
    uint32_t n_threads = gridDim.x * prep_threads;
    bool is_first = blockIdx.y == 0;
    if (is_first && thread == 0 && a.out_start_ns)
        *a.out_start_ns = time_ns();
    bool is_inline = !a.items;
    const gpu_item *items = is_inline ? a.inline_items : a.items;
    const gpu_patch *patches = a.patches ? a.patches : a.inline_patches;
    for (uint32_t i = thread; is_first && i < a.n_patches; i += n_threads) {
        gpu_patch p = patches[i];
        a.kv.table[(uint64_t)p.row * a.kv.row_blocks + p.index] = p.block;
    }
    if (is_inline && is_first) {
        uint32_t words = a.n_items * (uint32_t)(sizeof(gpu_item) / 16);
        for (uint32_t i = thread; i < words; i += n_threads)
            ((uint4 *)a.out_items)[i] = ((const uint4 *)a.inline_items)[i];
    }
    if (blockIdx.x >= a.n_tokens)
        return;
    const gpu_item it = item_of(a, items, blockIdx.x);
    uint32_t token = blockIdx.x - it.token0;
    if (!is_first && it.q_src && !a.brought)
        bring_q(a, it, token);
    if (is_first && it.k_src)
        append_token(a.kv, it, a.blocks ? a.blocks : a.inline_blocks, token,
                     a.brought ? a.brought + blockIdx.x * kv_row_bytes(a.kv) : nullptr);
}

/* Every token's q, k and v are one list of 16 bytes each, in pieces of bring_threads * at_once,
 * which the blocks take in turn. Few threads of few registers: there is room for them beside every
 * attention kernel. */
__global__ void __launch_bounds__(bring_threads) bring(GPU_PARAM(gpu_prep, by_value))
{
    const gpu_prep &a = params(by_value);
    const gpu_kv &kv = a.kv;
    const gpu_item *items = a.items ? a.items : a.inline_items;
    const uint32_t size = element_bytes(kv.q_dtype), nq = q_pieces(a);
    const uint32_t nk = kv.num_kv_heads * kv.dk * size / 16;
    const uint32_t n = nq + (uint32_t)(kv_row_bytes(kv) / 16);
    const uint32_t pieces = (n + bring_threads * at_once - 1) / (bring_threads * at_once);
    for (uint32_t piece = blockIdx.x; piece < a.n_tokens * pieces; piece += gridDim.x) {
        const uint32_t row = piece / pieces;
        const gpu_item it = item_of(a, items, row);
        const uint64_t token = row - it.token0;
        const uint4 *q = (const uint4 *)it.q_src, *k = (const uint4 *)it.k_src; /* or NULL */
        const uint4 *v = (const uint4 *)it.v_src;
        const uint64_t q0 = token * nq, k0 = token * nk, v0 = token * (n - nq - nk);
        uint4 *to_q = q_place(a, it, (uint32_t)token);
        uint4 *to_kv = (uint4 *)(a.brought + row * kv_row_bytes(kv));
        uint32_t i0 = piece % pieces * bring_threads * at_once + threadIdx.x;
        uint4 x[at_once];
        bool has[at_once];
#pragma unroll
        for (int u = 0; u < at_once; ++u) {
            uint32_t i = i0 + u * bring_threads;
            has[u] = i < n && (i < nq ? q : k);
            if (has[u])
                x[u] = i < nq ? q[q0 + i] : i < nq + nk ? k[k0 + i - nq] : v[v0 + i - nq - nk];
        }
#pragma unroll
        for (int u = 0; u < at_once; ++u) {
            uint32_t i = i0 + u * bring_threads;
            if (has[u])
                *(i < nq ? to_q + i : to_kv + (i - nq)) = x[u];
        }
    }
}

__global__ void finish(GPU_PARAM(gpu_finish, a))
{
    chain_wait();
    signal_host(a);
}

} // namespace

int gpu_prep_launch(const struct gpu_prep *a, void *stream)
{
    uint32_t grid = a->n_tokens ? a->n_tokens : 1 + (a->n_patches > 1024 ? 31 : 0);
    uint32_t lists = a->n_tokens && !a->brought ? 2 : 1;
    return launch(prep, dim3(grid, lists), dim3(prep_threads), 0, stream, false, *a);
}

int gpu_bring_launch(const struct gpu_prep *a, void *stream)
{
    return launch(bring, dim3(bring_blocks), dim3(bring_threads), 0, stream, false, *a);
}

/* A processor divides its memory between cache and shared memory anew only when it is empty, so
 * blocks that ask for none of the latter would keep those of the attention kernels out, or be kept
 * out. */
int gpu_prep_init(void)
{
    int code = share_memory(prep);
    if (!code)
        code = share_memory(bring);
    return code ? code : share_memory(finish);
}

int gpu_finish_launch(const struct gpu_finish *a, void *stream, int chained)
{
    return launch(finish, dim3(1), dim3(1), 0, stream, chained != 0, *a);
}
