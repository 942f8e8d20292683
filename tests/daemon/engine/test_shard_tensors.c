/* test_shard_tensors.c: pools split over several devices: what each is told of a batch, and what
 * becomes of their outputs, over the product of geometries, dtypes and options, against the float64
 * reference; with layers that are dilated, with queries that choose blocks, and with heads that are
 * projected, too. And blocks in shards.
 *
 *     test_shard_tensors [NAME [EVERY [OFFSET [TESTS]]]]
 *
 * NAME is cpu (the default) or a module of the executor; the product is walked in steps of about
 * EVERY, of dilated layers twice that, from OFFSET on. Queries of which two blocks' bounds are too
 * close to say which is chosen are left out: few, which is asserted.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "daemon/cards/split/extremes.h"
#include "daemon/cards/split/tensors.h"
#include "kernels/kv_layout.h"
#include "kernels/load.h"
#include "kernels/reference.h"
#include "tests/kernels/cases.h"
#include "tests/random.h"

enum {
    MAX_CARDS = 4,
    N_SEQS = 2,
    MAX_TOKENS = 320,
    N_BLOCKS = 80,
    MAX_HEADS = 160,
    MAX_BATCH_ITEMS = 256,
    SLICE = 3, /* blocks that are joined at once */
    Q_NOPE_DIM = 24, /* of heads that are projected */
    OUT_DIM = 80,
    DEVICE_BYTES = 128 << 20,
};
#define TOO_CLOSE 1e-3 /* what f32 sums may be off, and more */

static const struct backend_ops *ops;
#ifndef EVERY
#define EVERY 31
#endif
static uint32_t every = EVERY, offset; /* no factor of the tables' sizes */
static struct backend *backends[1 + MAX_CARDS]; /* the last computes what one device would */
static uint64_t n_unseeing; /* rows of which a card has no key */
static uint64_t n_choices, n_left_out, n_joined;
static float sinks[MAX_HEADS], slopes[MAX_HEADS];
static uint64_t random_state = 11;

static double next_random(void)
{
    return (double)(random_mixed(&random_state) >> 11) * 0x1p-52 - 1;
}

/* --- memory that devices reach: the heap's, whose ends sanitizers watch; a GPU's are pieces of one
 * that all devices were told of, taken from its start by each step --- */

static bool is_on_gpu;
static uint8_t *device_base; /* NULL: devices reach all of the host's */
static size_t device_taken;

static void *memory_take(size_t bytes)
{
    bytes = (bytes + 63) / 64 * 64;
    if (device_base == NULL)
        return aligned_alloc(64, bytes);
    assert_true(bytes <= DEVICE_BYTES - device_taken);
    device_taken += bytes;
    return device_base + device_taken - bytes;
}

static void memory_give(const void *p)
{
    if (device_base == NULL)
        free((void *)(uintptr_t)p);
}

static void *filled(attn_dtype dtype, size_t n)
{
    void *p = memory_take(n * 4);
    assert_non_null(p);
    for (size_t i = 0; i < n; i++)
        reference_put(dtype, p, i, next_random());
    return p;
}

static int open_backends(void **state)
{
    (void)state;
    struct backend_config c = {.kv_bytes = 64 << 20,
                               .max_batch_items = MAX_BATCH_ITEMS,
                               .max_batch_tokens = 1024,
                               .n_threads = 1,
                               .import_fd = -1};
    const uint32_t n_devices = ops->n_devices != NULL ? ops->n_devices() : 1;
    for (uint32_t i = 0; i <= MAX_CARDS; i++) {
        c.device_index = n_devices > 0 ? (int32_t)(i % n_devices) : 0;
        if (ops->open(&c, &backends[i]) != ATTN_OK)
            return -1;
    }
    if (is_on_gpu &&
        ops->host_alloc(backends[0], DEVICE_BYTES, (void **)(void *)&device_base) != ATTN_OK)
        return -1;
    for (uint32_t i = 0; i < MAX_HEADS; i++) {
        sinks[i] = (float)next_random();
        slopes[i] = (float)next_random() / 8;
    }
    return 0;
}

static int close_backends(void **state)
{
    (void)state;
    if (device_base != NULL)
        ops->host_free(backends[0], device_base, DEVICE_BYTES);
    for (uint32_t i = 0; i <= MAX_CARDS; i++)
        ops->close(backends[i]);
    return 0;
}

/* --- a pool on one device and in shards ------------------------------------------------------- */

/* The branches of its layer. */
struct dilation {
    uint32_t n;
    struct attn_branch branches[ATTN_MAX_BRANCHES];
};

struct split_run {
    struct backend_pool_config config;
    struct attn_layer_spec layer;
    struct pool_split splits[MAX_CARDS];
    struct backend_pool *shards[MAX_CARDS], *whole;
    uint32_t n_cards, table[N_SEQS][N_BLOCKS], len[N_SEQS];
    struct backend_patch patches[N_BLOCKS]; /* all of table */
    uint32_t n_patches;
    float *rk[N_SEQS], *rv[N_SEQS]; /* what was appended, as the cache reads it */
    bool is_choosing; /* queries choose blocks, and have no lists */
    float *weights; /* [num_q_heads][q_nope_dim + out_dim][head_dim_v]; NULL: no projections */
    struct split_extremes extremes;
};

