/* extremes.c: which blocks' extremes all devices have, and their join. */
#include "daemon/cards/split/extremes.h"

#include <stdlib.h>
#include <string.h>

#include "kernels/grow.h"

enum { SLICE_BYTES = 256 << 10 };

static uint8_t *has(const struct split_extremes *x, const struct backend_pool_config *whole,
                    uint32_t block, uint32_t layer)
{
    return &x->has[(size_t)block * whole->num_layers + layer];
}

void extremes_forget_all(struct split_extremes *x)
{
    free(x->has);
    free(x->known);
    x->has = NULL;
    x->known = NULL;
}

void extremes_forget(struct split_extremes *x, const struct backend_pool_config *whole,
                     uint32_t block)
{
    uint8_t had = 0;
    for (uint32_t i = 0; x->has != NULL && i < whole->num_layers; i++) {
        had |= *has(x, whole, block, i);
        *has(x, whole, block, i) = 0;
    }
    x->known_turn += had; /* it may be in any row */
}

static attn_status extremes_open(struct split_extremes *x, const struct backend_pool_config *whole)
{
    if (x->has != NULL)
        return ATTN_OK;
    x->has = calloc(whole->n_blocks, whole->num_layers);
    x->known = calloc((size_t)whole->n_table_rows * whole->num_layers, sizeof *x->known);
    if (x->has != NULL && x->known != NULL)
        return ATTN_OK;
    extremes_forget_all(x);
    return ATTN_ENOMEM;
}

static struct extremes_known *known_at(const struct split_extremes *x,
                                       const struct backend_pool_config *whole, uint32_t row,
                                       uint32_t layer)
{
    return &x->known[(size_t)row * whole->num_layers + layer];
}

/* The row's entries from `index` on may be blocks that devices lack. */
static void known_cut(const struct split_extremes *x, const struct backend_pool_config *whole,
                      uint32_t row, uint32_t layer, uint32_t index)
{
    struct extremes_known *k = known_at(x, whole, row, layer);
    k->n = k->n < index ? k->n : index;
}

static uint32_t blocks_seen(const struct backend_pool_config *whole,
                            const struct backend_item *item)
{
    return (item->pos + item->n_tokens - 1) / whole->block_tokens + 1;
}

bool extremes_item_chooses(const struct backend_pool_config *whole, const struct backend_item *item)
{
    return item->n_chosen > 0 && item->n_chosen < blocks_seen(whole, item);
}

static void forget_written(struct split_extremes *x, const struct backend_pool_config *whole,
                           const struct backend_batch *batch)
{
    for (uint32_t i = 0; i < batch->n_patches; i++) {
        const struct backend_patch *p = &batch->patches[i];
        if (i > 0 && p[-1].row == p->row && p[-1].index <= p->index)
            continue; /* it is cut already */
        for (uint32_t k = 0; k < whole->num_layers; k++)
            known_cut(x, whole, p->row, k, p->index);
    }
    for (uint32_t i = 0; i < batch->n_items; i++) {
        const struct backend_item *d = &batch->items[i];
        const uint32_t first = d->pos / whole->block_tokens, end = blocks_seen(whole, d);
        if (!(d->flags & BACKEND_APPEND))
            continue;
        known_cut(x, whole, d->table_row, d->layer, first);
        for (uint32_t k = first; k < end; k++)
            *has(x, whole, d->block_table[k], d->layer) = 0;
    }
    for (uint32_t i = 0; i < batch->n_copies; i++)
        extremes_forget(x, whole, batch->copies[i].dst);
}

/* Those of one item; a block that is listed is marked, so that it is listed once. */
static attn_status find(struct split_extremes *x, const struct backend_pool_config *whole,
                        const struct backend_item *d, struct extremes_list *out)
{
    const uint32_t n_blocks = blocks_seen(whole, d);
    struct extremes_known *known = known_at(x, whole, d->table_row, d->layer);
    const uint32_t from = known->turn == x->known_turn && known->n > 0 ? known->n : 1;
    if (from + 1 >= n_blocks)
        return ATTN_OK;
    attn_status st = array_reserve(&out->list, &out->capacity, (uint64_t)out->n + n_blocks - from,
                                   sizeof *out->list);
    for (uint32_t k = from; st == ATTN_OK && k + 1 < n_blocks; k++) {
        uint8_t *is_known = has(x, whole, d->block_table[k], d->layer);
        if (*is_known)
            continue;
        *is_known = 1;
        out->list[out->n++] = (struct backend_block_layer){d->block_table[k], d->layer};
    }
    if (st == ATTN_OK)
        *known = (struct extremes_known){.n = n_blocks - 1, .turn = x->known_turn};
    return st;
}

