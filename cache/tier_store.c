/* tier_store.c: finds evicted blocks by content and hands out places for their bytes; the block
 * used longest ago makes room.
 *
 * A shelf belongs to a pool: pieces of memory, each cut into places, and the free places. Stored
 * blocks are in a tree by content (tsearch(3)) and, unless they are held, in a list by last use.
 */
#define _GNU_SOURCE
#include "cache/tier_store.h"

#include <search.h>
#include <stdlib.h>
#include <string.h>
#include <sys/queue.h>

enum { PIECE_BYTES = 8 << 20 };
enum place_state { PLACE_FREE, PLACE_TAKEN, PLACE_THERE };

struct tier_block {
    struct kv_content content; /* first member: the tree compares it; ids are the piece's */
    TAILQ_ENTRY(tier_block) link; /* in the free list of its shelf, or by last use */
    TAILQ_ENTRY(tier_block) own_link; /* by last use, within its shelf */
    struct piece *piece;
    uint64_t place, sum[2];
    enum place_state state;
    uint32_t used_s;
    uint32_t n_holds;
    bool is_forgotten; /* held, but no longer in the tree */
};
TAILQ_HEAD(block_list, tier_block);

struct piece {
    LIST_ENTRY(piece) link; /* of its shelf */
    struct shelf *shelf;
    uint64_t memory;
    uint32_t *ids;
    uint32_t n_places, n_used; /* n_used: not free */
    struct tier_block places[];
};

struct shelf {
    LIST_ENTRY(shelf) link;
    uint32_t pool, n_ids;
    size_t block_bytes;
    LIST_HEAD(, piece) pieces;
    struct block_list free, by_use;
    uint64_t n_free;
};

struct tier_store {
    struct tier_memory memory;
    uint64_t limit_bytes, record_bytes;
    LIST_HEAD(, shelf) shelves;
    struct block_list by_use; /* oldest first */
    void *tree;
    uint32_t now_s;
    struct tier_store_stats stats;
};

static int compare_words(uint64_t a, uint64_t b)
{
    return a < b ? -1 : a > b;
}

/* The key comes first: it differs nearly always. */
static int compare(const void *x, const void *y)
{
    const struct kv_content *a = x, *b = y;
    int c = compare_words(a->key[0], b->key[0]);
    c = c != 0 ? c : compare_words(a->key[1], b->key[1]);
    c = c != 0 ? c : compare_words(a->parent, b->parent);
    c = c != 0 ? c : compare_words(a->adapter, b->adapter);
    c = c != 0 ? c : compare_words(a->pool, b->pool);
    c = c != 0 ? c : compare_words(a->tenant, b->tenant);
    c = c != 0 ? c : compare_words(a->index, b->index);
    c = c != 0 ? c : compare_words(a->n_ids, b->n_ids);
    return c != 0 ? c : memcmp(a->ids, b->ids, a->n_ids * sizeof a->ids[0]);
}

attn_status tier_store_open(uint64_t limit_bytes, const struct tier_memory *m,
                            struct tier_store **out_store)
{
    struct tier_store *t = calloc(1, sizeof *t);
    if (t == NULL)
        return ATTN_ENOMEM;
    t->memory = *m;
    t->limit_bytes = limit_bytes;
    LIST_INIT(&t->shelves);
    TAILQ_INIT(&t->by_use);
    *out_store = t;
    return ATTN_OK;
}

void tier_store_close(struct tier_store *t)
{
    if (t == NULL)
        return;
    while (!LIST_EMPTY(&t->shelves))
        tier_store_drop_pool(t, LIST_FIRST(&t->shelves)->pool);
    free(t);
}

void tier_store_set_time(struct tier_store *t, uint32_t now_s)
{
    t->now_s = now_s;
}

void tier_store_stats_read(const struct tier_store *t, struct tier_store_stats *out)
{
    *out = t->stats;
}

/* --- memory ----------------------------------------------------------------------------------- */

static struct shelf *shelf_find(const struct tier_store *t, uint32_t pool)
{
    struct shelf *s;
    LIST_FOREACH(s, &t->shelves, link)
        if (s->pool == pool)
            return s;
    return NULL;
}

