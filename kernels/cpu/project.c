/* project.c: pools whose items carry heads: their queries are multiplied into the space of latents,
 * attend there, and what they get is multiplied back. Also where layers' weights are.
 *
 * A batch is cut into slices, so that what lies between is a bounded piece of memory. Where an item
 * is cut depends on the item alone: its bytes do not depend on what else is in the batch.
 */
#include "kernels/cpu/cpu.h"
#include "kernels/grow.h"
#include "kernels/weights.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#define SLICE_BYTES (32u << 20) /* of projected queries and outputs */
#define CHUNK_ROWS 64 /* rows of a head that a thread takes: a head's weights stay in its cache */
#define ALONE_PRODUCTS (1u << 18) /* up to so many the caller's thread is as fast */

/* --- weights ---------------------------------------------------------------------------------- */

static uint64_t *count_of(const struct backend_pool *p, uint32_t layer)
{
    return (uint64_t *)(void *)p->weights + layer;
}

static uint8_t *weights_of(const struct backend_pool *p, uint32_t layer)
{
    return p->weights + weights_at(&p->config, layer);
}

uint64_t cpu_weights_have(const struct backend_pool *p, uint32_t layer)
{
    return p->weights == NULL ? 0 : weights_counted(&p->config, *count_of(p, layer));
}

attn_status cpu_weights_write(struct backend_pool *p, uint32_t layer, uint64_t offset,
                              const void *bytes, uint64_t n)
{
    const uint64_t all = backend_weights_bytes(&p->config), have = cpu_weights_have(p, layer);
    if (p->weights == NULL || layer >= p->config.num_layers || offset > have || n > all - offset) {
        cpu_fail(p->b,
                 "weights of layer %" PRIu32 ": bytes %" PRIu64 " to %" PRIu64 ", %" PRIu64
                 " of %" PRIu64 " are there",
                 layer, offset, offset + n, have, all);
        return ATTN_EINVAL;
    }
    uint8_t *to = weights_of(p, layer) + offset;
    const uint64_t known = have - offset < n ? have - offset : n;
    if (memcmp(to, bytes, known) != 0) {
        cpu_fail(p->b, "layer %" PRIu32 " has other weights in bytes %" PRIu64 " to %" PRIu64,
                 layer, offset, offset + known);
        return ATTN_EEXIST;
    }
    memcpy(to + known, (const uint8_t *)bytes + known, n - known);
    if (offset + n > have) /* last: a process that is killed before has them not */
        __atomic_store_n(count_of(p, layer), offset + n, __ATOMIC_RELEASE);
    return ATTN_OK;
}

attn_status cpu_weights_read(struct backend_pool *p, uint32_t layer, uint64_t offset, uint64_t n,
                             void *out_bytes)
{
    const uint64_t have = layer < p->config.num_layers ? cpu_weights_have(p, layer) : 0;
    if (offset > have || n > have - offset) {
        cpu_fail(p->b,
                 "weights of layer %" PRIu32 ": bytes %" PRIu64 " to %" PRIu64 ", %" PRIu64
                 " are there",
                 layer, offset, offset + n, have);
        return ATTN_EINVAL;
    }
    if (n > 0) /* there may be none */
        memcpy(out_bytes, weights_of(p, layer) + offset, n);
    return ATTN_OK;
}

/* --- products --------------------------------------------------------------------------------- */

struct project_job {
    const struct backend_pool *p;
    const struct cpu_isa *isa;
    const struct projected *x;
    uint32_t n_tokens;
    bool is_behind; /* the attention: latents to heads */
    _Atomic uint32_t next;
};

/* Rows of one head and layer: tokens [first, first + n). */
static void project_few(const struct project_job *job, uint32_t head, uint32_t first, uint32_t n)
{
    const struct backend_pool_config *c = &job->p->config;
    const struct projected *x = job->x;
    const size_t el = attn_dtype_bytes(c->q_dtype), heads = c->num_q_heads;
    const size_t latent = c->head_dim_v, nope = c->q_nope_dim, rope = c->head_dim_k - latent;
    const uint8_t *w =
        weights_of(job->p, x->tokens[first].layer) + head * (nope + c->out_dim) * latent * el;
    struct project_rows rows = {.w = job->is_behind ? w + nope * latent * el : w,
                                .n = job->is_behind ? c->out_dim : c->q_nope_dim,
                                .latent = c->head_dim_v,
                                .n_rows = n};
    for (uint32_t i = 0; i < n; i++) {
        const struct project_token *t = &x->tokens[first + i];
        const size_t row = (first + i) * heads + head;
        if (job->is_behind) {
            rows.in[i] = x->o + row * latent * el;
            rows.out[i] = t->out + head * c->out_dim * el;
            continue;
        }
        rows.in[i] = t->q + head * (nope + rope) * el;
        rows.out[i] = x->q + row * c->head_dim_k * el;
        memcpy(rows.out[i] + latent * el, rows.in[i] + nope * el, rope * el);
    }
    (job->is_behind ? job->isa->expand : job->isa->absorb)(c->q_dtype, &rows);
}

