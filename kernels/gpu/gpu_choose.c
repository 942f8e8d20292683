/* gpu_choose.c: items that choose blocks (backend_item.n_chosen): what is kept of blocks' keys, and
 * the launch in front of their attention (choose.cu).
 *
 * The extremes of a block's keys are made from the cached keys when a query first has the choice of
 * the block, and forgotten when anything of the block is written, so nothing else need know of
 * them. The host knows which blocks have them: every write is its own, and batches begin in their
 * order. Of a row of the table it knows how far all have them, so that a step looks at the new ones
 * only. They lie at the end of the KV memory, and leave that room to pools; not those of pools of
 * stripes, which are given them (backend_extremes), and not where there are summaries.
 *
 * A block that is not there has block 0 in its place in what attention reads, so that kernels need
 * not know of it.
 */
#include "kernels/gpu/gpu_host.h"
#include "kernels/grow.h"
#include "kernels/layer_visible.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#define EXTREMES_ALIGN 4096

static bool is_full(const struct backend_pool *p, const struct backend_item *it)
{
    return layer_is_full(&p->specs[it->layer], it->flags);
}

/* Of the item's query `token`. */
static struct choice_size choice_at(const struct backend_pool *p, const struct backend_item *it,
                                    uint32_t token)
{
    const uint32_t n_seen = is_full(p, it) ? it->n_tokens : token + 1;
    return choice_of(it->n_chosen, p->kv.block_shift, p->kv.stripes, it->pos + n_seen);
}

/* By its last query. */
static uint32_t blocks_seen(const struct backend_pool *p, const struct backend_item *it)
{
    return choice_at(p, it, it->n_tokens - 1).n_blocks;
}

bool gpu_item_chooses(const struct backend_pool *p, const struct backend_item *it)
{
    return it->n_chosen > 0 && (it->chosen || it->n_chosen < blocks_seen(p, it));
}

uint32_t gpu_chosen_most(const struct backend_pool *p, const struct backend_item *it)
{
    const uint32_t n_blocks = blocks_seen(p, it);
    return (it->n_chosen < n_blocks ? it->n_chosen : n_blocks) << p->kv.block_shift;
}

uint64_t gpu_chosen_bytes(const struct backend_pool *p, const struct backend_item *it)
{
    uint64_t n_keys = 0;
    for (uint32_t t = 0; t < it->n_tokens; t++)
        n_keys += choice_at(p, it, t).n_keys;
    return n_keys * layer_key_bytes(&p->config) * p->config.num_kv_heads;
}

/* ---- what is kept of blocks */

static uint64_t extremes_bytes(const struct backend_pool *p)
{
    const struct backend_pool_config *c = &p->config;
    const size_t size = attn_dtype_bytes(backend_extremes_dtype(c));
    const uint64_t bytes =
        (uint64_t)backend_n_names(c) * c->num_layers * c->num_kv_heads * 2 * c->head_dim_k * size;
    return (bytes + EXTREMES_ALIGN - 1) / EXTREMES_ALIGN * EXTREMES_ALIGN;
}

static uint8_t *has_extremes(const struct backend_pool *p, uint32_t block, uint32_t layer)
{
    return &p->has_extremes[(size_t)layer * backend_n_names(&p->config) + block];
}

void gpu_extremes_forget(struct backend_pool *p, uint32_t block)
{
    uint8_t had = 0;
    for (uint32_t i = 0; p->has_extremes != NULL && i < p->config.num_layers; i++) {
        had |= *has_extremes(p, block, i);
        *has_extremes(p, block, i) = 0;
    }
    p->known_turn += had; /* it may be in any row */
}

static struct gpu_known *known_at(const struct backend_pool *p, uint32_t row, uint32_t layer)
{
    return &p->known[(size_t)row * p->config.num_layers + layer];
}

/* The row's entries from `index` on may be blocks without extremes. */
static void known_cut(struct backend_pool *p, uint32_t row, uint32_t layer, uint32_t index)
{
    struct gpu_known *k = known_at(p, row, layer);
    k->n = k->n < index ? k->n : index;
}

void gpu_extremes_free(struct backend_pool *p)
{
    if (p->has_extremes != NULL)
        kv_range_give(&p->b->kv_ranges, &p->extremes_range);
    free(p->has_extremes);
    free(p->known);
    p->has_extremes = NULL;
    p->known = NULL;
}

