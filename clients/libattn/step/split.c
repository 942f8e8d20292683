/* split.c: a step too large for one message, or for the daemon's limit of tokens per step, as
 * several steps, its pieces.
 *
 * Pieces are sent one after another. Each is a range of the step's rows: whole items and parts of
 * one, in the order of positions, so that an item's first tokens are cached when its later ones
 * attend. The caller sees one request, the parent, which has a slot but is never sent. The thread
 * that completes a piece starts the next one. An item that failed is left out of later pieces.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "clients/libattn/core/core.h"
#include "clients/libattn/pool/pool.h"
#include "clients/libattn/step/split.h"

/* Arrays of a step in place that is cut. The client keeps the latest for its next: pages that are
 * new take longer than filling them. */
struct split_memory {
    size_t bytes;
    _Alignas(WIRE_ALIGN) uint8_t at[];
};

struct split {
    struct client_request *parent;
    struct attn_pool *pool; /* not touched once the client is being closed */
    step_start_piece_fn *start_piece;
    struct attn_step step; /* in arrays, also if the caller's is in place */
    const struct attn_in_place *in_place; /* the caller's, or NULL */
    struct split_memory *memory; /* of those arrays, then */
    size_t q_row, kv_row_k, kv_row_v, out_row; /* bytes per token */
    attn_dtype dtype;
    uint32_t n_heads; /* of queries */
    uint32_t max_tokens; /* of a piece */
    bool is_whole; /* an item may not be cut */

    uint32_t item, token; /* where the next piece begins */
    uint64_t row;
    uint32_t piece_first; /* item that the piece in flight begins with */
    uint64_t piece_rows;
    struct attn_item *piece_items; /* [n_items] */
    int32_t *piece_status, *item_status; /* [n_items] */
};

static void split_free(struct split *s)
{
    if (s == NULL)
        return;
    if (s->memory != NULL)
        free(atomic_exchange(&s->parent->client->spare, s->memory));
    free(s->piece_items);
    free(s->piece_status);
    free(s->item_status);
    free(s);
}

/* ---- the end ---- */

static void put_nan(attn_dtype dtype, void *dst, size_t n)
{
    const float nan = __builtin_nanf("");
    for (size_t i = 0; i < n; i++) {
        if (dtype == ATTN_F32)
            ((float *)dst)[i] = nan;
        else
            ((uint16_t *)dst)[i] = dtype == ATTN_BF16 ? 0x7fc0 : 0x7e00;
    }
}

/* Earlier pieces of an item that failed later have written outputs. */
static void forget_failed_rows(struct split *s)
{
    size_t e = attn_dtype_bytes(s->dtype);
    uint64_t row = 0;
    for (uint32_t i = 0; i < s->step.n_items; i++) {
        uint32_t n = s->step.items[i].n_tokens;
        if (s->item_status[i] != ATTN_OK && s->step.out != NULL)
            put_nan(s->dtype, (uint8_t *)s->step.out + row * s->out_row, n * (s->out_row / e));
        if (s->item_status[i] != ATTN_OK && s->step.lse != NULL)
            put_nan(ATTN_F32, s->step.lse + row * s->n_heads, (size_t)n * s->n_heads);
        row += n;
    }
}

static void split_end(struct split *s)
{
    struct client_request *parent = s->parent;
    struct attn_result *r = &parent->result;
    r->n_failed = 0;
    for (uint32_t i = 0; i < s->step.n_items; i++) {
        r->n_failed += s->item_status[i] != ATTN_OK;
        if (s->step.item_status != NULL)
            s->step.item_status[i] = s->item_status[i];
    }
    parent->has_item_status = true;
    if (r->n_failed > 0)
        forget_failed_rows(s);
    if (s->in_place != NULL && s->in_place->is_attend && r->n_failed < s->step.n_items)
        s->in_place->take(s->in_place->user, s->step.out, s->step.lse, r->n_failed);
    split_free(s);
    client_request_finish(parent);
}

/* ---- pieces ---- */

