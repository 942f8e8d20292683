/* host_tier.c: see host_tier.h.
 *
 * A shelf is what a pool has: pieces of memory, each cut into places, and the places that are free.
 * Blocks that are there are in a tree by content (tsearch(3)) and in a list by last use, which
 * those that somebody holds leave.
 */
#define _GNU_SOURCE
#include "cache/host_tier.h"

#include <search.h>
#include <stdlib.h>
#include <string.h>
#include <sys/queue.h>
#include <xxhash.h>

enum { PIECE_BYTES = 8 << 20 };
enum place_state { PLACE_FREE, PLACE_TAKEN, PLACE_THERE };

struct host_block {
    struct kv_content content; /* first: what the tree compares; ids are the piece's */
    TAILQ_ENTRY(host_block) link; /* of the free ones of its shelf, or by last use */
    struct piece *piece;
    uint8_t *bytes;
    XXH128_hash_t checksum;
    enum place_state state;
    uint32_t n_holds;
    bool is_forgotten; /* held, but not in the tree any more */
};
TAILQ_HEAD(block_list, host_block);

struct piece {
    LIST_ENTRY(piece) link; /* of its shelf */
    struct shelf *shelf;
    uint8_t *memory;
    uint32_t *ids;
    uint32_t n_places, n_used; /* used: not free */
    struct host_block places[];
};

struct shelf {
    LIST_ENTRY(shelf) link;
    uint32_t pool, n_ids;
    size_t block_bytes;
    LIST_HEAD(, piece) pieces;
    struct block_list free;
};

struct host_tier {
    struct host_tier_memory memory;
    uint64_t limit_bytes;
    LIST_HEAD(, shelf) shelves;
    struct block_list by_use; /* oldest first */
    void *tree;
    struct host_tier_stats stats;
};

static int compare_words(uint64_t a, uint64_t b)
{
    return a < b ? -1 : a > b;
}

/* By key first: it differs nearly always. */
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

attn_status host_tier_open(uint64_t limit_bytes, const struct host_tier_memory *m,
                           struct host_tier **out_tier)
{
    struct host_tier *t = calloc(1, sizeof *t);
    if (t == NULL)
        return ATTN_ENOMEM;
    t->memory = *m;
    t->limit_bytes = limit_bytes;
    LIST_INIT(&t->shelves);
    TAILQ_INIT(&t->by_use);
    *out_tier = t;
    return ATTN_OK;
}

void host_tier_close(struct host_tier *t)
{
    if (t == NULL)
        return;
    while (!LIST_EMPTY(&t->shelves))
        host_tier_drop_pool(t, LIST_FIRST(&t->shelves)->pool);
    free(t);
}

void host_tier_stats_read(const struct host_tier *t, struct host_tier_stats *out)
{
    *out = t->stats;
}

/* --- memory ----------------------------------------------------------------------------------- */

static struct shelf *shelf_find(const struct host_tier *t, uint32_t pool)
{
    struct shelf *s;
    LIST_FOREACH(s, &t->shelves, link)
        if (s->pool == pool)
            return s;
    return NULL;
}

static struct shelf *shelf_of(struct host_tier *t, uint32_t pool, uint32_t n_ids,
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
    LIST_INSERT_HEAD(&t->shelves, s, link);
    return s;
}

/* false: the limit is reached, or there is no memory. */
static bool piece_add(struct host_tier *t, struct shelf *s)
{
    uint64_t most = (t->limit_bytes - t->stats.bytes) / s->block_bytes;
    uint64_t n = s->block_bytes >= PIECE_BYTES ? 1 : PIECE_BYTES / s->block_bytes;
    n = n > most ? most : n;
    if (n == 0)
        return false;
    struct piece *p = calloc(1, sizeof *p + n * sizeof p->places[0]);
    uint32_t *ids = p == NULL ? NULL : calloc(n * s->n_ids, sizeof *ids);
    uint8_t *memory = ids == NULL ? NULL : t->memory.take(t->memory.arg, n * s->block_bytes);
    if (memory == NULL) {
        free(ids);
        free(p);
        return false;
    }
    p->shelf = s;
    p->memory = memory;
    p->ids = ids;
    p->n_places = (uint32_t)n;
    for (uint32_t i = 0; i < p->n_places; i++) {
        struct host_block *b = &p->places[i];
        b->piece = p;
        b->bytes = memory + i * s->block_bytes;
        b->content.ids = ids + (size_t)i * s->n_ids;
        TAILQ_INSERT_TAIL(&s->free, b, link);
    }
    LIST_INSERT_HEAD(&s->pieces, p, link);
    t->stats.bytes += n * s->block_bytes;
    return true;
}

static void piece_remove(struct host_tier *t, struct piece *p)
{
    struct shelf *s = p->shelf;
    for (uint32_t i = 0; i < p->n_places; i++)
        TAILQ_REMOVE(&s->free, &p->places[i], link);
    LIST_REMOVE(p, link);
    t->stats.bytes -= p->n_places * s->block_bytes;
    t->memory.give(t->memory.arg, p->memory, p->n_places * s->block_bytes);
    free(p->ids);
    free(p);
}

static void place_free(struct host_block *b)
{
    b->state = PLACE_FREE;
    b->piece->n_used--;
    TAILQ_INSERT_HEAD(&b->piece->shelf->free, b, link);
}

/* Nobody finds it any more; who holds it may go on. */
static void forget(struct host_tier *t, struct host_block *b)
{
    tdelete(&b->content, &t->tree, compare);
    t->stats.blocks--;
    if (b->n_holds > 0) {
        b->is_forgotten = true;
        return;
    }
    TAILQ_REMOVE(&t->by_use, b, link);
    place_free(b);
}

