/* cut.c: a plan whose layers are larger than the lane's regions, or than the daemon's tokens
 * of one step: each layer goes in pieces, one behind the other on its stream.
 *
 * A piece has items of its own and so a plan of its own, which attn_lane_enqueue sends as it comes
 * to it; attn_lane_plan has sent the first one, so that errors of the plan appear there. The daemon
 * keeps four plans that are not finished: the caller is at most so many pieces ahead of its GPU.
 */
#include <stdlib.h>
#include <string.h>

#include "clients/libattn/core/core.h"
#include "clients/libattn/lane/lane.h"
#include "clients/libattn/pool/pool.h"
#include "clients/libattn/step/step.h"

struct lane_cut {
    attn_pool *pool;
    struct attn_plan plan; /* of all of it; items and layers lie in memory */
    uint32_t n_tokens, max_tokens; /* of a layer, of a piece */
    uint32_t n_begun; /* layers */
    bool is_notified; /* the first piece of the first layer */
    bool has_failed; /* the layers that follow do nothing */
    struct error_kept failed;
    struct attn_item *piece; /* [n_items] */
    uint64_t memory[];
};

void lane_cut_end(struct attn_lane *l)
{
    free(l->cut);
    l->cut = NULL;
}

/* ---- sizes ---- */

/* Tokens that fit both regions and one step. */
static uint64_t most_tokens(const struct attn_lane *l, const attn_pool *p,
                            const struct attn_plan *a, uint32_t max_step_tokens)
{
    const struct attn_pool_spec *spec = &p->spec;
    const struct wire_shape shape = pool_shape(p);
    const uint64_t e = attn_dtype_bytes(spec->q_dtype);
    uint64_t in = 0, out = 0, most = max_step_tokens;
    if (a->is_attend) {
        in += spec->num_q_heads * wire_q_dim(&shape) * e;
        out += spec->num_q_heads * (wire_out_dim(&shape) * e + (a->has_lse ? sizeof(float) : 0));
    }
    if (a->is_append)
        in += (uint64_t)spec->num_kv_heads *
              (spec->head_dim_k + (spec->is_v_in_k ? 0 : spec->head_dim_v)) * e;
    uint64_t in_room = l->in_bytes - 3 * WIRE_ALIGN;
    uint64_t out_room = l->out_bytes - LANE_OUT_OFFSET - 2 * WIRE_ALIGN;
    most = in > 0 && in_room / in < most ? in_room / in : most;
    most = out > 0 && out_room / out < most ? out_room / out : most;
    return most > 4 ? most / 4 * 4 : most; /* lse of each piece begins at a multiple of 16 */
}

static uint32_t layer_of(const struct attn_plan *a, uint32_t i)
{
    return a->layers != NULL ? a->layers[i] : i;
}

/* The longest item of layers that don't let one be cut; 0: there are none. */
static uint32_t longest_whole(const struct attn_pool_spec *spec, const struct attn_plan *a)
{
    bool is_whole = false;
    uint32_t longest = 0;
    for (uint32_t i = 0; i < a->n_layers && a->is_attend; i++)
        is_whole |= step_sees_all(spec, layer_of(a, i));
    for (uint32_t i = 0; i < a->n_items && is_whole; i++)
        longest = a->items[i].n_tokens > longest ? a->items[i].n_tokens : longest;
    return longest;
}

/* ---- pieces ---- */

/* The next piece, from *item and *token on, which it moves; its number of tokens. */
static uint32_t take_piece(struct lane_cut *cut, bool is_whole, uint32_t *item, uint32_t *token,
                           uint32_t *out_n_items)
{
    uint32_t n = 0, left = cut->max_tokens;
    *out_n_items = 0;
    while (left > 0 && *item < cut->plan.n_items) {
        const struct attn_item *it = &cut->plan.items[*item];
        uint32_t rest = it->n_tokens - *token, take = rest < left ? rest : left;
        if (is_whole && take < rest)
            break;
        cut->piece[(*out_n_items)++] =
            (struct attn_item){.seq = it->seq, .pos = it->pos + *token, .n_tokens = take};
        n += take;
        left -= take;
        *token = take < rest ? *token + take : 0;
        *item += take == rest;
    }
    return n;
}

static bool is_whole(const struct lane_cut *cut, uint32_t layer)
{
    return cut->plan.is_attend && step_sees_all(&cut->pool->spec, layer);
}

static attn_status tell(struct attn_lane *l, uint32_t layer, uint32_t n_items)
{
    struct attn_plan p = l->cut->plan;
    p.items = l->cut->piece;
    p.n_items = n_items;
    p.layers = &layer;
    p.n_layers = 1;
    return lane_plan_send(l, l->cut->pool, &p, true);
}

