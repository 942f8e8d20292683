/* size.c: computes a pool's geometry on this card and checks its number of blocks against memory
 * and block records. Used when pools are created and resized; engine thread. */
#include "daemon/engine/pool/size.h"

#include <inttypes.h>
#include <stdio.h>

#include "daemon/engine/core/peers.h"
#include "daemon/engine/core/pool_table.h"
#include "daemon/engine/core/published.h"
#include "daemon/engine/tier/idle.h"
#include "daemon/engine/tier/summaries.h"
#include "kernels/kv_layout.h"

#define FAIL(status, ...) (snprintf(why, why_bytes, __VA_ARGS__), (status))

uint32_t pool_records(const struct engine *e, const struct pool *p)
{
    return pool_is_shard(e, p) ? 1 : p->spec.wire->n_blocks;
}

/* Whether some layer has no window, so that a sequence keeps all of its blocks. */
static bool keeps_all(const struct pool_spec *s)
{
    for (uint32_t i = 0; i < s->wire->num_layers; i++)
        if (s->layers[i].window_tokens == 0)
            return true;
    return false;
}

/* Where windows free blocks, or some may be in idle memory, a sequence may be longer than its
 * pool. */
uint32_t pool_row_blocks(const struct engine *e, const struct pool *p, uint32_t n_blocks)
{
    uint32_t bt = p->spec.wire->block_tokens;
    uint32_t n = e->env.cfg->max_seq_tokens / bt + (e->env.cfg->max_seq_tokens % bt != 0);
    return keeps_all(&p->spec) && !summaries_may_be(e, p) && n_blocks < n ? n_blocks : n;
}

static void pool_configure(struct engine *e, struct pool *p)
{
    pool_spec_config(&p->spec, e->env.cfg->max_sequences,
                     pool_row_blocks(e, p, p->spec.wire->n_blocks), &p->config);
    p->idle_pages = idle_block_pages(kv_layout_of(&p->config).block_bytes);
    p->config.n_summaries = summaries_of(e, p);
}

uint32_t pool_weight_blocks(const struct pool *p)
{
    const uint64_t bytes = backend_weights_bytes(&p->config) * p->config.num_layers;
    const uint64_t block = kv_layout_of(&p->config).block_bytes;
    return (uint32_t)((bytes + block - 1) / block);
}

/* The engine's own backend, or that of all devices together. */
static void pool_choose_backend(struct engine *e, struct pool *p)
{
    attn_split how = (attn_split)p->spec.wire->split;
    bool is_split = how != ATTN_SPLIT_WHOLE && e->peers->n > 1;
    struct backend_info info;
    p->ops = is_split ? e->peers->ops->split->backend : e->env.ops;
    p->backend = is_split ? e->peers->ops->split->backend_of(e->split, how) : e->env.backend;
    p->ops->info(p->backend, &info);
    p->has_words = (info.features & BACKEND_HAS_WORDS) != 0;
    p->has_trees = (info.features & BACKEND_HAS_TREES) != 0;
    p->has_lists = (info.features & BACKEND_HAS_LISTS) != 0;
    p->has_choice = (info.features & BACKEND_HAS_CHOICE) != 0;
    p->has_parts = (info.features & BACKEND_HAS_PARTS) != 0;
    p->has_summaries = (info.features & BACKEND_HAS_SUMMARIES) != 0;
}

/* Bytes of a block on this device. */
static uint64_t block_bytes_here(struct engine *e, struct pool *p)
{
    struct backend_pool_config many = p->config;
    if (!pool_spans(e, p))
        return kv_layout_of(&many).block_bytes;
    many.n_blocks = 1u << 26; /* so many that the backend's rounding is below a byte per block */
    return p->ops->pool_bytes(p->backend, &many) / many.n_blocks;
}

/* Sizes a pool whose spec leaves it open: half of what is free. */
static attn_status pool_size_auto(struct engine *e, struct pool *p, uint64_t free_bytes,
                                  uint32_t free_blocks, char *why, size_t why_bytes)
{
    struct backend_pool_config *c = &p->config;
    uint64_t block_bytes = block_bytes_here(e, p);
    if (pool_spans(e, p))
        free_bytes = least_free_bytes(e);
    const uint64_t weights = backend_weights_bytes(c) * c->num_layers;
    uint64_t n = weights < free_bytes ? (free_bytes - weights) / block_bytes : 0;
    c->n_blocks = n < free_blocks ? (uint32_t)n : free_blocks;
    c->n_blocks = c->n_blocks / 2 + c->n_blocks % 2;
    while (c->n_blocks > 0 && p->ops->pool_bytes(p->backend, c) > free_bytes)
        c->n_blocks--;
    p->spec.wire->n_blocks = c->n_blocks;
    if (c->n_blocks == 0)
        return FAIL(ATTN_ENOMEM,
                    "a block of %" PRIu64 " bytes does not fit%s: %" PRIu64 " of %" PRIu64
                    " KV bytes are free (device.kv_memory)",
                    block_bytes, weights > 0 ? " beside the pool's weights" : "", free_bytes,
                    e->info.kv_bytes);
    pool_configure(e, p);
    return ATTN_OK;
}

