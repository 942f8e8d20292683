/* reader.c: keeps an index from events and snapshots, as kv_tier.h tells a reader to. */
#include "tests/cache/reader.h"

#include <stdio.h>
#include <string.h>

/* Without pointers and the key, which a reader has no use for. */
static struct reader_entry entry_of(const struct kv_content *c, uint32_t block)
{
    struct reader_entry e;
    memset(&e, 0, sizeof e); /* entries are compared as bytes */
    e.content = *c;
    e.block = block;
    uint64_t h = c->n_ids;
    for (uint32_t i = 0; i < c->n_ids; i++)
        h = (h ^ c->ids[i]) * UINT64_C(0x9e3779b97f4a7c15);
    e.content.key[0] = h;
    e.content.key[1] = 0;
    e.content.ids = NULL;
    return e;
}

static struct reader_entry *find(const struct reader *r, uint64_t serial, uint32_t block)
{
    for (uint32_t i = 0; i < r->n; i++)
        if (r->known[i].content.serial == serial && r->known[i].block == block)
            return (struct reader_entry *)&r->known[i];
    return NULL;
}

static void learn(struct reader *r, const struct kv_content *c, uint32_t block)
{
    if (find(r, c->serial, block) == NULL && r->n < sizeof r->known / sizeof r->known[0])
        r->known[r->n++] = entry_of(c, block);
}

static void take(struct reader *r, const struct kv *kv, const struct kv_event *e)
{
    struct kv_content c;
    struct reader_entry *known = find(r, e->serial, e->block);
    r->n_events++;
    if (e->kind == KV_EVENT_PUBLISHED && kv_event_content(kv, e, &c))
        learn(r, &c, e->block);
    else if (e->kind == KV_EVENT_PUBLISHED)
        r->n_gone++;
    else if (e->kind == KV_EVENT_EVICTED && known != NULL)
        *known = r->known[--r->n];
}

void reader_turn(struct reader *r, struct kv *kv, uint32_t n_most)
{
    struct kv_content c;
    if (!kv_events_has(kv, r->number)) {
        r->number = kv_events_number(kv);
        r->is_in_snapshot = true;
        r->at = (struct kv_published_at){0};
        r->n = 0;
        r->n_snapshots++;
    }
    while (r->is_in_snapshot && n_most > 0) {
        attn_status st = kv_published_next(kv, &r->at, &n_most, &c);
        r->is_in_snapshot = st != ATTN_ENOTFOUND;
        if (st == ATTN_OK)
            learn(r, &c, r->at.block++);
    }
    struct kv_event e;
    for (; !r->is_in_snapshot && n_most > 0 && kv_event_next(kv, r->number, &e); n_most--) {
        take(r, kv, &e);
        r->number++;
    }
}

bool reader_is_current(const struct reader *r, const struct kv *kv)
{
    return !r->is_in_snapshot && r->number == kv_events_number(kv);
}

void reader_catch_up(struct reader *r, struct kv *kv)
{
    do
        reader_turn(r, kv, 1000);
    while (!reader_is_current(r, kv));
}

const char *reader_difference(const struct reader *r, const struct kv *kv)
{
    static char text[128];
    struct kv_published_at at = {0};
    struct kv_content c;
    uint32_t n = 0, n_most = UINT32_MAX;
    for (; kv_published_next(kv, &at, &n_most, &c) == ATTN_OK; at.block++, n++) {
        struct reader_entry is = entry_of(&c, at.block);
        const struct reader_entry *known = find(r, c.serial, at.block);
        if (known == NULL || memcmp(known, &is, sizeof is) != 0) {
            snprintf(text, sizeof text, "block %u is published as %llu, the reader has %s",
                     at.block, (unsigned long long)c.serial, known == NULL ? "none" : "another");
            return text;
        }
    }
    snprintf(text, sizeof text, "%u blocks are published, the reader has %u", n, r->n);
    return n == r->n ? "" : text;
}
