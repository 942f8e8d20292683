/* choose.cu: which blocks the queries of choosing items visit (backend_item.n_chosen), as
 * kernels/cpu/choose.c says it: the extremes of blocks' keys, from them a bound for each query, kv
 * head and block of how large q.k can be there, and the blocks whose bounds are highest.
 *
 * Bounds are made by many thread blocks a row (a query and kv head), so that one long sequence has
 * the whole device; the one that is the last to arrive takes the row's blocks. Of 16-bit extremes
 * bounds are products on tensor cores: of q's positive elements with the maxima, of its negative
 * ones with the minima. What is taken are numbers of the pool's blocks, so that attention reads a
 * row's choice as if it were the block table of a sequence of its own.
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
    uint32_t block = a.list[2 * nth], layer = a.list[2 * nth + 1], to_block = block;
    if (a.is_summary) {
        const uint32_t of = nth / a.extremes.num_layers;
        block = a.list[2 * of];
        layer = nth % a.extremes.num_layers;
        to_block = a.list[2 * of + 1];
    }
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
                       : extremes_at(kv, a.extremes, to_block, layer, head);
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

/* ---- bounds: a thread block makes those of a row's blocks [first, end) */

/* The executor's tests have fewer, and so several thread blocks a row. */
#ifndef GPU_CHOOSE_THREADS
#define GPU_CHOOSE_THREADS 256
#endif
constexpr uint32_t choose_threads = GPU_CHOOSE_THREADS, choose_warps = choose_threads / warp_width;

/* What it reads. */
struct bounds_source {
    const gpu_kv &kv;
    const char *q; /* [group][dk] */
    const char *extremes; /* those of the pool's block 0 */
    const uint32_t *table;
    uint64_t block_bytes; /* from one block's extremes to the next one's */
    uint32_t q_bytes, dtype, size; /* of an element of q; of the extremes */
    uint32_t first, end;

    GPU_DEVICE bounds_source(const gpu_choose &a, const choosing &x)
        : kv(a.kv), extremes(extremes_at(kv, a.extremes, 0, x.it.layer, x.head)),
          table(table_of(kv, x.it)), q_bytes(element_bytes(kv.q_dtype)), dtype(extremes_dtype(kv)),
          size(element_bytes(dtype)), first(1 + blockIdx.y * a.n_each),
          end(min(first + a.n_each, x.c.n_blocks - 1))
    {
        const uint64_t head = (uint64_t)x.token * kv.num_q_heads + x.head * kv.group;
        q = (const char *)x.it.q + head * kv.dk * q_bytes;
        block_bytes = (uint64_t)a.extremes.num_layers * kv.num_kv_heads * 2 * kv.dk * size;
    }
    /* Of the last row and of the last block for those beyond. */
    GPU_DEVICE const char *q_row(uint32_t row) const
    {
        return q + min(row, kv.group - 1) * kv.dk * q_bytes;
    }
    GPU_DEVICE const char *block(uint32_t at) const
    {
        return extremes + table[min(at, end - 1)] * block_bytes;
    }
};

/* Of any extremes, term by term: a group of lanes has one block at a time, a lane n_pieces pieces
 * of 8 dimensions. */
template <int lanes, int n_pieces> struct summed_bounds {
    static constexpr int rows = 4, ahead = 2;
    static constexpr uint32_t n_groups = choose_threads / lanes, at_once = n_groups * ahead;

    static uint32_t shared_bytes(uint32_t)
    {
        return 0;
    }

    static GPU_DEVICE void make(const bounds_source &x, uint32_t *bounds, void *)
    {
        const gpu_kv &kv = x.kv;
        const uint32_t e0 = threadIdx.x % lanes * 8, group = threadIdx.x / lanes;
        for (uint32_t row = 0; row < kv.group; row += rows) {
            float q[rows][n_pieces][8];
#pragma unroll
            for (int r = 0; r < rows; ++r)
#pragma unroll
                for (int c = 0; c < n_pieces; ++c) {
                    const uint32_t e = e0 + c * lanes * 8;
#pragma unroll
                    for (int i = 0; i < 8; ++i)
                        q[r][c][i] = 0.0f;
                    if (e < kv.dk)
                        load8(q[r][c], x.q_row(row + r) + e * x.q_bytes, kv.q_dtype);
                }
            for (uint32_t base = x.first; base < x.end; base += at_once) {
                float sum[ahead][rows] = {};
#pragma unroll
                for (int u = 0; u < ahead; ++u) {
                    const char *from = x.block(base + u * n_groups + group);
#pragma unroll
                    for (int c = 0; c < n_pieces; ++c) {
                        const uint32_t e = e0 + c * lanes * 8;
                        float above[8] = {}, below[8] = {};
                        if (e < kv.dk) {
                            load8(above, from + e * x.size, x.dtype);
                            load8(below, from + (kv.dk + e) * x.size, x.dtype);
                        }
#pragma unroll
                        for (int r = 0; r < rows; ++r)
#pragma unroll
                            for (int i = 0; i < 8; ++i)
                                sum[u][r] = fmaf(
                                    q[r][c][i], q[r][c][i] > 0.0f ? above[i] : below[i], sum[u][r]);
                    }
                }
#pragma unroll
                for (int u = 0; u < ahead; ++u) {
                    uint32_t best = 0;
#pragma unroll
                    for (int r = 0; r < rows; ++r)
                        best = max(best, ordered(warp_sum<lanes>(sum[u][r])));
                    const uint32_t at = base + u * n_groups + group;
                    if (threadIdx.x % lanes == 0 && at < x.end)
                        bounds[at] = row > 0 ? max(best, bounds[at]) : best;
                }
            }
        }
    }
};

