/* attend_shared.c: keys that items of a batch have in common. Which, and whether computing them
 * once pays, is prefix.h's; here is what a query may share, what that costs on a CPU, and where the
 * results of groups are until the rest of an item's keys is there.
 */
#include "kernels/cpu/cpu.h"
#include "kernels/grow.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* A partial result is written, read, and added to another's. A group has threads meet once more;
 * its tiles take what a few more pages take to read. */
#define ROW_TOUCHES 3
#define GROUP_BYTES (16 << 10)

/* Rows of a tall tile. Where K and V are laid in pairs once for all rows, more rows cost less each;
 * elsewhere they are converted for every four rows, and the sums of more rows leave the first
 * cache. */
#define PLAIN_ROWS 16

uint32_t cpu_shared_queries_at_once(const struct attend_geometry *g, const struct cpu_isa *isa)
{
    const bool is_paired = isa->has_pairs && g->kv_dtype == ATTN_BF16;
    return (is_paired ? MAX_ROWS : PLAIN_ROWS) / g->group;
}

/* Blocks that all queries of the item see whole and may compute with others: those of committed
 * tokens. Of items with many rows K and V are read once for many already. */
static uint32_t blocks_of(const struct backend_pool *p, const struct backend_item *item,
                          uint32_t queries_at_once)
{
    const struct attn_layer_spec *spec = &p->layers[item->layer];
    if ((item->flags & BACKEND_ATTEND) == 0 || spec->window_tokens > 0 || spec->n_branches > 0 ||
        item->lists.starts != NULL || cpu_chosen_blocks(p, item) > 0 ||
        item->n_tokens > queries_at_once / 2)
        return 0;
    return item->pos >> p->geometry.block_shift;
}

static struct prefix_cost cost_of(const struct backend_pool *p, uint32_t queries_at_once)
{
    const struct attend_geometry *g = &p->geometry;
    const struct kv_layout *l = &g->layout;
    const uint64_t row_bytes = l->v_offset == 0 ? l->k_row_bytes : l->k_row_bytes + l->v_row_bytes;
    return (struct prefix_cost){
        .align_blocks = g->block_tokens < TILE_TOKENS ? TILE_TOKENS / g->block_tokens : 1,
        .queries_at_once = queries_at_once,
        .block_bytes = row_bytes * g->block_tokens,
        .query_bytes = (uint64_t)g->group * (g->dv + 2) * sizeof(float) * ROW_TOUCHES,
        .group_bytes = GROUP_BYTES,
    };
}

static attn_status reserve_results(struct shared *s, size_t n_floats)
{
    if (n_floats <= s->results_capacity)
        return ATTN_OK;
    const size_t want = (n_floats + n_floats / 2 + 15) / 16 * 16;
    float *results = aligned_alloc(64, want * sizeof *results);
    if (results == NULL)
        return ATTN_ENOMEM;
    free(s->results);
    s->results = results;
    s->results_capacity = want;
    return ATTN_OK;
}

/* Places for queries and results of what was found. */
static attn_status lay_out(struct shared *s, const struct backend_pool *p,
                           const struct backend_item *items)
{
    const struct prefixes *x = &s->prefixes;
    uint64_t n_queries = 0, n_rows = 0;
    for (uint32_t i = 0; i < x->n_ordered; i++)
        n_queries += items[x->order[i]].n_tokens;
    attn_status st =
        array_reserve(&s->queries, &s->queries_capacity, n_queries, sizeof *s->queries);
    if (st == ATTN_OK)
        st = array_reserve(&s->at, &s->at_capacity, x->n_groups, sizeof *s->at);
    if (st != ATTN_OK)
        return st;
    for (uint32_t i = 0, q = 0; i < x->n_ordered; i++) {
        const struct backend_item *item = &items[x->order[i]];
        s->query_of[x->order[i]] = q;
        for (uint32_t t = 0; t < item->n_tokens; t++)
            s->queries[q++] = (struct shared_query){item, t};
    }
    s->row_floats = (p->geometry.dv + 15) / 16 * 16 + 16;
    for (uint32_t i = 0; i < x->n_groups; i++) {
        s->at[i] = n_rows * s->row_floats;
        n_rows += (uint64_t)x->groups[i].n_queries * p->geometry.num_q_heads;
    }
    return reserve_results(s, n_rows * s->row_floats);
}

attn_status cpu_shared_find(struct backend *b, const struct cpu_isa *isa,
                            const struct backend_batch *batch)
{
    const struct backend_pool *p = batch->pool;
    struct shared *s = &b->shared;
    const uint32_t queries_at_once = cpu_shared_queries_at_once(&p->geometry, isa);
    s->prefixes.n_groups = 0;
    if (batch->n_items < 2 || p->config.is_batch_invariant || queries_at_once < 2)
        return ATTN_OK;
    attn_status st = array_reserve(&s->items, &s->items_capacity, batch->n_items, sizeof *s->items);
    if (st == ATTN_OK)
        st =
            array_reserve(&s->query_of, &s->query_of_capacity, batch->n_items, sizeof *s->query_of);
    for (uint32_t i = 0; st == ATTN_OK && i < batch->n_items; i++) {
        const struct backend_item *item = &batch->items[i];
        s->items[i] = (struct prefix_item){.table = item->block_table,
                                           .n_blocks = blocks_of(p, item, queries_at_once),
                                           .n_queries = item->n_tokens,
                                           .layer = item->layer};
    }
    const struct prefix_cost cost = cost_of(p, queries_at_once);
    if (st == ATTN_OK)
        st = prefixes_find(&s->prefixes, &cost, s->items, batch->n_items);
    if (st == ATTN_OK && s->prefixes.n_groups > 0)
        st = lay_out(s, p, batch->items);
    if (st == ATTN_OK)
        return ATTN_OK;
    s->prefixes.n_groups = 0;
    cpu_fail(b, "no memory for what %u items have in common", batch->n_items);
    return ATTN_ENOMEM;
}

