/* pools.c: creates, finds, describes, empties and drops pools.
 *
 * A pool is a contiguous range of block records; block ids count from its start. A new pool takes
 * the first gap that fits; its end may move later (resize.c). A pool is truth: its record is
 * written whole while its state is free, and storing the state publishes it.
 */
#include "cache/kv_internal.h"

#include <string.h>

static attn_status spec_check(struct kv *kv, const struct kv_pool_spec *s)
{
    size_t name_bytes = strnlen(s->name, sizeof s->name);
    if (name_bytes == 0 || name_bytes == sizeof s->name)
        return kv_fail(kv, ATTN_EINVAL, "pool: name has %zu bytes, not in 1..%d", name_bytes,
                       KV_NAME_BYTES - 1);
    if (s->n_layers < 1 || s->n_layers > kv->config.max_layers)
        return kv_fail(kv, ATTN_EINVAL, "pool %s: n_layers is %u, not in 1..%u", s->name,
                       s->n_layers, kv->config.max_layers);
    if (s->block_tokens < 1 || s->block_tokens > kv->config.max_block_tokens ||
        (s->block_tokens & (s->block_tokens - 1)) != 0)
        return kv_fail(kv, ATTN_EINVAL, "pool %s: block_tokens is %u, not a power of two to %u",
                       s->name, s->block_tokens, kv->config.max_block_tokens);
    if (s->n_blocks < 1)
        return kv_fail(kv, ATTN_EINVAL, "pool %s: n_blocks is 0", s->name);
    if (s->kept_tokens > 0 && s->window_tokens == 0)
        return kv_fail(kv, ATTN_EINVAL, "pool %s: kept_tokens is %u without window_tokens", s->name,
                       s->kept_tokens);
    if (s->spec_bytes > KV_SPEC_BYTES || (s->spec_bytes > 0 && s->spec == NULL))
        return kv_fail(kv, ATTN_EINVAL, "pool %s: spec_bytes is %u, at most %d", s->name,
                       s->spec_bytes, KV_SPEC_BYTES);
    return ATTN_OK;
}

/* For a name that exists: ATTN_OK if the pool is the same, else the sentence names what differs. */
static attn_status spec_compare(struct kv *kv, uint32_t pool, const struct kv_pool_spec *s)
{
    const struct kv_pool_rec *p = &kv->pools[pool];
    if (p->n_layers != s->n_layers)
        return kv_fail(kv, ATTN_EEXIST, "pool %s: exists with n_layers %u, not %u", s->name,
                       p->n_layers, s->n_layers);
    if (p->block_tokens != s->block_tokens)
        return kv_fail(kv, ATTN_EEXIST, "pool %s: exists with block_tokens %u, not %u", s->name,
                       p->block_tokens, s->block_tokens);
    if (p->n_made != s->n_blocks)
        return kv_fail(kv, ATTN_EEXIST, "pool %s: exists with n_blocks %u, not %u", s->name,
                       p->n_made, s->n_blocks);
    if (p->window_tokens != s->window_tokens || p->kept_tokens != s->kept_tokens)
        return kv_fail(kv, ATTN_EEXIST,
                       "pool %s: exists with window_tokens %u and kept_tokens %u, not %u and %u",
                       s->name, p->window_tokens, p->kept_tokens, s->window_tokens, s->kept_tokens);
    if (p->spec_bytes != s->spec_bytes ||
        (s->spec_bytes > 0 &&
         memcmp(kv->specs + (size_t)pool * KV_SPEC_BYTES, s->spec, s->spec_bytes) != 0))
        return kv_fail(kv, ATTN_EEXIST, "pool %s: exists with another spec", s->name);
    return ATTN_OK;
}

attn_status kv_pool_find(struct kv *kv, uint32_t tenant, const char *name, kv_pool_id *out_pool)
{
    for (uint32_t i = 0; i < kv->config.max_pools; i++) {
        const struct kv_pool_rec *p = kv_pool_live(kv, i);
        if (p != NULL && p->tenant == tenant && strcmp(p->name, name) == 0) {
            *out_pool = (kv_pool_id){i};
            return ATTN_OK;
        }
    }
    return kv_fail(kv, ATTN_ENOTFOUND, "pool %.*s: not found", KV_NAME_BYTES, name);
}

/* Finds the first gap of n records; false: there is none, and *out_largest is the size of the
 * largest. */
static bool find_gap(const struct kv *kv, uint32_t n, uint32_t *out_first, uint32_t *out_largest)
{
    uint32_t at = 0, largest = 0;
    for (;;) {
        uint32_t next = kv->config.max_blocks, end = next; /* start and end of the next pool */
        for (uint32_t i = 0; i < kv->config.max_pools; i++) {
            const struct kv_pool_rec *p = kv_pool_live(kv, i);
            if (p != NULL && p->first_block >= at && p->first_block < next) {
                next = p->first_block;
                end = next + p->n_blocks;
            }
        }
        if (next - at >= n) {
            *out_first = at;
            return true;
        }
        largest = next - at > largest ? next - at : largest;
        if (next == kv->config.max_blocks)
            break;
        at = end;
    }
    *out_largest = largest;
    return false;
}

