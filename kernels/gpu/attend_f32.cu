/* attend_f32.cu: f32 prompts over f32 K and V on tensor cores, with fp32's accuracy: each factor is
 * the sum of two tf32, x = high + low, and a product is three of theirs, high high + high low + low
 * high; low low, 2^-22 of it, is left out.
 *
 * Tensor cores cut the sums that they carry on instead of rounding them, which adds up over many
 * keys. So the large products and the small ones have sums of their own, none is carried on for
 * longer than a tile, and tiles are added in ordinary arithmetic.
 *
 * A warp has 16 query rows, a thread block four, which share tiles of K and V. One of each is in
 * shared memory: V comes while the scores are made, the next K while the values are summed. All
 * operands are read 16 bytes per lane: which dimension or key is which in a product is free, as
 * long as both factors agree.
 *
 * high and low of an inf make NaN of what may be none. So where a result is not finite, the thread
 * block computes its rows once more, carefully: the small products leave out what is not finite,
 * and V's NaN and inf reach the rows that see them by addition.
 */
#include "kernels/gpu/attend_matrix.cuh"

using namespace gpu;

namespace
{

template <int dim_> struct f32_config {
    static constexpr int dim = dim_; /* head dim, rounded up: 64, 128, 256 */
    static constexpr int warps = 4, threads = warps * 32, rows = warps * 16;
    static constexpr int tile = dim == 256 ? 16 : 32;
    static constexpr int blocks = dim == 64 ? 3 : 2; /* of a processor */
    static constexpr int row_bytes = dim * 4, pieces = dim / 4;
    static constexpr int q_bytes = rows * row_bytes, tile_bytes = tile * row_bytes;
    static constexpr int shared_bytes = q_bytes + 2 * tile_bytes;
    static_assert(shared_bytes <= shared_limit, "more shared memory than a block may have");
};

/* Where 16 bytes of a row lie. Q and K: lanes 4g + t read piece 4k + t of row g; V: piece 8d + g of
 * row 2t or 2t + 1. Eight neighbouring lanes meet no bank twice. */
template <class C> GPU_DEVICE uint32_t qk_at(uint32_t row, uint32_t piece)
{
    return row * C::row_bytes + ((piece ^ (row & 1) << 2) << 4);
}

template <class C> GPU_DEVICE uint32_t v_at(uint32_t row, uint32_t piece)
{
    return row * C::row_bytes + ((piece ^ (row >> 1 & 3) << 1) << 4);
}

GPU_DEVICE bool is_finite(float x)
{
    return (__float_as_uint(x) & 0x7f800000) != 0x7f800000;
}

/* x in two parts. fin: high, if it is finite, else 0; only careful makes a difference. */
struct two_parts {
    uint32_t high, low, fin;
};

template <bool is_careful> GPU_DEVICE two_parts parts_of(float x)
{
    const uint32_t bits = __float_as_uint(x);
    two_parts p;
    p.high = (bits + 0x1000) & 0xffffe000; /* tf32: 10 bits of mantissa */
    if (is_careful && (p.high & 0x7f800000) == 0x7f800000) {
        const bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
        p.high = is_nan ? 0x7fc00000 : bits & 0xffffe000; /* what would be rounded to inf is not */
    }
    p.fin = is_careful && !is_finite(x) ? 0 : p.high;
    p.low = is_careful && !is_finite(x)
                ? 0
                : __float_as_uint(x - __uint_as_float(p.high)); /* exact but for its last bits */
    return p;
}

/* Rows of an operand of A, elements 2u and 2u + 1 of each: row g, row g + 8. */
struct a_parts {
    uint32_t high[4], low[4], fin[4];
};

template <bool is_careful> GPU_DEVICE a_parts a_of(float x0, float y0, float x1, float y1)
{
    const float x[4] = {x0, y0, x1, y1};
    a_parts a;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const two_parts p = parts_of<is_careful>(x[i]);
        a.high[i] = p.high, a.low[i] = p.low, a.fin[i] = p.fin;
    }
    return a;
}