bool gpu_extremes_make_way(struct backend *b)
{
    bool had_any = false;
    for (struct backend_pool *p = b->pools; p != NULL; p = p->next) {
        if (p->has_extremes == NULL || p->config.n_stripes > 0 || p->config.n_summaries > 0)
            continue;
        had_any = true;
        gpu_extremes_free(p);
    }
    return had_any;
}

/* At the end of the KV memory, which leaves pools room to grow, or in a gap. */
static bool take_room(struct backend_pool *p, uint64_t *out_largest)
{
    const uint64_t all = p->b->kv.bytes;
    struct kv_range *r = &p->extremes_range;
    r->bytes = extremes_bytes(p);
    r->offset = r->bytes <= all ? (all - r->bytes) & ~(uint64_t)(EXTREMES_ALIGN - 1) : 0;
    return kv_range_take(&p->b->kv_ranges, all, true, r, out_largest) ||
           kv_range_take(&p->b->kv_ranges, all, false, r, out_largest);
}

/* Takes their part of the KV memory, other pools' extremes too where no other room is left. What
 * runs there still is no batch's that this one does not follow: it makes all extremes anew. */
static attn_status extremes_open(struct backend_pool *p)
{
    struct backend *b = p->b;
    struct kv_range *r = &p->extremes_range;
    uint64_t largest;
    if (p->has_extremes != NULL)
        return ATTN_OK;
    if (!take_room(p, &largest) && !(gpu_extremes_make_way(b) && take_room(p, &largest)))
        return gpu_fail(b, ATTN_ENOMEM,
                        "choosing blocks takes %" PRIu64 " bytes of KV memory for the pool's "
                        "%" PRIu32 " blocks and %" PRIu32 " summaries, %" PRIu64
                        " are free in one piece",
                        r->bytes, p->config.n_blocks, p->config.n_summaries, largest);
    p->has_extremes = calloc((size_t)backend_n_names(&p->config) * p->config.num_layers, 1);
    p->known = calloc((size_t)p->config.n_table_rows * p->config.num_layers, sizeof *p->known);
    if (p->has_extremes == NULL || p->known == NULL) {
        kv_range_give(&b->kv_ranges, r);
        free(p->has_extremes);
        free(p->known);
        p->has_extremes = NULL;
        p->known = NULL;
        return gpu_fail(b, ATTN_ENOMEM, "out of host memory");
    }
    if (r->offset + r->bytes > b->kv_written)
        b->kv_written = r->offset + r->bytes;
    return ATTN_OK;
}

attn_status gpu_summaries_open(struct backend_pool *p)
{
    attn_status st = extremes_open(p);
    if (st != ATTN_OK)
        p->config.n_summaries = 0;
    return st;
}

/* ---- a batch */

/* Forgets what the batch writes to. */
static void forget_written(const struct backend_batch *batch)
{
    struct backend_pool *p = batch->pool;
    if (p->has_extremes == NULL)
        return;
    for (uint32_t i = 0; i < batch->n_patches; i++) {
        const struct backend_patch *x = &batch->patches[i];
        if (i > 0 && x[-1].row == x->row && x[-1].index <= x->index)
            continue; /* it is cut already */
        for (uint32_t k = 0; k < p->config.num_layers; k++)
            known_cut(p, x->row, k, x->index);
    }
    for (uint32_t i = 0; i < batch->n_items; i++) {
        const struct backend_item *it = &batch->items[i];
        const uint32_t shift = p->kv.block_shift, last = it->pos + it->n_tokens - 1;
        if (!(it->flags & BACKEND_APPEND))
            continue;
        known_cut(p, it->table_row, it->layer, it->pos >> shift);
        for (uint32_t k = it->pos >> shift; k <= last >> shift; k++)
            *has_extremes(p, it->block_table[k], it->layer) = 0;
    }
    for (uint32_t i = 0; i < batch->n_copies; i++)
        if (batch->copies[i].dst < p->config.n_blocks)
            gpu_extremes_forget(p, batch->copies[i].dst);
}

