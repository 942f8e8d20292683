/* prefix.c: prefix sharing: publishes what a sequence has computed, so that others of its tenant
 * need not compute it, and brings published blocks back from tiers.
 *
 * A full block whose token ids are known is published once every layer has it. Its key is a keyed
 * hash of its ids and the key before it; the first block's is chained to a hash of pool, tenant and
 * adapter. The key only finds candidates: a block is taken if its own ids are the ones asked for
 * and the block before it is the very publication that was taken before, as its serial tells. So
 * equal keys of different tokens do no harm.
 *
 * A published block is never written to. A sequence that has its only reference unpublishes it
 * first; others copy it (append.c). Two sequences may compute the same block side by side; the
 * second one's stays private and is freed when that sequence is closed. What that sequence says of
 * how long blocks stay (given.c) holds for the first one's.
 */
#include "cache/kv_internal.h"

#include <stdlib.h>
#include <string.h>

#ifdef KV_PREFIX_KEY_BITS /* for tests: so few that unlike blocks collide */
enum { KEY_BITS = KV_PREFIX_KEY_BITS };
#else
enum { KEY_BITS = 64 };
#endif

struct prefix_key {
    uint64_t word[2];
};

/* Hashes the words of before and then the bytes, under a secret. */
static struct prefix_key hash(const uint64_t secret[2], const uint64_t before[2], const void *bytes,
                              size_t n_bytes)
{
    struct prefix_key k;
    siphash128(secret, before, bytes, n_bytes, k.word);
    if (KEY_BITS < 64) {
        k.word[0] &= (UINT64_C(1) << KEY_BITS % 64) - 1;
        k.word[1] = 0;
    }
    return k;
}

/* The key that the first block of a prefix is chained to. */
static struct prefix_key root_key(const struct kv *kv, const struct kv_pool_rec *p, uint32_t tenant,
                                  uint64_t adapter)
{
    const uint64_t before[] = {p->seal, p->generation}, words[] = {tenant, adapter};
    return hash(kv->root_secret, before, words, sizeof words);
}

enum { AHEAD = 16 };

/* A walk along the blocks of some tokens. Keys follow from ids alone, so they are computed some
 * blocks ahead, and what they find is prefetched meanwhile. */
struct walk {
    const struct kv_pool_rec *p;
    uint32_t tenant;
    uint64_t adapter;
    const uint32_t *ids; /* of the whole sequence */
    uint32_t index; /* of the next block */
    uint32_t past; /* blocks with known ids */
    uint32_t first_ahead, n_ahead; /* blocks whose keys are computed */
    struct prefix_key ahead[AHEAD];
    uint64_t serial; /* of the publication before the next block; 0: it is the first */
    struct prefix_key key; /* the next block's, once computed */
    const uint64_t *secret;
};

static void walk_begin(const struct kv *kv, struct walk *w, uint32_t block_before)
{
    w->secret = kv->block_secret;
    if (block_before == 0) {
        w->serial = 0;
        w->key = root_key(kv, w->p, w->tenant, w->adapter);
        return;
    }
    const struct kv_published_rec *r = kv_published(kv, w->p, block_before - 1);
    w->serial = r->serial;
    memcpy(w->key.word, r->key, sizeof w->key.word);
}

static const uint32_t *walk_ids(const struct walk *w)
{
    return w->ids + ((size_t)w->index << w->p->block_shift);
}

/* Computes twice as many keys as the last time: most walks end at once or go far. */
static void look_ahead(const struct kv *kv, struct walk *w)
{
    uint32_t n = w->n_ahead == 0 ? 2 : 2 * w->n_ahead;
    n = n < AHEAD ? n : AHEAD;
    n = n < w->past - w->index ? n : w->past - w->index;
    struct prefix_key key = w->key;
    const uint32_t *ids = walk_ids(w);
    for (uint32_t i = 0; i < n; i++, ids += w->p->block_tokens) {
        key = hash(w->secret, key.word, ids, w->p->block_tokens * sizeof ids[0]);
        w->ahead[i] = key;
        __builtin_prefetch(kv_published_slot(kv, key.word));
    }
    for (uint32_t i = 0; i < n; i++) {
        uint32_t at = *kv_published_slot(kv, w->ahead[i].word), block = at - 1 - w->p->first_block;
        if (at == 0 || block >= w->p->n_blocks)
            continue;
        __builtin_prefetch(kv_published(kv, w->p, block));
        __builtin_prefetch(kv_published_ids(kv, w->p, block));
        __builtin_prefetch(kv_retained(kv, w->p, block), 1);
        __builtin_prefetch(kv_block(kv, w->p, block), 1);
    }
    w->first_ahead = w->index;
    w->n_ahead = n;
}

