/* import.c: moves a sequence from one cache to another: describes it where it leaves, makes it
 * where it enters.
 *
 * It keeps name, owner, epoch and the request that made the epoch, so that repeated requests get
 * the same answer. Its blocks are reserved while their bytes are copied, and are its own: blocks
 * that were shared are not shared here, and full ones are published anew. Blocks that its windows
 * released have no block here either. The record is published last, like that of any other
 * sequence; then both caches have the sequence until it is closed in the one it left. A process
 * that dies in between leaves two equal ones.
 *
 * Blocks that the caller reads beside the launches are held by the same kind of record, which has
 * references to them and no sequence.
 */
#include "cache/kv_internal.h"

#include <stdlib.h>
#include <string.h>

attn_status kv_seq_export_read(struct kv *kv, kv_seq_id seq, struct kv_seq_export *out)
{
    const struct kv_seq_rec *s = kv_seq_live(kv, seq.index);
    if (s == NULL)
        return kv_fail(kv, ATTN_ENOTFOUND, "sequence index %u is not open", seq.index);
    if (s->n_outstanding > 0)
        return kv_fail(kv, ATTN_EOVERLOAD, "sequence %llu: %u appends are outstanding",
                       (unsigned long long)s->name, s->n_outstanding);
    if (kv->links[seq.index].n_paged_out > 0)
        return kv_paged_out(kv, seq.index);
    if (kv_tree_n(&kv->trees[seq.index]) > 0)
        return kv_fail(kv, ATTN_EOVERLOAD, "sequence %llu: its tree is not committed",
                       (unsigned long long)s->name);
    const struct kv_given_rec *g = &kv->given[seq.index];
    uint32_t owner = kv_owner_of(s);
    *out = (struct kv_seq_export){
        .name = s->name,
        .request = s->request,
        .owner_id = owner == KV_NO_OWNER ? 0 : kv->owners[owner].id,
        .tenant = s->tenant,
        .epoch = kv_epoch_of(s),
        .made = s->made,
        .owner = owner,
        .n_blocks = s->n_blocks,
        .hole = kv->holes[seq.index],
        .n_cached = g->n_cached,
        .layer_len = kv_lens(kv, seq.index),
        .tokens = {kv_given_ids(kv, seq.index), g->n_ids, g->adapter, g->retention,
                   g->n_retentions},
        .note = kv_seq_note_get(kv, seq),
    };
    return ATTN_OK;
}

struct kv_seq_import *kv_seq_import_begin(struct kv *kv, kv_pool_id pool)
{
    struct kv_seq_import *a = kv_pool_live(kv, pool.index) == NULL ? NULL : calloc(1, sizeof *a);
    if (a == NULL)
        return NULL;
    a->pool = pool.index;
    LIST_INSERT_HEAD(&kv->imports, a, link);
    return a;
}

attn_status kv_seq_import_reserve(struct kv *kv, struct kv_seq_import *a, uint32_t first,
                                  uint32_t n)
{
    struct kv_pool_rec *p = &kv->pools[a->pool];
    uint64_t n_blocks = (uint64_t)first + n;
    uint32_t n_taken = 0;
    for (uint32_t i = first; i < n_blocks && i < a->n_blocks; i++)
        n_taken += a->blocks[i] != KV_NO_BLOCK;
    if (n_blocks > kv->config.max_seq_blocks ||
        !kv_block_make_room(kv, p, KV_NO_OWNER, n - n_taken))
        return kv_fail(kv, ATTN_ENOBLOCKS,
                       "pool %s: blocks %u to %llu of a sequence come, %u can be had", p->name,
                       first, (unsigned long long)n_blocks,
                       n_taken + kv_n_free_for(kv, p, KV_NO_OWNER));
    if (n_blocks > a->capacity) {
        uint32_t capacity = n_blocks < 2 * a->capacity ? 2 * a->capacity : (uint32_t)n_blocks;
        uint32_t *blocks = realloc(a->blocks, capacity * sizeof *blocks);
        if (blocks == NULL)
            return kv_fail(kv, ATTN_ENOMEM, "no memory for a table of %u blocks", capacity);
        a->blocks = blocks;
        a->capacity = capacity;
    }
    while (a->n_blocks < n_blocks)
        a->blocks[a->n_blocks++] = KV_NO_BLOCK;
    for (uint32_t i = first; i < n_blocks; i++)
        if (a->blocks[i] == KV_NO_BLOCK)
            a->blocks[i] = kv_block_alloc(kv, p);
    return ATTN_OK;
}

