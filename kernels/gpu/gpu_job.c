/* gpu_job.c: one batch as launches: checks it, orders its items by the kernel that computes them
 * (gpu_select.c), cuts long ones into splits, fills the parameters.
 *
 * Items that begin alike come as gpu_shared.c has them, and groups of them behind all items.
 *
 * How an item is split follows from itself where the pool is batch invariant, else from the whole
 * batch.
 */
#include "kernels/gpu/gpu_host.h"
#include "kernels/grow.h"
#include "kernels/layer_visible.h"

#include <stdlib.h>
#include <string.h>

#define UPLOAD_ALIGN PREFILL_UPLOAD_ALIGN
#define HEAD_ROW_BYTES (sizeof(struct gpu_head_row) + sizeof(struct gpu_head_tile))
#define FIXED_SPLIT_TOKENS 1024
#define MIN_SPLIT_TOKENS 256
/* What a thread block joins at most of its rows' partial results; more are joined by another
 * launch, on all processors. */
#define JOINED_BYTES (64u << 10)
/* Bytes of K and V for each processor, up to which they are read four times, by thread blocks of 16
 * rows in the place of 64. */
#define FEW_BYTES (64u << 10)
/* Of a group, whose queries see the same keys: the time of a product of a prompt's, and the least
 * tiles of keys that are worth a part. */
#define GROUP_TIME 0.62
#define GROUP_PART_TILES 2
/* Prompts beside decodes (launch_beside): at which rate of theirs both end together, as measured on
 * an H100, and how long each has to last; the executor's tests have it shorter. */
#define PROMPT_FLOP_PER_NS 215e3
#ifndef GPU_BESIDE_NS
#define GPU_BESIDE_NS 40e3
#endif
/* Where a batch has groups; and how many times as long as the decodes these may take: longer ones
 * are sooner done on all processors. */
#define GPU_GROUPS_BESIDE_NS (GPU_BESIDE_NS * 0.3)
#define GPU_GROUPS_BESIDE_MOST 4

static uint64_t align_up(uint64_t n, uint64_t unit)
{
    return (n + unit - 1) / unit * unit;
}

uint64_t gpu_staging_bytes(const struct backend *b, const struct backend_pool *p)
{
    uint64_t items = b->config.max_batch_items, tokens = b->config.max_batch_tokens;
    uint64_t tuned =
        p->tuned ? decode_upload_bytes(p->tuned, (uint32_t)items, (uint32_t)tokens) : 0;
    uint64_t prefill =
        p->prefill ? prefill_upload_bytes(p->prefill, (uint32_t)items, (uint32_t)tokens) : 0;
    if (p->prefill && !p->config.is_batch_invariant) /* groups */
        prefill += align_up(
            prefill_upload_bytes(p->prefill, (uint32_t)items, GPU_SHARED_LEVELS * (uint32_t)tokens),
            UPLOAD_ALIGN);
    return align_up(tuned, UPLOAD_ALIGN) + align_up(prefill, UPLOAD_ALIGN) +
           align_up(2 * items * sizeof(struct gpu_item), UPLOAD_ALIGN) +
           align_up(items * sizeof(struct gpu_joined), UPLOAD_ALIGN) +
           align_up(tokens * sizeof(uint32_t), UPLOAD_ALIGN) +
           align_up(tokens * sizeof(struct tree_node), UPLOAD_ALIGN) +
           align_up((tokens + items) * sizeof(uint32_t), UPLOAD_ALIGN) +
           BACKEND_MAX_LISTED * sizeof(uint32_t) + UPLOAD_ALIGN +
           (p->config.q_nope_dim > 0 ? align_up(tokens * HEAD_ROW_BYTES, UPLOAD_ALIGN) : 0) +
           align_up(GPU_MAX_PATCHES * sizeof(struct gpu_patch), UPLOAD_ALIGN);
}

uint64_t gpu_q_bytes(const struct backend *b, const struct backend_pool *p)
{
    return (uint64_t)b->config.max_batch_tokens * p->config.num_q_heads * p->config.head_dim_k *
           attn_dtype_bytes(p->config.q_dtype);
}

uint64_t gpu_kv_row_bytes(const struct backend_pool *p)
{
    const struct backend_pool_config *c = &p->config;
    return c->num_kv_heads * kv_stored_elements(c) * attn_dtype_bytes(c->q_dtype);
}

uint64_t gpu_brought_bytes(const struct backend *b, const struct backend_pool *p)
{
    uint32_t tokens = b->config.max_batch_tokens;
    return (tokens < GPU_BRING_TOKENS ? tokens : GPU_BRING_TOKENS) * gpu_kv_row_bytes(p);
}

attn_status gpu_job_init(struct backend *b, struct gpu_job *j)
{
    memset(j, 0, sizeof *j);
    j->ranges_capacity = 16;
    j->ranges = malloc(j->ranges_capacity * sizeof *j->ranges);
    j->tuned_items = malloc(b->config.max_batch_items * sizeof *j->tuned_items);
    j->order = malloc(b->config.max_batch_items * sizeof *j->order);
    return j->ranges && j->tuned_items && j->order ? ATTN_OK
                                                   : gpu_fail(b, ATTN_ENOMEM, "out of host memory");
}

void gpu_job_fini(struct gpu_job *j)
{
    free(j->ranges);
    free(j->tuned_items);
    free(j->order);
    free(j->missing);
    free(j->prefills);
    j->prefills = NULL;
    j->missing = NULL;
    j->ranges = NULL;
    j->tuned_items = NULL;
    j->order = NULL;
}

/* ---- checks */