/* Sets w->key to the key of the next block. */
static void walk_hash(const struct kv *kv, struct walk *w)
{
    if (w->index >= w->first_ahead + w->n_ahead)
        look_ahead(kv, w);
    w->key = w->ahead[w->index - w->first_ahead];
}

/* The published block, plus one, that is the next one of the walk; 0: there is none. */
static uint32_t walk_find(const struct kv *kv, const struct walk *w)
{
    size_t ids_bytes = w->p->block_tokens * sizeof w->ids[0];
    for (uint32_t at = *kv_published_slot(kv, w->key.word); at != 0;
         at = kv->blocks[at - 1].chain) {
        const struct kv_published_rec *r = &kv->published[at - 1];
        uint32_t block = at - 1 - w->p->first_block; /* wraps for a block of another pool */
        if (r->key[0] == w->key.word[0] && r->key[1] == w->key.word[1] && block < w->p->n_blocks &&
            r->parent == w->serial && r->index == w->index && r->tenant == w->tenant &&
            r->adapter == w->adapter &&
            memcmp(kv_published_ids(kv, w->p, block), walk_ids(w), ids_bytes) == 0)
            return block + 1;
    }
    return 0;
}

static void walk_on(const struct kv *kv, struct walk *w, uint32_t block)
{
    w->serial = kv_published(kv, w->p, block)->serial;
    w->index++;
}

struct kv_prefix kv_prefix_match(struct kv *kv, const struct kv_pool_rec *p, uint32_t tenant,
                                 const struct kv_tokens *t, uint32_t *row)
{
    struct walk w = {.p = p, .tenant = tenant, .adapter = t->adapter, .ids = t->ids};
    struct kv_prefix m = {0};
    w.past = t->n == 0 ? 0 : (t->n - 1) >> p->block_shift;
    walk_begin(kv, &w, 0);
    while (w.index < w.past) {
        walk_hash(kv, &w);
        uint32_t block = walk_find(kv, &w);
        if (block == 0)
            break;
        row[w.index] = block - 1;
        walk_on(kv, &w, block - 1);
        m = (struct kv_prefix){.n_blocks = w.index, .block = block, .serial = w.serial};
    }
    return m;
}

static struct kv_content walk_content(const struct kv *kv, const struct walk *w)
{
    return (struct kv_content){
        .pool = (uint32_t)(w->p - kv->pools),
        .tenant = w->tenant,
        .index = w->index,
        .n_ids = w->p->block_tokens,
        .adapter = w->adapter,
        .key = {w->key.word[0], w->key.word[1]},
        .parent = w->serial,
        .ids = walk_ids(w),
    };
}

/* The serial of the walk's next block in a tier; 0: it is not there. A block published under that
 * serial is the parent of those that follow it in the tier. */
static uint64_t serial_in_tier(const struct kv *kv, const struct walk *w)
{
    if (kv->tier.serial == NULL)
        return 0;
    struct kv_content c = walk_content(kv, w);
    return kv->tier.serial(kv->tier.arg, &c);
}

/* Publishes a block as the next one of the walk. serial 0: as a new publication. */
static void publish(struct kv *kv, struct kv_pool_rec *p, const struct walk *w, uint32_t block,
                    uint64_t serial)
{
    struct kv_published_rec *r = kv_published(kv, p, block);
    kv_publish64(&kv->epochs->clock, kv->epochs->clock + 1);
    *r = (struct kv_published_rec){
        .tenant = w->tenant,
        .index = w->index,
        .adapter = w->adapter,
        .key = {w->key.word[0], w->key.word[1]},
        .serial = serial != 0 ? serial : kv->epochs->clock,
        .parent = w->serial,
        .used = kv->epochs->clock,
    };
    memcpy(kv_published_ids(kv, p, block), walk_ids(w), p->block_tokens * sizeof w->ids[0]);
    kv_retain_default(kv, p, block);
    r->seal = kv_published_seal(kv, p, block);
    if (block >= p->n_ever_published) { /* an earlier pool may have left records behind */
        for (uint32_t i = p->n_ever_published; i < block; i++)
            kv_published(kv, p, i)->state = 0;
        kv_publish32(&p->n_ever_published, block + 1);
    }
    kv_publish32(&r->state, KV_LIVE);
    kv_published_link(kv, p, block);
    kv_event_put(kv, KV_EVENT_PUBLISHED, p, block, r->serial);
}