/* The batch's summaries are of something from now on, or of nothing. */
static attn_status note_summaries(const struct backend_batch *batch, bool is_made)
{
    struct backend_pool *p = batch->pool;
    for (uint32_t i = 0; i < batch->n_copies; i++) {
        const uint32_t to = batch->copies[i].dst;
        attn_status st = to >= p->config.n_blocks && is_made ? extremes_open(p) : ATTN_OK;
        if (st != ATTN_OK)
            return st;
        for (uint32_t k = 0; to >= p->config.n_blocks && k < p->config.num_layers; k++)
            if (p->has_extremes != NULL)
                *has_extremes(p, to, k) = is_made;
    }
    return ATTN_OK;
}

static bool needs_bounds(const struct backend_pool *p, const struct backend_item *it)
{
    return it->n_chosen > 2 && it->n_chosen < blocks_seen(p, it);
}

/* Lists the blocks that item i has the choice of and of which nothing is kept. */
static attn_status find_missing(struct gpu_job *j, const struct backend_item *it, uint32_t i)
{
    const struct backend_pool *p = j->pool;
    const struct backend_pool_config *c = &p->config;
    const uint32_t n_blocks = choice_at(p, it, it->n_tokens - 1).n_blocks;
    struct gpu_known *known = known_at(p, it->table_row, it->layer);
    const uint32_t from = known->turn == p->known_turn && known->n > 0 ? known->n : 1;
    if (from + 1 >= n_blocks)
        return ATTN_OK;
    attn_status st = array_reserve(&j->missing, &j->missing_capacity,
                                   (uint64_t)j->n_missing + n_blocks - from, sizeof *j->missing);
    if (st != ATTN_OK)
        return gpu_fail(p->b, ATTN_ENOMEM,
                        "item %" PRIu32 ": no memory for a choice of %" PRIu32 " blocks", i,
                        n_blocks);
    for (uint32_t k = from; k + 1 < n_blocks; k++) {
        const uint32_t block = it->block_table[k];
        const uint32_t n = it->chosen != NULL ? backend_n_names(c) : c->n_blocks;
        if (block >= n)
            return gpu_fail(p->b, ATTN_EINVAL,
                            "item %" PRIu32 ": block_table[%" PRIu32 "] is %" PRIu32 " of %" PRIu32,
                            i, k, block, n);
        uint8_t *has = has_extremes(p, block, it->layer);
        if (*has)
            continue;
        if (block >= c->n_blocks)
            return gpu_fail(p->b, ATTN_EINVAL,
                            "item %" PRIu32 ": block_table[%" PRIu32 "] is summary %" PRIu32
                            ", which nothing was copied to",
                            i, k, block);
        if (c->n_stripes > 0)
            return gpu_fail(p->b, ATTN_EINVAL,
                            "item %" PRIu32 ": extremes of block_table[%" PRIu32
                            "], in layer %" PRIu32 ", were not given",
                            i, k, it->layer);
        *has = 1;
        j->missing[j->n_missing++] = (struct backend_block_layer){block, it->layer};
    }
    *known = (struct gpu_known){.n = n_blocks - 1, .turn = p->known_turn};
    return ATTN_OK;
}

attn_status gpu_choice_note(struct gpu_job *j, const struct backend_batch *batch)
{
    const struct backend_extremes *x = batch->extremes;
    forget_written(batch);
    j->extremes = x;
    attn_status st = x != NULL ? extremes_open(j->pool) : ATTN_OK;
    if (st == ATTN_OK)
        st = note_summaries(batch, true);
    for (uint32_t i = 0; st == ATTN_OK && x != NULL && i < x->n; i++)
        if (x->is_given)
            *has_extremes(j->pool, x->list[i].block, x->list[i].layer) = 1;
    for (uint32_t i = 0; i < batch->n_items && st == ATTN_OK; i++) {
        if (!needs_bounds(j->pool, &batch->items[i]))
            continue;
        st = extremes_open(j->pool);
        if (st == ATTN_OK)
            st = find_missing(j, &batch->items[i], i);
    }
    if (st == ATTN_OK)
        return st;
    note_summaries(batch, false);
    const bool is_given = x != NULL && x->is_given && j->pool->has_extremes != NULL;
    for (uint32_t i = 0; is_given && i < x->n; i++)
        *has_extremes(j->pool, x->list[i].block, x->list[i].layer) = 0;
    for (uint32_t i = 0; i < j->n_missing; i++)
        *has_extremes(j->pool, j->missing[i].block, j->missing[i].layer) = 0;
    j->pool->known_turn++;
    return st;
}

