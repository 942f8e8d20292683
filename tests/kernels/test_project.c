/* test_project.c: pools whose items carry heads, which the backend projects to latents and back,
 * against the whole chain in float64; where the weights are, and what is refused.
 *
 * Errors are of a row's size: elements of it are sums of terms that cancel, each rounded to q_dtype
 * twice on the way.
 */
#include "kernels/load.h"
#include "kernels/reference.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
// clang-format off
#include <cmocka.h>
// clang-format on

enum { N_SEQS = 4, N_LAYERS = 2, MAX_TOKENS = 256, BLOCK_TOKENS = 16, N_BLOCKS = 128 };
enum { ROW_BLOCKS = MAX_TOKENS / BLOCK_TOKENS };
#define POISON 0xa5
#define GUARD 64

struct geometry {
    uint32_t heads, latent, rope, nope, out;
};

/* A pool with its weights, and what was appended. */
struct rig {
    const struct backend_ops *ops;
    struct backend *b;
    struct backend_pool *pool;
    struct backend_pool_config c;
    struct attn_layer_spec layers[N_LAYERS];
    uint8_t *weights[N_LAYERS];
    uint8_t *k[N_SEQS][N_LAYERS]; /* [MAX_TOKENS][head_dim_k] */
    uint32_t tables[N_SEQS][ROW_BLOCKS];
};

/* One item, with memory of its own. */
struct piece {
    uint32_t seq, layer, pos, n_tokens, flags;
    uint8_t *q, *out;
    float *lse;
    uint32_t n_chosen, *chosen; /* the test's */
};

static const struct backend_ops *ops;
/* Of backends that are opened. Some keep memory for a batch of that many: the executor's of 1,024
 * tokens of the widest pool here would be 0.9 GB. */
static uint32_t max_batch_tokens = 256;

static uint64_t state_of_random = 0x9e3779b97f4a7c15u;

static uint32_t random_below(uint32_t n)
{
    state_of_random = state_of_random * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(state_of_random >> 33) % n;
}

static double random_unit(void)
{
    return (double)random_below(1u << 20) / (1u << 19) - 1;
}

static uint8_t *random_array(attn_dtype d, size_t n, double size)
{
    uint8_t *a = aligned_alloc(64, (n * attn_dtype_bytes(d) + 63) / 64 * 64);
    assert_non_null(a);
    for (size_t i = 0; i < n; i++)
        reference_put(d, a, i, random_unit() * size);
    return a;
}

/* --- the rig ---------------------------------------------------------------------------------- */

/* Memory that the device reads and writes. */
static uint8_t *rig_alloc(const struct rig *r, size_t bytes)
{
    void *p;
    assert_int_equal(r->ops->host_alloc(r->b, bytes, &p), ATTN_OK);
    return p;
}

/* The same with random elements. */
static uint8_t *rig_array(const struct rig *r, attn_dtype d, size_t n, double size)
{
    uint8_t *from = random_array(d, n, size), *a = rig_alloc(r, n * attn_dtype_bytes(d));
    memcpy(a, from, n * attn_dtype_bytes(d));
    free(from);
    return a;
}

static size_t k_bytes(const struct rig *r)
{
    return (size_t)MAX_TOKENS * r->c.head_dim_k * attn_dtype_bytes(r->c.q_dtype);
}

static void open_backend(struct rig *r, int import_fd)
{
    const struct backend_config config = {.kv_bytes = 64u << 20,
                                          .max_batch_items = 16,
                                          .max_batch_tokens = max_batch_tokens,
                                          .n_threads = 2,
                                          .import_fd = import_fd};
    r->ops = ops;
    const attn_status st = r->ops->open(&config, &r->b);
    if (st == ATTN_ENOTSUP) { /* ATTND_CPU_ISA names what is not here */
        r->ops->close(r->b);
        exit(77);
    }
    assert_int_equal(st, ATTN_OK);
}

