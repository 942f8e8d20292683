/* decode_fill.c: a call of the tuned decode kernels from a batch and what decode_select.c chose for it: items, block
 * ids and runs in the kernel's parameters or in an upload, grid and shared memory.
 */
#include "kernels/gpu/sm90/decode_host.h"

#include <stdlib.h>
#include <string.h>

uint64_t decode_scratch_bytes(const struct decode_pool *p, uint32_t max_items, uint32_t max_tokens)
{
    (void)max_items;
    (void)max_tokens;
    uint64_t rows = 2 * (uint64_t)p->n_processors * DECODE_WIDE_ROWS;
    return (uint64_t)p->n_processors * DECODE_SLOTS * DECODE_MAX_CLUSTER * sizeof(uint32_t) +
           rows * (2 + p->kv.dv) * sizeof(float); /* decode_wide keeps both together */
}

uint64_t decode_upload_bytes(const struct decode_pool *p, uint32_t max_items, uint32_t max_tokens)
{
    uint64_t units = (uint64_t)max_tokens * p->kv.group / 8 + max_items;
    return max_items * sizeof(struct decode_dev_item) +
           (units * p->kv.num_kv_heads + 4 * (uint64_t)p->n_processors) *
               sizeof(struct decode_dev_run);
}

static void fill_item(const struct decode_pool *p, const struct decode_item *it,
                      struct decode_dev_item *out)
{
    const struct attn_layer_spec *spec = &p->specs[it->layer];
    *out = (struct decode_dev_item){
        .q = (uint64_t)(uintptr_t)it->q,
        .out = (uint64_t)(uintptr_t)it->out,
        .lse = (uint64_t)(uintptr_t)it->lse,
        .table = (uint64_t)(uintptr_t)(p->kv.table + (uint64_t)it->row * p->kv.row_blocks),
        .pos = it->pos,
        .n_tokens = it->n_tokens,
        .layer = it->layer,
        .flags = (spec->is_full ? DECODE_IS_FULL : 0) |
                 (spec->window_tokens ? DECODE_HAS_WINDOW : 0) |
                 (p->has_sinks ? DECODE_HAS_SINKS : 0),
        .scale_log2 = spec->scale * 1.44269504088896341f,
    };
    decode_visible_tiles(p, it, &out->n_tiles, &out->sink_tiles, &out->skip_tiles);
}

/* All block ids in the parameters of a short call; the rule has seen that they fit. */
static void inline_ids(const struct decode_pool *p, const struct decode_item *items,
                       struct decode_call *c)
{
    const uint32_t words = c->n_words;
    uint32_t stride = 0;
    for (uint32_t i = 0; i < c->n_items; i++) {
        uint32_t n = ceil_div(items[i].pos + items[i].n_tokens, p->kv.block_tokens);
        stride = n > stride ? n : stride;
    }
    c->n_words = words + stride * c->n_items;
    c->ids_at = words;
    c->ids_stride = stride;
    for (uint32_t i = 0; i < c->n_items; i++)
        memcpy(&c->inline_words[words + i * stride], items[i].blocks,
               ceil_div(items[i].pos + items[i].n_tokens, p->kv.block_tokens) * sizeof(uint32_t));
}

/* Block ids of the tiles with which blocks or warps begin, in the parameters as far as there is room: a load from
 * cold memory that their first copies need not wait for. runs: of DECODE_LIST, each processor's first. */
