/* append.c: makes room for tokens before a batch, and counts them after it.
 *
 * Truth changes in single stores. A new table entry lies past every committed length, so it is not
 * truth until a length covers it. A replaced entry is truth: its journal entry is live before the
 * table changes, and until that entry is freed recovery puts the old block back. Commit frees the
 * entries, then moves the length; only then are the old blocks released.
 */
#include "cache/kv_internal.h"

static uint32_t *journal_table_entry(const struct kv *kv, const struct kv_journal_rec *e)
{
    return kv_row(kv, e->seq) + e->index;
}

void kv_journal_put(struct kv *kv, uint32_t seq, uint32_t index, uint32_t old_block,
                    uint32_t new_block)
{
    struct kv_heads *h = kv->heads;
    uint32_t i = h->journal_free;
    if (i != 0)
        h->journal_free = kv->journal[i - 1].next;
    else
        i = ++h->journal_n_fresh;
    h->journal_n_free--;

    struct kv_journal_rec *e = &kv->journal[i - 1];
    struct kv_seq_rec *s = &kv->seqs[seq];
    e->seq = seq;
    e->index = index;
    e->old_block = old_block;
    e->new_block = new_block;
    e->next = s->journal_head;
    kv_publish32(&e->state, KV_LIVE);
    s->journal_head = i;
}

void kv_journal_drop(struct kv *kv, struct kv_seq_rec *s)
{
    struct kv_heads *h = kv->heads;
    uint32_t i = s->journal_head;
    struct kv_journal_rec *e = &kv->journal[i - 1];
    kv_publish32(&e->state, 0);
    s->journal_head = e->next;
    e->next = h->journal_free;
    h->journal_free = i;
    h->journal_n_free++;
}

/* True if an entry that tokens [pos, end) touch has its block in idle memory. */
static bool needs_paged_out(const struct kv *kv, uint32_t seq, const struct kv_pool_rec *p,
                            uint32_t pos, uint64_t end)
{
    const uint32_t *row = kv_row(kv, seq);
    const uint64_t past = (end + p->block_tokens - 1) >> p->block_shift;
    if (kv->links[seq].n_paged_out == 0)
        return false;
    for (uint32_t i = pos >> p->block_shift; i < past && i < kv->seqs[seq].n_blocks; i++)
        if (kv_is_place(row[i]) && !kv_in_hole(kv, p, seq, i))
            return true;
    return false;
}

/* Counts the shared blocks among the entries that tokens [pos, end) touch, none of which is in idle
 * memory. Those that forks read count as shared. */
static uint32_t count_shared(const struct kv *kv, uint32_t seq, const struct kv_pool_rec *p,
                             uint32_t pos, uint64_t end)
{
    const uint32_t *row = kv_row(kv, seq);
    uint64_t past = (end + p->block_tokens - 1) >> p->block_shift;
    uint32_t n = 0;
    if (past > kv->seqs[seq].n_maybe_shared) /* so that the usual append looks at no block at all */
        past = kv->seqs[seq].n_maybe_shared;
    uint32_t i = pos >> p->block_shift;
    if (i >= past)
        return 0;
    uint32_t n_read = kv->seqs[seq].is_lazy ? kv->seqs[seq].n_blocks
                                            : kv_blocks_of(p, kv->links[seq].n_fork_tokens);
    for (; i < past; i++)
        n += i < n_read || kv_block(kv, p, row[i])->n_refs > 1;
    return n;
}

/* Unpublishes the blocks that only this sequence refers to, so that it may write them again. */
static void take_back(struct kv *kv, uint32_t seq, const struct kv_pool_rec *p, uint32_t pos,
                      uint32_t past)
{
    const uint32_t *row = kv_row(kv, seq);
    if (past > kv->seqs[seq].n_maybe_shared)
        past = kv->seqs[seq].n_maybe_shared;
    for (uint32_t i = pos >> p->block_shift; i < past; i++) {
        if (kv_block(kv, p, row[i])->n_refs > 1 || !kv_is_published(kv, p, row[i]))
            continue;
        kv_prefix_rewind(kv, seq, i);
        kv_unpublish(kv, p, row[i]);
    }
}

bool kv_append_copies(const struct kv *kv, kv_seq_id seq, uint32_t pos, uint32_t n_tokens)
{
    const struct kv_seq_rec *s = kv_seq_live(kv, seq.index);
    if (s == NULL)
        return false;
    const struct kv_pool_rec *p = &kv->pools[s->pool];
    const uint64_t end = (uint64_t)pos + n_tokens;
    return !needs_paged_out(kv, seq.index, p, pos, end) &&
           count_shared(kv, seq.index, p, pos, end) > 0;
}