static struct backend_pool_config config_of(struct rig *r, const struct geometry *g, attn_dtype d)
{
    for (uint32_t i = 0; i < N_LAYERS; i++)
        r->layers[i] = (struct attn_layer_spec){.scale = 1 / sqrtf((float)(g->nope + g->rope))};
    return (struct backend_pool_config){.num_layers = N_LAYERS,
                                        .num_q_heads = g->heads,
                                        .num_kv_heads = 1,
                                        .head_dim_k = g->latent + g->rope,
                                        .head_dim_v = g->latent,
                                        .is_v_in_k = true,
                                        .q_nope_dim = g->nope,
                                        .out_dim = g->out,
                                        .block_tokens = BLOCK_TOKENS,
                                        .n_blocks = N_BLOCKS,
                                        .n_table_rows = N_SEQS,
                                        .max_row_blocks = ROW_BLOCKS,
                                        .q_dtype = d,
                                        .kv_dtype = d,
                                        .layers = r->layers};
}

static size_t weights_elements(const struct rig *r)
{
    return (size_t)r->c.num_q_heads * (r->c.q_nope_dim + r->c.out_dim) * r->c.head_dim_v;
}

/* Random weights, in pieces that overlap. */
static void give_weights(struct rig *r, uint32_t layer)
{
    const uint64_t all = backend_weights_bytes(&r->c);
    for (uint64_t at = 0; at < all;) {
        const uint64_t n = all - at < 5000 ? all - at : 5000;
        assert_int_equal(r->ops->weights_write(r->pool, layer, at, r->weights[layer] + at, n),
                         ATTN_OK);
        at += n < 5000 ? n : 4000;
    }
    assert_int_equal(r->ops->weights_have(r->pool, layer), all);
}

static void rig_begin(struct rig *r, const struct geometry *g, attn_dtype d, bool has_weights)
{
    *r = (struct rig){0};
    open_backend(r, -1);
    r->c = config_of(r, g, d);
    assert_int_equal(r->ops->pool_open(r->b, &r->c, &r->pool), ATTN_OK);
    for (uint32_t l = 0; l < N_LAYERS; l++) {
        r->weights[l] = random_array(d, weights_elements(r), 2 / sqrt((double)g->nope));
        if (has_weights)
            give_weights(r, l);
    }
    for (uint32_t s = 0, block = 0; s < N_SEQS; s++) {
        for (uint32_t i = 0; i < ROW_BLOCKS; i++)
            r->tables[s][i] = (block++ * 37 + 5) % N_BLOCKS; /* 37 and 128 share no factor */
        for (uint32_t l = 0; l < N_LAYERS; l++)
            r->k[s][l] = rig_array(r, d, (size_t)MAX_TOKENS * r->c.head_dim_k, 1);
    }
}

static void rig_end(struct rig *r)
{
    r->ops->pool_close(r->pool);
    for (uint32_t l = 0; l < N_LAYERS; l++) {
        free(r->weights[l]);
        for (uint32_t s = 0; s < N_SEQS; s++)
            r->ops->host_free(r->b, r->k[s][l], k_bytes(r));
    }
    r->ops->close(r->b);
}

static size_t out_bytes(const struct rig *r, const struct piece *p)
{
    return (size_t)p->n_tokens * r->c.num_q_heads * r->c.out_dim * attn_dtype_bytes(r->c.q_dtype);
}

static struct piece piece_of(const struct rig *r, uint32_t seq, uint32_t layer, uint32_t pos,
                             uint32_t n_tokens, uint32_t flags)
{
    struct piece p = {seq, layer, pos, n_tokens, flags, NULL, NULL, NULL, 0, NULL};
    if ((flags & BACKEND_ATTEND) == 0)
        return p;
    const size_t rows = (size_t)n_tokens * r->c.num_q_heads;
    p.q = rig_array(r, r->c.q_dtype, rows * backend_q_dim(&r->c), 2);
    p.out = rig_alloc(r, out_bytes(r, &p) + GUARD);
    p.lse = (float *)(void *)rig_alloc(r, rows * sizeof *p.lse);
    return p;
}

static void pieces_free(const struct rig *r, struct piece *p, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        const size_t rows = (size_t)p[i].n_tokens * r->c.num_q_heads;
        r->ops->host_free(r->b, p[i].q,
                          rows * backend_q_dim(&r->c) * attn_dtype_bytes(r->c.q_dtype));
        r->ops->host_free(r->b, p[i].out, out_bytes(r, &p[i]) + GUARD);
        r->ops->host_free(r->b, p[i].lse, rows * sizeof *p[i].lse);
    }
}

