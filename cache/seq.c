/* seq.c: sequence records: open, fork, truncate, adopt, close.
 *
 * A record is written whole while its state is free, and storing the state publishes it; closing
 * clears the state first. Truncation writes its goal into the record before it shortens the first
 * layer, so that recovery finishes what was begun. Opening with tokens fills the row of a new
 * record with published blocks, as fork fills it with the source's.
 */
#include "cache/kv_internal.h"

#include <string.h>

void kv_owner_link(struct kv *kv, uint32_t seq)
{
    uint32_t owner = kv_owner_of(&kv->seqs[seq]);
    kv->links[seq].prev = kv->links[seq].next = 0;
    if (owner == KV_NO_OWNER)
        return;
    uint32_t head = kv->owned[owner];
    kv->links[seq].next = head;
    if (head != 0)
        kv->links[head - 1].prev = seq + 1;
    kv->owned[owner] = seq + 1;
}

static void owner_unlink(struct kv *kv, uint32_t seq)
{
    uint32_t owner = kv_owner_of(&kv->seqs[seq]);
    if (owner == KV_NO_OWNER)
        return;
    struct kv_seq_links l = kv->links[seq];
    if (l.prev != 0)
        kv->links[l.prev - 1].next = l.next;
    else
        kv->owned[owner] = l.next;
    if (l.next != 0)
        kv->links[l.next - 1].prev = l.prev;
}

static attn_status owner_check(struct kv *kv, uint32_t owner)
{
    if (owner < kv->config.max_owners || owner == KV_NO_OWNER)
        return ATTN_OK;
    return kv_fail(kv, ATTN_EINVAL, "owner is %u, at most %u", owner, kv->config.max_owners - 1);
}

static attn_status seen_before(struct kv *kv, uint64_t name, uint64_t request)
{
    return kv_fail(
        kv, ATTN_ESTALE,
        "sequence %llu: request %llu was carried out before, or is older than the last %d "
        "that opened, forked or adopted",
        (unsigned long long)name, (unsigned long long)request, KV_MAX_SEEN);
}

/* Checks whether the sequence may be made. If an earlier copy of the same request has made it, sets
 * out_is_repeat and out_repeat. */
static attn_status birth_check(struct kv *kv, const struct kv_birth *b, kv_seq_id *out_repeat,
                               bool *out_is_repeat)
{
    attn_status st = owner_check(kv, b->owner);
    if (st != ATTN_OK)
        return st;
    uint32_t old = kv_index_find(kv, b->tenant, b->name);
    bool is_repeat = old != 0 && kv_seq_is_repeat(kv, (kv_seq_id){old - 1}, b->owner, b->request) &&
                     kv->seqs[old - 1].pool == b->pool;
    if (!is_repeat && kv_owner_has_seen(kv, b->owner, b->request))
        return seen_before(kv, b->name, b->request);
    if (old != 0 && !is_repeat)
        return kv_fail(kv, ATTN_EEXIST, "sequence %llu is already open",
                       (unsigned long long)b->name);
    if (old == 0 && kv->heads->stats.sequences == kv->config.max_sequences)
        return kv_fail(kv, ATTN_EOVERLOAD,
                       "sequence %llu: all %u sequences are open (cache.max_sequences)",
                       (unsigned long long)b->name, kv->config.max_sequences);
    if (old == 0 && kv_epoch_first(kv) == 0)
        return kv_fail(kv, ATTN_EOVERLOAD, "sequence %llu: no epoch is left",
                       (unsigned long long)b->name);
    if (is_repeat)
        *out_repeat = (kv_seq_id){old - 1};
    *out_is_repeat = is_repeat;
    return ATTN_OK;
}

uint32_t kv_record_next(const struct kv *kv)
{
    const struct kv_heads *h = kv->heads;
    return h->seq_free != 0 ? h->seq_free - 1 : h->seq_n_fresh;
}

