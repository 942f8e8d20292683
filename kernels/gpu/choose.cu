/* choose.cu: which blocks the queries of choosing items visit (backend_item.n_chosen), as
 * kernels/cpu/choose.c says it: the extremes of blocks' keys, from them a bound for each query, kv
 * head and block of how large q.k can be there, and the blocks whose bounds are highest.
 *
 * Bounds are made with many thread blocks a row (a query and kv head), so that one long sequence
 * has the whole device; a row's blocks are taken by one thread block. What is taken are numbers of
 * the pool's blocks, so that attention reads a row's choice as if it were the block table of a
 * sequence of its own.
 */
#include "kernels/gpu/device.cuh"

using namespace gpu;

namespace
{

GPU_DEVICE uint32_t extremes_dtype(const gpu_kv &kv)
{
    return kv.is_quantised ? (uint32_t)ATTN_F32 : kv.kv_dtype;
}

/* The maxima of a block's keys; the minima lie behind them. */
GPU_DEVICE char *extremes_at(const gpu_kv &kv, const gpu_extremes &x, uint32_t block,
                             uint32_t layer, uint32_t head)
{
    const uint64_t row = ((uint64_t)block * x.num_layers + layer) * kv.num_kv_heads + head;
    return x.base + row * 2 * kv.dk * element_bytes(extremes_dtype(kv));
}

/* The same of the nth block that is made or given beside them. */
GPU_DEVICE uint64_t given_at(const gpu_kv &kv, uint32_t nth, uint32_t head)
{
    return ((uint64_t)nth * kv.num_kv_heads + head) * 2 * kv.dk * element_bytes(extremes_dtype(kv));
}

/* ---- extremes: a thread has 8 dimensions of one (block, layer) and kv head */

constexpr uint32_t make_threads = 128;

__global__ void __launch_bounds__(make_threads) make_extremes(GPU_PARAM(gpu_extremes_make, a))
{
    chain_release();
    chain_wait();
    const gpu_kv &kv = a.kv;
    const uint32_t pieces = kv.dk / 8, at = blockIdx.x * make_threads + threadIdx.x;
    const uint32_t e = at % pieces * 8, head = at / pieces % kv.num_kv_heads;
    const uint32_t nth = at / pieces / kv.num_kv_heads;
    if (nth >= a.n)
        return;
    const uint32_t block = a.list[2 * nth], layer = a.list[2 * nth + 1];
    const part p = part_of(kv, layer, false);
    float max[8], min[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        max[i] = -INFINITY;
        min[i] = INFINITY;
    }
#pragma unroll 4
    for (uint32_t slot = 0; slot < kv.block_tokens; ++slot) {
        float x[8], scale = 1.0f;
        const char *scales = scale_address(kv, p, block, head, slot);
        load_stored8(x, row_address(kv, p, block, head, slot), scales, e, kv.kv_dtype);
        if (kv.is_quantised)
            scale = row_scale(scales, kv.kv_dtype);
#pragma unroll
        for (int i = 0; i < 8; ++i) { /* NaNs are left out */
            max[i] = fmaxf(max[i], x[i] * scale);
            min[i] = fminf(min[i], x[i] * scale);
        }
    }
    const uint32_t dtype = extremes_dtype(kv), size = element_bytes(dtype);
    char *to = a.bytes ? a.bytes + given_at(kv, nth, head)
                       : extremes_at(kv, a.extremes, block, layer, head);
    store8(to + e * size, max, dtype);
    store8(to + (kv.dk + e) * size, min, dtype);
}

/* A thread has 8 dimensions, as above. */
__global__ void __launch_bounds__(make_threads) keep_extremes(GPU_PARAM(gpu_extremes_make, a))
{
    chain_release();
    chain_wait();
    const gpu_kv &kv = a.kv;
    const uint32_t pieces = kv.dk / 8, at = blockIdx.x * make_threads + threadIdx.x;
    const uint32_t e = at % pieces * 8, head = at / pieces % kv.num_kv_heads;
    const uint32_t nth = at / pieces / kv.num_kv_heads;
    if (nth >= a.n)
        return;
    const uint32_t dtype = extremes_dtype(kv), size = element_bytes(dtype);
    const char *from = a.bytes + given_at(kv, nth, head);
    char *to = extremes_at(kv, a.extremes, a.list[2 * nth], a.list[2 * nth + 1], head);
#pragma unroll
    for (uint32_t row = 0; row < 2; ++row) { /* maxima, minima */
        const uint32_t offset = (row * kv.dk + e) * size;
        float x[8];
        load8(x, from + offset, dtype);
        store8(to + offset, x, dtype);
    }
}

/* ---- rows */

/* One query and kv head. */
struct choosing {
    const gpu_item &it;
    uint32_t token, head;
    choice_size c;