static attn_status check_item(struct backend *b, const struct backend_pool *p,
                              const struct backend_item *it, uint32_t i)
{
    const struct backend_pool_config *c = &p->config;
    if (it->n_tokens == 0)
        return gpu_fail(b, ATTN_EINVAL, "item %u: n_tokens is 0", i);
    if (it->layer >= c->num_layers)
        return gpu_fail(b, ATTN_EINVAL, "item %u: layer %u of %u", i, it->layer, c->num_layers);
    const char *fault = backend_item_fault(c, it);
    if (fault)
        return gpu_fail(b, ATTN_EINVAL, "item %u: %s", i, fault);
    if (it->table_row >= c->n_table_rows)
        return gpu_fail(b, ATTN_EINVAL, "item %u: table_row %u of %u", i, it->table_row,
                        c->n_table_rows);
    if ((it->flags & BACKEND_ATTEND) && gpu_weights_have(p, it->layer) < backend_weights_bytes(c))
        return gpu_fail(b, ATTN_EINVAL, "item %u: weights of its layer is missing", i);
    if (backend_item_end(c, it) > (uint64_t)c->max_row_blocks * c->block_tokens)
        return gpu_fail(b, ATTN_EINVAL, "item %u: pos %u + n_tokens %u is beyond max_row_blocks %u",
                        i, it->pos, it->n_tokens, c->max_row_blocks);
    const uint64_t n_blocks = (backend_item_end(c, it) + c->block_tokens - 1) / c->block_tokens;
    for (uint64_t k = 0; c->n_summaries > 0 && !it->chosen && k < n_blocks; k++)
        if (it->block_table[k] >= c->n_blocks)
            return gpu_fail(b, ATTN_EINVAL, "item %u: block_table[%llu] is %u of %u", i,
                            (unsigned long long)k, it->block_table[k], c->n_blocks);
    return ATTN_OK;
}

static attn_status check_batch(struct backend *b, const struct backend_batch *batch)
{
    const struct backend_pool *p = batch->pool;
    const struct backend_pool_config *c = &p->config;
    if (batch->n_items > b->config.max_batch_items)
        return gpu_fail(b, ATTN_EINVAL, "n_items %u exceeds max_batch_items %u", batch->n_items,
                        b->config.max_batch_items);
    uint64_t tokens = 0, listed = 0;
    for (uint32_t i = 0; i < batch->n_items; i++) {
        attn_status st = check_item(b, p, &batch->items[i], i);
        if (st != ATTN_OK)
            return st;
        tokens += batch->items[i].n_tokens;
        if (batch->items[i].key_base > 0 || batch->items[i].ahead > 0)
            return gpu_fail(b, ATTN_ENOTSUP,
                            "item %u: key_base is %u, ahead %u, this backend has no parts", i,
                            batch->items[i].key_base, batch->items[i].ahead);
        listed += backend_item_listed(c, &batch->items[i]);
    }
    if (listed > BACKEND_MAX_LISTED)
        return gpu_fail(b, ATTN_EINVAL, "lists of %llu tokens or blocks, the limit is %u",
                        (unsigned long long)listed, BACKEND_MAX_LISTED);
    if (tokens > b->config.max_batch_tokens)
        return gpu_fail(b, ATTN_EINVAL, "%llu tokens exceed max_batch_tokens %u",
                        (unsigned long long)tokens, b->config.max_batch_tokens);
    for (uint32_t i = 0; i < batch->n_patches; i++) {
        const struct backend_patch *t = &batch->patches[i];
        if (t->row >= c->n_table_rows || t->index >= c->max_row_blocks ||
            t->block >= backend_n_names(c))
            return gpu_fail(b, ATTN_EINVAL, "patch %u: row %u, index %u, block %u out of range", i,
                            t->row, t->index, t->block);
    }
    for (uint32_t i = 0; i < batch->n_copies; i++)
        if (batch->copies[i].src >= c->n_blocks || batch->copies[i].dst >= backend_n_names(c))
            return gpu_fail(b, ATTN_EINVAL, "copy %u: blocks %u -> %u of %u and %u summaries", i,
                            batch->copies[i].src, batch->copies[i].dst, c->n_blocks,
                            c->n_summaries);
    return ATTN_OK;
}

/* ---- kernels and splits */

static bool is_wide(const struct backend_pool *p)
{
    return p->kv.dk > 128 || p->kv.dv > 128;
}

/* Of attend_rows.cuh, where there is one, but for choices of quantised blocks. */
static bool is_sparse_16(enum gpu_kernel kernel)
{
    return kernel == GPU_CHOSEN_16 || kernel == GPU_LISTED_16;
}

/* Thread blocks of so many rows, of one split of an item. */
static uint64_t units_of(const struct backend_pool *p, enum gpu_kernel kernel,
                         uint32_t rows_per_unit, const struct gpu_item *it)
{
    if (gpu_is_sparse(kernel)) /* of one query each */
        return (uint64_t)(p->kv.group + rows_per_unit - 1) / rows_per_unit * it->n_tokens *
               p->kv.num_kv_heads;
    uint64_t rows = (uint64_t)it->n_tokens * p->kv.group;
    return (rows + rows_per_unit - 1) / rows_per_unit * p->kv.num_kv_heads;
}

/* Do thread blocks of 16 rows finish sooner than those of 64? They read K and V again, but there
 * are more of them, and each has fewer partial results to join. Not where an item's bits may not
 * depend on the others. */