uint32_t kv_record_take(struct kv *kv, const struct kv_birth *b)
{
    struct kv_heads *h = kv->heads;
    uint32_t seq = kv_record_next(kv);
    if (h->seq_free != 0)
        h->seq_free = kv->links[seq].next;
    else
        h->seq_n_fresh++;
    kv->links[seq] = (struct kv_seq_links){.n_pages = b->n_pages};
    kv->given[seq] = (struct kv_given_rec){.adapter = b->tokens.adapter,
                                           .n_cached = b->n_cached,
                                           .n_ids = b->tokens.n,
                                           .n_retentions = b->tokens.n_retentions,
                                           .row_of = b->row_of}; /* and no note */
    if (b->tokens.n_retentions > 0)
        memcpy(kv->given[seq].retention, b->tokens.retention,
               b->tokens.n_retentions * sizeof b->tokens.retention[0]);
    if (b->tokens.n > 0 && b->row_of == 0)
        memcpy(kv_own_ids(kv, seq), b->tokens.ids, b->tokens.n * sizeof b->tokens.ids[0]);
    struct kv_seq_rec *s = &kv->seqs[seq];
    *s = (struct kv_seq_rec){
        .tenant = b->tenant,
        .name = b->name,
        .request = b->request,
        .made = kv_epoch_first(kv),
        .epoch_owner = kv_epoch_owner(kv_epoch_first(kv), b->owner),
        .pool = (uint16_t)b->pool,
        .has_ids = b->tokens.n > 0,
        .longest = b->len,
    };
    s->seal = kv_seq_seal(kv, seq);
    for (uint32_t i = 0; i < kv->pools[b->pool].n_layers; i++)
        kv_lens(kv, seq)[i] = b->len;
    kv->trees[seq].at = 0;
    kv->holes[seq] = b->hole;
    if (kv->pools[b->pool].window_tokens != 0)
        memset(kv_latest(kv, seq), 0, kv->pools[b->pool].n_layers * sizeof kv_latest(kv, seq)[0]);
    return seq;
}

void kv_record_publish(struct kv *kv, uint32_t seq)
{
    kv_publish32(&kv->seqs[seq].state, KV_LIVE);
    kv_index_put(kv, seq);
    kv_owner_link(kv, seq);
    kv_request_see(kv, kv_owner_of(&kv->seqs[seq]), kv->seqs[seq].request);
    kv->pools[kv->seqs[seq].pool].n_seqs++;
    kv_count(&kv->heads->stats.sequences, 1);
}

static attn_status too_many_ids(struct kv *kv, uint64_t name, const struct kv_pool_rec *p,
                                uint64_t n)
{
    uint64_t most = kv_max_tokens(kv, p);
    if (most > kv->config.max_seq_tokens)
        most = kv->config.max_seq_tokens;
    if (n <= most)
        return ATTN_OK;
    return kv_fail(kv, ATTN_EINVAL, "sequence %llu: ids of %llu tokens are over %llu",
                   (unsigned long long)name, (unsigned long long)n, (unsigned long long)most);
}

static void count_hits(struct kv *kv, const struct kv_pool_rec *p, const struct kv_prefix *m,
                       uint32_t n_ids)
{
    struct kv_stats *stats = &kv->heads->stats;
    kv_count(&stats->prefix_hits, m->n_blocks);
    kv_count(&stats->prefix_misses, (n_ids >> p->block_shift) - m->n_blocks);
    kv_count(&stats->prefix_hit_tokens, (int64_t)m->n_blocks << p->block_shift);
}

/* Leaves at most n blocks of what was found. */
static void cut_match(const struct kv *kv, const struct kv_pool_rec *p, const uint32_t *row,
                      uint32_t n, struct kv_prefix *m)
{
    if (m->n_blocks <= n)
        return;
    m->n_blocks = n;
    m->block = n == 0 ? 0 : row[n - 1] + 1;
    m->serial = n == 0 ? 0 : kv_published(kv, p, row[n - 1])->serial;
}