/* Whose tokens a reserve is for. */
enum reserve_kind { OF_STEP, OF_COPY, OF_TREE };

static attn_status range_check(struct kv *kv, uint32_t seq, uint32_t layer, uint32_t pos,
                               uint32_t n_tokens, enum reserve_kind kind)
{
    const struct kv_seq_rec *s = &kv->seqs[seq];
    const struct kv_pool_rec *p = &kv->pools[s->pool];
    unsigned long long name = s->name;
    if (layer >= p->n_layers)
        return kv_fail(kv, ATTN_EINVAL, "sequence %llu: layer is %u, pool %s has %u", name, layer,
                       p->name, p->n_layers);
    if (n_tokens == 0)
        return kv_fail(kv, ATTN_EINVAL, "sequence %llu: n_tokens is 0", name);
    uint32_t len = kv_lens(kv, seq)[layer];
    if (pos > len)
        return kv_fail(kv, ATTN_EINVAL, "sequence %llu: pos is %u, layer %u has %u tokens", name,
                       pos, layer, len);
    if (kind != OF_TREE && (uint64_t)pos + n_tokens > kv_below_tree(kv, seq))
        return kv_fail(kv, ATTN_EINVAL,
                       "sequence %llu: pos %u + n_tokens %u, it has a tree of %u nodes at %u: "
                       "commit a path of it or truncate first",
                       name, pos, n_tokens, kv_tree_n(&kv->trees[seq]),
                       kv_tree_pos(&kv->trees[seq]));
    bool is_behind = kind == OF_COPY && pos >= (uint64_t)kv->holes[seq] << p->block_shift;
    if (p->window_tokens != 0 && !is_behind && kv_seq_sees(kv, (kv_seq_id){seq}, pos) != ATTN_OK)
        return ATTN_EINVAL;
    if ((uint64_t)pos + n_tokens > kv_max_tokens(kv, p))
        return kv_fail(kv, ATTN_EINVAL, "sequence %llu: pos %u + n_tokens %u is over %llu", name,
                       pos, n_tokens, (unsigned long long)kv_max_tokens(kv, p));
    return ATTN_OK;
}

attn_status kv_append_room(struct kv *kv, uint32_t seq, uint32_t n_new, uint32_t n_copies,
                           const struct kv_effects *fx)
{
    const struct kv_seq_rec *s = &kv->seqs[seq];
    struct kv_pool_rec *p = &kv->pools[s->pool];
    unsigned long long name = s->name;
    uint64_t n_blocks = (uint64_t)n_new + n_copies;
    uint64_t n_patches = n_blocks + (s->is_lazy || s->is_dirty ? s->n_blocks : 0);
    if (s->journal_head != 0)
        return kv_fail(kv, ATTN_EOVERLOAD, "sequence %llu: a copy is pending", name);
    if (n_copies > 0 && s->n_outstanding > 0)
        return kv_fail(kv, ATTN_EOVERLOAD, "sequence %llu: %u copies wait for %u appends", name,
                       n_copies, s->n_outstanding);
    if (s->n_outstanding == KV_MAX_OUTSTANDING)
        return kv_fail(kv, ATTN_EOVERLOAD, "sequence %llu: %u appends are outstanding", name,
                       s->n_outstanding);
    if (!kv_block_make_room(kv, p, kv_owner_of(s), n_blocks)) {
        kv_count(&kv->heads->stats.out_of_blocks, 1);
        if (p->n_reserved > 0)
            return kv_fail(kv, ATTN_ENOBLOCKS,
                           "sequence %llu: needs %llu blocks, pool %s has %u free for its session, "
                           "which has reserved %u and has %u; all have reserved %u",
                           name, (unsigned long long)n_blocks, p->name,
                           kv_n_free_for(kv, p, kv_owner_of(s)),
                           kv_reserved_by(kv, kv_owner_of(s), p),
                           *kv_charged_to(kv, kv_owner_of(s), p), p->n_reserved);
        if (p->n_pinned > 0)
            return kv_fail(kv, ATTN_ENOBLOCKS,
                           "sequence %llu: needs %llu blocks, pool %s has %u free, %u are pinned",
                           name, (unsigned long long)n_blocks, p->name, kv_n_available(p),
                           p->n_pinned);
        return kv_fail(kv, ATTN_ENOBLOCKS, "sequence %llu: needs %llu blocks, pool %s has %u free",
                       name, (unsigned long long)n_blocks, p->name, kv_n_available(p));
    }
    if (n_copies > kv->heads->journal_n_free)
        return kv_fail(kv, ATTN_EOVERLOAD, "sequence %llu: needs %u copies, the journal has %u",
                       name, n_copies, kv->heads->journal_n_free);
    if (n_patches > fx->patches_capacity - fx->n_patches ||
        n_copies > fx->copies_capacity - fx->n_copies)
        return kv_fail(kv, ATTN_EOVERLOAD, "sequence %llu: no room for %llu patches, %u copies",
                       name, (unsigned long long)n_patches, n_copies);
    return ATTN_OK;
}