static void entry_drop(struct kv *kv, struct kv_seq_import *a, uint32_t i)
{
    if (a->blocks[i] != KV_NO_BLOCK)
        kv_block_unref(kv, &kv->pools[a->pool], a->blocks[i]);
    a->blocks[i] = KV_NO_BLOCK;
}

uint32_t kv_seq_import_block(const struct kv_seq_import *a, uint32_t i)
{
    return a->blocks[i];
}

static void import_free(struct kv_seq_import *a)
{
    LIST_REMOVE(a, link);
    free(a->blocks);
    free(a->is_used);
    free(a);
}

void kv_seq_import_cancel(struct kv *kv, struct kv_seq_import *a)
{
    if (a == NULL)
        return;
    while (a->n_blocks > 0)
        entry_drop(kv, a, --a->n_blocks);
    import_free(a);
}

void kv_seq_imports_forget(struct kv *kv)
{
    while (!LIST_EMPTY(&kv->imports))
        import_free(LIST_FIRST(&kv->imports));
}

void kv_seq_import_count_refs(const struct kv *kv, uint32_t *n_refs)
{
    const struct kv_seq_import *a;
    LIST_FOREACH(a, &kv->imports, link)
        for (uint32_t i = 0; i < a->n_blocks; i++)
            if (a->blocks[i] != KV_NO_BLOCK)
                n_refs[kv->pools[a->pool].first_block + a->blocks[i]]++;
}

bool kv_seq_import_is_of(const struct kv *kv, uint32_t pool)
{
    const struct kv_seq_import *a;
    LIST_FOREACH(a, &kv->imports, link)
        if (a->pool == pool && a->n_blocks > 0)
            return true;
    return false;
}

static struct kv_seq_import *hold(struct kv *kv, kv_pool_id pool, const uint32_t *blocks,
                                  uint32_t n)
{
    struct kv_seq_import *a = kv_seq_import_begin(kv, pool);
    uint32_t *held = a == NULL ? NULL : malloc((n > 0 ? n : 1) * sizeof *held);
    if (held == NULL) {
        kv_seq_import_cancel(kv, a);
        return NULL;
    }
    memcpy(held, blocks, n * sizeof *held);
    a->blocks = held;
    a->capacity = a->n_blocks = n;
    for (uint32_t i = 0; i < n; i++)
        kv_block_ref(kv, &kv->pools[a->pool], held[i]);
    return a;
}

struct kv_seq_import *kv_cached_hold(struct kv *kv, kv_pool_id pool, const uint32_t *blocks,
                                     uint32_t n)
{
    struct kv_seq_import *a = hold(kv, pool, blocks, n);
    if (a == NULL)
        return NULL;
    a->is_used = calloc(n > 0 ? n : 1, sizeof *a->is_used);
    if (a->is_used != NULL)
        return a;
    kv_cached_release(kv, a);
    return NULL;
}

void kv_cached_release(struct kv *kv, struct kv_seq_import *a)
{
    struct kv_pool_rec *p = &kv->pools[a->pool];
    bool *is_used = a->is_used;
    a->is_used = NULL; /* releasing the hold itself is no use */
    for (uint32_t i = 0; is_used != NULL && i < a->n_blocks; i++)
        if (is_used[i])
            kv_block_unref(kv, p, a->blocks[i]);
    while (a->n_blocks-- > 0) /* backwards: each is put before the others */
        if (is_used == NULL || !is_used[a->n_blocks])
            kv_block_unref_unused(kv, p, a->blocks[a->n_blocks]);
    free(is_used);
    import_free(a);
}

struct kv_seq_import *kv_seq_export_hold(struct kv *kv, kv_seq_id seq, uint32_t first, uint32_t n)
{
    struct kv_seq_rec *s = &kv->seqs[seq.index];
    const uint32_t *row = kv_row(kv, seq.index) + first;
    struct kv_seq_import *a = hold(kv, (kv_pool_id){s->pool}, row, n);
    if (a != NULL && s->n_maybe_shared < first + n)
        s->n_maybe_shared = first + n;
    return a;
}