/* What a step is of: new tokens; queries of tokens that are there; or those are written once more,
 * with other keys. */
enum step_kind { MORE, AGAIN, ANEW };

/* The same weights to all pools, by which what is multiplied stays about as large. */
static void give_weights(struct split_run *r)
{
    const struct backend_pool_config *c = &r->config;
    const size_t dv = c->head_dim_v, head = (c->q_nope_dim + c->out_dim) * dv;
    const uint64_t bytes = backend_weights_bytes(c);
    void *given = malloc(bytes);
    r->weights = calloc(c->num_q_heads * head, sizeof *r->weights);
    for (size_t i = 0; i < c->num_q_heads * head; i++) {
        const double n = i % head < c->q_nope_dim * dv ? c->q_nope_dim : c->head_dim_v;
        reference_put(c->q_dtype, given, i, next_random() * sqrt(3 / n));
        r->weights[i] = (float)reference_get(c->q_dtype, given, i);
    }
    for (uint32_t i = 0; i < r->n_cards; i++)
        assert_int_equal(ops->weights_write(r->shards[i], 0, 0, given, bytes), ATTN_OK);
    assert_int_equal(ops->weights_write(r->whole, 0, 0, given, bytes), ATTN_OK);
    free(given);
}

static const float *weights_of(const struct split_run *r, size_t row)
{
    const struct backend_pool_config *c = &r->config;
    return r->weights + row % c->num_q_heads * (c->q_nope_dim + c->out_dim) * c->head_dim_v;
}

/* The item's q as it attends, to be freed. */
static void *attended_q(const struct split_run *r, const struct backend_item *d)
{
    const struct backend_pool_config *c = &r->config;
    const size_t n = (size_t)d->n_tokens * c->num_q_heads, dim = backend_q_dim(c);
    void *to = malloc(n * c->head_dim_k * attn_dtype_bytes(c->q_dtype));
    for (size_t row = 0; row < n; row++) {
        float q[BACKEND_MAX_LATENT_K], wide[BACKEND_MAX_LATENT_K];
        for (size_t i = 0; i < dim; i++)
            q[i] = (float)reference_get(c->q_dtype, d->q, row * dim + i);
        if (r->weights != NULL)
            reference_absorb(c, weights_of(r, row), q, wide);
        for (size_t i = 0; i < c->head_dim_k; i++)
            reference_put(c->q_dtype, to, row * c->head_dim_k + i,
                          (double)(r->weights != NULL ? wide : q)[i]);
    }
    return to;
}

/* What an output is of n rows that attention gives, from row `first` on; those are freed. */
static double *expanded(const struct split_run *r, double *rows, size_t first, size_t n)
{
    const struct backend_pool_config *c = &r->config;
    if (r->weights == NULL)
        return rows;
    double *out = calloc(n * c->out_dim, sizeof *out);
    for (size_t i = 0; i < n; i++)
        reference_expand(c, weights_of(r, first + i), rows + i * c->head_dim_v,
                         out + i * c->out_dim);
    free(rows);
    return out;
}

static attn_status run_begin(struct split_run *r, const struct case_geometry *g,
                             struct case_dtype d, const struct case_options *o,
                             const struct dilation *dilation, attn_split how, uint32_t n_cards,
                             bool has_heads)
{
    char why[256];
    *r = (struct split_run){.config = case_config(g, d, o), .layer = case_spec(g, o)};
    r->n_cards = n_cards;
    r->layer.n_branches = dilation->n;
    memcpy(r->layer.branches, dilation->branches, sizeof r->layer.branches);
    r->layer.sink_logits = o->has_sink_logits ? sinks : NULL;
    r->layer.alibi_slopes = o->has_alibi ? slopes : NULL;
    r->config.layers = &r->layer;
    r->config.num_layers = 1;
    r->config.q_nope_dim = has_heads ? Q_NOPE_DIM : 0;
    r->config.out_dim = has_heads ? OUT_DIM : 0;
    r->config.n_blocks = r->config.max_row_blocks = N_BLOCKS;
    r->config.n_table_rows = N_SEQS;
    for (uint32_t i = 0; i < n_cards; i++) {
        attn_status st =
            pool_split_init(&r->splits[i], &r->config, how, n_cards, i, why, sizeof why);
        if (st != ATTN_OK) {
            assert_int_equal(st, ATTN_ENOTSUP);
            assert_non_null(strstr(why, "split "));
            while (i-- > 0)
                pool_split_fini(&r->splits[i]);
            return st;
        }
    }
    attn_status st = ops->pool_open(backends[MAX_CARDS], &r->config, &r->whole);
    if (st == ATTN_ENOTSUP) { /* a geometry that this backend has not */
        for (uint32_t i = 0; i < n_cards; i++)
            pool_split_fini(&r->splits[i]);
        return st;
    }
    assert_int_equal(st, ATTN_OK);
    for (uint32_t i = 0; i < n_cards; i++)
        assert_int_equal(ops->pool_open(backends[i], &r->splits[i].config, &r->shards[i]), ATTN_OK);
    if (has_heads)
        give_weights(r);
    for (uint32_t s = 0; s < N_SEQS; s++) {
        for (uint32_t i = 0; i < N_BLOCKS / N_SEQS; i++) {
            r->table[s][i] = (i * 7 % (N_BLOCKS / N_SEQS)) * N_SEQS + s;
            r->patches[r->n_patches++] = (struct backend_patch){s, i, r->table[s][i]};
        }
        r->rk[s] = calloc((size_t)MAX_TOKENS * g->num_kv_heads * g->head_dim_k, sizeof(float));
        r->rv[s] = calloc((size_t)MAX_TOKENS * g->num_kv_heads * g->head_dim_v, sizeof(float));
    }
    return ATTN_OK;
}