static struct shelf *shelf_of(struct tier_store *t, uint32_t pool, uint32_t n_ids,
                              size_t block_bytes)
{
    struct shelf *s = shelf_find(t, pool);
    if (s != NULL)
        return s;
    s = calloc(1, sizeof *s);
    if (s == NULL)
        return NULL;
    *s = (struct shelf){.pool = pool, .n_ids = n_ids, .block_bytes = block_bytes};
    LIST_INIT(&s->pieces);
    TAILQ_INIT(&s->free);
    TAILQ_INIT(&s->by_use);
    LIST_INSERT_HEAD(&t->shelves, s, link);
    return s;
}

static uint64_t record_bytes(const struct shelf *s, uint64_t n_places)
{
    return sizeof(struct piece) +
           n_places * (sizeof(struct tier_block) + s->n_ids * sizeof(uint32_t));
}

/* Adds a piece to the shelf; false: the limit is reached, or there is no memory. */
static bool piece_add(struct tier_store *t, struct shelf *s)
{
    uint64_t most = (t->limit_bytes - t->stats.bytes) / s->block_bytes;
    uint64_t n = s->block_bytes >= PIECE_BYTES ? 1 : PIECE_BYTES / s->block_bytes;
    n = n > most ? most : n;
    uint64_t most_records = t->memory.most_record_bytes;
    if (n == 0 || (most_records > 0 && record_bytes(s, n) > most_records - t->record_bytes))
        return false;
    struct piece *p = calloc(1, sizeof *p + n * sizeof p->places[0]);
    uint32_t *ids = p == NULL ? NULL : calloc(n * s->n_ids, sizeof *ids);
    uint64_t memory;
    if (ids == NULL || !t->memory.take(t->memory.arg, n * s->block_bytes, &memory)) {
        free(ids);
        free(p);
        return false;
    }
    p->shelf = s;
    p->memory = memory;
    p->ids = ids;
    p->n_places = (uint32_t)n;
    for (uint32_t i = 0; i < p->n_places; i++) {
        struct tier_block *b = &p->places[i];
        b->piece = p;
        b->place = memory + i * s->block_bytes;
        b->content.ids = ids + (size_t)i * s->n_ids;
        TAILQ_INSERT_TAIL(&s->free, b, link);
    }
    LIST_INSERT_HEAD(&s->pieces, p, link);
    t->record_bytes += record_bytes(s, n);
    s->n_free += n;
    t->stats.bytes += n * s->block_bytes;
    return true;
}

static void piece_remove(struct tier_store *t, struct piece *p)
{
    struct shelf *s = p->shelf;
    for (uint32_t i = 0; i < p->n_places; i++)
        TAILQ_REMOVE(&s->free, &p->places[i], link);
    LIST_REMOVE(p, link);
    s->n_free -= p->n_places;
    t->record_bytes -= record_bytes(s, p->n_places);
    t->stats.bytes -= p->n_places * s->block_bytes;
    t->memory.give(t->memory.arg, p->memory, p->n_places * s->block_bytes);
    free(p->ids);
    free(p);
}

static void discharge(struct tier_store *t, uint32_t tenant, uint64_t bytes)
{
    if (t->memory.discharge != NULL)
        t->memory.discharge(t->memory.arg, tenant, bytes);
}

static void place_free(struct tier_store *t, struct tier_block *b)
{
    discharge(t, b->content.tenant, b->piece->shelf->block_bytes);
    b->state = PLACE_FREE;
    b->piece->n_used--;
    b->piece->shelf->n_free++;
    TAILQ_INSERT_HEAD(&b->piece->shelf->free, b, link);
}

/* Counts n more blocks of this size that can be found; n may be negative. */
static void count(struct tier_store *t, const struct tier_block *b, int n)
{
    t->stats.blocks += (uint64_t)n;
    t->stats.used_bytes += (uint64_t)(n * (int64_t)b->piece->shelf->block_bytes);
}

static void list_by_use(struct tier_store *t, struct tier_block *b)
{
    TAILQ_INSERT_TAIL(&t->by_use, b, link);
    TAILQ_INSERT_TAIL(&b->piece->shelf->by_use, b, own_link);
}

static void unlist_by_use(struct tier_store *t, struct tier_block *b)
{
    TAILQ_REMOVE(&t->by_use, b, link);
    TAILQ_REMOVE(&b->piece->shelf->by_use, b, own_link);
}

