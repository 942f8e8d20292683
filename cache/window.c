/* window.c: blocks that no layer's window reaches any more.
 *
 * The table's entries [kept, hole) then name no block: kept are the blocks of the tokens that stay
 * visible whatever the window, hole is one word of truth per sequence. It is stored before the
 * references go, so a kill leaves all of them or none; the row itself is not written. The word only
 * rises, until a truncation to the kept blocks alone makes it 0 again.
 */
#include "cache/kv_internal.h"

/* Entries below this one are seen by no query at pos or behind it. */
static uint32_t first_seen(const struct kv_pool_rec *p, uint32_t pos)
{
    uint64_t past = (uint64_t)pos + 1;
    return past <= p->window_tokens ? 0 : (uint32_t)((past - p->window_tokens) >> p->block_shift);
}

bool kv_hole_is_past(const struct kv_pool_rec *p, uint32_t len)
{
    return len <= (uint64_t)kv_blocks_of(p, p->kept_tokens) << p->block_shift;
}

bool kv_hole_is_damaged(const struct kv *kv, uint32_t seq, uint32_t longest)
{
    const struct kv_pool_rec *p = &kv->pools[kv->seqs[seq].pool];
    uint32_t hole = kv->holes[seq];
    return hole != 0 && (p->window_tokens == 0 || hole <= kv_blocks_of(p, p->kept_tokens) ||
                         hole > first_seen(p, longest));
}

attn_status kv_seq_sees(struct kv *kv, kv_seq_id seq, uint32_t pos)
{
    const struct kv_seq_rec *s = kv_seq_live(kv, seq.index);
    if (s == NULL)
        return kv_fail(kv, ATTN_ENOTFOUND, "sequence index %u is not open", seq.index);
    const struct kv_pool_rec *p = &kv->pools[s->pool];
    if (p->window_tokens == 0 || kv->holes[seq.index] <= first_seen(p, pos))
        return ATTN_OK;
    return kv_fail(
        kv, ATTN_EINVAL,
        "sequence %llu: a query at %u sees tokens that are freed: pool %s has windows of "
        "%u, of tokens %u to %u nothing is left",
        (unsigned long long)s->name, pos, p->name, p->window_tokens,
        kv_blocks_of(p, p->kept_tokens) << p->block_shift,
        (kv->holes[seq.index] << p->block_shift) - 1);
}

void kv_seq_free_unseen(struct kv *kv, kv_seq_id seq)
{
    const struct kv_seq_rec *s = kv_seq_live(kv, seq.index);
    if (s == NULL || s->n_outstanding > 0 || kv->links[seq.index].n_away > 0)
        return;
    struct kv_pool_rec *p = &kv->pools[s->pool];
    if (p->window_tokens == 0)
        return;
    uint32_t kept = kv_blocks_of(p, p->kept_tokens), hole = kv->holes[seq.index];
    uint32_t first = hole > kept ? hole : kept, past = UINT32_MAX;
    for (uint32_t i = p->n_layers; i-- > 0 && past > first;) { /* the last layer comes last */
        uint32_t seen = first_seen(p, kv_latest(kv, seq.index)[i]);
        past = seen < past ? seen : past;
    }
    if (past <= first)
        return;
    kv_publish32(&kv->holes[seq.index], past);
    const uint32_t *row = kv_row(kv, seq.index);
    for (uint32_t i = past; i-- > first;) /* of a prefix the end goes before the start */
        kv_block_unref(kv, p, row[i]);
}
