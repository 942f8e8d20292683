/* tile.h: attention of up to MAX_ROWS query rows over tiles of cached tokens; included by isa_*.c,
 * each with its own flags, ISA_NAME and ISA_SYMBOL. All state is the caller's.
 *
 * Per tile: scores of all rows (K is read from memory by the first four rows, then from cache),
 * mask, online softmax, weighted sum of V. While a piece of a tile is computed the same piece of
 * the next tile is fetched, K beside the scores and V beside the sum, since pieces of a shuffled
 * block table lie where no hardware prefetcher looks.
 *
 * For items with many rows K is laid anew once a tile: floats by dimensions (keys_f32.h), bf16 by
 * pairs where the CPU multiplies pairs (pairs_bf16.h).
 *
 * Pools of FP4 have a tile's rows decoded to floats first, scales included, and computed like those
 * of f32: arithmetic on codes would be no cheaper.
 *
 * What a row does not see is never multiplied: K there may be NaN, its score is overwritten; V
 * there is not read by that row. Pieces that no row sees are not read at all: a block that a window
 * has let go is another sequence's by now, and may be written to by another thread.
 */
#include "kernels/cpu/isa.h"
#include "kernels/cpu/keys_f32.h"
#include "kernels/cpu/piece.h"
#include "kernels/cpu/vec.h"

#include <math.h>

#define LOG2E 1.4426950408889634f
#define LN2 0.6931471805599453f
#define ROWS_AT_ONCE 4
#if VEC == 16
#define TOKENS_AT_ONCE 4 /* 16 sums of the scores and 4 K vectors fit in 32 registers */
#define V_VECS_AT_ONCE 4
#else
#define TOKENS_AT_ONCE 2
#define V_VECS_AT_ONCE 2
#endif
#if defined(__AVX512BF16__)
#define HAS_BF16_DOT 1
#include "kernels/cpu/pairs_bf16.h"
#else
#define HAS_BF16_DOT 0
#endif

/* A kv head at work: its rows' q, sums and maxima. */
struct tile_state {
    const struct attend_rows *r;
    const struct attend_geometry *g;
    struct attend_scratch *x;
    uint32_t kv_head;
    float *q, *o, *max, *sum;
    uint32_t o_stride, q_stride; /* in floats, or bf16 elements if the dot product is bf16 */
    uint32_t piece_tokens, v_stride; /* v_stride: bytes from a token's V to the next one's */
    bool is_fp4; /* tiles are decoded to f32 */
    bool is_scaled; /* K and V are multiplied by scales where they meet scores and weights */
    bool is_bf16_dot;
    bool is_plain; /* scores are scaled, and that is all */
    bool is_paired; /* its products are those of pairs_bf16.h, and q is laid for them */
    bool is_laid; /* its scores are those of keys_f32.h */
};

/* One tile of one kv head: keys of one branch. */
struct step {
    struct branch branch;
    uint32_t kv_head, key, n_keys; /* n_keys 0: past the end */
    uint32_t hidden, shown; /* keys [hidden, shown) are seen by no row */
};

INLINE bool is_hidden(const struct step *step, uint32_t key, uint32_t n)
{
    return step->hidden <= key && key + n <= step->shown;
}

/* The token of a key; of the tokens behind it in its block the keys follow it. */
INLINE uint32_t token_of(const struct tile_state *t, uint32_t key)
{
    const struct attend_geometry *g = t->g;
    if (t->r->blocks == NULL)
        return key;
    return (t->r->blocks[key >> g->block_shift] << g->block_shift) | (key & (g->block_tokens - 1));
}

/* s[row][token] = the lanes of sums[row][token], added. */
INLINE void reduce_scores(const vf sums[ROWS_AT_ONCE][TOKENS_AT_ONCE], int n_rows, float *s)
{
#if VEC == 16
    /* two rounds add within 128-bit parts, leaving token j in lane j of each; then the parts */
    for (int i = 0; i < n_rows; i++) {
        __m512 a = (__m512)sums[i][0], b = (__m512)sums[i][1];
        __m512 c = (__m512)sums[i][2], d = (__m512)sums[i][3];
        __m512d ab = (__m512d)(_mm512_unpacklo_ps(a, b) + _mm512_unpackhi_ps(a, b));
        __m512d cd = (__m512d)(_mm512_unpacklo_ps(c, d) + _mm512_unpackhi_ps(c, d));
        __m512 x = (__m512)_mm512_unpacklo_pd(ab, cd) + (__m512)_mm512_unpackhi_pd(ab, cd);
        __m256 h = _mm512_castps512_ps256(x) + _mm512_extractf32x8_ps(x, 1);
        _mm_storeu_ps(s + i * TILE_TOKENS, _mm256_castps256_ps128(h) + _mm256_extractf128_ps(h, 1));
    }
#else
    for (int i = 0; i < n_rows; i++)
        for (int j = 0; j < TOKENS_AT_ONCE; j++)
            s[i * TILE_TOKENS + j] = vf_hsum(sums[i][j]);
#endif
}

/* Scores of n_rows rows with TOKENS_AT_ONCE tokens from k; fetches as many at ahead (NULL:
 * none). */
INLINE void scores_f32(attn_dtype dtype, int n_rows, const float *q, uint32_t q_stride,
                       const uint8_t *k, const uint8_t *ahead, uint32_t dk, size_t k_stride,
                       float *s)
{
    size_t bytes = dtype_bytes(dtype);
    vf sums[ROWS_AT_ONCE][TOKENS_AT_ONCE] = {0};
    uint32_t d = 0;
    for (; d + VEC <= dk; d += VEC) {
        vf kv[TOKENS_AT_ONCE];
        for (int j = 0; j < TOKENS_AT_ONCE; j++)
            kv[j] = vf_load_as(dtype, k + j * k_stride + d * bytes, VEC);
        for (int j = 0; j < TOKENS_AT_ONCE && ahead != NULL && d * bytes % 64 == 0; j++)
            prefetch(ahead + j * k_stride + d * bytes);
        for (int i = 0; i < n_rows; i++)
            for (int j = 0; j < TOKENS_AT_ONCE; j++)
                sums[i][j] = vf_fma(vf_load(q + i * q_stride + d), kv[j], sums[i][j]);
    }
#if VEC == 16
    if (d < dk)
        for (int j = 0; j < TOKENS_AT_ONCE; j++) {
            vf kv = vf_load_as(dtype, k + j * k_stride + d * bytes, 8);
            for (int i = 0; i < n_rows; i++)
                sums[i][j] = vf_fma(vf_load(q + i * q_stride + d), kv, sums[i][j]);
        }
#endif
    reduce_scores((const vf(*)[TOKENS_AT_ONCE])sums, n_rows, s);
}