static void project_parts(void *arg, uint32_t thread)
{
    struct project_job *job = arg;
    const struct project_token *tokens = job->x->tokens;
    const uint32_t n_chunks = (job->n_tokens + CHUNK_ROWS - 1) / CHUNK_ROWS;
    const uint32_t n_parts = n_chunks * job->p->config.num_q_heads;
    (void)thread;
    for (uint32_t part; (part = atomic_fetch_add(&job->next, 1)) < n_parts;) {
        const uint32_t first = part % n_chunks * CHUNK_ROWS;
        const uint32_t end =
            first + CHUNK_ROWS < job->n_tokens ? first + CHUNK_ROWS : job->n_tokens;
        for (uint32_t at = first, n; at < end; at += n) {
            for (n = 1; n < CPU_PROJECT_ROWS && at + n < end; n++)
                if (tokens[at + n].layer != tokens[at].layer)
                    break;
            project_few(job, part / n_chunks, at, n);
        }
    }
}

static void project(struct backend *b, const struct cpu_isa *isa, const struct backend_pool *p,
                    uint32_t n_tokens, bool is_behind)
{
    struct project_job job = {
        .p = p, .isa = isa, .x = &b->projected, .n_tokens = n_tokens, .is_behind = is_behind};
    const uint64_t products = backend_weights_bytes(&p->config) * n_tokens;
    atomic_init(&job.next, 0);
    if (products <= ALONE_PRODUCTS)
        project_parts(&job, 0);
    else
        cpu_threads_run(b->threads, project_parts, &job);
}

/* --- slices ----------------------------------------------------------------------------------- */

/* Tokens of a slice, and the most that an item is cut into pieces of. */
static uint32_t slice_tokens(const struct backend_pool_config *c)
{
    const uint64_t row =
        (uint64_t)c->num_q_heads * (c->head_dim_k + c->head_dim_v) * attn_dtype_bytes(c->q_dtype);
    return SLICE_BYTES / row > 0 ? (uint32_t)(SLICE_BYTES / row) : 1;
}

/* Whether its queries see as far as the last of them, or each other: such an item stays whole. */
static bool is_whole(const struct backend_pool *p, const struct backend_item *item)
{
    return item->nodes != NULL || layer_is_full(&p->layers[item->layer], item->flags);
}

/* Tokens of the item's piece from `first` on. */
static uint32_t piece_tokens(const struct backend_pool *p, const struct backend_item *item,
                             uint32_t first)
{
    const uint32_t most = slice_tokens(&p->config), left = item->n_tokens - first;
    return left > most && !is_whole(p, item) ? most : left;
}

static attn_status reserve_bytes(uint8_t **bytes, size_t *capacity, size_t n)
{
    if (n <= *capacity)
        return ATTN_OK;
    uint8_t *more = aligned_alloc(64, (n + 63) / 64 * 64);
    if (more == NULL)
        return ATTN_ENOMEM;
    free(*bytes);
    *bytes = more;
    *capacity = n;
    return ATTN_OK;
}

