/* rung_matrix.cu: online softmax on tensor cores, tiles as in FlashAttention-2 (Dao, 2023): S = Q
 * K^T and O += P V by 16 x 16 tiles of bf16 products with fp32 sums; S, P and O stay in registers.
 *
 * A warp has 16 query rows, a thread block four or eight warps, which share tiles of K and V. Rows
 * lie in shared memory as 16-byte pieces, piece c of row r at c ^ (r % 8), so that matrix loads
 * meet no bank twice; the next tile is on its way while this one is computed, where copies run
 * beside.
 *
 * f32 goes the same way in two planes: x = hi + lo, both bf16, made by a kernel of its own before.
 * Of the four products lo * lo is left out: a product is off by about 2^-16 of its size. P is split
 * in registers. That is three times the arithmetic, and five digits instead of three.
 */
#include "kernels/bench/rungs/rung.cuh"

using namespace gpu;

namespace
{

template <int dim_, int planes_> struct config {
    static constexpr int dim = dim_, planes = planes_;
    static constexpr bool is_roomy = shared_limit > 64 << 10;
    static constexpr int warps = is_roomy && dim == 256 ? 8 : 4, threads = warps * warp_width;
    static constexpr int rows = warps * 16, row_bytes = dim * 2, pieces = dim / 8;
    static constexpr int tile = is_roomy ? (dim * planes <= 128   ? 64
                                            : dim * planes == 256 ? 32
                                                                  : 16)
                                         : (dim * planes <= 128 ? 64 : 16);
    static constexpr int q_bytes = rows * row_bytes, tile_bytes = tile * row_bytes;
    static constexpr int stage_bytes = 2 * planes * tile_bytes;
    static constexpr int shared_bytes = planes * q_bytes + copy_stages * stage_bytes;
    static constexpr bool is_built = is_roomy || shared_bytes <= shared_limit;
};

/* The planes of a tensor: bf16, one behind the other if there are two. */
struct planes_call {
    rung_call c;
    const uint16_t *q, *k, *v;
    uint64_t plane; /* elements */
};

template <class C> GPU_DEVICE shared_at piece_at(shared_at base, uint32_t row, uint32_t piece)
{
    return base + (row * C::row_bytes + ((piece ^ (row & 7)) << 4));
}

/* Starts to bring n rows, from token row0 on, one plane behind the other. */
template <class C>
GPU_DEVICE void bring(const planes_call &a, const uint16_t *from, uint32_t head, uint32_t row0,
                      int n, shared_at to)
{
    for (int i = threadIdx.x; i < C::planes * n * C::pieces; i += C::threads) {
        const uint32_t row = i / C::pieces % n, piece = i % C::pieces, p = i / C::pieces / n;
        const uint32_t token = min(row0 + row, a.c.n - 1);
        const uint16_t *x = from + p * a.plane + token_at(a.c, head, token) + piece * 8;
        copy16_async(piece_at<C>(to + p * n * C::row_bytes, row, piece), x, row0 + row < a.c.n);
    }
}

/* What bf16 leaves of x. */
GPU_DEVICE float rest_of(float x)
{
    return x - bf16_decode(bf16_encode2(x, 0.0f) & 0xffff);
}

/* c += a b, in planes: hi hi, hi lo, lo hi. */
template <int planes>
GPU_DEVICE void multiply(float (&c)[tile_values], const tile_operand (&a)[planes],
                         const tile_operand (&b)[planes])
{
    tile_multiply<true>(c, a[0], b[0]);
    if (planes == 2) {
        tile_multiply<true>(c, a[0], b[planes - 1]);
        tile_multiply<true>(c, a[planes - 1], b[0]);
    }
}

template <class C> __global__ void __launch_bounds__(C::threads) attend(GPU_PARAM(planes_call, a))
{
    GPU_SHARED(char, shared);
    constexpr int n_s = C::tile / 16, n_o = C::dim / 16;
    const rung_call &c = a.c;
    const int lane = lane_id(), warp_row = warp_id() * 16;
    const uint32_t head = blockIdx.y, row0 = blockIdx.x * C::rows;
    const shared_at s_q = shared_address(shared), stages = s_q + C::planes * C::q_bytes;
    const float scale = c.scale * log2e;
    auto start_tile = [&](uint32_t base, int stage) {
        const shared_at to = stages + stage * C::stage_bytes;
        bring<C>(a, a.k, head, base, C::tile, to);
        bring<C>(a, a.v, head, base, C::tile, to + C::planes * C::tile_bytes);
        copy_commit();
    };

    softmax_row row[tile_rows];
    float o[n_o][tile_values];
#pragma unroll
    for (int j = 0; j < n_o; ++j)
#pragma unroll
        for (int i = 0; i < tile_values; ++i)
            o[j][i] = 0.0f;
    bring<C>(a, a.q, head, row0, C::rows, s_q);
    int stage = 0;
    if (copy_stages == 2)
        start_tile(0, 0);
    for (uint32_t base = 0; base < c.n; base += C::tile) {
        const uint32_t next = base + C::tile;
        if (copy_stages == 1)
            start_tile(base, 0);
        else if (next < c.n)
            start_tile(next, stage ^ 1);
        if (copy_stages == 2 && next < c.n)
            copy_wait<1>();
        else
            copy_wait<0>();
        __syncthreads();

        const shared_at s_k = stages + stage * C::stage_bytes;
        const shared_at s_v = s_k + C::planes * C::tile_bytes;
        float s[n_s][tile_values];
#pragma unroll
        for (int j = 0; j < n_s; ++j)
#pragma unroll
            for (int i = 0; i < tile_values; ++i)
                s[j][i] = 0.0f;
#pragma unroll
        for (int kk = 0; kk < C::dim / 16; ++kk) {
            tile_operand q[C::planes], k[C::planes];
#pragma unroll
            for (int p = 0; p < C::planes; ++p)
                tile_load_rows(q[p], lane, [&](uint32_t r, uint32_t piece) {
                    return piece_at<C>(s_q + p * C::q_bytes, warp_row + r, kk * 2 + piece);
                });
#pragma unroll
            for (int j = 0; j < n_s; ++j) {
#pragma unroll
                for (int p = 0; p < C::planes; ++p)
                    tile_load_columns(k[p], lane, [&](uint32_t r, uint32_t piece) {
                        return piece_at<C>(s_k + p * C::tile_bytes, j * 16 + r, kk * 2 + piece);
                    });
                multiply(s[j], q, k);
            }
        }

        float top[tile_rows], factor[tile_rows];
#pragma unroll
        for (int r = 0; r < tile_rows; ++r)
            top[r] = row[r].m;
#pragma unroll
        for (int j = 0; j < n_s; ++j)
#pragma unroll
            for (int i = 0; i < tile_values; ++i) {
                s[j][i] *= scale;
                top[tile_row_of(i)] = fmaxf(top[tile_row_of(i)], s[j][i]);
            }
#pragma unroll
        for (int r = 0; r < tile_rows; ++r)
            factor[r] = row[r].raise(warp_max<tile_lanes, tile_step>(top[r]));
#pragma unroll
        for (int j = 0; j < n_o; ++j)
#pragma unroll
            for (int i = 0; i < tile_values; ++i)
                o[j][i] *= factor[tile_row_of(i)];

#pragma unroll
        for (int j = 0; j < n_s; ++j) {
            tile_operand w[C::planes], v[C::planes];
#pragma unroll
            for (int i = 0; i < tile_values; ++i)
                s[j][i] = row[tile_row_of(i)].add(s[j][i]);
            tile_pack<true>(w[0], s[j]);
            if (C::planes == 2) {
#pragma unroll
                for (int i = 0; i < tile_values; ++i)
                    s[j][i] = rest_of(s[j][i]);
                tile_pack<true>(w[C::planes - 1], s[j]);
            }
#pragma unroll
            for (int d = 0; d < n_o; ++d) {
#pragma unroll
                for (int p = 0; p < C::planes; ++p)
                    tile_load_transposed(v[p], lane, [&](uint32_t r, uint32_t piece) {
                        return piece_at<C>(s_v + p * C::tile_bytes, j * 16 + r, d * 2 + piece);
                    });
                multiply(o[d], w, v);
            }
        }
        __syncthreads(); /* the stage may be filled again */
        stage ^= copy_stages - 1;
    }

#pragma unroll
    for (int r = 0; r < tile_rows; ++r)
        row[r].sum = warp_sum<tile_lanes, tile_step>(row[r].sum);
#pragma unroll
    for (int j = 0; j < n_o; ++j)
#pragma unroll
        for (int i = 0; i < tile_values; i += 2) {
            const int r = tile_row_of(i);
            const uint32_t token = row0 + warp_row + tile_row(lane, r);
            if (token >= c.n)
                continue;
            const float f = 1.0f / row[r].sum, x = o[j][i] * f, y = o[j][i + 1] * f;
            const uint64_t at = token_at(c, head, token) + j * 16 + tile_column(lane, i);
            if (c.is_f32)
                *(float2 *)((float *)c.out + at) = make_float2(x, y);
            else
                *(uint32_t *)((uint16_t *)c.out + at) = bf16_encode2(x, y);
        }
}

/* q, k and v of f32 to two planes each. */
struct split_call {
    const float *from[3];
    uint16_t *to; /* [3][2][n] */
    uint64_t n;
};

constexpr int split_threads = 256;

__global__ void __launch_bounds__(split_threads) split(GPU_PARAM(split_call, a))
{
    const uint64_t at = ((uint64_t)blockIdx.x * split_threads + threadIdx.x) * 4;
    if (at >= a.n)
        return;
    const float4 x = load4<true>(a.from[blockIdx.y], at);
    uint16_t *to = a.to + blockIdx.y * 2 * a.n;
    store4<false>(to, at, x);
    store4<false>(to + a.n, at,
                  make_float4(rest_of(x.x), rest_of(x.y), rest_of(x.z), rest_of(x.w)));
}

uint64_t elements_of(const rung_call &c)
{
    return (uint64_t)c.batch * c.n * c.heads * c.dim;
}

template <class C> int run(const planes_call *a, uint32_t device_bytes, void *stream)
{
    if constexpr (!C::is_built) {
        return 0;
    } else {
        if (!a)
            return C::shared_bytes > device_bytes ? 0 : allow_shared(attend<C>, C::shared_bytes);
        const dim3 blocks((a->c.n + C::rows - 1) / C::rows, a->c.batch * a->c.heads);
        return launch(attend<C>, blocks, dim3(C::threads), C::shared_bytes, stream, false, *a);
    }
}

/* a NULL: prepares instead every kernel that fits device_bytes of shared memory. */
template <int planes> int run_planes(const planes_call *a, uint32_t device_bytes, void *stream)
{
    int code = 0;
    if (!a || a->c.dim == 64)
        code = run<config<64, planes>>(a, device_bytes, stream);
    if (!code && (!a || a->c.dim == 128))
        code = run<config<128, planes>>(a, device_bytes, stream);
    if (!code && (!a || a->c.dim == 256))
        code = run<config<256, planes>>(a, device_bytes, stream);
    return code;
}

template <int planes> bool fits(uint32_t dim, uint32_t device_bytes)
{
    const bool is_built = dim == 256   ? config<256, planes>::is_built
                          : dim == 128 ? config<128, planes>::is_built
                                       : config<64, planes>::is_built;
    const uint32_t bytes = dim == 256   ? config<256, planes>::shared_bytes
                           : dim == 128 ? config<128, planes>::shared_bytes
                                        : config<64, planes>::shared_bytes;
    return is_built && bytes <= device_bytes;
}

} // namespace