attn_status kv_seq_open_with(struct kv *kv, uint32_t tenant, uint64_t name, kv_pool_id pool,
                             uint32_t owner, uint64_t request, const struct kv_tokens *t,
                             struct kv_effects *fx, kv_seq_id *out_seq)
{
    struct kv_pool_rec *p = kv_pool_live(kv, pool.index);
    if (p == NULL)
        return kv_fail(kv, ATTN_ENOTFOUND, "pool index %u: no such pool", pool.index);
    struct kv_birth b = {.tenant = tenant,
                         .name = name,
                         .pool = pool.index,
                         .owner = owner,
                         .request = request,
                         .tokens = *t};
    bool is_repeat;
    attn_status st = birth_check(kv, &b, out_seq, &is_repeat);
    if (st != ATTN_OK || is_repeat)
        return st;
    st = too_many_ids(kv, name, p, t->n);
    if (st == ATTN_OK)
        st = kv_retention_check(kv, name, t->retention, t->n_retentions);
    if (st != ATTN_OK)
        return st;
    st = kv_room_take(kv, tenant, name, t->n, t->n >> p->block_shift, 0, &b.n_pages);
    if (st != ATTN_OK)
        return st;
    struct kv_prefix m = kv_prefix_match(kv, p, tenant, t, kv_own_row(kv, kv_record_next(kv)));
    cut_match(kv, p, kv_own_row(kv, kv_record_next(kv)), kv_n_shareable(kv, p, owner), &m);
    if (m.n_blocks > fx->patches_capacity - fx->n_patches) {
        kv_room_give(kv, tenant, kv_record_next(kv), b.n_pages);
        return kv_fail(kv, ATTN_EOVERLOAD, "sequence %llu: no room for %u patches",
                       (unsigned long long)name, m.n_blocks);
    }
    b.n_cached = b.len = m.n_blocks << p->block_shift;
    uint32_t seq = kv_record_take(kv, &b);
    kv_record_publish(kv, seq);
    kv_row_ref(kv, seq, m.n_blocks);
    kv_charge(kv, seq, m.n_blocks);
    for (uint32_t i = 0; i < m.n_blocks; i++) {
        fx->patches[fx->n_patches++] =
            (struct kv_patch){.row = seq, .index = i, .block = kv_row(kv, seq)[i]};
        kv_retained(kv, p, kv_row(kv, seq)[i])->was_found = 1; /* in no list while referenced */
        if (t->n_retentions > 0)
            kv_retain(kv, seq, i, kv_row(kv, seq)[i]);
    }
    kv->given[seq].n_looked_at = m.n_blocks;
    kv->given[seq].parent = m.block;
    kv->given[seq].parent_serial = m.serial;
    kv_room_trim(kv, seq);
    count_hits(kv, p, &m, t->n);
    kv_count(&kv->heads->stats.opens, 1);
    *out_seq = (kv_seq_id){seq};
    return ATTN_OK;
}

attn_status kv_seq_tokens(struct kv *kv, kv_seq_id seq, uint32_t pos, const uint32_t *ids,
                          uint32_t n)
{
    struct kv_seq_rec *s = kv_seq_live(kv, seq.index);
    if (s == NULL)
        return kv_fail(kv, ATTN_ENOTFOUND, "sequence index %u is not open", seq.index);
    struct kv_given_rec *g = &kv->given[seq.index];
    const uint32_t *known = kv_given_ids(kv, seq.index);
    unsigned long long name = s->name;
    if (n == 0)
        return kv_fail(kv, ATTN_EINVAL, "sequence %llu: ids of 0 tokens", name);
    if (pos > g->n_ids)
        return kv_fail(kv, ATTN_EINVAL, "sequence %llu: ids from pos %u, those of %u are known",
                       name, pos, g->n_ids);
    attn_status st = too_many_ids(kv, s->name, &kv->pools[s->pool], (uint64_t)pos + n);
    if (st != ATTN_OK)
        return st;
    for (uint32_t i = 0; i < n && pos + i < g->n_ids; i++)
        if (known[pos + i] != ids[i])
            return kv_fail(kv, ATTN_EINVAL,
                           "sequence %llu: the id of token %u is %u, was %u: truncate first", name,
                           pos + i, ids[i], known[pos + i]);
    if (pos + n <= g->n_ids)
        return ATTN_OK;
    st = kv_room_take(kv, s->tenant, name, pos + n, s->n_blocks, kv_note_end(kv, seq.index),
                      &kv->links[seq.index].n_pages);
    if (st != ATTN_OK)
        return st;
    kv_fork_own_ids(kv, seq.index);
    memcpy(kv_own_ids(kv, seq.index) + pos, ids, n * sizeof ids[0]);
    kv_publish32(&g->n_ids, pos + n);
    s->has_ids = 1;
    if (s->n_outstanding == 0)
        kv_prefix_publish(kv, seq.index);
    return ATTN_OK;
}

attn_status kv_seq_find(struct kv *kv, uint32_t tenant, uint64_t name, kv_seq_id *out_seq)
{
    uint32_t seq = kv_index_find(kv, tenant, name);
    if (seq == 0)
        return kv_fail(kv, ATTN_ENOTFOUND, "sequence %llu: not found", (unsigned long long)name);
    *out_seq = (kv_seq_id){seq - 1};
    return ATTN_OK;
}