/* Runs the pieces as one batch, with poisoned outputs, whose guards stay. */
static attn_status submit(struct rig *r, const struct piece *p, uint32_t n)
{
    struct backend_item items[16] = {0};
    struct backend_patch patches[N_SEQS * ROW_BLOCKS];
    for (uint32_t i = 0; i < N_SEQS * ROW_BLOCKS; i++)
        patches[i] = (struct backend_patch){i / ROW_BLOCKS, i % ROW_BLOCKS,
                                            r->tables[i / ROW_BLOCKS][i % ROW_BLOCKS]};
    for (uint32_t i = 0; i < n; i++) {
        items[i] = (struct backend_item){.flags = p[i].flags,
                                         .layer = p[i].layer,
                                         .table_row = p[i].seq,
                                         .pos = p[i].pos,
                                         .n_tokens = p[i].n_tokens,
                                         .block_table = r->tables[p[i].seq],
                                         .q = p[i].q,
                                         .out = p[i].out,
                                         .lse = p[i].lse,
                                         .n_chosen = p[i].n_chosen,
                                         .chosen = p[i].chosen};
        if (p[i].flags & BACKEND_APPEND)
            items[i].k = r->k[p[i].seq][p[i].layer] +
                         (size_t)p[i].pos * r->c.head_dim_k * attn_dtype_bytes(r->c.q_dtype);
        if (p[i].out != NULL)
            memset(p[i].out, POISON, out_bytes(r, &p[i]) + GUARD);
    }
    struct backend_batch batch = {.pool = r->pool,
                                  .items = items,
                                  .n_items = n,
                                  .patches = patches,
                                  .n_patches = N_SEQS * ROW_BLOCKS};
    attn_status st = r->ops->submit(r->b, &batch);
    if (st != ATTN_OK)
        return st;
    assert_ptr_equal(r->ops->poll(r->b, UINT64_MAX), &batch);
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t k = 0; p[i].out != NULL && k < GUARD; k++)
            assert_int_equal(p[i].out[out_bytes(r, &p[i]) + k], POISON);
    return batch.status;
}

/* --- the chain in float64 --------------------------------------------------------------------- */

/* Of how much of its size a row may be wrong. */
static double bound_of(attn_dtype d)
{
    return d == ATTN_F32 ? 2e-5 : d == ATTN_F16 ? 4e-3 : 3e-2;
}

/* The head's row of w times x, or x times its rows. */
static void absorb(const struct rig *r, uint32_t layer, uint32_t head, const uint8_t *q, size_t at,
                   double *out)
{
    const struct backend_pool_config *c = &r->c;
    const size_t first = (size_t)head * (c->q_nope_dim + c->out_dim) * c->head_dim_v;
    for (uint32_t d = 0; d < c->head_dim_v; d++)
        out[d] = 0;
    for (uint32_t i = 0; i < c->q_nope_dim; i++) {
        const double x = reference_get(c->q_dtype, q, at + i);
        for (uint32_t d = 0; d < c->head_dim_v; d++)
            out[d] += x * reference_get(c->q_dtype, r->weights[layer],
                                        first + (size_t)i * c->head_dim_v + d);
    }
    for (uint32_t d = c->head_dim_v; d < c->head_dim_k; d++)
        out[d] = reference_get(c->q_dtype, q, at + c->q_nope_dim + d - c->head_dim_v);
}

/* Attention of one query over keys [0, end), in plain sight. */
static double attend(const struct rig *r, const struct piece *p, const double *q, uint32_t end,
                     double *out)
{
    const struct backend_pool_config *c = &r->c;
    const uint8_t *k = r->k[p->seq][p->layer];
    double s[MAX_TOKENS], most = -INFINITY, sum = 0;
    for (uint32_t j = 0; j < end; j++) {
        s[j] = 0;
        for (uint32_t d = 0; d < c->head_dim_k; d++)
            s[j] += q[d] * reference_get(c->q_dtype, k, (size_t)j * c->head_dim_k + d);
        s[j] *= (double)r->layers[p->layer].scale;
        most = fmax(most, s[j]);
    }
    for (uint32_t d = 0; d < c->head_dim_v; d++)
        out[d] = 0;
    for (uint32_t j = 0; j < end; j++) {
        const double w = exp(s[j] - most);
        sum += w;
        for (uint32_t d = 0; d < c->head_dim_v; d++)
            out[d] += w * reference_get(c->q_dtype, k, (size_t)j * c->head_dim_k + d);
    }
    for (uint32_t d = 0; d < c->head_dim_v; d++)
        out[d] /= sum;
    return log(sum) + most;
}