void kv_prefix_rewind(struct kv *kv, uint32_t seq, uint32_t n_blocks)
{
    struct kv_given_rec *g = &kv->given[seq];
    const struct kv_pool_rec *p = &kv->pools[kv->seqs[seq].pool];
    if (n_blocks >= g->n_looked_at)
        return;
    uint32_t last = n_blocks == 0 ? 0 : kv_row(kv, seq)[n_blocks - 1];
    g->n_looked_at = g->parent = 0;
    g->parent_serial = 0;
    if (n_blocks == 0 || kv_in_hole(kv, p, seq, n_blocks - 1) || !kv_is_published(kv, p, last))
        return; /* from the start: the publication equal to the last block is not known */
    g->n_looked_at = n_blocks;
    g->parent = last + 1;
    g->parent_serial = kv_published(kv, p, last)->serial;
}

/* The number of leading full blocks that every layer has and whose ids are all known; up to
 * n_looked_at: nothing new. */
static uint32_t n_publishable(const struct kv *kv, uint32_t seq)
{
    const struct kv_seq_rec *s = &kv->seqs[seq];
    const struct kv_pool_rec *p = &kv->pools[s->pool];
    const struct kv_given_rec *g = &kv->given[seq];
    uint32_t n = g->n_ids < s->longest ? g->n_ids : s->longest;
    if (n > kv_below_tree(kv, seq))
        n = kv_below_tree(kv, seq);
    if (n >> p->block_shift <= g->n_looked_at || kv_in_hole(kv, p, seq, g->n_looked_at))
        return 0;
    for (uint32_t i = p->n_layers; i-- > 0 && n > 0;) /* the last layer is appended last */
        if (kv_lens(kv, seq)[i] < n)
            n = kv_lens(kv, seq)[i];
    return n >> p->block_shift;
}

void kv_prefix_publish(struct kv *kv, uint32_t seq)
{
    const struct kv_seq_rec *s = &kv->seqs[seq];
    struct kv_pool_rec *p = &kv->pools[s->pool];
    struct kv_given_rec *g = &kv->given[seq];
    uint32_t past = n_publishable(kv, seq);
    if (past <= g->n_looked_at)
        return;
    if (g->parent != 0 && (!kv_is_published(kv, p, g->parent - 1) ||
                           kv_published(kv, p, g->parent - 1)->serial != g->parent_serial))
        kv_prefix_rewind(kv, seq, 0);
    struct walk w = {.p = p,
                     .tenant = s->tenant,
                     .adapter = g->adapter,
                     .ids = kv_given_ids(kv, seq),
                     .index = g->n_looked_at,
                     .past = past};
    const uint32_t *row = kv_row(kv, seq);
    walk_begin(kv, &w, g->parent);
    while (w.index < past) {
        const bool is_in_hole = kv_in_hole(kv, p, seq, w.index);
        if (!is_in_hole && kv_is_place(row[w.index]))
            break; /* until it is back */
        walk_hash(kv, &w);
        uint32_t block = walk_find(kv, &w);
        if (block == 0 && is_in_hole)
            break; /* its ids came after a window had freed it */
        if (block == 0) {
            block = row[w.index] + 1;
            bool is_again = kv_is_published(kv, p, block - 1);
            struct kv_retained_rec *t = kv_retained(kv, p, block - 1), said = *t;
            if (is_again) /* the block before it was evicted since */
                kv_unpublish(kv, p, block - 1);
            publish(kv, p, &w, block - 1, serial_in_tier(kv, &w));
            said.used_s = t->used_s;
            if (is_again)
                *t = said;
        }
        kv_retain(kv, seq, w.index, block - 1);
        walk_on(kv, &w, block - 1);
        g->parent = block;
    }
    g->n_looked_at = w.index;
    g->parent_serial = w.serial;
    if (kv->seqs[seq].n_maybe_shared < w.index)
        kv->seqs[seq].n_maybe_shared = w.index;
}

/* --- retention -------------------------------------------------------------------------------- */

/* What the sequence says holds for the published blocks of its tokens from this one on: its own,
 * and those that equal them. */
