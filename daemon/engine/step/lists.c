/* lists.c: a query's indices become marks in a set of bits, and the set its list: neither their
 * order nor how often a token is named matters. */
#include "daemon/engine/step/lists.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "kernels/layer_visible.h"

/* One query at work. */
struct query {
    const struct attn_layer_spec *layer;
    struct visible sees;
    uint32_t pos; /* its own */
    size_t row; /* of indices */
    uint32_t unit; /* tokens that an index names */
};

attn_status lists_check(const Attnd__Step *s, const struct pool *p, uint64_t n_tokens, char *why,
                        size_t why_bytes)
{
    if (p->config.layers[s->layer].n_branches > 0) {
        snprintf(why, why_bytes,
                 "step.n_indices: layer %" PRIu32 " is dilated (branch_rates), which already says "
                 "what queries visit",
                 s->layer);
        return ATTN_ENOTSUP;
    }
    if (!p->has_lists) {
        snprintf(why, why_bytes,
                 "step.n_indices: pool %s can't have sparse steps: its backend has none",
                 p->spec.wire->name);
        return ATTN_ENOTSUP;
    }
    if (n_tokens * s->n_indices > WIRE_MAX_INDICES) {
        snprintf(why, why_bytes,
                 "step.n_indices is %" PRIu32 ", times %" PRIu64 " tokens: a step has at most %u",
                 s->n_indices, n_tokens, WIRE_MAX_INDICES);
        return ATTN_EINVAL;
    }
    return ATTN_OK;
}

static attn_status refuse(const struct query *q, uint32_t i, int32_t index, char *why,
                          size_t why_bytes)
{
    int n = snprintf(why, why_bytes, "indices[%zu][%" PRIu32 "] is %" PRId32, q->row, i, index);
    if (index < 0)
        snprintf(why + n, why_bytes - (size_t)n, ", must be -1 (none) or more");
    else if (q->sees.sinks > 0)
        snprintf(why + n, why_bytes - (size_t)n,
                 " of %" PRIu32 " tokens each: the query at %" PRIu32 " sees [0, %" PRIu32
                 ") and [%" PRIu32 ", %" PRIu32 ")",
                 q->unit, q->pos, q->sees.sinks, q->sees.first, q->sees.end);
    else
        snprintf(why + n, why_bytes - (size_t)n,
                 " of %" PRIu32 " tokens each: the query at %" PRIu32 " sees [%" PRIu32 ", %" PRIu32
                 ")",
                 q->unit, q->pos, q->sees.first, q->sees.end);
    return ATTN_EINVAL;
}

static void mark(uint64_t *bits, uint64_t from, uint64_t to)
{
    for (; from < to; from++)
        bits[from / 64] |= UINT64_C(1) << from % 64;
}

/* Marks what an index names and the query sees. false: nothing. */
static bool mark_index(const struct query *q, int32_t index, uint64_t *bits)
{
    const uint64_t from = (uint64_t)index * q->unit, to = from + q->unit;
    const uint64_t sinks = to < q->sees.sinks ? to : q->sees.sinks;
    const uint64_t first = from > q->sees.first ? from : q->sees.first;
    const uint64_t end = to < q->sees.end ? to : q->sees.end;
    mark(bits, from, sinks);
    mark(bits, first, end);
    return from < sinks || first < end;
}

/* Appends the marked tokens to the list, of n, and clears the marks; returns how many there are
 * then, or more than most if they don't fit. */
static uint64_t take_marked(uint64_t *bits, uint32_t end, uint32_t *list, uint64_t n, uint64_t most)
{
    for (uint32_t w = 0; w < end / 64 + 1; w++)
        for (uint64_t rest = bits[w]; rest != 0; rest &= rest - 1) {
            if (n < most)
                list[n] = w * 64 + (uint32_t)__builtin_ctzll(rest);
            n++;
        }
    memset(bits, 0, (end / 64 + 1) * sizeof *bits);
    return n;
}

/* What all lists of an item can have together. */
static uint64_t most_listed(const Attnd__Step *s, const struct item *it, uint32_t unit)
{
    const uint64_t named = (uint64_t)s->n_indices * unit, end = (uint64_t)it->pos + it->n_tokens;
    return it->n_tokens * (named < end ? named : end);
}

struct lists {
    uint32_t *starts, *tokens;
    uint64_t *bits; /* all 0 between queries */
    uint64_t n, most; /* tokens */
};

static attn_status lists_open(const struct engine *e, struct task *t, uint32_t unit,
                              struct lists *out, char *why, size_t why_bytes)
{
    const Attnd__Step *s = t->req->wire.header->step;
    uint64_t most = 0, longest = 0;
    for (uint32_t i = 0; i < t->n_items; i++) {
        const uint64_t end = (uint64_t)t->items[i].pos + t->items[i].n_tokens;
        if (end > e->env.cfg->max_seq_tokens)
            continue;
        most += most_listed(s, &t->items[i], unit);
        longest = end > longest ? end : longest;
    }
    out->n = 0;
    out->most = most < WIRE_MAX_INDICES ? most : WIRE_MAX_INDICES;
    const size_t bits_bytes = (longest / 64 + 1) * sizeof *out->bits;
    const size_t n_starts = t->layout.n_tokens + t->n_items;
    out->bits = wire_arena_alloc(&t->req->arena, bits_bytes);
    out->starts = wire_arena_alloc(&t->req->arena, n_starts * sizeof *out->starts);
    out->tokens = wire_arena_alloc(&t->req->arena, out->most * sizeof *out->tokens);
    if (out->bits == NULL || out->starts == NULL || out->tokens == NULL) {
        snprintf(why, why_bytes, "no memory for lists of %" PRIu64 " tokens", out->most);
        return ATTN_ENOMEM;
    }
    memset(out->bits, 0, bits_bytes);
    return ATTN_OK;
}