/* The block cannot be found any more; holds of it stay valid. */
static void forget(struct tier_store *t, struct tier_block *b)
{
    tdelete(&b->content, &t->tree, compare);
    count(t, b, -1);
    if (b->n_holds > 0) {
        b->is_forgotten = true;
        return;
    }
    unlist_by_use(t, b);
    place_free(t, b);
}

static void evict(struct tier_store *t, struct tier_block *b)
{
    t->stats.evictions++;
    t->stats.eviction_age_seconds += t->now_s > b->used_s ? t->now_s - b->used_s : 0;
    forget(t, b);
}

/* Frees at least one place for the shelf, of its own or as memory for a piece; false: it cannot. */
static bool make_room(struct tier_store *t, struct shelf *s)
{
    if (piece_add(t, s))
        return true;
    struct tier_block *oldest = TAILQ_FIRST(&t->by_use);
    if (oldest == NULL)
        return false;
    struct piece *p = oldest->piece;
    if (p->shelf == s) {
        evict(t, oldest);
        return true;
    }
    for (uint32_t i = 0; i < p->n_places; i++) {
        struct tier_block *b = &p->places[i];
        if (b->state == PLACE_THERE && b->n_holds == 0)
            evict(t, b);
    }
    if (p->n_used > 0)
        return false;
    piece_remove(t, p);
    return true;
}

/* --- blocks ----------------------------------------------------------------------------------- */

static void touch(struct tier_store *t, struct tier_block *b)
{
    b->used_s = t->now_s;
    if (b->n_holds > 0)
        return; /* listed again when it is released */
    unlist_by_use(t, b);
    list_by_use(t, b);
}

static struct tier_block *look_up(const struct tier_store *t, const struct kv_content *c)
{
    struct tier_block **at = tfind(c, (void *const *)&t->tree, compare);
    return at == NULL ? NULL : *at;
}

/* Charges the tenant for one more block of the shelf. At its bound, the blocks used longest ago are
 * evicted. */
static bool charge(struct tier_store *t, struct shelf *s, uint32_t tenant)
{
    while (t->memory.charge != NULL && !t->memory.charge(t->memory.arg, tenant, s->block_bytes)) {
        if (TAILQ_EMPTY(&s->by_use))
            return false;
        evict(t, TAILQ_FIRST(&s->by_use));
    }
    return true;
}

struct tier_block *tier_store_place(struct tier_store *t, const struct kv_content *c,
                                    size_t block_bytes)
{
    struct tier_block *b = look_up(t, c);
    if (b != NULL && b->content.serial == c->serial) {
        touch(t, b);
        return NULL;
    }
    struct shelf *s = shelf_of(t, c->pool, c->n_ids, block_bytes);
    bool is_charged = s != NULL && charge(t, s, c->tenant);
    while (is_charged && TAILQ_EMPTY(&s->free))
        if (!make_room(t, s))
            break;
    if (!is_charged || TAILQ_EMPTY(&s->free)) {
        if (is_charged)
            discharge(t, c->tenant, s->block_bytes);
        t->stats.no_room++;
        return NULL;
    }
    b = TAILQ_FIRST(&s->free);
    TAILQ_REMOVE(&s->free, b, link);
    s->n_free--;
    b->piece->n_used++;
    b->state = PLACE_TAKEN;
    b->n_holds = 0;
    b->is_forgotten = false;
    uint32_t *ids = b->piece->ids + (size_t)(b - b->piece->places) * s->n_ids;
    memcpy(ids, c->ids, s->n_ids * sizeof ids[0]);
    b->content = *c;
    b->content.ids = ids;
    return b;
}

void tier_store_filled(struct tier_store *t, struct tier_block *b, const uint64_t sum[2])
{
    struct tier_block *old = look_up(t, &b->content);
    if (old != NULL)
        forget(t, old);
    if (tsearch(b, &t->tree, compare) == NULL) {
        t->stats.no_room++;
        tier_store_drop(t, b);
        return;
    }
    memcpy(b->sum, sum, sizeof b->sum);
    b->state = PLACE_THERE;
    b->used_s = t->now_s;
    list_by_use(t, b);
    count(t, b, 1);
    t->stats.filled++;
}

struct tier_block *tier_store_find(struct tier_store *t, const struct kv_content *c)
{
    struct tier_block *b = look_up(t, c);
    if (b == NULL)
        return NULL;
    touch(t, b);
    t->stats.hits++;
    return b;
}

