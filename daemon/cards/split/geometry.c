/* geometry.c: computes which heads or tokens of a pool each card has.
 *
 * Sequences, block tables and the record of requests are kept in the first card's arena only:
 * copies in every card's arena would have to be kept equal over failures, evictions and kills. The
 * price is that the first engine does the host's work for all split pools.
 */
#include "daemon/cards/split/geometry.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/kv_layout.h"
#include "kernels/layer_visible.h"

#define FAIL(status, ...) (snprintf(why, why_bytes, __VA_ARGS__), (status))

enum { MIN_STRIPE = 8 }; /* tokens in the smallest block of a device */

/* --- heads ------------------------------------------------------------------------------------ */

/* The first kv head of a card. Where heads do not divide evenly, the first cards have one more. */
static uint32_t first_head(uint32_t n_heads, uint32_t n_cards, uint32_t card)
{
    uint32_t more = n_heads % n_cards;
    return n_heads / n_cards * card + (card < more ? card : more);
}

static attn_status split_heads(struct pool_split *s, char *why, size_t why_bytes)
{
    struct backend_pool_config *c = &s->config;
    uint32_t group = c->num_q_heads / c->num_kv_heads;
    if (c->num_kv_heads < s->n_cards)
        return FAIL(ATTN_ENOTSUP, "split heads: num_kv_heads is %" PRIu32 ", of %" PRIu32 " cards",
                    c->num_kv_heads, s->n_cards);
    if (c->q_nope_dim > 0)
        return FAIL(ATTN_ENOTSUP,
                    "split heads: q_nope_dim is %" PRIu32 ", such pools are split by tokens",
                    c->q_nope_dim);
    s->kv_head = first_head(c->num_kv_heads, s->n_cards, s->card);
    s->q_head = s->kv_head * group;
    c->num_kv_heads = first_head(c->num_kv_heads, s->n_cards, s->card + 1) - s->kv_head;
    c->num_q_heads = c->num_kv_heads * group;
    c->first_kv_head = s->kv_head; /* the tokens of a branch depend on the head's number */
    for (uint32_t l = 0; l < c->num_layers; l++) {
        struct attn_layer_spec *layer = &s->layers[l];
        layer->sink_logits = layer->sink_logits == NULL ? NULL : layer->sink_logits + s->q_head;
        layer->alibi_slopes = layer->alibi_slopes == NULL ? NULL : layer->alibi_slopes + s->q_head;
    }
    return ATTN_OK;
}

/* --- tokens ----------------------------------------------------------------------------------- */

/* Converts a window to the card's tokens: one of whole blocks has equally many on each card,
 * wherever it begins. Of the first tokens, which stay visible, each card has its own. */
static attn_status split_window(const struct pool_split *s, uint32_t l, struct stripes stripes,
                                char *why, size_t why_bytes)
{
    struct attn_layer_spec *layer = &s->layers[l];
    if (layer->window_tokens == 0)
        return ATTN_OK;
    if (layer->window_tokens % stripes.every != 0)
        return FAIL(ATTN_ENOTSUP,
                    "split tokens: layers[%" PRIu32 "].window_tokens is %" PRIu32
                    ", must be a multiple of block_tokens, %" PRIu32,
                    l, layer->window_tokens, stripes.every);
    if (layer->is_full)
        return FAIL(ATTN_ENOTSUP,
                    "split tokens: layers[%" PRIu32 "] is_full with a window can't be split so", l);
    layer->window_tokens = layer->window_tokens / stripes.every * stripes.tokens;
    layer->sink_tokens = stripes_before(stripes, layer->sink_tokens);
    return ATTN_OK;
}

static attn_status split_tokens(struct pool_split *s, char *why, size_t why_bytes)
{
    struct backend_pool_config *c = &s->config;
    if ((s->n_cards & (s->n_cards - 1)) != 0)
        return FAIL(ATTN_ENOTSUP, "split tokens: of 2, 4 or 8 cards, the daemon has %" PRIu32,
                    s->n_cards);
    if (c->block_tokens / s->n_cards < MIN_STRIPE)
        return FAIL(ATTN_ENOTSUP,
                    "split tokens: block_tokens is %" PRIu32 ", %" PRIu32 " cards need %" PRIu32,
                    c->block_tokens, s->n_cards, MIN_STRIPE * s->n_cards);
    c->block_tokens /= s->n_cards;
    c->n_stripes = s->n_cards;
    c->stripe = s->card;
    for (uint32_t l = 0; l < c->num_layers; l++) {
        struct attn_layer_spec *layer = &s->layers[l];
        if (layer->alibi_slopes != NULL && layer->n_branches == 0)
            return FAIL(ATTN_ENOTSUP,
                        "split tokens: layers[%" PRIu32 "].alibi_slopes can't be split so", l);
        attn_status st = split_window(s, l, stripes_of(c), why, why_bytes);
        if (st != ATTN_OK)
            return st;
        if (s->card != 0)
            layer->sink_logits = NULL; /* a sink counts once, on the first card */
    }
    return ATTN_OK;
}