static bool row_is_right(const struct rig *r, const struct piece *p, uint32_t token, uint32_t head)
{
    const struct backend_pool_config *c = &r->c;
    const size_t row = (size_t)token * c->num_q_heads + head;
    const uint32_t end = p->pos + (r->layers[p->layer].is_full ? p->n_tokens : token + 1);
    double q[BACKEND_MAX_LATENT_K], o[BACKEND_MAX_HEAD_DIM], error = 0, size = 0;
    absorb(r, p->layer, head, p->q, row * backend_q_dim(c), q);
    const double lse = attend(r, p, q, end, o);
    const size_t w = ((size_t)head * (c->q_nope_dim + c->out_dim) + c->q_nope_dim) * c->head_dim_v;
    for (uint32_t i = 0; i < c->out_dim; i++) {
        double want = 0;
        for (uint32_t d = 0; d < c->head_dim_v; d++)
            want += o[d] * reference_get(c->q_dtype, r->weights[p->layer],
                                         w + (size_t)i * c->head_dim_v + d);
        const double got = reference_get(c->q_dtype, p->out, row * c->out_dim + i);
        error += (got - want) * (got - want);
        size += want * want;
    }
    const double relative = sqrt(error / size), lse_off = fabs((double)p->lse[row] - lse);
    if (relative <= bound_of(c->q_dtype) && lse_off <= bound_of(c->q_dtype) * (1 + fabs(lse)))
        return true;
    fprintf(stderr,
            "sequence %u, layer %u, token %u of %u at %u, head %u: %g of the row is wrong, lse %g "
            "(%g)\n",
            p->seq, p->layer, token, p->n_tokens, p->pos, head, relative, (double)p->lse[row], lse);
    return false;
}

/* Some of the rows of long pieces, all of short ones. */
static void assert_right(const struct rig *r, const struct piece *p, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t t = 0; (p[i].flags & BACKEND_ATTEND) && t < p[i].n_tokens; t++)
            for (uint32_t h = 0; h < r->c.num_q_heads; h++)
                if (p[i].n_tokens * r->c.num_q_heads <= 32 || random_below(16) == 0 ||
                    (t == p[i].n_tokens - 1 && h == r->c.num_q_heads - 1))
                    assert_true(row_is_right(r, &p[i], t, h));
}

/* --- tests ------------------------------------------------------------------------------------ */

static const struct geometry geometries[] = {
    {4, 32, 8, 16, 24},      {1, 8, 8, 8, 8},   {5, 72, 64, 24, 40},
    {16, 512, 64, 128, 128}, {3, 40, 0, 8, 16}, {2, 264, 32, 136, 72},
};
static const attn_dtype dtypes[] = {ATTN_F32, ATTN_F16, ATTN_BF16};
enum {
    N_GEOMETRIES = sizeof geometries / sizeof geometries[0],
    BOTH = BACKEND_APPEND | BACKEND_ATTEND
};

static void heads_agree_with_the_chain_in_float64(void **state)
{
    (void)state;
    for (uint32_t g = 0; g < N_GEOMETRIES; g++)
        for (uint32_t d = 0; d < 3; d++) {
            struct rig r;
            rig_begin(&r, &geometries[g], dtypes[d], true);
            struct piece first[] = {piece_of(&r, 0, 0, 0, 33, BOTH), piece_of(&r, 1, 1, 0, 1, BOTH),
                                    piece_of(&r, 2, 0, 0, 70, BACKEND_APPEND),
                                    piece_of(&r, 3, 1, 0, 7, BOTH), piece_of(&r, 1, 0, 0, 2, BOTH)};
            assert_int_equal(submit(&r, first, 5), ATTN_OK);
            assert_right(&r, first, 5);
            struct piece next[] = {piece_of(&r, 0, 0, 33, 1, BOTH), piece_of(&r, 2, 0, 70, 5, BOTH),
                                   piece_of(&r, 3, 1, 6, 1, BACKEND_ATTEND)};
            assert_int_equal(submit(&r, next, 3), ATTN_OK);
            assert_right(&r, next, 3);
            pieces_free(&r, first, 5);
            pieces_free(&r, next, 3);
            rig_end(&r);
        }
}

