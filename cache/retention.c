/* retention.c: how long published blocks stay when no sequence uses them: what clients ask for
 * ranges of tokens, and what is stored with each published block.
 *
 * A range begins at a token and ends where the next one begins. A block follows the range of its
 * first token. The last sequence that published or found a block, or has a block equal to it, and
 * asked for a retention decides (prefix.c finds them).
 * Retention only orders evictions, so a record half written by a kill does no harm.
 */
#include "cache/kv_internal.h"

#include <string.h>

attn_status kv_retention_check(struct kv *kv, uint64_t name, const struct kv_retention *r,
                               uint32_t n)
{
    unsigned long long seq = name;
    if (n > KV_MAX_RETENTIONS)
        return kv_fail(kv, ATTN_EINVAL, "sequence %llu: retention has %u ranges, at most %d", seq,
                       n, KV_MAX_RETENTIONS);
    for (uint32_t i = 0; i < n; i++) {
        if (i > 0 && r[i].from <= r[i - 1].from)
            return kv_fail(kv, ATTN_EINVAL,
                           "sequence %llu: retention[%u] is from token %u, the one before from %u",
                           seq, i, r[i].from, r[i - 1].from);
        if (r[i].priority < KV_MIN_PRIORITY || r[i].priority > KV_MAX_PRIORITY)
            return kv_fail(kv, ATTN_EINVAL,
                           "sequence %llu: retention[%u].priority is %d, not in %d..%d", seq, i,
                           r[i].priority, KV_MIN_PRIORITY, KV_MAX_PRIORITY);
        if (r[i].life_s > KV_MAX_LIFE_S)
            return kv_fail(kv, ATTN_EINVAL,
                           "sequence %llu: retention[%u].time_to_live is %u s, at most %u", seq, i,
                           r[i].life_s, KV_MAX_LIFE_S);
    }
    return ATTN_OK;
}

/* 0: no limit; else log2 of the time to live, rounded up, plus one. */
static uint8_t life_of(uint32_t s)
{
    uint8_t life = 1;
    if (s == 0)
        return 0;
    while (1u << (life - 1) < s)
        life++;
    return life;
}

static void retain(struct kv *kv, struct kv_pool_rec *p, uint32_t block,
                   const struct kv_retention *r)
{
    bool is_cached = kv_block(kv, p, block)->n_refs == 0;
    struct kv_retained_rec *t = kv_retained(kv, p, block);
    if (is_cached)
        kv_lru_take(kv, p, block);
    t->priority = (uint8_t)(r->priority - KV_MIN_PRIORITY);
    t->life = life_of(r->life_s);
    t->is_pinned = r->is_pinned;
    if (is_cached)
        kv_lru_put(kv, p, block);
}

void kv_retain_default(struct kv *kv, const struct kv_pool_rec *p, uint32_t block)
{
    *kv_retained(kv, p, block) =
        (struct kv_retained_rec){.used_s = kv->now_s, .priority = -KV_MIN_PRIORITY};
}

void kv_retain(struct kv *kv, uint32_t seq, uint32_t index, uint32_t block)
{
    const struct kv_given_rec *g = &kv->given[seq];
    struct kv_pool_rec *p = &kv->pools[kv->seqs[seq].pool];
    uint64_t token = (uint64_t)index << p->block_shift;
    uint32_t i = g->n_retentions;
    while (i > 0 && g->retention[i - 1].from > token)
        i--;
    if (i > 0)
        retain(kv, p, block, &g->retention[i - 1]);
}

void kv_retention_recover(struct kv *kv, uint32_t seq)
{
    struct kv_given_rec *g = &kv->given[seq];
    uint64_t name = kv->seqs[seq].name;
    if (kv_retention_check(kv, name, g->retention, g->n_retentions) != ATTN_OK)
        g->n_retentions = 0;
}

void kv_retained_recover(struct kv *kv, const struct kv_pool_rec *p, uint32_t block)
{
    const struct kv_retained_rec *t = kv_retained(kv, p, block);
    if (t->priority >= KV_N_PRIORITIES || t->life >= KV_N_LIVES || t->is_pinned > 1 ||
        t->was_found > 1)
        kv_retain_default(kv, p, block);
}