attn_status lane_cut_begin(struct attn_lane *l, attn_pool *p, const struct attn_plan *a)
{
    uint64_t n_tokens = 0;
    for (uint32_t i = 0; i < a->n_items; i++)
        n_tokens += a->items[i].n_tokens;
    const uint64_t most = most_tokens(l, p, a, client_info(l->client).max_step_tokens);
    if (n_tokens <= most)
        return ATTN_OK;
    uint32_t least = longest_whole(&p->spec, a);
    if (most == 0 || least > most || n_tokens > UINT32_MAX)
        return error_set(ATTN_EINVAL,
                         "%llu tokens, of which %u see each other: the lane's regions have %llu "
                         "and %llu bytes, and a step %u tokens (engine.max_step_tokens), which is "
                         "room for %llu",
                         (unsigned long long)n_tokens, least > 0 ? least : 1,
                         (unsigned long long)l->in_bytes, (unsigned long long)l->out_bytes,
                         client_info(l->client).max_step_tokens, (unsigned long long)most);

    size_t items_bytes = a->n_items * sizeof *a->items;
    struct lane_cut *cut = malloc(sizeof *cut + 2 * items_bytes + a->n_layers * sizeof(uint32_t));
    if (cut == NULL)
        return error_set(ATTN_ENOMEM, "no memory for a plan of %u items", a->n_items);
    struct attn_item *items = (struct attn_item *)(void *)cut->memory;
    uint32_t *layers = (uint32_t *)(void *)(items + 2 * (size_t)a->n_items);
    memcpy(items, a->items, items_bytes);
    for (uint32_t i = 0; i < a->n_layers; i++)
        layers[i] = layer_of(a, i);
    *cut = (struct lane_cut){.pool = p,
                             .plan = *a,
                             .n_tokens = (uint32_t)n_tokens,
                             .max_tokens = (uint32_t)most,
                             .is_notified = true,
                             .piece = items + a->n_items};
    cut->plan.items = items;
    cut->plan.layers = layers;
    l->cut = cut;

    uint32_t item = 0, token = 0, n_items;
    take_piece(cut, is_whole(cut, layers[0]), &item, &token, &n_items);
    attn_status st = tell(l, layers[0], n_items);
    if (st != ATTN_OK)
        lane_cut_end(l);
    return st;
}

static attn_status check_step(const struct lane_cut *cut, const attn_pool *p,
                              const struct attn_lane_step *s)
{
    const struct attn_plan *a = &cut->plan;
    if (p != cut->pool || s->n_tokens != cut->n_tokens)
        return error_set(ATTN_EINVAL,
                         "n_tokens is %u, or the pool is another: "
                         "the plan is of %u",
                         s->n_tokens, cut->n_tokens);
    if ((s->q != NULL) != (a->is_attend != 0) || (s->k != NULL) != (a->is_append != 0) ||
        (s->lse != NULL) != (a->has_lse != 0))
        return error_set(ATTN_EINVAL, "q, k, v and lse are not those of the plan");
    if (s->q != NULL && s->out == NULL)
        return error_set(ATTN_EINVAL,
                         "out is NULL: %u tokens go in pieces, of which attn_lane_info.out has "
                         "the last one alone",
                         s->n_tokens);
    return ATTN_OK;
}

static uint64_t stride_of(uint64_t stride, uint64_t token_bytes)
{
    return stride != 0 ? stride : token_bytes;
}

/* The step's rows from `row` on. */
static struct attn_lane_step rows_of(const struct attn_lane_step *s, const attn_pool *p,
                                     uint64_t row, uint32_t n)
{
    const struct attn_pool_spec *spec = &p->spec;
    const struct wire_shape shape = pool_shape(p);
    const uint64_t e = attn_dtype_bytes(spec->q_dtype);
    const uint8_t *q = s->q, *k = s->k, *v = s->v;
    uint8_t *out = s->out;
    struct attn_lane_step part = {.struct_size = sizeof part, .n_tokens = n};
    part.q_stride = s->q_stride, part.k_stride = s->k_stride, part.v_stride = s->v_stride;
    if (q != NULL) {
        part.q = q + row * stride_of(s->q_stride, spec->num_q_heads * wire_q_dim(&shape) * e);
        part.out = out + row * spec->num_q_heads * wire_out_dim(&shape) * e;
    }
    if (k != NULL) {
        part.k = k + row * stride_of(s->k_stride, spec->num_kv_heads * spec->head_dim_k * e);
        if (v != NULL)
            part.v = v + row * stride_of(s->v_stride, spec->num_kv_heads * spec->head_dim_v * e);
    }
    if (s->lse != NULL)
        part.lse = s->lse + row * spec->num_q_heads;
    return part;
}

static void fail(struct lane_cut *cut)
{
    if (!cut->has_failed)
        cut->failed = error_keep();
    cut->has_failed = true;
}

attn_status lane_cut_enqueue(struct attn_lane *l, const attn_pool *p, void *stream,
                             const struct attn_lane_step *s)
{
    struct lane_cut *cut = l->cut;
    attn_status st = check_step(cut, p, s);
    if (st == ATTN_OK && l->ops->is_capturing(l->memory, stream))
        st = error_set(ATTN_ENOTSUP,
                       "%u tokens go in pieces, each with its plan: a stream that is "
                       "captured has no room for these",
                       s->n_tokens);
    if (st != ATTN_OK)
        return st;
    const uint32_t layer = cut->plan.layers[cut->n_begun];
    uint32_t item = 0, token = 0, n_items, n;
    for (uint64_t row = 0; row < cut->n_tokens; row += n) {
        n = take_piece(cut, is_whole(cut, layer), &item, &token, &n_items);
        if (!cut->is_notified && !cut->has_failed && tell(l, layer, n_items) != ATTN_OK)
            fail(cut);
        cut->is_notified = false;
        /* also of what has no plan: its bell fails, and leaves NaN there */
        struct attn_lane_step part = rows_of(s, p, row, n);
        if (lane_enqueue_whole(l, p, stream, &part) != ATTN_OK)
            fail(cut);
    }
    st = cut->has_failed ? error_restore(&cut->failed) : ATTN_OK;
    if (++cut->n_begun == cut->plan.n_layers)
        lane_cut_end(l);
    return st;
}
