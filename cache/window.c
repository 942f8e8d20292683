/* window.c: frees the blocks that no layer's window reaches any more.
 *
 * The table's entries [kept, hole) then name no block: kept are the blocks of the tokens that stay
 * visible outside the window, hole is one word of truth per sequence. The word is stored before the
 * references are released, so a kill leaves all of them or none; the row itself is not written. The
 * word only rises, until a truncation to the kept blocks makes it 0 again.
 *
 * A sequence that is copied from another cache begins with its hole: the word is stored, then the
 * layers are lengthened. Only this leaves a layer that ends where the hole begins, so a recovery
 * that finds one knows what was under way.
 *
 * What a retry of a layer's latest append would see stays, so the layer that is furthest back
 * decides, and after a recovery nothing is freed until each layer has been appended to. A block
 * holds all layers, so one layer without a window keeps everything. Published blocks that are freed
 * this way are cached like others.
 */
#include "cache/kv_internal.h"

/* The first entry that a query at pos or later sees. */
static uint32_t first_seen(const struct kv_pool_rec *p, uint32_t pos)
{
    uint64_t past = (uint64_t)pos + 1;
    return past <= p->window_tokens ? 0 : (uint32_t)((past - p->window_tokens) >> p->block_shift);
}

bool kv_hole_is_past(const struct kv_pool_rec *p, uint32_t len)
{
    return len <= (uint64_t)kv_blocks_of(p, p->kept_tokens) << p->block_shift;
}

/* True if a layer ends before entry past and not where entry first begins. */
static bool ends_inside(const struct kv *kv, uint32_t seq, uint32_t first, uint32_t past)
{
    const struct kv_pool_rec *p = &kv->pools[kv->seqs[seq].pool];
    const uint32_t *lens = kv_lens(kv, seq);
    for (uint32_t i = 0; i < p->n_layers; i++)
        if (lens[i] < (uint64_t)past << p->block_shift && lens[i] != first << p->block_shift)
            return true;
    return false;
}

bool kv_hole_is_damaged(const struct kv *kv, uint32_t seq)
{
    const struct kv_pool_rec *p = &kv->pools[kv->seqs[seq].pool];
    uint32_t hole = kv->holes[seq], kept = kv_blocks_of(p, p->kept_tokens);
    return hole != 0 && (p->window_tokens == 0 || hole <= kept ||
                         (uint64_t)hole << p->block_shift > kv_max_tokens(kv, p) ||
                         ends_inside(kv, seq, kept, hole));
}

/* Lengthens the layers that end where the hole begins to its end. */
static void layers_skip(struct kv *kv, uint32_t seq)
{
    const struct kv_pool_rec *p = &kv->pools[kv->seqs[seq].pool];
    uint32_t *lens = kv_lens(kv, seq), past = kv->holes[seq] << p->block_shift;
    for (uint32_t i = 0; i < p->n_layers; i++)
        if (lens[i] < past)
            kv_publish32(&lens[i], past);
}

void kv_hole_recover(struct kv *kv, uint32_t seq, uint32_t longest)
{
    if (kv_hole_is_past(&kv->pools[kv->seqs[seq].pool], longest))
        kv_publish32(&kv->holes[seq], 0);
    else
        layers_skip(kv, seq);
}

