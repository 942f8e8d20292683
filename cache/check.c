/* check.c: recomputes derived state from truth, in memory of its own, and compares. Changes nothing
 * in the arena.
 */
#include "cache/kv_internal.h"

#include <stdlib.h>

struct scratch {
    uint32_t *n_refs; /* [max_blocks] from table and journal entries */
    uint32_t *user; /* [max_blocks] a sequence whose table has it, plus one */
    uint32_t *n_seqs; /* [max_pools] */
    uint32_t *n_paged_out; /* [max_pools] */
    struct kv_pages pages;
    uint64_t n_sequences, n_lazy, n_owned, n_used, n_shared, n_cached, n_pinned, n_published,
        n_tiered, n_reserved;
};

#define DIFFER(...) kv_fail(kv, ATTN_EINTERNAL, __VA_ARGS__)

/* A block in idle memory: its pages must belong to no other entry. */
static attn_status check_place(struct kv *kv, uint32_t seq, uint32_t index, struct scratch *x)
{
    const struct kv_pool_rec *p = &kv->pools[kv->seqs[seq].pool];
    uint32_t entry = kv_row(kv, seq)[index], page = entry & ~KV_PLACE;
    if (!kv_place_is_possible(kv, p, entry))
        return DIFFER("sequence index %u: table entry %u is page %u", seq, index, page);
    for (uint32_t i = page; i < page + p->idle_pages; i++) {
        if (x->pages.map[i / 64] >> i % 64 & 1)
            return DIFFER("sequence index %u: entry %u has page %u, as another", seq, index, i);
        x->pages.map[i / 64] |= UINT64_C(1) << i % 64;
    }
    if (index < kv->given[seq].n_looked_at)
        return DIFFER("sequence index %u: entry %u is page %u, of %u that are published", seq,
                      index, page, kv->given[seq].n_looked_at);
    x->pages.n_used += p->idle_pages;
    x->n_paged_out[kv->seqs[seq].pool]++;
    return ATTN_OK;
}

static attn_status check_table(struct kv *kv, uint32_t seq, struct scratch *x)
{
    const struct kv_seq_rec *s = &kv->seqs[seq];
    const struct kv_pool_rec *p = &kv->pools[s->pool];
    const uint32_t *row = kv_row(kv, seq);
    if (s->is_lazy) /* its source's table is checked there */
        return ATTN_OK;
    uint32_t n_paged_out = 0;
    for (uint32_t i = 0; i < s->n_blocks; i++) {
        if (kv_in_hole(kv, p, seq, i))
            continue;
        if (kv_is_place(row[i])) {
            attn_status st = check_place(kv, seq, i, x);
            if (st != ATTN_OK)
                return st;
            n_paged_out++;
            continue;
        }
        if (row[i] >= p->n_blocks)
            return DIFFER("sequence index %u: table entry %u is block %u of %u", seq, i, row[i],
                          p->n_blocks);
        uint64_t at = (uint64_t)p->first_block + row[i];
        const struct kv_published_rec *r = kv_published(kv, p, row[i]);
        if (kv_is_published(kv, p, row[i]) && (r->index != i || r->tenant != s->tenant))
            return DIFFER("sequence index %u: entry %u is block %u, published as %u of tenant %u",
                          seq, i, row[i], r->index, r->tenant);
        x->n_refs[at]++;
        if (x->user[at] == 0) {
            x->user[at] = seq + 1;
            continue;
        }
        uint32_t first = x->user[at] - 1;
        if (first == seq || kv->seqs[first].tenant != s->tenant || i >= kv->seqs[first].n_blocks ||
            kv_row(kv, first)[i] != row[i] || kv_in_hole(kv, p, first, i))
            return DIFFER("sequence indices %u and %u may not share block %u", first, seq, row[i]);
    }
    if (n_paged_out != kv->links[seq].n_paged_out)
        return DIFFER("sequence index %u: %u blocks are away, %u counted", seq, n_paged_out,
                      kv->links[seq].n_paged_out);
    return ATTN_OK;
}