void kv_seq_info(const struct kv *kv, kv_seq_id seq, struct kv_seq_info *out)
{
    const struct kv_seq_rec *s = kv_seq_live(kv, seq.index);
    *out = (struct kv_seq_info){0};
    if (s == NULL)
        return;
    const struct kv_pool_rec *p = &kv->pools[s->pool];
    uint32_t hole = p->window_tokens == 0 ? 0 : kv->holes[seq.index];
    *out = (struct kv_seq_info){
        .name = s->name,
        .tenant = s->tenant,
        .pool = {s->pool},
        .epoch = kv_epoch_of(s),
        .owner = kv_owner_of(s),
        .n_blocks = s->n_blocks,
        .hole_first = hole == 0 ? 0 : kv_blocks_of(p, p->kept_tokens),
        .hole_past = hole,
        .is_notified = !s->is_lazy && !s->is_dirty,
        .block_table = kv_row(kv, seq.index),
        .n_paged_out = kv->links[seq.index].n_paged_out,
        .layer_len = kv_lens(kv, seq.index),
        .tree_pos = kv_tree_pos(&kv->trees[seq.index]),
        .n_nodes = kv_tree_n(&kv->trees[seq.index]),
        .n_cached = kv->given[seq.index].n_cached,
        .n_ids = kv->given[seq.index].n_ids,
        .adapter = kv->given[seq.index].adapter,
    };
}

attn_status kv_seq_fork(struct kv *kv, kv_seq_id src, uint64_t new_name, uint32_t len,
                        uint32_t owner, uint64_t request, kv_seq_id *out_seq)
{
    struct kv_seq_rec *s = kv_seq_live(kv, src.index);
    if (s == NULL)
        return kv_fail(kv, ATTN_ENOTFOUND, "sequence index %u is not open", src.index);
    struct kv_birth b = {.tenant = s->tenant,
                         .name = new_name,
                         .pool = s->pool,
                         .owner = owner,
                         .request = request,
                         .len = len};
    bool is_repeat;
    attn_status st = birth_check(kv, &b, out_seq, &is_repeat);
    if (st != ATTN_OK || is_repeat)
        return st;
    struct kv_pool_rec *p = &kv->pools[s->pool];
    unsigned long long src_name = s->name;
    for (uint32_t i = 0; i < p->n_layers; i++)
        if (kv_lens(kv, src.index)[i] < len)
            return kv_fail(kv, ATTN_EINVAL, "sequence %llu: fork at %u, layer %u has %u tokens",
                           src_name, len, i, kv_lens(kv, src.index)[i]);
    if (len > kv_below_tree(kv, src.index))
        return kv_fail(kv, ATTN_EINVAL,
                       "sequence %llu: fork at %u, its tree at %u is not committed", src_name, len,
                       kv_below_tree(kv, src.index));
    if (kv_hole_is_past(p, len))
        b.hole = 0;
    else if (kv_seq_sees(kv, src, len) == ATTN_OK)
        b.hole = kv->holes[src.index];
    else
        return ATTN_EINVAL;
    if (s->journal_head != 0)
        return kv_fail(kv, ATTN_EOVERLOAD, "sequence %llu: a copy is pending", src_name);
    if (kv->links[src.index].n_paged_out > 0)
        return kv_paged_out(kv, src.index);
    uint32_t n_blocks = kv_blocks_of(p, len);
    bool has_table = p->window_tokens != 0 || n_blocks == 0; /* windows free what it reads */
    bool has_own_ids = s->is_lazy && kv->given[src.index].has_own_ids;
    if (n_blocks > kv_n_shareable(kv, p, owner))
        return kv_fail(kv, ATTN_ENOBLOCKS,
                       "sequence %llu: fork at %u has %u blocks, pool %s has %u for its session: "
                       "others have reserved the rest",
                       src_name, len, n_blocks, p->name, kv_n_shareable(kv, p, owner));
    const struct kv_given_rec *g = &kv->given[src.index];
    b.tokens = (struct kv_tokens){kv_given_ids(kv, src.index), g->n_ids < len ? g->n_ids : len,
                                  g->adapter, g->retention, g->n_retentions};
    st = kv_room_take(kv, s->tenant, new_name, b.tokens.n, n_blocks, 0, &b.n_pages);
    if (st != ATTN_OK)
        return st;
    if (!has_table)
        b.row_of = s->is_lazy ? g->row_of : src.index + 1;
    uint32_t seq = kv_record_take(kv, &b);
    if (has_table)
        memcpy(kv_own_row(kv, seq), kv_row(kv, src.index), n_blocks * sizeof(uint32_t));
    if (!has_table && has_own_ids) {
        memcpy(kv_own_ids(kv, seq), b.tokens.ids, b.tokens.n * sizeof(uint32_t));
        kv->given[seq].has_own_ids = 1;
    }
    kv_record_publish(kv, seq);
    kv->seqs[seq].n_blocks = n_blocks;
    if (has_table) {
        kv_row_ref(kv, seq, n_blocks);
        kv->seqs[seq].is_dirty = n_blocks > 0;
    } else {
        kv_fork_link(kv, seq);
    }
    kv_charge(kv, seq, kv_charge_of(kv, seq));
    if (s->n_maybe_shared < n_blocks)
        s->n_maybe_shared = n_blocks;
    kv->given[seq].n_looked_at = g->n_looked_at;
    kv->given[seq].parent = g->parent;
    kv->given[seq].parent_serial = g->parent_serial;
    kv_prefix_rewind(kv, seq, len >> p->block_shift);
    kv_count(&kv->heads->stats.forks, 1);
    *out_seq = (kv_seq_id){seq};
    return ATTN_OK;
}