/* Backends may read what their tables have in common once for all. */
static void sequences_that_begin_alike_have_heads(void **state)
{
    (void)state;
    for (uint32_t d = 0; d < 3; d++) {
        enum { COMMON = 3 * BLOCK_TOKENS };
        struct rig r;
        rig_begin(&r, &geometries[2], dtypes[d], true);
        const size_t row = r.c.head_dim_k * attn_dtype_bytes(dtypes[d]);
        for (uint32_t s = 1; s < N_SEQS; s++) {
            memcpy(r.tables[s], r.tables[0], COMMON / BLOCK_TOKENS * sizeof r.tables[0][0]);
            for (uint32_t l = 0; l < N_LAYERS; l++)
                memcpy(r.k[s][l], r.k[0][l], COMMON * row);
        }
        struct piece all = piece_of(&r, 0, 1, 0, COMMON, BOTH);
        assert_int_equal(submit(&r, &all, 1), ATTN_OK);
        assert_right(&r, &all, 1);
        struct piece p[] = {
            piece_of(&r, 0, 1, COMMON, 1, BOTH), piece_of(&r, 1, 1, COMMON, 4, BOTH),
            piece_of(&r, 2, 1, COMMON, 1, BOTH), piece_of(&r, 3, 1, COMMON, 2, BOTH)};
        assert_int_equal(submit(&r, p, 4), ATTN_OK);
        assert_right(&r, p, 4);
        pieces_free(&r, &all, 1);
        pieces_free(&r, p, 4);
        rig_end(&r);
    }
}

/* 32 MiB of projected queries are 120 tokens here, up to where the cpu backend cuts; others have
 * fewer tokens, which are more than a tile. */
static void long_items_are_cut_and_full_ones_are_not(void **state)
{
    const struct geometry g = {64, 512, 64, 8, 8};
    const uint32_t part = ops == backend_cpu() ? 1 : 4;
    (void)state;
    struct rig r;
    max_batch_tokens = 512 / part;
    rig_begin(&r, &g, ATTN_F32, true);
    max_batch_tokens = 256;
    r.ops->pool_close(r.pool);
    r.layers[1].is_full = true;
    assert_int_equal(r.ops->pool_open(r.b, &r.c, &r.pool), ATTN_OK);
    give_weights(&r, 0);
    give_weights(&r, 1);
    struct piece p[] = {piece_of(&r, 0, 0, 0, 50 / part, BOTH),
                        piece_of(&r, 1, 0, 0, 250 / part, BOTH),
                        piece_of(&r, 2, 1, 0, 130 / part, BOTH), piece_of(&r, 3, 0, 0, 1, BOTH)};
    assert_int_equal(submit(&r, p, 4), ATTN_OK);
    for (uint32_t i = 0; i < 4; i++)
        for (uint32_t n = 0; n < 8; n++)
            assert_true(row_is_right(
                &r, &p[i], n < 4 ? (p[i].n_tokens - 1) * n / 3 : random_below(p[i].n_tokens),
                random_below(g.heads)));
    pieces_free(&r, p, 4);
    rig_end(&r);
}

/* What a query of an item that is cut chooses is what it chooses alone. */
static void long_items_say_what_they_choose(void **state)
{
    enum { N = 250, N_CHOSEN = 4 };
    const struct geometry g = {64, 512, 64, 8, 8};
    struct backend_info info;
    struct rig r;
    (void)state;
    rig_begin(&r, &g, ATTN_F32, true);
    r.ops->info(r.b, &info);
    if (info.features & BACKEND_HAS_SUMMARIES) {
        r.ops->pool_close(r.pool);
        r.c.n_summaries = 1;
        assert_int_equal(r.ops->pool_open(r.b, &r.c, &r.pool), ATTN_OK);
        give_weights(&r, 0);
        uint32_t *said = (uint32_t *)(void *)rig_alloc(&r, 2 * N * N_CHOSEN * sizeof *said);
        struct piece all = piece_of(&r, 1, 0, 0, N, BOTH);
        all.n_chosen = N_CHOSEN;
        all.chosen = said;
        memset(said, POISON, 2 * N * N_CHOSEN * sizeof *said);
        assert_int_equal(submit(&r, &all, 1), ATTN_OK);
        for (uint32_t t = 3; t < N; t += 41) {
            struct piece one = all;
            const size_t q_row = r.c.num_q_heads * backend_q_dim(&r.c) * sizeof(float);
            one.pos = t;
            one.n_tokens = 1;
            one.flags = BACKEND_ATTEND;
            one.q += t * q_row;
            one.chosen = said + N * N_CHOSEN;
            assert_int_equal(submit(&r, &one, 1), ATTN_OK);
            assert_memory_equal(one.chosen, said + t * N_CHOSEN, N_CHOSEN * sizeof *said);
        }
        r.ops->host_free(r.b, said, 2 * N * N_CHOSEN * sizeof *said);
        pieces_free(&r, &all, 1);
    }
    rig_end(&r);
}

