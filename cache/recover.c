/* recover.c: rebuilds derived state from truth, after a kill or from a predecessor's arena.
 *
 * Passes, each trusting only what the ones before have checked:
 *   1. owners, pools: seal, ranges                  5. lengths and table entries in range
 *   2. published blocks: seal                       6. journal entries: rolled back, freed
 *   3. appends that were answered: committed        7. blocks: which sequences share them
 *   4. sequences: seal, owner, pool                 8. references, lists, indexes, reservations
 * A sequence, pool or published block that fails is dropped and counted. A kill during recovery is
 * harmless: truth changes only as in any other operation, and derived state is rebuilt.
 */
#define _GNU_SOURCE /* MADV_REMOVE */
#include "cache/kv_internal.h"

#include <string.h>
#include <sys/mman.h>

enum { MAX_SANE_EPOCH = 1 << 30 };
#define MAX_SANE_CLOCK (UINT64_C(1) << 62)

/* Gives the pages back, so that they read as zero and take no memory. */
static void zero_range(uint8_t *from, uint8_t *to)
{
    if (madvise(from, (size_t)(to - from), MADV_REMOVE) != 0)
        memset(from, 0, (size_t)(to - from));
}

static void derived_reset(struct kv *kv)
{
    struct kv_heads *h = kv->heads;
    zero_range((uint8_t *)kv->blocks, (uint8_t *)h);
    h->seq_free = h->seq_n_fresh = 0;
    h->journal_free = h->journal_n_fresh = 0;
    h->journal_n_free = kv->journal_capacity;
    uint64_t *gauges[] = {&h->stats.blocks_total,     &h->stats.blocks_free,
                          &h->stats.blocks_used,      &h->stats.blocks_shared,
                          &h->stats.blocks_cached,    &h->stats.blocks_pinned,
                          &h->stats.blocks_published, &h->stats.blocks_tiered,
                          &h->stats.sequences,        &h->stats.pools,
                          &h->stats.blocks_reserved,  &h->stats.damaged};
    for (size_t i = 0; i < sizeof gauges / sizeof gauges[0]; i++)
        __atomic_store_n(gauges[i], 0, __ATOMIC_RELAXED);
}

static void seq_drop(struct kv *kv, uint32_t seq, uint32_t *n_dropped)
{
    if (kv->seqs[seq].state == 0)
        return;
    if (kv_epoch_of(&kv->seqs[seq]) < MAX_SANE_EPOCH) /* a higher one may be the damage */
        kv_epoch_end(kv, kv_epoch_of(&kv->seqs[seq]));
    kv_publish32(&kv->seqs[seq].state, 0);
    ++*n_dropped;
}

static void recover_owners(struct kv *kv)
{
    for (uint32_t i = 0; i < kv->config.max_owners; i++)
        if (kv->owners[i].label[KV_LABEL_BYTES - 1] != '\0')
            kv->owners[i].label[KV_LABEL_BYTES - 1] = '\0';
}

static void recover_pools(struct kv *kv)
{
    struct kv_heads *h = kv->heads;
    for (uint32_t i = 0; i < kv->config.max_pools; i++) {
        struct kv_pool_rec *p = &kv->pools[i];
        if (p->state == 0)
            continue;
        if (kv_pool_damage(kv, i) != NULL) {
            p->generation++;
            kv_publish32(&p->state, 0);
            kv_count(&h->stats.damaged, 1);
            continue;
        }
        p->n_blocks = kv_pool_size(p);
        p->block_shift = (uint32_t)__builtin_ctz(p->block_tokens);
        p->free_head = p->n_fresh = p->n_seqs = p->n_paged_out = 0;
        p->n_cached = p->n_pinned = p->n_refs = p->n_charged = p->n_lazy = 0;
        p->n_reserved = p->n_beyond = 0;
        memset(p->oldest, 0, sizeof p->oldest);
        memset(p->newest, 0, sizeof p->newest);
        memset(p->listed, 0, sizeof p->listed);
        p->n_free = p->n_blocks;
        if (p->n_ever_published > p->n_blocks)
            p->n_ever_published = p->n_blocks;
        kv_count(&h->stats.pools, 1);
        kv_count(&h->stats.blocks_total, p->n_blocks);
        kv_count(&h->stats.blocks_free, p->n_blocks);
    }
}