/* Makes one place of the shelf free at least; false: it can't. */
static bool make_room(struct host_tier *t, struct shelf *s)
{
    if (piece_add(t, s))
        return true;
    struct host_block *oldest = TAILQ_FIRST(&t->by_use);
    if (oldest == NULL)
        return false;
    struct piece *p = oldest->piece;
    if (p->shelf == s) {
        forget(t, oldest);
        t->stats.evictions++;
        return true;
    }
    for (uint32_t i = 0; i < p->n_places; i++) {
        struct host_block *b = &p->places[i];
        if (b->state == PLACE_THERE && b->n_holds == 0) {
            forget(t, b);
            t->stats.evictions++;
        }
    }
    if (p->n_used > 0)
        return false;
    piece_remove(t, p);
    return true;
}

/* --- blocks ----------------------------------------------------------------------------------- */

static void touch(struct host_tier *t, struct host_block *b)
{
    if (b->n_holds > 0)
        return; /* when it is let go of */
    TAILQ_REMOVE(&t->by_use, b, link);
    TAILQ_INSERT_TAIL(&t->by_use, b, link);
}

static struct host_block *look_up(const struct host_tier *t, const struct kv_content *c)
{
    struct host_block **at = tfind(c, (void *const *)&t->tree, compare);
    return at == NULL ? NULL : *at;
}

struct host_block *host_tier_place(struct host_tier *t, const struct kv_content *c,
                                   size_t block_bytes)
{
    struct host_block *b = look_up(t, c);
    if (b != NULL && b->content.serial == c->serial) {
        touch(t, b);
        return NULL;
    }
    struct shelf *s = shelf_of(t, c->pool, c->n_ids, block_bytes);
    while (s != NULL && TAILQ_EMPTY(&s->free))
        if (!make_room(t, s))
            break;
    if (s == NULL || TAILQ_EMPTY(&s->free)) {
        t->stats.no_room++;
        return NULL;
    }
    b = TAILQ_FIRST(&s->free);
    TAILQ_REMOVE(&s->free, b, link);
    b->piece->n_used++;
    b->state = PLACE_TAKEN;
    uint32_t *ids = b->piece->ids + (size_t)(b - b->piece->places) * s->n_ids;
    memcpy(ids, c->ids, s->n_ids * sizeof ids[0]);
    b->content = *c;
    b->content.ids = ids;
    return b;
}

void host_tier_filled(struct host_tier *t, struct host_block *b)
{
    struct host_block *old = look_up(t, &b->content);
    if (old != NULL)
        forget(t, old);
    if (tsearch(b, &t->tree, compare) == NULL) {
        t->stats.no_room++;
        host_tier_drop(t, b);
        return;
    }
    b->checksum = XXH3_128bits(b->bytes, b->piece->shelf->block_bytes);
    b->state = PLACE_THERE;
    b->n_holds = 0;
    b->is_forgotten = false;
    TAILQ_INSERT_TAIL(&t->by_use, b, link);
    t->stats.blocks++;
    t->stats.filled++;
}

struct host_block *host_tier_find(struct host_tier *t, const struct kv_content *c)
{
    struct host_block *b = look_up(t, c);
    if (b == NULL)
        return NULL;
    touch(t, b);
    t->stats.hits++;
    return b;
}

uint64_t host_tier_serial(const struct host_tier *t, const struct kv_content *c)
{
    const struct host_block *b = look_up(t, c);
    return b == NULL ? 0 : b->content.serial;
}

void host_tier_hold(struct host_tier *t, struct host_block *b)
{
    if (b->n_holds++ == 0)
        TAILQ_REMOVE(&t->by_use, b, link);
}

void host_tier_let_go(struct host_tier *t, struct host_block *b)
{
    if (--b->n_holds > 0)
        return;
    if (b->is_forgotten)
        place_free(b);
    else
        TAILQ_INSERT_TAIL(&t->by_use, b, link);
}

bool host_tier_verify(struct host_tier *t, struct host_block *b)
{
    XXH128_hash_t now = XXH3_128bits(b->bytes, b->piece->shelf->block_bytes);
    if (XXH128_isEqual(now, b->checksum))
        return true;
    t->stats.damaged++;
    if (!b->is_forgotten)
        forget(t, b);
    return false;
}

void host_tier_drop(struct host_tier *t, struct host_block *b)
{
    if (b->state == PLACE_TAKEN)
        place_free(b);
    else
        forget(t, b);
}

void host_tier_drop_pool(struct host_tier *t, uint32_t pool)
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

void *host_block_bytes(const struct host_block *b)
{
    return b->bytes;
}

uint64_t host_block_serial(const struct host_block *b)
{
    return b->content.serial;
}

/* --- check ------------------------------------------------------------------------------------ */

const char *host_tier_check(const struct host_tier *t)
{
    uint64_t n_there = 0, n_listed = 0, n_held = 0, n_bytes = 0;
    const struct shelf *s;
    const struct piece *p;
    const struct host_block *b;
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
                n_held += b->n_holds > 0;
                if (look_up(t, &b->content) != b)
                    return "a block is not found";
            }
            if (n_used != p->n_used)
                return "places of a piece are counted wrongly";
        }
        TAILQ_FOREACH(b, &s->free, link)
            n_listed_free++;
        if (n_free != n_listed_free)
            return "free places are lost";
    }
    TAILQ_FOREACH(b, &t->by_use, link)
        n_listed++;
    if (n_there != t->stats.blocks || n_listed + n_held != n_there)
        return "blocks are counted wrongly";
    return n_bytes != t->stats.bytes || n_bytes > t->limit_bytes ? "bytes are counted wrongly"
                                                                 : NULL;
}
