/* damage.c: judges a record by truth alone: can it be what it says?
 *
 * Recovery asks before it trusts a record; kv_check asks about every one. Only truth is read, since
 * derived state may not exist yet. Returns the name of the damaged field, or NULL.
 */
#include "cache/kv_internal.h"

#include <string.h>

const char *kv_pool_damage(const struct kv *kv, uint32_t pool)
{
    const struct kv_pool_rec *p = &kv->pools[pool];
    if (p->state != KV_LIVE)
        return "state";
    if (p->spec_bytes > KV_SPEC_BYTES)
        return "spec_bytes";
    if (p->seal != kv_pool_seal(kv, pool))
        return "seal";
    if (p->name[0] == '\0' || memchr(p->name, '\0', sizeof p->name) == NULL)
        return "name";
    if (p->n_layers < 1 || p->n_layers > kv->config.max_layers)
        return "n_layers";
    if (p->block_tokens < 1 || p->block_tokens > kv->config.max_block_tokens ||
        (p->block_tokens & (p->block_tokens - 1)) != 0)
        return "block_tokens";
    uint32_t n_blocks = kv_pool_size(p);
    if (p->sized != kv_pool_sized(kv, pool, n_blocks) || n_blocks < 1 ||
        (uint64_t)p->first_block + n_blocks > kv->config.max_blocks)
        return "n_blocks";
    for (uint32_t i = 0; i < kv->config.max_pools; i++) {
        const struct kv_pool_rec *q = &kv->pools[i];
        if (i != pool && q->state == KV_LIVE &&
            p->first_block < (uint64_t)q->first_block + kv_pool_size(q) &&
            q->first_block < (uint64_t)p->first_block + n_blocks)
            return "first_block";
    }
    return NULL;
}

uint32_t kv_longest_layer(const struct kv *kv, uint32_t seq)
{
    const uint32_t *lens = kv_lens(kv, seq);
    uint32_t longest = 0;
    for (uint32_t i = 0; i < kv->pools[kv->seqs[seq].pool].n_layers; i++)
        if (lens[i] > longest)
            longest = lens[i];
    return longest;
}

bool kv_may_read(const struct kv *kv, uint32_t seq, uint32_t src, uint32_t longest)
{
    const struct kv_seq_rec *s = kv_seq_live(kv, src);
    const struct kv_given_rec *g = &kv->given[seq];
    return s != NULL && s->pool == kv->seqs[seq].pool && s->tenant == kv->seqs[seq].tenant &&
           kv->given[src].row_of == 0 && kv->pools[s->pool].window_tokens == 0 &&
           kv_longest_layer(kv, src) >= longest && g->has_own_ids <= 1 &&
           (g->has_own_ids || kv->given[src].n_ids >= g->n_ids);
}

/* A layer has all of its nodes, or none and nothing behind where it begins. */
static bool tree_is_damaged(const struct kv *kv, uint32_t seq, uint32_t longest)
{
    const struct kv_tree_rec *t = &kv->trees[seq];
    const uint32_t n = kv_tree_n(t), pos = kv_tree_pos(t);
    if (n == 0)
        return t->at != 0;
    if (n > KV_MAX_TREE_NODES || longest > (uint64_t)pos + n)
        return true;
    for (uint32_t i = 0; i < kv->pools[kv->seqs[seq].pool].n_layers; i++)
        if (kv_lens(kv, seq)[i] > pos && kv_lens(kv, seq)[i] != pos + n)
            return true;
    for (uint32_t i = 0; i < n; i++)
        if (t->parents[i] < -1 || t->parents[i] >= (int)i)
            return true;
    return false;
}

const char *kv_seq_damage(const struct kv *kv, uint32_t seq)
{
    const struct kv_seq_rec *s = &kv->seqs[seq];
    if (s->state != KV_LIVE)
        return "state";
    if (s->seal != kv_seq_seal(kv, seq))
        return "seal";
    const struct kv_pool_rec *p = kv_pool_live(kv, s->pool);
    if (p == NULL)
        return "pool";
    if (kv_epoch_of(s) == 0)
        return "epoch";
    if (kv_owner_of(s) >= kv->config.max_owners && kv_owner_of(s) != KV_NO_OWNER)
        return "owner";
    uint32_t longest = kv_longest_layer(kv, seq);
    if (longest > kv_max_tokens(kv, p))
        return "length";
    uint32_t n_ids = kv->given[seq].n_ids;
    if (n_ids > kv->config.max_seq_tokens || n_ids > kv_max_tokens(kv, p))
        return "n_ids";
    if (s->redo_len > (uint64_t)longest + 1)
        return "redo_len";
    if (kv_note_is_damaged(kv, seq))
        return "note";
    if (s->redo_len == 0 && kv_hole_is_damaged(kv, seq))
        return "hole";
    if (s->redo_len == 0 && tree_is_damaged(kv, seq, longest))
        return "tree";
    uint32_t row_of = kv->given[seq].row_of;
    if (row_of != 0 && !kv_may_read(kv, seq, row_of - 1, longest))
        return "row_of";
    const uint32_t *row = kv_own_row(kv, row_of != 0 ? row_of - 1 : seq);
    for (uint32_t i = 0; i < kv_blocks_of(p, longest); i++)
        if (!kv_in_hole(kv, p, seq, i) && row[i] >= p->n_blocks &&
            (row_of != 0 || !kv_place_is_possible(kv, p, row[i])))
            return "block table";
    return NULL;
}

const char *kv_published_damage(const struct kv *kv, const struct kv_pool_rec *p, uint32_t block)
{
    const struct kv_published_rec *r = kv_published(kv, p, block);
    if (r->state != KV_LIVE)
        return "state";
    if (r->seal != kv_published_seal(kv, p, block))
        return "seal";
    if (r->serial > kv->epochs->clock || r->used > kv->epochs->clock)
        return "clock";
    return NULL;
}