static void recover_published(struct kv *kv, uint32_t *n_dropped)
{
    bool is_clock_sane = kv->epochs->clock < MAX_SANE_CLOCK;
    for (uint32_t i = 0; i < kv->config.max_pools; i++) {
        struct kv_pool_rec *p = kv_pool_live(kv, i);
        for (uint32_t block = 0; p != NULL && block < p->n_ever_published; block++) {
            struct kv_published_rec *r = kv_published(kv, p, block);
            if (r->state == 0)
                continue;
            if (!is_clock_sane || kv_published_damage(kv, p, block) != NULL) {
                kv_publish32(&r->state, 0);
                ++*n_dropped;
                continue;
            }
            kv_retained_recover(kv, p, block);
            kv_published_link(kv, p, block);
        }
    }
    if (!is_clock_sane)
        kv_publish64(&kv->epochs->clock, 0);
}

/* A commit of a tree's path had decided: the blocks that it replaced are not put back. */
static void journal_keep_new(struct kv *kv, uint32_t seq)
{
    for (uint32_t i = 0; i < kv->journal_capacity; i++)
        if (kv->journal[i].state == KV_LIVE && kv->journal[i].seq == seq)
            kv_publish32(&kv->journal[i].state, 0);
}

static void recover_records(struct kv *kv, uint32_t *n_dropped)
{
    for (uint32_t seq = 0; seq < kv->config.max_sequences; seq++) {
        struct kv_seq_rec *s = &kv->seqs[seq];
        if (s->state == 0)
            continue;
        if (kv_seq_damage(kv, seq) != NULL) {
            seq_drop(kv, seq, n_dropped);
            continue;
        }
        const struct kv_pool_rec *p = &kv->pools[s->pool];
        uint32_t *lens = kv_lens(kv, seq);
        if (s->redo_len != 0) {
            journal_keep_new(kv, seq);
            for (uint32_t i = 0; i < p->n_layers; i++)
                if (lens[i] > s->redo_len - 1)
                    lens[i] = s->redo_len - 1;
            if (kv->given[seq].n_ids > s->redo_len - 1)
                kv->given[seq].n_ids = s->redo_len - 1;
            kv_publish64(&kv->trees[seq].at, 0);
            if (s->made > kv_epoch_of(s)) /* the truncation announced it */
                kv_publish64(&s->epoch_owner, kv_epoch_owner(s->made, kv_owner_of(s)));
            if (kv_hole_is_past(p, kv_longest_layer(kv, seq)))
                kv_publish32(&kv->holes[seq], 0);
            kv_publish32(&s->redo_len, 0);
            if (kv_hole_is_damaged(kv, seq)) {
                seq_drop(kv, seq, n_dropped);
                continue;
            }
        }
        if (kv->holes[seq] != 0)
            kv_hole_recover(kv, seq, kv_longest_layer(kv, seq));
        if (s->made == kv_epoch_of(s))
            kv_request_see(kv, kv_owner_of(s), s->request);
        kv_retention_recover(kv, seq);
        s->longest = kv_longest_layer(kv, seq);
        if (s->longest <= kv_below_tree(kv, seq)) /* no layer got its nodes */
            kv_publish64(&kv->trees[seq].at, 0);
        s->n_blocks = s->n_maybe_shared = kv_blocks_of(p, s->longest);
        s->n_outstanding = 0;
        s->is_lazy = kv->given[seq].row_of != 0;
        s->is_dirty = 0;
        s->journal_head = 0;
        s->has_ids = kv->given[seq].n_ids > 0;
        kv->given[seq].n_looked_at = kv->given[seq].parent = 0;
        kv->given[seq].parent_serial = 0;
    }
}

/* Rolls the journal back. An entry of a closed sequence is left over and just freed. An entry that
 * does not fit its sequence shows that one of them is damaged: then the sequence is dropped. */
