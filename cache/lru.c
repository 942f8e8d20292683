/* lru.c: which published block goes when blocks run out: of those that no sequence refers to, the
 * one that was let go of longest ago.
 *
 * A closed sequence lets go of its last block first, so the end of a prefix goes before its start.
 * The list is derived from the blocks' times of last use, which are truth.
 */
#include "cache/kv_internal.h"

static void link_last(struct kv *kv, struct kv_pool_rec *p, uint32_t block)
{
    struct kv_block_rec *b = kv_block(kv, p, block);
    b->next = 0;
    b->prev = p->newest;
    if (p->newest != 0)
        kv_block(kv, p, p->newest - 1)->next = block + 1;
    else
        p->oldest = block + 1;
    p->newest = block + 1;
}

void kv_lru_put(struct kv *kv, struct kv_pool_rec *p, uint32_t block)
{
    kv_publish64(&kv->epochs->clock, kv->epochs->clock + 1);
    kv_published(kv, p, block)->used = kv->epochs->clock;
    link_last(kv, p, block);
    p->n_cached++;
    kv_count(&kv->heads->stats.blocks_cached, 1);
}

void kv_lru_take(struct kv *kv, struct kv_pool_rec *p, uint32_t block)
{
    struct kv_block_rec *b = kv_block(kv, p, block);
    if (b->prev != 0)
        kv_block(kv, p, b->prev - 1)->next = b->next;
    else
        p->oldest = b->next;
    if (b->next != 0)
        kv_block(kv, p, b->next - 1)->prev = b->prev;
    else
        p->newest = b->prev;
    b->next = b->prev = 0;
    p->n_cached--;
    kv_count(&kv->heads->stats.blocks_cached, -1);
}

uint32_t kv_lru_evict(struct kv *kv, struct kv_pool_rec *p)
{
    uint32_t block = p->oldest - 1;
    kv_unpublish(kv, p, block); /* first: it is a block like any other from here on */
    kv_lru_take(kv, p, block);
    kv_count(&kv->heads->stats.evictions, 1);
    return block;
}

/* Two lists, linked by next and ordered, into one. Indices are plus one. */
static uint32_t merge(struct kv *kv, const struct kv_pool_rec *p, uint32_t a, uint32_t b)
{
    uint32_t head = 0, *end = &head;
    while (a != 0 && b != 0) {
        bool is_a = kv_published(kv, p, a - 1)->used <= kv_published(kv, p, b - 1)->used;
        uint32_t *first = is_a ? &a : &b;
        *end = *first;
        end = &kv_block(kv, p, *first - 1)->next;
        *first = *end;
    }
    *end = a != 0 ? a : b;
    return head;
}

void kv_lru_sort(struct kv *kv, struct kv_pool_rec *p)
{
    uint32_t sorted[32] = {0}; /* [i]: nothing, or a list of 2^i blocks */
    uint32_t list = 0;
    for (uint32_t at = p->oldest; at != 0;) {
        uint32_t one = at, i = 0;
        at = kv_block(kv, p, one - 1)->next;
        kv_block(kv, p, one - 1)->next = 0;
        for (; sorted[i] != 0; i++) {
            one = merge(kv, p, sorted[i], one);
            sorted[i] = 0;
        }
        sorted[i] = one;
    }
    for (uint32_t i = 0; i < 32; i++)
        list = merge(kv, p, sorted[i], list);
    p->oldest = p->newest = 0;
    for (uint32_t at = list; at != 0;) {
        uint32_t next = kv_block(kv, p, at - 1)->next;
        link_last(kv, p, at - 1);
        at = next;
    }
}