static attn_status reserve(struct kv *kv, kv_seq_id seq, uint32_t layer, uint32_t pos,
                           uint32_t n_tokens, enum reserve_kind kind, struct kv_effects *fx)
{
    struct kv_seq_rec *s = kv_seq_live(kv, seq.index);
    if (s == NULL)
        return kv_fail(kv, ATTN_ENOTFOUND, "sequence index %u is not open", seq.index);
    attn_status st = range_check(kv, seq.index, layer, pos, n_tokens, kind);
    if (st != ATTN_OK)
        return st;
    struct kv_pool_rec *p = &kv->pools[s->pool];
    uint64_t end = (uint64_t)pos + n_tokens;
    if (needs_paged_out(kv, seq.index, p, pos, end))
        return kv_paged_out(kv, seq.index);
    uint32_t first = pos >> p->block_shift, past = kv_blocks_of(p, (uint32_t)end);
    if (first < s->n_maybe_shared)
        kv_forks_part(kv, seq.index, first << p->block_shift);
    uint32_t n_new = past > s->n_blocks ? past - s->n_blocks : 0;
    uint32_t n_copies = count_shared(kv, seq.index, p, pos, end);
    st = kv_append_room(kv, seq.index, n_new, n_copies, fx);
    if (st == ATTN_OK)
        st = kv_room_take(kv, s->tenant, s->name, kv->given[seq.index].n_ids, s->n_blocks + n_new,
                          kv_note_end(kv, seq.index), &kv->links[seq.index].n_pages);
    if (st != ATTN_OK)
        return st;

    kv_seq_materialize(kv, seq, fx);
    uint32_t *row = kv_own_row(kv, seq.index);
    take_back(kv, seq.index, p, pos, past);
    for (uint32_t i = pos >> p->block_shift; n_copies > 0; i++) {
        uint32_t old_block = row[i];
        if (kv_block(kv, p, old_block)->n_refs == 1)
            continue;
        uint32_t new_block = kv_block_alloc(kv, p);
        kv_journal_put(kv, seq.index, i, old_block, new_block);
        kv_publish32(&row[i], new_block); /* the journal entry now refers to old_block */
        fx->copies[fx->n_copies++] = (struct kv_copy){.src = old_block, .dst = new_block};
        fx->patches[fx->n_patches++] =
            (struct kv_patch){.row = seq.index, .index = i, .block = new_block};
        kv_count(&kv->heads->stats.copies, 1);
        n_copies--;
    }
    for (; n_new > 0; n_new--) {
        uint32_t i = s->n_blocks++;
        row[i] = kv_block_alloc(kv, p);
        kv_charge(kv, seq.index, 1);
        fx->patches[fx->n_patches++] =
            (struct kv_patch){.row = seq.index, .index = i, .block = row[i]};
    }
    s->n_outstanding++;
    return ATTN_OK;
}

attn_status kv_append_reserve(struct kv *kv, kv_seq_id seq, uint32_t layer, uint32_t pos,
                              uint32_t n_tokens, struct kv_effects *fx)
{
    return reserve(kv, seq, layer, pos, n_tokens, OF_STEP, fx);
}

attn_status kv_copy_reserve(struct kv *kv, kv_seq_id seq, uint32_t layer, uint32_t pos,
                            uint32_t n_tokens, struct kv_effects *fx)
{
    return reserve(kv, seq, layer, pos, n_tokens, OF_COPY, fx);
}

attn_status kv_append_reserve_nodes(struct kv *kv, kv_seq_id seq, uint32_t layer, uint32_t pos,
                                    uint32_t n_tokens, struct kv_effects *fx)
{
    return reserve(kv, seq, layer, pos, n_tokens, OF_TREE, fx);
}

