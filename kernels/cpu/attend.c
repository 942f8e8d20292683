/* attend.c: cuts a batch's attention into segments (item, kv heads, rows that share K and V), plans
 * their runs, and lets the threads draw runs until none is left.
 *
 * The bytes of an output depend on the plan alone, never on which thread computed which run: splits
 * leave partials in slots of their own and are merged in split order by whoever finishes last.
 */
#include "kernels/cpu/cpu.h"
#include "kernels/grow.h"

#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

/* Runs are drawn, so a plan of several shares a thread evens out threads that start late or are
 * preempted; more shares mean more partials. */
#define SHARES_A_THREAD 4
#define MIN_RUN_TILES 2
#define MAX_SPLITS 64
#define FIXED_RUN_TILES 32
#define ALONE_BYTES (64 << 10)
#define MOST_SLOT_BYTES (32 << 20) /* partial results at once; of a fixed plan there may be more */

struct attend_job {
    struct backend *b;
    const struct cpu_isa *isa;
    struct segment *segments; /* those of the plan */
    size_t slot_floats;
    uint32_t max_rows, o_stride;
    _Atomic uint32_t next_run;
};

static struct attend_partial slot_of(const struct attend_job *job, uint32_t slot)
{
    float *at = job->b->slots + slot * job->slot_floats;
    return (struct attend_partial){.o = at,
                                   .max = at + (size_t)job->max_rows * job->o_stride,
                                   .sum = at + (size_t)job->max_rows * (job->o_stride + 1),
                                   .o_stride = job->o_stride};
}

/* Adds the splits up, in order, into *to. */
static void merge(const struct attend_job *job, uint32_t slot, uint32_t n_splits, uint32_t n_rows,
                  const struct attend_partial *to)
{
    for (uint32_t row = 0; row < n_rows; row++) {
        float max = -INFINITY, sum = 0, *o = to->o + (size_t)row * to->o_stride;
        for (uint32_t i = 0; i < n_splits; i++)
            max = fmaxf(max, slot_of(job, slot + i).max[row]);
        memset(o, 0, to->o_stride * sizeof *o);
        for (uint32_t i = 0; i < n_splits; i++) {
            struct attend_partial p = slot_of(job, slot + i);
            /* a split that saw nothing has sum 0; one whose scores were all NaN has sum NaN */
            if (p.max[row] == -INFINITY && p.sum[row] == 0)
                continue;
            float w = p.max[row] == max && isfinite(max) ? 1 : exp2f(p.max[row] - max);
            const float *from = p.o + (size_t)row * p.o_stride;
            for (uint32_t d = 0; d < to->o_stride; d++)
                o[d] += w * from[d];
            sum += w * p.sum[row];
        }
        to->max[row] = max;
        to->sum[row] = sum;
    }
}

/* All of the segment's own keys are in *own. */
static void finish(const struct attend_job *job, const struct segment *s,
                   const struct attend_partial *own)
{
    if (s->rows.queries != NULL) {
        cpu_shared_keep(job->b, s, own);
        return;
    }
    if (s->group != PREFIX_NONE)
        cpu_shared_add(job->b, s, own);
    job->isa->finish(&s->rows, own);
}

static void run_runs(void *arg, uint32_t thread)
{
    struct attend_job *job = arg;
    struct backend *b = job->b;
    struct attend_scratch *x = b->scratch[thread];
    struct attend_partial own = {
        .o = x->o, .max = x->max, .sum = x->sum, .o_stride = job->o_stride};
    uint32_t i;
    while ((i = atomic_fetch_add(&job->next_run, 1)) < b->plan.n_runs) {
        const struct plan_run *run = &b->plan.runs[i];
        struct segment *s = &job->segments[run->segment];
        if (run->n_splits == 1) {
            job->isa->attend(&s->rows, s->first_tile + run->tile0, run->n_tiles, x, &own);
        } else {
            struct attend_partial p = slot_of(job, run->slot + run->split);
            job->isa->attend(&s->rows, s->first_tile + run->tile0, run->n_tiles, x, &p);
            if (atomic_fetch_add(&s->n_done, 1) + 1 < run->n_splits)
                continue;
            merge(job, run->slot, run->n_splits, s->rows.n_heads * s->rows.n_rows, &own);
        }
        finish(job, s, &own);
    }
}