/* The next epoch of the sequence; 0, with the sentence: it has the last one. */
static uint32_t epoch_next(struct kv *kv, const struct kv_seq_rec *s)
{
    uint32_t epoch = kv_epoch_next(kv, kv_epoch_of(s));
    if (epoch == 0)
        kv_fail(kv, ATTN_EOVERLOAD, "sequence %llu: epoch %u is the last",
                (unsigned long long)s->name, kv_epoch_of(s));
    return epoch;
}

void kv_seq_cut(struct kv *kv, uint32_t seq, uint32_t len, uint32_t epoch)
{
    struct kv_seq_rec *s = &kv->seqs[seq];
    const struct kv_pool_rec *p = &kv->pools[s->pool];
    struct kv_given_rec *g = &kv->given[seq];
    uint32_t *lens = kv_lens(kv, seq), *latest = kv_latest(kv, seq);
    bool has_no_hole = kv_hole_is_past(p, len);
    kv_forks_part(kv, seq, len);
    kv_publish32(&s->redo_len, len + 1);
    kv_journal_end(kv, seq);
    for (uint32_t i = 0; i < p->n_layers; i++)
        if (lens[i] > len)
            lens[i] = len;
    for (uint32_t i = 0; i < p->n_layers && p->window_tokens != 0; i++)
        if (latest[i] > len)
            latest[i] = len;
    if (g->n_ids > len)
        g->n_ids = len;
    s->has_ids = g->n_ids > 0;
    kv_publish64(&kv->trees[seq].at, 0);
    kv_publish64(&s->epoch_owner, kv_epoch_owner(epoch, kv_owner_of(s)));
    s->longest = len;
    kv_prefix_rewind(kv, seq, len >> p->block_shift);
    kv_seq_trim(kv, seq, kv_blocks_of(p, len));
    if (has_no_hole)
        kv_publish32(&kv->holes[seq], 0);
    kv_publish32(&s->redo_len, 0);
    if (len == 0)
        kv_fork_materialize(kv, seq);
    kv_room_trim(kv, seq);
}

attn_status kv_seq_truncate(struct kv *kv, kv_seq_id seq, uint32_t len, uint64_t request,
                            uint32_t *out_epoch)
{
    struct kv_seq_rec *s = kv_seq_live(kv, seq.index);
    if (s == NULL)
        return kv_fail(kv, ATTN_ENOTFOUND, "sequence index %u is not open", seq.index);
    if (len > s->longest)
        return kv_fail(kv, ATTN_EINVAL, "sequence %llu: len is %u, its longest layer has %u",
                       (unsigned long long)s->name, len, s->longest);
    if (s->n_outstanding > 0)
        return kv_fail(kv, ATTN_EOVERLOAD, "sequence %llu: %u appends are outstanding",
                       (unsigned long long)s->name, s->n_outstanding);
    if (len > kv_below_tree(kv, seq.index))
        return kv_fail(kv, ATTN_EINVAL,
                       "sequence %llu: len is %u, it has a tree at %u: commit a path of it, or "
                       "truncate to there or less",
                       (unsigned long long)s->name, len, kv_below_tree(kv, seq.index));
    const struct kv_pool_rec *p = &kv->pools[s->pool];
    bool has_no_hole = kv_hole_is_past(p, len);
    if (!has_no_hole && kv_seq_sees(kv, seq, len) != ATTN_OK)
        return ATTN_EINVAL;
    uint32_t epoch = epoch_next(kv, s);
    if (epoch == 0)
        return ATTN_EOVERLOAD;
    kv_epoch_announce(s, epoch, request);
    const struct kv_given_rec *g = &kv->given[seq.index];
    bool ends_hole = has_no_hole && kv->holes[seq.index] > 0;
    if (len < s->longest || len < g->n_ids || ends_hole) { /* so len + 1 does not wrap */
        kv_seq_cut(kv, seq.index, len, epoch);
    } else {
        kv_publish64(&s->epoch_owner, kv_epoch_owner(epoch, kv_owner_of(s)));
    }
    kv_count(&kv->heads->stats.truncates, 1);
    *out_epoch = epoch;
    return ATTN_OK;
}