static attn_status free_to_check(struct kv *kv, uint32_t seq, uint32_t first, uint32_t past,
                                 const struct kv_effects *fx)
{
    const struct kv_seq_rec *s = &kv->seqs[seq];
    const struct kv_pool_rec *p = &kv->pools[s->pool];
    unsigned long long name = s->name;
    if (p->window_tokens == 0)
        return kv_fail(kv, ATTN_EINVAL,
                       "sequence %llu: blocks are freed to %u: pool %s has a layer without a "
                       "window, nothing of it is",
                       name, past, p->name);
    if (first != kv_blocks_of(p, p->kept_tokens) || past <= first ||
        (uint64_t)past << p->block_shift > kv_max_tokens(kv, p))
        return kv_fail(
            kv, ATTN_EINVAL,
            "sequence %llu: blocks are freed from %u to %u: pool %s keeps %u, a sequence "
            "has %llu at most",
            name, first, past, p->name, kv_blocks_of(p, p->kept_tokens),
            (unsigned long long)kv_max_tokens(kv, p) >> p->block_shift);
    if (s->n_outstanding > 0)
        return kv_fail(kv, ATTN_EOVERLOAD, "sequence %llu: %u appends are outstanding", name,
                       s->n_outstanding);
    if (kv->links[seq].n_paged_out > 0)
        return kv_paged_out(kv, seq);
    if (kv_tree_n(&kv->trees[seq]) > 0)
        return kv_fail(kv, ATTN_EINVAL,
                       "sequence %llu: blocks are freed to %u, it has a tree at %u", name, past,
                       kv_tree_pos(&kv->trees[seq]));
    if (ends_inside(kv, seq, first, past))
        return kv_fail(kv, ATTN_EINVAL,
                       "sequence %llu: blocks are freed from %u to %u: a layer ends between them",
                       name, first, past);
    if (past > s->n_blocks && past - s->n_blocks > fx->patches_capacity - fx->n_patches)
        return kv_fail(kv, ATTN_EOVERLOAD, "sequence %llu: no room for %u patches", name,
                       past - s->n_blocks);
    return ATTN_OK;
}

attn_status kv_seq_free_to(struct kv *kv, kv_seq_id seq, uint32_t first, uint32_t past,
                           struct kv_effects *fx)
{
    struct kv_seq_rec *s = kv_seq_live(kv, seq.index);
    if (s == NULL)
        return kv_fail(kv, ATTN_ENOTFOUND, "sequence index %u is not open", seq.index);
    attn_status st = free_to_check(kv, seq.index, first, past, fx);
    if (st != ATTN_OK)
        return st;
    struct kv_pool_rec *p = &kv->pools[s->pool];
    uint32_t *row = kv_own_row(kv, seq.index), hole = kv->holes[seq.index], n = s->n_blocks;
    for (uint32_t i = n; i < past; i++) { /* not truth: no length covers it */
        row[i] = 0;
        fx->patches[fx->n_patches++] = (struct kv_patch){.row = seq.index, .index = i, .block = 0};
    }
    if (past > hole)
        kv_publish32(&kv->holes[seq.index], past);
    for (uint32_t i = past < n ? past : n; i-- > (hole > first ? hole : first);) {
        kv_charge(kv, seq.index, -1);
        kv_block_unref(kv, p, row[i]);
    }
    layers_skip(kv, seq.index);
    if (n < kv->holes[seq.index]) {
        s->n_blocks = kv->holes[seq.index];
        s->longest = s->n_blocks << p->block_shift;
    }
    return ATTN_OK;
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
    if (s == NULL || s->n_outstanding > 0)
        return;
    struct kv_pool_rec *p = &kv->pools[s->pool];
    if (p->window_tokens == 0)
        return;
    uint32_t kept = kv_blocks_of(p, p->kept_tokens), hole = kv->holes[seq.index];
    uint32_t first = hole > kept ? hole : kept, past = UINT32_MAX;
    for (uint32_t i = p->n_layers; i-- > 0 && past > first;) { /* the last layer is appended last */
        uint32_t seen = first_seen(p, kv_latest(kv, seq.index)[i]);
        past = seen < past ? seen : past;
    }
    if (past <= first)
        return;
    kv_publish32(&kv->holes[seq.index], past);
    const uint32_t *row = kv_row(kv, seq.index);
    for (uint32_t i = past; i-- > first;) { /* backwards: a prefix is evicted from its end */
        if (kv_is_place(row[i])) {
            kv_idle_drop(kv, seq.index, i);
            continue;
        }
        kv_charge(kv, seq.index, -1);
        kv_block_unref(kv, p, row[i]);
    }
}
