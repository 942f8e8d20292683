/* tree.c: trees of tokens that wait for a commit.
 *
 * A sequence's tree record is truth: where the tree begins and its parents. It is published before
 * any layer's length covers nodes, and goes with the truncation or the commit that ends the tree.
 * A commit makes new blocks for what moves, each with a journal entry, so that until the decision
 * recovery goes back to the old ones. The decision is the goal that a truncation writes, too
 * (redo_len): with it, recovery keeps the new blocks and finishes.
 */
#include "cache/kv_internal.h"

#include <string.h>

static attn_status parents_check(struct kv *kv, uint64_t name, const int32_t *parents, uint32_t n)
{
    if (n == 0 || n > KV_MAX_TREE_NODES)
        return kv_fail(kv, ATTN_EINVAL, "sequence %llu: a tree of %u nodes, 1 to %d are allowed",
                       (unsigned long long)name, n, KV_MAX_TREE_NODES);
    for (uint32_t i = 0; i < n; i++)
        if (parents[i] < -1 || parents[i] >= (int64_t)i)
            return kv_fail(kv, ATTN_EINVAL,
                           "sequence %llu: the parent of node %u is %d, must be -1 or an earlier "
                           "node",
                           (unsigned long long)name, i, parents[i]);
    return ATTN_OK;
}

/* Whether the sequence may have this tree, or has it. */
static attn_status tree_check(struct kv *kv, uint32_t seq, uint32_t layer, uint32_t pos,
                              const int32_t *parents, uint32_t n)
{
    const struct kv_seq_rec *s = &kv->seqs[seq];
    const struct kv_tree_rec *t = &kv->trees[seq];
    unsigned long long name = s->name;
    if (layer >= kv->pools[s->pool].n_layers)
        return ATTN_OK; /* the append refuses it */
    attn_status st = parents_check(kv, s->name, parents, n);
    if (st != ATTN_OK)
        return st;
    if (kv_tree_n(t) == 0 && s->n_outstanding > 0) /* which may end behind where it begins */
        return kv_fail(kv, ATTN_EOVERLOAD, "sequence %llu: %u appends are outstanding", name,
                       s->n_outstanding);
    if (kv_tree_n(t) == 0 && s->longest > pos)
        return kv_fail(kv, ATTN_EINVAL,
                       "sequence %llu: a tree at %u, a layer has %u tokens: truncate first", name,
                       pos, s->longest);
    if (kv_tree_n(t) == 0 && pos != kv_lens(kv, seq)[layer])
        return kv_fail(kv, ATTN_EINVAL, "sequence %llu: a tree at %u, layer %u has %u tokens", name,
                       pos, layer, kv_lens(kv, seq)[layer]);
    bool is_same = kv_tree_n(t) == n && kv_tree_pos(t) == pos;
    for (uint32_t i = 0; i < n && is_same; i++)
        is_same = t->parents[i] == parents[i];
    if (kv_tree_n(t) > 0 && !is_same)
        return kv_fail(
            kv, ATTN_EINVAL,
            "sequence %llu: a tree of %u nodes at %u, it has another of %u at %u: commit "
            "or truncate first",
            name, n, pos, kv_tree_n(t), kv_tree_pos(t));
    return ATTN_OK;
}

attn_status kv_tree_reserve(struct kv *kv, kv_seq_id seq, uint32_t layer, uint32_t pos,
                            const int32_t *parents, uint32_t n, struct kv_effects *fx)
{
    const struct kv_seq_rec *s = kv_seq_live(kv, seq.index);
    if (s == NULL)
        return kv_fail(kv, ATTN_ENOTFOUND, "sequence index %u is not open", seq.index);
    attn_status st = tree_check(kv, seq.index, layer, pos, parents, n);
    if (st != ATTN_OK)
        return st;
    struct kv_tree_rec *t = &kv->trees[seq.index];
    bool is_new = kv_tree_n(t) == 0;
    if (is_new) {
        for (uint32_t i = 0; i < n; i++)
            t->parents[i] = (int8_t)parents[i];
        kv_publish64(&t->at, (uint64_t)pos << 32 | n);
    }
    st = kv_append_reserve_nodes(kv, seq, layer, pos, n, fx);
    if (st != ATTN_OK && is_new)
        kv_publish64(&t->at, 0);
    return st;
}

static attn_status path_check(struct kv *kv, uint32_t seq, const uint32_t *nodes, uint32_t n)
{
    const struct kv_seq_rec *s = &kv->seqs[seq];
    const struct kv_tree_rec *t = &kv->trees[seq];
    unsigned long long name = s->name;
    const uint32_t n_nodes = kv_tree_n(t), end = kv_tree_pos(t) + n_nodes;
    if (n_nodes == 0)
        return kv_fail(kv, ATTN_EINVAL, "sequence %llu: has no tree to commit a path of", name);
    if (s->n_outstanding > 0)
        return kv_fail(kv, ATTN_EOVERLOAD, "sequence %llu: %u appends are outstanding", name,
                       s->n_outstanding);
    if (kv->links[seq].n_paged_out > 0)
        return kv_paged_out(kv, seq);
    for (uint32_t i = 0; i < kv->pools[s->pool].n_layers && n > 0; i++)
        if (kv_lens(kv, seq)[i] != end)
            return kv_fail(kv, ATTN_EINVAL,
                           "sequence %llu: layer %u has %u tokens, not yet the tree's %u nodes at "
                           "%u",
                           name, i, kv_lens(kv, seq)[i], n_nodes, kv_tree_pos(t));
    int64_t parent = -1;
    for (uint32_t i = 0; i < n; parent = nodes[i], i++)
        if (nodes[i] >= n_nodes || t->parents[nodes[i]] != parent)
            return kv_fail(kv, ATTN_EINVAL,
                           "sequence %llu: nodes[%u] is %u of %u, its parent is not %lld: no path",
                           name, i, nodes[i], n_nodes, (long long)parent);
    return ATTN_OK;
}