attn_status pool_size(struct engine *e, const struct tenant *who, struct pool *p, char *why,
                      size_t why_bytes)
{
    Attnd__PoolSpec *w = p->spec.wire;
    if (w->num_layers > e->env.cfg->max_layers)
        return FAIL(ATTN_EINVAL,
                    "num_layers is %" PRIu32 ", %" PRIu32 " are allowed (cache.max_layers)",
                    w->num_layers, e->env.cfg->max_layers);
    uint64_t free_bytes = e->info.kv_bytes - e->device_bytes;
    uint32_t free_blocks = e->n_blocks, asked = w->n_blocks;
    for (struct pool *k = NULL; (k = pool_next(e, k)) != NULL;)
        free_blocks -= k == p ? 0 : pool_records(e, k);

    bool is_split = w->split != ATTND__SPLIT__SPLIT_WHOLE;
    uint32_t n_cards = is_split ? 1 : e->peers->n;
    uint64_t left = tenant_left(who, TENANT_BLOCKS);
    if (is_split && !is_primary(e)) /* the primary was charged for them */
        left = UINT64_MAX;
    if (asked > left || left == 0)
        return FAIL(ATTN_EQUOTA,
                    "n_blocks is %" PRIu32 ", tenant %s has %" PRIu64 " of its %" PRIu64
                    " blocks in its pools",
                    asked, who->name, atomic_load(&who->used[TENANT_BLOCKS]),
                    who->most[TENANT_BLOCKS]);
    if (asked == 0 && left / n_cards < free_blocks)
        free_blocks = (uint32_t)((left + n_cards - 1) / n_cards);
    if (asked == 0)
        w->n_blocks = 1; /* check the geometry first, then the size */
    pool_choose_backend(e, p);
    pool_configure(e, p);
    attn_status st = p->ops->pool_check(p->backend, &p->config);
    if (st != ATTN_OK)
        return FAIL(st, "%s", p->ops->last_error(p->backend));
    if (w->q_nope_dim > 0 && e->env.ops->weights_write == NULL)
        return FAIL(ATTN_ENOTSUP, "q_nope_dim is %" PRIu32 ": backend %s has no projections",
                    w->q_nope_dim, e->info.name);
    const uint32_t of_weights = pool_weight_blocks(p);
    const uint64_t share = left / n_cards, rest = share < of_weights ? 0 : share - of_weights;
    if (asked + (uint64_t)of_weights > left || (asked == 0 && of_weights > 0 && rest == 0))
        return FAIL(ATTN_EQUOTA,
                    "weights take as much as %" PRIu32 " blocks, and n_blocks is %" PRIu32
                    ": tenant %s has %" PRIu64 " left of its %" PRIu64 " blocks",
                    of_weights, asked, who->name, left, who->most[TENANT_BLOCKS]);
    if (asked == 0 && of_weights > 0 && rest < free_blocks)
        free_blocks = (uint32_t)rest;
    if (asked == 0)
        st = pool_size_auto(e, p, free_bytes, free_blocks, why, why_bytes);
    if (st != ATTN_OK)
        return st;
    if (pool_records(e, p) > free_blocks)
        return FAIL(ATTN_ENOMEM,
                    "n_blocks is %" PRIu32 ", %" PRIu32
                    " block records are free (device.kv_memory)",
                    w->n_blocks, free_blocks);
    p->device_bytes = p->ops->pool_bytes(p->backend, &p->config);
    if (p->device_bytes > free_bytes)
        return FAIL(ATTN_ENOMEM,
                    "n_blocks %" PRIu32 " takes %" PRIu64 " bytes, %" PRIu64 " of %" PRIu64
                    " KV bytes are free (device.kv_memory)",
                    w->n_blocks, p->device_bytes, free_bytes, e->info.kv_bytes);
    return ATTN_OK;
}