attn_status kv_pool_create(struct kv *kv, const struct kv_pool_spec *s, kv_pool_id *out_pool)
{
    attn_status st = spec_check(kv, s);
    if (st != ATTN_OK)
        return st;
    kv_pool_id old;
    if (kv_pool_find(kv, s->tenant, s->name, &old) == ATTN_OK) {
        st = spec_compare(kv, old.index, s);
        if (st == ATTN_OK)
            *out_pool = old;
        return st;
    }

    uint32_t i = 0;
    while (i < kv->config.max_pools && kv_pool_live(kv, i) != NULL)
        i++;
    if (i == kv->config.max_pools)
        return kv_fail(kv, ATTN_ENOMEM, "pool %s: all %u pools are made", s->name, i);
    struct kv_heads *h = kv->heads;
    uint32_t first_block, n_largest;
    if (!find_gap(kv, s->n_blocks, &first_block, &n_largest))
        return kv_fail(kv, ATTN_ENOMEM, "pool %s: n_blocks is %u, %u are left in one piece",
                       s->name, s->n_blocks, n_largest);

    struct kv_pool_rec *p = &kv->pools[i];
    *p = (struct kv_pool_rec){
        .generation = p->generation,
        .place = s->place,
        .n_layers = s->n_layers,
        .block_tokens = s->block_tokens,
        .n_made = s->n_blocks,
        .n_blocks = s->n_blocks,
        .first_block = first_block,
        .spec_bytes = s->spec_bytes,
        .window_tokens = s->window_tokens,
        .kept_tokens = s->kept_tokens,
        .idle_pages = s->idle_pages,
        .tenant = s->tenant,
        .block_shift = (uint32_t)__builtin_ctz(s->block_tokens),
        .n_free = s->n_blocks,
    };
    strcpy(p->name, s->name);
    st = kv_room_take_blocks(kv, p, s->n_blocks);
    if (st != ATTN_OK)
        return st;
    if (s->spec_bytes > 0)
        memcpy(kv->specs + (size_t)i * KV_SPEC_BYTES, s->spec, s->spec_bytes);
    p->seal = kv_pool_seal(kv, i);
    p->sized = kv_pool_sized(kv, i, s->n_blocks);
    kv_publish32(&p->state, KV_LIVE);
    kv_event_put(kv, KV_EVENT_POOL_MADE, p, 0, 0);

    kv_count(&h->stats.pools, 1);
    kv_count(&h->stats.blocks_total, s->n_blocks);
    kv_count(&h->stats.blocks_free, s->n_blocks);
    *out_pool = (kv_pool_id){i};
    return ATTN_OK;
}

attn_status kv_pool_info(const struct kv *kv, kv_pool_id pool, struct kv_pool_spec *out,
                         uint32_t *out_free_blocks)
{
    const struct kv_pool_rec *p = kv_pool_live(kv, pool.index);
    if (p == NULL)
        return ATTN_ENOTFOUND;
    *out = (struct kv_pool_spec){
        .tenant = p->tenant,
        .n_layers = p->n_layers,
        .n_blocks = p->n_blocks,
        .n_made = p->n_made,
        .block_tokens = p->block_tokens,
        .spec_bytes = p->spec_bytes,
        .spec = kv->specs + (size_t)pool.index * KV_SPEC_BYTES,
        .place = p->place,
        .window_tokens = p->window_tokens,
        .kept_tokens = p->kept_tokens,
        .idle_pages = p->idle_pages,
        .generation = p->generation,
    };
    memcpy(out->name, p->name, sizeof out->name);
    *out_free_blocks = kv_n_available(p);
    return ATTN_OK;
}

uint32_t kv_pool_sequences(const struct kv *kv, kv_pool_id pool)
{
    const struct kv_pool_rec *p = kv_pool_live(kv, pool.index);
    return p == NULL ? 0 : p->n_seqs;
}

uint32_t kv_pool_cached(const struct kv *kv, kv_pool_id pool)
{
    const struct kv_pool_rec *p = kv_pool_live(kv, pool.index);
    return p == NULL ? 0 : p->n_cached - p->n_pinned;
}

attn_status kv_pool_drop(struct kv *kv, kv_pool_id pool)
{
    struct kv_pool_rec *p = kv_pool_live(kv, pool.index);
    if (p == NULL)
        return kv_fail(kv, ATTN_ENOTFOUND, "pool index %u: no such pool", pool.index);
    if (p->n_seqs > 0)
        return kv_fail(kv, ATTN_EINVAL, "pool %s: %u sequences are open in it", p->name, p->n_seqs);
    if (kv_seq_import_is_of(kv, pool.index) || kv_idle_is_of(kv, pool.index))
        return kv_fail(kv, ATTN_EOVERLOAD, "pool %s: blocks of it are on their way", p->name);
    struct kv_stats *stats = &kv->heads->stats;
    kv_count(&stats->cached_dropped, p->n_cached);
    for (uint32_t block = 0; p->n_cached > 0; block++)
        if (kv_is_published(kv, p, block))
            kv_block_drop_published(kv, p, block);
    kv_count(&stats->blocks_reserved, -(int64_t)p->n_reserved);
    kv_event_put(kv, KV_EVENT_POOL_GONE, p, 0, 0);
    /* first: nothing that named the old pool may name the next; its reservations go with this */
    p->generation++;
    kv_publish32(&p->state, 0);
    kv_room_give_blocks(kv, p, 0, p->n_blocks);
    kv_count(&stats->pools, -1);
    kv_count(&stats->blocks_total, -(int64_t)p->n_blocks);
    kv_count(&stats->blocks_free, -(int64_t)p->n_free);
    return ATTN_OK;
}

void kv_pool_clear(struct kv *kv, kv_pool_id pool)
{
    struct kv_pool_rec *p = kv_pool_live(kv, pool.index);
    if (p == NULL)
        return;
    for (kv_seq_id id = {0}; kv_seq_next(kv, UINT32_MAX, &id) == ATTN_OK; id.index++) {
        struct kv_seq_info info;
        kv_seq_info(kv, id, &info);
        if (info.pool.index == pool.index)
            kv_seq_close(kv, id);
    }
    for (uint32_t block = 0; block < p->n_fresh; block++)
        if (kv_is_published(kv, p, block)) /* unreferenced now: its sequences are closed */
            kv_block_drop_published(kv, p, block);
}
