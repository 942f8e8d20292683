/* gpu_shared.c: what items of a batch begin with in common (kernels/prefix.h) is computed once for
 * all of them.
 *
 * To the kernels a group of items is an item with all their queries, which see all of its keys and
 * append none; what is left of a member is an item whose row of the block table begins behind what
 * its groups have. All of them leave outputs and lse in device memory, in levels: first those of
 * the members, then of their first groups, then of the groups inside those. A launch behind
 * attention (merge.cu) adds them.
 */
#include "kernels/gpu/gpu_host.h"
#include "kernels/grow.h"
#include "kernels/layer_visible.h"

#include <stdlib.h>
#include <string.h>

/* What a processor reads through the L2 cache, which has what items share, in the time that groups'
 * launches take; and the keys of a tile, at whose multiples groups begin and end. The executor's
 * tests have both smaller. */
#ifndef GPU_SHARED_BYTES
#define GPU_SHARED_BYTES (2u << 20)
#endif
#ifndef GPU_SHARED_KEYS
#define GPU_SHARED_KEYS 128
#endif

/* A group has tiles that are not full and splits of its own. */
#define GROUP_BYTES (GPU_SHARED_BYTES == 0 ? 0 : 1 << 20)
#define TILE_ROWS 128
#define LATENT_TILE_ROWS 64
#define ROW_TOUCHES 4 /* results of a group and of what is left, written and read */

static uint32_t queries_at_once(const struct backend_pool *p)
{
    const uint32_t n = (p->config.is_v_in_k ? LATENT_TILE_ROWS : TILE_ROWS) / p->kv.group;
    return n > 0 ? n : 1;
}

/* Of a query, for each level: its heads' outputs, then their lse. */
static uint64_t out_bytes(const struct backend_pool *p)
{
    return (uint64_t)p->config.num_q_heads * p->config.head_dim_v *
           attn_dtype_bytes(p->config.q_dtype);
}

static uint64_t result_bytes(const struct backend_pool *p)
{
    return out_bytes(p) + p->config.num_q_heads * sizeof(float);
}

/* Blocks that all queries of the item see whole and may compute with others: those in front of its
 * tokens. */
static uint32_t blocks_of(const struct backend_pool *p, const struct backend_item *it)
{
    const struct attn_layer_spec *s = &p->specs[it->layer];
    if (!(it->flags & BACKEND_ATTEND) || s->window_tokens > 0 || s->n_branches > 0 ||
        (it->nodes == NULL && it->n_tokens > DECODE_MAX_TOKENS) || it->lists.starts != NULL ||
        gpu_item_chooses(p, it))
        return 0;
    return it->pos >> p->kv.block_shift;
}

static uint64_t block_bytes(const struct backend_pool *p)
{
    return layer_key_bytes(&p->config) * p->config.num_kv_heads << p->kv.block_shift;
}

static struct prefix_cost cost_of(const struct backend_pool *p)
{
    return (struct prefix_cost){
        .align_blocks =
            p->kv.block_tokens < GPU_SHARED_KEYS ? GPU_SHARED_KEYS / p->kv.block_tokens : 1,
        .queries_at_once = queries_at_once(p),
        .block_bytes = block_bytes(p),
        .query_bytes = result_bytes(p) * ROW_TOUCHES,
        .group_bytes = GROUP_BYTES,
    };
}

/* A tree's own kernel reads K and V for every few rows; others read what its nodes see in front of
 * them for all. */
static uint32_t tree_passes(const struct backend_pool *p, const struct backend_item *it)
{
    return (it->n_tokens * p->kv.group + GPU_VECTOR_ROWS - 1) / GPU_VECTOR_ROWS;
}

/* Groups that the group is in, itself included. */
static uint32_t depth_of(const struct prefixes *x, uint32_t group)
{
    uint32_t n = 0;
    for (; group != PREFIX_NONE; group = x->groups[group].parent)
        n++;
    return n;
}

/* The last group of an item of the batch for which there is a level. */
static uint32_t group_of(const struct prefixes *x, uint32_t item)
{
    uint32_t group = x->group_of[item];
    while (depth_of(x, group) > GPU_SHARED_LEVELS)
        group = x->groups[group].parent;
    return group;
}

static uint64_t keys_of(const struct backend_pool *p, const struct prefix_group *g)
{
    return (uint64_t)(g->end_block - g->first_block) << p->kv.block_shift;
}

/* A group's queries are at its last keys, so that it is more than one item if it has more queries
 * than keys. */
static uint32_t pieces_of(const struct backend_pool *p, const struct prefix_group *g)
{
    const uint64_t keys = keys_of(p, g);
    return (uint32_t)((g->n_queries + keys - 1) / keys);
}

static attn_status reserve(struct gpu_shared *s, uint32_t n)
{
    attn_status st = array_reserve(&s->begins, &s->begins_capacity, n, sizeof *s->begins);
    if (st == ATTN_OK)
        st = array_reserve(&s->items, &s->items_capacity, n, sizeof *s->items);
    if (st == ATTN_OK)
        st = array_reserve(&s->from, &s->from_capacity, n, sizeof *s->from);
    if (st == ATTN_OK)
        st = array_reserve(&s->place, &s->place_capacity, n, sizeof *s->place);
    if (st == ATTN_OK)
        st = array_reserve(&s->query_of, &s->query_of_capacity, n, sizeof *s->query_of);
    return st;
}

