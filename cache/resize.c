/* resize.c: grows or shrinks a pool while it is in use. Its range of block records stays where it
 * is and only its end moves.
 *
 * One word of truth says how many blocks a pool has (kv_pool_rec.sized). Before it is lowered, the
 * blocks above the new end are emptied: each that must stay has been copied to one below. First its
 * publication moves to the copy, then the table entries one by one. Between any two of these stores
 * both blocks hold the same, so that a kill leaves valid tables; two sequences that shared a block
 * may then have one each, both whole.
 *
 * The word carries a hash, so that one store changes both; the pool's seal covers only what it was
 * created with, on which the keys of published blocks depend. A pool does not move elsewhere for
 * room: it would need its whole size again, free and in one piece. Other requests wait while a pool
 * shrinks: a resize is an operator's act, and doing it in slices would mean keeping new blocks out
 * of the part that goes.
 */
#include "cache/kv_internal.h"

#include <stdlib.h>
#include <string.h>

#define NOT_MOVED UINT32_MAX

/* --- more ------------------------------------------------------------------------------------- */

uint32_t kv_pool_room(const struct kv *kv, kv_pool_id pool)
{
    const struct kv_pool_rec *p = kv_pool_live(kv, pool.index);
    if (p == NULL)
        return 0;
    uint32_t end = kv->config.max_blocks;
    for (uint32_t i = 0; i < kv->config.max_pools; i++) {
        const struct kv_pool_rec *q = kv_pool_live(kv, i);
        if (q != NULL && q->first_block > p->first_block && q->first_block < end)
            end = q->first_block;
    }
    return end - p->first_block;
}

/* Adds n free blocks to the counts of the pool; n may be negative. */
static void count_free(struct kv *kv, struct kv_pool_rec *p, int64_t n)
{
    p->n_blocks = (uint32_t)(p->n_blocks + n);
    p->n_free = (uint32_t)(p->n_free + n);
    kv_count(&kv->heads->stats.blocks_total, n);
    kv_count(&kv->heads->stats.blocks_free, n);
}

attn_status kv_pool_grow(struct kv *kv, kv_pool_id pool, uint32_t n_blocks)
{
    struct kv_pool_rec *p = kv_pool_live(kv, pool.index);
    if (p == NULL)
        return kv_fail(kv, ATTN_ENOTFOUND, "pool index %u: no such pool", pool.index);
    if (n_blocks <= p->n_blocks)
        return kv_fail(kv, ATTN_EINVAL, "pool %s: n_blocks is %u, it has %u", p->name, n_blocks,
                       p->n_blocks);
    if (n_blocks > kv_pool_room(kv, pool))
        return kv_fail(kv, ATTN_ENOMEM, "pool %s: n_blocks is %u, there is room for %u", p->name,
                       n_blocks, kv_pool_room(kv, pool));
    attn_status st = kv_room_take_blocks(kv, p, n_blocks - p->n_blocks);
    if (st != ATTN_OK)
        return st;
    kv_publish64(&p->sized, kv_pool_sized(kv, pool.index, n_blocks));
    count_free(kv, p, (int64_t)n_blocks - p->n_blocks);
    return ATTN_OK;
}

/* --- fewer ------------------------------------------------------------------------------------ */

static attn_status shrink_check(struct kv *kv, kv_pool_id pool, uint32_t n_blocks)
{
    struct kv_pool_rec *p = kv_pool_live(kv, pool.index);
    if (p == NULL)
        return kv_fail(kv, ATTN_ENOTFOUND, "pool index %u: no such pool", pool.index);
    if (n_blocks < 1 || n_blocks >= p->n_blocks)
        return kv_fail(kv, ATTN_EINVAL, "pool %s: n_blocks is %u, it has %u", p->name, n_blocks,
                       p->n_blocks);
    if (kv_seq_import_is_of(kv, pool.index) || kv_promote_is_of(kv, pool.index) ||
        kv_idle_is_of(kv, pool.index))
        return kv_fail(kv, ATTN_EOVERLOAD, "pool %s: blocks of it are on their way", p->name);
    if (!kv_block_make_room(kv, p, KV_NO_OWNER, p->n_blocks - n_blocks) && p->n_reserved > 0)
        return kv_fail(kv, ATTN_ENOBLOCKS,
                       "pool %s: n_blocks is %u, %u blocks are reserved, %u in use beyond that and "
                       "%u pinned",
                       p->name, n_blocks, p->n_reserved, p->n_beyond + kv_n_held(p), p->n_pinned);
    if (p->n_blocks - n_blocks > kv_n_available(p))
        return kv_fail(kv, ATTN_ENOBLOCKS,
                       "pool %s: n_blocks is %u, %u blocks are in use and %u pinned", p->name,
                       n_blocks, p->n_blocks - p->n_free - p->n_cached, p->n_pinned);
    return ATTN_OK;
}