static void run_end(struct split_run *r)
{
    for (uint32_t i = 0; i < r->n_cards; i++) {
        ops->pool_close(r->shards[i]);
        pool_split_fini(&r->splits[i]);
    }
    ops->pool_close(r->whole);
    extremes_forget_all(&r->extremes);
    free(r->weights);
    for (uint32_t s = 0; s < N_SEQS; s++) {
        free(r->rk[s]);
        free(r->rv[s]);
    }
}

static void compute(const struct split_run *r, struct backend *b, struct backend_pool *p,
                    const struct backend_item *items, uint32_t n, const struct backend_extremes *x)
{
    for (uint32_t first = 0; first < n || (first == 0 && x != NULL); first += MAX_BATCH_ITEMS) {
        uint32_t left = n - first;
        const bool has_extremes = x != NULL && (x->is_given ? first == 0 : left <= MAX_BATCH_ITEMS);
        struct backend_batch batch = {.pool = p,
                                      .items = items + first,
                                      .patches = r->patches,
                                      .n_patches = r->n_patches,
                                      .extremes = has_extremes ? x : NULL,
                                      .n_items = left < MAX_BATCH_ITEMS ? left : MAX_BATCH_ITEMS};
        if (ops->submit(b, &batch) != ATTN_OK)
            fail_msg("%s", ops->last_error(b));
        assert_ptr_equal(ops->poll(b, UINT64_MAX), &batch);
        assert_int_equal(batch.status, ATTN_OK);
    }
}

/* On the last card's device, behind nothing. */
static void merge(const struct split_run *r, const struct shard_tensors *t,
                  struct backend_merges *m)
{
    struct backend_batch batch = {.pool = r->whole, .merges = m};
    m->n = tokens_merges(t, (struct backend_merge *)(uintptr_t)m->list);
    m->stripe = r->splits[0].config.block_tokens;
    assert_int_equal(ops->submit(backends[MAX_CARDS], &batch), ATTN_OK);
    assert_ptr_equal(ops->poll(backends[MAX_CARDS], UINT64_MAX), &batch);
    assert_int_equal(batch.status, ATTN_OK);
}

static void count_unseeing(const struct shard_tensors *t)
{
    for (uint32_t i = 0; i < t->n_items; i++)
        for (uint32_t row = 0; row < t->items[i].n_tokens * t->config->num_q_heads; row++)
            if (t->items[i].flags & BACKEND_ATTEND)
                n_unseeing += t->items[i].lse[row] == -INFINITY;
}

/* What queries choose by is made on all cards behind their appends, joined, and given to all: slice
 * by slice, of which the last is in x, for the caller to give. */
static void join(struct split_run *r, const struct shard_tensors *shards,
                 const struct extremes_list *list, struct backend_extremes *x)
{
    void *bytes[MAX_CARDS];
    const size_t n_bytes = SLICE * extremes_bytes(&r->config);
    n_joined += list->n;
    for (uint32_t i = 0; i < r->n_cards; i++)
        bytes[i] = memory_take(n_bytes);
    for (uint32_t at = 0, n; at < list->n; at += n) {
        n = list->n - at < SLICE ? list->n - at : SLICE;
        for (uint32_t i = 0; i < r->n_cards; i++) {
            if (at > 0)
                compute(r, backends[i], r->shards[i], NULL, 0, &x[i]);
            memset(bytes[i], 0xff, n_bytes);
            x[i] = (struct backend_extremes){.list = list->list + at, .n = n, .bytes = bytes[i]};
            compute(r, backends[i], r->shards[i], shards[i].items,
                    at == 0 ? shards[i].n_appends : 0, &x[i]);
            x[i].is_given = true;
        }
        extremes_join(&r->config, bytes, r->n_cards, n);
    }
    extremes_note(&r->extremes, &r->config, list);
}