/* Fails what a piece was about and, if it is an end for all, what comes after it. */
static void fail_piece(struct split *s, const struct attn_result *r, attn_gone gone)
{
    struct attn_result *all = &s->parent->result;
    bool is_end = r->status == ATTN_ECONN || r->status == ATTN_ETIMEDOUT;
    if (all->status == ATTN_OK) {
        all->status = r->status;
        all->retry_after_us = r->retry_after_us;
        memcpy(all->message, r->message, sizeof all->message);
        s->parent->gone = gone;
    }
    for (uint32_t i = s->piece_first; i < s->step.n_items; i++) {
        bool is_piece = i < s->item || (i == s->item && s->token > 0);
        int32_t st = is_piece ? s->piece_status[i - s->piece_first] : (int32_t)r->status;
        if ((is_piece || is_end) && s->item_status[i] == ATTN_OK)
            s->item_status[i] = st;
    }
}

/* Moves to the next item that is to be sent. False: there is none. */
static bool skip_failed(struct split *s)
{
    while (s->item < s->step.n_items && s->item_status[s->item] != ATTN_OK) {
        s->row += s->step.items[s->item].n_tokens - s->token;
        s->item++;
        s->token = 0;
    }
    return s->item < s->step.n_items;
}

/* The next piece, from the item and token where the split is; moves that on. */
static struct attn_step next_piece(struct split *s)
{
    const struct attn_step *all = &s->step;
    struct attn_step p = {.struct_size = sizeof p,
                          .layer = all->layer,
                          .array_dtype = all->array_dtype,
                          .items = s->piece_items,
                          .item_status = s->piece_status,
                          .timeout_us = 1};
    uint32_t n = 0;
    s->piece_first = s->item;
    for (uint32_t left = s->max_tokens; left > 0 && s->item < all->n_items;) {
        const struct attn_item *it = &all->items[s->item];
        uint32_t rest = it->n_tokens - s->token, take = rest < left ? rest : left;
        if (s->item_status[s->item] != ATTN_OK || (s->is_whole && take < rest))
            break;
        s->piece_items[p.n_items++] =
            (struct attn_item){.seq = it->seq, .pos = it->pos + s->token, .n_tokens = take};
        n += take;
        left -= take;
        s->token = take < rest ? s->token + take : 0;
        s->item += take == rest;
    }
    if (all->q != NULL) {
        p.q = (const uint8_t *)all->q + s->row * s->q_row;
        p.out = (uint8_t *)all->out + s->row * s->out_row;
    }
    if (all->k != NULL) {
        p.k = (const uint8_t *)all->k + s->row * s->kv_row_k;
        p.v = all->v != NULL ? (const uint8_t *)all->v + s->row * s->kv_row_v : NULL;
    }
    if (all->lse != NULL)
        p.lse = all->lse + s->row * s->n_heads;
    if (all->parents != NULL)
        p.parents = all->parents + s->row;
    p.is_full = all->is_full;
    p.choose_blocks = all->choose_blocks;
    p.parts = all->parts != NULL ? all->parts + s->piece_first : NULL;
    if (all->indices != NULL) {
        p.indices = all->indices + (size_t)s->row * all->n_indices;
        p.n_indices = all->n_indices;
        p.index_tokens = all->index_tokens;
    }
    s->row += n;
    return p;
}

static void on_piece(void *user, attn_ticket ticket, const struct attn_result *r)
{
    struct split *s = user;
    struct attn_result *all = &s->parent->result;
    (void)ticket;
    all->n_sends = r->n_sends > all->n_sends ? r->n_sends : all->n_sends;
    all->queue_ns += r->queue_ns;
    all->device_ns += r->device_ns;
    if (r->status != ATTN_OK)
        fail_piece(s, r, attn_last_error_gone());
    while (skip_failed(s)) {
        struct attn_step p = next_piece(s);
        attn_status st = s->start_piece(s->pool, &p, s->parent, on_piece, s);
        if (st == ATTN_OK)
            return;
        struct attn_result failed = {.status = st};
        snprintf(failed.message, sizeof failed.message, "%s", attn_last_error()->message);
        for (uint32_t i = 0; i < p.n_items; i++)
            s->piece_status[i] = st;
        fail_piece(s, &failed, attn_last_error_gone());
    }
    split_end(s);
}

