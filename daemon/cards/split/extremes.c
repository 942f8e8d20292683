/* extremes.c: which blocks' extremes all devices have, and their join. */
#include "daemon/cards/split/extremes.h"

#include <stdlib.h>
#include <string.h>

#include "kernels/grow.h"

static uint8_t *has(const struct split_extremes *x, const struct backend_pool_config *whole,
                    uint32_t block, uint32_t layer)
{
    return &x->has[(size_t)block * whole->num_layers + layer];
}

void extremes_forget_all(struct split_extremes *x)
{
    free(x->has);
    x->has = NULL;
}

void extremes_forget(struct split_extremes *x, const struct backend_pool_config *whole,
                     uint32_t block)
{
    if (x->has != NULL)
        memset(has(x, whole, block, 0), 0, whole->num_layers);
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

static void forget_written(const struct split_extremes *x, const struct backend_pool_config *whole,
                           const struct backend_batch *batch)
{
    for (uint32_t i = 0; i < batch->n_items; i++) {
        const struct backend_item *d = &batch->items[i];
        const uint32_t end = blocks_seen(whole, d);
        for (uint32_t k = d->pos / whole->block_tokens; (d->flags & BACKEND_APPEND) && k < end; k++)
            *has(x, whole, d->block_table[k], d->layer) = 0;
    }
    for (uint32_t i = 0; i < batch->n_copies; i++)
        memset(has(x, whole, batch->copies[i].dst, 0), 0, whole->num_layers);
}

/* Those of one item; a block that is listed is marked, so that it is listed once. */
static attn_status find(struct split_extremes *x, const struct backend_pool_config *whole,
                        const struct backend_item *d, struct extremes_list *out)
{
    const uint32_t n_blocks = blocks_seen(whole, d);
    attn_status st =
        array_reserve(&out->list, &out->capacity, (uint64_t)out->n + n_blocks, sizeof *out->list);
    for (uint32_t k = 1; st == ATTN_OK && k + 1 < n_blocks; k++) {
        uint8_t *is_known = has(x, whole, d->block_table[k], d->layer);
        if (*is_known)
            continue;
        *is_known = 1;
        out->list[out->n++] = (struct backend_block_layer){d->block_table[k], d->layer};
    }
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
        if (x->has == NULL)
            x->has = calloc(whole->n_blocks, whole->num_layers);
        st = x->has == NULL ? ATTN_ENOMEM : find(x, whole, d, out);
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

/* Floats of 16 or 32 bits in an order of integers; none of them is not a number. */
static uint32_t ordered(uint32_t bits, uint32_t sign)
{
    return bits & sign ? ~bits & (sign | (sign - 1)) : bits | sign;
}

static uint32_t load(const void *row, uint32_t i, bool is_wide)
{
    return is_wide ? ((const uint32_t *)row)[i] : ((const uint16_t *)row)[i];
}

static void store(void *row, uint32_t i, bool is_wide, uint32_t bits)
{
    if (is_wide)
        ((uint32_t *)row)[i] = bits;
    else
        ((uint16_t *)row)[i] = (uint16_t)bits;
}

/* Of n_cards rows of n elements the largest or the smallest of each column, into all of them. */
static void join_row(void *const *rows, uint32_t n_cards, uint32_t n, bool is_wide, bool is_max)
{
    const uint32_t sign = is_wide ? UINT32_C(1) << 31 : UINT32_C(1) << 15;
    for (uint32_t i = 0; i < n; i++) {
        uint32_t best = load(rows[0], i, is_wide);
        for (uint32_t k = 1; k < n_cards; k++) {
            const uint32_t x = load(rows[k], i, is_wide);
            if ((ordered(x, sign) > ordered(best, sign)) == is_max)
                best = x;
        }
        for (uint32_t k = 0; k < n_cards; k++)
            store(rows[k], i, is_wide, best);
    }
}

void extremes_join(const struct backend_pool_config *whole, void *const *bytes, uint32_t n_cards,
                   uint32_t n)
{
    const uint32_t size = (uint32_t)attn_dtype_bytes(backend_extremes_dtype(whole));
    const size_t row_bytes = (size_t)whole->head_dim_k * size;
    void *rows[BACKEND_MAX_PARTS];
    for (size_t i = 0; i < (size_t)n * whole->num_kv_heads * 2; i++) {
        for (uint32_t k = 0; k < n_cards; k++)
            rows[k] = (uint8_t *)bytes[k] + i * row_bytes;
        join_row(rows, n_cards, whole->head_dim_k, size == 4, i % 2 == 0);
    }
}
