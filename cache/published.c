/* published.c: the records of published blocks, and the hash index that finds them by key.
 *
 * A record and its ids are written whole while the state is free; storing the state publishes them.
 * The index is derived. prefix.c decides which blocks are published and looks them up.
 */
#include "cache/kv_internal.h"

#include <string.h>

uint32_t kv_published_seal(const struct kv *kv, const struct kv_pool_rec *p, uint32_t block)
{
    const struct kv_published_rec *r = kv_published(kv, p, block);
    uint64_t ids =
        siphash(kv->key, kv_published_ids(kv, p, block), p->block_tokens * sizeof(uint32_t));
    uint64_t words[] = {p->seal,   p->generation, block,     r->tenant, r->index, r->adapter,
                        r->key[0], r->key[1],     r->serial, r->parent, ids};
    return (uint32_t)siphash(kv->key, words, sizeof words);
}

void kv_published_link(struct kv *kv, const struct kv_pool_rec *p, uint32_t block)
{
    uint32_t *slot = kv_published_slot(kv, kv_published(kv, p, block)->key);
    kv_block(kv, p, block)->chain = *slot;
    *slot = p->first_block + block + 1;
    kv_count(&kv->heads->stats.blocks_published, 1);
}

void kv_unpublish(struct kv *kv, const struct kv_pool_rec *p, uint32_t block)
{
    struct kv_published_rec *r = kv_published(kv, p, block);
    uint32_t *at = kv_published_slot(kv, r->key);
    kv_publish32(&r->state, 0);
    while (*at != p->first_block + block + 1)
        at = &kv->blocks[*at - 1].chain;
    *at = kv_block(kv, p, block)->chain;
    kv_block(kv, p, block)->chain = 0;
    kv_count(&kv->heads->stats.blocks_published, -1);
    kv_note_parted(kv, p);
}

void kv_published_move(struct kv *kv, const struct kv_pool_rec *p, uint32_t from, uint32_t to)
{
    struct kv_published_rec *r = kv_published(kv, p, to), as = *kv_published(kv, p, from);
    as.state = 0;
    *r = as;
    memcpy(kv_published_ids(kv, p, to), kv_published_ids(kv, p, from),
           p->block_tokens * sizeof(uint32_t));
    *kv_retained(kv, p, to) = *kv_retained(kv, p, from);
    r->seal = kv_published_seal(kv, p, to);
    kv_publish32(&r->state, KV_LIVE);
    kv_published_link(kv, p, to);
    kv_unpublish(kv, p, from);
}

bool kv_block_content(const struct kv *kv, kv_pool_id pool, uint32_t block, struct kv_content *out)
{
    const struct kv_pool_rec *p = kv_pool_live(kv, pool.index);
    if (p == NULL || block >= p->n_fresh || !kv_is_published(kv, p, block))
        return false;
    const struct kv_published_rec *r = kv_published(kv, p, block);
    *out = (struct kv_content){
        .pool = pool.index,
        .tenant = r->tenant,
        .index = r->index,
        .n_ids = p->block_tokens,
        .adapter = r->adapter,
        .key = {r->key[0], r->key[1]},
        .serial = r->serial,
        .parent = r->parent,
        .ids = kv_published_ids(kv, p, block),
    };
    return true;
}