/* What the groups that were found take and save; they go if there is no room, or if they save less
 * than the launches take. */
static void weigh(struct backend *b, const struct backend_batch *batch, struct gpu_shared *s)
{
    const struct backend_pool *p = batch->pool;
    struct prefixes *x = &s->prefixes;
    const uint64_t room = (uint64_t)GPU_SHARED_SLOTS * b->part_dv * sizeof(float);
    uint64_t pieces = 0, n_levels = 1, saved = 0;
    s->n_queries = 0;
    s->bytes = 0;
    for (uint32_t i = 0; i < x->n_groups; i++) {
        const struct prefix_group *g = &x->groups[i];
        const uint32_t depth = depth_of(x, i);
        if (depth > GPU_SHARED_LEVELS)
            continue;
        pieces += pieces_of(p, g);
        n_levels = depth + 1 > n_levels ? depth + 1 : n_levels;
        saved += g->saved_bytes;
        s->n_queries += depth == 1 ? g->n_queries : 0;
        s->bytes += (g->n - 1) * (uint64_t)(g->end_block - g->first_block) * block_bytes(p);
    }
    const uint64_t least = (uint64_t)GPU_SHARED_BYTES * b->device.n_processors;
    s->n_pieces = (uint32_t)pieces;
    if (pieces > b->config.max_batch_items || s->n_queries * n_levels * result_bytes(p) > room ||
        saved < least)
        x->n_groups = s->n_pieces = 0;
}

/* The batch's items, those that may be in groups first and in the order of prefixes.order, without
 * what their groups have. */
static void list_items(const struct backend_batch *batch, struct gpu_shared *s)
{
    const struct prefixes *x = &s->prefixes;
    const uint32_t shift = batch->pool->kv.block_shift;
    uint32_t n = 0;
    memset(s->place, 0, batch->n_items * sizeof *s->place);
    for (uint32_t i = 0; i < x->n_ordered; i++) {
        s->from[n++] = x->order[i];
        s->place[x->order[i]] = 1; /* it is listed */
    }
    for (uint32_t i = 0; i < batch->n_items; i++)
        if (s->place[i] == 0)
            s->from[n++] = i;
    for (uint32_t i = 0; i < n; i++) {
        struct backend_item *it = &s->items[i];
        *it = batch->items[s->from[i]];
        const uint32_t group = group_of(x, s->from[i]);
        const uint32_t n_blocks = group == PREFIX_NONE ? 0 : x->groups[group].end_block;
        it->pos -= n_blocks << shift;
        it->block_table += n_blocks;
    }
}

enum gpu_kernel gpu_groups_kernel(const struct backend_pool *p, uint32_t layer, uint32_t n_tokens,
                                  uint32_t n_keys)
{
    const struct gpu_choice general = {.is_forced = true, .forced = GPU_MATRIX_16};
    const struct backend_item it = {.flags = BACKEND_ATTEND, .layer = layer, .n_tokens = n_tokens};
    if (p->prefill && prefill_blocks(p->prefill, n_keys) <= p->prefill->decoded_blocks)
        return GPU_PREFILL;
    const enum gpu_kernel kernel = gpu_kernel_of(p, &general, &it);
    return kernel == GPU_MATRIX_16 ? GPU_MATRIX_64 : kernel;
}

attn_status gpu_shared_find(struct backend *b, const struct gpu_choice *choice,
                            const struct backend_batch *batch)
{
    const struct backend_pool *p = batch->pool;
    struct gpu_shared *s = &b->shared;
    s->prefixes.n_groups = s->n_pieces = 0;
    if (s->is_off || p->config.is_batch_invariant || p->has_alibi || p->config.n_stripes > 1 ||
        choice->is_forced || choice->n_shards > 0)
        return ATTN_OK;
    attn_status st = reserve(s, batch->n_items);
    for (uint32_t i = 0; st == ATTN_OK && i < batch->n_items; i++) {
        const struct backend_item *it = &batch->items[i];
        const uint32_t n_blocks = blocks_of(p, it);
        /* those of a group lie side by side in the job, which has items sorted by kernel */
        const uint32_t kernel = n_blocks > 0 ? gpu_kernel_of(p, choice, it) : 0;
        const bool is_tree =
            kernel == GPU_TREE &&
            gpu_groups_kernel(p, it->layer, it->n_tokens, it->pos + it->n_tokens) != GPU_VECTOR;
        s->begins[i] = (struct prefix_item){.table = it->block_table,
                                            .n_blocks = n_blocks,
                                            .n_queries = it->n_tokens,
                                            .n_passes = is_tree ? tree_passes(p, it) : 0,
                                            .layer = it->layer * GPU_N_KERNELS + kernel};
    }
    const struct prefix_cost cost = cost_of(p);
    if (st == ATTN_OK)
        st = prefixes_find(&s->prefixes, &cost, s->begins, batch->n_items);
    if (st == ATTN_OK && s->prefixes.n_groups > 0)
        weigh(b, batch, s);
    if (st == ATTN_OK && s->prefixes.n_groups > 0)
        list_items(batch, s);
    if (st == ATTN_OK)
        return ATTN_OK;
    s->prefixes.n_groups = 0;
    return gpu_fail(b, st, "no memory for what %u items have in common", batch->n_items);
}