/* The batch, in shards: outputs where the items say. */
static void compute_split(struct split_run *r, const struct backend_item *items, uint32_t n)
{
    struct shard_tensors shards[MAX_CARDS] = {0};
    struct backend_merge list[N_SEQS];
    struct backend_merges merges = {.list = list, .n_parts = r->n_cards};
    struct extremes_list lacking = {0};
    struct backend_extremes x[MAX_CARDS] = {0};
    const struct backend_batch batch = {.items = items, .n_items = n};
    bool is_heads = r->splits[0].how == ATTN_SPLIT_HEADS;
    for (uint32_t i = 0; i < r->n_cards; i++) {
        struct shard_tensors *t = &shards[i];
        *t = (struct shard_tensors){
            .split = &r->splits[i], .config = &r->config, .whole = items, .n_whole = n};
        uint32_t n_items = is_heads ? n : tokens_items_max(t);
        uint64_t bytes = is_heads ? heads_staging_bytes(t) : tokens_staging_bytes(t);
        uint64_t output_bytes = is_heads ? 64 : tokens_output_bytes(t);
        t->items = calloc(n_items, sizeof *t->items);
        t->staging = memory_take(bytes + 64);
        memset(t->staging, 0xff, bytes); /* NaN */
        t->outputs = memory_take(output_bytes);
        memset(t->outputs, 0xff, output_bytes);
        merges.parts[i] = t->outputs;
        if (is_heads)
            heads_scatter(t);
        else
            tokens_scatter(t);
        assert_true(t->n_items <= n_items);
    }
    if (!is_heads)
        assert_int_equal(extremes_find(&r->extremes, &r->config, &batch, &lacking), ATTN_OK);
    if (lacking.n > 0)
        join(r, shards, &lacking, x);
    for (uint32_t i = 0; i < r->n_cards; i++) {
        struct shard_tensors *t = &shards[i];
        const uint32_t first = lacking.n > 0 ? t->n_appends : 0;
        compute(r, backends[i], r->shards[i], t->items + first, t->n_items - first,
                lacking.n > 0 ? &x[i] : NULL);
        if (is_heads)
            heads_gather(t);
        else
            count_unseeing(t);
    }
    if (!is_heads)
        merge(r, &shards[0], &merges);
    for (uint32_t i = 0; i < r->n_cards; i++) {
        free(shards[i].items);
        memory_give(shards[i].staging);
        memory_give(shards[i].outputs);
        memory_give(x[i].bytes);
    }
    free(lacking.list);
}

/* --- steps ------------------------------------------------------------------------------------ */

static void check_outputs(const struct split_run *r, const struct backend_item *d, const void *out,
                          const float *lse, const char *name)
{
    const struct backend_pool_config *c = &r->config;
    size_t n = (size_t)d->n_tokens * c->num_q_heads, n_out = n * backend_out_dim(c);
    double *want = calloc(n * c->head_dim_v, sizeof *want), *want_lse = calloc(n, sizeof *want_lse);
    /* over what the cache reads: the bound is that of the dtype alone */
    struct reference_bound bound = reference_bound_of(c->q_dtype, c->q_dtype);
    float *q = calloc((size_t)d->n_tokens * c->num_q_heads * c->head_dim_k, sizeof *q);
    for (size_t i = 0; i < (size_t)d->n_tokens * c->num_q_heads * c->head_dim_k; i++)
        q[i] = (float)reference_get(c->q_dtype, d->q, i);
    const struct reference_seen seen = {.starts = d->lists.starts, .tokens = d->lists.tokens};
    assert_int_equal(reference_attend_seen(c->layers, c->num_q_heads, c->num_kv_heads,
                                           c->head_dim_k, c->head_dim_v, ATTN_F32, q, d->n_tokens,
                                           d->pos, r->rk[d->table_row], r->rv[d->table_row],
                                           r->len[d->table_row], &seen, want, want_lse),
                     ATTN_OK);
    want = expanded(r, want, 0, n);
    for (size_t i = 0; i < n_out; i++) {
        double got = reference_get(c->q_dtype, out, i);
        if (!(fabs(got - want[i]) <= bound.atol + bound.rtol * fabs(want[i])))
            fail_msg("%s: out %zu of %u tokens at %u is %g, not %g", name, i, d->n_tokens, d->pos,
                     got, want[i]);
    }
    for (size_t i = 0; i < n; i++)
        if ((double)lse[i] != want_lse[i] && /* as of queries that visit nothing */
            !(fabs((double)lse[i] - want_lse[i]) <=
              bound.lse_atol + bound.lse_rtol * fabs(want_lse[i])))
            fail_msg("%s: lse %zu is %g, not %g", name, i, (double)lse[i], want_lse[i]);
    free(q);
    free(want);
    free(want_lse);
}

static void compare(const double *want, const void *got, attn_dtype dtype, size_t first, size_t n,
                    double atol, double rtol, const char *name)
{
    for (size_t i = 0; i < n; i++) {
        const double x = reference_get(dtype, got, first + i);
        if (x != want[i] && !(fabs(x - want[i]) <= atol + rtol * fabs(want[i])))
            fail_msg("%s: element %zu is %g, not %g", name, first + i, x, want[i]);
    }
}

/* One query that chooses, and one kv head; k and v are [token][dim] of it. */
static void check_choice(const struct split_run *r, const struct backend_item *d, uint32_t token,
                         uint32_t head, const float *k, const float *v, const char *name)
{
    const struct backend_pool_config *c = &r->config;
    const uint32_t group = c->num_q_heads / c->num_kv_heads, dk = c->head_dim_k;
    const uint32_t end = d->pos + (r->layer.is_full ? d->n_tokens : token + 1);
    const size_t row = (size_t)token * c->num_q_heads + (size_t)head * group;
    const struct reference_bound bound = reference_bound_of(c->q_dtype, c->q_dtype);
    struct attn_layer_spec layer = r->layer;
    uint32_t list[MAX_TOKENS];
    double margin;
    float *q = calloc((size_t)group * dk, sizeof *q);
    double *out = calloc((size_t)group * c->head_dim_v, sizeof *out), lse[MAX_HEADS];
    for (size_t i = 0; i < (size_t)group * dk; i++)
        q[i] = (float)reference_get(c->q_dtype, d->q, row * dk + i);
    const uint32_t n =
        reference_choose(d->n_chosen, c->block_tokens, group, dk, q, k, end, list, &margin, NULL);
    const uint32_t starts[] = {0, n};
    const struct reference_seen seen = {.starts = starts, .tokens = list};
    if (layer.sink_logits != NULL)
        layer.sink_logits += head * group;
    n_choices++;
    n_left_out += margin < TOO_CLOSE;
    if (margin >= TOO_CLOSE) {
        assert_int_equal(reference_attend_seen(&layer, group, 1, dk, c->head_dim_v, ATTN_F32, q, 1,
                                               end - 1, k, v, end, &seen, out, lse),
                         ATTN_OK);
        out = expanded(r, out, row, group);
        compare(out, d->out, c->q_dtype, row * backend_out_dim(c),
                (size_t)group * backend_out_dim(c), bound.atol, bound.rtol, name);
        compare(lse, d->lse, ATTN_F32, row, group, bound.lse_atol, bound.lse_rtol, name);
    }
    free(q);
    free(out);
}

