/* decode_fill.c: a call of the tuned decode kernels from a batch and what decode_select.c chose for
 * it: items, block ids and runs in the kernel's parameters or in an upload, grid and shared memory.
 */
#include "kernels/gpu/sm90/decode_host.h"
#include "kernels/grow.h"

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
        .table = (uint64_t)(uintptr_t)(p->kv.table + it->table_at),
        .pos = it->pos,
        .n_tokens = it->n_tokens,
        .layer = it->layer,
        .flags = (spec->is_full || it->is_full ? DECODE_IS_FULL : 0) |
                 (spec->window_tokens ? DECODE_HAS_WINDOW : 0) |
                 (p->has_sinks ? DECODE_HAS_SINKS : 0),
        .scale_log2 = spec->scale * 1.44269504088896341f,
    };
    decode_visible_tiles(p, it, &out->n_tiles, &out->sink_tiles, &out->skip_tiles);
}

/* A batch on its way into a call. */
struct filling {
    const struct decode_pool *p;
    const struct decode_item *items;
    const struct decode_choice *c;
    struct decode_call *call;
    struct decode_dev_item *dev; /* in the call's words (is_inline) or at the upload's begin */
    char *upload;
    uint64_t upload_capacity, words_capacity, item_bytes; /* all in bytes */
    bool is_inline;
    uint32_t max_units; /* of an item and kv head */
};

/* All block ids in the parameters of a short call; the rule has seen that they fit. */
static void inline_ids(const struct filling *f)
{
    struct decode_call *o = f->call;
    const uint32_t words = o->n_words, block_tokens = f->p->kv.block_tokens;
    uint32_t stride = 0;
    for (uint32_t i = 0; i < o->n_items; i++) {
        uint32_t n = ceil_div(f->items[i].pos + f->items[i].n_tokens, block_tokens);
        stride = n > stride ? n : stride;
    }
    o->n_words = words + stride * o->n_items;
    o->ids_at = words;
    o->ids_stride = stride;
    for (uint32_t i = 0; i < o->n_items; i++)
        memcpy(&o->inline_words[words + i * stride], f->items[i].blocks,
               ceil_div(f->items[i].pos + f->items[i].n_tokens, block_tokens) * sizeof(uint32_t));
}

/* Block ids of the tiles with which blocks or warps begin, in the parameters as far as there is
 * room: a load from cold memory that their first copies need not wait for. runs: of DECODE_LIST,
 * each processor's first. */
static void inline_first_ids(const struct filling *f, const struct decode_dev_run *runs)
{
    struct decode_call *o = f->call;
    const struct decode_choice *c = f->c;
    const bool is_list = c->kernel == DECODE_LIST, is_warp = c->kernel == DECODE_WARP;
    const bool is_wide = c->kernel == DECODE_WIDE;
    const uint32_t parts = is_list || is_warp ? 1 : o->cluster * (is_wide ? o->n_groups : 1);
    const uint32_t n_places = is_list ? o->n_processors : o->n_items * parts;
    const uint32_t round = is_wide   ? DECODE_WIDE_TOKENS / DECODE_TILE
                           : is_warp ? 1
                                     : c->warps; /* tiles copied at a time */
    const uint32_t capacity = is_list || is_warp ? DECODE_INLINE_WORDS : DECODE_SHORT_WORDS;
    const uint32_t rounds = (capacity - o->n_words) / n_places / round;
    const uint32_t lg_parts = log2_of(parts);
    uint32_t *out = &o->inline_words[o->n_words];
    o->ids_at = o->n_words;
    o->ids_stride = min_u32(rounds, c->stages) * round;
    o->n_words += n_places * o->ids_stride;
    for (uint32_t place = 0; place < n_places; place++) {
        const uint32_t i = is_list ? runs[place].item : place / parts;
        const struct decode_dev_item *dev = &f->dev[i];
        const uint32_t n = dev->n_tiles;
        const uint32_t first = is_list   ? runs[place].tile0
                               : is_wide ? decode_wide_begin(n, place % parts, parts)
                                         : decode_cluster_begin(n, place % parts, lg_parts);
        for (uint32_t t = first; t < first + o->ids_stride; t++) {
            uint32_t tile = visible_tile_at(t, dev->sink_tiles, dev->skip_tiles);
            *out++ = t < n ? f->items[i].blocks[tile * DECODE_TILE / f->p->kv.block_tokens] : 0;
        }
    }
}

