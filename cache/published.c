/* published.c: the records of published blocks, and the hash index that finds them by key.
 *
 * A record and its ids are written whole while the state is free; storing the state publishes them.
 * The index is derived. prefix.c decides which blocks are published and looks them up.
 *
 * The number of the latest event is truth, since numbers never restart; the ring of events is this
 * process's. A kill loses at most the event under way, of which recovery makes a gap that no reader
 * passes.
 */
#include "cache/kv_internal.h"

#include <string.h>

/* --- events ----------------------------------------------------------------------------------- */

#define MAX_SANE_NUMBER (UINT64_C(1) << 55)

void kv_event_put(struct kv *kv, enum kv_event_kind kind, const struct kv_pool_rec *p,
                  uint32_t block, uint64_t serial)
{
    if (kv->events == NULL)
        return;
    uint64_t number = kv->epochs->events + 1;
    kv->events[number % kv->config.events_kept] = (struct kv_event){
        .serial = serial,
        .pool = kv_pool_index(kv, p),
        .generation = p->generation,
        .block = block,
        .kind = kind,
    };
    kv_publish64(&kv->epochs->events, number);
}

void kv_events_begin(struct kv *kv)
{
    uint64_t number = kv->epochs->events < MAX_SANE_NUMBER ? kv->epochs->events : 0;
    number = number > kv->config.events_from ? number : kv->config.events_from;
    kv->first_event = number + 2; /* the event between is the one that may be lost */
    kv_publish64(&kv->epochs->events, number + 1);
}

uint64_t kv_events_number(const struct kv *kv)
{
    return kv->epochs->events;
}

bool kv_events_has(const struct kv *kv, uint64_t after)
{
    uint64_t last = kv->epochs->events;
    return after + 1 >= kv->first_event && after <= last && last - after <= kv->config.events_kept;
}

bool kv_event_next(const struct kv *kv, uint64_t after, struct kv_event *out)
{
    if (!kv_events_has(kv, after) || after == kv->epochs->events)
        return false;
    *out = kv->events[(after + 1) % kv->config.events_kept];
    return true;
}

/* --- records ---------------------------------------------------------------------------------- */

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
    kv_event_put(kv, KV_EVENT_EVICTED, p, block, r->serial);
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
    kv_event_put(kv, KV_EVENT_PUBLISHED, p, to, r->serial);
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

bool kv_event_content(const struct kv *kv, const struct kv_event *e, struct kv_content *out)
{
    struct kv_content c;
    const struct kv_pool_rec *p = kv_pool_live(kv, e->pool);
    if (e->kind != KV_EVENT_PUBLISHED || p == NULL || p->generation != e->generation ||
        !kv_block_content(kv, (kv_pool_id){e->pool}, e->block, &c) || c.serial != e->serial)
        return false;
    *out = c;
    return true;
}

attn_status kv_published_next(const struct kv *kv, struct kv_published_at *at, uint32_t *n_most,
                              struct kv_content *out)
{
    for (; at->pool < kv->config.max_pools; at->pool++, at->block = 0) {
        const struct kv_pool_rec *p = kv_pool_live(kv, at->pool);
        uint32_t past = p == NULL ? 0 : p->n_ever_published;
        for (; at->block < past; at->block++) {
            if (kv_block_content(kv, (kv_pool_id){at->pool}, at->block, out))
                return ATTN_OK;
            if (*n_most == 0)
                return ATTN_EOVERLOAD;
            --*n_most;
        }
        if (*n_most == 0)
            return ATTN_EOVERLOAD;
        --*n_most;
    }
    return ATTN_ENOTFOUND;
}