/* Rows of an item and kv head that share one pass over K and V: whole tokens if a group fits. */
static uint32_t rows_at_once(uint32_t group)
{
    return group <= MAX_ROWS ? MAX_ROWS / group * group : MAX_ROWS;
}

/* Rows of each kv head that the item is cut into, one cut after another: all of them, or, where
 * each query has a list or chooses, those of a query. */
static uint32_t rows_of_part(const struct backend_pool *p, const struct backend_item *item)
{
    const bool is_one = item->lists.starts != NULL || cpu_chosen_blocks(p, item) > 0;
    return is_one ? p->geometry.group : item->n_tokens * p->geometry.group;
}

/* Segments of one kv head. */
static uint64_t segments_of(const struct backend_pool *p, const struct backend_item *item)
{
    const struct attend_geometry *g = &p->geometry;
    const uint64_t n = rows_of_part(p, item), step = rows_at_once(g->group);
    return (n + step - 1) / step * ((uint64_t)item->n_tokens * g->group / n);
}

/* kv heads of a segment: as many as the rows allow, fewer where that leaves too few parts to share.
 * An item's bytes do not depend on it: heads are cut together, never summed together. */
static uint32_t heads_at_once(const struct backend_pool *p, uint32_t longest, uint64_t tiles,
                              uint32_t n_threads)
{
    const struct attend_geometry *g = &p->geometry;
    const uint32_t heads = p->config.num_kv_heads;
    const bool is_narrow = g->dk <= NARROW_DIM && g->dv <= NARROW_DIM;
    const uint32_t most = is_narrow ? MAX_SEGMENT_ROWS : MAX_ROWS;
    uint32_t n = most / longest < heads ? most / longest : heads;
    while (n > 1 && tiles * ((heads + n - 1) / n) < (uint64_t)n_threads * SHARES_A_THREAD)
        n = (n + 1) / 2;
    return n;
}

/* The same for the batch's items. */
static uint32_t heads_of_items(const struct backend *b, const struct backend_batch *batch)
{
    const struct attend_geometry *g = &batch->pool->geometry;
    uint32_t longest = 1;
    uint64_t tiles = 0;
    for (uint32_t i = 0; i < batch->n_items; i++) {
        const struct backend_item *item = &batch->items[i];
        uint64_t rows = rows_of_part(batch->pool, item);
        if ((item->flags & BACKEND_ATTEND) == 0)
            continue;
        longest = rows > longest ? (uint32_t)(rows < MAX_ROWS ? rows : MAX_ROWS) : longest;
        tiles += item->lists.starts != NULL
                     ? backend_listed(&item->lists, item->n_tokens) / TILE_TOKENS + 1
                     : (item->pos + item->n_tokens - cpu_shared_keys(b, g, i)) / TILE_TOKENS + 1;
    }
    return heads_at_once(batch->pool, longest, tiles, cpu_threads_count(b->threads));
}

static attn_status reserve_segments(struct backend *b, uint64_t n)
{
    attn_status st = array_reserve(&b->segments, &b->segments_capacity, n, sizeof *b->segments);
    if (st == ATTN_OK)
        st = array_reserve(&b->segment_tiles, &b->tiles_capacity, n, sizeof *b->segment_tiles);
    if (st == ATTN_OK)
        return ATTN_OK;
    cpu_fail(b, "no memory for %llu segments", (unsigned long long)n);
    return ATTN_ENOMEM;
}

static attn_status reserve_slots(struct backend *b, size_t n_floats)
{
    if (n_floats <= b->slots_capacity)
        return ATTN_OK;
    size_t want = (n_floats + n_floats / 2 + 15) / 16 * 16;
    float *slots = aligned_alloc(64, want * sizeof *slots);
    if (slots == NULL) {
        cpu_fail(b, "no memory for %zu bytes of partial results", want * sizeof *slots);
        return ATTN_ENOMEM;
    }
    free(b->slots);
    b->slots = slots;
    b->slots_capacity = want;
    return ATTN_OK;
}