GPU_DEVICE float element_of(const float4 &x, int i)
{
    return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w;
}

/* n products of 16 rows by 8 columns: large += high high, small += the others. */
template <int n>
GPU_DEVICE void multiply(float (&large)[n][4], float (&small)[n][4], const a_parts &a,
                         const two_parts (&b0)[n], const two_parts (&b1)[n])
{
#pragma unroll
    for (int j = 0; j < n; ++j)
        mma_1688_tf32(large[j], a.high, b0[j].high, b1[j].high);
#pragma unroll
    for (int j = 0; j < n; ++j)
        mma_1688_tf32(small[j], a.low, b0[j].fin, b1[j].fin);
#pragma unroll
    for (int j = 0; j < n; ++j)
        mma_1688_tf32(small[j], a.fin, b0[j].low, b1[j].low);
}

/* What a thread block computes, and from what. */
template <class C> struct f32_block {
    const gpu_attend &a;
    const gpu_item &it;
    const gpu_layer &stored;
    char *shared;
    uint32_t split, head, row0, n;
    token_order order;

    GPU_DEVICE char *k_tile() const
    {
        return shared + C::q_bytes;
    }
    GPU_DEVICE char *v_tile() const
    {
        return k_tile() + C::tile_bytes;
    }

    GPU_DEVICE void start_q() const
    {
        const gpu_kv &kv = a.kv;
        for (int i = threadIdx.x; i < C::rows * C::pieces; i += C::threads) {
            const uint32_t r = i / C::pieces, piece = i % C::pieces, row = row0 + r;
            const bool is_live = r < n && piece * 4 < kv.dk;
            const uint64_t token = token_at(order, is_live ? row / kv.group : 0);
            const uint64_t at = token * kv.num_q_heads + head * kv.group + row % kv.group;
            const char *from = (const char *)it.q + (at * kv.dk + piece * 4) * 4;
            copy16_async(shared_address(shared) + qk_at<C>(r, piece),
                         is_live ? from : (const char *)it.q, is_live);
        }
    }

    /* Starts bringing a tile of a branch's K or V; keys from end on and pieces behind the head dim
     * become zero. */
    template <bool is_v> GPU_DEVICE void start_tile(const branch &b, uint32_t base, uint32_t end)
    {
        const gpu_kv &kv = a.kv;
        const uint32_t *table = kv.table + it.table_at;
        const part p = part_of(kv, it.layer, is_v);
        const shared_at to = shared_address(is_v ? v_tile() : k_tile());
#pragma unroll 4
        for (int i = threadIdx.x; i < C::tile * C::pieces; i += C::threads) {
            const uint32_t r = i / C::pieces, piece = i % C::pieces, key = base + r;
            const uint32_t token = branch_token(b, key);
            const bool is_live = key < end, has = is_live && piece * 4 < (is_v ? kv.dv : kv.dk);
            const uint32_t block = is_live ? table[token >> kv.block_shift] : 0;
            const uint32_t slot = is_live ? token & (kv.block_tokens - 1) : 0;
            const char *from = row_address(kv, p, block, head, slot) + (has ? piece * 16 : 0);
            copy16_async(to + (is_v ? v_at<C>(r, piece) : qk_at<C>(r, piece)), from, has);
        }
        copy_commit();
    }

    /* V's NaN and inf are added to the sums of the rows that see them and become zero. o: as
     * attend_rows has them. */
    GPU_DEVICE void hide_bad(float (&o)[C::dim / 32][4][4], const matrix_row (&row)[2],
                             uint32_t base, uint32_t end)
    {
        char *v = v_tile();
        bool found = false;
        for (int i = threadIdx.x; i < C::tile * C::dim; i += C::threads)
            found |= !is_finite(((const float *)v)[i]);
        if (!block_any(found))
            return;
        const uint32_t t = lane_id() % 4;
#pragma unroll 1
        for (uint32_t r = 0; r < C::tile; ++r)
#pragma unroll
            for (int d = 0; d < C::dim / 32; ++d)
#pragma unroll
                for (int x = 0; x < 16; ++x) {
                    const int i = x / 4, h = x % 4 / 2;
                    const uint32_t piece = 8 * d + 2 * t + x % 2;
                    const float bad = *(const float *)(v + v_at<C>(r, piece) + i * 4);
                    if (!is_finite(bad) && base + r < end && is_visible(row[h].see, base + r))
                        o[d][i][x % 4] += bad;
                }
        __syncthreads();
        for (int i = threadIdx.x; i < C::tile * C::dim; i += C::threads)
            if (!is_finite(((const float *)v)[i]))
                ((float *)v)[i] = 0.0f;
        __syncthreads();
    }

    /* s[j]: keys 8j + 2t and 8j + 2t + 1 of row g, then of row g + 8. */
    template <bool is_careful> GPU_DEVICE void make_scores(float (&s)[C::tile / 8][4]) const
    {
        constexpr int n_s = C::tile / 8;
        const uint32_t g = lane_id() / 4, t = lane_id() % 4, warp_row = warp_id() * 16;
        float small[n_s][4];
#pragma unroll
        for (int j = 0; j < n_s; ++j)
#pragma unroll
            for (int c = 0; c < 4; ++c)
                s[j][c] = small[j][c] = 0.0f;
#pragma unroll
        for (int kk = 0; kk < C::dim / 16; ++kk) {
            if (kk * 16 >= a.kv.dk)
                break;
            float4 q[2], k[n_s];
#pragma unroll
            for (int h = 0; h < 2; ++h)
                q[h] = *(const float4 *)(shared + qk_at<C>(warp_row + g + 8 * h, 4 * kk + t));
#pragma unroll
            for (int j = 0; j < n_s; ++j)
                k[j] = *(const float4 *)(k_tile() + qk_at<C>(8 * j + g, 4 * kk + t));
#pragma unroll
            for (int u = 0; u < 4; u += 2) {
                const a_parts x =
                    a_of<is_careful>(element_of(q[0], u), element_of(q[1], u),
                                     element_of(q[0], u + 1), element_of(q[1], u + 1));
                two_parts b0[n_s], b1[n_s];
#pragma unroll
                for (int j = 0; j < n_s; ++j) {
                    b0[j] = parts_of<is_careful>(element_of(k[j], u));
                    b1[j] = parts_of<is_careful>(element_of(k[j], u + 1));
                }
                multiply(s, small, x, b0, b1);
            }
        }
#pragma unroll
        for (int j = 0; j < n_s; ++j)
#pragma unroll
            for (int c = 0; c < 4; ++c)
                s[j][c] += small[j][c];
    }

    /* o = o * factor + weights * V. o[d][i]: elements 32d + 8t + i and 32d + 8t + 4 + i of row g,
     * then of row g + 8. */
    GPU_DEVICE void add_values(float (&o)[C::dim / 32][4][4], const float (&s)[C::tile / 8][4],
                               const float (&factor)[2])
    {
        constexpr int n_s = C::tile / 8;
        const uint32_t g = lane_id() / 4, t = lane_id() % 4;
        a_parts w[n_s];
#pragma unroll
        for (int j = 0; j < n_s; ++j)
            w[j] = a_of<false>(s[j][0], s[j][2], s[j][1], s[j][3]);
#pragma unroll
        for (int d = 0; d < C::dim / 32; ++d) {
            if (d * 32 >= a.kv.dv)
                break;
            float large[4][4] = {}, small[4][4] = {};
#pragma unroll
            for (int j = 0; j < n_s; ++j) {
                const float4 x = *(const float4 *)(v_tile() + v_at<C>(8 * j + 2 * t, 8 * d + g));
                const float4 y =
                    *(const float4 *)(v_tile() + v_at<C>(8 * j + 2 * t + 1, 8 * d + g));
                two_parts b0[4], b1[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    b0[i] = parts_of<false>(element_of(x, i));
                    b1[i] = parts_of<false>(element_of(y, i));
                }
                multiply(large, small, w[j], b0, b1);
            }
#pragma unroll
            for (int i = 0; i < 4; ++i)
#pragma unroll
                for (int c = 0; c < 4; ++c)
                    o[d][i][c] = fmaf(o[d][i][c], factor[c / 2], large[i][c] + small[i][c]);
        }
    }

    /* false: a result is not finite, and nothing is stored; never if careful. */
    template <bool is_careful> GPU_DEVICE bool attend_rows();
};