static attn_status check_journal_list(struct kv *kv, uint32_t seq, struct scratch *x,
                                      uint32_t *n_entries)
{
    const struct kv_seq_rec *s = &kv->seqs[seq];
    const struct kv_pool_rec *p = &kv->pools[s->pool];
    if (s->journal_head != 0 && s->n_outstanding != 1)
        return DIFFER("sequence index %u: a copy is pending beside %u reserves", seq,
                      s->n_outstanding);
    for (uint32_t i = s->journal_head; i != 0; i = kv->journal[i - 1].next) {
        if (i > kv->journal_capacity || ++*n_entries > kv->journal_capacity)
            return DIFFER("sequence index %u: its journal list is broken", seq);
        const struct kv_journal_rec *e = &kv->journal[i - 1];
        if (e->state != KV_LIVE || e->seq != seq || e->index >= s->n_blocks ||
            e->old_block >= p->n_blocks || kv_row(kv, seq)[e->index] != e->new_block)
            return DIFFER("sequence index %u: journal entry %u is not of its table", seq, i - 1);
        x->n_refs[(uint64_t)p->first_block + e->old_block]++;
    }
    return ATTN_OK;
}

static attn_status check_given(struct kv *kv, uint32_t seq)
{
    const struct kv_seq_rec *s = &kv->seqs[seq];
    const struct kv_given_rec *g = &kv->given[seq];
    const struct kv_pool_rec *p = &kv->pools[s->pool];
    uint32_t n = g->n_ids < s->longest ? g->n_ids : s->longest;
    if (s->has_ids != (g->n_ids > 0) || g->n_looked_at > n >> p->block_shift ||
        (g->parent == 0) != (g->n_looked_at == 0) || g->parent > p->n_blocks)
        return DIFFER("sequence index %u: %u ids, %u blocks of %u tokens looked at", seq, g->n_ids,
                      g->n_looked_at, n);
    return ATTN_OK;
}

static attn_status check_sequence(struct kv *kv, uint32_t seq, struct scratch *x,
                                  uint32_t *n_entries)
{
    const struct kv_seq_rec *s = &kv->seqs[seq];
    const char *damage = kv_seq_damage(kv, seq);
    if (damage != NULL)
        return DIFFER("sequence index %u: its %s is damaged", seq, damage);
    uint32_t longest = 0;
    for (uint32_t i = 0; i < kv->pools[s->pool].n_layers; i++)
        if (kv_lens(kv, seq)[i] > longest)
            longest = kv_lens(kv, seq)[i];
    uint32_t n_blocks = kv_blocks_of(&kv->pools[s->pool], longest);
    if (s->longest != longest)
        return DIFFER("sequence index %u: longest is %u, its layers have %u", seq, s->longest,
                      longest);
    if (s->is_lazy != (kv->given[seq].row_of != 0) || (s->is_lazy && s->n_outstanding > 0))
        return DIFFER("sequence index %u: its table is %s", seq,
                      s->is_lazy ? "passed as another's" : "another's");
    x->n_lazy += s->is_lazy;
    if (s->redo_len != 0)
        return DIFFER("sequence index %u: redo_len is %u", seq, s->redo_len);
    if (s->n_blocks > kv->config.max_seq_blocks || s->n_blocks < n_blocks ||
        (s->n_blocks > n_blocks && s->n_outstanding == 0))
        return DIFFER("sequence index %u: holds %u blocks, its tokens take %u", seq, s->n_blocks,
                      n_blocks);
    if (kv_index_find(kv, s->tenant, s->name) != seq + 1)
        return DIFFER("sequence index %u: the name index does not find it", seq);
    x->n_sequences++;
    x->n_seqs[s->pool]++;
    x->n_owned += kv_owner_of(s) != KV_NO_OWNER;
    attn_status st = check_given(kv, seq);
    if (st == ATTN_OK)
        st = check_table(kv, seq, x);
    return st != ATTN_OK ? st : check_journal_list(kv, seq, x, n_entries);
}