/* ---- in a job */

/* Where a level has the results of a query. */
static char *out_at(const struct backend *b, const struct backend_pool *p, uint32_t level,
                    uint32_t query)
{
    char *base = (char *)(b->part_o + (uint64_t)GPU_PART_SLOTS * b->part_dv);
    return base + ((uint64_t)level * b->shared.n_queries + query) * out_bytes(p);
}

static float *lse_at(const struct backend *b, const struct backend_pool *p, uint32_t n_levels,
                     uint32_t level, uint32_t query)
{
    return (float *)out_at(b, p, n_levels, 0) +
           ((uint64_t)level * b->shared.n_queries + query) * p->config.num_q_heads;
}

static uint32_t n_levels_of(const struct prefixes *x)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < x->n_groups; i++) {
        const uint32_t depth = depth_of(x, i);
        n = depth > n && depth <= GPU_SHARED_LEVELS ? depth : n;
    }
    return n + 1;
}

/* What is left of members leaves its results in the first level. */
static void write_joined(struct backend *b, struct gpu_job *j, struct gpu_item *items,
                         struct gpu_joined *joined, uint32_t n_levels)
{
    const struct backend_pool *p = j->pool;
    struct gpu_shared *s = &b->shared;
    const struct prefixes *x = &s->prefixes;
    const uint32_t heads = p->config.num_q_heads;
    uint32_t query = 0, most = 0;
    j->join = (struct gpu_join){.layers = p->kv.layers,
                                .outs = out_at(b, p, 0, 0),
                                .lses = lse_at(b, p, n_levels, 0, 0),
                                .n_rows = s->n_queries * heads,
                                .num_q_heads = heads,
                                .dv = p->config.head_dim_v,
                                .q_dtype = (uint32_t)p->config.q_dtype};
    for (uint32_t i = 0; i < x->n_ordered; i++) {
        const uint32_t group = group_of(x, x->order[i]);
        struct gpu_item *it = &items[s->place[i]];
        s->query_of[i] = query;
        if (group == PREFIX_NONE)
            continue;
        joined[j->join.n_items++] = (struct gpu_joined){.out = it->out,
                                                        .lse = it->lse,
                                                        .row0 = query * heads,
                                                        .n_rows = it->n_tokens * heads,
                                                        .n_parts = depth_of(x, group) + 1,
                                                        .layer = it->layer};
        most = it->n_tokens > most ? it->n_tokens : most;
        it->out = out_at(b, p, 0, query);
        it->lse = lse_at(b, p, n_levels, 0, query);
        it->table_at += x->groups[group].end_block;
        query += it->n_tokens;
    }
    j->join.most_rows = most * heads;
}

void gpu_shared_write(struct backend *b, struct gpu_job *j, struct gpu_item *items,
                      uint32_t n_items, struct gpu_joined *joined)
{
    const struct backend_pool *p = j->pool;
    struct gpu_shared *s = &b->shared;
    const struct prefixes *x = &s->prefixes;
    const uint32_t n_levels = n_levels_of(x);
    const uint64_t q_row = (uint64_t)p->config.num_q_heads * p->config.head_dim_k *
                           attn_dtype_bytes(p->config.q_dtype);
    for (uint32_t i = 0; i < n_items; i++)
        s->place[j->order[i]] = i;
    write_joined(b, j, items, joined, n_levels);
    struct gpu_item *to = items + n_items;
    uint32_t token0 = 0;
    for (uint32_t i = 0; i < x->n_groups; i++) {
        const struct prefix_group *g = &x->groups[i];
        const uint32_t level = depth_of(x, i), keys = (uint32_t)keys_of(p, g);
        const uint32_t query = s->query_of[g->first];
        const struct gpu_item *first = &items[s->place[g->first]];
        const uint32_t row = s->items[g->first].table_row * p->config.max_row_blocks;
        if (level > GPU_SHARED_LEVELS)
            continue;
        for (uint32_t q = 0, n; q < g->n_queries; q += n, token0 += n) {
            n = g->n_queries - q < keys ? g->n_queries - q : keys;
            *to++ = (struct gpu_item){
                .q = (char *)first->q + q * q_row,
                .out = out_at(b, p, level, query + q),
                .lse = lse_at(b, p, n_levels, level, query + q),
                .table_at = row + g->first_block,
                .pos = keys - n,
                .n_tokens = n,
                .layer = first->layer,
                .token0 = token0,
                .is_full = 1,
            };
        }
    }
}

void gpu_shared_fini(struct gpu_shared *s)
{
    prefixes_fini(&s->prefixes);
    free(s->begins);
    free(s->items);
    free(s->from);
    free(s->place);
    free(s->query_of);
    *s = (struct gpu_shared){0};
}