static void retain_from(struct kv *kv, uint32_t seq, uint32_t token)
{
    const struct kv_seq_rec *s = &kv->seqs[seq];
    struct kv_pool_rec *p = &kv->pools[s->pool];
    const struct kv_given_rec *g = &kv->given[seq];
    const uint32_t *row = kv_row(kv, seq), first = kv_blocks_of(p, token);
    struct walk w = {.p = p,
                     .tenant = s->tenant,
                     .adapter = g->adapter,
                     .ids = kv_given_ids(kv, seq),
                     .past = g->n_ids >> p->block_shift};
    walk_begin(kv, &w, 0);
    while (w.index < w.past) {
        walk_hash(kv, &w);
        uint32_t i = w.index, block = walk_find(kv, &w);
        bool is_own =
            i < s->n_blocks && !kv_in_hole(kv, p, seq, i) && kv_is_published(kv, p, row[i]);
        if (i >= first && block != 0)
            kv_retain(kv, seq, i, block - 1);
        if (i >= first && is_own && row[i] + 1 != block)
            kv_retain(kv, seq, i, row[i]); /* the block before it was evicted since */
        if (block == 0 && !is_own)
            return;
        walk_on(kv, &w, block != 0 ? block - 1 : row[i]);
    }
}

attn_status kv_seq_retain(struct kv *kv, kv_seq_id seq, const struct kv_retention *r, uint32_t n)
{
    const struct kv_seq_rec *s = kv_seq_live(kv, seq.index);
    if (s == NULL)
        return kv_fail(kv, ATTN_ENOTFOUND, "sequence index %u is not open", seq.index);
    attn_status st = kv_retention_check(kv, s->name, r, n);
    if (st != ATTN_OK || n == 0)
        return st;
    struct kv_given_rec *g = &kv->given[seq.index];
    uint32_t n_before = 0;
    while (n_before < g->n_retentions && g->retention[n_before].from < r[0].from)
        n_before++;
    if (n_before + n > KV_MAX_RETENTIONS)
        return kv_fail(kv, ATTN_EINVAL,
                       "sequence %llu: retention has %u ranges before and %u more, at most %d",
                       (unsigned long long)s->name, n_before, n, KV_MAX_RETENTIONS);
    kv_publish32(&g->n_retentions, n_before);
    memcpy(g->retention + n_before, r, n * sizeof r[0]);
    kv_publish32(&g->n_retentions, n_before + n);
    retain_from(kv, seq.index, r[0].from);
    return ATTN_OK;
}

/* --- promotions ------------------------------------------------------------------------------- */

struct kv_promote {
    LIST_ENTRY(kv_promote) link; /* in kv->promotions */
    uint32_t pool, tenant;
    uint64_t adapter;
    uint32_t n_blocks, n_held; /* blocks with known ids; it has references to the first n_held of
                                  them */
    uint32_t n_before; /* the first n_before of them were published */
    uint64_t parent; /* serial of the last published one */
    uint64_t *serials; /* [n_blocks] of the blocks that come from a tier */
    uint32_t *blocks; /* [n_blocks] */
    uint32_t *ids; /* of n_blocks */
};

static struct kv_promote *promote_make(const struct kv_pool_rec *p, const struct kv_tokens *t,
                                       uint32_t n_blocks)
{
    size_t ids_bytes = (size_t)n_blocks * p->block_tokens * sizeof t->ids[0];
    struct kv_promote *f = calloc(1, sizeof *f);
    if (f == NULL)
        return NULL;
    f->serials = calloc(n_blocks, sizeof *f->serials);
    f->blocks = calloc(n_blocks, sizeof *f->blocks);
    f->ids = malloc(ids_bytes);
    if (f->serials == NULL || f->blocks == NULL || f->ids == NULL)
        return f;
    memcpy(f->ids, t->ids, ids_bytes);
    f->n_blocks = n_blocks;
    return f;
}

static void promote_free(struct kv *kv, struct kv_promote *f)
{
    while (f->n_held > 0)
        kv_block_unref(kv, &kv->pools[f->pool], f->blocks[--f->n_held]);
    if (f->n_blocks > 0)
        LIST_REMOVE(f, link);
    free(f->serials);
    free(f->blocks);
    free(f->ids);
    free(f);
}

bool kv_promote_is_of(const struct kv *kv, uint32_t pool)
{
    const struct kv_promote *f;
    LIST_FOREACH(f, &kv->promotions, link)
        if (f->pool == pool)
            return true;
    return false;
}

static struct walk promote_walk(const struct kv *kv, const struct kv_promote *f)
{
    return (struct walk){.p = &kv->pools[f->pool],
                         .tenant = f->tenant,
                         .adapter = f->adapter,
                         .ids = f->ids,
                         .past = f->n_blocks};
}