static void bytes_do_not_depend_on_what_else_is_in_the_batch(void **state)
{
    (void)state;
    for (uint32_t d = 0; d < 3; d++) {
        struct rig r;
        rig_begin(&r, &geometries[2], dtypes[d], true);
        r.ops->pool_close(r.pool);
        r.c.is_batch_invariant = true;
        assert_int_equal(r.ops->pool_open(r.b, &r.c, &r.pool), ATTN_OK);
        give_weights(&r, 0);
        give_weights(&r, 1);
        struct piece p[] = {piece_of(&r, 0, 0, 0, 1, BOTH), piece_of(&r, 1, 0, 0, 6, BOTH),
                            piece_of(&r, 2, 0, 0, 1, BOTH), piece_of(&r, 3, 1, 0, 3, BOTH),
                            piece_of(&r, 3, 0, 0, 2, BOTH)};
        uint8_t *together[5];
        assert_int_equal(submit(&r, p, 5), ATTN_OK);
        for (uint32_t i = 0; i < 5; i++) {
            together[i] = malloc(out_bytes(&r, &p[i]));
            memcpy(together[i], p[i].out, out_bytes(&r, &p[i]));
        }
        for (uint32_t i = 0; i < 5; i++) {
            assert_int_equal(submit(&r, &p[i], 1), ATTN_OK);
            assert_memory_equal(p[i].out, together[i], out_bytes(&r, &p[i]));
            free(together[i]);
        }
        pieces_free(&r, p, 5);
        rig_end(&r);
    }
}

/* Rows lie side by side where they are multiplied: none reads of another. */
static void a_row_of_nan_is_alone(void **state)
{
    (void)state;
    for (uint32_t d = 0; d < 3; d++) {
        struct rig r;
        rig_begin(&r, &geometries[4], dtypes[d], true); /* a latent of whole vectors and a half */
        struct piece p = piece_of(&r, 0, 0, 0, 5, BOTH);
        const size_t row = (size_t)r.c.num_q_heads * backend_q_dim(&r.c);
        for (size_t i = 0; i < row; i++)
            reference_put(dtypes[d], p.q, 3 * row + i, NAN);
        assert_int_equal(submit(&r, &p, 1), ATTN_OK);
        for (uint32_t t = 0; t < 5; t++)
            for (uint32_t h = 0; h < r.c.num_q_heads; h++)
                if (t == 3)
                    assert_true(isnan(p.lse[t * r.c.num_q_heads + h]));
                else
                    assert_true(row_is_right(&r, &p, t, h));
        pieces_free(&r, &p, 1);
        rig_end(&r);
    }
}