/* Counts the table entries that name blocks from n_blocks on, and lists them unless list is
 * NULL. */
static uint32_t list_entries(const struct kv *kv, kv_pool_id pool, uint32_t n_blocks,
                             struct kv_patch *list)
{
    uint32_t n = 0;
    for (kv_seq_id id = {0}; kv_seq_next(kv, UINT32_MAX, &id) == ATTN_OK; id.index++) {
        const struct kv_seq_rec *s = &kv->seqs[id.index];
        const uint32_t *row = kv_own_row(kv, id.index);
        if (s->pool != pool.index || s->is_lazy)
            continue;
        for (uint32_t i = 0; i < s->n_blocks; i++) {
            if (row[i] < n_blocks || kv_is_place(row[i]))
                continue;
            if (list != NULL)
                list[n] = (struct kv_patch){.row = id.index, .index = i, .block = row[i]};
            n++;
        }
    }
    return n;
}

static bool has_outstanding(const struct kv *kv, kv_pool_id pool)
{
    for (kv_seq_id id = {0}; kv_seq_next(kv, UINT32_MAX, &id) == ATTN_OK; id.index++)
        if (kv->seqs[id.index].pool == pool.index && kv->seqs[id.index].n_outstanding > 0)
            return true;
    return false;
}

static bool is_free(const struct kv *kv, const struct kv_pool_rec *p, uint32_t block)
{
    return block >= p->n_fresh ||
           (kv_block(kv, p, block)->n_refs == 0 && !kv_is_published(kv, p, block));
}

/* Lists the blocks above that stay, each with a free block below; there are enough. */
static void choose_copies(const struct kv *kv, const struct kv_pool_rec *p, struct kv_shrink *s)
{
    uint32_t dst = 0;
    for (uint32_t src = s->n_blocks; src < p->n_blocks; src++) {
        if (is_free(kv, p, src))
            continue;
        while (!is_free(kv, p, dst))
            dst++;
        s->copies[s->n_copies++] = (struct kv_copy){.src = src, .dst = dst++};
    }
}

/* Where a block above was moved to; NOT_MOVED: it was evicted. The copies are in ascending
 * order. */
static uint32_t moved_to(const struct kv_shrink *s, uint32_t block)
{
    uint32_t first = 0, past = s->n_copies;
    while (first < past) {
        uint32_t middle = first + (past - first) / 2;
        if (s->copies[middle].src == block)
            return s->copies[middle].dst;
        if (s->copies[middle].src < block)
            first = middle + 1;
        else
            past = middle;
    }
    return NOT_MOVED;
}

