/* choose.c: which blocks the queries of choosing items visit (backend_item.n_chosen).
 *
 * What is kept of a block's keys, for each layer and kv head, is their maximum and their minimum in
 * each dimension: whatever q is, no key of the block has a larger product with it than the sum of
 * q[d] * max[d] where q[d] is positive, and of q[d] * min[d] where it is negative. It is made from
 * the cached keys when a query first has the choice of the block, and forgotten when anything of
 * the block is written, so it need not be copied, moved, exported or recovered: the keys say it
 * all. Of a block that is not there a summary has it, made while it was
 * (backend_pool_config.n_summaries). A pool of stripes has no block's keys all: it hands over the
 * extremes of its own, and goes by those that it was given (backend_extremes).
 *
 * Each query chooses for each kv head: its newest block, the sequence's first, and of the others
 * those whose bound is highest, for whichever of the kv head's q heads that is.
 */
#include "kernels/choice.h"
#include "kernels/cpu/cpu.h"
#include "kernels/grow.h"

#include <inttypes.h>
#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

/* One past the last token that the item's query sees. */
static uint32_t end_of(const struct backend_pool *p, const struct backend_item *item,
                       uint32_t token)
{
    const bool is_full = layer_is_full(&p->layers[item->layer], item->flags);
    return item->pos + (is_full ? item->n_tokens : token + 1);
}

static struct choice_size choice_at(const struct backend_pool *p, const struct backend_item *item,
                                    uint32_t token)
{
    return choice_of(item->n_chosen, p->geometry.block_shift, p->geometry.stripes,
                     end_of(p, item, token));
}

/* That the item's last query sees. */
static uint32_t blocks_of(const struct backend_pool *p, const struct backend_item *item)
{
    return choice_at(p, item, item->n_tokens - 1).n_blocks;
}

uint32_t cpu_chosen_blocks(const struct backend_pool *p, const struct backend_item *item)
{
    const uint32_t n_blocks = blocks_of(p, item);
    if (item->n_chosen < n_blocks)
        return item->n_chosen;
    return item->chosen != NULL ? n_blocks : 0;
}

/* Are some of the blocks taken by their bounds? */
static bool needs_bounds(const struct backend_pool *p, const struct backend_item *item)
{
    return item->n_chosen > 2 && item->n_chosen < blocks_of(p, item);
}

uint32_t cpu_chosen_keys(const struct backend_pool *p, const struct backend_item *item,
                         uint32_t token)
{
    return choice_at(p, item, token).n_keys;
}

const uint32_t *cpu_chosen_list(const struct backend *b, const struct backend_pool *p,
                                const struct backend_item *item, uint32_t i, uint32_t token,
                                uint32_t kv_head)
{
    return b->choice.blocks + b->choice.first[i] +
           ((size_t)token * p->config.num_kv_heads + kv_head) * cpu_chosen_blocks(p, item);
}

/* --- what is kept of blocks ------------------------------------------------------------------- */

static size_t extremes_bytes(const struct backend_pool *p)
{
    const struct attend_geometry *g = &p->geometry;
    return 2 * (size_t)g->dk * attn_dtype_bytes(cpu_extremes_dtype(g));
}

static uint8_t *extremes_of(const struct backend_pool *p, uint32_t block, uint32_t layer,
                            uint32_t kv_head)
{
    const struct backend_pool_config *c = &p->config;
    const size_t row = ((size_t)block * c->num_layers + layer) * c->num_kv_heads + kv_head;
    return p->extremes + row * extremes_bytes(p);
}

void cpu_extremes_forget(struct backend_pool *p, uint32_t block)
{
    if (p->has_extremes != NULL)
        memset(p->has_extremes + (size_t)block * p->config.num_layers, 0, p->config.num_layers);
}