void kv_seq_trim(struct kv *kv, uint32_t seq, uint32_t n_blocks)
{
    struct kv_seq_rec *s = &kv->seqs[seq];
    const uint32_t *row = kv_row(kv, seq);
    struct kv_pool_rec *p = &kv->pools[s->pool];
    if (s->is_lazy && s->n_blocks > n_blocks) { /* it has no references of its own */
        kv_charge(kv, seq, (int64_t)n_blocks - s->n_blocks);
        p->n_lazy -= s->n_blocks - n_blocks;
        s->n_blocks = n_blocks;
    }
    while (s->n_blocks > n_blocks) {
        if (kv_in_hole(kv, p, seq, --s->n_blocks))
            continue;
        if (kv_is_place(row[s->n_blocks])) {
            kv_idle_drop(kv, seq, s->n_blocks);
            continue;
        }
        kv_charge(kv, seq, -1);
        kv_block_unref(kv, p, row[s->n_blocks]);
    }
    if (s->n_maybe_shared > s->n_blocks)
        s->n_maybe_shared = s->n_blocks;
}

void kv_journal_end(struct kv *kv, uint32_t seq)
{
    struct kv_seq_rec *s = &kv->seqs[seq];
    while (s->journal_head != 0) {
        const struct kv_journal_rec *e = &kv->journal[s->journal_head - 1];
        uint32_t old_block = e->old_block;
        if (s->n_maybe_shared == e->index + 1)
            s->n_maybe_shared = e->index;
        kv_journal_drop(kv, s);
        kv_block_unref(kv, &kv->pools[s->pool], old_block);
    }
}

/* Ends a reserve. The last one to end releases the blocks that no length covers and publishes full
 * blocks; a tree that no layer has got is gone. */
static void reserve_end(struct kv *kv, uint32_t seq)
{
    struct kv_seq_rec *s = &kv->seqs[seq];
    if (--s->n_outstanding == 0) {
        if (s->longest <= kv_below_tree(kv, seq))
            kv_publish64(&kv->trees[seq].at, 0);
        kv_seq_trim(kv, seq, kv_blocks_of(&kv->pools[s->pool], s->longest));
        kv_room_trim(kv, seq);
    }
    if (s->n_outstanding == 0 && s->has_ids)
        kv_prefix_publish(kv, seq);
}

void kv_append_commit(struct kv *kv, kv_seq_id seq, uint32_t layer, uint32_t pos, uint32_t n_tokens)
{
    struct kv_seq_rec *s = kv_seq_live(kv, seq.index);
    if (s == NULL || s->n_outstanding == 0 || layer >= kv->pools[s->pool].n_layers)
        return;
    struct kv_pool_rec *p = &kv->pools[s->pool];
    uint32_t *len = &kv_lens(kv, seq.index)[layer];
    uint64_t end = (uint64_t)pos + n_tokens, covered = (uint64_t)s->n_blocks << p->block_shift;

    kv_journal_end(kv, seq.index);
    if (pos <= *len && end > *len && end <= covered && end <= UINT32_MAX)
        kv_publish32(len, (uint32_t)end);
    if (*len > s->longest)
        s->longest = *len;
    if (p->window_tokens != 0)
        kv_latest(kv, seq.index)[layer] = pos;
    reserve_end(kv, seq.index);
}

attn_status kv_append_cancel(struct kv *kv, kv_seq_id seq, uint32_t layer, uint32_t pos,
                             uint32_t n_tokens, struct kv_effects *fx)
{
    (void)layer, (void)pos, (void)n_tokens; /* unused: a copying reserve is alone */
    struct kv_seq_rec *s = kv_seq_live(kv, seq.index);
    if (s == NULL || s->n_outstanding == 0)
        return ATTN_OK;
    struct kv_pool_rec *p = &kv->pools[s->pool];
    uint32_t n = 0;
    for (uint32_t i = s->journal_head; i != 0; i = kv->journal[i - 1].next)
        n++;
    if (n > fx->patches_capacity - fx->n_patches)
        return kv_fail(kv, ATTN_EOVERLOAD, "sequence %llu: no room for %u patches",
                       (unsigned long long)s->name, n);

    while (s->journal_head != 0) {
        const struct kv_journal_rec *e = &kv->journal[s->journal_head - 1];
        uint32_t new_block = e->new_block;
        kv_publish32(journal_table_entry(kv, e), e->old_block);
        fx->patches[fx->n_patches++] =
            (struct kv_patch){.row = e->seq, .index = e->index, .block = e->old_block};
        kv_journal_drop(kv, s);
        kv_block_unref(kv, p, new_block);
    }
    reserve_end(kv, seq.index);
    return ATTN_OK;
}
