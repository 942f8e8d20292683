/* lru.c: which cached block is evicted when blocks run out: of those that are not pinned, one of
 * the lowest priority; among these one whose time to live is over, else the one released longest
 * ago.
 *
 * A block that sequences have been opened with counts as used later than it was, by twice as many
 * uses as the pool has blocks: what was found once is more likely to be found again.
 *
 * Each priority has two lists per time to live, one of blocks that were found and one of others.
 * Times to live are powers of two, so there are few; within a list the order of use is also the
 * order of expiry, so only the heads of lists are compared. A closed sequence releases its last
 * block first, so the end of a prefix is evicted before its start. The lists are derived from the
 * blocks' times of last use, which are truth.
 */
#include "cache/kv_internal.h"

#include <string.h>

static uint32_t *end_of(uint32_t (*ends)[KV_N_LISTS], const struct kv_retained_rec *t)
{
    return &ends[t->priority][kv_list_of(t)];
}

static void link_last(struct kv *kv, struct kv_pool_rec *p, uint32_t block)
{
    const struct kv_retained_rec *t = kv_retained(kv, p, block);
    struct kv_block_rec *b = kv_block(kv, p, block);
    uint32_t *oldest = end_of(p->oldest, t), *newest = end_of(p->newest, t);
    b->next = 0;
    b->prev = *newest;
    if (*newest != 0)
        kv_block(kv, p, *newest - 1)->next = block + 1;
    else
        *oldest = block + 1;
    *newest = block + 1;
    p->listed[t->priority] |= UINT64_C(1) << kv_list_of(t);
}

static void unlink_block(struct kv *kv, struct kv_pool_rec *p, uint32_t block)
{
    const struct kv_retained_rec *t = kv_retained(kv, p, block);
    struct kv_block_rec *b = kv_block(kv, p, block);
    uint32_t *oldest = end_of(p->oldest, t), *newest = end_of(p->newest, t);
    if (b->prev != 0)
        kv_block(kv, p, b->prev - 1)->next = b->next;
    else
        *oldest = b->next;
    if (b->next != 0)
        kv_block(kv, p, b->next - 1)->prev = b->prev;
    else
        *newest = b->prev;
    b->next = b->prev = 0;
    if (*oldest == 0)
        p->listed[t->priority] &= ~(UINT64_C(1) << kv_list_of(t));
}

/* Lists the block among the pool's cached ones, or counts it as pinned. */
static void list(struct kv *kv, struct kv_pool_rec *p, uint32_t block)
{
    if (kv_retained(kv, p, block)->is_pinned) {
        p->n_pinned++;
        kv_note_parted(kv, p);
        kv_count(&kv->heads->stats.blocks_pinned, 1);
    } else {
        link_last(kv, p, block);
    }
}

static void count_cached(struct kv *kv, struct kv_pool_rec *p, int n)
{
    p->n_cached += (uint32_t)n;
    kv_count(&kv->heads->stats.blocks_cached, n);
}

/* A pin gives way to what owners have reserved. */
static void keep_pin(struct kv *kv, const struct kv_pool_rec *p, uint32_t block)
{
    struct kv_retained_rec *t = kv_retained(kv, p, block);
    if (t->is_pinned && !kv_may_pin(p))
        t->is_pinned = 0;
}

void kv_lru_put(struct kv *kv, struct kv_pool_rec *p, uint32_t block)
{
    keep_pin(kv, p, block);
    kv_publish64(&kv->epochs->clock, kv->epochs->clock + 1);
    kv_published(kv, p, block)->used = kv->epochs->clock;
    kv_retained(kv, p, block)->used_s = kv->now_s;
    list(kv, p, block);
    count_cached(kv, p, 1);
}

void kv_lru_put_back(struct kv *kv, struct kv_pool_rec *p, uint32_t block)
{
    const struct kv_retained_rec *t = kv_retained(kv, p, block);
    struct kv_block_rec *b = kv_block(kv, p, block);
    uint32_t prev = 0, next = *end_of(p->oldest, t);
    keep_pin(kv, p, block);
    while (next != 0 && kv_published(kv, p, next - 1)->used < kv_published(kv, p, block)->used) {
        prev = next;
        next = kv_block(kv, p, next - 1)->next;
    }
    if (t->is_pinned || next == 0) {
        list(kv, p, block);
    } else {
        b->prev = prev;
        b->next = next;
        kv_block(kv, p, next - 1)->prev = block + 1;
        if (prev != 0)
            kv_block(kv, p, prev - 1)->next = block + 1;
        else
            *end_of(p->oldest, t) = block + 1;
    }
    count_cached(kv, p, 1);
}

void kv_lru_take(struct kv *kv, struct kv_pool_rec *p, uint32_t block)
{
    if (kv_retained(kv, p, block)->is_pinned) {
        p->n_pinned--;
        kv_count(&kv->heads->stats.blocks_pinned, -1);
    } else {
        unlink_block(kv, p, block);
    }
    count_cached(kv, p, -1);
}