void cpu_extremes_forget_item(struct backend_pool *p, const struct backend_item *item)
{
    const uint32_t shift = p->geometry.block_shift, last = item->pos + item->n_tokens - 1;
    for (uint32_t i = item->pos >> shift; p->has_extremes != NULL && i <= last >> shift; i++)
        p->has_extremes[(size_t)item->block_table[i] * p->config.num_layers + item->layer] = 0;
}

bool cpu_extremes_can_go(const struct backend_pool *p)
{
    return p->extremes != NULL && p->config.n_stripes == 0 && p->config.n_summaries == 0;
}

void cpu_extremes_free(struct backend_pool *p)
{
    if (p->extremes != NULL)
        kv_range_give(&p->b->memory.ranges, &p->extremes_range);
    p->has_extremes = p->extremes = NULL;
}

/* Takes their part of the KV memory: its end, which leaves pools room to grow, or a gap. */
static attn_status extremes_open(struct backend_pool *p)
{
    const struct backend_pool_config *c = &p->config;
    struct cpu_memory *m = &p->b->memory;
    const size_t n = (size_t)backend_n_names(c) * c->num_layers;
    struct kv_range *r = &p->extremes_range;
    uint64_t largest;
    if (p->extremes != NULL)
        return ATTN_OK;
    r->bytes = (n * (c->num_kv_heads * extremes_bytes(p) + 1) + 4095) & ~(uint64_t)4095;
    r->offset = r->bytes <= m->bytes ? (m->bytes - r->bytes) & ~(uint64_t)4095 : 0;
    if (!kv_range_take(&m->ranges, m->bytes, true, r, &largest) &&
        !kv_range_take(&m->ranges, m->bytes, false, r, &largest)) {
        cpu_fail(p->b,
                 "choosing blocks takes %" PRIu64 " bytes of KV memory for the pool's %" PRIu32
                 " blocks and %" PRIu32 " summaries, %" PRIu64 " are free in one piece",
                 r->bytes, c->n_blocks, c->n_summaries, largest);
        return ATTN_ENOMEM;
    }
    attn_status st = cpu_memory_give(m, r->offset, r->bytes, p->b->error, sizeof p->b->error);
    if (st != ATTN_OK) {
        kv_range_give(&m->ranges, r);
        return st;
    }
    p->extremes = m->base + r->offset;
    p->has_extremes = p->extremes + n * c->num_kv_heads * extremes_bytes(p);
    memset(p->has_extremes, 0, n);
    return ATTN_OK;
}

attn_status cpu_summaries_open(struct backend_pool *p)
{
    attn_status st = extremes_open(p);
    if (st != ATTN_OK)
        p->config.n_summaries = 0;
    return st;
}

/* --- a batch's choices ------------------------------------------------------------------------ */

struct choose_job {
    struct backend *b;
    const struct cpu_isa *isa;
    const struct backend_batch *batch;
    const struct backend_block_layer *missing; /* [n_missing] whose extremes are made */
    uint8_t *to; /* [n_missing][num_kv_heads] of them; NULL: they are kept */
    uint32_t n_missing;
    uint32_t longest; /* blocks that a query sees, of the longest item */
    _Atomic uint32_t next;
};

/* Lists the blocks that items have the choice of and of which nothing is kept. It looks at all of
 * them: 0.7 % of the time that their bounds take with one kv head of 64, less with more. */