/* ---- the start ---- */

/* NULL: there is none. */
static struct split_memory *get_memory(struct attn_client *c, size_t bytes)
{
    struct split_memory *m = atomic_exchange(&c->spare, NULL);
    if (m != NULL && m->bytes >= bytes)
        return m;
    free(m);
    m = aligned_alloc(WIRE_ALIGN, sizeof *m + bytes);
    if (m != NULL)
        m->bytes = bytes;
    return m;
}

/* Arrays for a step in place, with q, k and v in them. */
static bool fill_arrays(struct split *s, const struct attn_in_place *ip, uint64_t n_tokens)
{
    size_t lse_bytes = ip->has_lse ? sizeof(float) * s->n_heads : 0;
    size_t rows[5] = {ip->is_attend ? s->q_row : 0, ip->is_append ? s->kv_row_k : 0,
                      ip->is_append ? s->kv_row_v : 0, ip->is_attend ? s->out_row : 0, lse_bytes};
    uint8_t *at[5];
    size_t bytes = 0;
    for (int i = 0; i < 5; i++)
        bytes += (rows[i] * n_tokens + WIRE_ALIGN - 1) & ~(size_t)(WIRE_ALIGN - 1);
    s->memory = get_memory(s->parent->client, bytes);
    if (s->memory == NULL)
        return false;
    uint8_t *next = s->memory->at;
    for (int i = 0; i < 5; i++) {
        at[i] = rows[i] != 0 ? next : NULL;
        next += (rows[i] * n_tokens + WIRE_ALIGN - 1) & ~(size_t)(WIRE_ALIGN - 1);
    }
    s->step.q = at[0];
    s->step.k = at[1];
    s->step.v = at[2];
    s->step.out = at[3];
    s->step.lse = (float *)(void *)at[4];
    s->step.in_place = NULL;
    ip->fill(ip->user, at[0], at[1], at[2]);
    return true;
}

attn_status split_start(struct client_request *parent, uint32_t max_tokens, bool is_whole,
                        step_start_piece_fn *start_piece)
{
    const struct attn_step *step = &parent->step;
    const struct attn_pool_spec *spec = &parent->pool->spec;
    const struct wire_shape shape = pool_shape(parent->pool);
    attn_dtype dtype = step->array_dtype != ATTN_DTYPE_NONE ? step->array_dtype : spec->q_dtype;
    size_t e = attn_dtype_bytes(dtype);
    struct split *s = calloc(1, sizeof *s);
    if (s == NULL)
        return error_set(ATTN_ENOMEM, "no memory to cut a step");
    s->parent = parent;
    s->pool = (struct attn_pool *)parent->pool;
    s->step = *step;
    s->in_place = step->in_place;
    s->dtype = dtype;
    s->n_heads = spec->num_q_heads;
    s->max_tokens = max_tokens;
    s->is_whole = is_whole;
    s->start_piece = start_piece;
    s->q_row = (size_t)spec->num_q_heads * wire_q_dim(&shape) * e;
    s->out_row = (size_t)spec->num_q_heads * wire_out_dim(&shape) * e;
    s->kv_row_k = (size_t)spec->num_kv_heads * spec->head_dim_k * e;
    s->kv_row_v = spec->is_v_in_k ? 0 : (size_t)spec->num_kv_heads * spec->head_dim_v * e;
    s->piece_items = calloc(step->n_items, sizeof *s->piece_items);
    s->piece_status = calloc(step->n_items, sizeof *s->piece_status);
    s->item_status = calloc(step->n_items, sizeof *s->item_status);
    if (s->piece_items == NULL || s->piece_status == NULL || s->item_status == NULL ||
        (s->in_place != NULL && !fill_arrays(s, s->in_place, parent->layout.n_tokens))) {
        split_free(s);
        return error_set(ATTN_ENOMEM, "no memory to cut a step");
    }
    struct attn_step p = next_piece(s);
    attn_status st = s->start_piece(s->pool, &p, parent, on_piece, s);
    if (st != ATTN_OK)
        split_free(s);
    return st;
}