/* Holds the published blocks, then takes a block for each that is in a tier. */
static void promote_take(struct kv *kv, struct kv_promote *f, uint32_t n_most)
{
    struct walk w = promote_walk(kv, f);
    struct kv_pool_rec *p = &kv->pools[f->pool];
    walk_begin(kv, &w, 0);
    for (; f->n_held < f->n_blocks; f->n_held++) {
        walk_hash(kv, &w);
        uint32_t block = walk_find(kv, &w);
        struct kv_content c = walk_content(kv, &w);
        if (block != 0 && f->n_before == f->n_held) {
            f->n_before++;
            kv_block_ref(kv, p, --block);
            walk_on(kv, &w, block);
        } else if (block == 0 && f->n_held - f->n_before < n_most && kv_n_available(p) > 0 &&
                   kv->tier.find(kv->tier.arg, &c)) {
            block = kv_block_alloc(kv, p);
            if (f->n_held == f->n_before)
                f->parent = w.serial;
            f->serials[f->n_held] = w.serial = c.serial;
            w.index++;
        } else {
            return;
        }
        f->blocks[f->n_held] = block;
    }
}

struct kv_promote *kv_promote_begin(struct kv *kv, kv_pool_id pool, uint32_t tenant, uint32_t owner,
                                    const struct kv_tokens *t, uint32_t n_most)
{
    struct kv_pool_rec *p = kv_pool_live(kv, pool.index);
    if (p == NULL || t->n == 0 || kv->tier.find == NULL)
        return NULL;
    uint32_t n_blocks = (t->n - 1) >> p->block_shift;
    struct kv_promote *f = n_blocks == 0 ? NULL : promote_make(p, t, n_blocks);
    if (f == NULL)
        return NULL;
    f->pool = pool.index;
    f->tenant = tenant;
    f->adapter = t->adapter;
    n_most = n_most < kv_n_free_for(kv, p, owner) ? n_most : kv_n_free_for(kv, p, owner);
    if (f->n_blocks > 0) {
        LIST_INSERT_HEAD(&kv->promotions, f, link);
        promote_take(kv, f, n_most);
    }
    if (f->n_held > f->n_before)
        return f;
    promote_free(kv, f);
    return NULL;
}

struct kv_found kv_prefix_find(const struct kv *kv, kv_pool_id pool, uint32_t tenant,
                               const struct kv_tokens *t, uint32_t n_most)
{
    const struct kv_pool_rec *p = kv_pool_live(kv, pool.index);
    struct kv_found n = {0};
    if (p == NULL || t->n == 0)
        return n;
    struct walk w = {.p = p,
                     .tenant = tenant,
                     .adapter = t->adapter,
                     .ids = t->ids,
                     .past = (t->n - 1) >> p->block_shift};
    walk_begin(kv, &w, 0);
    while (w.index < w.past && n.n_in_tier < n_most) {
        walk_hash(kv, &w);
        uint32_t block = walk_find(kv, &w);
        uint64_t there = block == 0 ? serial_in_tier(kv, &w) : 0;
        if (block != 0 && n.n_in_tier == 0) {
            walk_on(kv, &w, block - 1);
            n.n_published++;
        } else if (there != 0) {
            w.serial = there;
            w.index++;
            n.n_in_tier++;
        } else {
            break;
        }
    }
    return n;
}

uint32_t kv_promote_block(const struct kv_promote *f, uint32_t i)
{
    return f->blocks[f->n_before + i];
}

/* Meanwhile the same blocks may have been computed, or one before them unpublished. */
void kv_promote_end(struct kv *kv, struct kv_promote *f, uint32_t n_there)
{
    struct walk w = promote_walk(kv, f);
    struct kv_pool_rec *p = &kv->pools[f->pool];
    walk_begin(kv, &w, 0);
    while (w.index < f->n_before + n_there) {
        walk_hash(kv, &w);
        uint32_t block = walk_find(kv, &w);
        if (block == 0) {
            if (w.index < f->n_before)
                break;
            uint64_t parent = w.index == f->n_before ? f->parent : f->serials[w.index - 1];
            if (parent != w.serial)
                break;
            block = f->blocks[w.index] + 1;
            publish(kv, p, &w, block - 1, f->serials[w.index]);
        }
        walk_on(kv, &w, block - 1);
    }
    promote_free(kv, f);
}

void kv_promotions_forget(struct kv *kv)
{
    while (!LIST_EMPTY(&kv->promotions)) {
        struct kv_promote *f = LIST_FIRST(&kv->promotions);
        f->n_held = 0;
        promote_free(kv, f);
    }
}

void kv_promote_count_refs(const struct kv *kv, uint32_t *n_refs)
{
    const struct kv_promote *f;
    LIST_FOREACH(f, &kv->promotions, link)
        for (uint32_t i = 0; i < f->n_held; i++)
            n_refs[kv->pools[f->pool].first_block + f->blocks[i]]++;
}
