/* decode_select.c: the rule that chooses among the tuned decode kernels, and how they cut the work.
 */
#include "kernels/gpu/sm90/decode_host.h"

bool decode_supported(const struct backend_pool_config *c, int major, int minor)
{
    (void)minor;
    bool is_dim = c->head_dim_k == 64 || c->head_dim_k == 128 || c->head_dim_k == 256;
    return major == 9 && !c->is_v_in_k && c->head_dim_k == c->head_dim_v && is_dim &&
           c->q_dtype == c->kv_dtype && (c->q_dtype == ATTN_BF16 || c->q_dtype == ATTN_F16) &&
           c->block_tokens >= DECODE_TILE;
}

void decode_visible_tiles(const struct decode_pool *p, const struct decode_item *it,
                          uint32_t *out_n, uint32_t *out_sinks, uint32_t *out_skip)
{
    const struct attn_layer_spec *l = &p->specs[it->layer];
    const uint32_t w = l->window_tokens, s = l->sink_tokens, n_keys = it->pos + it->n_tokens;
    const uint32_t is_full = l->is_full || it->is_full;
    const struct visible seen = visible_to_some(visible_to(w, s, is_full, it->pos, n_keys),
                                                visible_to(w, s, is_full, n_keys - 1, n_keys));
    const struct visible_tiles t = visible_tiles_of(seen, DECODE_TILE);
    *out_n = t.n;
    *out_sinks = t.sinks == 0 && t.skip == 0 ? t.n : t.sinks;
    *out_skip = t.skip;
}

struct decode_shape decode_shape_of(const struct decode_pool *p, const struct decode_item *items,
                                    uint32_t n_items, uint32_t rows)
{
    struct decode_shape s = {0};
    for (uint32_t i = 0; i < n_items; i++) {
        uint32_t n, sinks, skip, r = items[i].n_tokens * p->kv.group;
        decode_visible_tiles(p, &items[i], &n, &sinks, &skip);
        s.max_rows = r > s.max_rows ? r : s.max_rows;
        s.max_tiles = n > s.max_tiles ? n : s.max_tiles;
        uint32_t segments = ceil_div(r, rows) * p->kv.num_kv_heads;
        s.segments += segments;
        s.tiles += (uint64_t)segments * n;
    }
    return s;
}

/* Thread blocks in clusters of `size` that run at the same time, one a processor: GPCs have 16 or
 * 18 processors and a cluster stays in one. On an H200 (132): 2, 4 and 8 as the driver says; 32 of
 * 3 and 16 of 6 were seen to run at once, 16 of 7 not. */
static uint32_t cluster_room(uint32_t n_processors, uint32_t size)
{
    static const uint8_t clusters[] = {0, 132, 66, 42, 30, 24, 18, 14, 15};
    return clusters[size] * size * n_processors / 132; /* size <= DECODE_MAX_CLUSTER */
}

uint32_t decode_cluster_a_gpc(uint32_t n_processors)
{
    return (cluster_room(n_processors, 8) / 8 + 1) / 2 * 8;
}

/* Long calls of 8 or 14 such clusters take 1.02 to 1.04 times a plain read, of 6, 7, 10 or 12 of
 * them 1.08 to 1.21. */
bool decode_is_even_load(uint32_t n_processors, uint64_t blocks)
{
    return blocks == decode_cluster_a_gpc(n_processors) ||
           blocks + 16 == 2 * decode_cluster_a_gpc(n_processors);
}

/* What decode_short takes: one token an item, everything in the parameters, and a segment's tiles
 * all in the shared memory of the blocks that share it. Fills *out but for rows, which the caller
 * has chosen. */
static bool select_short(const struct decode_pool *p, const struct decode_item *items,
                         uint32_t n_items, const struct decode_shape *s, struct decode_choice *out)
{
    /* cutting further gains nothing; where every block brings q over the bus, it loses */
    const uint32_t few_tiles = 4, few_blocks = items[0].q_src ? 32 : 64;
    uint32_t size = 1, blocks = 0;
    for (uint32_t i = 0; i < n_items; i++) {
        blocks = decode_max(blocks, ceil_div(items[i].pos + 1, p->kv.block_tokens));
        if (items[i].n_tokens != 1)
            return false;
    }
    if (p->has_extras || p->kv.dk < 128 || out->rows > 16 ||
        (uint64_t)n_items * (blocks + sizeof(struct decode_dev_item) / 4) > DECODE_SHORT_WORDS)
        return false;
    while (size < DECODE_MAX_CLUSTER &&
           (size * DECODE_SHORT_TILES < s->max_tiles ||
            (size * few_tiles < s->max_tiles && s->segments * size * 2 <= few_blocks)))
        size *= 2;
    /* more segments than processors: two thread blocks a processor, of half its shared memory
     * each */
    const uint32_t tiles = ceil_div(s->max_tiles, size);
    const uint32_t a_processor = s->segments > p->n_processors ? 2 : 1;
    const bool is_tight = p->kv.dk == 256 || a_processor == 2;
    const uint32_t bytes = decode_short_bytes(p->kv.dk, out->rows, tiles, size, is_tight);
    if (tiles > DECODE_SHORT_TILES ||
        s->segments * size > a_processor * cluster_room(p->n_processors, size) ||
        a_processor * (bytes + BLOCK_RESERVED) > PROCESSOR_SHARED)
        return false;
    out->kernel = DECODE_SHORT;
    out->cluster = size;
    out->stages = tiles;
    out->is_tight = is_tight;
    return true;
}