static bool is_few(const struct backend_pool *p, const struct gpu_item *items, uint32_t n)
{
    const uint64_t token_bytes = (p->kv.dk + p->kv.dv) * attn_dtype_bits(p->config.kv_dtype) / 8;
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < n; i++) {
        bytes += p->kv.num_kv_heads * token_bytes * ((uint64_t)items[i].pos + items[i].n_tokens);
        if (p->specs[items[i].layer].n_branches > 0)
            return false;
    }
    return !p->config.is_batch_invariant && gpu_rows_blocks(p, 16) > 0 &&
           bytes <= (uint64_t)FEW_BYTES * p->b->device.n_processors;
}

/* Query rows of a thread block that computes these items. Few thread blocks are halved, but for the
 * widest heads, whose halves would have other bits. */
static uint32_t rows_per_unit(const struct backend_pool *p, enum gpu_kernel kernel,
                              const struct gpu_item *items, uint32_t n)
{
    switch (kernel) {
    case GPU_MATRIX_16:
    case GPU_CHOSEN_16:
    case GPU_LISTED_16:
        return 16;
    case GPU_MATRIX_64:
        return is_few(p, items, n) ? 16 : 64;
    case GPU_MATRIX_128:
        break;
    case GPU_VECTOR:
    case GPU_TREE:
    case GPU_LISTED:
    case GPU_CHOSEN:
        return GPU_VECTOR_ROWS;
    case GPU_SHARED:
        return GPU_SHARED_ROWS;
    default:
        return 1;
    }
    uint64_t units = 0;
    for (uint32_t i = 0; i < n; i++)
        units += units_of(p, kernel, 128, &items[i]);
    return is_wide(p) || units >= 2ull * p->b->device.n_processors ? 128 : 64;
}

/* Tokens that splits cut: all that are cached; of a dilated layer those that a query sees at most,
 * in all branches, the stripes' share of them; of lists and choices the longest. */
static uint64_t tokens_to_scatter(const struct backend_pool *p, enum gpu_kernel kernel,
                                  const struct gpu_item *it)
{
    if (gpu_is_sparse(kernel))
        return it->split_tokens; /* as write_items left it */
    const struct attn_layer_spec *s = &p->specs[it->layer];
    uint64_t len = (uint64_t)it->pos + it->n_tokens, n = 0;
    uint32_t n_stripes = p->config.n_stripes > 0 ? p->config.n_stripes : 1;
    for (uint32_t i = 0; i < s->n_branches; i++) {
        const struct attn_branch *b = &s->branches[i];
        n += (b->segment_tokens < len ? b->segment_tokens : len) / b->rate / n_stripes + 1;
    }
    return s->n_branches > 0 ? n : len;
}

/* The least tokens of a split, of n tokens: those of a tile, and as many that what is joined in the
 * end is no more than what is read before. */
static uint64_t least_split(uint64_t n_tokens, uint32_t rows)
{
    uint64_t least = 64;
    while (least * least < n_tokens * rows)
        least += 64;
    return least;
}

/* Tokens of one split: the batch's work in equal shares for all processors. Thread blocks of
 * attend_rows.cuh are cut only as far as all of them run at once. */
static uint64_t share_of(const struct backend *b, const struct backend_pool *p,
                         enum gpu_kernel kernel, uint32_t rows, const struct gpu_item *items,
                         uint32_t n)
{
    const uint32_t blocks =
        gpu_is_matrix(kernel) || is_sparse_16(kernel) ? gpu_rows_blocks(p, rows) : 0;
    uint64_t work = 0, units = 0, longest = 0, most_rows = 0;
    for (uint32_t i = 0; i < n; i++) {
        const uint64_t n_units = units_of(p, kernel, rows, &items[i]);
        const uint64_t n_tokens = tokens_to_scatter(p, kernel, &items[i]);
        const uint64_t n_rows = (uint64_t)items[i].n_tokens * p->kv.group;
        units += n_units;
        work += n_units * n_tokens;
        longest = n_tokens > longest ? n_tokens : longest;
        most_rows = n_rows > most_rows ? n_rows : most_rows;
    }
    uint64_t share = work / (4 * b->device.n_processors) + 1, least = MIN_SPLIT_TOKENS;
    if (blocks > 0) {
        const uint32_t at_once = blocks * b->device.n_processors;
        const uint64_t n_splits = units < at_once ? at_once / units : 1;
        share = work / units / n_splits + 1;
        least = 2 * rows;
        if (rows == 16)
            least = least_split(longest, most_rows < 16 ? (uint32_t)most_rows : 16);
    }
    return share < least ? least : share;
}

static void split_item(const struct backend *b, const struct backend_pool *p,
                       enum gpu_kernel kernel, const struct gpu_choice *choice, struct gpu_item *it,
                       uint64_t share)
{
    uint64_t len = tokens_to_scatter(p, kernel, it);
    uint64_t rows = (uint64_t)it->n_tokens * p->config.num_q_heads;
    if (p->config.is_batch_invariant)
        share = it->n_tokens <= DECODE_MAX_TOKENS ? FIXED_SPLIT_TOKENS : len;
    if (choice->n_shards > 0) {
        it->n_splits = choice->n_shards;
        it->split_tokens = (uint32_t)((len + it->n_splits - 1) / it->n_splits);
        return;
    }
    uint64_t n = (len + share - 1) / share, most = b->part_slots / rows;
    if (n > GPU_MAX_SPLITS)
        n = GPU_MAX_SPLITS;
    if (n > most)
        n = most ? most : 1;
    it->split_tokens = (uint32_t)align_up((len + n - 1) / n, 64);
    it->n_splits = (uint32_t)((len + it->split_tokens - 1) / it->split_tokens);
}