#if HAS_BF16_DOT
INLINE void scores_bf16(int n_rows, const uint16_t *q, uint32_t q_stride, const uint8_t *k,
                        const uint8_t *ahead, uint32_t dk, size_t k_stride, float *s)
{
    vf sums[ROWS_AT_ONCE][TOKENS_AT_ONCE] = {0};
    for (uint32_t d = 0; d < dk; d += 32) {
        __mmask32 mask = dk - d >= 32 ? 0xffffffff : (1u << (dk - d)) - 1;
        __m512bh kv[TOKENS_AT_ONCE];
        for (int j = 0; j < TOKENS_AT_ONCE; j++)
            kv[j] = (__m512bh)_mm512_maskz_loadu_epi16(mask, k + j * k_stride + d * 2);
        for (int j = 0; j < TOKENS_AT_ONCE && ahead != NULL; j++)
            prefetch(ahead + j * k_stride + d * 2);
        for (int i = 0; i < n_rows; i++) {
            __m512bh qv = (__m512bh)_mm512_loadu_si512(q + i * q_stride + d);
            for (int j = 0; j < TOKENS_AT_ONCE; j++)
                sums[i][j] = (vf)_mm512_dpbf16_ps((__m512)sums[i][j], qv, kv[j]);
        }
    }
    reduce_scores((const vf(*)[TOKENS_AT_ONCE])sums, n_rows, s);
}
#endif

/* Scores of all rows with one piece, from column col of s; fetches the same piece ahead. */
INLINE void piece_scores(const struct tile_state *t, attn_dtype dtype, const uint8_t *k,
                         const uint8_t *ahead, uint32_t n_tokens, uint32_t col)
{
    uint32_t dk = t->g->dk, n_rows = t->r->n_rows;
    size_t k_stride = dk * dtype_bytes(dtype);
    for (uint32_t row = 0; row < n_rows; row += ROWS_AT_ONCE) {
        float *s = t->x->s + row * TILE_TOKENS + col;
        for (uint32_t j = 0; j < n_tokens; j += TOKENS_AT_ONCE) {
            const uint8_t *kj = k + j * k_stride;
            const uint8_t *aj = row == 0 && ahead != NULL ? ahead + j * k_stride : NULL;
#if HAS_BF16_DOT
            const uint16_t *qb = (const uint16_t *)t->q + (size_t)row * t->q_stride;
#define SCORES(n)                                                                                  \
    (dtype == ATTN_BF16 && t->is_bf16_dot                                                          \
         ? scores_bf16(n, qb, t->q_stride, kj, aj, dk, k_stride, s + j)                            \
         : scores_f32(dtype, n, q, t->q_stride, kj, aj, dk, k_stride, s + j))
#else
#define SCORES(n) scores_f32(dtype, n, q, t->q_stride, kj, aj, dk, k_stride, s + j)
#endif
            const float *q = t->q + (size_t)row * t->q_stride;
            switch (n_rows - row) {
            case 1:
                SCORES(1);
                break;
            case 2:
                SCORES(2);
                break;
            case 3:
                SCORES(3);
                break;
            default:
                SCORES(4);
            }
#undef SCORES
        }
    }
}

/* Scores of all rows with a tile of n_keys keys of floats, in pieces of size tokens; fetches
 * k_ahead. */
INLINE void laid_scores(const struct tile_state *t, const struct piece *pieces,
                        const uint8_t *const *k_ahead, uint32_t n_keys, uint32_t size)
{
    const size_t k_stride = t->g->dk * sizeof(float);
    for (uint32_t col = 0; col < TILE_TOKENS; col += 4) {
        const uint8_t *rows[4];
        for (uint32_t j = 0; j < 4; j++) {
            const uint32_t key = col + j, i = key / size, at = key % size;
            rows[j] = key < n_keys && pieces[i].k != NULL ? pieces[i].k + at * k_stride : NULL;
            for (size_t n = 0; key < n_keys && k_ahead[i] != NULL && n < k_stride; n += 64)
                prefetch(k_ahead[i] + at * k_stride + n);
        }
        lay_keys(t->x->k_laid, rows, t->g->dk, col);
    }
    scores_of_all(t->q, t->r->n_rows, t->q_stride, t->x->k_laid, t->g->dk, t->x->s);
}

#if HAS_BF16_DOT
/* Scores of all rows with a tile that lies in n_pieces of size tokens; fetches k_ahead. */
INLINE void pair_scores(const struct tile_state *t, const struct piece *pieces,
                        const uint8_t *const *k_ahead, uint32_t n_pieces, uint32_t size)
{
    size_t k_stride = (size_t)t->g->dk * 2;
    for (uint32_t col = 0; col < TILE_TOKENS; col += 16) {
        const uint8_t *rows[16];
        for (uint32_t j = 0; j < 16; j++) {
            uint32_t i = (col + j) / size, at = (col + j) % size;
            rows[j] = i < n_pieces && pieces[i].k != NULL ? pieces[i].k + at * k_stride : NULL;
            for (size_t n = 0; i < n_pieces && k_ahead[i] != NULL && n < k_stride; n += 64)
                prefetch(k_ahead[i] + at * k_stride + n);
        }
        pair_keys(t->x, rows, t->g->dk, col);
    }
    uint32_t n_pairs = t->g->dk / 2;
    for (uint32_t row = 0; row < t->r->n_rows; row += ROWS_OF_PAIRS)
        scores_of_pairs((const uint32_t *)(const void *)t->q + (size_t)row * n_pairs, t->x->k_pairs,
                        n_pairs, t->x->s + row * TILE_TOKENS);
}
#endif