static void inline_first_ids(const struct decode_pool *p, const struct decode_item *items,
                             const struct decode_dev_item *dev, const struct decode_choice *choice,
                             const struct decode_dev_run *runs, struct decode_call *c)
{
    const bool is_list = choice->kernel == DECODE_LIST, is_warp = choice->kernel == DECODE_WARP;
    const bool is_wide = choice->kernel == DECODE_WIDE;
    const uint32_t parts = is_list || is_warp ? 1 : c->cluster * (is_wide ? c->n_groups : 1);
    const uint32_t n_places = is_list ? c->n_processors : c->n_items * parts;
    const uint32_t round = is_wide   ? DECODE_WIDE_TOKENS / DECODE_TILE
                           : is_warp ? 1
                                     : choice->warps; /* tiles copied at a time */
    const uint32_t capacity = is_list || is_warp ? DECODE_INLINE_WORDS : DECODE_SHORT_WORDS;
    const uint32_t rounds = (capacity - c->n_words) / n_places / round;
    const uint32_t lg_parts = log2_of(parts);
    uint32_t *out = &c->inline_words[c->n_words];
    c->ids_at = c->n_words;
    c->ids_stride = min_u32(rounds, choice->stages) * round;
    c->n_words += n_places * c->ids_stride;
    for (uint32_t place = 0; place < n_places; place++) {
        const uint32_t i = is_list ? runs[place].item : place / parts, n = dev[i].n_tiles;
        const uint32_t first = is_list   ? runs[place].tile0
                               : is_wide ? decode_wide_begin(n, place % parts, parts)
                                         : decode_cluster_begin(n, place % parts, lg_parts);
        for (uint32_t t = first; t < first + c->ids_stride; t++) {
            uint32_t tile = t + (t >= dev[i].sink_tiles ? dev[i].skip_tiles : 0);
            *out++ = t < n ? items[i].blocks[tile * DECODE_TILE / p->kv.block_tokens] : 0;
        }
    }
}

/* Where q, k and v come from, behind the block ids. */
static void inline_sources(const struct decode_item *items, struct decode_call *c)
{
    const uint32_t at = c->n_words + c->n_words % 2, words = sizeof(struct decode_source) / 4;
    if (at + c->n_items * words > DECODE_SHORT_WORDS)
        return;
    for (uint32_t i = 0; i < c->n_items; i++) {
        const struct decode_item *it = &items[i];
        if (!it->q_src || !it->k_src || !it->v_src)
            return;
        const struct decode_source s = {.q = (uint64_t)(uintptr_t)it->q_src,
                                        .k = (uint64_t)(uintptr_t)it->k_src,
                                        .v = (uint64_t)(uintptr_t)it->v_src};
        memcpy(&c->inline_words[at + i * words], &s, sizeof s);
    }
    c->n_words = at + c->n_items * words;
    c->sources_at = at;
}

/* Adds the segments of an item, in the order unit, kv head: of one head, or of one for each warp. The plan cuts
 * rounds: a tile of each warp. Four of a head a warp take about as long as three of a shared head. */
static void add_segments(const struct decode_pool *p, const struct decode_choice *c, uint32_t item,
                         uint32_t units, uint32_t n_tiles, uint32_t lg_team,
                         struct decode_planner *w)
{
    for (uint32_t unit = 0; unit < units; unit++)
        for (uint32_t head = 0; head < p->kv.num_kv_heads; head += c->warps >> lg_team) {
            w->rounds[w->n_segments] =
                lg_team > 0 ? ceil_div(n_tiles, 1u << lg_team) : ceil_div(n_tiles * 3, 4);
            w->segments[w->n_segments++] = (struct decode_segment){
                .item = item,
                .head_unit = head | unit << 16,
                .lg_team = lg_team,
            };
        }
}

