/* blocks.c: lists of published blocks and of their events (cache/kv_tier.h), as JSON.
 *
 * A page has as many token ids as fit an answer, so ids are hex digits: making them takes the
 * engine's time.
 */
#include "daemon/engine/operator/blocks.h"

#include <inttypes.h>
#include <stdio.h>

#include "cache/kv_tier.h"
#include "daemon/engine/core/peers.h"
#include "daemon/engine/core/pool_table.h"

enum {
    MAX_LISTED = 400, /* entries of a page */
    MAX_IDS = 1 << 14, /* of a page; 8 digits each */
    MAX_IDS_OF_BLOCK = 256,
    MAX_LOOKED_AT = 1 << 14, /* records that one page walks over */
    /* positions: the card is above CARD_SHIFT; of blocks, the pool is above POOL_SHIFT */
    CARD_SHIFT = 56,
    POOL_SHIFT = 32,
};

static uint64_t below_card(uint64_t after)
{
    return after & ((UINT64_C(1) << CARD_SHIFT) - 1);
}

static json_t *position(const struct engine *e, uint64_t at)
{
    return json_integer((json_int_t)((uint64_t)e->env.card << CARD_SHIFT | at));
}

uint32_t blocks_device(const struct engine *e, uint64_t after)
{
    uint64_t card = after >> CARD_SHIFT;
    return card < peers_n(e) ? (uint32_t)card : 0;
}

/* Eight digits for each id, the most significant first. */
static json_t *hex(const uint32_t *ids, uint32_t n)
{
    static const char digits[] = "0123456789abcdef";
    char text[8 * MAX_IDS_OF_BLOCK];
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t k = 0; k < 8; k++)
            text[8 * i + k] = digits[ids[i] >> (28 - 4 * k) & 15];
    return json_stringn(text, 8 * n);
}

static void add_pool(const struct engine *e, json_t *o, uint32_t index)
{
    const struct pool *p = pool_of_kv(e, (kv_pool_id){index});
    if (p == NULL)
        return;
    json_object_set_new(o, "pool", json_string(p->spec.wire->name));
    const struct tenant *t = tenants_of_id(e->env.tenants, p->tenant);
    if (e->env.tenants != NULL)
        json_object_set_new(o, "tenant", json_string(t == NULL ? "?" : t->name));
}

/* What the block holds, and its place: a publication may be in two blocks for a moment. */
static void add_content(const struct engine *e, json_t *o, const struct kv_content *c)
{
    char adapter[24]; /* JSON numbers end at 2^53 */
    snprintf(adapter, sizeof adapter, "%" PRIu64, c->adapter);
    add_pool(e, o, c->pool);
    json_object_set_new(o, "parent", json_integer((json_int_t)c->parent));
    json_object_set_new(o, "place", json_integer(c->index));
    if (c->adapter != 0)
        json_object_set_new(o, "adapter", json_string(adapter));
    json_object_set_new(o, "ids", hex(c->ids, c->n_ids));
}

json_t *list_blocks(struct engine *e, const Attnd__Inspect *ask)
{
    json_t *list = json_array();
    uint64_t after = below_card(ask->after), number = kv_events_number(e->env.kv);
    struct kv_published_at at = {(uint32_t)(after >> POOL_SHIFT), (uint32_t)after};
    struct kv_content c;
    uint32_t n_most = MAX_LOOKED_AT, n_ids = 0;
    attn_status st = ATTN_OK;
    while (n_ids + MAX_IDS_OF_BLOCK <= MAX_IDS && json_array_size(list) < MAX_LISTED &&
           (st = kv_published_next(e->env.kv, &at, &n_most, &c)) == ATTN_OK) {
        json_t *o =
            json_pack("{s:I, s:I}", "serial", (json_int_t)c.serial, "block", (json_int_t)at.block);
        add_content(e, o, &c);
        json_array_append_new(list, o);
        n_ids += c.n_ids;
        at.block++;
    }
    uint32_t next_card = e->env.card + 1;
    json_t *next =
        st != ATTN_ENOTFOUND
            ? position(e, (uint64_t)at.pool << POOL_SHIFT | at.block)
            : json_integer(next_card < peers_n(e) ? (json_int_t)next_card << CARD_SHIFT : 0);
    return json_pack("{s:o, s:o, s:o, s:I}", "blocks", list, "next", next, "number",
                     position(e, number), "card", (json_int_t)e->env.card);
}

static json_t *event_object(const struct engine *e, const struct kv_event *v, uint32_t *n_ids)
{
    static const char *const names[] = {
        [KV_EVENT_PUBLISHED] = "published",
        [KV_EVENT_EVICTED] = "evicted",
        [KV_EVENT_POOL_MADE] = "pool_made",
        [KV_EVENT_POOL_GONE] = "pool_gone",
    };
    json_t *o = json_pack("{s:s}", "event", names[v->kind]);
    struct kv_content c;
    if (v->kind == KV_EVENT_POOL_MADE || v->kind == KV_EVENT_POOL_GONE) {
        json_object_set_new(o, "pool_index", json_integer(v->pool));
        if (v->kind == KV_EVENT_POOL_MADE)
            add_pool(e, o, v->pool);
        return o;
    }
    json_object_set_new(o, "serial", json_integer((json_int_t)v->serial));
    json_object_set_new(o, "block", json_integer(v->block));
    if (kv_event_content(e->env.kv, v, &c)) {
        add_content(e, o, &c);
        *n_ids += c.n_ids;
    }
    return o;
}

json_t *list_block_events(struct engine *e, const Attnd__Inspect *ask)
{
    json_t *list = json_array();
    uint64_t number = below_card(ask->after);
    bool is_behind = !kv_events_has(e->env.kv, number);
    struct kv_event v;
    uint32_t n_ids = 0;
    while (n_ids + MAX_IDS_OF_BLOCK <= MAX_IDS && json_array_size(list) < MAX_LISTED &&
           kv_event_next(e->env.kv, number, &v)) {
        json_array_append_new(list, event_object(e, &v, &n_ids));
        number++;
    }
    return json_pack("{s:o, s:o, s:b, s:b}", "block_events", list, "next", position(e, number),
                     "behind", (int)is_behind, "more",
                     (int)(!is_behind && number < kv_events_number(e->env.kv)));
}
