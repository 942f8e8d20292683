/* tokens.c: tensors of a pool that is split by tokens: gives one card its tokens of a batch, and
 * says how the outputs of all cards are merged.
 *
 * Each card's outputs have the same layout: out and lse of each item that attends. Appended tokens
 * are gathered in staging. Where items carry heads, each device projects its own outputs, and they
 * are merged as heads are: the projection is linear.
 *
 * A device sees its stripes one behind another, as a shorter sequence, and decoding is one query
 * over them. A prompt is ring attention without the ring: every device reads all queries from the
 * message, and its keys stay where they are. Queries of a stripe that the device has are one causal
 * item; queries between two such stripes see the same keys and are one full item (BACKEND_FULL), so
 * larger blocks make larger items. Queries of a dilated layer, or that choose blocks, are one item
 * at their positions in the sequence (kernels/stripes.h). Of a query's list a device has the tokens
 * that are there. Where a query sees no key of a device, that device's lse is minus infinity and
 * has no weight.
 */
#include "daemon/cards/split/extremes.h"
#include "daemon/cards/split/tensors.h"
#include "kernels/layer_visible.h"

enum { ALIGN = 64 };

static uint64_t aligned(uint64_t bytes)
{
    return (bytes + ALIGN - 1) / ALIGN * ALIGN;
}

/* How many of a sequence's first n tokens the card has. */
static uint32_t n_of_card(const struct pool_split *s, uint32_t n)
{
    return stripes_before(stripes_of(&s->config), n);
}

static bool is_of_card(const struct pool_split *s, uint32_t pos)
{
    return stripes_have(stripes_of(&s->config), pos);
}

/* Bytes of a token's row of each tensor. */
struct rows {
    uint64_t q, k, v, out, lse; /* v 0: it is in k */
};

static struct rows rows_of(const struct shard_tensors *t)
{
    const struct backend_pool_config *c = t->config;
    uint64_t el = attn_dtype_bytes(c->q_dtype);
    return (struct rows){
        .q = c->num_q_heads * backend_q_dim(c) * el,
        .k = c->num_kv_heads * c->head_dim_k * el,
        .v = c->is_v_in_k ? 0 : c->num_kv_heads * c->head_dim_v * el,
        .out = c->num_q_heads * backend_out_dim(c) * el,
        .lse = c->num_q_heads * sizeof(float),
    };
}

static uint64_t output_bytes(const struct backend_item *d, const struct rows *r)
{
    if (!(d->flags & BACKEND_ATTEND))
        return 0;
    return aligned(d->n_tokens * r->out) + aligned(d->n_tokens * r->lse);
}

uint32_t tokens_items_max(const struct shard_tensors *t)
{
    uint64_t n = 0;
    for (uint32_t i = 0; i < t->n_whole; i++)
        n += 1 + (uint64_t)t->whole[i].n_tokens;
    return (uint32_t)n;
}

uint64_t tokens_output_bytes(const struct shard_tensors *t)
{
    const struct rows r = rows_of(t);
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < t->n_whole; i++)
        bytes += output_bytes(&t->whole[i], &r);
    return bytes;
}

/* Starts and, at most, tokens of its lists. */
static uint64_t lists_bytes(const struct backend_item *d)
{
    if (d->lists.starts == NULL)
        return 0;
    return aligned(((uint64_t)d->n_tokens + 1) * sizeof(uint32_t)) +
           aligned(backend_listed(&d->lists, d->n_tokens) * sizeof(uint32_t));
}

uint64_t tokens_staging_bytes(const struct shard_tensors *t)
{
    const struct rows r = rows_of(t);
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < t->n_whole; i++) {
        const struct backend_item *d = &t->whole[i];
        if (d->flags & BACKEND_APPEND)
            bytes += aligned(d->n_tokens * r.k) + aligned(d->n_tokens * r.v);
        bytes += lists_bytes(d);
    }
    return bytes;
}

/* --- appends ---------------------------------------------------------------------------------- */

/* Copies the card's rows of an item's tensor to *staging and advances it: the rest of its first
 * stripe, then all whole stripes at once, then the begin of its last. Returns the copy. */