template <class C> template <bool is_careful> GPU_DEVICE bool f32_block<C>::attend_rows()
{
    constexpr int n_s = C::tile / 8, n_o = C::dim / 32;
    const gpu_kv &kv = a.kv;
    const gpu_layer layer = layer_of(kv, it);
    const uint32_t kv_len = it.pos + it.n_tokens, g = lane_id() / 4, t = lane_id() % 4;
    const uint32_t warp_row = warp_id() * 16;
    matrix_row row[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const uint32_t r = warp_row + g + 8 * h, at = row0 + (r < n ? r : n - 1);
        row[h].position = it.pos + token_at(order, at / kv.group);
        row[h].slope =
            layer.alibi_slopes ? layer.alibi_slopes[head * kv.group + at % kv.group] : 0.0f;
    }
    const query_range queries = queries_of(order, it, row0 / kv.group, (row0 + n - 1) / kv.group);
    const bool is_plain = layer.soft_cap == 0.0f && !layer.alibi_slopes;
    const float scale_log2 = layer.scale * log2e;
    float o[n_o][4][4];
#pragma unroll
    for (int d = 0; d < n_o; ++d)
#pragma unroll
        for (int x = 0; x < 16; ++x)
            o[d][x / 4][x % 4] = 0.0f;
    start_q();
    for (uint32_t nth = 0; nth < n_branches_of(stored); ++nth) {
        const branch from = branch_at(kv, stored, nth, head);
        const branch_part keys = part_of_branch(kv, layer, from, it, queries, split);
        /* jumps over tiles that no row sees */
        auto next_tile = [&](uint32_t base) {
            if (base >= keys.highest.sinks && base + C::tile <= keys.lowest.first)
                base += (keys.lowest.first - base) / C::tile * C::tile;
            return base;
        };
#pragma unroll
        for (int h = 0; h < 2; ++h)
            row[h].see = visible_to(kv, layer, from, row[h].position, kv_len);
        uint32_t base = next_tile(keys.begin);
        if (base < keys.end)
            start_tile<false>(from, base, keys.end);
#pragma unroll 1
        while (base < keys.end) {
            const uint32_t next = next_tile(base + C::tile);
            copy_wait<0>();
            __syncthreads(); /* K is there, and nobody reads the last V any more */
            start_tile<true>(from, base, keys.end);
            float s[n_s][4];
            make_scores<is_careful>(s);

            const bool is_open = keys.all_take_part && base >= keys.highest.first &&
                                 base + C::tile <= min(keys.lowest.end, keys.end);
            float top[2] = {row[0].m, row[1].m}, factor[2];
#pragma unroll
            for (int j = 0; j < n_s; ++j)
#pragma unroll
                for (int c = 0; c < 4; ++c) {
                    const matrix_row &w = row[c / 2];
                    const uint32_t key = base + 8 * j + 2 * t + c % 2;
                    const float x = is_plain ? s[j][c] * scale_log2
                                             : score_of(layer, s[j][c], w.slope, w.position,
                                                        branch_token(from, key));
                    s[j][c] = is_open || (key < keys.end && is_visible(w.see, key)) ? x : -INFINITY;
                    top[c / 2] = fmaxf(top[c / 2], s[j][c]);
                }
#pragma unroll
            for (int h = 0; h < 2; ++h)
                factor[h] = row[h].raise(warp_max<4>(top[h]));
#pragma unroll
            for (int j = 0; j < n_s; ++j)
#pragma unroll
                for (int c = 0; c < 4; ++c)
                    s[j][c] = row[c / 2].add(s[j][c]);

            copy_wait<0>();
            __syncthreads(); /* V is there, and nobody reads K any more */
            if (next < keys.end)
                start_tile<false>(from, next, keys.end);
            if (is_careful) {
#pragma unroll
                for (int d = 0; d < n_o; ++d)
#pragma unroll
                    for (int x = 0; x < 16; ++x)
                        o[d][x / 4][x % 4] *= factor[x % 4 / 2];
                factor[0] = factor[1] = 1.0f;
                hide_bad(o, row, base, keys.end);
            }
            add_values(o, s, factor);
            base = next;
        }
        __syncthreads(); /* the next branch begins with K and, where this one has no keys, q */
    }
    copy_wait<0>();
    bool is_good = true;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        row[h].sum = warp_sum<4>(row[h].sum);
        is_good = is_good && is_finite(row[h].sum);
    }