/* Where q, k and v come from, behind the block ids. */
static void inline_sources(const struct filling *f)
{
    struct decode_call *o = f->call;
    const uint32_t at = o->n_words + o->n_words % 2, words = sizeof(struct decode_source) / 4;
    if (at + o->n_items * words > DECODE_SHORT_WORDS)
        return;
    for (uint32_t i = 0; i < o->n_items; i++) {
        const struct decode_item *it = &f->items[i];
        if (!it->q_src || !it->k_src || !it->v_src)
            return;
        const struct decode_source s = {.q = (uint64_t)(uintptr_t)it->q_src,
                                        .k = (uint64_t)(uintptr_t)it->k_src,
                                        .v = (uint64_t)(uintptr_t)it->v_src};
        memcpy(&o->inline_words[at + i * words], &s, sizeof s);
    }
    o->n_words = at + o->n_items * words;
    o->sources_at = at;
}

/* Adds the segments of an item, in the order unit, kv head: of one head, or of one for each warp.
 * The plan cuts rounds: a tile of each warp. Four of a head a warp take about as long as three of a
 * shared head. */
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
static attn_status plan_runs(const struct filling *f, struct decode_planner *w)
{
    const struct decode_choice *c = f->c;
    const uint32_t n = f->call->n_segments; /* at most: a head a warp or one that all share */
    attn_status st = array_reserve(&w->segments, &w->segments_capacity, n, sizeof *w->segments);
    if (st == ATTN_OK)
        st = array_reserve(&w->rounds, &w->rounds_capacity, n, sizeof *w->rounds);
    if (st != ATTN_OK)
        return st;
    const uint32_t lg_all = log2_of(c->warps);
    w->n_segments = 0;
    for (uint32_t i = 0; i < f->call->n_items; i++)
        add_segments(f->p, c, i, units_of(f->p, &f->items[i], c->rows), f->dev[i].n_tiles,
                     f->dev[i].n_tiles <= c->by_head_tiles ? 0 : lg_all, w);
    const struct plan_config pc = {.kind = PLAN_AUTO,
                                   .n_processors = c->n_processors,
                                   .max_splits = c->n_processors,
                                   .min_run_tiles = 1,
                                   .snap_percent = 1};
    st = plan_make(&w->plan, &pc, w->rounds, w->n_segments);
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

/* Writes the planner's runs; each processor's first comes first, so that it is found without a
 * look-up. Gives the number of processors that have runs. */
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

/* What follows from the choice alone. */
static void begin_call(const struct filling *f, uint32_t n_items)
{
    const struct decode_choice *c = f->c;
    struct decode_call *o = f->call;
    memset(o, 0, offsetof(struct decode_call, inline_words));
    o->pool = f->p;
    o->kernel = c->kernel;
    o->rows = c->rows;
    o->n_items = n_items;
    o->cluster = c->cluster;
    o->launch_cluster = c->cluster;
    o->n_groups = c->n_groups;
    o->stages = c->stages;
    o->is_tight = c->is_tight;
    o->block = c->kernel == DECODE_WIDE ? 384 : c->warps * 32;
    o->grid[1] = o->grid[2] = 1;
}

/* Settles where the items go: in the parameters if they fit, else in the upload. */
static attn_status place_items(struct filling *f)
{
    const enum decode_kernel kernel = f->c->kernel;
    const bool is_list = kernel == DECODE_WARP || kernel == DECODE_LIST;
    f->words_capacity = 4 * (is_list ? DECODE_INLINE_WORDS : DECODE_SHORT_WORDS);
    f->item_bytes = f->call->n_items * sizeof(struct decode_dev_item);
    f->is_inline = f->item_bytes <= f->words_capacity;
    if (!f->is_inline && f->item_bytes > f->upload_capacity)
        return ATTN_ENOMEM;
    f->dev = f->is_inline ? (void *)f->call->inline_words : (void *)f->upload;
    f->call->upload_bytes = f->is_inline ? 0 : f->item_bytes;
    f->call->n_words = f->is_inline ? (uint32_t)(f->item_bytes / 4) : 0;
    return ATTN_OK;
}

/* Writes the items and what the call knows of them all. */
static attn_status fill_items(struct filling *f)
{
    const struct decode_pool *p = f->p;
    struct decode_call *o = f->call;
    uint32_t max_rows = 1;
    f->max_units = 1;
    for (uint32_t i = 0; i < o->n_items; i++) {
        const struct decode_item *it = &f->items[i];
        if (it->n_tokens == 0 || it->n_tokens > DECODE_MAX_TOKENS)
            return ATTN_ENOTSUP;
        fill_item(p, it, &f->dev[i]);
        const uint32_t units = units_of(p, it, o->rows);
        f->max_units = decode_max(f->max_units, units);
        o->n_segments += units * p->kv.num_kv_heads;
        max_rows = decode_max(max_rows, min_u32(it->n_tokens * p->kv.group, o->rows));
        const uint64_t seen = (uint64_t)f->dev[i].n_tiles * DECODE_TILE;
        const uint64_t all = (uint64_t)it->pos + it->n_tokens;
        o->kv_bytes += (seen < all ? seen : all) * p->kv.num_kv_heads * p->kv.dk * 4;
    }
    o->row_span = 1u << log2_of(max_rows);
    return ATTN_OK;
}

static uint32_t clustered_shared_bytes(const struct decode_choice *c, uint32_t d, uint32_t parts)
{
    if (c->kernel == DECODE_WIDE)
        return decode_wide_bytes(d, c->rows, c->stages, parts, c->cluster);
    if (c->kernel == DECODE_SHORT)
        return decode_short_bytes(d, c->rows, c->stages, c->cluster, c->is_tight);
    return decode_cluster_bytes(d, c->rows, c->warps, c->stages);
}

/* DECODE_CLUSTER, DECODE_SHORT, DECODE_WIDE: as many thread blocks a segment, which their index
 * tells apart. */
static attn_status fill_clustered(const struct filling *f)
{
    const struct decode_pool *p = f->p;
    const struct decode_choice *c = f->c;
    struct decode_call *o = f->call;
    const uint32_t heads = p->kv.num_kv_heads, units = f->max_units;
    const uint32_t parts = c->cluster * (c->kernel == DECODE_WIDE ? c->n_groups : 1);
    if (c->kernel == DECODE_WIDE && parts > 1 &&
        (uint64_t)o->n_items * heads * units * parts > 2 * p->n_processors)
        return ATTN_ENOTSUP; /* more partial slots than scratch has */
    if (c->kernel == DECODE_SHORT) {
        inline_ids(f);
        inline_sources(f);
    } else if (f->is_inline) {
        inline_first_ids(f, NULL);
    }
    o->grid[0] = parts * (c->kernel == DECODE_CLUSTER ? heads : units);
    o->grid[1] = c->kernel == DECODE_CLUSTER ? units : heads;
    o->grid[2] = o->n_items;
    if (c->kernel == DECODE_CLUSTER && o->grid[0] % 8 == 0) {
        const uint64_t blocks = (uint64_t)o->grid[0] * units * o->n_items;
        if ((parts > 1 && blocks <= decode_cluster_a_gpc(p->n_processors)) ||
            decode_is_even_load(p->n_processors, blocks))
            o->launch_cluster = 8; /* so that they cannot crowd on some GPCs */
    }
    o->n_runs = o->n_segments * parts;
    o->shared_bytes = clustered_shared_bytes(c, p->kv.dk, parts);
    return ATTN_OK;
}

static attn_status fill_warp(const struct filling *f)
{
    const struct decode_choice *c = f->c;
    struct decode_call *o = f->call;
    o->n_runs = o->n_segments;
    o->n_processors = c->n_processors;
    if (f->is_inline)
        inline_first_ids(f, NULL);
    o->grid[0] = ceil_div(c->n_processors, c->warps);
    o->shared_bytes = decode_runs_bytes(f->p->kv.dk, c->rows, c->warps, c->stages, true);
    return f->max_units == 1 ? ATTN_OK : ATTN_ENOTSUP;
}

/* Settles where the runs go: behind the items in the parameters if both fit there, else both in
 * the upload. */
static attn_status place_runs(const struct filling *f, uint32_t n_runs,
                              struct decode_dev_run **out_runs)
{
    struct decode_call *o = f->call;
    const uint64_t bytes = n_runs * sizeof(struct decode_dev_run);
    if (f->is_inline && f->item_bytes + bytes <= f->words_capacity) {
        o->runs_at = o->n_words;
        o->n_words += (uint32_t)(bytes / 4);
        *out_runs = (void *)&o->inline_words[o->runs_at];
        return ATTN_OK;
    }
    if (f->item_bytes + bytes > f->upload_capacity)
        return ATTN_ENOMEM;
    if (f->is_inline)
        memcpy(f->upload, o->inline_words, f->item_bytes);
    o->n_words = 0;
    o->upload_bytes = f->item_bytes + bytes;
    *out_runs = (void *)(f->upload + f->item_bytes);
    return ATTN_OK;
}

static attn_status fill_list(const struct filling *f, struct decode_planner *w)
{
    const struct decode_choice *c = f->c;
    struct decode_call *o = f->call;
    struct decode_dev_run *runs;
    attn_status st = plan_runs(f, w);
    if (st == ATTN_OK)
        st = place_runs(f, w->plan.n_runs, &runs);
    if (st != ATTN_OK)
        return st;
    o->n_processors = write_runs(w, f->dev, runs);
    if (o->n_words > 0)
        inline_first_ids(f, runs);
    o->n_runs = w->plan.n_runs;
    o->grid[0] = o->n_processors;
    if (o->grid[0] % 2 == 0 && o->grid[0] <= f->p->n_processors)
        o->launch_cluster = 2; /* two by two they are dealt to the GPCs more evenly */
    o->shared_bytes = decode_runs_bytes(f->p->kv.dk, c->rows, c->warps, c->stages, false);
    return ATTN_OK;
}

attn_status decode_fill(const struct decode_pool *p, const struct decode_item *items,
                        uint32_t n_items, const struct decode_choice *c, struct decode_planner *w,
                        void *upload, uint64_t upload_capacity, struct decode_call *out_call)
{
    struct filling f = {.p = p,
                        .items = items,
                        .c = c,
                        .call = out_call,
                        .upload = upload,
                        .upload_capacity = upload_capacity};
    begin_call(&f, n_items);
    attn_status st = place_items(&f);
    if (st == ATTN_OK)
        st = fill_items(&f);
    if (st != ATTN_OK)
        return st;
    switch (c->kernel) {
    case DECODE_WARP:
        return fill_warp(&f);
    case DECODE_LIST:
        return fill_list(&f, w);
    default:
        return fill_clustered(&f);
    }
}

/* Two launches that share processors share their bandwidth: both end late, and at the same time. So
 * a long one that fills the processors takes so much shared memory that no other's thread blocks
 * have room beside its own; those of the next come when these leave. A short one's neighbours may
 * have their head start, and clusters need every place there is. */
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