/* Items of a list that are at most half a processor's share are computed a head a warp, whole, so
 * that the warps of a block need not meet; but only where they are an eighth of the work or more.
 * Gives the most tiles of such an item, or 0. */
static uint32_t select_by_head(const struct decode_pool *p, const struct decode_item *items,
                               uint32_t n_items, const struct decode_choice *c)
{
    uint64_t all = 0, of_short = 0; /* in rounds: a tile for each warp */
    uint32_t most = 0;
    if (c->rows != 8 || p->kv.num_kv_heads % c->warps != 0)
        return 0;
    for (int pass = 0; pass < 2; pass++) {
        for (uint32_t i = 0; i < n_items; i++) {
            uint32_t n, sinks, skip;
            decode_visible_tiles(p, &items[i], &n, &sinks, &skip);
            const uint64_t rounds =
                (uint64_t)units_of(p, &items[i], c->rows) * n * (p->kv.num_kv_heads / c->warps);
            if (pass == 0)
                all += rounds;
            else if (n <= most)
                of_short += rounds;
        }
        most = (uint32_t)(all / (2 * c->n_processors));
    }
    return of_short * 8 >= all ? most : 0;
}

/* Rows computed together, and the batch's shape in units of so many. */
static uint32_t select_rows(const struct decode_pool *p, const struct decode_item *items,
                            uint32_t n_items, struct decode_shape *out_shape)
{
    const uint32_t d = p->kv.dk;
    const struct decode_shape by8 = decode_shape_of(p, items, n_items, 8);
    const uint32_t widest = p->is_batch_invariant ? p->kv.group : by8.max_rows;
    uint32_t rows = widest <= 8                             ? 8
                    : d == 64 || (widest <= 16 && d <= 128) ? 16
                    : widest <= 32                          ? 32
                                                            : DECODE_WIDE_ROWS;
    if (p->is_batch_invariant && rows > 16)
        rows = 16;
    *out_shape = decode_shape_of(p, items, n_items, rows);
    if (rows <= 16 || out_shape->tiles >= 1024)
        return rows;
    /* so short that every unit of 8 or 16 rows had better read K and V by itself, through L2 */
    const struct decode_shape by16 = decode_shape_of(p, items, n_items, 16);
    if (out_shape->tiles < 512 && by8.segments <= p->n_processors) {
        *out_shape = by8;
        return 8;
    }
    if (out_shape->max_tiles <= 32 && by16.segments <= p->n_processors) {
        *out_shape = by16;
        return 16;
    }
    return rows;
}

static void select_wide(const struct decode_pool *p, uint32_t n_items, const struct decode_shape *s,
                        struct decode_choice *c)
{
    const uint32_t d = p->kv.dk;
    c->kernel = DECODE_WIDE;
    c->stages = d == 256 ? 3 : 6;
    /* segments are cut until 64 of 132 processors are at work: that many draw all the bandwidth
     * there is, and fewer parts are merged sooner */
    const uint32_t units = n_items * p->kv.num_kv_heads * ceil_div(s->max_rows, c->rows);
    const uint32_t n_stages = ceil_div(s->max_tiles * DECODE_TILE, DECODE_WIDE_TOKENS);
    const uint32_t enough = p->n_processors * 16 / 33;
    for (uint32_t size = 2; size <= DECODE_MAX_CLUSTER && size <= n_stages; size++)
        if (units * c->cluster < enough && units * size <= cluster_room(p->n_processors, size))
            c->cluster = size;
    /* more clusters a segment for few long ones; a rank's slice of all parts must fit in shared
     * memory, where the ring was */
    uint32_t groups = enough / (units * c->cluster);
    groups = min_u32(groups, s->max_tiles / (32 * c->cluster));
    c->n_groups = c->cluster < 8 ? 1 : min_u32(decode_max(groups, 1), d == 256 ? 6 : 8);
}

/* Nothing to gain by sharing out what the longest is longer than the mean: a twentieth, or four
 * tiles, which take no longer than the list's merge. */
static bool is_even(const struct decode_shape *s)
{
    return (uint64_t)s->max_tiles * s->segments * 20 <= s->tiles * 21 + 80ull * s->segments;
}

static bool is_long(const struct decode_pool *p, const struct decode_shape *s)
{
    return s->segments > 16 ? s->tiles >= 1u << 15 && s->segments <= p->n_processors / 2
                            : s->tiles >= 1u << 17;
}

