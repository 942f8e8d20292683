/* heads.c: tensors of a pool that is split by heads: gives one card its heads of a batch, and puts
 * its outputs among those of the others. */
#include "daemon/cards/split/tensors.h"

enum { ALIGN = 64 };

/* Bytes of a token's row of each tensor. */
struct rows {
    uint64_t q, k, v, out, lse; /* the card's heads; v 0: it is in k */
    uint64_t all_q, all_k, all_v, all_out, all_lse; /* all heads, as in the message */
    uint64_t q_at, k_at, v_at, out_at, lse_at; /* where the card's heads begin in that */
};

static struct rows rows_of(const struct shard_tensors *t)
{
    const struct backend_pool_config *all = t->config, *c = &t->split->config;
    uint64_t el = attn_dtype_bytes(c->q_dtype), dk = c->head_dim_k * el, dv = c->head_dim_v * el;
    uint64_t q_head = t->split->q_head, kv_head = t->split->kv_head;
    return (struct rows){
        .q = c->num_q_heads * dk,
        .k = c->num_kv_heads * dk,
        .v = c->is_v_in_k ? 0 : c->num_kv_heads * dv,
        .out = c->num_q_heads * dv,
        .lse = c->num_q_heads * sizeof(float),
        .all_q = all->num_q_heads * dk,
        .all_k = all->num_kv_heads * dk,
        .all_v = all->num_kv_heads * dv,
        .all_out = all->num_q_heads * dv,
        .all_lse = all->num_q_heads * sizeof(float),
        .q_at = q_head * dk,
        .k_at = kv_head * dk,
        .v_at = kv_head * dv,
        .out_at = q_head * dv,
        .lse_at = q_head * sizeof(float),
    };
}

static uint64_t aligned(uint64_t bytes)
{
    return (bytes + ALIGN - 1) / ALIGN * ALIGN;
}

static const uint8_t *at(const void *tensor, uint64_t offset)
{
    return (const uint8_t *)tensor + offset;
}

static uint8_t *out_at(void *tensor, uint64_t offset)
{
    return (uint8_t *)tensor + offset;
}

static uint64_t item_bytes(const struct backend_item *d, const struct rows *r)
{
    uint64_t n = d->n_tokens, bytes = 0;
    if (n == 1)
        return 0;
    if (d->flags & BACKEND_APPEND)
        bytes += aligned(n * r->k) + aligned(n * r->v);
    if (d->flags & BACKEND_ATTEND)
        bytes += aligned(n * r->q) + aligned(n * r->out);
    return bytes + (d->lse != NULL ? aligned(n * r->lse) : 0);
}

uint64_t heads_staging_bytes(const struct shard_tensors *t)
{
    const struct rows r = rows_of(t);
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < t->n_whole; i++)
        bytes += item_bytes(&t->whole[i], &r);
    return bytes;
}

/* Copies the card's part of n rows to *staging and advances it; returns the copy. */
static const void *gather(struct shard_tensors *t, uint8_t **staging, const void *tensor,
                          uint32_t n, uint64_t all, uint64_t offset, uint64_t bytes)
{
    uint8_t *to = *staging;
    shard_copy(t, &(struct backend_rows){.to = to,
                                         .from = at(tensor, offset),
                                         .row_bytes = bytes,
                                         .to_step = bytes,
                                         .from_step = all,
                                         .n = n});
    *staging += aligned(n * bytes);
    return to;
}

static void *take(uint8_t **staging, uint64_t bytes)
{
    uint8_t *p = *staging;
    *staging += aligned(bytes);
    return p;
}

static void cut_in_place(struct backend_item *d, const struct rows *r)
{
    if (d->flags & BACKEND_APPEND) {
        d->k = at(d->k, r->k_at);
        d->v = r->v > 0 ? at(d->v, r->v_at) : NULL;
    }
    if (d->flags & BACKEND_ATTEND) {
        d->q = at(d->q, r->q_at);
        d->out = out_at(d->out, r->out_at);
    }
    if (d->lse != NULL)
        d->lse = (float *)(void *)out_at(d->lse, r->lse_at);
}

static void cut_copied(struct shard_tensors *t, struct backend_item *d, const struct rows *r,
                       uint8_t **staging)
{
    uint32_t n = d->n_tokens;
    if (d->flags & BACKEND_APPEND) {
        d->k = gather(t, staging, d->k, n, r->all_k, r->k_at, r->k);
        d->v = r->v > 0 ? gather(t, staging, d->v, n, r->all_v, r->v_at, r->v) : NULL;
    }
    if (d->flags & BACKEND_ATTEND) {
        d->q = gather(t, staging, d->q, n, r->all_q, r->q_at, r->q);
        d->out = take(staging, n * r->out);
    }
    if (d->lse != NULL)
        d->lse = take(staging, n * r->lse);
}

void heads_scatter(struct shard_tensors *t)
{
    const struct rows r = rows_of(t);
    uint8_t *staging = t->staging;
    t->n_items = t->n_whole;
    for (uint32_t i = 0; i < t->n_whole; i++) {
        t->items[i] = t->whole[i];
        if (t->whole[i].n_tokens == 1)
            cut_in_place(&t->items[i], &r);
        else
            cut_copied(t, &t->items[i], &r, &staging);
    }
}

static void scatter(struct shard_tensors *t, void *tensor, const void *from, uint32_t n,
                    uint64_t all, uint64_t offset, uint64_t bytes)
{
    shard_copy(t, &(struct backend_rows){.to = out_at(tensor, offset),
                                         .from = from,
                                         .row_bytes = bytes,
                                         .to_step = all,
                                         .from_step = bytes,
                                         .n = n});
}

void heads_gather(struct shard_tensors *t)
{
    const struct rows r = rows_of(t);
    for (uint32_t i = 0; i < t->n_whole; i++) {
        const struct backend_item *d = &t->whole[i], *of = &t->items[i];
        if (d->n_tokens == 1)
            continue;
        if (d->flags & BACKEND_ATTEND)
            scatter(t, d->out, of->out, d->n_tokens, r.all_out, r.out_at, r.out);
        if (d->lse != NULL)
            scatter(t, d->lse, of->lse, d->n_tokens, r.all_lse, r.lse_at, r.lse);
    }
}