/* o[row][d ..] += p[row][token] * v[token][d ..] for n_vecs vectors of the head; fetches as many
 * rows of V ahead (NULL: none). */
INLINE void sum_vecs(attn_dtype dtype, int n_rows, int n_vecs, int lanes, const float *p,
                     const uint8_t *v, const uint8_t *ahead, size_t v_stride, uint32_t n_tokens,
                     float *o, uint32_t o_stride)
{
    size_t bytes = dtype_bytes(dtype);
    vf acc[ROWS_AT_ONCE][V_VECS_AT_ONCE];
    for (int i = 0; i < n_rows; i++)
        for (int c = 0; c < n_vecs; c++)
            acc[i][c] = vf_load(o + i * o_stride + c * VEC);
    for (uint32_t j = 0; j < n_tokens; j++) {
        vf vv[V_VECS_AT_ONCE];
        for (int c = 0; c < n_vecs; c++)
            vv[c] = vf_load_as(dtype, v + j * v_stride + c * VEC * bytes, lanes);
        for (int c = 0; c < n_vecs && ahead != NULL; c++)
            if (c * VEC * bytes % 64 == 0)
                prefetch(ahead + j * v_stride + c * VEC * bytes);
        for (int i = 0; i < n_rows; i++) {
            vf w = vf_set(p[i * TILE_TOKENS + j]);
            for (int c = 0; c < n_vecs; c++)
                acc[i][c] = vf_fma(w, vv[c], acc[i][c]);
        }
    }
    for (int i = 0; i < n_rows; i++)
        for (int c = 0; c < n_vecs; c++)
            vf_store(o + i * o_stride + c * VEC, acc[i][c]);
}

INLINE void sum_rows(attn_dtype dtype, int n_rows, const float *p, const uint8_t *v,
                     const uint8_t *ahead, uint32_t dv, size_t v_stride, uint32_t n_tokens,
                     float *o, uint32_t o_stride)
{
    size_t bytes = dtype_bytes(dtype);
    uint32_t d = 0;
    for (; d + V_VECS_AT_ONCE * VEC <= dv; d += V_VECS_AT_ONCE * VEC)
        sum_vecs(dtype, n_rows, V_VECS_AT_ONCE, VEC, p, v + d * bytes,
                 ahead ? ahead + d * bytes : NULL, v_stride, n_tokens, o + d, o_stride);
    for (; d + VEC <= dv; d += VEC)
        sum_vecs(dtype, n_rows, 1, VEC, p, v + d * bytes, ahead ? ahead + d * bytes : NULL,
                 v_stride, n_tokens, o + d, o_stride);
    if (d < dv)
        sum_vecs(dtype, n_rows, 1, VEC_TAIL, p, v + d * bytes, ahead ? ahead + d * bytes : NULL,
                 v_stride, n_tokens, o + d, o_stride);
}

/* Adds tokens [a, b) of the tile (columns of s), which lie in one piece at v, to rows [row0,
 * row1). */
INLINE void piece_sum(const struct tile_state *t, attn_dtype dtype, const uint8_t *v,
                      const uint8_t *ahead, uint32_t a, uint32_t b, uint32_t row0, uint32_t row1)
{
    const uint32_t dv = t->g->dv;
    const size_t v_stride = t->v_stride;
    for (uint32_t row = row0; row < row1; row += ROWS_AT_ONCE) {
        const float *p = t->x->s + row * TILE_TOKENS + a;
        const uint8_t *next = row == 0 ? ahead : NULL;
        float *o = t->o + (size_t)row * t->o_stride;
        switch (row1 - row) {
        case 1:
            sum_rows(dtype, 1, p, v, next, dv, v_stride, b - a, o, t->o_stride);
            break;
        case 2:
            sum_rows(dtype, 2, p, v, next, dv, v_stride, b - a, o, t->o_stride);
            break;
        case 3:
            sum_rows(dtype, 3, p, v, next, dv, v_stride, b - a, o, t->o_stride);
            break;
        default:
            sum_rows(dtype, 4, p, v, next, dv, v_stride, b - a, o, t->o_stride);
        }
    }
}

/* Columns [from, to) that one query sees, cut to a tile: two ranges, either may be empty; and those
 * of a tree's nodes, one bit each. */
struct columns {
    uint32_t from[2], to[2];
    uint32_t nodes;
};

/* The position of the row's query. */
INLINE uint32_t position_of_row(const struct tile_state *t, uint32_t row)
{
    const struct shared_query q = rows_query(t->r, row);
    return q.item->pos + q.item->ahead +
           (q.item->nodes != NULL ? q.item->nodes[q.token].depth : q.token);
}

/* Of the nodes, those in the tile of keys from `key` on. */
static uint32_t node_columns(uint64_t seen, uint32_t pos, uint32_t key)
{
    if (key >= pos)
        return key - pos < 64 ? (uint32_t)(seen >> (key - pos)) : 0;
    return pos - key < TILE_TOKENS ? (uint32_t)(seen << (pos - key)) : 0;
}

static struct columns columns_of(const struct tile_state *t, const struct step *step, uint32_t row)
{
    /* all of the list, all of the blocks, whole tiles */
    if (t->r->list != NULL || t->r->blocks != NULL || t->r->queries != NULL)
        return (struct columns){.to = {0, step->n_keys}};
    const struct backend_item *item = t->r->item;
    const struct attn_layer_spec *spec = t->r->spec;
    const struct tree_node *node = item->nodes ? &item->nodes[row / t->g->group] : NULL;
    const uint32_t sinks = layer_sinks(spec, item->key_base);
    struct visible v =
        node ? tree_visible(node, spec->window_tokens, sinks, item->pos)
             : layer_visible(spec, t->g->stripes, item, step->branch, row / t->g->group);
    uint32_t ends[2][2] = {{0, v.sinks}, {v.first, v.end}}, key = step->key;
    struct columns c = {.nodes = 0};
    if (node)
        c.nodes =
            node_columns(tree_seen(node, spec->window_tokens, sinks, item->pos), item->pos, key);
    for (int i = 0; i < 2; i++) {
        uint32_t from = ends[i][0] > key ? ends[i][0] - key : 0;
        uint32_t to = ends[i][1] > key ? ends[i][1] - key : 0;
        c.to[i] = to < TILE_TOKENS ? to : TILE_TOKENS;
        c.from[i] = from < c.to[i] ? from : c.to[i];
    }
    return c;
}