/* Appends a query's list. */
static attn_status list_add(struct lists *l, const struct query *q, const int32_t *indices,
                            uint32_t n_indices, char *why, size_t why_bytes)
{
    for (uint32_t i = 0; i < n_indices; i++) {
        const int32_t index = __atomic_load_n(&indices[i], __ATOMIC_RELAXED);
        if (index == -1)
            continue;
        if (index < 0 || !mark_index(q, index, l->bits))
            return refuse(q, i, index, why, why_bytes);
    }
    l->n = take_marked(l->bits, q->sees.end, l->tokens, l->n, l->most);
    if (l->n <= l->most)
        return ATTN_OK;
    snprintf(why, why_bytes,
             "step.n_indices, of %" PRIu32 " tokens each: a step's queries visit at most %u "
             "together",
             q->unit, WIRE_MAX_INDICES);
    return ATTN_EINVAL;
}

attn_status lists_make(const struct engine *e, struct task *t, char *why, size_t why_bytes)
{
    const Attnd__Step *s = t->req->wire.header->step;
    const struct backend_pool_config *c = &t->pool->config;
    const int32_t *indices =
        (const int32_t *)(const void *)(t->req->wire.payload + t->layout.indices_offset);
    struct query q = {.layer = &c->layers[t->layer],
                      .unit = s->index_tokens > 0 ? s->index_tokens : 1};
    struct lists l;
    attn_status st = lists_open(e, t, q.unit, &l, why, why_bytes);
    for (uint32_t i = 0; i < t->n_items && st == ATTN_OK; i++) {
        struct item *it = &t->items[i];
        const bool is_here = it->state != ITEM_DONE &&
                             (uint64_t)it->pos + it->n_tokens <= e->env.cfg->max_seq_tokens;
        const struct backend_item d = {.flags = t->flags & WIRE_STEP_FULL ? BACKEND_FULL : 0,
                                       .pos = it->pos,
                                       .n_tokens = it->n_tokens,
                                       .key_base = it->key_base,
                                       .ahead = it->ahead};
        it->lists = (struct backend_lists){.starts = l.starts, .tokens = l.tokens};
        for (uint32_t k = 0; k < it->n_tokens && st == ATTN_OK; k++) {
            *l.starts++ = (uint32_t)l.n;
            q.pos = it->pos + it->ahead + k;
            q.row = it->row + k;
            q.sees = layer_visible(q.layer, (struct stripes){0}, &d, (struct branch){0}, k);
            if (is_here)
                st = list_add(&l, &q, indices + q.row * s->n_indices, s->n_indices, why, why_bytes);
        }
        *l.starts++ = (uint32_t)l.n;
    }
    t->n_listed = (uint32_t)l.n;
    return st;
}

attn_status choice_check(const Attnd__Step *s, const struct pool *p, char *why, size_t why_bytes)
{
    const struct attn_layer_spec *l = &p->config.layers[s->layer];
    const char *has = l->window_tokens > 0      ? "a window (window_tokens)"
                      : l->alibi_slopes != NULL ? "ALiBi (alibi_slopes)"
                      : l->n_branches > 0       ? "branches (branch_rates)"
                                                : NULL;
    if (has != NULL)
        snprintf(why, why_bytes, "step.choose_blocks: layer %" PRIu32 " has %s", s->layer, has);
    else if (!p->has_choice)
        snprintf(why, why_bytes, "step.choose_blocks: pool %s can't have steps that choose: %s",
                 p->spec.wire->name,
                 p->spec.wire->split == ATTND__SPLIT__SPLIT_TOKENS
                     ? "it is split by tokens (pool.split) over cards of several backends"
                     : "its backend has none");
    else
        return ATTN_OK;
    return ATTN_ENOTSUP;
}

attn_status choice_make(const struct engine *e, struct task *t, char *why, size_t why_bytes)
{
    const struct backend_pool_config *c = &t->pool->config;
    const uint32_t n = t->req->wire.header->step->choose_blocks;
    uint64_t n_listed = 0;
    for (uint32_t i = 0; i < t->n_items; i++) {
        const struct item *it = &t->items[i];
        const uint64_t end = (uint64_t)it->pos + it->n_tokens;
        const uint64_t n_blocks = (end + c->block_tokens - 1) / c->block_tokens;
        if (n < n_blocks && end <= e->env.cfg->max_seq_tokens)
            n_listed += (uint64_t)n * it->n_tokens * c->num_kv_heads;
    }
    t->n_chosen = n;
    t->n_listed = (uint32_t)n_listed;
    if (n_listed <= WIRE_MAX_INDICES)
        return ATTN_OK;
    snprintf(why, why_bytes,
             "step.choose_blocks is %" PRIu32 ", times %" PRIu32 " kv heads and %" PRIu64
             " tokens: a step has at most %u",
             n, c->num_kv_heads, t->layout.n_tokens, WIRE_MAX_INDICES);
    return ATTN_EINVAL;
}