static struct gpu_range *add_range(struct gpu_job *j)
{
    if (array_reserve(&j->ranges, &j->ranges_capacity, (uint64_t)j->n_ranges + 1,
                      sizeof *j->ranges) != ATTN_OK)
        return NULL;
    struct gpu_range *r = &j->ranges[j->n_ranges++];
    memset(r, 0, sizeof *r);
    return r;
}

/* Adds what the launches of a choosing item's range need to know of it. */
static attn_status plan_choice(struct backend *b, struct gpu_job *j, struct gpu_range *r,
                               const struct gpu_item *it)
{
    const struct gpu_kv *kv = &j->pool->kv;
    const uint32_t n_blocks =
        choice_of(1, kv->block_shift, kv->stripes, it->pos + it->n_tokens).n_blocks;
    if (n_blocks > (uint64_t)GPU_PART_SLOTS * b->part_dv)
        return gpu_fail(b, ATTN_ENOTSUP, "a choice of %u blocks: there is room for %llu bounds",
                        n_blocks, (unsigned long long)GPU_PART_SLOTS * b->part_dv);
    r->chosen = j->chosen;
    r->places = j->places;
    r->attend.chosen = j->chosen;
    r->n_tokens += it->n_tokens;
    r->n_longest = n_blocks > r->n_longest ? n_blocks : r->n_longest;
    return ATTN_OK;
}

/* Cuts items[0..n) into launches whose partial results fit the workspace, and whose queries may
 * visit as many blocks. device: where items[0] will be; from: its place in j->order. */
static attn_status plan_ranges(struct backend *b, struct gpu_job *j, enum gpu_kernel kernel,
                               const struct gpu_choice *choice, const struct backend_batch *batch,
                               struct gpu_item *items, uint32_t from, uint32_t n,
                               const struct gpu_item *device)
{
    struct backend_pool *p = j->pool;
    const bool is_split = choice->is_split && (kernel == GPU_VECTOR || kernel == GPU_TREE ||
                                               gpu_is_sparse(kernel) || gpu_is_matrix(kernel));
    const uint32_t rows_of_unit = rows_per_unit(p, kernel, items, n);
    const bool has_lists = kernel == GPU_LISTED || kernel == GPU_LISTED_16;
    const bool may_join = (gpu_is_matrix(kernel) || is_sparse_16(kernel)) && rows_of_unit == 16 &&
                          gpu_rows_blocks(p, 16) > 0;
    uint64_t share = is_split ? share_of(b, p, kernel, rows_of_unit, items, n) : 0;
    struct gpu_range *r = NULL;
    uint64_t slots = 0;
    for (uint32_t i = 0; i < n; i++) {
        struct gpu_item *it = &items[i];
        uint64_t rows = (uint64_t)it->n_tokens * p->config.num_q_heads;
        const uint32_t n_chosen =
            gpu_is_choosing(kernel) ? batch->items[j->order[from + i]].n_chosen : 0;
        it->n_splits = 1;
        if (!gpu_is_sparse(kernel))
            it->split_tokens = it->pos + it->n_tokens;
        if (is_split)
            split_item(b, p, kernel, choice, it, share);
        uint64_t need = it->n_splits > 1 ? rows * it->n_splits : 0;
        if (!r || slots + need > b->part_slots || r->attend.n_chosen != n_chosen) {
            r = add_range(j);
            if (!r)
                return gpu_fail(b, ATTN_ENOMEM, "out of host memory");
            r->kernel = kernel;
            r->attend = (struct gpu_attend){
                .kv = p->kv,
                .items = device + i,
                .part_o = b->part_o,
                .part_ml = b->part_ml,
                .arrivals = b->arrivals,
                .is_joined = may_join,
                .rows_per_unit = rows_of_unit,
                .shared_bytes = b->device.shared_bytes,
                .nodes = kernel == GPU_TREE ? j->nodes : NULL,
                .list_starts = has_lists ? j->list_starts : NULL,
                .list_tokens = has_lists ? j->list_tokens : NULL,
                .n_chosen = n_chosen,
            };
            slots = 0;
        }
        it->slot0 = (uint32_t)slots;
        slots += need;
        it->unit0 = r->attend.n_units;
        uint64_t units = units_of(p, kernel, rows_of_unit, it) * it->n_splits;
        if (r->attend.n_units + units > INT32_MAX)
            return gpu_fail(b, ATTN_EINVAL, "a batch of more than 2^31 thread blocks");
        r->attend.n_units += (uint32_t)units;
        r->attend.n_rows += (uint32_t)rows;
        r->attend.n_items++;
        r->attend.any_split |= it->n_splits > 1;
        r->attend.is_dilated |= p->specs[it->layer].n_branches > 0;
        const uint64_t own = (uint64_t)it->n_tokens * p->kv.group;
        const uint64_t joined = (own < rows_of_unit ? own : rows_of_unit) * p->kv.dv *
                                sizeof(float) * (it->n_splits > 1 ? it->n_splits : 0);
        r->attend.is_joined &= joined <= JOINED_BYTES && r->attend.n_units <= GPU_MAX_JOINED;
        j->n_splits += it->n_splits * p->config.num_kv_heads;
        if (gpu_is_choosing(kernel)) {
            attn_status st = plan_choice(b, j, r, it);
            if (st != ATTN_OK)
                return st;
        }
        if (!gpu_is_sparse(kernel))
            j->kv_bytes +=
                layer_bytes_seen(&p->specs[it->layer], &p->config,
                                 &(struct backend_item){.pos = it->pos, .n_tokens = it->n_tokens});
    }
    return ATTN_OK;
}