const uint32_t *kv_seq_ids(const struct kv *kv, kv_seq_id seq)
{
    return kv_given_ids(kv, seq.index);
}

attn_status kv_seq_next(const struct kv *kv, uint32_t end, kv_seq_id *seq)
{
    uint32_t n = kv->heads->seq_n_fresh;
    uint32_t i = seq->index;
    while (i < n && i < end && kv_seq_live(kv, i) == NULL)
        i++;
    if (i >= n)
        return ATTN_ENOTFOUND;
    seq->index = i;
    return i < end ? ATTN_OK : ATTN_EOVERLOAD;
}

void kv_seq_close(struct kv *kv, kv_seq_id seq)
{
    struct kv_seq_rec *s = kv_seq_live(kv, seq.index);
    if (s == NULL)
        return;
    struct kv_heads *h = kv->heads;
    kv_forks_part(kv, seq.index, 0);
    kv_epoch_end(kv, kv_epoch_of(s));
    kv_publish32(&s->state, 0);
    while (s->journal_head != 0) { /* the new block is in the table, which is trimmed below */
        uint32_t old_block = kv->journal[s->journal_head - 1].old_block;
        kv_journal_drop(kv, s);
        kv_block_unref(kv, &kv->pools[s->pool], old_block);
    }
    kv_seq_trim(kv, seq.index, 0);
    kv_idle_closed(kv, seq.index);
    kv_room_trim(kv, seq.index);
    if (s->is_lazy)
        kv_fork_unlink(kv, seq.index);
    kv_index_remove(kv, seq.index);
    owner_unlink(kv, seq.index);
    kv->links[seq.index] = (struct kv_seq_links){.next = h->seq_free};
    h->seq_free = seq.index + 1;
    kv->pools[s->pool].n_seqs--;
    kv_count(&h->stats.sequences, -1);
    kv_count(&h->stats.closes, 1);
}

attn_status kv_seq_adopt(struct kv *kv, kv_seq_id seq, uint32_t owner, uint64_t request,
                         uint32_t *out_epoch)
{
    struct kv_seq_rec *s = kv_seq_live(kv, seq.index);
    if (s == NULL)
        return kv_fail(kv, ATTN_ENOTFOUND, "sequence index %u is not open", seq.index);
    attn_status st = owner_check(kv, owner);
    if (st != ATTN_OK)
        return st;
    if (kv_seq_is_repeat(kv, seq, owner, request)) {
        *out_epoch = kv_epoch_of(s);
        return ATTN_OK;
    }
    if (kv_owner_has_seen(kv, owner, request))
        return seen_before(kv, s->name, request);
    if (!kv_charge_fits(kv, seq.index, owner))
        return kv_fail(kv, ATTN_ENOBLOCKS,
                       "sequence %llu: its %u blocks are more than its new session can have: of "
                       "pool %s all have reserved %u",
                       (unsigned long long)s->name, kv_charge_of(kv, seq.index),
                       kv->pools[s->pool].name, kv->pools[s->pool].n_reserved);
    uint32_t epoch = epoch_next(kv, s);
    if (epoch == 0)
        return ATTN_EOVERLOAD;
    owner_unlink(kv, seq.index);
    kv_charge_moves(kv, seq.index, owner);
    kv_epoch_announce(s, epoch, request);
    kv_publish64(&s->epoch_owner, kv_epoch_owner(epoch, owner));
    kv_owner_link(kv, seq.index);
    kv_request_see(kv, owner, request);
    kv_count(&kv->heads->stats.adoptions, 1);
    *out_epoch = epoch;
    return ATTN_OK;
}

attn_status kv_owner_any(struct kv *kv, uint32_t owner, kv_seq_id *out_seq)
{
    if (owner >= kv->config.max_owners || kv->owned[owner] == 0)
        return kv_fail(kv, ATTN_ENOTFOUND, "owner %u has no sequence", owner);
    *out_seq = (kv_seq_id){kv->owned[owner] - 1};
    return ATTN_OK;
}
