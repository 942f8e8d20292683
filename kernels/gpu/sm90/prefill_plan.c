/* prefill_plan.c: which pools the prefill kernels compute, and the order of a batch's work. Pure
 * functions of the pool and the batch.
 */
#include "kernels/dilated.h"
#include "kernels/gpu/sm90/decode.h"
#include "kernels/gpu/sm90/prefill_params.h"

#include <string.h>

/* K and V of so many bytes are left in the L2 cache until every unit that reads them has done
 * so. */
#define SECTION_BYTES (32u << 20)

/* Of a dilated layer: runs of fewer rows are not cut off, and items of fewer tokens of each
 * remainder are left to the general kernels. */
#define RUN_ROWS 64
#define RUN_TOKENS 8

uint32_t prefill_dim(const struct backend_pool_config *c)
{
    const uint32_t dim = c->head_dim_k > c->head_dim_v ? c->head_dim_k : c->head_dim_v;
    if (c->is_v_in_k)
        return PREFILL_LATENT_DIM;
    return dim <= 64 ? 64 : dim <= 128 ? 128 : dim <= 192 ? 192 : 256;
}

bool prefill_supported(const struct backend_pool_config *c, int major)
{
    const uint32_t k = c->head_dim_k, v = c->head_dim_v;
    const bool is_dim = c->is_v_in_k ? k <= PREFILL_LATENT_DIM && v <= LATENT_COLUMNS
                                     : k >= 64 && v >= 64 && k <= 256 && v <= 256;
    const bool has_codes = c->kv_dtype == ATTN_INT8 || c->kv_dtype == ATTN_FP8_E4M3 ||
                           c->kv_dtype == ATTN_NVFP4 ||
                           (c->kv_dtype == ATTN_MXFP4 && c->q_dtype == ATTN_BF16);
    const bool is_kv =
        has_codes ? !c->is_v_in_k && k <= 128 && v <= 128 : c->q_dtype == c->kv_dtype;
    return major == 9 && is_dim && is_kv && (c->q_dtype == ATTN_BF16 || c->q_dtype == ATTN_F16) &&
           c->block_tokens >= 16;
}

/* The rates of a dilated layer are powers of two: the logarithm of the largest, or a large number
 * if they are not. */
static uint32_t rates_log2(const struct attn_layer_spec *s)
{
    uint32_t most = 1;
    for (uint32_t i = 0; i < s->n_branches; i++) {
        const uint32_t rate = s->branches[i].rate;
        if ((rate & (rate - 1)) != 0)
            return UINT32_MAX;
        most = rate > most ? rate : most;
    }
    return (uint32_t)__builtin_ctz(most);
}

static bool has_rates(const struct prefill_pool *p, const struct attn_layer_spec *s)
{
    return p->dim <= 128 && !p->kv.is_quantised && p->kv.stripes.every == 0 &&
           rates_log2(s) < PREFILL_RATES;
}

bool prefill_has_dilated(const struct prefill_pool *p)
{
    bool has = false;
    for (uint32_t i = 0; i < p->num_layers; i++)
        has |= p->specs[i].n_branches > 0 && has_rates(p, &p->specs[i]);
    return has;
}

uint32_t prefill_blocks(const struct prefill_pool *p, uint32_t n_keys)
{
    return p->kv.is_quantised ? (n_keys - 1) / PREFILL_DECODED_TOKENS + 1 : 0;
}

bool prefill_takes(const struct prefill_pool *p, uint32_t layer, uint32_t n_tokens, uint32_t n_keys)
{
    const struct attn_layer_spec *s = &p->specs[layer];
    if (n_tokens <= DECODE_MAX_TOKENS && p->dim != PREFILL_LATENT_DIM)
        return false;
    if (prefill_blocks(p, n_keys) > p->decoded_blocks)
        return false;
    return s->n_branches == 0 || (has_rates(p, s) && n_tokens >> rates_log2(s) >= RUN_TOKENS);
}