/* Two 16-bit floats that are not negative, or that are; the others become 0. */
GPU_DEVICE uint32_t keep_signed(uint32_t two, bool is_negative)
{
    const uint32_t negative = (two >> 15 & 0x00010001) * 0xffff;
    return two & (is_negative ? negative : ~negative);
}

constexpr int chunks_ahead = 4;

/* Chunks of 32 dimensions, chunks_ahead or a multiple. */
VISIBLE_FN uint32_t chunks_of(uint32_t dk)
{
    return (dk + 32 * chunks_ahead - 1) / (32 * chunks_ahead) * chunks_ahead;
}

/* Of extremes of q's type, of 16 bits: a warp has 16 blocks at a time as one factor, 16 rows of q
 * as the other. What q is multiplied by the maxima with and what by the minima lies in shared
 * memory, as operands: [chunks][maxima, minima][halves][lanes]. */
template <bool is_bf16> struct multiplied_bounds {
    static constexpr uint32_t rows = 16, at_once = choose_warps * 16;

    static uint32_t shared_bytes(uint32_t dk)
    {
        return chunks_of(dk) * 4 * warp_width * sizeof(tile_operand);
    }

    static GPU_DEVICE void make(const bounds_source &x, uint32_t *bounds, void *shared)
    {
        const uint32_t n_chunks = chunks_of(x.kv.dk);
        tile_operand *const q = (tile_operand *)shared + lane_id();
        for (uint32_t row = 0; row < x.kv.group; row += rows) {
            if (row > 0)
                __syncthreads(); /* it is not read any more */
            for (uint32_t c = warp_id(); c < n_chunks; c += choose_warps)
                split_q(x, row, c, q);
            __syncthreads();
            for (uint32_t base = x.first + warp_id() * 16; base < x.end; base += at_once) {
                float sum[tile_values] = {};
#pragma unroll 1
                for (uint32_t c = 0; c < n_chunks; c += chunks_ahead)
                    add_products(sum, x, base, c, q);
                keep_best(sum, base, x.end, row == 0, bounds);
            }
        }
    }

    static GPU_DEVICE void split_q(const bounds_source &x, uint32_t row, uint32_t c,
                                   tile_operand *q)
    {
        const uint32_t dk = x.kv.dk;
        tile_operand all[2];
        tile_fetch_columns(all, lane_id(), [&](uint32_t r, uint32_t piece) -> const char * {
            const uint32_t e = c * 32 + piece * 8;
            return e < dk ? x.q_row(row + r) + e * 2 : nullptr;
        });
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            tile_operand some;
#pragma unroll
            for (int i = 0; i < (int)(sizeof some.w / 4); ++i)
                some.w[i] = keep_signed(all[k % 2].w[i], k / 2);
            q[(c * 4 + k) * warp_width] = some;
        }
    }

    /* What the chunks from c0 on give to the bounds of blocks from base on: all of their extremes
     * are on their way before the first are used. */
    static GPU_DEVICE void add_products(float (&sum)[tile_values], const bounds_source &x,
                                        uint32_t base, uint32_t c0, const tile_operand *q)
    {
        const uint32_t dk = x.kv.dk;
        tile_operand extremes[chunks_ahead][2][2];
#pragma unroll
        for (int k = 0; k < chunks_ahead; ++k)
#pragma unroll
            for (int is_min = 0; is_min < 2; ++is_min)
                tile_fetch_rows(extremes[k][is_min], lane_id(),
                                [&](uint32_t r, uint32_t piece) -> const char * {
                                    const uint32_t e = (c0 + k) * 32 + piece * 8;
                                    return e < dk ? x.block(base + r) + (is_min * dk + e) * 2
                                                  : nullptr;
                                });
#pragma unroll
        for (int k = 0; k < chunks_ahead * 4; ++k)
            tile_multiply<is_bf16>(sum, extremes[k / 4][k / 2 % 2][k % 2],
                                   q[(c0 * 4 + k) * warp_width]);
    }

    /* sum: of the blocks from base on, as a tile's rows. */
    static GPU_DEVICE void keep_best(const float (&sum)[tile_values], uint32_t base, uint32_t end,
                                     bool is_first, uint32_t *bounds)
    {
        const int lane = lane_id();
#pragma unroll
        for (int r = 0; r < tile_rows; ++r) {
            const uint32_t at = base + tile_row(lane, r);
            float best = -INFINITY;
#pragma unroll
            for (int i = 0; i < tile_values; ++i) {
                if (tile_row_of(i) != r)
                    continue;
                best = fmaxf(best, sum[i] == sum[i] ? sum[i] : INFINITY);
            }
            const uint32_t most = ordered(warp_max<tile_lanes, tile_step>(best));
            if (tile_is_first(lane) && at < end)
                bounds[at] = is_first ? most : max(most, bounds[at]);
        }
    }
};