/* The piece becomes the slice's n_items-th item, its tokens those from n_tokens on. */
static attn_status add_piece(struct backend *b, const struct backend_pool *p,
                             const struct backend_item *item, uint32_t first, uint32_t n,
                             uint32_t n_items, uint32_t n_tokens)
{
    const struct backend_pool_config *c = &p->config;
    struct projected *x = &b->projected;
    const size_t el = attn_dtype_bytes(c->q_dtype);
    const size_t q_row = c->num_q_heads * backend_q_dim(c) * el;
    const size_t out_row = c->num_q_heads * backend_out_dim(c) * el;
    attn_status st = array_reserve(&x->items, &x->items_capacity, n_items + 1ull, sizeof *x->items);
    if (st == ATTN_OK)
        st = array_reserve(&x->tokens, &x->tokens_capacity, (uint64_t)n_tokens + n,
                           sizeof *x->tokens);
    if (st != ATTN_OK) {
        cpu_fail(b, "no memory for %" PRIu32 " items of a batch", n_items + 1);
        return st;
    }
    struct backend_item *piece = &x->items[n_items];
    *piece = *item;
    piece->flags &= ~(uint32_t)BACKEND_APPEND;
    piece->pos += first;
    piece->n_tokens = n;
    piece->lse = item->lse != NULL ? item->lse + (size_t)first * c->num_q_heads : NULL;
    if (item->lists.starts != NULL)
        piece->lists.starts += first;
    if (item->chosen != NULL)
        piece->chosen += (size_t)first * c->num_kv_heads * item->n_chosen;
    for (uint32_t t = 0; t < n; t++)
        x->tokens[n_tokens + t] =
            (struct project_token){.q = (const uint8_t *)item->q + (first + t) * q_row,
                                   .out = (uint8_t *)item->out + (first + t) * out_row,
                                   .layer = item->layer};
    return ATTN_OK;
}

/* The slice's items get their places in what is projected. */
static attn_status place_slice(struct backend *b, const struct backend_pool *p, uint32_t n_items,
                               uint32_t n_tokens)
{
    const struct backend_pool_config *c = &p->config;
    struct projected *x = &b->projected;
    const size_t heads = c->num_q_heads * attn_dtype_bytes(c->q_dtype);
    attn_status st = reserve_bytes(&x->q, &x->q_bytes, n_tokens * heads * c->head_dim_k);
    if (st == ATTN_OK)
        st = reserve_bytes(&x->o, &x->o_bytes, n_tokens * heads * c->head_dim_v);
    if (st != ATTN_OK)
        cpu_fail(b, "no memory for the projections of %" PRIu32 " tokens", n_tokens);
    for (uint32_t i = 0, row = 0; i < n_items && st == ATTN_OK; row += x->items[i++].n_tokens) {
        x->items[i].q = x->q + row * heads * c->head_dim_k;
        x->items[i].out = x->o + row * heads * c->head_dim_v;
    }
    return st;
}

static attn_status run_slice(struct backend *b, const struct cpu_isa *isa,
                             struct backend_batch *batch, uint32_t n_items, uint32_t n_tokens)
{
    struct backend_batch slice = {
        .pool = batch->pool, .items = b->projected.items, .n_items = n_items};
    attn_status st = place_slice(b, batch->pool, n_items, n_tokens);
    if (st != ATTN_OK)
        return st;
    slice.items = b->projected.items;
    project(b, isa, batch->pool, n_tokens, false);
    st = cpu_attend(b, isa, &slice, 0);
    if (st == ATTN_OK)
        project(b, isa, batch->pool, n_tokens, true);
    batch->kv_bytes += slice.kv_bytes;
    batch->kv_shared_bytes += slice.kv_shared_bytes;
    batch->n_splits += slice.n_splits;
    return st;
}

attn_status cpu_project_attend(struct backend *b, const struct cpu_isa *isa,
                               struct backend_batch *batch)
{
    const struct backend_pool *p = batch->pool;
    const uint32_t most = slice_tokens(&p->config);
    uint32_t n_items = 0, n_tokens = 0;
    attn_status st = ATTN_OK;
    batch->kv_bytes = batch->kv_shared_bytes = 0;
    batch->n_splits = 0;
    for (uint32_t i = 0; i < batch->n_items; i++) {
        const struct backend_item *item = &batch->items[i];
        if ((item->flags & BACKEND_ATTEND) == 0)
            continue;
        for (uint32_t first = 0, n; first < item->n_tokens && st == ATTN_OK; first += n) {
            n = piece_tokens(p, item, first);
            if (n_items > 0 && n_tokens + n > most) {
                st = run_slice(b, isa, batch, n_items, n_tokens);
                n_items = n_tokens = 0;
            }
            if (st == ATTN_OK)
                st = add_piece(b, p, item, first, n, n_items++, n_tokens);
            n_tokens += n;
        }
    }
    if (st == ATTN_OK && n_items > 0)
        st = run_slice(b, isa, batch, n_items, n_tokens);
    return st;
}

void cpu_projected_fini(struct projected *p)
{
    free(p->q);
    free(p->o);
    free(p->items);
    free(p->tokens);
}