bool prefill_takes_trees(const struct prefill_pool *p, uint32_t layer)
{
    const struct attn_layer_spec *s = &p->specs[layer];
    const bool has_kernel = p->dim <= 128 || p->dim == PREFILL_LATENT_DIM;
    return has_kernel && !p->kv.is_quantised && s->n_branches == 0 && s->window_tokens == 0;
}

/* Of an item's rows, of `rows` each. */
static uint32_t tiles_of(const struct prefill_pool *p, uint64_t n_tokens, uint32_t rows)
{
    return (uint32_t)((n_tokens * p->kv.group + rows - 1) / rows);
}

uint64_t prefill_upload_bytes(const struct prefill_pool *p, uint32_t max_items, uint32_t max_tokens)
{
    const uint32_t rows = prefill_rows(p->dim, false); /* units of fewer are never uploaded */
    uint64_t plain = (uint64_t)max_items + tiles_of(p, max_tokens, rows);
    if (p->dim == PREFILL_LATENT_DIM) /* any tokens may have lists */
        plain += (uint64_t)max_tokens * tiles_of(p, 1, rows) + PREFILL_UPLOAD_ALIGN;
    /* tiles, where each run's tokens may be one more for each remainder; one tile that is not full
     * of each, of as many runs as cut_of allows and of the two at an item's ends */
    const uint64_t runs = (uint64_t)max_tokens * p->kv.group / RUN_ROWS;
    const uint64_t ends = 2 * (uint64_t)max_tokens / RUN_TOKENS;
    const uint64_t dilated =
        tiles_of(p, 3 * (uint64_t)max_tokens, prefill_rows(p->dim, true)) + runs + ends;
    return plain * sizeof(struct prefill_entry) + PREFILL_UPLOAD_ALIGN + /* trees apart */
           (p->kv.is_quantised ? plain / 3 + PREFILL_UPLOAD_ALIGN : 0) + /* several calls */
           (p->has_dilated ? dilated * sizeof(struct prefill_run) + PREFILL_UPLOAD_ALIGN : 0);
}

/* A part of a unit's keys has at least so many tiles, in latent pools LATENT_PART_TILES. */
#ifndef PREFILL_PART_TILES
#define PREFILL_PART_TILES 8
#define LATENT_PART_TILES 2
#endif
#ifndef LATENT_PART_TILES
#define LATENT_PART_TILES PREFILL_PART_TILES
#endif

/* In the time of a tile, about: what a unit takes besides its tiles, and to write a part's sums and
 * read them back. */
enum { UNIT_TILES = 2, JOIN_TILES = PREFILL_PART_TILES / 2 };

static struct prefill_shape shape_of_prompts(const struct prefill_pool *p)
{
    return (struct prefill_shape){.n_processors = p->n_processors,
                                  .part_tiles = p->dim == PREFILL_LATENT_DIM ? LATENT_PART_TILES
                                                                             : PREFILL_PART_TILES};
}

/* Work to be put in order: an entry of either kind, and how many tiles of keys it has. */
struct work {
    struct prefill_run run; /* of a layer that is not dilated: item and tile */
    uint32_t part, last_part;
    uint32_t cost; /* of all its parts */
};

/* Calls put(arg, work) for all work of an item. */
typedef void work_fn(void *arg, const struct work *w);

/* A counting sort by tiles of keys, the most first; long units share a bucket with those of nearly
 * as many. */
enum { BUCKETS = 1024 };

struct order {
    uint32_t n, most, shift;
    uint32_t rows; /* of a unit */
    uint32_t share; /* tiles of keys of a part; 0: nothing is cut */
    const uint32_t *list_starts; /* NULL: items have no lists */
    uint32_t at[BUCKETS + 1];
    bool is_dilated;
    union {
        struct prefill_entry *entries;
        struct prefill_run *runs;
    };
};