attn_status extremes_find(struct split_extremes *x, const struct backend_pool_config *whole,
                          const struct backend_batch *batch, struct extremes_list *out)
{
    attn_status st = ATTN_OK;
    out->n = 0;
    if (x->has != NULL)
        forget_written(x, whole, batch);
    for (uint32_t i = 0; i < batch->n_items && st == ATTN_OK; i++) {
        const struct backend_item *d = &batch->items[i];
        if (d->n_chosen < 3 || !extremes_item_chooses(whole, d))
            continue;
        st = extremes_open(x, whole);
        if (st == ATTN_OK)
            st = find(x, whole, d, out);
    }
    for (uint32_t i = 0; i < out->n; i++)
        *has(x, whole, out->list[i].block, out->list[i].layer) = 0;
    return st;
}

void extremes_note(struct split_extremes *x, const struct backend_pool_config *whole,
                   const struct extremes_list *list)
{
    for (uint32_t i = 0; i < list->n && x->has != NULL; i++)
        *has(x, whole, list->list[i].block, list->list[i].layer) = 1;
}

/* --- the join --------------------------------------------------------------------------------- */

uint64_t extremes_bytes(const struct backend_pool_config *whole)
{
    return (uint64_t)whole->num_kv_heads * 2 * whole->head_dim_k *
           attn_dtype_bytes(backend_extremes_dtype(whole));
}

uint32_t extremes_slice(const struct backend_pool_config *whole)
{
    const uint64_t n = SLICE_BYTES / extremes_bytes(whole);
    return n > 0 ? (uint32_t)n : 1;
}

/* Of two rows of n elements the larger or, where turn is -1, the smaller of each column, into the
 * first. As integers floats are in order but for the negative ones' other bits; none of them is not
 * a number. */
static void join_row16(int16_t *restrict row, const int16_t *restrict other, uint32_t n,
                       int16_t turn)
{
    for (uint32_t i = 0; i < n; i++) {
        const int16_t a = row[i] ^ (int16_t)((row[i] >> 15) & INT16_MAX) ^ turn;
        const int16_t b = other[i] ^ (int16_t)((other[i] >> 15) & INT16_MAX) ^ turn;
        row[i] = b > a ? other[i] : row[i];
    }
}

static void join_row32(int32_t *restrict row, const int32_t *restrict other, uint32_t n,
                       int32_t turn)
{
    for (uint32_t i = 0; i < n; i++) {
        const int32_t a = row[i] ^ ((row[i] >> 31) & INT32_MAX) ^ turn;
        const int32_t b = other[i] ^ ((other[i] >> 31) & INT32_MAX) ^ turn;
        row[i] = b > a ? other[i] : row[i];
    }
}

void extremes_join(const struct backend_pool_config *whole, void *const *bytes, uint32_t n_cards,
                   uint32_t n)
{
    const uint32_t size = (uint32_t)attn_dtype_bytes(backend_extremes_dtype(whole));
    const size_t row_bytes = (size_t)whole->head_dim_k * size;
    const size_t n_rows = (size_t)n * whole->num_kv_heads * 2; /* the largest, the smallest, ... */
    for (size_t i = 0, at = 0; i < n_rows; i++, at += row_bytes)
        for (uint32_t k = 1; k < n_cards; k++) {
            void *row = (uint8_t *)bytes[0] + at, *other = (uint8_t *)bytes[k] + at;
            if (size == 4)
                join_row32(row, other, whole->head_dim_k, i % 2 == 0 ? 0 : -1);
            else
                join_row16(row, other, whole->head_dim_k, i % 2 == 0 ? 0 : -1);
        }
    for (uint32_t k = 1; k < n_cards; k++)
        memcpy(bytes[k], bytes[0], n_rows * row_bytes);
}