/* Cuts the work among the processors. */
static attn_status plan_runs(const struct decode_pool *p, const struct decode_item *items,
                             const struct decode_choice *c, uint32_t n_items,
                             const struct decode_dev_item *dev, struct decode_planner *w,
                             uint32_t n_segments)
{
    if (n_segments > w->capacity) {
        const uint64_t n = 2 * (uint64_t)n_segments;
        struct decode_segment *segments = realloc(w->segments, n * sizeof *segments);
        if (segments != NULL)
            w->segments = segments;
        uint32_t *rounds = realloc(w->rounds, n * sizeof *rounds);
        if (rounds != NULL)
            w->rounds = rounds;
        if (segments == NULL || rounds == NULL)
            return ATTN_ENOMEM;
        w->capacity = (uint32_t)n;
    }
    const uint32_t lg_all = log2_of(c->warps);
    w->n_segments = 0;
    for (uint32_t i = 0; i < n_items; i++)
        add_segments(p, c, i, units_of(p, &items[i], c->rows), dev[i].n_tiles,
                     dev[i].n_tiles <= c->by_head_tiles ? 0 : lg_all, w);
    const struct plan_config pc = {.kind = PLAN_AUTO,
                                   .n_processors = c->n_processors,
                                   .max_splits = c->n_processors,
                                   .min_run_tiles = 1,
                                   .snap_percent = 1};
    attn_status st = plan_make(&w->plan, &pc, w->rounds, w->n_segments);
    if (st != ATTN_OK)
        return st;
    /* each head of a cut segment has slots of its own */
    uint32_t slots = 0;
    for (uint32_t k = 0; k < w->plan.n_runs; k++) {
        const struct plan_run *r = &w->plan.runs[k];
        if (r->split > 0 || r->n_splits == 1)
            continue;
        w->segments[r->segment].slot = slots;
        slots += r->n_splits * (c->warps >> w->segments[r->segment].lg_team);
    }
    return ATTN_OK;
}

/* The tile with which a round of a segment begins; the round after the last gives their number. */
static uint32_t tile_of_round(const struct decode_planner *w, const struct decode_dev_item *dev,
                              uint32_t segment, uint32_t round)
{
    const struct decode_segment *s = &w->segments[segment];
    const uint32_t n = dev[s->item].n_tiles;
    return s->lg_team > 0 ? min_u32(round << s->lg_team, n)
                          : (uint32_t)((uint64_t)n * round / w->rounds[segment]);
}

/* Writes the planner's runs; each processor's first comes first, so that it is found without a look-up.
 * Gives the number of processors that have runs. */
static uint32_t write_runs(const struct decode_planner *w, const struct decode_dev_item *dev,
                           struct decode_dev_run *runs)
{
    const struct plan *plan = &w->plan;
    uint32_t heads = 0;
    for (uint32_t q = 0; q < plan->n_processors; q++)
        heads += plan->first[q] < plan->first[q + 1];
    for (uint32_t q = 0, head = 0, at = heads; q < plan->n_processors; q++) {
        struct decode_dev_run *before = NULL;
        for (uint32_t k = plan->first[q]; k < plan->first[q + 1]; k++) {
            const struct plan_run *r = &plan->runs[k];
            const struct decode_segment *s = &w->segments[r->segment];
            const uint32_t index = before == NULL ? head++ : at++;
            const uint32_t tile0 = tile_of_round(w, dev, r->segment, r->tile0);
            runs[index] = (struct decode_dev_run){
                .item = s->item,
                .head_unit = s->head_unit,
                .tile0 = tile0,
                .n_tiles = tile_of_round(w, dev, r->segment, r->tile0 + r->n_tiles) - tile0,
                .next = DECODE_NO_RUN,
                .split_of = r->split | r->n_splits << 16,
                .slot = s->slot,
                .lg_team = s->lg_team,
            };
            if (before != NULL)
                before->next = index;
            before = &runs[index];
        }
    }
    return heads;
}