/* Every fork without a table is in the list of the sequence whose table it reads. */
static attn_status check_forks(struct kv *kv, const struct scratch *x)
{
    uint64_t n = 0;
    for (uint32_t seq = 0; seq < kv->config.max_sequences; seq++) {
        const struct kv_seq_rec *s = kv_seq_live(kv, seq);
        uint32_t prev = 0;
        for (uint32_t i = s == NULL ? 0 : kv->links[seq].fork; i != 0;
             prev = i, i = kv->links[i - 1].fork_next)
            if (kv_seq_live(kv, i - 1) == NULL || kv->given[i - 1].row_of != seq + 1 ||
                kv->links[i - 1].fork_prev != prev || n++ == x->n_lazy ||
                kv->seqs[i - 1].longest > kv->links[seq].n_fork_tokens ||
                kv->seqs[i - 1].n_blocks > s->n_maybe_shared)
                return DIFFER("sequence index %u: the list of its forks is broken at %u", seq,
                              i - 1);
    }
    if (n != x->n_lazy)
        return DIFFER("forks: %llu in lists, %llu without a table", (unsigned long long)n,
                      (unsigned long long)x->n_lazy);
    return ATTN_OK;
}

/* Entries that count as private have the only reference. Runs once all references are counted. */
static attn_status check_private(struct kv *kv, const struct scratch *x)
{
    for (uint32_t seq = 0; seq < kv->config.max_sequences; seq++) {
        const struct kv_seq_rec *s = kv_seq_live(kv, seq);
        if (s == NULL)
            continue;
        if (s->is_lazy)
            continue;
        if (s->n_maybe_shared > s->n_blocks)
            return DIFFER("sequence index %u: %u of %u blocks may be shared", seq,
                          s->n_maybe_shared, s->n_blocks);
        const struct kv_pool_rec *p = &kv->pools[s->pool];
        for (uint32_t i = s->n_maybe_shared; i < s->n_blocks; i++) {
            if (kv_in_hole(kv, p, seq, i) || kv_is_place(kv_row(kv, seq)[i]))
                continue;
            uint32_t block = kv_row(kv, seq)[i], n_refs = x->n_refs[p->first_block + block];
            if (n_refs != 1 || kv_is_published(kv, p, block))
                return DIFFER("sequence index %u: entry %u passes as private, has %u references%s",
                              seq, i, n_refs, n_refs == 1 ? ", is published" : "");
        }
    }
    return ATTN_OK;
}

static attn_status check_sequences(struct kv *kv, struct scratch *x)
{
    const struct kv_heads *h = kv->heads;
    uint32_t n_entries = 0, n_live_entries = 0, n_free = 0;
    for (uint32_t seq = 0; seq < kv->config.max_sequences; seq++) {
        if (kv->seqs[seq].state == 0)
            continue;
        if (seq >= h->seq_n_fresh)
            return DIFFER("sequence index %u: in use, but counted as fresh", seq);
        attn_status st = check_sequence(kv, seq, x, &n_entries);
        if (st != ATTN_OK)
            return st;
    }
    for (uint32_t i = 0; i < kv->journal_capacity; i++)
        n_live_entries += kv->journal[i].state != 0;
    if (n_live_entries != n_entries || h->journal_n_free != kv->journal_capacity - n_entries)
        return DIFFER("journal: %u live entries, %u in lists, %u free of %u", n_live_entries,
                      n_entries, h->journal_n_free, kv->journal_capacity);
    for (uint32_t i = h->journal_free; i != 0; i = kv->journal[i - 1].next)
        if (i > h->journal_n_fresh || kv->journal[i - 1].state != 0 ||
            n_free++ == h->journal_n_fresh)
            return DIFFER("journal: the free list is broken at entry %u", i - 1);
    if (n_free + n_entries != h->journal_n_fresh)
        return DIFFER("journal: %u free and %u live of %u entries", n_free, n_entries,
                      h->journal_n_fresh);
    if (x->n_sequences != h->stats.sequences)
        return DIFFER("sequences: %llu open, %llu counted", (unsigned long long)x->n_sequences,
                      (unsigned long long)h->stats.sequences);
    uint64_t n_seq_free = 0;
    for (uint32_t i = h->seq_free; i != 0; i = kv->links[i - 1].next)
        if (i > h->seq_n_fresh || kv->seqs[i - 1].state != 0 || n_seq_free++ == h->seq_n_fresh)
            return DIFFER("sequences: the free list is broken at index %u", i - 1);
    if (n_seq_free + x->n_sequences != h->seq_n_fresh)
        return DIFFER("sequences: %llu free and %llu open of %u records",
                      (unsigned long long)n_seq_free, (unsigned long long)x->n_sequences,
                      h->seq_n_fresh);
    return ATTN_OK;
}