INLINE bool is_whole(struct columns c)
{
    return c.to[0] == TILE_TOKENS || c.to[1] - c.from[1] == TILE_TOKENS;
}

/* How far the step's keys j and on are from position p: the difference is exact, positions beyond
 * 2^24 are not as floats. */
INLINE vf distances(const struct tile_state *t, const struct step *step, uint32_t j, uint32_t p)
{
    const struct stripes s = t->g->stripes;
    const struct branch b = step->branch;
    const bool is_even = s.every == 0 || b.segment_tokens == 0;
    const uint32_t first = branch_token(b, step->key + j) - p;
    vu x;
    if (t->r->list != NULL) {
        for (uint32_t i = 0; i < VEC; i++)
            x[i] = j + i < step->n_keys ? t->r->list[step->key + j + i] - p : 0;
        return __builtin_convertvector((vi)x, vf);
    }
    for (uint32_t i = 0; i < VEC; i++)
        x[i] = is_even ? first + i * b.rate
                       : stripes_position(s, stripes_token(s, b, step->key + j + i)) - p;
    const struct backend_item *item = t->r->item;
    if (item->nodes != NULL && step->key + j + VEC > item->pos)
        for (uint32_t i = 0; i < VEC; i++) {
            uint32_t node = step->key + j + i - item->pos; /* or wraps */
            if (node < item->n_tokens)
                x[i] = item->pos + item->nodes[node].depth - p;
        }
    return __builtin_convertvector((vi)x, vf);
}

/* Scales, caps, slopes and masks one row's raw products, n of them; returns their maximum. */
INLINE vf finish_scores(const struct tile_state *t, const struct step *step, uint32_t row,
                        struct columns c, uint32_t n)
{
    const struct attn_layer_spec *spec = t->r->spec;
    float *s = t->x->s + row * TILE_TOKENS;
    uint32_t head = t->kv_head * t->g->group + (t->r->row0 + row) % t->g->group;
    uint32_t p = position_of_row(t, t->r->row0 + row);
    float unit = spec->scale * vec_code_unit(t->g->kv_dtype);
    float slope = spec->alibi_slopes ? spec->alibi_slopes[head] * LOG2E : 0;
    vf lane;
    for (int i = 0; i < VEC; i++)
        lane[i] = (float)i;

    vf max = vf_set(-INFINITY);
    for (uint32_t j = 0; j < n; j += VEC) {
        vf x = vf_load(s + j);
        if (t->is_scaled)
            x *= vf_load(t->x->k_scales + j);
        if (spec->soft_cap > 0)
            x = vf_tanh(x * (unit / spec->soft_cap)) * (spec->soft_cap * LOG2E);
        else
            x *= unit * LOG2E;
        if (spec->alibi_slopes)
            x += slope * distances(t, step, j, p);
        vf col = lane + (float)j;
        vi seen = ((col >= (float)c.from[0]) & (col < (float)c.to[0])) |
                  ((col >= (float)c.from[1]) & (col < (float)c.to[1]));
        for (uint32_t i = 0; i < VEC && c.nodes != 0; i++)
            seen[i] |= -(int32_t)(c.nodes >> (j + i) & 1);
        x = vf_select(seen, x, vf_set(-INFINITY));
        vf_store(s + j, x);
        max = vf_max(x, max);
    }
    return max;
}

/* The online softmax step of one row: its scores, whose maximum is max, become weights, and its o,
 * max and sum are brought to the new maximum. */
INLINE void softmax_row(const struct tile_state *t, uint32_t row, uint32_t n, vf max,
                        bool is_scaled)
{
    float *s = t->x->s + row * TILE_TOKENS, old = t->max[row], m = vf_hmax(max);
    m = m > old ? m : old;
    float base = m == -INFINITY ? 0 : m;
    vf sum = {0};
    for (uint32_t j = 0; j < n; j += VEC) {
        vf w = vf_exp2(vf_load(s + j) - base);
        sum += w;
        if (is_scaled)
            w *= vf_load(t->x->v_scales + j);
        vf_store(s + j, w);
    }
    if (m != old) {
        float shrink = vf_exp2(vf_set(old - m))[0];
        float *o = t->o + (size_t)row * t->o_stride;
        for (uint32_t d = 0; d < t->o_stride; d += VEC)
            vf_store(o + d, vf_load(o + d) * shrink);
        t->sum[row] *= shrink;
        t->max[row] = m;
    }
    t->sum[row] += vf_hsum(sum);
}

static void masked_softmax_row(const struct tile_state *t, const struct step *step, uint32_t row,
                               struct columns c)
{
    uint32_t n = c.to[1] > c.to[0] ? c.to[1] : c.to[0];
    uint32_t n_nodes = c.nodes == 0 ? 0 : 32 - (uint32_t)__builtin_clz(c.nodes);
    n = n > n_nodes ? n : n_nodes;
    n = (n + VEC - 1) / VEC * VEC;
    softmax_row(t, row, n, finish_scores(t, step, row, c, n), t->is_scaled);
}

/* The same of a row that sees the whole tile, where scores are only scaled. */
static void plain_softmax_row(const struct tile_state *t, uint32_t row)
{
    float *s = t->x->s + row * TILE_TOKENS, unit = t->r->spec->scale * LOG2E;
    vf max = vf_set(-INFINITY);
    for (uint32_t j = 0; j < TILE_TOKENS; j += VEC) {
        vf x = vf_load(s + j) * unit;
        vf_store(s + j, x);
        max = vf_max(x, max);
    }
    softmax_row(t, row, TILE_TOKENS, max, false);
}