static attn_status find_missing(struct choose_job *job)
{
    struct choice *c = &job->b->choice;
    const struct backend_pool *p = job->batch->pool;
    for (uint32_t i = 0; i < job->batch->n_items; i++) {
        const struct backend_item *item = &job->batch->items[i];
        const uint32_t n_blocks = blocks_of(p, item);
        if (c->first[i] == SIZE_MAX || !needs_bounds(p, item))
            continue;
        attn_status st = extremes_open(job->batch->pool);
        if (st != ATTN_OK)
            return st;
        st = array_reserve(&c->missing, &c->missing_capacity, (uint64_t)job->n_missing + n_blocks,
                           sizeof *c->missing);
        if (st != ATTN_OK) {
            cpu_fail(job->b, "item %" PRIu32 ": no memory for a choice of %" PRIu32 " blocks", i,
                     n_blocks);
            return st;
        }
        for (uint32_t j = 1; j + 1 < n_blocks; j++) {
            const uint32_t block = item->block_table[j];
            uint8_t *has = &p->has_extremes[(size_t)block * p->config.num_layers + item->layer];
            if (*has)
                continue;
            if (block >= p->config.n_blocks) {
                cpu_fail(job->b,
                         "item %" PRIu32 ": block_table[%" PRIu32 "] is summary %" PRIu32
                         ", which nothing was copied to",
                         i, j, block);
                return ATTN_EINVAL;
            }
            if (p->config.n_stripes > 0) {
                cpu_fail(job->b,
                         "item %" PRIu32 ": extremes of block_table[%" PRIu32 "], in layer %" PRIu32
                         ", were not given",
                         i, j, item->layer);
                return ATTN_EINVAL;
            }
            *has = 1;
            c->missing[job->n_missing++] = (struct backend_block_layer){block, item->layer};
        }
    }
    return ATTN_OK;
}

/* [num_kv_heads] of them, from the keys of a block in a layer. */
static void make_of_block(const struct choose_job *job, uint32_t block, uint32_t layer, uint8_t *to)
{
    const struct backend_pool *p = job->batch->pool;
    const struct attend_geometry *g = &p->geometry;
    const struct kv_layout *l = &g->layout;
    const uint8_t *k = p->base + block * l->block_bytes + layer * l->layer_bytes;
    for (uint32_t h = 0; h < p->config.num_kv_heads; h++) {
        const uint64_t row = (uint64_t)h * g->block_tokens;
        job->isa->extremes(g, k + h * l->k_head_bytes, k + l->k_scales + row * l->k_scale_bytes,
                           to + h * extremes_bytes(p));
    }
}

static void make_extremes(void *arg, uint32_t thread)
{
    (void)thread;
    struct choose_job *job = arg;
    const struct backend_pool *p = job->batch->pool;
    const size_t each = p->config.num_kv_heads * extremes_bytes(p);
    uint32_t i;
    while ((i = atomic_fetch_add(&job->next, 1)) < job->n_missing) {
        const struct backend_block_layer at = job->missing[i];
        make_of_block(job, at.block, at.layer,
                      job->to != NULL ? job->to + i * each : extremes_of(p, at.block, at.layer, 0));
    }
}

static void make_summaries(void *arg, uint32_t thread)
{
    (void)thread;
    struct choose_job *job = arg;
    const struct backend_pool *p = job->batch->pool;
    uint32_t i;
    while ((i = atomic_fetch_add(&job->next, 1)) < job->batch->n_copies) {
        const struct backend_copy *c = &job->batch->copies[i];
        if (c->dst < p->config.n_blocks)
            continue;
        for (uint32_t layer = 0; layer < p->config.num_layers; layer++)
            make_of_block(job, c->src, layer, extremes_of(p, c->dst, layer, 0));
    }
}

attn_status cpu_summaries_make(struct backend *b, const struct cpu_isa *isa,
                               const struct backend_batch *batch)
{
    struct choose_job job = {.b = b, .isa = isa, .batch = batch};
    struct backend_pool *p = batch->pool;
    const uint32_t layers = p->config.num_layers;
    uint32_t n = 0;
    for (uint32_t i = 0; i < batch->n_copies; i++) {
        const uint32_t to = batch->copies[i].dst;
        if (to < p->config.n_blocks)
            continue;
        attn_status st = extremes_open(p);
        if (st != ATTN_OK)
            return st;
        memset(p->has_extremes + (size_t)to * layers, 1, layers);
        n++;
    }
    if (n > 0)
        cpu_threads_run(b->threads, make_summaries, &job);
    return ATTN_OK;
}