static void check_choices(const struct split_run *r, const struct backend_item *d, const char *name)
{
    const struct backend_pool_config *c = &r->config;
    const uint32_t dk = c->head_dim_k, dv = c->head_dim_v, end = d->pos + d->n_tokens;
    float *k = calloc((size_t)end * dk, sizeof *k), *v = calloc((size_t)end * dv, sizeof *v);
    for (uint32_t h = 0; h < c->num_kv_heads; h++) {
        for (size_t j = 0; j < end; j++) {
            const size_t row = j * c->num_kv_heads + h;
            memcpy(k + j * dk, r->rk[d->table_row] + row * dk, dk * sizeof *k);
            memcpy(v + j * dv, r->rv[d->table_row] + row * dv, dv * sizeof *v);
        }
        for (uint32_t t = 0; t < d->n_tokens; t++)
            if (d->n_tokens < 8 || random_below(&random_state, 8) == 0) /* of long items some */
                check_choice(r, d, t, h, k, v, name);
    }
    free(k);
    free(v);
}

/* What the cache has of an appended row's heads. */
static void remember(float *to, const struct split_run *r, const void *rows, uint32_t n,
                     uint32_t dim)
{
    const struct backend_pool_config *c = &r->config;
    for (size_t i = 0; i < (size_t)n * c->num_kv_heads; i++)
        reference_cached_row(c->q_dtype, c->kv_dtype, rows, i * dim, dim, to + i * dim);
}

/* Lists of what an item's queries visit: some of what they see, or nothing. */
static struct backend_lists lists_of(const struct split_run *r, uint32_t pos, uint32_t n_tokens)
{
    const struct attn_layer_spec *l = &r->layer;
    uint32_t *starts = calloc(n_tokens + 1, sizeof *starts), n = 0;
    uint32_t *tokens = calloc((size_t)n_tokens * MAX_TOKENS, sizeof *tokens);
    for (uint32_t t = 0; t < n_tokens; t++) {
        const uint32_t p = pos + t, end = l->is_full ? pos + n_tokens : p + 1;
        const double chance = t % 5 == 4 ? -2 : next_random();
        starts[t] = n;
        for (uint32_t j = 0; j < end; j++)
            if (next_random() <= chance &&
                (l->window_tokens == 0 || j + l->window_tokens > p || j < l->sink_tokens))
                tokens[n++] = j;
    }
    starts[n_tokens] = n;
    return (struct backend_lists){.starts = starts, .tokens = tokens};
}

/* n_tokens of each sequence, of the second one some fewer. The second sequence's have lists, unless
 * its layer is dilated or they choose. */