static attn_status plan_tuned(struct backend *b, struct gpu_job *j,
                              const struct backend_batch *batch, const struct gpu_item *items,
                              uint32_t n, uint64_t upload_at, bool may_be_direct)
{
    for (uint32_t i = 0; i < n; i++)
        j->tuned_items[i] = (struct decode_item){
            .q = items[i].q,
            .out = items[i].out,
            .lse = items[i].lse,
            .q_src = may_be_direct ? items[i].q_src : NULL,
            .k_src = items[i].k_src,
            .v_src = items[i].v_src,
            .blocks = batch->items[j->order[i]].block_table,
            .table_at = items[i].table_at,
            .layer = items[i].layer,
            .pos = items[i].pos,
            .n_tokens = items[i].n_tokens,
            .is_full = items[i].is_full,
        };
    uint64_t capacity =
        decode_upload_bytes(j->pool->tuned, b->config.max_batch_items, b->config.max_batch_tokens);
    attn_status st = decode_prepare(j->pool->tuned, j->tuned_items, n, &b->planner,
                                    j->staging.host + upload_at, capacity, &j->tuned);
    if (st != ATTN_OK)
        return gpu_fail(b, st, "decode_prepare: %s", attn_status_message(st));
    j->has_tuned = true;
    j->tuned_upload = j->tuned.upload_bytes ? j->staging.device + upload_at : NULL;
    j->kv_bytes += j->tuned.kv_bytes;
    j->n_splits += j->tuned.n_runs;
    j->upload_bytes += j->tuned.upload_bytes;
    return ATTN_OK;
}

/* ---- the batch */

/* Items sorted by kernel (a counting sort); first[k] .. first[k + 1] are those of kernel k. */
static void order_items(const struct backend_pool *p, const struct gpu_choice *choice,
                        const struct backend_batch *batch, uint32_t *order, uint32_t *first)
{
    uint32_t next[GPU_N_KERNELS + 1] = {0};
    for (uint32_t i = 0; i < batch->n_items; i++)
        next[gpu_kernel_of(p, choice, &batch->items[i]) + 1]++;
    for (uint32_t k = 0; k < GPU_N_KERNELS; k++)
        next[k + 1] += next[k];
    memcpy(first, next, sizeof next);
    for (uint32_t i = 0; i < batch->n_items; i++)
        order[next[gpu_kernel_of(p, choice, &batch->items[i])]++] = i;
}

static uint32_t item_blocks(const struct backend_pool *p, const struct backend_item *it)
{
    if (!(it->flags & BACKEND_APPEND))
        return 0;
    uint32_t shift = p->kv.block_shift;
    return ((it->pos + it->n_tokens - 1) >> shift) - (it->pos >> shift) + 1;
}

/* A batch's lists as the host writes them: in prep's parameters, or in the staging, to be
 * uploaded. */
struct job_lists {
    struct gpu_item *items;
    uint32_t *blocks; /* of the appends, as gpu_prep has them */
    struct gpu_patch *patches;
    struct tree_node *nodes; /* of all trees, in the order of items */
    uint32_t *list_starts, *list_tokens; /* of all lists, in the order of items */
    const struct gpu_item *device_items; /* where attention finds the items */
    struct gpu_joined *joined, *device_joined;
    uint64_t tuned_at; /* in the staging: what the tuned kernels want uploaded */
};

static void reset_job(struct gpu_job *j, const struct backend_batch *batch)
{
    j->pool = batch->pool;
    j->n_ranges = 0;
    j->n_missing = 0;
    j->extremes = NULL;
    j->n_splits = 0;
    j->kv_bytes = j->kv_shared_bytes = 0;
    j->join.n_items = 0;
    j->has_tuned = false;
    j->n_prefills = 0;
    j->prefill_flop = 0;
    j->has_append = false;
    j->is_direct = false;
    j->prep.kv = batch->pool->kv;
    if (batch->pool->config.is_v_in_k)
        j->prep.kv.dv = 0; /* nothing of V is brought or stored */
    j->prep.n_items = batch->n_items;
    j->prep.n_patches = batch->n_patches < GPU_MAX_PATCHES ? batch->n_patches : GPU_MAX_PATCHES;
    j->prep.out_start_ns = NULL;
    j->prep.brought = NULL;
    j->prep.heads = NULL;
    j->prep.q_dim = backend_q_dim(&batch->pool->config);
    j->heads.n_tiles = 0;
    j->n_head_rows = 0;
}

/* Small batches travel in the parameters of prep, which stores the items on the device. n_pieces:
 * items that groups of the batch's become. */