attn_status cpu_extremes_exchange(struct backend *b, const struct cpu_isa *isa,
                                  const struct backend_batch *batch)
{
    const struct backend_extremes *x = batch->extremes;
    const struct backend_pool *p = batch->pool;
    struct choose_job job = {.b = b, .isa = isa, .batch = batch};
    const size_t each = p->config.num_kv_heads * extremes_bytes(p);
    attn_status st = x != NULL ? extremes_open(batch->pool) : ATTN_OK;
    if (x == NULL || st != ATTN_OK)
        return st;
    for (uint32_t i = 0; x->is_given && i < x->n; i++) {
        memcpy(extremes_of(p, x->list[i].block, x->list[i].layer, 0),
               (const uint8_t *)x->bytes + i * each, each);
        p->has_extremes[(size_t)x->list[i].block * p->config.num_layers + x->list[i].layer] = 1;
    }
    if (x->is_given)
        return ATTN_OK;
    job.missing = x->list;
    job.n_missing = x->n;
    job.to = x->bytes;
    cpu_threads_run(b->threads, make_extremes, &job);
    return ATTN_OK;
}

/* Does a go in front of b? Of blocks with the same bound the newer one. */
static bool is_better(const float *bounds, uint32_t a, uint32_t b)
{
    return bounds[a] > bounds[b] || (bounds[a] == bounds[b] && a > b);
}

/* heap[0] is the worst of n; moves what is at `at` down to its place. */
static void sift(const float *bounds, uint32_t *heap, uint32_t n, uint32_t at)
{
    for (uint32_t child; (child = 2 * at + 1) < n; at = child) {
        if (child + 1 < n && is_better(bounds, heap[child], heap[child + 1]))
            child++;
        if (is_better(bounds, heap[child], heap[at]))
            return;
        const uint32_t x = heap[at];
        heap[at] = heap[child];
        heap[child] = x;
    }
}

/* The n best of blocks [1, end), n < end - 1, in *list, ascending. */
static void take_best(const float *bounds, uint32_t end, uint32_t n, uint32_t *list)
{
    uint32_t n_taken = 0;
    if (n == 0)
        return;
    for (uint32_t i = 0; i < n; i++)
        list[i] = i + 1;
    for (uint32_t i = n / 2; i-- > 0;)
        sift(bounds, list, n, i);
    for (uint32_t i = n + 1; i < end; i++)
        if (is_better(bounds, i, list[0])) {
            list[0] = i;
            sift(bounds, list, n, 0);
        }
    const uint32_t worst = list[0];
    for (uint32_t i = 1; i < end; i++)
        if (i == worst || is_better(bounds, i, worst))
            list[n_taken++] = i;
}

static void choose(const struct choose_job *job, const struct backend_item *item, uint32_t token,
                   uint32_t kv_head, uint32_t *list, float *bounds)
{
    const struct backend_pool *p = job->batch->pool;
    const struct attend_geometry *g = &p->geometry;
    const struct choice_size of = choice_at(p, item, token);
    const uint32_t n_blocks = of.n_blocks, n = of.n;
    list[n - 1] = n_blocks - 1;
    if (n == n_blocks)
        for (uint32_t i = 0; i < n; i++)
            list[i] = i;
    if (n == n_blocks || n == 1)
        return;
    list[0] = 0;
    if (n == 2)
        return;
    const struct attend_rows rows = {
        .g = g, .item = item, .kv_head = kv_head, .row0 = token * g->group, .n_rows = g->group};
    job->isa->bounds(&rows, extremes_of(p, 0, item->layer, kv_head),
                     extremes_bytes(p) * p->config.num_layers * p->config.num_kv_heads,
                     n_blocks - 1, bounds);
    take_best(bounds, n_blocks - 1, n - 2, list + 1);
}