static attn_status check_lookup(struct kv *kv, const struct scratch *x)
{
    uint64_t n_slots = 0, n_owned = 0;
    for (uint64_t i = 0; i <= kv->index_mask; i++)
        n_slots += kv->slots[i].seq != 0;
    if (n_slots != x->n_sequences)
        return DIFFER("name index: %llu entries, %llu sequences", (unsigned long long)n_slots,
                      (unsigned long long)x->n_sequences);
    for (uint32_t owner = 0; owner < kv->config.max_owners; owner++) {
        uint32_t prev = 0;
        for (uint32_t i = kv->owned[owner]; i != 0; prev = i, i = kv->links[i - 1].next)
            if (kv_seq_live(kv, i - 1) == NULL || kv_owner_of(&kv->seqs[i - 1]) != owner ||
                kv->links[i - 1].prev != prev || n_owned++ == x->n_owned)
                return DIFFER("owner %u: the list is broken at sequence index %u", owner, i - 1);
    }
    if (n_owned != x->n_owned)
        return DIFFER("owners: %llu in lists, %llu sequences have one", (unsigned long long)n_owned,
                      (unsigned long long)x->n_owned);
    return ATTN_OK;
}

/* One list of cached blocks: in order, of this priority and time to live. */
static attn_status check_list(struct kv *kv, const struct kv_pool_rec *p, uint32_t priority,
                              uint32_t list, uint32_t n_most, uint32_t *n_listed)
{
    uint32_t prev = 0, at = p->oldest[priority][list];
    if ((at != 0) != (p->listed[priority] >> list & 1))
        return DIFFER("pool %s: list %u of priority %u is counted wrongly", p->name, list,
                      priority);
    for (; at != 0; prev = at, at = kv_block(kv, p, at - 1)->next) {
        if (at > p->n_blocks || (*n_listed)++ == n_most)
            return DIFFER("pool %s: the list of cached blocks is broken at %u", p->name, at - 1);
        const struct kv_retained_rec *t = kv_retained(kv, p, at - 1);
        if (kv_block(kv, p, at - 1)->n_refs != 0 || !kv_is_published(kv, p, at - 1) ||
            kv_block(kv, p, at - 1)->prev != prev || t->priority != priority ||
            kv_list_of(t) != list || t->is_pinned ||
            (prev != 0 && kv_published(kv, p, prev - 1)->used > kv_published(kv, p, at - 1)->used))
            return DIFFER("pool %s: the list of cached blocks is broken at %u", p->name, at - 1);
    }
    if (p->newest[priority][list] != prev)
        return DIFFER("pool %s: the list of cached blocks has another end", p->name);
    return ATTN_OK;
}

/* Published blocks of a pool are undamaged, can be found, and are listed in the order of
 * eviction. */
static attn_status check_published(struct kv *kv, const struct kv_pool_rec *p, struct scratch *x)
{
    uint32_t n_cached = 0, n_pinned = 0, n_listed = 0;
    for (uint32_t block = 0; block < p->n_ever_published; block++) {
        const struct kv_published_rec *r = kv_published(kv, p, block);
        if (r->state == 0)
            continue;
        const char *damage = kv_published_damage(kv, p, block);
        if (damage != NULL || block >= p->n_fresh)
            return DIFFER("pool %s: published block %u: its %s is damaged", p->name, block,
                          damage != NULL ? damage : "pool");
        uint32_t at = kv->prefixes[r->key[0] & kv->prefix_mask], n = 0;
        while (at != 0 && at != p->first_block + block + 1 && n++ < kv->config.max_blocks)
            at = kv->blocks[at - 1].chain;
        if (at != p->first_block + block + 1)
            return DIFFER("pool %s: published block %u is not found", p->name, block);
        x->n_published++;
        bool is_cached = x->n_refs[p->first_block + block] == 0;
        n_cached += is_cached;
        n_pinned += is_cached && kv_retained(kv, p, block)->is_pinned;
    }
    for (uint32_t i = 0; i < KV_N_PRIORITIES * KV_N_LISTS; i++) {
        attn_status st =
            check_list(kv, p, i / KV_N_LISTS, i % KV_N_LISTS, n_cached - n_pinned, &n_listed);
        if (st != ATTN_OK)
            return st;
    }
    if (n_listed + n_pinned != n_cached || p->n_cached != n_cached || p->n_pinned != n_pinned)
        return DIFFER("pool %s: %u blocks cached, %u listed, %u pinned, %u and %u counted", p->name,
                      n_cached, n_listed, n_pinned, p->n_cached, p->n_pinned);
    x->n_pinned += n_pinned;
    x->n_cached += n_cached;
    return ATTN_OK;
}