static const void *gather(struct shard_tensors *t, const struct backend_item *d, const void *tensor,
                          uint64_t row_bytes, uint8_t **staging)
{
    const struct pool_split *s = t->split;
    uint32_t stripe = s->config.block_tokens, block = stripe * s->n_cards;
    uint8_t *from = *staging, *to = from;
    for (uint32_t i = 0, n; i < d->n_tokens; i += n) {
        uint32_t left = d->n_tokens - i, rest = stripe - (d->pos + i) % stripe, n_stripes = 1;
        uint32_t n_rows = n = rest < left ? rest : left;
        if (!is_of_card(s, d->pos + i))
            continue;
        if (n == stripe) {
            n_stripes = 1 + (left - stripe) / block;
            n = n_stripes * block;
        }
        shard_copy(t, &(struct backend_rows){.to = to,
                                             .from = (const uint8_t *)tensor + i * row_bytes,
                                             .row_bytes = n_rows * row_bytes,
                                             .to_step = n_rows * row_bytes,
                                             .from_step = block * row_bytes,
                                             .n = n_stripes});
        to += n_stripes * n_rows * row_bytes;
    }
    *staging += aligned((uint64_t)(to - from));
    return from;
}

static void cut_append(struct shard_tensors *t, const struct backend_item *d, const struct rows *r,
                       uint8_t **staging)
{
    uint32_t first = n_of_card(t->split, d->pos);
    uint32_t n = n_of_card(t->split, d->pos + d->n_tokens) - first;
    if (n == 0)
        return;
    struct backend_item *to = &t->items[t->n_items++];
    *to = (struct backend_item){.flags = BACKEND_APPEND,
                                .layer = d->layer,
                                .table_row = d->table_row,
                                .pos = first,
                                .n_tokens = n,
                                .block_table = d->block_table,
                                .k = d->k,
                                .v = d->v};
    if (n == d->n_tokens)
        return; /* all tokens are the card's, used in place */
    to->k = gather(t, d, d->k, r->k, staging);
    to->v = r->v > 0 ? gather(t, d, d->v, r->v, staging) : NULL;
}

/* --- queries ---------------------------------------------------------------------------------- */

static bool is_full_item(const struct shard_tensors *t, const struct backend_item *d)
{
    return t->config->layers[d->layer].is_full || (d->flags & BACKEND_FULL) != 0;
}

/* How many of the card's keys query i sees. */
static uint32_t n_seen(const struct shard_tensors *t, const struct backend_item *d, uint32_t i)
{
    bool is_full = is_full_item(t, d);
    return n_of_card(t->split, d->pos + (is_full ? d->n_tokens : i + 1));
}

/* How many queries from i on can be one item over `seen` keys: each sees one key more than the one
 * before, or (*out_is_full) all see the same. The latter is never more than one query under a
 * window, since within an item the first key seen advances with every query. */
static uint32_t run_of(const struct shard_tensors *t, const struct backend_item *d, uint32_t i,
                       uint32_t seen, bool *out_is_full)
{
    const bool has_window = t->config->layers[d->layer].window_tokens > 0;
    uint32_t left = d->n_tokens - i, n = 1;
    *out_is_full = !has_window && left > 1 && n_seen(t, d, i + 1) == seen;
    while (n < left && n_seen(t, d, i + n) == (*out_is_full ? seen : seen + n))
        n++;
    return *out_is_full && n > seen ? seen : n; /* its position can't be before the first key */
}

/* The card's tokens of an item's lists, by its numbers, in *staging, which is advanced. */
static struct backend_lists cut_lists(const struct shard_tensors *t, const struct backend_item *d,
                                      uint8_t **staging)
{
    const struct backend_lists *all = &d->lists;
    if (all->starts == NULL)
        return *all;
    uint32_t *starts = (uint32_t *)(void *)*staging, n = 0;
    uint32_t *tokens = starts + aligned((d->n_tokens + 1) * sizeof *starts) / sizeof *starts;
    for (uint32_t i = 0; i < d->n_tokens; i++) {
        starts[i] = n;
        for (uint32_t j = all->starts[i]; j < all->starts[i + 1]; j++)
            if (is_of_card(t->split, all->tokens[j]))
                tokens[n++] = n_of_card(t->split, all->tokens[j]);
    }
    starts[d->n_tokens] = n;
    *staging += lists_bytes(d);
    return (struct backend_lists){.starts = starts, .tokens = tokens};
}