static uint32_t tiles_of(const struct attend_rows *r)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < layer_n_branches(r->spec); i++)
        n += visible_tiles_of(rows_visible(r, rows_branch(r, i)), TILE_TOKENS).n;
    return n;
}

/* Bytes of K and V that the item's queries visit. */
static uint64_t bytes_visited(const struct backend_pool *p, const struct backend_item *item)
{
    const struct backend_pool_config *c = &p->config;
    uint64_t n_keys = 0;
    if (item->lists.starts != NULL)
        return layer_bytes_listed(c, backend_listed(&item->lists, item->n_tokens));
    if (cpu_chosen_blocks(p, item) == 0)
        return layer_bytes_seen(&p->layers[item->layer], c, item);
    for (uint32_t t = 0; t < item->n_tokens; t++)
        n_keys += cpu_chosen_keys(p, item, t);
    return layer_bytes_listed(c, n_keys);
}

/* Does the query whose rows they are, of a choosing item, visit a block that is not there? */
static bool is_missed(const struct backend_pool *p, const struct attend_rows *r)
{
    const uint32_t n = (r->n_listed + p->geometry.block_tokens - 1) >> p->geometry.block_shift;
    for (uint32_t i = 0; r->item->chosen != NULL && i < n; i++)
        if (r->item->block_table[r->blocks[i]] >= p->config.n_blocks)
            return true;
    return false;
}

/* Fills segments and segment_tiles, which have room. */
static uint32_t make_segments(struct backend *b, struct backend_batch *batch, uint32_t n_heads,
                              uint32_t *out_max_rows)
{
    const struct backend_pool *p = batch->pool;
    const struct attend_geometry *g = &p->geometry;
    uint32_t n = 0, step = rows_at_once(g->group);
    *out_max_rows = 0;
    for (uint32_t i = 0; i < batch->n_items; i++) {
        const struct backend_item *item = &batch->items[i];
        if ((item->flags & BACKEND_ATTEND) == 0)
            continue;
        const struct attn_layer_spec *spec = &p->layers[item->layer];
        batch->kv_bytes += bytes_visited(p, item);
        uint32_t n_rows = item->n_tokens * g->group, heads = p->config.num_kv_heads;
        const bool is_choosing = cpu_chosen_blocks(p, item) > 0;
        uint32_t n_together = spec->n_branches > 0 || is_choosing ? 1 : n_heads;
        const uint32_t part = rows_of_part(p, item);
        const struct backend_lists *l = &item->lists;
        const uint32_t n_shared = cpu_shared_keys(b, g, i);
        const uint32_t group = n_shared > 0 ? b->shared.prefixes.group_of[i] : PREFIX_NONE;
        for (uint32_t h = 0; h < heads; h += n_together) {
            for (uint32_t row = 0, rows; row < n_rows; row += rows) {
                uint32_t left = part - row % part, token = row / g->group;
                rows = left < step ? left : step;
                struct segment *s = &b->segments[n];
                s->rows = (struct attend_rows){
                    .g = g,
                    .spec = spec,
                    .item = item,
                    .layer = p->base + item->layer * g->layout.layer_bytes,
                    .kv_head = h,
                    .n_heads = heads - h < n_together ? heads - h : n_together,
                    .row0 = row,
                    .n_rows = rows,
                };
                if (l->starts != NULL) {
                    s->rows.list = l->tokens + l->starts[token];
                    s->rows.n_listed = l->starts[token + 1] - l->starts[token];
                }
                if (is_choosing) {
                    s->rows.blocks = cpu_chosen_list(b, p, item, i, token, h);
                    s->rows.n_listed = cpu_chosen_keys(p, item, token);
                    if (is_missed(p, &s->rows)) {
                        if (row % part == 0) /* bytes_visited has counted it */
                            batch->kv_bytes -= s->rows.n_listed * layer_key_bytes(&p->config);
                        continue;
                    }
                }
                s->group = group;
                s->first_query = group != PREFIX_NONE ? b->shared.query_of[i] : 0;
                s->first_tile = n_shared / TILE_TOKENS;
                atomic_init(&s->n_done, 0);
                b->segment_tiles[n] = tiles_of(&s->rows) - s->first_tile;
                uint32_t all = s->rows.n_heads * s->rows.n_rows;
                *out_max_rows = all > *out_max_rows ? all : *out_max_rows;
                n++;
            }
        }
    }
    return n;
}

