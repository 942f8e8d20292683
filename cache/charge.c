/* charge.c: what each owner is charged for, and how many blocks of a pool it may take.
 *
 * An owner is charged for each table entry of its sequences that names a block of the pool, so for
 * a shared block once per sequence: whoever else gives it back, those that are left have paid for
 * it. What a pool owes is, over all owners, the larger of what one reserved and what it is charged,
 * and what is held besides (blocks that are being moved, copied or promoted) or pinned. As long as
 * it owes no more blocks than it has, each owner can have what it reserved at any moment. So where
 * there are reservations, whatever would make it owe more is refused; where there are none, nothing
 * but free blocks counts. What others hold for a moment is the exception: it isn't refused, and an
 * append that meets it is refused until it is over. Pins give way: a block is not pinned any more
 * if it would make the pool owe too much when its last sequence ends.
 *
 * Truth is one word per owner and pool: the number, and the pool's generation, so that a dropped
 * pool takes its reservations along. Charges are derived.
 */
#include "cache/kv_internal.h"

uint64_t *kv_reserved_word(const struct kv *kv, uint32_t owner, uint32_t pool)
{
    return &kv->reserved[(size_t)owner * kv->config.max_pools + pool];
}

/* Owners' rows, and behind them one for sequences without an owner. */
uint32_t *kv_charged_to(const struct kv *kv, uint32_t owner, const struct kv_pool_rec *p)
{
    uint32_t row = owner < kv->config.max_owners ? owner : kv->config.max_owners;
    return &kv->charged[(size_t)row * kv->config.max_pools + kv_pool_index(kv, p)];
}

uint32_t kv_reserved_by(const struct kv *kv, uint32_t owner, const struct kv_pool_rec *p)
{
    if (owner >= kv->config.max_owners)
        return 0;
    uint64_t word = *kv_reserved_word(kv, owner, kv_pool_index(kv, p));
    return word >> 32 == p->generation ? (uint32_t)word : 0;
}

uint32_t kv_n_held(const struct kv_pool_rec *p)
{
    return kv_above(p->n_refs, p->n_charged - p->n_lazy);
}

uint64_t kv_owes(const struct kv_pool_rec *p)
{
    return (uint64_t)p->n_reserved + p->n_beyond + kv_n_held(p) + p->n_pinned;
}

uint32_t kv_unowed(const struct kv_pool_rec *p)
{
    return kv_owes(p) < p->n_blocks ? p->n_blocks - (uint32_t)kv_owes(p) : 0;
}

uint32_t kv_n_free_for(const struct kv *kv, const struct kv_pool_rec *p, uint32_t owner)
{
    uint32_t n = kv_n_available(p);
    if (p->n_reserved == 0)
        return n;
    uint32_t own = kv_above(kv_reserved_by(kv, owner, p), *kv_charged_to(kv, owner, p));
    return n < own + kv_unowed(p) ? n : own + kv_unowed(p);
}

uint32_t kv_n_shareable(const struct kv *kv, const struct kv_pool_rec *p, uint32_t owner)
{
    if (p->n_reserved == 0)
        return UINT32_MAX;
    return kv_above(kv_reserved_by(kv, owner, p), *kv_charged_to(kv, owner, p)) + kv_unowed(p);
}

bool kv_may_pin(const struct kv_pool_rec *p)
{
    return p->n_reserved == 0 || kv_unowed(p) > 0;
}

static void charge(struct kv *kv, struct kv_pool_rec *p, uint32_t owner, int64_t n)
{
    uint32_t *to = kv_charged_to(kv, owner, p), reserved = kv_reserved_by(kv, owner, p);
    p->n_beyond -= kv_above(*to, reserved);
    *to = (uint32_t)(*to + n);
    p->n_beyond += kv_above(*to, reserved);
    p->n_charged = (uint32_t)(p->n_charged + n);
}

void kv_charge(struct kv *kv, uint32_t seq, int64_t n)
{
    const struct kv_seq_rec *s = &kv->seqs[seq];
    charge(kv, &kv->pools[s->pool], kv_owner_of(s), n);
}

uint32_t kv_charge_of(const struct kv *kv, uint32_t seq)
{
    const struct kv_seq_rec *s = &kv->seqs[seq];
    const struct kv_pool_rec *p = &kv->pools[s->pool];
    uint32_t kept = kv_blocks_of(p, p->kept_tokens);
    uint32_t hole = p->window_tokens == 0 ? 0 : kv->holes[seq];
    hole = hole < s->n_blocks ? hole : s->n_blocks;
    return s->n_blocks - kv_above(hole, kept) - kv->links[seq].n_paged_out;
}

bool kv_charge_fits(const struct kv *kv, uint32_t seq, uint32_t owner)
{
    const struct kv_seq_rec *s = &kv->seqs[seq];
    const struct kv_pool_rec *p = &kv->pools[s->pool];
    uint32_t n = kv_charge_of(kv, seq), from = kv_owner_of(s);
    if (p->n_reserved == 0 || from == owner)
        return true;
    uint32_t own = kv_above(kv_reserved_by(kv, owner, p), *kv_charged_to(kv, owner, p));
    uint32_t beyond = kv_above(*kv_charged_to(kv, from, p), kv_reserved_by(kv, from, p));
    return kv_above(n, own) <= kv_unowed(p) + (beyond < n ? beyond : n);
}

bool kv_charge_may_stay(const struct kv *kv, uint32_t seq)
{
    const struct kv_seq_rec *s = &kv->seqs[seq];
    const struct kv_pool_rec *p = &kv->pools[s->pool];
    uint32_t owner = kv_owner_of(s);
    return p->n_reserved == 0 || kv_owes(p) <= p->n_blocks ||
           *kv_charged_to(kv, owner, p) < kv_reserved_by(kv, owner, p);
}

void kv_charge_moves(struct kv *kv, uint32_t seq, uint32_t owner)
{
    struct kv_pool_rec *p = &kv->pools[kv->seqs[seq].pool];
    uint32_t n = kv_charge_of(kv, seq);
    charge(kv, p, kv_owner_of(&kv->seqs[seq]), -(int64_t)n);
    charge(kv, p, owner, n);
}

bool kv_seq_is_covered(const struct kv *kv, kv_seq_id seq)
{
    const struct kv_seq_rec *s = kv_seq_live(kv, seq.index);
    if (s == NULL || kv->pools[s->pool].n_reserved == 0)
        return false;
    const struct kv_pool_rec *p = &kv->pools[s->pool];
    return *kv_charged_to(kv, kv_owner_of(s), p) <= kv_reserved_by(kv, kv_owner_of(s), p);
}