static void recover_journal(struct kv *kv, uint32_t *n_dropped)
{
    for (uint32_t i = 0; i < kv->journal_capacity; i++) {
        struct kv_journal_rec *e = &kv->journal[i];
        if (e->state == 0)
            continue;
        const struct kv_seq_rec *s = kv_seq_live(kv, e->seq);
        if (s != NULL) {
            uint32_t n_blocks = kv->pools[s->pool].n_blocks;
            uint32_t *row = kv_own_row(kv, e->seq);
            if (e->state == KV_LIVE && !s->is_lazy && e->index < s->n_blocks &&
                e->old_block < n_blocks &&
                (row[e->index] == e->old_block || row[e->index] == e->new_block))
                kv_publish32(&row[e->index], e->old_block);
            else
                seq_drop(kv, e->seq, n_dropped);
        }
        kv_publish32(&e->state, 0);
    }
}

/* False if the block is published for another index or another tenant. */
static bool may_hold(const struct kv *kv, const struct kv_pool_rec *p, const struct kv_seq_rec *s,
                     uint32_t index, uint32_t block)
{
    const struct kv_published_rec *r = kv_published(kv, p, block);
    return !kv_is_published(kv, p, block) || (r->index == index && r->tenant == s->tenant);
}

/* Drops sequences that share a block in a way that no fork can make: at different indices of their
 * tables, or across tenants. During this pass, a block's next holds the first sequence seen with
 * it. */
static void recover_sharing(struct kv *kv, uint32_t *n_dropped)
{
    for (uint32_t seq = 0; seq < kv->config.max_sequences; seq++) {
        const struct kv_seq_rec *s = kv_seq_live(kv, seq);
        if (s == NULL || s->is_lazy)
            continue;
        const uint32_t *row = kv_row(kv, seq);
        const struct kv_pool_rec *p = &kv->pools[s->pool];
        for (uint32_t i = 0; i < s->n_blocks; i++) {
            if (kv_in_hole(kv, p, seq, i))
                continue;
            if (kv_is_place(row[i])) { /* claimed twice: the first keeps the pages; a wrong claim
                                          fails its checksum later */
                if (kv_place_claim(kv, p, row[i]))
                    continue;
                seq_drop(kv, seq, n_dropped);
                break;
            }
            struct kv_block_rec *b = kv_block(kv, p, row[i]);
            if (!may_hold(kv, p, s, i, row[i])) {
                kv_unpublish(kv, p, row[i]);
                seq_drop(kv, seq, n_dropped);
                ++*n_dropped;
                break;
            }
            if (b->next == 0) {
                b->next = seq + 1;
                continue;
            }
            uint32_t first = b->next - 1;
            const struct kv_seq_rec *f = &kv->seqs[first];
            if (first == seq || f->tenant != s->tenant || i >= f->n_blocks ||
                kv_row(kv, first)[i] != row[i] || kv_in_hole(kv, p, first, i)) {
                seq_drop(kv, first, n_dropped);
                seq_drop(kv, seq, n_dropped);
                break;
            }
        }
    }
}

/* Counts references and links sequences: first those with a table of their own, then lazy forks. */
static void recover_references(struct kv *kv, bool of_lazy, uint32_t *n_dropped)
{
    struct kv_heads *h = kv->heads;
    for (uint32_t seq = 0; seq < kv->config.max_sequences; seq++) {
        struct kv_seq_rec *s = kv_seq_live(kv, seq);
        if (s == NULL || s->is_lazy != of_lazy)
            continue;
        if (of_lazy && !kv_may_read(kv, seq, kv->given[seq].row_of - 1, s->longest)) {
            seq_drop(kv, seq, n_dropped); /* its source was dropped */
            continue;
        }
        if (kv_index_find(kv, s->tenant, s->name) != 0) {
            seq_drop(kv, seq, n_dropped);
            continue;
        }
        struct kv_pool_rec *p = &kv->pools[s->pool];
        const uint32_t *row = kv_row(kv, seq);
        for (uint32_t i = 0; i < s->n_blocks && !of_lazy; i++) {
            if (kv_in_hole(kv, p, seq, i))
                continue;
            if (kv_is_place(row[i])) {
                kv_place_claim(kv, p, row[i]);
                kv_idle_found_paged_out(kv, seq);
                continue;
            }
            if (++kv_block(kv, p, row[i])->n_refs == 2)
                kv_count(&h->stats.blocks_shared, 1);
            if (p->n_fresh <= row[i])
                p->n_fresh = row[i] + 1;
        }
        kv_index_put(kv, seq);
        kv_owner_link(kv, seq);
        if (of_lazy)
            kv_fork_link(kv, seq);
        if (of_lazy && s->longest == 0) /* an interrupted truncation to 0 */
            kv_fork_materialize(kv, seq);
        p->n_seqs++;
        kv_count(&h->stats.sequences, 1);
        if (h->seq_n_fresh <= seq)
            h->seq_n_fresh = seq + 1;
    }
}