/* Tiles of keys of the unit that is tile `tile` of an item's rows. */
static uint32_t cost_of(const struct prefill_pool *p, const struct gpu_item *it, uint32_t rows,
                        uint32_t tile)
{
    const struct attn_layer_spec *s = &p->specs[it->layer];
    const uint64_t row = (uint64_t)tile * rows;
    const uint64_t end = (uint64_t)it->n_tokens * p->kv.group;
    const uint64_t last = row + rows < end ? row + rows : end;
    const uint32_t low = it->pos + (uint32_t)(row / p->kv.group), n_keys = it->pos + it->n_tokens;
    const uint32_t high = it->pos + (uint32_t)((last - 1) / p->kv.group);
    const uint32_t window = s->window_tokens, sinks = s->sink_tokens;
    const uint32_t is_full = s->is_full || it->is_full;
    const struct visible seen = visible_to_some(visible_to(window, sinks, is_full, low, n_keys),
                                                visible_to(window, sinks, is_full, high, n_keys));
    return visible_tiles_of(seen, prefill_keys(p->dim)).n;
}

/* Parts of a unit of `cost` tiles, none of more than `share` if there are enough parts. */
static uint32_t parts_of(const struct prefill_pool *p, uint32_t cost, uint32_t share)
{
    const uint32_t most =
        p->dim == PREFILL_LATENT_DIM ? PREFILL_MAX_LATENT_PARTS : PREFILL_MAX_PARTS;
    const uint32_t n = share == 0 ? 1 : (cost + share - 1) / share;
    return n == 0 ? 1 : n < most ? n : most;
}

/* cost_of for an item with lists: each query has units of its own. */
static uint32_t listed_cost_of(const struct prefill_pool *p, const struct gpu_item *it,
                               const struct order *o, uint32_t tile)
{
    const uint32_t *starts = o->list_starts + it->node0 + tile / tiles_of(p, 1, o->rows);
    const uint32_t keys = prefill_keys(p->dim), n = (starts[1] - starts[0] + keys - 1) / keys;
    return n > 0 ? n : 1;
}

static void each_tile(const struct prefill_pool *p, const struct gpu_item *it, uint32_t item,
                      const struct order *o, work_fn *put, void *arg)
{
    const bool has_lists = o->list_starts != NULL;
    const uint32_t n_tiles =
        has_lists ? it->n_tokens * tiles_of(p, 1, o->rows) : tiles_of(p, it->n_tokens, o->rows);
    for (uint32_t t = n_tiles; t-- > 0;) {
        struct work w = {.run = {.item = item, .tile = t}};
        w.cost = has_lists ? listed_cost_of(p, it, o, t) : cost_of(p, it, o->rows, t);
        w.last_part = parts_of(p, w.cost, o->share) - 1;
        for (w.part = 0; w.part <= w.last_part; w.part++)
            put(arg, &w);
    }
}

/* Positions at whose multiples an item's runs end, so that the rows of a run see the same keys: the
 * shortest segments. 0: nowhere, because a head has too few rows of a remainder in one. */
static uint32_t cut_of(const struct prefill_pool *p, const struct attn_layer_spec *s)
{
    uint32_t least = UINT32_MAX;
    for (uint32_t i = 0; i < s->n_branches; i++)
        least = s->branches[i].segment_tokens < least ? s->branches[i].segment_tokens : least;
    return (uint64_t)(least >> rates_log2(s)) * p->kv.group < RUN_ROWS ? 0 : least;
}