static void step(struct split_run *r, uint32_t n_tokens, enum step_kind kind, const char *name)
{
    static const uint32_t numbers[] = {1, 2, 3, 4, 5, 8, 100};
    const struct backend_pool_config *c = &r->config;
    struct backend_item items[N_SEQS], alone[N_SEQS];
    size_t el = attn_dtype_bytes(c->q_dtype), out_bytes[N_SEQS], lse_bytes[N_SEQS];
    for (uint32_t s = 0; s < N_SEQS; s++) {
        uint32_t n = n_tokens > 3 * s ? n_tokens - 3 * s : 1;
        size_t q_heads = (size_t)n * c->num_q_heads, kv_heads = (size_t)n * c->num_kv_heads;
        out_bytes[s] = q_heads * backend_out_dim(c) * el;
        lse_bytes[s] = q_heads * sizeof(float);
        uint32_t more = kind == AGAIN ? 0 : n, back = r->len[s] - n;
        uint32_t pos = kind == MORE ? r->len[s] : (uint32_t)((next_random() + 1) / 2 * back);
        items[s] = (struct backend_item){
            .flags = BACKEND_ATTEND | (kind == AGAIN ? 0 : BACKEND_APPEND),
            .table_row = s,
            .pos = pos,
            .n_tokens = n,
            .block_table = r->table[s],
            .q = filled(c->q_dtype, q_heads * backend_q_dim(c)),
            .k = filled(c->q_dtype, kv_heads * c->head_dim_k),
            .v = c->is_v_in_k ? NULL : filled(c->q_dtype, kv_heads * c->head_dim_v),
            .out = filled(c->q_dtype, q_heads * backend_out_dim(c)),
            .lse = filled(ATTN_F32, q_heads)};
        if (r->is_choosing)
            items[s].n_chosen = numbers[random_below(&random_state, CASE_COUNT(numbers))];
        else if (s == 1 && r->layer.n_branches == 0)
            items[s].lists = lists_of(r, pos, n);
        alone[s] = items[s];
        alone[s].out = filled(c->q_dtype, q_heads * backend_out_dim(c));
        alone[s].lse = filled(ATTN_F32, q_heads);
        remember(r->rk[s] + (size_t)pos * c->num_kv_heads * c->head_dim_k, r, items[s].k, more,
                 c->head_dim_k);
        const size_t row0 = (size_t)pos * c->num_kv_heads;
        for (size_t i = row0; c->is_v_in_k && i < row0 + (size_t)more * c->num_kv_heads; i++)
            memcpy(r->rv[s] + i * c->head_dim_v, r->rk[s] + i * c->head_dim_k,
                   c->head_dim_v * sizeof(float));
        if (!c->is_v_in_k)
            remember(r->rv[s] + row0 * c->head_dim_v, r, items[s].v, more, c->head_dim_v);
        r->len[s] += kind == MORE ? more : 0;
        assert_true(r->len[s] <= MAX_TOKENS);
    }
    compute_split(r, items, N_SEQS);
    compute(r, backends[MAX_CARDS], r->whole, alone, N_SEQS, NULL);
    for (uint32_t s = 0; s < N_SEQS; s++) {
        struct backend_item attended = items[s];
        attended.q = attended_q(r, &items[s]);
        if (r->is_choosing)
            check_choices(r, &attended, name);
        else
            check_outputs(r, &attended, items[s].out, items[s].lse, name);
        free((void *)(uintptr_t)attended.q);
        if (c->is_batch_invariant && r->splits[0].how == ATTN_SPLIT_HEADS) {
            assert_memory_equal(items[s].out, alone[s].out, out_bytes[s]);
            assert_memory_equal(items[s].lse, alone[s].lse, lse_bytes[s]);
        }
        memory_give(items[s].q);
        memory_give(items[s].k);
        memory_give(items[s].v);
        free((void *)(uintptr_t)items[s].lists.starts);
        free((void *)(uintptr_t)items[s].lists.tokens);
        memory_give(items[s].out);
        memory_give(items[s].lse);
        memory_give(alone[s].out);
        memory_give(alone[s].lse);
    }
    device_taken = 0;
}

/* Every block put together from its shards is the one that a single device has, and comes apart. */
static void check_blocks(const struct split_run *r)
{
    size_t bytes = kv_layout_of(&r->config).block_bytes;
    uint8_t *whole = calloc(1, bytes), *together = calloc(1, bytes);
    for (uint32_t i = 0; i < N_BLOCKS; i += 3) {
        memset(together, 0, bytes);
        ops->block_read(r->whole, i, whole);
        for (uint32_t k = 0; k < r->n_cards; k++) {
            size_t part_bytes = kv_layout_of(&r->splits[k].config).block_bytes;
            uint8_t *shard = calloc(1, part_bytes), *again = malloc(part_bytes);
            memset(again, 0xa5, part_bytes);
            ops->block_read(r->shards[k], i, shard);
            pool_split_block_in(&r->splits[k], &r->config, shard, together);
            pool_split_block_out(&r->splits[k], &r->config, whole, again);
            assert_memory_equal(again, shard, part_bytes);
            free(shard);
            free(again);
        }
        assert_memory_equal(together, whole, bytes);
    }
    free(whole);
    free(together);
}

/* Chunks that fill a few blocks, and single tokens; queries anywhere, keys that change. Of short
 * chunks in the executor. */
static void run_choices(struct split_run *r, const char *name)
{
    static const uint32_t pieces[] = {90, 1, 37, 5, 60, 1, 1}, few[] = {9, 1, 40, 1, 33, 1, 1};
    const bool is_cpu = strcmp(ops->name, "cpu") == 0;
    for (size_t i = 0; i < CASE_COUNT(pieces); i++)
        step(r, is_cpu ? pieces[i] : few[i], MORE, name);
    for (uint32_t i = 0; i < (is_cpu ? 3 : 1); i++) {
        step(r, i == 0 && is_cpu ? 33 : 1, AGAIN, name);
        step(r, is_cpu ? 20 : 7, ANEW, name);
        step(r, 1, MORE, name);
    }
}

/* Of dilated layers as many tokens as a few segments have, in chunks, and queries anywhere. */
static void run_steps(struct split_run *r, const char *name)
{
    static const uint32_t pieces[] = {37, 1, 5, 1, 20, 1}, more[] = {120, 1, 33, 20, 1};
    bool is_dilated = r->layer.n_branches > 0, is_quick = r->config.num_q_heads <= 16;
    uint32_t n_most = N_BLOCKS / N_SEQS * r->config.block_tokens;
    const uint32_t *n = is_dilated && is_quick && n_most > 180 ? more : pieces;
    size_t n_pieces = n == more ? CASE_COUNT(more) : CASE_COUNT(pieces);
    for (size_t i = 0; i < n_pieces; i++)
        step(r, n[i], MORE, name);
    for (uint32_t i = 0; is_dilated && i < 3; i++)
        step(r, i == 0 ? 9 : 1, AGAIN, name);
}

/* Not the plain one: those of a table, or random ones. A rate that divides no stripe, rates larger
 * than stripes and blocks, segments that end within stripes, everything. */