static struct job_lists place_lists(struct gpu_job *j, const struct backend_batch *batch,
                                    uint32_t n_pieces)
{
    struct gpu_prep *prep = &j->prep;
    uint32_t n_blocks = 0, n_nodes = 0, n_starts = 0, n_listed = 0;
    uint64_t n_chosen = 0;
    bool is_asked = false; /* somebody wants to know what it chose */
    for (uint32_t i = 0; i < batch->n_items; i++) {
        const struct backend_item *it = &batch->items[i];
        is_asked |= it->chosen != NULL;
        n_blocks += item_blocks(batch->pool, it);
        n_nodes += it->nodes != NULL ? it->n_tokens : 0;
        n_starts += it->lists.starts != NULL ? it->n_tokens + 1 : 0;
        n_listed += backend_listed(&it->lists, it->n_tokens);
        if (gpu_item_chooses(batch->pool, it))
            n_chosen += backend_item_listed(&batch->pool->config, it);
        if (batch->pool->config.q_nope_dim > 0 && (it->flags & BACKEND_ATTEND))
            j->n_head_rows += it->n_tokens;
    }
    bool is_inline = n_pieces == 0 && batch->n_items <= GPU_INLINE_ITEMS &&
                     n_blocks <= GPU_INLINE_BLOCKS && prep->n_patches <= GPU_INLINE_PATCHES &&
                     n_nodes == 0 && n_starts == 0 && j->n_head_rows == 0;
    uint64_t joined_at =
        align_up((batch->n_items + n_pieces) * sizeof(struct gpu_item), UPLOAD_ALIGN);
    uint64_t n_joined = n_pieces > 0 ? batch->n_items : 0;
    uint64_t blocks_at = joined_at + align_up(n_joined * sizeof(struct gpu_joined), UPLOAD_ALIGN);
    uint64_t patches_at = blocks_at + align_up(n_blocks * sizeof(uint32_t), UPLOAD_ALIGN);
    uint64_t nodes_at =
        patches_at + align_up(prep->n_patches * sizeof(struct gpu_patch), UPLOAD_ALIGN);
    uint64_t starts_at = nodes_at + align_up(n_nodes * sizeof(struct tree_node), UPLOAD_ALIGN);
    uint64_t listed_at = starts_at + align_up(n_starts * sizeof(uint32_t), UPLOAD_ALIGN);
    uint64_t heads_at = listed_at + align_up(n_listed * sizeof(uint32_t), UPLOAD_ALIGN);
    uint64_t end = heads_at + align_up(j->n_head_rows * HEAD_ROW_BYTES, UPLOAD_ALIGN);
    char *host = j->staging.host, *device = j->staging.device;
    /* at its end: what is written on the device is behind all that is uploaded */
    j->chosen = (uint32_t *)(device + j->staging.bytes) - n_chosen;
    j->places = is_asked ? (uint32_t *)(host + j->staging.bytes) - n_chosen : NULL;

    struct job_lists l = {.device_items = (struct gpu_item *)device, .tuned_at = end};
    l.joined = (struct gpu_joined *)(host + joined_at);
    l.device_joined = (struct gpu_joined *)(device + joined_at);
    l.nodes = (struct tree_node *)(host + nodes_at);
    j->nodes = (struct tree_node *)(device + nodes_at);
    l.list_starts = (uint32_t *)(host + starts_at);
    l.list_tokens = (uint32_t *)(host + listed_at);
    j->list_starts = (uint32_t *)(device + starts_at);
    j->list_tokens = (uint32_t *)(device + listed_at);
    l.items = is_inline ? prep->inline_items : (struct gpu_item *)host;
    l.blocks = is_inline ? prep->inline_blocks : (uint32_t *)(host + blocks_at);
    l.patches = is_inline ? prep->inline_patches : (struct gpu_patch *)(host + patches_at);
    prep->items = is_inline ? NULL : l.device_items;
    prep->blocks = is_inline ? NULL : (uint32_t *)(device + blocks_at);
    prep->patches = is_inline ? NULL : (struct gpu_patch *)(device + patches_at);
    prep->out_items = is_inline ? (struct gpu_item *)device : NULL;
    if (j->n_head_rows > 0)
        gpu_heads_begin(j, heads_at);
    j->upload_from = is_inline ? end : 0;
    j->upload_bytes = end - j->upload_from;
    return l;
}

/* The ids of the blocks that an item appends to, n of them. */
static attn_status write_blocks(struct backend *b, const struct backend_pool *p,
                                const struct backend_item *it, uint32_t index, uint32_t n,
                                uint32_t *out)
{
    uint32_t from = it->pos >> p->kv.block_shift;
    for (uint32_t k = 0; k < n; k++) {
        out[k] = it->block_table[from + k];
        if (out[k] >= p->config.n_blocks)
            return gpu_fail(b, ATTN_EINVAL, "item %u: block_table[%u] is %u of %u blocks", index,
                            from + k, out[k], p->config.n_blocks);
    }
    return ATTN_OK;
}

/* An item's lists behind those before it, whose starts and tokens *n_starts and *n_listed count.
 * Returns the length of the longest. */
static uint32_t write_lists(const struct job_lists *l, const struct backend_item *it,
                            uint32_t *n_starts, uint32_t *n_listed)
{
    const struct backend_lists *from = &it->lists;
    const uint32_t n = backend_listed(from, it->n_tokens);
    uint32_t longest = 0;
    for (uint32_t t = 0; t <= it->n_tokens; t++)
        l->list_starts[*n_starts + t] = *n_listed + from->starts[t] - from->starts[0];
    for (uint32_t t = 0; t < it->n_tokens; t++)
        if (from->starts[t + 1] - from->starts[t] > longest)
            longest = from->starts[t + 1] - from->starts[t];
    memcpy(l->list_tokens + *n_listed, from->tokens + from->starts[0], n * sizeof *from->tokens);
    *n_starts += it->n_tokens + 1;
    *n_listed += n;
    return longest > 0 ? longest : 1;
}

