/* prefix.c: finds the items of a batch that begin alike (prefix.h). Items are looked up by their
 * first block; those that are not alone are sorted by their tables, so that those which begin alike
 * are neighbours, and then divided from the front: what all of a span have in common is a group if
 * that pays, and where neighbours part, the span is divided.
 */
#include "kernels/prefix.h"

#include "kernels/grow.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#define MAX_DIVISIONS 8 /* of a span, one inside the other: bounds what is spent on odd batches */
#define RUN_BLOCKS 64 /* compared at once */

struct prefix_key {
    const uint32_t *table;
    uint32_t n_blocks, layer, item;
    uint32_t alike; /* blocks that it has in common with the one in front */
};

/* Keys that are still to be divided: first .. first + n - 1. */
struct prefix_span {
    uint32_t first, n, parent, block, n_divisions;
};

static uint32_t min_u32(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

static uint32_t passes(const struct prefix_cost *c, uint64_t n_queries)
{
    return (uint32_t)((n_queries + c->queries_at_once - 1) / c->queries_at_once);
}

/* Of the item by itself. */
static uint32_t own_passes(const struct prefix_cost *c, const struct prefix_item *item)
{
    return item->n_passes > 0 ? item->n_passes : passes(c, item->n_queries);
}

static bool may_be_alone(const struct prefix_cost *c, const struct prefix_item *item)
{
    return own_passes(c, item) > passes(c, item->n_queries);
}

static uint32_t alike(const struct prefix_key *a, const struct prefix_key *b)
{
    uint32_t n = a->layer == b->layer ? min_u32(a->n_blocks, b->n_blocks) : 0, i = 0;
    while (n - i >= RUN_BLOCKS &&
           memcmp(a->table + i, b->table + i, RUN_BLOCKS * sizeof *a->table) == 0)
        i += RUN_BLOCKS;
    while (i < n && a->table[i] == b->table[i])
        i++;
    return i;
}

/* Any order in which tables that begin alike are neighbours. */
static int compare(const void *pa, const void *pb)
{
    const struct prefix_key *a = pa, *b = pb;
    if (a->layer != b->layer)
        return a->layer < b->layer ? -1 : 1;
    int d = memcmp(a->table, b->table, min_u32(a->n_blocks, b->n_blocks) * sizeof *a->table);
    if (d != 0)
        return d;
    if (a->n_blocks != b->n_blocks)
        return a->n_blocks < b->n_blocks ? -1 : 1;
    return a->item < b->item ? -1 : 1;
}

static attn_status reserve(struct prefixes *p, uint32_t n, uint32_t n_buckets)
{
    attn_status st = array_reserve(&p->groups, &p->groups_capacity, 2 * n, sizeof *p->groups);
    if (st == ATTN_OK)
        st = array_reserve(&p->order, &p->order_capacity, n, sizeof *p->order);
    if (st == ATTN_OK)
        st = array_reserve(&p->group_of, &p->group_of_capacity, n, sizeof *p->group_of);
    if (st == ATTN_OK)
        st = array_reserve(&p->keys, &p->keys_capacity, n, sizeof *p->keys);
    if (st == ATTN_OK)
        st = array_reserve(&p->spans, &p->spans_capacity, 2 * n, sizeof *p->spans);
    if (st == ATTN_OK)
        st = array_reserve(&p->buckets, &p->buckets_capacity, n_buckets, sizeof *p->buckets);
    return st;
}

static void add_key(struct prefixes *p, const struct prefix_item *items, uint32_t i, uint32_t *n)
{
    const struct prefix_item *item = &items[i];
    p->group_of[i] = 0; /* it is there */
    p->keys[(*n)++] = (struct prefix_key){
        .table = item->table, .n_blocks = item->n_blocks, .layer = item->layer, .item = i};
}

/* Those that begin with the same block as another or may be groups alone; returns their number. */
static uint32_t find_keys(struct prefixes *p, const struct prefix_cost *c,
                          const struct prefix_item *items, uint32_t n_items, uint32_t n_buckets)
{
    uint32_t n = 0;
    memset(p->buckets, 0xff, n_buckets * sizeof *p->buckets);
    memset(p->group_of, 0xff, n_items * sizeof *p->group_of);
    for (uint32_t i = 0; i < n_items; i++) {
        if (items[i].n_blocks < c->align_blocks)
            continue;
        uint32_t hash = (items[i].table[0] ^ items[i].layer * 0x9e3779b9u) * 0x85ebca6bu;
        uint32_t at = (hash ^ hash >> 16) & (n_buckets - 1), other;
        while ((other = p->buckets[at]) != PREFIX_NONE &&
               (items[other].table[0] != items[i].table[0] || items[other].layer != items[i].layer))
            at = (at + 1) & (n_buckets - 1);
        if (other == PREFIX_NONE) {
            p->buckets[at] = i;
            if (may_be_alone(c, &items[i]))
                add_key(p, items, i, &n);
            continue;
        }
        if (p->group_of[other] == PREFIX_NONE)
            add_key(p, items, other, &n);
        add_key(p, items, i, &n);
    }
    return n;
}

/* Makes a group of the span up to block `end` if it pays. */
static void try_group(struct prefixes *p, const struct prefix_cost *c,
                      const struct prefix_item *items, struct prefix_span *s, uint32_t end)
{
    uint64_t n_queries = 0, n_alone = 0;
    if (end <= s->block)
        return;
    for (uint32_t i = s->first; i < s->first + s->n; i++) {
        const uint32_t n = items[p->keys[i].item].n_queries;
        n_queries += n;
        n_alone += own_passes(c, &items[p->keys[i].item]);
    }
    const uint64_t n_together = passes(c, n_queries);
    const uint64_t saved =
        n_alone > n_together ? (n_alone - n_together) * (end - s->block) * c->block_bytes : 0;
    if (n_queries > UINT32_MAX || saved <= n_queries * c->query_bytes + c->group_bytes)
        return;
    for (uint32_t i = s->first; i < s->first + s->n; i++)
        p->group_of[p->keys[i].item] = p->n_groups;
    p->groups[p->n_groups] = (struct prefix_group){.parent = s->parent,
                                                   .first_block = s->block,
                                                   .end_block = end,
                                                   .first = s->first,
                                                   .n = s->n,
                                                   .n_queries = (uint32_t)n_queries,
                                                   .saved_bytes = saved};
    s->parent = p->n_groups++;
    s->block = end;
}

/* Divides all keys; there are never more groups than keys but for those of one, since each parts
 * some from others or is the last of its span. */
static void divide(struct prefixes *p, const struct prefix_cost *c, const struct prefix_item *items,
                   uint32_t n_keys)
{
    uint32_t n_spans = 0;
    p->spans[n_spans++] = (struct prefix_span){.n = n_keys, .parent = PREFIX_NONE};
    while (n_spans > 0) {
        struct prefix_span s = p->spans[--n_spans];
        uint32_t least = s.n == 1 ? p->keys[s.first].n_blocks : UINT32_MAX, begin = s.first;
        for (uint32_t i = s.first + 1; i < s.first + s.n; i++)
            least = min_u32(least, p->keys[i].alike);
        try_group(p, c, items, &s, least / c->align_blocks * c->align_blocks);
        for (uint32_t i = s.first + 1; i <= s.first + s.n; i++) {
            if (i < s.first + s.n && p->keys[i].alike > least)
                continue;
            const uint32_t n = i - begin;
            const bool is_span = n >= 2 || may_be_alone(c, &items[p->keys[begin].item]);
            if (is_span && n < s.n && s.n_divisions < MAX_DIVISIONS)
                p->spans[n_spans++] = (struct prefix_span){.first = begin,
                                                           .n = n,
                                                           .parent = s.parent,
                                                           .block = s.block,
                                                           .n_divisions = s.n_divisions + 1};
            begin = i;
        }
    }
}

attn_status prefixes_find(struct prefixes *p, const struct prefix_cost *c,
                          const struct prefix_item *items, uint32_t n_items)
{
    uint32_t n_buckets = 4;
    p->n_groups = p->n_ordered = 0;
    if (c->align_blocks == 0 || c->queries_at_once == 0 || n_items > UINT32_MAX / 4)
        return ATTN_EINVAL;
    if (n_items == 0 || (n_items == 1 && !may_be_alone(c, items)))
        return ATTN_OK;
    while (n_buckets < 2 * n_items)
        n_buckets *= 2;
    attn_status st = reserve(p, n_items, n_buckets);
    if (st != ATTN_OK)
        return st;
    const uint32_t n = find_keys(p, c, items, n_items, n_buckets);
    if (n == 0)
        return ATTN_OK;
    qsort(p->keys, n, sizeof *p->keys, compare);
    for (uint32_t i = 0; i < n; i++) {
        p->keys[i].alike = i > 0 ? alike(&p->keys[i - 1], &p->keys[i]) : 0;
        p->order[i] = p->keys[i].item;
        p->group_of[p->keys[i].item] = PREFIX_NONE;
    }
    divide(p, c, items, n);
    p->n_ordered = n;
    return ATTN_OK;
}

void prefixes_fini(struct prefixes *p)
{
    if (p == NULL)
        return;
    free(p->groups);
    free(p->order);
    free(p->group_of);
    free(p->keys);
    free(p->spans);
    free(p->buckets);
    *p = (struct prefixes){0};
}