/* About the tiles of keys of a unit of kv head 0. */
static uint32_t dilated_cost_of(const struct prefill_pool *p, const struct gpu_item *it,
                                const struct prefill_run *run)
{
    const struct attn_layer_spec *s = &p->specs[it->layer];
    const uint32_t r = prefill_rows(p->dim, true), n_keys = it->pos + it->n_tokens;
    const uint64_t row = (uint64_t)run->tile * r, end = run->n_tokens - 1;
    const uint64_t low = row / p->kv.group << run->shift,
                   high = (row + r - 1) / p->kv.group << run->shift;
    const uint32_t begin = it->pos + run->from;
    uint32_t n = 0;
    for (uint32_t i = 0; i < s->n_branches; i++) {
        const struct attn_branch *b = &s->branches[i];
        if ((run->residue & (b->rate - 1)) != 0)
            continue;
        const struct branch_range seen =
            branch_visible_to(branch_of(b->segment_tokens, b->rate, 0), s->is_full,
                              begin + (uint32_t)(low < end ? low : end),
                              begin + (uint32_t)(high < end ? high : end), n_keys);
        n += visible_tiles_of(visible_to_some(seen.lowest, seen.highest), prefill_keys(p->dim)).n;
    }
    return n;
}

static void each_run(const struct prefill_pool *p, const struct gpu_item *it, uint32_t item,
                     const struct order *o, work_fn *put, void *arg)
{
    const struct attn_layer_spec *s = &p->specs[it->layer];
    const uint32_t shift = rates_log2(s), cut = cut_of(p, s);
    uint32_t n = 0;
    for (uint32_t from = 0; from < it->n_tokens; from += n) {
        const uint32_t left = it->n_tokens - from;
        const uint32_t to_cut = cut ? cut - (it->pos + from) % cut : left;
        n = to_cut < left ? to_cut : left;
        for (uint32_t residue = 0; residue < 1u << shift; residue++)
            for (uint32_t t = tiles_of(p, ((uint64_t)n + (1u << shift) - 1) >> shift, o->rows);
                 t-- > 0;) {
                struct work w = {.run = {.item = item,
                                         .shift = shift,
                                         .from = from,
                                         .n_tokens = n,
                                         .tile = t,
                                         .residue = residue}};
                w.cost = dilated_cost_of(p, it, &w.run);
                put(arg, &w);
            }
    }
}

static void measure(void *arg, const struct work *w)
{
    struct order *o = arg;
    o->n++;
    o->most = w->cost > o->most ? w->cost : o->most;
}

static uint32_t bucket_of(const struct order *o, const struct work *w)
{
    const uint32_t bucket = w->cost >> o->shift;
    return bucket < BUCKETS ? BUCKETS - 1 - bucket : 0;
}

static void count(void *arg, const struct work *w)
{
    struct order *o = arg;
    o->at[bucket_of(o, w) + 1]++;
}

static void place(void *arg, const struct work *w)
{
    struct order *o = arg;
    const uint32_t to = o->at[bucket_of(o, w)]++;
    if (o->is_dilated)
        o->runs[to] = w->run;
    else
        o->entries[to] = (struct prefill_entry){
            .item = w->run.item, .tile = w->run.tile, .part = w->part, .last_part = w->last_part};
}

static void each_work(const struct prefill_pool *p, const struct gpu_item *items, uint32_t n,
                      const struct order *o, work_fn *put, void *arg)
{
    for (uint32_t i = 0; i < n; i++)
        if (o->is_dilated)
            each_run(p, &items[i], i, o, put, arg);
        else
            each_tile(p, &items[i], i, o, put, arg);
}

/* Tiles of keys of each entry, the most first. */
struct costs {
    uint32_t n, of[PREFILL_MAX_CUT];
};

static void note_cost(void *arg, const struct work *w)
{
    struct costs *c = arg;
    uint32_t i = c->n++;
    for (; i > 0 && c->of[i - 1] < w->cost; i--)
        c->of[i] = c->of[i - 1];
    c->of[i] = w->cost;
}

/* The smallest share with which all entries together have at most `most` parts. */
static uint32_t share_for(const struct prefill_pool *p, const struct prefill_shape *shape,
                          const struct costs *c, uint32_t most)
{
    uint32_t low = shape->part_tiles, high = c->of[0];
    while (low < high) {
        const uint32_t share = low + (high - low) / 2;
        uint32_t n = 0;
        for (uint32_t i = 0; i < c->n; i++)
            n += parts_of(p, c->of[i], share);
        if (n <= most)
            high = share;
        else
            low = share + 1;
    }
    return high;
}