static attn_status check_prefixes(struct kv *kv, const struct scratch *x)
{
    uint64_t n = 0;
    for (uint64_t i = 0; i <= kv->prefix_mask; i++)
        for (uint32_t at = kv->prefixes[i]; at != 0; at = kv->blocks[at - 1].chain)
            if (n++ == x->n_published)
                return DIFFER("published blocks: slot %llu has one too many",
                              (unsigned long long)i);
    if (n != x->n_published)
        return DIFFER("published blocks: %llu there, %llu found",
                      (unsigned long long)x->n_published, (unsigned long long)n);
    return ATTN_OK;
}

static attn_status check_pool(struct kv *kv, uint32_t pool, struct scratch *x)
{
    const struct kv_pool_rec *p = &kv->pools[pool];
    const char *damage = kv_pool_damage(kv, pool);
    if (damage != NULL)
        return DIFFER("pool index %u: its %s is damaged", pool, damage);
    if (p->n_blocks != kv_pool_size(p))
        return DIFFER("pool %s: has %u blocks, counts %u", p->name, kv_pool_size(p), p->n_blocks);
    uint32_t n_used = 0, n_listed = 0;
    if (p->n_paged_out != x->n_paged_out[pool])
        return DIFFER("pool %s: %u blocks are away, %u counted", p->name, x->n_paged_out[pool],
                      p->n_paged_out);
    x->n_tiered += p->n_paged_out;
    if (p->n_seqs != x->n_seqs[pool])
        return DIFFER("pool %s: %u sequences open, %u counted", p->name, x->n_seqs[pool],
                      p->n_seqs);
    for (uint32_t block = 0; block < p->n_blocks; block++) {
        uint32_t expected = x->n_refs[(uint64_t)p->first_block + block];
        n_used += expected > 0;
        x->n_shared += expected > 1;
        if (block >= p->n_fresh && expected > 0)
            return DIFFER("pool %s: block %u is in use, but counted as fresh", p->name, block);
        if (block < p->n_fresh && kv_block(kv, p, block)->n_refs != expected)
            return DIFFER("pool %s: block %u has %u references, counted %u", p->name, block,
                          kv_block(kv, p, block)->n_refs, expected);
    }
    for (uint32_t i = p->free_head; i != 0; i = kv_block(kv, p, i - 1)->next)
        if (i > p->n_fresh || kv_block(kv, p, i - 1)->n_refs != 0 ||
            kv_is_published(kv, p, i - 1) || n_listed++ == p->n_fresh)
            return DIFFER("pool %s: the free list is broken at block %u", p->name, i - 1);
    attn_status st = check_published(kv, p, x);
    if (st != ATTN_OK)
        return st;
    if (n_listed + n_used + p->n_cached != p->n_fresh ||
        p->n_free != p->n_blocks - n_used - p->n_cached)
        return DIFFER("pool %s: %u blocks used, %u cached, %u listed, %u ever used, %u counted "
                      "free",
                      p->name, n_used, p->n_cached, n_listed, p->n_fresh, p->n_free);
    x->n_used += n_used;
    x->n_reserved += p->n_reserved;
    return kv_reservations_check(kv, pool);
}

static attn_status check_moved(struct kv *kv)
{
    uint64_t last = 0;
    for (uint32_t i = 0; i < KV_MAX_MOVED; i++) {
        if (kv->moved[i].state == 0)
            continue;
        if (kv_moved_is_damaged(kv, i))
            return DIFFER("entry %u of moved sequences is damaged", i);
        if (kv->moved[i].serial > last)
            last = kv->moved[i].serial;
    }
    if (last != kv->heads->moved)
        return DIFFER("moved sequences: the latest is %llu, counted %llu", (unsigned long long)last,
                      (unsigned long long)kv->heads->moved);
    return ATTN_OK;
}