/* Rebuilds free lists, lowest ids first, and the lists of cached blocks, by last use. */
static void recover_free_lists(struct kv *kv)
{
    struct kv_heads *h = kv->heads;
    for (uint32_t i = 0; i < kv->config.max_pools; i++) {
        struct kv_pool_rec *p = kv_pool_live(kv, i);
        if (p == NULL)
            continue;
        uint32_t cached = 0;
        for (uint32_t block = p->n_ever_published; block-- > p->n_fresh;)
            if (kv_is_published(kv, p, block))
                p->n_fresh = block + 1;
        for (uint32_t block = p->n_fresh; block-- > 0;) {
            struct kv_block_rec *b = kv_block(kv, p, block);
            bool is_cached = b->n_refs == 0 && kv_is_published(kv, p, block);
            if (is_cached) {
                b->next = cached;
                cached = block + 1;
                p->n_cached++;
                p->n_free--;
                kv_count(&h->stats.blocks_free, -1);
                kv_count(&h->stats.blocks_cached, 1);
                continue;
            }
            if (b->n_refs == 0) {
                b->next = p->free_head;
                p->free_head = block + 1;
                continue;
            }
            b->next = 0;
            p->n_free--;
            kv_count(&h->stats.blocks_free, -1);
            kv_count(&h->stats.blocks_used, 1);
        }
        kv_lru_build(kv, p, cached);
    }
    for (uint32_t seq = h->seq_n_fresh; seq-- > 0;) {
        if (kv_seq_live(kv, seq) != NULL)
            continue;
        kv->links[seq] = (struct kv_seq_links){.next = h->seq_free};
        h->seq_free = seq + 1;
    }
}

attn_status kv_recover(struct kv *kv, uint32_t *out_dropped)
{
    uint32_t n_dropped = 0;
    derived_reset(kv);
    kv_pages_reset(kv);
    recover_owners(kv);
    recover_pools(kv);
    recover_published(kv, &n_dropped);
    kv_early_recover(kv);
    recover_records(kv, &n_dropped);
    recover_journal(kv, &n_dropped);
    recover_sharing(kv, &n_dropped);
    kv_pages_reset(kv); /* claimed again below, by the sequences that are left */
    recover_references(kv, false, &n_dropped);
    recover_references(kv, true, &n_dropped);
    recover_free_lists(kv);
    kv_room_recover(kv);
    kv_reservations_recover(kv);
    kv_moved_recover(kv);
    kv_events_begin(kv);
    kv_count(&kv->heads->stats.damaged, n_dropped);
    *out_dropped = n_dropped;
    return ATTN_OK;
}

attn_status kv_pools_drop(struct kv *kv, kv_pool_id first, uint32_t *out_dropped)
{
    uint32_t n_pools = 0, n_sequences;
    for (uint32_t i = first.index; i < kv->config.max_pools; i++) {
        bool was_made = kv->pools[i].state != 0;
        n_pools += was_made;
        kv->pools[i].generation += was_made;
        kv_publish32(&kv->pools[i].state, 0);
    }
    attn_status st = kv_recover(kv, &n_sequences);
    kv_count(&kv->heads->stats.damaged, n_pools);
    *out_dropped = n_pools + n_sequences;
    return st;
}