/* Whole segments, one per warp, where they keep nearly all warps at work for the same time. */
static bool select_warp(const struct decode_pool *p, const struct decode_shape *s,
                        struct decode_choice *c)
{
    const uint32_t lanes = p->n_processors * 8; /* warps at work */
    const uint32_t each = ceil_div(s->segments, lanes);
    if (p->has_extras || c->rows != 8 || !is_even(s) || s->max_tiles < 16)
        return false;
    if (s->segments >= lanes * 3 / 4 && (uint64_t)each * lanes * 10 <= (uint64_t)s->segments * 11) {
        c->kernel = DECODE_WARP;
        c->n_processors = ceil_div(s->segments, each);
        return true;
    }
    if (p->kv.dk == 128 && s->segments > 2 * p->n_processors && s->segments <= lanes) {
        /* fewer warps a processor, with as many bytes under way */
        c->kernel = DECODE_WARP;
        c->warps = ceil_div(s->segments, p->n_processors);
        c->stages = 18 / c->warps;
        c->n_processors = s->segments;
        return true;
    }
    return false;
}

/* Long calls are cut so that their blocks load the GPCs alike; those that cannot be, and those
 * of head_dim 64, take less time by the list. */
static bool select_even_load(const struct decode_pool *p, const struct decode_shape *s,
                             struct decode_choice *c)
{
    if (p->kv.dk < 128 || !is_even(s) || !is_long(p, s))
        return false;
    for (uint32_t size = 1; size <= 8; size *= 2)
        if (decode_is_even_load(p->n_processors, (uint64_t)s->segments * size) &&
            size * p->kv.num_kv_heads % 8 == 0) {
            c->cluster = size;
            return true;
        }
    return false;
}

static bool select_list(const struct decode_pool *p, const struct decode_item *items,
                        uint32_t n_items, const struct decode_shape *s, struct decode_choice *c)
{
    const uint32_t d = p->kv.dk;
    const bool has_even = is_even(s), has_long = is_long(p, s);
    if (has_even && s->segments <= 2 * p->n_processors && !has_long)
        return false;
    c->kernel = DECODE_LIST;
    c->n_processors = p->n_processors;
    if (!has_even && p->n_processors >= 16)
        c->n_processors -= c->n_processors % 16; /* as many on each GPC: they have 16 or 18 */
    if (c->rows * d == 16 * 256)
        c->rows = 8;
    /* Long even segments: 64 KB on each of 132 processors, with more under way some are served
     * far sooner than others; two thread blocks of 4 warps there take up to a hundredth less
     * time than one of 8. Uneven ones, whose runs change more often, take 1.5 to 3 % less with
     * 128 KB, where there is room. */
    c->stages = 128 / d;
    if (d == 256)
        c->warps = 4, c->stages = 2;
    else if (has_even && has_long)
        c->warps = 4, c->n_processors *= 2;
    if (!has_even) {
        c->by_head_tiles = select_by_head(p, items, n_items, c);
        if (c->rows * d < 16 * 128)
            c->stages = 2048 / (d * c->warps);
    }
    return true;
}

/* Two thread blocks a processor where there is a segment for each, else one; a few segments are cut
 * until 48 of 132 processors are at work: with 128 KB under way on each they draw nearly all the
 * bandwidth there is, and more parts take longer to merge than they save. */
static void select_cluster(const struct decode_pool *p, const struct decode_shape *s,
                           struct decode_choice *c)
{
    const bool is_double = s->segments > p->n_processors;
    const uint32_t enough = p->n_processors * 4 / 11;
    for (uint32_t size = 2; size <= 8 && size * 4 <= s->max_tiles; size *= 2)
        if (s->segments * c->cluster < enough &&
            s->segments * size <= cluster_room(p->n_processors, size))
            c->cluster = size;
    if (s->max_tiles <= c->cluster * c->warps * 2)
        c->stages = 1;
    else if (c->cluster == 1 && (is_double || s->tiles >= 1u << 16))
        c->warps = 4;
    if (p->kv.dk == 256 && is_double)
        c->warps = 4;
}

void decode_select(const struct decode_pool *p, const struct decode_item *items, uint32_t n_items,
                   struct decode_choice *out)
{
    struct decode_shape s;
    struct decode_choice c = {.kernel = DECODE_CLUSTER,
                              .cluster = 1,
                              .n_groups = 1,
                              .warps = 8,
                              .stages = 256 / p->kv.dk};
    c.rows = select_rows(p, items, n_items, &s);
    if (c.rows > 16)
        select_wide(p, n_items, &s, &c);
    else if (p->is_batch_invariant)
        c.cluster = 8;
    else if (!select_short(p, items, n_items, &s, &c) && !select_warp(p, &s, &c) &&
             !select_even_load(p, &s, &c) && !select_list(p, items, n_items, &s, &c))
        select_cluster(p, &s, &c);
    *out = c;
}