static uint32_t age_s(const struct kv *kv, const struct kv_retained_rec *t)
{
    return kv->now_s > t->used_s ? kv->now_s - t->used_s : 0;
}

static bool is_expired(const struct kv *kv, const struct kv_retained_rec *t)
{
    return t->life != 0 && age_s(kv, t) >= 1u << (t->life - 1);
}

static bool goes_before(const struct kv *kv, const struct kv_pool_rec *p, uint32_t a, uint32_t b)
{
    bool is_a_expired = is_expired(kv, kv_retained(kv, p, a));
    bool is_b_expired = is_expired(kv, kv_retained(kv, p, b));
    if (is_a_expired != is_b_expired)
        return is_a_expired;
    return kv_goes_at(kv, p, a) < kv_goes_at(kv, p, b);
}

/* The first block to evict, plus one, of the lists that begin at begin; 0: they are empty. */
static uint32_t first_of(const struct kv *kv, const struct kv_pool_rec *p,
                         const uint32_t (*begin)[KV_N_LISTS])
{
    for (uint32_t i = 0; i < KV_N_PRIORITIES; i++) {
        uint32_t best = 0;
        for (uint64_t lists = p->listed[i]; lists != 0; lists &= lists - 1) {
            uint32_t at = begin[i][__builtin_ctzll(lists)];
            if (at != 0 && (best == 0 || goes_before(kv, p, at - 1, best - 1)))
                best = at;
        }
        if (best != 0)
            return best;
    }
    return 0;
}

uint32_t kv_lru_first(const struct kv *kv, const struct kv_pool_rec *p)
{
    return first_of(kv, p, p->oldest) - 1;
}

void kv_lru_count_eviction(struct kv *kv, const struct kv_pool_rec *p, uint32_t block)
{
    struct kv_stats *s = &kv->heads->stats;
    const struct kv_retained_rec *t = kv_retained(kv, p, block);
    kv_count(&s->evictions, 1);
    kv_count(&s->evictions_expired, is_expired(kv, t));
    kv_count(&s->eviction_age_seconds, age_s(kv, t));
}

uint32_t kv_pool_next_evicted(const struct kv *kv, kv_pool_id pool, uint32_t n,
                              struct kv_evictable *out)
{
    const struct kv_pool_rec *p = kv_pool_live(kv, pool.index);
    uint32_t at[KV_N_PRIORITIES][KV_N_LISTS], i = 0;
    if (p == NULL)
        return 0;
    memcpy(at, p->oldest, sizeof at);
    for (; i < n; i++) {
        uint32_t block = first_of(kv, p, at);
        if (block == 0)
            break;
        const struct kv_retained_rec *t = kv_retained(kv, p, block - 1);
        out[i] = (struct kv_evictable){
            .block = block - 1,
            .index = kv_published(kv, p, block - 1)->index,
            .priority = t->priority + KV_MIN_PRIORITY,
            .age_s = age_s(kv, t),
            .life_s = t->life == 0 ? 0 : 1u << (t->life - 1),
            .is_expired = is_expired(kv, t),
        };
        at[t->priority][kv_list_of(t)] = kv_block(kv, p, block - 1)->next;
    }
    return i;
}

/* Merges two ordered lists that are linked by next. Indices are plus one. */
static uint32_t merge(struct kv *kv, const struct kv_pool_rec *p, uint32_t a, uint32_t b)
{
    uint32_t head = 0, *end = &head;
    while (a != 0 && b != 0) {
        bool is_a = kv_published(kv, p, a - 1)->used <= kv_published(kv, p, b - 1)->used;
        uint32_t *first = is_a ? &a : &b;
        *end = *first;
        end = &kv_block(kv, p, *first - 1)->next;
        *first = *end;
    }
    *end = a != 0 ? a : b;
    return head;
}

void kv_lru_build(struct kv *kv, struct kv_pool_rec *p, uint32_t blocks)
{
    uint32_t sorted[32] = {0}; /* [i]: empty, or a list of 2^i blocks */
    uint32_t all = 0;
    for (uint32_t at = blocks; at != 0;) {
        uint32_t one = at, i = 0;
        at = kv_block(kv, p, one - 1)->next;
        kv_block(kv, p, one - 1)->next = 0;
        for (; sorted[i] != 0; i++) {
            one = merge(kv, p, sorted[i], one);
            sorted[i] = 0;
        }
        sorted[i] = one;
    }
    for (uint32_t i = 0; i < 32; i++)
        all = merge(kv, p, sorted[i], all);
    for (uint32_t at = all; at != 0;) {
        uint32_t next = kv_block(kv, p, at - 1)->next;
        kv_block(kv, p, at - 1)->next = 0;
        list(kv, p, at - 1);
        at = next;
    }
}