/* How the batch's segments are split, which are ready. */
static struct plan_config plan_of(const struct backend *b, const struct backend_pool *p,
                                  uint32_t n_segments, uint32_t n_shards)
{
    uint32_t n_threads = cpu_threads_count(b->threads), longest = 1;
    struct plan_config c = {
        .kind = p->config.is_batch_invariant ? PLAN_FIXED : PLAN_AUTO,
        .n_processors = n_threads > 1 ? n_threads * SHARES_A_THREAD : 1,
        .max_splits = MAX_SPLITS,
        .min_run_tiles = MIN_RUN_TILES,
        .snap_percent = 25,
        .fixed_run_tiles = FIXED_RUN_TILES,
    };
    for (uint32_t i = 0; n_shards > 0 && i < n_segments; i++)
        longest = b->segment_tiles[i] > longest ? b->segment_tiles[i] : longest;
    if (n_shards > 0) {
        c.kind = PLAN_FIXED;
        c.fixed_run_tiles = (longest + n_shards - 1) / n_shards;
    }
    return c;
}

/* How many segments from first on are planned together: all, but of a fixed plan, whose segments do
 * not depend on each other, no more than have room for their partial results. */
static uint32_t segments_at_once(const struct backend *b, const struct plan_config *c,
                                 uint32_t first, uint32_t n_segments, size_t slot_bytes)
{
    uint64_t bytes = 0;
    uint32_t i = first;
    for (; i < n_segments && (c->kind != PLAN_FIXED || bytes <= MOST_SLOT_BYTES); i++) {
        uint64_t n = (b->segment_tiles[i] + c->fixed_run_tiles - 1) / c->fixed_run_tiles;
        bytes += (n > MAX_SPLITS ? MAX_SPLITS : n) * slot_bytes;
    }
    return i - first;
}

/* Plans and computes n segments from first on. */
static attn_status run_segments(struct attend_job *job, const struct plan_config *c,
                                struct backend_batch *batch, uint32_t first, uint32_t n)
{
    struct backend *b = job->b;
    attn_status st = plan_make(&b->plan, c, b->segment_tiles + first, n);
    if (st != ATTN_OK) {
        cpu_fail(b, "no plan for %u segments: %s", n, attn_status_message(st));
        return ATTN_ENOMEM;
    }
    st = reserve_slots(b, b->plan.n_slots * job->slot_floats);
    if (st != ATTN_OK)
        return st;
    job->segments = b->segments + first;
    atomic_store(&job->next_run, 0);
    if (batch->kv_bytes <= ALONE_BYTES)
        run_runs(job, 0);
    else
        cpu_threads_run(b->threads, run_runs, job);
    batch->n_splits += b->plan.n_runs;
    return ATTN_OK;
}

/* Plans and computes n_segments, which are ready. */
static attn_status run_all(struct attend_job *job, struct backend_batch *batch, uint32_t n_segments,
                           uint32_t n_shards)
{
    struct backend *b = job->b;
    const struct plan_config c = plan_of(b, batch->pool, n_segments, n_shards);
    attn_status st = ATTN_OK;
    job->slot_floats = ((size_t)job->max_rows * (job->o_stride + 2) + 15) / 16 * 16;
    for (uint32_t first = 0, n; first < n_segments && st == ATTN_OK; first += n) {
        n = segments_at_once(b, &c, first, n_segments, job->slot_floats * sizeof(float));
        st = run_segments(job, &c, batch, first, n);
    }
    return st;
}

/* Fills segments with those of what items have in common: rows of many items over a group's keys.
 * Returns their number, or 0 where there is no memory. */