/* The n blocks that a query visits, of `most` that it may. */
static void tell_chosen(const uint32_t *list, uint32_t n, uint32_t most, uint32_t *out)
{
    memcpy(out, list, n * sizeof *out);
    for (uint32_t i = n; i < most; i++)
        out[i] = UINT32_MAX;
}

/* Every thread walks all items and takes the parts, of a query and a kv head, whose number it
 * draws. */
static void make_choices(void *arg, uint32_t thread)
{
    struct choose_job *job = arg;
    struct choice *c = &job->b->choice;
    const uint32_t heads = job->batch->pool->config.num_kv_heads;
    float *bounds = c->bounds + (size_t)thread * job->longest;
    uint32_t mine = atomic_fetch_add(&job->next, 1), part = 0;
    for (uint32_t i = 0; i < job->batch->n_items; i++) {
        const struct backend_item *item = &job->batch->items[i];
        if (c->first[i] == SIZE_MAX)
            continue;
        const uint32_t most = cpu_chosen_blocks(job->batch->pool, item);
        const uint32_t n = item->n_tokens * heads;
        for (; mine < part + n; mine = atomic_fetch_add(&job->next, 1)) {
            const uint32_t at = mine - part, token = at / heads;
            uint32_t *list = c->blocks + c->first[i] + (size_t)at * most;
            choose(job, item, token, at % heads, list, bounds);
            if (item->chosen != NULL)
                tell_chosen(list, choice_at(job->batch->pool, item, token).n, item->n_chosen,
                            item->chosen + (size_t)at * item->n_chosen);
        }
        part += n;
    }
}

/* Where items' lists are in choice.blocks; returns how long they are together. */
static size_t place_lists(struct choose_job *job)
{
    struct choice *c = &job->b->choice;
    const struct backend_pool *p = job->batch->pool;
    size_t n = 0;
    for (uint32_t i = 0; i < job->batch->n_items; i++) {
        const struct backend_item *item = &job->batch->items[i];
        const uint32_t most = cpu_chosen_blocks(p, item);
        c->first[i] = SIZE_MAX;
        if (!(item->flags & BACKEND_ATTEND) || most == 0)
            continue;
        c->first[i] = n;
        n += (size_t)item->n_tokens * p->config.num_kv_heads * most;
        const uint32_t n_blocks = blocks_of(p, item);
        job->longest = n_blocks > job->longest ? n_blocks : job->longest;
    }
    return n;
}

attn_status cpu_choose(struct backend *b, const struct cpu_isa *isa,
                       const struct backend_batch *batch)
{
    struct choice *c = &b->choice;
    struct choose_job job = {.b = b, .isa = isa, .batch = batch};
    attn_status st = array_reserve(&c->first, &c->first_capacity, batch->n_items, sizeof *c->first);
    const size_t n = st == ATTN_OK ? place_lists(&job) : 0;
    if (st == ATTN_OK && n == 0)
        return ATTN_OK;
    const uint64_t n_bounds = (uint64_t)cpu_threads_count(b->threads) * job.longest;
    if (st == ATTN_OK)
        st = array_reserve(&c->blocks, &c->blocks_capacity, n, sizeof *c->blocks);
    if (st == ATTN_OK)
        st = array_reserve(&c->bounds, &c->bounds_capacity, n_bounds, sizeof *c->bounds);
    if (st != ATTN_OK) {
        cpu_fail(b, "no memory for choices of %zu blocks", n);
        return st;
    }
    st = find_missing(&job);
    job.missing = c->missing;
    if (job.n_missing > 0)
        cpu_threads_run(b->threads, make_extremes, &job);
    atomic_store(&job.next, 0);
    if (st == ATTN_OK)
        cpu_threads_run(b->threads, make_choices, &job);
    return st;
}

void cpu_choice_fini(struct choice *c)
{
    free(c->first);
    free(c->blocks);
    free(c->missing);
    free(c->bounds);
}