/* Items in j->order, and the blocks they append to. */
static attn_status write_items(struct backend *b, struct gpu_job *j,
                               const struct backend_batch *batch, const struct job_lists *l,
                               char *out_device, float *lse_device)
{
    const struct backend_pool *p = j->pool;
    uint64_t heads = p->config.num_q_heads, size = attn_dtype_bytes(p->config.q_dtype);
    uint64_t q_row = heads * p->config.head_dim_k * size;
    uint64_t out_row = heads * backend_out_dim(&p->config) * size;
    uint32_t token0 = 0, blocks0 = 0, node0 = 0, n_starts = 0, n_listed = 0, n_chosen = 0;
    for (uint32_t i = 0; i < batch->n_items; i++) {
        const struct backend_item *it = &batch->items[j->order[i]];
        bool is_append = it->flags & BACKEND_APPEND, is_attend = it->flags & BACKEND_ATTEND;
        l->items[i] = (struct gpu_item){
            .q_src = is_attend ? it->q : NULL,
            .k_src = is_append ? it->k : NULL,
            .v_src = is_append ? it->v : NULL,
            .q = j->staging.q + token0 * q_row,
            .out = out_device ? out_device + token0 * out_row : it->out,
            .lse = lse_device && it->lse ? lse_device + token0 * heads : it->lse,
            .table_at = it->table_row * p->config.max_row_blocks,
            .pos = it->pos,
            .n_tokens = it->n_tokens,
            .is_full = (it->flags & BACKEND_FULL) != 0,
            .layer = it->layer,
            .token0 = token0,
            .blocks0 = blocks0,
            .node0 = node0,
        };
        if (is_attend && p->config.q_nope_dim > 0) {
            char *out = l->items[i].out;
            l->items[i].out = j->staging.heads + token0 * heads * p->config.head_dim_v * size;
            gpu_heads_add(j, &l->items[i], out);
        }
        if (it->nodes != NULL) {
            memcpy(l->nodes + node0, it->nodes, it->n_tokens * sizeof *it->nodes);
            node0 += it->n_tokens;
        }
        if (it->lists.starts != NULL) {
            l->items[i].node0 = n_starts;
            l->items[i].split_tokens = write_lists(l, it, &n_starts, &n_listed);
        }
        if (gpu_item_chooses(p, it)) {
            l->items[i].node0 = n_chosen;
            l->items[i].split_tokens = gpu_chosen_most(p, it);
            n_chosen += (uint32_t)backend_item_listed(&p->config, it);
            j->kv_bytes += gpu_chosen_bytes(p, it);
        }
        uint32_t n = item_blocks(p, it);
        attn_status st = write_blocks(b, p, it, j->order[i], n, l->blocks + blocks0);
        if (st != ATTN_OK)
            return st;
        blocks0 += n;
        token0 += it->n_tokens;
        j->has_append |= is_append;
    }
    j->prep.n_tokens = token0;
    j->kv_bytes += layer_bytes_listed(&p->config, n_listed);
    return ATTN_OK;
}

/* As if its layer had no window and were causal. */
static double flop_of(const struct backend_pool *p, const struct gpu_item *it)
{
    double seen = it->pos + it->n_tokens / 2.0;
    return 2.0 * p->config.num_q_heads * (p->config.head_dim_k + p->config.head_dim_v) *
           it->n_tokens * seen;
}

/* Items [from, to) of the job; their upload, if there is one, follows what is brought so far. */
static attn_status plan_prefill(struct backend *b, struct gpu_job *j, const struct job_lists *l,
                                uint32_t from, uint32_t to, const struct prefill_shape *shape)
{
    const uint64_t at = align_up(j->upload_from + j->upload_bytes, UPLOAD_ALIGN);
    struct gpu_prefill *added =
        array_reserve(&j->prefills, &j->prefills_capacity, (uint64_t)j->n_prefills + 1,
                      sizeof *j->prefills) == ATTN_OK
            ? &j->prefills[j->n_prefills++]
            : NULL;
    if (!added)
        return gpu_fail(b, ATTN_ENOMEM, "out of host memory");
    struct prefill_call *c = &added->call;
    prefill_prepare(j->pool->prefill, l->items + from, to - from, l->device_items + from, shape,
                    j->staging.host + at, c);
    added->upload = c->upload_bytes ? j->staging.device + at : NULL;
    if (c->upload_bytes)
        j->upload_bytes = at + c->upload_bytes - j->upload_from;
    const bool is_listed = shape && shape->list_starts != NULL;
    if (is_listed) {
        c->list_starts = j->list_starts;
        c->list_tokens = j->list_tokens;
    }
    for (uint32_t i = from; i < to && !is_listed; i++) { /* lists have been counted */
        const struct gpu_item *it = &l->items[i];
        const struct attn_layer_spec *s = &j->pool->specs[it->layer];
        j->kv_bytes += layer_bytes_seen(
            s, &j->pool->config, &(struct backend_item){.pos = it->pos, .n_tokens = it->n_tokens});
    }
    j->n_splits += c->n_entries * j->pool->config.num_kv_heads;
    return ATTN_OK;
}

/* The same of trees. */
static attn_status plan_trees(struct backend *b, struct gpu_job *j, const struct job_lists *l,
                              uint32_t from, uint32_t to)
{
    const attn_status st = plan_prefill(b, j, l, from, to, NULL);
    if (st == ATTN_OK)
        j->prefills[j->n_prefills - 1].call.nodes = j->nodes;
    return st;
}

/* The same of a quantised pool in as many calls as there is room for decoded keys. */
static attn_status plan_prefills(struct backend *b, struct gpu_job *j, const struct job_lists *l,
                                 uint32_t from, uint32_t to, const struct prefill_shape *shape)
{
    const struct prefill_pool *p = j->pool->prefill;
    attn_status st = ATTN_OK;
    for (uint32_t end; from < to && st == ATTN_OK; from = end) {
        uint32_t n = 0;
        for (end = from; end < to; end++) {
            struct gpu_item *it = &l->items[end];
            const uint32_t more = prefill_blocks(p, it->pos + it->n_tokens);
            if (n > 0 && n + more > p->decoded_blocks)
                break;
            it->node0 = n;
            n += more;
        }
        st = plan_prefill(b, j, l, from, end, shape);
    }
    return st;
}