/* Puts the old blocks back. */
static void moves_undo(struct kv *kv, uint32_t seq)
{
    struct kv_seq_rec *s = &kv->seqs[seq];
    struct kv_pool_rec *p = &kv->pools[s->pool];
    while (s->journal_head != 0) {
        const struct kv_journal_rec e = kv->journal[s->journal_head - 1];
        kv_publish32(&kv_own_row(kv, seq)[e.index], e.old_block);
        kv_journal_drop(kv, s);
        kv_block_unref(kv, p, e.new_block);
    }
}

/* New blocks for the tokens from the first that moves on, with those before it. */
static attn_status path_move(struct kv *kv, uint32_t seq, const uint32_t *nodes, uint32_t n,
                             const struct kv_token_ops *ops, struct kv_effects *fx)
{
    struct kv_token_copy list[KV_MAX_TREE_NODES];
    struct kv_seq_rec *s = &kv->seqs[seq];
    struct kv_pool_rec *p = &kv->pools[s->pool];
    const uint32_t pos = kv_tree_pos(&kv->trees[seq]), mask = p->block_tokens - 1;
    uint32_t n_stay = 0, n_listed = 0;
    while (n_stay < n && nodes[n_stay] == n_stay)
        n_stay++;
    if (n_stay == n)
        return ATTN_OK;
    const uint32_t first = (pos + n_stay) >> p->block_shift, past = kv_blocks_of(p, pos + n);
    const uint32_t n_patches = fx->n_patches;
    attn_status st = kv_append_room(kv, seq, 0, past - first, fx);
    if (st != ATTN_OK)
        return st;
    kv_forks_part(kv, seq, first << p->block_shift);
    uint32_t *row = kv_own_row(kv, seq), old[KV_MAX_TREE_NODES + 1], n_old = 0;
    for (uint32_t i = first; i < s->n_blocks && n_old < KV_MAX_TREE_NODES + 1; i++)
        old[n_old++] = row[i];
    for (uint32_t i = first; i < past; i++) {
        uint32_t block = kv_block_alloc(kv, p);
        kv_journal_put(kv, seq, i, row[i], block);
        kv_publish32(&row[i], block);
        fx->patches[fx->n_patches++] = (struct kv_patch){.row = seq, .index = i, .block = block};
    }
    for (uint32_t to = first << p->block_shift; to < pos + n && st == ATTN_OK; to++) {
        uint32_t from = to < pos ? to : pos + nodes[to - pos];
        list[n_listed++] =
            (struct kv_token_copy){old[(from >> p->block_shift) - first], from & mask,
                                   row[to >> p->block_shift], to & mask};
        if (n_listed == KV_MAX_TREE_NODES || to + 1 == pos + n) {
            st = ops->copy(ops->user, list, n_listed);
            n_listed = 0;
        }
    }
    if (st == ATTN_OK)
        return ATTN_OK;
    moves_undo(kv, seq);
    fx->n_patches = n_patches;
    return kv_fail(kv, st, "sequence %llu: its path could not be copied",
                   (unsigned long long)s->name);
}

attn_status kv_tree_commit(struct kv *kv, kv_seq_id seq, const uint32_t *nodes, uint32_t n,
                           uint64_t request, const struct kv_token_ops *ops, struct kv_effects *fx,
                           uint32_t *out_epoch)
{
    struct kv_seq_rec *s = kv_seq_live(kv, seq.index);
    if (s == NULL)
        return kv_fail(kv, ATTN_ENOTFOUND, "sequence index %u is not open", seq.index);
    attn_status st = path_check(kv, seq.index, nodes, n);
    if (st != ATTN_OK)
        return st;
    uint32_t epoch = kv_epoch_next(kv, kv_epoch_of(s));
    if (epoch == 0)
        return kv_fail(kv, ATTN_EOVERLOAD, "sequence %llu: epoch %u is the last",
                       (unsigned long long)s->name, kv_epoch_of(s));
    const uint32_t len = kv_tree_pos(&kv->trees[seq.index]) + n;
    st = path_move(kv, seq.index, nodes, n, ops, fx);
    if (st != ATTN_OK)
        return st;
    kv_epoch_announce(s, epoch, request);
    kv_seq_cut(kv, seq.index, len, epoch);
    if (s->has_ids)
        kv_prefix_publish(kv, seq.index);
    *out_epoch = epoch;
    return ATTN_OK;
}