static struct dilation dilation_of(uint32_t at)
{
    static const struct dilation table[] = {
        {3, {{64, 1}, {128, 2}, {256, 4}}},
        {3, {{10, 1}, {30, 3}, {100, 5}}},
        {5, {{16, 1}, {32, 2}, {64, 4}, {128, 8}, {256, 16}}},
        {4, {{24, 1}, {60, 6}, {96, 12}, {7, 7}}},
        {3, {{INT32_MAX, INT32_MAX}, {192, 64}, {INT32_MAX, 1}}},
    };
    struct dilation d = table[at % CASE_COUNT(table)];
    if (at / CASE_COUNT(table) % 2 == 0)
        return d;
    d.n = 1 + at % ATTN_MAX_BRANCHES;
    for (uint32_t i = 0; i < d.n; i++) {
        uint32_t rate = i == at % d.n ? 1 : 1 + (uint32_t)((next_random() + 1) * 20);
        d.branches[i].rate = rate;
        d.branches[i].segment_tokens =
            rate * (1 + (uint32_t)((next_random() + 1) / 2 * (1 + 200.0 / rate)));
    }
    return d;
}

/* May its queries choose blocks? */
static bool can_choose(const struct case_options *o)
{
    return o->window_tokens == 0 && !o->has_alibi;
}

static bool run(uint32_t at, attn_split how, uint32_t n_cards, struct dilation dilation,
                bool is_choosing, bool has_heads)
{
    const struct case_geometry *g = &case_geometries[at % CASE_N_PRODUCT];
    at /= CASE_N_PRODUCT;
    struct case_dtype d = case_dtypes[at % CASE_COUNT(case_dtypes)];
    struct case_options rounded = case_options[at / CASE_COUNT(case_dtypes)], *o = &rounded;
    struct split_run r;
    if (how == ATTN_SPLIT_TOKENS) /* windows are whole blocks */
        o->window_tokens =
            (o->window_tokens + g->block_tokens - 1) / g->block_tokens * g->block_tokens;
    char name[256];
    snprintf(name, sizeof name, "%s over %u: %s%s, %s in %s, %s, %u branches, the last %u, %u",
             attn_split_name(how), n_cards, g->name, has_heads ? " to heads" : "",
             attn_dtype_name(d.q), attn_dtype_name(d.kv), o->name, dilation.n,
             dilation.n ? dilation.branches[dilation.n - 1].segment_tokens : 0,
             dilation.n ? dilation.branches[dilation.n - 1].rate : 0);
    if ((dilation.n > 0 && o->window_tokens > 0) || !case_fits(g, d) ||
        (is_choosing && !can_choose(o)) ||
        run_begin(&r, g, d, o, &dilation, how, n_cards, has_heads) != ATTN_OK)
        return false;
    r.is_choosing = is_choosing;
    if (is_choosing)
        run_choices(&r, name);
    else
        run_steps(&r, name);
    check_blocks(&r);
    run_end(&r);
    return true;
}

static uint32_t over_the_product(attn_split how, bool is_dilated, const uint32_t *n_cards,
                                 uint32_t n)
{
    const struct dilation none = {0};
    const uint32_t n_all = CASE_N_PRODUCT * CASE_COUNT(case_dtypes) * CASE_COUNT(case_options);
    uint32_t n_run = 0;
    const uint32_t apart = is_dilated ? 2 * every + 5 : every + 1;
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t at = offset + i, k = offset; at < n_all; at += apart + i, k++)
            n_run += run(at, how, n_cards[i], is_dilated ? dilation_of(k) : none, false, false);
    print_message("%u of the product\n", n_run);
    assert_true(n_run >= n_all / apart / 4);
    return n_run;
}

static void heads_compute_what_one_device_does(void **state)
{
    (void)state;
    over_the_product(ATTN_SPLIT_HEADS, false, (const uint32_t[]){2, 3, 4}, 3);
}

/* By the number of a head among all, whichever card has it. */
static void every_option_of_dilated_layers_by_heads(void **state)
{
    (void)state;
    over_the_product(ATTN_SPLIT_HEADS, true, (const uint32_t[]){2, 3, 4}, 3);
}

static void tokens_compute_what_one_device_does(void **state)
{
    (void)state;
    over_the_product(ATTN_SPLIT_TOKENS, false, (const uint32_t[]){2, 4}, 2);
}

static void every_option_of_dilated_layers_by_tokens(void **state)
{
    (void)state;
    n_unseeing = 0;
    uint32_t n_run = over_the_product(ATTN_SPLIT_TOKENS, true, (const uint32_t[]){2, 4}, 2);
    print_message("%llu rows of which a card has no key\n", (unsigned long long)n_unseeing);
    assert_true(n_run == 0 || n_unseeing > 0);
}