static void load_q(const struct tile_state *t)
{
    const struct attend_rows *r = t->r;
    const struct attend_geometry *g = t->g;
    size_t bytes = dtype_bytes(g->q_dtype);
    for (uint32_t i = 0; i < r->n_rows; i++) {
        uint32_t row = r->row0 + i;
        const struct shared_query query = rows_query(r, row);
        size_t head = (size_t)query.token * g->num_q_heads + t->kv_head * g->group;
        const uint8_t *q = (const uint8_t *)query.item->q + (head + row % g->group) * g->dk * bytes;
#if HAS_BF16_DOT
        if (t->is_paired) {
            pair_q((const uint16_t *)(const void *)q, g->dk, i, (uint32_t *)(void *)t->q);
            continue;
        }
#endif
        if (t->is_bf16_dot) {
            uint16_t *to = (uint16_t *)t->q + (size_t)i * t->q_stride;
            memset(to, 0, t->q_stride * 2);
            memcpy(to, q, g->dk * 2);
            continue;
        }
        float *to = t->q + (size_t)i * t->q_stride;
        for (uint32_t d = 0; d < g->dk; d += VEC) {
            int n = g->dk - d < VEC ? VEC_TAIL : VEC;
            vf_store(to + d, g->q_dtype == ATTN_F32   ? vf_load_as(ATTN_F32, q + d * 4, n)
                             : g->q_dtype == ATTN_F16 ? vf_load_as(ATTN_F16, q + d * 2, n)
                                                      : vf_load_as(ATTN_BF16, q + d * 2, n));
        }
    }
}

#define STEPS_TO_PAGE 4 /* how far ahead pages are touched */

/* Brings a tile's tokens that lie apart together; behind the last, keys are 0. */
static struct piece gather(const struct tile_state *t, const struct step *step)
{
    const struct attend_geometry *g = t->g;
    struct attend_scratch *x = t->x;
    const bool is_v_in_k = g->layout.v_offset == 0;
    size_t bytes = t->is_fp4 ? sizeof(float) : dtype_bytes(g->kv_dtype);
    size_t k_row = g->dk * bytes, v_row = g->dv * bytes;
    for (uint32_t i = 0; i < step->n_keys; i++) {
        uint32_t token = t->r->list != NULL
                             ? t->r->list[step->key + i]
                             : stripes_token(t->g->stripes, step->branch, step->key + i);
        struct piece from = piece_of(t->r, t->kv_head, token);
        if (t->is_fp4) {
            decode_token(g, &from, 0, x, i);
            continue;
        }
        memcpy(x->k + i * k_row, from.k, k_row);
        if (!is_v_in_k)
            memcpy(x->v + i * v_row, from.v, v_row);
        if (t->is_scaled) {
            memcpy(&x->k_scales[i], from.k_scales, sizeof(float));
            memcpy(&x->v_scales[i], from.v_scales, sizeof(float));
        }
    }
    memset(x->k + step->n_keys * k_row, 0, (TILE_TOKENS - step->n_keys) * k_row);
    for (uint32_t i = step->n_keys; i < TILE_TOKENS; i++)
        x->k_scales[i] = x->v_scales[i] = 0;
    return (struct piece){.k = x->k, .v = is_v_in_k ? x->k : x->v};
}

/* Do the tokens of a tile lie behind one another? */
INLINE bool is_in_place(const struct tile_state *t, const struct step *step)
{
    return step->branch.rate == 1 && t->r->list == NULL;
}

/* Computes steps[0]; fetches steps[1], and the page addresses of steps[STEPS_TO_PAGE]: a piece is
 * often a page, and a prefetch that waits for a page walk is lost or holds up those behind it. */