/* In tiles, how long the launch takes at least if nothing is cut: of the kP + 1 longest units some
 * processor of P has k + 1, and all P have all units. */
static uint32_t time_whole(const struct costs *c, uint32_t heads, uint32_t n_processors)
{
    uint32_t most = 0, turn = 1;
    for (uint64_t i = 0; i < (uint64_t)c->n * heads; i += n_processors, turn++) {
        const uint32_t time = turn * (c->of[i / heads] + UNIT_TILES);
        most = time > most ? time : most;
    }
    uint64_t all = 0;
    for (uint32_t i = 0; i < c->n; i++)
        all += c->of[i] + UNIT_TILES;
    all = all * heads / n_processors;
    return most > all ? most : (uint32_t)all;
}

/* The same if parts of at most `share` tiles are computed in so many turns. */
static uint32_t time_cut(const struct prefill_pool *p, const struct costs *c, uint32_t share,
                         uint32_t turns)
{
    const uint32_t n = parts_of(p, c->of[0], share), longest = (c->of[0] + n - 1) / n;
    return turns * ((longest > share ? longest : share) + UNIT_TILES + JOIN_TILES);
}

/* Tiles of a part at most, 0: nothing is cut; and of how many tiles the launch takes the time. */
struct cut {
    uint32_t share, time;
};

/* May any of the units be cut? */
static bool can_be_cut(const struct prefill_pool *p, const struct prefill_shape *shape,
                       uint32_t heads, const struct order *whole)
{
    return !whole->is_dilated && whole->n <= p->most_parts / heads &&
           whole->most > shape->part_tiles;
}

/* Where units leave processors idle, the keys of long ones are cut into as many parts as the
 * processors compute in one to four turns, whichever ends soonest. heads: kv heads of a launch.
 * Of an order of at most PREFILL_MAX_CUT entries. */
static struct cut best_cut(const struct prefill_pool *p, const struct prefill_shape *shape,
                           const struct gpu_item *items, uint32_t n, uint32_t heads,
                           const struct order *whole)
{
    const uint32_t room = p->most_parts / heads;
    struct costs c = {.n = 0};
    each_work(p, items, n, whole, note_cost, &c);
    struct cut best = {0, time_whole(&c, heads, shape->n_processors)};
    for (uint32_t turns = 1; turns <= 4 && can_be_cut(p, shape, heads, whole); turns++) {
        const uint32_t in_turns = turns * shape->n_processors / heads;
        const uint32_t most = in_turns < room ? in_turns : room;
        if (most <= c.n)
            continue;
        const uint32_t share = share_for(p, shape, &c, most), time = time_cut(p, &c, share, turns);
        if (time < best.time && share < c.of[0])
            best = (struct cut){share, time};
    }
    return best;
}

/* Of the time of a unit of many rows one of PREFILL_FEW_ROWS and as many tiles takes so many
 * eighths, beside another on its processor (H200; docs/benchmarks/prompts.md). */
enum { FEW_ROWS_EIGHTHS = 7 };

/* Units of how many rows a launch has and how they are cut: whichever ends sooner. More than two
 * turns of units of few rows never do. *o becomes that order, with what is counted before it is
 * cut. */