static void weights_are_taken_once_and_from_the_start(void **state)
{
    (void)state;
    struct rig r;
    rig_begin(&r, &geometries[0], ATTN_BF16, false);
    const uint64_t all = backend_weights_bytes(&r.c);
    uint8_t *other = random_array(ATTN_BF16, weights_elements(&r), 1), *w = r.weights[0];
    struct piece p = piece_of(&r, 0, 0, 0, 3, BOTH);
    struct piece append = piece_of(&r, 0, 0, 0, 3, BACKEND_APPEND);
    assert_int_equal(submit(&r, &p, 1), ATTN_EINVAL);
    assert_string_equal(r.ops->last_error(r.b), "item 0: weights of its layer is missing");
    assert_int_equal(submit(&r, &append, 1), ATTN_OK);
    assert_int_equal(r.ops->weights_read(r.pool, 0, 0, 0, NULL), ATTN_OK);
    assert_int_equal(r.ops->weights_write(r.pool, 0, 1, w + 1, 4), ATTN_EINVAL);
    assert_int_equal(r.ops->weights_write(r.pool, N_LAYERS, 0, w, 4), ATTN_EINVAL);
    assert_int_equal(r.ops->weights_write(r.pool, 0, 0, w, all + 1), ATTN_EINVAL);
    assert_int_equal(r.ops->weights_have(r.pool, 0), 0);
    assert_int_equal(r.ops->weights_write(r.pool, 0, 0, w, all - 2), ATTN_OK);
    assert_int_equal(submit(&r, &p, 1), ATTN_EINVAL);
    assert_int_equal(r.ops->weights_write(r.pool, 0, 8, other + 8, 16), ATTN_EEXIST);
    assert_string_equal(r.ops->last_error(r.b), "layer 0 has other weights in bytes 8 to 24");
    assert_int_equal(r.ops->weights_write(r.pool, 0, all, other, 1), ATTN_EINVAL);
    assert_int_equal(r.ops->weights_have(r.pool, 0), all - 2);
    assert_int_equal(r.ops->weights_write(r.pool, 0, all - 8, w + all - 8, 8), ATTN_OK);
    assert_int_equal(r.ops->weights_write(r.pool, 0, 0, w, 8), ATTN_OK); /* a late copy */
    uint8_t read[40];
    memset(read, POISON, sizeof read);
    assert_int_equal(r.ops->weights_read(r.pool, 0, 8, 32, read + 4), ATTN_OK);
    assert_memory_equal(read + 4, w + 8, 32);
    assert_int_equal(read[3], POISON);
    assert_int_equal(read[36], POISON);
    assert_int_equal(r.ops->weights_read(r.pool, 0, all - 8, 9, read), ATTN_EINVAL);
    assert_int_equal(r.ops->weights_read(r.pool, 1, 0, 1, read), ATTN_EINVAL);
    assert_int_equal(r.ops->weights_read(r.pool, N_LAYERS, 0, 1, read), ATTN_EINVAL);
    assert_int_equal(r.ops->weights_have(r.pool, 0), all);
    assert_int_equal(r.ops->weights_have(r.pool, 1), 0);
    assert_int_equal(submit(&r, &p, 1), ATTN_OK);
    assert_right(&r, &p, 1);
    pieces_free(&r, &p, 1);
    free(other);
    rig_end(&r);
}

/* Blocks that are written, and a pool that ends elsewhere, leave them; a successor finds them. */
static void weights_stay_where_they_are(void **state)
{
    (void)state;
    struct rig r;
    rig_begin(&r, &geometries[5], ATTN_F16, true);
    struct piece p = piece_of(&r, 1, 1, 0, 40, BOTH);
    assert_int_equal(submit(&r, &p, 1), ATTN_OK);
    assert_right(&r, &p, 1);
    const uint32_t most = r.ops->pool_room(r.pool);
    assert_int_equal(r.ops->pool_resize(r.pool, most + 1, r.c.max_row_blocks), ATTN_ENOMEM);
    assert_int_equal(r.ops->pool_resize(r.pool, most, r.c.max_row_blocks), ATTN_OK);
    assert_int_equal(r.ops->pool_resize(r.pool, N_BLOCKS, r.c.max_row_blocks), ATTN_OK);
    assert_int_equal(submit(&r, &p, 1), ATTN_OK);
    assert_right(&r, &p, 1);

    int fd;
    assert_int_equal(r.ops->export_memory(r.b, &fd), ATTN_OK);
    r.c.kv_place = r.ops->pool_place(r.pool);
    r.ops->close(r.b); /* as a process that is killed: without closing its pools */
    open_backend(&r, fd);
    close(fd);
    assert_int_equal(r.ops->pool_open(r.b, &r.c, &r.pool), ATTN_OK);
    assert_int_equal(r.ops->weights_have(r.pool, 0), backend_weights_bytes(&r.c));
    p.flags = BACKEND_ATTEND;
    assert_int_equal(submit(&r, &p, 1), ATTN_OK);
    assert_right(&r, &p, 1);

    r.ops->pool_close(r.pool); /* another pool does not find them */
    r.c.kv_place = 0;
    assert_int_equal(r.ops->pool_open(r.b, &r.c, &r.pool), ATTN_OK);
    assert_int_equal(r.ops->weights_have(r.pool, 0), 0);
    assert_int_equal(r.ops->weights_have(r.pool, 1), 0);
    pieces_free(&r, &p, 1);
    rig_end(&r);
}