static uint32_t make_shared_segments(struct attend_job *job, const struct backend_batch *batch)
{
    struct backend *b = job->b;
    const struct backend_pool *p = batch->pool;
    const struct attend_geometry *g = &p->geometry;
    const struct prefixes *x = &b->shared.prefixes;
    const uint32_t step = cpu_shared_queries_at_once(g, job->isa), heads = p->config.num_kv_heads;
    uint32_t longest = 1, n = 0;
    uint64_t tiles = 0, n_wanted = 0;
    for (uint32_t i = 0; i < x->n_groups; i++) {
        const struct prefix_group *k = &x->groups[i];
        const uint32_t n_chunks = (k->n_queries + step - 1) / step;
        const uint32_t rows = (k->n_queries < step ? k->n_queries : step) * g->group;
        longest = rows > longest ? rows : longest;
        tiles += (uint64_t)n_chunks *
                 (((k->end_block - k->first_block) << g->block_shift) / TILE_TOKENS);
        n_wanted += (uint64_t)n_chunks * heads;
    }
    if (reserve_segments(b, n_wanted) != ATTN_OK)
        return 0;
    const uint32_t n_heads = heads_at_once(p, longest, tiles, cpu_threads_count(b->threads));
    job->max_rows = n_heads * longest;
    for (uint32_t i = 0; i < x->n_groups; i++) {
        const struct prefix_group *k = &x->groups[i];
        const struct backend_item *item = &batch->items[x->order[k->first]];
        const uint32_t first = b->shared.query_of[x->order[k->first]];
        for (uint32_t h = 0; h < heads; h += n_heads)
            for (uint32_t q = 0; q < k->n_queries; q += step, n++) {
                struct segment *s = &b->segments[n];
                s->rows = (struct attend_rows){
                    .g = g,
                    .spec = &p->layers[item->layer],
                    .item = item,
                    .layer = p->base + item->layer * g->layout.layer_bytes,
                    .kv_head = h,
                    .n_heads = heads - h < n_heads ? heads - h : n_heads,
                    .n_rows = (k->n_queries - q < step ? k->n_queries - q : step) * g->group,
                    .queries = b->shared.queries + first + q,
                    .n_shared = k->end_block << g->block_shift,
                };
                s->group = i;
                s->first_query = first + q;
                s->first_tile = (k->first_block << g->block_shift) / TILE_TOKENS;
                atomic_init(&s->n_done, 0);
                b->segment_tiles[n] = s->rows.n_shared / TILE_TOKENS - s->first_tile;
            }
    }
    return n;
}

attn_status cpu_attend(struct backend *b, const struct cpu_isa *isa, struct backend_batch *batch,
                       uint32_t n_shards)
{
    const struct backend_pool *p = batch->pool;
    uint64_t n_wanted = 0;
    batch->kv_bytes = batch->kv_shared_bytes = 0;
    batch->n_splits = 0;
    b->shared.prefixes.n_groups = 0;
    for (uint32_t i = 0; i < batch->n_items; i++)
        if (batch->items[i].flags & BACKEND_ATTEND)
            n_wanted += segments_of(p, &batch->items[i]) * p->config.num_kv_heads;
    if (n_wanted == 0)
        return ATTN_OK;
    attn_status st = reserve_segments(b, n_wanted);
    if (st == ATTN_OK)
        st = cpu_choose(b, isa, batch);
    if (st != ATTN_OK)
        return st;

    struct attend_job job = {.b = b, .isa = isa, .o_stride = (p->geometry.dv + 15) / 16 * 16};
    if (n_shards == 0 && !b->shared.is_off)
        st = cpu_shared_find(b, isa, batch);
    if (st == ATTN_OK && b->shared.prefixes.n_groups > 0) {
        const uint32_t n_shared = make_shared_segments(&job, batch);
        batch->kv_shared_bytes = cpu_shared_bytes(b, batch);
        batch->kv_bytes = UINT64_MAX; /* by all threads */
        st = n_shared > 0 ? run_all(&job, batch, n_shared, 0) : ATTN_ENOMEM;
    }
    if (st != ATTN_OK)
        return st;
    batch->kv_bytes = 0;
    uint32_t n_segments = make_segments(b, batch, heads_of_items(b, batch), &job.max_rows);
    batch->kv_bytes -= batch->kv_shared_bytes;
    return run_all(&job, batch, n_segments, n_shards);
}