uint64_t tier_store_serial(const struct tier_store *t, const struct kv_content *c)
{
    const struct tier_block *b = look_up(t, c);
    return b == NULL ? 0 : b->content.serial;
}

void tier_store_hold(struct tier_store *t, struct tier_block *b)
{
    if (b->n_holds++ == 0)
        unlist_by_use(t, b);
}

void tier_store_release(struct tier_store *t, struct tier_block *b)
{
    if (--b->n_holds > 0)
        return;
    if (b->is_forgotten)
        place_free(t, b);
    else
        list_by_use(t, b);
}

bool tier_store_verify(struct tier_store *t, struct tier_block *b, const uint64_t sum[2])
{
    if (memcmp(sum, b->sum, sizeof b->sum) == 0)
        return true;
    t->stats.damaged++;
    tier_store_drop(t, b);
    return false;
}

void tier_store_drop(struct tier_store *t, struct tier_block *b)
{
    if (b->state == PLACE_TAKEN)
        place_free(t, b);
    else if (!b->is_forgotten)
        forget(t, b);
}

void tier_store_drop_pool(struct tier_store *t, uint32_t pool)
{
    struct shelf *s = shelf_find(t, pool);
    if (s == NULL)
        return;
    while (!LIST_EMPTY(&s->pieces)) {
        struct piece *p = LIST_FIRST(&s->pieces);
        for (uint32_t i = 0; i < p->n_places; i++)
            if (p->places[i].state == PLACE_THERE)
                forget(t, &p->places[i]);
        piece_remove(t, p);
    }
    LIST_REMOVE(s, link);
    free(s);
}

uint32_t tier_store_next_out(const struct tier_store *t, uint32_t n, struct tier_block **out)
{
    uint32_t i = 0;
    for (struct tier_block *b = TAILQ_FIRST(&t->by_use); b != NULL && i < n; i++) {
        out[i] = b;
        b = TAILQ_NEXT(b, link);
    }
    return i;
}

uint64_t tier_store_room(const struct tier_store *t, uint32_t pool)
{
    const struct shelf *s = shelf_find(t, pool);
    return t->limit_bytes - t->stats.bytes + (s == NULL ? 0 : s->n_free * s->block_bytes);
}

uint64_t tier_block_place(const struct tier_block *b)
{
    return b->place;
}

size_t tier_block_bytes(const struct tier_block *b)
{
    return b->piece->shelf->block_bytes;
}

const struct kv_content *tier_block_content(const struct tier_block *b)
{
    return &b->content;
}

const uint64_t *tier_block_sum(const struct tier_block *b)
{
    return b->sum;
}

/* --- check ------------------------------------------------------------------------------------ */

const char *tier_store_check(const struct tier_store *t)
{
    uint64_t n_there = 0, n_listed = 0, n_held = 0, n_bytes = 0, n_used_bytes = 0;
    const struct shelf *s;
    const struct piece *p;
    const struct tier_block *b;
    LIST_FOREACH(s, &t->shelves, link) {
        uint64_t n_free = 0, n_listed_free = 0;
        LIST_FOREACH(p, &s->pieces, link) {
            uint32_t n_used = 0;
            n_bytes += p->n_places * s->block_bytes;
            for (uint32_t i = 0; i < p->n_places; i++) {
                b = &p->places[i];
                n_used += b->state != PLACE_FREE;
                n_free += b->state == PLACE_FREE;
                if (b->state != PLACE_THERE || b->is_forgotten)
                    continue;
                n_there++;
                n_used_bytes += s->block_bytes;
                n_held += b->n_holds > 0;
                if (look_up(t, &b->content) != b)
                    return "a block is not found";
            }
            if (n_used != p->n_used)
                return "places of a piece are counted wrongly";
        }
        TAILQ_FOREACH(b, &s->free, link)
            n_listed_free++;
        if (n_free != n_listed_free || n_free != s->n_free)
            return "free places are lost";
    }
    TAILQ_FOREACH(b, &t->by_use, link)
        n_listed++;
    if (n_there != t->stats.blocks || n_listed + n_held != n_there)
        return "blocks are counted wrongly";
    return n_bytes != t->stats.bytes || n_used_bytes != t->stats.used_bytes ||
                   n_bytes > t->limit_bytes
               ? "bytes are counted wrongly"
               : NULL;
}