static void plan_units(const struct prefill_pool *p, const struct prefill_shape *shape,
                       const struct gpu_item *items, uint32_t n, uint32_t heads, struct order *o)
{
    struct order few = *o;
    struct prefill_shape shared = *shape;
    few.rows = PREFILL_FEW_ROWS;
    shared.n_processors *= prefill_blocks_at_once(p->dim, few.rows);
    const uint32_t two_turns = 2 * shared.n_processors / heads;
    const uint32_t most = two_turns < PREFILL_MAX_CUT ? two_turns : PREFILL_MAX_CUT;
    each_work(p, items, n, o, measure, o);
    bool may_be_few = prefill_has_few_rows(p->dim, p->kv.is_quantised) && !o->is_dilated;
    if (may_be_few && o->n <= most)
        each_work(p, items, n, &few, measure, &few);
    may_be_few &= o->n <= most && few.n <= most;
    if (!may_be_few && !can_be_cut(p, shape, heads, o))
        return;
    const struct cut cut = best_cut(p, shape, items, n, heads, o);
    o->share = cut.share;
    if (may_be_few) {
        const struct cut few_cut = best_cut(p, &shared, items, n, heads, &few);
        few.share = few_cut.share;
        if (FEW_ROWS_EIGHTHS * few_cut.time < 8 * cut.time)
            *o = few;
    }
}

/* Kv heads of a launch: all, or those whose decoded keys, `blocks` of each head, have room; all
 * launches but the last have as many. */
static uint32_t heads_at_once(const struct prefill_pool *p, uint32_t blocks)
{
    const uint32_t n = p->kv.num_kv_heads, most = blocks ? p->decoded_blocks / blocks : n;
    const uint32_t n_launches = most >= n ? 1 : (n + most - 1) / most;
    return (n + n_launches - 1) / n_launches;
}

void prefill_prepare(const struct prefill_pool *p, const struct gpu_item *items, uint32_t n,
                     const struct gpu_item *device_items, const struct prefill_shape *shape,
                     void *upload, struct prefill_call *out_call)
{
    struct prefill_shape own = shape_of_prompts(p);
    struct order o = {.is_dilated = p->specs[items[0].layer].n_branches > 0,
                      .list_starts = shape ? shape->list_starts : NULL};
    o.rows = prefill_rows(p->dim, o.is_dilated);
    if (shape && shape->n_processors > 0)
        own.n_processors = shape->n_processors;
    if (shape && shape->part_tiles > 0)
        own.part_tiles = shape->part_tiles;
    uint64_t tokens = 0;
    uint32_t blocks = 0;
    for (uint32_t i = 0; i < n; i++) {
        tokens += items[i].pos + items[i].n_tokens;
        blocks += prefill_blocks(p, items[i].pos + items[i].n_tokens);
    }
    out_call->n_items = n;
    out_call->head_blocks = blocks;
    out_call->heads = heads_at_once(p, blocks);
    plan_units(p, &own, items, n, out_call->heads, &o);
    if (o.share > 0) {
        o.n = 0;
        each_work(p, items, n, &o, measure, &o);
    }
    while (o.most >> o.shift >= BUCKETS)
        o.shift++;
    out_call->upload_bytes = 0;
    o.entries = out_call->inline_list.entries;
    if (o.n > (o.is_dilated ? PREFILL_INLINE_RUNS : PREFILL_INLINE_ENTRIES)) {
        o.entries = upload;
        out_call->upload_bytes = o.n * (o.is_dilated ? sizeof *o.runs : sizeof *o.entries);
    }
    each_work(p, items, n, &o, count, &o);
    for (uint32_t k = 0; k < BUCKETS; k++)
        o.at[k + 1] += o.at[k];
    each_work(p, items, n, &o, place, &o);
    const uint64_t row_bytes = p->kv.is_quantised
                                   ? (p->kv.dk + p->kv.dv) * 2 /* decoded */
                                   : (p->kv.k_head_bytes + p->kv.v_head_bytes) / p->kv.block_tokens;
    out_call->pool = p;
    out_call->items = device_items;
    out_call->is_dilated = o.is_dilated;
    out_call->list_starts = out_call->list_tokens = NULL;
    out_call->nodes = NULL;
    out_call->is_cut = o.share > 0;
    out_call->rows = o.rows;
    out_call->n_entries = o.n;
    const uint64_t heads = SECTION_BYTES / (tokens * row_bytes);
    out_call->section_heads = heads == 0                   ? 1
                              : heads < p->kv.num_kv_heads ? (uint32_t)heads
                                                           : p->kv.num_kv_heads;
}
