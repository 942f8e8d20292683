/* reserve.c: reservations of blocks: made, changed, ended, recovered and checked. charge.c says
 * what they mean.
 *
 * A reservation changes in one store. One whose owner has gone, whose pool was dropped, or that is
 * damaged, is cleared by recovery.
 */
#include "cache/kv_internal.h"

#include <string.h>

uint32_t kv_reserved(const struct kv *kv, uint32_t owner, kv_pool_id pool)
{
    const struct kv_pool_rec *p = kv_pool_live(kv, pool.index);
    return p == NULL ? 0 : kv_reserved_by(kv, owner, p);
}

uint32_t kv_charged(const struct kv *kv, uint32_t owner, kv_pool_id pool)
{
    const struct kv_pool_rec *p = kv_pool_live(kv, pool.index);
    return p == NULL ? 0 : *kv_charged_to(kv, owner, p);
}

uint32_t kv_pool_reserved(const struct kv *kv, kv_pool_id pool)
{
    const struct kv_pool_rec *p = kv_pool_live(kv, pool.index);
    return p == NULL ? 0 : p->n_reserved;
}

uint32_t kv_pool_free_for(const struct kv *kv, kv_pool_id pool, uint32_t owner)
{
    const struct kv_pool_rec *p = kv_pool_live(kv, pool.index);
    return p == NULL ? 0 : kv_n_free_for(kv, p, owner);
}

/* Changes the word and what depends on it. */
static void set(struct kv *kv, uint32_t owner, struct kv_pool_rec *p, uint32_t n)
{
    uint32_t had = kv_reserved_by(kv, owner, p), charged = *kv_charged_to(kv, owner, p);
    kv_publish64(kv_reserved_word(kv, owner, kv_pool_index(kv, p)),
                 n == 0 ? 0 : (uint64_t)p->generation << 32 | n);
    p->n_reserved = p->n_reserved - had + n;
    p->n_beyond = p->n_beyond - kv_above(charged, had) + kv_above(charged, n);
    kv_count(&kv->heads->stats.blocks_reserved, (int64_t)n - had);
}

attn_status kv_reserve(struct kv *kv, uint32_t owner, kv_pool_id pool, uint32_t n_blocks)
{
    struct kv_pool_rec *p = kv_pool_live(kv, pool.index);
    if (p == NULL)
        return kv_fail(kv, ATTN_ENOTFOUND, "pool index %u: no such pool", pool.index);
    if (owner >= kv->config.max_owners || kv->owners[owner].id == 0)
        return kv_fail(kv, ATTN_ENOTFOUND, "owner is %u, there is none", owner);
    uint32_t had = kv_reserved_by(kv, owner, p), charged = *kv_charged_to(kv, owner, p);
    uint32_t now = had > charged ? had : charged, then = n_blocks > charged ? n_blocks : charged;
    if (then > now && kv_unowed(p) < then - now)
        kv_block_drop_lost(kv, p);
    if (n_blocks > had && kv_owes(p) - now + then > p->n_blocks)
        return kv_fail(kv, ATTN_ENOBLOCKS,
                       "pool %s: n_blocks is %u, of its %u blocks %u can be reserved: others have "
                       "reserved %u and hold %u beyond that, %u are pinned",
                       p->name, n_blocks, p->n_blocks, now + kv_unowed(p), p->n_reserved - had,
                       p->n_beyond - kv_above(charged, had) + kv_n_held(p), p->n_pinned);
    if (n_blocks != had)
        set(kv, owner, p, n_blocks);
    return ATTN_OK;
}

void kv_reservations_end(struct kv *kv, uint32_t owner)
{
    for (uint32_t i = 0; i < kv->config.max_pools; i++) {
        struct kv_pool_rec *p = kv_pool_live(kv, i);
        if (p != NULL && kv_reserved_by(kv, owner, p) > 0)
            set(kv, owner, p, 0);
        else if (*kv_reserved_word(kv, owner, i) != 0)
            kv_publish64(kv_reserved_word(kv, owner, i), 0);
    }
}

/* --- recovery and check ----------------------------------------------------------------------- */