static attn_status check_pools(struct kv *kv, struct scratch *x)
{
    const struct kv_stats *s = &kv->heads->stats;
    uint64_t n_pools = 0, n_blocks = 0;
    for (uint32_t i = 0; i < kv->config.max_pools; i++) {
        if (kv->pools[i].state == 0)
            continue;
        attn_status st = check_pool(kv, i, x);
        if (st != ATTN_OK)
            return st;
        n_pools++;
        n_blocks += kv->pools[i].n_blocks;
    }
    if (s->pools != n_pools || s->blocks_total != n_blocks || s->blocks_used != x->n_used ||
        s->blocks_free != n_blocks - x->n_used - x->n_cached || s->blocks_shared != x->n_shared ||
        s->blocks_cached != x->n_cached || s->blocks_pinned != x->n_pinned ||
        s->blocks_published != x->n_published)
        return DIFFER("stats: %llu pools, %llu blocks, %llu used, %llu shared, %llu cached, %llu "
                      "published counted; %llu, %llu, %llu, %llu, %llu, %llu there",
                      (unsigned long long)s->pools, (unsigned long long)s->blocks_total,
                      (unsigned long long)s->blocks_used, (unsigned long long)s->blocks_shared,
                      (unsigned long long)s->blocks_cached, (unsigned long long)s->blocks_published,
                      (unsigned long long)n_pools, (unsigned long long)n_blocks,
                      (unsigned long long)x->n_used, (unsigned long long)x->n_shared,
                      (unsigned long long)x->n_cached, (unsigned long long)x->n_published);
    if (s->table_bytes != kv_room_count(kv))
        return DIFFER("stats: table_bytes is %llu, not %llu", (unsigned long long)s->table_bytes,
                      (unsigned long long)kv_room_count(kv));
    if (s->blocks_reserved != x->n_reserved)
        return DIFFER("stats: %llu blocks reserved counted, %llu there",
                      (unsigned long long)s->blocks_reserved, (unsigned long long)x->n_reserved);
    if (s->blocks_tiered != x->n_tiered)
        return DIFFER("stats: %llu blocks tiered counted, %llu there",
                      (unsigned long long)s->blocks_tiered, (unsigned long long)x->n_tiered);
    if (!kv_idle_count_pages(kv, &x->pages))
        return DIFFER("idle memory: %u pages are taken, others or %u have owners", kv->pages.n_used,
                      x->pages.n_used);
    attn_status st = check_moved(kv);
    return st == ATTN_OK ? check_prefixes(kv, x) : st;
}

attn_status kv_check(struct kv *kv)
{
    struct scratch x = {
        .n_refs = calloc(kv->config.max_blocks, sizeof *x.n_refs),
        .user = calloc(kv->config.max_blocks, sizeof *x.user),
        .n_seqs = calloc(kv->config.max_pools, sizeof *x.n_seqs),
        .n_paged_out = calloc(kv->config.max_pools, sizeof *x.n_paged_out),
        .pages = {.map = calloc((size_t)kv->pages.n / 64 + 1, sizeof *x.pages.map)},
    };
    attn_status st;
    if (x.n_refs == NULL || x.user == NULL || x.n_seqs == NULL || x.n_paged_out == NULL ||
        x.pages.map == NULL)
        st = kv_fail(kv, ATTN_ENOMEM, "check: no memory for %u blocks", kv->config.max_blocks);
    else
        st = check_sequences(kv, &x);
    if (st == ATTN_OK) {
        kv_promote_count_refs(kv, x.n_refs);
        kv_seq_import_count_refs(kv, x.n_refs);
        kv_idle_count_refs(kv, x.n_refs);
    }
    if (st == ATTN_OK)
        st = check_forks(kv, &x);
    if (st == ATTN_OK)
        st = check_private(kv, &x);
    if (st == ATTN_OK)
        st = check_lookup(kv, &x);
    if (st == ATTN_OK)
        st = check_pools(kv, &x);
    free(x.n_refs);
    free(x.user);
    free(x.n_seqs);
    free(x.n_paged_out);
    free(x.pages.map);
    return st;
}