void cpu_shared_fini(struct shared *s)
{
    prefixes_fini(&s->prefixes);
    free(s->items);
    free(s->queries);
    free(s->query_of);
    free(s->at);
    free(s->results);
    *s = (struct shared){0};
}

uint32_t cpu_shared_keys(const struct backend *b, const struct attend_geometry *g, uint32_t item)
{
    const struct prefixes *x = &b->shared.prefixes;
    const uint32_t group = x->n_groups > 0 ? x->group_of[item] : PREFIX_NONE;
    return group == PREFIX_NONE ? 0 : x->groups[group].end_block << g->block_shift;
}

uint64_t cpu_shared_bytes(const struct backend *b, const struct backend_batch *batch)
{
    const struct prefixes *x = &b->shared.prefixes;
    const struct attend_geometry *g = &batch->pool->geometry;
    uint64_t n_tokens = 0;
    for (uint32_t i = 0; i < x->n_groups; i++)
        n_tokens +=
            (uint64_t)(x->groups[i].n - 1) * (x->groups[i].end_block - x->groups[i].first_block)
            << g->block_shift;
    /* a token of a layer: what all queries see of one token */
    const struct attn_layer_spec plain = {.is_full = true};
    return n_tokens *
           layer_bytes_seen(&plain, &batch->pool->config, &(struct backend_item){.n_tokens = 1});
}

/* The group's result of one q head of those of the kv head; query: its place in queries. */
static float *result_of(const struct backend *b, const struct attend_geometry *g, uint32_t group,
                        uint32_t kv_head, uint32_t query, uint32_t head)
{
    const struct shared *s = &b->shared;
    const struct prefix_group *x = &s->prefixes.groups[group];
    const uint32_t first = s->query_of[s->prefixes.order[x->first]];
    const size_t row = ((size_t)kv_head * x->n_queries + query - first) * g->group + head;
    return s->results + s->at[group] + row * s->row_floats;
}

void cpu_shared_keep(struct backend *b, const struct segment *s, const struct attend_partial *p)
{
    const struct attend_rows *r = &s->rows;
    for (uint32_t h = 0; h < r->n_heads; h++)
        for (uint32_t i = 0; i < r->n_rows; i++) {
            const size_t row = (size_t)h * r->n_rows + i;
            float *to = result_of(b, r->g, s->group, r->kv_head + h,
                                  s->first_query + i / r->g->group, i % r->g->group);
            memcpy(to, p->o + row * p->o_stride, p->o_stride * sizeof *to);
            to[p->o_stride] = p->max[row];
            to[p->o_stride + 1] = p->sum[row];
        }
}

/* Has a part seen nothing? One whose scores were all NaN has sum NaN. */
static bool is_nothing(float max, float sum)
{
    return max == -INFINITY && sum == 0;
}

/* One row of *p and a result, added. */
static void add(const struct attend_partial *p, size_t row, const float *from)
{
    float *o = p->o + row * p->o_stride;
    const float max = from[p->o_stride], sum = from[p->o_stride + 1];
    if (is_nothing(max, sum))
        return;
    if (is_nothing(p->max[row], p->sum[row])) {
        memcpy(o, from, p->o_stride * sizeof *o);
        p->max[row] = max;
        p->sum[row] = sum;
        return;
    }
    const float most = fmaxf(p->max[row], max);
    const float w = p->max[row] == most && isfinite(most) ? 1 : exp2f(p->max[row] - most);
    const float u = max == most && isfinite(most) ? 1 : exp2f(max - most);
    for (uint32_t d = 0; d < p->o_stride; d++)
        o[d] = w * o[d] + u * from[d];
    p->sum[row] = w * p->sum[row] + u * sum;
    p->max[row] = most;
}

void cpu_shared_add(const struct backend *b, const struct segment *s,
                    const struct attend_partial *p)
{
    const struct attend_rows *r = &s->rows;
    for (uint32_t k = s->group; k != PREFIX_NONE; k = b->shared.prefixes.groups[k].parent)
        for (uint32_t h = 0; h < r->n_heads; h++)
            for (uint32_t i = 0; i < r->n_rows; i++) {
                const uint32_t row = r->row0 + i;
                add(p, (size_t)h * r->n_rows + i,
                    result_of(b, r->g, k, r->kv_head + h, s->first_query + row / r->g->group,
                              row % r->g->group));
            }
}