INLINE void attend_tile(const struct tile_state *t, attn_dtype dtype,
                        const struct step steps[STEPS_TO_PAGE + 1])
{
    struct piece pieces[TILE_TOKENS / 8];
    const uint8_t *k_ahead[TILE_TOKENS / 8], *v_ahead[TILE_TOKENS / 8];
    const bool is_gathered = !is_in_place(t, &steps[0]);
    uint32_t size = is_gathered ? TILE_TOKENS : t->piece_tokens, group = t->g->group;
    uint32_t n_rows = t->r->n_rows, key = steps[0].key, n_keys = steps[0].n_keys;
    uint32_t n_pieces = (n_keys + size - 1) / size;

    const struct step *far_step = &steps[STEPS_TO_PAGE];
    for (uint32_t i = 0; i * size < far_step->n_keys && is_in_place(t, far_step); i++) {
        struct piece far = piece_of(t->r, far_step->kv_head, token_of(t, far_step->key + i * size));
        prefetch(far.k);
        prefetch(far.v);
    }
    for (uint32_t i = 0; i < n_pieces; i++) {
        struct piece ahead = {0};
        pieces[i] = (struct piece){0};
        if (is_gathered)
            pieces[i] = gather(t, &steps[0]);
        else if (!is_hidden(&steps[0], key + i * size, size))
            pieces[i] = piece_of(t->r, t->kv_head, token_of(t, key + i * size));
        if (i * size < steps[1].n_keys && !is_gathered && is_in_place(t, &steps[1]))
            ahead = piece_of(t->r, steps[1].kv_head, token_of(t, steps[1].key + i * size));
        if (dtype == ATTN_F32 && t->is_fp4) {
            const uint32_t n = n_keys - i * size < size ? n_keys - i * size : size;
            if (!is_gathered && pieces[i].k != NULL)
                pieces[i] =
                    decode_piece(t->g, &pieces[i], &ahead, n, TOKENS_AT_ONCE, t->x, i * size);
            k_ahead[i] = v_ahead[i] = NULL;
            continue;
        }
        k_ahead[i] = ahead.k;
        v_ahead[i] = t->g->layout.v_offset == 0 ? NULL : ahead.v; /* comes with K */
        if ((dtype == ATTN_INT8 || dtype == ATTN_FP8_E4M3) && !is_gathered && pieces[i].k) {
            memcpy(t->x->k_scales + i * size, pieces[i].k_scales, size * sizeof(float));
            memcpy(t->x->v_scales + i * size, pieces[i].v_scales, size * sizeof(float));
        }
    }

#if HAS_BF16_DOT
    if (dtype == ATTN_BF16 && t->is_paired)
        pair_scores(t, pieces, k_ahead, n_pieces, size);
#endif
    if (dtype == ATTN_F32 && t->is_laid)
        laid_scores(t, pieces, k_ahead, n_keys, size);
    for (uint32_t i = 0; i < n_pieces && !t->is_paired && !t->is_laid; i++) {
        uint32_t n = n_keys - i * size < size ? n_keys - i * size : size;
        if (pieces[i].k == NULL)
            continue;
        piece_scores(t, dtype, pieces[i].k, k_ahead[i], n, i * size);
    }

    struct columns c = {0};
    bool is_same = true; /* all rows see the same columns */
    bool is_plain = false;
    for (uint32_t i = 0; i < n_rows; i++) {
        if (i == 0 || (t->r->row0 + i) % group == 0) {
            struct columns next = columns_of(t, &steps[0], t->r->row0 + i);
            is_same = is_same && (i == 0 || memcmp(&c, &next, sizeof c) == 0);
            c = next;
            is_plain = t->is_plain && is_whole(c);
        }
        if (is_plain)
            plain_softmax_row(t, i);
        else
            masked_softmax_row(t, &steps[0], i, c);
    }

#if HAS_BF16_DOT
    if (dtype == ATTN_BF16 && t->is_paired && is_same && is_whole(c) &&
        t->g->dv % PAIRS_DIMS == 0) {
        for (uint32_t j = 0; j < TILE_TOKENS; j += 2)
            pair_rows(t->x, j, pieces[j / size].v, v_ahead[j / size], j % size, t->g->dv,
                      t->g->layout.v_row_bytes);
        sum_whole_tile(t->x, n_rows, t->g->dv, t->o, t->o_stride);
        return;
    }
#endif
    for (uint32_t i = 0; i < n_pieces; i++) {
        size_t v_stride = t->v_stride;
        uint32_t begin = i * size, end = begin + size;
        for (uint32_t row = 0, next; row < n_rows; row = next) {
            next = is_same ? n_rows : row + group - (t->r->row0 + row) % group;
            next = next < n_rows ? next : n_rows;
            c = columns_of(t, &steps[0], t->r->row0 + row);
            for (int j = 0; j < 2; j++) {
                uint32_t a = c.from[j] > begin ? c.from[j] : begin;
                uint32_t b = c.to[j] < end ? c.to[j] : end;
                if (a < b)
                    piece_sum(t, dtype, pieces[i].v + (a - begin) * v_stride, v_ahead[i], a, b, row,
                              next);
            }
            for (uint32_t rest = c.nodes; rest != 0; rest &= rest - 1) {
                uint32_t a = (uint32_t)__builtin_ctz(rest);
                if (a >= begin && a < end)
                    piece_sum(t, dtype, pieces[i].v + (a - begin) * v_stride, NULL, a, a + 1, row,
                              next);
            }
        }
    }
}

/* Heads inside, tiles outside. */
INLINE void attend_tiles(struct tile_state *heads, attn_dtype dtype, uint32_t tile0,
                         uint32_t n_tiles)
{
    const struct attend_rows *r = heads->r;
    uint32_t n_steps = n_tiles * r->n_heads, next_branch = 0, past = 0; /* tiles of those behind */
    struct branch branch = {0};
    struct visible seen = {0};
    struct visible_tiles tiles = {0};
    struct step steps[STEPS_TO_PAGE + 1] = {{.n_keys = 0}}, *last = &steps[STEPS_TO_PAGE];
    for (uint32_t i = 0; i < n_steps + STEPS_TO_PAGE; i++) {
        memmove(steps, steps + 1, STEPS_TO_PAGE * sizeof *steps);
        *last = (struct step){.n_keys = 0};
        if (i < n_steps) {
            uint32_t at = tile0 + i / r->n_heads;
            while (at - past >= tiles.n) {
                past += tiles.n;
                branch = rows_branch(r, next_branch++);
                seen = rows_visible(r, branch);
                tiles = visible_tiles_of(seen, TILE_TOKENS);
            }
            uint32_t tile = visible_tile_at(at - past, tiles.sinks, tiles.skip);
            uint32_t left = seen.end - tile * TILE_TOKENS;
            last->branch = branch;
            last->kv_head = r->kv_head + i % r->n_heads;
            last->key = tile * TILE_TOKENS;
            last->n_keys = left < TILE_TOKENS ? left : TILE_TOKENS;
            last->hidden = seen.sinks;
            last->shown = seen.first;
        }
        if (i >= STEPS_TO_PAGE)
            attend_tile(&heads[steps[0].kv_head - r->kv_head], dtype, steps);
    }
}