#pragma unroll
    for (int d = 0; d < n_o; ++d)
#pragma unroll
        for (int x = 0; x < 16; ++x)
            is_good = is_good && is_finite(o[d][x / 4][x % 4]);
    if (!is_careful && block_any(!is_good))
        return false;
    const row_sink sink = {a, it, layer, order, head, row0, split};
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int d = 0; d < n_o; ++d) {
            const uint32_t r = warp_row + g + 8 * h, e = 32 * d + 8 * t;
            float x[8];
#pragma unroll
            for (int i = 0; i < 8; ++i)
                x[i] = o[d][i % 4][2 * h + i / 4];
            if (r < n && e < kv.dv)
                sink.template store<ATTN_F32>(r, e, x, row[h].m, row[h].sum);
        }
    return true;
}

template <class C>
__global__ void __launch_bounds__(C::threads, C::blocks) attend_f32(GPU_PARAM(gpu_attend, a))
{
    GPU_SHARED(char, shared);
    chain_release();
    chain_wait();
    const gpu_kv &kv = a.kv;
    const gpu_item &it = a.items[find_item<&gpu_item::unit0>(a.items, a.n_items, blockIdx.x)];
    const uint32_t unit = blockIdx.x - it.unit0, n_rows = it.n_tokens * kv.group;
    const uint32_t n_chunks = (n_rows + C::rows - 1) / C::rows;
    /* later rows see more keys: they start first */
    const uint32_t chunk = n_chunks - 1 - unit / it.n_splits % n_chunks;
    const uint32_t row0 = chunk * C::rows, left = n_rows - row0;
    const gpu_layer &stored = kv.layers[it.layer];
    f32_block<C> block = {a,
                          it,
                          stored,
                          shared,
                          unit % it.n_splits,
                          unit / it.n_splits / n_chunks,
                          row0,
                          left < C::rows ? left : C::rows,
                          order_of(stored, it)};
    if (!block.template attend_rows<false>()) {
        __syncthreads();
        block.template attend_rows<true>();
    }
}

template <int dim> int allow()
{
    return allow_shared(attend_f32<f32_config<dim>>, f32_config<dim>::shared_bytes);
}

template <int dim> int run(const gpu_attend *a, void *stream, bool chained)
{
    typedef f32_config<dim> C;
    static_assert(C::rows == 64, "what the planner counts with");
    return launch(attend_f32<C>, dim3(a->n_units), dim3(C::threads), C::shared_bytes, stream,
                  chained, *a);
}

} // namespace

int gpu::f32_init()
{
    int code = allow<64>();
    code = code ? code : allow<128>();
    return code ? code : allow<256>();
}

bool gpu::f32_fits(const gpu_kv &kv)
{
    return kv.q_dtype == ATTN_F32 && !kv.is_quantised;
}

int gpu::f32_launch(const gpu_attend *a, void *stream, bool chained)
{
    const uint32_t d = a->kv.dk > a->kv.dv ? a->kv.dk : a->kv.dv;
    if (d <= 64)
        return run<64>(a, stream, chained);
    return d <= 128 ? run<128>(a, stream, chained) : run<256>(a, stream, chained);
}