/* --- all -------------------------------------------------------------------------------------- */

attn_status pool_split_init(struct pool_split *s, const struct backend_pool_config *whole,
                            attn_split how, uint32_t n_cards, uint32_t card, char *why,
                            size_t why_bytes)
{
    *s = (struct pool_split){
        .how = how, .n_cards = how == ATTN_SPLIT_WHOLE ? 1 : n_cards, .config = *whole};
    if (!pool_is_split(s))
        return ATTN_OK;
    if (whole->n_summaries > 0)
        return FAIL(ATTN_ENOTSUP, "n_summaries is %" PRIu32 ", split pools have none",
                    whole->n_summaries);
    s->card = card;
    s->layers = calloc(whole->num_layers, sizeof *s->layers);
    if (s->layers == NULL)
        return FAIL(ATTN_ENOMEM, "no memory for a pool's layers");
    memcpy(s->layers, whole->layers, whole->num_layers * sizeof *s->layers);
    attn_status st =
        how == ATTN_SPLIT_HEADS ? split_heads(s, why, why_bytes) : split_tokens(s, why, why_bytes);
    s->config.layers = s->layers;
    if (st != ATTN_OK)
        pool_split_fini(s);
    return st;
}

void pool_split_fini(struct pool_split *s)
{
    free(s->layers);
    *s = (struct pool_split){0};
}

/* --- blocks ----------------------------------------------------------------------------------- */

/* Copies the rows of a K or V part, or of its scales: [kv_head][block_tokens] of row_bytes each. */
static void move_rows(const struct pool_split *s, const struct backend_pool_config *whole,
                      uint64_t row_bytes, uint8_t *block, uint8_t *shard, bool is_in)
{
    uint32_t stripe = s->config.block_tokens;
    uint32_t first = s->how == ATTN_SPLIT_TOKENS ? s->card * stripe : 0;
    for (uint32_t h = 0; h < s->config.num_kv_heads; h++) {
        uint64_t row = (uint64_t)(s->kv_head + h) * whole->block_tokens + first;
        uint8_t *there = block + row * row_bytes;
        uint8_t *here = shard + (uint64_t)h * stripe * row_bytes;
        memcpy(is_in ? there : here, is_in ? here : there, stripe * row_bytes);
    }
}

static void move_block(const struct pool_split *s, const struct backend_pool_config *whole,
                       uint8_t *block, uint8_t *shard, bool is_in)
{
    struct kv_layout to = kv_layout_of(whole), of = kv_layout_of(&s->config);
    for (uint32_t l = 0; l < whole->num_layers; l++) {
        uint8_t *b = block + l * to.layer_bytes, *p = shard + l * of.layer_bytes;
        move_rows(s, whole, to.k_row_bytes, b, p, is_in);
        if (to.is_quantised)
            move_rows(s, whole, to.k_scale_bytes, b + to.k_scales, p + of.k_scales, is_in);
        if (whole->is_v_in_k)
            continue;
        move_rows(s, whole, to.v_row_bytes, b + to.v_offset, p + of.v_offset, is_in);
        if (to.is_quantised)
            move_rows(s, whole, to.v_scale_bytes, b + to.v_scales, p + of.v_scales, is_in);
    }
}

void pool_split_block_in(const struct pool_split *s, const struct backend_pool_config *whole,
                         const uint8_t *shard, uint8_t *block)
{
    move_block(s, whole, block, (uint8_t *)(uintptr_t)shard, true);
}

void pool_split_block_out(const struct pool_split *s, const struct backend_pool_config *whole,
                          const uint8_t *block, uint8_t *shard)
{
    memset(shard, 0, kv_layout_of(&s->config).block_bytes); /* for the gaps between its parts */
    move_block(s, whole, (uint8_t *)(uintptr_t)block, shard, false);
}