/* ---- the blocks whose bounds are highest: one thread block takes a row's */

constexpr uint32_t take_kept = 8192; /* bounds that shared memory has room for */
constexpr int take_steps = 3; /* thresholds that are tried at once */
constexpr uint32_t take_sums = (2 * take_steps + 2) * choose_warps; /* words of it */
constexpr uint32_t take_words = take_sums + 1; /* behind the sums is_last_of_row's */
static_assert((take_words + take_kept) * 4 <= 48 << 10, "more than a block has unasked");

/* Sums over the thread block of counts below 2^24, by turns in one half of `sums` and the other, so
 * that one barrier is enough. */
template <int n> GPU_DEVICE void block_sum(float *sums, uint32_t turn, uint32_t (&count)[n])
{
    float *own = sums + turn % 2 * take_steps * choose_warps;
#pragma unroll
    for (int k = 0; k < n; ++k) {
        const float of_warp = warp_sum((float)count[k]);
        if (lane_id() == 0)
            own[k * choose_warps + warp_id()] = of_warp;
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < n; ++k) {
        float all = 0.0f;
#pragma unroll
        for (uint32_t w = 0; w < choose_warps; ++w)
            all += own[k * choose_warps + w];
        count[k] = (uint32_t)all;
    }
}

/* The counts of the threads before this one. Its own barrier; sums [choose_warps]. */
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
        for (uint32_t i = threadIdx.x; i < n; i += choose_threads)
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

/* The row's bounds that the thread block made are stored; are all others? Collective. */
GPU_DEVICE bool is_last_of_row(uint32_t *arrivals, uint32_t *is_last)
{
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        *is_last = atomicAdd(arrivals, 1) == gridDim.y - 1;
        if (*is_last)
            *arrivals = 0;
        __threadfence();
    }
    __syncthreads();
    return *is_last;
}

/* What a row visits: attention reads blocks, the caller places. */
struct taken {
    const gpu_choose &a;
    const uint32_t *table;
    uint32_t first; /* of the row's list */

    GPU_DEVICE void put(uint32_t i, uint32_t place) const
    {
        const uint32_t block = table[place];
        a.chosen[first + i] = block < a.n_blocks ? block : 0;
        if (a.places)
            a.places[first + i] = place;
    }
};