/* Counts references and entries of all pools and owners, in zeroed arrays. */
static void count_refs(const struct kv *kv, uint32_t pool, struct kv_pool_rec *to)
{
    const struct kv_pool_rec *p = &kv->pools[pool];
    to->n_refs = to->n_lazy = to->n_charged = 0;
    for (uint32_t block = 0; block < p->n_fresh; block++)
        to->n_refs += kv_block(kv, p, block)->n_refs;
    for (uint32_t seq = 0; seq < kv->heads->seq_n_fresh; seq++) {
        const struct kv_seq_rec *s = kv_seq_live(kv, seq);
        if (s == NULL || s->pool != pool)
            continue;
        to->n_lazy += s->is_lazy ? s->n_blocks : 0;
        to->n_charged += kv_charge_of(kv, seq);
    }
}

void kv_reservations_recover(struct kv *kv)
{
    for (uint32_t i = 0; i < kv->config.max_pools; i++) {
        struct kv_pool_rec *p = kv_pool_live(kv, i);
        if (p != NULL)
            p->n_reserved = p->n_beyond = 0;
        for (uint32_t owner = 0; owner < kv->config.max_owners; owner++) {
            uint64_t *word = kv_reserved_word(kv, owner, i);
            if (*word == 0)
                continue;
            uint32_t n = p == NULL || kv->owners[owner].id == 0 ? 0 : kv_reserved_by(kv, owner, p);
            if (n == 0 || n > p->n_blocks - p->n_reserved) { /* an end under way, or damage */
                kv_publish64(word, 0);
                continue;
            }
            p->n_reserved += n;
            kv_count(&kv->heads->stats.blocks_reserved, n);
        }
    }
    memset(kv->charged, 0,
           ((size_t)kv->config.max_owners + 1) * kv->config.max_pools * sizeof kv->charged[0]);
    for (uint32_t i = 0; i < kv->config.max_pools; i++)
        if (kv_pool_live(kv, i) != NULL) {
            count_refs(kv, i, &kv->pools[i]);
            kv->pools[i].n_charged = 0; /* counted again below */
        }
    for (uint32_t seq = 0; seq < kv->heads->seq_n_fresh; seq++)
        if (kv_seq_live(kv, seq) != NULL)
            kv_charge(kv, seq, kv_charge_of(kv, seq));
}

attn_status kv_reservations_check(struct kv *kv, uint32_t pool)
{
    const struct kv_pool_rec *p = &kv->pools[pool];
    struct kv_pool_rec found = {0};
    uint32_t n_reserved = 0, n_beyond = 0, n_charged = 0;
    count_refs(kv, pool, &found);
    for (uint32_t owner = 0; owner <= kv->config.max_owners; owner++) {
        uint32_t charged = 0, expected = *kv_charged_to(kv, owner, p);
        for (uint32_t seq = 0; expected > 0 && seq < kv->heads->seq_n_fresh; seq++) {
            const struct kv_seq_rec *s = kv_seq_live(kv, seq);
            uint32_t of = s == NULL ? 0 : kv_owner_of(s);
            if (s != NULL && s->pool == pool &&
                (of < kv->config.max_owners ? of : kv->config.max_owners) == owner)
                charged += kv_charge_of(kv, seq);
        }
        if (charged != expected)
            return kv_fail(kv, ATTN_EINTERNAL, "pool %s: owner %u has %u entries, %u are charged",
                           p->name, owner, charged, expected);
        n_charged += charged;
        n_reserved += kv_reserved_by(kv, owner, p);
        n_beyond += kv_above(charged, kv_reserved_by(kv, owner, p));
    }
    if (p->n_refs != found.n_refs || p->n_lazy != found.n_lazy || p->n_charged != found.n_charged ||
        p->n_charged != n_charged)
        return kv_fail(kv, ATTN_EINTERNAL,
                       "pool %s: %u references, %u entries, %u of forks counted; %u, %u, %u there",
                       p->name, p->n_refs, p->n_charged, p->n_lazy, found.n_refs, found.n_charged,
                       found.n_lazy);
    if (p->n_reserved != n_reserved || p->n_beyond != n_beyond || n_reserved > p->n_blocks)
        return kv_fail(kv, ATTN_EINTERNAL,
                       "pool %s: %u blocks reserved and %u beyond counted; %u, %u of %u there",
                       p->name, p->n_reserved, p->n_beyond, n_reserved, n_beyond, p->n_blocks);
    return ATTN_OK;
}