/* True if the sequence has no block at entry i. */
static bool in_hole(const struct kv_pool_rec *p, const struct kv_seq_export *d, uint32_t i)
{
    return i < d->hole && i >= kv_blocks_of(p, p->kept_tokens);
}

static uint32_t n_missing(const struct kv *kv, const struct kv_seq_import *a,
                          const struct kv_seq_export *d)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < d->n_blocks; i++)
        n += !in_hole(&kv->pools[a->pool], d, i) &&
             (i >= a->n_blocks || a->blocks[i] == KV_NO_BLOCK);
    return n;
}

static attn_status end_check(struct kv *kv, const struct kv_seq_import *a,
                             const struct kv_seq_export *d, const struct kv_effects *fx)
{
    unsigned long long name = d->name;
    uint64_t owner_id = d->owner >= kv->config.max_owners ? 0 : kv->owners[d->owner].id;
    if (kv_index_find(kv, d->tenant, d->name) != 0)
        return kv_fail(kv, ATTN_EEXIST, "sequence %llu is already open", name);
    if (owner_id == 0 || owner_id != d->owner_id)
        return kv_fail(kv, ATTN_ENOTFOUND, "sequence %llu: owner %u is not here", name, d->owner);
    if (kv->heads->stats.sequences == kv->config.max_sequences)
        return kv_fail(kv, ATTN_EOVERLOAD,
                       "sequence %llu: all %u sequences are open (cache.max_sequences)", name,
                       kv->config.max_sequences);
    if (n_missing(kv, a, d) > 0)
        return kv_fail(kv, ATTN_EINVAL, "sequence %llu: of %u blocks %u did not come", name,
                       d->n_blocks, n_missing(kv, a, d));
    if (d->n_blocks > fx->patches_capacity - fx->n_patches)
        return kv_fail(kv, ATTN_EOVERLOAD, "sequence %llu: no room for %u patches", name,
                       d->n_blocks);
    return ATTN_OK;
}

attn_status kv_seq_import_end(struct kv *kv, struct kv_seq_import *a, const struct kv_seq_export *d,
                              struct kv_effects *fx, kv_seq_id *out_seq)
{
    uint32_t n_pages = 0;
    attn_status st = end_check(kv, a, d, fx);
    if (st == ATTN_OK)
        st = kv_room_take(kv, d->tenant, d->name, d->tokens.n, d->n_blocks,
                          d->note.request == 0 ? 0 : kv_note_bytes(d->note.n_bytes), &n_pages);
    if (st != ATTN_OK)
        return st;
    struct kv_pool_rec *p = &kv->pools[a->pool];
    struct kv_birth b = {.tenant = d->tenant,
                         .name = d->name,
                         .pool = a->pool,
                         .owner = d->owner,
                         .request = d->request,
                         .tokens = d->tokens,
                         .n_cached = d->n_cached,
                         .hole = d->hole,
                         .n_pages = n_pages};
    uint32_t *row = kv_own_row(kv, kv_record_next(kv));
    for (uint32_t i = 0; i < d->n_blocks; i++)
        row[i] = in_hole(p, d, i) ? 0 : a->blocks[i]; /* in a hole any value will do */
    uint32_t seq = kv_record_take(kv, &b);
    struct kv_seq_rec *s = &kv->seqs[seq];
    s->made = d->made;
    s->epoch_owner = kv_epoch_owner(d->epoch, d->owner);
    s->n_blocks = d->n_blocks;
    kv_note_put(kv, seq, &d->note);
    for (uint32_t l = 0; l < p->n_layers; l++) {
        kv_lens(kv, seq)[l] = d->layer_len[l];
        s->longest = d->layer_len[l] > s->longest ? d->layer_len[l] : s->longest;
    }
    kv_record_publish(kv, seq);
    kv_charge(kv, seq, kv_charge_of(kv, seq));
    for (uint32_t i = 0; i < d->n_blocks; i++)
        fx->patches[fx->n_patches++] = (struct kv_patch){.row = seq, .index = i, .block = row[i]};
    for (uint32_t i = a->n_blocks; i-- > 0;)
        if (i >= d->n_blocks || in_hole(p, d, i))
            entry_drop(kv, a, i);
    import_free(a);
    if (d->tokens.n > 0)
        kv_prefix_publish(kv, seq);
    *out_seq = (kv_seq_id){seq};
    return ATTN_OK;
}