int rung_matrix_init(uint32_t shared_bytes)
{
    int code = run_planes<1>(nullptr, shared_bytes, nullptr);
    return code ? code : run_planes<2>(nullptr, shared_bytes, nullptr);
}

bool rung_matrix_fits(const struct rung_call *c, uint32_t shared_bytes)
{
    return c->is_f32 ? fits<2>(c->dim, shared_bytes) : fits<1>(c->dim, shared_bytes);
}

uint64_t rung_matrix_scratch(const struct rung_call *c)
{
    return c->is_f32 ? elements_of(*c) * 12 : 0;
}

int rung_matrix_launch(const struct rung_call *c, void *stream)
{
    const uint64_t n = elements_of(*c);
    if (!c->is_f32) {
        const planes_call a = {*c, (const uint16_t *)c->q, (const uint16_t *)c->k,
                               (const uint16_t *)c->v, 0};
        return run_planes<1>(&a, 0, stream);
    }
    uint16_t *to = (uint16_t *)c->scratch;
    const split_call s = {{(const float *)c->q, (const float *)c->k, (const float *)c->v}, to, n};
    const uint32_t blocks = (uint32_t)((n / 4 + split_threads - 1) / split_threads);
    int code = launch(split, dim3(blocks, 3), dim3(split_threads), 0, stream, false, s);
    const planes_call a = {*c, to, to + 2 * n, to + 4 * n, n};
    return code ? code : run_planes<2>(&a, 0, stream);
}