    GPU_DEVICE choosing(const gpu_choose &a, uint32_t row)
        : it(a.items[find_item<&gpu_item::token0>(a.items, a.n_items,
                                                  a.items[0].token0 + row / a.kv.num_kv_heads)])
    {
        token = a.items[0].token0 + row / a.kv.num_kv_heads - it.token0;
        head = row % a.kv.num_kv_heads;
        c = choice_at(a.kv, it, a.n_chosen, token);
    }
    /* Are there blocks beside the first and the newest, some of which are taken? */
    GPU_DEVICE bool needs_bounds() const
    {
        return c.n > 2 && c.n < c.n_blocks;
    }
};

/* Floats in an order of integers; what is not a number may be anything, so it comes first. */
GPU_DEVICE uint32_t ordered(float x)
{
    const uint32_t u = __float_as_uint(x == x ? x + 0.0f : INFINITY); /* one zero */
    return u >> 31 ? ~u : u | 0x80000000;
}

/* ---- bounds: a group of lanes has one block at a time, a lane n_pieces pieces of 8 dimensions */

constexpr int bound_threads = 128, bound_rows = 4, bounds_ahead = 2;
constexpr uint32_t bound_turns = 16; /* of a thread block, fewer where there are few of them */
constexpr uint32_t bound_enough = 512; /* thread blocks */

template <int lanes> constexpr uint32_t bound_blocks = bound_threads / lanes; /* of a turn */

template <int lanes, int n_pieces>
__global__ void __launch_bounds__(bound_threads) make_bounds(GPU_PARAM(gpu_choose, a))
{
    constexpr uint32_t n_groups = bound_blocks<lanes>;
    chain_release();
    chain_wait();
    const gpu_kv &kv = a.kv;
    const choosing x(a, a.row0 + blockIdx.x);
    if (!x.needs_bounds())
        return;
    const uint32_t first = 1 + blockIdx.y * a.n_each;
    const uint32_t end = min(first + a.n_each, x.c.n_blocks - 1);
    const uint32_t e0 = threadIdx.x % lanes * 8, group = threadIdx.x / lanes;
    const uint32_t dtype = extremes_dtype(kv), size = element_bytes(dtype);
    const uint32_t q_bytes = element_bytes(kv.q_dtype);
    const uint32_t *table = table_of(kv, x.it);
    uint32_t *bounds = a.bounds + (uint64_t)blockIdx.x * a.n_longest;
    const uint64_t q_row = (uint64_t)x.token * kv.num_q_heads + x.head * kv.group;

    for (uint32_t row = 0; row < kv.group; row += bound_rows) {
        float q[bound_rows][n_pieces][8];
#pragma unroll
        for (int r = 0; r < bound_rows; ++r)
#pragma unroll
            for (int c = 0; c < n_pieces; ++c) {
                const uint32_t e = e0 + c * lanes * 8;
#pragma unroll
                for (int i = 0; i < 8; ++i)
                    q[r][c][i] = 0.0f;
                if (e < kv.dk)
                    load8(q[r][c],
                          (const char *)x.it.q +
                              ((q_row + min(row + r, kv.group - 1)) * kv.dk + e) * q_bytes,
                          kv.q_dtype);
            }
        for (uint32_t base = first; base < end; base += n_groups * bounds_ahead) {
            float sum[bounds_ahead][bound_rows] = {};
#pragma unroll
            for (int u = 0; u < bounds_ahead; ++u) {
                const uint32_t at = base + u * n_groups + group;
                const char *from =
                    extremes_at(kv, a.extremes, table[min(at, end - 1)], x.it.layer, x.head);
#pragma unroll
                for (int c = 0; c < n_pieces; ++c) {
                    const uint32_t e = e0 + c * lanes * 8;
                    float above[8] = {}, below[8] = {};
                    if (e < kv.dk) {
                        load8(above, from + e * size, dtype);
                        load8(below, from + (kv.dk + e) * size, dtype);
                    }
#pragma unroll
                    for (int r = 0; r < bound_rows; ++r)
#pragma unroll
                        for (int i = 0; i < 8; ++i)
                            sum[u][r] = fmaf(q[r][c][i], q[r][c][i] > 0.0f ? above[i] : below[i],
                                             sum[u][r]);
                }
            }
#pragma unroll
            for (int u = 0; u < bounds_ahead; ++u) {
                uint32_t best = 0;
#pragma unroll
                for (int r = 0; r < bound_rows; ++r)
                    best = max(best, ordered(warp_sum<lanes>(sum[u][r])));
                const uint32_t at = base + u * n_groups + group;
                if (threadIdx.x % lanes == 0 && at < end)
                    bounds[at] = row > 0 ? max(best, bounds[at]) : best;
            }
        }
    }
}

/* ---- the blocks whose bounds are highest: a thread block has one row */

constexpr uint32_t take_threads = 256, take_warps = take_threads / warp_width;
constexpr uint32_t take_kept = 8192; /* bounds that shared memory has room for */
constexpr int take_steps = 3; /* thresholds that are tried at once */
constexpr uint32_t take_sums = (2 * take_steps + 2) * take_warps; /* words of it */
static_assert((take_sums + take_kept) * 4 <= 48 << 10, "more than a block has unasked");

/* Sums over the thread block of counts below 2^24, by turns in one half of `sums` and the other, so
 * that one barrier is enough. */
template <int n> GPU_DEVICE void block_sum(float *sums, uint32_t turn, uint32_t (&count)[n])
{
    float *own = sums + turn % 2 * take_steps * take_warps;
#pragma unroll
    for (int k = 0; k < n; ++k) {
        const float of_warp = warp_sum((float)count[k]);
        if (lane_id() == 0)
            own[k * take_warps + warp_id()] = of_warp;
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < n; ++k) {
        float all = 0.0f;
#pragma unroll
        for (uint32_t w = 0; w < take_warps; ++w)
            all += own[k * take_warps + w];
        count[k] = (uint32_t)all;
    }
}

/* The counts of the threads before this one. Its own barrier; sums [take_warps]. */
GPU_DEVICE uint32_t block_before(float *sums, uint32_t count)
{
    float before = 0.0f, all = (float)count;
#pragma unroll
    for (int d = 1; d < warp_width; d *= 2) {
        const float other = shuffle_xor(all, d);
        before += lane_id() & d ? other : 0.0f;
        all += other;
    }
    if (lane_id() == 0)
        sums[warp_id()] = all;
    __syncthreads();
    for (int w = 0; w < warp_id(); ++w)
        before += sums[w];
    return (uint32_t)before;
}

/* The largest number that `want` of n keys are not below. */
GPU_DEVICE uint32_t threshold_of(float *sums, const uint32_t *keys, uint32_t n, uint32_t want)
{
    uint32_t low = 0;
    for (int bit = 30; bit >= 0; bit -= 2) {
        uint32_t count[take_steps] = {}, step = 0;
        for (uint32_t i = threadIdx.x; i < n; i += take_threads)
#pragma unroll
            for (uint32_t k = 0; k < take_steps; ++k)
                count[k] += keys[i] >= low + ((k + 1) << bit);
        block_sum(sums, bit / 2, count);
        bool is_found = false;
#pragma unroll
        for (uint32_t k = 0; k < take_steps; ++k) {
            step = count[k] >= want ? k + 1 : step;
            is_found |= count[k] == want;
        }
        low += step << bit;
        if (is_found)
            break;
    }
    return low;
}

__global__ void __launch_bounds__(take_threads) take_blocks(GPU_PARAM(gpu_choose, a))
{
    GPU_SHARED(uint32_t, shared);
    float *sums = (float *)shared; /* two halves of block_sum's, two arrays of block_before's */
    chain_release();
    chain_wait();
    const gpu_kv &kv = a.kv;
    const choosing x(a, a.row0 + blockIdx.x);
    const choice_size c = x.c;
    const uint32_t *table = table_of(kv, x.it);
    uint32_t *list = a.chosen + chosen_at(kv, x.it, a.n_chosen, x.token, x.head);
    if (!x.needs_bounds()) {
        for (uint32_t i = threadIdx.x; i < c.n; i += take_threads)
            list[i] = table[c.n == c.n_blocks || i + 1 < c.n ? i : c.n_blocks - 1];
        return;
    }
    if (threadIdx.x == 0) {
        list[0] = table[0];
        list[c.n - 1] = table[c.n_blocks - 1];
    }

    /* of the others the c.n - 2 highest, in their order */
    const uint32_t n = c.n_blocks - 2, want = c.n - 2;
    const uint32_t *keys = a.bounds + (uint64_t)blockIdx.x * a.n_longest + 1;
    if (n <= take_kept) {
        uint32_t *kept = shared + take_sums;
        for (uint32_t i = threadIdx.x; i < n; i += take_threads)
            kept[i] = keys[i];
        keys = kept;
    }
    __syncthreads();
    const uint32_t lowest = threshold_of(sums, keys, n, want);
    const uint32_t each = (n + take_threads - 1) / take_threads;
    const uint32_t begin = min(threadIdx.x * each, n), end = min(begin + each, n);
    uint32_t n_above = 0, n_equal = 0;
    for (uint32_t i = begin; i < end; ++i) {
        n_above += keys[i] > lowest;
        n_equal += keys[i] == lowest;
    }
    float *before = sums + 2 * take_steps * take_warps;
    uint32_t above = block_before(before, n_above);
    uint32_t equal = block_before(before + take_warps, n_equal);
    /* of those that are equal the newer ones: the first are passed over */
    uint32_t n_all[] = {n_above + n_equal};
    block_sum(sums, 0, n_all);
    const uint32_t surplus = n_all[0] - want;
    for (uint32_t i = begin; i < end; ++i) {
        const bool is_equal = keys[i] == lowest;
        if (keys[i] > lowest || (is_equal && equal >= surplus))
            list[1 + above + (equal > surplus ? equal - surplus : 0)] = table[1 + i];
        above += keys[i] > lowest;
        equal += is_equal;
    }
}

template <int lanes, int n_pieces = 1>
int launch_bounds(const gpu_choose *a, void *stream, bool chained)
{
    gpu_choose x = *a;
    if (a->n_longest <= 2)
        return 0;
    const uint32_t n = a->n_longest - 2;
    uint32_t turns = bound_turns;
    auto n_parts = [&] { return (n - 1) / (turns * bound_blocks<lanes>)+1; };
    while (turns > bounds_ahead && a->n_rows * n_parts() < bound_enough)
        turns /= 2;
    x.n_each = turns * bound_blocks<lanes>;
    return launch(make_bounds<lanes, n_pieces>, dim3(a->n_rows, n_parts()), dim3(bound_threads), 0,
                  stream, chained, x);
}

} // namespace