static void attend(const struct attend_rows *r, uint32_t tile0, uint32_t n_tiles,
                   struct attend_scratch *scratch, const struct attend_partial *out)
{
    const struct attend_geometry *g = r->g;
    struct tile_state t[MAX_SEGMENT_ROWS];
    uint32_t q_stride = (g->dk + 31) / 32 * 32, n_rows = r->n_heads * r->n_rows;
    uint32_t head_q = r->n_rows * q_stride;
    const bool is_fp4 = kv_group(g->kv_dtype) > 0, is_scaled = g->layout.is_quantised && !is_fp4;
    bool is_paired = false;
    /* by the item alone, as its bytes are; where there is more than one, by what pays */
    const uint32_t n_like =
        r->queries != NULL || r->blocks != NULL ? r->n_rows : r->item->n_tokens * g->group;
    const bool is_laid =
        (g->kv_dtype == ATTN_F32 || is_fp4) && r->list == NULL && n_like >= LAID_MIN_ROWS;
#if HAS_BF16_DOT
    is_paired = g->kv_dtype == ATTN_BF16 && n_like >= PAIRS_MIN_ROWS;
    if (is_paired)
        head_q = (r->n_rows + ROWS_OF_PAIRS - 1) / ROWS_OF_PAIRS * ROWS_OF_PAIRS * (g->dk / 2);
#endif
    for (uint32_t h = 0; h < r->n_heads; h++) {
        size_t row = (size_t)h * r->n_rows;
        t[h] = (struct tile_state){
            .r = r,
            .g = g,
            .x = scratch,
            .kv_head = r->kv_head + h,
            .q = scratch->q + (size_t)h * head_q,
            .o = out->o + row * out->o_stride,
            .max = out->max + row,
            .sum = out->sum + row,
            .o_stride = out->o_stride,
            .q_stride = q_stride,
            .piece_tokens = g->block_tokens < TILE_TOKENS ? g->block_tokens : TILE_TOKENS,
            .v_stride = is_fp4 ? (g->layout.v_offset == 0 ? g->dk : g->dv) * (uint32_t)sizeof(float)
                               : g->layout.v_row_bytes,
            .is_fp4 = is_fp4,
            .is_scaled = is_scaled,
            .is_bf16_dot = HAS_BF16_DOT && g->kv_dtype == ATTN_BF16,
            .is_plain = !is_scaled && r->spec->soft_cap <= 0 && r->spec->alibi_slopes == NULL,
            .is_paired = is_paired,
            .is_laid = is_laid,
        };
        load_q(&t[h]);
    }
    memset(out->o, 0, (size_t)n_rows * out->o_stride * sizeof(float));
    memset(out->sum, 0, n_rows * sizeof(float));
    for (uint32_t i = 0; i < n_rows; i++)
        out->max[i] = -INFINITY;
    switch (g->kv_dtype) {
    case ATTN_F32:
    case ATTN_NVFP4:
    case ATTN_MXFP4:
        attend_tiles(t, ATTN_F32, tile0, n_tiles);
        break;
    case ATTN_F16:
        attend_tiles(t, ATTN_F16, tile0, n_tiles);
        break;
    case ATTN_BF16:
        attend_tiles(t, ATTN_BF16, tile0, n_tiles);
        break;
    case ATTN_FP8_E4M3:
        attend_tiles(t, ATTN_FP8_E4M3, tile0, n_tiles);
        break;
    default:
        attend_tiles(t, ATTN_INT8, tile0, n_tiles);
    }
}

static void finish(const struct attend_rows *r, const struct attend_partial *p)
{
    const struct attend_geometry *g = r->g;
    size_t bytes = dtype_bytes(g->q_dtype);
    for (uint32_t i = 0; i < r->n_heads * r->n_rows; i++) {
        uint32_t row = r->row0 + i % r->n_rows;
        uint32_t head = (r->kv_head + i / r->n_rows) * g->group + row % g->group;
        float max = p->max[i], sum = p->sum[i], scale = vec_code_unit(g->kv_dtype);
        if (r->spec->sink_logits != NULL && r->spec->sink_logits[head] != -INFINITY &&
            r->item->key_base == 0) {
            float sink = r->spec->sink_logits[head] * LOG2E;
            float m = max > sink ? max : sink;
            scale *= exp2f(max - m);
            sum = sum * exp2f(max - m) + exp2f(sink - m);
            max = m;
        }
        scale = sum == 0 ? 0 : scale / sum;
        size_t at = (size_t)(row / g->group) * g->num_q_heads + head;
        const float *o = p->o + (size_t)i * p->o_stride;
        uint8_t *out = (uint8_t *)r->item->out + at * g->dv * bytes;
        for (uint32_t d = 0; d < g->dv; d += VEC) {
            vf v = vf_load(o + d) * scale;
            int n = g->dv - d < VEC ? VEC_TAIL : VEC;
            if (g->q_dtype == ATTN_F32)
                vf_store_as(ATTN_F32, out + d * 4, v, n);
            else if (g->q_dtype == ATTN_F16)
                vf_store_as(ATTN_F16, out + d * 2, v, n);
            else
                vf_store_as(ATTN_BF16, out + d * 2, v, n);
        }
        if (r->item->lse != NULL)
            r->item->lse[at] = sum == 0 ? -INFINITY : (max + log2f(sum)) * LN2;
    }
}

/* The n elements from d on of one of a block's keys. */
INLINE vf load_key(attn_dtype dtype, const uint8_t *k, const uint8_t *scales, uint32_t d, int n)
{
    float scale;
    if (dtype == ATTN_NVFP4 || dtype == ATTN_MXFP4)
        return vf_load_e2m1(k + d / 2) * vec_group_scale(dtype, scales, d);
    const vf x = vf_load_as(dtype, k + d * dtype_bytes(dtype), n);
    if (dtype != ATTN_FP8_E4M3 && dtype != ATTN_INT8)
        return x;
    memcpy(&scale, scales, sizeof scale);
    return x * (scale * vec_code_unit(dtype));
}

/* n elements of a dimension's vector of a block's keys; *max and *min lie behind one another. */
INLINE void extremes_vec(attn_dtype dtype, const struct attend_geometry *g, const uint8_t *k,
                         const uint8_t *scales, uint32_t d, int n, vf *max, vf *min)
{
    const struct kv_layout *l = &g->layout;
    *max = vf_set(-INFINITY);
    *min = vf_set(INFINITY);
    for (uint32_t j = 0; j < g->block_tokens; j++) {
        vf x = load_key(dtype, k + j * (size_t)l->k_row_bytes,
                        scales + j * (size_t)l->k_scale_bytes, d, n);
        *max = vf_max(x, *max);
        *min = vf_select(x < *min, x, *min);
    }
}

INLINE void extremes_as(attn_dtype dtype, attn_dtype to, const struct attend_geometry *g,
                        const uint8_t *k, const uint8_t *scales, uint8_t *out)
{
    const size_t bytes = dtype_bytes(to);
    for (uint32_t d = 0; d < g->dk; d += VEC) {
        const int n = g->dk - d < VEC ? VEC_TAIL : VEC;
        vf max, min;
        extremes_vec(dtype, g, k, scales, d, n, &max, &min);
        vf_store_as(to, out + d * bytes, max, n);
        vf_store_as(to, out + (g->dk + d) * bytes, min, n);
    }
}