static void geometries_without_sense_are_refused_by_name(void **state)
{
    static const struct {
        uint32_t nope, out;
        bool is_v_in_k;
        const char *why;
    } cases[] = {
        {16, 0, true, "out_dim is 0, must be 8 to 512"},
        {0, 16, true, "q_nope_dim is 0, must be 8 to 512"},
        {520, 16, true, "q_nope_dim is 520, must be 8 to 512"},
        {16, 20, true, "out_dim is 20, not a multiple of 8"},
        {16, 16, false, "q_nope_dim is 16 in a pool without is_v_in_k"},
    };
    (void)state;
    struct rig r = {0};
    open_backend(&r, -1);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const struct geometry g = {4, 32, 8, cases[i].nope, cases[i].out};
        struct backend_pool_config c = config_of(&r, &g, ATTN_BF16);
        c.is_v_in_k = cases[i].is_v_in_k;
        assert_int_equal(r.ops->pool_check(r.b, &c), ATTN_EINVAL);
        assert_string_equal(r.ops->last_error(r.b), cases[i].why);
    }
    r.ops->close(r.b);
}

/* What the largest batch takes lies beside the KV memory, and a device may lack it; pools that are
 * open go on. */
static void memory_that_a_device_lacks_is_refused_by_name(void **state)
{
    (void)state;
    if (ops == backend_cpu()) /* which takes a slice of a batch at a time */
        skip();
    struct rig r;
    max_batch_tokens = 1u << 17;
    rig_begin(&r, &geometries[1], ATTN_BF16, true);
    max_batch_tokens = 256;
    struct piece first = piece_of(&r, 0, 0, 0, 33, BOTH);
    assert_int_equal(submit(&r, &first, 1), ATTN_OK);
    assert_right(&r, &first, 1);

    const struct geometry wide = {1024, 512, 64, 8, 8};
    struct rig other = {.ops = ops};
    const struct backend_pool_config c = config_of(&other, &wide, ATTN_BF16);
    assert_int_equal(r.ops->pool_open(r.b, &c, &other.pool), ATTN_ENOMEM);
    const char *why = r.ops->last_error(r.b);
    if (strstr(why, "154618822656 bytes for batches of 131072 tokens (engine.max_batch_tokens)") ==
        NULL)
        fail_msg("%s", why);

    struct piece next[] = {piece_of(&r, 0, 0, 33, 1, BOTH), piece_of(&r, 1, 1, 0, 70, BOTH)};
    assert_int_equal(submit(&r, next, 2), ATTN_OK);
    assert_right(&r, next, 2);
    pieces_free(&r, &first, 1);
    pieces_free(&r, next, 2);
    rig_end(&r);
}

int main(int argc, char **argv) /* test_project [BACKEND [TESTS]]: those whose names match */
{
    char why[256];
    if (backend_load(argc > 1 ? argv[1] : "cpu", &ops, why, sizeof why) != ATTN_OK) {
        fprintf(stderr, "%s\n", why);
        return 1;
    }
    if (argc > 2)
        cmocka_set_test_filter(argv[2]);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(heads_agree_with_the_chain_in_float64),
        cmocka_unit_test(sequences_that_begin_alike_have_heads),
        cmocka_unit_test(long_items_are_cut_and_full_ones_are_not),
        cmocka_unit_test(long_items_say_what_they_choose),
        cmocka_unit_test(bytes_do_not_depend_on_what_else_is_in_the_batch),
        cmocka_unit_test(a_row_of_nan_is_alone),
        cmocka_unit_test(weights_are_taken_once_and_from_the_start),
        cmocka_unit_test(weights_stay_where_they_are),
        cmocka_unit_test(geometries_without_sense_are_refused_by_name),
        cmocka_unit_test(memory_that_a_device_lacks_is_refused_by_name),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