int gpu_extremes_launch(const struct gpu_extremes_make *a, void *stream, int chained)
{
    const uint32_t n = a->n * a->kv.num_kv_heads * (a->kv.dk / 8);
    const dim3 blocks((n - 1) / make_threads + 1);
    if (a->is_given)
        return launch(keep_extremes, blocks, dim3(make_threads), 0, stream, chained != 0, *a);
    return launch(make_extremes, blocks, dim3(make_threads), 0, stream, chained != 0, *a);
}

int gpu_choose_launch(const struct gpu_choose *a, void *stream, int chained)
{
    const uint32_t dk = a->kv.dk;
    int code = 0;
    if (a->n_chosen > 2 && dk <= 64)
        code = launch_bounds<8>(a, stream, chained != 0);
    else if (a->n_chosen > 2 && dk <= 128)
        code = launch_bounds<16>(a, stream, chained != 0);
    else if (a->n_chosen > 2 && dk <= 256)
        code = launch_bounds<32>(a, stream, chained != 0);
    else if (a->n_chosen > 2)
        code = launch_bounds<32, 3>(a, stream, chained != 0);
    if (code)
        return code;
    const uint32_t kept = a->n_longest < take_kept ? a->n_longest : take_kept;
    return launch(take_blocks, dim3(a->n_rows), dim3(take_threads),
                  (take_sums + kept) * sizeof(uint32_t), stream, chained != 0 || a->n_chosen > 2,
                  *a);
}
