/* blocks.c: allocates, references, releases and evicts a pool's blocks.
 *
 * A block without references is on its pool's free list or was never used; a published one keeps
 * its content until blocks run out (lru.c chooses which one is evicted). References and free lists
 * are derived.
 */
#include "cache/kv_internal.h"

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

void kv_block_evict_first(struct kv *kv, struct kv_pool_rec *p)
{
    uint32_t block = kv_lru_first(kv, p);
    tell_evicted(kv, p, block);
    kv_lru_count_eviction(kv, p, block);
    kv_block_drop_published(kv, p, block);
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
    if (++b->n_refs == 2)
        kv_count(&kv->heads->stats.blocks_shared, 1);
}

/* Drops one reference; true if it was the last. */
static bool is_last_ref(struct kv *kv, const struct kv_pool_rec *p, uint32_t block)
{
    struct kv_block_rec *b = kv_block(kv, p, block);
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
