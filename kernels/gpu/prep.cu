/* prep.cu: everything a batch does before attention: block-table patches, append with quantisation, q to
 * the device; and the small kernels around it: block copies, scrubbing, completion.
 *
 * An append takes its block ids from the batch, never from the block table, so patches and appends
 * need no order between them.
 */
#include "kernels/gpu/device.cuh"

using namespace gpu;

namespace
{

constexpr int prep_threads = 128;

/* About as many as keep the bus busy: more reads of host memory at a time hold up the attention kernel's. */
constexpr int bring_threads = 64, bring_blocks = 128;

constexpr float e4m3_max = 448.0f, int8_max = 127.0f;

/* One head's row, by one warp, 8 elements a lane (n <= 256): codes and their scale by
 * reference_quantise's rule. */
GPU_DEVICE void quantise_row(char *dst, float *dst_scale, const float (&x)[8], uint32_t n,
                             uint32_t dtype)
{
    float amax = 0.0f, bad = 0.0f;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        amax = fmaxf(amax, fabsf(x[j]));
        bad = isfinite(x[j]) ? bad : 1.0f;
    }
    amax = warp_max(amax);
    float scale = amax / (dtype == ATTN_FP8_E4M3 ? e4m3_max : int8_max);
    if (warp_max(bad) > 0.0f)
        scale = NAN;
    float inverse = 1.0f / scale;
    bool is_tiny = scale < 0x1p-100f;
    uint32_t w[2] = {0, 0};
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        /* x / scale, correctly rounded: a quotient from the rounded inverse and one correction */
        float y = x[j] * inverse;
        y = fmaf(fmaf(-y, scale, x[j]), inverse, y);
        if (is_tiny)
            y = x[j] / scale;
        if (x[j] == 0.0f)
            y = x[j]; /* the correction drops the sign of a zero, which e4m3 has */
        if (!(scale > 0.0f))
            y = 0.0f;
        uint32_t code;
        if (dtype == ATTN_FP8_E4M3)
            code = e4m3_encode(y);
        else
            code = (uint32_t)__float2int_rn(fminf(fmaxf(y, -int8_max), int8_max)) & 0xff;
        w[j / 4] |= code << (j % 4 * 8);
    }
    if (lane_id() * 8 < n)
        *(uint2 *)(dst + lane_id() * 8) = make_uint2(w[0], w[1]);
    if (lane_id() == 0)
        *dst_scale = scale;
}

/* Loads over the bus take a microsecond: `at_once` of them are asked for before the first is used. */
constexpr int at_once = 4, rows_at_once = 2;