static struct gpu_extremes extremes_of(const struct backend_pool *p)
{
    return (struct gpu_extremes){.base = (char *)p->b->kv.p + p->extremes_range.offset,
                                 .num_layers = p->config.num_layers};
}

static int make(const struct backend_pool *p, const struct backend_block_layer *list, uint32_t n,
                const struct backend_extremes *x, runtime_stream *s)
{
    const uint32_t most = GPU_LIST / 2;
    const size_t each = (size_t)p->kv.num_kv_heads * 2 * p->kv.dk *
                        attn_dtype_bytes(backend_extremes_dtype(&p->config));
    int code = 0;
    for (uint32_t i = 0; i < n && !code; i += most) {
        struct gpu_extremes_make a = {.kv = p->kv, .extremes = extremes_of(p)};
        a.n = n - i < most ? n - i : most;
        a.bytes = x != NULL ? (char *)x->bytes + i * each : NULL;
        a.is_given = x != NULL && x->is_given;
        memcpy(a.list, list + i, a.n * sizeof *list);
        code = runtime_check("extremes kernel", gpu_extremes_launch(&a, s, 0));
    }
    return code;
}

int gpu_summaries_make(const struct backend_batch *batch, runtime_stream *s)
{
    const struct backend_pool *p = batch->pool;
    const uint32_t layers = p->config.num_layers;
    struct gpu_extremes_make a = {.kv = p->kv, .extremes = extremes_of(p), .is_summary = true};
    uint32_t n = 0;
    int code = 0;
    for (uint32_t i = 0; i < batch->n_copies && !code; i++) {
        const bool is_last = i + 1 == batch->n_copies;
        if (batch->copies[i].dst >= p->config.n_blocks) {
            a.list[2 * n] = batch->copies[i].src;
            a.list[2 * n++ + 1] = batch->copies[i].dst;
        }
        if (n < GPU_LIST / 2 && !(is_last && n > 0))
            continue;
        a.n = n * layers;
        code = runtime_check("summaries kernel", gpu_extremes_launch(&a, s, 0));
        n = 0;
    }
    return code;
}

void gpu_choices_tell(const struct gpu_job *j, const struct backend_batch *batch)
{
    const uint32_t *from = j->places;
    for (uint32_t i = 0; i < batch->n_items && from != NULL; i++) {
        const struct backend_item *it = &batch->items[j->order[i]];
        if (!gpu_item_chooses(j->pool, it))
            continue;
        const uint64_t n = backend_item_listed(&j->pool->config, it);
        if (it->chosen)
            memcpy(it->chosen, from, n * sizeof *from);
        from += n;
    }
}

int gpu_extremes_make(const struct gpu_job *j, runtime_stream *s)
{
    const struct backend_extremes *x = j->extremes;
    const int code = x != NULL ? make(j->pool, x->list, x->n, x, s) : 0;
    return code ? code : make(j->pool, j->missing, j->n_missing, NULL, s);
}

int gpu_choice_launch(const struct backend_pool *p, const struct gpu_range *r, runtime_stream *s,
                      bool is_chained)
{
    const struct backend *b = p->b;
    const uint64_t room = (uint64_t)GPU_PART_SLOTS * b->part_dv;
    const uint32_t n_rows = r->n_tokens * p->kv.num_kv_heads;
    struct gpu_choose a = {.kv = p->kv,
                           .extremes = extremes_of(p),
                           .items = r->attend.items,
                           .bounds = (uint32_t *)b->part_o,
                           .arrivals = b->arrivals,
                           .chosen = r->chosen,
                           .places = r->places,
                           .n_blocks = p->config.n_blocks,
                           .n_items = r->attend.n_items,
                           .n_chosen = r->attend.n_chosen,
                           .n_longest = r->n_longest};
    const uint64_t fit = room / a.n_longest, most = fit < GPU_MAX_JOINED ? fit : GPU_MAX_JOINED;
    int code = 0;
    for (; a.row0 < n_rows && !code; a.row0 += a.n_rows, is_chained = true) {
        a.n_rows = n_rows - a.row0 < most ? n_rows - a.row0 : (uint32_t)most;
        code = runtime_check("choice kernel", gpu_choose_launch(&a, s, is_chained));
    }
    return code;
}
