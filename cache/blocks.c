/* blocks.c: allocates, references, releases and evicts a pool's blocks.
 *
 * A block without references is on its pool's free list or was never used; a published one keeps
 * its content until blocks run out (lru.c chooses which one is evicted). References and free lists
 * are derived.
 */
#include "cache/kv_internal.h"

#include <stdlib.h>

static void free_put(struct kv *kv, struct kv_pool_rec *p, uint32_t block)
{
    struct kv_block_rec *b = kv_block(kv, p, block);
    b->next = p->free_head;
    p->free_head = block + 1;
    p->n_free++;
    kv_count(&kv->heads->stats.blocks_free, 1);
}

void kv_block_drop_published(struct kv *kv, struct kv_pool_rec *p, uint32_t block)
{
    kv_unpublish(kv, p, block); /* first: it is a block like any other from here on */
    kv_lru_take(kv, p, block);
    free_put(kv, p, block);
}

/* Calls back before a published block is evicted, while its bytes are still there. */
static void tell_evicted(const struct kv *kv, const struct kv_pool_rec *p, uint32_t block)
{
    struct kv_content c;
    if (kv->tier.evicted != NULL &&
        kv_block_content(kv, (kv_pool_id){(uint32_t)(p - kv->pools)}, block, &c))
        kv->tier.evicted(kv->tier.arg, &c, block);
}

static void evict(struct kv *kv, struct kv_pool_rec *p, uint32_t block)
{
    tell_evicted(kv, p, block);
    kv_lru_count_eviction(kv, p, block);
    kv_block_drop_published(kv, p, block);
}

void kv_block_evict_first(struct kv *kv, struct kv_pool_rec *p)
{
    evict(kv, p, kv_lru_first(kv, p));
}

/* A publication, and whether some block before it is none any more. */
struct chained {
    uint64_t serial, parent;
    uint32_t block, index;
    bool is_lost;
};

static int by_serial(const void *a, const void *b)
{
    uint64_t x = ((const struct chained *)a)->serial, y = ((const struct chained *)b)->serial;
    return (x > y) - (x < y);
}

static int by_index(const void *a, const void *b)
{
    uint32_t x = (*(struct chained *const *)a)->index, y = (*(struct chained *const *)b)->index;
    return (x > y) - (x < y);
}

/* All publications of the pool; *out_n of them. NULL: no memory. */
static struct chained *list_published(const struct kv *kv, const struct kv_pool_rec *p,
                                      uint32_t *out_n)
{
    struct chained *all = malloc((p->n_ever_published + 1) * sizeof *all);
    uint32_t n = 0;
    for (uint32_t i = 0; all != NULL && i < p->n_ever_published; i++) {
        const struct kv_published_rec *r = kv_published(kv, p, i);
        if (kv_is_published(kv, p, i))
            all[n++] = (struct chained){r->serial, r->parent, i, r->index, false};
    }
    *out_n = n;
    return all;
}

void kv_block_drop_lost(struct kv *kv, struct kv_pool_rec *p)
{
    if (p->n_pinned == 0 || kv->n_parted[p - kv->pools] == 0)
        return;
    uint32_t n = 0;
    struct chained *all = list_published(kv, p, &n);
    struct chained **order = malloc((n + 1) * sizeof(struct chained *));
    if (all != NULL && order != NULL) {
        qsort(all, n, sizeof *all, by_serial);
        for (uint32_t i = 0; i < n; i++)
            order[i] = &all[i];
        qsort(order, n, sizeof(struct chained *), by_index); /* parents come first */
        for (uint32_t i = 0; i < n; i++) {
            struct chained *c = order[i], key = {.serial = c->parent};
            const struct chained *parent = bsearch(&key, all, n, sizeof *all, by_serial);
            c->is_lost = c->parent != 0 && (parent == NULL || parent->is_lost);
            if (c->is_lost && kv_block(kv, p, c->block)->n_refs == 0 &&
                kv_retained(kv, p, c->block)->is_pinned)
                evict(kv, p, c->block);
        }
        kv->n_parted[p - kv->pools] = 0;
    }
    free(all);
    free(order);
}

bool kv_block_make_room(struct kv *kv, struct kv_pool_rec *p, uint32_t owner, uint64_t n)
{
    if (n > kv_n_free_for(kv, p, owner))
        kv_block_drop_lost(kv, p);
    return n <= kv_n_free_for(kv, p, owner);
}

uint32_t kv_block_alloc(struct kv *kv, struct kv_pool_rec *p)
{
    uint32_t block;
    if (p->n_free == 0)
        kv_block_evict_first(kv, p);
    if (p->free_head != 0) {
        block = p->free_head - 1;
        p->free_head = kv_block(kv, p, block)->next;
    } else {
        block = p->n_fresh++;
    }
    *kv_block(kv, p, block) = (struct kv_block_rec){.n_refs = 1};
    p->n_free--;
    p->n_refs++;
    kv_count(&kv->heads->stats.blocks_free, -1);
    kv_count(&kv->heads->stats.blocks_used, 1);
    return block;
}

void kv_block_ref(struct kv *kv, struct kv_pool_rec *p, uint32_t block)
{
    struct kv_block_rec *b = kv_block(kv, p, block);
    if (b->n_refs == 0) { /* published: nothing can name a free block */
        kv_lru_take(kv, p, block);
        kv_count(&kv->heads->stats.blocks_used, 1);
    }
    p->n_refs++;
    if (++b->n_refs == 2)
        kv_count(&kv->heads->stats.blocks_shared, 1);
}

/* Drops one reference; true if it was the last. */
static bool is_last_ref(struct kv *kv, struct kv_pool_rec *p, uint32_t block)
{
    struct kv_block_rec *b = kv_block(kv, p, block);
    p->n_refs--;
    if (--b->n_refs == 1)
        kv_count(&kv->heads->stats.blocks_shared, -1);
    if (b->n_refs > 0)
        return false;
    kv_count(&kv->heads->stats.blocks_used, -1);
    return true;
}

/* The last sequence to use a held block releases it: notes the use in the hold. */
static void note_use(struct kv *kv, const struct kv_pool_rec *p, uint32_t block)
{
    struct kv_seq_import *a;
    LIST_FOREACH(a, &kv->imports, link)
        for (uint32_t i = 0; a->is_used != NULL && &kv->pools[a->pool] == p && i < a->n_blocks; i++)
            a->is_used[i] |= a->blocks[i] == block;
}

void kv_block_unref(struct kv *kv, struct kv_pool_rec *p, uint32_t block)
{
    if (!is_last_ref(kv, p, block)) {
        if (kv_block(kv, p, block)->n_refs == 1 && !LIST_EMPTY(&kv->imports))
            note_use(kv, p, block);
        return;
    }
    if (kv_is_published(kv, p, block))
        kv_lru_put(kv, p, block);
    else
        free_put(kv, p, block);
}

void kv_block_unref_unused(struct kv *kv, struct kv_pool_rec *p, uint32_t block)
{
    if (!is_last_ref(kv, p, block))
        return;
    if (kv_is_published(kv, p, block))
        kv_lru_put_back(kv, p, block);
    else
        free_put(kv, p, block);
}