/* brought: the token's k and v on the device, or NULL. */
GPU_DEVICE void append_token(const gpu_kv &kv, const gpu_item &it, const uint32_t *blocks,
                             uint32_t token, const char *brought)
{
    uint32_t position = it.pos + token, slot = position & (kv.block_tokens - 1);
    uint32_t block = blocks[it.blocks0 + (position >> kv.block_shift) - (it.pos >> kv.block_shift)];
    part k = part_of(kv, it.layer, false), v = part_of(kv, it.layer, true);
    uint32_t size = element_bytes(kv.q_dtype);
    const char *src_k = (const char *)it.k_src + (uint64_t)token * kv.num_kv_heads * kv.dk * size;
    const char *src_v = (const char *)it.v_src + (uint64_t)token * kv.num_kv_heads * kv.dv * size;
    if (brought) {
        src_k = brought;
        src_v = brought + kv.num_kv_heads * kv.dk * size;
    }
    if (kv.is_quantised) {
        constexpr uint32_t n_warps = prep_threads / warp_width;
        for (uint32_t r0 = warp_id(); r0 < 2 * kv.num_kv_heads; r0 += n_warps * rows_at_once) {
            float x[rows_at_once][8] = {};
#pragma unroll
            for (int u = 0; u < rows_at_once; ++u) {
                uint32_t r = r0 + u * n_warps, e = lane_id() * 8;
                bool is_v = r >= kv.num_kv_heads;
                uint32_t head = is_v ? r - kv.num_kv_heads : r, d = is_v ? kv.dv : kv.dk;
                if (r < 2 * kv.num_kv_heads && e < d)
                    load8(x[u], (is_v ? src_v : src_k) + (head * d + e) * size, kv.q_dtype);
            }
#pragma unroll
            for (int u = 0; u < rows_at_once; ++u) {
                uint32_t r = r0 + u * n_warps;
                bool is_v = r >= kv.num_kv_heads;
                uint32_t head = is_v ? r - kv.num_kv_heads : r;
                part p = v;
                if (!is_v)
                    p = k;
                if (r < 2 * kv.num_kv_heads)
                    quantise_row(row_address(kv, p, block, head, slot),
                                 scale_address(kv, p, block, head, slot), x[u],
                                 is_v ? kv.dv : kv.dk, kv.kv_dtype);
            }
        }
        return;
    }
    uint32_t nk = k.row_bytes / 16, nv = v.row_bytes / 16, n = kv.num_kv_heads * (nk + nv);
    for (uint32_t i0 = threadIdx.x; i0 < n; i0 += prep_threads * at_once) {
        uint4 x[at_once];
#pragma unroll
        for (int u = 0; u < at_once; ++u) {
            uint32_t i = i0 + u * prep_threads, at = kv.num_kv_heads * nk;
            if (i < n)
                x[u] = i < at ? ((const uint4 *)src_k)[i] : ((const uint4 *)src_v)[i - at];
        }
#pragma unroll
        for (int u = 0; u < at_once; ++u) {
            uint32_t i = i0 + u * prep_threads;
            bool is_v = i >= kv.num_kv_heads * nk;
            uint32_t j = is_v ? i - kv.num_kv_heads * nk : i, w = is_v ? nv : nk;
            part p = v;
            if (!is_v)
                p = k;
            if (i < n)
                *(uint4 *)(row_address(kv, p, block, j / w, slot) + j % w * 16) = x[u];
        }
    }
}

GPU_DEVICE uint64_t kv_row_bytes(const gpu_kv &kv)
{
    return (uint64_t)kv.num_kv_heads * (kv.dk + kv.dv) * element_bytes(kv.q_dtype);
}

/* One token's q to the device. */
GPU_DEVICE void bring_q(const gpu_kv &kv, const gpu_item &it, uint32_t token)
{
    uint32_t n = kv.num_q_heads * kv.dk * element_bytes(kv.q_dtype) / 16;
    const uint4 *src = (const uint4 *)it.q_src + (uint64_t)token * n;
    uint4 *dst = (uint4 *)it.q + (uint64_t)token * n;
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

/* A token's item: in one go, and without a search where every item has one token, so that few loads wait for
 * each other. */
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

/* Two thread blocks a token, for k and v and for q; patches and the inline items are spread over the
 * first ones. */
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
        bring_q(a.kv, it, token);
    if (is_first && it.k_src)
        append_token(a.kv, it, a.blocks ? a.blocks : a.inline_blocks, token,
                     a.brought ? a.brought + blockIdx.x * kv_row_bytes(a.kv) : nullptr);
}

/* Every token's q, k and v are one list of 16 bytes each, in pieces of bring_threads * at_once, which the
 * blocks take in turn. Few threads of few registers: there is room for them beside every attention kernel. */