attn_status decode_fill(const struct decode_pool *p, const struct decode_item *items,
                        uint32_t n_items, const struct decode_choice *c, struct decode_planner *w,
                        void *upload, uint64_t upload_capacity, struct decode_call *out_call)
{
    struct decode_call *o = out_call;
    uint32_t units = 1, n_segments = 0, max_rows = 1;
    memset(o, 0, offsetof(struct decode_call, inline_words));
    o->pool = p;
    o->kernel = c->kernel;
    o->rows = c->rows;
    o->n_items = n_items;
    o->cluster = c->cluster;
    o->launch_cluster = c->cluster;
    o->n_groups = c->n_groups;
    o->stages = c->stages;
    o->is_tight = c->is_tight;
    o->block = c->kernel == DECODE_WIDE ? 384 : c->warps * 32;

    bool is_list = c->kernel == DECODE_WARP || c->kernel == DECODE_LIST;
    const uint64_t capacity = 4 * (is_list ? DECODE_INLINE_WORDS : DECODE_SHORT_WORDS);
    const uint64_t item_bytes = n_items * sizeof(struct decode_dev_item);
    bool is_inline = item_bytes <= capacity;
    struct decode_dev_item *dev = is_inline ? (void *)o->inline_words : upload;
    if (!is_inline && item_bytes > upload_capacity)
        return ATTN_ENOMEM;
    for (uint32_t i = 0; i < n_items; i++) {
        if (items[i].n_tokens == 0 || items[i].n_tokens > DECODE_MAX_TOKENS)
            return ATTN_ENOTSUP;
        fill_item(p, &items[i], &dev[i]);
        uint32_t u = units_of(p, &items[i], c->rows);
        units = u > units ? u : units;
        n_segments += u * p->kv.num_kv_heads;
        max_rows = decode_max(max_rows, min_u32(items[i].n_tokens * p->kv.group, c->rows));
        uint64_t seen = (uint64_t)dev[i].n_tiles * DECODE_TILE;
        uint64_t all = (uint64_t)items[i].pos + items[i].n_tokens;
        o->kv_bytes += (seen < all ? seen : all) * p->kv.num_kv_heads * p->kv.dk * 4;
    }
    for (o->row_span = 1; o->row_span < max_rows;)
        o->row_span *= 2;

    o->upload_bytes = is_inline ? 0 : item_bytes;
    o->n_words = is_inline ? (uint32_t)(item_bytes / 4) : 0;
    o->n_segments = n_segments;
    o->grid[1] = o->grid[2] = 1;
    switch (c->kernel) {
    case DECODE_CLUSTER:
    case DECODE_SHORT:
    case DECODE_WIDE: {
        uint32_t parts = c->cluster * (c->kernel == DECODE_WIDE ? c->n_groups : 1);
        if (c->kernel == DECODE_WIDE && parts > 1 &&
            (uint64_t)n_items * p->kv.num_kv_heads * units * parts > 2 * p->n_processors)
            return ATTN_ENOTSUP; /* more partial slots than scratch has */
        if (c->kernel == DECODE_SHORT) {
            inline_ids(p, items, o);
            inline_sources(items, o);
        } else if (is_inline) {
            inline_first_ids(p, items, dev, c, NULL, o);
        }
        o->grid[0] = parts * units;
        o->grid[1] = p->kv.num_kv_heads;
        if (c->kernel == DECODE_CLUSTER) {
            o->grid[0] = parts * p->kv.num_kv_heads;
            o->grid[1] = units;
            const uint64_t blocks = (uint64_t)o->grid[0] * units * n_items;
            if (o->grid[0] % 8 == 0 &&
                ((parts > 1 && blocks <= decode_cluster_a_gpc(p->n_processors)) ||
                 decode_is_even_load(p->n_processors, blocks)))
                o->launch_cluster = 8; /* so that they cannot crowd on some GPCs */
        }
        o->grid[2] = n_items;
        o->n_runs = n_segments * parts;
        o->shared_bytes =
            c->kernel == DECODE_WIDE
                ? decode_wide_bytes(p->kv.dk, c->rows, c->stages, parts, c->cluster)
            : c->kernel == DECODE_SHORT
                ? decode_short_bytes(p->kv.dk, c->rows, c->stages, c->cluster, c->is_tight)
                : decode_cluster_bytes(p->kv.dk, c->rows, c->warps, c->stages);
        return ATTN_OK;
    }
    case DECODE_WARP:
        o->n_runs = n_segments;
        o->n_processors = c->n_processors;
        if (is_inline)
            inline_first_ids(p, items, dev, c, NULL, o);
        o->grid[0] = ceil_div(c->n_processors, c->warps);
        o->shared_bytes = decode_runs_bytes(p->kv.dk, c->rows, c->warps, c->stages, true);
        return units == 1 ? ATTN_OK : ATTN_ENOTSUP;
    case DECODE_LIST:
        break;
    }

    attn_status st = plan_runs(p, items, c, n_items, dev, w, n_segments);
    if (st != ATTN_OK)
        return st;
    uint64_t run_bytes = w->plan.n_runs * sizeof(struct decode_dev_run);
    if (is_inline && item_bytes + run_bytes <= capacity) {
        o->runs_at = o->n_words;
        o->n_words += (uint32_t)(run_bytes / 4);
    } else {
        if (item_bytes + run_bytes > upload_capacity)
            return ATTN_ENOMEM;
        if (is_inline)
            memcpy(upload, o->inline_words, item_bytes);
        o->n_words = 0;
        o->upload_bytes = item_bytes + run_bytes;
    }
    struct decode_dev_run *runs =
        o->n_words ? (void *)&o->inline_words[o->runs_at] : (void *)((char *)upload + item_bytes);
    o->n_processors = write_runs(w, dev, runs);
    if (o->n_words > 0)
        inline_first_ids(p, items, dev, c, runs, o);
    o->n_runs = w->plan.n_runs;
    o->grid[0] = o->n_processors;
    if (o->grid[0] % 2 == 0 && o->grid[0] <= p->n_processors)
        o->launch_cluster = 2; /* two by two they are dealt to the GPCs more evenly */
    o->shared_bytes = decode_runs_bytes(p->kv.dk, c->rows, c->warps, c->stages, false);
    return ATTN_OK;
}