uint32_t gpu_job_beside(const struct gpu_job *j)
{
    const struct runtime_device *d = &j->pool->b->device;
    const double prompts_ns = j->prefill_flop / PROMPT_FLOP_PER_NS;
    const double decodes_ns = (double)j->tuned.kv_bytes / ((double)d->memory_bytes_per_s * 1e-9);
    const bool has_groups = j->join.n_items > 0;
    const double least_ns = has_groups ? GPU_GROUPS_BESIDE_NS : GPU_BESIDE_NS;
    if ((has_groups && prompts_ns > GPU_GROUPS_BESIDE_MOST * decodes_ns) || !j->has_tuned ||
        j->prefill_flop == 0 || j->is_direct || j->n_ranges > 0 || d->memory_bytes_per_s == 0 ||
        prompts_ns < least_ns || decodes_ns < least_ns)
        return 0;
    const double n = d->n_processors * prompts_ns / (prompts_ns + decodes_ns);
    return n < 1 ? 1 : n > d->n_processors - 1 ? d->n_processors - 1 : (uint32_t)n;
}

/* Groups of items: by the kernel that takes the smallest. */
static attn_status plan_groups(struct backend *b, struct gpu_job *j,
                               const struct backend_batch *batch, const struct gpu_choice *choice,
                               const struct job_lists *l)
{
    const uint32_t from = batch->n_items, n = b->shared.n_pieces;
    const struct gpu_item *items = l->items + from;
    uint32_t least = 0, n_keys = 0;
    for (uint32_t i = 0; i < n; i++) {
        const uint32_t keys = items[i].pos + items[i].n_tokens;
        least = items[i].n_tokens < items[least].n_tokens ? i : least;
        n_keys = keys > n_keys ? keys : n_keys;
    }
    const enum gpu_kernel kernel =
        gpu_groups_kernel(j->pool, items[least].layer, items[least].n_tokens, n_keys);
    if (kernel == GPU_PREFILL) {
        for (uint32_t i = 0; i < n; i++)
            j->prefill_flop += GROUP_TIME * flop_of(j->pool, &items[i]);
        const uint32_t n_beside = gpu_job_beside(j);
        const struct prefill_shape shape = {.n_processors =
                                                n_beside > 0 ? n_beside : b->device.n_processors,
                                            .part_tiles = GROUP_PART_TILES};
        return plan_prefills(b, j, l, from, from + n, &shape);
    }
    return plan_ranges(b, j, kernel, choice, batch, l->items + from, from, n,
                       l->device_items + from);
}

/* The launches of every kernel's items; first as order_items leaves it. */
static attn_status plan_kernels(struct backend *b, struct gpu_job *j,
                                const struct backend_batch *batch, const struct gpu_choice *choice,
                                const struct job_lists *l, const uint32_t *first,
                                bool may_be_direct)
{
    attn_status st = ATTN_OK;
    if (first[GPU_TUNED + 1])
        st = plan_tuned(b, j, batch, l->items, first[GPU_TUNED + 1], l->tuned_at, may_be_direct);
    for (uint32_t k = GPU_TUNED + 1; k < GPU_NONE && st == ATTN_OK; k++) {
        uint32_t n = first[k + 1] - first[k];
        if (n > 0 && (k == GPU_PREFILL || k == GPU_DILATED)) {
            for (uint32_t i = first[k]; i < first[k + 1]; i++)
                j->prefill_flop += flop_of(j->pool, &l->items[i]);
            st = plan_prefills(b, j, l, first[k], first[k + 1], NULL);
        } else if (n > 0 && k == GPU_LISTED_LATENT)
            st = plan_prefill(b, j, l, first[k], first[k + 1],
                              &(struct prefill_shape){.list_starts = l->list_starts});
        else if (n > 0 && k == GPU_TREE_PREFILL)
            st = plan_trees(b, j, l, first[k], first[k + 1]);
        else if (n > 0)
            st = plan_ranges(b, j, (enum gpu_kernel)k, choice, batch, l->items + first[k], first[k],
                             n, l->device_items + first[k]);
    }
    return st;
}

attn_status gpu_job_make(struct backend *b, struct gpu_job *j, const struct backend_batch *batch,
                         const struct gpu_choice *choice, char *out_device, float *lse_device)
{
    uint32_t first[GPU_N_KERNELS + 1];
    attn_status st = check_batch(b, batch);
    if (st == ATTN_OK)
        st = gpu_shared_find(b, choice, batch);
    if (st != ATTN_OK)
        return st;
    struct backend_batch rests = *batch; /* what groups leave of its items */
    const bool has_groups = b->shared.prefixes.n_groups > 0;
    if (has_groups)
        rests.items = b->shared.items;
    reset_job(j, batch);
    order_items(batch->pool, choice, &rests, j->order, first);
    const struct job_lists l = place_lists(j, &rests, b->shared.n_pieces);
    st = write_items(b, j, &rests, &l, out_device, lse_device);
    if (st != ATTN_OK)
        return st;
    const uint32_t n_patches = j->prep.n_patches;
    if (n_patches > 0)
        memcpy(l.patches, batch->patches, n_patches * sizeof *l.patches);
    if (has_groups) {
        gpu_shared_write(b, j, l.items, batch->n_items, l.joined);
        j->join.items = l.device_joined;
        j->kv_shared_bytes = b->shared.bytes;
    }
    st = plan_kernels(b, j, &rests, choice, &l, first,
                      out_device == NULL && n_patches == 0 && !has_groups);
    if (st == ATTN_OK && has_groups)
        st = plan_groups(b, j, &rests, choice, &l);
    for (uint32_t i = 0; has_groups && i < batch->n_items; i++)
        j->order[i] = b->shared.from[j->order[i]];
    return st;
}
