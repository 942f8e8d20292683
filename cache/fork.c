/* fork.c: lazy forks, which nothing was written to yet.
 *
 * A lazy fork has neither a table nor ids of its own: it reads its source's, up to its own length,
 * so that its cost does not depend on the prefix. It has no references either: the source's keep
 * the blocks. It gets all three (is materialized) when it is written to or computed with; the
 * caller gets the table's effects then. A fork of a lazy fork reads the same table: reads never go
 * through two.
 *
 * Before a source changes or drops what forks read, the longest of these is materialized, and the
 * others read that one's table from then on. So a long table is copied once for all of them. A fork
 * of no tokens has its own table, so the longest one always has tokens.
 *
 * Truth is row_of, one word: the fork's table and ids are written before it becomes 0 or names
 * another sequence.
 *
 * Where windows free blocks, forks have tables from the start. A fork that reads a damaged table is
 * dropped with its source.
 */
#include "cache/kv_internal.h"

#include <string.h>

void kv_fork_link(struct kv *kv, uint32_t seq)
{
    uint32_t src = kv->given[seq].row_of - 1;
    struct kv_seq_links *l = &kv->links[seq], *s = &kv->links[src];
    l->fork_prev = 0;
    l->fork_next = s->fork;
    if (s->fork != 0)
        kv->links[s->fork - 1].fork_prev = seq + 1;
    s->fork = seq + 1;
    if (s->n_fork_tokens < kv->seqs[seq].longest)
        s->n_fork_tokens = kv->seqs[seq].longest;
    kv->seqs[seq].is_lazy = 1;
    kv->pools[kv->seqs[seq].pool].n_lazy += kv->seqs[seq].n_blocks;
    kv->seqs[seq].n_maybe_shared = kv->seqs[seq].n_blocks;
    if (kv->seqs[src].n_maybe_shared < kv->seqs[seq].n_blocks)
        kv->seqs[src].n_maybe_shared = kv->seqs[seq].n_blocks;
}

void kv_fork_unlink(struct kv *kv, uint32_t seq)
{
    struct kv_seq_links *l = &kv->links[seq], *s = &kv->links[kv->given[seq].row_of - 1];
    if (l->fork_prev != 0)
        kv->links[l->fork_prev - 1].fork_next = l->fork_next;
    else
        s->fork = l->fork_next;
    if (l->fork_next != 0)
        kv->links[l->fork_next - 1].fork_prev = l->fork_prev;
    if (s->fork == 0)
        s->n_fork_tokens = 0;
    l->fork_prev = l->fork_next = 0;
    kv->pools[kv->seqs[seq].pool].n_lazy -= kv->seqs[seq].n_blocks;
    kv->seqs[seq].is_lazy = 0;
}

void kv_row_ref(struct kv *kv, uint32_t seq, uint32_t n_blocks)
{
    struct kv_seq_rec *s = &kv->seqs[seq];
    struct kv_pool_rec *p = &kv->pools[s->pool];
    const uint32_t *row = kv_own_row(kv, seq);
    s->n_blocks = s->n_maybe_shared = n_blocks;
    for (uint32_t i = 0; i < n_blocks; i++)
        if (!kv_in_hole(kv, p, seq, i))
            kv_block_ref(kv, p, row[i]);
}

void kv_fork_own_ids(struct kv *kv, uint32_t seq)
{
    struct kv_given_rec *g = &kv->given[seq];
    if (!kv->seqs[seq].is_lazy || g->has_own_ids)
        return;
    memcpy(kv_own_ids(kv, seq), kv_given_ids(kv, seq), g->n_ids * sizeof(uint32_t));
    kv_publish32(&g->has_own_ids, 1);
}

void kv_fork_materialize(struct kv *kv, uint32_t seq)
{
    struct kv_seq_rec *s = &kv->seqs[seq];
    if (!s->is_lazy)
        return;
    kv_fork_own_ids(kv, seq);
    memcpy(kv_own_row(kv, seq), kv_row(kv, seq), s->n_blocks * sizeof(uint32_t));
    uint32_t src = kv->given[seq].row_of - 1;
    kv_fork_unlink(kv, seq);
    kv_publish32(&kv->given[seq].row_of, 0);
    kv->given[seq].has_own_ids = 0;
    kv_row_ref(kv, seq, s->n_blocks);
    if (kv->seqs[src].n_maybe_shared < s->n_blocks)
        kv->seqs[src].n_maybe_shared = s->n_blocks;
    s->is_dirty = s->n_blocks > 0;
}

void kv_forks_part(struct kv *kv, uint32_t seq, uint32_t len)
{
    uint32_t heir = UINT32_MAX;
    if (kv->links[seq].n_fork_tokens <= len)
        return;
    for (uint32_t i = kv->links[seq].fork; i != 0; i = kv->links[i - 1].fork_next)
        if (heir == UINT32_MAX || kv->seqs[i - 1].longest > kv->seqs[heir].longest)
            heir = i - 1;
    if (kv->seqs[heir].longest <= len) { /* n_fork_tokens was too high: longer forks are gone */
        kv->links[seq].n_fork_tokens = kv->seqs[heir].longest;
        return;
    }
    bool are_ids_its_own = kv->given[heir].has_own_ids;
    kv_fork_materialize(kv, heir);
    for (uint32_t i; (i = kv->links[seq].fork) != 0;) {
        if (are_ids_its_own || kv->given[i - 1].n_ids > kv->given[heir].n_ids)
            kv_fork_own_ids(kv, i - 1);
        kv_fork_unlink(kv, i - 1);
        kv_publish32(&kv->given[i - 1].row_of, heir + 1);
        kv_fork_link(kv, i - 1);
    }
}

attn_status kv_seq_materialize(struct kv *kv, kv_seq_id seq, struct kv_effects *fx)
{
    struct kv_seq_rec *s = kv_seq_live(kv, seq.index);
    if (s == NULL || (!s->is_lazy && !s->is_dirty))
        return ATTN_OK;
    if (s->n_blocks > fx->patches_capacity - fx->n_patches)
        return kv_fail(kv, ATTN_EOVERLOAD, "sequence %llu: no room for %u patches",
                       (unsigned long long)s->name, s->n_blocks);
    kv_fork_materialize(kv, seq.index);
    const uint32_t *row = kv_own_row(kv, seq.index);
    for (uint32_t i = 0; i < s->n_blocks; i++)
        if (!kv_in_hole(kv, &kv->pools[s->pool], seq.index, i))
            fx->patches[fx->n_patches++] =
                (struct kv_patch){.row = seq.index, .index = i, .block = row[i]};
    s->is_dirty = 0;
    return ATTN_OK;
}