/* Two launches that share processors share their bandwidth: both end late, and at the same time. So a long one
 * that fills the processors takes so much shared memory that no other's thread blocks have room beside its
 * own; those of the next come when these leave. A short one's neighbours may have their head start, and
 * clusters need every place there is. */
static void keep_others_out(const struct decode_pool *p, const struct decode_shape *s,
                            struct decode_call *c)
{
    enum { LONG_TILES = 1 << 15 };
    const uint32_t blocks = c->grid[0] * c->grid[1] * c->grid[2];
    if (s->tiles < LONG_TILES || blocks * 2 < p->n_processors || c->cluster > 1)
        return;
    uint32_t one_more = ceil_div(blocks, p->n_processors) + 1;
    uint32_t least = PROCESSOR_SHARED / one_more - BLOCK_RESERVED + DECODE_ALIGN;
    c->shared_bytes = decode_max(c->shared_bytes, least);
}

attn_status decode_prepare(const struct decode_pool *p, const struct decode_item *items,
                           uint32_t n_items, struct decode_planner *w, void *upload,
                           uint64_t upload_capacity, struct decode_call *out_call)
{
    struct decode_choice c;
    for (uint32_t i = 0; i < n_items; i++)
        if (items[i].n_tokens == 0 || items[i].n_tokens > DECODE_MAX_TOKENS)
            return ATTN_ENOTSUP;
    decode_select(p, items, n_items, &c);
    attn_status st = decode_fill(p, items, n_items, &c, w, upload, upload_capacity, out_call);
    if (st != ATTN_OK)
        return st;
    struct decode_shape s = decode_shape_of(p, items, n_items, c.rows);
    keep_others_out(p, &s, out_call);
    return ATTN_OK;
}

void decode_planner_fini(struct decode_planner *w)
{
    if (w == NULL)
        return;
    plan_fini(&w->plan);
    free(w->segments);
    free(w->rounds);
    *w = (struct decode_planner){0};
}