__global__ void __launch_bounds__(bring_threads) bring(GPU_PARAM(gpu_prep, by_value))
{
    const gpu_prep &a = params(by_value);
    const gpu_kv &kv = a.kv;
    const gpu_item *items = a.items ? a.items : a.inline_items;
    const uint32_t size = element_bytes(kv.q_dtype), nq = kv.num_q_heads * kv.dk * size / 16;
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
        uint4 *to_q = (uint4 *)it.q + token * nq;
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

__global__ void __launch_bounds__(256) copy_blocks(GPU_PARAM(gpu_copy, a))
{
    const uint4 *src = (const uint4 *)(a.base + a.list[2 * blockIdx.y] * a.block_bytes);
    uint4 *dst = (uint4 *)(a.base + a.list[2 * blockIdx.y + 1] * a.block_bytes);
    uint64_t n = a.block_bytes / 16, step = (uint64_t)gridDim.x * blockDim.x;
    for (uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step)
        dst[i] = src[i];
}

__global__ void __launch_bounds__(256) scrub_blocks(GPU_PARAM(gpu_copy, a))
{
    uint4 *dst = (uint4 *)(a.base + a.list[blockIdx.y] * a.block_bytes);
    uint64_t n = a.block_bytes / 16, step = (uint64_t)gridDim.x * blockDim.x;
    for (uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step)
        dst[i] = make_uint4(0, 0, 0, 0);
}

__global__ void finish(GPU_PARAM(gpu_finish, a))
{
    chain_wait();
    tell_host(a);
}

/* Plain 16-byte loads, `unroll` of them in flight a thread. */
template <int unroll>
__global__ void __launch_bounds__(1024) read_bytes(const uint4 *p, uint64_t n, uint32_t *sink)
{
    uint64_t step = (uint64_t)gridDim.x * blockDim.x;
    uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x;
    uint32_t x = 0;
    for (; i + (unroll - 1) * step < n; i += unroll * step) {
        uint4 v[unroll];
#pragma unroll
        for (int u = 0; u < unroll; ++u)
            v[u] = p[i + u * step];
#pragma unroll
        for (int u = 0; u < unroll; ++u)
            x ^= v[u].x ^ v[u].y ^ v[u].z ^ v[u].w;
    }
    for (; i < n; i += step)
        x ^= p[i].x ^ p[i].y ^ p[i].z ^ p[i].w;
    if (x == 0x5eed5eed) /* so that the loads are not removed */
        *sink = x;
}

dim3 block_grid(uint64_t block_bytes, uint32_t n)
{
    uint64_t x = (block_bytes / 16 + 1023) / 1024; /* four loads a thread */
    return dim3((uint32_t)(x < 64 ? x : 64), n);
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

/* A processor divides its memory between cache and shared memory anew only when it is empty, so blocks
 * that ask for none of the latter would keep those of the attention kernels out, or be kept out. */
int gpu_prep_init(void)
{
    int code = share_memory(prep);
    if (!code)
        code = share_memory(bring);
    return code ? code : share_memory(finish);
}

int gpu_copy_launch(const struct gpu_copy *a, void *stream)
{
    return launch(copy_blocks, block_grid(a->block_bytes, a->n), dim3(256), 0, stream, false, *a);
}

int gpu_scrub_launch(const struct gpu_copy *a, void *stream)
{
    return launch(scrub_blocks, block_grid(a->block_bytes, a->n), dim3(256), 0, stream, false, *a);
}

int gpu_finish_launch(const struct gpu_finish *a, void *stream, int chained)
{
    return launch(finish, dim3(1), dim3(1), 0, stream, chained != 0, *a);
}

int gpu_read_launch(const void *p, uint64_t bytes, uint32_t *sink, int shape, uint32_t n_processors,
                    void *stream)
{
    const uint4 *q = (const uint4 *)p;
    uint64_t n = bytes / 16;
    struct {
        void (*kernel)(const uint4 *, uint64_t, uint32_t *);
        uint32_t threads, a_processor;
    } const shapes[GPU_READ_SHAPES] = {
        {read_bytes<8>, 512, 4},  {read_bytes<8>, 1024, 2}, {read_bytes<4>, 1024, 2},
        {read_bytes<16>, 256, 4}, {read_bytes<2>, 1024, 2}, {read_bytes<1>, 256, 8},
    };
    uint32_t threads = shapes[shape].threads;
    uint64_t grid = (n + threads - 1) / threads, cap = n_processors * shapes[shape].a_processor;
    if (grid > cap)
        grid = cap;
    return launch(shapes[shape].kernel, dim3(grid ? (uint32_t)grid : 1), dim3(threads), 0, stream,
                  false, q, n, sink);
}