attn_status kv_pool_shrink_begin(struct kv *kv, kv_pool_id pool, uint32_t n_blocks,
                                 struct kv_shrink *out)
{
    attn_status st = shrink_check(kv, pool, n_blocks);
    if (st != ATTN_OK)
        return st;
    struct kv_pool_rec *p = &kv->pools[pool.index];
    if (has_outstanding(kv, pool))
        return kv_fail(kv, ATTN_EOVERLOAD, "pool %s: appends are outstanding", p->name);
    uint32_t n_gone = p->n_blocks - n_blocks;
    struct kv_shrink s = {.pool = pool, .n_blocks = n_blocks};
    s.n_patches = list_entries(kv, pool, n_blocks, NULL);
    s.patches = calloc((size_t)s.n_patches + 1, sizeof *s.patches);
    s.copies = calloc(n_gone, sizeof *s.copies);
    if (s.patches == NULL || s.copies == NULL) {
        kv_shrink_fini(&s);
        return kv_fail(kv, ATTN_ENOMEM, "pool %s: no memory to move %u blocks", p->name, n_gone);
    }
    while (p->n_free < n_gone)
        kv_block_evict_first(kv, p);
    choose_copies(kv, p, &s);
    list_entries(kv, pool, n_blocks, s.patches);
    for (uint32_t i = 0; i < s.n_patches; i++) {
        uint32_t block = moved_to(&s, s.patches[i].block);
        bool is_hole = kv_in_hole(kv, p, s.patches[i].row, s.patches[i].index);
        s.patches[i].block = is_hole || block == NOT_MOVED ? 0 : block; /* hole: any value */
    }
    *out = s;
    return ATTN_OK;
}

void kv_shrink_fini(struct kv_shrink *s)
{
    free(s->copies);
    free(s->patches);
    *s = (struct kv_shrink){0};
}

/* Updates the published blocks that sequences remember as parents. */
static void move_parents(struct kv *kv, const struct kv_shrink *s)
{
    for (kv_seq_id id = {0}; kv_seq_next(kv, UINT32_MAX, &id) == ATTN_OK; id.index++) {
        struct kv_given_rec *g = &kv->given[id.index];
        if (kv->seqs[id.index].pool != s->pool.index || g->parent <= s->n_blocks)
            continue;
        uint32_t block = moved_to(s, g->parent - 1);
        g->parent = block == NOT_MOVED ? 1 : block + 1; /* evicted: its serial will not match */
    }
}

/* Rebuilds the lists of free and of cached blocks, which still name moved blocks. */
static void build_lists(struct kv *kv, struct kv_pool_rec *p)
{
    uint32_t cached = 0;
    kv_count(&kv->heads->stats.blocks_pinned, -(int64_t)p->n_pinned);
    p->n_pinned = p->free_head = 0;
    memset(p->oldest, 0, sizeof p->oldest);
    memset(p->newest, 0, sizeof p->newest);
    memset(p->listed, 0, sizeof p->listed);
    for (uint32_t block = p->n_fresh; block-- > 0;) {
        struct kv_block_rec *b = kv_block(kv, p, block);
        if (b->n_refs > 0)
            continue;
        uint32_t *head = kv_is_published(kv, p, block) ? &cached : &p->free_head;
        b->next = *head;
        b->prev = 0;
        *head = block + 1;
    }
    kv_lru_build(kv, p, cached);
}

void kv_pool_shrink_end(struct kv *kv, const struct kv_shrink *s)
{
    struct kv_pool_rec *p = &kv->pools[s->pool.index];
    for (uint32_t i = 0; i < s->n_copies; i++) {
        uint32_t src = s->copies[i].src, dst = s->copies[i].dst;
        if (kv_is_published(kv, p, src))
            kv_published_move(kv, p, src, dst);
        kv_block(kv, p, dst)->n_refs = kv_block(kv, p, src)->n_refs;
        kv_block(kv, p, src)->n_refs = 0;
    }
    for (uint32_t i = 0; i < s->n_patches; i++)
        kv_publish32(&kv_own_row(kv, s->patches[i].row)[s->patches[i].index], s->patches[i].block);
    kv_publish64(&p->sized, kv_pool_sized(kv, s->pool.index, s->n_blocks));
    uint32_t n_blocks = p->n_blocks;
    count_free(kv, p, (int64_t)s->n_blocks - n_blocks);
    if (p->n_ever_published > s->n_blocks)
        kv_publish32(&p->n_ever_published, s->n_blocks);
    if (p->n_fresh > s->n_blocks)
        p->n_fresh = s->n_blocks;
    kv_room_give_blocks(kv, p, s->n_blocks, n_blocks);
    move_parents(kv, s);
    build_lists(kv, p);
}