static void extremes(const struct attend_geometry *g, const uint8_t *k, const uint8_t *scales,
                     uint8_t *out)
{
    switch (g->kv_dtype) {
    case ATTN_F32:
        extremes_as(ATTN_F32, ATTN_F32, g, k, scales, out);
        break;
    case ATTN_F16:
        extremes_as(ATTN_F16, ATTN_F16, g, k, scales, out);
        break;
    case ATTN_BF16:
        extremes_as(ATTN_BF16, ATTN_BF16, g, k, scales, out);
        break;
    case ATTN_FP8_E4M3:
        extremes_as(ATTN_FP8_E4M3, ATTN_F32, g, k, scales, out);
        break;
    case ATTN_NVFP4:
        extremes_as(ATTN_NVFP4, ATTN_F32, g, k, scales, out);
        break;
    case ATTN_MXFP4:
        extremes_as(ATTN_MXFP4, ATTN_F32, g, k, scales, out);
        break;
    default:
        extremes_as(ATTN_INT8, ATTN_F32, g, k, scales, out);
    }
}

/* What a q takes of the maxima, and what of the minima. */
struct halves {
    _Alignas(64) float above[ROWS_AT_ONCE][MAX_K_DIM], below[ROWS_AT_ONCE][MAX_K_DIM];
};

INLINE void load_halves(const struct attend_rows *r, uint32_t row, uint32_t n, struct halves *to)
{
    const struct attend_geometry *g = r->g;
    const size_t bytes = dtype_bytes(g->q_dtype), token = r->row0 / g->group;
    const size_t head = token * g->num_q_heads + (size_t)r->kv_head * g->group + row;
    for (uint32_t i = 0; i < n; i++) {
        const uint8_t *q = (const uint8_t *)r->item->q + (head + i) * g->dk * bytes;
        for (uint32_t d = 0; d < g->dk; d += VEC) {
            const int lanes = g->dk - d < VEC ? VEC_TAIL : VEC;
            const vf x = g->q_dtype == ATTN_F32   ? vf_load_as(ATTN_F32, q + d * 4, lanes)
                         : g->q_dtype == ATTN_F16 ? vf_load_as(ATTN_F16, q + d * 2, lanes)
                                                  : vf_load_as(ATTN_BF16, q + d * 2, lanes);
            vf_store(to->above[i] + d, vf_select(x > 0, x, vf_set(0)));
            vf_store(to->below[i] + d, vf_select(x > 0, vf_set(0), x));
        }
    }
}

/* The highest bound of n_rows rows for one block. */
INLINE float bound_of(attn_dtype dtype, int n_rows, const struct halves *q, const uint8_t *extremes,
                      uint32_t dk)
{
    const size_t bytes = dtype_bytes(dtype);
    vf sums[ROWS_AT_ONCE] = {0};
    uint32_t d = 0;
    for (; d + VEC <= dk; d += VEC) {
        const vf max = vf_load_as(dtype, extremes + d * bytes, VEC);
        const vf min = vf_load_as(dtype, extremes + (dk + d) * bytes, VEC);
        for (int i = 0; i < n_rows; i++)
            sums[i] = vf_fma(vf_load(q->above[i] + d), max,
                             vf_fma(vf_load(q->below[i] + d), min, sums[i]));
    }
#if VEC == 16
    if (d < dk) {
        const vf max = vf_load_as(dtype, extremes + d * bytes, 8);
        const vf min = vf_load_as(dtype, extremes + (dk + d) * bytes, 8);
        for (int i = 0; i < n_rows; i++)
            sums[i] = vf_fma(vf_load(q->above[i] + d), max,
                             vf_fma(vf_load(q->below[i] + d), min, sums[i]));
    }
#endif
    float best = -INFINITY;
    for (int i = 0; i < n_rows; i++) {
        const float x = vf_hsum(sums[i]);
        best = x <= best ? best : x == x ? x : INFINITY; /* what is not a number may be anything */
    }
    return best;
}

#define BLOCKS_AHEAD 4

INLINE void bounds_as(attn_dtype dtype, int n_rows, const struct attend_rows *r, bool is_first,
                      const struct halves *q, const uint8_t *extremes, size_t block_bytes,
                      uint32_t end, float *out)
{
    const uint32_t dk = r->g->dk;
    const size_t bytes = 2 * dk * dtype_bytes(dtype);
    for (uint32_t i = 1; i < end; i++) {
        const uint32_t next = i + BLOCKS_AHEAD < end ? i + BLOCKS_AHEAD : i;
        for (size_t at = 0; at < bytes; at += 64)
            prefetch(extremes + r->item->block_table[next] * block_bytes + at);
        const float x =
            bound_of(dtype, n_rows, q, extremes + r->item->block_table[i] * block_bytes, dk);
        out[i] = is_first || x > out[i] ? x : out[i];
    }
}

static void bounds(const struct attend_rows *r, const uint8_t *extremes, size_t block_bytes,
                   uint32_t end, float *out)
{
    const attn_dtype dtype = cpu_extremes_dtype(r->g);
    struct halves q;
    for (uint32_t row = 0; row < r->n_rows; row += ROWS_AT_ONCE) {
        const uint32_t left = r->n_rows - row, n = left < ROWS_AT_ONCE ? left : ROWS_AT_ONCE;
        load_halves(r, row, n, &q);
#define BOUNDS(d, n) bounds_as(d, n, r, row == 0, &q, extremes, block_bytes, end, out)
#define BOUNDS_OF(n)                                                                               \
    (dtype == ATTN_F32   ? BOUNDS(ATTN_F32, n)                                                     \
     : dtype == ATTN_F16 ? BOUNDS(ATTN_F16, n)                                                     \
                         : BOUNDS(ATTN_BF16, n))
        switch (n) {
        case 1:
            BOUNDS_OF(1);
            break;
        case 2:
            BOUNDS_OF(2);
            break;
        case 3:
            BOUNDS_OF(3);
            break;
        default:
            BOUNDS_OF(4);
        }
#undef BOUNDS_OF
#undef BOUNDS
    }
}

#include "kernels/cpu/products.h"

const struct cpu_isa ISA_SYMBOL = {
    .name = ISA_NAME,
    .has_pairs = HAS_BF16_DOT,
    .attend = attend,
    .finish = finish,
    .extremes = extremes,
    .bounds = bounds,
    .absorb = absorb,
    .expand = expand,
    .read = vec_read,
};