/* The first, the newest, and between them what the bounds say. shared: of take_words and bounds. */
GPU_DEVICE void take_highest(const gpu_choose &a, const choosing &x, const taken &to,
                             uint32_t *shared)
{
    float *sums = (float *)shared; /* two halves of block_sum's, two arrays of block_before's */
    const choice_size c = x.c;
    if (threadIdx.x == 0) {
        to.put(0, 0);
        to.put(c.n - 1, c.n_blocks - 1);
    }

    /* of the others the c.n - 2 highest, in their order */
    const uint32_t n = c.n_blocks - 2, want = c.n - 2;
    const uint32_t *keys = a.bounds + (uint64_t)blockIdx.x * a.n_longest + 1;
    if (n <= take_kept) {
        uint32_t *kept = shared + take_words;
        for (uint32_t i = threadIdx.x; i < n; i += choose_threads)
            kept[i] = keys[i];
        keys = kept;
    }
    __syncthreads();
    const uint32_t lowest = threshold_of(sums, keys, n, want);
    const uint32_t each = (n + choose_threads - 1) / choose_threads;
    const uint32_t begin = min(threadIdx.x * each, n), end = min(begin + each, n);
    uint32_t n_above = 0, n_equal = 0;
    for (uint32_t i = begin; i < end; ++i) {
        n_above += keys[i] > lowest;
        n_equal += keys[i] == lowest;
    }
    float *before = sums + 2 * take_steps * choose_warps;
    uint32_t above = block_before(before, n_above);
    uint32_t equal = block_before(before + choose_warps, n_equal);
    /* of those that are equal the newer ones: the first are passed over */
    uint32_t n_all[] = {n_above + n_equal};
    block_sum(sums, 0, n_all);
    const uint32_t surplus = n_all[0] - want;
    for (uint32_t i = begin; i < end; ++i) {
        const bool is_equal = keys[i] == lowest;
        if (keys[i] > lowest || (is_equal && equal >= surplus))
            to.put(1 + above + (equal > surplus ? equal - surplus : 0), 1 + i);
        above += keys[i] > lowest;
        equal += is_equal;
    }
}

/* ---- a row's choice */

template <class Bounds>
__global__ void __launch_bounds__(choose_threads) choose_blocks(GPU_PARAM(gpu_choose, a))
{
    GPU_SHARED(uint32_t, shared);
    chain_release();
    chain_wait();
    const gpu_kv &kv = a.kv;
    const choosing x(a, a.row0 + blockIdx.x);
    const taken to = {a, table_of(kv, x.it), chosen_at(kv, x.it, a.n_chosen, x.token, x.head)};
    for (uint32_t i = x.c.n + threadIdx.x; blockIdx.y == 0 && a.places && i < a.n_chosen;
         i += choose_threads)
        a.places[to.first + i] = UINT32_MAX;
    if (!x.needs_bounds()) {
        for (uint32_t i = threadIdx.x; i < x.c.n && blockIdx.y == 0; i += choose_threads)
            to.put(i, x.c.n == x.c.n_blocks || i + 1 < x.c.n ? i : x.c.n_blocks - 1);
        return;
    }
    Bounds::make(bounds_source(a, x), a.bounds + (uint64_t)blockIdx.x * a.n_longest, shared);
    if (is_last_of_row(a.arrivals + blockIdx.x, shared + take_sums))
        take_highest(a, x, to, shared);
}

constexpr uint32_t most_turns = 16; /* of a thread block, fewer where there are few of them */
constexpr uint32_t enough_blocks = 512; /* thread blocks */

template <class Bounds> int launch_choice(const gpu_choose *a, void *stream, bool chained)
{
    gpu_choose x = *a;
    const uint32_t n = a->n_chosen > 2 && a->n_longest > 2 ? a->n_longest - 2 : 1;
    const uint32_t take_bytes = (take_words + min(a->n_longest, take_kept)) * sizeof(uint32_t);
    uint32_t turns = most_turns;
    auto n_parts = [&] { return (n - 1) / (turns * Bounds::at_once) + 1; };
    while (turns > 1 && a->n_rows * n_parts() < enough_blocks)
        turns /= 2;
    x.n_each = turns * Bounds::at_once;
    return launch(choose_blocks<Bounds>, dim3(a->n_rows, n_parts()), dim3(choose_threads),
                  max(take_bytes, Bounds::shared_bytes(a->kv.dk)), stream, chained, x);
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
    const gpu_kv &kv = a->kv;
    const bool is_bf16 = kv.kv_dtype == ATTN_BF16, is_f16 = kv.kv_dtype == ATTN_F16;
    auto run = [&](auto bounds) {
        return launch_choice<decltype(bounds)>(a, stream, chained != 0);
    };
    if (is_bf16 && kv.q_dtype == kv.kv_dtype)
        return run(multiplied_bounds<true>());
    if (is_f16 && kv.q_dtype == kv.kv_dtype)
        return run(multiplied_bounds<false>());
    if (kv.dk <= 64)
        return run(summed_bounds<8, 1>());
    if (kv.dk <= 128)
        return run(summed_bounds<16, 1>());
    if (kv.dk <= 256)
        return run(summed_bounds<32, 1>());
    return run(summed_bounds<32, 3>());
}