/* An item for queries of d from the i-th on; n_tokens and pos are the caller's to set. */
static struct backend_item query_item(const struct backend_item *d, const struct rows *r,
                                      uint32_t i, uint8_t *out, uint8_t *lse)
{
    return (struct backend_item){.flags = BACKEND_ATTEND,
                                 .layer = d->layer,
                                 .table_row = d->table_row,
                                 .block_table = d->block_table,
                                 .q = (const uint8_t *)d->q + i * r->q,
                                 .out = out + i * r->out,
                                 .lse = (float *)(void *)(lse + i * r->lse)};
}

static void cut_queries(struct shard_tensors *t, const struct backend_item *d, const struct rows *r,
                        uint8_t *out, uint8_t *lse, uint8_t **staging)
{
    const struct backend_lists lists = cut_lists(t, d, staging);
    uint32_t n;
    for (uint32_t i = 0; i < d->n_tokens; i += n) {
        uint32_t seen = n_seen(t, d, i);
        bool is_full;
        n = 1;
        if (seen == 0)
            continue; /* the merge leaves these out, too */
        n = run_of(t, d, i, seen, &is_full);
        struct backend_item *to = &t->items[t->n_items++];
        *to = query_item(d, r, i, out, lse);
        to->flags |= is_full ? BACKEND_FULL : 0;
        if (lists.starts != NULL)
            to->lists = (struct backend_lists){.starts = lists.starts + i, .tokens = lists.tokens};
        to->pos = is_full ? seen - n : seen - 1;
        to->n_tokens = n;
    }
}

/* Queries of a dilated layer, or that choose, are one item, from the first whose range reaches a
 * key of the card: the device decides which keys each sees, and gives an output even for those that
 * see none. */
static void cut_whole(struct shard_tensors *t, const struct backend_item *d, const struct rows *r,
                      uint8_t *out, uint8_t *lse)
{
    uint32_t i = 0;
    while (i < d->n_tokens && n_seen(t, d, i) == 0)
        i++;
    if (i == d->n_tokens)
        return;
    struct backend_item *to = &t->items[t->n_items++];
    *to = query_item(d, r, i, out, lse);
    to->flags |= d->flags & BACKEND_FULL;
    to->pos = d->pos + i; /* in the sequence */
    to->n_tokens = d->n_tokens - i;
    to->n_chosen = d->n_chosen;
}

void tokens_scatter(struct shard_tensors *t)
{
    const struct rows r = rows_of(t);
    uint8_t *output = t->outputs, *staging = t->staging;
    t->n_items = 0;
    for (uint32_t i = 0; i < t->n_whole; i++)
        if (t->whole[i].flags & BACKEND_APPEND)
            cut_append(t, &t->whole[i], &r, &staging);
    t->n_appends = t->n_items;
    for (uint32_t i = 0; i < t->n_whole; i++) {
        const struct backend_item *d = &t->whole[i];
        uint8_t *lse = output + aligned(d->n_tokens * r.out);
        const bool is_whole =
            t->config->layers[d->layer].n_branches > 0 || extremes_item_chooses(t->config, d);
        if ((d->flags & BACKEND_ATTEND) && is_whole)
            cut_whole(t, d, &r, output, lse);
        else if (d->flags & BACKEND_ATTEND)
            cut_queries(t, d, &r, output, lse, &staging);
        output += output_bytes(d, &r);
    }
}

/* --- the merge -------------------------------------------------------------------------------- */

uint32_t tokens_merges(const struct shard_tensors *t, struct backend_merge *out_list)
{
    const struct rows r = rows_of(t);
    uint64_t at = 0;
    uint32_t n = 0;
    for (uint32_t i = 0; i < t->n_whole; i++) {
        const struct backend_item *d = &t->whole[i];
        if (d->flags & BACKEND_ATTEND)
            out_list[n++] = (struct backend_merge){.out_at = at,
                                                   .lse_at = at + aligned(d->n_tokens * r.out),
                                                   .out = d->out,
                                                   .lse = d->lse,
                                                   .pos = d->pos,
                                                   .n_tokens = d->n_tokens,
                                                   .is_full = is_full_item(t, d)};
        at += output_bytes(d, &r);
    }
    return n;
}