/* By heads each card has all keys of its heads; by tokens all choose by what they have together. */
static void choices_are_those_of_one_device(void **state)
{
    (void)state;
    static const uint32_t n_cards[] = {2, 4, 3};
    const uint32_t n_all = CASE_N_PRODUCT * CASE_COUNT(case_dtypes) * CASE_COUNT(case_options);
    uint32_t n_run = 0;
    struct backend_info info;
    ops->info(backends[0], &info);
    if (!(info.features & BACKEND_HAS_EXTREMES))
        skip();
    n_choices = n_left_out = n_joined = 0;
    for (uint32_t i = 0; i < CASE_COUNT(n_cards); i++)
        for (uint32_t at = offset + i; at < n_all; at += every + 1 + i)
            n_run += run(at, n_cards[i] == 3 ? ATTN_SPLIT_HEADS : ATTN_SPLIT_TOKENS, n_cards[i],
                         (struct dilation){0}, true, false);
    print_message("%u of the product, %llu choices, %llu left out, %llu blocks joined\n", n_run,
                  (unsigned long long)n_choices, (unsigned long long)n_left_out,
                  (unsigned long long)n_joined);
    assert_true(n_run > 0 && n_joined > 0 && n_left_out <= n_choices / 20);
}

/* Of pools where V is in K; each card projects what it has. */
static void projected_heads_are_merged_as_heads(void **state)
{
    (void)state;
    enum { N_GEOMETRIES = CASE_N_PRODUCT - CASE_LATENT };
    const uint32_t n_all = N_GEOMETRIES * CASE_COUNT(case_dtypes) * CASE_COUNT(case_options);
    uint32_t n_run = 0;
    n_choices = n_left_out = n_joined = 0;
    for (uint32_t i = 0; i < 4; i++)
        for (uint32_t at = offset + i; at < n_all; at += every + N_GEOMETRIES * i)
            n_run += run(at / N_GEOMETRIES * CASE_N_PRODUCT + CASE_LATENT + at % N_GEOMETRIES,
                         ATTN_SPLIT_TOKENS, i % 2 ? 4 : 2, (struct dilation){0}, i >= 2, true);
    print_message("%u of the product, %llu choices\n", n_run, (unsigned long long)n_choices);
    assert_true(n_run > 0 && n_left_out <= n_choices / 20);
}

static attn_status try_item(struct backend_pool *p, struct backend_item item)
{
    struct backend_batch batch = {.pool = p, .items = &item, .n_items = 1};
    attn_status st = ops->submit(backends[0], &batch);
    if (st == ATTN_OK)
        assert_ptr_equal(ops->poll(backends[0], UINT64_MAX), &batch);
    return st;
}

/* Positions of a dilated layer's queries are the sequence's, those of its appends the card's. */
static void items_of_stripes_are_refused_by_what_is_wrong(void **state)
{
    (void)state;
    const struct case_geometry *g = &case_geometries[CASE_HEAD_EACH];
    const struct dilation d = {2, {{64, 1}, {128, 2}}};
    struct split_run r;
    assert_int_equal(run_begin(&r, g, case_dtypes[CASE_F32], &case_options[CASE_PLAIN], &d,
                               ATTN_SPLIT_TOKENS, 2, false),
                     ATTN_OK);
    const size_t n = (size_t)g->num_q_heads * g->head_dim_k;
    uint32_t end = r.config.max_row_blocks * g->block_tokens;
    void *x = filled(ATTN_F32, n), *out = filled(ATTN_F32, n);
    struct backend_item item = {
        .flags = BACKEND_ATTEND, .n_tokens = 1, .pos = end - 1, .q = x, .k = x, .v = x, .out = out};
    uint32_t all_blocks[N_BLOCKS] = {0};
    item.block_table = all_blocks;
    assert_int_equal(try_item(r.shards[0], item), ATTN_OK);
    item.pos = end;
    assert_int_equal(try_item(r.shards[0], item), ATTN_EINVAL);
    item.flags = BACKEND_APPEND;
    item.pos = end / 2 - 1;
    assert_int_equal(try_item(r.shards[0], item), ATTN_OK);
    item.pos = end / 2;
    assert_int_equal(try_item(r.shards[0], item), ATTN_EINVAL);
    item.pos = 0;
    item.flags = BACKEND_APPEND | BACKEND_ATTEND;
    assert_int_equal(try_item(r.shards[0], item), ATTN_EINVAL);
    assert_non_null(strstr(ops->last_error(backends[0]),
                           "item 0: appends and attends, in a dilated layer of a pool of stripes"));
    memory_give(x);
    memory_give(out);
    device_taken = 0;
    run_end(&r);
}

int main(int argc, char **argv)
{
    char why[256];
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(heads_compute_what_one_device_does),
        cmocka_unit_test(every_option_of_dilated_layers_by_heads),
        cmocka_unit_test(tokens_compute_what_one_device_does),
        cmocka_unit_test(every_option_of_dilated_layers_by_tokens),
        cmocka_unit_test(choices_are_those_of_one_device),
        cmocka_unit_test(projected_heads_are_merged_as_heads),
        cmocka_unit_test(items_of_stripes_are_refused_by_what_is_wrong),
    };
    if (argc > 2)
        every = (uint32_t)strtoul(argv[2], NULL, 10);
    if (argc > 3)
        offset = (uint32_t)strtoul(argv[3], NULL, 10);
    if (argc > 4)
        cmocka_set_test_filter(argv[4]);
    if (every == 0 || backend_load(argc > 1 ? argv[1] : "cpu", &ops, why, sizeof why) != ATTN_OK) {
        fprintf(stderr, "%s\n", every == 0 ? "EVERY must be 1 or more" : why);
        return 2;
    }
    is_on_gpu = argc > 1 && (strcmp(argv[1], "cuda") == 0 || strcmp(argv[1], "hip") == 0);
    return cmocka_run_group_tests(tests, open_backends, close_backends);
}
